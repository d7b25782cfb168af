"""From documents to token ids: exactly what ``tokenizers`` gives, several times as fast.

A document's ids depend on that document alone, never on its neighbours, the batch size or the
number of workers. Special tokens that are spelled out in a text (``<|endoftext|>`` in a page about
GPT-2) are encoded as ordinary characters, so the id of the end-of-document token stands at the ends
of documents and nowhere else.

Why there is more here than a call of ``encode_batch``: that call gives 0.18 M tokens per CPU second
where this module gives 0.84 (8.5 M tokens of English educational text, one busy AMD EPYC core,
benchmark_tokenizers.py), and half of its time goes to the allocation of per-word objects that nobody
reads. Natural text repeats its words, and with a byte-level BPE the ids of a word do not depend on
its neighbours. So documents are cut at places where a cut provably changes nothing
(:func:`splits_safely`), the ids of each distinct piece come from ``tokenizers`` once, and are
remembered. Tokenizers without that property are run as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data_utils.tokenizer import load_tokenizer

LONG_DOCUMENT_BYTES = 1 << 20
"""Documents above this many UTF-8 bytes are decoded and encoded in pieces of about this size."""

REMEMBERED_PIECES = 1 << 19
"""Distinct pieces of text that an encoder remembers, at most: about 80 MB."""

_REMEMBERED_CHARACTERS = 48
_CHECK_EVERY = 500
_MAX_WHOLE = 64
_SEARCH_BYTES = 4096


class EncoderMismatch(RuntimeError):
    """Remembered pieces and the tokenizer disagree about a document: a bug in this module."""


def splits_safely(config: dict[str, Any]) -> bool:
    """Whether a text may be cut before an ASCII space or newline that follows a non-space.

    Cutting there leaves every token unchanged when all of this holds:

    * normalisation is none or NFC: an ASCII character never composes with what precedes it, so
      NFC(a + b) = NFC(a) + NFC(b) when b begins with one;
    * the pre-tokenizer is GPT-2's byte-level pattern without a prefix space: each of its
      alternatives is either all space or an optional *leading* space and then non-spaces, so a
      non-space followed by a space always ends a piece; its only look-ahead, ``\\s+(?!\\S)``, looks
      past spaces, and the left part ends with a non-space;
    * byte-pair merges stay inside a piece, without dropout and without prefix or suffix marks;
    * no added token holds a non-space followed by a space or takes neighbouring spaces with it;
    * nothing is truncated, padded or added by a template.

    :param config: the parsed JSON of the tokenizer file.
    """
    normalizer = config.get("normalizer")
    if normalizer and normalizer.get("type") == "Sequence":
        normalizers = normalizer.get("normalizers") or []
    else:
        normalizers = [normalizer] if normalizer else []
    if any(n.get("type") != "NFC" for n in normalizers):
        return False
    pre = config.get("pre_tokenizer") or {}
    if (
        pre.get("type") != "ByteLevel"
        or pre.get("add_prefix_space", True)
        or not pre.get("use_regex", True)
    ):
        return False
    model = config.get("model") or {}
    if model.get("type", "BPE") != "BPE" or any(
        model.get(k)
        for k in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        return False
    if (config.get("post_processor") or {}).get("type", "ByteLevel") != "ByteLevel":
        return False
    return not any(
        token.get("lstrip")
        or token.get("rstrip")
        or token.get("single_word")
        or re.search(r"\S\s", token["content"])
        for token in config.get("added_tokens") or ()
    )


# What may count as a space in some Unicode version, so no cut after it. str.isspace() is a superset
# of the \s of the pre-tokenizer's pattern (White_Space) except for characters that were spaces in
# old Unicode versions, or are format characters that some libraries take for spaces.
_SPACES = frozenset(c for c in map(chr, range(0x10000)) if c.isspace()) | frozenset(
    "\u180e\u200b\u2060\ufeff"
)
_OTHER_SPACE = re.escape("".join(sorted(_SPACES - {" ", "\n"})))

# ASCII punctuation without the apostrophe, which starts contractions ('s, 're).
_PUNCTUATION = r"!-&(-/:-@\[-`{-~"

# A text, cut into pieces with the spaces before them. Besides the cuts of splits_safely, a cut
# between runs of ASCII letters, digits and punctuation is safe: the pre-tokenizer's pattern never
# puts two of these classes into one token, except for contractions. The runs are possessive, so
# that none is cut inside, and ASCII must follow, so that no combining mark or other letter belongs
# to them. Everything else is one piece up to the next space or newline that may be cut before,
# which one after another kind of space may not.
_PIECES = re.compile(
    r"[ \n]*+(?:"
    rf"[A-Za-z]++(?=[ \n0-9'{_PUNCTUATION}]|\Z)"
    rf"|[{_PUNCTUATION}]++(?=[ \nA-Za-z0-9]|\Z)"
    rf"|[0-9]++(?=[ \nA-Za-z'{_PUNCTUATION}]|\Z)"
    rf"|[^ \n]++(?:(?<=[{_OTHER_SPACE}])[ \n]++[^ \n]*+)*+"
    r")|[ \n]+"
).findall

# Pieces that the pre-tokenizer passes on whole, so that they can go straight to the BPE model
# (4 against 18 us a piece).
_ONE_RUN = re.compile(rf" ?(?:[A-Za-z]+|[0-9]+|[{_PUNCTUATION}]+)").fullmatch

_SPACE_AFTER_BYTE = re.compile(rb"[\x21-\x7e\x80-\xbf][ \n]")


def safe_pieces(
    document: bytes | memoryview, piece_bytes: int = LONG_DOCUMENT_BYTES
) -> Iterator[str]:
    """Cut a UTF-8 document into pieces of about ``piece_bytes`` bytes before a space or newline.

    The cuts are those of :func:`splits_safely`. Only one piece exists as a string at a time. A
    stretch without any such place (one endless word) stays in one piece, whatever its length.

    :raises UnicodeDecodeError: when the document is not UTF-8.
    """
    view = memoryview(document)
    start, size = 0, len(view)
    while size - start > piece_bytes:
        cut = _next_cut(view, start + piece_bytes, size)
        yield str(view[start:cut], "utf-8")
        start = cut
    if start < size:
        yield str(view[start:], "utf-8")


def _next_cut(view: memoryview, position: int, size: int) -> int:
    while position < size:
        # one byte of overlap, so that a pair across two windows is seen
        window = bytes(view[position - 1 : position + _SEARCH_BYTES])
        for match in _SPACE_AFTER_BYTE.finditer(window):
            cut = position + match.start()
            if window[match.start()] < 0x80:
                return cut
            # Not ASCII: the character may itself be a space (no-break, ideographic).
            before = bytes(view[max(0, cut - 4) : cut]).decode("utf-8", errors="ignore")
            if before and before[-1] not in _SPACES:
                return cut
        position += _SEARCH_BYTES
    return size


class _Memory(dict[str, bytes]):
    """Remembered ids of pieces of text, as raw little-endian bytes."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, piece: str) -> bytes:
        ids = self._encode(piece)
        if len(piece) <= _REMEMBERED_CHARACTERS:
            self[piece] = ids
        return ids

    def shrink(self) -> None:
        """Forget the newer half, when full: the frequent words of a language are met early."""
        if len(self) > REMEMBERED_PIECES:
            for piece in list(self)[REMEMBERED_PIECES // 2 :]:
                del self[piece]


class DocumentEncoder:
    """Turns documents into token ids that end with EOS.

    One process per core is meant: the threads of ``tokenizers`` are switched off, since ids become
    Python objects under the interpreter's lock.

    :param data: content of the tokenizer file.
    :param eos_token_id: id that is put after every document.
    :param dtype: ``uint16`` or ``uint32``; results are little-endian.
    :param remember: False runs the tokenizer as it is.
    :ivar splits: whether words are remembered and long documents are cut.
    """

    def __init__(
        self, data: bytes, *, eos_token_id: int, dtype: str, remember: bool = True
    ) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        config = json.loads(data)
        self.tokenizer: Tokenizer = load_tokenizer(data, "the tokenizer")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        # Without special tokens a post-processor changes offsets only; that costs 8 % of the time.
        self.tokenizer.post_processor = None
        self._model = self.tokenizer.model
        self.eos_token_id = eos_token_id
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._typecode = "H" if self.dtype.itemsize == 2 else "I"
        self._eos = np.array([eos_token_id], dtype=self.dtype).tobytes()
        # Added tokens that a cut could break: texts that hold one are encoded whole. Runs of two
        # and more spaces are never cut.
        self._whole = [
            t["content"]
            for t in config.get("added_tokens") or ()
            if not t.get("special") and not re.fullmatch(r" {2,}", t["content"])
        ]
        # each of these is searched for in every text
        self.splits = remember and splits_safely(config) and len(self._whole) <= _MAX_WHOLE
        self._memory = _Memory(self._encode_piece)
        self._documents = 0

    def encode(self, documents: Sequence[str | memoryview]) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents.

        :param documents: texts; long ones may come as their UTF-8 bytes.
        :returns: the ids of all documents one after the other, each followed by EOS (``[tokens]``,
            the encoder's dtype), and the number of tokens per document with its EOS
            (``[documents]``, int64).
        :raises UnicodeDecodeError: when a document given as bytes is not UTF-8.
        :raises EncoderMismatch: when a spot check fails.
        """
        if self.splits:
            encoded = self._encode_by_pieces(documents)
        else:
            texts = [d if isinstance(d, str) else str(d, "utf-8") for d in documents]
            # one call for all is 10 % faster than one for each
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            encoded = [self._pack(e.ids) for e in encodings]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        lengths //= self.dtype.itemsize
        joined = self._eos.join(encoded) + self._eos if encoded else b""
        return np.frombuffer(joined, dtype=self.dtype), lengths + 1

    def _encode_by_pieces(self, documents: Sequence[str | memoryview]) -> list[bytes]:
        encoded = []
        for document in documents:
            if not isinstance(document, str):
                encoded.append(b"".join(map(self._encode_text, safe_pieces(document))))
                continue
            encoded.append(self._encode_text(document))
            if self._documents % _CHECK_EVERY == 0:
                self._check(document, encoded[-1])
            self._documents += 1
        return encoded

    def _check(self, text: str, ids: bytes) -> None:
        if ids != self._encode_plainly(text):
            raise EncoderMismatch(
                f"the ids of a document that begins {text[:60]!r} are not those of the tokenizer; "
                "please report this text"
            )

    def _encode_plainly(self, text: str) -> bytes:
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return self._pack(encoding.ids)

    def _pack(self, ids: list[int]) -> bytes:
        # array("I") reads a long list of ints three times as fast as array("H") or numpy (15
        # against 45 ns an id)
        return np.frombuffer(array("I", ids), dtype=np.uint32).astype(self.dtype).tobytes()

    def _encode_piece(self, piece: str) -> bytes:
        if not _ONE_RUN(piece):
            return self._encode_plainly(piece)
        # the byte-level alphabet: printable ASCII is itself, a space is G with a dot
        tokens = self._model.tokenize(piece.replace(" ", "\u0120"))
        ids = array(self._typecode, [t.id for t in tokens])
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def _encode_text(self, text: str) -> bytes:
        if any(token in text for token in self._whole):
            return self._encode_plainly(text)
        self._memory.shrink()
        return b"".join(map(self._memory.__getitem__, _PIECES(text)))

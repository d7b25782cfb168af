"""
Builds a small text corpus from documentation that is already on the machine: the Python language reference and the
docstrings of the standard library and of installed packages, and the packages' long descriptions. For trying things out
where FineWeb-Edu is not at hand; it is real prose, but no training corpus.

    python data_utils/build_corpus.py OUT_DIR

writes ``OUT_DIR/train/*.parquet`` and ``OUT_DIR/eval/*.parquet`` with the columns ``text``, ``id`` and ``source``.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import pyarrow as pa
import pyarrow.parquet as pq

from config_utils.errors import UserError, run_cli

MIN_CHARACTERS = 400
EVAL_SHARE = 0.05
TRAIN_SHARDS = 2
PACKAGES = ("numpy", "matplotlib")
"""Installed packages whose docstrings read as prose; those that are missing are left out."""


def language_reference() -> Iterator[tuple[str, str]]:
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"pydoc/{name}", text


def docstrings(root: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """One document for each module: its docstring and those of its public classes and functions."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in ("test", "tests", "idlelib", "site-packages") for part in relative.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        parts = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = getattr(node, "name", "")
                text = ast.get_docstring(node)
                if text and len(text) > 80 and not name.startswith("_"):
                    parts.append(f"{name}\n\n{text}" if name else text)
        yield f"{prefix}/{relative}", "\n\n".join(parts)


def descriptions() -> Iterator[tuple[str, str]]:
    for distribution in sorted(
        importlib.metadata.distributions(), key=lambda d: d.metadata["Name"].lower()
    ):
        text = distribution.metadata.get_payload()  # type: ignore[attr-defined]
        yield f"description/{distribution.metadata['Name']}", text or ""


def documents() -> Iterator[tuple[str, str]]:
    yield from language_reference()
    yield from docstrings(Path(sysconfig.get_path("stdlib")), "stdlib")
    site = Path(sysconfig.get_path("purelib"))
    for package in PACKAGES:
        if (site / package).is_dir():
            yield from docstrings(site / package, package)
    yield from descriptions()


def build(out: Path) -> dict[str, int]:
    """
    Write the shards. Whether a document is held out, and its shard, depend on its text alone.

    :returns: The number of documents in each split.
    """
    shards: dict[str, list[dict[str, str]]] = {"eval/000_00000": []}
    shards.update({f"train/000_{i:05d}": [] for i in range(TRAIN_SHARDS)})
    seen: set[str] = set()
    for source, text in documents():
        text = text.strip()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < MIN_CHARACTERS or digest in seen:
            continue
        seen.add(digest)
        draw = int(digest[:8], 16) / 2**32
        shard = (
            "eval/000_00000"
            if draw < EVAL_SHARE
            else f"train/000_{int(digest[8:16], 16) % TRAIN_SHARDS:05d}"
        )
        shards[shard].append({"text": text, "id": digest, "source": source})
    for name, rows in shards.items():
        path = out / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        # By digest: modules of one package would otherwise stand side by side.
        table = pa.Table.from_pylist(sorted(rows, key=lambda r: r["id"]))
        temporary = path.with_suffix(".tmp")
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    return {
        split: sum(len(r) for n, r in shards.items() if n.startswith(split))
        for split in ("train", "eval")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    opts = parser.parse_args()
    try:
        opts.out_dir.mkdir(parents=True, exist_ok=True)  # before a minute of reading
        counts = build(opts.out_dir)
    except OSError as e:
        raise UserError(f"{opts.out_dir} cannot be written ({e.strerror})") from None
    print(f"{opts.out_dir}: {counts['train']} training and {counts['eval']} held-out documents")
    return 0


if __name__ == "__main__":
    run_cli(main)

"""Tokens per second and core of our tokeniser beside datatrove's and dolma's, on the same text.

Every tool tokenises the same documents with the same tokenizer file in one worker of its own, in
fresh processes that take turns (A, B, C, B, C, A, ...), with the files in the page cache. Measured is
each tool's own entry point, from call to files on disk; imports are not. Tokens per second of CPU
time (user and system, child processes included) is the number to compare: on a busy machine wall
time says more about the neighbours.

    python data_utils/benchmark_tokenizers.py --parquet data/train/000_00000.parquet \\
      --datatrove-python DATATROVE_ENV/bin/python --dolma-python DOLMA_ENV/bin/python \\
      --rounds 3 --output tokenizers.json

The competitors are no dependencies of this project and do not resolve together (numpy 2 and numpy
1), so each gets an environment of its own: ``uv venv ENV --python 3.11``, then
``uv pip install --python ENV/bin/python "datatrove[io,processing]==0.10.1" "tokenizers==0.22.2"
"pyarrow==19.0.1"`` for one and ``uv pip install --python ENV/bin/python "dolma==1.2.1"`` for the
other. A tool whose interpreter is not given is left out.

dolma reads JSON lines, so the text is converted for it beforehand (not compressed, which favours it).
"ours, plain" is our tokeniser without the memory of words: how it runs a tokenizer whose texts cannot
be cut safely. The speed with the memory grows with the amount of text, which has fewer new words.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import pyarrow as pa
import pyarrow.parquet as pq

from data_utils.errors import BadInput
from data_utils.tokenize_corpus import code_version
from data_utils.tokenizer import DEFAULT_TOKENIZER, resolve_tokenizer

SCHEMA_VERSION = 1

# Each driver gets the path of a JSON file with sources, output folder, tokenizer and ids, and prints
# the tokens and seconds as the last line on stdout.
_MEASURE = """
import json, os, resource, sys, time
job = json.load(open(sys.argv[1]))
def cpu():
    usage = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)
def measure(run):
    wall, used = time.perf_counter(), cpu()
    run()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": cpu() - used}
def finish(times, pattern, versions):
    from pathlib import Path
    size = sum(p.stat().st_size for p in Path(job["out"]).rglob(pattern))
    print(json.dumps({**times, "tokens": size // 2, "versions": versions}))
from importlib.metadata import version
"""

_OURS = """
sys.path.insert(0, job["root"])
import contextlib, functools, io, rich.console
from data_utils import tokenize_corpus
from data_utils.tokenize_from_pretrain_datasets import main
if job["plain"]:
    tokenize_corpus.DocumentEncoder = functools.partial(
        tokenize_corpus.DocumentEncoder, remember=False
    )
def run():
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([
            "--train-parquet-glob", job["glob"], "--output-dir", job["out"],
            "--tokenizer-name-or-path", job["tokenizer"], "--workers", "1",
            "--vocab-size", str(job["vocab_size"]), "--eos-token-id", str(job["eos_token_id"]),
        ]) == 0
finish(measure(run), "*.npy", {p: version(p) for p in ("tokenizers", "pyarrow")})
"""

_DATATROVE = """
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
import pyarrow.parquet, tokenizers
executor = LocalPipelineExecutor(
    [
        ParquetReader(job["folder"], glob_pattern="*.parquet", read_metadata=False),
        DocumentTokenizer(
            job["out"], job["tokenizer"], eos_token=job["eos_token"], shuffle_documents=False
        ),
    ],
    tasks=1, workers=1, logging_dir=job["out"] + "/logs",
)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
times = measure(executor.run)
finish(times, "*.ds", {p: version(p) for p in ("datatrove", "tokenizers", "pyarrow")})
"""

_DOLMA = """
from dolma.tokenizer import tokenize_in_parallel
def run():
    tokenize_in_parallel(
        sources=[job["folder"] + "/*.jsonl"], destination=job["out"], num_writers=1,
        tokenizer_name_or_path=job["tokenizer"], eos_token_id=job["eos_token_id"],
        pad_token_id=job["pad_token_id"], dtype="uint16", metadata_dir=job["out"] + "/done",
    )
if __name__ == "__main__":
    times = measure(run)
    finish(times, "*.npy", {p: version(p) for p in ("dolma", "tokenizers")})
"""


def _documents(paths: Sequence[Path], text_field: str, limit: int | None) -> list[str]:
    texts: list[str] = []
    for path in paths:
        with pq.ParquetFile(path) as f:
            for batch in f.iter_batches(columns=[text_field], batch_size=256):
                texts.extend(t for t in batch.column(0).to_pylist() if t)
                if limit is not None and len(texts) >= limit:
                    return texts[:limit]
    return texts


def _prepare(folder: Path, texts: Sequence[str]) -> None:
    ids = [str(i) for i in range(len(texts))]
    pq.write_table(
        pa.table({"text": texts, "id": ids}), folder / "shard.parquet", compression="zstd"
    )
    with (folder / "shard.jsonl").open("w", encoding="utf-8") as f:
        for doc_id, text in zip(ids, texts, strict=True):
            f.write(json.dumps({"id": doc_id, "text": text, "source": "benchmark"}) + "\n")


def _run(python: str, driver: str, job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    script = scratch / "driver.py"
    script.write_text(_MEASURE + driver)
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        job_file = scratch / "job.json"
        job_file.write_text(json.dumps({**job, "out": out}))
        done = subprocess.run(
            [python, str(script), str(job_file)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise BadInput(f"{python} could not run its tool: {tail}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; returns the JSON document.

    :raises BadInput: when an interpreter or a file cannot be used.
    """
    tokenizer = resolve_tokenizer(args.tokenizer_name_or_path)
    tools: dict[str, tuple[str, str, bool]] = {
        "ours": (sys.executable, _OURS, False),
        "ours, plain": (sys.executable, _OURS, True),
    }
    for name, python, driver in (
        ("datatrove", args.datatrove_python, _DATATROVE),
        ("dolma", args.dolma_python, _DOLMA),
    ):
        if python is None:
            print(f"{name} is left out (no --{name}-python)", file=sys.stderr)
        else:
            tools[name] = (python, driver, False)
    try:
        texts = _documents(args.parquet, args.text_field, args.limit_documents)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise BadInput(f"the parquet files cannot be read ({error})") from None
    if not texts:
        raise BadInput("the parquet files have no text")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory(prefix="benchmark-tokenizers-") as name:
        scratch = Path(name)
        _prepare(scratch, texts)
        job = {
            "root": str(Path(__file__).resolve().parent.parent),
            "folder": str(scratch),
            "glob": str(scratch / "shard.parquet"),
            "tokenizer": str(tokenizer.path),
            "vocab_size": tokenizer.tokenizer.get_vocab_size(),
            "eos_token_id": args.eos_token_id,
            "pad_token_id": args.pad_token_id,
            "eos_token": tokenizer.tokenizer.id_to_token(args.eos_token_id),
        }
        order = list(tools)
        for number in range(args.rounds):
            for tool in order[number % len(order) :] + order[: number % len(order)]:
                for source in scratch.glob("shard.*"):
                    source.read_bytes()  # into the page cache
                python, driver, plain = tools[tool]
                result = _run(python, driver, {**job, "plain": plain}, scratch)
                runs[tool].append(result)
                print(
                    f"round {number + 1}: {tool}: {result['tokens']} tokens, "
                    f"{result['cpu_s']:.1f} s of CPU, {result['wall_s']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return {
        "schema_version": SCHEMA_VERSION,
        "argv": sys.argv[1:],
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "load_after": os.getloadavg(),
        },
        "code_version": code_version(),
        "documents": len(texts),
        "text_bytes": sum(len(t.encode()) for t in texts),
        "tokenizer_sha256": tokenizer.sha256,
        "workers": 1,
        "runs": runs,
        "summary": {tool: _summary(results) for tool, results in runs.items()},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def _summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    per_cpu = [r["tokens"] / r["cpu_s"] for r in results]
    per_wall = [r["tokens"] / r["wall_s"] for r in results]
    return {
        "rounds": len(results),
        "tokens": results[0]["tokens"],
        "tokens_per_cpu_s_median": statistics.median(per_cpu),
        "tokens_per_cpu_s_min": min(per_cpu),
        "tokens_per_cpu_s_max": max(per_cpu),
        "tokens_per_s_median": statistics.median(per_wall),
        "versions": results[0]["versions"],
    }


def _table(document: dict[str, Any]) -> str:
    summary = document["summary"]
    ours = summary["ours"]["tokens_per_cpu_s_median"]
    lines = [
        f"{document['documents']:,} documents, {document['text_bytes'] / 1e6:.1f} MB of text, one "
        f"worker each, {summary['ours']['rounds']} rounds, {document['machine']['processor']}",
        "",
        "| tool | tokens | tokens per CPU second, median (min to max) | tokens/s, wall | ours is |",
        "|---|---:|---:|---:|---:|",
    ]
    for tool, s in summary.items():
        lines.append(
            f"| {tool} | {s['tokens']:,} | {s['tokens_per_cpu_s_median']:,.0f} "
            f"({s['tokens_per_cpu_s_min']:,.0f} to {s['tokens_per_cpu_s_max']:,.0f}) "
            f"| {s['tokens_per_s_median']:,.0f} | {ours / s['tokens_per_cpu_s_median']:.2f} x |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parquet", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--text-field", default="text", metavar="COLUMN")
    parser.add_argument("--tokenizer-name-or-path", default=DEFAULT_TOKENIZER, metavar="FILE")
    parser.add_argument("--eos-token-id", type=int, default=50279)
    parser.add_argument("--pad-token-id", type=int, default=1)
    parser.add_argument("--datatrove-python", metavar="PYTHON", help="interpreter with datatrove")
    parser.add_argument("--dolma-python", metavar="PYTHON", help="interpreter with dolma")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-documents", type=int, metavar="N", help="only the first N")
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the numbers")
    args = parser.parse_args(argv)
    try:
        document = benchmark(args)
        if args.output is not None:
            args.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""
Ends the quickstart: one table, ``summary.json`` and ``summary.png`` (loss curves and retrieval maps).

    python paper-experiments/quickstart/summarize.py OUT_DIR --seconds S eval-preln.json eval-ldm.json
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info
from config_utils.scales import VOCAB_SIZE
from data_utils.shards import read_corpus
from eval.checkpoint import load_checkpoint
from eval.retrieval import draw_map, save_png
from olmo_core.nn.depth import retrieval_map

NOTE = "This run shows that the pipeline works. It ranks nothing: the models are tiny, trained for minutes, on one seed."
TRAIN_LOSS, HELD_OUT_LOSS = "train/CE loss", "eval/held-out/CE loss"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summarise(path: Path) -> dict[str, Any]:
    """One method's row, from its evaluation and its run folder."""
    result = json.loads(path.read_text())
    run = Path(result["checkpoint"]).parent
    steps = [m for m in read_metrics(run) if TRAIN_LOSS in m]
    heldout = result["heldout"]["cross_entropy_nats_per_token"]
    return {
        "method": result["method"],
        "checkpoint": result["checkpoint"],
        "parameters": result["parameters"],
        "steps": result["step"],
        "train_loss_first_nats": steps[0][TRAIN_LOSS],
        "train_loss_last_nats": steps[-1][TRAIN_LOSS],
        "heldout_loss_nats": heldout,
        "heldout_bits_per_byte": result["heldout"]["bits_per_byte"],
        "heldout_fall_from_uniform_nats": math.log(VOCAB_SIZE) - heldout,
        "lm_eval": result["lm_eval"],
        "curve": [[m["step"], m[TRAIN_LOSS]] for m in steps],
    }


def plot(rows: list[dict[str, Any]], maps: dict[str, np.ndarray], path: Path) -> None:
    figure, axes = plt.subplots(
        1, 1 + len(maps), figsize=(5.5 * (1 + len(maps)), 4.5), layout="constrained"
    )
    axes = np.atleast_1d(axes)
    for row in rows:
        axes[0].plot(*zip(*row["curve"], strict=True), label=row["method"])
    axes[0].axhline(math.log(VOCAB_SIZE), color="grey", linestyle=":", label="uniform guess")
    axes[0].set(xlabel="step", ylabel="training loss (nats per token)", title="Loss")
    axes[0].legend()
    for axis, (method, weights) in zip(axes[1:], maps.items(), strict=True):
        draw_map(figure, axis, weights, method)
    save_png(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, required=True)
    opts = parser.parse_args()
    for path in opts.results:
        if not path.is_file():
            raise UserError(f"{path} is missing: run the quickstart again")
    rows = [summarise(path) for path in opts.results]

    corpus = read_corpus(opts.out / "tokenized")
    tokens = np.fromfile(corpus.paths(opts.out / "tokenized", "eval")[0], dtype=corpus.dtype)
    sample = torch.from_numpy(tokens[: 4 * 256].astype(np.int64)).view(-1, 256)
    maps = {}
    for row in rows:
        if row["method"] != "preln":  # all ones
            model = load_checkpoint(Path(row["checkpoint"]), torch.device("cpu")).model
            maps[row["method"]] = retrieval_map(model, sample).numpy()

    plot(rows, maps, opts.out / "summary.png")
    summary = {
        "note": NOTE,
        "seconds": opts.seconds,
        "methods": rows,
        "retrieval_maps": {method: m.round(5).tolist() for method, m in maps.items()},
        **run_info(),
    }
    temporary = opts.out / "summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    os.replace(temporary, opts.out / "summary.json")

    tasks = sorted({t for row in rows for t in (row["lm_eval"] or {}).get("tasks", {})})
    table = Table(title="Quickstart", caption=NOTE)
    for column in (
        "method",
        "parameters",
        "steps",
        "held-out loss (nats)",
        "bits per byte",
        *tasks,
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['parameters']:,}",
            str(row["steps"]),
            f"{row['heldout_loss_nats']:.3f}",
            f"{row['heldout_bits_per_byte']:.3f}",
            *(task_cell(row["lm_eval"]["tasks"][t]) for t in tasks),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(
        f"{opts.seconds:.0f} s; {opts.out / 'summary.json'} and {opts.out / 'summary.png'} written"
    )
    return 0


def task_cell(task: dict[str, Any]) -> str:
    """Accuracy with its standard error."""
    error = task.get("acc_stderr")
    return f"{task['acc']:.2f}" + ("" if error is None else f" ± {error:.2f}")


if __name__ == "__main__":
    run_cli(main)

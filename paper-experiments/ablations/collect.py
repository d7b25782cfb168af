"""
Turns run folders into one JSON file each, and those into a table and a plot.

    python paper-experiments/ablations/collect.py save RUN_FOLDER ... [--out DIR]   # DIR/<run>.json
    python paper-experiments/ablations/collect.py table [--results DIR]              # table.md, loss.png beside the results
    python paper-experiments/ablations/collect.py curves LABEL=FILE ... --out DIR    # training losses side by side: curves.md, .png

``save`` writes to, and ``table`` reads, ``results/ablations`` in the repository, as ``series.py`` does; the committed results are in
``paper-experiments/ablations/results``.

The table groups runs by scale, steps, learning rate and variant: mean over seeds, its standard error, the difference to ``ldm``
with its standard error (paired by seed where both have it), tokens per second and memory.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config_utils.errors import UserError, run_cli
from config_utils.run_info import REPOSITORY, result_name

RESULTS = REPOSITORY / "results" / "ablations"
HELD_OUT, TRAIN = "eval/held-out/CE loss", "train/CE loss"
WARM_UP_STEPS = 20
"""Steps left out of the speed: compilation and the allocator."""
DEPTH = "model.block.depth."
"""Begins an override of the depth connection."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path.parent} is not a run folder: it has no {path.name}")
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as e:
        raise UserError(f"{path} is damaged ({e}); starting the run again repairs it") from None


def collect(run: Path, shared_gpu: bool = False) -> dict[str, Any]:
    """
    One run's result, from the run folder of ``launch.sh``.

    :param shared_gpu: Other processes used the GPU at the same time, so that its speed says nothing and is left out.

    :raises UserError: If the folder is no run, or the run has not finished.
    """
    metrics = read_lines(run / "metrics.jsonl")
    starts = read_lines(run / "runs.jsonl")
    configs = sorted(run.glob("step*/config.json"), key=lambda p: int(p.parent.name[4:]))
    if not configs:
        raise UserError(f"{run} has no checkpoint, so the run has not finished")
    try:
        config = json.loads(configs[-1].read_text())
        steps = config["trainer"]["max_duration"]["value"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{configs[-1]} is not the config of a run") from None
    last = [m for m in metrics if m["step"] == steps and HELD_OUT in m]
    if not last:
        raise UserError(f"{run} has no held-out loss at step {steps}, so the run has not finished")
    batch = config["data_loader"]["global_batch_size"]
    timed = [m for m in metrics if m["step"] > WARM_UP_STEPS]
    tps = [m["throughput/device/TPS"] for m in timed if "throughput/device/TPS" in m]
    memory = [v for m in metrics for k, v in m.items() if k == "gpu_memory/GPU active mem (GiB)"]
    reserved = [
        v for m in metrics for k, v in m.items() if k == "gpu_memory/GPU reserved mem (GiB)"
    ]
    return {
        "schema_version": 2,  # 1 had the loss of OLMo-core's evaluator
        "run": config["run_name"],
        "scale": config["scale"],
        "variant": config["method"],
        "depth": config["model"]["block"]["depth"],
        "learning_rate": config["train_module"]["optim"]["lr"],
        "seed": config["seed"],
        "overrides": [a for a in starts[-1].get("argv", []) if "=" in a and not a.startswith("-")],
        "steps": steps,
        "tokens": steps * batch,
        "heldout_loss_nats": last[-1][HELD_OUT],
        "train_loss_last_nats": [m[TRAIN] for m in metrics if TRAIN in m][-1],
        "tokens_per_s_per_gpu_median": statistics.median(tps) if tps and not shared_gpu else None,
        "peak_active_memory_gib": max(memory, default=None),
        "peak_reserved_memory_gib": max(reserved, default=None),
        "curve": [
            [m["step"], round(m[TRAIN], 4)] for m in metrics if TRAIN in m and m["step"] % 10 == 0
        ],
        "starts": starts,
    }


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """The mean and its standard error; no error from a single value."""
    if len(values) < 2:
        return values[0], None
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def difference(a: dict[int, float], b: dict[int, float]) -> tuple[float, float | None]:
    """``mean(a) - mean(b)`` and its standard error; over the seeds that both have, if there are two, else unpaired."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) >= 2 or (shared and len(a) == len(b) == 1):
        return mean_and_error([a[s] - b[s] for s in shared])
    (mean_a, error_a), (mean_b, error_b) = (mean_and_error(list(x.values())) for x in (a, b))
    error = None if error_a is None or error_b is None else math.hypot(error_a, error_b)
    return mean_a - mean_b, error


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    One row for each scale, number of steps, learning rate and variant; best first. What overrides the depth connection makes another
    variant of the same recipe.
    """
    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for r in results:
        overrides = r.get("overrides", [])
        recipe = " ".join(o for o in overrides if not o.startswith(DEPTH))
        options = [o.removeprefix(DEPTH) for o in overrides if o.startswith(DEPTH)]
        variant = " ".join([r["variant"], *options])
        groups[(r["scale"], r["steps"], r["learning_rate"], recipe, variant)].append(r)
    losses = {
        key: {r["seed"]: r["heldout_loss_nats"] for r in group} for key, group in groups.items()
    }
    rows = []
    for key, group in groups.items():
        scale, steps, lr, recipe, variant = key
        mean, error = mean_and_error(list(losses[key].values()))
        base = losses.get((scale, steps, lr, recipe, "ldm"))
        delta, delta_error = (None, None) if base is None else difference(losses[key], base)
        speeds = [r["tokens_per_s_per_gpu_median"] for r in group]
        rows.append(
            {
                "scale": scale,
                "steps": steps,
                "tokens": group[0]["tokens"],
                "learning_rate": lr,
                "overrides": recipe,
                "variant": variant,
                "seeds": len(losses[key]),
                "heldout_loss_nats": mean,
                "heldout_loss_standard_error": error,
                "difference_to_ldm_nats": delta,
                "difference_standard_error": delta_error,
                "tokens_per_s_per_gpu": statistics.median(s for s in speeds if s)
                if any(speeds)
                else None,
                "peak_active_memory_gib": max(
                    (r["peak_active_memory_gib"] or 0 for r in group), default=None
                ),
            }
        )
    return sorted(
        rows,
        key=lambda r: (
            r["scale"],
            r["steps"],
            r["overrides"],
            r["learning_rate"],
            r["heldout_loss_nats"],
        ),
    )


def amount(tokens: int) -> str:
    return f"{tokens / 1e6:.0f}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}k"


def markdown(rows: list[dict[str, Any]]) -> str:
    def with_error(value: float | None, error: float | None, sign: str = "") -> str:
        if value is None:
            return ""
        return f"{value:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")

    lines = [
        "| scale | tokens | learning rate | recipe | variant | seeds | held-out loss (nats) | difference to ldm | tokens/s per GPU | memory (GiB) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (
            r["scale"],
            amount(r["tokens"]),
            f"{r['learning_rate']:g}",
            r["overrides"],
            r["variant"],
            str(r["seeds"]),
            with_error(r["heldout_loss_nats"], r["heldout_loss_standard_error"]),
            with_error(r["difference_to_ldm_nats"], r["difference_standard_error"], "+"),
            "" if r["tokens_per_s_per_gpu"] is None else f"{r['tokens_per_s_per_gpu'] / 1e3:.0f}k",
            f"{r['peak_active_memory_gib']:.1f}" if r["peak_active_memory_gib"] else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for r in rows:
        groups[(r["scale"], r["tokens"], r["learning_rate"], r["overrides"])].append(r)
    height = 1.2 + 0.3 * max(len(g) for g in groups.values())
    figure, axes = plt.subplots(
        1, len(groups), figsize=(5.5 * len(groups), height), layout="constrained", squeeze=False
    )
    for axis, ((scale, tokens, lr, recipe), group) in zip(axes[0], groups.items(), strict=True):
        group = sorted(group, key=lambda r: -r["heldout_loss_nats"])
        axis.errorbar(
            [r["heldout_loss_nats"] for r in group],
            range(len(group)),
            xerr=[r["heldout_loss_standard_error"] or 0 for r in group],
            fmt="o",
            capsize=3,
        )
        axis.set_yticks(range(len(group)), [f"{r['variant']} ({r['seeds']})" for r in group])
        axis.set(
            xlabel="held-out loss (nats)",
            title=f"{scale}, {amount(tokens)} tokens, lr {lr:g}" + (recipe and f"\n{recipe}"),
        )
        axis.grid(axis="x", alpha=0.3)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, path)


def compare_curves(curves: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """
    How far each curve of training losses is from the first one, at the steps that all have.

    :param curves: By label, the loss (nats) by step.

    :raises UserError: If they have no step in common.
    """
    steps = sorted(set.intersection(*(set(c) for c in curves.values())))
    if not steps:
        raise UserError("the runs have no step in common: compare runs of one recipe")
    first, *others = curves
    rows = []
    for label in others:
        differences = [curves[label][s] - curves[first][s] for s in steps]
        largest = max(range(len(steps)), key=lambda i: abs(differences[i]))
        rows.append(
            {
                "run": label,
                "against": first,
                "steps_compared": len(steps),
                "largest_difference_nats": abs(differences[largest]),
                "at_step": steps[largest],
                "mean_difference_nats": statistics.mean(differences),
                "mean_absolute_difference_nats": statistics.mean(map(abs, differences)),
                "last_difference_nats": differences[-1],
            }
        )
    return rows


def save_curves(arguments: list[str], out: Path) -> str:
    """The table of :func:`compare_curves` for ``LABEL=FILE`` arguments; writes it and a plot."""
    curves: dict[str, dict[int, float]] = {}
    for argument in arguments:
        label, _, file = argument.partition("=")
        try:
            result = json.loads(Path(file).read_text())
            curves[label] = {int(step): float(loss) for step, loss in result["curve"]}
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"'{argument}' is not LABEL=FILE with a result of 'collect.py save'"
            ) from None
    if len(curves) < 2:
        raise UserError("curves needs two runs or more, as LABEL=FILE")
    rows = compare_curves(curves)
    lines = [
        "| run | against | largest difference (nats) | at step | mean absolute difference | mean difference |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['run']} | {r['against']} | {r['largest_difference_nats']:.4f} | {r['at_step']} "
            f"| {r['mean_absolute_difference_nats']:.4f} | {r['mean_difference_nats']:+.4f} |"
        )
    text = "\n".join(lines) + "\n"

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for label, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), label=label, linewidth=1)
    axis.set(xlabel="step", ylabel="training loss (nats)")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / "curves.tmp.png"
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, out / "curves.png")
    write(out / "curves.json", json.dumps(rows, indent=1) + "\n")
    write(out / "curves.md", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    save = commands.add_parser("save", help="run folders to JSON files")
    save.add_argument("runs", type=Path, nargs="+")
    save.add_argument(
        "--out", type=Path, default=RESULTS, help="(results/ablations in the repository)"
    )
    save.add_argument(
        "--shared-gpu", action="store_true", help="the runs shared a GPU: leave their speed out"
    )
    table = commands.add_parser("table", help="JSON files to a table and a plot")
    table.add_argument(
        "--results", type=Path, default=RESULTS, help="(results/ablations in the repository)"
    )
    curves = commands.add_parser("curves", help="training losses of runs side by side")
    curves.add_argument("runs", nargs="+", metavar="LABEL=FILE")
    curves.add_argument("--out", type=Path, required=True)
    opts = parser.parse_args()
    if opts.command == "curves":
        print(save_curves(opts.runs, opts.out))
        return 0
    if opts.command == "save":
        for run in opts.runs:
            result = collect(run, opts.shared_gpu)
            name = result_name(result["run"], result["steps"], result["overrides"])
            write(opts.out / name, json.dumps(result, indent=1) + "\n")
            print(f"{name}: held-out {result['heldout_loss_nats']:.4f} nats")
        return 0
    files = sorted(opts.results.glob("*.json"))
    if not files:
        raise UserError(
            f"{opts.results} holds no results: make some with series.py or 'collect.py save RUN_FOLDER', or give "
            "--results paper-experiments/ablations/results for the committed ones"
        )
    results = []
    for path in files:
        try:
            results.append(json.loads(path.read_text()))
            summarise(results[-1:])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path} is not a result of collect.py: remove it, or save the run again"
            ) from None
    rows = summarise(results)
    text = markdown(rows)
    write(opts.results / "table.md", text)
    plot(rows, opts.results / "loss.png")
    print(text)
    return 0


if __name__ == "__main__":
    run_cli(main)

"""
Rounds to a table: ``summary.json``, ``summary.md``, ``throughput.png`` and ``memory.png`` beside the rounds.

    python paper-experiments/throughput/summarize.py results/throughput/train-400m-h200-...

Ratios to PreLN are taken within a round, where both ran within minutes of each other on the same machine; the table has the
median over the rounds and, in brackets where there are several, the smallest and the largest.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import timing

from config_utils.errors import UserError, run_cli

BASELINE = "preln"
CANARY_TOLERANCE = 0.05
"""A reading further than this below the best one of the run marks its round as slow."""
STEADY_TOLERANCE = 0.2
"""The same for a machine that was not steady: what slows a reading so much may come and go between two methods of the round."""

Key = tuple[str, int | None, int | None]
"""A measured thing: method, batch and context (``None`` in training)."""


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """
    All rounds in their order, those that were stopped before their end too.

    :raises UserError: If there are none, or they are of different settings.
    """
    paths = sorted(folder.glob("round-*.json"), key=lambda p: int(p.stem.split("-")[1]))
    if not paths:
        raise UserError(f"{folder} holds no round-*.json: run rounds.sh with OUT={folder}")
    rounds = []
    for path in paths:
        try:
            rounds.append(json.loads(path.read_text()))
            if rounds[-1]["settings"] != rounds[0]["settings"]:
                raise UserError(
                    f"{path} has other settings than {paths[0]}: keep one run in a folder"
                )
        except (json.JSONDecodeError, KeyError) as e:
            raise UserError(f"{path} is damaged ({e}): remove it") from None
    return rounds


def cases_of(row: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """The cases of one row that were measured."""
    return {
        (row["method"], case.get("batch"), case.get("context")): case
        for case in row.get("cases", [])
        if row["status"] == "ok" and case["status"] == "ok"
    }


def paired_ratios(rounds: list[dict[Key, dict[str, Any]]], key: Key) -> list[float]:
    """Tokens per second of ``key`` over PreLN's at the same batch and context, for each round that has both."""
    baseline = (BASELINE, *key[1:])
    return [
        found[key]["tokens_per_s"] / found[baseline]["tokens_per_s"]
        for found in rounds
        if key in found and baseline in found
    ]


def median_of(cases: list[dict[str, Any]], name: str) -> float | None:
    values = [case[name] for case in cases if case.get(name) is not None]
    return statistics.median(values) if values else None


def gpu_median(cases: list[dict[str, Any]], name: str) -> float | None:
    """The median over rounds of one of nvidia-smi's readings; ``None`` where it gave none."""
    readings = [(case.get("gpu") or {}).get(name) for case in cases]
    values = [reading["median"] for reading in readings if reading is not None]
    return statistics.median(values) if values else None


def canary_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The readings of both speeds, and the rounds with one below the best by more than either tolerance."""
    out: dict[str, Any] = {"slow_rounds": [], "unsteady_rounds": []}
    for name in ("matmul_flops_per_s", "copy_bytes_per_s"):
        readings = [
            (r["round"], reading[name])
            for r in rounds
            for reading in (r.get("canary_before"), r.get("canary_after"))
            if reading is not None
        ]
        if not readings:
            continue
        values = [value for _, value in readings]
        out[name] = timing.spread(values)
        for key, tolerance in (
            ("slow_rounds", CANARY_TOLERANCE),
            ("unsteady_rounds", STEADY_TOLERANCE),
        ):
            slow = {number for number, value in readings if value < (1 - tolerance) * max(values)}
            out[key] = sorted(slow.union(out[key]))
    return out


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for each measured thing, in the order of the settings' methods."""
    measured = [
        {key: case for row in r["rows"] for key, case in cases_of(row).items()} for r in rounds
    ]
    canary = canary_summary(rounds)
    copy = canary.get("copy_bytes_per_s", {}).get("median")
    rows: list[dict[str, Any]] = []
    for method in rounds[0]["settings"]["methods"]:
        its = [row for r in rounds for row in r["rows"] if row["method"] == method]
        failed = [row for row in its if row["status"] != "ok"]
        keys = list(dict.fromkeys(key for found in measured for key in found if key[0] == method))
        ok = [row for row in its if row["status"] == "ok"]
        for key in keys:
            cases = [found[key] for found in measured if key in found]
            ratios = paired_ratios(measured, key)
            speeds = timing.spread([case["tokens_per_s"] for case in cases])
            bandwidth = median_of(cases, "bytes_per_s")
            compiling = [row for row in ok if key in cases_of(row)]
            rows.append(
                {
                    "method": method,
                    "backend": backend_name(compiling[0]),
                    "batch": key[1],
                    "context": key[2],
                    "status": "ok",
                    "rounds": len(cases),
                    "failed_rounds": len(failed),
                    "tokens_per_s": speeds,
                    "ms": timing.spread([case["ms"]["median"] for case in cases]),
                    "ms_iqr": statistics.median(
                        case["ms"]["q3"] - case["ms"]["q1"] for case in cases
                    ),
                    "ratio_to_preln": timing.spread(ratios) if ratios else None,
                    "mfu": median_of(cases, "mfu"),
                    "bytes_per_s": bandwidth,
                    "of_copy": bandwidth / copy if bandwidth and copy else None,
                    "cuda_graph": all(case.get("cuda_graph", False) for case in cases),
                    "peak_allocated_gib": median_of(cases, "peak_allocated_gib"),
                    "peak_reserved_gib": median_of(cases, "peak_reserved_gib"),
                    "compile_seconds_first_round": compiling[0].get("compile_seconds"),
                    "sm_clock_mhz": gpu_median(cases, "sm_clock_mhz"),
                    "power_w": gpu_median(cases, "power_w"),
                }
            )
        # A case that ran in no round says why; so does a method.
        for row in ok:
            for case in row["cases"]:
                key = (method, case.get("batch"), case.get("context"))
                if key not in keys:
                    keys.append(key)
                    rows.append(failure(method, case["status"], case.get("error"), *key[1:]))
        if failed and not ok:
            rows.append(failure(method, failed[0]["status"], failed[0]["error"], None, None))
    return {
        "settings": rounds[0]["settings"],
        "run": rounds[0].get("run"),
        "rounds": len(rounds),
        "incomplete_rounds": [r["round"] for r in rounds if not r["complete"]],
        "canary": canary,
        "rows": rows,
    }


def backend_name(row: dict[str, Any]) -> str | None:
    """The reference of a compiled model is what torch.compile made of it."""
    backend = row.get("backend")
    return f"{backend} + compile" if backend == "reference" and row.get("compiled") else backend


def failure(
    method: str, status: str, error: str | None, batch: int | None, context: int | None
) -> dict[str, Any]:
    return {
        "method": method,
        "batch": batch,
        "context": context,
        "status": status,
        "error": error,
    }


# The table.


def number(value: float | None, format: str) -> str:
    return "" if value is None else f"{value:{format}}"


def rounds_text(summary: dict[str, Any]) -> str:
    return f"{summary['rounds']} round" + ("s" if summary["rounds"] != 1 else "")


def ratio_cell(ratio: dict[str, float] | None) -> str:
    """Median (smallest to largest) over the rounds; a single round has no spread."""
    if ratio is None:
        return ""
    if ratio["min"] == ratio["max"]:
        return f"{ratio['median']:.3f}"
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


def table(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the printed table."""
    decode = summary["settings"]["mode"] == "decode"
    head = ["method", "backend"]
    head += ["batch", "context"] if decode else []
    head += ["tokens/s", "ms", "x PreLN" + (" (min to max)" if summary["rounds"] > 1 else "")]
    head += ["TB/s", "of copy"] if decode else ["MFU"]
    head += ["peak GiB", "reserved", "compile s"]
    lines = []
    for row in summary["rows"]:
        cells = [row["method"]]
        where = [number(row["batch"], "d"), number(row["context"], "d")] if decode else []
        if row["status"] != "ok":
            cells += [row["status"], *where]
            lines.append(cells + [""] * (len(head) - len(cells)))
            continue
        cells += [row["backend"] or "", *where]
        cells += [
            f"{row['tokens_per_s']['median']:,.0f}",
            f"{row['ms']['median']:.2f}",
            ratio_cell(row["ratio_to_preln"]),
        ]
        if decode:
            cells += [
                number(None if row["bytes_per_s"] is None else row["bytes_per_s"] / 1e12, ".2f"),
                number(row["of_copy"], ".0%") + ("" if row["cuda_graph"] else " (eager)"),
            ]
        else:
            cells.append(number(row["mfu"], ".1%"))
        cells += [
            number(row["peak_allocated_gib"], ".2f"),
            number(row["peak_reserved_gib"], ".2f"),
            number(row["compile_seconds_first_round"], ".0f"),
        ]
        lines.append(cells)
    return head, lines


def notes(summary: dict[str, Any]) -> list[str]:
    """What a reader of the table must know beside it."""
    out = []
    canary = summary["canary"]
    if "copy_bytes_per_s" in canary:
        m, c = canary["matmul_flops_per_s"], canary["copy_bytes_per_s"]
        out.append(
            f"canary: matmul {m['min'] / 1e12:.3g} to {m['max'] / 1e12:.3g} TFLOP/s, "
            f"copy {c['min'] / 1e12:.3g} to {c['max'] / 1e12:.3g} TB/s"
        )
    # Of decode there are rows for each batch and context, too many for a note; the JSON has them.
    clocks = [
        f"{row['method']} {row['sm_clock_mhz']:.0f} MHz"
        + ("" if row["power_w"] is None else f" at {row['power_w']:.0f} W")
        for row in summary["rows"]
        if row["status"] == "ok" and row["sm_clock_mhz"] is not None
    ]
    if clocks and summary["settings"]["mode"] != "decode":
        out.append(f"SM clock and power while timed: {', '.join(clocks)}")
    unsteady = canary["unsteady_rounds"]
    if slow := [n for n in canary["slow_rounds"] if n not in unsteady]:
        out.append(
            f"the machine was more than {CANARY_TOLERANCE:.0%} slower than its best in round "
            f"{', '.join(map(str, slow))}: trust the ratios, not the tokens/s"
        )
    if unsteady:
        out.append(
            f"the machine was not steady: more than {STEADY_TOLERANCE:.0%} slower than its best in round "
            f"{', '.join(map(str, unsteady))}, whose ratios mean little, and tokens/s too; see what else runs on it"
        )
    if summary["rounds"] == 1:
        out.append("one round: the ratios have no spread; take at least three")
    if summary["settings"]["device"] == "cpu":
        out.append("on a CPU these numbers only show that the benchmark works; they rank nothing")
    if summary["incomplete_rounds"]:
        out.append(
            f"stopped before the end: round {', '.join(map(str, summary['incomplete_rounds']))}"
        )
    for row in summary["rows"]:
        if row["status"] != "ok":
            at = (
                ""
                if row["batch"] is None
                else f" at batch {row['batch']}, context {row['context']}"
            )
            out.append(f"{row['method']}{at}: {row['status']}: {row['error']}")
        elif row["failed_rounds"]:
            out.append(f"{row['method']}: {row['failed_rounds']} of its rounds gave no number")
    return out


def markdown(summary: dict[str, Any]) -> str:
    head, lines = table(summary)
    s, run = summary["settings"], summary["run"] or {}
    commit = (run.get("git") or {}).get("commit")
    text = [
        f"{s['mode']} {s['scale']} on {s['world_size']} x {s['device']}, {rounds_text(summary)}, "
        f"commit {commit or 'unknown'}, {s['date']}, `{s['command']}`",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cells) + " |" for cells in lines),
        "",
        *(f"- {note}" for note in notes(summary)),
    ]
    return "\n".join(text).rstrip() + "\n"


def print_table(summary: dict[str, Any]) -> None:
    """Plain columns: the same in a terminal and in a log."""
    head, lines = table(summary)
    widths = [max(len(cells[i]) for cells in [head, *lines]) for i in range(len(head))]
    for cells in [head, *lines]:
        first, *rest = (
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())
    for note in notes(summary):
        print(f"- {note}")


def plot(summary: dict[str, Any], folder: Path) -> list[str]:
    """Bars of the ratio to PreLN with its spread (of tokens/s where PreLN is missing), and of peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in summary["rows"] if row["status"] == "ok"]
    if not rows:
        return []
    s = summary["settings"]
    labels = [
        row["method"] + (f"\n{row['batch']} x {row['context']}" if row["batch"] is not None else "")
        for row in rows
    ]
    title = f"{s['mode']} {s['scale']}, {s['world_size']} x {s['device']}"
    paired = all(row["ratio_to_preln"] for row in rows)
    values = [row["ratio_to_preln" if paired else "tokens_per_s"] for row in rows]
    written = []

    def save(figure: Any, name: str) -> None:
        temporary = folder / f"{name}.tmp.png"
        figure.savefig(temporary, dpi=120)
        os.replace(temporary, folder / name)
        plt.close(figure)
        written.append(name)

    size = (max(5.0, 0.9 * len(rows) + 2), 4.2)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    middle = [v["median"] for v in values]
    errors = [
        [m - v["min"] for m, v in zip(middle, values, strict=True)],
        [v["max"] - m for m, v in zip(middle, values, strict=True)],
    ]
    positions = range(len(rows))
    axis.bar(positions, middle, yerr=errors if summary["rounds"] > 1 else None, capsize=3)
    axis.set_xticks(positions, labels, fontsize=8)
    if paired:
        axis.axhline(1, color="grey", linestyle=":")
    axis.set(
        ylabel="tokens/s relative to PreLN" if paired else "tokens/s",
        title=f"{title}\n"
        + ("median, smallest and largest of " if summary["rounds"] > 1 else "")
        + rounds_text(summary),
    )
    save(figure, "throughput.png")

    with_memory = [row for row in rows if row["peak_allocated_gib"] is not None]
    if with_memory:
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        positions = range(len(with_memory))
        kept = [labels[rows.index(row)] for row in with_memory]
        axis.bar(
            positions, [r["peak_reserved_gib"] for r in with_memory], label="reserved", alpha=0.4
        )
        axis.bar(positions, [r["peak_allocated_gib"] for r in with_memory], label="allocated")
        axis.set_xticks(positions, kept, fontsize=8)
        axis.set(ylabel="peak memory (GiB)", title=title)
        axis.legend()
        save(figure, "memory.png")
    return written


def summarise_folder(folder: Path) -> dict[str, Any]:
    """Read the rounds in ``folder``, print the table, write its files."""
    summary = summarise(read_rounds(folder))
    timing.write_json(folder / "summary.json", summary)
    temporary = folder / "summary.md.tmp"
    temporary.write_text(markdown(summary))
    os.replace(temporary, folder / "summary.md")
    print_table(summary)
    try:
        written = plot(summary, folder)
    except ImportError:
        print("no plots: matplotlib is not here")
        written = []
    print(f"{', '.join(['summary.json', 'summary.md', *written])} in {folder}")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the OUT of rounds.sh")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the OUT of rounds.sh")
    summarise_folder(folder)
    return 0


if __name__ == "__main__":
    run_cli(main)

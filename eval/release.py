"""
Makes a release folder from the runs of a learning-rate sweep: one folder for each learning rate, and a model card.

    python -m eval.release RUN [RUN ...] OUT_DIR --data-dir DATA_DIR
    python -m eval.release checkpoints/400m-ldm-lr{5e-4,1e-3,2e-3}-seed42 release/400m-ldm --results results/*.json

A RUN is a run folder (its last checkpoint is taken) or a ``stepN`` folder; all must be of one method and scale. Weights are
BF16, apart from those that the model keeps in FP32 when it is trained in BF16 (the depth connection's own). The sweep's
held-out cross-entropy comes from the files that ``run.sh`` wrote for these checkpoints (``--results``), or is computed here
(``--data-dir``). OUT_DIR appears under its name only when it is complete.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from config_utils.errors import UserError, run_cli
from config_utils.run_info import format_lr
from data_utils.tokenizer import ResolvedTokenizer
from eval.checkpoint import (
    Checkpoint,
    LoadedCheckpoint,
    build_model,
    check_weights,
    load_checkpoint,
    open_weights,
    read_checkpoint,
)
from eval.heldout import HeldoutData, evaluate_heldout, model_loss, token_byte_lengths
from eval.releases import RELEASES
from eval.run import find_tokenizer

CONFIG_KEYS = ("run_name", "scale", "method", "gpu", "model", "train_module", "seed")
"""What a release keeps of a run's ``config.json``; the rest is paths of the machine that trained."""


@dataclass
class Entry:
    """One learning rate of the sweep."""

    checkpoint: Checkpoint
    heldout: dict[str, Any] | None = None

    @property
    def learning_rate(self) -> float:
        lr = self.checkpoint.learning_rate
        if not lr:
            raise UserError(
                f"{self.checkpoint.path / 'config.json'} has no learning rate (train_module.optim.lr)"
            )
        return lr

    @property
    def folder(self) -> str:
        return f"lr{format_lr(self.learning_rate)}"

    @property
    def cross_entropy(self) -> float | None:
        return None if self.heldout is None else self.heldout["cross_entropy_nats_per_token"]


def last_step(path: Path) -> Path:
    """The last ``stepN`` folder of a run folder; a checkpoint as it is."""
    steps = [
        p
        for p in path.glob("step*")
        if p.name.removeprefix("step").isdigit() and (p / "config.json").is_file()
    ]
    if (path / "config.json").is_file() or not steps:
        return path
    return max(steps, key=lambda p: int(p.name.removeprefix("step")))


def collect(runs: list[Path]) -> list[Entry]:
    """
    The sweep, by learning rate.

    :raises UserError: If the runs do not belong together.
    """
    entries = [Entry(read_checkpoint(last_step(path))) for path in runs]
    first = entries[0].checkpoint
    for entry in entries:
        check_weights(entry.checkpoint, open_weights(entry.checkpoint.path))
        other = entry.checkpoint
        if other.model_config != first.model_config:
            raise UserError(
                f"{other.path} ({other.scale} {other.method}) and {first.path} ({first.scale} {first.method}) are "
                "different models; a release has one"
            )
    by_folder: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda e: e.learning_rate):
        if entry.folder in by_folder:
            raise UserError(
                f"{entry.checkpoint.path} and {by_folder[entry.folder].checkpoint.path} both have the learning rate "
                f"{entry.learning_rate}; give one of them"
            )
        by_folder[entry.folder] = entry
    return list(by_folder.values())


def read_results(paths: list[Path], entries: list[Entry]) -> None:
    """
    Fill in the held-out results that ``run.sh`` wrote.

    :raises UserError: If a file is none of those, or belongs to none of the checkpoints.
    """
    for path in paths:
        try:
            data = json.loads(path.read_text())
            run, step, heldout = data["run"], data["step"], data["heldout"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(
                f"{path} is not a results file of evaluation/run.sh ({type(e).__name__}: {e})"
            ) from None
        for entry in entries:
            if (entry.checkpoint.run, entry.checkpoint.step) == (run, step):
                entry.heldout = heldout
                break
        else:
            raise UserError(
                f"{path} is about {run}, step {step}, which is not among the given runs"
            )


def measure(
    loaded: LoadedCheckpoint, data: HeldoutData, tokenizer: ResolvedTokenizer
) -> dict[str, Any]:
    """The held-out cross-entropy, as ``run.sh`` measures it."""
    return evaluate_heldout(
        model_loss(loaded.model),
        data,
        device=loaded.model.device,
        sequence_length=loaded.sequence_length,
        byte_lengths=token_byte_lengths(tokenizer.tokenizer),
        pad_token_id=loaded.tokenizer_config.pad_token_id,
    ).as_dict()


def release_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The ``config.json`` of one learning rate."""
    config = {k: checkpoint.config[k] for k in CONFIG_KEYS if k in checkpoint.config}
    config["dataset"] = {
        "sequence_length": checkpoint.sequence_length,
        "tokenizer": checkpoint.tokenizer_config.as_config_dict(),
    }
    config["release"] = {"run": checkpoint.run, "step": checkpoint.step}
    return config


def release_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every parameter, on the CPU, in the dtype that it has in a model that is trained in BF16."""
    weights = open_weights(checkpoint.path)
    names = check_weights(checkpoint, weights)
    meta = build_model(checkpoint.model_config, torch.bfloat16, torch.device("meta"))
    return {
        name: weights.read(names[name]).to(t.dtype).contiguous()
        for name, t in meta.state_dict().items()
    }


def write_entry(entry: Entry, folder: Path, tokenizer: ResolvedTokenizer, layout: str) -> None:
    """One learning rate's folder."""
    folder.mkdir()
    weights = release_weights(entry.checkpoint)
    if layout == "safetensors":
        from safetensors.torch import save_file

        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    else:
        from olmo_core.distributed.checkpoint import save_state_dict

        save_state_dict(folder / "model_and_optim", {"model": weights})
    (folder / "tokenizer.json").write_bytes(tokenizer.data)
    config = json.dumps(release_config(entry.checkpoint), indent=2)
    (folder / "config.json").write_text(config + "\n")
    # Written is not yet readable: the same check that a user's evaluation makes.
    written = read_checkpoint(folder)
    check_weights(written, open_weights(folder))


def model_card(entries: list[Entry], layout: str) -> str:
    """``README.md`` of a release."""
    first = entries[0].checkpoint
    measured = [e for e in entries if e.cross_entropy is not None]
    best = min(measured, key=lambda e: e.cross_entropy or 0.0) if measured else None
    method, scale = first.method, first.scale or "custom"
    repository = RELEASES.get((method, scale), "OWNER/REPOSITORY")
    example = (best or entries[0]).folder
    tokens_per_step = first.config.get("data_loader", {}).get("global_batch_size")

    rows = [
        "| folder | learning rate | steps | held-out cross-entropy (nats/token) | perplexity | bits per byte |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        values = ["", "", ""]
        if entry.heldout is not None:
            h = entry.heldout
            values = [
                f"{h['cross_entropy_nats_per_token']:.4f}",
                f"{h['perplexity_per_token']:.3f}",
                f"{h['bits_per_byte']:.4f}",
            ]
        if entry is best and len(measured) > 1:
            values[0] = f"**{values[0]}**"
        steps = "" if entry.checkpoint.step is None else f"{entry.checkpoint.step:,d}"
        rows.append(
            f"| {entry.folder} | {entry.learning_rate:g} | {steps} | {' | '.join(values)} |"
        )
    about = [
        f"{first.model_config.num_params:,d} parameters",
        f"sequence length {first.sequence_length:,d}",
    ]
    if tokens_per_step:
        about.append(f"{tokens_per_step:,d} tokens a step")
    conditions = ""
    if measured:
        h = measured[0].heldout or {}
        conditions = (
            f"\nMeasured on {h['tokens']:,d} held-out tokens (windows: {h['windows']}, "
            f"{h['sequence_length_tokens']:,d} tokens each)."
        )
    stored = "`model.safetensors`" if layout == "safetensors" else "`model_and_optim/` (OLMo-core)"
    return f"""---
library_name: olmo-core
pipeline_tag: text-generation
---

# Depth Memory: {method}, {scale}

{"; ".join(about)}. Each folder is one learning rate and holds `config.json`, {stored} and `tokenizer.json`. The weights are
BF16; the depth connection's own parameters are FP32.

{chr(10).join(rows)}
{conditions}

## Use

With the Depth Memory repository:

```bash
hf download {repository} --include "{example}/*" --local-dir {scale}-{method}
bash paper-experiments/pretrain/evaluation/run.sh {scale}-{method}/{example} results.json
```
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders or stepN folders"
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the folder to make")
    parser.add_argument(
        "--results", nargs="+", type=Path, default=[], metavar="JSON", help="results of run.sh"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="measure the held-out cross-entropy on this corpus"
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "olmo"),
        default="safetensors",
        help="of the weights (safetensors)",
    )
    args = parser.parse_args(argv)
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists and is not an empty folder; choose another name or remove it"
        )
    entries = collect(args.runs)
    tokenizer = find_tokenizer(entries[0].checkpoint)
    read_results(args.results, entries)
    missing = [e for e in entries if e.heldout is None]
    if missing and args.data_dir is not None:
        data = HeldoutData(args.data_dir, entries[0].checkpoint.tokenizer_config)
        for entry in missing:
            entry.heldout = measure(load_checkpoint(entry.checkpoint.path), data, tokenizer)
    how = {
        (h["windows"], h["tokens"], h["sequence_length_tokens"])
        for e in entries
        if (h := e.heldout)
    }
    if len(how) > 1:
        raise UserError(
            "the held-out results are not of the same text (windows, tokens, sequence length: "
            f"{'; '.join(map(str, sorted(how)))}); measure them again with the same options"
        )

    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        for entry in entries:
            write_entry(entry, partial / entry.folder, tokenizer, args.format)
            print(f"{entry.folder}: {entry.checkpoint.run}, step {entry.checkpoint.step}")
        (partial / "README.md").write_text(model_card(entries, args.format))
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    run_cli(main)

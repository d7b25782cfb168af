"""
The retrieval map of a checkpoint: how much of each earlier output (the embedding, every sublayer) each reader (every
sublayer, the LM head) receives, as the mean over tokens of held-out text. Prints each reader's largest weights.

    python -m eval.retrieval CHECKPOINT --data-dir DATA_DIR --json map.json --png map.png
"""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info
from eval.checkpoint import LoadedCheckpoint, default_device, load_checkpoint, read_checkpoint
from eval.generate import check_output, positive
from eval.heldout import HeldoutData
from eval.run import write_json
from olmo_core.nn.depth import DepthTransformer, retrieval_map

SCHEMA_VERSION = 1

TOKENS = 4096
"""Unless told otherwise: two windows of 2,048."""


def sublayers(n_layers: int) -> list[str]:
    """Their names, in order."""
    return [f"layer {i} {kind}" for i in range(n_layers) for kind in ("attention", "feed-forward")]


def windows(data: HeldoutData, sequence_length: int, n_tokens: int) -> list[torch.Tensor]:
    """
    The first ``n_tokens`` tokens of the held-out shards, or all if there are fewer, in windows ``[1, T]``, int64.

    :raises UserError: If there is none.
    """
    out: list[torch.Tensor] = []
    left = n_tokens
    for window in data.windows("stream", sequence_length):
        inputs, _ = data.tokens(window)
        out.append(torch.from_numpy(inputs[:left])[None])
        left -= out[-1].numel()
        if left == 0:
            break
    if not out:
        raise UserError(f"{', '.join(map(str, data.paths))}: no token to read")
    return out


def mean_map(loaded: LoadedCheckpoint, inputs: list[torch.Tensor]) -> np.ndarray:
    """
    The map as the mean over all tokens of ``inputs``, ``[L + 1, L + 1]``, FP64.

    :raises UserError: If the model has no depth connection of ours, or something in it is not finite.
    """
    if not isinstance(loaded.model, DepthTransformer):
        raise UserError(
            f"{loaded.path} is a model of OLMo-core without a depth connection of ours: it has no retrieval map"
        )
    n = 2 * loaded.model.n_layers + 1
    total = np.zeros((n, n))
    for ids in inputs:
        part = retrieval_map(loaded.model, ids.to(loaded.device))
        total += ids.numel() * part.double().cpu().numpy()
    if not np.isfinite(total).all():
        raise UserError(f"{loaded.path}: the retrieval map is not finite; its weights are damaged")
    return total / sum(ids.numel() for ids in inputs)


def draw_map(figure: Any, axis: Any, weights: np.ndarray, method: str) -> None:
    """A heat map with its colour bar; what no reader can see stays white."""
    shown = np.ma.masked_where(np.triu(np.ones_like(weights), 1) > 0, weights)
    image = axis.imshow(shown, cmap="viridis")
    figure.colorbar(image, ax=axis)
    axis.set(
        xlabel="output (0 = embedding)",
        ylabel="reader (last = LM head)",
        title=f"{method}: weight of each output in each read",
    )


def save_png(figure: Any, path: Path) -> None:
    """So that the file is absent, old or whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def describe(weights: np.ndarray, readers: list[str], outputs: list[str], most: int = 3) -> str:
    """A line for each reader with the outputs of the largest weights (by size, whatever the sign)."""
    width = max(map(len, readers))
    lines = []
    for reader, name in enumerate(readers):
        row = weights[reader, : reader + 1]
        largest = np.argsort(-np.abs(row), kind="stable")[:most]
        lines.append(
            f"{name:{width}s}  " + ", ".join(f"{outputs[i]} {row[i]:.3f}" for i in largest)
        )
    return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.retrieval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a stepN folder of a run, or one learning rate of a release"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("DATA_DIR") or None,
        help="the tokeniser's output, whose held-out text is read (default: $DATA_DIR)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=TOKENS,
        metavar="N",
        help=f"of the text, in windows as in training (default: {TOKENS})",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: a GPU if there is one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the map to this file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the map into this file")
    args = parser.parse_args(argv)
    if args.data_dir is None:
        parser.error("no text to read: give --data-dir (or set DATA_DIR)")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: this machine has no CUDA GPU; leave it away or pass --device cpu"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # Everything that can be wrong, before the weights are read.
    checkpoint = read_checkpoint(args.checkpoint)
    for option in ("json", "png"):
        if (path := getattr(args, option)) is not None:
            check_output(path, f"--{option}")
    # A window's last token is only predicted: one more is read.
    data = HeldoutData(args.data_dir, checkpoint.tokenizer_config, max_tokens=args.tokens + 1)
    inputs = windows(data, checkpoint.sequence_length, args.tokens)

    device = default_device() if args.device is None else torch.device(args.device)
    loaded = load_checkpoint(args.checkpoint, device)
    weights = mean_map(loaded, inputs)
    assert isinstance(loaded.model, DepthTransformer)
    exact = loaded.model.depth.exact_map
    names = sublayers(loaded.model.n_layers)
    readers, outputs = [*names, "LM head"], ["embedding", *names]
    n_tokens = sum(ids.numel() for ids in inputs)

    print(describe(weights, readers, outputs))
    over = "tokens" if exact else "tokens and channels"
    print(f"{loaded.method}: the largest weights of each reader, mean over {n_tokens:,} {over}")
    if args.json is not None:
        write_json(
            args.json,
            {
                "schema_version": SCHEMA_VERSION,
                "checkpoint": str(args.checkpoint.resolve()),
                "run": loaded.run,
                "method": loaded.method,
                "scale": loaded.scale,
                "step": loaded.step,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "device": device.type,
                "tokens": n_tokens,
                "sequence_length_tokens": checkpoint.sequence_length,
                "files": data.names,
                "exact": exact,
                "readers": readers,
                "outputs": outputs,
                "mean_weight_by_reader_and_output": weights.tolist(),
                **run_info(),
                "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        print(f"written: {args.json}")
    if args.png is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 4.5), layout="constrained")
        draw_map(figure, figure.subplots(), weights, loaded.method)
        save_png(figure, args.png)
        print(f"written: {args.png}")
    return 0


if __name__ == "__main__":
    run_cli(main)

"""
Do two halves of a micro-batch help each other, the boundary of one, which waits for memory, beside the matrix products of the
other, which wait for the tensor cores?

    python paper-experiments/throughput/overlap.py --out overlap.json
    python paper-experiments/throughput/overlap.py --shapes 2048x4 --tokens 8192

Each half is a row of sublayers: LDM's boundary (``fast``, the recurrent form) and one product of as many operations as a sublayer
of these models has in the mean, ``[M, d] x [d, 6 d]``; in the backward the boundary's backward and two such products. ``serial`` runs
both halves on one stream; ``halves`` gives each half a stream and starts the second with its products, all in one CUDA
graph. A persistent kernel takes every multiprocessor, so the boundary also runs with a part of its clusters, which leaves the
others to the products. One NVIDIA Hopper or Blackwell GPU with the fast backend's kernels.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import timing
import torch

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info

SHAPES = "1024x8,2048x8"
PARTS = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Of the boundary's clusters."""
SUBLAYERS = 6
"""Of each half, in one graph."""

Call = Callable[[], Any]


def repeated(*calls: Call) -> Call:
    def call() -> None:
        for _ in range(SUBLAYERS):
            for each in calls:
                each()

    return call


def on_two_streams(one: Call, other: Call, side: torch.cuda.Stream) -> Call:
    def call() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other()
        one()
        main.wait_stream(side)

    return call


def measure(d: int, d_k: int, n_tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """:returns: A row for each direction and part of the clusters; times are of one sublayer of both halves."""
    from olmo_core.nn.ldm.backends.fast import ops
    from olmo_core.nn.ldm.backends.fast.tune import Case

    side = torch.cuda.Stream(device)
    rows = []
    for direction in ("forward", "backward"):
        case = Case(d, d_k, n_tokens, ops)
        code = case.forward_args[-1]
        if direction == "forward":
            plan = ops._forward_plan(code, d, device.index)
        else:
            plans = ops._backward_plan(code, d, device.index, True)
            if plans is None:
                continue
            plan = plans[0]
        boundary: Call = getattr(case, direction)
        x = torch.randn(n_tokens, d, device=device, dtype=torch.bfloat16)
        w = torch.randn(d, 6 * d, device=device, dtype=torch.bfloat16)

        def products(x=x, w=w, n=1 if direction == "forward" else 2) -> None:
            for _ in range(n):
                torch.mm(x, w)

        def us(call: Call) -> float:
            return timing.graph_seconds([call], device) / SUBLAYERS * 1e6

        every = plan.max_clusters
        serial = us(repeated(boundary, boundary, products, products))
        alone = us(repeated(products))
        for part in PARTS:
            plan.max_clusters = max(1, round(part * every))
            halves = on_two_streams(
                repeated(boundary, products), repeated(products, boundary), side
            )
            row = {
                "d": d, "d_k": d_k, "tokens_of_a_half": n_tokens, "direction": direction,
                "clusters": plan.max_clusters, "boundary_us": us(repeated(boundary)),
                "products_us": alone, "serial_us": serial, "halves_us": us(halves),
            }  # fmt: skip
            row["speedup"] = serial / row["halves_us"]
            rows.append(row)
            print(
                f"{d:5d} {d_k:2d} {n_tokens:6d} {direction:8s} {row['clusters']:4d} clusters: boundary {row['boundary_us']:7.1f} us, "
                f"products {alone:7.1f} us, both halves {serial:7.1f} us in turn, {row['halves_us']:7.1f} us on two streams "
                f"({row['speedup']:.2f} times as fast)",
                flush=True,
            )
        plan.max_clusters = every
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--shapes", default=SHAPES, help=f"widths and slots ({SHAPES})")
    parser.add_argument("--tokens", type=int, default=32768, help="of each half (32768)")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {args.tokens}")
    if not torch.cuda.is_available():
        raise UserError("overlap.py needs a CUDA GPU: none is visible to torch")
    from olmo_core.nn.ldm import LDMConfig
    from olmo_core.nn.ldm.backends import fast
    from olmo_core.nn.ldm.backends.fast.precompile import parse_shapes

    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    canary = timing.canary(device)
    for d, d_k in parse_shapes(args.shapes):
        config = LDMConfig(d_k=d_k, window=1)
        reason = fast.unavailable(device, torch.bfloat16, d, config, by_name=True)
        if reason is not None:
            raise UserError(f"LDM's fast backend cannot run with d_model {d}, d_k {d_k}: {reason}")
        rows += measure(d, d_k, args.tokens, device)
        if args.out:
            report = {**run_info(), "canary": canary, "rows": rows}
            timing.write_json(args.out, report)
    return 0


if __name__ == "__main__":
    run_cli(main)

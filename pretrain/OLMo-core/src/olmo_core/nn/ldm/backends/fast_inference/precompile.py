"""
Compile the inference kernels without a GPU, for machines that have one but not the CuTe DSL::

    python -m olmo_core.nn.ldm.backends.fast_inference.precompile --arch sm_90a --out kernels [--shapes 1024x8,2048x4] [--window 4] [--candidates]

``--window`` is the models' option of that name, for prefill: 0, the default, is the window that they have by default; prefill without windows
is compiled with any. Without ``--shapes``: the shapes of the launch table, or the standard ones for an architecture that has none. Set
``DEPTH_MEMORY_KERNELS`` to the folder where the kernels are to be used; it can be that of the ``fast`` backend.
"""

import argparse
import sys
from pathlib import Path

from ..fast import cache
from ..fast import launch_table as fast
from ..fast.precompile import SHAPES, compile_all, parse_shapes
from . import launch_table


def shapes_of(architecture: str) -> list[tuple[int, int]]:
    rows = {(d, d_k) for a, d, d_k, _ in launch_table.TABLE if a == architecture}
    return sorted(rows) or SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--arch", default="sm_90a", help="sm_90a (Hopper) or sm_100f (Blackwell)")
    parser.add_argument("--out", required=True, type=Path, help="the folder for the kernels")
    parser.add_argument("--shapes", help="widths and slots, such as 1024x8,2048x4")
    parser.add_argument(
        "--key-activation", default="two_sigmoid", choices=["two_sigmoid", "softmax"]
    )
    parser.add_argument("--forget", default="dynamic", choices=["dynamic", "static", "none"])
    parser.add_argument("--window", type=int, default=0, help="the models' option of that name")
    parser.add_argument(
        "--candidates", action="store_true", help="the launches that tune tries, too"
    )
    args = parser.parse_args()
    if cache.dsl_version() is None:
        sys.exit(
            "precompile needs nvidia-cutlass-dsl: install the extra 'cute' (uv sync --extra cute)"
        )
    shapes = parse_shapes(args.shapes) if args.shapes else shapes_of(args.arch)
    options = (args.key_activation, args.forget)
    specs: list[cache.Spec] = []
    for d, d_k in shapes:
        window = fast.window(d, d_k, args.window) if d_k in fast.SLOTS else 1
        found = launch_table.all_specs(args.arch, d, d_k, *options, window)
        if not found:
            sys.exit(f"the fast_inference backend has no kernels for d_model {d} with d_k {d_k}")
        if args.window and window != args.window:
            sys.exit(f"no kernels for a window of {args.window} with d_model {d} and d_k {d_k}")
        specs += found
        if args.candidates:
            for end in launch_table.BUCKETS:
                for launch in launch_table.candidates(args.arch, d, d_k, end):
                    if not launch.prefill:
                        specs.append(launch_table.spec_of(launch, d, d_k, *options))
    n = compile_all(specs, args.arch, args.out)
    print(f"{n} kernels compiled for {args.arch}, {len(set(specs)) - n} were there: {args.out}")


if __name__ == "__main__":
    main()

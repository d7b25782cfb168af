"""
Compile the ``fast`` kernels without a GPU, for machines that have one but not the CuTe DSL::

    python -m olmo_core.nn.hyper_connections.backends.fast.precompile --arch sm_90a --out kernels [--widths 1024,2048]

Set ``DEPTH_MEMORY_KERNELS`` to the folder where the kernels are to be used; it can be that of LDM's kernels.
"""

import argparse
import sys
from pathlib import Path

from ....ldm.backends.fast import cache
from ....ldm.backends.fast.precompile import compile_all
from . import launch_table
from .layout import Spec

WIDTHS = "512,1024,2048"
"""Of the scales that have a kernel."""


def parse_widths(text: str) -> list[int]:
    """:raises SystemExit: With a sentence, if ``text`` is not widths such as ``1024,2048``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        sys.exit(f"--widths takes widths such as 1024,2048; '{text}' is not that")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--arch", default="sm_90a", help="sm_90a (Hopper) or sm_100f (Blackwell)")
    parser.add_argument("--out", required=True, type=Path, help="the folder for the kernels")
    parser.add_argument("--widths", default=WIDTHS, help=f"the default is {WIDTHS}")
    parser.add_argument("--residual-map", default="sinkhorn", choices=["sinkhorn", "identity"])
    args = parser.parse_args()
    if cache.dsl_version() is None:
        sys.exit(
            "precompile needs nvidia-cutlass-dsl: install the extra 'cute' (uv sync --extra cute)"
        )
    specs: list[Spec] = []
    for d in parse_widths(args.widths):
        spec = launch_table.spec(d, args.residual_map)
        if spec is None:
            sys.exit(f"mHC's fast backend has no kernel for d_model {d}")
        specs.append(spec)
    n = compile_all(specs, args.arch, args.out)
    print(f"{n} kernels compiled for {args.arch}, {len(set(specs)) - n} were there: {args.out}")


if __name__ == "__main__":
    main()

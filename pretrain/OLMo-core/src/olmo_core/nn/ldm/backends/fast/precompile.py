"""
Compile the ``fast`` kernels without a GPU, for machines that have one but not the CuTe DSL::

    python -m olmo_core.nn.ldm.backends.fast.precompile --arch sm_90a --out kernels [--shapes 1024x8,2048x4] [--window 4] [--memory-dtype float8] [--candidates]

``--window`` is the models' option of that name; the kernels of the recurrent form are compiled too. Without ``--shapes``: every row of the
launch table, or the standard shapes for an architecture that has no rows. Set ``DEPTH_MEMORY_KERNELS`` to the folder where the kernels are
to be used.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from . import cache, launch_table
from .layout import Spec

SHAPES = [(d, d_k) for d in (512, 1024, 2048) for d_k in (4, 8, 16)]


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """:raises SystemExit: With a sentence, if ``text`` is not widths and slots such as ``1024x8,2048x4``."""
    shapes = []
    for part in text.split(","):
        try:
            d, d_k = map(int, part.split("x"))
        except ValueError:
            sys.exit(f"--shapes takes widths and slots such as 1024x8,2048x4; '{part}' is not one")
        shapes.append((d, d_k))
    return shapes


def shapes_of(architecture: str) -> list[tuple[int, int]]:
    rows = {(d, d_k) for a, _, d, d_k in launch_table.TABLE if a == architecture}
    return sorted(rows) or SHAPES


def compile_all(specs: Sequence[cache.Spec], architecture: str, place: Path) -> int:
    """Compile what ``place`` does not have yet. Returns the number of compiled kernels."""
    n = 0
    for spec in dict.fromkeys(specs):
        start = time.perf_counter()
        if cache.has_at(spec, architecture, place):
            continue
        code, _ = cache.build(spec, architecture)
        cache.store(spec, architecture, code, place)
        n += 1
        print(f"{spec.name}: {time.perf_counter() - start:.1f} s", flush=True)
    return n


def _variants(
    launch: launch_table.Launch,
    direction: str,
    d: int,
    d_k: int,
    options: tuple[str, str],
    earlier: int,
    writes: bool,
) -> list[Spec]:
    """What tune asks for of a launch: at a window's boundary, and at the first also as the launch of the recurrent form."""
    forms: list[dict[str, Any]] = [{"writes": writes}]
    if direction == "backward":
        forms.append({"memory_gradient": False})
    elif not earlier:
        forms += [{"writes": True}, {"writes": True, "saves": False}]
    return [
        launch_table.spec_of(launch, direction, d, d_k, *options, earlier=earlier, **form)
        for form in forms
    ]


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
        "--memory-dtype", default="model", choices=["model", "float8"],
        help="the models' option of that name: float8 also compiles a window's kernels for it",
    )  # fmt: skip
    parser.add_argument(
        "--whole-windows", action="store_true",
        help="the backward of whole windows, also where it is not used yet",
    )  # fmt: skip
    parser.add_argument(
        "--candidates", action="store_true", help="the launches that tune tries, too"
    )
    args = parser.parse_args()
    if cache.dsl_version() is None:
        sys.exit(
            "precompile needs nvidia-cutlass-dsl: install the extra 'cute' (uv sync --extra cute)"
        )
    shapes = parse_shapes(args.shapes) if args.shapes else shapes_of(args.arch)
    specs: list[Spec] = []
    for d, d_k in shapes:
        options = (args.key_activation, args.forget)
        if not launch_table.specs(args.arch, d, d_k, *options):
            sys.exit(f"the fast backend has no kernels for d_model {d} with d_k {d_k}")
        window = launch_table.window(d, d_k, args.window)
        if args.window and window != args.window:
            sys.exit(f"no kernels for a window of {args.window} with d_model {d} and d_k {d_k}")
        for w in {1, window}:
            specs += launch_table.specs(args.arch, d, d_k, *options, w)
        for stored8 in {False, args.memory_dtype == "float8"} if window > 1 else ():
            gather = args.whole_windows or None
            specs += launch_table.specs(args.arch, d, d_k, *options, window, stored8, gather)
        if args.candidates:
            for direction, earlier in product(("forward", "backward"), range(window)):
                last = earlier == window - 1 or direction == "backward"
                for launch in launch_table.coefficients_candidates(
                    args.arch, direction, d, d_k, earlier, last
                ):
                    specs += _variants(launch, direction, d, d_k, options, earlier, last)
                known = launch_table.candidates(args.arch, direction, d, d_k, earlier)
                if window > 1 and not earlier:
                    # A window's first boundary has the rows of the recurrent form; tune times only these beside them.
                    known = launch_table.dots_candidates(args.arch, direction, d, d_k)
                for launch in known:
                    for writes in {last, last or not earlier}:
                        specs.append(
                            launch_table.spec_of(
                                launch, direction, d, d_k, *options, earlier=earlier, writes=writes
                            )
                        )
                    if launch.dots_warps and not earlier:
                        # A module asks for all kernels of the recurrent form, and tune checks one with these rows.
                        backward = direction == "backward"
                        specs.append(
                            launch_table.spec_of(
                                launch, direction, d, d_k, *options,
                                memory_gradient=not backward, saves=backward,
                            )
                        )  # fmt: skip
    n = compile_all(specs, args.arch, args.out)
    print(f"{n} kernels compiled for {args.arch}, {len(set(specs)) - n} were there: {args.out}")


if __name__ == "__main__":
    main()

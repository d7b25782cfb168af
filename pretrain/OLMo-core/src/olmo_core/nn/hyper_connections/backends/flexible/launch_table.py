"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

Provenance of the timed rows: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30, commit 5fbb346, 16,384 tokens,
``python -m olmo_core.nn.hyper_connections.backends.flexible.tune --quick``; each the best of 5 candidates a kernel by CUDA graph
replay, against the 4.25 TB/s of a copy kernel in the same run. All candidates are in ``paper-experiments/throughput/results``.
"""

import math
from dataclasses import dataclass

import torch

from olmo_core.nn.depth.connection import log_once
from olmo_core.nn.depth.triton_ops import next_power_of_2


@dataclass(frozen=True)
class Forward:
    tokens: int
    """Tokens of a program. More of them share one reading of ``phi``; fewer leave their new streams in L2."""
    width: int
    """Columns of one step of the mixing, a power of two >= 16."""
    rows: int
    """Tokens whose whole rows are held at once to collapse the streams; divides ``tokens``."""
    warps: int
    stages: int = 1
    """Software pipelining of the mixing; 1 is none."""
    registers: int | None = None
    """A cap on the registers of a thread."""


@dataclass(frozen=True)
class Rows:
    """The backward's part that needs whole rows."""

    tokens: int
    rows: int
    warps: int
    programs_per_sm: int
    registers: int | None = None


@dataclass(frozen=True)
class Backward:
    """The backward's part that takes one chunk of the width for each program."""

    tokens: int
    """Tokens of one step, a power of two >= 16."""
    width: int
    warps: int
    programs_per_sm: int
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Launches:
    forward: Forward
    rows: Rows
    backward: Backward


INTERPRETER = Launches(Forward(16, 16, 8, 4), Rows(16, 8, 4, 2), Backward(16, 32, 4, 8))
"""On a CPU: small enough that tests meet several tiles, chunks and splits."""

Key = tuple[int, torch.dtype, int, int]

TABLE: dict[Key, Launches] = {
    # Untimed: from the other two by the size of the registers.
    (90, torch.bfloat16, 512, 4): Launches(
        Forward(32, 64, 16, 8, stages=2), Rows(16, 1, 1, 16), Backward(32, 32, 4, 2)
    ),
    # forward 206 us, 2.61 x 10 units; backward 441 us, 2.43 x 23 units
    (90, torch.bfloat16, 1024, 4): Launches(
        Forward(32, 64, 8, 8, stages=2), Rows(16, 1, 2, 4), Backward(32, 32, 4, 2)
    ),
    # forward 375 us, 2.37 x 10 units; backward 836 us, 2.30 x 23 units
    (90, torch.bfloat16, 2048, 4): Launches(
        Forward(32, 64, 4, 8, stages=2), Rows(16, 1, 4, 3, registers=168), Backward(32, 32, 4, 2)
    ),
}
"""By architecture, dtype, D and N."""


def _fit(launches: Launches, dtype: torch.dtype, d_model: int, n: int) -> Launches:
    """A row for another shape: no more bytes of streams in a program, or values in a thread, than there."""
    scale = 2 ** -max(0, math.ceil(math.log2(dtype.itemsize * n / 8)))
    # TF32x3 products in three terms each take what registers there are: FP16 streams at the width of BF16 ones spilled 8 KB.
    columns = 1.0 if dtype == torch.bfloat16 else 0.5
    width = next_power_of_2(d_model)
    f, r, b = launches.forward, launches.rows, launches.backward
    tokens = max(16, int(f.tokens * scale))
    warps = max(1, min(16, width // 512))
    return Launches(
        Forward(
            tokens,
            int(f.width * columns),
            max(1, min(tokens, int(8192 * scale) // width)),
            f.warps,
            f.stages if scale * columns == 1 else 1,
        ),
        Rows(r.tokens, 1, warps, max(1, 8 // warps)),
        Backward(
            max(16, int(b.tokens * scale)), int(b.width * columns), b.warps, b.programs_per_sm
        ),
    )


def launches(arch: int, dtype: torch.dtype, d_model: int, n_streams: int) -> Launches:
    """
    The row of these, or the nearest one fitted to them, which is logged once.

    :param arch: As in ``sm_90``; 0 for the interpreter.
    """
    if arch == 0:
        return INTERPRETER
    key = (arch, dtype, d_model, n_streams)
    found = TABLE.get(key)
    if found is not None:
        return found

    def distance(row: Key) -> tuple:
        return (
            row[3] != n_streams,
            row[1].itemsize != dtype.itemsize,
            row[0] != arch,
            abs(math.log2(row[2] / d_model)),
        )

    nearest = min(TABLE, key=distance)
    log_once(
        f"mHC flexible: no launch row for {_name(key)}, taking that of {_name(nearest)}: "
        "run its tune module for one of its own"
    )
    if nearest[1:] == key[1:]:
        return TABLE[nearest]
    return _fit(TABLE[nearest], dtype, d_model, n_streams)


def _name(key: Key) -> str:
    return f"sm_{key[0]}, {str(key[1]).removeprefix('torch.')}, d={key[2]}, n={key[3]}"

"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

Provenance: no row is timed yet. All were compiled for sm_90 by triton 3.6.0, that of width 1024 also by 3.7.1, with at most
16 bytes of a thread's registers spilled, and the numbers follow from registers, shared memory and the bytes that must be in
flight. The kernels before these, of which results are in ``paper-experiments/throughput/results``, took 206 us forward and
441 us backward at width 1024, and 375 and 836 us at 2048 (NVIDIA H200, 16,384 tokens): 2.3 to 2.6 times the byte floor.
To time these:
``python -m olmo_core.nn.hyper_connections.backends.flexible.tune --quick``.
"""

import math
from dataclasses import dataclass, replace

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
    """If ``fused``: tokens whose whole rows are held at once to collapse the streams; divides ``tokens``."""
    warps: int
    stages: int = 1
    """Software pipelining of the mixing; 1 is none, and 2 overlaps nothing yet."""
    registers: int | None = None
    """A cap on the registers of a thread."""
    fused: bool = False
    """Whether the same kernel collapses the streams."""


@dataclass(frozen=True)
class Collapse:
    """The forward's part that needs whole rows, unless it is fused."""

    rows: int
    """Tokens of a program."""
    warps: int


@dataclass(frozen=True)
class Rows:
    """The backward's part that needs whole rows, one token at a time."""

    warps: int
    programs_per_sm: int
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Backward:
    """The backward's part that needs no whole rows: one tile of tokens for each program, or one chunk of the width."""

    tokens: int
    """Tokens of a program, or of one step by chunks; a power of two >= 16."""
    width: int
    """Columns of one step, or of a program by chunks."""
    warps: int
    stages: int = 1
    registers: int | None = None
    by_chunks: bool = False
    """Whether a program has a chunk of the width, with its part of the gradient of ``phi``."""
    programs_per_sm: int = 1
    """By chunks."""


@dataclass(frozen=True)
class Phi:
    """The gradient of ``phi``, unless the backward is by chunks."""

    tokens: int
    width: int
    warps: int
    programs_per_sm: int
    stages: int = 1


@dataclass(frozen=True)
class Launches:
    forward: Forward
    collapse: Collapse
    rows: Rows
    backward: Backward
    phi: Phi


INTERPRETER = Launches(
    Forward(16, 16, 8, 4), Collapse(4, 1), Rows(1, 3), Backward(16, 32, 4), Phi(16, 32, 4, 8)
)
"""On a CPU: small enough that tests meet several tiles, chunks and splits."""

SMALL_SHARED_MEMORY = (86, 89, 120, 121)
"""Architectures with 99 KB of shared memory for a program: the pipelined loops take up to 201 KB, those of the table 123 KB."""

Key = tuple[int, torch.dtype, int, int]

TABLE: dict[Key, Launches] = {
    # Untimed.
    (90, torch.bfloat16, 512, 4): Launches(
        Forward(64, 32, 8, 8, 3, registers=128),
        Collapse(2, 1),
        Rows(1, 8, 3),
        Backward(32, 32, 4, 3),
        Phi(64, 256, 8, 2, 3),
    ),
    # Untimed.
    (90, torch.bfloat16, 1024, 4): Launches(
        Forward(64, 32, 8, 8, 3, registers=128),
        Collapse(2, 2),
        Rows(2, 6, 3),
        Backward(32, 32, 4, 3),
        Phi(64, 256, 8, 2, 3),
    ),
    # Untimed.
    (90, torch.bfloat16, 2048, 4): Launches(
        Forward(64, 32, 4, 8, 3, registers=128),
        Collapse(1, 2),
        Rows(4, 3, 3),
        Backward(32, 32, 4, 3),
        Phi(64, 256, 8, 2, 3),
    ),
}
"""By architecture, dtype, D and N."""


def _fit(launches: Launches, dtype: torch.dtype, d_model: int, n: int) -> Launches:
    """A row for another shape: no more bytes of streams in a program, or values in a thread, than there."""
    scale = 2 ** -max(0, math.ceil(math.log2(dtype.itemsize * n / 8)))
    # TF32x3 products in three terms each take what registers there are: FP16 streams at the width of BF16 ones spilled 8 KB.
    columns = 1.0 if dtype == torch.bfloat16 else 0.5
    width = next_power_of_2(d_model)
    f, r, b, p = launches.forward, launches.rows, launches.backward, launches.phi
    tokens = max(16, int(f.tokens * scale))
    warps = max(1, min(16, width // 512))
    plain = scale * columns == 1
    return Launches(
        Forward(
            tokens,
            max(16, int(f.width * columns)),
            max(1, min(tokens, int(8192 * scale) // width)),
            f.warps,
            f.stages if plain else 1,
            f.registers if plain else None,
            f.fused,
        ),
        Collapse(max(1, min(4, 2048 // width)), warps),
        Rows(warps, max(1, 8 // warps), r.stages if plain else 1),
        Backward(
            max(16, int(b.tokens * scale)),
            max(16, int(b.width * columns)),
            b.warps,
            b.stages if plain else 1,
            b.registers if plain else None,
            b.by_chunks,
            b.programs_per_sm,
        ),
        Phi(
            max(16, int(p.tokens * scale)),
            max(16, int(p.width * scale * columns)),
            p.warps,
            p.programs_per_sm,
            p.stages if plain else 1,
        ),
    )


def _without_pipelines(found: Launches) -> Launches:
    return Launches(
        replace(found.forward, stages=1),
        found.collapse,
        replace(found.rows, stages=1),
        replace(found.backward, stages=1),
        replace(found.phi, stages=1),
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
    found = TABLE[nearest]
    if nearest[1:] != key[1:]:
        found = _fit(found, dtype, d_model, n_streams)
    return _without_pipelines(found) if arch in SMALL_SHARED_MEMORY else found


def _name(key: Key) -> str:
    return f"sm_{key[0]}, {str(key[1]).removeprefix('torch.')}, d={key[2]}, n={key[3]}"

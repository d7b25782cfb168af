"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

Provenance of the rows with times: NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-11-30, commit 2ea8dad, 16,384 tokens, CUDA graph
replay, ``python -m olmo_core.nn.hyper_connections.backends.flexible.tune --quick --seconds 52 --shapes 1024x4,2048x4``. Beside
the microseconds is how many times the byte floor they are, of 2N + 2 vectors for each token forward and 5N + 3 backward.
"""

import math
from dataclasses import dataclass, replace

import torch

from olmo_core.nn.depth.connection import log_once
from olmo_core.nn.depth.triton_ops import next_power_of_2


@dataclass(frozen=True)
class Forward:
    """The mixing of the streams and their product with ``phi``: one tile of tokens for each program."""

    tokens: int
    """Tokens of a program, a power of two >= 16. More of them share one reading of ``phi``."""
    width: int
    """Columns of one step, a power of two >= 16."""
    warps: int
    stages: int = 1
    """Software pipelining; 1 is none, and 2 overlaps nothing yet."""
    registers: int | None = None
    """A cap on the registers of a thread."""


@dataclass(frozen=True)
class Collapse:
    """The forward's part that needs whole rows."""

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
    """The gradients of the streams: one tile of tokens for each program."""

    tokens: int
    """Tokens of a program, a power of two >= 16."""
    width: int
    """Columns of one step, a power of two >= 16."""
    warps: int
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Phi:
    """The gradient of ``phi``: one chunk of the width of one stream and one split of the tokens for each program."""

    tokens: int
    """Tokens of one step, a power of two >= 16."""
    width: int
    """Columns of a program, a power of two >= 16."""
    warps: int
    programs_per_sm: int
    """So many splits that there are about as many programs."""
    stages: int = 1


@dataclass(frozen=True)
class Launches:
    forward: Forward
    collapse: Collapse
    rows: Rows
    backward: Backward
    phi: Phi


INTERPRETER = Launches(
    Forward(16, 16, 4), Collapse(4, 1), Rows(1, 3), Backward(16, 32, 4), Phi(16, 32, 4, 8)
)
"""On a CPU: small enough that tests meet several tiles, chunks and splits."""

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}
"""KB of shared memory for a program, of architectures with less than the 227 KB of sm_90: the loops of the table take 197 KB, with
steps of half the width 101, not pipelined 64."""

Key = tuple[int, torch.dtype, int, int]

TABLE: dict[Key, Launches] = {
    # Untimed: from the next row, with half the warps for rows of half the width.
    (90, torch.bfloat16, 512, 4): Launches(
        Forward(64, 64, 8, 3),
        Collapse(1, 1),
        Rows(1, 8, 3),
        Backward(32, 64, 8, 3),
        Phi(128, 128, 8, 1, 4),
    ),
    # Timed: forward 156 us, 1.98 x; backward 279 us, 1.54 x.
    (90, torch.bfloat16, 1024, 4): Launches(
        Forward(64, 64, 8, 3),
        Collapse(1, 2),
        Rows(2, 6, 3),
        Backward(32, 64, 8, 3),
        Phi(128, 128, 8, 1, 4),
    ),
    # Timed: forward 292 us, 1.85 x; backward 521 us, 1.43 x.
    (90, torch.bfloat16, 2048, 4): Launches(
        Forward(64, 64, 8, 3),
        Collapse(1, 4),
        Rows(2, 4, 3),
        Backward(32, 64, 8, 3),
        Phi(64, 256, 8, 1, 4),
    ),
}
"""By architecture, dtype, D and N."""


def _fit(launches: Launches, dtype: torch.dtype, d_model: int, n: int) -> Launches:
    """A row for another shape: no more bytes of streams in a program, or values in a thread, than there."""
    scale = 2 ** -max(0, math.ceil(math.log2(dtype.itemsize * n / 8)))
    # TF32x3 products in three terms each take what registers there are: FP16 streams at the width of BF16 ones spilled 8 KB.
    columns = 1.0 if dtype == torch.bfloat16 else 0.5
    # With half of them the forward spilled 480 bytes of a thread's registers in FP32, and on sm_89 1,472 in FP16.
    columns_forward = 1.0 if dtype == torch.bfloat16 else 0.25
    width = next_power_of_2(d_model)
    f, r, b, p = launches.forward, launches.rows, launches.backward, launches.phi
    warps = max(1, min(16, width // 512))
    plain = scale * columns == 1
    return Launches(
        Forward(
            max(16, int(f.tokens * scale)),
            max(16, int(f.width * columns_forward)),
            f.warps,
            f.stages if plain else 1,
            f.registers if plain else None,
        ),
        Collapse(max(1, min(4, 2048 // width)), warps),
        Rows(warps, max(1, 8 // warps), r.stages if plain else 1),
        Backward(
            max(16, int(b.tokens * scale)),
            max(16, int(b.width * columns)),
            b.warps,
            b.stages if plain else 1,
            b.registers if plain else None,
        ),
        Phi(
            max(16, int(p.tokens * scale)),
            max(16, int(p.width * scale * columns)),
            p.warps,
            p.programs_per_sm,
            p.stages if plain else 1,
        ),
    )


def _within(found: Launches, arch: int) -> Launches:
    """As much of it as the architecture has shared memory for, and Triton can compile."""
    forward, rows, backward, phi = found.forward, found.rows, found.backward, found.phi
    shared = SHARED_MEMORY.get(arch, 227)
    if shared < 163:
        rows, backward = replace(rows, stages=1), replace(backward, stages=1)
        phi = replace(phi, stages=1)
    elif shared < 227:
        forward = replace(forward, width=max(16, forward.width // 2))
        backward = replace(backward, width=max(16, backward.width // 2))
        phi = replace(phi, stages=min(phi.stages, 3))
    if shared < 163 or arch >= 100:
        # From sm_100 on Triton's pipeliner refuses the forward's inline assembly: "doesn't know how to predicate this op".
        forward = replace(forward, stages=1)
    return Launches(forward, found.collapse, rows, backward, phi)


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
    return _within(found, arch)


def _name(key: Key) -> str:
    return f"sm_{key[0]}, {str(key[1]).removeprefix('torch.')}, d={key[2]}, n={key[3]}"

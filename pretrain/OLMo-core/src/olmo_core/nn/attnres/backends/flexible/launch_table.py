"""
Launch numbers of AttnRes's ``flexible`` kernels: frozen data, no tuning at run time.

Rows are keyed by architecture (90 for ``sm_90``), bytes of an element, power of two above ``d_model``, and the number of
sources they were timed with. A shape without a row takes the nearest one and says so once.

Provenance of the rows: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30, commit 5fbb346 with this backend, 16,384 tokens,
``python -m olmo_core.nn.attnres.backends.flexible.tune --quick``; each the best of 6 to 8 candidates by CUDA graph replay. The floor
is the bytes that the kernel must move at the 4.25 TB/s of a copy kernel in the same run. Rows with ``keep_h`` were timed with a BF16
``h``: one vector less in each direction than now. All candidates are in
``paper-experiments/throughput/results``.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import log2

from olmo_core.nn.depth.connection import log_once


@dataclass(frozen=True)
class Launch:
    sources: int
    """Sources that are loaded and reduced together, a power of two."""
    warps: int
    tokens: int = 1
    """Tokens of a program's tile, a power of two."""
    programs_per_sm: int = 0
    """Programs for each multiprocessor, each with a share of the tokens; 0 is one program for each tile."""
    stages: int = 1
    """Software pipelining of the loop over sources; 1 is none."""
    registers: int | None = None
    """A cap on the registers of a thread."""


@dataclass(frozen=True)
class Row:
    forward: Launch
    backward: Launch
    """Of a boundary that writes the sources' gradients; each of its programs leaves one row of partial sums."""
    deferring: Launch
    """Of one that leaves its part to an earlier boundary."""
    keep_h: bool = False
    """
    Keep the mixture ``h`` for the backward, in FP32 (two vectors more for each boundary), instead of mixing the sources again.
    """


Key = tuple[int, int, int, int]
"""Architecture, bytes of an element, power of two above ``d_model``, sources."""

Rows = dict[Key, Row]

ROWS: Rows = {
    # forward 86 us, 1.08 x, backward 498 us, 2.03 x, deferring 204 us, 1.84 x
    (90, 2, 1024, 9): Row(
        Launch(2, 1, stages=3),
        Launch(2, 4, programs_per_sm=4, registers=128),
        Launch(4, 4, programs_per_sm=4),
    ),
    # forward 188 us, 1.19 x, backward 1000 us, 2.04 x, deferring 364 us, 1.64 x
    (90, 2, 2048, 9): Row(
        Launch(2, 2, stages=3),
        Launch(2, 8, programs_per_sm=2, registers=128),
        Launch(4, 8, programs_per_sm=2),
        keep_h=True,
    ),
    # forward 218 us, 1.06 x, backward 1204 us, 1.93 x, deferring 403 us, 1.70 x
    (90, 2, 1024, 25): Row(
        Launch(2, 1, stages=3),
        Launch(2, 2, programs_per_sm=4),
        Launch(4, 4, programs_per_sm=4),
        keep_h=True,
    ),
    # forward 425 us, 1.03 x, backward 2544 us, 2.03 x, deferring 802 us, 1.69 x
    (90, 2, 2048, 25): Row(
        Launch(2, 2, stages=3),
        Launch(2, 4, programs_per_sm=2),
        Launch(4, 8, programs_per_sm=2),
        keep_h=True,
    ),
}
"""With each launch's time at 16,384 tokens in BF16 and its ratio to the byte floor."""

INTERPRETER = Row(
    Launch(4, 1, tokens=8),
    Launch(2, 1, tokens=4, programs_per_sm=2),
    Launch(2, 1, tokens=4, programs_per_sm=2),
)
"""On a CPU: few programs, since the interpreter's time goes by operations."""

SIZES = (4, 8, 12, 32, 64, 127)
"""Lengths that a tuple of committed sources is padded to: each is compiled once."""
MOST_ARGUMENTS = 12
"""Up to this many committed sources are arguments of the kernels; of more a table is written first (about 3 us)."""


def padded(n_committed: int) -> int:
    """
    The length of the tuple for this many committed sources.

    :raises ValueError: If there are too many.
    """
    for size in SIZES:
        if n_committed <= size:
            return size
    raise ValueError(f"no launch takes {n_committed} committed sources, {SIZES[-1]} at most")


def bucket(n_sources: int) -> int:
    """The number of sources of the rows: 9 for few, 25 for many."""
    return 9 if n_sources <= 16 else 25


@cache
def find_row(architecture: int, itemsize: int, width: int, n_sources: int) -> Row:
    """
    :param architecture: 0 is the interpreter.
    :param width: The power of two above ``d_model``.
    """
    if architecture == 0:
        return INTERPRETER
    key = (architecture, itemsize, width, bucket(n_sources))
    row = ROWS.get(key)
    if row is not None:
        return row

    def distance(other: Key) -> tuple[float, ...]:
        return (
            # The bytes of a row first: they decide the registers.
            abs(log2(other[1] * other[2]) - log2(itemsize * width)),
            abs(other[3] - key[3]),
            abs(other[0] - architecture),
        )

    nearest = min(ROWS, key=distance)
    row = ROWS[nearest]
    # As many values in a thread as the row has; a warp at least, 16 at most.
    scale = width / nearest[2]
    forward, backward, deferring = (
        _scaled(launch, scale) for launch in (row.forward, row.backward, row.deferring)
    )
    row = Row(forward, backward, deferring, row.keep_h)
    log_once(
        f"AttnRes 'flexible' has no launch numbers timed for sm_{architecture}, {itemsize}-byte elements, width {width} and "
        f"{key[3]} sources: it takes those for sm_{nearest[0]}, {nearest[1]}-byte elements, width {nearest[2]}"
    )
    return row


def _scaled(launch: Launch, scale: float) -> Launch:
    warps = max(1, min(16, int(launch.warps * scale)))
    programs = launch.programs_per_sm
    if programs:
        programs = max(1, programs * launch.warps // warps)
    return replace(launch, warps=warps, programs_per_sm=programs)


def vector(launch: Launch, width: int) -> int:
    """Elements of one load of a thread (at most 8), so that the program's warps span ``tokens`` rows of the width."""
    return max(1, min(8, width * launch.tokens // (32 * launch.warps)))

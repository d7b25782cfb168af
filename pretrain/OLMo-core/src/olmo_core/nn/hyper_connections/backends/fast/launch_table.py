"""
Launch numbers of the ``fast`` kernel: a rule for any width, and rows that were timed. No tuning at run time.

There is no row yet: nothing was timed on a GPU.
"""

from dataclasses import dataclass, replace

from ....ldm.backends.fast.driver import PORTABLE_CLUSTER
from .layout import Spec


@dataclass(frozen=True)
class Launch:
    """The numbers of :class:`.layout.Spec` that a shape leaves open."""

    cluster: int
    lag: int = 1
    copy: str = "bulk"
    load_warps: int = 2
    kept: int = 0
    maps: bool = True
    timed: bool = False


COLUMNS = (256, 128)
"""Of a block, the first that divides the width: ``phi``'s part is 96 KiB or 48 KiB of shared memory."""

TABLE: dict[tuple[str, int], Launch] = {}
"""By architecture and width."""


def rule(d: int) -> Launch | None:
    """``None`` if the width has no kernel."""
    for columns in COLUMNS:
        if d % columns == 0 and d // columns <= PORTABLE_CLUSTER:
            return Launch(d // columns)
    return None


def launch(architecture: str, d: int) -> Launch | None:
    return TABLE.get((architecture, d)) or rule(d)


def spec_of(found: Launch, d: int, residual: str) -> Spec:
    """:param residual: ``sinkhorn`` or ``identity``, before and after a boundary."""
    columns = 3 if residual == "sinkhorn" else 1
    return Spec(
        d,
        residual,
        residual,
        cluster=found.cluster,
        lag=found.lag,
        copy=found.copy,
        load_warps=found.load_warps,
        kept=min(found.kept, columns),
        maps=found.maps,
    )


def spec(architecture: str, d: int, residual: str) -> Spec | None:
    found = launch(architecture, d)
    return None if found is None else spec_of(found, d, residual)


def timed(architecture: str, d: int) -> bool:
    row = TABLE.get((architecture, d))
    return row is not None and row.timed


def candidates(architecture: str, d: int) -> list[Launch]:
    """At most eight, the one in use first."""
    base = launch(architecture, d)
    if base is None:
        return []
    plain = Launch(base.cluster)
    found = [
        replace(base, timed=False),
        plain,
        replace(plain, maps=False),
        replace(plain, lag=2),
        replace(plain, kept=3),
        replace(plain, kept=3, load_warps=3),
        replace(plain, copy="lanes", load_warps=3),
        replace(plain, kept=3, copy="lanes", load_warps=3),
    ]
    return list(dict.fromkeys(found))[:8]

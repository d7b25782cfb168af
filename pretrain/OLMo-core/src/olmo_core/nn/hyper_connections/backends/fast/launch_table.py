"""
Launch numbers of the ``fast`` kernel: one rule for all widths, and the widths that were timed with it. No tuning at run time.
"""

from ....ldm.backends.fast.driver import PORTABLE_CLUSTER
from .layout import Spec

COLUMNS = (256, 128)
"""Of a block, the first that divides the width: 32 for each of 8 or 4 main warps."""

TIMED: frozenset[tuple[str, int]] = frozenset(
    {
        # NVIDIA H200, torch 2.11.0+cu130, triton 3.6, 2026-12-01, commit 2e3d156, `fast.tune --only time`; 16,384 and 65,536 tokens.
        # 111.6 us, 1.42 x floor; 398.7 us, 1.27 x floor
        ("sm_90a", 1024),
        # 213.7 us, 1.36 x floor; 811.8 us, 1.29 x floor
        ("sm_90a", 2048),
    }
)
"""Architecture and width, with ``H_res`` by the Sinkhorn iteration: all that ``auto`` takes."""


def rule(d: int) -> int | None:
    """The blocks of a cluster, which share a token; ``None`` if the width has no kernel."""
    for columns in COLUMNS:
        if d % columns == 0 and d // columns <= PORTABLE_CLUSTER:
            return d // columns
    return None


def spec(d: int, residual: str) -> Spec | None:
    """:param residual: ``sinkhorn`` or ``identity``, before and after a boundary."""
    cluster = rule(d)
    return None if cluster is None else Spec(d, residual, residual, cluster)


def timed(architecture: str, d: int, residual: str) -> bool:
    return residual == "sinkhorn" and (architecture, d) in TIMED

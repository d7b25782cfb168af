"""
AttnRes's ``flexible`` backend: one Triton kernel for a whole boundary, forward and backward, full and block form. Import
:mod:`.ops` only where :func:`unavailable` says that it can run: it imports Triton.
"""

import torch

from olmo_core.nn.depth.triton_ops import triton_unavailable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SOURCES = 128
"""The most sources of one boundary; every one is an argument, of the kernel or of the one that writes its table."""
MAX_WIDTH = 8192
"""The largest ``d_model``: a program holds whole rows in registers."""

GROUP = 4
"""
Boundaries that share one write of the sources' gradients; see :mod:`.ops`. With ``N`` sources a boundary's backward moves
``3N + 1`` vectors a token in groups of 1, ``1.5 N + 4.75`` in groups of 4, ``1.25 N + 6.9`` in groups of 8.
"""


def unavailable(
    device: torch.device, dtype: torch.dtype, d_model: int, n_sources: int, *, interpreter: bool
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param n_sources: Of the last boundary, which has the most: all boundaries of a model must take the same backend.
    :param interpreter: Whether Triton's interpreter will do: it is for tests, and far slower than the reference.
    """
    if d_model % 8 or d_model > MAX_WIDTH:
        return f"d_model must be a multiple of 8 and at most {MAX_WIDTH}, got {d_model}"
    if n_sources > MAX_SOURCES:
        return f"its kernels take at most {MAX_SOURCES} sources, the last boundary has {n_sources}"
    if dtype not in DTYPES:
        return f"its sources are BF16, FP16 or FP32, not {dtype}"
    return triton_unavailable(device, interpreter=interpreter)

"""
The ``flexible`` backend: Triton kernels for every boundary of mHC, forward and backward. Import :mod:`.ops` only where
:func:`unavailable` says that it can run: it imports Triton.
"""

import torch

from olmo_core.nn.depth.triton_ops import triton_unavailable

STREAMS = (1, 2, 4)
"""The numbers of streams that the kernels are written for (a stream axis in Triton is a power of two)."""
MAX_WIDTH = 8192
"""A program holds whole rows of one stream."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unavailable(
    device: torch.device, dtype: torch.dtype, d_model: int, n_streams: int, *, interpreter: bool
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param interpreter: Whether Triton's interpreter will do: it is for tests, and far slower than the reference.
    """
    if n_streams not in STREAMS:
        return f"its kernels are for n_streams in {STREAMS}, not {n_streams}"
    if d_model % 8 or d_model > MAX_WIDTH:
        return f"d_model must be a multiple of 8 and at most {MAX_WIDTH}, got {d_model}"
    if dtype not in DTYPES:
        return f"its streams are BF16, FP16 or FP32, not {dtype}"
    return triton_unavailable(device, interpreter=interpreter)

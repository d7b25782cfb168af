"""
The ``flexible`` backend: Triton kernels for every option of LDM, forward and backward. Import
:mod:`.ops` only where :func:`unavailable` says that it can run: it imports Triton.
"""

import torch

from olmo_core.nn.depth.triton_ops import triton_unavailable

SLOTS = (1, 2, 4, 8, 16)
"""The numbers of slots K that the kernels are written for (a slot axis in Triton is a power of two)."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unavailable(
    device: torch.device, dtype: torch.dtype, d_model: int, d_k: int, *, interpreter: bool
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param interpreter: Whether Triton's interpreter will do: it is for tests, and far slower than the reference.
    """
    if d_k not in SLOTS:
        return f"its kernels are for d_k in {SLOTS}, not {d_k}"
    if d_model % 8:
        return f"d_model must be a multiple of 8, got {d_model}"
    if dtype not in DTYPES:
        return f"its states are BF16, FP16 or FP32, not {dtype}"
    return triton_unavailable(device, interpreter=interpreter)

"""
fla-core's ``fused_attnres`` (0.6.0, MIT) behind the boundary: the baseline. Importing this module needs neither fla nor
Triton.

One fused read with the norm that follows folded in. Autograd sums the gradients of a source over its readers, in pairs
and in the dtype of the source. Left to this project: the partial sums of the block form, and boundary 0, since fla's
query gradient for a single source is rounding noise (about 2e-3) instead of zero.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unavailable(device: torch.device, dtype: torch.dtype, d_model: int) -> str | None:
    """Why the backend cannot run for these, as one clause; ``None`` if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, got '{device.type}'"
    if find_spec("fla") is None or find_spec("triton") is None:
        return "fla-core and triton are not both installed"
    if dtype not in DTYPES:
        return f"its sources are BF16, FP16 or FP32, not {dtype}"
    if d_model * dtype.itemsize % 16:
        return f"its rows must be multiples of 16 bytes: d_model = {d_model} in {dtype} is not"
    return None


@cache
def _fused_attnres() -> Any:
    from fla.ops.attnres import fused_attnres

    # It looks at the addresses of its inputs, which a trace has not: a compiled block breaks its graph here.
    return torch.compiler.disable(fused_attnres)


def attnres_read_norm(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    gain: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """
    The read of :func:`.reference.attnres_read` and the RMSNorm that follows.

    :param sources: At least two tensors ``[..., D]`` of one dtype.
    :param query: ``[D]``.
    :param gain: The gain of the key norm, ``[D]``.
    :param norm_weight: The gain of the norm that follows, ``[D]``.

    :returns: ``x`` ``[..., D]`` in the dtype of the sources.
    """
    return _fused_attnres()(query, list(sources), gain, output_rms_weight=norm_weight, rms_eps=eps)

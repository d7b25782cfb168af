"""Attention Residuals (arXiv 2603.15031) in readable PyTorch: one read over the depth, FP32 arithmetic."""

from collections.abc import Sequence

import torch

from olmo_core.nn.depth.connection import rms_normalize, upcast


def attnres_read(
    sources: Sequence[torch.Tensor], query: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ``h = sum_i alpha_i v_i`` with ``alpha = softmax_i(query . (gain * rms(v_i)))``: keys are normalised, values are
    not; no scale, no bias.

    :param sources: ``n`` tensors ``[..., D]``.
    :param query: ``[D]``.
    :param gain: The gain of the key norm, ``[D]``.

    :returns: ``h`` ``[..., D]`` and the weights ``[..., n]``, FP32.
    """
    values = [upcast(v) for v in sources]
    w = upcast(query) * upcast(gain)
    logits = torch.stack([rms_normalize(v, eps) @ w for v in values], dim=-1)
    weights = torch.softmax(logits, dim=-1)
    h = torch.zeros_like(values[0])
    for i, v in enumerate(values):
        h = h + weights[..., i, None] * v
    return h, weights

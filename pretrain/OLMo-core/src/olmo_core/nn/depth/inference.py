"""Where inference leaves plain PyTorch: the Triton kernels that all methods share, and a feed-forward that uses them."""

import importlib
from functools import cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from olmo_core.nn.feed_forward import FeedForward

from .triton_ops import is_eager, triton_unavailable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTERPRETER = False
"""Let Triton's interpreter run the kernels on a CPU: for tests, it is far slower than PyTorch."""


@cache
def _ops(device_type: str) -> Any:
    if triton_unavailable(torch.device(device_type), interpreter=True) is not None:
        return None
    return importlib.import_module(".triton_inference_ops", __package__)


def inference_ops(*tensors: torch.Tensor) -> Any:
    """
    The module :mod:`.triton_inference_ops` if its kernels can take these tensors now, otherwise ``None``: they are for CUDA, know no
    gradients, and torch.compile has better things to do with the same PyTorch.
    """
    first = tensors[0]
    if torch.is_grad_enabled() or not (first.is_cuda or INTERPRETER):
        return None
    for t in tensors:
        if t.dtype != first.dtype or t.dtype not in DTYPES or not is_eager(t):
            return None
    return _ops(first.device.type)


class FusedFeedForward(FeedForward):
    """Upstream's feed-forward; in inference on a GPU, SwiGLU's product is one kernel instead of two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        See :meth:`FeedForward.forward`.

        :param x: ``[..., D]``.
        """
        ops = inference_ops(x)
        if ops is None:
            return super().forward(x)
        return self.w2(ops.silu_mul(self.w1(x), self.w3(x)))


def install_feed_forward(feed_forward: nn.Module) -> None:
    """Let a module that is exactly upstream's SwiGLU feed-forward use the kernel; others are left alone."""
    if type(feed_forward) is FeedForward and feed_forward.activation_fn is F.silu:
        # Upstream builds its class from the config and offers no place to name another.
        feed_forward.__class__ = FusedFeedForward

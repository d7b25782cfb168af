"""Where inference leaves plain PyTorch: the Triton kernels that all methods share, and a feed-forward that uses them."""

import importlib
from functools import cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from olmo_core.nn.feed_forward import FeedForward

from .input_gradient import JoinedLinear
from .triton_ops import is_eager, triton_unavailable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = (nn.Linear, JoinedLinear)
"""Linear layers whose forward is a product and nothing more."""
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


class PackedWeights:
    """
    The weights of several linear layers with one input as one matrix. In a decode step a product is short of rows, not of columns: one
    of 4,096 columns takes 7 us where three of 2,048, 1,024 and 1,024 take 18 to 31 (H200, d = 2048).

    The layers' own weights become parts of the matrix, so that no memory is spent, and what is loaded into them later is in it.
    """

    def __init__(self) -> None:
        self._matrix: torch.Tensor | None = None

    def matrix(self, *layers: nn.Linear) -> torch.Tensor | None:
        """``[sum of out_features, in_features]``; ``None`` where the layers cannot be packed: biases, shards, several dtypes."""
        weights = [layer.weight for layer in layers]
        if self._is_current(weights):
            return self._matrix
        first = weights[0]
        if (
            any(type(layer) not in PLAIN or layer.bias is not None for layer in layers)
            or any(type(w) is not nn.Parameter or w.dtype != first.dtype for w in weights)
            or any(w.is_inference() != first.is_inference() for w in weights)
            or any((w.numel() * w.element_size()) % 16 for w in weights)
        ):
            return None
        # Outside inference mode, since a later training step saves the weights for its backward; but weights that were made in it stay
        # inference tensors, with the version counter of neither kind otherwise.
        with torch.inference_mode(first.is_inference()), torch.no_grad():
            self._matrix = torch.cat([w.detach() for w in weights])
            for w, part in zip(
                weights, self._matrix.split([w.shape[0] for w in weights]), strict=True
            ):
                w.data = part
        return self._matrix

    def _is_current(self, weights: list[torch.Tensor]) -> bool:
        if self._matrix is None:
            return False
        at = self._matrix.data_ptr()
        for w in weights:
            if w.data_ptr() != at or w.dtype != self._matrix.dtype:
                return False
            at += w.numel() * w.element_size()
        return True


class FusedFeedForward(FeedForward):
    """Upstream's feed-forward; in inference on a GPU the first two products are one, and SwiGLU's is one kernel."""

    packed: PackedWeights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        See :meth:`FeedForward.forward`.

        :param x: ``[..., D]``.
        """
        ops = inference_ops(x)
        if ops is None:
            return super().forward(x)
        matrix = self.packed.matrix(self.w1, self.w3)
        if matrix is None or (self.w1.out_features * x.element_size()) % 16:
            return self.w2(ops.silu_mul(self.w1(x), self.w3(x)))
        return self.w2(ops.silu_mul_packed(F.linear(x, matrix)))


def install_feed_forward(feed_forward: nn.Module) -> None:
    """Let a module that is exactly upstream's SwiGLU feed-forward use the kernel; others are left alone."""
    if type(feed_forward) is FeedForward and feed_forward.activation_fn is F.silu:
        # Upstream builds its class from the config and offers no place to name another.
        feed_forward.__class__ = FusedFeedForward
        feed_forward.packed = PackedWeights()  # type: ignore[assignment]

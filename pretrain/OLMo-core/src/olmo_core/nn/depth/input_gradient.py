"""
Linear layers of one input whose gradients of it are added up inside their products.

Queries, keys and values have one input, and so have the two inner layers of a gated feed-forward. Each of them leaves a gradient of
it; to add them up takes 7 vectors of d a token and block to and from memory where the boundary runs outside of the compiled sublayers,
5.1 ms of a step of 424 at 400M (LDM, 65,536 tokens on an H200; PreLN's compiled block adds them up on the way into its norm).
A matrix product can begin with what is in its output: 3 vectors. The parameters, their names and the forward are as before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from olmo_core.exceptions import OLMoConfigurationError

from .triton_ops import define_op


def _input_gradient(gradients: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    """``sum_i g_i W_i``: ``g_i`` ``[..., M_i]``, ``W_i`` ``[M_i, D]``, result ``[..., D]``."""
    first, *rest = [g.flatten(0, -2) for g in gradients]
    out = first @ weights[0]
    for g, w in zip(rest, weights[1:], strict=True):
        out.addmm_(g, w)
    return out.view(*gradients[0].shape[:-1], weights[0].shape[1])


def _fake(gradients: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    return gradients[0].new_empty(*gradients[0].shape[:-1], weights[0].shape[1])


# Traced as a whole: as in-place products of a graph they would become products with a copy before each.
_op = define_op(
    "input_gradient", "(Tensor[] gradients, Tensor[] weights) -> Tensor", _input_gradient, _fake
)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.linear(x, w) for w in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *weights = ctx.saved_tensors
        contiguous = [g.contiguous() for g in gradients]
        d_x = _op(contiguous, weights)
        rows = x.flatten(0, -2)
        return d_x, *(g.flatten(0, -2).t() @ rows for g in contiguous)


class _Group:
    """What the first layer has computed for the others."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.waiting: list[torch.Tensor] = []


class JoinedLinear(nn.Linear):
    """One of the layers of a group. They are called one after the other, in their order and with one input: the first takes all products."""

    group: _Group
    position: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.group
        if self.position == 0:
            # The dtype that autocast has for a product; its own cast of a parameter is kept for all micro-batches, this one is not.
            dtype = torch.get_autocast_dtype(x.device.type)
            if not torch.is_autocast_enabled(x.device.type):
                dtype = x.dtype
            weights = [layer.weight.to(dtype) for layer in group.layers]
            group.waiting = list(_Products.apply(x.to(dtype), *weights))
        elif len(group.layers) - len(group.waiting) != self.position:
            raise RuntimeError(
                "linear layers that share an input are called one after the other, the first one first"
            )
        return group.waiting.pop(0)


def join(*layers: nn.Linear) -> None:
    """
    Let the layers of one input add up their gradients of it in their products.

    :param layers: In the order in which they are called.
    :raises OLMoConfigurationError: If one of them has a bias or is no plain linear layer, or they have inputs of several widths.
    """
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        raise OLMoConfigurationError(
            "joint_input_gradient needs plain linear layers without a bias"
        )
    if len({layer.in_features for layer in layers}) != 1:
        raise OLMoConfigurationError("joint_input_gradient needs layers of one input")
    group = _Group(layers)
    for position, layer in enumerate(layers):
        layer.__class__ = JoinedLinear
        layer.group, layer.position = group, position  # type: ignore[assignment]

"""
Linear layers of one input as one product.

Queries, keys and values have one input, and so have the two halves of a gated feed-forward. As products of their own each of them leaves a
gradient of that input, which are then added up: for a boundary that runs outside of the compiled sublayers 7 vectors of d a token
and block are read and written for that, 5.1 ms of a step of 424 at 400M (LDM, 65,536 tokens on an H200, ``profile-400m_h200_2026-12-01``; PreLN's compiled block adds
them up on the way into its norm). The parameters stay apart, so checkpoints do not change.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from olmo_core.exceptions import OLMoConfigurationError


class _Products:
    """What the first layer of a group has computed for the others."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        self.waiting: list[torch.Tensor] = []


class PackedLinear(nn.Linear):
    """One of the layers of a group. They are called one after the other, in their order and with one input: the first takes all products."""

    group: _Products
    position: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.group
        if self.position == 0:
            weights = [layer.weight for layer in group.layers]
            products = F.linear(x, torch.cat(weights)).split([w.shape[0] for w in weights], dim=-1)
            group.waiting = list(products)
        elif len(group.layers) - len(group.waiting) != self.position:
            raise RuntimeError(
                "linear layers with packed projections are called one after the other, the first one first"
            )
        return group.waiting.pop(0)


def pack(*layers: nn.Linear) -> None:
    """
    Make one product of the layers of one input; their forward is as before.

    :param layers: In the order in which they are called.
    :raises OLMoConfigurationError: If one of them has a bias or is no plain linear layer, or they have inputs of several widths.
    """
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        raise OLMoConfigurationError("packed_projections needs plain linear layers without a bias")
    if len({layer.in_features for layer in layers}) != 1:
        raise OLMoConfigurationError("packed_projections needs layers of one input")
    group = _Products(layers)
    for position, layer in enumerate(layers):
        layer.__class__ = PackedLinear
        layer.group, layer.position = group, position  # type: ignore[assignment]

"""PreLN: the plain residual stream, as a depth connection."""

from dataclasses import dataclass

import torch

from .connection import (
    BoundaryRecord,
    DepthBoundary,
    DepthConnectionConfig,
    State,
    rms_norm,
    upcast,
)


class PreLNBoundary(DepthBoundary):
    """``h += y; x = norm(h)``. The state is ``(h,)``, ``[B, T, D]``."""

    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        h = y if self.is_first else state[0] + y
        return (h,), rms_norm(h, norm_weight, self.eps, y.dtype), upcast(h), {}


@dataclass
class PreLNConfig(DepthConnectionConfig):
    """The baseline: the pre-norm residual stream of Llama."""

    def build(
        self, *, d_model: int, index: int, n_sublayers: int, eps: float, init_device: str = "cpu"
    ) -> PreLNBoundary:
        del init_device
        return PreLNBoundary(
            d_model=d_model, index=index, n_sublayers=n_sublayers, eps=eps, backend=self.backend
        )

    def num_flops_per_token(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        del index, n_sublayers
        return 2 * d_model

    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        n = len(records)
        ones = torch.ones(n, n, dtype=records[0].h.dtype, device=records[0].h.device).tril()
        return ones.expand(*records[0].h.shape[:-1], n, n)

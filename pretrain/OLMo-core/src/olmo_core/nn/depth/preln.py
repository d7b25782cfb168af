"""PreLN: the plain residual stream, as a depth connection."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import inference
from .connection import (
    BoundaryRecord,
    DepthBackend,
    DepthBoundary,
    DepthConnectionConfig,
    State,
    rms_norm,
    upcast,
)
from .triton_ops import triton_unavailable


class PreLNBoundary(DepthBoundary):
    """
    ``h += y; x = norm(h)``. The state is ``(h,)``, ``[B, T, D]``.

    Backend ``flexible`` is one Triton kernel for inference. With gradients, and inside ``torch.compile``, which fuses the
    reference as well as a kernel by hand could, the reference runs.
    """

    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        h = y if self.is_first else state[0] + y
        return (h,), rms_norm(h, norm_weight, self.eps, y.dtype), upcast(h), {}

    def backend_candidates(
        self, device: torch.device, dtype: torch.dtype
    ) -> dict[DepthBackend, Callable[[], str | None]]:
        del dtype

        def flexible() -> str | None:
            if torch.is_grad_enabled():
                return "it has no gradients"
            return triton_unavailable(device, interpreter=inference.INTERPRETER)

        return {DepthBackend.flexible: flexible, DepthBackend.reference: lambda: None}

    def run_backend(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        if self.selected_backend == DepthBackend.flexible:
            ops = inference.inference_ops(*((y,) if self.is_first else (y, state[0])))
            if ops is not None:
                h = None if self.is_first else state[0]
                h, x = ops.add_rms_norm(h, y, norm_weight, self.eps)
                return (h,), x
        return super().run_backend(state, y, norm_weight)


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
        del n_sublayers
        # One addition forward, twice that backward; the first boundary adds nothing.
        return 0 if index == 0 else 3 * d_model

    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        n = len(records)
        ones = torch.ones(n, n, dtype=records[0].h.dtype, device=records[0].h.device).tril()
        return ones.expand(*records[0].h.shape[:-1], n, n)

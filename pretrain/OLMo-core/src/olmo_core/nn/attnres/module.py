"""The boundary of Attention Residuals (full and block) as a module."""

from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from olmo_core.nn.depth.connection import DepthBoundary, State, rms_norm, upcast

from .backends.reference import attnres_read

if TYPE_CHECKING:
    from .config import AttnResConfig


class AttnResBoundary(DepthBoundary):
    """
    A softmax mix over the earlier outputs (full) or over block sums (block).

    The state is ``(b_0, .., b_m)`` or ``(b_0, .., b_m, partial)``, each ``[B, T, D]``: the embedding, the sums of the
    complete blocks, and the running sum of the open block. With one sublayer a block these are all earlier outputs.
    """

    def __init__(
        self,
        config: "AttnResConfig",
        *,
        d_model: int,
        index: int,
        n_sublayers: int,
        eps: float,
        init_device: str = "cpu",
    ):
        super().__init__(
            d_model=d_model, index=index, n_sublayers=n_sublayers, eps=eps, backend=config.backend
        )
        # The open block's partial sum is in the state unless the boundary before closed a block.
        self.has_partial = index > 0 and (index - 1) % config.block_size != 0
        self.query: nn.Parameter | None = None
        self.gain: nn.Parameter | None = None
        if not self.is_first:
            # FP32: the query starts at zero and moves by less than BF16 resolves beside the gain of 1.
            self.query = nn.Parameter(torch.empty(d_model, dtype=torch.float32, device=init_device))
            self.gain = nn.Parameter(torch.empty(d_model, dtype=torch.float32, device=init_device))
            if init_device != "meta":
                self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.query is not None and self.gain is not None:
            self.query.zero_()  # uniform weights at the start: the paper needs it for stability
            self.gain.fill_(1.0)

    def sources(self, state: State, y: torch.Tensor) -> State:
        """The tensors to mix, each ``[B, T, D]``, after ``y`` has joined the open block. Also the new state."""
        if self.has_partial:
            return (*state[:-1], state[-1] + y)
        return (*state, y)

    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        sources = self.sources(state, y)
        if self.query is None or self.gain is None:
            # One source: its weight is 1.
            x = rms_norm(y, norm_weight, self.eps, y.dtype)
            return sources, x, upcast(y), {"weights": upcast(y).new_ones(*y.shape[:-1], 1)}
        h, weights = attnres_read(sources, self.query, self.gain, self.eps)
        return sources, rms_norm(h, norm_weight, self.eps, y.dtype), h, {"weights": weights}

"""The boundary of Attention Residuals (full and block) as a module."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from olmo_core.nn.depth import connection
from olmo_core.nn.depth.connection import DepthBackend, DepthBoundary, State, rms_norm, upcast

from .backends import fla, flexible
from .backends.reference import attnres_read

if TYPE_CHECKING:
    from .config import AttnResConfig


class AttnResBoundary(DepthBoundary):
    """
    A softmax mix over the earlier outputs (full) or over block sums (block).

    The state is ``(b_0, .., b_m)`` or ``(b_0, .., b_m, partial)``, each ``[B, T, D]``: the embedding, the sums of the
    complete blocks, and the running sum of the open block. With one sublayer a block these are all earlier outputs.

    Under the ``flexible`` backend they carry no gradient, and before them stand the *channels*, which carry those of all
    of them: see :mod:`.backends.flexible.ops`.
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
        # Of the last boundary: all boundaries of a model must take the same backend, since the state differs.
        self._most_sources = config.num_sources(n_sublayers)
        self._n_state = config.num_sources(index - 1) if index else 0
        # What ops.Form says. Groups of boundaries share one write of the sources' gradients; the last boundary is one of
        # its own. Plain numbers: they differ between blocks, but so does the length of the state.
        start = index - index % flexible.GROUP
        end = min(start + flexible.GROUP, n_sublayers) - 1
        self._form: tuple[int, int, int, bool, bool] = (
            (0, 0, 0, True, True)
            if self.is_last
            else (
                config.num_sources(end + 1) - 1,
                end - index,
                config.num_sources(end),
                index % config.block_size == 0,
                index == start,
            )
        )
        self.query: nn.Parameter | None
        self.gain: nn.Parameter | None
        for name in ("query", "gain"):
            self.register_parameter(name, None)
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

    def backend_candidates(
        self, device: torch.device, dtype: torch.dtype
    ) -> dict[DepthBackend, Callable[[], str | None]]:
        return {
            DepthBackend.flexible: lambda: flexible.unavailable(
                device,
                dtype,
                self.d_model,
                self._most_sources,
                interpreter=self.backend == DepthBackend.flexible,
            ),
            DepthBackend.fla: lambda: fla.unavailable(device, dtype, self.d_model),
            DepthBackend.reference: lambda: None,
        }

    def forward(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        # The kernels do not look at autocast, and leaving and restoring it costs the host as much as a launch.
        if self.selected_backend == DepthBackend.flexible and connection._RECORDER is None:
            return self.run_backend(state, y, norm_weight)
        return super().forward(state, y, norm_weight)

    def run_backend(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        if self.selected_backend == DepthBackend.fla and self.query is not None:
            assert self.gain is not None
            sources = self.sources(state, y)
            return sources, fla.attnres_read_norm(
                sources, self.query, self.gain, norm_weight, self.eps
            )
        if self.selected_backend != DepthBackend.flexible:
            return super().run_backend(state, y, norm_weight)
        from .backends.flexible import ops

        n_channels = len(state) - self._n_state
        channels, state = state[:n_channels], state[n_channels:]
        partial = state[-1] if self.has_partial else None
        committed = state[:-1] if self.has_partial else state
        form = self._form
        if not channels and torch.is_grad_enabled() and any(v.requires_grad for v in state):
            # A state that was not made by these boundaries: its tensors have gradients of their own.
            channels = ops.enter(committed, partial)
            form = (*form[:-1], True)
            committed = tuple(v.detach() for v in committed)
            partial = None if partial is None else partial.detach()
        x, new_partial, new_channels = ops.boundary(
            y,
            partial,
            committed,
            channels,
            # Not by attribute: nn.Module's look-up is a slow one.
            self._parameters["query"],
            self._parameters["gain"],
            norm_weight,
            self.eps,
            form,
        )
        last = y.detach() if new_partial is None else new_partial
        return (*new_channels, *committed, last), x

"""The boundary of mHC as a module: post-mix of the last sublayer, controllers and pre-mix of the next one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from olmo_core.nn.depth import connection
from olmo_core.nn.depth.connection import (
    DepthBackend,
    DepthBoundary,
    State,
    rms_norm,
    rms_normalize,
    upcast,
)
from olmo_core.nn.transformer.init import _apply_init

from .backends import fast, flexible, tile_kernels
from .backends.flexible.options import BoundaryOptions
from .backends.reference import mhc_collapse, mhc_controls, mhc_post_mix

if TYPE_CHECKING:
    from .config import HyperConnectionsConfig

KERNELS = (DepthBackend.fast, DepthBackend.flexible)
"""The backends of our own kernels: they do not look at autocast, and share their inference and their buffers."""


class HyperConnectionsBoundary(DepthBoundary):
    """
    The state is ``(X, H_post, H_res)``: the streams ``[B, T, N, D]`` in the model's dtype and, FP32, the maps that the
    last boundary computed and this one applies to the sublayer's output: ``[B, T, N]`` and ``[B, T, N, N]`` (absent if it is
    the identity). The last boundary collapses the streams for the LM head.
    """

    def __init__(
        self,
        config: "HyperConnectionsConfig",
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
        self.config = config
        self._home_stream = index % config.n_streams
        n = config.n_streams
        self.phi: nn.Parameter | None = None
        self.alpha: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.mixes_streams = config.residual_map == "sinkhorn"
        self.options_code = BoundaryOptions.of(config, self.is_first, self.is_last).code
        if self.is_last and config.collapse == "sum":
            return
        if self.is_last:
            columns, scales = n, 1
        elif self.mixes_streams:
            columns, scales = n * n + 2 * n, 3
        else:
            columns, scales = 2 * n, 2

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=init_device))

        self.phi = parameter(n * d_model, columns)
        self.alpha = parameter(scales)
        self.bias = parameter(columns)
        if init_device != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.phi is None or self.alpha is None or self.bias is None:
            return
        n = self.config.n_streams
        self.phi.zero_()
        self.alpha.fill_(self.config.alpha_init)
        start = torch.zeros(self.bias.shape)
        if not self.is_last:
            # Every stream is the home of each n-th sublayer, and keeps most of itself: H_pre = 0.95 at home and 0.05
            # elsewhere, H_post = 1, H_res = 0.993 on the diagonal. Uniform biases would keep the streams identical
            # for ever if phi were zero.
            start[:n] = -3.0
            start[self._home_stream] = 3.0
            if self.mixes_streams:
                start[2 * n :] = (6.0 * torch.eye(n) - 3.0).flatten()
        _apply_init(lambda t: t.copy_(start), self.bias)

    def init_weights(self, generator: torch.Generator) -> None:
        if self.phi is not None:
            _apply_init(
                nn.init.normal_, self.phi, std=self.config.phi_init_std, generator=generator
            )

    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        config = self.config
        if self.is_first:
            streams = y[..., None, :].expand(*y.shape[:-1], config.n_streams, self.d_model)
        else:
            streams, post, *rest = state
            res = rest[0] if self.mixes_streams else None
            # Rounded to the model's dtype once a sublayer, as the residual stream of PreLN is.
            streams = mhc_post_mix(streams, y, post, res).to(y.dtype)

        if self.is_last:
            if self.phi is None or self.alpha is None or self.bias is None:
                weights = upcast(y).new_ones(*y.shape[:-1], config.n_streams)
            else:
                z = rms_normalize(upcast(streams).flatten(-2), self.eps) @ upcast(self.phi)
                weights = torch.sigmoid(upcast(self.alpha) * z + upcast(self.bias))
            h = mhc_collapse(streams, weights)
            x = rms_norm(h, norm_weight, self.eps, y.dtype)
            return (streams,), x, h, {"pre": weights}

        assert self.phi is not None and self.alpha is not None and self.bias is not None
        controls = mhc_controls(
            streams, self.phi, self.alpha, self.bias, self.eps, config.sinkhorn_iterations
        )
        h = mhc_collapse(streams, controls.pre)
        x = rms_norm(h, norm_weight, self.eps, y.dtype)
        coefficients = {name: c for name, c in controls._asdict().items() if c is not None}
        state = (streams, controls.post)
        if controls.res is not None:
            state = (*state, controls.res)
        return state, x, h, coefficients

    def backend_candidates(
        self, device: torch.device, dtype: torch.dtype
    ) -> dict[DepthBackend, Callable[[], str | None]]:
        return {
            DepthBackend.fast: lambda: fast.unavailable(
                device,
                dtype,
                self.d_model,
                self.config,
                by_name=self.backend == DepthBackend.fast,
            ),
            DepthBackend.flexible: lambda: flexible.unavailable(
                device,
                dtype,
                self.d_model,
                self.config.n_streams,
                interpreter=self.backend == DepthBackend.flexible,
            ),
            DepthBackend.tile_kernels: lambda: tile_kernels.unavailable(
                device,
                dtype,
                self.config,
                self.d_model,
                by_name=self.backend == DepthBackend.tile_kernels,
            ),
            DepthBackend.reference: lambda: None,
        }

    def forward(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        # The kernels do not look at autocast, and leaving and restoring it costs the host as much as a launch.
        if self.selected_backend in KERNELS and connection._RECORDER is None:
            return self.run_backend(state, y, norm_weight)
        return super().forward(state, y, norm_weight)

    def run_backend(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        run: Callable
        if self.selected_backend in KERNELS:
            # As few imports as can be: also one of a module that is loaded costs the host time.
            if self.selected_backend == DepthBackend.fast:
                from .backends.fast.ops import boundary as run
            else:
                from .backends.flexible.ops import boundary as run
            if not torch.is_grad_enabled():
                from .backends.flexible import inference_ops

                if inference_ops.takes(y):
                    run = inference_ops.boundary
        elif self.selected_backend == DepthBackend.tile_kernels:
            from .backends.tile_kernels import boundary as run
        else:
            return super().run_backend(state, y, norm_weight)
        streams, post, res = (*state, None, None, None)[:3]
        # Not by attribute: nn.Module's look-up of each costs most of a microsecond.
        phi, alpha, bias = map(self._parameters.get, ("phi", "alpha", "bias"))
        streams, x, post, res = run(
            streams, y, post, res, phi, alpha, bias, norm_weight, self.eps, self.options_code
        )
        if self.is_last:
            return (streams,), x
        return ((streams, post, res) if self.mixes_streams else (streams, post)), x

"""The boundary of mHC as a module: post-mix of the last sublayer, controllers and pre-mix of the next one."""

from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from olmo_core.nn.depth.connection import DepthBoundary, State, rms_norm, rms_normalize, upcast
from olmo_core.nn.transformer.init import _apply_init

from .backends.reference import mhc_collapse, mhc_controls, mhc_post_mix

if TYPE_CHECKING:
    from .config import HyperConnectionsConfig


class HyperConnectionsBoundary(DepthBoundary):
    """
    The state is ``(X, H_post, H_res)``: the streams ``[B, T, N, D]`` in the model's dtype and, FP32, the maps that the
    last boundary computed and this one applies to the sublayer's output: ``[B, T, N]`` and ``[B, T, N, N]``. The last
    boundary collapses the streams for the LM head.
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
        if self.is_last and config.collapse == "sum":
            return
        columns, scales = (n, 1) if self.is_last else (n * n + 2 * n, 3)

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
            streams, post, res = state
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
        return (streams, controls.post, controls.res), x, h, controls._asdict()

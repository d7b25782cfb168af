"""The boundary of Linear Depth Memory as a module: parameters, initialisation, state and choice of backend."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth import connection
from olmo_core.nn.depth.connection import DepthBackend, DepthBoundary, State
from olmo_core.nn.transformer.init import _apply_init

from .backends import fast, fast_inference, flexible
from .backends.fast import launch_table
from .backends.fast_inference import packing
from .backends.flexible.options import BoundaryOptions
from .backends.reference import LDMParameters, activated_key, ldm_boundary, ldm_first_boundary

if TYPE_CHECKING:
    from .config import LDMConfig

BLOCK_START = {"two_sigmoid": (3.0, -3.0), "softmax": (1.5, -1.5), "none": (2.0, 0.0)}
"""Key biases of a boundary's own and of the other slots at the start, unless ``key_start=uniform``."""
KERNELS = (DepthBackend.fast, DepthBackend.fast_inference, DepthBackend.flexible)
"""The backends with kernels of their own; the fast ones have the flexible one's boundary 0."""
FORGET_RATES = {"narrow": (1e-4, 1e-2), "wide": (1e-3, 1.0)}
"""The first and last forget rate ``softplus(b)`` of the slots at the start, log-spaced, by ``forget_start``."""
SCALAR_FORGET_RATE = 1e-3
"""The forget rate at the start of a scalar gate, and of a memory with one slot."""


class LDMBoundary(DepthBoundary):
    """
    Forget, write, query, read, norm. The state is ``(S, *rest)`` with ``S`` ``[B, T, K, D]`` and in ``rest``, in this
    order and each ``[B, T, D]``: the sublayer's input (``key_source=input``), the residual stream
    (``residual=kept``), and attention's output that waits for the block's end (``write_every=block``). In a window of the
    ``fast`` backend, and of ``fast_inference`` in prefill, it is as :func:`.backends.fast.ops.window_boundary` says.
    """

    def __init__(
        self,
        config: "LDMConfig",
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
        self._n_sublayers = n_sublayers
        self.writes = index == 0 or config.write_every == "sublayer" or index % 2 == 0
        self.keeps_input = config.key_source == "input"
        self.keeps_residual = config.residual == "kept"
        # At a block's end the state holds attention's output, put there by the boundary in the middle.
        self.has_pending = config.write_every == "block" and index > 0 and index % 2 == 0

        def parameter(*shape: int) -> nn.Parameter:
            # FP32 whatever the model's dtype: forget rates of 1e-4 vanish beside 1 in BF16.
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=init_device))

        K, d = config.d_k, d_model
        gates = 1 if config.forget_granularity == "scalar" else K
        for name in ("key_0", *LDMParameters._fields):
            self.register_parameter(name, None)
        if self.is_first:
            self.key_0 = parameter(K)
        else:
            self.b_query = parameter(K)
            if config.query_source != "static":
                self.w_query = parameter(d, K)
            if self.writes:
                self.b_key = parameter(K)
                if config.key_source != "static":
                    self.w_key = parameter(d, K)
                if config.forget != "none":
                    self.b_forget = parameter(gates)
                if config.forget == "dynamic":
                    self.w_forget = parameter(d, gates)
                if config.update == "delta":
                    self.w_beta = parameter(d)
                    self.b_beta = parameter(1)
        self.window = launch_table.window(d, K, config.window)
        self.stores8 = self.window > 1 and config.memory_dtype == "float8"
        # The model's last memory has no gradient, so its window's backward is that of single boundaries.
        ends = index - 1 - (index - 1) % self.window + self.window
        self.gathers = self.window > 1 and ends < n_sublayers and launch_table.gathers(d, K)
        self.options_code = BoundaryOptions.of(config, self.writes).code
        self.infers_fast = False
        """Whether the fast_inference backend runs where there are no gradients."""
        self.prefill_window = 1
        """The window of the fast_inference backend's prefill; 1 stores the memory at every boundary."""
        if init_device != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        K = self.config.d_k
        starts = {
            "key_0": 1.0,
            "b_key": 1.0 if self.config.key_activation == "none" else 0.0,
            "b_query": {
                "softmax": 0.0,
                "sigmoid": 4.0 if K == 1 else -math.log(K - 1),
                "none": 1.0 / K,
            }[self.config.query_activation],
            "b_beta": -4.0,
        }
        for name, parameter in self.named_parameters(recurse=False):
            if name != "b_forget":
                parameter.fill_(starts.get(name, 0.0))
        if self.config.key_start != "uniform" and K > 1:
            apart = self.config.key_start == "embedding_block"
            own_slot = max(self._index - 1, 0) * (K - apart) // self._n_sublayers
            own_slot += apart and not self.is_first
            own, other = BLOCK_START[self.config.key_activation]
            bias = torch.full((K,), other)
            bias[own_slot] = own
            if self.is_first:
                # What a sublayer writes at the start: so the slots' sum has all sources with one weight, as the residual stream.
                bias = activated_key(bias, self.config)
            key = self._parameters.get("key_0" if self.is_first else "b_key")
            if key is not None:
                _apply_init(lambda t: t.copy_(bias), key)
        if self.b_forget is not None:
            # Element by element, so that a shard of the parameter gets its own part.
            slots = 1 if self.config.forget_granularity == "scalar" else K
            if slots == 1:
                rates = torch.full((1,), SCALAR_FORGET_RATE, dtype=torch.float64)
            else:
                first, last = (math.log10(r) for r in FORGET_RATES[self.config.forget_start])
                rates = torch.logspace(first, last, slots, dtype=torch.float64)
            # softplus(b) = rate
            start = torch.log(torch.expm1(rates)).to(torch.float32)
            _apply_init(lambda t: t.copy_(start), self.b_forget)

    def init_weights(self, generator: torch.Generator) -> None:
        std = 0.1 / math.sqrt(self.d_model)
        for w in (self.w_key, self.w_query):
            if w is not None:
                _apply_init(nn.init.normal_, w, std=std, generator=generator)

    @property
    def ldm_parameters(self) -> LDMParameters:
        # Not by attribute: eight of nn.Module's look-ups cost 5 us.
        return LDMParameters(*map(self._parameters.get, LDMParameters._fields))  # type: ignore[arg-type]

    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        config = self.config
        keeps_input = self.keeps_input
        keeps_residual = self.keeps_residual
        if self.is_first:
            assert self.key_0 is not None
            out = ldm_first_boundary(y, self.key_0, norm_weight, self.eps)
            rest = [y] if keeps_residual else []
        else:
            memory, *carried = state
            key_input = carried.pop(0) if keeps_input else None
            residual = carried.pop(0) if keeps_residual else None
            if self.has_pending:
                y = carried.pop(0) + y
            if self.writes and residual is not None:
                residual = residual + y
            rest = [residual] if residual is not None else []
            if not self.writes:
                rest.append(y)
                residual = y if residual is None else residual + y
            out = ldm_boundary(
                memory,
                y,
                self.ldm_parameters,
                config,
                norm_weight,
                self.eps,
                key_input=key_input,
                residual=residual,
                write=self.writes,
            )
        if keeps_input:
            rest.insert(0, out.x)
        memory = out.memory if self.writes else state[0]
        return (memory, *rest), out.x, out.h, out.coefficients

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
                self.config.d_k,
                interpreter=self.backend == DepthBackend.flexible,
            ),
            DepthBackend.reference: lambda: None,
            # Last: auto takes it beside one that can train; see select_backend.
            DepthBackend.fast_inference: lambda: self._inference_unavailable(device, dtype),
        }

    def _inference_unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        by_name = self.backend == DepthBackend.fast_inference
        return fast_inference.unavailable(device, dtype, self.d_model, self.config, by_name=by_name)

    def select_backend(self, device: torch.device, dtype: torch.dtype) -> DepthBackend:
        selected = super().select_backend(device, dtype)
        if self.config.memory_dtype == "float8" and not (
            self.stores8 and selected == DepthBackend.fast
        ):
            connection.log_once(
                f"{type(self).__name__}: backend '{selected}' does not store memories in FP8 here, so memory_dtype=float8 changes nothing"
            )
        self.infers_fast = selected == DepthBackend.fast_inference
        if self.backend == DepthBackend.auto and selected in KERNELS:
            reason = self._inference_unavailable(device, dtype)
            self.infers_fast = reason is None
            name = f"{type(self).__name__} in evaluation: "
            connection.log_once(
                f"{name}backend 'fast_inference'"
                if reason is None
                else f"{name}backend '{selected}' (not 'fast_inference': {reason})"
            )
        if self.infers_fast:
            by_name = self.backend == DepthBackend.fast_inference
            self.prefill_window = fast_inference.prefill_window(
                device, self.d_model, self.config, self.window, by_name=by_name
            )
            if by_name and self.prefill_window != self.window:
                connection.log_once(
                    f"{type(self).__name__}: prefill without windows (no compiled kernels of a window of {self.window} were found)"
                )
        return selected

    @property
    def inference_backend(self) -> DepthBackend | None:
        return DepthBackend.fast_inference if self.infers_fast else self.selected_backend

    def train(self, mode: bool = True) -> "LDMBoundary":
        # Weights loaded through .data, or gathered by FSDP, have the version of those before.
        packing.forget()
        return super().train(mode)

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
        if self.selected_backend not in KERNELS:
            return super().run_backend(state, y, norm_weight)
        by_name = self.selected_backend == DepthBackend.fast_inference
        if self.infers_fast and not torch.is_grad_enabled() and (by_name or not self.training):
            return self._infer(state, y, norm_weight)
        if by_name:
            raise OLMoConfigurationError(
                "LDM's backend 'fast_inference' has no gradients: call the model under torch.no_grad(), or choose 'auto'"
            )
        if self.selected_backend == DepthBackend.fast and not self.is_first:
            from .backends.fast import ops as fast_ops

            if self.window > 1:
                return fast_ops.window_boundary(
                    state,
                    y,
                    self.ldm_parameters,
                    self.options_code,
                    norm_weight,
                    self.eps,
                    self.window,
                    self.stores8,
                    self.gathers,
                )
            new_memory, x = fast_ops.boundary(
                state[0], y, self.ldm_parameters, self.options_code, norm_weight, self.eps
            )
            return (new_memory,), x
        from .backends.flexible import ops

        keeps_input = self.keeps_input
        keeps_residual = self.keeps_residual
        if self.is_first:
            assert self.key_0 is not None
            memory, x = ops.first_boundary(y, self.key_0, norm_weight, self.eps)
            rest = [y] if keeps_residual else []
        else:
            memory, *carried = state
            key_input = carried.pop(0) if keeps_input else None
            residual = carried.pop(0) if keeps_residual else None
            new_memory, x, new_residual = ops.boundary(
                memory,
                y,
                self.ldm_parameters,
                self.options_code,
                norm_weight,
                self.eps,
                key_input=key_input if self.writes else None,
                residual=residual,
                pending=carried.pop(0) if self.has_pending else None,
            )
            if self.writes:
                memory = new_memory
            if residual is not None:
                residual = new_residual if self.writes else residual
            rest = [residual] if residual is not None else []
            if not self.writes:
                rest.append(y)
        if keeps_input:
            rest.insert(0, x)
        return (memory, *rest), x

    def _infer(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        from .backends.fast_inference import ops

        if self.is_first:
            assert self.key_0 is not None
            memory, x = ops.first_boundary(y, self.key_0, norm_weight, self.eps)
        elif self.prefill_window > 1:
            return ops.window_boundary(
                state,
                y,
                self.ldm_parameters,
                self.options_code,
                norm_weight,
                self.eps,
                self.prefill_window,
                in_place=self.owns_state,
            )
        else:
            memory, x = ops.boundary(
                state[0],
                y,
                self.ldm_parameters,
                self.options_code,
                norm_weight,
                self.eps,
                in_place=self.owns_state,
            )
        return (memory,), x

"""
The depth-connection protocol: what carries the output of one sublayer to the inputs of later ones.

Dimension letters used in all depth connections: ``B`` batch, ``T`` sequence, ``M = B*T`` tokens, ``D`` model
width, ``K`` memory slots, ``N`` sources or streams, ``L`` sublayers (two for each block).

A model of ``L`` sublayers has ``L + 1`` boundaries. Boundary ``i`` takes the state that travels down the depth and
``y``, the output of sublayer ``i - 1`` (the embedding for ``i = 0``), and returns the new state and ``x``, the
normalised input of sublayer ``i`` (of the LM head for ``i = L``)::

    boundary(state, y, norm_weight) -> (state, x)

The state is a plain tuple of tensors, each with leading dimensions ``[B, T]``: FSDP2 finds tensors in tuples, not in
objects of our own, and nothing in it may be changed in place (but see :attr:`DepthBoundary.owns_state`). A tensor of it
whose last dimension is ``D`` has the dtype of ``y``; smaller ones may be FP32.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
import torch.nn as nn

from olmo_core.config import StrEnum
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.config import ModuleConfig

log = logging.getLogger(__name__)

State = tuple[torch.Tensor, ...]


class DepthBackend(StrEnum):
    """Which implementation runs a boundary. A method supports some of these; see :func:`resolve_backend`."""

    auto = "auto"
    """The fastest one that can run here; the choice is logged once with the reason."""
    reference = "reference"
    """Readable PyTorch with FP32 arithmetic; any device."""
    flexible = "flexible"
    """Triton kernels with every option; recent CUDA GPUs (or the Triton interpreter)."""
    fast = "fast"
    """CuTe DSL training kernels; NVIDIA Hopper and Blackwell."""
    fast_inference = "fast_inference"
    """CuTe DSL prefill and decode kernels; NVIDIA Hopper and Blackwell."""
    fla = "fla"
    """flash-linear-attention's AttnRes kernel (fla-core)."""
    tile_kernels = "tile_kernels"
    """DeepSeek's mHC kernels (tile-kernels); needs nvcc."""


@dataclass
class BoundaryRecord:
    """What one boundary did in a recorded forward pass; see :func:`record_boundaries`."""

    index: int
    """The boundary's number, 0 .. L."""
    h: torch.Tensor
    """The mixture before the norm, ``[B, T, D]``, FP32 (the norm of AttnRes's mean shrinks with the sources)."""
    coefficients: dict[str, torch.Tensor] = field(default_factory=dict)
    """The method's mixing coefficients, each ``[B, T, ...]``, FP32."""


_RECORDER: list[BoundaryRecord] | None = None


@contextmanager
def record_boundaries() -> Iterator[list[BoundaryRecord]]:
    """
    Run every boundary through its reference and collect a :class:`BoundaryRecord` from each.

    Compiled modules run eagerly in this context, so recording never causes a recompilation.
    """
    global _RECORDER
    outer, _RECORDER = _RECORDER, []
    try:
        with torch.compiler.set_stance("force_eager"):
            yield _RECORDER
    finally:
        _RECORDER = outer


def is_recording() -> bool:
    """Whether a :func:`record_boundaries` context is open."""
    return _RECORDER is not None


def upcast(t: torch.Tensor) -> torch.Tensor:
    """Promote to the dtype of the reference's arithmetic: FP32, or FP64 for FP64 input."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def rms_normalize(v: torch.Tensor, eps: float) -> torch.Tensor:
    """``v / sqrt(mean(v^2) + eps)`` over the last dimension, without a gain, in the dtype of ``v``."""
    return v * torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + eps)


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """
    RMSNorm with a gain: arithmetic in FP32 (FP64 for FP64 input), one rounding to ``dtype`` at the end.

    :param h: ``[..., D]``.
    :param weight: The gain, ``[D]``.
    """
    return (rms_normalize(upcast(h), eps) * upcast(weight)).to(dtype)


class DepthBoundary(nn.Module):
    """
    One boundary of a depth connection. Subclasses write :meth:`reference`, and :meth:`run_backend` if they have
    another implementation.

    :param d_model: The model width ``D``.
    :param index: The boundary's number, 0 .. ``n_sublayers``.
    :param n_sublayers: The number of sublayers ``L`` of the model.
    :param eps: The epsilon of every RMS in the boundary.
    :param backend: The requested backend.
    """

    def __init__(
        self, *, d_model: int, index: int, n_sublayers: int, eps: float, backend: DepthBackend
    ):
        super().__init__()
        self.d_model = d_model
        self.eps = eps
        self.backend = DepthBackend(backend)
        self.selected_backend: DepthBackend | None = None
        # forward() may read booleans, never the index: an integer that differs between blocks would compile every
        # block anew, and beyond torch's recompile limit of 8 the rest would run eagerly.
        self.is_first = index == 0
        self.is_last = index == n_sublayers
        self._index = index
        self.owns_state = False
        """
        Whether nobody looks at a state after the boundary that took it, as in a model: without gradients it may then be
        written over.
        """

    @abstractmethod
    def reference(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """
        The boundary in readable PyTorch with FP32 arithmetic.

        :returns: The new state, ``x`` ``[B, T, D]`` in the dtype of ``y``, the mixture ``h`` before the norm
            (FP32) and the mixing coefficients (FP32).
        """
        raise NotImplementedError

    def run_backend(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        """Run :attr:`selected_backend`."""
        state, x, _, _ = self.reference(state, y, norm_weight)
        return state, x

    def select_backend(self, device: torch.device, dtype: torch.dtype) -> DepthBackend:
        """
        Choose the implementation for this device and dtype and remember it.

        :raises OLMoConfigurationError: If the requested backend cannot run; the message says why.
        """
        self.selected_backend = resolve_backend(
            self.backend, type(self).__name__, self.backend_candidates(device, dtype)
        )
        return self.selected_backend

    @property
    def inference_backend(self) -> DepthBackend | None:
        """The implementation that runs in evaluation without gradients; mostly :attr:`selected_backend`."""
        return self.selected_backend

    def backend_candidates(
        self, device: torch.device, dtype: torch.dtype
    ) -> "dict[DepthBackend, Callable[[], str | None]]":
        """
        The backends of this method, best first. Each value returns ``None`` if the backend can run, otherwise the
        reason why not.
        """
        del device, dtype
        return {DepthBackend.reference: lambda: None}

    def forward(
        self, state: State, y: torch.Tensor, norm_weight: torch.Tensor
    ) -> tuple[State, torch.Tensor]:
        """
        :param state: The state of the boundary before; empty for boundary 0.
        :param y: The output of the sublayer before (the embedding for boundary 0), ``[B, T, D]``.
        :param norm_weight: The gain of the norm that follows, ``[D]``.

        :returns: The new state and ``x``, ``[B, T, D]``, in the dtype of ``y``.
        """
        # The coefficients need FP32 whatever autocast says: in BF16 mHC's Sinkhorn is off by 4e-3 on both axes.
        with torch.autocast(device_type=y.device.type, enabled=False):
            if _RECORDER is not None:
                state, x, h, coefficients = self.reference(state, y, norm_weight)
                # Copies: a static coefficient is the parameter itself, whose memory FSDP frees after the forward pass
                # (a segmentation fault in the statistics of key_0, seen with two gloo processes).
                copies = {name: c.clone() for name, c in coefficients.items()}
                _RECORDER.append(BoundaryRecord(self._index, h, copies))
                return state, x
            if self.selected_backend is None:
                self.select_backend(y.device, y.dtype)
            return self.run_backend(state, y, norm_weight)

    def reset_parameters(self) -> None:
        """Set every parameter to its deterministic start value (random ones to zero)."""

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the random start values, after :meth:`reset_parameters`, in a way that sharding does not change."""

    def extra_repr(self) -> str:
        return f"index={self._index}, backend={self.backend}"


_LOGGED: set[str] = set()


def log_once(message: str) -> None:
    if message not in _LOGGED:
        _LOGGED.add(message)
        log.info(message)


def resolve_backend(
    requested: DepthBackend,
    owner: str,
    candidates: "dict[DepthBackend, Callable[[], str | None]]",
) -> DepthBackend:
    """
    Pick the backend: an explicit one that cannot run raises and says why; ``auto`` takes the first of
    ``candidates`` that can run and logs the choice and the refusals once.

    :raises OLMoConfigurationError: If the requested backend is not one of the method's or cannot run here.
    """
    if requested != DepthBackend.auto:
        check = candidates.get(requested)
        reason = f"it has only {', '.join(map(str, candidates))}" if check is None else check()
        if reason is not None:
            raise OLMoConfigurationError(
                f"backend '{requested}' cannot run for {owner}: {reason}; choose another one or 'auto'"
            )
        return requested
    refusals: list[str] = []
    for backend, check in candidates.items():
        reason = check()
        if reason is None:
            log_once(
                f"{owner}: backend '{backend}'" + (f" ({'; '.join(refusals)})" if refusals else "")
            )
            return backend
        refusals.append(f"not '{backend}': {reason}")
    raise OLMoConfigurationError(f"no backend can run for {owner}: {'; '.join(refusals)}")


@dataclass
class DepthConnectionConfig(ModuleConfig):
    """
    Base of the configs of all depth connections. A subclass is a dataclass of simple fields, so that it round-trips
    through ``config.json``; add a method by writing one with a :class:`DepthBoundary`.
    """

    keeps_fp32: ClassVar[bool] = False
    """Whether the boundary's parameters stay FP32 when the model is trained in BF16."""

    state_grows: ClassVar[bool] = False
    """Whether the number of tensors in the state grows with the depth: each block would then be a graph of its own."""

    exact_map: ClassVar[bool] = True
    """Whether :meth:`retrieval_map` gives what is read; ``False`` where weights differ between channels."""

    backend: DepthBackend = DepthBackend.auto

    def __post_init__(self) -> None:
        # Code that sets an option by its name goes past the check of Config.from_dict, and a misspelt one would act as
        # the last branch of an if.
        for option in fields(self):
            if isinstance(option.default, StrEnum):
                values, value = type(option.default), getattr(self, option.name)
                if value not in list(values):
                    raise OLMoConfigurationError(
                        f"{type(self).__name__}: {option.name} must be one of {', '.join(values)}, got '{value}'"
                    )
                setattr(self, option.name, values(value))

    @abstractmethod
    def build(
        self,
        *,
        d_model: int,
        index: int,
        n_sublayers: int,
        eps: float,
        init_device: str = "cpu",
    ) -> DepthBoundary:
        """Build boundary ``index`` of a model with ``n_sublayers`` sublayers."""
        raise NotImplementedError

    def num_params(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        """The number of parameters of boundary ``index``, without the norm's gain."""
        boundary = self.build(
            d_model=d_model, index=index, n_sublayers=n_sublayers, eps=1e-6, init_device="meta"
        )
        return sum(p.numel() for p in boundary.parameters())

    @abstractmethod
    def num_flops_per_token(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        """
        Forward and backward FLOPs of boundary ``index`` for one token (a multiply-add counts as two): three times the
        forward pass, of which its matrix products count (``6 * num_params`` if every parameter is a weight of one) and what
        it does to every element of the state, the slots, the streams or the sources. The norm before ``x`` does not count.
        """
        raise NotImplementedError

    def no_weight_decay(self) -> list[str]:
        """Names (globs within one boundary) of the parameters that take no weight decay."""
        return []

    @abstractmethod
    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        """
        How much of each earlier output every reader receives: ``M[l, i]`` with ``h_l = sum_i M[l, i] y_i``. The weights may
        differ between tokens, but a map has one for all channels: a method whose weights differ between channels returns
        their means over the channels, with which the equation does not hold, and sets :attr:`exact_map` to ``False``.

        :param records: One record for every boundary, in order.
        :returns: ``[B, T, L + 1, L + 1]``, FP32, lower triangular in the last two dimensions (reader, source).
        """
        raise NotImplementedError

    def statistics(self, record: BoundaryRecord) -> dict[str, torch.Tensor]:
        """Scalars that describe one boundary in a recorded forward pass, for the training metrics."""
        return {"hidden rms": record.h.square().mean(dim=-1).sqrt().mean()}

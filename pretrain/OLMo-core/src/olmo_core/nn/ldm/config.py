"""Configuration of Linear Depth Memory: every option, its values and what it means."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from olmo_core.config import StrEnum
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import BoundaryRecord, DepthConnectionConfig

from .module import LDMBoundary


class KeyActivation(StrEnum):
    two_sigmoid = "two_sigmoid"
    """``k = 2 sigmoid(z)``; 1 for a bias of 0."""
    softmax = "softmax"
    """``k = K softmax(z)``; 1 for equal biases."""
    none = "none"
    """``k = z``; the bias of ``uniform`` is 1. Diverged at a learning rate of 2e-3; kept for the record."""


class KeySource(StrEnum):
    output = "output"
    """The key is a function of what is written, ``rms(y)``."""
    input = "input"
    """The key is a function of the input that the sublayer saw."""
    static = "static"
    """The key is a learned constant."""


class KeyStart(StrEnum):
    embedding_block = "embedding_block"
    """
    The first slot starts with the embedding, the others with a (K - 1)-th of the depth each: weight 1.9 in a sublayer's own slot and
    0.1 in the others (softmax: 5.9 and 0.3 at K = 8). Slots start as the sources of block AttnRes (arXiv 2603.15031), and their mean,
    which is what a query reads at the start, as the residual stream. Ahead of ``uniform`` by 0.08 to 0.17 nats at 90M
    (``paper-experiments/ablations/RESULTS.md``).
    """
    block = "block"
    """The same without a slot for the embedding: K runs of sublayers have a slot each, the first one's also the embedding."""
    uniform = "uniform"
    """Every output is written to every slot with weight 1 at the start."""


class QuerySource(StrEnum):
    memory = "memory"
    """The query is a function of the mean over the slots."""
    output = "output"
    """The query is a function of the last output, ``rms(y)``."""
    static = "static"
    """The query is a learned constant."""


class QueryActivation(StrEnum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    """Bias ``-log(K - 1)``, so that q = 1/K at the start (4 for K = 1)."""
    none = "none"
    """``q = z`` with a bias of 1/K."""


class Forget(StrEnum):
    dynamic = "dynamic"
    """The gate is a function of ``rms(y)``."""
    static = "static"
    """The gate is a learned constant."""
    none = "none"


class ForgetGranularity(StrEnum):
    slot = "slot"
    """One gate for each slot; where the rates start is ``forget_start``."""
    scalar = "scalar"
    """One gate for the whole memory; its rate starts at 1e-3."""


class ForgetStart(StrEnum):
    narrow = "narrow"
    """The rates of the slots start log-spaced over 1e-4 .. 1e-2: every slot keeps the whole depth."""
    wide = "wide"
    """Over 1e-3 .. 1: the last slot keeps what the last one or two sublayers wrote."""


class Update(StrEnum):
    additive = "additive"
    """``S <- diag(a) S + k (outer) y``."""
    delta = "delta"
    """The delta rule: erase along the key before the write."""


class WriteEvery(StrEnum):
    sublayer = "sublayer"
    block = "block"
    """Attention's output is added to the read at once and written together with the MLP's."""


class Residual(StrEnum):
    none = "none"
    kept = "kept"
    """A plain residual stream beside the memory."""


class MemoryDtype(StrEnum):
    model = "model"
    """As the model's states."""
    float8 = "float8"
    """
    FP8 (e4m3), each row in a unit of its own: numbers are rounded by up to 1/16, 2.7% of the RMS of a row of normal numbers. The gradient passes as if they were not.
    """


WINDOWS = (0, 1, 2, 3, 4, 6, 8)


@dataclass
class LDMConfig(DepthConnectionConfig):
    """
    Linear Depth Memory (arXiv 2610.18809): a memory of ``d_k`` slots for each token that every sublayer writes to
    and reads from. ``backends/BACKENDS.md`` has the equations; each option is defined beside its enum.
    """

    keeps_fp32: ClassVar[bool] = True

    d_k: int = 8
    """The number of slots K: any positive integer for the reference, 1, 2, 4, 8 or 16 for the kernels."""
    key_activation: KeyActivation = KeyActivation.two_sigmoid
    key_source: KeySource = KeySource.output
    key_start: KeyStart = KeyStart.embedding_block
    query_source: QuerySource = QuerySource.memory
    query_activation: QueryActivation = QueryActivation.softmax
    forget: Forget = Forget.dynamic
    forget_granularity: ForgetGranularity = ForgetGranularity.slot
    forget_start: ForgetStart = ForgetStart.narrow
    update: Update = Update.additive
    write_every: WriteEvery = WriteEvery.sublayer
    residual: Residual = Residual.none
    window: int = 0
    """
    Keep the memory for the backward every ``window`` boundaries (1, 2, 3, 4, 6 or 8) instead of at each: less memory, the same
    function. The ``fast`` backend does, up to 8 with 8 slots and up to 4 with 4; the others keep every one. 0 is the backend's
    choice, 4 where it can: 1.19 times PreLN's training memory instead of 1.66 at 400M on an H200 (``BACKENDS.md`` has all
    measurements). Other than 1, ``torch.compile`` compiles the sublayers and not whole blocks.
    """

    memory_dtype: MemoryDtype = MemoryDtype.model
    """
    In what a window's memories are stored while training with the ``fast`` backend: they are what is read most, so FP8 takes a fifth of the
    bytes that boundaries move, and half of what windows keep. Everything else, the other backends and evaluation store them as the model's states; a backend that trains without says so once.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window not in WINDOWS:
            raise OLMoConfigurationError(
                f"LDM's window must be one of {', '.join(map(str, WINDOWS[1:]))} boundaries, or 0 for the backend's choice, "
                f"got {self.window}"
            )
        if self.memory_dtype != MemoryDtype.model and self.window == 1:
            raise OLMoConfigurationError(
                f"LDM's memory_dtype={self.memory_dtype} is for what a window stores: it needs a window, got window=1"
            )
        if self.d_k < 1:
            raise OLMoConfigurationError(f"LDM needs d_k >= 1 memory slots, got {self.d_k}")

    @property
    def state_grows(self) -> bool:  # type: ignore[override]
        """In a window the state has one more output after each boundary."""
        return self.window != 1

    def build(
        self, *, d_model: int, index: int, n_sublayers: int, eps: float, init_device: str = "cpu"
    ) -> LDMBoundary:
        return LDMBoundary(
            self,
            d_model=d_model,
            index=index,
            n_sublayers=n_sublayers,
            eps=eps,
            init_device=init_device,
        )

    def num_flops_per_token(self, *, d_model: int, index: int, n_sublayers: int) -> int:
        if index == 0:
            return 3 * self.d_k * d_model
        maps = self.num_params(d_model=d_model, index=index, n_sublayers=n_sublayers)
        # Store (scale, multiply, add), slot mean, read (multiply, add): 6 K d forward, twice that backward.
        return 6 * maps + 18 * self.d_k * d_model

    def no_weight_decay(self) -> list[str]:
        names = ["b_*", "key_0"]
        if self.forget == Forget.dynamic:
            names.append("w_forget")
        return names

    def retrieval_map(self, records: list[BoundaryRecord]) -> torch.Tensor:
        """
        ``M[l, i] = q_l^T (prod_{j = i+1 .. l} A_j) k_i`` with ``A_j = diag(a_j)``, for the delta rule
        ``A_j = (I - beta_j k^_j k^_j^T) diag(a_j)``; a kept residual adds 1, and with writes once a block
        attention's output is read directly (1) until the block's end writes it.
        """
        from olmo_core.nn.depth.connection import upcast

        n = len(records)
        shape = records[0].h.shape[:-1]
        out = upcast(records[0].h).new_zeros(*shape, n, n)
        out[..., 0, 0] = 1.0
        key_0 = records[0].coefficients["key"].expand(*shape, self.d_k)
        keys: list[torch.Tensor | None] = [key_0]
        kept = 1.0 if self.residual == Residual.kept else 0.0
        pending: int | None = None
        for reader, record in enumerate(records[1:], start=1):
            c = record.coefficients
            if "key" in c:
                keys = [None if key is None else self._carry(key, c) for key in keys]
                if pending is not None:
                    keys[pending] = c["key"]
                    pending = None
                keys.append(c["key"])
            else:
                keys.append(None)
                pending = reader
            for source, key in enumerate(keys):
                if key is None:
                    out[..., reader, source] = 1.0
                else:
                    out[..., reader, source] = (c["query"] * key).sum(dim=-1) + kept
        return out

    def _carry(self, key: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
        key = key * c["forget"] if "forget" in c else key
        if self.update == Update.delta:
            unit = c["key"] / c["key"].norm(dim=-1, keepdim=True)
            key = key - c["beta"] * unit * (unit * key).sum(dim=-1, keepdim=True)
        return key

    def statistics(self, record: BoundaryRecord) -> dict[str, torch.Tensor]:
        out = super().statistics(record)
        c = record.coefficients
        if "key" in c:
            out["write key"] = c["key"].mean()
        if "forget" in c:
            out["forget rate"] = -c["forget"].log().mean()
        if "beta" in c:
            out["erase rate"] = c["beta"].mean()
        if "query" in c and self.query_activation == QueryActivation.softmax:
            q = c["query"]
            out["query entropy (nats)"] = torch.special.entr(q).sum(dim=-1).mean()
        return out

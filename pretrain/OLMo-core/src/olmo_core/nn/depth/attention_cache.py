"""
A KV cache for OLMo-core's attention on torch's SDPA, which upstream has only with flash-attn.

Row ``b`` of a batch keeps its token at position ``p`` (the first real token is 0) in slot ``p``, whatever padding
the batch came with. So left padding costs a permutation of the queries at prefill and nothing afterwards: prefill is
plain causal attention, RoPE turns every token exactly as it would turn it in an unpadded batch, and a decode step masks
the slots beyond the row's own position. All shapes of a decode step are fixed and the positions are tensors, so it
makes no host synchronisation and a CUDA graph can hold it.

On a GPU a decode step is one kernel of :mod:`.triton_inference_kernels` (and one that puts its parts together): RoPE, the new key
and value into the cache, and attention to the slots that a row really has, shared among all multiprocessors. SDPA needs a mask
here, which rules flash attention out; what is left reads the slots up to the mask's end for every row, and gives a row and
head to one multiprocessor. A prompt, and the CPU, have SDPA.

Dimension letters: ``B`` rows, ``T`` new tokens, ``S`` slots, ``H`` key and value heads, ``G`` query heads for each of
them, ``E`` head dimension; ``R`` is ``B`` with left padding, otherwise 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attention import Attention, FusedAttentionV2
from olmo_core.nn.attention.backend import TorchAttentionBackend
from olmo_core.nn.attention.kv_cache import KVCacheManager
from olmo_core.nn.rope import RoPEBuffers, RotaryEmbedding, RotaryEmbeddingBase

from .inference import PackedWeights, inference_ops, install_feed_forward

SLOT_MULTIPLE = 64
"""A cache has a multiple of this many slots: the SDPA kernels that take a mask want aligned rows of it."""
ATTENDED_MULTIPLE = 256
"""A decode step attends to the used slots rounded up to this, a new shape (and CUDA graph) every so many tokens."""

_Value = TypeVar("_Value")


class RoPETables(NamedTuple):
    """``[S, E]`` each, FP32."""

    cos: torch.Tensor
    sin: torch.Tensor


def _round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


class CacheStep:
    """
    What the layers share in one forward pass; the mask and the RoPE rows are made once, by the first that asks.

    :param start: The number of columns (tokens and padding) that came in earlier passes.
    :param n_tokens: The number of new columns ``T``.
    :param slots: The slot of every new token, ``[R, T]``, int64.
    :param leftpad: ``[B]``, int64, in a first pass with left padding, otherwise ``None``.
    """

    def __init__(
        self, start: int, n_tokens: int, slots: torch.Tensor, leftpad: torch.Tensor | None
    ):
        self.start = start
        self.n_tokens = n_tokens
        self.slots = slots
        self.leftpad = leftpad
        self._shared: dict[object, object] = {}

    def _once(self, key: object, make: Callable[[], _Value]) -> _Value:
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def rows(self, batch_size: int, n_rows: int) -> torch.Tensor:
        """The row of every new token in a ``[B * n_rows, ...]`` view of the cache: ``[B * T]``, int64."""

        def make() -> torch.Tensor:
            first = torch.arange(batch_size, device=self.slots.device).unsqueeze(1) * n_rows
            return (first + self.slots).flatten()

        return self._once(("rows", batch_size, n_rows), make)

    def to_slot_order(self) -> torch.Tensor | None:
        """``[B * T]``, int64: takes columns in the order of their slots; ``None`` if they are."""
        leftpad = self.leftpad
        if leftpad is None:
            return None

        def make() -> torch.Tensor:
            n = self.n_tokens
            columns = (torch.arange(n, device=leftpad.device) + leftpad.unsqueeze(1)) % n
            first = torch.arange(leftpad.shape[0], device=leftpad.device).unsqueeze(1) * n
            return (first + columns).flatten()

        return self._once("to_slot_order", make)

    def mask(
        self, n_slots: int, window_left: int, repeats: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """
        What a query may see of the first ``n_slots`` slots: 0 or -inf, ``[R, 1, repeats * T, n_slots]``.

        :param window_left: How many slots before its own a query sees, or -1 for all.
        :param repeats: Repeat the queries this often, for query heads that share a key head.
        """

        def make() -> torch.Tensor:
            queries = self.slots
            if self.leftpad is not None:
                queries = torch.arange(self.n_tokens, device=queries.device).unsqueeze(0)
            queries = queries.unsqueeze(-1)
            keys = torch.arange(n_slots, device=queries.device)
            hidden = keys > queries
            if window_left >= 0:
                hidden |= keys < queries - window_left
            # An additive mask: SDPA would turn a boolean one into this in every layer anew.
            mask = torch.zeros(hidden.shape, dtype=dtype, device=queries.device)
            return mask.masked_fill_(hidden, float("-inf")).repeat(1, repeats, 1).unsqueeze(1)

        return self._once(("mask", n_slots, window_left, repeats, dtype), make)

    def rope_rows(self, rope: RotaryEmbeddingBase, n_slots: int) -> RoPEBuffers:
        """The rows of the RoPE tables for the new tokens, ``R * T`` of them."""

        def make() -> RoPEBuffers:
            table = rope_buffers(rope, n_slots, self.slots.device)
            rows = self.slots.flatten()

            def select(t: torch.Tensor | None) -> torch.Tensor | None:
                return None if t is None else t.index_select(0, rows)

            return RoPEBuffers(
                pos_sin=select(table.pos_sin),
                pos_cos=select(table.pos_cos),
                freqs_cis=select(table.freqs_cis),
            )

        return self._once(("rope", *rope_key(rope), n_slots), make)

    def rope_tables(self, rope: RotaryEmbeddingBase, n_slots: int) -> RoPETables:
        """The whole RoPE tables, for kernels that look up their rows themselves."""

        def make() -> RoPETables:
            table = rope_buffers(rope, n_slots, self.slots.device)
            assert table.pos_cos is not None and table.pos_sin is not None
            return RoPETables(table.pos_cos, table.pos_sin)

        return self._once(("tables", *rope_key(rope), n_slots), make)


def rope_key(rope: RotaryEmbeddingBase) -> tuple[object, ...]:
    """Equal for modules with equal tables."""
    return (type(rope), rope.theta, rope.rotary_dim, repr(rope.scaling))


def rope_buffers(rope: RotaryEmbeddingBase, n_slots: int, device: torch.device) -> RoPEBuffers:
    # Outside inference mode: the module keeps the table, and a later training step saves it for backward.
    with torch.inference_mode(False):
        return rope.get_buffers(n_slots, device)


class CacheState:
    """How many tokens each row of the batch holds; one object for all layers of a model."""

    def __init__(self) -> None:
        self.lengths: torch.Tensor | None = None
        """The number of tokens of each row, ``[R]``, int64."""
        self.attended: int | None = None
        """How many slots SDPA attends to in a decode step, instead of what the columns so far ask for."""
        self._step: CacheStep | None = None

    def reset(self) -> None:
        self.lengths = None
        self._step = None

    def resume(self, lengths: torch.Tensor) -> None:
        """Go on from ``lengths`` tokens of each row, ``[B]``, int64: the tensor itself, which a step then adds to."""
        self.lengths = lengths
        self._step = None

    def step(
        self, start: int, n_tokens: int, leftpad: torch.Tensor | None, device: torch.device
    ) -> CacheStep:
        """The step that begins at column ``start``: a new one for the first layer, the same for the others."""
        if (
            self._step is None
            or self._step.start != start
            or self._step.n_tokens != n_tokens
            or (start > 0 and leftpad is not None)
        ):
            self._step = self._advance(start, n_tokens, leftpad, device)
        return self._step

    def _advance(
        self, start: int, n_tokens: int, leftpad: torch.Tensor | None, device: torch.device
    ) -> CacheStep:
        columns = torch.arange(n_tokens, device=device)
        if start == 0:
            if leftpad is not None and not bool((leftpad != 0).any()):
                leftpad = None
            # Not in inference mode, so that a later step outside of it may add to the tensor.
            with torch.inference_mode(False):
                if leftpad is None:
                    self.lengths = torch.full((1,), n_tokens, device=device)
                else:
                    leftpad = leftpad.to(device=device, dtype=torch.int64)
                    self.lengths = n_tokens - leftpad
            slots = columns.unsqueeze(0)
            if leftpad is not None:
                # The padding goes into the slots after the row's tokens, which overwrite it one by one.
                slots = (slots - leftpad.unsqueeze(1)) % n_tokens
            return CacheStep(start, n_tokens, slots, leftpad)
        if leftpad is not None:
            raise RuntimeError("cache_leftpad belongs to the first pass (the prompt) only")
        assert self.lengths is not None
        slots = self.lengths.unsqueeze(1) + columns
        self.lengths.add_(n_tokens)
        return CacheStep(start, n_tokens, slots, None)


class StaticKVCache(KVCacheManager):
    """
    The keys and values of one layer, ``[B, S, H, E]`` each, allocated once in the dtype and on the device of the first
    keys that come (upstream's is always BF16).
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(
        self, state: CacheState, batch_size: int, max_seq_len: int, num_kv_heads: int, head_dim: int
    ):
        # Not KVCacheManager's own: it would allocate, and a left padding and a position for every layer.
        nn.Module.__init__(self)
        self.state = state
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.register_buffer("k_cache", None, persistent=False)
        self.register_buffer("v_cache", None, persistent=False)
        self.reallocate(batch_size, max_seq_len)
        self.zero_cache()

    @property
    def n_slots(self) -> int:
        return self.kv_cache_shape[1]

    def reallocate(
        self, batch_size: int, max_seq_len: int, _explicitly_free_memory: bool = True
    ) -> None:
        del _explicitly_free_memory
        self._batch_size = batch_size
        self._max_seq_len = max_seq_len
        n_slots = _round_up(max_seq_len, SLOT_MULTIPLE)
        self.kv_cache_shape = (batch_size, n_slots, self.num_kv_heads, self.head_dim)
        self.k_cache = self.v_cache = None  # type: ignore[assignment]

    def reset(self, batch_size: int, max_seq_len: int) -> None:
        if not self.is_reusable(batch_size, max_seq_len):
            self.reallocate(batch_size, max_seq_len)
        self.zero_cache()

    def zero_cache(self) -> None:
        # A NaN in a slot that the mask hides would still come through: 0 * NaN.
        if self.k_cache is not None:
            self.k_cache.zero_()
            self.v_cache.zero_()
        self.rewind()

    def rewind(self) -> None:
        """Forget all tokens; what stands in the slots stays until others take them."""
        self.columns = 0
        """How many tokens, padding included, came so far."""
        self._step: CacheStep | None = None
        self._tables: RoPETables | None = None
        self.state.reset()

    def current_position(self) -> torch.Tensor:
        """The number of tokens of each row, ``[R]``, int64."""
        assert self.state.lengths is not None
        return self.state.lengths

    def record_leftpad(self, leftpad: torch.Tensor | None) -> None:
        """:meth:`begin` has it: RoPE comes before and needs it too."""

    def update_seqlen(self, seqlen: int) -> None:
        self.columns += seqlen

    def begin(self, n_tokens: int, leftpad: torch.Tensor | None, device: torch.device) -> None:
        """
        Start a pass of ``n_tokens`` new columns.

        :raises RuntimeError: If the cache has no room for them.
        """
        if self.columns + n_tokens > self.n_slots:
            raise RuntimeError(
                f"the KV cache has {self.n_slots} slots, {self.columns} in use, and cannot take {n_tokens} more: "
                "prepare it for a longer sequence"
            )
        self._step = self.state.step(self.columns, n_tokens, leftpad, device)

    def rope(
        self, rope: RotaryEmbeddingBase, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Turn the new queries and keys by their positions.

        :param q: ``[B, T, H * G, E]``.
        :param k: ``[B, T, H, E]``.

        :returns: Both, or both as they were if :meth:`attend` will turn them.
        """
        assert self._step is not None
        if (
            self._ops(q) is not None
            and type(rope) is RotaryEmbedding
            and rope.rotary_dim == self.head_dim
        ):
            # attend() does it: there the kernels turn what they have loaded anyway.
            self._tables = self._step.rope_tables(rope, self.n_slots)
            return q, k
        rows = self._step.rope_rows(rope, self.n_slots)
        q_shape, k_shape = q.shape, k.shape
        if self._step.slots.shape[0] > 1:
            # Upstream's RoPE has one position for a column; here a column's position differs between rows.
            q, k = q.reshape(1, -1, *q_shape[2:]), k.reshape(1, -1, *k_shape[2:])
        tables = {
            name: t
            for name in ("pos_sin", "pos_cos", "freqs_cis")
            if (t := getattr(rows, name)) is not None
        }
        q, k = rope(q, k, head_first=False, **tables)
        return q.reshape(q_shape), k.reshape(k_shape)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window_left: int,
    ) -> torch.Tensor:
        """
        Store the new keys and values and attend.

        :param q: ``[B, T, H * G, E]``.
        :param k: ``[B, T, H, E]``.
        :param v: ``[B, T, H, E]``.
        :param scale: As for SDPA.
        :param window_left: How many tokens before its own a query sees, or -1 for all.

        :returns: ``[B, T, H * G, E]``.
        """
        step = self._step
        assert step is not None
        batch_size, n_tokens, n_heads, head_dim = q.shape
        n_groups = n_heads // self.num_kv_heads
        self._allocate(step, k)
        tables, self._tables = self._tables, None
        ops = self._ops(q)
        if ops is not None and n_tokens == 1 and step.start > 0:
            cos, sin = (None, None) if tables is None else tables
            return ops.decode_attention(
                q, k, v, step.slots, cos, sin, self.k_cache, self.v_cache,
                head_dim**-0.5 if scale is None else scale, window_left,
            )  # fmt: skip
        if tables is None:
            self._store(step, k, v)
        else:
            q = ops.rope_store(q, k, v, step.slots, *tables, self.k_cache, self.v_cache)

        order = step.to_slot_order()
        if order is not None:
            q = q.reshape(batch_size * n_tokens, n_heads, head_dim)[order].view(q.shape)
        in_order = step.start == 0 or (step.slots.shape[0] == 1 and n_tokens > 1)
        if in_order and window_left < 0:
            # The slots are the tokens so far in order, and the padding comes last.
            n_keys = step.start + n_tokens
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                self.k_cache[:, :n_keys].transpose(1, 2),
                self.v_cache[:, :n_keys].transpose(1, 2),
                # Written so, flash attention takes a later part of a prompt too.
                attn_mask=causal_lower_right(n_tokens, n_keys) if step.start else None,
                is_causal=step.start == 0,
                scale=scale,
                enable_gqa=n_groups > 1,
            )
        else:
            used = self.state.attended if n_tokens == 1 else None
            if used is None:
                used = min(_round_up(step.start + n_tokens, ATTENDED_MULTIPLE), self.n_slots)
            # The query heads of one key head stand one after the other along T. enable_gqa with a mask falls back to
            # repeating the cache in memory on some versions of torch.
            grouped = q.unflatten(2, (self.num_kv_heads, n_groups)).permute(0, 2, 3, 1, 4)
            out = F.scaled_dot_product_attention(
                grouped.flatten(2, 3),
                self.k_cache[:, :used].transpose(1, 2),
                self.v_cache[:, :used].transpose(1, 2),
                attn_mask=step.mask(used, window_left, n_groups, q.dtype),
                scale=scale,
            )
            out = out.unflatten(2, (n_groups, n_tokens)).flatten(1, 2)
        out = out.transpose(1, 2)
        if order is not None:
            out = out.reshape(batch_size * n_tokens, n_heads, head_dim)
            out = out[step.rows(batch_size, n_tokens)].view(q.shape)
        return out.contiguous()

    def _ops(self, q: torch.Tensor) -> Any:
        ops = inference_ops(q)
        return None if ops is None or self.head_dim > ops.MAX_HEAD_DIM else ops

    def _allocate(self, step: CacheStep, k: torch.Tensor) -> None:
        if k.shape[0] != self._batch_size:
            raise RuntimeError(
                f"the KV cache was prepared for {self._batch_size} rows, the batch has {k.shape[0]}"
            )
        if self.k_cache is None or self.k_cache.dtype != k.dtype or self.k_cache.device != k.device:
            if step.start > 0:
                raise RuntimeError(
                    "the dtype or device of the keys changed since the prompt: prepare the KV cache anew"
                )
            with torch.inference_mode(False):
                self.k_cache = torch.zeros(self.kv_cache_shape, dtype=k.dtype, device=k.device)
                self.v_cache = torch.zeros_like(self.k_cache)

    def _store(self, step: CacheStep, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = step.rows(self._batch_size, self.n_slots)
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.flatten(0, 1).index_copy_(0, rows, new.detach().flatten(0, 1))


class CachedTorchAttentionBackend(TorchAttentionBackend):
    """Torch's SDPA with a :class:`StaticKVCache`; without one it is upstream's."""

    @classmethod
    def assert_supports_kv_cache(cls) -> None:
        pass

    def forward(self, qkv, *args, kv_cache_manager=None, **kwargs) -> torch.Tensor:  # type: ignore[override]
        if kv_cache_manager is None:
            return super().forward(qkv, *args, **kwargs)
        if args or any(value is not None for value in kwargs.values()):
            raise RuntimeError(
                "with a KV cache, torch attention supports no document masking and no attention sinks"
            )
        if self.cp_enabled:
            raise RuntimeError("a KV cache does not work with context parallelism")
        return kv_cache_manager.attend(*qkv, scale=self.scale, window_left=self.window_size[0])


class CachedAttention(Attention):
    """Upstream's attention with a :class:`StaticKVCache` when a generation module asks for one."""

    cache_state: CacheState
    packed: PackedWeights

    def _prepare_qkv(self, x: torch.Tensor, **kwargs):
        """
        In a decode step of few tokens the three products are one; see :meth:`Attention._prepare_qkv`.

        :param x: ``[B, T, d_model]``.
        """
        cache = self.kv_cache_manager
        matrix = None
        if (
            type(self) is CachedAttention
            and isinstance(cache, StaticKVCache)
            and x.shape[1] == 1
            and cache._ops(x) is not None
            and self.clip_qkv is None
            and self.q_norm is None
            and self.k_norm is None
        ):
            matrix = self.packed.matrix(self.w_q, self.w_k, self.w_v)
        if matrix is None:
            return super()._prepare_qkv(x, **kwargs)
        E, H = self.head_dim, self.n_kv_heads
        qkv = F.linear(x, matrix).unflatten(-1, (self.n_heads + 2 * H, E))
        q, k, v = qkv.split([self.n_heads, H, H], dim=2)
        if self.rope is not None:
            q, k = self._apply_rope(q, k)
        return q, k, v

    def init_kv_cache_manager(self, batch_size: int, max_seq_len: int) -> None:
        if getattr(self, "scalable_softmax", False) or self.sinks is not None:
            raise OLMoConfigurationError(
                "scalable softmax and attention sinks do not work with a KV cache: generate with use_cache=False"
            )
        self.kv_cache_manager = StaticKVCache(
            self.cache_state, batch_size, max_seq_len, self.n_kv_heads, self.head_dim
        )

    def _apply_rope(self, q, k, *args, **kwargs):
        if self.kv_cache_manager is None:
            return super()._apply_rope(q, k, *args, **kwargs)
        assert self.rope is not None and isinstance(self.kv_cache_manager, StaticKVCache)
        return self.kv_cache_manager.rope(self.rope, q, k)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, cache_leftpad: torch.Tensor | None = None, **kwargs
    ) -> torch.Tensor:
        """
        See :meth:`Attention.forward`.

        :param x: ``[B, T, d_model]``.
        :param cache_leftpad: The number of padding tokens before each row's first token, ``[B]``; with a KV cache only.
        """
        if self.kv_cache_manager is not None:
            return self._cached_forward(x, cache_leftpad, **kwargs)
        if cache_leftpad is not None:
            raise RuntimeError(
                "cache_leftpad needs a KV cache: call prepare_inference_cache, or pad on the right"
            )
        return super().forward(x, **kwargs)

    # The cache counts its columns in Python; torch.compile would make a new graph for every one.
    @torch.compiler.disable
    def _cached_forward(
        self, x: torch.Tensor, leftpad: torch.Tensor | None, **kwargs
    ) -> torch.Tensor:
        assert isinstance(self.kv_cache_manager, StaticKVCache)
        self.kv_cache_manager.begin(x.shape[1], leftpad, x.device)
        return super().forward(x, **kwargs)


class CachedFusedAttentionV2(CachedAttention, FusedAttentionV2):
    """The same for the variant with packed projections."""


_CACHED: dict[type, type[CachedAttention]] = {
    Attention: CachedAttention,
    FusedAttentionV2: CachedFusedAttentionV2,
}


def install_kv_cache(model: nn.Module) -> None:
    """
    Let a model with torch's SDPA keep a KV cache in generation, OLMo-core's own
    ``TransformerGenerationModule`` included, and its feed-forwards use one kernel less there. Parameters, names and the
    forward pass without a cache stay as they are. Attention of another backend (flash-attn has upstream's cache) or of
    another kind is left alone.

    :param model: A :class:`~olmo_core.nn.transformer.Transformer`.
    """
    state = CacheState()
    for block in model.blocks.values():  # type: ignore[union-attr,operator]
        if (feed_forward := getattr(block, "feed_forward", None)) is not None:
            install_feed_forward(feed_forward)
        attention: Any = getattr(block, "attention", None)
        cached = _CACHED.get(type(attention))
        if cached is None or type(attention.backend) is not TorchAttentionBackend:
            continue
        # Upstream builds its class from the config and offers no place to name another, and its
        # init_kv_cache_manager knows only the BF16 cache of flash-attn.
        attention.__class__ = cached
        attention.cache_state = state
        attention.packed = PackedWeights()
        attention.backend.__class__ = CachedTorchAttentionBackend

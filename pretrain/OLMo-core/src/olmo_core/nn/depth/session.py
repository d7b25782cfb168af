"""
What generation runs on: a KV cache of a fixed size, prompts in pieces, and the whole decode step, from the last tokens to the
next ones, over buffers that stay where they are, so that one CUDA graph holds it.

A decode step of a small model is hundreds of kernels of a few microseconds each. Launched one by one they take the host ten
times as long as the device (about 10 ms against 1 for 12 blocks on an H200); replayed as one graph they follow each
other without a gap, and what a method's boundary costs shows.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from olmo_core.nn.transformer import Transformer

from .attention_cache import CachedAttention, CacheState, CacheStep, StaticKVCache
from .inference import inference_ops

log = logging.getLogger(__name__)

PREFILL_CHUNK = 4096
"""Tokens of each row in one pass over a prompt: what bounds its activations."""
GRAPH_SLOTS = 1024
"""With SDPA, a decode step attends to the used slots rounded up to this, in a CUDA graph for each such length."""
STOP_MULTIPLE = 8
"""Room for the ids that end a row, so that their number is no reason for another graph."""


def supports_session(model: Transformer) -> bool:
    """Whether all attention of the model keeps :class:`.StaticKVCache`; flash-attn has upstream's cache."""
    return all(
        isinstance(getattr(block, "attention", None), CachedAttention)
        for block in model.blocks.values()
    )


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    """``[B, 1, V]``; each replay writes them anew."""
    step: CacheStep | None
    """Keeps the RoPE tables that the graph reads: a longer sequence replaces those of the model."""


class InferenceSession:
    """
    Caches and static buffers for a batch of ``batch_size`` rows of up to ``max_seq_len`` tokens.

    Use the model otherwise only outside :meth:`attached`. All methods run in inference mode.

    :param model: In evaluation mode. Its parameters must stay where they are; :attr:`signature` says whether they did.
    :param greedy: Let the step itself choose the most likely token. Otherwise the caller chooses and calls :meth:`accept`.
    :param cuda_graph: Capture the decode step; on a CPU, and where a step cannot be captured, it runs as usual.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        max_seq_len: int,
        *,
        greedy: bool = True,
        cuda_graph: bool = True,
        n_stop_tokens: int = 1,
    ):
        self.model = model
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        self.greedy = greedy
        self.cuda_graph = cuda_graph
        self.device = device = model.device
        self.prepare_seconds = 0.0
        """Time spent on loading kernels and capturing."""
        self.no_graph_because: str | None = None
        """Why the decode step runs as usual."""
        if device.type != "cuda":
            self.no_graph_because = "no CUDA"
        elif not cuda_graph:
            self.no_graph_because = "not asked for"
        elif any(isinstance(p, DTensor) for p in model.parameters()):
            self.no_graph_because = "the model is sharded"

        def static(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = static(batch_size)
        """The last token of each row, ``[B]``: the input of the next step, and its output."""
        self.lengths = static(batch_size)
        """Tokens of each row in the cache, ``[B]``."""
        self.finished = static(batch_size, dtype=torch.bool)
        """The rows that have ended, ``[B]``; their next token is always EOS."""
        self.all_finished = static(dtype=torch.bool)
        self._eos = static(1)
        n_stop = -(-n_stop_tokens // STOP_MULTIPLE) * STOP_MULTIPLE
        self._stop = static(n_stop).fill_(-1)
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        self._attentions: list[Any] = [block.attention for block in model.blocks.values()]
        self.caches: list[StaticKVCache] = []
        with self._no_cache():
            for attention in self._attentions:
                attention.init_kv_cache_manager(batch_size, max_seq_len)
                self.caches.append(attention.kv_cache_manager)
        self.state: CacheState = self.caches[0].state
        self.n_slots = self.caches[0].n_slots
        self._prepare()
        # Only now: the first step packs weights.
        self.signature = signature(model)

    def fits(
        self,
        batch_size: int,
        max_seq_len: int,
        greedy: bool,
        n_stop_tokens: int,
        cuda_graph: bool | None,
    ) -> bool:
        """Whether another generation of this size may use this session; with ``cuda_graph=None`` of either kind."""
        return (
            cuda_graph in (None, self.cuda_graph)
            and self.batch_size == batch_size
            and self.n_slots >= max_seq_len
            and self.greedy == greedy
            and self._stop.numel() >= n_stop_tokens
            and self.signature == signature(self.model)
        )

    @contextmanager
    def _no_cache(self) -> Iterator[None]:
        """Afterwards the model has no cache."""
        try:
            yield
        finally:
            for attention in self._attentions:
                attention.kv_cache_manager = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model has this session's caches meanwhile, and none afterwards."""
        with self._no_cache():
            for attention, cache in zip(self._attentions, self.caches, strict=True):
                attention.kv_cache_manager = cache
            self.state.resume(self.lengths)  # all sessions of a model share it
            yield

    @torch.inference_mode()
    def clear(self) -> None:
        """
        Zero the caches. Not needed between two generations, unless a NaN may have come into a cache: SDPA multiplies what
        its mask hides by 0.
        """
        for cache in self.caches:
            cache.zero_cache()

    def _prepare(self) -> None:
        """Allocate the caches, load and compile every kernel of a step, and capture it."""
        if self.device.type != "cuda":
            return
        start = perf_counter()
        with self.attached():
            # The caches get the dtype and device of the first keys.
            self.model(self.tokens.unsqueeze(1), logits_to_keep=1)
            self.resume(torch.ones_like(self.lengths), 1)
            if self._graph() is None:
                self._step()
            self.clear()
        torch.cuda.synchronize(self.device)
        self.prepare_seconds = perf_counter() - start

    @torch.inference_mode()
    def prefill(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None = None,
        *,
        chunk: int = PREFILL_CHUNK,
    ) -> torch.Tensor:
        """
        Empty the caches and fill them with prompts. Call it in :meth:`attached`.

        :param input_ids: ``[B, T]``, int64, padding on the right: causal attention does not see it, and new tokens take its
            slots.
        :param lengths: Tokens of each row, ``[B]``, int64; ``None`` if none is padded.
        :param chunk: Tokens of each row in one pass.

        :returns: The logits of each row's last token, ``[B, 1, V]``.
        """
        batch_size, n_tokens = input_ids.shape
        if batch_size != self.batch_size or n_tokens > self.n_slots:
            raise ValueError(
                f"a session for {self.batch_size} rows of at most {self.n_slots} tokens cannot take a prompt of "
                f"{batch_size} rows of {n_tokens}"
            )
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        for cache in self.caches:
            cache.rewind()
        logits: torch.Tensor | None = None
        for start in range(0, n_tokens, chunk):
            piece = input_ids[:, start : start + chunk]
            n = piece.shape[1]
            if lengths is None:
                # The head of earlier pieces is one token's work, and to leave it out would be another path.
                logits = self.model(piece, logits_to_keep=1)
                continue
            last = lengths - 1 - start
            here = (last >= 0) & (last < n)
            found = self.model(piece, logits_to_keep=last.clamp(0, n - 1).unsqueeze(1))
            logits = found if logits is None else torch.where(here[:, None, None], found, logits)
        assert logits is not None
        self.resume(
            torch.full_like(self.lengths, n_tokens) if lengths is None else lengths, n_tokens
        )
        return logits

    @torch.inference_mode()
    def resume(self, lengths: torch.Tensor, columns: int) -> None:
        """
        Go on from caches that hold ``lengths`` tokens (``[B]``, int64) of each row.

        :param columns: The largest of them, or more.
        """
        self.lengths.copy_(lengths)
        self.state.resume(self.lengths)
        self._set_columns(columns)

    def _set_columns(self, columns: int) -> None:
        self.columns = columns
        for cache in self.caches:
            cache.columns = columns

    @torch.inference_mode()
    def begin(self, eos_token_id: int, stop_token_ids: list[int]) -> None:
        """No row has ended; ``eos_token_id`` and ``stop_token_ids`` will end them."""
        self.finished.zero_()
        self.all_finished.zero_()
        self._eos.fill_(eos_token_id)
        ids = [eos_token_id, *stop_token_ids]
        self._stop.fill_(-1)
        self._stop[: len(ids)].copy_(torch.tensor(ids, device=self.device))

    @torch.inference_mode()
    def accept(self, sampled: torch.Tensor) -> None:
        """
        Make the chosen tokens the input of the next step, EOS in the rows that have ended, and note which end with them.

        :param sampled: ``[B]``, int64.
        """
        torch.where(self.finished, self._eos, sampled, out=self.tokens)
        self.finished.logical_or_((self.tokens.unsqueeze(1) == self._stop).any(dim=1))
        torch.all(self.finished, dim=0, out=self.all_finished)

    @torch.inference_mode()
    def step(self, *, replay: bool = True) -> torch.Tensor:
        """
        One decode step: :attr:`tokens` goes into the caches and, if :attr:`greedy`, becomes the next tokens. Call it in
        :meth:`attached`.

        :param replay: ``False`` launches the kernels one by one, even if there is a graph.

        :returns: The logits, ``[B, 1, V]``; the next step may overwrite them.
        """
        if self.columns >= self.n_slots:
            raise RuntimeError(f"the KV cache of {self.n_slots} slots is full")
        found = self._graph() if replay else None
        if found is None:
            logits = self._step()
            self.columns += 1  # the caches have counted theirs
        else:
            found.graph.replay()
            logits = found.logits
            self._set_columns(self.columns + 1)
        return logits

    @property
    def captured(self) -> bool:
        return bool(self._graphs)

    def _attended(self) -> int:
        """The slots that SDPA would attend to; with the kernel, which goes by the rows' own lengths, always all."""
        if inference_ops(self.caches[0].k_cache) is not None:
            return self.n_slots
        used = -(-(self.columns + 1) // GRAPH_SLOTS) * GRAPH_SLOTS
        return min(used, self.n_slots)

    def _step(self) -> torch.Tensor:
        self.state._step = None  # the columns may not have moved since the last one
        logits = self.model(self.tokens.unsqueeze(1), logits_to_keep=1)
        if self.greedy:
            self.accept(logits[:, -1].argmax(dim=-1))
        return logits

    def _graph(self) -> _Graph | None:
        """The graph for the present length; captured if this is the first step of the length."""
        if self.no_graph_because is not None:
            return None
        attended = self._attended()
        if attended not in self._graphs:
            start = perf_counter()
            try:
                self._graphs[attended] = self._capture(attended)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as e:
                # A step that reads the device's memory from the host, for example.
                self.no_graph_because = f"{type(e).__name__}: {e}".splitlines()[0][:300]
                log.warning("no CUDA graph for decode steps: %s", self.no_graph_because)
                return None
            finally:
                self.prepare_seconds += perf_counter() - start
        return self._graphs[attended]

    def _capture(self, attended: int) -> _Graph:
        columns, outside = self.columns, torch.cuda.current_stream(self.device)
        saved = [t.clone() for t in self._buffers()]
        self.state.attended = attended
        stream = torch.cuda.Stream(self.device)
        try:
            # Kernels are compiled and loaded, and libraries take their workspaces, outside the graph.
            stream.wait_stream(outside)
            with torch.cuda.stream(stream):
                self._step()
            outside.wait_stream(stream)
            self._set_columns(columns)
            torch.cuda.synchronize(self.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                logits = self._step()
            found = _Graph(graph, logits, self.state._step)
        finally:
            # A capture that fails leaves its own stream behind.
            torch.cuda.set_stream(outside)
            torch.cuda.synchronize(self.device)
            self.state.attended = None
            self._set_columns(columns)
            # The step will run again, over the same slot.
            for t, value in zip(self._buffers(), saved, strict=True):
                t.copy_(value)
        return found

    def _buffers(self) -> list[torch.Tensor]:
        """What a step changes, apart from the caches."""
        return [self.tokens, self.lengths, self.finished, self.all_finished]


def signature(model: Transformer) -> tuple[object, ...]:
    """Differs after the parameters moved or changed: a graph holds their addresses, a backend may hold a packed copy."""
    return tuple(
        (
            id(p) if isinstance(p, DTensor) else p.data_ptr(),
            p.dtype,
            0 if p.is_inference() else p._version,
        )
        for p in model.parameters()
    )

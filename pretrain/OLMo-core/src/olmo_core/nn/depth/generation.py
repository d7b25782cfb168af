"""Text generation with a KV cache, on CPU and GPU, for batches of prompts of different lengths."""

import logging
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed.checkpoint.state_dict as dist_cp_sd

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.generate.generation_module import GenerationConfig, TransformerGenerationModule
from olmo_core.generate.sampling import greedy_selection, top_k_filtering, top_p_filtering
from olmo_core.nn.attention.backend import FlashAttention4Backend
from olmo_core.nn.transformer import Transformer
from olmo_core.utils import log_or_print, move_to_device

from .attention_cache import install_kv_cache
from .session import PREFILL_CHUNK, InferenceSession, supports_session

log = logging.getLogger(__name__)

SESSION_MULTIPLE = 256
"""Sessions have a multiple of this many slots, so that the next generation, a little longer, may use the same one."""
STEPS_AHEAD = {"cuda": 1}
"""How many steps run beyond the one that is given, so that a GPU works while the host learns whether the rows have ended."""
MIN_GRAPH_TOKENS = 8
"""A CUDA graph for fewer new tokens than this costs more than it saves: it takes two steps and the capture of one."""


class NaNLogitsError(RuntimeError):
    """The model gave no number for a token to sample."""


class GenerationStep(NamedTuple):
    """One new token for every row of the batch."""

    tokens: torch.Tensor
    """``[B]``, int64; EOS for a row that had ended before."""
    token_ids: list[int]
    """The same on the host: reading ``tokens`` on a GPU waits for the next step, which runs already."""
    logits: torch.Tensor | None
    """``[B, 1, V]``, before temperature and filters; ``None`` if not asked for."""
    logprobs: torch.Tensor | None
    """The log-probabilities of the tokens by those logits, ``[B, 1]``, FP32, or ``None`` if not asked for."""


@dataclass
class GenerationTiming:
    """
    How long one generation took by the clock on the wall. The device has finished its work at the end of each span. What the
    caller does between two steps counts: on a GPU the next step runs meanwhile.
    """

    batch_size: int
    prompt_tokens: int
    """Columns of the prompt, padding included."""
    new_tokens: int = 0
    """New tokens of each row."""
    prefill_seconds: float = 0.0
    """From the prompt to the first new token."""
    decode_seconds: float = 0.0
    """From the first new token to the last."""
    prepare_seconds: float = 0.0
    """Before the prompt: allocating the cache, loading kernels, capturing the decode step. In none of the rates."""
    cuda_graph: bool = False
    """Whether decode steps were replays of a CUDA graph."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of all rows per second."""
        return _rate(self.batch_size * self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of all rows, without the first ones, per second; 0 if there are none."""
        return _rate(self.batch_size * max(self.new_tokens - 1, 0), self.decode_seconds)

    def __str__(self) -> str:
        prepared = f"preparation: {self.prepare_seconds:.3f} s; " if self.prepare_seconds else ""
        return (
            f"{prepared}prefill: {self.batch_size} x {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s, "
            f"{self.prefill_tokens_per_second:,.1f} tokens/s; "
            f"decode: {self.batch_size} x {max(self.new_tokens - 1, 0)} tokens in {self.decode_seconds:.3f} s, "
            f"{self.decode_tokens_per_second:,.1f} tokens/s"
        )


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n and seconds > 0 else 0.0


def prompt_spans(
    attention_mask: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Where the prompt of each row lies.

    :param attention_mask: ``[B, T]``, bool or 0/1; the ones of a row are next to each other, padding may be on the
        left, on the right or on both sides.
    :param shape: The shape of the prompts, ``[B, T]``.

    :returns: The first column and the length of each row's prompt, ``[B]`` each, int64.

    :raises ValueError: If the mask is anything else, or a row has no token.
    """
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(shape)}, got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask != 0
    lengths = mask.sum(dim=1)
    first = mask.int().argmax(dim=1)
    columns = torch.arange(shape[1], device=mask.device)
    span = (columns >= first.unsqueeze(1)) & (columns < (first + lengths).unsqueeze(1))
    bad = (span != mask).any(dim=1) | (lengths == 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        what = "has no token" if int(lengths[row]) == 0 else "has padding between its tokens"
        raise ValueError(
            f"row {row} of attention_mask {what}: mask padding on the left or right of at least one token"
        )
    return first, lengths


NAN_LOGITS = "the model's logits are NaN, so that there is nothing to sample from: its weights are damaged, or the run diverged"


def is_greedy(config: GenerationConfig) -> bool:
    return not config.do_sample or config.temperature == 0


def sample_token(logits: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """
    Draw the next token as :func:`olmo_core.generate.sampling.select_next_token` does, with the arithmetic in FP32 (in BF16
    the cumulative probability of top-p has steps of 0.004), and without a look at the device: NaN gives any token.

    :param logits: ``[B, V]``.

    :returns: ``[B]``, int64.
    """
    logits = logits.float() / config.temperature
    logits = top_p_filtering(top_k_filtering(logits, config.top_k), config.top_p)
    probabilities = logits.softmax(dim=-1)
    # What torch.multinomial does for one sample, which also asks the device whether it has probabilities.
    noise = torch.empty_like(probabilities).exponential_(1)
    return (probabilities / noise).argmax(dim=-1)


def select_token(logits: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """
    The most likely next token, or one drawn by :func:`sample_token`, as the config says.

    :param logits: ``[B, V]``.

    :returns: ``[B]``, int64.

    :raises NaNLogitsError: If there is a NaN to sample from (greedy choice takes it for the largest logit).
    """
    if not is_greedy(config) and bool(logits.isnan().any()):
        raise NaNLogitsError(NAN_LOGITS)
    return choose(logits, config)


def choose(logits: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """:func:`select_token` without a look at the device: NaN gives any token."""
    return greedy_selection(logits) if is_greedy(config) else sample_token(logits, config)


class _Ready:
    """
    Tokens and booleans of the device on their way to the host, which reads them later without waiting for what it started
    since.

    :param tokens: ``[B]``, int64.
    """

    def __init__(self, tokens: torch.Tensor, *flags: torch.Tensor):
        n = tokens.shape[0]
        values = torch.cat([tokens, torch.stack([f.reshape(()) for f in flags]).to(tokens.dtype)])
        self.tokens = values[:n]
        """A copy of ``tokens``."""
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[list[int], list[bool]]:
        """The tokens and the booleans."""
        if self._event is not None:
            self._event.synchronize()
        n = self.tokens.shape[0]
        values = self._host.tolist()
        return values[:n], [bool(v) for v in values[n:]]


class DepthGenerationModule(TransformerGenerationModule):
    """
    OLMo-core's generation module, for depth-connected and plain transformers, with what it lacks: a KV cache for
    torch's SDPA on any device; padding on either side, with and without a cache; timing on CPU; log-probabilities
    without a C++ compiler; and :meth:`stream`.

    Make one with :meth:`~TransformerGenerationModule.from_checkpoint` or :meth:`from_model`; the constructor, like
    upstream's and with the same parameters, draws the model's weights anew.
    """

    last_timing: GenerationTiming | None
    """The timing of the last generation (of the one under way, up to its last step)."""

    def __init__(self, model: Transformer, generation_config: GenerationConfig, **kwargs):
        install_kv_cache(model)
        super().__init__(model, generation_config, **kwargs)
        self.last_timing = None
        self._session: InferenceSession | None = None

    @classmethod
    def from_model(
        cls, model: Transformer, generation_config: GenerationConfig
    ) -> "DepthGenerationModule":
        """Generate with a model as it is, with its weights and on its device."""
        # Not through upstream's constructor, which draws the weights anew and, in a distributed process, makes the world
        # mesh; that can be done once in a process.
        install_kv_cache(model)
        module = cls.__new__(cls)
        module.device = model.device
        module.world_mesh = None
        module.model = model
        module._model_mode = None
        module._dp_config = None
        module.state_dict_save_opts = dist_cp_sd.StateDictOptions(strict=True)
        module.state_dict_load_opts = dist_cp_sd.StateDictOptions(strict=True)
        module.load_key_mapping = None
        module._generation_config = generation_config
        module.last_timing = None
        module._session = None
        return module

    def free_inference_cache(self) -> None:
        """Take the cache out of the model, and free it and its CUDA graph, which the next generation might have used."""
        self._session = None
        super().free_inference_cache()

    @torch.inference_mode()
    def model_forward(self, input_ids: torch.Tensor, **kwargs):
        """
        A forward pass in evaluation mode, never with the cache that a generation left.

        :param input_ids: ``[B, T]``, int64.

        :returns: Logits ``[B, T, V]``.
        """
        super().free_inference_cache()
        return super().model_forward(input_ids, **kwargs)

    @torch.inference_mode()
    def stream(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        return_logits: bool = True,
        return_logprobs: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        cuda_graph: bool | None = None,
        **generation_kwargs,
    ) -> Generator[GenerationStep, None, None]:
        """
        Generate token by token until every row has ended or the length is reached. On a GPU the step after the one that is
        given has been started already.

        :param input_ids: ``[B, T]``, int64.
        :param attention_mask: ``[B, T]``, 1 for tokens and 0 for padding on the left, right or both; ``None`` for no
            padding. Every row continues as it would alone.
        :param return_logits: Give each step's logits.
        :param return_logprobs: Compute log-probabilities.
        :param prefill_chunk: Tokens of each row in one pass over the prompt.
        :param cuda_graph: Replay decode steps as a CUDA graph. ``None``: on a GPU, unless the new tokens are very few.
        :param generation_kwargs: Overrides of the :class:`GenerationConfig`.

        :raises OLMoConfigurationError: If ``use_cache`` is on and there is no limit on the length.
        :raises NaNLogitsError: If there is a NaN to sample from.
        """
        config = self._generation_config.replace(**generation_kwargs)
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must be [B, T] with at least one token, got shape {tuple(input_ids.shape)}"
            )
        input_ids = move_to_device(input_ids, self.device)
        batch_size, prompt_len = input_ids.shape
        if config.max_new_tokens is not None:
            limit: int | None = config.max_new_tokens
        elif config.max_length is not None:
            limit = config.max_length - prompt_len
        else:
            limit = None
        if config.use_cache and limit is None:
            raise OLMoConfigurationError(
                "a KV cache is allocated for a known length: set max_new_tokens or max_length, or use_cache=False"
            )
        in_session = config.use_cache and supports_session(self.model)

        lengths: torch.Tensor | None = None
        leftpad: torch.Tensor | None = None
        if attention_mask is not None:
            first, lengths = prompt_spans(
                move_to_device(attention_mask, self.device), input_ids.shape
            )
            if bool((lengths == prompt_len).all()):
                lengths = None
            elif config.use_cache and not in_session:
                self._assert_cache_takes_padding()
                leftpad = (prompt_len - lengths).int()
                input_ids = _roll(input_ids, prompt_len - lengths - first)
            else:
                # Causal attention does not see padding on the right.
                input_ids = _roll(input_ids, -first)

        # Not from the base class's cached value: someone may have put the model into training mode since. Only where needed:
        # a backend may prepare its copy of the weights anew.
        self._model_mode = None if any(m.training for m in self.model.modules()) else "eval"
        self._set_model_mode("eval")
        timing = self.last_timing = GenerationTiming(batch_size, prompt_len)
        if limit is not None and limit <= 0:
            return
        if in_session:
            assert limit is not None
            session = self._session_for(batch_size, prompt_len + limit, limit, config, cuda_graph)
            timing.prepare_seconds = session.prepare_seconds
            steps = self._session_steps(session, input_ids, lengths, limit, config, prefill_chunk)
        else:
            steps = self._plain_steps(input_ids, lengths, leftpad, limit, config)

        ahead = STEPS_AHEAD.get(self.device.type, 0) if in_session else 0
        queue: deque[tuple[_Ready, torch.Tensor | None, torch.Tensor | None]] = deque()
        started = perf_counter()
        first_token = started
        try:
            while True:
                while len(queue) <= ahead and (found := next(steps, None)) is not None:
                    tokens, logits, all_finished = found
                    flags = [all_finished]
                    if not is_greedy(config):
                        flags.append(logits.isnan().any())
                    logprobs = None
                    if return_logprobs:
                        logprobs = logits[:, -1].float().log_softmax(dim=-1)
                        logprobs = logprobs.gather(1, tokens.unsqueeze(1))
                    kept = None
                    if return_logits:
                        # A session's buffers belong to its next step.
                        kept = logits.clone() if in_session else logits
                    queue.append((_Ready(tokens, *flags), kept, logprobs))
                if not queue:
                    return
                ready, kept, logprobs = queue.popleft()
                token_ids, (ended, *nan) = ready.read()
                if any(nan):
                    raise NaNLogitsError(NAN_LOGITS)
                now = perf_counter()
                if timing.new_tokens == 0:
                    first_token = now
                    timing.prefill_seconds = now - started
                timing.decode_seconds = now - first_token
                if in_session:
                    timing.cuda_graph = session.captured
                timing.new_tokens += 1
                yield GenerationStep(ready.tokens, token_ids, kept, logprobs)
                if ended:
                    return
        finally:
            steps.close()
            # A cache left in place would swallow the next plain forward pass of the model.
            super().free_inference_cache()

    def _session_for(
        self,
        batch_size: int,
        max_seq_len: int,
        limit: int,
        config: GenerationConfig,
        cuda_graph: bool | None,
    ) -> InferenceSession:
        """The session of the last generation if it fits, otherwise a new one."""
        n_stop = 1 + len(config.stop_token_ids or [])
        if cuda_graph is None and limit >= MIN_GRAPH_TOKENS:
            cuda_graph = True
        session = self._session
        if session is not None and session.fits(
            batch_size, max_seq_len, is_greedy(config), n_stop, cuda_graph
        ):
            session.prepare_seconds = 0.0
            session.clear()
            return session
        session = self._session = None  # its memory, before the next one needs it
        self._session = InferenceSession(
            self.model,
            batch_size,
            -(-max_seq_len // SESSION_MULTIPLE) * SESSION_MULTIPLE,
            greedy=is_greedy(config),
            cuda_graph=bool(cuda_graph),
            n_stop_tokens=n_stop,
        )
        return self._session

    def _session_steps(
        self,
        session: InferenceSession,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        limit: int,
        config: GenerationConfig,
        prefill_chunk: int,
    ) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor], None, None]:
        """
        :param input_ids: ``[B, T]``, padding on the right.

        :returns: For every step the tokens ``[B]``, the logits ``[B, 1, V]`` and whether all rows have ended.
        """
        with session.attached():
            session.begin(config.eos_token_id, list(config.stop_token_ids or []))
            logits = session.prefill(input_ids, lengths, chunk=prefill_chunk)
            for i in range(limit):
                if i > 0:
                    logits = session.step()
                if i == 0 or not session.greedy:
                    session.accept(choose(logits[:, -1], config))
                yield session.tokens, logits, session.all_finished

    def _plain_steps(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        leftpad: torch.Tensor | None,
        limit: int | None,
        config: GenerationConfig,
    ) -> Generator[tuple[torch.Tensor, torch.Tensor, torch.Tensor], None, None]:
        """
        The same without a cache, or with upstream's.

        :param lengths: Without a cache, the tokens of each row; padding is on the right.
        :param leftpad: With one, the padding on the left of each row.
        """
        batch_size, prompt_len = input_ids.shape
        stop_tokens = torch.tensor(
            [config.eos_token_id, *(config.stop_token_ids or [])], device=self.device
        )
        finished = torch.zeros(batch_size, dtype=torch.bool, device=self.device)
        # Where the logits of the last token are.
        last: int | torch.Tensor = 1
        if lengths is not None and leftpad is None:
            last = lengths.unsqueeze(1) - 1
        if config.use_cache:
            assert limit is not None
            self.prepare_inference_cache(batch_size, prompt_len + limit)
        else:
            super().free_inference_cache()
        tokens: torch.Tensor | None = None
        n = 0
        while limit is None or n < limit:
            if tokens is None:
                logits = self.model(input_ids, logits_to_keep=last, cache_leftpad=leftpad)
            elif config.use_cache:
                logits = self.model(tokens.unsqueeze(1), logits_to_keep=1)
            else:
                input_ids, last = _append(input_ids, last, tokens)
                logits = self.model(input_ids, logits_to_keep=last)
            sampled = choose(logits[:, -1], config)
            tokens = torch.where(finished, config.eos_token_id, sampled)
            finished = finished | torch.isin(tokens, stop_tokens)
            n += 1
            yield tokens, logits, finished.all()

    def _assert_cache_takes_padding(self) -> None:
        for block in self.model.blocks.values():
            if isinstance(getattr(block.attention, "backend", None), FlashAttention4Backend):
                raise OLMoConfigurationError(
                    "flash_4's KV cache ignores padding: generate prompts of one length, or use use_cache=False or "
                    "attention_backend='torch'"
                )

    @torch.inference_mode()
    def generate_batch(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        return_logits: bool = False,
        return_logprobs: bool = False,
        completions_only: bool = False,
        log_timing: bool = True,
        **generation_kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        See :meth:`TransformerGenerationModule.generate_batch`; the parameters that differ are those of :meth:`stream`.

        :returns: ``(ids, logits, logprobs)``: ``[B, T + n]`` with the prompts as they were given (``[B, n]`` with
            ``completions_only``), ``[B, n, V]`` and ``[B, n]`` for the new tokens, the last two if asked for.
        """
        prompt = move_to_device(input_ids, self.device)
        columns = [prompt[:, :0] if completions_only else prompt]
        all_logits: list[torch.Tensor] = []
        all_logprobs: list[torch.Tensor] = []
        for step in self.stream(
            input_ids,
            attention_mask=attention_mask,
            return_logits=return_logits,
            return_logprobs=return_logprobs,
            **generation_kwargs,
        ):
            columns.append(step.tokens.unsqueeze(1))
            if step.logits is not None:
                all_logits.append(step.logits)
            if step.logprobs is not None:
                all_logprobs.append(step.logprobs)
        if log_timing:
            log_or_print(log, str(self.last_timing))
        return (
            torch.cat(columns, dim=1),
            torch.cat(all_logits, dim=1) if all_logits else None,
            torch.cat(all_logprobs, dim=1) if all_logprobs else None,
        )


def _roll(ids: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Move each row ``b`` of ``ids`` (``[B, T]``) by ``shift[b]`` columns to the right, around the end."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    return ids.gather(1, (columns - shift.unsqueeze(1)) % ids.shape[1])


def _append(
    ids: torch.Tensor, last: int | torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, int | torch.Tensor]:
    """Put one token (``[B]``) after each row's last, which is in column ``last`` (``[B, 1]``) or in the last one."""
    ids = torch.cat([ids, tokens.unsqueeze(1)], dim=1)
    if isinstance(last, int):
        return ids, last
    return ids.scatter(1, last + 1, tokens.unsqueeze(1)), last + 1

"""Text generation with a KV cache, on CPU and GPU, for batches of prompts of different lengths."""

import logging
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

log = logging.getLogger(__name__)


class NaNLogitsError(RuntimeError):
    """The model gave no number for a token to sample."""


class GenerationStep(NamedTuple):
    """One new token for every row of the batch."""

    tokens: torch.Tensor
    """``[B]``, int64; EOS for a row that had ended before."""
    logits: torch.Tensor
    """``[B, 1, V]``, before temperature and filters."""
    logprobs: torch.Tensor | None
    """The log-probabilities of the tokens by those logits, ``[B, 1]``, FP32, or ``None`` if not asked for."""


@dataclass
class GenerationTiming:
    """
    How long one generation took. The device has finished its work at the end of each span; what the caller does
    between two steps is not counted.
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

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of all rows per second."""
        return _rate(self.batch_size * self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of all rows, without the first ones, per second; 0 if there are none."""
        return _rate(self.batch_size * max(self.new_tokens - 1, 0), self.decode_seconds)

    def __str__(self) -> str:
        return (
            f"prefill: {self.batch_size} x {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s, "
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


def select_token(logits: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """
    Choose the next token as :func:`olmo_core.generate.sampling.select_next_token` does, with the arithmetic in FP32 (in
    BF16 the cumulative probability of top-p has steps of 0.004) and one look at the device instead of one for each row.

    :param logits: ``[B, V]``.

    :returns: ``[B]``, int64.

    :raises NaNLogitsError: If there is a NaN to sample from (greedy choice takes it for the largest logit).
    """
    if not config.do_sample or config.temperature == 0:
        return greedy_selection(logits)
    if bool(logits.isnan().any()):
        raise NaNLogitsError(
            "the model's logits are NaN, so that there is nothing to sample from: its weights are damaged, or the run "
            "diverged"
        )
    logits = logits.float() / config.temperature
    logits = top_p_filtering(top_k_filtering(logits, config.top_k), config.top_p)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1).squeeze(-1)


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
        return module

    @torch.inference_mode()
    def model_forward(self, input_ids: torch.Tensor, **kwargs):
        """
        A forward pass in evaluation mode, never with the cache that a generation left.

        :param input_ids: ``[B, T]``, int64.

        :returns: Logits ``[B, T, V]``.
        """
        self.free_inference_cache()
        return super().model_forward(input_ids, **kwargs)

    @torch.inference_mode()
    def stream(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        return_logprobs: bool = False,
        **generation_kwargs,
    ) -> Generator[GenerationStep, None, None]:
        """
        Generate token by token until every row has ended or the length is reached.

        :param input_ids: ``[B, T]``, int64.
        :param attention_mask: ``[B, T]``, 1 for tokens and 0 for padding on the left, right or both; ``None`` for no
            padding. Every row continues as it would alone.
        :param return_logprobs: Compute log-probabilities.
        :param generation_kwargs: Overrides of the :class:`GenerationConfig`.

        :raises OLMoConfigurationError: If ``use_cache`` is on and there is no limit on the length.
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

        # Where the logits of the last token are, and the padding that the cache must know of.
        last: int | torch.Tensor = 1
        leftpad: torch.Tensor | None = None
        lengths: torch.Tensor | None = None
        if attention_mask is not None:
            first, lengths = prompt_spans(
                move_to_device(attention_mask, self.device), input_ids.shape
            )
            if bool((lengths == prompt_len).all()):
                lengths = None
            elif config.use_cache:
                self._assert_cache_takes_padding()
                leftpad = (prompt_len - lengths).int()
                input_ids = _roll(input_ids, prompt_len - lengths - first)
            else:
                # Causal attention does not see padding on the right.
                input_ids = _roll(input_ids, -first)
                last = lengths.unsqueeze(1) - 1

        # Not from a cached value: someone may have put the model into training mode since.
        self._model_mode = None
        self._set_model_mode("eval")
        timing = self.last_timing = GenerationTiming(batch_size, prompt_len)
        if limit is not None and limit <= 0:
            return
        stop_tokens = torch.tensor(
            [config.eos_token_id, *(config.stop_token_ids or [])], device=self.device
        )
        finished = torch.zeros(batch_size, dtype=torch.bool, device=self.device)
        tokens: torch.Tensor | None = None
        try:
            if config.use_cache:
                self.prepare_inference_cache(batch_size, prompt_len + (limit or 0))
            else:
                self.free_inference_cache()
            while limit is None or timing.new_tokens < limit:
                start = perf_counter()
                if tokens is None:
                    logits = self.model(input_ids, logits_to_keep=last, cache_leftpad=leftpad)
                elif config.use_cache:
                    logits = self.model(tokens.unsqueeze(1), logits_to_keep=1)
                else:
                    input_ids, last = _append(input_ids, last, tokens)
                    logits = self.model(input_ids, logits_to_keep=last)
                sampled = select_token(logits[:, -1], config)
                logprobs = None
                if return_logprobs:
                    logprobs = logits[:, -1].float().log_softmax(dim=-1)
                    logprobs = logprobs.gather(1, sampled.unsqueeze(1))
                tokens = torch.where(finished, config.eos_token_id, sampled)
                finished = finished | torch.isin(tokens, stop_tokens)
                all_finished = bool(finished.all())  # known only when the device is done
                elapsed = perf_counter() - start
                if timing.new_tokens == 0:
                    timing.prefill_seconds = elapsed
                else:
                    timing.decode_seconds += elapsed
                timing.new_tokens += 1
                yield GenerationStep(tokens, logits, logprobs)
                if all_finished:
                    return
        finally:
            # A cache left in place would swallow the next plain forward pass of the model.
            self.free_inference_cache()

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
            return_logprobs=return_logprobs,
            **generation_kwargs,
        ):
            columns.append(step.tokens.unsqueeze(1))
            if return_logits:
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

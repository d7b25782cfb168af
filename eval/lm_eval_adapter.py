"""
lm-eval for native checkpoints: a :class:`lm_eval.api.model.TemplateLM` over any OLMo-core ``Transformer``.

Scores are those of lm-eval's own ``hf`` model (``HFLM``) for the same weights: the same prefix token, split of context and
continuation, truncation from the left and rolling windows. Differences are of speed only: requests with the same input
share a row, logits are computed for the scored positions alone, and a batch holds a number of tokens.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from tqdm import tqdm

from config_utils.errors import UserError
from olmo_core.nn.transformer import Transformer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

BATCH_TOKENS = {"cuda": 32_768, "cpu": 2_048}
"""Padded input tokens in a batch, by device; logits are made for the scored positions only."""

MAX_BATCH = 512
"""Sequences in a batch at most: beyond it, short requests gain nothing."""

Request = tuple[tuple[str, str] | None, list[int], list[int]]


class DepthLM(TemplateLM):
    """
    :param model: In evaluation mode, on its device.
    :param tokenizer: With the ids that the model was trained on.
    :param eos_token_id: Ends generation, and stands before texts that have no context.
    :param max_length: Tokens that the model may see at once: its training sequence length.
    :param batch_size: Sequences in a batch; default as many as fit :data:`BATCH_TOKENS`.
    :param tokenizer_name: For lm-eval's request cache.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        eos_token_id: int,
        pad_token_id: int,
        max_length: int,
        batch_size: int | None = None,
        tokenizer_name: str = "tokenizer",
    ):
        super().__init__()
        if max_length < 1 or (batch_size is not None and batch_size < 1):
            raise UserError(
                f"the maximum length and the batch size must be at least 1, got {max_length} and {batch_size}"
            )
        self.model = model
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._pad_token_id = pad_token_id
        self._max_length = max_length
        self._batch_size = batch_size
        self._tokenizer_name = tokenizer_name
        self._device = model.device
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.truncated_requests = 0
        """How many scored requests had to be cut on the left so far."""

    @property
    def eot_token_id(self) -> int:
        return self._eos_token_id

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def batch_size(self) -> int | str:
        return self._batch_size or "auto"

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer_name

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        tensor = tensor.reshape(-1) if tensor.dim() == 0 else tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self.world_size == 1:
            return [obj]
        parts: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        del kwargs
        return self._tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)).ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def loglikelihood(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        # The base class shows a bar for the tokenisation in logs and on every process.
        quiet = disable_tqdm or self.rank != 0 or not sys.stderr.isatty()
        return super().loglikelihood(requests, disable_tqdm=quiet)

    @torch.inference_mode()
    def _loglikelihood_tokens(  # type: ignore[override]
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """
        Sum of the log-probabilities of each continuation, and whether greedy decoding would give it.

        :param requests: ``(cache key, context tokens, continuation tokens)``; both at least one token.
        """
        del kwargs
        # Input -> the requests that it serves: the same question with several one-token answers is one row.
        rows: dict[tuple[int, ...], list[int]] = {}
        for i, (key, context, continuation) in enumerate(requests):
            # lm-eval's hf model stops at these with an AssertionError.
            if not context or not continuation:
                raise UserError(
                    f"a request has no token to score or none before it: {key!r} ({len(context)} context and "
                    f"{len(continuation)} continuation tokens)"
                )
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit into {self.max_length}: raise "
                    "--max-length"
                )
            tokens = context + continuation
            self.truncated_requests += len(tokens) > self.max_length + 1
            rows.setdefault(tuple(tokens[-(self.max_length + 1) : -1]), []).append(i)

        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        # Longest first, so that running out of memory shows at once.
        order = sorted(rows, key=lambda row: (-len(row), row))
        bar = tqdm(
            total=len(requests),
            desc="loglikelihood",
            disable=True if disable_tqdm or self.rank else None,
        )
        for batch in self._batches(order):
            longest = len(batch[0])
            keep = max(len(requests[i][2]) for row in batch for i in rows[row])
            inputs = torch.full((len(batch), longest), self._pad_token_id, dtype=torch.long)
            positions = torch.zeros(len(batch), keep, dtype=torch.long)
            for b, row in enumerate(batch):
                inputs[b, : len(row)] = torch.tensor(row)
                # The last `keep` positions of the row itself, right-aligned; those of shorter rows repeat position 0.
                positions[b] = torch.arange(len(row) - keep, len(row)).clamp_min(0)
            # Padding on the right changes nothing for the positions before it: the model is causal.
            logits = self.model(inputs.to(self.device), logits_to_keep=positions.to(self.device))
            for b, row in enumerate(batch):
                n_max = max(len(requests[i][2]) for i in rows[row])
                log_probs = torch.log_softmax(logits[b, keep - n_max :].float(), dim=-1)
                greedy = log_probs.argmax(dim=-1)
                for i in rows[row]:
                    key, _, continuation = requests[i]
                    target = torch.tensor(continuation, device=self.device)
                    n = len(continuation)
                    score = log_probs[n_max - n :].gather(1, target[:, None]).sum()
                    results[i] = (float(score), bool((greedy[n_max - n :] == target).all()))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, results[i])
                    bar.update(1)
        bar.close()
        return results

    def _batches(self, rows: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Split rows, longest first, into batches."""
        out: list[list[tuple[int, ...]]] = []
        budget = BATCH_TOKENS.get(self.device.type, 2_048)
        while sum(map(len, out)) < len(rows):
            done = sum(map(len, out))
            n = self._batch_size or min(MAX_BATCH, max(1, budget // len(rows[done])))
            out.append(rows[done : done + n])
        return out

    def loglikelihood_rolling(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts: disjoint windows of :attr:`max_length`, the first after the EOS token."""
        windows: list[Request] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(i)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for i, (score, _) in zip(owners, scores, strict=True):
            totals[i] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Continue each context, greedily or by sampling as its ``gen_kwargs`` say, until EOS or a stop string."""
        from .generation import generate_tokens  # takes 12 s to import (torch.compile)

        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        # One group for each set of options.
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        contexts = [self.tok_encode(r.args[0]) or [self.prefix_token_id] for r in requests]
        results = [""] * len(requests)
        bar = tqdm(
            total=len(requests),
            desc="generate_until",
            disable=True if disable_tqdm or self.rank else None,
        )
        for members in groups.values():
            options: dict[str, Any] = dict(
                normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
            )
            until = handle_stop_sequences(options.pop("until", None), eos=eos)
            max_new_tokens = options.pop("max_gen_toks")
            room = self.max_length - max_new_tokens
            if room < 1:
                raise UserError(
                    f"a task generates up to {max_new_tokens} tokens, which leaves no context in the model's "
                    f"{self.max_length}: raise --max-length or lower max_gen_toks"
                )
            temperature = options.pop("temperature", 0.0)
            if not options.pop("do_sample"):
                temperature = 0.0
            top_k, top_p = options.pop("top_k", None), options.pop("top_p", None)
            if options:
                raise UserError(
                    f"generation options {', '.join(sorted(options))} are not supported; use until, max_gen_toks, "
                    "do_sample, temperature, top_k and top_p"
                )
            members = sorted(members, key=lambda i: -len(contexts[i]))
            budget = BATCH_TOKENS.get(self.device.type, 2_048)
            longest = min(room, len(contexts[members[0]])) + max_new_tokens
            n = self._batch_size or min(MAX_BATCH, max(1, budget // longest))
            for start in range(0, len(members), n):
                batch = members[start : start + n]
                generated = generate_tokens(
                    self.model,
                    [contexts[i][-room:] for i in batch],
                    max_new_tokens=max_new_tokens,
                    eos_token_id=self.eot_token_id,
                    pad_token_id=self._pad_token_id,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    stop=self._stop(until),
                )
                for i, tokens in zip(batch, generated, strict=True):
                    text = postprocess_generated_text(self.tok_decode(tokens), until, None)
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update(1)
        bar.close()
        return results

    def _stop(self, until: list[str]) -> Callable[[list[int]], bool]:
        strings = [s for s in until if s]
        return lambda tokens: any(s in self.tok_decode(tokens) for s in strings)

    def get_model_info(self) -> dict[str, Any]:
        return {"model_num_parameters": self.model.num_params}

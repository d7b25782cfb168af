"""Generation for lm-eval's ``generate_until``: the one place that knows how tokens are made."""

from collections.abc import Callable
from contextlib import closing

import torch

from olmo_core.generate.generation_module import GenerationConfig
from olmo_core.nn.depth.generation import DepthGenerationModule
from olmo_core.nn.transformer import Transformer


@torch.inference_mode()
def generate_tokens(
    model: Transformer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos_token_id: int,
    pad_token_id: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """
    Continue prompts of any lengths, with a KV cache; a continuation does not depend on its neighbours.

    :param prompts: Token ids, at least one each.
    :param temperature: 0 is greedy.
    :param top_k: Sample among this many most likely tokens.
    :param top_p: Sample among the most likely tokens that together have this probability.
    :param stop: Is given the new tokens of a row, and says whether the row is finished.

    :returns: The new tokens of each row, without EOS.
    """
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    module = DepthGenerationModule.from_model(
        model,
        GenerationConfig(
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature,
            top_k=top_k or -1,
            top_p=1.0 if top_p is None else top_p,
        ),
    )
    out: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    with closing(module.stream(input_ids, attention_mask=mask, return_logits=False)) as steps:
        for step in steps:
            tokens = step.token_ids
            for row in sorted(running):
                if tokens[row] == eos_token_id:
                    running.discard(row)
                    continue
                out[row].append(tokens[row])
                if stop is not None and stop(out[row]):
                    running.discard(row)
            if not running:
                break
    return out

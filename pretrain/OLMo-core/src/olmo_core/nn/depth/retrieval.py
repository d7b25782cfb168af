"""Which earlier output reaches which reader: the retrieval map of any depth connection."""

import torch

from .model import DepthTransformer


@torch.no_grad()
def retrieval_map(model: DepthTransformer, tokens: torch.Tensor) -> torch.Tensor:
    """
    ``M[l, i]``, the weight of output ``y_i`` in what reader ``l`` mixes, ``h_l = sum_i M[l, i] y_i``, averaged over
    the tokens (and over the channels, for a method whose ``exact_map`` is false). Readers are the sublayers 0 .. L - 1 and the LM head; outputs are the embedding and those of the sublayers.

    :param model: Any depth-connected transformer.
    :param tokens: ``[B, T]``, int64.

    :returns: ``[L + 1, L + 1]``, FP32, lower triangular.
    """
    training = model.training
    model.eval()
    try:
        records = model.record(tokens)
    finally:
        model.train(training)
    return model.depth.retrieval_map(records).mean(dim=(0, 1))

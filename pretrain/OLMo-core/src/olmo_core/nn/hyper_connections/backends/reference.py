"""
Manifold-constrained hyper-connections (mHC, arXiv 2512.24880) in readable PyTorch with FP32 arithmetic.

``N`` streams of width ``D`` for each token. A sublayer F, with its own norm, is wrapped as
``X <- H_res X + H_post^T F(H_pre X)``; the three maps come from the streams themselves. With ``H_res = I`` for every token
only the other two remain.
"""

from typing import NamedTuple

import torch

from olmo_core.nn.depth.connection import rms_normalize, upcast


class MHCControls(NamedTuple):
    """The mixing maps of one sublayer, FP32."""

    pre: torch.Tensor
    """``H_pre`` ``[..., N]``, each in (0, 1)"""
    post: torch.Tensor
    """``H_post`` ``[..., N]``, each in (0, 2)"""
    res: torch.Tensor | None
    """``H_res`` ``[..., N, N]``, rows sum to 1, columns nearly; ``None`` for the identity"""
    res_logits: torch.Tensor | None
    """What the Sinkhorn iteration started from, ``[..., N, N]``"""


def sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    """
    ``M_0 = exp(logits)``, then ``iterations`` times: normalise the columns, then the rows (eq. 9). In the log domain:
    ``exp`` of a logit above 88 overflows FP32.

    :param logits: ``[..., N, N]``.
    :returns: Rows sum to 1 exactly; columns only as far as the iteration has converged.
    """
    m = logits
    for _ in range(iterations):
        m = m - torch.logsumexp(m, dim=-2, keepdim=True)
        m = m - torch.logsumexp(m, dim=-1, keepdim=True)
    return m.exp()


def mhc_controls(
    streams: torch.Tensor,
    phi: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    iterations: int,
) -> MHCControls:
    """
    The controllers (eq. 7-9): one RMS over all ``N * D`` values of a token, one product with ``phi``.

    :param streams: ``X``, ``[..., N, D]``.
    :param phi: ``[N * D, N^2 + 2 N]``; columns: pre (N), post (N), res (N x N, row major). ``[N * D, 2 N]``, without res,
        makes ``H_res`` the identity.
    :param alpha: The scales of pre, post and res, ``[3]`` (``[2]`` without res).
    :param bias: In the order of ``phi``'s columns, as many.
    """
    n = streams.shape[-2]
    z = rms_normalize(upcast(streams).flatten(-2), eps) @ upcast(phi)
    scale, b = upcast(alpha), upcast(bias)
    pre = torch.sigmoid(scale[0] * z[..., :n] + b[:n])
    post = 2 * torch.sigmoid(scale[1] * z[..., n : 2 * n] + b[n : 2 * n])
    if z.shape[-1] == 2 * n:
        return MHCControls(pre, post, None, None)
    res_logits = (scale[2] * z[..., 2 * n :] + b[2 * n :]).unflatten(-1, (n, n))
    return MHCControls(pre, post, sinkhorn(res_logits, iterations), res_logits)


def mhc_post_mix(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, res: torch.Tensor | None
) -> torch.Tensor:
    """
    ``X <- H_res X + H_post^T y``, FP32.

    :param streams: ``[..., N, D]``.
    :param y: The sublayer's output, ``[..., D]``.
    :param res: ``None`` is the identity.
    """
    mixed = upcast(streams) if res is None else upcast(res) @ upcast(streams)
    return mixed + upcast(post)[..., None] * upcast(y)[..., None, :]


def mhc_collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_n weights[n] X[n]``, ``[..., D]``, FP32."""
    return (upcast(weights)[..., None] * upcast(streams)).sum(dim=-2)

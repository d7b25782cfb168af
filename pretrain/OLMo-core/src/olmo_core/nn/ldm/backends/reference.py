"""
Linear Depth Memory (arXiv 2610.18809) in readable PyTorch: the definition that every other backend is tested against.

All arithmetic is FP32 (FP64 for FP64 inputs); inputs are promoted once at entry, outputs rounded once at exit.
Shapes: ``S`` ``[..., K, D]``, ``y`` ``[..., D]``, weights ``[D, K]`` (``[D, 1]`` for a scalar forget gate).
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from olmo_core.nn.depth.connection import rms_norm, rms_normalize, upcast

if TYPE_CHECKING:
    from ..config import LDMConfig


class LDMParameters(NamedTuple):
    """The parameters of one boundary after the first, all FP32; ``None`` where the options leave one out."""

    w_key: torch.Tensor | None
    """``[D, K]``"""
    b_key: torch.Tensor | None
    """``[K]``; ``None`` at a boundary that does not write"""
    w_query: torch.Tensor | None
    """``[D, K]``"""
    b_query: torch.Tensor
    """``[K]``"""
    w_forget: torch.Tensor | None
    """``[D, K]`` or ``[D, 1]``"""
    b_forget: torch.Tensor | None
    """``[K]`` or ``[1]``"""
    w_beta: torch.Tensor | None
    """``[D]``, the delta rule's erase rate"""
    b_beta: torch.Tensor | None
    """``[1]``"""


class LDMOutput(NamedTuple):
    memory: torch.Tensor
    """``[..., K, D]`` in the dtype of ``y``"""
    x: torch.Tensor
    """``[..., D]`` in the dtype of ``y``"""
    h: torch.Tensor
    """``[..., D]``, FP32: what was read, before the norm"""
    coefficients: dict[str, torch.Tensor]
    """``key``, ``query`` ``[..., K]``, ``forget`` ``[..., K or 1]``, ``beta`` ``[..., 1]``: those that exist"""


def activated_key(z: torch.Tensor, config: "LDMConfig") -> torch.Tensor:
    """The write key of the logits ``z``, ``[..., K]``."""
    if config.key_activation == "two_sigmoid":
        return 2 * torch.sigmoid(z)
    if config.key_activation == "softmax":
        return config.d_k * F.softmax(z, dim=-1)
    return z


def ldm_first_boundary(
    y: torch.Tensor, key_0: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> LDMOutput:
    """
    Boundary 0: ``S_0 = k_0 (outer) y_0`` and ``x = RMSNorm(y_0)``. A read would be a multiple of ``y_0``, which the norm
    removes, so there is no query.
    """
    k = upcast(key_0)
    memory = k[:, None] * upcast(y)[..., None, :]
    x = rms_norm(y, norm_weight, eps, y.dtype)
    return LDMOutput(memory.to(y.dtype), x, upcast(y), {"key": k})


def ldm_boundary(
    memory: torch.Tensor,
    y: torch.Tensor,
    parameters: LDMParameters,
    config: "LDMConfig",
    norm_weight: torch.Tensor,
    eps: float,
    *,
    key_input: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    write: bool = True,
) -> LDMOutput:
    """
    Boundary 1 .. L: forget, write ``y``, query, read, normalise.

    :param memory: ``S``, ``[..., K, D]``.
    :param y: What is written, ``[..., D]``; with ``write=False`` it only feeds the query of ``query_source=output``.
    :param key_input: The input that the sublayer saw, ``[..., D]``, for ``key_source=input``.
    :param residual: Added to what is read, ``[..., D]``.
    :param write: ``False`` at a boundary that only reads (``write_every=block``, after attention).
    """
    p = parameters
    S, v = upcast(memory), upcast(y)
    v_rms = rms_normalize(v, eps)
    coefficients: dict[str, torch.Tensor] = {}

    if write:
        # Forget: a = exp(-softplus(z)), which is sigmoid(-z).
        if config.forget != "none":
            assert p.b_forget is not None
            z = upcast(p.b_forget)
            z = z if p.w_forget is None else v_rms @ upcast(p.w_forget) + z
            a = torch.sigmoid(-z)
            coefficients["forget"] = a
            S = a[..., None] * S

        # Write key.
        assert p.b_key is not None
        z = upcast(p.b_key)
        if p.w_key is not None:
            source = v_rms if key_input is None else rms_normalize(upcast(key_input), eps)
            z = source @ upcast(p.w_key) + z
        k = activated_key(z, config)
        coefficients["key"] = k

        # Store.
        if config.update == "delta":
            assert p.w_beta is not None and p.b_beta is not None
            beta = torch.sigmoid(
                (v_rms * upcast(p.w_beta)).sum(-1, keepdim=True) + upcast(p.b_beta)
            )
            coefficients["beta"] = beta
            unit = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True)
            erased = (unit[..., None] * S).sum(dim=-2)
            S = S - beta[..., None] * unit[..., None] * erased[..., None, :]
        S = S + k[..., None] * v[..., None, :]

    # Query.
    z = upcast(p.b_query)
    if p.w_query is not None:
        source = rms_normalize(S.mean(dim=-2), eps) if config.query_source == "memory" else v_rms
        z = source @ upcast(p.w_query) + z
    if config.query_activation == "softmax":
        q = F.softmax(z, dim=-1)
    elif config.query_activation == "sigmoid":
        q = torch.sigmoid(z)
    else:
        q = z
    coefficients["query"] = q

    # Retrieve.
    h = (q[..., None] * S).sum(dim=-2)
    if residual is not None:
        h = h + upcast(residual)
    x = rms_norm(h, norm_weight, eps, y.dtype)
    coefficients = {name: c.expand(*y.shape[:-1], c.shape[-1]) for name, c in coefficients.items()}
    return LDMOutput(S.to(y.dtype), x, h, coefficients)

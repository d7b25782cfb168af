"""
Launches of :mod:`.triton_inference_kernels`. Importing this module needs Triton. No gradients, and no ``torch.compile``: callers that
are traced or need gradients keep to plain PyTorch.
"""

from dataclasses import dataclass
from functools import cache

import torch

from . import triton_inference_kernels as kernels
from .triton_launcher import Launcher
from .triton_ops import ceil_div, multiprocessors, next_power_of_2, on_device

Tensor = torch.Tensor

MAX_HEAD_DIM = 256
MAX_SPLITS = 64


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch numbers of the decode attention; derived, untimed."""

    slots: int = 64
    """Slots of one step of the loop over the cache."""
    warps: int = 4
    stages: int = 3
    """Steps whose loads are in flight."""
    programs_per_sm: int = 8
    """How many programs a multiprocessor should get, so that the last wave is a small part."""
    min_slots: int = 128
    """The least part of the allocated cache that is worth a program."""


ATTENTION = AttentionLaunch()
INTERPRETER = AttentionLaunch(slots=16, min_slots=16)


def attention_launch(device: int) -> AttentionLaunch:
    return INTERPRETER if device < 0 else ATTENTION


def n_splits(launch: AttentionLaunch, n_heads: int, n_slots: int, device: int) -> int:
    """
    In how many parts, a power of two, the slots of one row and key head are attended to.

    :param n_heads: Key heads of all rows of the batch.
    """
    wanted = ceil_div(launch.programs_per_sm * multiprocessors(device), n_heads)
    if device < 0:
        wanted = 4  # so that the interpreter's tests see the parts put together
    most = max(1, n_slots // launch.min_slots)
    splits = min(next_power_of_2(wanted), MAX_SPLITS)
    while splits > most:
        splits //= 2
    return splits


@cache
def _decode_plan(
    launch: AttentionLaunch,
    n_heads: int,
    n_groups: int,
    head_dim: int,
    splits: int,
    window: int,
    rope: bool,
    full_fp32: bool,
    packed: bool,
) -> tuple[Launcher, Launcher | None]:
    shape = {"E": head_dim, "BE": max(16, next_power_of_2(head_dim)), "SPLITS": splits}
    q_row, kv_row = n_heads * n_groups * head_dim, n_heads * head_dim
    row = q_row + 2 * kv_row
    attention = Launcher(
        kernels.decode_attention_kernel,
        {
            **shape,
            "Q_ROW": row if packed else q_row,
            "KV_ROW": row if packed else kv_row,
            "K_AT": q_row if packed else 0,
            "V_AT": q_row + kv_row if packed else 0,
            "H": n_heads,
            "G": n_groups,
            "BG": max(16, next_power_of_2(n_groups)),  # what the tensor cores multiply
            "BN": launch.slots,
            "WINDOW": window,
            "ROPE": rope,
            "STAGES": launch.stages,
            "PRECISION": "ieee" if full_fp32 else "tf32",
        },
        num_warps=launch.warps,
    )
    if splits == 1:
        return attention, None
    return attention, Launcher(kernels.combine_kernel, {**shape, "BS": splits}, num_warps=4)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window_left: int = -1,
    launch: AttentionLaunch | None = None,
) -> Tensor:
    """
    RoPE, the new key and value into the cache, and attention of one new token a row to all that its row has: up to and with
    its own slot.

    :param q: ``[B, 1, H * G, E]``, before RoPE. Where ``q``, ``k`` and ``v`` are parts of one product, it is read as it is.
    :param k: ``[B, 1, H, E]``, before RoPE.
    :param v: ``[B, 1, H, E]``.
    :param slots: ``[B, 1]`` or ``[1, 1]``, int64.
    :param cos: ``[>= S, E]``, FP32; ``None`` for no RoPE, and so ``sin``.
    :param k_cache: ``[B, S, H, E]``, written; and so ``v_cache``.
    :param window_left: How many tokens before its own a query sees, or -1 for all.

    :returns: ``[B, 1, H * G, E]`` in the dtype of ``q``.
    """
    batch_size, n_slots, n_heads, head_dim = k_cache.shape
    n_q_heads = q.shape[2]
    device = q.get_device()
    launch = launch or attention_launch(device)
    splits = n_splits(launch, batch_size * n_heads, n_slots, device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    row = (n_q_heads + 2 * n_heads) * head_dim
    parts = [(t.data_ptr() - q.data_ptr()) // t.element_size() // head_dim for t in (k, v)]
    packed = (
        batch_size > 1
        and q.stride(0) == k.stride(0) == v.stride(0) == row
        and q.stride()[2:] == k.stride()[2:] == v.stride()[2:] == (head_dim, 1)
        and parts == [n_q_heads, n_q_heads + n_heads]
    )
    if packed:
        q = k = v = q.as_strided((batch_size, row), (row, 1))
    attention, combine = _decode_plan(
        launch,
        n_heads,
        n_q_heads // n_heads,
        head_dim,
        splits,
        window_left,
        cos is not None,
        q.dtype == torch.float32,
        packed,
    )
    partial = None
    if combine is not None:
        n_parts = batch_size * n_q_heads * splits
        partial = torch.empty(n_parts * (head_dim + 2), dtype=torch.float32, device=q.device)
    with on_device(device):
        attention(
            (splits, n_heads, batch_size),
            (q, k, v, slots, cos, sin, k_cache, v_cache),
            (out, partial),
            n_slots,
            0 if slots.shape[0] == 1 else 1,
            scale,
        )
        if combine is not None:
            assert partial is not None
            combine((batch_size * n_q_heads, 1, 1), (partial,), (out,))
    return out


@cache
def _rope_plan(n_q_heads: int, n_heads: int, head_dim: int) -> Launcher:
    half = next_power_of_2(head_dim // 2)
    constants = {
        "HQ": n_q_heads,
        "BHQ": next_power_of_2(n_q_heads),
        "H": n_heads,
        "BH": next_power_of_2(n_heads),
        "E": head_dim,
        "BE": half,
    }
    warps = max(1, min(8, next_power_of_2(n_q_heads) * half // (32 * 8)))
    return Launcher(kernels.rope_store_kernel, constants, num_warps=warps)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """
    RoPE, and the new keys and values into the cache. The parameters are those of :func:`decode_attention`, with any number
    of new tokens.

    :returns: The turned queries, ``[B, T, H * G, E]``.
    """
    batch_size, n_tokens, n_q_heads, head_dim = q.shape
    n_slots, n_heads = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    with on_device(q.get_device()):
        _rope_plan(n_q_heads, n_heads, head_dim)(
            (batch_size * n_tokens, 1, 1),
            (q, k, v, slots, cos, sin, k_cache, v_cache),
            (out,),
            n_tokens,
            n_slots,
            0 if slots.shape[0] == 1 else n_tokens,
        )
    return out


SILU_COLUMNS = 1024


@cache
def _silu_mul_plan(width: int, packed: bool) -> Launcher:
    row, b_at = (2 * width, width) if packed else (width, 0)
    constants = {"F": width, "BF": SILU_COLUMNS, "ROW": row, "B_AT": b_at}
    return Launcher(kernels.silu_mul_kernel, constants, num_warps=4)


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b`` for tensors of one shape, ``[..., F]``, and dtype."""
    out = torch.empty_like(a, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    width = a.shape[-1]
    with on_device(a.get_device()):
        _silu_mul_plan(width, False)(
            (out.numel() // width, ceil_div(width, SILU_COLUMNS), 1), (a, b), (out,)
        )
    return out


def silu_mul_packed(ab: Tensor) -> Tensor:
    """:func:`silu_mul` of the two halves of ``[..., 2 F]``."""
    width = ab.shape[-1] // 2
    out = torch.empty(*ab.shape[:-1], width, dtype=ab.dtype, device=ab.device)
    if out.numel():
        with on_device(ab.get_device()):
            _silu_mul_plan(width, True)(
                (out.numel() // width, ceil_div(width, SILU_COLUMNS), 1), (ab, ab), (out,)
            )
    return out


@cache
def _add_rms_norm_plan(d: int, add: bool) -> Launcher:
    block = next_power_of_2(d)
    warps = max(1, min(16, block // (32 * 8)))
    return Launcher(kernels.add_rms_norm_kernel, {"ADD": add, "D": d, "BD": block}, num_warps=warps)


def add_rms_norm(h: Tensor | None, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """
    PreLN's boundary.

    :param h: The residual stream, ``[..., D]``, or ``None`` for none yet.
    :param y: What is added to it, of the same shape and dtype.
    :param weight: The gain, ``[D]``.

    :returns: The new residual stream (``y`` itself without ``h``) and its norm, in the dtype of ``y``.
    """
    d = y.shape[-1]
    x = torch.empty_like(y, memory_format=torch.contiguous_format)
    h_out = None if h is None else torch.empty_like(x)
    if x.numel():
        with on_device(y.get_device()):
            _add_rms_norm_plan(d, h is not None)(
                (x.numel() // d, 1, 1), (h, y, weight), (x, h_out), eps
            )
    return y if h_out is None else h_out, x

"""
Triton kernels that every method shares in inference: attention over the KV cache, RoPE into it, SwiGLU's product, and PreLN's
boundary. Forward only.

A decode step launches each of them once a sublayer, so that it is short of launches before it is short of anything else: what
would be ten elementwise kernels of RoPE and a copy of the keys and values happens inside the attention kernel, while its
loads of the cache are in flight.

Layouts (row-major)::

    q                [B, T, H * G, E]     G query heads share a key head
    k, v             [B, T, H, E]; in a decode step the three may be parts of one [B, (H * G + 2 H) * E]
    k_cache, v_cache [B, S, H, E]
    slots            [R, T] int64, R = B or 1: the slot, and so the position, of every new token
    cos, sin         [>= S, E] FP32, the two halves of a row equal
    partial          FP32: [B, H * G, SPLITS, E] sums, then [B, H * G, SPLITS] maxima, then as many sums of weights

Counts that differ between calls are not specialised on: one compiled kernel serves all of them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotate(x, partner, cos, sin, lower):
    """RoPE of ``x``, whose other half is ``partner``; ``lower``: which elements are in the first half. FP32."""
    return x * cos + tl.where(lower, -partner, partner) * sin


@triton.jit(do_not_specialize=["n_slots", "slot_stride"])
def decode_attention_kernel(
    q, k, v, slots, cos, sin, k_cache, v_cache, out, partial, n_slots, slot_stride, scale,
    H: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, ROPE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, Q_ROW: tl.constexpr, KV_ROW: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr,
):  # fmt: skip
    """
    ``Q_ROW``, ``KV_ROW``: elements from one row's queries (keys, values) to the next one's; ``K_AT``, ``V_AT``: elements before the
    first row's.

    One new token a row (``T = 1``). Program ``(split, head, row)`` takes its part of the slots that the row really has,
    for all query heads of one key head; the first one also stores the new key and value and starts from them.
    """
    split = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + b * slot_stride)

    e = tl.arange(0, BE)
    g = tl.arange(0, BG)
    n = tl.arange(0, BN)
    in_e = e < E
    in_q = (g < G)[:, None] & in_e[None, :]
    dtype = k_cache.dtype.element_ty
    q_row = (b * H + h) * G + g
    q_at = q_row[:, None] * E
    from_q = b * Q_ROW + (h * G + g)[:, None] * E
    new = b * KV_ROW + h * E
    query = tl.load(q + from_q + e[None, :], mask=in_q, other=0.0)
    if ROPE:
        other = (e + E // 2) % E
        lower = e < E // 2
        c = tl.load(cos + slot * E + e, mask=in_e, other=0.0)
        s = tl.load(sin + slot * E + e, mask=in_e, other=0.0)
        partner = tl.load(q + from_q + other[None, :], mask=in_q, other=0.0).to(tl.float32)
        query = rotate(query.to(tl.float32), partner, c[None, :], s[None, :], lower[None, :]).to(
            dtype
        )

    maximum = tl.full([BG], float("-inf"), tl.float32)
    weights = tl.zeros([BG], tl.float32)
    total = tl.zeros([BG, BE], tl.float32)
    cached = (b * n_slots * H + h) * E
    if split == 0:
        key = tl.load(k + K_AT + new + e, mask=in_e, other=0.0)
        value = tl.load(v + V_AT + new + e, mask=in_e, other=0.0).to(dtype)
        if ROPE:
            partner_k = tl.load(k + K_AT + new + other, mask=in_e, other=0.0).to(tl.float32)
            key = rotate(key.to(tl.float32), partner_k, c, s, lower)
        key = key.to(dtype)
        at = cached + slot * (H * E) + e
        tl.store(k_cache + at, key, mask=in_e)
        tl.store(v_cache + at, value, mask=in_e)
        maximum = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * (
            scale * LOG2_E
        )
        weights += 1.0
        total += value.to(tl.float32)[None, :]

    first = tl.zeros([], tl.int64)
    if WINDOW >= 0:
        first = tl.maximum(slot - WINDOW, 0)
    # The programs share what the row has, not what is allocated for it.
    each = tl.cdiv(tl.cdiv(slot - first, SPLITS), BN) * BN
    start = first + split * each
    end = tl.minimum(start + each, slot)
    for i in tl.range(0, tl.maximum(end - start, 0), BN, num_stages=STAGES):
        rows = start + i + n
        in_n = rows < end
        at = cached + rows * (H * E)
        keys = tl.load(
            k_cache + at[None, :] + e[:, None], mask=in_n[None, :] & in_e[:, None], other=0.0
        )
        z = tl.dot(query, keys, input_precision=PRECISION) * (scale * LOG2_E)
        z = tl.where(in_n[None, :], z, float("-inf"))
        larger = tl.maximum(maximum, tl.max(z, axis=1))
        p = tl.exp2(z - larger[:, None])
        shrink = tl.exp2(maximum - larger)
        weights = weights * shrink + tl.sum(p, axis=1)
        values = tl.load(
            v_cache + at[:, None] + e[None, :], mask=in_n[:, None] & in_e[None, :], other=0.0
        )
        total = total * shrink[:, None] + tl.dot(p.to(dtype), values, input_precision=PRECISION)
        maximum = larger

    if SPLITS == 1:
        tl.store(out + q_at + e[None, :], total / weights[:, None], mask=in_q)
    else:
        part = q_row * SPLITS + split
        tl.store(partial + part[:, None] * E + e[None, :], total, mask=in_q)
        n_parts = tl.num_programs(2).to(tl.int64) * (H * G * SPLITS)
        tl.store(partial + n_parts * E + part, maximum, mask=g < G)
        tl.store(partial + n_parts * (E + 1) + part, weights, mask=g < G)


@triton.jit
def combine_kernel(
    partial, out,
    E: tl.constexpr, BE: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The parts of :func:`decode_attention_kernel` to one output; a program for each row and query head."""
    row = tl.program_id(0).to(tl.int64)
    n_parts = tl.num_programs(0).to(tl.int64) * SPLITS
    s = tl.arange(0, BS)
    e = tl.arange(0, BE)
    part = row * SPLITS + s
    in_s = s < SPLITS
    mask = in_s[:, None] & (e < E)[None, :]
    maximum = tl.load(partial + n_parts * E + part, mask=in_s, other=float("-inf"))
    weights = tl.load(partial + n_parts * (E + 1) + part, mask=in_s, other=0.0)
    total = tl.load(partial + part[:, None] * E + e[None, :], mask=mask, other=0.0)
    # Finite: the first part always has the new token.
    share = tl.exp2(maximum - tl.max(maximum, axis=0))
    result = tl.sum(total * share[:, None], axis=0) / tl.sum(weights * share, axis=0)
    tl.store(out + row * E + e, result, mask=e < E)


@triton.jit(do_not_specialize=["n_tokens", "n_slots", "slot_stride"])
def rope_store_kernel(
    q, k, v, slots, cos, sin, k_cache, v_cache, q_out, n_tokens, n_slots, slot_stride,
    HQ: tl.constexpr, BHQ: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    """RoPE of the queries, and of the keys on their way into the cache; the values go as they are. A program a token."""
    token = tl.program_id(0).to(tl.int64)
    b = token // n_tokens
    slot = tl.load(slots + b * slot_stride + token % n_tokens)
    e = tl.arange(0, BE)
    in_e = e < E // 2
    c = tl.load(cos + slot * E + e, mask=in_e, other=0.0)[None, :]
    s = tl.load(sin + slot * E + e, mask=in_e, other=0.0)[None, :]

    heads = tl.arange(0, BHQ)
    mask = (heads < HQ)[:, None] & in_e[None, :]
    at = (token * HQ + heads[:, None]) * E + e[None, :]
    lower = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(q + at + E // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(q_out + at, lower * c - upper * s, mask=mask)
    tl.store(q_out + at + E // 2, upper * c + lower * s, mask=mask)

    heads = tl.arange(0, BH)
    mask = (heads < H)[:, None] & in_e[None, :]
    at = (token * H + heads[:, None]) * E + e[None, :]
    to = ((b * n_slots + slot) * H + heads[:, None]) * E + e[None, :]
    lower = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(k + at + E // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(k_cache + to, lower * c - upper * s, mask=mask)
    tl.store(k_cache + to + E // 2, upper * c + lower * s, mask=mask)
    tl.store(v_cache + to, tl.load(v + at, mask=mask, other=0.0), mask=mask)
    tl.store(v_cache + to + E // 2, tl.load(v + at + E // 2, mask=mask, other=0.0), mask=mask)


@triton.jit
def silu_mul_kernel(
    a, b, out, F: tl.constexpr, BF: tl.constexpr, ROW: tl.constexpr, B_AT: tl.constexpr
):
    """
    ``silu(a) * b`` in FP32, one rounding at the end. A program for ``BF`` columns of a row of ``F``. Rows of ``a`` and ``b`` are
    ``ROW`` elements apart, those of ``b`` begin ``B_AT`` after the pointer.
    """
    # The width is a constant, so that the compiler sees that rows are aligned and loads 16 bytes at a time.
    column = tl.program_id(1) * BF + tl.arange(0, BF)
    row = tl.program_id(0).to(tl.int64)
    i = row * ROW + column
    mask = column < F
    x = tl.load(a + i, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(b + B_AT + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, x * tl.sigmoid(x) * y, mask=mask)


@triton.jit
def add_rms_norm_kernel(
    h, y, weight, x, h_out, eps, ADD: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """``h_out = h + y`` (rounded) and ``x = rms_norm(h_out) * weight``; without ``ADD``, of ``y`` alone. A program a row."""
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BD)
    mask = d < D
    value = tl.load(y + row + d, mask=mask, other=0.0)
    gain = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value = (
            tl.load(h + row + d, mask=mask, other=0.0).to(tl.float32) + value.to(tl.float32)
        ).to(h_out.dtype.element_ty)
        tl.store(h_out + row + d, value, mask=mask)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    tl.store(x + row + d, value * scale * gain, mask=mask)

"""
Triton kernels of an mHC boundary for few tokens, as in a decode step. Forward only; the maths is that of :mod:`..reference`.

The training forward gives a program 64 tokens and all that belongs to them. With one token, a single multiprocessor then reads the
whole of ``phi`` (786 KB at D = 2048, N = 4) and mixes all streams alone: 108 us a boundary on an H200. Here the width is cut into
chunks, a program each, and a second kernel, which needs the sums over all of them, finishes:

1. :func:`mix_kernel`, program (chunk, tile of tokens): the new streams of the chunk, and what they add to their product with
   ``phi`` and to their square.
2. :func:`finish_kernel`, program (role, token): the sums of these parts, always in the same order; then one role collapses the
   streams and normalises the result, while the other does the Sinkhorn iteration: 40 normalisations, each waiting for the one before,
   take longer than all the rest.

Layouts in memory (row-major)::

    streams, streams_out  [M, N, D] in the model's dtype
    y, x                  [M, D] in the model's dtype
    post, res             [M, N], [M, N, N] FP32
    phi                   [N * D, COLUMNS], the parameter itself; columns: pre, post, res
    partial               [M, CHUNKS, BN] FP32: products with ``phi`` and, in column COLUMNS, the sum of squares

``PREVIOUS`` and ``NEXT`` are those of :mod:`.kernels`. The number of tokens is not specialised on: one compiled kernel serves many.
A kernel may be launched before its predecessor has ended (programmatic dependent launch): it reads what does not depend on that,
and waits; ``WAITS``: whether the device knows how, from Hopper on. ``NATIVE`` is false in the interpreter, which knows no PTX.
"""

# mypy: disable-error-code="assignment, misc"
# Triton's only sequences are tuples, which grow here.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kernels import join_streams, load_vectors, reciprocal

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_streams(streams, at, mask, N: tl.constexpr, D: tl.constexpr, PREVIOUS: tl.constexpr):
    """What is ``at`` a place of the first stream, and at the same place of the others, FP32; nothing if there are none yet."""
    out = ()
    if PREVIOUS != "first":
        for j in tl.static_range(N):
            out += (tl.load(streams + at + j * D, mask=mask, other=0.0).to(tl.float32),)
    return out


@triton.jit
def mix(k: tl.constexpr, v, old, posts, mixes, N: tl.constexpr, PREVIOUS: tl.constexpr):
    """The new stream ``k``, FP32, from the output ``v`` and the streams ``old``."""
    if PREVIOUS == "first":
        return v
    else:
        m = posts[k] * v
        if PREVIOUS == "identity":
            m += old[k]
        else:
            for j in tl.static_range(N):
                m += mixes[k * N + j] * old[j]
        return m


@triton.jit(do_not_specialize=["n_tokens"])
def mix_kernel(
    streams,  # [M, N, D] or None: the first boundary
    y,  # [M, D]
    post,  # [M, N] or None
    res,  # [M, N, N] or None
    phi,  # [N * D, COLUMNS] or None
    streams_out,  # [M, N, D]
    partial,  # [M, CHUNKS, BN] or None
    n_tokens,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    BN: tl.constexpr,  # power of two > COLUMNS
    BT: tl.constexpr,  # tokens of a program
    BD: tl.constexpr,  # its part of the width
    CHUNKS: tl.constexpr,
    PRODUCT: tl.constexpr,  # "fma"; or on the tensor cores, "tf32x2" for streams that are TF32 numbers, "tf32x3" for others
    NATIVE: tl.constexpr,
    WAITS: tl.constexpr,
):
    if WAITS:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * BT
    dd = chunk * BD + tl.arange(0, BD)
    in_d = dd < D
    c = tl.arange(0, BN)
    dtype = y.dtype.element_ty
    # From memory, while everything else is in L2, and known before the predecessor ends: first of all.
    if NEXT != "sum":
        if PRODUCT == "fma":
            maps = ()
            for k in tl.static_range(N):
                at = (k * D + dd)[:, None] * COLUMNS + c[None, :]
                mask = in_d[:, None] & (c < COLUMNS)[None, :]
                maps += (tl.load(phi + at, mask=mask, other=0.0).to(tl.float32),)
        else:
            row = tl.arange(0, BD * N)
            column = chunk * BD + row // N
            at = ((row % N) * D + column)[:, None] * COLUMNS + c[None, :]
            mask = (column < D)[:, None] & (c < COLUMNS)[None, :]
            joined_maps = tl.load(phi + at, mask=mask, other=0.0).to(tl.float32)
    if WAITS:
        # Without an early launch it only keeps the loads in this order: ptxas had put those of phi behind the others' use.
        gdc_wait()

    posts = ()
    mixes = ()
    if PRODUCT == "fma":
        for t in tl.static_range(BT):
            tok = first + t
            here = tok < n_tokens
            mask = in_d & here
            v = tl.load(y + tok * D + dd, mask=mask, other=0.0).to(tl.float32)
            old = load_streams(streams, tok * (N * D) + dd, mask, N, D, PREVIOUS)
            if PREVIOUS != "first":
                posts = load_vectors(post + tok * N, here, N)
            if PREVIOUS == "sinkhorn":
                mixes = load_vectors(res + tok * (N * N), here, N * N)
            products = tl.zeros([BD, BN], tl.float32)
            for k in tl.static_range(N):
                # Rounded before anything is computed from it, as in the reference.
                m = mix(k, v, old, posts, mixes, N, PREVIOUS).to(dtype)
                tl.store(streams_out + tok * (N * D) + (k * D + dd), m, mask=mask)
                if NEXT != "sum":
                    value = m.to(tl.float32)[:, None]
                    products += value * tl.where((c == COLUMNS)[None, :], value, maps[k])
            if NEXT != "sum":
                to = partial + (tok * CHUNKS + chunk) * BN + c
                tl.store(to, tl.sum(products, axis=0), mask=here)
    else:
        tok = first + tl.arange(0, BT)
        here = tok < n_tokens
        mask = here[:, None] & in_d[None, :]
        v = tl.load(y + tok[:, None] * D + dd[None, :], mask=mask, other=0.0).to(tl.float32)
        old = load_streams(streams, tok[:, None] * (N * D) + dd[None, :], mask, N, D, PREVIOUS)
        if PREVIOUS != "first":
            posts = load_vectors((post + tok * N)[:, None], here[:, None], N)
        if PREVIOUS == "sinkhorn":
            mixes = load_vectors((res + tok * (N * N))[:, None], here[:, None], N * N)
        out_rows = streams_out + tok[:, None] * (N * D)
        squares = tl.zeros([BT, BD], tl.float32)
        new = ()
        for k in tl.static_range(N):
            m = mix(k, v, old, posts, mixes, N, PREVIOUS).to(dtype)
            tl.store(out_rows + (k * D + dd)[None, :], m, mask=mask)
            new += (m,)
            squares += m.to(tl.float32) * m.to(tl.float32)
        if NEXT != "sum":
            joined = join_streams(new, N, BT, BD)
            if NATIVE and (PRODUCT == "tf32x2"):
                # Opaque, or Triton mixes the streams once more in the layout of the product's operand, and exchanges all that
                # they come from through shared memory: 55 barriers instead of 9.
                joined = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [joined], dtype, is_pure=False, pack=2
                )
            joined = joined.to(tl.float32)
            products = tl.zeros([BT, BN], tl.float32)
            if PRODUCT == "tf32x2":
                # Two TF32 numbers hold phi to 2^-21, and one a BF16 or FP16 number.
                high = joined_maps.to(tl.int32, bitcast=True) & -8192
                high = high.to(tl.float32, bitcast=True)
                products = tl.dot(joined, joined_maps - high, products, input_precision="tf32")
                products = tl.dot(joined, high, products, input_precision="tf32")
            else:
                products = tl.dot(joined, joined_maps, products, input_precision="tf32x3")
            to = partial + (tok * CHUNKS + chunk) * BN
            mask = here[:, None] & (c != COLUMNS)[None, :]
            tl.store(to[:, None] + c[None, :], products, mask=mask)
            tl.store(to + COLUMNS, tl.sum(squares, axis=1), mask=here)


@triton.jit
def pick(z, c, k: tl.constexpr):
    """Element ``k`` of a vector with the indices ``c``, as a scalar in every thread."""
    return tl.sum(tl.where(c == k, z, 0.0), axis=0)


@triton.jit
def largest(values, START: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr):
    out = values[START]
    for j in tl.static_range(1, N):
        out = tl.maximum(out, values[START + j * STEP])
    return out


@triton.jit
def sinkhorn_of_scalars(logits, ITERATIONS: tl.constexpr, N: tl.constexpr, NATIVE: tl.constexpr):
    """
    ``H_res`` from ``N * N`` scalar logits in units of ln 2, all in one thread: a sum is then N - 1 additions, not an exchange
    between threads. The first iteration is in the log domain, for the reason given at :func:`.kernels.normalize_first`; after it
    the matrix is ``u_i E_ij v_j``, and only u and v change. Neither leaves [4^-20, 4^20].
    """
    columns = ()
    for j in tl.static_range(N):
        top = largest(logits, j, N, N)
        total = tl.exp2(logits[j] - top)
        for i in tl.static_range(1, N):
            total += tl.exp2(logits[i * N + j] - top)
        columns += (top + tl.log2(total),)
    entries = ()
    for i in tl.static_range(N):
        row = ()
        for j in tl.static_range(N):
            row += (logits[i * N + j] - columns[j],)
        top = largest(row, 0, 1, N)
        powers = ()
        for j in tl.static_range(N):
            powers += (tl.exp2(row[j] - top),)
        total = powers[0]
        for j in tl.static_range(1, N):
            total += powers[j]
        scale = reciprocal(total, NATIVE)
        for j in tl.static_range(N):
            entries += (powers[j] * scale,)
    u = ()
    for _i in tl.static_range(N):
        u += (total * 0.0 + 1.0,)
    v = u
    for _t in tl.range(1, ITERATIONS):
        new_v = ()
        for j in tl.static_range(N):
            total = entries[j] * u[0]
            for i in tl.static_range(1, N):
                total += entries[i * N + j] * u[i]
            new_v += (reciprocal(total, NATIVE),)
        new_u = ()
        for i in tl.static_range(N):
            total = entries[i * N] * new_v[0]
            for j in tl.static_range(1, N):
                total += entries[i * N + j] * new_v[j]
            new_u += (reciprocal(total, NATIVE),)
        v = new_v
        u = new_u
    out = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            out += (u[i] * entries[i * N + j] * v[j],)
    return out


@triton.jit
def load_parts(partial, tok, c, BN: tl.constexpr, CHUNKS: tl.constexpr, BC: tl.constexpr):
    """The columns ``c`` of every chunk."""
    i = tl.arange(0, BC)
    at = (tok * CHUNKS + i)[:, None] * BN + c[None, :]
    return tl.load(partial + at, mask=(i < CHUNKS)[:, None], other=0.0)


@triton.jit
def collapse(
    tok, streams_out, partial, alpha, bias, norm_weight, x, post_out, eps,
    D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, NEXT: tl.constexpr, BN: tl.constexpr,
    BW: tl.constexpr, CHUNKS: tl.constexpr, BC: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """``x`` and ``post`` of one token."""
    has_maps: tl.constexpr = (NEXT == "sinkhorn") or (NEXT == "identity")
    # Without the columns of res, whose registers would be those of loads under way.
    gates: tl.constexpr = 2 * N if has_maps else N
    d = tl.arange(0, BW)
    in_d = d < D
    c = tl.arange(0, gates)
    gain = tl.load(norm_weight + d, mask=in_d, other=0.0).to(tl.float32)
    biases = ()
    if NEXT != "sum":
        scale_pre = tl.load(alpha).to(tl.float32)
        biases = load_vectors(bias, True, gates)
    if has_maps:
        scale_post = tl.load(alpha + 1).to(tl.float32)
    if WAITS:
        gdc_wait()
    rows = ()
    for k in tl.static_range(N):
        at = tok * (N * D) + (k * D + d)
        rows += (tl.load(streams_out + at, mask=in_d, other=0.0),)
    # Or ptxas moves most of these loads behind the sum of the parts, so that they are not under way meanwhile.
    tl.debug_barrier()
    if NEXT != "sum":
        squares = load_parts(partial, tok, COLUMNS + tl.arange(0, 1), BN, CHUNKS, BC)
        parts = load_parts(partial, tok, c, BN, CHUNKS, BC)
    h = tl.zeros([BW], tl.float32)
    if NEXT == "sum":
        for k in tl.static_range(N):
            h += rows[k].to(tl.float32)
    else:
        z = tl.sum(parts, axis=0)
        rstd = tl.rsqrt(tl.sum(squares) / (N * D) + eps)
        for k in tl.static_range(N):
            logit = scale_pre * (pick(z, c, k) * rstd) + biases[k].to(tl.float32)
            h += tl.sigmoid(logit) * rows[k].to(tl.float32)
    rstd_h = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    tl.store(x + tok * D + d, (h * rstd_h * gain).to(x.dtype.element_ty), mask=in_d)
    if has_maps:
        for k in tl.static_range(N):
            logit = scale_post * (pick(z, c, N + k) * rstd) + biases[N + k].to(tl.float32)
            tl.store(post_out + tok * N + k, 2.0 * tl.sigmoid(logit))


@triton.jit
def residual_map(
    tok, partial, alpha, bias, res_out, eps,
    D: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, ITERATIONS: tl.constexpr,
    BN: tl.constexpr, CHUNKS: tl.constexpr, BC: tl.constexpr, NATIVE: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """``res`` of one token."""
    c = tl.arange(0, BN)
    scale = tl.load(alpha + 2).to(tl.float32)
    biases = load_vectors(bias + 2 * N, True, N * N)
    if WAITS:
        gdc_wait()
    z = tl.sum(load_parts(partial, tok, c, BN, CHUNKS, BC), axis=0)
    rstd = tl.rsqrt(pick(z, c, COLUMNS) / (N * D) + eps)
    logits = ()
    for e in tl.static_range(N * N):
        logit = scale * (pick(z, c, 2 * N + e) * rstd) + biases[e].to(tl.float32)
        logits += (logit * LOG2_E,)
    entries = sinkhorn_of_scalars(logits, ITERATIONS, N, NATIVE)
    for e in tl.static_range(N * N):
        tl.store(res_out + tok * (N * N) + e, entries[e])


@triton.jit
def finish_kernel(
    streams_out,  # [M, N, D]
    partial,  # [M, CHUNKS, BN] or None
    alpha,  # [alphas] or None
    bias,  # [COLUMNS] or None
    norm_weight,  # [D]
    x,  # [M, D]
    post_out,  # [M, N] or None
    res_out,  # [M, N, N] or None
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,  # power of two >= D
    CHUNKS: tl.constexpr,
    BC: tl.constexpr,  # power of two >= CHUNKS
    NATIVE: tl.constexpr,
    WAITS: tl.constexpr,
):
    tok = tl.program_id(1).to(tl.int64)
    # The longer one first, so that with more programs than fit it does not come last.
    if (NEXT != "sinkhorn") or (tl.program_id(0) == 1):
        collapse(
            tok, streams_out, partial, alpha, bias, norm_weight, x, post_out, eps,
            D, N, COLUMNS, NEXT, BN, BW, CHUNKS, BC, WAITS,
        )  # fmt: skip
    else:
        residual_map(
            tok, partial, alpha, bias, res_out, eps,
            D, N, COLUMNS, ITERATIONS, BN, CHUNKS, BC, NATIVE, WAITS,
        )  # fmt: skip

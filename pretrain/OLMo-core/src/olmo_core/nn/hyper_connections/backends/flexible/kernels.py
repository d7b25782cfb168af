"""
Triton kernels of mHC's ``flexible`` backend. The maths is that of :mod:`..reference`.

Everything is bound by memory, so what counts is how often a token's ``[N, D]`` streams cross the bus. The forward is one
kernel: a program mixes the streams of ``BT`` tokens chunk by chunk, accumulates their product with ``phi`` on the tensor
cores, and reads the streams that it has just written once more, from L2 if its tile is small enough, to collapse them.
The backward is three: what depends on whole rows (norm, collapse, maps, Sinkhorn); what does not, with one chunk of the
width for each program, so that its part of ``phi`` and of ``d_phi`` stays on chip; and the sums of partial results.

Layouts in memory (row-major), FP32 where not said::

    streams         [M, N, D] in the model's dtype
    y, x            [M, D] in the model's dtype
    post, res       [M, N], [M, N, N]
    phi             [N * D, COLUMNS]; for BF16 streams the forward takes [D, N, 2, COLUMNS] BF16: what BF16 keeps of it,
                    and what BF16 keeps of the rest
    saved           [M, COLUMNS] products X phi before the norm; [M] reciprocal RMS of X; [M] reciprocal RMS of h; [M, N]
                    H_pre
    scratch         [programs, D + SMALL] sums of each program for the gain, the biases and the alphas;
                    [M, COLUMNS] Q = alpha dlogits rstd, so that d_phi = X^T Q and dX has Q phi^T;
                    [M] what dh has of -h from the norm; [M] what dX has of -X from the RMS; [M, N] d_pre;
                    [splits, N * D, COLUMNS] sums for phi; [chunks, M, N] and [chunks, M, N * N] for post and res;
                    [programs, ITERATIONS, BT, N] row scalings of the Sinkhorn iteration
    d_parameters    [N * D, COLUMNS] phi; [D] gain; [COLUMNS] bias; [alphas]

``PREVIOUS`` says how the last sublayer's output joins the streams: ``first`` (they are copies of it), ``identity``,
``sinkhorn``; ``NEXT`` what is computed for the next: the maps with H_res by ``sinkhorn`` or the ``identity``, only the
``gate`` of the last collapse, or nothing (``sum``). Columns: pre, post, res.
Counts of tokens, programs and splits are not specialised on: one compiled kernel serves all of them, which the
launcher relies on.
"""

# mypy: disable-error-code="assignment, misc"
# Triton's only sequences are tuples, which grow here.

import triton
import triton.language as tl


@triton.jit
def wide(n):
    """``n`` in 64 bits; in the interpreter it may be a Python integer."""
    return tl.full([], 0, tl.int64) + n


@triton.jit
def load_each(rows, columns, mask, N: tl.constexpr, STRIDE: tl.constexpr):
    """``N`` tiles, ``STRIDE`` apart: what each stream has at ``columns`` of ``rows``."""
    out = ()
    for j in tl.static_range(N):
        tile = tl.load(
            rows + (columns + j * STRIDE), mask=mask, other=0.0, eviction_policy="evict_first"
        )
        out += (tile,)
    return out


@triton.jit
def load_scalars(rows, mask, N: tl.constexpr):
    """``N`` numbers of each token, as that many ``[BT, 1]``."""
    out = ()
    for j in tl.static_range(N):
        out += (tl.load(rows + j, mask=mask, other=0.0)[:, None],)
    return out


@triton.jit
def widen(tile, BF16: tl.constexpr):
    """To FP32. By hand for BF16: Triton takes two instructions for the upper of two numbers in a register."""
    if BF16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [tile],
            tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return tile.to(tl.float32)


@triton.jit
def narrow(tile, dtype: tl.constexpr, BF16: tl.constexpr):
    """To the model's dtype. By hand for BF16: two numbers in one instruction, and one that is not the slow F2F."""
    if BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [tile], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tile.to(dtype)


@triton.jit
def reciprocal(v, BF16: tl.constexpr):
    """Of a sum of the Sinkhorn iteration, never far from 1: without the cases of a division, to one unit in the last place."""
    if BF16:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [v], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / v


@triton.jit
def sinkhorn_start(logits):
    """
    The first iteration, in the log domain: columns, then rows, of ``[BT, N, N]``. Whatever the logits, every row now sums
    to 1 and every column to at least 1 / N, so that no later factor leaves [1 / N, N]: the other iterations may multiply
    instead of taking logarithms, and an entry that underflows here could not have grown to matter.
    """
    columns = logits - tl.max(logits, axis=1)[:, None, :]
    columns -= tl.log(tl.sum(tl.exp(columns), axis=1))[:, None, :]
    rows = tl.exp(columns - tl.max(columns, axis=2)[:, :, None])
    return tl.exp(columns), rows * (1.0 / tl.sum(rows, axis=2))[:, :, None]


@triton.jit
def join_streams(tiles, N: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """``N`` tiles ``[BT, BD]`` as one ``[BT, BD * N]``, the stream as the faster index: a thread's own values side by side."""
    if N == 1:
        return tiles[0]
    elif N == 2:
        return tl.reshape(tl.join(tiles[0], tiles[1]), [BT, BD * 2])
    else:
        pairs = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        return tl.reshape(pairs, [BT, BD * 4])


@triton.jit
def sum_streams(tiles, N: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The sums of ``N`` tiles ``[BT, BD]`` over the columns, ``[BT, N]``: one result to store, since each costs a barrier."""
    return tl.sum(tl.reshape(join_streams(tiles, N, BT, BD), [BT, BD, N]), axis=1)


@triton.jit
def split_streams(tile, N: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """What :func:`join_streams` joined."""
    if N == 1:
        return (tile,)
    elif N == 2:
        a, b = tl.split(tl.reshape(tile, [BT, BD, 2]))
        return (a, b)
    else:
        even, odd = tl.split(tl.reshape(tile, [BT, BD, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return (a, b, c, d)


@triton.jit(do_not_specialize=["n_tokens"])
def boundary_forward_kernel(
    streams,  # [M, N, D] or None: the first boundary
    y,  # [M, D]
    post,  # [M, N] or None
    res,  # [M, N, N] or None
    phi,
    alpha,  # [alphas] or None
    bias,  # [COLUMNS] or None
    norm_weight,  # [D]
    streams_out,  # [M, N, D]
    x,  # [M, D]
    post_out,  # [M, N] or None
    res_out,  # [M, N, N] or None
    saved,
    n_tokens,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,  # power of two >= 16 and COLUMNS
    ROWS: tl.constexpr,  # tokens whose whole rows are held at once
    BW: tl.constexpr,  # power of two >= D
    STAGES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BT
    tok = first + tl.arange(0, BT)
    mask_t = tok < n_tokens
    c = tl.arange(0, BN)
    mask_c = (c < COLUMNS)[None, :]
    # What the product with phi sums over: stream and column, the stream faster.
    inner = tl.arange(0, BD * N)
    terms = tl.arange(0, 2 * BN)
    rstd_at = saved + wide(n_tokens) * COLUMNS
    gates_at = rstd_at + 2 * wide(n_tokens)
    if PREVIOUS != "first":
        posts = load_scalars(post + tok * N, mask_t, N)
        in_rows = streams + tok[:, None] * (N * D)
    if PREVIOUS == "sinkhorn":
        mixes = load_scalars(res + tok * (N * N), mask_t, N * N)
    y_rows = y + tok[:, None] * D
    out_rows = streams_out + tok[:, None] * (N * D)

    products = tl.zeros([BT, 2 * BN if BF16 else BN], tl.float32)
    squares = tl.zeros([BT], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        dd = start + tl.arange(0, BD)
        if D % BD == 0:
            mask = mask_t[:, None]
        else:
            mask = mask_t[:, None] & (dd < D)[None, :]
        v = tl.load(y_rows + dd[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        v = widen(v, BF16)
        if PREVIOUS != "first":
            old = load_each(in_rows, dd[None, :], mask, N, D)
        square = tl.zeros([BT, BD], tl.float32)
        new = ()
        for k in tl.static_range(N):
            if PREVIOUS == "first":
                m = v
            else:
                m = posts[k] * v
                if PREVIOUS == "identity":
                    m += widen(old[k], BF16)
                else:
                    for j in tl.static_range(N):
                        m += mixes[k * N + j] * widen(old[j], BF16)
            # Rounded before anything is computed from it, so that the backward sees the same streams.
            m = narrow(m, y.dtype.element_ty, BF16)
            new += (m,)
            tl.store(out_rows + (k * D + dd)[None, :], m, mask=mask)
            m = widen(m, BF16)
            square += m * m
        if NEXT != "sum":
            joined = join_streams(new, N, BT, BD)
            if BF16:
                # Opaque, or Triton mixes the streams once more in the layout of the product's operand, in which a third of
                # the warps have values of their own.
                joined = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=r,r", [joined], tl.bfloat16, is_pure=False, pack=2
                )
                w_at = (start * N + inner)[:, None] * (2 * COLUMNS)
                w_at += ((terms // BN) * COLUMNS + terms % BN)[None, :]
                mask_w = (terms % BN < COLUMNS)[None, :]
                if D % BD != 0:
                    mask_w = mask_w & (start * N + inner < D * N)[:, None]
                products = tl.dot(joined, tl.load(phi + w_at, mask=mask_w, other=0.0), products)
            else:
                column = start + inner // N
                w_at = ((inner % N) * D + column)[:, None] * COLUMNS + c[None, :]
                w = tl.load(phi + w_at, mask=mask_c & (column < D)[:, None], other=0.0)
                products = tl.dot(
                    joined.to(tl.float32), w.to(tl.float32), products, input_precision="tf32x3"
                )
            squares += tl.sum(square, axis=1)

    i = tl.arange(0, N)
    if NEXT != "sum":
        if BF16:
            products = tl.sum(tl.reshape(products, [BT, 2, BN]), axis=1)
        tl.store(
            saved + tok[:, None] * COLUMNS + c[None, :], products, mask=mask_t[:, None] & mask_c
        )
        tl.store(rstd_at + tok, tl.rsqrt(squares / (N * D) + eps), mask=mask_t)
        # From here on threads read what others of the program have written.
        tl.debug_barrier()
        rstd = tl.load(rstd_at + tok, mask=mask_t, other=0.0)
        at = tok[:, None] * COLUMNS + i[None, :]
        z = tl.load(saved + at, mask=mask_t[:, None], other=0.0) * rstd[:, None]
        z = tl.load(alpha).to(tl.float32) * z + tl.load(bias + i).to(tl.float32)[None, :]
        tl.store(gates_at + tok[:, None] * N + i[None, :], tl.sigmoid(z), mask=mask_t[:, None])
    tl.debug_barrier()

    dw = tl.arange(0, BW)
    mask_w = dw < D
    gain = tl.load(norm_weight + dw, mask=mask_w, other=0.0).to(tl.float32)[None, :]
    for sub in tl.range(0, BT, ROWS):
        r = sub + tl.arange(0, ROWS)
        mask_r = r < n_tokens - first
        if D == BW:
            mask = mask_r[:, None]
        else:
            mask = mask_r[:, None] & mask_w[None, :]
        h = tl.zeros([ROWS, BW], tl.float32)
        if NEXT != "sum":
            gates = load_scalars(gates_at + first * N + r * N, mask_r, N)
        for k in tl.static_range(N):
            s = tl.load(
                streams_out + first * (N * D) + (r[:, None] * (N * D) + (k * D + dw)[None, :]),
                mask=mask,
                other=0.0,
            )
            if NEXT == "sum":
                h += widen(s, BF16)
            else:
                h += gates[k] * widen(s, BF16)
        rstd_h = tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)
        tl.store(rstd_at + n_tokens + first + r, rstd_h, mask=mask_r)
        h = narrow(h * rstd_h[:, None] * gain, y.dtype.element_ty, BF16)
        tl.store(x + first * D + (r[:, None] * D + dw[None, :]), h, mask=mask)

    if (NEXT == "sinkhorn") or (NEXT == "identity"):
        z = tl.load(saved + at + N, mask=mask_t[:, None], other=0.0) * rstd[:, None]
        z = tl.load(alpha + 1).to(tl.float32) * z + tl.load(bias + N + i).to(tl.float32)[None, :]
        tl.store(
            post_out + tok[:, None] * N + i[None, :], 2.0 * tl.sigmoid(z), mask=mask_t[:, None]
        )
    if NEXT == "sinkhorn":
        entry = i[:, None] * N + i[None, :]
        mask_m = mask_t[:, None, None]
        at = tok[:, None, None] * COLUMNS + (2 * N + entry)[None, :, :]
        b = tl.load(bias + 2 * N + entry).to(tl.float32)[None, :, :]
        z = tl.load(saved + at, mask=mask_m, other=0.0) * rstd[:, None, None]
        _, m = sinkhorn_start(tl.load(alpha + 2).to(tl.float32) * z + b)
        for _ in tl.range(1, ITERATIONS):
            m *= reciprocal(tl.sum(m, axis=1), BF16)[:, None, :]
            m *= reciprocal(tl.sum(m, axis=2), BF16)[:, :, None]
        tl.store(res_out + tok[:, None, None] * (N * N) + entry[None, :, :], m, mask=mask_m)


@triton.jit
def split_kernel(
    phi,
    out,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``phi`` in two BF16 terms, which hold it to 2^-17, and with the stream as the faster index of the rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BN)
    mask = (row < N * D)[:, None] & (c < COLUMNS)[None, :]
    w = tl.load(phi + row[:, None] * COLUMNS + c[None, :], mask=mask, other=0.0).to(tl.float32)
    high = w.to(tl.bfloat16)
    out += ((row % D) * N + row // D)[:, None] * (2 * COLUMNS) + c[None, :]
    tl.store(out, high, mask=mask)
    tl.store(out + COLUMNS, (w - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def scratch_places(
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Where Q, the norm's mean, the RMS's part, d_pre, and the sums for phi, post, res and the Sinkhorn scalings begin."""
    m = wide(n_tokens)
    q = scratch + n_programs * (D + SMALL)
    mean = q + m * COLUMNS
    pull = mean + m
    d_pre = pull + m
    maps = d_pre + m * N
    posts = maps + wide(n_splits) * (N * D * COLUMNS)
    mixes = posts + m * (CHUNKS * N)
    scalings = mixes + m * (CHUNKS * N * N)
    return q, mean, pull, d_pre, maps, posts, mixes, scalings


@triton.jit
def sinkhorn_backward(
    d_res,
    logits,
    scalings,
    tok_in_tile,
    ITERATIONS: tl.constexpr,
    BT: tl.constexpr,
    N: tl.constexpr,
    BF16: tl.constexpr,
):
    """
    The gradient of the logits from that of H_res, through every iteration. After iteration t the matrix is
    ``u_t E v_t`` with E that of the first: the row scalings u_t are kept, everything else is computed again.
    In the log domain a normalisation is ``m - logsumexp(m)``; its backward takes ``P sum(d)`` off ``d``, with P the
    normalised matrix.
    """
    i = tl.arange(0, N)
    at = scalings + tok_in_tile[:, None] * N + i[None, :]
    p_first, e = sinkhorn_start(logits)
    u = tl.full([BT, N], 1.0, tl.float32)
    v = tl.full([BT, N], 1.0, tl.float32)
    for t in tl.range(1, ITERATIONS):
        tl.store(at + (t - 1) * (BT * N), u)
        v = reciprocal(tl.sum(u[:, :, None] * e, axis=1), BF16)
        u = reciprocal(tl.sum(e * v[:, None, :], axis=2), BF16)
    tl.debug_barrier()
    d = d_res * (u[:, :, None] * e * v[:, None, :])
    for back in tl.range(1, ITERATIONS):
        before = tl.load(at + (ITERATIONS - 1 - back) * (BT * N))
        v = reciprocal(tl.sum(before[:, :, None] * e, axis=1), BF16)
        ev = e * v[:, None, :]
        d -= ev * (u * tl.sum(d, axis=2))[:, :, None]
        d -= before[:, :, None] * (ev * tl.sum(d, axis=1)[:, None, :])
        u = before
    d -= e * tl.sum(d, axis=2)[:, :, None]
    d -= p_first * tl.sum(d, axis=1)[:, None, :]
    return d


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits"])
def rows_backward_kernel(
    streams_out,  # [M, N, D]; at the first boundary y, [M, D]
    alpha,
    bias,
    norm_weight,
    saved,
    d_x,  # [M, D]
    d_post_out,  # [M, N] or None
    d_res_out,  # [M, N, N] or None
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNKS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
):
    """
    Back through the norm, the collapse and the maps. A fixed number of programs, each with a fixed set of tokens: the
    sums over tokens stay in registers and are written once, in an order that never changes.
    """
    pid = tl.program_id(0)
    q, mean_at, pull_at, d_pre_at, _, _, _, scalings = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, SMALL, CHUNKS
    )
    rstd_at = saved + wide(n_tokens) * COLUMNS
    gates_at = rstd_at + 2 * wide(n_tokens)
    scalings += wide(pid) * (ITERATIONS * BT * N)
    i = tl.arange(0, N)
    entry = i[:, None] * N + i[None, :]
    dw = tl.arange(0, BW)
    mask_w = dw < D
    gain = tl.load(norm_weight + dw, mask=mask_w, other=0.0).to(tl.float32)[None, :]
    d_gain = tl.zeros([ROWS, BW], tl.float32)
    d_bias_pre = tl.zeros([BT, N], tl.float32)
    d_bias_post = tl.zeros([BT, N], tl.float32)
    d_bias_res = tl.zeros([BT, N, N], tl.float32)
    d_alpha_pre = tl.zeros([BT, N], tl.float32)
    d_alpha_post = tl.zeros([BT, N], tl.float32)
    d_alpha_res = tl.zeros([BT, N, N], tl.float32)
    for tile in tl.range(pid, tl.cdiv(n_tokens, BT), n_programs):
        first = wide(tile) * BT
        for sub in tl.range(0, BT, ROWS):
            r = sub + tl.arange(0, ROWS)
            mask_r = r < n_tokens - first
            if D == BW:
                mask = mask_r[:, None]
            else:
                mask = mask_r[:, None] & mask_w[None, :]
            at = r[:, None] * D + dw[None, :]
            g = widen(tl.load(d_x + first * D + at, mask=mask, other=0.0), BF16)
            rstd_h = tl.load(rstd_at + n_tokens + first + r, mask=mask_r, other=0.0)[:, None]
            if PREVIOUS == "first":
                s = (tl.load(streams_out + first * D + at, mask=mask, other=0.0),)
            else:
                s = load_each(
                    streams_out + first * (N * D), r[:, None] * (N * D) + dw[None, :], mask, N, D
                )
            h = tl.zeros([ROWS, BW], tl.float32)
            if NEXT != "sum":
                gates = load_scalars(gates_at + first * N + r * N, mask_r, N)
            for k in tl.static_range(N):
                if NEXT == "sum":
                    h += widen(s[0 if PREVIOUS == "first" else k], BF16)
                else:
                    h += gates[k] * widen(s[0 if PREVIOUS == "first" else k], BF16)
            h *= rstd_h
            d_gain += g * h
            g *= gain
            mean = tl.sum(g * h, axis=1)[:, None] / D
            tl.store(mean_at + first + r[:, None], mean * rstd_h * rstd_h, mask=mask_r[:, None])
            if NEXT != "sum":
                dh = (g - h * mean) * rstd_h
                for_gates = ()
                for k in tl.static_range(N):
                    for_gates += (widen(s[0 if PREVIOUS == "first" else k], BF16) * dh,)
                sums = sum_streams(for_gates, N, ROWS, BW)
                tl.store(
                    d_pre_at + first * N + (r[:, None] * N + i[None, :]),
                    sums,
                    mask=mask_r[:, None],
                )

        if NEXT != "sum":
            # From here on threads read what others of the program have written.
            tl.debug_barrier()
            tok = first + tl.arange(0, BT)
            mask_t = tok < n_tokens
            mask_n = mask_t[:, None]
            rstd = tl.load(rstd_at + tok, mask=mask_t, other=0.0)
            at = tok[:, None] * COLUMNS + i[None, :]
            z = tl.load(saved + at, mask=mask_n, other=0.0) * rstd[:, None]
            scale = tl.load(alpha).to(tl.float32)
            gate = tl.load(gates_at + tok[:, None] * N + i[None, :], mask=mask_n, other=0.0)
            dl = tl.load(d_pre_at + tok[:, None] * N + i[None, :], mask=mask_n, other=0.0)
            dl *= gate * (1.0 - gate)
            d_bias_pre += dl
            d_alpha_pre += dl * z
            tl.store(q + at, scale * dl * rstd[:, None], mask=mask_n)
            inner = scale * tl.sum(dl * z, axis=1)
            if NEXT != "gate":
                scale = tl.load(alpha + 1).to(tl.float32)
                if d_post_out is not None:
                    z = tl.load(saved + at + N, mask=mask_n, other=0.0) * rstd[:, None]
                    gate = tl.sigmoid(scale * z + tl.load(bias + N + i).to(tl.float32)[None, :])
                    dl = tl.load(d_post_out + tok[:, None] * N + i[None, :], mask=mask_n, other=0.0)
                    dl *= 2.0 * gate * (1.0 - gate)
                    d_bias_post += dl
                    d_alpha_post += dl * z
                    tl.store(q + at + N, scale * dl * rstd[:, None], mask=mask_n)
                    inner += scale * tl.sum(dl * z, axis=1)
                else:
                    tl.store(q + at + N, tl.zeros([BT, N], tl.float32), mask=mask_n)
            if NEXT == "sinkhorn":
                mask_m = mask_t[:, None, None]
                at = tok[:, None, None] * COLUMNS + (2 * N + entry)[None, :, :]
                scale = tl.load(alpha + 2).to(tl.float32)
                if d_res_out is not None:
                    z = tl.load(saved + at, mask=mask_m, other=0.0) * rstd[:, None, None]
                    b = tl.load(bias + 2 * N + entry).to(tl.float32)[None, :, :]
                    d_res = tl.load(
                        d_res_out + tok[:, None, None] * (N * N) + entry[None, :, :],
                        mask=mask_m,
                        other=0.0,
                    )
                    dm = sinkhorn_backward(
                        d_res, scale * z + b, scalings, tl.arange(0, BT), ITERATIONS, BT, N, BF16
                    )
                    d_bias_res += dm
                    d_alpha_res += dm * z
                    tl.store(q + at, scale * dm * rstd[:, None, None], mask=mask_m)
                    inner += scale * tl.sum(tl.sum(dm * z, axis=2), axis=1)
                else:
                    tl.store(q + at, tl.zeros([BT, N, N], tl.float32), mask=mask_m)
            tl.store(pull_at + tok, inner * rstd * rstd / (N * D), mask=mask_t)
            # The next tile overwrites the scalings.
            tl.debug_barrier()

    out = scratch + wide(pid) * (D + SMALL)
    tl.store(out + dw, tl.sum(d_gain, axis=0), mask=mask_w)
    out += D
    if NEXT != "sum":
        tl.store(out + i, tl.sum(d_bias_pre, axis=0))
        tl.store(out + COLUMNS, tl.sum(tl.sum(d_alpha_pre, axis=1), axis=0))
    if (NEXT == "sinkhorn") or (NEXT == "identity"):
        tl.store(out + N + i, tl.sum(d_bias_post, axis=0))
        tl.store(out + COLUMNS + 1, tl.sum(tl.sum(d_alpha_post, axis=1), axis=0))
    if NEXT == "sinkhorn":
        tl.store(out + 2 * N + entry, tl.sum(d_bias_res, axis=0))
        tl.store(out + COLUMNS + 2, tl.sum(tl.sum(tl.sum(d_alpha_res, axis=2), axis=1), axis=0))


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits", "tokens_per_split"])
def boundary_backward_kernel(
    streams,  # [M, N, D] or None: the first boundary
    y,  # [M, D]
    post,  # [M, N] or None
    res,  # [M, N, N] or None
    streams_out,  # [M, N, D]
    phi,
    norm_weight,
    saved,
    d_streams_out,  # [M, N, D] or None: not used
    d_x,  # [M, D]
    d_y,  # [M, D]
    d_streams,  # [M, N, D] or None
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    tokens_per_split,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNKS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    The gradients of the streams, of ``y`` and of ``phi``, and parts of those of ``post`` and ``res``: one chunk of the
    width and one split of the tokens for each program.
    """
    chunk = tl.program_id(0)
    split = tl.program_id(1).to(tl.int64)
    q_at, mean_at, pull_at, _, maps, d_posts, d_mixes, _ = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, SMALL, CHUNKS
    )
    d_posts += wide(chunk) * n_tokens * N
    d_mixes += wide(chunk) * n_tokens * (N * N)
    rstd_h_at = saved + wide(n_tokens) * (COLUMNS + 1)
    gates_at = rstd_h_at + n_tokens
    dd = chunk * BD + tl.arange(0, BD)
    mask_d = dd < D
    c = tl.arange(0, BN)
    mask_c = c < COLUMNS
    gain = tl.load(norm_weight + dd, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    i = tl.arange(0, N)
    entry = tl.arange(0, N * N)
    inner = tl.arange(0, BD * N)
    column = chunk * BD + inner // N
    # Rows of phi, the stream faster, as columns: [BN, BD * N].
    w_at = ((inner % N) * D + column)[None, :] * COLUMNS + c[:, None]
    mask_w = (column < D)[None, :] & mask_c[:, None]
    if NEXT != "sum":
        w = tl.load(phi + w_at, mask=mask_w, other=0.0).to(tl.float32)
    d_maps = tl.zeros([BN, BD * N], tl.float32)

    start = split * tokens_per_split
    end = tl.minimum(start + tokens_per_split, n_tokens)
    r = tl.arange(0, BT)
    # Places in a tile, in 32 bits; where the tile begins is one number for the whole program.
    in_row = r[:, None] * D + dd[None, :]
    in_streams = r[:, None] * (N * D) + dd[None, :]
    for block in tl.range(start, end, BT, num_stages=STAGES):
        mask_t = r < end - block
        if D % BD == 0:
            mask = mask_t[:, None]
        else:
            mask = mask_t[:, None] & mask_d[None, :]
        g = tl.load(d_x + block * D + in_row, mask=mask, other=0.0)
        v = tl.load(y + block * D + in_row, mask=mask, other=0.0)
        new = ()
        for k in tl.static_range(N):
            if PREVIOUS == "first":
                new += (v,)
            else:
                at = streams_out + block * (N * D) + (in_streams + k * D)
                new += (tl.load(at, mask=mask, other=0.0),)
        rstd_h = tl.load(rstd_h_at + block + r, mask=mask_t, other=0.0)[:, None]
        mean = tl.load(mean_at + block + r, mask=mask_t, other=0.0)[:, None]
        if NEXT != "sum":
            gates = load_scalars(gates_at + block * N + r * N, mask_t, N)
            pull = tl.load(pull_at + block + r, mask=mask_t, other=0.0)[:, None]
            q = tl.load(
                q_at + block * COLUMNS + (r[:, None] * COLUMNS + c[None, :]),
                mask=mask_t[:, None] & mask_c[None, :],
                other=0.0,
            )
            joined = join_streams(new, N, BT, BD)
            if BF16:
                # BF16 gradients: TF32's rounding of their smaller part is far below theirs. For the sum over tokens the
                # streams are exact in BF16 and two terms hold Q to 2^-17.
                parts = tl.dot(q, w, input_precision="tf32")
                high = q.to(tl.bfloat16)
                d_maps = tl.dot(tl.trans(high), joined, d_maps)
                low = (q - high.to(tl.float32)).to(tl.bfloat16)
                d_maps = tl.dot(tl.trans(low), joined, d_maps)
            else:
                parts = tl.dot(q, w, input_precision="tf32x3")
                d_maps = tl.dot(
                    tl.trans(q), joined.to(tl.float32), d_maps, input_precision="tf32x3"
                )
            parts = split_streams(parts, N, BT, BD)

        # After the products, whose barriers no load passes: there are not registers for everything at once.
        if PREVIOUS != "first":
            old = load_each(streams + block * (N * D), in_streams, mask, N, D)
            posts = load_scalars(post + block * N + r * N, mask_t, N)
        if PREVIOUS == "sinkhorn":
            mixes = load_scalars(res + block * (N * N) + r * (N * N), mask_t, N * N)

        h = tl.zeros([BT, BD], tl.float32)
        for k in tl.static_range(N):
            if NEXT == "sum":
                h += widen(new[k], BF16)
            else:
                h += gates[k] * widen(new[k], BF16)
        dh = widen(g, BF16) * (gain * rstd_h) - h * mean

        v = widen(v, BF16)
        dv = tl.zeros([BT, BD], tl.float32)
        d_new = ()
        for k in tl.static_range(N):
            if NEXT == "sum":
                d = dh
            else:
                d = gates[k] * dh - pull * widen(new[k], BF16) + parts[k]
            if d_streams_out is not None:
                # Here, not above: the registers for one more tile of each stream are not there.
                at = d_streams_out + block * (N * D) + (in_streams + k * D)
                given = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
                d += widen(given, BF16)
            if PREVIOUS == "first":
                dv += d
            else:
                dv += posts[k] * d
            if PREVIOUS == "identity":
                at = d_streams + block * (N * D) + (in_streams + k * D)
                tl.store(at, narrow(d, streams.dtype.element_ty, BF16), mask=mask)
            d_new += (d,)
        dv = narrow(dv, y.dtype.element_ty, BF16)
        tl.store(d_y + block * D + in_row, dv, mask=mask)

        if PREVIOUS != "first":
            for_posts = ()
            for k in tl.static_range(N):
                for_posts += (d_new[k] * v,)
            sums = sum_streams(for_posts, N, BT, BD)
            at = d_posts + block * N + (r[:, None] * N + i[None, :])
            tl.store(at, sums, mask=mask_t[:, None])
        if PREVIOUS == "sinkhorn":
            for_mixes = ()
            for j in tl.static_range(N):
                before = widen(old[j], BF16)
                d_old = mixes[j] * d_new[0]
                for_column = (d_new[0] * before,)
                for k in tl.static_range(1, N):
                    d_old += mixes[k * N + j] * d_new[k]
                    for_column += (d_new[k] * before,)
                at = d_streams + block * (N * D) + (in_streams + j * D)
                tl.store(at, narrow(d_old, streams.dtype.element_ty, BF16), mask=mask)
                for_mixes += (sum_streams(for_column, N, BT, BD),)
            sums = join_streams(for_mixes, N, BT, N)
            at = d_mixes + block * (N * N) + (r[:, None] * (N * N) + entry[None, :])
            tl.store(at, sums, mask=mask_t[:, None])

    if NEXT != "sum":
        tl.store(maps + split * (N * D * COLUMNS) + w_at, d_maps, mask=mask_w)


@triton.jit
def sum_parts(parts, out, block, n_elements, n_parts, stride, BLOCK: tl.constexpr):
    at = wide(block) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n_elements
    acc = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that several loads are on their way at once.
    for part in tl.range(0, n_parts, loop_unroll_factor=8):
        acc += tl.load(parts + part * stride + at, mask=mask, other=0.0)
    tl.store(out + at, acc, mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits"])
def finish_kernel(
    scratch,
    d_parameters,
    d_post,  # [M, N] or None
    d_res,  # [M, N, N] or None
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMALL: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """Sum what programs, splits and chunks left, in a fixed order: first the programs' part of the grid, and so on."""
    _, _, _, _, maps, posts, mixes, _ = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, SMALL, CHUNKS
    )
    pid = tl.program_id(0)
    ROW_BLOCKS: tl.constexpr = (D + SMALL + BS - 1) // BS
    MAP_BLOCKS: tl.constexpr = (N * D * COLUMNS + BLOCK - 1) // BLOCK
    if pid < ROW_BLOCKS:
        s = pid * BS + tl.arange(0, BS)
        acc = tl.zeros([BP, BS], tl.float32)
        for start in range(0, n_programs, BP):
            p = start + tl.arange(0, BP)
            acc += tl.load(
                scratch + p[:, None] * (D + SMALL) + s[None, :],
                mask=(p < n_programs)[:, None] & (s < D + SMALL)[None, :],
                other=0.0,
            )
        tl.store(d_parameters + N * D * COLUMNS + s, tl.sum(acc, axis=0), mask=s < D + SMALL)
    elif pid < ROW_BLOCKS + MAP_BLOCKS:
        sum_parts(
            maps, d_parameters, pid - ROW_BLOCKS, N * D * COLUMNS, n_splits, N * D * COLUMNS, BLOCK
        )
    else:
        if d_post is not None:
            n = wide(n_tokens) * N
            post_blocks = tl.cdiv(n, BLOCK)
            block = pid - ROW_BLOCKS - MAP_BLOCKS
            if block < post_blocks:
                sum_parts(posts, d_post, block, n, CHUNKS, n, BLOCK)
            else:
                if d_res is not None:
                    sum_parts(mixes, d_res, block - post_blocks, n * N, CHUNKS, n * N, BLOCK)

"""
Triton kernels of mHC's ``flexible`` backend. The maths is that of :mod:`..reference`.

Everything is bound by memory, so what counts is how often a token's ``[N, D]`` streams cross the bus; a unit is ``D`` numbers
for each token.

Forward, 3N + 2 units: :func:`boundary_forward_kernel` mixes the streams of ``BT`` tokens, ``BD`` columns at a time, and
accumulates their product with ``phi`` on the tensor cores (2N + 1). Collapsing the new streams needs all of the product:
:func:`collapse_kernel` does it, from the last token to the first, since the last are what L2 still holds (N + 1). So tiles
are as large as the reading of ``phi`` wants, 64 tokens, while a program that collapses has a token or two.

Backward, 6N + 4 units: :func:`rows_backward_kernel` does what depends on whole rows (norm, collapse, gates; N + 1).
:func:`streams_backward_kernel`, which needs its results, gives the gradients of the streams, with a tile of tokens for each
program, so that their coefficients and the sums over the width for ``post`` and ``res`` stay in its registers (4N + 3).
:func:`phi_backward_kernel` gives that of ``phi`` (N). Programs with a chunk of the width each could do both from one reading,
but their sums for ``post`` and ``res`` would go through memory: 356 us against 279 at D = 1024. :func:`finish_kernel` sums
partial results.

The maps of a token, forward and backward, are in one thread, in programs of their own beside those for rows: no reduction
crosses threads, and 40 normalisations, each waiting for the one before, hold up nothing else.

The loops over tiles are pipelined by Triton with ``STAGES - 1`` tiles in shared memory: with 2 stages a tile is loaded
after the one before has been used up, so that only 3 or more hide the latency of memory.

Layouts in memory (row-major), FP32 where not said::

    streams         [M, N, D] in the model's dtype
    y, x            [M, D] in the model's dtype
    post, res       [M, N], [M, N, N]
    phi             [N * D, COLUMNS]; for BF16 streams the forward takes [D, N, 2, COLUMNS] BF16: what BF16 keeps of it,
                    and what BF16 keeps of the rest
    saved           [M, COLUMNS] products X phi before the norm; [M] reciprocal RMS of X; [M] reciprocal RMS of h; [M, N]
                    H_pre
    scratch         [M, COLUMNS] Q = alpha dlogits rstd, so that d_phi = X^T Q and dX has Q phi^T;
                    [splits, N * D, COLUMNS] sums for phi;
                    [M] what dh has of -h from the norm; [2, M] what dX has of -X from the RMS, by way of the gates and of
                    the other maps;
                    [programs, D + N + 1] sums of each program for the gain, and for bias and alpha of the gates;
                    [map programs, COLUMNS - N + 2] the same for the other maps;
                    [ITERATIONS, N, M] row scalings of the Sinkhorn iteration
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
def reciprocal(v, NATIVE: tl.constexpr):
    """Of a sum of the Sinkhorn iteration, never far from 1: without the cases of a division, to one unit in the last place."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [v], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / v


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
    streams_out,  # [M, N, D]
    saved,
    n_tokens,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,  # power of two >= 16 and COLUMNS
    STAGES: tl.constexpr,
):
    """The new streams, their products with ``phi`` and their RMS: one tile of tokens for each program."""
    first = tl.program_id(0).to(tl.int64) * BT
    tok = first + tl.arange(0, BT)
    mask_t = tok < n_tokens
    c = tl.arange(0, BN)
    mask_c = (c < COLUMNS)[None, :]
    # What the product with phi sums over: stream and column, the stream faster.
    inner = tl.arange(0, BD * N)
    terms = tl.arange(0, 2 * BN)
    rstd_at = saved + wide(n_tokens) * COLUMNS
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

    if NEXT != "sum":
        if BF16:
            products = tl.sum(tl.reshape(products, [BT, 2, BN]), axis=1)
        tl.store(
            saved + tok[:, None] * COLUMNS + c[None, :], products, mask=mask_t[:, None] & mask_c
        )
        tl.store(rstd_at + tok, tl.rsqrt(squares / (N * D) + eps), mask=mask_t)


@triton.jit
def normalize_rows(e, u, N: tl.constexpr, BF16: tl.constexpr):
    """
    One Sinkhorn iteration on ``u E v``, as tuples of a vector over tokens for each entry: the column scalings ``v`` that
    the row scalings ``u`` ask for, and the next ``u``. All of a token in one thread: no reduction crosses threads.
    """
    v = ()
    for c in tl.static_range(N):
        total = u[0] * e[c]
        for k in tl.static_range(1, N):
            total += u[k] * e[k * N + c]
        v += (reciprocal(total, BF16),)
    new = ()
    for k in tl.static_range(N):
        total = e[k * N] * v[0]
        for c in tl.static_range(1, N):
            total += e[k * N + c] * v[c]
        new += (reciprocal(total, BF16),)
    return v, new


@triton.jit
def normalize_first(logits, N: tl.constexpr):
    """
    The first iteration, in the log domain: columns, then rows, of a tuple of a vector over tokens for each entry; the results
    of both. Whatever the logits, every row now sums to 1 and every column to at least 1 / N, so that no later factor leaves
    [1 / N, N]: the other iterations may multiply instead of taking logarithms, and an entry that underflows here could not
    have grown to matter.
    """
    shift = ()
    for c in tl.static_range(N):
        top = logits[c]
        for k in tl.static_range(1, N):
            top = tl.maximum(top, logits[k * N + c])
        total = tl.exp(logits[c] - top)
        for k in tl.static_range(1, N):
            total += tl.exp(logits[k * N + c] - top)
        shift += (top + tl.log(total),)
    columns = ()
    for entry in tl.static_range(N * N):
        columns += (logits[entry] - shift[entry % N],)
    p = ()
    rows = ()
    for k in tl.static_range(N):
        top = columns[k * N]
        for c in tl.static_range(1, N):
            top = tl.maximum(top, columns[k * N + c])
        row = ()
        total = tl.zeros_like(top)
        for c in tl.static_range(N):
            m = tl.exp(columns[k * N + c] - top)
            p += (tl.exp(columns[k * N + c]),)
            row += (m,)
            total += m
        total = 1.0 / total
        for c in tl.static_range(N):
            rows += (row[c] * total,)
    return p, rows


@triton.jit
def load_vectors(at, mask, N: tl.constexpr):
    """``N`` numbers from ``at``, a scalar or one address a token: as many scalars, or vectors over tokens."""
    out = ()
    for j in tl.static_range(N):
        out += (tl.load(at + j, mask=mask, other=0.0),)
    return out


@triton.jit
def collapse_tile(
    tile,
    alpha,
    bias,
    norm_weight,
    streams_out,
    x,
    saved,
    n_tokens,
    eps,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEXT: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
):
    """The gates of ``ROWS`` tokens, and the collapse of their streams with its norm."""
    rstd_at = saved + wide(n_tokens) * COLUMNS
    tok = tile * ROWS + tl.arange(0, ROWS)
    mask_t = tok < n_tokens
    dw = tl.arange(0, BW)
    mask_w = dw < D
    if D == BW:
        mask = mask_t[:, None]
    else:
        mask = mask_t[:, None] & mask_w[None, :]
    s = load_each(streams_out + tok[:, None] * (N * D), dw[None, :], mask, N, D)
    gain = tl.load(norm_weight + dw, mask=mask_w, other=0.0).to(tl.float32)[None, :]
    h = tl.zeros([ROWS, BW], tl.float32)
    if NEXT == "sum":
        for k in tl.static_range(N):
            h += widen(s[k], BF16)
    else:
        rstd = tl.load(rstd_at + tok, mask=mask_t, other=0.0)
        scale = tl.load(alpha).to(tl.float32)
        for k in tl.static_range(N):
            z = tl.load(saved + tok * COLUMNS + k, mask=mask_t, other=0.0) * rstd
            gate = tl.sigmoid(scale * z + tl.load(bias + k).to(tl.float32))
            tl.store(rstd_at + 2 * wide(n_tokens) + tok * N + k, gate, mask=mask_t)
            h += gate[:, None] * widen(s[k], BF16)
    rstd_h = tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)
    tl.store(rstd_at + n_tokens + tok, rstd_h, mask=mask_t)
    h = narrow(h * rstd_h[:, None] * gain, x.dtype.element_ty, BF16)
    tl.store(x + tok[:, None] * D + dw[None, :], h, mask=mask)


@triton.jit
def maps_tile(
    tile,
    alpha,
    bias,
    post_out,
    res_out,
    saved,
    n_tokens,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    BM: tl.constexpr,
):
    """``post`` and ``res`` of ``BM`` tokens, one for each thread."""
    rstd_at = saved + wide(n_tokens) * COLUMNS
    tok = tile * BM + tl.arange(0, BM)
    mask_t = tok < n_tokens
    rstd = tl.load(rstd_at + tok, mask=mask_t, other=0.0)
    scale = tl.load(alpha + 1).to(tl.float32)
    for k in tl.static_range(N):
        z = tl.load(saved + tok * COLUMNS + (N + k), mask=mask_t, other=0.0) * rstd
        z = scale * z + tl.load(bias + N + k).to(tl.float32)
        tl.store(post_out + tok * N + k, 2.0 * tl.sigmoid(z), mask=mask_t)
    if NEXT == "sinkhorn":
        scale = tl.load(alpha + 2).to(tl.float32)
        logits = ()
        for entry in tl.static_range(N * N):
            z = tl.load(saved + tok * COLUMNS + (2 * N + entry), mask=mask_t, other=0.0) * rstd
            logits += (scale * z + tl.load(bias + 2 * N + entry).to(tl.float32),)
        _, e = normalize_first(logits, N)
        u = ()
        v = ()
        for _ in tl.static_range(N):
            u += (tl.full([BM], 1.0, tl.float32),)
            v += (tl.full([BM], 1.0, tl.float32),)
        for _ in tl.range(1, ITERATIONS):
            v, u = normalize_rows(e, u, N, BF16)
        for entry in tl.static_range(N * N):
            m = u[entry // N] * e[entry] * v[entry % N]
            tl.store(res_out + tok * (N * N) + entry, m, mask=mask_t)


@triton.jit(do_not_specialize=["n_tokens"])
def collapse_kernel(
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
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
    BW: tl.constexpr,  # power of two >= D
    BM: tl.constexpr,  # tokens of a program for the maps: one for each thread
):
    """The maps from the products with ``phi``, and the collapse of the streams with its norm, in programs of their own."""
    pid = tl.program_id(0)
    maps = 0
    if (NEXT == "sinkhorn") or (NEXT == "identity"):
        maps = tl.cdiv(n_tokens, BM)
        if pid < maps:
            maps_tile(
                wide(pid), alpha, bias, post_out, res_out, saved, n_tokens,
                N, COLUMNS, NEXT, ITERATIONS, BF16, BM,
            )  # fmt: skip
    if pid >= maps:
        # The last tokens first: they are what L2 still holds of the streams that were just written.
        collapse_tile(
            wide(tl.num_programs(0)) - 1 - pid, alpha, bias, norm_weight, streams_out, x, saved,
            n_tokens, eps, D, N, COLUMNS, NEXT, BF16, ROWS, BW,
        )  # fmt: skip


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
    BM: tl.constexpr,
):
    """
    Where the sums for phi, the norm's mean, the RMS's part, the programs' sums, those of the maps' programs, and the
    Sinkhorn scalings begin; Q is first.
    """
    m = wide(n_tokens)
    maps = scratch + m * COLUMNS
    mean = maps + wide(n_splits) * (N * D * COLUMNS)
    pull = mean + m
    sums = pull + 2 * m
    map_sums = sums + wide(n_programs) * (D + N + 1)
    scalings = map_sums
    if COLUMNS > N:
        scalings += tl.cdiv(m, BM) * (COLUMNS - N + 2)
    return maps, mean, pull, sums, map_sums, scalings


@triton.jit
def sinkhorn_backward(
    d_res,
    logits,
    scalings,
    stride,
    mask,
    BM: tl.constexpr,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    BF16: tl.constexpr,
):
    """
    The gradient of the logits from that of H_res, through every iteration, as tuples of a vector over tokens for each
    entry. After iteration t the matrix is ``u_t E v_t`` with E that of the first: the row scalings u_t are kept at
    ``scalings``, everything else is computed again. In the log domain a normalisation is ``m - logsumexp(m)``; its backward
    takes ``P sum(d)`` off ``d``, with P the normalised matrix. The loops are not unrolled: Triton took four minutes for that.
    """
    p, e = normalize_first(logits, N)
    u = ()
    v = ()
    for _ in tl.static_range(N):
        u += (tl.full([BM], 1.0, tl.float32),)
        v += (tl.full([BM], 1.0, tl.float32),)
    for t in tl.range(1, ITERATIONS):
        for k in tl.static_range(N):
            tl.store(scalings + ((t - 1) * N + k) * stride, u[k], mask=mask)
        v, u = normalize_rows(e, u, N, BF16)
    # From here on threads may read what others of the program have written.
    tl.debug_barrier()
    d = ()
    for entry in tl.static_range(N * N):
        d += (d_res[entry] * (u[entry // N] * e[entry] * v[entry % N]),)
    for back in tl.range(1, ITERATIONS):
        before = ()
        for k in tl.static_range(N):
            at = scalings + ((ITERATIONS - 1 - back) * N + k) * stride
            before += (tl.load(at, mask=mask, other=1.0),)
        columns = ()
        for c in tl.static_range(N):
            total = before[0] * e[c]
            for k in tl.static_range(1, N):
                total += before[k] * e[k * N + c]
            columns += (reciprocal(total, BF16),)
        ev = ()
        for entry in tl.static_range(N * N):
            ev += (e[entry] * columns[entry % N],)
        d = take_off_rows(d, ev, u, N)
        d = take_off_columns(d, ev, before, N)
        u = before
    ones = ()
    for _ in tl.static_range(N):
        ones += (1.0,)
    d = take_off_rows(d, e, ones, N)
    return take_off_columns(d, p, ones, N)


@triton.jit
def take_off_rows(d, m, u, N: tl.constexpr):
    """``d - u m sum(d)``, the sum over each row."""
    out = ()
    for k in tl.static_range(N):
        total = d[k * N]
        for c in tl.static_range(1, N):
            total += d[k * N + c]
        total *= u[k]
        for c in tl.static_range(N):
            out += (d[k * N + c] - m[k * N + c] * total,)
    return out


@triton.jit
def take_off_columns(d, m, u, N: tl.constexpr):
    """``d - u m sum(d)``, the sum over each column and ``u`` that of the row."""
    totals = ()
    for c in tl.static_range(N):
        total = d[c]
        for k in tl.static_range(1, N):
            total += d[k * N + c]
        totals += (total,)
    out = ()
    for entry in tl.static_range(N * N):
        out += (d[entry] - (u[entry // N] * m[entry]) * totals[entry % N],)
    return out


@triton.jit
def sum_pairs(a, b, N: tl.constexpr, BW: tl.constexpr):
    """The sums of ``N`` vectors and of ``N`` others, each ``[N]``, in one reduction, since each costs barriers."""
    a = tl.reshape(join_streams(a, N, 1, BW), [BW, N])
    b = tl.reshape(join_streams(b, N, 1, BW), [BW, N])
    return tl.split(tl.sum(tl.join(a, b), axis=0))


@triton.jit
def rows_backward(
    program,
    streams_out,
    alpha,
    norm_weight,
    saved,
    d_x,
    q,
    mean_at,
    pull_at,
    sums_at,
    n_tokens,
    n_programs,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    BF16: tl.constexpr,
    BW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Back through the norm, the collapse and its gates: every ``n_programs``-th token from ``program`` on."""
    rstd_at = saved + wide(n_tokens) * COLUMNS
    gates_at = rstd_at + 2 * wide(n_tokens)
    i = tl.arange(0, N)
    dw = tl.arange(0, BW)
    mask = dw < D
    gain = tl.load(norm_weight + dw, mask=mask, other=0.0).to(tl.float32)
    d_gain = tl.zeros([BW], tl.float32)
    d_bias = tl.zeros([N], tl.float32)
    d_alpha = tl.zeros([N], tl.float32)
    for tok in tl.range(program, n_tokens, n_programs, num_stages=STAGES):
        t = wide(tok)
        g = tl.load(d_x + t * D + dw, mask=mask, other=0.0)
        given = ()
        if PREVIOUS == "first":
            given += (tl.load(streams_out + t * D + dw, mask=mask, other=0.0),)
        else:
            for k in tl.static_range(N):
                at = streams_out + t * (N * D) + (k * D + dw)
                given += (tl.load(at, mask=mask, other=0.0),)
        rstd_h = tl.load(rstd_at + n_tokens + t)
        h = tl.zeros([BW], tl.float32)
        s = ()
        for k in tl.static_range(N):
            if (PREVIOUS != "first") or (k == 0):
                s += (widen(given[k], BF16),)
            if NEXT == "sum":
                h += s[0 if PREVIOUS == "first" else k]
            else:
                h += tl.load(gates_at + t * N + k) * s[0 if PREVIOUS == "first" else k]
        g = widen(g, BF16)
        d_gain += g * (h * rstd_h)
        g *= gain
        if NEXT == "sum":
            mean = tl.sum(g * h, axis=0) * (rstd_h / D)
        else:
            gates = tl.load(gates_at + t * N + i)
            if (PREVIOUS == "first") or (N == 1):
                # The norm undoes what the gates do to a single stream but for eps: what is left must not be lost.
                mean = tl.sum(g * h, axis=0) * (rstd_h / D)
                dh = g - h * (mean * rstd_h)
                dl = rstd_h * tl.sum(s[0] * dh, axis=0)
            else:
                # The norm's mean follows from the streams' products with g: all sums at once, none waits for another.
                of_g = ()
                of_h = ()
                for k in tl.static_range(N):
                    of_g += (s[k] * g,)
                    of_h += (s[k] * h,)
                of_g, of_h = sum_pairs(of_g, of_h, N, BW)
                mean = tl.sum(gates * of_g, axis=0) * (rstd_h / D)
                dl = rstd_h * (of_g - of_h * (mean * rstd_h))
            dl = dl * gates * (1.0 - gates)
            rstd = tl.load(rstd_at + t)
            z = tl.load(saved + t * COLUMNS + i) * rstd
            scale = tl.load(alpha).to(tl.float32)
            d_bias += dl
            d_alpha += dl * z
            tl.store(q + t * COLUMNS + i, scale * dl * rstd)
            inner = scale * tl.sum(dl * z, axis=0)
            tl.store(pull_at + t, inner * rstd * rstd / (N * D))
        tl.store(mean_at + t, mean * rstd_h * rstd_h)
    out = sums_at + wide(program) * (D + N + 1)
    tl.store(out + dw, d_gain, mask=mask)
    if NEXT != "sum":
        tl.store(out + D + i, d_bias)
        tl.store(out + D + N, tl.sum(d_alpha, axis=0))


@triton.jit
def maps_backward(
    tile,
    alpha,
    bias,
    saved,
    d_post_out,
    d_res_out,
    q,
    pull_at,
    sums_at,
    scalings,
    n_tokens,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    BM: tl.constexpr,
):
    """Back through ``post`` and ``res`` of ``BM`` tokens, one for each thread."""
    rstd_at = saved + wide(n_tokens) * COLUMNS
    tok = tile * BM + tl.arange(0, BM)
    mask = tok < n_tokens
    sums = sums_at + tile * (COLUMNS - N + 2)
    rstd = tl.load(rstd_at + tok, mask=mask, other=0.0)
    inner = tl.zeros([BM], tl.float32)
    d_alpha = tl.zeros([BM], tl.float32)
    scale = tl.load(alpha + 1).to(tl.float32)
    for k in tl.static_range(N):
        dl = tl.zeros([BM], tl.float32)
        if d_post_out is not None:
            z = tl.load(saved + tok * COLUMNS + (N + k), mask=mask, other=0.0) * rstd
            gate = tl.sigmoid(scale * z + tl.load(bias + N + k).to(tl.float32))
            dl = tl.load(d_post_out + tok * N + k, mask=mask, other=0.0)
            dl *= 2.0 * gate * (1.0 - gate)
            d_alpha += dl * z
        tl.store(q + tok * COLUMNS + (N + k), scale * dl * rstd, mask=mask)
        tl.store(sums + k, tl.sum(dl, axis=0))
    inner += scale * d_alpha
    tl.store(sums + COLUMNS - N, tl.sum(d_alpha, axis=0))
    if NEXT == "sinkhorn":
        scale = tl.load(alpha + 2).to(tl.float32)
        d_alpha = tl.zeros([BM], tl.float32)
        if d_res_out is not None:
            d = load_vectors(d_res_out + tok * (N * N), mask, N * N)
            logits = ()
            for entry in tl.static_range(N * N):
                z = tl.load(saved + tok * COLUMNS + (2 * N + entry), mask=mask, other=0.0)
                logits += (scale * (z * rstd) + tl.load(bias + 2 * N + entry).to(tl.float32),)
            d = sinkhorn_backward(
                d, logits, scalings + tok, wide(n_tokens), mask, BM, ITERATIONS, N, BF16
            )
            for entry in tl.static_range(N * N):
                # Loaded once more: there are not registers for everything at once.
                z = tl.load(saved + tok * COLUMNS + (2 * N + entry), mask=mask, other=0.0)
                d_alpha += d[entry] * (z * rstd)
                at = q + tok * COLUMNS + (2 * N + entry)
                tl.store(at, scale * d[entry] * rstd, mask=mask)
                tl.store(sums + N + entry, tl.sum(d[entry], axis=0))
        else:
            for entry in tl.static_range(N * N):
                tl.store(q + tok * COLUMNS + (2 * N + entry), 0.0, mask=mask)
                tl.store(sums + N + entry, 0.0)
        inner += scale * d_alpha
        tl.store(sums + COLUMNS - N + 1, tl.sum(d_alpha, axis=0))
    tl.store(pull_at + n_tokens + tok, inner * rstd * rstd / (N * D), mask=mask)


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
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BF16: tl.constexpr,
    BW: tl.constexpr,
    BM: tl.constexpr,  # tokens of a program for the maps: one for each thread
    STAGES: tl.constexpr,
):
    """
    Back through the maps, with programs of their own, and through the norm, the collapse and its gates: a fixed number of
    programs, each with a fixed set of tokens, so that the sums over tokens stay in registers and are written once, in an
    order that never changes.
    """
    pid = tl.program_id(0)
    _, mean_at, pull_at, sums_at, map_sums_at, scalings = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, BM
    )
    maps = 0
    if (NEXT == "sinkhorn") or (NEXT == "identity"):
        maps = tl.cdiv(n_tokens, BM)
        if pid < maps:
            maps_backward(
                wide(pid), alpha, bias, saved, d_post_out, d_res_out, scratch, pull_at,
                map_sums_at, scalings, n_tokens, D, N, COLUMNS, NEXT, ITERATIONS, BF16, BM,
            )  # fmt: skip
    if pid >= maps:
        rows_backward(
            pid - maps, streams_out, alpha, norm_weight, saved, d_x, scratch, mean_at, pull_at,
            sums_at, n_tokens, n_programs, D, N, COLUMNS, PREVIOUS, NEXT, BF16, BW, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits"])
def streams_backward_kernel(
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
    d_post,  # [M, N] or None
    d_res,  # [M, N, N] or None
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    NEXT: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of the streams, of ``y``, of ``post`` and of ``res``: one tile of tokens for each program."""
    _, mean_at, pull_at, _, _, _ = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, BM
    )
    # The last tokens first: they are what L2 still holds of the streams, which the kernel before read.
    first = (wide(tl.num_programs(0)) - 1 - tl.program_id(0)) * BT
    # Places in a tile, in 32 bits; where the tile begins is one number for the whole program.
    r = tl.arange(0, BT)
    mask_t = r < n_tokens - first
    c = tl.arange(0, BN)
    mask_c = c < COLUMNS
    inner = tl.arange(0, BD * N)
    rstd_h_at = saved + wide(n_tokens) * (COLUMNS + 1)
    gates_at = rstd_h_at + n_tokens
    rstd_h = tl.load(rstd_h_at + first + r, mask=mask_t, other=0.0)[:, None]
    mean = tl.load(mean_at + first + r, mask=mask_t, other=0.0)[:, None]
    if NEXT != "sum":
        gates = load_scalars(gates_at + first * N + r * N, mask_t, N)
        pull = tl.load(pull_at + first + r, mask=mask_t, other=0.0)[:, None]
        if NEXT != "gate":
            pull += tl.load(pull_at + n_tokens + first + r, mask=mask_t, other=0.0)[:, None]
        q = tl.load(
            scratch + first * COLUMNS + (r[:, None] * COLUMNS + c[None, :]),
            mask=mask_t[:, None] & mask_c[None, :],
            other=0.0,
        )
    # Sums over the columns that a thread has of a row; over threads only after the loop.
    PART: tl.constexpr = 16 // (y.dtype.element_ty.primitive_bitwidth // 8)
    of_posts = ()
    of_mixes = ()
    if PREVIOUS != "first":
        posts = load_scalars(post + first * N + r * N, mask_t, N)
        for _ in tl.static_range(N):
            of_posts += (tl.zeros([BT, BD // PART], tl.float32),)
    if PREVIOUS == "sinkhorn":
        mixes = load_scalars(res + first * (N * N) + r * (N * N), mask_t, N * N)
        for _ in tl.static_range(N * N):
            of_mixes += (tl.zeros([BT, BD // PART], tl.float32),)

    y_rows = y + first * D
    g_rows = d_x + first * D
    dy_rows = d_y + first * D
    new_rows = streams_out + first * (N * D)
    if PREVIOUS != "first":
        old_rows = streams + first * (N * D)
        d_old_rows = d_streams + first * (N * D)
    if d_streams_out is not None:
        given_rows = d_streams_out + first * (N * D)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        dd = start + tl.arange(0, BD)
        mask_d = dd < D
        if D % BD == 0:
            mask = mask_t[:, None]
        else:
            mask = mask_t[:, None] & mask_d[None, :]
        in_row = r[:, None] * D + dd[None, :]
        in_streams = r[:, None] * (N * D) + dd[None, :]
        g = tl.load(g_rows + in_row, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(y_rows + in_row, mask=mask, other=0.0, eviction_policy="evict_first")
        new = ()
        for k in tl.static_range(N):
            if PREVIOUS == "first":
                new += (v,)
            else:
                # The kernel for phi reads these once more.
                new += (tl.load(new_rows + (in_streams + k * D), mask=mask, other=0.0),)
        if PREVIOUS != "first":
            old = load_each(old_rows, in_streams, mask, N, D)
        if d_streams_out is not None:
            given = load_each(given_rows, in_streams, mask, N, D)
        gain = tl.load(norm_weight + dd, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        if NEXT != "sum":
            # Rows of phi, the stream faster, as columns: [BN, BD * N].
            column = start + inner // N
            w_at = ((inner % N) * D + column)[None, :] * COLUMNS + c[:, None]
            if D % BD == 0:
                mask_w = mask_c[:, None]
            else:
                mask_w = (column < D)[None, :] & mask_c[:, None]
            w = tl.load(phi + w_at, mask=mask_w, other=0.0).to(tl.float32)
            if BF16:
                # BF16 gradients: TF32's rounding of their smaller part is far below theirs.
                parts = tl.dot(q, w, input_precision="tf32")
            else:
                parts = tl.dot(q, w, input_precision="tf32x3")
            parts = split_streams(parts, N, BT, BD)

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
        sums = ()
        for k in tl.static_range(N):
            if NEXT == "sum":
                d = dh
            else:
                d = gates[k] * dh - pull * widen(new[k], BF16) + parts[k]
            if d_streams_out is not None:
                d += widen(given[k], BF16)
            if PREVIOUS == "first":
                dv += d
            else:
                dv += posts[k] * d
                sums += (of_posts[k] + sum_columns(d * v, BT, BD, PART),)
            if PREVIOUS == "identity":
                at = d_old_rows + (in_streams + k * D)
                tl.store(at, narrow(d, y.dtype.element_ty, BF16), mask=mask)
            d_new += (d,)
        of_posts = sums
        dv = narrow(dv, y.dtype.element_ty, BF16)
        tl.store(dy_rows + in_row, dv, mask=mask)
        if PREVIOUS == "sinkhorn":
            sums = ()
            for j in tl.static_range(N):
                before = widen(old[j], BF16)
                d_old = mixes[j] * d_new[0]
                for k in tl.static_range(1, N):
                    d_old += mixes[k * N + j] * d_new[k]
                for k in tl.static_range(N):
                    part = sum_columns(d_new[k] * before, BT, BD, PART)
                    sums += (of_mixes[j * N + k] + part,)
                at = d_old_rows + (in_streams + j * D)
                tl.store(at, narrow(d_old, y.dtype.element_ty, BF16), mask=mask)
            of_mixes = sums

    if PREVIOUS != "first":
        for k in tl.static_range(N):
            tl.store(d_post + first * N + (r * N + k), tl.sum(of_posts[k], axis=1), mask=mask_t)
    if PREVIOUS == "sinkhorn":
        for j in tl.static_range(N):
            for k in tl.static_range(N):
                at = d_res + first * (N * N) + (r * (N * N) + (k * N + j))
                tl.store(at, tl.sum(of_mixes[j * N + k], axis=1), mask=mask_t)


@triton.jit
def sum_columns(tile, BT: tl.constexpr, BD: tl.constexpr, PART: tl.constexpr):
    """Sums over ``PART`` neighbouring columns, those of one load and so of one thread: ``[BT, BD / PART]``."""
    return tl.sum(tl.reshape(tile, [BT, BD // PART, PART]), axis=2)


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits", "tokens_per_split"])
def phi_backward_kernel(
    streams_out,  # [M, N, D]; at the first boundary y, [M, D]
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    tokens_per_split,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PREVIOUS: tl.constexpr,
    BF16: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``X^T Q``: one chunk of the width of one stream and one split of the tokens for each program."""
    SLICES: tl.constexpr = (D + BD - 1) // BD
    stream = tl.program_id(0) // SLICES
    split = tl.program_id(1).to(tl.int64)
    maps, _, _, _, _, _ = scratch_places(scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, BM)
    dd = (tl.program_id(0) % SLICES) * BD + tl.arange(0, BD)
    mask_d = dd < D
    c = tl.arange(0, BN)
    mask_c = c < COLUMNS
    start = split * tokens_per_split
    end = tl.minimum(start + tokens_per_split, n_tokens)
    r = tl.arange(0, BT)
    WIDTH: tl.constexpr = D if PREVIOUS == "first" else N * D
    rows = streams_out
    if PREVIOUS != "first":
        rows += stream * D
    in_rows = r[:, None] * WIDTH + dd[None, :]
    d_maps = tl.zeros([BD, BN], tl.float32)
    for block in tl.range(start, end, BT, num_stages=STAGES):
        mask_t = (r < end - block)[:, None]
        if D % BD == 0:
            mask = mask_t
        else:
            mask = mask_t & mask_d[None, :]
        tile = tl.load(rows + block * WIDTH + in_rows, mask=mask, other=0.0)
        q = tl.load(
            scratch + block * COLUMNS + (r[:, None] * COLUMNS + c[None, :]),
            mask=mask_t & mask_c[None, :],
            other=0.0,
        )
        if BF16:
            # The streams are exact in BF16, and two terms hold Q to 2^-17.
            high = narrow(q, tl.bfloat16, BF16)
            low = narrow(q - widen(high, BF16), tl.bfloat16, BF16)
            d_maps = tl.dot(tl.trans(tile), high, d_maps)
            d_maps = tl.dot(tl.trans(tile), low, d_maps)
        else:
            d_maps = tl.dot(tl.trans(tile).to(tl.float32), q, d_maps, input_precision="tf32x3")
    at = (stream * D + dd)[:, None] * COLUMNS + c[None, :]
    mask = mask_d[:, None] & mask_c[None, :]
    tl.store(maps + split * (N * D * COLUMNS) + at, d_maps, mask=mask)


@triton.jit
def sum_parts(parts, out, block, n_elements, n_parts, stride, BLOCK: tl.constexpr):
    at = wide(block) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n_elements
    acc = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that several loads are on their way at once.
    for part in tl.range(0, n_parts, loop_unroll_factor=8):
        acc += tl.load(parts + part * stride + at, mask=mask, other=0.0)
    tl.store(out + at, acc, mask=mask)


@triton.jit
def sum_rows(rows, s, n_rows, COUNT, STRIDE: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr):
    """The sums of ``COUNT`` columns over all rows, in blocks of ``BP``."""
    acc = tl.zeros([BP, BS], tl.float32)
    for start in range(0, n_rows, BP):
        p = start + tl.arange(0, BP)
        acc += tl.load(
            rows + p[:, None] * STRIDE + s[None, :],
            mask=(p < n_rows)[:, None] & (s < COUNT)[None, :],
            other=0.0,
        )
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits"])
def finish_kernel(
    scratch,
    d_parameters,
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEXT: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """Sum what programs and splits left, in a fixed order: first the programs' part of the grid, and so on."""
    maps, _, _, sums, map_sums, _ = scratch_places(
        scratch, n_tokens, n_programs, n_splits, D, N, COLUMNS, BM
    )
    pid = tl.program_id(0)
    # Sums of the programs for rows, of those for the maps, and of the splits; out: gain, bias, alpha.
    OWN: tl.constexpr = D if NEXT == "sum" else D + N + 1
    OTHER: tl.constexpr = COLUMNS - N + (1 if NEXT == "identity" else 2)
    OTHERS: tl.constexpr = 1 if ((NEXT == "sinkhorn") or (NEXT == "identity")) else 0
    ROW_BLOCKS: tl.constexpr = (OWN + BS - 1) // BS
    out = d_parameters + N * D * COLUMNS
    if pid < ROW_BLOCKS:
        s = pid * BS + tl.arange(0, BS)
        acc = sum_rows(sums, s, n_programs, OWN, D + N + 1, BP, BS)
        # Between the gates' bias and their alpha is the other maps' bias.
        tl.store(out + s + tl.where(s < D + N, 0, COLUMNS - N), acc, mask=s < OWN)
    elif pid < ROW_BLOCKS + OTHERS:
        s = tl.arange(0, BS)
        acc = sum_rows(map_sums, s, tl.cdiv(n_tokens, BM), OTHER, COLUMNS - N + 2, BP, BS)
        tl.store(out + D + N + s + tl.where(s < COLUMNS - N, 0, 1), acc, mask=s < OTHER)
    else:
        block = pid - ROW_BLOCKS - OTHERS
        sum_parts(maps, d_parameters, block, N * D * COLUMNS, n_splits, N * D * COLUMNS, BLOCK)

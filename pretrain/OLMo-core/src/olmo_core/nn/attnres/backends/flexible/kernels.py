"""
Triton kernels of AttnRes's ``flexible`` backend. The maths is that of :mod:`..reference`.

A program holds the whole rows of ``BT`` tokens and goes through the sources once, ``S`` at a time, with a running softmax.
The sources are tensors of their own: nothing is stacked or copied. Tiles are ``[S, BT, BD]``, ``BD`` the power of two
above ``D``: Triton spreads warps over the last axes first, so each thread has all ``S`` sources of its columns, and one
exchange between threads reduces ``S`` logits. ``VEC`` caps the elements of a thread's load so that ``num_warps`` warps
span the width. Columns beyond ``D`` are masked and move no bytes.

The *committed* sources are those of the state, without the last one: ``y``, or in an open block ``partial + y``. A few
are arguments of the kernel, and each step selects its own among them; of many, each step loads the distances from the
first one out of a table that :func:`table_kernel` writes just before. The loop over sources is a loop in both cases: unrolled for 64
sources, the backward took 380 s to compile and spilled 4 KB a thread.

Layouts in memory (row-major), ``C`` committed sources and ``N = C + 1``::

    sources        PADDED tensors [M, D], the first one repeated at the end
    table          [C]  distance of each source from the first one in units of 16 bytes. INT64
    y, x, ...      [M, D]
    statistics     [M, 2N + 2]  log-sum-exp of the logits, 1/rms(h), N logits, N times 1/rms(source); the last source is
                   column C of each N. FP32
    d_rows         [M, n_rows, D]  the gradients of the committed sources so far; the last source is row C if it is one of
                   them later on
    ledger         [D + M * 3 * PITCH]  what a boundary that defers its part of the sources' gradients leaves beside its g:
                   query * gain; for each token the coefficients of g, of query * gain, and of the source itself. FP32
    scratch        [programs, 2, D]  sums of each program for query * gain and for the norm's gain. FP32
    d_parameters   [3, D]       gradients of the query, its gain, and the norm's gain. FP32

All arithmetic is FP32. Counts of tokens, programs and sources are not specialised on, which the launcher relies on: one
compiled kernel serves all numbers of sources of one ``PADDED``, or all that go through the table.
"""

import triton
import triton.language as tl


@triton.jit
def width_offsets(BD: tl.constexpr, VEC: tl.constexpr):
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BD), VEC), VEC)


@triton.jit
def load_vector(pointer, dd, D: tl.constexpr):
    """A parameter ``[D]`` as ``[1, 1, BD]``. Every program reads it: keep it in cache."""
    v = tl.load(pointer + dd, mask=dd < D, other=0.0, eviction_policy="evict_last")
    return v.to(tl.float32)[None, None, :]


@triton.jit
def load_sources(
    sources,
    table,
    first,
    row,
    mask,
    n_committed,
    S: tl.constexpr,
    PADDED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """``S`` sources from ``first`` on, ``[S, BT, BD]``; zeros beyond the last one."""
    s = tl.arange(0, S)[:, None, None]
    p = sources[0]
    if table is not None:
        # Scalars: in a tile every thread would load each distance once for each of its columns.
        UNIT: tl.constexpr = 128 // p.dtype.element_ty.primitive_bitwidth
        q = p + tl.load(table + first) * UNIT
        for k in tl.static_range(1, S):
            distance = tl.load(table + first + k, mask=first + k < n_committed, other=0)
            q = tl.where(s == k, p + distance * UNIT, q)
    else:
        q = p
        for k in tl.static_range(1, PADDED):
            q = tl.where(s + first == k, sources[k], q)
    present = s + first < n_committed
    return tl.load(q + row, mask=mask & present, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def statistic(statistics, tok, column, n_committed):
    """Pointers to a column of the statistics for each token; ``column`` a number or ``[S]``."""
    return statistics + tok[None, :] * (2 * n_committed + 4) + column


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_committed"])
def forward_kernel(
    sources,  # PADDED tensors [M, D], or the first one; None at the first boundary
    table,  # [C] or None
    y,  # [M, D]
    partial,  # [M, D] or None: y joins it
    query,  # [D] or None: the first boundary, which has one source
    gain,  # [D] or None
    norm_weight,  # [D]
    x,  # [M, D]
    partial_out,  # [M, D] or None
    h_out,  # [M, D] or None: kept for the backward
    statistics,
    n_tokens,
    n_programs,
    n_committed,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    dd = width_offsets(BD, VEC)
    if query is not None:
        w = load_vector(query, dd, D) * load_vector(gain, dd, D)
    for block in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BT), n_programs):
        tok = block * BT + tl.arange(0, BT).to(tl.int64)
        mask_t = tok < n_tokens
        mask = mask_t[None, :, None] & (dd < D)[None, None, :]
        row = tok[None, :, None] * D + dd[None, None, :]

        v = tl.load(y + row, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if partial is not None:
            v += tl.load(partial + row, mask=mask, other=0.0).to(tl.float32)
            v = v.to(y.dtype.element_ty).to(tl.float32)
            tl.store(partial_out + row, v, mask=mask)
        h = v
        if query is not None:
            rstd = tl.rsqrt(tl.sum(v * v, axis=2) / D + eps)
            z = tl.sum(v * w, axis=2) * rstd
            out = statistic(statistics, tok, 2 + n_committed, n_committed)
            tl.store(out, z, mask=mask_t[None, :])
            tl.store(out + n_committed + 1, rstd, mask=mask_t[None, :])
            # Sum and mix relative to the largest logit so far.
            largest = z
            total = tl.full([1, BT], 1.0, tl.float32)
            for first in tl.range(0, n_committed, S, num_stages=STAGES):
                s = first + tl.arange(0, S)[:, None]
                present = s < n_committed
                u = load_sources(
                    sources, table, first, row, mask, n_committed, S, PADDED, "evict_first"
                )
                rstd_s = tl.rsqrt(tl.sum(u * u, axis=2) / D + eps)
                z_s = tl.sum(u * w, axis=2) * rstd_s
                out_s = statistic(statistics, tok, 2 + s, n_committed)
                tl.store(out_s, z_s, mask=mask_t[None, :] & present)
                tl.store(out_s + n_committed + 1, rstd_s, mask=mask_t[None, :] & present)
                z_s = tl.where(present, z_s, float("-inf"))
                now = tl.maximum(largest, tl.max(z_s, axis=0)[None, :])
                e = tl.exp(z_s - now)
                scale = tl.exp(largest - now)
                h = h * scale[:, :, None] + tl.sum(e[:, :, None] * u, axis=0)[None, :, :]
                total = total * scale + tl.sum(e, axis=0)[None, :]
                largest = now
            h /= total[:, :, None]
            lse = largest + tl.log(total)
            tl.store(statistic(statistics, tok, 0, n_committed), lse, mask=mask_t[None, :])
            if h_out is not None:
                tl.store(h_out + row, h, mask=mask)
        rstd = tl.rsqrt(tl.sum(h * h, axis=2) / D + eps)
        tl.store(statistic(statistics, tok, 1, n_committed), rstd, mask=mask_t[None, :])
        tl.store(x + row, h * rstd[:, :, None] * load_vector(norm_weight, dd, D), mask=mask)


@triton.jit
def add_later(
    total,
    v,
    s,
    later_g,
    later_ledgers,
    tok,
    row,
    mask,
    present,
    dd,
    pitch,
    D: tl.constexpr,
    LATER: tl.constexpr,
):
    """Add to the gradients of the sources ``s`` (``[S, 1]``, ``v`` ``[S, BT, BD]``) what later boundaries have deferred."""
    for k in tl.static_range(LATER):
        w = load_vector(later_ledgers[k], dd, D)
        g = tl.load(later_g[k] + row, mask=mask, other=0.0, eviction_policy="evict_last")
        column = later_ledgers[k] + D + tok[None, :] * (3 * pitch) + s
        of_g = tl.load(column, mask=present, other=0.0)
        of_w = tl.load(column + pitch, mask=present, other=0.0)
        of_v = tl.load(column + 2 * pitch, mask=present, other=0.0)
        total += of_g[:, :, None] * g.to(tl.float32) + of_w[:, :, None] * w + of_v[:, :, None] * v
    return total


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_committed", "n_rows", "pitch"])
def backward_kernel(
    sources,  # PADDED tensors [M, D], or the first one; None at the first boundary
    table,  # [C] or None
    last,  # [M, D]: y, or with the partial sum
    query,  # [D] or None
    gain,  # [D] or None
    norm_weight,  # [D]
    statistics,
    h_kept,  # [M, D] or None
    d_x,  # [M, D]
    d_rows,  # [M, n_rows, D] or None: no boundary after this group reads a source
    d_partial,  # [M, D] or None: the gradient of the last source as a partial sum
    later_g,  # LATER tensors [M, D], or None
    later_ledgers,  # LATER ledgers, or None
    d_last,  # [M, D]
    d_sources,  # [M, C, D], or None if there are none or DEFER
    g_out,  # [M, D], or None unless DEFER
    ledger,  # or None unless DEFER
    scratch,
    n_tokens,
    n_programs,
    n_committed,
    n_rows,
    pitch,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    LATER: tl.constexpr,
    CLOSES: tl.constexpr,  # later boundaries read the last source as it is
    DEFER: tl.constexpr,  # leave g and a ledger instead of the committed sources' gradients
    S: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    With ``g`` the gradient of ``h``: ``ds_i = alpha_i (<g, v_i> - <g, h>)`` and
    ``dv_i = alpha_i g + r_i ds_i w - (r_i^2 / D) ds_i z_i v_i`` with ``w = query * gain``, added to what later boundaries
    left. A fixed number of programs, each with a fixed set of tokens: the sums over tokens stay in registers and are
    written once for each program, in an order that never changes.
    """
    pid = tl.program_id(0).to(tl.int64)
    dd = width_offsets(BD, VEC)
    d_w = tl.zeros([1, BT, BD], tl.float32)
    d_norm = tl.zeros([1, BT, BD], tl.float32)
    if query is not None:
        w = load_vector(query, dd, D) * load_vector(gain, dd, D)
        if DEFER:
            if pid == 0:
                tl.store(ledger + dd[None, None, :], w, mask=(dd < D)[None, None, :])
    for block in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BT), n_programs):
        tok = block * BT + tl.arange(0, BT).to(tl.int64)
        mask_t = tok < n_tokens
        mask = mask_t[None, :, None] & (dd < D)[None, None, :]
        row = tok[None, :, None] * D + dd[None, None, :]
        row_out = tok[None, :, None] * (n_committed * D) + dd[None, None, :]
        row_in = tok[None, :, None] * (n_rows * D) + dd[None, None, :]

        g = tl.load(d_x + row, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        v = tl.load(last + row, mask=mask, other=0.0).to(tl.float32)
        stat = statistic(statistics, tok, 1, n_committed)
        rstd_h = tl.load(stat, mask=mask_t[None, :], other=0.0)
        if query is not None:
            lse = tl.load(stat - 1, mask=mask_t[None, :], other=0.0)
            stat = statistic(statistics, tok, 2 + n_committed, n_committed)
            z = tl.load(stat, mask=mask_t[None, :], other=0.0)
            rstd = tl.load(stat + n_committed + 1, mask=mask_t[None, :], other=0.0)
            alpha = tl.exp(z - lse)
            if h_kept is not None:
                h = tl.load(h_kept + row, mask=mask, other=0.0).to(tl.float32)
            else:
                # The sources are read a second time below, then from cache.
                h = alpha[:, :, None] * v
                for first in tl.range(0, n_committed, S, num_stages=STAGES):
                    s = first + tl.arange(0, S)[:, None]
                    present = mask_t[None, :] & (s < n_committed)
                    stat_s = statistic(statistics, tok, 2 + s, n_committed)
                    alpha_s = tl.exp(tl.load(stat_s, mask=present, other=0.0) - lse)
                    alpha_s = tl.where(present, alpha_s, 0.0)
                    u = load_sources(
                        sources, table, first, row, mask, n_committed, S, PADDED, "evict_last"
                    )
                    h += tl.sum(alpha_s[:, :, None] * u, axis=0)[None, :, :]
        else:
            h = v

        # Back through the norm.
        normed = h * rstd_h[:, :, None]
        d_norm += g * normed
        g *= load_vector(norm_weight, dd, D)
        g = (g - normed * (tl.sum(g * normed, axis=2) / D)[:, :, None]) * rstd_h[:, :, None]

        # The last source: what later boundaries gave it, and this one's part.
        dv = tl.zeros([1, BT, BD], tl.float32)
        if CLOSES:
            if d_rows is not None:
                dv += tl.load(
                    d_rows + row_in + n_committed * D,
                    mask=mask,
                    other=0.0,
                    eviction_policy="evict_first",
                ).to(tl.float32)
            if LATER > 0:
                own = n_committed + tl.arange(0, 1)[:, None]
                dv = add_later(
                    dv, v, own, later_g, later_ledgers, tok, row, mask, mask_t[None, :], dd, pitch, D, LATER,
                )  # fmt: skip
        elif d_partial is not None:
            dv += tl.load(d_partial + row, mask=mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
        if query is not None:
            delta = tl.sum(g * h, axis=2)
            b = alpha * (tl.sum(g * v, axis=2) - delta) * rstd
            of_v = -b * z * rstd / D
            dv += alpha[:, :, None] * g + b[:, :, None] * w + of_v[:, :, None] * v
            d_w += b[:, :, None] * v
        else:
            dv += g
        tl.store(d_last + row, dv, mask=mask)

        if DEFER:
            tl.store(g_out + row, g, mask=mask)
        if query is not None:
            for first in tl.range(0, n_committed, S, num_stages=STAGES):
                s = first + tl.arange(0, S)[:, None]
                present = mask_t[None, :] & (s < n_committed)
                mask_s = mask & (s < n_committed)[:, :, None]
                u = load_sources(
                    sources, table, first, row, mask, n_committed, S, PADDED, "evict_first"
                )
                if not DEFER:
                    if d_rows is not None:
                        du = tl.load(
                            d_rows + row_in + (s * D)[:, :, None],
                            mask=mask_s,
                            other=0.0,
                            eviction_policy="evict_first",
                        )
                stat_s = statistic(statistics, tok, 2 + s, n_committed)
                z_s = tl.load(stat_s, mask=present, other=0.0)
                rstd_s = tl.load(stat_s + n_committed + 1, mask=present, other=0.0)
                alpha_s = tl.where(present, tl.exp(z_s - lse), 0.0)
                b_s = alpha_s * (tl.sum(g * u, axis=2) - delta) * rstd_s
                of_u = -b_s * z_s * rstd_s / D
                d_w += tl.sum(b_s[:, :, None] * u, axis=0)[None, :, :]
                if DEFER:
                    column = ledger + D + tok[None, :] * (3 * pitch) + s
                    tl.store(column, alpha_s, mask=present)
                    tl.store(column + pitch, b_s, mask=present)
                    tl.store(column + 2 * pitch, of_u, mask=present)
                else:
                    part = alpha_s[:, :, None] * g + b_s[:, :, None] * w + of_u[:, :, None] * u
                    if d_rows is not None:
                        part += du.to(tl.float32)
                    if LATER > 0:
                        part = add_later(
                            part, u, s, later_g, later_ledgers, tok, row, mask, present, dd, pitch, D, LATER,
                        )  # fmt: skip
                    tl.store(d_sources + row_out + (s * D)[:, :, None], part, mask=mask_s)

    out = scratch + pid * (2 * D) + dd
    tl.store(out, tl.sum(tl.sum(d_w, axis=1), axis=0), mask=dd < D)
    tl.store(out + D, tl.sum(tl.sum(d_norm, axis=1), axis=0), mask=dd < D)


@triton.jit(do_not_specialize=["n_committed"])
def table_kernel(sources, table, n_committed, PADDED: tl.constexpr):
    """
    Not the addresses: of one in a table the alignment is not known, and the loads would be of single elements.
    """
    start = sources[0].to(tl.int64, bitcast=True)
    for k in tl.static_range(PADDED):
        distance = sources[k].to(tl.int64, bitcast=True) - start
        tl.store(table + k, distance // 16, mask=k < n_committed)


@triton.jit(do_not_specialize=["n_programs"])
def finish_kernel(
    query,  # [D] or None
    gain,  # [D] or None
    scratch,
    d_parameters,
    n_programs,
    D: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """Sum what the programs left, in a fixed order, into the parameters' gradients."""
    dd = tl.program_id(0) * BD + tl.arange(0, BD)
    d_w = tl.zeros([BP, BD], tl.float32)
    d_norm = tl.zeros([BP, BD], tl.float32)
    for start in range(0, n_programs, BP):
        p = start + tl.arange(0, BP)
        row = scratch + p[:, None] * (2 * D) + dd[None, :]
        mask = (p < n_programs)[:, None] & (dd < D)[None, :]
        d_w += tl.load(row, mask=mask, other=0.0)
        d_norm += tl.load(row + D, mask=mask, other=0.0)
    mask_d = dd < D
    if query is not None:
        total = tl.sum(d_w, axis=0)
        q = tl.load(query + dd, mask=mask_d, other=0.0).to(tl.float32)
        k = tl.load(gain + dd, mask=mask_d, other=0.0).to(tl.float32)
        tl.store(d_parameters + dd, total * k, mask=mask_d)
        tl.store(d_parameters + D + dd, total * q, mask=mask_d)
    tl.store(d_parameters + 2 * D + dd, tl.sum(d_norm, axis=0), mask=mask_d)

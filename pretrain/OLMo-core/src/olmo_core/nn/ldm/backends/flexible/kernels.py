"""
Triton kernels of the ``flexible`` backend. The maths is that of :mod:`..reference`; ``BACKENDS.md`` has the equations.

A program holds the rows of ``BT`` tokens whole: a tile ``[K, BT, BD]`` of the memory, ``BD`` the power of two above
``D``, so that the memory crosses the bus once in each direction. The tile's axes are slot, token, width, in this
order, since Triton spreads warps over the last axes first: each thread then has all slots of its columns and a sum
over slots needs no exchange. ``VEC`` caps the elements of a thread's load so that ``num_warps`` warps span the width.

Layouts in memory (row-major)::

    memory          [M, K, D]
    y, x, ...       [M, D]
    packed          [ROWS, D] all maps transposed, rows by map; the norm's gain [D]; [BIASES] the biases of query, key,
                    forget and beta, padded to a multiple of 4; then [M, ROWS + 4] products W v before the bias, and
                    the reciprocal RMS of y, key_input, slot mean and h
    scratch         [programs, D + BIASES] sums of each program for the gain and the biases; then [splits, D, ROWS] sums
                    for the maps; then [M, ROWS] dz * rstd of the source, so that dW = source^T of it
    d_parameters    the maps' gradients in the order of their rows, each [D, N]; then the gain's [D]; then the biases'

The last three are FP32 and one allocation each, since every tensor of a launch costs the host about 2 us and an
allocation 4. A map that
the options leave out has no rows; its ``*_ROW`` is then meaningless and its ``*_N`` 0. All arithmetic is FP32.
Counts of tokens, programs and splits are not specialised on: one compiled kernel serves all of them, which the
launcher relies on.
"""

import triton
import triton.language as tl


@triton.jit
def width_offsets(BD: tl.constexpr, VEC: tl.constexpr):
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BD), VEC), VEC)


@triton.jit
def load_rows(weights, row, N: tl.constexpr, dd, D: tl.constexpr):
    """``N`` rows of the packed maps from ``row`` on, ``[N, 1, BD]``. Every program reads them: keep them in cache."""
    rows = row + tl.arange(0, N)
    return tl.load(
        weights + rows[:, None, None] * D + dd[None, None, :],
        mask=dd[None, None, :] < D,
        other=0.0,
        eviction_policy="evict_last",
    )


@triton.jit
def load_columns(pointer, tok, column, N: tl.constexpr, STRIDE: tl.constexpr, mask_t):
    """``N`` columns of a ``[M, STRIDE]`` buffer, as ``[N, BT]``."""
    n = column + tl.arange(0, N)
    return tl.load(pointer + tok[None, :] * STRIDE + n[:, None], mask=mask_t[None, :], other=0.0)


@triton.jit
def store_columns(pointer, tok, column, value, N: tl.constexpr, STRIDE: tl.constexpr, mask_t):
    n = column + tl.arange(0, N)
    tl.store(pointer + tok[None, :] * STRIDE + n[:, None], value, mask=mask_t[None, :])


@triton.jit
def load_bias(pointer, N: tl.constexpr):
    return tl.load(pointer + tl.arange(0, N)).to(tl.float32)[:, None]


@triton.jit
def softmax_slots(z):
    e = tl.exp(z - tl.max(z, axis=0)[None, :])
    return e / tl.sum(e, axis=0)[None, :]


@triton.jit
def key_activation(z, ACTIVATION: tl.constexpr, K: tl.constexpr):
    """The write key from its logits ``[K, BT]``."""
    if ACTIVATION == "two_sigmoid":
        return 2.0 * tl.sigmoid(z)
    elif ACTIVATION == "softmax":
        return K * softmax_slots(z)
    else:
        return z


@triton.jit
def key_activation_backward(dk, k, ACTIVATION: tl.constexpr, K: tl.constexpr):
    """The gradient of the logits from that of the key ``k``."""
    if ACTIVATION == "two_sigmoid":
        return dk * k * (1.0 - 0.5 * k)
    elif ACTIVATION == "softmax":
        return k * (dk - tl.sum(dk * k, axis=0)[None, :] / K)
    else:
        return dk


@triton.jit
def query_activation(z, ACTIVATION: tl.constexpr):
    """The query from its logits ``[K, BT]``."""
    if ACTIVATION == "softmax":
        return softmax_slots(z)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(z)
    else:
        return z


@triton.jit
def query_activation_backward(dq, q, ACTIVATION: tl.constexpr):
    if ACTIVATION == "softmax":
        return q * (dq - tl.sum(dq * q, axis=0)[None, :])
    elif ACTIVATION == "sigmoid":
        return dq * q * (1.0 - q)
    else:
        return dq


@triton.jit(do_not_specialize=["n_tokens"])
def boundary_forward_kernel(
    memory,  # [M, K, D]
    y,  # [M, D]
    key_input,  # [M, D] or None
    residual,  # [M, D] or None
    pending,  # [M, D] or None: added to y first
    packed,
    memory_out,  # [M, K, D] or None: a boundary that only reads
    x,  # [M, D]
    residual_out,  # [M, D] or None
    y_out,  # [M, D] or None: pending + y
    n_tokens,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,  # forget gates: K or 1
    ROWS: tl.constexpr,
    BIASES: tl.constexpr,
    FORGET_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    WRITE: tl.constexpr,
    KEY_SOURCE: tl.constexpr,
    KEY_ACTIVATION: tl.constexpr,
    QUERY_SOURCE: tl.constexpr,
    QUERY_ACTIVATION: tl.constexpr,
    FORGET: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PENDING: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
):
    tok = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    dd = width_offsets(BD, VEC)
    mask_t = tok < n_tokens
    mask = mask_t[None, :, None] & (dd < D)[None, None, :]
    row = tok[None, :, None] * D + dd[None, None, :]
    slot = tl.arange(0, K)
    tile = tok[None, :, None] * (K * D) + (slot[:, None, None] * D + dd[None, None, :])
    COLUMNS: tl.constexpr = ROWS + 4
    weights = packed
    norm_weight = packed + ROWS * D
    b_query = norm_weight + D
    b_key = b_query + K
    b_forget = b_key + K
    b_beta = b_forget + GATES
    saved = b_query + BIASES

    v = tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
    S = tl.load(memory + tile, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if PENDING:
        v += tl.load(pending + row, mask=mask, other=0.0).to(tl.float32)
        v = v.to(y.dtype.element_ty).to(tl.float32)
        tl.store(y_out + row, v, mask=mask)
    if RESIDUAL:
        r = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32) + v
        r = r.to(y.dtype.element_ty).to(tl.float32)
        if WRITE:
            tl.store(residual_out + row, r, mask=mask)

    rstd_y = tl.rsqrt(tl.sum(v * v, axis=2) / D + eps)  # [1, BT]
    store_columns(saved, tok, ROWS, rstd_y, 1, COLUMNS, mask_t)

    if WRITE:
        if FORGET != "none":
            z = load_bias(b_forget, GATES)
            if FORGET == "dynamic":
                p = tl.sum(load_rows(weights, FORGET_ROW, GATES, dd, D) * v, axis=2) * rstd_y
                store_columns(saved, tok, FORGET_ROW, p, GATES, COLUMNS, mask_t)
                z += p
            S = tl.sigmoid(-z)[:, :, None] * S

        z = load_bias(b_key, K)
        if KEY_SOURCE == "output":
            p = tl.sum(load_rows(weights, KEY_ROW, K, dd, D) * v, axis=2) * rstd_y
            store_columns(saved, tok, KEY_ROW, p, K, COLUMNS, mask_t)
            z += p
        elif KEY_SOURCE == "input":
            u = tl.load(key_input + row, mask=mask, other=0.0).to(tl.float32)
            rstd_u = tl.rsqrt(tl.sum(u * u, axis=2) / D + eps)
            p = tl.sum(load_rows(weights, KEY_ROW, K, dd, D) * u, axis=2) * rstd_u
            store_columns(saved, tok, KEY_ROW, p, K, COLUMNS, mask_t)
            store_columns(saved, tok, ROWS + 1, rstd_u, 1, COLUMNS, mask_t)
            z += p
        k = key_activation(z, KEY_ACTIVATION, K)

        if DELTA:
            p = tl.sum(load_rows(weights, BETA_ROW, 1, dd, D) * v, axis=2) * rstd_y
            store_columns(saved, tok, BETA_ROW, p, 1, COLUMNS, mask_t)
            beta = tl.sigmoid(load_bias(b_beta, 1) + p)
            unit = k * tl.rsqrt(tl.sum(k * k, axis=0))[None, :]
            erased = tl.sum(unit[:, :, None] * S, axis=0)[None, :, :]
            S -= (beta * unit)[:, :, None] * erased
        S += k[:, :, None] * v
        tl.store(memory_out + tile, S, mask=mask)

    z = load_bias(b_query, K)
    if QUERY_SOURCE == "memory":
        m = tl.sum(S, axis=0)[None, :, :] / K
        rstd_m = tl.rsqrt(tl.sum(m * m, axis=2) / D + eps)
        p = tl.sum(load_rows(weights, QUERY_ROW, K, dd, D) * m, axis=2) * rstd_m
        store_columns(saved, tok, QUERY_ROW, p, K, COLUMNS, mask_t)
        store_columns(saved, tok, ROWS + 2, rstd_m, 1, COLUMNS, mask_t)
        z += p
    elif QUERY_SOURCE == "output":
        p = tl.sum(load_rows(weights, QUERY_ROW, K, dd, D) * v, axis=2) * rstd_y
        store_columns(saved, tok, QUERY_ROW, p, K, COLUMNS, mask_t)
        z += p
    q = query_activation(z, QUERY_ACTIVATION)

    h = tl.sum(q[:, :, None] * S, axis=0)[None, :, :]
    if RESIDUAL:
        h += r
    elif not WRITE:
        h += v
    rstd_h = tl.rsqrt(tl.sum(h * h, axis=2) / D + eps)
    store_columns(saved, tok, ROWS + 3, rstd_h, 1, COLUMNS, mask_t)
    gain = tl.load(norm_weight + dd, mask=dd < D, other=0.0).to(tl.float32)
    tl.store(x + row, h * rstd_h[:, :, None] * gain[None, None, :], mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits"])
def boundary_backward_kernel(
    memory,  # [M, K, D]
    y,  # [M, D]: with what was pending
    key_input,  # [M, D] or None
    residual,  # [M, D] or None: the new one at a boundary that writes, else the old one
    packed,
    d_memory_out,  # [M, K, D] or None: not used
    d_x,  # [M, D]
    d_residual_out,  # [M, D] or None
    d_memory,  # [M, K, D]
    d_y,  # [M, D]
    d_key_input,  # [M, D] or None
    d_residual,  # [M, D] or None
    slot_mean,  # [M, D] or None: written for the gradient of w_query
    scratch,
    n_tokens,
    n_programs,
    n_splits,
    D: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    BIASES: tl.constexpr,
    FORGET_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    WRITE: tl.constexpr,
    KEY_SOURCE: tl.constexpr,
    KEY_ACTIVATION: tl.constexpr,
    QUERY_SOURCE: tl.constexpr,
    QUERY_ACTIVATION: tl.constexpr,
    FORGET: tl.constexpr,
    DELTA: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """
    A fixed number of programs, each with a fixed set of tokens: the sums over tokens of the gain's and the biases'
    gradients stay in registers and are written once for each program, in an order that never changes.
    """
    pid = tl.program_id(0).to(tl.int64)
    dd = width_offsets(BD, VEC)
    slot = tl.arange(0, K)
    COLUMNS: tl.constexpr = ROWS + 4
    weights = packed
    norm_weight = packed + ROWS * D
    b_query = norm_weight + D
    b_key = b_query + K
    b_forget = b_key + K
    b_beta = b_forget + GATES
    saved = b_query + BIASES
    d_products = scratch + n_programs * (D + BIASES) + n_splits * (D * ROWS)
    gain = tl.load(norm_weight + dd, mask=dd < D, other=0.0).to(tl.float32)[None, None, :]
    d_gain = tl.zeros([1, BT, BD], tl.float32)
    d_b_query = tl.zeros([K, BT], tl.float32)
    d_b_key = tl.zeros([K, BT], tl.float32)
    d_b_forget = tl.zeros([GATES, BT], tl.float32)
    d_b_beta = tl.zeros([1, BT], tl.float32)

    for block in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BT), n_programs, num_stages=STAGES):
        tok = block * BT + tl.arange(0, BT).to(tl.int64)
        mask_t = tok < n_tokens
        mask = mask_t[None, :, None] & (dd < D)[None, None, :]
        row = tok[None, :, None] * D + dd[None, None, :]
        tile = tok[None, :, None] * (K * D) + (slot[:, None, None] * D + dd[None, None, :])

        S = tl.load(memory + tile, mask=mask, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        v = tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
        gx = tl.load(d_x + row, mask=mask, other=0.0).to(tl.float32)
        if d_memory_out is not None:
            G = tl.load(
                d_memory_out + tile, mask=mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
        rstd_y = load_columns(saved, tok, ROWS, 1, COLUMNS, mask_t)
        rstd_h = load_columns(saved, tok, ROWS + 3, 1, COLUMNS, mask_t)

        # The coefficients again, from the saved products. decay, k, unit: [K, BT]; the new memory is
        # S' = decay S - beta unit (outer) erased + k (outer) v with erased = (unit decay)^T S.
        # Every thread holds every coefficient: what is needed later is loaded again there, not kept.
        decay = tl.full([K, BT], 1.0, tl.float32)
        if WRITE:
            if FORGET != "none":
                z = load_bias(b_forget, GATES) + tl.zeros([GATES, BT], tl.float32)
                if FORGET == "dynamic":
                    z += load_columns(saved, tok, FORGET_ROW, GATES, COLUMNS, mask_t)
                decay *= tl.sigmoid(-z)
            z = load_bias(b_key, K) + tl.zeros([K, BT], tl.float32)
            if KEY_SOURCE != "static":
                z += load_columns(saved, tok, KEY_ROW, K, COLUMNS, mask_t)
            k = key_activation(z, KEY_ACTIVATION, K)
            if DELTA:
                p_beta = load_columns(saved, tok, BETA_ROW, 1, COLUMNS, mask_t)
                beta = tl.sigmoid(load_bias(b_beta, 1) + p_beta)
                inverse_norm = tl.rsqrt(tl.sum(k * k, axis=0))[None, :]
                unit = k * inverse_norm
                erased = tl.sum((unit * decay)[:, :, None] * S, axis=0)[None, :, :]
        z = load_bias(b_query, K) + tl.zeros([K, BT], tl.float32)
        if QUERY_SOURCE != "static":
            z += load_columns(saved, tok, QUERY_ROW, K, COLUMNS, mask_t)
        q = query_activation(z, QUERY_ACTIVATION)

        # The read again, and back through the norm.
        h = tl.sum((q * decay)[:, :, None] * S, axis=0)[None, :, :]
        if WRITE:
            h += tl.sum(q * k, axis=0)[None, :, None] * v
            if DELTA:
                h -= (beta * tl.sum(q * unit, axis=0)[None, :])[:, :, None] * erased
        if RESIDUAL:
            r = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
            if not WRITE:
                r = (r + v).to(y.dtype.element_ty).to(tl.float32)
            h += r
        elif not WRITE:
            h += v
        h *= rstd_h[:, :, None]
        d_gain += gx * h
        gx *= gain
        dh = (gx - h * (tl.sum(gx * h, axis=2) / D)[:, :, None]) * rstd_h[:, :, None]

        # The query. <S', dh> for each slot, without S'.
        if QUERY_SOURCE == "memory":
            m = tl.sum(decay[:, :, None] * S, axis=0)[None, :, :]
            if WRITE:
                m += tl.sum(k, axis=0)[None, :, None] * v
                if DELTA:
                    m -= (beta * tl.sum(unit, axis=0)[None, :])[:, :, None] * erased
            m /= K
            tl.store(slot_mean + row, m, mask=mask)
        Sdh = tl.sum(S * dh, axis=2) * decay
        dq = Sdh
        if WRITE:
            dq += k * tl.sum(v * dh, axis=2)
            if DELTA:
                dq -= beta * unit * tl.sum(unit * Sdh, axis=0)[None, :]
        dz_query = query_activation_backward(dq, q, QUERY_ACTIVATION)
        d_b_query += dz_query

        if RELOAD:
            # From L1, so that the memory takes no registers while its reductions and the query are worked out.
            S = tl.load(memory + tile, mask=mask, other=0.0).to(tl.float32)
        # G is the gradient of S': of its store, its read, and its mean.
        dq_h = q[:, :, None] * dh
        if d_memory_out is not None:
            G += dq_h
        else:
            G = dq_h
        if QUERY_SOURCE == "memory":
            p = load_columns(saved, tok, QUERY_ROW, K, COLUMNS, mask_t)
            inner_m = tl.sum(dz_query * p, axis=0)[None, :]
            rstd_m = load_columns(saved, tok, ROWS + 2, 1, COLUMNS, mask_t)
            w = load_rows(weights, QUERY_ROW, K, dd, D)
            dm = tl.sum(dz_query[:, :, None] * w, axis=0)[None, :, :]
            dm -= m * (rstd_m * inner_m / D)[:, :, None]
            G += dm * (rstd_m / K)[:, :, None]
            store_columns(d_products, tok, QUERY_ROW, dz_query * rstd_m, K, ROWS, mask_t)

        # y collects in dv what reaches it through its maps (before the RMS's scale), in dy the rest.
        dv = tl.zeros([1, BT, BD], tl.float32)
        inner = tl.zeros([1, BT], tl.float32)
        dy = tl.zeros([1, BT, BD], tl.float32)
        if WRITE:
            dy += tl.sum(k[:, :, None] * G, axis=0)[None, :, :]
            dk = tl.sum(v * G, axis=2)
            if DELTA:
                # dS_decayed = G - beta unit (outer) E with E = unit^T G.
                E = tl.sum(unit[:, :, None] * G, axis=0)[None, :, :]
                Ge = tl.sum(G * erased, axis=2)
                SE = tl.sum(S * E, axis=2) * decay
                d_beta = -tl.sum(unit * Ge, axis=0)[None, :]
                d_unit = -beta * (Ge + SE)
                dk += (d_unit - unit * tl.sum(unit * d_unit, axis=0)[None, :]) * inverse_norm
                G -= (beta * unit)[:, :, None] * E
                dz = d_beta * beta * (1.0 - beta)
                d_b_beta += dz
                store_columns(d_products, tok, BETA_ROW, dz * rstd_y, 1, ROWS, mask_t)
                dv += dz[:, :, None] * load_rows(weights, BETA_ROW, 1, dd, D)
                inner += dz * p_beta

            if FORGET != "none":
                # a = sigmoid(-z): da/dz = -a (1 - a), and 1 - a as sigmoid(z), since a is within 1e-4 of 1.
                dz = -tl.sum(S * G, axis=2) * decay
                if GATES == 1:
                    dz = tl.sum(dz, axis=0)[None, :]
                z = load_bias(b_forget, GATES) + tl.zeros([GATES, BT], tl.float32)
                if FORGET == "dynamic":
                    p = load_columns(saved, tok, FORGET_ROW, GATES, COLUMNS, mask_t)
                    z += p
                dz *= tl.sigmoid(z)
                d_b_forget += dz
                if FORGET == "dynamic":
                    store_columns(d_products, tok, FORGET_ROW, dz * rstd_y, GATES, ROWS, mask_t)
                    w = load_rows(weights, FORGET_ROW, GATES, dd, D)
                    dv += tl.sum(dz[:, :, None] * w, axis=0)[None, :, :]
                    inner += tl.sum(dz * p, axis=0)[None, :]
                G *= decay[:, :, None]

            dz = key_activation_backward(dk, k, KEY_ACTIVATION, K)
            d_b_key += dz
            if KEY_SOURCE != "static":
                p = load_columns(saved, tok, KEY_ROW, K, COLUMNS, mask_t)
            if KEY_SOURCE == "output":
                store_columns(d_products, tok, KEY_ROW, dz * rstd_y, K, ROWS, mask_t)
                w = load_rows(weights, KEY_ROW, K, dd, D)
                dv += tl.sum(dz[:, :, None] * w, axis=0)[None, :, :]
                inner += tl.sum(dz * p, axis=0)[None, :]
            elif KEY_SOURCE == "input":
                rstd_u = load_columns(saved, tok, ROWS + 1, 1, COLUMNS, mask_t)
                store_columns(d_products, tok, KEY_ROW, dz * rstd_u, K, ROWS, mask_t)
                u = tl.load(key_input + row, mask=mask, other=0.0).to(tl.float32)
                w = load_rows(weights, KEY_ROW, K, dd, D)
                du = tl.sum(dz[:, :, None] * w, axis=0)[None, :, :]
                du -= u * (rstd_u * (tl.sum(dz * p, axis=0) / D)[None, :])[:, :, None]
                tl.store(d_key_input + row, du * rstd_u[:, :, None], mask=mask)
        tl.store(d_memory + tile, G, mask=mask)

        if QUERY_SOURCE == "output":
            store_columns(d_products, tok, QUERY_ROW, dz_query * rstd_y, K, ROWS, mask_t)
            w = load_rows(weights, QUERY_ROW, K, dd, D)
            dv += tl.sum(dz_query[:, :, None] * w, axis=0)[None, :, :]
            p = load_columns(saved, tok, QUERY_ROW, K, COLUMNS, mask_t)
            inner += tl.sum(dz_query * p, axis=0)[None, :]
        dy += (dv - v * (rstd_y * inner / D)[:, :, None]) * rstd_y[:, :, None]

        if RESIDUAL:
            dr = dh
            if d_residual_out is not None:
                dr += tl.load(d_residual_out + row, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_residual + row, dr, mask=mask)
            dy += dr
        elif not WRITE:
            dy += dh
        tl.store(d_y + row, dy, mask=mask)

    out = scratch + pid * (D + BIASES)
    tl.store(out + dd, tl.sum(tl.sum(d_gain, axis=1), axis=0), mask=dd < D)
    out += D
    tl.store(out + slot, tl.sum(d_b_query, axis=1))
    if WRITE:
        tl.store(out + K + slot, tl.sum(d_b_key, axis=1))
        if FORGET != "none":
            tl.store(out + 2 * K + tl.arange(0, GATES), tl.sum(d_b_forget, axis=1))
        if DELTA:
            tl.store(out + 2 * K + GATES + tl.arange(0, 1), tl.sum(d_b_beta, axis=1))


@triton.jit(do_not_specialize=["n_tokens"])
def first_forward_kernel(
    y,  # [M, D]
    key_0,  # [K]
    norm_weight,  # [D]
    memory,  # [M, K, D]
    x,  # [M, D]
    rstd,  # [M]
    n_tokens,
    eps,
    D: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
):
    tok = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    dd = width_offsets(BD, VEC)
    mask_t = tok < n_tokens
    mask = mask_t[None, :, None] & (dd < D)[None, None, :]
    row = tok[None, :, None] * D + dd[None, None, :]
    tile = (tok[None, :, None] * K + tl.arange(0, K)[:, None, None]) * D + dd[None, None, :]
    v = tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
    tl.store(memory + tile, load_bias(key_0, K)[:, :, None] * v, mask=mask)
    rstd_y = tl.rsqrt(tl.sum(v * v, axis=2) / D + eps)
    store_columns(rstd, tok, 0, rstd_y, 1, 1, mask_t)
    gain = tl.load(norm_weight + dd, mask=dd < D, other=0.0).to(tl.float32)
    tl.store(x + row, v * rstd_y[:, :, None] * gain[None, None, :], mask=mask)


@triton.jit(do_not_specialize=["n_tokens", "n_programs"])
def first_backward_kernel(
    y,  # [M, D]
    key_0,  # [K]
    norm_weight,  # [D]
    rstd,  # [M]
    d_memory,  # [M, K, D] or None
    d_x,  # [M, D]
    d_y,  # [M, D]
    scratch,  # key_0 in the place of the query's bias
    n_tokens,
    n_programs,
    D: tl.constexpr,
    K: tl.constexpr,
    BIASES: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    VEC: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    dd = width_offsets(BD, VEC)
    slot = tl.arange(0, K)
    gain = tl.load(norm_weight + dd, mask=dd < D, other=0.0).to(tl.float32)[None, None, :]
    k = load_bias(key_0, K)
    d_gain = tl.zeros([1, BT, BD], tl.float32)
    d_key = tl.zeros([K, BT], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BT), n_programs):
        tok = block * BT + tl.arange(0, BT).to(tl.int64)
        mask_t = tok < n_tokens
        mask = mask_t[None, :, None] & (dd < D)[None, None, :]
        row = tok[None, :, None] * D + dd[None, None, :]
        v = tl.load(y + row, mask=mask, other=0.0).to(tl.float32)
        gx = tl.load(d_x + row, mask=mask, other=0.0).to(tl.float32)
        rstd_y = load_columns(rstd, tok, 0, 1, 1, mask_t)
        normed = v * rstd_y[:, :, None]
        d_gain += gx * normed
        gx *= gain
        dy = (gx - normed * (tl.sum(gx * normed, axis=2) / D)[:, :, None]) * rstd_y[:, :, None]
        if d_memory is not None:
            tile = tok[None, :, None] * (K * D) + (slot[:, None, None] * D + dd[None, None, :])
            G = tl.load(d_memory + tile, mask=mask, other=0.0).to(tl.float32)
            dy += tl.sum(k[:, :, None] * G, axis=0)[None, :, :]
            d_key += tl.sum(v * G, axis=2)
        tl.store(d_y + row, dy, mask=mask)
    out = scratch + pid * (D + BIASES)
    tl.store(out + dd, tl.sum(tl.sum(d_gain, axis=1), axis=0), mask=dd < D)
    tl.store(out + D + slot, tl.sum(d_key, axis=1))


@triton.jit
def pack_map(w, weights, dd, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    n = tl.arange(0, N)
    mask = dd[None, :] < D
    value = tl.load(w + dd[None, :] * N + n[:, None], mask=mask, other=0.0)
    tl.store(weights + (ROW + n)[:, None] * D + dd[None, :], value.to(tl.float32), mask=mask)


@triton.jit
def pack_bias(bias, packed, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(packed + n, tl.load(bias + n).to(tl.float32))


@triton.jit
def pack_kernel(
    w_forget,  # [D, GATES] or None
    w_beta,  # [D] or None
    w_key,  # [D, K] or None
    w_query,  # [D, K] or None
    norm_weight,  # [D]
    b_query,  # [K]
    b_key,  # [K] or None
    b_forget,  # [GATES] or None
    b_beta,  # [1] or None
    packed,
    D: tl.constexpr,
    K: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    FORGET_ROW: tl.constexpr,
    BETA_ROW: tl.constexpr,
    KEY_ROW: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    BD: tl.constexpr,
):
    """
    All parameters as FP32, the maps transposed, so that the boundary reads rows of them: 16 bytes for each thread.
    """
    dd = tl.program_id(0) * BD + tl.arange(0, BD)
    if w_forget is not None:
        pack_map(w_forget, packed, dd, FORGET_ROW, GATES, D)
    if w_beta is not None:
        pack_map(w_beta, packed, dd, BETA_ROW, 1, D)
    if w_key is not None:
        pack_map(w_key, packed, dd, KEY_ROW, K, D)
    if w_query is not None:
        pack_map(w_query, packed, dd, QUERY_ROW, K, D)
    packed += ROWS * D
    gain = tl.load(norm_weight + dd, mask=dd < D, other=0.0).to(tl.float32)
    tl.store(packed + dd, gain, mask=dd < D)
    packed += D
    if tl.program_id(0) == 0:
        pack_bias(b_query, packed, K)
        if b_key is not None:
            pack_bias(b_key, packed + K, K)
        if b_forget is not None:
            pack_bias(b_forget, packed + 2 * K, GATES)
        if b_beta is not None:
            pack_bias(b_beta, packed + 2 * K + GATES, 1)


@triton.jit
def map_gradient(
    source,
    d_products,
    partial,
    n_tokens,
    tokens_per_split,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """The maps of one source: rows ``ROW .. ROW + N - 1``."""
    split = tl.program_id(1).to(tl.int64)
    dd = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    acc = tl.zeros([BD, BN], tl.float32)
    start = split * tokens_per_split
    end = tl.minimum(start + tokens_per_split, n_tokens)
    for block in range(start, end, BM):
        tok = block + tl.arange(0, BM).to(tl.int64)
        mask_t = tok < end
        src = tl.load(
            source + tok[None, :] * D + dd[:, None],
            mask=mask_t[None, :] & (dd < D)[:, None],
            other=0.0,
        )
        dz = tl.load(
            d_products + tok[:, None] * ROWS + ROW + n[None, :],
            mask=mask_t[:, None] & (n < N)[None, :],
            other=0.0,
        )
        if SPLIT:
            # The source is exact in BF16; two terms hold dz to 2^-17.
            high = dz.to(tl.bfloat16)
            acc = tl.dot(src, high, acc)
            acc = tl.dot(src, (dz - high.to(tl.float32)).to(tl.bfloat16), acc)
        else:
            acc = tl.dot(src.to(tl.float32), dz, acc, input_precision="tf32x3")
    tl.store(
        partial + (split * D + dd[:, None]) * ROWS + ROW + n[None, :],
        acc,
        mask=(dd < D)[:, None] & (n < N)[None, :],
    )


@triton.jit(do_not_specialize=["n_tokens", "n_programs", "n_splits", "tokens_per_split"])
def map_gradient_kernel(
    y,  # [M, D]
    key_input,  # [M, D] or None
    scratch,
    slot_mean,  # [M, D] or None
    n_tokens,
    n_programs,
    n_splits,
    tokens_per_split,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BIASES: tl.constexpr,
    OUTPUT_ROW: tl.constexpr,
    OUTPUT_N: tl.constexpr,
    INPUT_ROW: tl.constexpr,
    INPUT_N: tl.constexpr,
    MEMORY_ROW: tl.constexpr,
    MEMORY_N: tl.constexpr,
    SPLIT: tl.constexpr,  # BF16 products of dz in two terms, instead of TF32x3 ones
    BN: tl.constexpr,  # power of two >= 16 and the rows of each source
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """
    ``source^T d_products`` over one split of the tokens, in FP32 whatever the dtype of the source. The last axis of the
    grid is the source, of those that have maps.
    """
    partial = scratch + n_programs * (D + BIASES)
    d_products = partial + n_splits * (D * ROWS)
    group = tl.program_id(2)
    if OUTPUT_N > 0:
        if group == 0:
            map_gradient(
                y, d_products, partial, n_tokens, tokens_per_split,
                D, ROWS, OUTPUT_ROW, OUTPUT_N, SPLIT, BN, BM, BD,
            )  # fmt: skip
    if INPUT_N > 0:
        if group == (1 if OUTPUT_N > 0 else 0):
            map_gradient(
                key_input, d_products, partial, n_tokens, tokens_per_split,
                D, ROWS, INPUT_ROW, INPUT_N, SPLIT, BN, BM, BD,
            )  # fmt: skip
    if MEMORY_N > 0:
        if group == tl.num_programs(2) - 1:
            map_gradient(
                slot_mean, d_products, partial, n_tokens, tokens_per_split,
                D, ROWS, MEMORY_ROW, MEMORY_N, SPLIT, BN, BM, BD,
            )  # fmt: skip


@triton.jit
def store_map(d_parameters, acc, dd, r, ROW: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    mask = (dd < D)[:, None] & ((r >= ROW) & (r < ROW + N))[None, :]
    tl.store(d_parameters + ROW * D + dd[:, None] * N + (r - ROW)[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["n_programs", "n_splits"])
def finish_kernel(
    scratch,
    d_parameters,
    n_programs,
    n_splits,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BIASES: tl.constexpr,
    FORGET_ROW: tl.constexpr,
    FORGET_N: tl.constexpr,
    BETA_ROW: tl.constexpr,
    BETA_N: tl.constexpr,
    KEY_ROW: tl.constexpr,
    KEY_N: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    QUERY_N: tl.constexpr,
    BR: tl.constexpr,  # power of two >= ROWS
    BB: tl.constexpr,  # power of two >= BIASES
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """Sum what splits and programs left, in a fixed order, into the parameters' gradients."""
    pid = tl.program_id(0)
    dd = pid * BD + tl.arange(0, BD)
    if ROWS > 0:
        partial = scratch + n_programs * (D + BIASES)
        r = tl.arange(0, BR)
        acc = tl.zeros([BD, BR], tl.float32)
        mask = (dd < D)[:, None] & (r < ROWS)[None, :]
        for split in range(n_splits):
            acc += tl.load(
                partial + (split * D + dd[:, None]) * ROWS + r[None, :], mask=mask, other=0.0
            )
        if FORGET_N > 0:
            store_map(d_parameters, acc, dd, r, FORGET_ROW, FORGET_N, D)
        if BETA_N > 0:
            store_map(d_parameters, acc, dd, r, BETA_ROW, BETA_N, D)
        if KEY_N > 0:
            store_map(d_parameters, acc, dd, r, KEY_ROW, KEY_N, D)
        if QUERY_N > 0:
            store_map(d_parameters, acc, dd, r, QUERY_ROW, QUERY_N, D)

    gain = tl.zeros([BP, BD], tl.float32)
    for start in range(0, n_programs, BP):
        p = start + tl.arange(0, BP)
        gain += tl.load(
            scratch + p[:, None] * (D + BIASES) + dd[None, :],
            mask=(p < n_programs)[:, None] & (dd < D)[None, :],
            other=0.0,
        )
    tl.store(d_parameters + ROWS * D + dd, tl.sum(gain, axis=0), mask=dd < D)

    if pid == 0:
        b = tl.arange(0, BB)
        sums = tl.zeros([BP, BB], tl.float32)
        for start in range(0, n_programs, BP):
            p = start + tl.arange(0, BP)
            sums += tl.load(
                scratch + p[:, None] * (D + BIASES) + D + b[None, :],
                mask=(p < n_programs)[:, None] & (b < BIASES)[None, :],
                other=0.0,
            )
        tl.store(d_parameters + (ROWS + 1) * D + b, tl.sum(sums, axis=0), mask=b < BIASES)

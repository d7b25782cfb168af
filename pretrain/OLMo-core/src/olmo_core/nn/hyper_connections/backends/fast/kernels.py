"""
The CuTe DSL kernel of mHC's ``fast`` backend; ``DESIGN.md`` tells how it works. The maths is that of :mod:`..reference`.
Importing this module needs ``nvidia-cutlass-dsl``.

Names: ``g`` and ``c`` the row group (lane / 4) and the column group (lane % 4) of a lane in an ``mma`` fragment: it has token
``g`` of a tile and the columns ``8 c .. 8 c + 7`` of its warp's 32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.arch import inline_ptx

from ....ldm.backends.fast import ptx
from ....ldm.backends.fast.pieces import fold, max_over, split, sum_over, zeros
from .layout import (
    COEFFICIENT_BUFFERS,
    COEFFICIENT_WARPS,
    GRAM,
    LOAD_WARPS,
    STREAMS,
    TOKENS,
    UNIT,
    Spec,
)

PAIRS = [(n, n) for n in range(4)] + [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
"""
The products of the streams with each other, in the order in which they are kept: first ``n`` with itself, then with ``n ^ 1``, ``n ^ 2``
and ``n ^ 3``.
"""


def log(x):
    bits = inline_ptx(
        "lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )
    return bits * Float32(1.0 / ptx.LOG2_E)


class Forward:
    """
    A persistent cluster of blocks takes tiles of 8 tokens in turn; a block has some of the columns. The main warps mix the
    streams of a tile, store them and take their products; the coefficient warps make gates and norms of these; one tile
    later the main warps collapse the streams, which they still have in registers. Two warps load, one makes the maps.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.shared = spec.shared
        self.barriers = spec.barriers
        self.first_loader = spec.main_warps + COEFFICIENT_WARPS

    @cute.jit
    def __call__(
        self,
        streams: Int64,
        y: Int64,
        post: Int64,
        res: Int64,
        phi: Int64,
        alpha: Int64,
        bias: Int64,
        gain: Int64,
        streams_out: Int64,
        x: Int64,
        post_out: Int64,
        res_out: Int64,
        saved: Int64,
        n_tokens: Int32,
        iterations: Int32,
        eps: Float32,
        grid: Int32,
        stream,
    ):
        self.kernel(
            streams,
            y,
            post,
            res,
            phi,
            alpha,
            bias,
            gain,
            streams_out,
            x,
            post_out,
            res_out,
            saved,
            n_tokens,
            iterations,
            eps,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.spec.threads, 1, 1],
            cluster=[self.spec.cluster, 1, 1],
            smem=self.shared["size"],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        streams: Int64,
        y: Int64,
        post: Int64,
        res: Int64,
        phi: Int64,
        alpha: Int64,
        bias: Int64,
        gain: Int64,
        streams_out: Int64,
        x: Int64,
        post_out: Int64,
        res_out: Int64,
        saved: Int64,
        n_tokens: Int32,
        iterations: Int32,
        eps: Float32,
    ):
        s = self.spec
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        rank = block % s.cluster
        first_tile = block // s.cluster
        step = blocks // s.cluster
        n_tiles = (n_tokens + (TOKENS - 1)) // TOKENS
        n = (n_tiles - first_tile + step - 1) // step

        self.initialise(base, gain, thread, rank)
        if warp < s.main_warps:
            self.take_registers("main")
            self.main(
                base, phi, streams_out, x, n_tokens, first_tile, step, n, rank, warp, lane
            )  # fmt: skip
        else:
            self.take_registers("helper")
            if warp < self.first_loader:
                self.coefficients(
                    base, alpha, bias, saved, n_tokens, eps, first_tile, step, n, rank,
                    warp - s.main_warps, lane,
                )  # fmt: skip
            elif warp < self.first_loader + LOAD_WARPS:
                self.load(
                    base, streams, y, post, res, n_tokens, first_tile, step, n, rank,
                    warp - self.first_loader,
                )  # fmt: skip
            elif warp == self.first_loader + LOAD_WARPS:
                self.maps(
                    base, alpha, bias, post_out, res_out, n_tokens, iterations, eps, first_tile, step,
                    n, rank, lane,
                )  # fmt: skip
        if cutlass.const_expr(s.cluster > 1):
            # A block's shared memory must outlive the last store of its peers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def initialise(self, base, gain, thread, rank):
        """Barriers, and the gain in shared memory."""
        s = self.spec
        b = self.barriers
        if thread == 0:
            for i in range_constexpr(s.stages):
                ptx.barrier_init(base + b["full"] + 8 * i, 1)
                ptx.barrier_init(base + b["empty"] + 8 * i, s.main_warps)
            for i in range_constexpr(COEFFICIENT_BUFFERS):
                ptx.barrier_init(base + b["coefficients_full"] + 8 * i, COEFFICIENT_WARPS)
            for i in range_constexpr(2):
                ptx.barrier_init(base + b["maps_full"] + 8 * i, COEFFICIENT_WARPS)
                ptx.barrier_init(base + b["maps_empty"] + 8 * i, 1)
            ptx.barrier_init(base + b["partial_full"], s.main_warps)
            ptx.barrier_init(base + b["partial_empty"], COEFFICIENT_WARPS)
            if cutlass.const_expr(s.cluster > 1):
                for i in range_constexpr(2 * COEFFICIENT_WARPS):
                    ptx.barrier_init(base + b["exchange"] + 8 * i, 1)
            cute.arch.mbarrier_init_fence()
        for i in cutlass.range(thread, s.columns, s.threads, unroll=1):
            value = ptx.load_global_float(gain + Int64(4) * (rank * s.columns + i))
            ptx.store_shared_float(base + self.shared["gain"] + 4 * i, value)
        cute.arch.sync_threads()
        if cutlass.const_expr(s.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def take_registers(self, role: cutlass.Constexpr):
        s = self.spec
        if cutlass.const_expr(s.registers[role] > s.start_registers):
            cute.arch.setmaxregister_increase(s.registers[role])
        else:
            cute.arch.setmaxregister_decrease(s.registers[role])

    # The warps that load.

    @cute.jit
    def load(
        self, base, streams, y, post, res, n_tokens, first_tile, step, n, rank, loader
    ):  # fmt: skip
        """A block's columns of the rows of tiles, and their maps, as many tiles ahead as the ring holds."""
        s = self.spec
        for i in cutlass.range(n, unroll=1):
            stage = i % s.stages
            full = base + self.barriers["full"] + 8 * stage
            token = (first_tile + i * step) * TOKENS
            there = cutlass.min(n_tokens - token, TOKENS)
            ptx.barrier_wait(base + self.barriers["empty"] + 8 * stage, (i // s.stages + 1) & 1)
            tile = base + self.shared["ring"] + stage * s.tile_bytes
            with cute.arch.elect_one():
                # All addresses are the warp's: with one for each lane, a copy is issued in a loop over the lanes, 40 clocks each.
                if loader == 0:
                    ptx.barrier_expect(full, there * s.token_loads)
                    maps = post + Int64(token) * (4 * STREAMS)
                    ptx.copy_to_shared(tile + s.post_offset, maps, there * (4 * STREAMS), full)
                    if cutlass.const_expr(s.previous == "sinkhorn"):
                        mixes = res + Int64(token) * (4 * STREAMS * STREAMS)
                        n_bytes = there * (4 * STREAMS * STREAMS)
                        ptx.copy_to_shared(tile + s.res_offset, mixes, n_bytes, full)
                for t in cutlass.range(loader, there, LOAD_WARPS, unroll=1):
                    rows = streams + 2 * (Int64(token + t) * (STREAMS * s.d) + rank * s.columns)
                    output = y + 2 * (Int64(token + t) * s.d + rank * s.columns)
                    place = tile + t * s.token_bytes
                    for k in range_constexpr(STREAMS):
                        source = rows + 2 * k * s.d
                        ptx.copy_to_shared(place + k * s.row_bytes, source, s.row_bytes, full)
                    ptx.copy_to_shared(place + STREAMS * s.row_bytes, output, s.row_bytes, full)

    # The main warps.

    @cute.jit
    def main(
        self, base, phi, streams_out, x, n_tokens, first_tile, step, n, rank, warp, lane
    ):  # fmt: skip
        fragments = self.load_phi(phi, rank, warp, lane)
        # The streams of the last tile as they were rounded.
        held = cute.make_rmem_tensor(16, Uint32)
        for k in range_constexpr(16):
            held[k] = Uint32(0)
        for i in cutlass.range(n + 1, unroll=1):
            new = cute.make_rmem_tensor(16, Uint32)
            for k in range_constexpr(16):
                new[k] = Uint32(0)
            if i < n:
                tile = first_tile + i * step
                self.mix(
                    base, fragments, new, streams_out, n_tokens, i, tile, rank, warp, lane
                )  # fmt: skip
            if i >= 1:
                tile = first_tile + (i - 1) * step
                self.collapse(base, held, x, n_tokens, i - 1, tile, rank, warp, lane)
            for k in range_constexpr(16):
                held[k] = new[k]

    def load_phi(self, phi, rank, warp, lane) -> list:
        """
        ``phi`` as fragments ``a``: rows 0-7 what BF16 keeps of 8 of its columns, rows 8-15 what BF16 keeps of the rest. A lane's
        own parts, in its registers: 32 for each 8 columns of ``phi``.
        """
        s = self.spec
        g, c = lane // 4, lane % 4
        column = rank * s.columns + warp * UNIT + 8 * c
        fragments = []
        for n in range(STREAMS):
            for h in range(2):
                at = phi + Int64(4) * ((n * s.d + column + 4 * h) * s.phi_columns + g)
                loaded = [
                    [ptx.load_global_float(at + 4 * (k * s.phi_columns + 8 * m)) for k in range(4)]
                    for m in range(s.phi_tiles)
                ]
                for values in loaded:
                    high, low = split(values[:2])
                    more_high, more_low = split(values[2:])
                    fragments.append((high, low, more_high, more_low))
        return fragments

    @cute.jit
    def mix(self, base, fragments, new, streams_out, n_tokens, i, tile, rank, warp, lane):
        """The new streams of a tile, their products with ``phi`` and with each other."""
        s = self.spec
        g, c = lane // 4, lane % 4
        stage = i % s.stages
        ptx.barrier_wait(base + self.barriers["full"] + 8 * stage, (i // s.stages) & 1)
        ring = base + self.shared["ring"] + stage * s.tile_bytes
        row = ring + g * s.token_bytes + 64 * warp + 16 * c
        posts = ptx.load_shared_float_4(ring + s.post_offset + 16 * g)
        mixes = []
        if cutlass.const_expr(s.previous == "sinkhorn"):
            mixes = [
                ptx.load_shared_float_4(ring + s.res_offset + 64 * g + 16 * k)
                for k in range(STREAMS)
            ]
        outputs = ptx.load_shared_4(row + STREAMS * s.row_bytes)
        old = [ptx.load_shared_4(row + n * s.row_bytes) for n in range(STREAMS)]
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["empty"] + 8 * stage, predicate=lane == 0)

        gram = [Float32(0.0)] * GRAM
        rounded: list[list] = [[] for _ in range(STREAMS)]
        for q in range_constexpr(4):
            by = ptx.unpack(outputs[q])
            before = [ptx.unpack(r[q]) for r in old]
            pairs = []
            for k in range_constexpr(STREAMS):
                values = []
                for e in range_constexpr(2):
                    m = posts[k] * by[e]
                    if cutlass.const_expr(s.previous == "identity"):
                        m = m + before[k][e]
                    else:
                        for j in range_constexpr(STREAMS):
                            m = m + mixes[k][j] * before[j][e]
                    values.append(m)
                # Rounded before anything is computed from it, so that the backward sees the same streams.
                bits = ptx.pack(values[0], values[1])
                rounded[k].append(bits)
                new[4 * k + q] = bits
                pairs.append(ptx.unpack(bits))
            for p in range_constexpr(len(PAIRS)):
                a, b = PAIRS[p]
                for e in range_constexpr(2):
                    gram[p] = gram[p] + pairs[a][e] * pairs[b][e]

        token = tile * TOKENS + g
        valid = token < n_tokens
        column = rank * s.columns + warp * UNIT + 8 * c
        out = streams_out + Int64(2) * (Int64(token) * (STREAMS * s.d) + column)
        for k in range_constexpr(STREAMS):
            ptx.store_global_4(out + 2 * k * s.d, rounded[k], predicate=valid)

        # Both halves apart: half as long a chain.
        sums = [[zeros() for _ in range(s.phi_tiles)] for _ in range(2)]
        for n in range_constexpr(STREAMS):
            for h in range_constexpr(2):
                b = (rounded[n][2 * h], rounded[n][2 * h + 1])
                for m in range_constexpr(s.phi_tiles):
                    a = fragments[(2 * n + h) * s.phi_tiles + m]
                    sums[h][m] = ptx.mma(a, b, sums[h][m])
        of_lane = fold(fold(gram, c >= 2, 2), c % 2 == 1, 1)

        ptx.barrier_wait(base + self.barriers["partial_empty"], (i + 1) & 1)
        partials = base + self.shared["partial"] + warp * (4 * TOKENS * s.floats)
        for m in range_constexpr(s.phi_tiles):
            for e in range_constexpr(2):
                # Rows g and g + 8: the products with the two parts of phi.
                whole = (sums[0][m][e] + sums[1][m][e]) + (sums[0][m][2 + e] + sums[1][m][2 + e])
                at = partials + 4 * ((2 * c + e) * s.floats + 8 * m + g)
                ptx.store_shared_float(at, whole)
        at = partials + 4 * (g * s.floats + s.phi_columns + GRAM // 4 * c)
        for k in range_constexpr(3):
            ptx.store_shared_float(at + 4 * k, of_lane[k])
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["partial_full"], predicate=lane == 0)

    def coefficients_of(self, base, i, t):
        """The weights of the streams of token ``t`` of this block's tile ``i``, the norm's factor included."""
        buffer = i % COEFFICIENT_BUFFERS
        return base + self.shared["coefficients"] + (buffer * TOKENS + t) * (4 * STREAMS)

    def coefficients_barrier(self, base, i):
        return base + self.barriers["coefficients_full"] + 8 * (i % COEFFICIENT_BUFFERS)

    @cute.jit
    def collapse(self, base, held, x, n_tokens, i, tile, rank, warp, lane):
        """``x`` of a tile that was mixed one tile ago."""
        s = self.spec
        g, c = lane // 4, lane % 4
        in_block = warp * UNIT + 8 * c
        gains = base + self.shared["gain"] + 4 * in_block
        gain = [*ptx.load_shared_float_4(gains), *ptx.load_shared_float_4(gains + 16)]
        phase = (i // COEFFICIENT_BUFFERS) & 1
        ptx.barrier_wait(self.coefficients_barrier(base, i), phase)
        weights = ptx.load_shared_float_4(self.coefficients_of(base, i, g))
        out = []
        for q in range_constexpr(4):
            pairs = [ptx.unpack(held[4 * k + q]) for k in range(STREAMS)]
            values = []
            for e in range_constexpr(2):
                h = weights[0] * pairs[0][e]
                for k in range_constexpr(1, STREAMS):
                    h = h + weights[k] * pairs[k][e]
                values.append(h * gain[2 * q + e])
            out.append(ptx.pack(values[0], values[1]))
        token = tile * TOKENS + g
        address = x + Int64(2) * (Int64(token) * s.d + rank * s.columns + in_block)
        ptx.store_global_4(address, out, predicate=token < n_tokens)

    # The warps that make coefficients.

    @cute.jit
    def coefficients(
        self, base, alpha, bias, saved, n_tokens, eps, first_tile, step, n, rank, warp, lane
    ):  # fmt: skip
        """Two tokens of each tile for each warp: the sums over warps and blocks, the gates, and the norms' factors."""
        s = self.spec
        vectors = s.floats // 4
        # For the sums: 4 numbers of a token. Lanes without any repeat others'.
        slot = lane // vectors
        mine = slot < TOKENS // COEFFICIENT_WARPS
        slot = cutlass.min(slot, Int32(TOKENS // COEFFICIENT_WARPS - 1))
        vector = lane % vectors
        t = warp + COEFFICIENT_WARPS * slot
        offset = (t * vectors + vector) * 16
        # For the gates: one stream of a token.
        stream = lane % STREAMS
        of_gate = warp + COEFFICIENT_WARPS * ((lane // STREAMS) % (TOKENS // COEFFICIENT_WARPS))
        first_gate = lane < STREAMS * (TOKENS // COEFFICIENT_WARPS)
        scale = ptx.load_global_float(alpha)
        shift = ptx.load_global_float(bias + Int64(4) * stream)
        rstds = saved + Int64(4 * s.phi_columns) * n_tokens
        for i in cutlass.range(n, unroll=1):
            tile = first_tile + i * step
            # The maps of every so manieth tile are made here.
            owned = i % s.cluster == rank
            turn = i // s.cluster
            place = cutlass.select_(owned, turn & 1, Int32(2))
            total = base + self.shared["total"] + place * s.total_bytes
            if owned:
                empty = base + self.barriers["maps_empty"] + 8 * (turn & 1)
                ptx.barrier_wait(empty, (turn // 2 + 1) & 1)
            ptx.barrier_wait(base + self.barriers["partial_full"], i & 1)
            partials = base + self.shared["partial"] + offset
            sums = self.add_up(partials, s.main_warps, 4 * TOKENS * s.floats)
            cute.arch.sync_warp()
            ptx.barrier_arrive(base + self.barriers["partial_empty"], predicate=lane == 0)
            if cutlass.const_expr(s.cluster > 1):
                buffer = i & 1
                exchange = base + self.shared["exchange"] + buffer * s.exchange_bytes + offset
                barrier = base + self.barriers["exchange"] + 8 * (2 * warp + buffer)
                of_block = 4 * TOKENS * s.floats
                if lane == 0:
                    n_bytes = 4 * s.floats * (TOKENS // COEFFICIENT_WARPS) * (s.cluster - 1)
                    ptx.barrier_expect(barrier, n_bytes)
                if mine:
                    here = exchange + rank * of_block
                    ptx.store_shared_float_4(here, sums)
                    for other in range_constexpr(1, s.cluster):
                        peer = (rank + other) % s.cluster
                        ptx.store_peer_4(
                            ptx.peer_address(here, peer), sums, ptx.peer_address(barrier, peer)
                        )
                ptx.barrier_wait_cluster(barrier, (i // 2) & 1)
                cute.arch.sync_warp()
                sums = self.add_up(exchange, s.cluster, of_block)
            if mine:
                ptx.store_shared_float_4(total + offset, sums)
            token = Int64(tile * TOKENS + t)
            # All blocks of a cluster have the same sums; each saves those of some tokens.
            saves = mine & (tile * TOKENS + t < n_tokens) & (t % s.cluster == rank)
            saves = saves & (vector < s.phi_columns // 4)
            ptx.store_global_4(
                saved + Int64(4) * (token * s.phi_columns + 4 * vector),
                [ptx.as_bits(v) for v in sums],
                predicate=saves,
            )
            cute.arch.sync_warp()

            # G, the products of the streams with each other, gives the norms of all streams and of their sum.
            sums_at = total + of_gate * (4 * s.floats)
            gram = sums_at + 4 * s.phi_columns
            norms = ptx.load_shared_float_4(gram)
            squares = (norms[0] + norms[1]) + (norms[2] + norms[3])
            rstd = ptx.rsqrt(squares * Float32(1.0 / (STREAMS * s.d)) + eps)
            z = ptx.load_shared_float(sums_at + 4 * stream) * rstd
            gate = ptx.sigmoid(scale * z + shift)
            row = gate * ptx.load_shared_float(gram + 4 * stream)
            places = (4 + stream // 2, 6 + stream % 2, 8 + ((stream ^ (stream >> 1)) & 1))
            for other in range_constexpr(1, STREAMS):
                product = ptx.load_shared_float(gram + 4 * places[other - 1])
                row = row + product * cute.arch.shuffle_sync_bfly(gate, offset=other)
            squares = ptx.maximum(sum_over(gate * row, STREAMS), Float32(0.0))
            rstd_h = ptx.rsqrt(squares * Float32(1.0 / s.d) + eps)
            at = self.coefficients_of(base, i, of_gate) + 4 * stream
            ptx.store_shared_float(at, gate * rstd_h, predicate=first_gate)
            cute.arch.sync_warp()
            ptx.barrier_arrive(self.coefficients_barrier(base, i), predicate=lane == 0)
            full = base + self.barriers["maps_full"] + 8 * (turn & 1)
            ptx.barrier_arrive(full, predicate=owned & (lane == 0))

            number = tile * TOKENS + of_gate
            saves = first_gate & (number < n_tokens) & (of_gate % s.cluster == rank)
            gates = rstds + Int64(8) * n_tokens
            ptx.store_global_float(
                gates + Int64(4) * (Int64(number) * STREAMS + stream), gate, predicate=saves
            )
            saves = saves & (stream == 0)
            at_token = rstds + Int64(4) * number
            ptx.store_global_float(at_token, rstd, predicate=saves)
            ptx.store_global_float(at_token + Int64(4) * n_tokens, rstd_h, predicate=saves)

    # The warp that makes the maps.

    @cute.jit
    def maps(
        self, base, alpha, bias, post_out, res_out, n_tokens, iterations, eps, first_tile, step, n,
        rank, lane,
    ):  # fmt: skip
        """
        ``post`` and ``res`` of every so manieth tile: 4 lanes for each token, one for each row of ``H_res``. After the first of the
        Sinkhorn iterations the matrix is ``u E v``: no factor leaves [1/4, 4] any more, and no logarithm is needed.
        """
        s = self.spec
        t, k = lane // STREAMS, lane % STREAMS
        post_scale = ptx.load_global_float(alpha + 4)
        post_shift = ptx.load_global_float(bias + Int64(4) * (STREAMS + k))
        res_scale = Float32(0.0)
        res_shift = [Float32(0.0)] * STREAMS
        if cutlass.const_expr(s.next == "sinkhorn"):
            res_scale = ptx.load_global_float(alpha + 8)
            res_shift = [
                ptx.load_global_float(bias + Int64(4) * (STREAMS * (2 + k) + c))
                for c in range(STREAMS)
            ]
        for turn in cutlass.range((n - rank + s.cluster - 1) // s.cluster, unroll=1):
            buffer = turn & 1
            ptx.barrier_wait(base + self.barriers["maps_full"] + 8 * buffer, (turn // 2) & 1)
            sums = base + self.shared["total"] + buffer * s.total_bytes + t * (4 * s.floats)
            norms = ptx.load_shared_float_4(sums + 4 * s.phi_columns)
            of_post = ptx.load_shared_float(sums + 4 * (STREAMS + k))
            logits = [Float32(0.0)] * STREAMS
            if cutlass.const_expr(s.next == "sinkhorn"):
                logits = ptx.load_shared_float_4(sums + 16 * (2 + k))
            cute.arch.sync_warp()
            empty = base + self.barriers["maps_empty"] + 8 * buffer
            ptx.barrier_arrive(empty, predicate=lane == 0)

            squares = (norms[0] + norms[1]) + (norms[2] + norms[3])
            rstd = ptx.rsqrt(squares * Float32(1.0 / (STREAMS * s.d)) + eps)
            token = (first_tile + (rank + turn * s.cluster) * step) * TOKENS + t
            valid = token < n_tokens
            row = Int64(token) * STREAMS + k
            gate = Float32(2.0) * ptx.sigmoid(post_scale * (of_post * rstd) + post_shift)
            ptx.store_global_float(post_out + Int64(4) * row, gate, predicate=valid)
            if cutlass.const_expr(s.next == "sinkhorn"):
                e = [
                    res_scale * (z * rstd) + shift
                    for z, shift in zip(logits, res_shift, strict=True)
                ]
                e = self.first_iteration(e)
                u = cute.make_rmem_tensor(1, Float32)
                v = cute.make_rmem_tensor(STREAMS, Float32)
                u[0] = Float32(1.0)
                for c in range_constexpr(STREAMS):
                    v[c] = Float32(1.0)
                for _i in cutlass.range(iterations - 1, unroll=1):
                    columns = [sum_over(u[0] * a, STREAMS) for a in e]
                    for c in range_constexpr(STREAMS):
                        v[c] = ptx.reciprocal(columns[c])
                    u[0] = ptx.reciprocal((e[0] * v[0] + e[1] * v[1]) + (e[2] * v[2] + e[3] * v[3]))
                out = [ptx.as_bits(u[0] * e[c] * v[c]) for c in range(STREAMS)]
                ptx.store_global_4(res_out + Int64(16) * row, out, predicate=valid)

    def first_iteration(self, logits) -> list:
        """Columns, then rows, in the log domain: ``exp`` of a logit above 88 overflows FP32."""
        columns = []
        for a in logits:
            top = max_over(a, STREAMS)
            total = sum_over(ptx.exp(a - top), STREAMS)
            columns.append((a - top) - log(total))
        top = ptx.maximum(ptx.maximum(*columns[:2]), ptx.maximum(*columns[2:]))
        row = [ptx.exp(a - top) for a in columns]
        total = ptx.reciprocal((row[0] + row[1]) + (row[2] + row[3]))
        return [a * total for a in row]

    def add_up(self, address, n: int, stride: int) -> list:
        """The sums over ``n`` places, in their order."""
        parts = [ptx.load_shared_float_4(address + w * stride) for w in range(n)]
        sums = parts[0]
        for more in parts[1:]:
            sums = [a + b for a, b in zip(sums, more, strict=True)]
        return sums

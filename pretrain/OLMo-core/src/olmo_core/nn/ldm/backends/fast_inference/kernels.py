"""
The CuTe DSL kernel of the decode step; ``DESIGN.md`` tells how it works. The maths is that of :mod:`..reference`. Importing
this module needs ``nvidia-cutlass-dsl``.

Names: ``K`` slots, ``g`` and ``c`` the row group (lane / 4) and the column group (lane % 4) of a lane in an ``mma`` fragment.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from ..fast import ptx
from ..fast.pieces import (
    dot,
    fold,
    load_row,
    max_over,
    pack_pairs,
    spread,
    sum_over,
    where_both,
    zeros,
)
from .layout import UNIT, Spec


def unpack_row(bits) -> list:
    """8 columns of BF16 in registers as FP32."""
    return [f for r in bits for f in ptx.unpack(r)]


class Decode:
    """
    A cluster of blocks has a group of up to 8 tokens. A lane keeps its 8 columns of a row of the memory in registers from the load
    to the store; in between are dot products by tensor cores, their sum over warps and blocks, and one warp for each token that
    makes coefficients of them.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.shared = spec.shared
        K, tokens = spec.d_k, spec.tokens
        # Memory tiles of 8 rows: one token at K = 8, two at K = 4 (the second may be missing), half of one at K = 16.
        self.memory_tiles = -(-tokens // 2) if K == 4 else tokens * K // 8
        barriers = self.shared["barriers"]
        self.barriers = {
            name: barriers + 8 * tokens * i for i, name in enumerate(("exchange", "gates", "reads"))
        }

    @cute.jit
    def __call__(
        self,
        memory: Int64,
        y: Int64,
        packed: Int64,
        memory_out: Int64,
        x: Int64,
        n_tokens: Int32,
        eps: Float32,
        grid: Int32,
        stream,
    ):
        self.kernel(memory, y, packed, memory_out, x, n_tokens, eps).launch(
            grid=[grid, 1, 1],
            block=[self.spec.threads, 1, 1],
            cluster=[self.spec.cluster, 1, 1],
            smem=self.shared["size"],
            min_blocks_per_mp=self.spec.blocks_per_multiprocessor,
            # Given, or the compiler asks a GPU for it; the driver chooses at the launch.
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        memory: Int64,
        y: Int64,
        packed: Int64,
        memory_out: Int64,
        x: Int64,
        n_tokens: Int32,
        eps: Float32,
    ):
        s = self.spec
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        rank = block % s.cluster
        first = (block // s.cluster) * s.tokens
        last = n_tokens - 1

        # What no kernel before this one has written: asked for before the wait for the kernel before.
        weights, gains, biases = self.load_parameters(packed, rank, warp, lane)
        self.initialise(base, thread, rank)
        cute.arch.griddepcontrol_wait()
        rows, by = self.load_sources(memory, y, first, last, rank, warp, lane)
        cute.arch.griddepcontrol_launch_dependents()

        self.dots(base, weights, rows, by, warp, lane)
        if cutlass.const_expr(s.cluster > 1):
            # The peers' barriers are there before anything is sent.
            cute.arch.cluster_wait()
        cute.arch.sync_threads()
        for t in cutlass.range(warp, s.tokens, s.warps, unroll=1):
            self.token_coefficients(base, biases, t, eps, rank, lane)
        ys = self.load_outputs(y, by, first, last, rank, warp, lane)
        self.store_memory(base, memory_out, rows, ys, first, n_tokens, rank, warp, lane)
        self.read(base, x, rows, ys, gains, first, n_tokens, rank, warp, lane)

    def column(self, j: int, warp, lane):
        """The first of a lane's 8 columns in step ``j``, in the block."""
        return (warp + self.spec.warps * j) * UNIT + (lane % 4) * 8

    def read_column(self, lane):
        """The two of a lane's 8 columns that it has after the sum over the slots, and whether it stores them."""
        g = lane // 4
        if self.spec.d_k == 4:
            return 4 * ((g // 2) % 2) + 2 * (g % 2), None
        return 4 * (g // 4) + 2 * ((g // 2) % 2), g % 2 == 0

    def load_parameters(self, packed, rank, warp, lane):
        """
        Fragments of the maps, ``[step][part][half of the step]``; the gain, two columns for each step; the biases of slot
        ``lane % K`` for the query, the key and the forget gate.
        """
        s = self.spec
        weights, gains = [], []
        units = s.columns // UNIT
        in_unit, _ = self.read_column(lane)
        policy = ptx.keep_policy() if s.keep != "nothing" else None
        for j in range(s.steps):
            unit = rank * units + warp + s.warps * j
            start = packed + Int64(unit) * s.unit_bytes + 16 * lane
            weights.append(
                [
                    [ptx.load_global_4(start + 512 * (2 * p + h), policy) for h in range(2)]
                    for p in range(len(s.parts))
                ]
            )
            column = rank * s.columns + self.column(j, warp, lane) + in_unit
            gains.append(ptx.load_global_float_2(packed + s.gain_offset + Int64(4) * column))
        slot = packed + s.bias_offset + Int64(4) * (lane % s.d_k)
        biases = [ptx.load_global_float(slot + 4 * s.d_k * i) for i in range(3)]
        return weights, gains, biases

    @cute.jit
    def initialise(self, base, thread, rank):
        s = self.spec
        b = self.barriers
        floats = s.partial["size"]
        if thread == 0:
            for t in range_constexpr(s.tokens):
                ptx.barrier_init(base + b["exchange"] + 8 * t, 1)
                ptx.barrier_init(base + b["gates"] + 8 * t, 1)
                ptx.barrier_init(base + b["reads"] + 8 * t, 1)
            cute.arch.mbarrier_init_fence()
            for t in range_constexpr(s.tokens):
                if cutlass.const_expr(s.exchange == "owner"):
                    if rank == t % s.cluster:
                        ptx.barrier_expect(base + b["exchange"] + 8 * t, 4 * floats * s.cluster)
                    ptx.barrier_expect(base + b["gates"] + 8 * t, s.gate_bytes)
                    ptx.barrier_expect(base + b["reads"] + 8 * t, s.read_bytes)
                elif cutlass.const_expr(s.cluster > 1):
                    n_bytes = 4 * floats * (s.cluster - 1)
                    ptx.barrier_expect(base + b["exchange"] + 8 * t, n_bytes)
        if cutlass.const_expr(s.cluster > 1):
            # Relaxed: the fence above is all that the peers need, and a release would wait for the loads.
            cute.arch.cluster_arrive_relaxed()

    def load_sources(self, memory, y, first, last, rank, warp, lane):
        """
        All rows of the group at once: the memory's ``[step][tile]``, and ``y`` of token ``g``, ``[step]``. Beyond the last token, the
        last one's.
        """
        s = self.spec
        g = lane // 4
        rows, by = [], []
        policy = ptx.keep_policy() if s.keep == "all" else None
        of_group = cutlass.min(first + g % s.tokens, last)
        for j in range(s.steps):
            column = rank * s.columns + self.column(j, warp, lane)
            tiles = []
            for t in range(self.memory_tiles):
                token, slot = self.row(first, t, g)
                token = cutlass.min(token, last)
                address = memory + 2 * (Int64(token) * (s.d_k * s.d) + slot * s.d + column)
                tiles.append(ptx.load_global_4(address, policy))
            rows.append(tiles)
            by.append(ptx.load_global_4(y + 2 * (Int64(of_group) * s.d + column)))
        return rows, by

    def load_outputs(self, y, by, first, last, rank, warp, lane):
        """
        ``y`` of the token of each tile, ``[step][tile]``. Again, since beside the products and the coefficients it would be too many
        registers; the L1 cache has it, and most warps wait for coefficients anyway.
        """
        s = self.spec
        if s.tokens == 1:
            return [[v] * self.memory_tiles for v in by]
        out = []
        for j in range(s.steps):
            column = rank * s.columns + self.column(j, warp, lane)
            tiles: list = []
            for t in range(self.memory_tiles):
                token, _ = self.row(first, t, lane // 4)
                if s.d_k == 16 and t % 2:
                    tiles.append(tiles[-1])
                else:
                    token = cutlass.min(token, last)
                    tiles.append(ptx.load_global_4(y + 2 * (Int64(token) * s.d + column)))
            out.append(tiles)
        return out

    def row(self, first, t: int, g):
        """Token and slot of row ``g`` of tile ``t``."""
        K = self.spec.d_k
        if K == 8:
            return first + t, g
        if K == 4:
            if self.spec.tokens == 1:
                return first, g % 4
            return first + 2 * t + g // 4, g % 4
        return first + t // 2, 8 * (t % 2) + g

    # Dot products.

    def dots(self, base, weights, rows, by, warp, lane):
        """
        Memory rows with each other, with ``y`` and with the query's map; ``y`` with itself and with all maps. The order of the
        columns is free in a dot product, so that a lane's 16 bytes in a row are its part of a fragment.
        """
        s = self.spec
        K = s.d_k
        g, c = lane // 4, lane % 4
        partials = base + self.shared["partial"] + warp * (4 * s.tokens * s.partial["size"])
        halves = [(j, h) for j in range(s.steps) for h in range(2)]

        maps = [zeros() for _ in range(3 if K == 16 else 2)]
        low = [zeros() for _ in range(3 if K == 16 else 1)]
        norm = zeros()
        for j, h in halves:
            p, q = 2 * h, 2 * h + 1
            w, b = weights[j], (by[j][p], by[j][q])
            # High and low parts apart: half as long a chain.
            n = len(w) // 2
            for m in range(n):
                slot = m + len(low) - n
                maps[slot] = ptx.mma(w[2 * m][h], b, maps[slot])
                low[slot] = ptx.mma(w[2 * m + 1][h], b, low[slot])
            if K == 8:
                maps[1] = ptx.mma(w[2][h], b, maps[1])
            norm = ptx.mma((Uint32(0), b[0], Uint32(0), b[1]), b, norm)
        maps = [
            [a + b for a, b in zip(m, low[i], strict=True)] if i < len(low) else m
            for i, m in enumerate(maps)
        ]
        self.store_maps(partials, maps, norm, g, c)

        for t in range(self.memory_tiles):
            if K == 16 and t % 2:
                continue
            tiles = (t, t + 1) if K == 16 else (t,)
            gram, query, more = ([zeros() for _ in tiles] for _ in range(3))
            with_y = zeros()
            for j, h in halves:
                p, q = 2 * h, 2 * h + 1
                w, ys = weights[j], by[j]
                if K == 16:
                    r, r8 = (rows[j][i] for i in tiles)
                    a = (r[p], r8[p], r[q], r8[q])
                    with_y = ptx.mma(a, (ys[p], ys[q]), with_y)
                else:
                    r = rows[j][t]
                    a = (r[p], ys[p], r[q], ys[q])
                for i, tile in enumerate(tiles):
                    b = (rows[j][tile][p], rows[j][tile][q])
                    gram[i] = ptx.mma(a, b, gram[i])
                    if K == 8:
                        query[i] = ptx.mma(w[2][h], b, query[i])
                    else:
                        query[i] = ptx.mma(w[-2][h], b, query[i])
                        more[i] = ptx.mma(w[-1][h], b, more[i])
            self.store_products(partials, t, gram, query, more, with_y, g, c)

    def place(self, partials, token, name: str, index):
        p = self.spec.partial
        return partials + 4 * (token * p["size"] + p[name] + index)

    def store_maps(self, partials, maps, norm, g, c):
        """
        Products with ``y``, one column for each token. A thread's four numbers of a product are rows ``g`` (two) and ``g + 8`` (two),
        columns ``2c`` and ``2c + 1``.
        """
        s = self.spec
        K = s.d_k
        for column in range(min(2, s.tokens)):
            token = 2 * c + column
            # A predicate that is always true is no register, and PTX has no place for its value.
            mine = token < s.tokens if s.tokens < 8 else None
            values = [(g, maps[0][column]), (8 + g, maps[0][2 + column])]
            if K == 8:
                values += [(16 + g, maps[1][column] + maps[1][2 + column])]
            if K == 16:
                values = [
                    (16 * m + 8 * half + g, maps[m][2 * half + column])
                    for m in range(3)
                    for half in range(2)
                ]
            for i, (index, value) in enumerate(values):
                stored = where_both(mine, g < 4) if K == 4 and i == 1 else mine
                ptx.store_shared_float(self.place(partials, token, "maps", index), value, stored)
            own = where_both(mine, g == token)
            ptx.store_shared_float(self.place(partials, token, "norm", 0), norm[2 + column], own)

    def store_products(self, partials, t: int, gram, query, more, with_y, g, c):
        """Products of the memory's rows."""
        s = self.spec
        K = s.d_k
        if K == 8:
            ptx.store_shared_float_2(self.place(partials, t, "gram", 8 * g + 2 * c), gram[0][:2])
            both = [query[0][0] + query[0][2], query[0][1] + query[0][3]]
            ptx.store_shared_float_2(self.place(partials, t, "query", 8 * g + 2 * c), both)
            ptx.store_shared_float_2(
                self.place(partials, t, "memory", 2 * c), gram[0][2:], predicate=g == t
            )
        elif K == 4:
            token, slot = 2 * t + c // 2, (2 * c) % 4
            there = token < s.tokens if 2 * t + 1 >= s.tokens else None
            ptx.store_shared_float_2(
                self.place(partials, token, "gram", (g % 4) * 4 + slot),
                gram[0][:2],
                predicate=where_both(there, g // 4 == c // 2),
            )
            ptx.store_shared_float_2(
                self.place(partials, token, "query", g * 4 + slot),
                [query[0][i] + more[0][i] for i in (2, 3)],
                predicate=where_both(there, g < 4),
            )
            ptx.store_shared_float_2(
                self.place(partials, token, "memory", slot),
                gram[0][2:],
                predicate=where_both(there, g == token),
            )
        else:
            token = t // 2
            for i in range(2):
                products = [a + b for a, b in zip(query[i], more[i], strict=True)]
                for name, values in (("gram", gram[i]), ("query", products)):
                    for half in range(2):
                        index = (g + 8 * half) * 16 + 8 * i + 2 * c
                        ptx.store_shared_float_2(
                            self.place(partials, token, name, index),
                            values[2 * half : 2 * half + 2],
                        )
            for column in range(min(2, s.tokens)):
                if token % 2 == column or s.tokens == 1:
                    for half in range(2):
                        ptx.store_shared_float(
                            self.place(partials, token, "memory", 8 * half + g),
                            with_y[2 * half + column],
                            predicate=2 * c + column == token,
                        )

    # Coefficients: one warp for each token.

    @cute.jit
    def token_coefficients(self, base, biases, t, eps, rank, lane):
        s = self.spec
        owner = rank
        if cutlass.const_expr(s.exchange == "owner"):
            owner = t % s.cluster
        total = base + self.shared["partial"] + t * (4 * s.partial["size"])
        self.send_partials(base, total, t, owner, rank, lane)
        if rank == owner:
            self.sum_blocks(base, total, t, lane)
            cute.arch.sync_warp()
            self.coefficients(base, biases, total, t, eps, lane)

    def rounds(self) -> list[list[int]]:
        """
        The rounds in which a warp adds a token's dot products, 4 numbers for each lane: two at a time, so that the loads of both are
        in flight.
        """
        n = -(-self.spec.partial["size"] // (4 * 32))
        return [[i for i in (first, first + 1) if i < n] for first in range(0, n, 2)]

    def add_up(self, address, n: int, stride: int, rounds: list[int], lane) -> list:
        """Sums over ``n`` places in their order, for each round; a lane that has nothing to do in one repeats another's."""
        last = self.spec.partial["size"] // 4 - 1
        vectors = [cutlass.min(lane + 32 * i, last) for i in rounds]
        parts = [
            [ptx.load_shared_float_4(address + w * stride + 16 * v) for w in range(n)]
            for v in vectors
        ]
        out = []
        for v, terms in zip(vectors, parts, strict=True):
            sums = terms[0]
            for more in terms[1:]:
                sums = [a + b for a, b in zip(sums, more, strict=True)]
            out.append((v, sums))
        return out

    def has_work(self, i: int, lane):
        """Whether a lane has numbers of its own in round ``i``."""
        return lane + 32 * i < self.spec.partial["size"] // 4

    @cute.jit
    def send_partials(self, base, total, t, owner, rank, lane):
        """This block's dot products of one token, summed over its warps in a fixed order, to the blocks that want them."""
        s = self.spec
        floats = s.partial["size"]
        barrier = base + self.barriers["exchange"] + 8 * t
        slot = t
        if cutlass.const_expr(s.exchange == "owner"):
            slot = t // s.cluster
        exchange = base + self.shared["exchange"] + (slot * s.cluster + rank) * (4 * floats)
        for rounds in self.rounds():
            sums = self.add_up(total, s.warps, 4 * s.tokens * floats, rounds, lane)
            for i, (v, values) in zip(rounds, sums, strict=True):
                if cutlass.const_expr(s.cluster == 1):
                    # In place of the first warp's, by the lane that read them or with the same values.
                    cute.arch.sync_warp()
                    ptx.store_shared_float_4(total + 16 * v, values)
                elif self.has_work(i, lane):
                    mine = exchange + 16 * v
                    if cutlass.const_expr(s.exchange == "owner"):
                        ptx.store_peer_4(
                            ptx.peer_address(mine, owner),
                            values,
                            ptx.peer_address(barrier, owner),
                        )
                    else:
                        ptx.store_shared_float_4(mine, values)
                        for other in range_constexpr(1, s.cluster):
                            peer = (rank + other) % s.cluster
                            ptx.store_peer_4(
                                ptx.peer_address(mine, peer),
                                values,
                                ptx.peer_address(barrier, peer),
                            )

    @cute.jit
    def sum_blocks(self, base, total, t, lane):
        """The sum over the blocks, in their order, so that all have the same bits."""
        s = self.spec
        floats = s.partial["size"]
        if cutlass.const_expr(s.cluster > 1):
            slot = t
            if cutlass.const_expr(s.exchange == "owner"):
                slot = t // s.cluster
            exchange = base + self.shared["exchange"] + slot * (s.cluster * 4 * floats)
            ptx.barrier_wait_cluster(base + self.barriers["exchange"] + 8 * t, 0)
            cute.arch.sync_warp()
            for rounds in self.rounds():
                for v, values in self.add_up(exchange, s.cluster, 4 * floats, rounds, lane):
                    ptx.store_shared_float_4(total + 16 * v, values)

    @cute.jit
    def coefficients(self, base, biases, total, t, eps, lane):
        """
        Forget gate, key, query and the weights of the read. A lane has slot ``lane % K``; the mean of the new memory, its norm and
        the norm of what is read are quadratic forms in the dot products.
        """
        s = self.spec
        K = s.d_k
        p = s.partial
        slot = lane % K
        mine = lane < K
        inverse_d, inverse_k = Float32(1.0 / s.d), Float32(1.0 / K)
        b_query, b_key, b_forget = biases
        yy = ptx.load_shared_float(total + 4 * p["norm"])
        maps = total + 4 * (p["maps"] + slot)
        p_key = ptx.load_shared_float(maps + 4 * K)
        y_query = ptx.load_shared_float(maps + 8 * K)
        sy = ptx.load_shared_float(total + 4 * (p["memory"] + slot))
        gram = load_row(total + 4 * (p["gram"] + K * slot), K)
        query_row = load_row(total + 4 * (p["query"] + K * slot), K)

        rstd_y = ptx.rsqrt(yy * inverse_d + eps)
        a = Float32(1.0)
        if cutlass.const_expr(s.forget != "none"):
            z = b_forget
            if cutlass.const_expr(s.forget == "dynamic"):
                z = z + ptx.load_shared_float(maps) * rstd_y
            a = ptx.sigmoid(-z)
        k = self.key(b_key + p_key * rstd_y)
        gates = base + self.shared["gates"] + t * s.gate_bytes
        reads = base + self.shared["reads"] + t * s.read_bytes
        if cutlass.const_expr(s.exchange == "owner"):
            gates = base + self.shared["sent"] + t * (s.gate_bytes + s.read_bytes)
            reads = gates + s.gate_bytes
        ptx.store_shared_float_2(gates + 8 * slot, (a, k), mine)
        cute.arch.sync_warp()
        self.publish(base, gates, "gates", s.gate_bytes, t, lane)

        # m = (sum_t a_t S_t + sum_k y) / K
        all_a, all_k = spread(a, K), spread(k, K)
        sum_k = all_k[0]
        for f in all_k[1:]:
            sum_k = sum_k + f
        s_m = (dot(all_a, gram) + sum_k * sy) * inverse_k
        m = dot(all_a, query_row) + sum_k * y_query
        # a . s_m + sum_k y . m, with y . m = (a . sy + sum_k yy) / K
        m_m = sum_over(a * (s_m + (sum_k * inverse_k) * sy), K) + sum_k * sum_k * yy * inverse_k
        rstd_m = ptx.rsqrt(ptx.maximum(m_m * inverse_k, Float32(0.0)) * inverse_d + eps)
        z = b_query + m * (rstd_m * inverse_k)
        e = ptx.exp(z - max_over(z, K))
        all_e = spread(e, K)
        sum_e = all_e[0]
        wy = all_e[0] * all_k[0]
        for i in range_constexpr(1, K):
            sum_e = sum_e + all_e[i]
            wy = wy + all_e[i] * all_k[i]
        # h = sum_t w_t S_t + w_y y, times the sum of the exponentials.
        w = e * a
        all_w = [f * f_a for f, f_a in zip(all_e, all_a, strict=True)]
        s_h = dot(all_w, gram) + wy * sy
        # w . s_h + w_y y . h, with y . h = w . sy + w_y yy
        h_h = sum_over(w * (s_h + wy * sy), K) + wy * wy * yy
        scale = ptx.reciprocal(sum_e)
        h_h = ptx.maximum(h_h, Float32(0.0)) * (scale * scale)
        rstd_h = ptx.rsqrt(h_h * inverse_d + eps) * scale
        ptx.store_shared_float(reads + 4 * slot, w * rstd_h, mine)
        last = (wy * rstd_h, Float32(0.0), Float32(0.0), Float32(0.0))
        ptx.store_shared_float_4(reads + 4 * K, last, lane == 0)
        cute.arch.sync_warp()
        self.publish(base, reads, "reads", s.read_bytes, t, lane)

    def key(self, z):
        s = self.spec
        if s.key_activation == "two_sigmoid":
            return Float32(2.0) * ptx.sigmoid(z)
        e = ptx.exp(z - max_over(z, s.d_k))
        return Float32(s.d_k) * e * ptx.reciprocal(sum_over(e, s.d_k))

    @cute.jit
    def publish(self, base, source, name: cutlass.Constexpr, n_bytes: cutlass.Constexpr, t, lane):
        """Tell this block's warps that a token's coefficients are there, or send them to all blocks of the cluster."""
        s = self.spec
        barrier = base + self.barriers[name] + 8 * t
        if cutlass.const_expr(s.exchange == "owner"):
            n = n_bytes // 16
            target = base + self.shared[name] + t * n_bytes
            for i in cutlass.range(lane, n * s.cluster, 32, unroll=1):
                peer, v = i // n, i % n
                values = ptx.load_shared_float_4(source + 16 * v)
                ptx.store_peer_4(
                    ptx.peer_address(target + 16 * v, peer),
                    values,
                    ptx.peer_address(barrier, peer),
                )
        else:
            ptx.barrier_arrive(barrier, predicate=lane == 0)

    def wait_for(self, base, name: str, t: int) -> None:
        barrier = base + self.barriers[name] + 8 * t
        if self.spec.exchange == "owner":
            ptx.barrier_wait_cluster(barrier, 0)
        else:
            ptx.barrier_wait(barrier, 0)

    # Results.

    @cute.jit
    def store_memory(self, base, memory_out, rows, ys, first, n_tokens, rank, warp, lane):
        """``S' = a S + k y``, in the registers that the rows came in."""
        s = self.spec
        K = s.d_k
        g = lane // 4
        policy = None
        if cutlass.const_expr(s.keep == "all"):
            policy = ptx.keep_policy()
        for t in range_constexpr(self.memory_tiles):
            for token in self.tokens_of(t):
                self.wait_for(base, "gates", token)
            token, slot = self.row(first, t, g)
            local = token - first
            valid = token < n_tokens
            if cutlass.const_expr(K == 4 and s.tokens == 1):
                valid = valid & (g < 4)
            place = base + self.shared["gates"] + local * s.gate_bytes + 8 * slot
            a, k = ptx.load_shared_float_2(place)
            for j in range_constexpr(s.steps):
                column = rank * s.columns + self.column(j, warp, lane)
                v, row = unpack_row(ys[j][t]), unpack_row(rows[j][t])
                new = pack_pairs([a * r + k * f for r, f in zip(row, v, strict=True)])
                address = memory_out + 2 * (Int64(token) * (K * s.d) + slot * s.d + column)
                ptx.store_global_4(address, new, predicate=valid, policy=policy)

    def tokens_of(self, t: int) -> list[int]:
        """The tokens that begin in tile ``t``."""
        K = self.spec.d_k
        if K == 4:
            return [token for token in (2 * t, 2 * t + 1) if token < self.spec.tokens]
        return [t * 8 // K] if t * 8 % K == 0 else []

    @cute.jit
    def read(self, base, x, rows, ys, gains, first, n_tokens, rank, warp, lane):
        """``x = gain * (sum_s w_s S_s + w_y y)``: the sum over the slots by shuffles, which leave two columns to each lane."""
        s = self.spec
        K = s.d_k
        g = lane // 4
        in_unit, stores = self.read_column(lane)
        for t in range_constexpr(self.memory_tiles):
            if cutlass.const_expr(K < 16 or t % 2 == 0):
                for token in self.tokens_of(t):
                    self.wait_for(base, "reads", token)
                token, slot = self.row(first, t, g)
                local = token - first
                valid = token < n_tokens
                if cutlass.const_expr(stores is not None):
                    valid = valid & stores
                if cutlass.const_expr(K == 4 and s.tokens == 1):
                    valid = valid & (g < 4)
                place = base + self.shared["reads"] + local * s.read_bytes
                w = ptx.load_shared_float(place + 4 * slot)
                # One lane for each column adds y.
                wy = ptx.load_shared_float(place + 4 * K)
                wy = cutlass.select_(slot == 0, wy, Float32(0.0))
                w8 = Float32(0.0)
                if cutlass.const_expr(K == 16):
                    w8 = ptx.load_shared_float(place + 4 * (slot + 8))
                for j in range_constexpr(s.steps):
                    v, row = unpack_row(ys[j][t]), unpack_row(rows[j][t])
                    h = [wy * f + w * r for f, r in zip(v, row, strict=True)]
                    if cutlass.const_expr(K == 16):
                        row = unpack_row(rows[j][t + 1])
                        h = [f + w8 * r for f, r in zip(h, row, strict=True)]
                    if cutlass.const_expr(K == 4):
                        h = fold(h, (g // 2) % 2 == 1, 8)
                        h = fold(h, g % 2 == 1, 4)
                    else:
                        h = fold(h, g // 4 == 1, 16)
                        h = fold(h, (g // 2) % 2 == 1, 8)
                        h = [f + cute.arch.shuffle_sync_bfly(f, offset=4) for f in h]
                    out = [f * gain for f, gain in zip(h, gains[j], strict=True)]
                    column = rank * s.columns + self.column(j, warp, lane) + in_unit
                    address = x + 2 * (Int64(token) * s.d + column)
                    ptx.store_global_bits(address, ptx.pack(*out), predicate=valid)

"""
The CuTe DSL kernels of the ``fast`` backend; ``DESIGN.md`` tells how they work. The maths is that of
:mod:`..reference`. Importing this module needs ``nvidia-cutlass-dsl``.

Names: ``K`` slots, ``g`` and ``c`` the row group (lane / 4) and the column group (lane % 4) of a lane in an ``mma`` fragment.
"""

from itertools import product
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from . import ptx
from .layout import FINISH_THREADS, MAIN_WARPS, Spec
from .pieces import (
    dot,
    load_pairs,
    load_row,
    max_over,
    pack_pairs,
    split,
    spread,
    sum_over,
    where_both,
    zeros,
)


class Kernel:
    """
    What the kernels share. A persistent cluster of blocks takes tiles of tokens in turn. Warp 8 copies their rows into a
    ring in shared memory; warps 0-7 take all dot products of a tile; the warps from 9 on make coefficients of them; one tile
    later warps 0-7 read the rows again and write the results.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self.shared = spec.shared
        self.barriers = spec.barriers
        self.n_steps = -(-spec.columns // (32 * spec.product_warps))
        self.whole_steps = spec.columns % (32 * spec.product_warps) == 0
        self.first_dots_warp = MAIN_WARPS + 1 + spec.coefficient_warps
        # Memory tiles of 8 rows: one token at K = 8, two at K = 4, half of one at K = 16.
        self.memory_tiles = spec.tokens * spec.d_k // 8
        assert spec.d_k in (4, 8, 16) and self.memory_tiles * 8 == spec.tokens * spec.d_k
        assert spec.output_tiles * spec.output_tokens == spec.tokens
        # The memory rows of a tile and the outputs of their tokens are one fragment.
        assert spec.output_tokens * spec.d_k >= 8

    @cute.jit
    def initialise(self, base, packed, thread, rank):
        """Barriers, and the gain as FP32 in shared memory."""
        s = self.spec
        b = self.barriers
        if thread == 0:
            for i in range_constexpr(s.stages):
                ptx.barrier_init(base + b["full"] + 8 * i, 1)
                ptx.barrier_init(base + b["empty"] + 8 * i, MAIN_WARPS)
            for i in range_constexpr(s.coefficient_buffers):
                ptx.barrier_init(base + b["coefficients_full"] + 8 * i, s.coefficient_warps)
            ptx.barrier_init(base + b["partial_full"], s.product_warps)
            ptx.barrier_init(base + b["partial_empty"], s.coefficient_warps)
            if cutlass.const_expr(s.cluster > 1):
                for i in range_constexpr(2 * s.coefficient_warps):
                    ptx.barrier_init(base + b["exchange"] + 8 * i, 1)
            cute.arch.mbarrier_init_fence()
        gain = packed + Int64(4) * (s.map_rows * s.d + rank * s.columns)
        for i in cutlass.range(thread, s.columns, s.threads, unroll=1):
            value = ptx.load_global_float(gain + Int64(4) * i)
            ptx.store_shared_float(base + self.shared["gain"] + 4 * i, value)
        cute.arch.sync_threads()
        if cutlass.const_expr(s.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load(self, base, sources, earlier, n_tokens, first_tile, step, n, rank):
        """
        Bulk copies of whole rows, as many tiles ahead as the ring holds. All addresses are the same for the warp's lanes: a copy whose
        lanes have addresses of their own is issued in a loop over them, 40 clocks for each and more where other warps want to issue.
        """
        s = self.spec
        row_bytes = 2 * s.columns
        for i in cutlass.range(n, unroll=1):
            stage = i % s.stages
            full = base + self.barriers["full"] + 8 * stage
            token = (first_tile + i * step) * s.tokens
            here = cutlass.min(n_tokens - token, s.tokens)
            ptx.barrier_wait(base + self.barriers["empty"] + 8 * stage, (i // s.stages + 1) & 1)
            tile = base + self.shared["ring"] + stage * s.tile_bytes
            with cute.arch.elect_one():
                ptx.barrier_expect(full, here * s.copied_bytes)
                for t in cutlass.range(here, unroll=1):
                    vector = 2 * (Int64(token + t) * s.d + rank * s.columns)
                    matrix = 2 * (Int64(token + t) * (s.d_k * s.d) + rank * s.columns)
                    place = tile + t * s.token_bytes
                    stored, size = matrix, 2
                    if cutlass.const_expr(s.stored8):
                        stored, size = Int64(token + t) * (s.d_k * s.d) + rank * s.columns, 1
                    rows = [sources[0] + (stored + size * slot * s.d) for slot in range(s.d_k)]
                    rows.append(sources[1] + vector)
                    if cutlass.const_expr(s.direction == "backward"):
                        rows.append(sources[2] + vector)
                        if cutlass.const_expr(s.reads_gradient):
                            rows += [
                                sources[3] + (matrix + 2 * slot * s.d) for slot in range(s.d_k)
                            ]
                    rows += [earlier[e] + vector for e in range(s.earlier)]
                    if cutlass.const_expr(s.gathered > 0):
                        bundle = sources[4] + self.bundle_of(token + t, rank * s.columns)
                        rows += [
                            bundle + 2 * s.gathered_place(row) * s.d for row in range(s.gathered)
                        ]
                    for row in range_constexpr(s.d_k):
                        at = place + row * s.memory_row_bytes
                        ptx.copy_to_shared(at, rows[row], size * s.columns, full)
                    for row in range_constexpr(s.d_k, s.rows):
                        at = place + (row * s.row_bytes + s.rows_shift)
                        ptx.copy_to_shared(at, rows[row], row_bytes, full)

    @cute.jit
    def take_registers(self, role: cutlass.Constexpr):
        s = self.spec
        if cutlass.const_expr(s.moves_registers):
            if cutlass.const_expr(s.registers[role] > s.start_registers):
                cute.arch.setmaxregister_increase(s.registers[role])
            else:
                cute.arch.setmaxregister_decrease(s.registers[role])

    def bundle_of(self, token, column):
        """Bytes from the bundle's start to a column of a token's first vector."""
        s = self.spec
        return 2 * (Int64(token) * (s.bundle_rows * s.d) + column)

    def coefficients_of(self, base, i, t):
        """The coefficients of token ``t`` of this block's tile ``i``."""
        s = self.spec
        token = (i % s.coefficient_buffers) * s.tokens + t
        return base + self.shared["coefficients"] + token * (4 * s.coefficient_floats)

    def coefficients_barrier(self, base, i):
        return base + self.barriers["coefficients_full"] + 8 * (i % self.spec.coefficient_buffers)

    def column(self, j: int, warp, lane):
        """The first of a lane's 8 columns in step ``j`` of a dot product: 32 columns for each warp."""
        return (warp + self.spec.product_warps * j) * 32 + (lane % 4) * 8

    def load_fragment(self, tile, token, row, mask):
        """8 columns of a row, as the fragments ``b`` of the two halves of a step."""
        s = self.spec
        values = ptx.load_shared_4(tile + token * s.token_bytes + row * s.row_bytes + s.rows_shift)
        return values if mask is None else tuple(v & mask for v in values)

    def load_stored(self, tile, token, row, mask):
        """The same of a row of the stored memory in FP8."""
        s = self.spec
        words = ptx.load_shared_2(tile + token * s.token_bytes + row * s.memory_row_bytes)
        if mask is not None:
            words = tuple(w & mask for w in words)
        return (*ptx.unpack8(words[0]), *ptx.unpack8(words[1]))

    def load_memory(self, tile, column, g, mask, first_row: int = 0) -> list:
        """One for each tile of 8 rows of the memory, or of its gradient."""
        out = []
        for t in range(self.memory_tiles):
            if self.spec.d_k == 8:
                token, row = t, g
            elif self.spec.d_k == 4:
                token, row = 2 * t + g // 4, g % 4
            else:
                token, row = t // 2, 8 * (t % 2) + g
            if self.spec.stored8 and first_row == 0:
                out.append(self.load_stored(tile + column, token, row, mask))
            else:
                out.append(self.load_fragment(tile + 2 * column, token, first_row + row, mask))
        return out

    def output_of(self, g):
        """The token in a tile of outputs, and which of its outputs, of row ``g``; that may be none."""
        return g // self.spec.output_stride, g % self.spec.output_stride

    def is_output(self, g, even: bool = False):
        """
        Whether row ``g`` of a tile of outputs has one; ``None`` if all rows have, or all ``even`` ones if ``g`` is even: a predicate must not
        be a constant.
        """
        s = self.spec
        token, index = self.output_of(g)
        full = s.output_tokens * s.output_stride == 8
        all_have = s.outputs == s.output_stride or (even and s.outputs == s.output_stride - 1)
        return where_both(
            None if full else token < s.output_tokens, None if all_have else index < s.outputs
        )

    def same_token(self, a, b):
        """Whether two tokens of a tile of outputs are the same; ``None`` if it has one token."""
        return None if self.spec.output_stride == 8 else a == b

    def load_outputs(self, tile, g, mask) -> list:
        """One for each tile of outputs; rows without an output are copies."""
        s = self.spec
        token, index = self.output_of(g)
        row = s.d_k
        if s.earlier:
            index = cutlass.min(index, Int32(s.earlier))
            row = s.d_k + index + Int32(index > 0) * (s.first_earlier - s.d_k - 1)
        first = token % s.output_tokens
        return [
            self.load_fragment(tile, v * s.output_tokens + first, row, mask)
            for v in range(s.output_tiles)
        ]

    def outputs_of_memory(self, t: int) -> int:
        """The tile of outputs that has those of memory tile ``t``."""
        return t * 8 // self.spec.d_k // self.spec.output_tokens

    def store_outputs(self, place, token, slot, values, name: str, g) -> None:
        """
        Products of the outputs, rows ``g`` of their tile, with two slots of ``token``: its own, ``[outputs, K]`` from ``name`` on.
        """
        s = self.spec
        row_tile, index = self.output_of(g)
        mine = where_both(self.is_output(g), self.same_token(row_tile, token % s.output_tokens))
        ptx.store_shared_float_2(place(token, name, index * s.d_k + slot), values, predicate=mine)

    def load_window(self, coefficients, token, slot) -> list:
        """``D`` and ``c_1 ..`` of one slot of the memory as it was before."""
        s = self.spec
        if not s.composed:
            return []
        here = coefficients + Int64(4) * (Int64(token) * (s.outputs * s.d_k) + slot)
        return [ptx.load_global_float(here + 4 * s.d_k * e) for e in range(s.outputs)]

    @cute.jit
    def sum_partials(self, base, total, t, which, count, rank, lane):
        """The dot products of one token, summed over the warps and over the blocks of the cluster, in a fixed order."""
        s = self.spec
        floats = s.partial["size"]
        partials = base + self.shared["partial"] + t * (4 * floats)
        exchange = barrier = Int32(0)
        if cutlass.const_expr(s.cluster > 1):
            buffer = which * 2 + (count & 1)
            exchange = base + self.shared["exchange"] + buffer * (4 * s.cluster * floats)
            barrier = base + self.barriers["exchange"] + 8 * buffer
            if lane == 0:
                ptx.barrier_expect(barrier, 4 * floats * (s.cluster - 1))
        else:
            # A warp with two tokens of a tile: all its lanes have read the first one's sums.
            cute.arch.sync_warp()
        for v in cutlass.range(lane, floats // 4, 32, unroll=1):
            sums = ptx.load_shared_float_4(partials + 16 * v)
            for w in range_constexpr(1, s.product_warps):
                more = ptx.load_shared_float_4(partials + w * (4 * s.tokens * floats) + 16 * v)
                sums = [a + b for a, b in zip(sums, more, strict=True)]
            if cutlass.const_expr(s.cluster == 1):
                ptx.store_shared_float_4(total + 16 * v, sums)
            else:
                mine = exchange + rank * (4 * floats) + 16 * v
                ptx.store_shared_float_4(mine, sums)
                for other in range_constexpr(1, s.cluster):
                    peer = (rank + other) % s.cluster
                    ptx.store_peer_4(
                        ptx.peer_address(mine, peer), sums, ptx.peer_address(barrier, peer)
                    )
        if cutlass.const_expr(s.cluster > 1):
            ptx.barrier_wait_cluster(barrier, (count // 2) & 1)
            cute.arch.sync_warp()
            for v in cutlass.range(lane, floats // 4, 32, unroll=1):
                sums = ptx.load_shared_float_4(exchange + 16 * v)
                for r in range_constexpr(1, s.cluster):
                    more = ptx.load_shared_float_4(exchange + r * (4 * floats) + 16 * v)
                    sums = [a + b for a, b in zip(sums, more, strict=True)]
                ptx.store_shared_float_4(total + 16 * v, sums)

    @staticmethod
    def unit_of(mean_square):
        """
        The unit of a stored row, and one over it: a power of two, an eighth to a sixteenth of its RMS. e4m3 holds 448 units, 28 times the RMS
        or more, in steps of 2^-9 near zero.
        """
        mean_square = ptx.maximum(mean_square, Float32(1e-30))
        eighth = Float32(0.125) * (mean_square * ptx.rsqrt(mean_square))
        bits = ptx.as_bits(eighth) & Uint32(0x7F800000)
        return ptx.as_float(bits), ptx.as_float(Uint32(0x7F000000) - bits)

    def key(self, z):
        s = self.spec
        if s.key_activation == "two_sigmoid":
            return Float32(2.0) * ptx.sigmoid(z)
        e = ptx.exp(z - max_over(z, s.d_k))
        return Float32(s.d_k) * e * ptx.reciprocal(sum_over(e, s.d_k))


def of_memory(held, of_stored, of_outputs):
    """A product with a row of the memory, ``D A + sum_e c_e y_e``, from those with ``A`` and with the outputs, of which ``y`` is the first."""
    out = held[0] * of_stored
    for c, value in zip(held[1:], of_outputs[1:], strict=True):
        out = out + c * value
    return out


class Rows(NamedTuple):
    """Map rows for the row groups ``start .. end - 1`` of half a weight tile: group ``g`` has row ``first + g``."""

    first: int
    start: int = 0
    end: int = 8


class WeightTile(NamedTuple):
    """Rows 0-7 and 8-15 of a fragment ``a``: one for the high and one for the low parts, or the low parts below the high ones."""

    upper: Rows | None
    lower: Rows | None
    stacked: bool = False


class Forward(Kernel):
    """
    Warps 0-7 take the dot products of a tile of tokens (:meth:`dots`) and, one tile later, mix it (:meth:`mix`). Warp 8 loads.
    The others turn the dot products into coefficients (:meth:`coefficients`).
    """

    def __init__(self, spec: Spec):
        super().__init__(spec)
        K = spec.d_k
        key = spec.n_forget
        query = key + K
        has_forget = spec.n_forget > 0
        tiles: list[WeightTile]
        if K == 4:
            # Rows: forget 4, key 4, query 4, nothing 4.
            upper = Rows(0) if has_forget else Rows(key - 4, start=4)
            tiles = [WeightTile(upper, Rows(query, end=4))]
        elif K == 8:
            tiles = [
                WeightTile(Rows(0) if has_forget else None, Rows(key)),
                WeightTile(Rows(query), Rows(query), stacked=True),
            ]
        else:
            maps = [0, key, query] if has_forget else [key, query]
            tiles = [WeightTile(Rows(first), Rows(first + 8)) for first in maps]
        self.weight_tiles = tiles

    @cute.jit
    def __call__(
        self,
        memory: Int64,
        y: Int64,
        packed: Int64,
        saved: Int64,
        extra: Int64,
        memory_out: Int64,
        x: Int64,
        window,
        n_tokens: Int32,
        eps: Float32,
        grid: Int32,
        stream,
    ):
        self.kernel(memory, y, packed, saved, extra, memory_out, x, window, n_tokens, eps).launch(
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
        memory: Int64,
        y: Int64,
        packed: Int64,
        saved: Int64,
        extra: Int64,
        memory_out: Int64,
        x: Int64,
        window,
        n_tokens: Int32,
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
        n_tiles = (n_tokens + (s.tokens - 1)) // s.tokens
        n = (n_tiles - first_tile + step - 1) // step

        self.initialise(base, packed, thread, rank)
        if warp < MAIN_WARPS:
            self.take_registers("main")
            self.main(base, packed, memory_out, x, n_tokens, first_tile, step, n, rank, warp, lane)
        elif cutlass.const_expr(s.dots_warps == 0):
            self.help(
                base, memory, y, packed, saved, extra, window, n_tokens, eps, first_tile, step, n, rank,
                warp, lane,
            )  # fmt: skip
        elif warp >= self.first_dots_warp:
            self.take_registers("dots")
            self.products(base, packed, n, rank, warp - self.first_dots_warp, lane)
        else:
            self.help(
                base, memory, y, packed, saved, extra, window, n_tokens, eps, first_tile, step, n, rank,
                warp, lane,
            )  # fmt: skip
        if cutlass.const_expr(s.cluster > 1):
            # A block's shared memory must outlive the last store of its peers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def help(
        self, base, memory, y, packed, saved, extra, window, n_tokens, eps, first_tile, step, n, rank,
        warp, lane,
    ):  # fmt: skip
        self.take_registers("helper")
        if warp == MAIN_WARPS:
            self.load(base, (memory, y), window[2:], n_tokens, first_tile, step, n, rank)
        else:
            self.coefficients(
                base, packed, saved, extra, window, n_tokens, eps, first_tile, step, n, rank,
                warp - (MAIN_WARPS + 1), lane,
            )  # fmt: skip

    # Warps 0-7.

    @cute.jit
    def main(self, base, packed, memory_out, x, n_tokens, first_tile, step, n, rank, warp, lane):
        if cutlass.const_expr(self.spec.dots_warps > 0):
            for i in cutlass.range(n, unroll=1):
                tile = first_tile + i * step
                self.mix(base, memory_out, x, n_tokens, i, tile, rank, warp, lane)
        else:
            weights = self.load_weights(packed, rank, warp, lane)
            for i in cutlass.range(n + 1, unroll=1):
                if i < n:
                    self.dots(base, weights, i, warp, lane)
                if i > 0:
                    tile = first_tile + (i - 1) * step
                    self.mix(base, memory_out, x, n_tokens, i - 1, tile, rank, warp, lane)

    @cute.jit
    def products(self, base, packed, n, rank, warp, lane):
        """The dot products, where they have warps of their own."""
        weights = self.load_weights(packed, rank, warp, lane)
        for i in cutlass.range(n, unroll=1):
            self.dots(base, weights, i, warp, lane)

    def load_weights(self, packed, rank, warp, lane):
        """
        The maps as fragments ``a`` in registers, for the whole kernel: ``[step][tile][half of the step]``. FP32 as two BF16
        numbers, which hold 2^-17.
        """
        s = self.spec
        g = lane // 4
        out = []
        for j in range(self.n_steps):
            column = self.column(j, warp, lane)
            global_column = column + rank * s.columns
            inside = None if self.whole_steps else column < s.columns
            tiles = []
            for tile in self.weight_tiles:
                up = self.load_map(packed, tile.upper, g, global_column, inside)
                low = self.load_map(packed, tile.lower, g, global_column, inside)
                parts = [(0, 1)] if tile.stacked else [(0, 0), (1, 1)]
                for up_part, low_part in parts:
                    tiles.append([self._fragment(up, low, up_part, low_part, h) for h in (0, 1)])
            out.append(tiles)
        return out

    def load_map(self, packed, rows: Rows | None, g, column, inside) -> list:
        """8 columns of map row ``g`` as pairs of BF16 numbers, each with its high and its low part; zeros where there is none."""
        if rows is None:
            return [(Uint32(0), Uint32(0))] * 4
        valid, row = inside, g + rows.first
        if rows.start > 0:
            valid = g >= rows.start if valid is None else valid & (g >= rows.start)
        if rows.end < 8:
            valid = g < rows.end if valid is None else valid & (g < rows.end)
        if valid is not None:
            row, column = row * Int32(valid), column * Int32(valid)
        address = packed + Int64(4) * (row * self.spec.d + column)
        values = [*ptx.load_global_float_4(address), *ptx.load_global_float_4(address + 16)]
        if valid is not None:
            scale = Float32(Int32(valid))
            values = [v * scale for v in values]
        return [split((values[2 * i], values[2 * i + 1])) for i in range(4)]

    @staticmethod
    def _fragment(up, low, up_part: int, low_part: int, half: int):
        p, q = 2 * half, 2 * half + 1
        return [up[p][up_part], low[p][low_part], up[q][up_part], low[q][low_part]]

    @cute.jit
    def dots(self, base, weights, i, warp, lane):
        """
        All dot products of a tile, by tensor cores: memory rows with each other, with ``y`` and with the query's map; ``y`` with
        itself and with all maps. The order of the columns is free in a dot product, so a lane takes 16 bytes in a row.
        """
        s = self.spec
        K = s.d_k
        g, c = lane // 4, lane % 4
        stage = i % s.stages
        tile = base + self.shared["ring"] + stage * s.tile_bytes
        ptx.barrier_wait(base + self.barriers["full"] + 8 * stage, (i // s.stages) & 1)

        gram = [zeros() for _ in range(self.memory_tiles)]
        query = [zeros() for _ in range(self.memory_tiles)]
        with_y = [zeros() for _ in range(s.tokens)]  # K = 16
        maps = [[zeros() for _ in range(3 if K == 16 else 2)] for _ in range(s.output_tiles)]
        norm = [zeros() for _ in range(s.output_tiles)]
        for j in range_constexpr(self.n_steps):
            column = self.column(j, warp, lane)
            mask = None
            if cutlass.const_expr(not self.whole_steps):
                inside = column < s.columns
                column = column * Int32(inside)
                mask = Uint32(0) - Uint32(Int32(inside))

            outputs = self.load_outputs(tile + 2 * column, g, mask)
            memory = self.load_memory(tile, column, g, mask)
            w = weights[j]
            for h in range_constexpr(2):
                p, q = 2 * h, 2 * h + 1
                if cutlass.const_expr(K == 16):
                    by = (outputs[0][p], outputs[0][q])
                    n = len(w) // 2
                    for m in range_constexpr(n):
                        slot = m + 3 - n
                        maps[0][slot] = ptx.mma(w[2 * m][h], by, maps[0][slot])
                        maps[0][slot] = ptx.mma(w[2 * m + 1][h], by, maps[0][slot])
                    for t in range_constexpr(s.tokens):
                        low, high = memory[2 * t], memory[2 * t + 1]
                        rows = (low[p], high[p], low[q], high[q])
                        for k in range_constexpr(2):
                            r = memory[2 * t + k]
                            br = (r[p], r[q])
                            m = 2 * t + k
                            gram[m] = ptx.mma(rows, br, gram[m])
                            query[m] = ptx.mma(w[-2][h], br, query[m])
                            query[m] = ptx.mma(w[-1][h], br, query[m])
                        with_y[t] = ptx.mma(rows, by, with_y[t])
                else:
                    for t in range_constexpr(self.memory_tiles):
                        r, ys = memory[t], outputs[self.outputs_of_memory(t)]
                        br = (r[p], r[q])
                        gram[t] = ptx.mma((r[p], ys[p], r[q], ys[q]), br, gram[t])
                        if cutlass.const_expr(K == 8):
                            query[t] = ptx.mma(w[2][h], br, query[t])
                        else:
                            query[t] = ptx.mma(w[0][h], br, query[t])
                            query[t] = ptx.mma(w[1][h], br, query[t])
                for v in range_constexpr(s.output_tiles):
                    ys = outputs[v]
                    by = (ys[p], ys[q])
                    if cutlass.const_expr(K < 16):
                        maps[v][0] = ptx.mma(w[0][h], by, maps[v][0])
                        maps[v][0] = ptx.mma(w[1][h], by, maps[v][0])
                    if cutlass.const_expr(K == 8):
                        maps[v][1] = ptx.mma(w[2][h], by, maps[v][1])
                    norm[v] = ptx.mma((Uint32(0), ys[p], Uint32(0), ys[q]), by, norm[v])

        ptx.barrier_wait(base + self.barriers["partial_empty"], (i + 1) & 1)
        self.store_partials(base, gram, query, with_y, maps, norm, warp, g, c)
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["partial_full"], predicate=lane == 0)

    def store_partials(self, base, gram, query, with_y, maps, norm, warp, g, c):
        """
        This warp's part of every dot product. A thread's four numbers of a product are rows ``g`` (two) and ``g + 8`` (two),
        columns ``2c`` and ``2c + 1``.
        """
        s = self.spec
        K = s.d_k
        p = s.partial
        floats = p["size"]
        partials = base + self.shared["partial"] + warp * (4 * s.tokens * floats)

        def place(token, name, index):
            return partials + 4 * (token * floats + p[name] + index)

        for t in range(self.memory_tiles):
            if K == 8:
                ptx.store_shared_float_2(place(t, "gram", g * 8 + 2 * c), gram[t][:2])
                both = [query[t][0] + query[t][2], query[t][1] + query[t][3]]
                ptx.store_shared_float_2(place(t, "query", g * 8 + 2 * c), both)
                self.store_outputs(place, t, 2 * c, gram[t][2:], "memory", g)
            elif K == 4:
                token, slot = 2 * t + c // 2, (2 * c) % 4
                ptx.store_shared_float_2(
                    place(token, "gram", (g % 4) * 4 + slot),
                    gram[t][:2],
                    predicate=g // 4 == c // 2,
                )
                ptx.store_shared_float_2(
                    place(token, "query", g * 4 + slot), query[t][2:], predicate=g < 4
                )
                self.store_outputs(place, token, slot, gram[t][2:], "memory", g)
            else:
                token, first = t // 2, 8 * (t % 2)
                for name, values in (("gram", gram[t]), ("query", query[t])):
                    for half in range(2):
                        ptx.store_shared_float_2(
                            place(token, name, (g + 8 * half) * 16 + first + 2 * c),
                            values[2 * half : 2 * half + 2],
                        )

        # Products with the outputs: a column for each.
        stride = s.output_stride
        for v, column in product(range(s.output_tiles), range(2)):
            if column >= s.output_tokens * stride:
                continue
            in_tile, index = self.output_of(2 * c + column)
            token = v * s.output_tokens + in_tile
            mine = self.is_output(2 * c + column, even=column == 0)
            first = where_both(mine, index == 0 if s.earlier else None)
            of_query = 2 * K + index * K
            # y is the first of a token's outputs, so it never is in an odd column unless it is the only one.
            has_y = column == 0 or stride == 1
            if K == 8:
                if has_y:
                    ptx.store_shared_float(place(token, "maps", g), maps[v][0][column], first)
                    ptx.store_shared_float(
                        place(token, "maps", 8 + g), maps[v][0][2 + column], first
                    )
                both = maps[v][1][column] + maps[v][1][2 + column]
                ptx.store_shared_float(place(token, "maps", of_query + g), both, mine)
            elif K == 4:
                if has_y:
                    ptx.store_shared_float(place(token, "maps", g), maps[v][0][column], first)
                ptx.store_shared_float(
                    place(token, "maps", of_query + g),
                    maps[v][0][2 + column],
                    where_both(mine, g < 4),
                )
            else:
                for m in range(3):
                    for half in range(2):
                        ptx.store_shared_float(
                            place(token, "maps", 16 * m + 8 * half + g),
                            maps[v][m][2 * half + column],
                            mine,
                        )
                for t in range(column, s.tokens, 2):
                    for half in range(2):
                        ptx.store_shared_float(
                            place(t, "memory", 8 * half + g),
                            with_y[t][2 * half + column],
                            token == t,
                        )
            row_tile, row = self.output_of(g)
            mine = where_both(
                where_both(mine, self.is_output(g)), self.same_token(row_tile, in_tile)
            )
            ptx.store_shared_float(
                place(token, "norm", row * s.outputs + index), norm[v][2 + column], mine
            )

    @cute.jit
    def mix(self, base, memory_out, x, n_tokens, i, tile_index, rank, warp, lane):
        """
        ``S' = a S + k y`` and ``x = gain * (sum_s w_s S_s + w_y y)``, in a window with all its outputs: 8 columns of one token for
        each lane.
        """
        s = self.spec
        K = s.d_k
        stage = i % s.stages
        tile = base + self.shared["ring"] + stage * s.tile_bytes
        if cutlass.const_expr(s.dots_warps > 0):
            # Other warps have waited for the copies; who reads them waits himself.
            ptx.barrier_wait(base + self.barriers["full"] + 8 * stage, (i // s.stages) & 1)
        ptx.barrier_wait(self.coefficients_barrier(base, i), (i // s.coefficient_buffers) & 1)
        chunks = -(-s.columns // 256)
        units = s.tokens * chunks
        for u in range_constexpr(-(-units // MAIN_WARPS)):
            unit = warp + MAIN_WARPS * u
            t = unit // chunks
            column = (unit % chunks) * 256 + lane * 8
            token = tile_index * s.tokens + t
            valid = token < n_tokens
            if cutlass.const_expr(units % MAIN_WARPS != 0):
                valid = valid & (unit < units)
            if cutlass.const_expr(s.columns % 256 != 0):
                valid = valid & (column < s.columns)
            if valid:
                stored = tile + t * s.token_bytes
                rows = stored + (2 * column + s.rows_shift)
                coefficients = self.coefficients_of(base, i, t)
                out = Int64(token) * (K * s.d) + rank * s.columns + column
                if cutlass.const_expr(not s.stored8):
                    out = 2 * out
                out = memory_out + out
                v = load_pairs(rows + K * s.row_bytes)
                wy = ptx.load_shared_float(coefficients + 4 * K * s.slot_floats)
                h = [wy * f for f in v]
                earlier = []
                for e in range_constexpr(s.earlier):
                    more = load_pairs(rows + (s.first_earlier + e) * s.row_bytes)
                    wy = ptx.load_shared_float(coefficients + 4 * (K * s.slot_floats + 1 + e))
                    h = [hc + wy * f for hc, f in zip(h, more, strict=True)]
                    earlier.append(more)
                reads = []
                if cutlass.const_expr(not s.writes):
                    reads = load_row(coefficients, K)
                for slot in range_constexpr(K):
                    if cutlass.const_expr(s.stored8):
                        words = ptx.load_shared_2(stored + (slot * s.memory_row_bytes + column))
                        row = [f for w in words for f in ptx.floats8_of_word(w)]
                    else:
                        row = load_pairs(rows + slot * s.row_bytes)
                    if cutlass.const_expr(not s.writes):
                        h = [hc + reads[slot] * r for hc, r in zip(h, row, strict=True)]
                    else:
                        own = coefficients + 4 * s.slot_floats * slot
                        a, k, w, per_unit = ptx.load_shared_float_4(own)
                        h = [hc + w * r for hc, r in zip(h, row, strict=True)]
                        new = [a * r + k * f for r, f in zip(row, v, strict=True)]
                        held = load_row(own + 16, s.slot_floats - 4)
                        for e in range_constexpr(s.earlier):
                            new = [n + held[e] * f for n, f in zip(new, earlier[e], strict=True)]
                        if cutlass.const_expr(s.stored8):
                            new = [per_unit * n for n in new]
                            words = (ptx.pack8(new[:4]), ptx.pack8(new[4:]))
                            ptx.store_global_2(out + slot * s.d, words)
                        else:
                            ptx.store_global_4(out + (2 * slot * s.d), pack_pairs(new))
                gain = base + self.shared["gain"] + 4 * column
                gains = [*ptx.load_shared_float_4(gain), *ptx.load_shared_float_4(gain + 16)]
                h = [hc * f for hc, f in zip(h, gains, strict=True)]
                ptx.store_global_4(
                    x + 2 * (Int64(token) * s.d + rank * s.columns + column),
                    pack_pairs(h),
                )
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["empty"] + 8 * stage, predicate=lane == 0)

    # Warps 9 on.

    @cute.jit
    def coefficients(
        self, base, packed, saved, extra, window, n_tokens, eps, first_tile, step, n, rank, which,
        lane,
    ):  # fmt: skip
        """
        Sum the warps' dot products of a token, then forget gate, key, query and the weights of the read. A lane has slot
        ``lane % K``; the mean of the new memory, its norm and the norm of what is read are quadratic forms in the dot products.
        """
        s = self.spec
        K = s.d_k
        p = s.partial
        floats = p["size"]
        slot = lane % K
        biases = packed + Int64(4) * ((s.map_rows + 1) * s.d)
        b_query = ptx.load_global_float(biases + 4 * Int64(slot))
        b_key = ptx.load_global_float(biases + 4 * Int64(K + slot))
        b_forget = Float32(0.0)
        if cutlass.const_expr(s.forget != "none"):
            b_forget = ptx.load_global_float(biases + 4 * Int64(2 * K + slot))
        total = base + self.shared["total"] + which * (4 * floats)
        inverse_d = Float32(1.0 / s.d)
        count = Int32(0)
        for i in cutlass.range(n, unroll=1):
            tile = first_tile + i * step
            # Tokens go round the warps, so that none idles where a tile has fewer.
            shift = (i * s.tokens) % s.coefficient_warps
            first = (which - shift + s.coefficient_warps) % s.coefficient_warps
            for t in cutlass.range(first, s.tokens, s.coefficient_warps, unroll=1):
                token = tile * s.tokens + t
                # Asked for before the wait. Beyond the last token, the last one's.
                held = self.load_window(window[0], cutlass.min(token, n_tokens - 1), slot)
                ptx.barrier_wait(base + self.barriers["partial_full"], i & 1)
                self.sum_partials(base, total, t, which, count, rank, lane)
                cute.arch.sync_warp()
                count += 1
                if t + s.coefficient_warps >= s.tokens:
                    ptx.barrier_arrive(base + self.barriers["partial_empty"], predicate=lane == 0)

                gram = load_row(total + 4 * (p["gram"] + K * slot), K)
                query_row = load_row(total + 4 * (p["query"] + K * slot), K)
                maps = total + 4 * (p["maps"] + slot)
                outputs = range(s.outputs)
                yy = [
                    [
                        ptx.load_shared_float(total + 4 * (p["norm"] + s.outputs * e + f))
                        for f in outputs
                    ]
                    for e in outputs
                ]
                sy = [
                    ptx.load_shared_float(total + 4 * (p["memory"] + K * e + slot)) for e in outputs
                ]
                y_query = [ptx.load_shared_float(maps + 4 * K * (2 + e)) for e in outputs]
                rstd_y = ptx.rsqrt(yy[0][0] * inverse_d + eps)
                p_forget = Float32(0.0)
                a = Float32(1.0)
                if cutlass.const_expr(s.forget != "none"):
                    z = b_forget
                    if cutlass.const_expr(s.forget == "dynamic"):
                        p_forget = ptx.load_shared_float(maps) * rstd_y
                        z = z + p_forget
                    a = ptx.sigmoid(-z)
                p_key = ptx.load_shared_float(maps + 4 * K) * rstd_y
                k = self.key(b_key + p_key)
                # S' = D' A + sum_e c'_e y_e, with y the first of the outputs
                kept = [a * f for f in held]
                D = a
                if cutlass.const_expr(s.composed):
                    D = kept[0]
                new = [k, *kept[1:]]
                # m = (sum_t D'_t A_t + sum_e mu_e y_e) / K
                spread_D = spread(D, K)
                mu = [sum_over(f, K) for f in new]
                s_m = (dot(spread_D, gram) + dot(mu, sy)) * Float32(1.0 / K)
                y_m = [
                    (sum_over(D * sy[e], K) + dot(mu, yy[e])) * Float32(1.0 / K) for e in outputs
                ]
                m_m = (sum_over(D * s_m, K) + dot(mu, y_m)) * Float32(1.0 / K)
                rstd_m = ptx.rsqrt(ptx.maximum(m_m, Float32(0.0)) * inverse_d + eps)
                p_query = (dot(spread_D, query_row) + dot(mu, y_query)) * (
                    rstd_m * Float32(1.0 / K)
                )
                z = b_query + p_query
                e = ptx.exp(z - max_over(z, K))
                q = e * ptx.reciprocal(sum_over(e, K))
                # h = sum_t w_t A_t + sum_e w_e y_e
                w = q * D
                wy = [sum_over(q * f, K) for f in new]
                s_h = dot(spread(w, K), gram) + dot(wy, sy)
                y_h = [sum_over(w * sy[e], K) + dot(wy, yy[e]) for e in outputs]
                h_h = sum_over(w * s_h, K) + dot(wy, y_h)
                rstd_h = ptx.rsqrt(ptx.maximum(h_h, Float32(0.0)) * inverse_d + eps)

                place = self.coefficients_of(base, i, t)
                own = place + 4 * s.slot_floats * slot
                if cutlass.const_expr(not s.writes):
                    ptx.store_shared_float(own, w * rstd_h, predicate=lane < K)
                else:
                    unit = per_unit = Float32(0.0)
                    if cutlass.const_expr(s.stored8):
                        diagonal = ptx.load_shared_float(total + 4 * (p["gram"] + (K + 1) * slot))
                        square = D * D * diagonal + Float32(2.0) * D * dot(new, sy)
                        for f in range_constexpr(s.outputs):
                            square = square + new[f] * dot(new, yy[f])
                        unit, per_unit = self.unit_of(square * inverse_d)
                    quad = (D, k, w * rstd_h, per_unit)
                    ptx.store_shared_float_4(own, quad, predicate=lane < K)
                    for f in range_constexpr(s.earlier):
                        ptx.store_shared_float(own + 16 + 4 * f, new[1 + f], predicate=lane < K)
                for f in range_constexpr(s.outputs):
                    ptx.store_shared_float(
                        place + 4 * (K * s.slot_floats + f), wy[f] * rstd_h, predicate=lane == 0
                    )

                first_lane = (token < n_tokens) & (rank == 0)
                mine = first_lane & (lane < K)
                if cutlass.const_expr(s.writes and s.stored8):
                    own = window[1] + Int64(4) * (Int64(token) * K + slot)
                    ptx.store_global_float(own, unit, mine)
                if cutlass.const_expr(not s.writes):
                    own = window[1] + Int64(4) * (Int64(token) * ((1 + s.outputs) * K) + slot)
                    ptx.store_global_float(own, D, mine)
                    for f in range_constexpr(s.outputs):
                        value = new[(1 + f) % s.outputs]  # that of y comes last
                        ptx.store_global_float(own + 4 * K * (1 + f), value, mine)
                if cutlass.const_expr(s.saves):
                    here = saved + 4 * (Int64(token) * s.saved_columns)
                    own = here + 4 * Int64(slot)
                    if cutlass.const_expr(s.forget == "dynamic"):
                        ptx.store_global_float(own, p_forget, mine)
                    ptx.store_global_float(own + 4 * s.n_forget, p_key, mine)
                    ptx.store_global_float(own + 4 * (s.n_forget + K), p_query, mine)
                    first_lane = first_lane & (lane == 0)
                    ptx.store_global_float(here + 4 * s.map_rows, rstd_y, first_lane)
                    ptx.store_global_float(here + 4 * (s.map_rows + 2), rstd_m, first_lane)
                    ptx.store_global_float(here + 4 * (s.map_rows + 3), rstd_h, first_lane)
                    if cutlass.const_expr(s.extra):
                        here = extra + 4 * (Int64(token) * s.extra_columns)
                        own = here + 4 * Int64(slot)
                        for j in range_constexpr(K // 4):
                            ptx.store_global_4(
                                here + 4 * Int64(slot * K + 4 * j),
                                [ptx.as_bits(v) for v in query_row[4 * j : 4 * j + 4]],
                                mine,
                            )
                        for f in range_constexpr(s.outputs):
                            ptx.store_global_float(own + 4 * K * (K + f), y_query[f], mine)
                        ptx.store_global_float(own + 4 * s.extra_s_h, s_h, mine)
                        ptx.store_global_float(own + 4 * (s.extra_s_h + K), s_m, mine)
                        own = here + 4 * s.extra_y_h
                        for f in range_constexpr(s.outputs):
                            ptx.store_global_float(own + 4 * f, y_h[f], first_lane)
                            ptx.store_global_float(own + 4 * (s.outputs + f), y_m[f], first_lane)
            if first >= s.tokens:
                ptx.barrier_wait(base + self.barriers["partial_full"], i & 1)
                ptx.barrier_arrive(base + self.barriers["partial_empty"], predicate=lane == 0)
            cute.arch.sync_warp()
            ptx.barrier_arrive(self.coefficients_barrier(base, i), predicate=lane == 0)


class Backward(Kernel):
    """
    The same warps in the same roles; ``DESIGN.md`` has the formulas. With ``G`` the gradient of the new memory and ``g`` that of
    ``x`` times the gain, the second pass is, in each column::

        dh  = alpha g - beta h                      h = sum_s w_s S_s + w_y y
        u   = sum_j c_j Wq_j / K - gamma m          m = (sum_s a_s S_s + sum_k y) / K
        dS_s = a_s (G_s + q_s dh + u)
        dy  = sum_s k_s G_s + w_y dh + sum_k u + sum_j (e_j Wk_j + f_j Wa_j) - phi y

    A thread of the main warps keeps its columns for the whole kernel, with their maps and the sums of the maps' and the gain's
    gradients in registers.
    """

    def __init__(self, spec: Spec):
        super().__init__(spec)
        assert spec.d_k in (4, 8) and spec.tokens <= 4
        width = spec.columns_per_thread
        assert spec.columns % (32 * width) == 0 and spec.columns <= 32 * MAIN_WARPS * width
        self.active_warps = spec.columns // (32 * width)

    @cute.jit
    def __call__(
        self,
        memory: Int64,
        y: Int64,
        packed: Int64,
        saved: Int64,
        extra: Int64,
        d_memory_out: Int64,
        d_x: Int64,
        d_memory: Int64,
        d_y: Int64,
        partials: Int64,
        window,
        n_tokens: Int32,
        grid: Int32,
        stream,
    ):
        self.kernel(
            memory, y, packed, saved, extra, d_memory_out, d_x, d_memory, d_y, partials, window,
            n_tokens,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.spec.threads, 1, 1],
            cluster=[self.spec.cluster, 1, 1],
            smem=self.shared["size"],
            min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        memory: Int64,
        y: Int64,
        packed: Int64,
        saved: Int64,
        extra: Int64,
        d_memory_out: Int64,
        d_x: Int64,
        d_memory: Int64,
        d_y: Int64,
        partials: Int64,
        window,
        n_tokens: Int32,
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
        n_tiles = (n_tokens + (s.tokens - 1)) // s.tokens
        n = (n_tiles - first_tile + step - 1) // step
        sums = partials + Int64(first_tile) * (4 * s.n_parameters)

        self.initialise(base, packed, thread, rank)
        if warp < MAIN_WARPS:
            self.take_registers("main")
            if cutlass.const_expr(s.gather in ("end", "middle")):
                # No gradient of a memory is written there, but of the bundle's vectors.
                d_memory = window[1]
            self.main(
                base, packed, d_memory, d_y, sums, n_tokens, first_tile, step, n, rank, warp, lane
            )
        elif cutlass.const_expr(s.dots_warps == 0):
            self.help(
                base, (memory, y, d_x, d_memory_out), packed, saved, extra, window, n_tokens,
                first_tile, step, n, rank, warp, lane,
            )  # fmt: skip
        elif warp >= self.first_dots_warp:
            self.take_registers("dots")
            self.products(base, n, warp - self.first_dots_warp, lane)
        else:
            self.help(
                base, (memory, y, d_x, d_memory_out), packed, saved, extra, window, n_tokens,
                first_tile, step, n, rank, warp, lane,
            )  # fmt: skip
        cute.arch.sync_threads()
        self.store_biases(base, sums, thread, rank)
        if cutlass.const_expr(s.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def help(
        self, base, sources, packed, saved, extra, window, n_tokens, first_tile, step, n, rank, warp,
        lane,
    ):  # fmt: skip
        s = self.spec
        self.take_registers("helper")
        rows = sources, window[1:]
        if cutlass.const_expr(s.gather != ""):
            rows = (*sources, window[1]), window[2:]
        if warp == MAIN_WARPS:
            self.load(base, *rows, n_tokens, first_tile, step, n, rank)
        else:
            self.coefficients(
                base, packed, saved, extra, window, n_tokens, first_tile, step, n,
                warp - (MAIN_WARPS + 1), lane, rank,
            )  # fmt: skip

    # Warps 0-7.

    @cute.jit
    def main(
        self, base, packed, d_memory, d_y, sums, n_tokens, first_tile, step, n, rank, warp, lane
    ):
        s = self.spec
        width = s.columns_per_thread
        active = warp < self.active_warps
        # An idle warp computes on the first columns and stores nothing.
        column = (warp * 32 + lane) * width * Int32(active)
        weights, gain = self.load_columns(packed, column + rank * s.columns)
        # [map row][column], then the gain
        gradients = cute.make_rmem_tensor((s.map_rows + 1) * width, Float32)
        for q in range_constexpr((s.map_rows + 1) * width):
            gradients[q] = Float32(0.0)
        if cutlass.const_expr(s.dots_warps > 0):
            for i in cutlass.range(n, unroll=1):
                first = (first_tile + i * step) * s.tokens
                self.mix(
                    base, weights, gain, gradients, d_memory, d_y, n_tokens, i, first, column, rank,
                    active, lane,
                )  # fmt: skip
        else:
            for i in cutlass.range(n + 1, unroll=1):
                if i < n:
                    self.dots(base, i, warp, lane)
                if i > 0:
                    first = (first_tile + (i - 1) * step) * s.tokens
                    self.mix(
                        base, weights, gain, gradients, d_memory, d_y, n_tokens, i - 1, first,
                        column, rank, active, lane,
                    )  # fmt: skip
        self.store_gradients(sums, gradients, column + rank * s.columns, active)

    @cute.jit
    def products(self, base, n, warp, lane):
        """The dot products, where they have warps of their own."""
        for i in cutlass.range(n, unroll=1):
            self.dots(base, i, warp, lane)

    def load_columns(self, packed, column):
        """The maps ``[row][column]`` and the gain of a thread's columns."""
        s = self.spec
        width = s.columns_per_thread
        rows = []
        for row in range(s.map_rows + 1):
            address = packed + Int64(4) * (column + row * s.d)
            if width == 4:
                rows.append(list(ptx.load_global_float_4(address)))
            else:
                rows.append([ptx.load_global_float(address + 4 * q) for q in range(width)])
        return rows[:-1], rows[-1]

    @cute.jit
    def store_gradients(self, sums, gradients, column, active):
        """Into this cluster's row of partial sums: each map ``[D, K]``, the gain ``[D]``."""
        s = self.spec
        K = s.d_k
        width = s.columns_per_thread
        if active:
            for m in range_constexpr(s.map_rows // K):
                for q in range_constexpr(width):
                    place = sums + Int64(4) * (m * K * s.d + (column + q) * K)
                    for j in range_constexpr(K):
                        ptx.store_global_float(place + 4 * j, gradients[(m * K + j) * width + q])
            for q in range_constexpr(width):
                place = sums + Int64(4) * (s.map_rows * s.d + column + q)
                ptx.store_global_float(place, gradients[s.map_rows * width + q])

    @cute.jit
    def dots(self, base, i, warp, lane):
        """The dot products of ``G`` and ``g`` with the memory rows and ``y``."""
        s = self.spec
        K = s.d_k
        g, c = lane // 4, lane % 4
        stage = i % s.stages
        tile = base + self.shared["ring"] + stage * s.tile_bytes
        ptx.barrier_wait(base + self.barriers["full"] + 8 * stage, (i // s.stages) & 1)
        gram = [zeros() for _ in range(self.memory_tiles)]
        with_x = [zeros() for _ in range(self.memory_tiles)]
        for j in range_constexpr(self.n_steps):
            column = self.column(j, warp, lane)
            mask = None
            if cutlass.const_expr(not self.whole_steps):
                inside = column < s.columns
                column = column * Int32(inside)
                mask = Uint32(0) - Uint32(Int32(inside))
            outputs = self.load_outputs(tile + 2 * column, g, mask)
            memory = self.load_memory(tile, column, g, mask)
            xs = self.load_scaled(base, tile, column, g, mask)
            ds = memory
            if cutlass.const_expr(s.gradient_products):
                ds = self.load_memory(tile, column, g, mask, K + 2)
            for h in range_constexpr(2):
                p, q = 2 * h, 2 * h + 1
                for t in range_constexpr(self.memory_tiles):
                    r, ys = memory[t], outputs[self.outputs_of_memory(t)]
                    rows = (r[p], ys[p], r[q], ys[q])
                    if cutlass.const_expr(s.gradient_products):
                        gram[t] = ptx.mma(rows, (ds[t][p], ds[t][q]), gram[t])
                    with_x[t] = ptx.mma(rows, (xs[p], xs[q]), with_x[t])

        ptx.barrier_wait(base + self.barriers["partial_empty"], (i + 1) & 1)
        self.store_partials(base, gram, with_x, warp, g, c)
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["partial_full"], predicate=lane == 0)

    def load_scaled(self, base, tile, column, g, mask):
        """
        The gradient of ``x`` times the gain, of token ``g % 4``: its high BF16 part for ``g < 4``, what that leaves for the others.
        """
        s = self.spec
        bits = self.load_fragment(tile + 2 * column, (g % 4) % s.tokens, s.d_k + 1, mask)
        gains = load_row(base + self.shared["gain"] + 4 * column, 8)
        out = []
        for q in range(4):
            a, b = ptx.unpack(bits[q])
            high, low = split((a * gains[2 * q], b * gains[2 * q + 1]))
            out.append(ptx.select(g < 4, high, low))
        return out

    def store_partials(self, base, gram, with_x, warp, g, c):
        s = self.spec
        K = s.d_k
        p = s.partial
        floats = p["size"]
        partials = base + self.shared["partial"] + warp * (4 * s.tokens * floats)

        def place(token, name, index):
            return partials + 4 * (token * floats + p[name] + index)

        for t in range(self.memory_tiles):
            # Rows g: memory row; columns 2c and 2c + 1: row of G, or token (0-3 high part, 4-7 low part) of g.
            if K == 8:
                token, slot, row = t, 2 * c, g
                of_row = t
            else:
                token, slot, row = 2 * t + c // 2, (2 * c) % 4, g % 4
                of_row = 2 * t + g // 4
            if s.gradient_products:
                for column in range(2):
                    ptx.store_shared_float(
                        place(of_row, "memory", row), gram[t][column], predicate=g == 2 * c + column
                    )
                self.store_outputs(place, token, slot, gram[t][2:], "y", g)
            for column in range(2):
                n = 2 * c + column
                part = n // 4
                ptx.store_shared_float(
                    place(of_row, "x", part * K + row),
                    with_x[t][column],
                    predicate=n % 4 == of_row,
                )
                # Every memory tile has this product; the one of the token stores it.
                in_tile, index = self.output_of(g)
                own = self.outputs_of_memory(t) * s.output_tokens + in_tile
                mine = where_both(self.is_output(g), (own == n % 4) & (own * K // 8 == t))
                ptx.store_shared_float(
                    place(own, "y_x", part * s.outputs + index),
                    with_x[t][2 + column],
                    predicate=mine,
                )

    @cute.jit
    def mix(
        self, base, weights, gain, gradients, d_memory, d_y, n_tokens, i, first, column, rank,
        active, lane,
    ):  # fmt: skip
        s = self.spec
        K = s.d_k
        width = s.columns_per_thread
        stage = i % s.stages
        ring = base + self.shared["ring"] + stage * s.tile_bytes
        tile = ring + (2 * column + s.rows_shift)
        if cutlass.const_expr(s.dots_warps > 0):
            # Other warps have waited for the copies; who reads them waits himself.
            ptx.barrier_wait(base + self.barriers["full"] + 8 * stage, (i // s.stages) & 1)
        ptx.barrier_wait(self.coefficients_barrier(base, i), (i // s.coefficient_buffers) & 1)
        for t in range_constexpr(s.tokens):
            token = first + t
            if (token < n_tokens) & active:
                rows = tile + t * s.token_bytes
                place = self.coefficients_of(base, i, t)
                wy, sum_k, alpha, beta = ptx.load_shared_float_4(place + 32 * K)
                gamma, phi, rstd_h, _ = ptx.load_shared_float_4(place + 32 * K + 16)
                v = self.load_row(rows + K * s.row_bytes)
                gx = self.load_row(rows + (K + 1) * s.row_bytes)
                h = [wy * f for f in v]
                m = [sum_k * f for f in v]
                for e in range_constexpr(s.earlier):
                    more = self.load_row(rows + (s.first_earlier + e) * s.row_bytes)
                    of_h = ptx.load_shared_float(place + 32 * (K + 1) + 8 * e)
                    of_m = ptx.load_shared_float(place + 32 * (K + 1) + 8 * e + 4)
                    h = [hc + of_h * f for hc, f in zip(h, more, strict=True)]
                    m = [mc + of_m * f for mc, f in zip(m, more, strict=True)]
                u = [Float32(0.0)] * width
                dy = [-phi * f for f in v]
                for slot in range_constexpr(K):
                    a, k, w, q = ptx.load_shared_float_4(place + 32 * slot)
                    c, e, f, D = ptx.load_shared_float_4(place + 32 * slot + 16)
                    if cutlass.const_expr(s.stored8):
                        at = ring + (t * s.token_bytes + slot * s.memory_row_bytes)
                        row = self.load_stored_columns(at, column)
                    else:
                        row = self.load_row(rows + slot * s.row_bytes)
                    for x in range_constexpr(width):
                        h[x] = h[x] + w * row[x]
                        m[x] = m[x] + D * row[x]
                        u[x] = u[x] + c * weights[s.n_forget + K + slot][x]
                        dy[x] = dy[x] + e * weights[s.n_forget + slot][x]
                        z = (s.n_forget + slot) * width + x
                        gradients[z] = gradients[z] + e * v[x]
                        if cutlass.const_expr(s.n_forget > 0):
                            dy[x] = dy[x] + f * weights[slot][x]
                            z = slot * width + x
                            gradients[z] = gradients[z] + f * v[x]
                dh = []
                for x in range_constexpr(width):
                    m[x] = m[x] * Float32(1.0 / K)
                    u[x] = u[x] * Float32(1.0 / K) - gamma * m[x]
                    z = s.map_rows * width + x
                    gradients[z] = gradients[z] + (gx[x] * rstd_h) * h[x]
                    dh.append(alpha * (gx[x] * gain[x]) - beta * h[x])
                    dy[x] = dy[x] + wy * dh[x] + sum_k * u[x]
                own_column = rank * s.columns + column
                out = d_memory + 2 * (Int64(token) * (K * s.d) + own_column)
                if cutlass.const_expr(s.gather in ("end", "middle")):
                    out = d_memory + self.bundle_of(token, own_column)
                gathered = [
                    self.load_row(rows + (s.first_gathered + r) * s.row_bytes)
                    for r in range(s.gathered)
                ]
                # What is left for the earlier outputs.
                left = []
                if cutlass.const_expr(s.gathered > 0):
                    dy = [d + f for d, f in zip(dy, gathered[0], strict=True)]
                if cutlass.const_expr(s.gather in ("end", "middle")):
                    for e in range_constexpr(s.earlier):
                        of_h = ptx.load_shared_float(place + 32 * (K + 1) + 8 * e)
                        of_m = ptx.load_shared_float(place + 32 * (K + 1) + 8 * e + 4)
                        value = [of_h * d + of_m * f for d, f in zip(dh, u, strict=True)]
                        if cutlass.const_expr(s.gather == "middle"):
                            value = [f + r for f, r in zip(value, gathered[1 + e], strict=True)]
                        left.append(value)
                for slot in range_constexpr(K):
                    a, k, w, q = ptx.load_shared_float_4(place + 32 * slot)
                    c = ptx.load_shared_float(place + 32 * slot + 16)
                    row = []
                    if cutlass.const_expr(s.reads_gradient):
                        row = self.load_row(rows + (K + 2 + slot) * s.row_bytes)
                    if cutlass.const_expr(s.gradient_products):
                        dy = [d + k * f for d, f in zip(dy, row, strict=True)]
                    weights_of = load_row(
                        place + 4 * (s.first_weight + s.slot_weights * slot), s.slot_weights
                    )
                    if cutlass.const_expr(s.gather == "end"):
                        for e in range_constexpr(s.earlier):
                            left[e] = [
                                f + weights_of[e] * r for f, r in zip(left[e], row, strict=True)
                            ]
                    elif cutlass.const_expr(s.gather == "first"):
                        new = [a * (q * d + f) for d, f in zip(dh, u, strict=True)]
                        for r in range_constexpr(2 * s.window - 2):
                            by = weights_of[r]
                            new = [n + by * f for n, f in zip(new, gathered[1 + r], strict=True)]
                        by = weights_of[2 * s.window - 3]
                        new = [n + by * f for n, f in zip(new, row, strict=True)]
                        self.store_row(out + (2 * slot * s.d), new)
                    elif cutlass.const_expr(s.gather == ""):
                        new = [q * d + f for d, f in zip(dh, u, strict=True)]
                        if cutlass.const_expr(s.memory_gradient):
                            new = [n + f for n, f in zip(new, row, strict=True)]
                        self.store_row(out + (2 * slot * s.d), [a * f for f in new])
                    for x in range_constexpr(width):
                        z = (s.n_forget + K + slot) * width + x
                        gradients[z] = gradients[z] + c * m[x]
                if cutlass.const_expr(s.gather in ("end", "middle")):
                    for e in range_constexpr(s.earlier):
                        self.store_row(out + 2 * e * s.d, left[e])
                    pair = out + 2 * (s.window - 1 + 2 * (s.earlier - 1)) * s.d
                    self.store_row(pair, dh)
                    self.store_row(pair + 2 * s.d, u)
                self.store_row(d_y + 2 * (Int64(token) * s.d + rank * s.columns + column), dy)
        cute.arch.sync_warp()
        ptx.barrier_arrive(base + self.barriers["empty"] + 8 * stage, predicate=lane == 0)

    def load_stored_columns(self, row, column) -> list:
        """A thread's columns of a row of the stored memory in FP8."""
        if self.spec.columns_per_thread == 2:
            # Columns 0 and 1 of four, or 2 and 3, whose bytes are one higher.
            word = ptx.load_shared_bits(row + (column & Int32(-4)))
            return ptx.floats8_of_half_word(word, (column // 2) & Int32(1))
        return ptx.floats8_of_word(ptx.load_shared_bits(row + column))

    def load_row(self, address) -> list:
        """A thread's columns of a row in shared memory as FP32."""
        if self.spec.columns_per_thread == 2:
            return list(ptx.unpack(ptx.load_shared_bits(address)))
        return [f for r in ptx.load_shared_2(address) for f in ptx.unpack(r)]

    def store_row(self, address, values) -> None:
        pairs = pack_pairs(values)
        if len(pairs) == 1:
            ptx.store_global_bits(address, pairs[0])
        else:
            ptx.store_global_2(address, pairs)

    # Warps 9 on.

    @cute.jit
    def coefficients(
        self, base, packed, saved, extra, window, n_tokens, first_tile, step, n, which, lane, rank
    ):
        s = self.spec
        K = s.d_k
        p = s.partial
        floats = p["size"]
        slot = lane % K
        biases = packed + Int64(4) * ((s.map_rows + 1) * s.d)
        b_query = ptx.load_global_float(biases + 4 * Int64(slot))
        b_key = ptx.load_global_float(biases + 4 * Int64(K + slot))
        b_forget = Float32(0.0)
        if cutlass.const_expr(s.forget != "none"):
            b_forget = ptx.load_global_float(biases + 4 * Int64(2 * K + slot))
        total = base + self.shared["total"] + which * (4 * floats)
        count = Int32(0)
        d_query, d_key, d_forget = Float32(0.0), Float32(0.0), Float32(0.0)
        for i in cutlass.range(n, unroll=1):
            tile = first_tile + i * step
            shift = (i * s.tokens) % s.coefficient_warps
            first = (which - shift + s.coefficient_warps) % s.coefficient_warps
            for t in cutlass.range(first, s.tokens, s.coefficient_warps, unroll=1):
                # What the forward saved: asked for before the wait. Beyond the last token, the last one's.
                token = tile * s.tokens + t
                valid = token < n_tokens
                from_token = cutlass.min(token, n_tokens - 1)
                here = saved + Int64(4) * (Int64(from_token) * s.saved_columns + slot)
                p_forget = Float32(0.0)
                if cutlass.const_expr(s.forget == "dynamic"):
                    p_forget = ptx.load_global_float(here)
                p_key = ptx.load_global_float(here + 4 * s.n_forget)
                p_query = ptx.load_global_float(here + 4 * (s.n_forget + K))
                here = saved + Int64(4) * (Int64(from_token) * s.saved_columns + s.map_rows)
                rstd_y = ptx.load_global_float(here)
                rstd_m = ptx.load_global_float(here + 8)
                rstd_h = ptx.load_global_float(here + 12)
                here = extra + Int64(4) * (Int64(from_token) * s.extra_columns)
                own = here + Int64(4) * Int64(slot)
                query_column = [ptx.load_global_float(own + 4 * K * j) for j in range(K)]
                outputs = range(s.outputs)
                y_query = [ptx.load_global_float(own + 4 * K * (K + e)) for e in outputs]
                stored_h = ptx.load_global_float(own + 4 * s.extra_s_h)
                stored_m = ptx.load_global_float(own + 4 * (s.extra_s_h + K))
                own = here + 4 * s.extra_y_h
                y_h = [ptx.load_global_float(own + 4 * e) for e in outputs]
                y_m = [ptx.load_global_float(own + 4 * (s.outputs + e)) for e in outputs]
                held = self.load_window(window[0], from_token, slot)
                bundle = Int64(0)
                known, weights = [], []
                if cutlass.const_expr(s.gather != ""):
                    # Its floats.
                    bundle = window[1] + self.bundle_of(from_token, 3 * (s.window - 1) * s.d)
                    bundle = bundle + Int64(4) * Int64(slot)
                if cutlass.const_expr(s.gather in ("middle", "first")):
                    place = bundle + 4 * s.products_place(s.earlier + 1)
                    known = [ptx.load_global_float(place + 4 * K * j) for j in range(s.earlier + 2)]
                if cutlass.const_expr(s.gather == "first"):
                    place = bundle + 4 * s.weights_place(2)
                    weights = [
                        ptx.load_global_float(place + 4 * K * j) for j in range(2 * s.window - 2)
                    ]

                ptx.barrier_wait(base + self.barriers["partial_full"], i & 1)
                self.sum_partials(base, total, t, which, count, rank, lane)
                cute.arch.sync_warp()
                count += 1
                if t + s.coefficient_warps >= s.tokens:
                    ptx.barrier_arrive(base + self.barriers["partial_empty"], predicate=lane == 0)

                # S_s . G_s of the stored memory, y_e . G_s of all outputs.
                stored_g, y_g = Float32(0.0), [Float32(0.0) for _ in outputs]
                if cutlass.const_expr(s.gradient_products):
                    stored_g = ptx.load_shared_float(total + 4 * (p["memory"] + slot))
                    of_y = total + 4 * (p["y"] + slot)
                    y_g = [ptx.load_shared_float(of_y + 4 * K * e) for e in outputs]
                elif cutlass.const_expr(s.memory_gradient):
                    stored_g, y_g = known[0], [known[-1], *known[1:-1]]
                of_x = total + 4 * (p["x"] + slot)
                stored_x = ptx.load_shared_float(of_x) + ptx.load_shared_float(of_x + 4 * K)
                of_x = total + 4 * p["y_x"]
                y_x = [
                    ptx.load_shared_float(of_x + 4 * e)
                    + ptx.load_shared_float(of_x + 4 * (s.outputs + e))
                    for e in outputs
                ]
                s_x, s_g, s_h, s_m = stored_x, stored_g, stored_h, stored_m
                if cutlass.const_expr(s.composed):
                    # From the anchor's products to the memory's.
                    s_x = of_memory(held, stored_x, y_x)
                    s_h = of_memory(held, stored_h, y_h)
                    s_m = of_memory(held, stored_m, y_m)
                    if cutlass.const_expr(s.memory_gradient):
                        s_g = of_memory(held, stored_g, y_g)

                # The coefficients again.
                a, closed = Float32(1.0), Float32(0.0)
                if cutlass.const_expr(s.forget != "none"):
                    z = b_forget + p_forget
                    a, closed = ptx.sigmoid(-z), ptx.sigmoid(z)
                k = self.key(b_key + p_key)
                z = b_query + p_query
                e = ptx.exp(z - max_over(z, K))
                q = e * ptx.reciprocal(sum_over(e, K))
                w = q * a
                wy = sum_over(q * k, K)
                sum_k = sum_over(k, K)

                # Through the norm of h: dh = alpha g - beta h.
                inverse_d = Float32(1.0 / s.d)
                g_h = sum_over(w * s_x, K) + wy * y_x[0]
                alpha = rstd_h
                beta = rstd_h * rstd_h * rstd_h * g_h * inverse_d
                s_dh = alpha * s_x - beta * s_h
                y_dh = [alpha * y_x[e] - beta * y_h[e] for e in outputs]

                # Through the query and the norm of m.
                dq = a * s_dh + k * y_dh[0]
                dz_query = q * (dq - sum_over(dq * q, K))
                inner = sum_over(dz_query * p_query, K)
                c = dz_query * rstd_m
                gamma = rstd_m * rstd_m * inner * Float32(1.0 / (s.d * K))
                spread_c = spread(c, K)
                stored_query = dot(spread_c, query_column)
                of_query = [sum_over(c * y_query[e], K) for e in outputs]
                s_query = stored_query
                if cutlass.const_expr(s.composed):
                    s_query = of_memory(held, stored_query, of_query)
                s_u = s_query * Float32(1.0 / K) - gamma * s_m
                y_u = [of_query[e] * Float32(1.0 / K) - gamma * y_m[e] for e in outputs]

                # Key and forget gate.
                dk = y_g[0] + q * y_dh[0] + y_u[0]
                if cutlass.const_expr(s.key_activation == "two_sigmoid"):
                    dz_key = dk * k * (Float32(1.0) - Float32(0.5) * k)
                else:
                    dz_key = k * (dk - sum_over(dk * k, K) * Float32(1.0 / K))
                inner = dz_key * p_key
                dz_forget = Float32(0.0)
                if cutlass.const_expr(s.forget != "none"):
                    dz_forget = -(s_g + q * s_dh + s_u) * a * closed
                    inner = inner + dz_forget * p_forget
                phi = rstd_y * rstd_y * inverse_d * sum_over(inner, K)

                place = self.coefficients_of(base, i, t)
                mine = lane < K
                D = a
                if cutlass.const_expr(s.composed):
                    D = a * held[0]
                ptx.store_shared_float_4(place + 32 * slot, (a, k, q * D, q), mine)
                dz = (c, dz_key * rstd_y, dz_forget * rstd_y, D)
                ptx.store_shared_float_4(place + 32 * slot + 16, dz, mine)
                if cutlass.const_expr(s.gather == "end"):
                    own = place + 4 * (s.first_weight + s.slot_weights * slot)
                    for f in range_constexpr(s.earlier):
                        ptx.store_shared_float(own + 4 * f, a * held[1 + f], mine)
                if cutlass.const_expr(s.gather == "first"):
                    # The gradient is that of the memory, whatever its unit: D begins at 1 for it.
                    per_unit = Float32(1.0)
                    if cutlass.const_expr(s.stored8):
                        per_unit = ptx.reciprocal(held[0])
                    own = place + 4 * (s.first_weight + s.slot_weights * slot)
                    for f in range_constexpr(2 * s.window - 2):
                        ptx.store_shared_float(own + 4 * f, per_unit * weights[f], mine)
                if cutlass.const_expr(s.gather in ("end", "middle")):
                    # For the boundaries before.
                    first_block = mine & valid & (rank == 0)
                    stored_dh = alpha * stored_x - beta * stored_h
                    stored_u = stored_query * Float32(1.0 / K) - gamma * stored_m
                    own = bundle + 4 * s.products_place(s.earlier)
                    value = a * (stored_g + q * stored_dh + stored_u)
                    ptx.store_global_float(own, value, first_block)
                    for f in range_constexpr(s.earlier):
                        value = a * (y_g[1 + f] + q * y_dh[1 + f] + y_u[1 + f])
                        ptx.store_global_float(own + 4 * K * (1 + f), value, first_block)
                    own = bundle + 4 * s.weights_place(s.earlier + 1)
                    ptx.store_global_float(own, q * D, first_block)
                    ptx.store_global_float(own + 4 * K, D, first_block)
                mine = lane == 0
                for f in range_constexpr(s.earlier):
                    new = a * held[1 + f]
                    ptx.store_shared_float_2(
                        place + 32 * (K + 1) + 8 * f,
                        (sum_over(q * new, K), sum_over(new, K)),
                        mine,
                    )
                ptx.store_shared_float_4(place + 32 * K, (wy, sum_k, alpha, beta), mine)
                ptx.store_shared_float_4(
                    place + 32 * K + 16, (gamma, phi, rstd_h, Float32(0.0)), mine
                )
                if valid:
                    d_query = d_query + dz_query
                    d_key = d_key + dz_key
                    d_forget = d_forget + dz_forget
            if first >= s.tokens:
                ptx.barrier_wait(base + self.barriers["partial_full"], i & 1)
                ptx.barrier_arrive(base + self.barriers["partial_empty"], predicate=lane == 0)
            cute.arch.sync_warp()
            ptx.barrier_arrive(self.coefficients_barrier(base, i), predicate=lane == 0)
        own = base + self.shared["biases"] + 4 * (which * (3 * K) + slot)
        ptx.store_shared_float(own, d_query, lane < K)
        ptx.store_shared_float(own + 4 * K, d_key, lane < K)
        ptx.store_shared_float(own + 8 * K, d_forget, lane < K)

    @cute.jit
    def store_biases(self, base, sums, thread, rank):
        """The sums of the coefficient warps, in the order of the warps. All blocks of a cluster have the same."""
        s = self.spec
        K = s.d_k
        if (thread < s.n_biases) & (rank == 0):
            value = Float32(0.0)
            if thread < 3 * K:
                for w in range_constexpr(s.coefficient_warps):
                    place = base + self.shared["biases"] + 4 * (w * (3 * K) + thread)
                    value = value + ptx.load_shared_float(place)
            place = sums + Int64(4) * ((s.map_rows + 1) * s.d + thread)
            ptx.store_global_float(place, value)


class Finish:
    """
    The sums of the clusters' partial gradients: 4 parameters for each of 8 lanes, every fourth cluster for each quarter of a warp, then
    the quarters, always in this order. One lane for all clusters took 11 us for 7 MB, most of it waiting.
    """

    def __init__(self, spec: Spec):
        self.spec = spec

    @cute.jit
    def __call__(self, partials: Int64, out: Int64, n_rows: Int32, grid: Int32, stream):
        self.kernel(partials, out, n_rows).launch(
            grid=[grid, 1, 1], block=[FINISH_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, partials: Int64, out: Int64, n_rows: Int32):
        s = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        quarter = lane // 8
        place = (block * (FINISH_THREADS // 32) + warp) * 8 + lane % 8
        inside = place < s.n_parameters // 4
        # Launched while the backward ends.
        cute.arch.griddepcontrol_wait()
        count = Int32(0)
        if inside:
            count = (n_rows - quarter + 3) // 4
        sums = cute.make_rmem_tensor(4, Float32)
        for q in range_constexpr(4):
            sums[q] = Float32(0.0)
        address = partials + Int64(16) * place + Int64(4 * s.n_parameters) * quarter
        for _r in cutlass.range(count, unroll=8):
            values = ptx.load_global_float_4(address)
            for q in range_constexpr(4):
                sums[q] = sums[q] + values[q]
            address += 16 * s.n_parameters
        for q in range_constexpr(4):
            for offset in (8, 16):
                sums[q] = sums[q] + cute.arch.shuffle_sync_bfly(sums[q], offset=offset)
        if inside and quarter == 0:
            ptx.store_global_4(out + Int64(16) * place, [ptx.as_bits(sums[q]) for q in range(4)])

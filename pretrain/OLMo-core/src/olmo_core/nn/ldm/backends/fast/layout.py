"""
What a kernel is compiled for, and where things lie in its shared memory and in the buffer of saved products. Plain
Python: the launch needs the numbers without the CuTe DSL.
"""

from dataclasses import asdict, dataclass
from functools import cached_property

MAIN_WARPS = 8
FINISH_THREADS = 64
FINISH_PARAMETERS = 64
"""Sums of a block of the finish kernel: 4 for each of 8 lanes of a warp, whose other lanes take other clusters."""
SHARED_BYTES = 231_424
"""What a block takes at most: Hopper and Blackwell give 227 KiB; 1 KiB of it stays free."""
ROW_PAD = 64
"""
Bytes between rows in shared memory. A row is a multiple of 128 bytes, and the 8 lanes of one phase of a 16-byte load
read 64 bytes of each of two rows: the padding puts them in different banks.
"""


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Spec:
    """One kernel: ``direction`` (``forward``, ``backward`` or ``finish``), options, shape, launch numbers, all compiled in."""

    direction: str
    d: int
    d_k: int
    key_activation: str = "two_sigmoid"
    forget: str = "dynamic"
    cluster: int = 1
    """Blocks that share a token, each with ``d / cluster`` of its columns."""
    tokens: int = 2
    """Tokens of a tile."""
    coefficient_warps: int = 3
    max_stages: int = 16
    extra: bool = True
    """Forward: save what the backward of this backend wants."""
    memory_gradient: bool = True
    """Backward: the new memory has a gradient (not at a model's last boundary)."""
    saves: bool = True
    """Forward: save anything for a backward; without, ``saved`` and ``extra`` are not touched."""
    earlier: int = 0
    """
    Outputs of the window's earlier boundaries, 0 to 7 (K = 4: to 3). With some, the memory is not stored: it is
    ``D_s A_s + sum_i c_is y_i`` of the anchor ``A``, which was, and of these.
    """
    writes: bool = True
    """Forward: store the new memory; without, ``D`` and ``c`` of the new memory instead."""

    stored8: bool = False
    """
    The stored memories are FP8 (e4m3), each row in a unit of its own, a power of two: a window begins with ``D`` equal to that, and
    whoever stores a memory writes the units in the place of ``D`` and ``c``.
    """

    gather: str = ""
    """
    Backward of a whole window of ``window`` boundaries: ``end``, ``middle`` or ``first`` by its place, or "" for a boundary that takes the gradient
    of the memory after it and leaves that of the memory before it.
    """
    window: int = 0
    """With ``gather``: the window's boundaries."""

    dots_warps: int = 0
    """Warps that take the dot products, 0 or 4: without, the 8 main warps take them before they mix the tile before."""

    def __post_init__(self) -> None:
        limit = {4: 3, 8: 7}.get(self.d_k, 0)
        assert not self.dots_warps or (self.dots_warps, self.coefficient_warps) == (4, 3)
        assert 0 <= self.earlier <= limit, "more outputs than a tile of 8 rows holds"
        if self.gather:
            places = {"first": [0], "middle": range(1, self.window - 1), "end": [self.window - 1]}
            assert self.direction == "backward" and self.earlier in places[self.gather]
            assert self.window > 1 and self.memory_gradient

    @property
    def name(self) -> str:
        return "_".join(str(v) for v in asdict(self).values())

    @property
    def arguments(self) -> str:
        """Letters of the kernel's arguments, as :class:`~.driver.Kernel` takes them."""
        window = "p" * self.window_arguments[1]
        return {
            "forward": f"ppppppp{window}if",
            "backward": f"pppppppppp{window}i",
            "finish": "ppi",
        }[self.direction]

    @property
    def window_arguments(self) -> tuple[int, int]:
        """
        The first and the number of the arguments that are the window, one tuple for the compiler: ``D`` and ``c`` before the boundary,
        those after it (forward only), the bundle (with ``gather``), the earlier outputs.
        """
        return {
            "forward": (7, 2 + self.earlier),
            "backward": (10, 1 + bool(self.gather) + self.earlier),
            "finish": (0, 0),
        }[self.direction]

    # Shape.

    @cached_property
    def columns(self) -> int:
        """Columns of a block."""
        return self.d // self.cluster

    @cached_property
    def threads(self) -> int:
        return 32 * (MAIN_WARPS + 1 + self.coefficient_warps + self.dots_warps)

    @property
    def product_warps(self) -> int:
        """Warps that share the columns of a dot product."""
        return self.dots_warps or MAIN_WARPS

    @property
    def moves_registers(self) -> bool:
        """Whether the helpers give registers to the main warps: that goes by groups of 4 warps."""
        return (1 + self.coefficient_warps) % 4 == 0

    @property
    def start_registers(self) -> int:
        """Of each thread at the start, in steps of 8."""
        return 65_536 // self.threads // 8 * 8

    @property
    def registers(self) -> dict[str, int]:
        """Of a thread by its warp's role, together no more than all have at the start."""
        main, helper = self.main_registers, self.helper_registers
        if self.dots_warps and self.direction == "forward":
            # The maps are in the registers of the warps that take the products.
            main = 104 if self.writes and self.earlier else 88
        elif self.dots_warps:
            main = 168
        given = {"main": main, "helper": helper}
        if self.dots_warps:
            given["dots"] = 4 * self.start_registers - 2 * main - helper
        return given

    @property
    def helper_registers(self) -> int:
        """As few as leave the helpers without spills; so chosen, a forward has none at all."""
        if self.direction == "forward":
            return 104 if self.earlier < 4 else 136
        return 104 if self.gather == "end" else 88

    @property
    def main_registers(self) -> int:
        given = (self.start_registers - self.helper_registers) * 32 * (1 + self.coefficient_warps)
        return min(240, self.start_registers + given // (32 * MAIN_WARPS) // 8 * 8)

    @property
    def composed(self) -> bool:
        """The memory is not the stored one: there are ``D`` and ``c``."""
        return self.earlier > 0 or self.stored8

    @cached_property
    def rows(self) -> int:
        """Rows of a token in shared memory: the memory's and ``y``; backward, their gradients too; the window's earlier outputs."""
        return self.first_gathered + self.gathered

    @cached_property
    def first_earlier(self) -> int:
        """The row of the first earlier output."""
        if self.direction == "forward":
            return self.d_k + 1
        return self.d_k + 2 + (self.d_k if self.reads_gradient else 0)

    @property
    def reads_gradient(self) -> bool:
        """Backward: reads the gradient of a memory: of the one after it, or of the one at the window's end."""
        return self.memory_gradient and self.gather != "middle"

    @property
    def gradient_products(self) -> bool:
        """Backward: takes the products of that gradient with the memory and the outputs; after a window's end they are known."""
        return self.memory_gradient and self.gather in ("", "end")

    @cached_property
    def first_gathered(self) -> int:
        """The row of the first vector from the bundle."""
        return self.first_earlier + self.earlier

    @cached_property
    def gathered(self) -> int:
        """Vectors from the bundle: what later boundaries left for ``y``; for earlier outputs, which is added to; ``dh`` and ``u`` of all later ones."""
        return {"": 0, "end": 0, "middle": 1 + self.earlier, "first": 2 * self.window - 1}[
            self.gather
        ]

    def gathered_place(self, row: int) -> int:
        """Where in the bundle that vector is."""
        if row == 0:
            return self.earlier
        return row - 1 if self.gather == "middle" else self.window - 1 + row - 1

    # The bundle: for a token, V_1 .. V_(c - 1), what the window's later boundaries leave for each output; dh_l and u_l of boundaries
    # 2 .. c; then floats: the products that boundary i starts with, S_s . G_s of the stored memory and y_e . G_s of outputs 1 .. i, left by
    # boundary i + 1; and q_l D_l and D_l of boundaries 2 .. c.

    @cached_property
    def bundle_floats(self) -> int:
        return self.products_place(self.window) + 2 * self.d_k * (self.window - 1)

    @cached_property
    def bundle_rows(self) -> int:
        """Vectors of d BF16 elements of a token."""
        return 3 * (self.window - 1) + -(-2 * self.bundle_floats // self.d)

    def products_place(self, boundary: int) -> int:
        """Of boundary 1 .. c - 1; the weights begin where those of c would."""
        return self.d_k * ((boundary - 1) + boundary * (boundary - 1) // 2)

    def weights_place(self, boundary: int) -> int:
        """Of boundary 2 .. c."""
        return self.products_place(self.window) + 2 * self.d_k * (boundary - 2)

    # Tiles of 8 rows with the outputs of a few tokens, each with ``y`` as row 0 and the window's earlier outputs after it.

    @cached_property
    def outputs(self) -> int:
        """Outputs of a token: ``y`` and the earlier ones."""
        return 1 + self.earlier

    @cached_property
    def output_stride(self) -> int:
        """Rows from one token to the next."""
        return 1 << (self.outputs - 1).bit_length()

    @cached_property
    def output_tokens(self) -> int:
        """Tokens of one tile of outputs."""
        return min(self.tokens, 8 // self.output_stride)

    @cached_property
    def output_tiles(self) -> int:
        return self.tokens // self.output_tokens

    @cached_property
    def columns_per_thread(self) -> int:
        """Backward: columns that a thread of the 8 main warps keeps, with their maps and the maps' gradients."""
        return 2 if self.columns <= 64 * MAIN_WARPS else 4

    # The packed buffer of the flexible backend: map rows, gain, biases, saved products.

    @cached_property
    def n_forget(self) -> int:
        return self.d_k if self.forget == "dynamic" else 0

    @cached_property
    def map_rows(self) -> int:
        return 2 * self.d_k + self.n_forget

    @cached_property
    def n_biases(self) -> int:
        return round_up(3 * self.d_k + 1, 4)

    @cached_property
    def saved_columns(self) -> int:
        """Products of the maps and four reciprocal RMS, as the flexible backend saves them."""
        return self.map_rows + 4

    @cached_property
    def extra_columns(self) -> int:
        """
        What the backward wants besides: ``S_s . Wq_j`` ``[K, K]`` (of the anchor, in a window); ``y . Wq_j`` ``[outputs, K]``,
        ``y`` first; ``S_s . h`` and ``S_s . m`` ``[K]`` (of the anchor, too); ``y . h`` and ``y . m`` ``[outputs]``.
        """
        return round_up(self.extra_y_h + 2 * self.outputs, 4)

    @cached_property
    def extra_s_h(self) -> int:
        return self.d_k * (self.d_k + self.outputs)

    @cached_property
    def extra_y_h(self) -> int:
        return self.extra_s_h + 2 * self.d_k

    @cached_property
    def n_parameters(self) -> int:
        """Gradients of the parameters: maps in the order of their rows, gain, biases."""
        return (self.map_rows + 1) * self.d + self.n_biases

    # Shared memory, in bytes.

    @cached_property
    def row_bytes(self) -> int:
        return 2 * self.columns + ROW_PAD

    @cached_property
    def memory_row_bytes(self) -> int:
        """
        Of the first ``d_k`` rows. FP8: the 16 lanes of one phase of an 8-byte load read 32 bytes of each of four rows, which are 32 bytes
        apart from a multiple of 128.
        """
        return self.columns + ROW_PAD // 2 if self.stored8 else self.row_bytes

    @cached_property
    def rows_shift(self) -> int:
        """Row ``r`` from ``d_k`` on begins ``r * row_bytes`` and this after its token."""
        return self.d_k * (self.memory_row_bytes - self.row_bytes)

    @cached_property
    def token_bytes(self) -> int:
        return self.rows * self.row_bytes + self.rows_shift

    @cached_property
    def copied_bytes(self) -> int:
        """Of one token, into this block."""
        return self.columns * (2 * self.rows - self.d_k * self.stored8)

    @cached_property
    def tile_bytes(self) -> int:
        return self.tokens * self.token_bytes

    @cached_property
    def coefficient_bytes(self) -> int:
        """Of one tile."""
        return 4 * self.tokens * self.coefficient_floats

    @property
    def coefficient_buffers(self) -> int:
        """Tiles whose coefficients are kept: warps of their own for the dot products may be as far ahead as the ring holds."""
        return self.stages if self.dots_warps else 2

    @cached_property
    def partial(self) -> dict[str, int]:
        """Where each kind of dot product lies among those of one token, in floats, and their number ``size``."""
        K, n = self.d_k, self.outputs
        if self.direction == "backward":
            # With G the gradient of the new memory and g that of x times the gain, in two BF16 parts:
            # S_s . G_s, y . G_s, S_s . g (high, low), y . g (high, low); here and below S is a window's anchor, and
            # everything with y is for each of its outputs
            parts = {"memory": K, "y": n * K, "x": 2 * K, "y_x": 2 * n}
        else:
            # S_s . S_t, Wq_j . S_s, y . S_s, y . (Wa, Wk, Wq) and y_i . Wq, y . y
            parts = {
                "gram": K * K,
                "query": K * K,
                "memory": n * K,
                "maps": (2 + n) * K,
                "norm": n * n,
            }
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += size
        offsets["size"] = round_up(at, 4)
        return offsets

    @cached_property
    def coefficient_floats(self) -> int:
        """Coefficients of one token that the second pass reads."""
        if self.direction == "forward":
            return self.d_k * self.slot_floats + round_up(self.outputs, 4)
        return self.first_weight + self.d_k * self.slot_weights

    @cached_property
    def first_weight(self) -> int:
        """Backward: where the weights of a whole window begin."""
        return 8 * (self.d_k + 1) + round_up(2 * self.earlier, 4)

    @cached_property
    def slot_weights(self) -> int:
        """
        Of one slot: of the last gradient for each earlier output (``end``), of ``dh`` and ``u`` of all later boundaries for the gradient of the
        stored memory (``first``).
        """
        n = {"end": self.earlier, "first": 2 * (self.window - 1)}.get(self.gather, 0)
        return round_up(n, 4)

    @cached_property
    def slot_floats(self) -> int:
        """Forward: coefficients of one slot; one, the weight of the read, where no memory is written."""
        return 4 + round_up(self.earlier, 4) if self.writes else 1

    @cached_property
    def shared(self) -> dict[str, int]:
        """Where the parts of shared memory begin; ``size`` is their sum."""
        K, floats = self.d_k, self.partial["size"]
        # An exchange has two buffers for each warp, each with a place for every block of the cluster.
        exchange = self.coefficient_warps * 2 * self.cluster * floats if self.cluster > 1 else 0
        parts = {
            "barriers": 512,
            "gain": 4 * self.columns,
            "partial": 4 * self.product_warps * self.tokens * floats,
            "total": 4 * self.coefficient_warps * floats,
            "exchange": 4 * exchange,
            "coefficients": 0 if self.dots_warps else 2 * self.coefficient_bytes,
            "biases": 4 * self.coefficient_warps * 3 * K if self.direction == "backward" else 0,
        }
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += round_up(size, 128)
        for_each = self.tile_bytes
        if self.dots_warps:
            for_each += round_up(self.coefficient_bytes, 128)
            offsets["coefficients"] = at
        stages = min(self.max_stages, (SHARED_BYTES - at) // for_each)
        offsets["stages"] = stages
        offsets["ring"] = at + stages * (for_each - self.tile_bytes)
        offsets["size"] = at + stages * for_each
        return offsets

    @property
    def stages(self) -> int:
        return self.shared["stages"]

    # Barriers, 8 bytes each.

    @cached_property
    def barriers(self) -> dict[str, int]:
        n, buffers = self.stages, self.coefficient_buffers
        return {
            "full": 0,
            "empty": 8 * n,
            "coefficients_full": 16 * n,
            "partial_full": 16 * n + 8 * buffers,
            "partial_empty": 16 * n + 8 * buffers + 8,
            "exchange": 16 * n + 8 * buffers + 16,
        }

"""
What a kernel is compiled for, and where things lie in its shared memory and in the buffer of saved products. Plain
Python: the launch needs the numbers without the CuTe DSL.
"""

from dataclasses import asdict, dataclass
from functools import cached_property

MAIN_WARPS = 8
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

    @property
    def name(self) -> str:
        return "_".join(str(v) for v in asdict(self).values())

    @property
    def arguments(self) -> str:
        """Letters of the kernel's arguments, as :class:`~.driver.Kernel` takes them."""
        return {"forward": "pppppppif", "backward": "ppppppppppi", "finish": "ppi"}[self.direction]

    # Shape.

    @cached_property
    def columns(self) -> int:
        """Columns of a block."""
        return self.d // self.cluster

    @cached_property
    def threads(self) -> int:
        return 32 * (MAIN_WARPS + 1 + self.coefficient_warps)

    @property
    def moves_registers(self) -> bool:
        """Whether the helpers give registers to the main warps: that goes by groups of 4 warps."""
        return (1 + self.coefficient_warps) % 4 == 0

    @property
    def helper_registers(self) -> int:
        """As few as leave the helpers without spills; so chosen, a forward has none at all."""
        return 104 if self.direction == "forward" else 88

    @property
    def main_registers(self) -> int:
        """Together no more than all threads have at the start: 65,536 in steps of 8 for each."""
        start = 65_536 // self.threads // 8 * 8
        given = (start - self.helper_registers) * 32 * (1 + self.coefficient_warps)
        return min(240, start + given // (32 * MAIN_WARPS) // 8 * 8)

    @cached_property
    def rows(self) -> int:
        """Rows of a token in shared memory: the memory's and ``y``; backward, their gradients too."""
        if self.direction == "forward":
            return self.d_k + 1
        return self.d_k + 2 + (self.d_k if self.memory_gradient else 0)

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
        What the backward wants besides: ``S_s . Wq_j`` ``[K, K]``; ``y . Wq_j``, ``S_s . h`` and ``S_s . m`` ``[K]``;
        ``y . h`` and ``y . m``.
        """
        return round_up(self.d_k * self.d_k + 3 * self.d_k + 2, 4)

    @cached_property
    def n_parameters(self) -> int:
        """Gradients of the parameters: maps in the order of their rows, gain, biases."""
        return (self.map_rows + 1) * self.d + self.n_biases

    # Shared memory, in bytes.

    @cached_property
    def row_bytes(self) -> int:
        return 2 * self.columns + ROW_PAD

    @cached_property
    def token_bytes(self) -> int:
        return self.rows * self.row_bytes

    @cached_property
    def tile_bytes(self) -> int:
        return self.tokens * self.token_bytes

    @cached_property
    def partial(self) -> dict[str, int]:
        """Where each kind of dot product lies among those of one token, in floats, and their number ``size``."""
        K = self.d_k
        if self.direction == "backward":
            # With G the gradient of the new memory and g that of x times the gain, in two BF16 parts:
            # S_s . G_s, y . G_s, S_s . g (high, low), y . g (high, low)
            parts = {"memory": K, "y": K, "x": 2 * K, "y_x": 2}
        else:
            # S_s . S_t, Wq_j . S_s, y . S_s, y . (Wa, Wk, Wq), y . y
            parts = {"gram": K * K, "query": K * K, "memory": K, "maps": 3 * K, "norm": 1}
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += size
        offsets["size"] = round_up(at, 4)
        return offsets

    @cached_property
    def coefficient_floats(self) -> int:
        """Coefficients of one token that the second pass reads."""
        return 4 * (self.d_k + 1) if self.direction == "forward" else 8 * (self.d_k + 1)

    @cached_property
    def shared(self) -> dict[str, int]:
        """Where the parts of shared memory begin; ``size`` is their sum."""
        K, floats = self.d_k, self.partial["size"]
        # An exchange has two buffers for each warp, each with a place for every block of the cluster.
        exchange = self.coefficient_warps * 2 * self.cluster * floats if self.cluster > 1 else 0
        parts = {
            "barriers": 512,
            "gain": 4 * self.columns,
            "partial": 4 * MAIN_WARPS * self.tokens * floats,
            "total": 4 * self.coefficient_warps * floats,
            "exchange": 4 * exchange,
            "coefficients": 4 * 2 * self.tokens * self.coefficient_floats,
            "biases": 4 * self.coefficient_warps * 3 * K if self.direction == "backward" else 0,
        }
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += round_up(size, 128)
        offsets["ring"] = at
        stages = min(self.max_stages, (SHARED_BYTES - at) // self.tile_bytes)
        offsets["stages"] = stages
        offsets["size"] = at + stages * self.tile_bytes
        return offsets

    @property
    def stages(self) -> int:
        return self.shared["stages"]

    # Barriers, 8 bytes each.

    @cached_property
    def barriers(self) -> dict[str, int]:
        n = self.stages
        return {
            "full": 0,
            "empty": 8 * n,
            "partial_full": 16 * n,
            "partial_empty": 16 * n + 8,
            "coefficients_full": 16 * n + 16,
            "exchange": 16 * n + 32,
        }

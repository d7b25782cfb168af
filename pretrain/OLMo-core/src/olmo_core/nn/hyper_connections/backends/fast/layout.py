"""
What the kernel is compiled for, and where things lie in its shared memory. Plain Python: the launch needs the numbers
without the CuTe DSL.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ....ldm.backends.fast.layout import SHARED_BYTES, round_up

STREAMS = 4
TOKENS = 8
"""Tokens of a tile: the columns of an ``mma``."""
UNIT = 32
"""Columns of a main warp: 8 for each of a fragment's 4 lanes in a row."""
COEFFICIENT_WARPS = 4
"""Each has two tokens of a tile."""
LOAD_WARPS = 2
MAP_WARPS = 1
COEFFICIENT_BUFFERS = 2
"""All main warps have collapsed tile ``i - 2`` before they have all mixed tile ``i``."""
ROW_PAD = 64
"""
Bytes between the tokens of a tile. A row is a multiple of 128 bytes, and the 8 lanes of one phase of a 16-byte load read 64
bytes of each of two tokens: the padding puts them in different banks.
"""
GRAM = 12
"""Floats for the 10 products of the streams with each other: 3 for each lane of a row of the fragment."""


@dataclass(frozen=True)
class Spec:
    """One kernel: options, shape and launch numbers, all compiled in."""

    d: int
    previous: str = "sinkhorn"
    """How the last sublayer's output joins the streams: with ``H_res`` by ``sinkhorn``, or the ``identity``."""
    next: str = "sinkhorn"
    """The maps of the next sublayer: with or without (``identity``) those that ``H_res`` comes from."""
    cluster: int = 1
    """Blocks that share a token, each with ``d / cluster`` of its columns."""
    max_stages: int = 8
    """Of the ring: tiles that are loaded ahead."""

    def __post_init__(self) -> None:
        fits = self.d % (self.cluster * UNIT) == 0 and self.main_warps in (4, 8)
        known = {self.previous, self.next} <= {"sinkhorn", "identity"}
        if not (fits and known):
            raise ValueError(f"no kernel for {self}")

    @property
    def name(self) -> str:
        return "_".join(["mhc", *(str(v) for v in asdict(self).values())])

    arguments = "pppppppppppppiif"
    sources = (
        "kernels.py",
        "layout.py",
        "../../../ldm/backends/fast/pieces.py",
        "../../../ldm/backends/fast/ptx.py",
    )

    def kernel(self) -> Any:
        """The kernel for the CuTe DSL's compiler."""
        from .kernels import Forward

        return Forward(self)

    # Shape.

    @cached_property
    def columns(self) -> int:
        """Columns of a block."""
        return self.d // self.cluster

    @cached_property
    def main_warps(self) -> int:
        return self.columns // UNIT

    @cached_property
    def helper_warps(self) -> int:
        """Registers move between groups of 4 warps: one of these has nothing to do."""
        return round_up(COEFFICIENT_WARPS + LOAD_WARPS + MAP_WARPS, 4)

    @cached_property
    def threads(self) -> int:
        return 32 * (self.main_warps + self.helper_warps)

    @property
    def start_registers(self) -> int:
        """Of each thread at the start, in steps of 8."""
        return 65_536 // self.threads // 8 * 8

    @property
    def registers(self) -> dict[str, int]:
        """Of a thread by its warp's role, together no more than all have at the start."""
        helper = 56
        given = (self.start_registers - helper) * self.helper_warps // self.main_warps
        return {"main": min(240, self.start_registers + given // 8 * 8), "helper": helper}

    @cached_property
    def phi_columns(self) -> int:
        return STREAMS * (STREAMS + 2) if self.next == "sinkhorn" else 2 * STREAMS

    @cached_property
    def phi_tiles(self) -> int:
        return self.phi_columns // 8

    # Sums of one token, in floats: the products with phi, then those of the streams with each other.

    @cached_property
    def floats(self) -> int:
        return self.phi_columns + GRAM

    # A tile in shared memory, in bytes: for each token the rows of the streams and of y; then H_res and H_post.

    @cached_property
    def row_bytes(self) -> int:
        return 2 * self.columns

    @cached_property
    def token_bytes(self) -> int:
        return (STREAMS + 1) * self.row_bytes + ROW_PAD

    @cached_property
    def res_offset(self) -> int:
        return TOKENS * self.token_bytes

    @cached_property
    def post_offset(self) -> int:
        return self.res_offset + 4 * TOKENS * STREAMS * STREAMS

    @cached_property
    def tile_bytes(self) -> int:
        return round_up(self.post_offset + 4 * TOKENS * STREAMS, 128)

    @cached_property
    def token_loads(self) -> int:
        """Bytes that are copied for one token of a tile."""
        res = 4 * STREAMS * STREAMS if self.previous == "sinkhorn" else 0
        return (STREAMS + 1) * self.row_bytes + res + 4 * STREAMS

    # Shared memory, in bytes.

    @cached_property
    def exchange_bytes(self) -> int:
        """Of one tile, with a place for every block of the cluster."""
        return 4 * self.cluster * TOKENS * self.floats

    @cached_property
    def total_bytes(self) -> int:
        """
        Sums of one tile. There are two places for the tiles whose maps this block makes, so that the next one's sums do not wait
        for them, and one for the other tiles.
        """
        return 4 * TOKENS * self.floats

    @cached_property
    def shared(self) -> dict[str, int]:
        """Where the parts begin; ``size`` is their sum."""
        parts = {
            "barriers": 512,
            "gain": 4 * self.columns,
            "partial": 4 * self.main_warps * TOKENS * self.floats,
            "total": 3 * self.total_bytes,
            "exchange": 2 * self.exchange_bytes if self.cluster > 1 else 0,
            "coefficients": COEFFICIENT_BUFFERS * 4 * TOKENS * STREAMS,
        }
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += round_up(size, 128)
        stages = min(self.max_stages, (SHARED_BYTES - at) // self.tile_bytes)
        offsets["ring"] = at
        offsets["stages"] = stages
        offsets["size"] = at + stages * self.tile_bytes
        return offsets

    @property
    def stages(self) -> int:
        return self.shared["stages"]

    # Barriers, 8 bytes each.

    @cached_property
    def barriers(self) -> dict[str, int]:
        n, buffers = self.stages, COEFFICIENT_BUFFERS
        return {
            "full": 0,
            "empty": 8 * n,
            "coefficients_full": 16 * n,
            "partial_full": 16 * n + 8 * buffers,
            "partial_empty": 16 * n + 8 * buffers + 8,
            "maps_full": 16 * n + 8 * buffers + 16,
            "maps_empty": 16 * n + 8 * buffers + 32,
            "exchange": 16 * n + 8 * buffers + 48,
        }

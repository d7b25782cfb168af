"""
What a decode kernel is compiled for, where things lie in its shared memory, and how its parameters are packed. Plain Python
and torch: the launch needs these without the CuTe DSL.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from ..fast.layout import SHARED_BYTES, round_up
from ..reference import LDMParameters

Tensor = torch.Tensor

UNIT = 32
"""Columns of a warp in one step: 8 for each of a fragment's 4 lanes in a row."""


@dataclass(frozen=True)
class Spec:
    """One decode kernel: options, shape and launch numbers, all compiled in."""

    d: int
    d_k: int
    key_activation: str = "two_sigmoid"
    forget: str = "dynamic"
    cluster: int = 8
    """Blocks that share a group of tokens, each with ``d / cluster`` of their columns."""
    warps: int = 8
    """Warps of a block; each takes ``columns / (32 warps)`` steps."""
    tokens: int = 1
    """Tokens of a group, 1, 2, 4 or 8: they share one read of the maps."""
    exchange: str = "all"
    """
    How the blocks of a cluster add their dot products: ``all`` send theirs to all (one trip, ``cluster`` times the bytes), or
    to the ``owner`` of the token, which sends the coefficients back (two trips).
    """
    keep: str = "maps"
    """
    What the L2 cache is asked to keep while a model's weights stream through it: ``nothing``, the ``maps`` until the next step, or
    ``all``, the memory until the next boundary too.
    """

    @property
    def name(self) -> str:
        return "_".join(["decode", *(str(v) for v in asdict(self).values())])

    arguments = "pppppif"
    sources = ("kernels.py", "layout.py", "../fast/pieces.py", "../fast/ptx.py")

    def kernel(self) -> Any:
        """The kernel for the CuTe DSL's compiler."""
        from .kernels import Decode

        return Decode(self)

    def __post_init__(self) -> None:
        fits = self.d % (self.cluster * self.warps * UNIT) == 0
        if not (fits and self.d_k in (4, 8, 16) and self.tokens in (1, 2, 4, 8)):
            raise ValueError(f"no decode kernel for {self}")

    @cached_property
    def columns(self) -> int:
        """Columns of a block."""
        return self.d // self.cluster

    @cached_property
    def steps(self) -> int:
        return self.columns // (self.warps * UNIT)

    @cached_property
    def threads(self) -> int:
        return 32 * self.warps

    @cached_property
    def blocks_per_multiprocessor(self) -> int:
        """What the compiler keeps room for in registers: 512 threads of 128, if shared memory has room for as many."""
        return max(1, min(512 // self.threads, SHARED_BYTES // self.shared["size"]))

    @cached_property
    def n_forget(self) -> int:
        return self.d_k if self.forget == "dynamic" else 0

    # The packed parameters: fragments of the maps, gain, biases.

    @cached_property
    def parts(self) -> list[tuple[tuple[str, int, bool] | None, ...]]:
        """
        The fragments ``a`` of the maps in one half of a step, each of four groups of 4 rows: (map, first row of it, whether the
        low part) or nothing. The low part of an FP32 map is what its BF16 rounding leaves; the two hold 2^-17.
        """

        def rows(name: str, first: int, low: bool):
            if name == "forget" and not self.n_forget:
                return None
            return (name, first, low)

        if self.d_k == 4:
            return [
                (rows("forget", 0, low), rows("key", 0, low), rows("query", 0, low), None)
                for low in (False, True)
            ]
        if self.d_k == 8:
            gates = [
                (*(rows("forget", f, low) for f in (0, 4)), *(rows("key", f, low) for f in (0, 4)))
                for low in (False, True)
            ]
            query = [rows("query", f, low) for low in (False, True) for f in (0, 4)]
            return [*gates, tuple(query)]
        return [
            tuple(rows(name, f, low) for f in (0, 4, 8, 12))
            for name in ("forget", "key", "query")
            if name != "forget" or self.n_forget
            for low in (False, True)
        ]

    @cached_property
    def unit_bytes(self) -> int:
        """Fragments of 32 columns: 16 bytes for each lane, part and half of a step."""
        return len(self.parts) * 2 * 512

    @cached_property
    def gain_offset(self) -> int:
        return self.d // UNIT * self.unit_bytes

    @cached_property
    def bias_offset(self) -> int:
        return self.gain_offset + 4 * self.d

    @cached_property
    def packed_floats(self) -> int:
        return self.bias_offset // 4 + round_up(3 * self.d_k, 4)

    # Dot products of one token, in floats.

    @cached_property
    def partial(self) -> dict[str, int]:
        """``S_s . S_t``, ``Wq_j . S_s``, ``y . S_s``, ``y . (Wa, Wk, Wq)``, ``y . y``, and their number ``size``."""
        K = self.d_k
        parts = {"gram": K * K, "query": K * K, "memory": K, "maps": 3 * K, "norm": 1}
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += size
        offsets["size"] = round_up(at, 4)
        return offsets

    # Shared memory, in bytes.

    @cached_property
    def gate_bytes(self) -> int:
        """Forget gate and key of a token's slots."""
        return 8 * self.d_k

    @cached_property
    def read_bytes(self) -> int:
        """Weights of a token's read: of its slots, and of ``y``."""
        return 4 * self.d_k + 16

    @cached_property
    def owned(self) -> int:
        """Tokens of a group whose coefficients one block works out."""
        return self.tokens if self.exchange == "all" else -(-self.tokens // self.cluster)

    @cached_property
    def shared(self) -> dict[str, int]:
        """Where the parts begin; ``size`` is their sum."""
        floats = self.partial["size"]
        parts = {
            "barriers": 3 * 8 * self.tokens,
            "partial": 4 * self.warps * self.tokens * floats,
            "exchange": 4 * self.cluster * self.owned * floats if self.cluster > 1 else 0,
            "gates": self.tokens * self.gate_bytes,
            "reads": self.tokens * self.read_bytes,
            "sent": self.tokens * (self.gate_bytes + self.read_bytes),
        }
        offsets, at = {}, 0
        for name, size in parts.items():
            offsets[name] = at
            at += round_up(size, 128)
        offsets["size"] = at
        return offsets


def pack(spec: Spec, parameters: LDMParameters, gain: Tensor) -> Tensor:
    """
    A boundary's parameters as the kernel reads them, ``[packed_floats]``, FP32.

    :param gain: The gain of the norm that follows, ``[D]``.
    """
    K, d = spec.d_k, spec.d
    maps = {"forget": parameters.w_forget, "key": parameters.w_key, "query": parameters.w_query}
    rows: dict[tuple[str, bool], Tensor] = {}
    for name, w in maps.items():
        if w is not None:
            high = w.t().float().bfloat16()
            rows[name, False] = high
            rows[name, True] = (w.t().float() - high.float()).bfloat16()
    zeros = torch.zeros(4, d, dtype=torch.bfloat16, device=gain.device)
    tiles = torch.stack(
        [
            torch.cat([zeros if r is None else rows[r[0], r[2]][r[1] : r[1] + 4] for r in part])
            for part in spec.parts
        ]
    )
    # [part, rows 0-7 or 8-15, g, unit, c, half of the step, which pair of it, number of the pair]; registers of a lane: both
    # rows of the first pair, both rows of the second.
    tiles = tiles.view(len(spec.parts), 2, 8, d // UNIT, 4, 2, 2, 2)
    fragments = tiles.permute(3, 0, 5, 2, 4, 6, 1, 7).contiguous().view(-1).view(torch.float32)
    biases = torch.zeros(round_up(3 * K, 4), dtype=torch.float32, device=gain.device)
    for i, b in enumerate((parameters.b_query, parameters.b_key, parameters.b_forget)):
        if b is not None:
            biases[i * K : (i + 1) * K] = b
    return torch.cat([fragments, gain.float(), biases])

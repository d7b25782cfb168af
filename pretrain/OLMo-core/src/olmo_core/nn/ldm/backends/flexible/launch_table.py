"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

Provenance: derived, untimed. One token's row ``[K, D]`` is spread over the threads of a program; the rule keeps the
memory's values of one thread at 64 forward, and at 32 backward, where the memory and its gradient are both live.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    tokens: int
    """Tokens of a program's tile, a power of two."""
    warps: int
    stages: int = 1
    """Software pipelining of the loop over tokens; 1 is none."""
    programs_per_sm: int = 2
    """Programs of a backward for each multiprocessor; each leaves one row of partial sums."""
    registers: int | None = None
    """A cap on the registers of a thread, where fewer with some spills beat fewer resident programs."""
    reload: bool = False
    """Load the memory a second time in the backward, from L1, instead of keeping it in registers."""
    width: int = 0
    """Columns of a program's tile; 0 is the whole width."""


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def vector(launch: Launch, d_model: int) -> int:
    """Elements of one load of a thread (at most 8), so that the program's warps span ``tokens`` rows of the width."""
    return max(1, min(8, next_power_of_2(d_model) * launch.tokens // (32 * launch.warps)))


def _warps(d_model: int, values: int, values_per_thread: int) -> int:
    return max(1, min(16, next_power_of_2(d_model) * values // (32 * values_per_thread)))


INTERPRETER = Launch(8, 4)
"""On a CPU: few programs, since the interpreter's time goes by operations."""


def forward_launch(d_model: int, d_k: int, device: str = "cuda") -> Launch:
    if device != "cuda":
        return INTERPRETER
    return FORWARD.get((next_power_of_2(d_model), d_k)) or Launch(1, _warps(d_model, d_k, 64))


def backward_launch(d_model: int, d_k: int, device: str = "cuda") -> Launch:
    if device != "cuda":
        return INTERPRETER
    warps = _warps(d_model, d_k, 32)
    # 16 warps of 128 registers fill the register file of a multiprocessor.
    return BACKWARD.get((next_power_of_2(d_model), d_k)) or Launch(
        1, warps, programs_per_sm=16 // warps, registers=128
    )


def first_launch(d_model: int, d_k: int, device: str = "cuda") -> Launch:
    del d_k
    if device != "cuda":
        return INTERPRETER
    return Launch(1, _warps(d_model, 1, 8), programs_per_sm=4)


def map_gradient_launch(d_model: int) -> Launch:
    """``tokens`` is the depth of one step of the product, ``width`` its rows."""
    return Launch(64, 4, stages=3, width=64 if d_model <= 512 else 128)


FORWARD: dict[tuple[int, int], Launch] = {}
"""By (power of two above D, K)."""
BACKWARD: dict[tuple[int, int], Launch] = {}

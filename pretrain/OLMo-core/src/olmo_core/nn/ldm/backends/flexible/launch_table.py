"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

One token's row ``[K, D]`` is spread over the threads of a program. Few warps with many values each win: a sum over the
width costs shuffles for each warp and a barrier if there are several, and every warp has its own copies of the
coefficients.

Provenance of the timed rows: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30, 16384 tokens in BF16,
``python -m olmo_core.nn.ldm.backends.flexible.tune --quick``, best of 4 candidates forward and 7 backward, before the
parameters were packed into one buffer. GB/s counts 2K + 2 and 3K + 3 vectors for each token. The other rows follow the
timed ones by values in a thread (128 forward; 64, at K = 4 32, backward): derived, untimed.
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
    return FORWARD.get((next_power_of_2(d_model), d_k)) or Launch(1, _warps(d_model, d_k, 128))


def backward_launch(d_model: int, d_k: int, device: str = "cuda") -> Launch:
    if device != "cuda":
        return INTERPRETER
    warps = _warps(d_model, d_k, 64)
    # 8 warps of 255 registers fill the register file of a multiprocessor, or 16 of 128.
    return BACKWARD.get((next_power_of_2(d_model), d_k)) or Launch(
        1,
        warps,
        programs_per_sm=max(1, 8 // warps),
        registers=128 if warps > 8 else None,
        reload=True,
    )


def first_launch(d_model: int, d_k: int, device: str = "cuda") -> Launch:
    del d_k
    if device != "cuda":
        return INTERPRETER
    return Launch(1, _warps(d_model, 1, 8), programs_per_sm=4)


def map_gradient_launch(d_model: int) -> Launch:
    """``tokens`` is the depth of one step of the product, ``width`` its rows."""
    return Launch(64, 4, stages=3, width=64 if d_model <= 512 else 128)


FORWARD: dict[tuple[int, int], Launch] = {
    (512, 4): Launch(1, 1),
    (512, 8): Launch(1, 1),
    (512, 16): Launch(1, 2),
    (1024, 4): Launch(1, 1),  # timed: 121.0 us, 2774 GB/s
    (1024, 8): Launch(1, 2),  # timed: 261.3 us, 2312 GB/s
    (1024, 16): Launch(1, 4),
    (2048, 4): Launch(1, 2),
    (2048, 8): Launch(1, 4),  # timed: 574.7 us, 2102 GB/s
    (2048, 16): Launch(1, 8),
}
"""By (power of two above D, K)."""
BACKWARD: dict[tuple[int, int], Launch] = {
    (512, 4): Launch(1, 2, programs_per_sm=8, registers=128, reload=True),
    (512, 8): Launch(1, 2, programs_per_sm=4, reload=True),
    (512, 16): Launch(1, 4, programs_per_sm=2, reload=True),
    (1024, 4): Launch(1, 4, programs_per_sm=4, registers=128, reload=True),  # 252.4 us, 1994 GB/s
    (1024, 8): Launch(1, 4, programs_per_sm=2, reload=True),  # timed: 490.8 us, 1846 GB/s
    (1024, 16): Launch(1, 8, programs_per_sm=1, reload=True),
    (2048, 4): Launch(1, 8, programs_per_sm=2, registers=128, reload=True),
    (2048, 8): Launch(1, 8, programs_per_sm=1, reload=True),  # timed: 1070.7 us, 1692 GB/s
    # 512 threads have 128 registers at most.
    (2048, 16): Launch(1, 16, programs_per_sm=1, registers=128, reload=True),
}

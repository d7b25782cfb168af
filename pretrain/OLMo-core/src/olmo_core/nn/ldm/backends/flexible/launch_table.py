"""
Launch numbers of the ``flexible`` kernels: frozen data, no tuning at run time.

One token's row ``[K, D]`` is spread over the threads of a program. Few warps with many values each win: a sum over the
width costs shuffles for each warp and a barrier if there are several, and every warp has its own copies of the
coefficients.

Provenance of the rows: NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 2026-11-30, commit 4e08084, 16,384 tokens in BF16,
``python -m olmo_core.nn.ldm.backends.flexible.tune``; each the best of about 6 candidates by CUDA graph replay. GB/s counts
2K + 2 and 3K + 3 vectors for each token, and the floor is those bytes at the 4.24 TB/s of a device copy in the same run. All
candidates and the times at 65,536 tokens are in ``paper-experiments/throughput/results``. Shapes without a row follow the rule
of values in a thread (128 forward; 64, at K = 4 32, backward): derived, untimed.
"""

from dataclasses import dataclass

from olmo_core.nn.depth.triton_ops import next_power_of_2


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
    (512, 4): Launch(2, 1),  # 66 us, 2556 GB/s, 1.66 x floor
    (512, 8): Launch(1, 1, registers=168),  # 140 us, 2163 GB/s, 1.96 x floor
    (512, 16): Launch(1, 2),  # 303 us, 1885 GB/s, 2.25 x floor
    (1024, 4): Launch(1, 1),  # 123 us, 2721 GB/s, 1.56 x floor
    (1024, 8): Launch(1, 2),  # 264 us, 2289 GB/s, 1.85 x floor
    (1024, 16): Launch(1, 4, registers=168),  # 634 us, 1798 GB/s, 2.36 x floor
    (2048, 4): Launch(1, 2),  # 256 us, 2619 GB/s, 1.62 x floor
    (2048, 8): Launch(1, 4, registers=168),  # 569 us, 2123 GB/s, 2.00 x floor
    (2048, 16): Launch(1, 8),  # 1406 us, 1622 GB/s, 2.62 x floor
}
"""By (power of two above D, K)."""
BACKWARD: dict[tuple[int, int], Launch] = {
    (512, 4): Launch(1, 1, programs_per_sm=8),  # 130 us, 1932 GB/s, 2.20 x floor
    (512, 8): Launch(1, 2, programs_per_sm=4),  # 243 us, 1866 GB/s, 2.27 x floor
    # At K = 16 and 65,536 tokens the launches without a reload, 6% faster here, took 12.0 and 7.7 times the floor.
    (512, 16): Launch(1, 4, reload=True),  # 602 us, 1422 GB/s, 2.99 x floor
    (1024, 4): Launch(1, 2, programs_per_sm=4),  # 237 us, 2126 GB/s, 2.00 x floor
    (1024, 8): Launch(1, 4),  # 488 us, 1854 GB/s, 2.29 x floor
    (1024, 16): Launch(1, 8, programs_per_sm=1, reload=True),  # 1354 us, 1264 GB/s, 3.36 x floor
    (2048, 4): Launch(1, 8, registers=128, reload=True),  # 505 us, 1994 GB/s, 2.13 x floor
    (2048, 8): Launch(1, 4, reload=True),  # 1045 us, 1733 GB/s, 2.45 x floor
    (2048, 16): Launch(1, 8, programs_per_sm=1, reload=True),  # 3198 us, 1070 GB/s, 3.97 x floor
}

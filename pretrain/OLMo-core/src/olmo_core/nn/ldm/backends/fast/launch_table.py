"""
Launch numbers of the ``fast`` kernels: frozen data, no tuning at run time.

Registers decide the columns of a block. The forward keeps the maps as BF16 pairs (high and low part) in the registers of 8
warps, 12 K bytes for each column; the backward keeps them in FP32, and beside them the sums of their gradients. Wider models
share a token among the blocks of a cluster.

Provenance of the rows: NVIDIA H200, torch 2.11.0+cu130, 2026-11-30, commit 776bd00 with this backend, 16,384 tokens,
``python -m olmo_core.nn.ldm.backends.fast.tune``; each the best of up to 5 candidates by CUDA graph replay. GB/s counts 2K + 2 and
3K + 3 vectors for each token; the floor is those bytes at the 4.25 TB/s of a copy kernel in the same run. All candidates are in
``paper-experiments/throughput/results``.

Rows are by (architecture, direction, d, K). A shape without a row follows the rule and is untimed: ``auto`` does not take it.
"""

from dataclasses import dataclass

from .layout import Spec

SLOTS = (4, 8, 16)
MAX_CLUSTER = 8
"""The largest cluster that every device takes."""
COLUMNS = {
    "forward": {4: 1024, 8: 1024, 16: 512},
    "backward": {4: 1024, 8: 512},
}
"""The most columns of a block, by K. The backward of K = 16 has no room: it is the flexible backend's."""


@dataclass(frozen=True)
class Launch:
    cluster: int
    tokens: int
    coefficient_warps: int = 3
    timed: bool = False


TABLE: dict[tuple[str, str, int, int], Launch] = {
    # 170.7 us, 3539 GB/s, 1.2 x floor
    ("sm_90a", "forward", 1024, 8): Launch(2, 4, 3, timed=True),
    # 302.3 us, 2997 GB/s, 1.42 x floor
    ("sm_90a", "backward", 1024, 8): Launch(2, 2, 3, timed=True),
    # 335.6 us, 3600 GB/s, 1.18 x floor
    ("sm_90a", "forward", 2048, 8): Launch(2, 2, 3, timed=True),
    # 632.6 us, 2864 GB/s, 1.48 x floor
    ("sm_90a", "backward", 2048, 8): Launch(4, 2, 3, timed=True),
    # 101.5 us, 3305 GB/s, 1.29 x floor
    ("sm_90a", "forward", 1024, 4): Launch(1, 2, 3, timed=True),
    # 169.4 us, 2971 GB/s, 1.43 x floor
    ("sm_90a", "backward", 1024, 4): Launch(1, 2, 3, timed=True),
    # 188.1 us, 3568 GB/s, 1.19 x floor
    ("sm_90a", "forward", 2048, 4): Launch(2, 2, 2, timed=True),
    # 297.3 us, 3386 GB/s, 1.26 x floor
    ("sm_90a", "backward", 2048, 4): Launch(2, 2, 3, timed=True),
    # 92.5 us, 3263 GB/s, 1.3 x floor
    ("sm_90a", "forward", 512, 8): Launch(1, 4, 3, timed=True),
    # 171.1 us, 2647 GB/s, 1.61 x floor
    ("sm_90a", "backward", 512, 8): Launch(1, 2, 3, timed=True),
}


def rule(direction: str, d: int, d_k: int) -> Launch | None:
    """``None`` if the shape has no launch."""
    limit = COLUMNS[direction].get(d_k)
    if limit is None:
        return None
    cluster = 1
    while cluster <= MAX_CLUSTER:
        columns = d // cluster
        unit = 128 if direction == "backward" and columns > 512 else 64
        if d % cluster == 0 and columns <= limit and columns % unit == 0:
            break
        cluster *= 2
    else:
        return None
    # About 36 KB for a tile: enough for the tensor cores, and several tiles in the ring.
    rows = d_k + 1 if direction == "forward" else 2 * d_k + 2
    tokens = 4
    while tokens > max(1, 8 // d_k) and tokens * rows * columns * 2 > 40_000:
        tokens //= 2
    if direction == "forward" and d_k == 16:
        tokens = 1
    return Launch(cluster, tokens)


def launch(architecture: str, direction: str, d: int, d_k: int) -> Launch | None:
    return TABLE.get((architecture, direction, d, d_k)) or rule(direction, d, d_k)


def candidates(architecture: str, direction: str, d: int, d_k: int) -> list[Launch]:
    """What ``tune`` tries: the launch of the shape, other tiles, one more split of the width."""
    first = launch(architecture, direction, d, d_k)
    if first is None:
        return []
    c, t, w = first.cluster, first.tokens, first.coefficient_warps
    out = [first]
    others = [(c, 2 * t, w), (c, t // 2, w), (2 * c, 2 * t, w)]
    if d_k == 4:
        # Tokens follow each other fast, so their coefficients need more warps; the maps leave the registers for it.
        others += [(c, 2 * t, 7)]
    for cluster, tokens, warps in others:
        new = Launch(cluster, tokens, warps)
        columns = d // cluster
        unit = 128 if direction == "backward" and columns > 512 else 64
        whole = d % cluster == 0 and columns % unit == 0 and cluster <= MAX_CLUSTER
        if (
            whole
            and 8 // d_k <= tokens <= 4
            and tokens
            and spec_of(new, direction, d, d_k).stages > 2
        ):
            out.append(new)
    return out


def spec_of(
    launch: Launch,
    direction: str,
    d: int,
    d_k: int,
    key_activation: str = "two_sigmoid",
    forget: str = "dynamic",
    memory_gradient: bool = True,
) -> Spec:
    return Spec(
        direction,
        d,
        d_k,
        key_activation,
        forget,
        launch.cluster,
        launch.tokens,
        launch.coefficient_warps,
        extra=direction == "forward" and rule("backward", d, d_k) is not None,
        memory_gradient=memory_gradient,
    )


def spec(
    architecture: str,
    direction: str,
    d: int,
    d_k: int,
    key_activation: str,
    forget: str,
    memory_gradient: bool = True,
) -> Spec | None:
    """The kernel of one direction (``forward``, ``backward``, ``finish``); ``None`` if the shape has none."""
    if direction == "finish":
        # Only the number of parameters counts.
        return Spec("finish", d, d_k, forget="none" if forget == "static" else forget)
    found = launch(architecture, direction, d, d_k)
    if found is None:
        return None
    return spec_of(found, direction, d, d_k, key_activation, forget, memory_gradient)


def specs(architecture: str, d: int, d_k: int, key_activation: str, forget: str) -> list[Spec]:
    """All kernels that a boundary of these options needs; empty if the shape has none."""
    wanted = [
        spec(architecture, "forward", d, d_k, key_activation, forget),
        spec(architecture, "backward", d, d_k, key_activation, forget),
        spec(architecture, "backward", d, d_k, key_activation, forget, memory_gradient=False),
    ]
    if wanted[0] is None:
        return []
    if wanted[1] is not None:
        wanted.append(spec(architecture, "finish", d, d_k, key_activation, forget))
    return [s for s in wanted if s is not None]


def timed(architecture: str, d: int, d_k: int) -> bool:
    rows = [TABLE.get((architecture, direction, d, d_k)) for direction in ("forward", "backward")]
    return all(row is not None and row.timed for row in rows)


def max_width(d_k: int) -> int:
    return MAX_CLUSTER * COLUMNS["forward"][d_k]

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

from dataclasses import dataclass, replace
from typing import Any

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
    dots_warps: int = 0


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
    # 161.4 us, 3118 GB/s, 1.36 x floor, commit fe6ada2
    ("sm_90a", "backward", 1024, 4): Launch(1, 2, 3, timed=True, dots_warps=4),
    # 188.1 us, 3568 GB/s, 1.19 x floor
    ("sm_90a", "forward", 2048, 4): Launch(2, 2, 2, timed=True),
    # 281.2 us, 3580 GB/s, 1.19 x floor, commit fe6ada2
    ("sm_90a", "backward", 2048, 4): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 92.5 us, 3263 GB/s, 1.3 x floor
    ("sm_90a", "forward", 512, 8): Launch(1, 4, 3, timed=True),
    # 171.1 us, 2647 GB/s, 1.61 x floor
    ("sm_90a", "backward", 512, 8): Launch(1, 2, 3, timed=True),
}

WINDOWS: dict[tuple[str, str, int, int, int], Launch] = {
    # 106.3 us, 3157 GB/s, 1.35 x floor, commit 2ea8dad; 138.1 us with four warps for the dot products
    ("sm_90a", "forward", 1024, 8, 0): Launch(2, 4, 7, timed=True),
    # 115.5 us, 3195 GB/s, 1.34 x floor
    ("sm_90a", "forward", 1024, 8, 1): Launch(2, 4, 7, timed=True),
    # 139.6 us, 2884 GB/s, 1.48 x floor
    ("sm_90a", "forward", 1024, 8, 2): Launch(2, 4, 7, timed=True),
    # 192.9 us, 3653 GB/s, 1.17 x floor
    ("sm_90a", "forward", 1024, 8, 3): Launch(2, 4, 7, timed=True),
    # 304.0 us, 3091 GB/s, 1.38 x floor
    ("sm_90a", "backward", 1024, 8, 1): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 315.2 us, 3087 GB/s, 1.38 x floor
    ("sm_90a", "backward", 1024, 8, 2): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 321.9 us, 3127 GB/s, 1.36 x floor
    ("sm_90a", "backward", 1024, 8, 3): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 65.4 us, 3080 GB/s, 1.38 x floor
    ("sm_90a", "forward", 1024, 4, 0): Launch(1, 4, 3, timed=True, dots_warps=4),
    # 71.9 us, 3268 GB/s, 1.3 x floor
    ("sm_90a", "forward", 1024, 4, 1): Launch(1, 4, 3, timed=True, dots_warps=4),
    # 79.7 us, 3366 GB/s, 1.27 x floor
    ("sm_90a", "forward", 1024, 4, 2): Launch(1, 2, 3, timed=True),
    # 119.9 us, 3637 GB/s, 1.17 x floor
    ("sm_90a", "forward", 1024, 4, 3): Launch(1, 2, 3, timed=True),
    # 165.4 us, 3246 GB/s, 1.31 x floor
    ("sm_90a", "backward", 1024, 4, 1): Launch(1, 2, 3, timed=True, dots_warps=4),
    # 173.2 us, 3293 GB/s, 1.29 x floor
    ("sm_90a", "backward", 1024, 4, 2): Launch(1, 2, 3, timed=True, dots_warps=4),
    # 178.1 us, 3391 GB/s, 1.25 x floor
    ("sm_90a", "backward", 1024, 4, 3): Launch(1, 2, 3, timed=True),
    # 205.6 us, 3591 GB/s, 1.19 x floor
    ("sm_90a", "forward", 2048, 8, 1): Launch(2, 2, 3, timed=True),
    # 210.5 us, 3826 GB/s, 1.12 x floor
    ("sm_90a", "forward", 2048, 8, 2): Launch(2, 2, 3, timed=True),
    # 408.9 us, 3446 GB/s, 1.24 x floor
    ("sm_90a", "forward", 2048, 8, 3): Launch(2, 2, 3, timed=True),
    # 627.3 us, 2995 GB/s, 1.43 x floor
    ("sm_90a", "backward", 2048, 8, 1): Launch(4, 2, 3, timed=True),
    # 643.3 us, 3025 GB/s, 1.41 x floor
    ("sm_90a", "backward", 2048, 8, 2): Launch(4, 2, 3, timed=True, dots_warps=4),
    # 656.2 us, 3068 GB/s, 1.39 x floor
    ("sm_90a", "backward", 2048, 8, 3): Launch(4, 2, 3, timed=True, dots_warps=4),
    # 114.5 us, 3516 GB/s, 1.21 x floor
    ("sm_90a", "forward", 2048, 4, 0): Launch(2, 4, 3, timed=True, dots_warps=4),
    # 128.8 us, 3648 GB/s, 1.17 x floor
    ("sm_90a", "forward", 2048, 4, 1): Launch(2, 4, 3, timed=True, dots_warps=4),
    # 150.1 us, 3577 GB/s, 1.19 x floor
    ("sm_90a", "forward", 2048, 4, 2): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 224.8 us, 3880 GB/s, 1.1 x floor
    ("sm_90a", "forward", 2048, 4, 3): Launch(2, 2, 3, timed=True),
    # 290.6 us, 3695 GB/s, 1.15 x floor
    ("sm_90a", "backward", 2048, 4, 1): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 302.0 us, 3777 GB/s, 1.13 x floor
    ("sm_90a", "backward", 2048, 4, 2): Launch(2, 2, 3, timed=True, dots_warps=4),
    # 313.8 us, 3850 GB/s, 1.11 x floor
    ("sm_90a", "backward", 2048, 4, 3): Launch(2, 2, 3, timed=True),
}
"""
The same in a window of 4, by the number of earlier outputs too; 0 earlier ones: the window's first boundary, where it does not
store the memory. Commit fe6ada2, the same machine and command with ``--only window`` and ``--only dots``; the forward of the
last boundary, 3, stores the memory. Without a row: the launch of the recurrent form with as many tokens in a tile as leave
:data:`MIN_STAGES` tiles in the ring; untimed.
"""
BEST_WINDOW = 4
MIN_STAGES = 3
MAX_WINDOW = {4: 4, 8: 8, 16: 1}
"""The longest window by K: the outputs of the tokens of a memory tile are one tile of 8 rows."""


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


def launch(
    architecture: str, direction: str, d: int, d_k: int, earlier: int = 0, writes: bool = True
) -> Launch | None:
    found = TABLE.get((architecture, direction, d, d_k)) or rule(direction, d, d_k)
    if found is None:
        return None
    if not earlier:
        first = None if writes else WINDOWS.get((architecture, direction, d, d_k, 0))
        return first or found
    if earlier >= MAX_WINDOW[d_k]:
        return None
    row = WINDOWS.get((architecture, direction, d, d_k, earlier))
    if row is not None:
        return row
    tokens = found.tokens
    while (
        tokens > max(1, 8 // d_k)
        and spec_of(replace(found, tokens=tokens), direction, d, d_k, earlier=earlier).stages
        < MIN_STAGES
    ):
        tokens //= 2
    return replace(found, tokens=tokens, timed=False)


def window(d: int, d_k: int, wanted: int) -> int:
    """
    The window that the kernels run when ``wanted`` is asked for: it, or 1 if the shape has no kernels for it; for 0 the one that was
    measured to be best.
    """
    kernels = rule("forward", d, d_k) is not None and rule("backward", d, d_k) is not None
    wanted = wanted or BEST_WINDOW
    return wanted if kernels and wanted <= MAX_WINDOW[d_k] else 1


def _runs(launch: Launch, direction: str, d: int, d_k: int, earlier: int) -> bool:
    """Whether a candidate divides the width, fits into shared memory, and has a tile to copy while two are in use."""
    columns = d // launch.cluster
    unit = 128 if direction == "backward" and columns > 512 else 64
    if d % launch.cluster or columns % unit or launch.cluster > MAX_CLUSTER:
        return False
    if not max(1, 8 // d_k) <= launch.tokens <= 4:
        return False
    # Four warps hold the maps of all columns: 24 (K = 8) or 16 (K = 4) registers for every 128.
    if launch.dots_warps and direction == "forward" and columns > 4096 // d_k:
        return False
    return spec_of(launch, direction, d, d_k, earlier=earlier).stages > 2


def dots_candidates(
    architecture: str, direction: str, d: int, d_k: int, earlier: int = 0
) -> list[Launch]:
    """Launches whose dot products have warps of their own."""
    first = launch(architecture, direction, d, d_k, earlier)
    if first is None or d_k == 16:
        return []
    c, t = first.cluster, first.tokens
    shapes = [(c, t)]
    if direction == "forward":
        shapes += [(c, 2 * t), (2 * c, 2 * t)]
    found = [Launch(cluster, tokens, 3, dots_warps=4) for cluster, tokens in shapes]
    found = [f for f in found if _runs(f, direction, d, d_k, earlier)][:2]
    if direction == "forward" and not earlier and t == 4:
        # More warps for the coefficients gave 24% in a window's second boundary; not tried in its first.
        found.append(Launch(c, t, 7))
    return found


MANY_COEFFICIENT_WARPS = 7
"""
In the forward of a window's first three boundaries at d = 1024, K = 8, 18% to 24% faster than three; slower in every backward at K = 8
(4% to 7%), and with tiles of two tokens (d = 2048, 5% to 22%).
"""


def coefficients_candidates(
    architecture: str, direction: str, d: int, d_k: int, earlier: int = 0, writes: bool = True
) -> list[Launch]:
    """
    The launch of the shape with more warps for the coefficients: those that do not work out a token's ask for what the forward saved
    of the next tokens. Where the dot products had warps of their own, without these too. Where the launch has so many already,
    tiles of half the tokens, of which the ring holds twice as many.
    """
    first = launch(architecture, direction, d, d_k, earlier, writes)
    if first is None or d_k == 16:
        return []
    tokens = first.tokens
    if first.coefficient_warps == MANY_COEFFICIENT_WARPS:
        tokens //= 2
    new = replace(
        first,
        tokens=tokens,
        coefficient_warps=MANY_COEFFICIENT_WARPS,
        dots_warps=0,
        timed=False,
    )
    return [new] if _runs(new, direction, d, d_k, earlier) else []


def candidates(
    architecture: str, direction: str, d: int, d_k: int, earlier: int = 0
) -> list[Launch]:
    """What ``tune`` tries: the launch of the shape, other tiles, one more split of the width, other warps."""
    first = launch(architecture, direction, d, d_k, earlier)
    if first is None:
        return []
    c, t, w = first.cluster, first.tokens, first.coefficient_warps
    if not earlier:
        others = [(c, 2 * t, w), (c, t // 2, w), (2 * c, 2 * t, w)]
        # K = 4: tokens follow each other fast, so their coefficients need more warps; the maps leave the registers for it.
        others += [(c, 2 * t, 7)] if d_k == 4 else []
    elif direction == "forward":
        # The rows of the earlier outputs make tiles larger, their products more work for the coefficients' warps.
        others = [(c, t // 2, w), (2 * c, 2 * t, w), (2 * c, t, w)]
        others += [(c, t, 7)] if t == 4 else [(c, t, 3)] if w < 3 else []
    else:
        # None of the others was faster in the recurrent form.
        others = []
    new = [Launch(*numbers) for numbers in others]
    new = [n for n in new if _runs(n, direction, d, d_k, earlier)]
    return [first, *new, *dots_candidates(architecture, direction, d, d_k, earlier)]


def spec_of(
    launch: Launch,
    direction: str,
    d: int,
    d_k: int,
    key_activation: str = "two_sigmoid",
    forget: str = "dynamic",
    memory_gradient: bool = True,
    saves: bool = True,
    earlier: int = 0,
    writes: bool = True,
    stored8: bool = False,
    gather: str = "",
    window: int = 0,
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
        extra=saves and direction == "forward" and rule("backward", d, d_k) is not None,
        memory_gradient=memory_gradient,
        saves=saves,
        earlier=earlier,
        writes=writes,
        stored8=stored8,
        gather=gather,
        window=window,
        dots_warps=launch.dots_warps,
    )


def spec(
    architecture: str,
    direction: str,
    d: int,
    d_k: int,
    key_activation: str,
    forget: str,
    **values: Any,
) -> Spec | None:
    """
    The kernel of one direction (``forward``, ``backward``, ``finish``); ``None`` if the shape has none.

    :param values: As :func:`spec_of` takes them after ``forget``.
    """
    if direction == "finish":
        # Only the number of parameters counts.
        return Spec("finish", d, d_k, forget="none" if forget == "static" else forget)
    found = launch(
        architecture, direction, d, d_k, values.get("earlier", 0), values.get("writes", True)
    )
    if found is None:
        return None
    if values.get("gather"):
        dots_warps = WHOLE_DOTS_WARPS.get(values["gather"], found.dots_warps)
        found = replace(found, dots_warps=dots_warps, timed=False)
    return spec_of(found, direction, d, d_k, key_activation, forget, **values)


def specs(
    architecture: str,
    d: int,
    d_k: int,
    key_activation: str,
    forget: str,
    window: int = 1,
    stored8: bool = False,
    gather: bool | None = None,
) -> list[Spec]:
    """
    All kernels that the boundaries of these options need; empty if the shape has none.

    :param gather: Whether whole windows have a backward of their own; ``None``: what :data:`GATHER` says.
    """
    if rule("forward", d, d_k) is None:
        return []
    wanted: list[Spec | None] = []
    for earlier in range(window):
        values: dict[str, Any] = {"earlier": earlier, "writes": earlier == window - 1}
        values["stored8"] = stored8
        wanted.append(spec(architecture, "forward", d, d_k, key_activation, forget, **values))
        for memory_gradient in (True, False):
            values = {"memory_gradient": memory_gradient, "earlier": earlier, "stored8": stored8}
            wanted.append(spec(architecture, "backward", d, d_k, key_activation, forget, **values))
    if window > 1 and (gathers(d, d_k) if gather is None else gather):
        for earlier in range(window):
            place = "end" if earlier == window - 1 else "middle" if earlier else "first"
            values = {"earlier": earlier, "stored8": stored8, "gather": place, "window": window}
            wanted.append(spec(architecture, "backward", d, d_k, key_activation, forget, **values))
    if window == 1:
        wanted.append(spec(architecture, "forward", d, d_k, key_activation, forget, saves=False))
    if rule("backward", d, d_k) is not None:
        wanted.append(spec(architecture, "finish", d, d_k, key_activation, forget))
    return [s for s in wanted if s is not None]


GATHER: set[tuple[int, int]] = set()
"""``d`` and K whose whole windows have a backward of their own: where it was measured to be faster. It has run on no GPU yet."""


WHOLE_DOTS_WARPS = {"end": 0, "first": 0}
"""By place, if not as in other windows: with four the main warps have too few registers for what these keep (104 bytes of a stack at K = 8; with none 16 and 56)."""


def gathers(d: int, d_k: int) -> bool:
    return (d, d_k) in GATHER


def timed(architecture: str, d: int, d_k: int) -> bool:
    rows = [TABLE.get((architecture, direction, d, d_k)) for direction in ("forward", "backward")]
    return all(row is not None and row.timed for row in rows)


def max_width(d_k: int) -> int:
    return MAX_CLUSTER * COLUMNS["forward"][d_k]

"""
Launch numbers of the decode kernel, and where prefill takes over: frozen data, no tuning at run time.

Few tokens: a cluster for each, so that many multiprocessors load its maps (12 K bytes for a column) at once. More tokens: groups
of up to 8, which read the maps once. Many: the persistent forward kernel of :mod:`..fast`, which keeps the maps in registers.

Rows are by (architecture, d, K, bucket), the bucket the largest number of tokens that the row is for. A shape without rows
follows the rule and is untimed: ``auto`` does not take it. ``tune`` prints the rows; their provenance stands above them.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from ..fast import cache
from ..fast import launch_table as fast
from ..fast.driver import PORTABLE_CLUSTER
from .layout import UNIT, Spec

BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512)
"""Upper ends of the buckets; more tokens are prefill."""
MAX_DECODE = 256
"""The most tokens for which the rule takes the decode kernel."""
MAX_WARPS = 16


@dataclass(frozen=True)
class Launch:
    """:param prefill: Take the forward kernel of :mod:`..fast`; the other numbers are not used."""

    cluster: int = 8
    warps: int = 8
    tokens: int = 1
    exchange: str = "all"
    keep: str = "maps"
    prefill: bool = False


TABLE: dict[tuple[str, int, int, int], Launch] = {
    # 2.03 us, 235.46 x floor; among products 2.37 us
    ("sm_90a", 1024, 8, 1): Launch(8, 4, 1, "all", "nothing"),
    # 2.0 us, 28.93 x floor; among products 2.44 us
    ("sm_90a", 1024, 8, 8): Launch(8, 4, 1, "all", "maps"),
    # 2.13 us, 15.43 x floor; among products 2.57 us
    ("sm_90a", 1024, 8, 16): Launch(4, 8, 1, "all", "maps"),
    # 2.52 us, 9.14 x floor; among products 2.87 us
    ("sm_90a", 1024, 8, 32): Launch(4, 8, 1, "all", "maps"),
    # 3.29 us, 5.95 x floor; among products 3.4 us
    ("sm_90a", 1024, 8, 64): Launch(8, 4, 2, "owner", "maps"),
    # 3.26 us, 2.95 x floor; among products 3.71 us
    ("sm_90a", 1024, 8, 128): Launch(2, 16, 2, "all", "maps"),
    # 6.42 us, 2.91 x floor; among products 6.87 us
    ("sm_90a", 1024, 8, 256): Launch(2, 16, 2, "all", "maps"),
    # 10.08 us, 2.28 x floor; among products 10.82 us
    ("sm_90a", 1024, 8, 512): Launch(prefill=True),
    # 1.8 us, 187.57 x floor; among products 2.21 us
    ("sm_90a", 2048, 4, 1): Launch(16, 4, 1, "owner", "maps"),
    # 1.92 us, 25.06 x floor; among products 2.33 us
    ("sm_90a", 2048, 4, 8): Launch(8, 8, 1, "all", "maps"),
    # 2.11 us, 13.73 x floor; among products 2.55 us
    ("sm_90a", 2048, 4, 16): Launch(8, 8, 2, "owner", "maps"),
    # 2.47 us, 8.05 x floor; among products 2.95 us
    ("sm_90a", 2048, 4, 32): Launch(8, 8, 2, "owner", "maps"),
    # 3.04 us, 4.95 x floor; among products 3.33 us
    ("sm_90a", 2048, 4, 64): Launch(8, 8, 2, "owner", "maps"),
    # 3.14 us, 2.56 x floor; among products 3.4 us
    ("sm_90a", 2048, 4, 128): Launch(2, 16, 2, "all", "maps"),
    # 6.12 us, 2.49 x floor; among products 6.63 us
    ("sm_90a", 2048, 4, 256): Launch(2, 16, 2, "all", "maps"),
    # 9.61 us, 1.96 x floor; among products 10.61 us
    ("sm_90a", 2048, 4, 512): Launch(prefill=True),
    # 2.15 us, 124.36 x floor; among products 2.66 us
    ("sm_90a", 2048, 8, 1): Launch(8, 8, 1, "all", "nothing"),
    # 2.2 us, 15.89 x floor; among products 2.74 us
    ("sm_90a", 2048, 8, 8): Launch(8, 8, 1, "all", "maps"),
    # 2.48 us, 8.97 x floor; among products 3.06 us
    ("sm_90a", 2048, 8, 16): Launch(4, 16, 1, "all", "maps"),
    # 3.24 us, 5.87 x floor; among products 3.7 us
    ("sm_90a", 2048, 8, 32): Launch(8, 8, 2, "owner", "maps"),
    # 4.48 us, 4.05 x floor; among products 4.85 us
    ("sm_90a", 2048, 8, 64): Launch(8, 8, 4, "owner", "nothing"),
    # 4.45 us, 2.01 x floor; among products 5.31 us
    ("sm_90a", 2048, 8, 128): Launch(2, 16, 2, "all", "maps"),
    # 8.77 us, 1.98 x floor; among products 9.5 us
    ("sm_90a", 2048, 8, 256): Launch(2, 16, 2, "all", "maps"),
    # 13.99 us, 1.58 x floor; among products 15.03 us
    ("sm_90a", 2048, 8, 512): Launch(prefill=True),
    # 1.81 us, 418.26 x floor; among products 2.26 us
    ("sm_90a", 512, 8, 1): Launch(4, 4, 1, "all", "maps"),
    # 1.88 us, 54.4 x floor; among products 2.23 us
    ("sm_90a", 512, 8, 8): Launch(4, 4, 1, "all", "maps"),
    # 1.95 us, 28.21 x floor; among products 2.25 us
    ("sm_90a", 512, 8, 16): Launch(4, 4, 1, "all", "maps"),
    # 2.07 us, 14.96 x floor; among products 2.42 us
    ("sm_90a", 512, 8, 32): Launch(4, 4, 1, "all", "maps"),
    # 2.54 us, 9.2 x floor; among products 2.9 us
    ("sm_90a", 512, 8, 64): Launch(2, 8, 2, "all", "maps"),
    # 2.65 us, 4.8 x floor; among products 3.04 us
    ("sm_90a", 512, 8, 128): Launch(2, 8, 2, "all", "maps"),
    # 3.22 us, 2.91 x floor; among products 3.78 us
    ("sm_90a", 512, 8, 256): Launch(2, 8, 2, "all", "maps"),
    # 6.04 us, 2.73 x floor; among products 6.52 us
    ("sm_90a", 512, 8, 512): Launch(2, 8, 2, "all", "maps"),
    # 1.78 us, 371.52 x floor; among products 2.13 us
    ("sm_90a", 1024, 4, 1): Launch(8, 4, 1, "all", "maps"),
    # 1.76 us, 45.78 x floor; among products 2.11 us
    ("sm_90a", 1024, 4, 8): Launch(8, 4, 1, "all", "maps"),
    # 1.86 us, 24.26 x floor; among products 2.24 us
    ("sm_90a", 1024, 4, 16): Launch(4, 8, 1, "all", "maps"),
    # 2.14 us, 13.92 x floor; among products 2.46 us
    ("sm_90a", 1024, 4, 32): Launch(8, 4, 2, "owner", "maps"),
    # 2.34 us, 7.62 x floor; among products 2.64 us
    ("sm_90a", 1024, 4, 64): Launch(8, 4, 2, "owner", "maps"),
    # 2.46 us, 4.01 x floor; among products 2.92 us
    ("sm_90a", 1024, 4, 128): Launch(2, 16, 2, "all", "maps"),
    # 3.63 us, 2.96 x floor; among products 3.9 us
    ("sm_90a", 1024, 4, 256): Launch(8, 4, 4, "owner", "maps"),
    # 6.55 us, 2.67 x floor; among products 6.9 us
    ("sm_90a", 1024, 4, 512): Launch(8, 4, 4, "owner", "maps"),
}
"""
NVIDIA H200, torch 2.11.0+cu130, 2026-11-30, ``tune --shapes 2048x8,1024x8,2048x4`` at commit fe6ada2 and ``--shapes 512x8,1024x4`` at 21cae92: microseconds of one
of 57 boundaries in a CUDA graph with overlapping launches; among products: what it adds to a product before each boundary.
"""


def bucket(n_tokens: int) -> int:
    """The end of the bucket of a number of tokens; 0 beyond the last."""
    i = bisect_left(BUCKETS, n_tokens)
    return BUCKETS[i] if i < len(BUCKETS) else 0


def splits(d: int) -> list[tuple[int, int]]:
    """Clusters of at most 8 blocks and their warps, largest cluster first, then most warps."""
    out = []
    for cluster in (8, 4, 2, 1):
        if d % (cluster * UNIT) == 0:
            units = d // (cluster * UNIT)
            warps = max(w for w in range(1, MAX_WARPS + 1) if units % w == 0)
            if units // warps <= 4:
                out.append((cluster, warps))
    return out


def rule(d: int, d_k: int, end: int) -> Launch | None:
    """
    Launches of shapes that were not timed: from 32 tokens as many groups as make about 16 clusters of 8 blocks, one for each pair of processing clusters of the GPU.
    """
    found = splits(d)
    if d_k not in fast.SLOTS or not found:
        return None
    if end == 0 or end > MAX_DECODE:
        return Launch(prefill=True)
    # Few warps in a block leave its multiprocessor idle: 4 at least.
    cluster, warps = next((s for s in found if s[1] >= 4), found[-1])
    tokens = 1
    while tokens < (4 if d_k == 16 else 8) and end > 16 * tokens:
        tokens *= 2
    return Launch(cluster, warps, tokens, "owner" if tokens >= 4 and cluster > 1 else "all")


def launch(architecture: str, d: int, d_k: int, end: int) -> Launch | None:
    """The launch of a bucket by its end; ``None`` if the shape has none."""
    return TABLE.get((architecture, d, d_k, end)) or rule(d, d_k, end)


TIMED_WINDOWS: dict[tuple[str, int, int], int] = {
    ("sm_90a", d, d_k): 4 for d, d_k in ((512, 8), (1024, 4), (1024, 8), (2048, 4), (2048, 8))
}
"""
The window of prefill by architecture, width and slots, where it was timed on a GPU; ``auto`` takes windows for no other. NVIDIA H200, ``tune --only prefill``
at commit 21cae92, 16,384 tokens, microseconds of a boundary without windows and in windows of 4: 318 and 246 (2048 x 8), 184 and 148 (2048 x 4), 161 and 135
(1024 x 8), 85 and 73 (512 x 8).
"""


def timed(architecture: str, d: int, d_k: int) -> bool:
    return any(key[:3] == (architecture, d, d_k) for key in TABLE)


def spec_of(launch: Launch, d: int, d_k: int, key_activation: str, forget: str) -> Spec:
    assert not launch.prefill
    x = launch
    return Spec(d, d_k, key_activation, forget, x.cluster, x.warps, x.tokens, x.exchange, x.keep)


def decode_specs(
    architecture: str, d: int, d_k: int, key_activation: str, forget: str
) -> list[Spec]:
    """The decode kernels of all buckets; none if the shape has none."""
    found = [launch(architecture, d, d_k, end) for end in BUCKETS]
    kernels = [
        spec_of(x, d, d_k, key_activation, forget) for x in found if x is not None and not x.prefill
    ]
    return list(dict.fromkeys(kernels))


def window_specs(
    architecture: str, d: int, d_k: int, key_activation: str, forget: str, window: int
) -> list[cache.Spec]:
    """The kernels of prefill in windows, one for each boundary of a window; none for a window of 1."""
    if window == 1:
        return []
    found = [
        fast.spec(
            architecture, "forward", d, d_k, key_activation, forget,
            saves=False, earlier=earlier, writes=earlier == window - 1,
        )
        for earlier in range(window)
    ]  # fmt: skip
    return [s for s in found if s is not None]


def all_specs(
    architecture: str, d: int, d_k: int, key_activation: str, forget: str, window: int = 1
) -> list[cache.Spec]:
    """The kernels of decode and of prefill, with ``window`` > 1 of prefill in windows too; none if the shape has none."""
    decode = decode_specs(architecture, d, d_k, key_activation, forget)
    prefill = fast.spec(architecture, "forward", d, d_k, key_activation, forget, saves=False)
    if prefill is None or not decode:
        return []
    return [
        *decode,
        prefill,
        *window_specs(architecture, d, d_k, key_activation, forget, window),
    ]


def candidates(architecture: str, d: int, d_k: int, end: int) -> list[Launch]:
    """What ``tune`` tries for a bucket: the launch of the shape, other clusters and groups, prefill for many tokens."""
    first = launch(architecture, d, d_k, end)
    if first is None:
        return []
    out = [first]
    if end in (1, 64, 256):
        out += [replace(first, keep=keep) for keep in ("nothing", "all")]
    tokens = 8 if first.prefill else first.tokens
    for cluster, warps, group, exchange in [
        (16, 4, 1, "all"),
        (16, 4, tokens, "owner"),
        (8, 8, 1, "all"),
        (4, 16, 1, "all"),
        (8, 8, tokens, "owner"),
        (8, 8, tokens, "all"),
        (8, 8, 2 * tokens, "owner"),
        (8, 8, max(1, tokens // 2), "owner"),
        (4, 16, tokens, "owner"),
        (2, 16, 2, "all"),
    ]:
        warps = min(warps, d // (cluster * UNIT))
        if warps < 1 or d % (cluster * warps * UNIT) or d // (cluster * warps * UNIT) > 4:
            continue
        if group > 8 or group >= 2 * end or (end >= 64 and group == 1):
            continue
        if exchange == "owner" and group == 1 and cluster <= PORTABLE_CLUSTER:
            continue
        new = Launch(cluster, warps, group, exchange)
        shared = spec_of(new, d, d_k, "two_sigmoid", "dynamic").shared["size"]
        if shared <= 100_000 and not (cluster > PORTABLE_CLUSTER and end > 16):
            out.append(new)
    if end >= 64:
        out.append(Launch(prefill=True))
    return list(dict.fromkeys(out))

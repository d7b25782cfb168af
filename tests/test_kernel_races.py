"""
No data races in the CuTe DSL kernels, by PTX's memory model (:mod:`ptx_races`), in an emulator of PTX; and kernels with a
synchronization taken out, which must be found. compute-sanitizer's racecheck does not follow what these kernels do: each lane of a warp
accesses shared memory, ``bar.warp.sync``, one lane arrives at an mbarrier for all.
"""

import random
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import ptx_emulator
import test_ldm_fast
import test_ldm_fast_inference
from ptx_races import Races

from olmo_core.nn.ldm.backends.fast.layout import Spec
from olmo_core.nn.ldm.backends.fast_inference.layout import Spec as DecodeSpec

needs_dsl = test_ldm_fast.needs_dsl
LAUNCH = ptx_emulator.launch


# Small kernels, written by hand.

HEADER = """
.visible .entry kernel(.param .u64 out)
.reqntid {threads}, 1, 1
{{
ld.param.b64 %rd1, [out];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
and.b32 %r3, %r1, 31;
shl.b32 %r4, %r3, 2;
mov.b32 %r5, __dynamic_shmem__0;
add.s32 %r6, %r5, %r4;
setp.eq.b32 %p1, %r1, 0;
setp.ne.b32 %p2, %r2, 0;
setp.eq.b32 %p3, %r3, 0;
mov.u32 %r7, %ctaid.x;
setp.eq.b32 %p4, %r7, 0;
"""
WAIT = "{{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity{}.shared::cta.b64 done, [%r5], 0;\n@!done bra wait;\n}}\n"
HAND_OVER = (
    """
@%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
bar.sync 0;
@%p2 bra $L_reader;
st.shared.b32 [%r6 + 256], %r3;
bar.warp.sync -1;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r5];
ret;
$L_reader:
"""
    + WAIT.format("")
    + """
ld.shared.b32 %r8, [%r6 + 256];
ret;
"""
)
SENT = (
    """
@%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed;
barrier.cluster.wait;
shl.b32 %r10, %r3, 4;
add.s32 %r11, %r5, %r10;
@!%p4 bra $L_reader;
mapa.shared::cluster.u32 %r8, %r11, 1;
mapa.shared::cluster.u32 %r9, %r5, 1;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r8 + 256], {%r3, %r3, %r3, %r3}, [%r9];
ret;
$L_reader:
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 512;
"""
    + WAIT.format(".acquire.cluster")
    + """
ld.shared.v4.f32 {%r12, %r13, %r14, %r15}, [%r11 + 256];
ret;
"""
)
COPIED = (
    """
@%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
bar.sync 0;
@!%p1 bra $L_reader;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 128;
add.s32 %r8, %r5, 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd1], 128, [%r5];
$L_reader:
"""
    + WAIT.format("")
    + """
ld.shared.b32 %r9, [%r6 + 256];
ret;
"""
)
COPIES_OF_LANES = (
    """
@%p1 mbarrier.init.shared::cta.b64 [%r5], 32;
bar.sync 0;
@%p2 bra $L_reader;
cvt.u64.u32 %rd2, %r4;
add.s64 %rd3, %rd1, %rd2;
cp.async.ca.shared.global [%r6 + 256], [%rd3], 4;
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r5];
ret;
$L_reader:
"""
    + WAIT.format("")
    + """
ld.shared.b32 %r9, [%r6 + 256];
ret;
"""
)


def races(text: str, threads: int = 64, cluster: int = 1, **options: Any) -> list[str]:
    memory = ptx_emulator.Memory()
    out = memory.add(np.zeros(256, np.uint32))
    watch = Races(**options)
    LAUNCH(
        HEADER.format(threads=threads) + text + "\n}", cluster, cluster, [out], memory, watch=watch
    )
    return list(watch.found.values())


def replaced(text: str, old: str, new: str = "") -> str:
    assert old in text, old
    return text.replace(old, new)


def test_what_a_warp_wrote_is_handed_over_by_one_lane():
    assert races(HAND_OVER) == []
    (race,) = races(replaced(HAND_OVER, "bar.warp.sync -1;"))
    assert race.startswith(
        "read after write, not ordered, shared memory of block 0 at 0x504: st.shared.b32"
    )
    assert "by warp 0 lane 1 of block 0" in race and "by warp 1 lane 1 of block 0" in race
    shuffle = "shfl.sync.bfly.b32 %r9, %r3, 1, 31, -1;"
    assert len(races(replaced(HAND_OVER, "bar.warp.sync -1;", shuffle))) == 1
    assert len(races(replaced(HAND_OVER, "mbarrier.arrive.", "mbarrier.arrive.relaxed.cta."))) == 1
    assert len(races(replaced(HAND_OVER, "parity.", "parity.relaxed.cta."))) == 1
    # The mbarrier itself: its first words, before the others may touch it.
    assert any("mbarrier.init" in race for race in races(replaced(HAND_OVER, "bar.sync 0;", "")))


def test_lanes_are_threads():
    text = "st.shared.b32 [%r6 + 256], %r3;\nbar.warp.sync -1;\nxor.b32 %r8, %r4, 4;\nadd.s32 %r9, %r5, %r8;\nld.shared.b32 %r10, [%r9 + 256];\nret;"
    assert races(text, threads=32) == []
    found = races(replaced(text, "bar.warp.sync -1;"), threads=32)
    assert found and all("lane 0 " in race and "lane 1 " in race for race in found)
    # Two warps on the same words.
    found = races(text)
    assert found and all("warp 0" in race and "warp 1" in race for race in found)
    # One place for all lanes: the same bits are one store's, different ones are nobody's.
    assert races("st.shared.b32 [%r5 + 256], %r2;\nret;", threads=32) == []
    assert len(races("st.shared.b32 [%r5 + 256], %r3;\nret;", threads=32)) == 1
    assert len(races("st.shared.b32 [%r5 + 256], %r5;\nret;")) == 1


def test_what_is_sent_to_another_block():
    assert races(SENT, 32, 2) == []
    race, unseen = races(replaced(SENT, ".acquire.cluster"), 32, 2)  # the scope is a block's
    assert "no thread of its block waits" in unseen
    assert "a copy begun by warp 0 lane 0 of block 0" in race
    assert any(
        "mbarrier.init" in r
        for r in races(replaced(SENT, "@%p1 fence.mbarrier_init.release.cluster;"), 32, 2)
    )
    # A second store to the place, before the block has told that it has read the first.
    send = re.search(r"st\.async.*\n", SENT)
    assert send is not None
    twice = replaced(replaced(SENT, send[0], 2 * send[0]), "_, [%r5], 512", "_, [%r5], 1024")
    assert any(race.startswith("write after write") for race in races(twice, 32, 2))
    unread = replaced(
        replaced(SENT, "ld.shared.v4.f32 {%r12, %r13, %r14, %r15}, [%r11 + 256];"),
        "acquire",
        "relaxed",
    )
    (race,) = races(unread, 32, 2)
    assert race.startswith("a store that no thread of its block waits for: st.async")


def test_bulk_copies():
    assert races(COPIED) == []
    read = "ld.shared.b32 %r9, [%r6 + 256];"
    early = replaced(replaced(COPIED, read), "$L_reader:", f"$L_reader:\n{read}")
    assert any("a copy begun by warp 0 lane 0" in race for race in races(early))
    # Over what threads have written, or from it, only after a proxy fence.
    wrote = replaced(COPIED, "bar.sync 0;", "@!%p2 st.shared.b32 [%r6 + 256], %r3;\nbar.sync 0;")
    (race,) = races(wrote)
    assert race.startswith("write after write without a proxy fence")
    assert races(replaced(wrote, "bar.sync 0;", "fence.proxy.async;\nbar.sync 0;")) == []
    source = replaced(COPIED, "bar.sync 0;", "@%p1 st.global.b32 [%rd1], %r3;\nbar.sync 0;")
    (race,) = races(source)
    assert race.startswith("read after write without a proxy fence, not ordered, global memory")


def test_copies_of_lanes():
    assert races(COPIES_OF_LANES) == []
    read = "ld.shared.b32 %r9, [%r6 + 256];"
    early = replaced(replaced(COPIES_OF_LANES, read), "$L_reader:", f"$L_reader:\n{read}")
    assert any("a copy begun by warp 0 lane 0" in race for race in races(early))


def test_blocks_of_different_clusters_are_not_ordered():
    memory = ptx_emulator.Memory()
    watch = Races()
    text = HEADER.format(threads=32) + "@%p1 st.global.b32 [%rd1], %r3;\nret;\n}"
    LAUNCH(text, 2, 1, [memory.add(np.zeros(4, np.uint32))], memory, watch=watch)
    (race,) = watch.found.values()
    assert "of cluster 0" in race and "of cluster 1" in race


# The kernels.


class Watched:
    """The launches of a test, each with its races."""

    def __init__(self, **options: Any):
        self.options = options
        self.watches: list[Races] = []
        self.change = lambda ptx: ptx

    def __call__(self, ptx: str, *arguments: Any) -> None:
        self.watches.append(Races(**self.options))
        LAUNCH(self.change(ptx), *arguments, watch=self.watches[-1])

    @property
    def found(self) -> list[str]:
        return [race for watch in self.watches for race in watch.found.values()]


def unlike_products(requests: list[tuple]) -> list[tuple]:
    """
    In the place of ``mma``, whose emulation takes a third of the time: no address and no branch depends on a product. All differ, so
    that no two stores have the same bits by chance.
    """
    return [tuple(random.uniform(0.5, 1.5) for _ in range(4)) for _ in requests]


@pytest.fixture
def watched(monkeypatch):
    def watch(**options: Any) -> Watched:
        launch = Watched(**options)
        monkeypatch.setattr(ptx_emulator, "launch", launch)
        monkeypatch.setattr(ptx_emulator, "multiply_tiles", unlike_products)
        return launch

    return watch


def run(n_tokens: int, forward: dict[str, Any], backward: dict[str, Any] | None = None) -> None:
    other = None if backward is None else Spec("backward", **{**forward, **backward})
    test_ldm_fast.Emulated(n_tokens, Spec("forward", **forward), other).run(1, seed=1)


SMALL: dict[str, Any] = {"d": 64, "d_k": 4, "max_stages": 2, "coefficient_warps": 2}
CLUSTER: dict[str, Any] = {
    "d": 128,
    "d_k": 8,
    "cluster": 2,
    "max_stages": 2,
    "coefficient_warps": 2,
}
TRAINING: list[tuple[int, dict[str, Any], dict[str, Any] | None]] = [
    # Two blocks share a token; all buffers are used again.
    (6, CLUSTER, {}),
    (9, {"d": 64, "d_k": 4, "max_stages": 2}, {}),
    (4, {"d": 64, "d_k": 16, "tokens": 1, "max_stages": 2}, None),
    # The new memory over the old one.
    (5, {"d": 64, "d_k": 8, "max_stages": 2, "saves": False, "extra": False}, None),
    # Windows; warps for the dot products alone; more warps for the coefficients than tokens.
    (7, {"d": 64, "d_k": 4, "tokens": 2, "earlier": 2, "writes": False, "dots_warps": 4, "max_stages": 2}, {}),
    (6, {"d": 64, "d_k": 8, "tokens": 4, "earlier": 1, "coefficient_warps": 7, "max_stages": 2}, {"tokens": 2, "dots_warps": 4, "coefficient_warps": 3}),
    (5, {"d": 64, "d_k": 8, "tokens": 2, "earlier": 3, "dots_warps": 4, "max_stages": 2}, None),
    (6, {"d": 128, "d_k": 8, "cluster": 2, "earlier": 1, "stored8": True, "max_stages": 2, "coefficient_warps": 2}, {}),
]  # fmt: skip


@needs_dsl
@pytest.mark.parametrize(("n_tokens", "forward", "backward"), TRAINING, ids=str)
def test_training_kernels(watched, n_tokens, forward, backward):
    launch = watched(carries=True)
    run(n_tokens, forward, backward)
    assert launch.found == []
    assert len(launch.watches) == (1 if backward is None else 3)
    assert all(watch.n_checked > 1000 for watch in launch.watches)
    assert not any(watch.same_bits for watch in launch.watches)


@needs_dsl
def test_kernels_of_a_whole_window(watched):
    """The bundle is read and written in place, by the blocks of a cluster."""
    launch = watched(carries=True)
    numbers = {"cluster": 2, "max_stages": 2, "coefficient_warps": 2}
    test_ldm_fast.EmulatedWindow(6, 3, d=128, d_k=8, **numbers).run(1, seed=1)
    assert launch.found == []
    assert len(launch.watches) == 9 and all(watch.n_checked > 1000 for watch in launch.watches)


DECODE: list[tuple[int, dict[str, Any]]] = [
    (1, {"d": 256, "d_k": 8, "cluster": 4, "warps": 2}),
    (3, {"d": 128, "d_k": 8, "cluster": 1, "warps": 2, "tokens": 2, "keep": "all"}),
    (3, {"d": 128, "d_k": 4, "cluster": 2, "warps": 2, "keep": "nothing"}),
    (9, {"d": 64, "d_k": 8, "cluster": 2, "warps": 1, "tokens": 8, "exchange": "owner"}),
    (3, {"d": 64, "d_k": 16, "cluster": 2, "warps": 1, "tokens": 2}),
]


@needs_dsl
@pytest.mark.parametrize(("n_tokens", "options"), DECODE, ids=str)
def test_decode_kernels(watched, n_tokens, options):
    launch = watched()
    test_ldm_fast_inference.Case(n_tokens, DecodeSpec(**options)).run(seed=1, in_place=True)
    assert launch.found == [] and launch.watches[0].n_checked > 1000
    # Lanes beyond the numbers of a token repeat the last ones' sum: one instruction.
    assert len(launch.watches[0].same_bits) <= 1


@needs_dsl
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_warp_with_two_tokens_of_a_tile(watched, direction):
    launch = watched()
    if direction == "forward":
        run(4, {"d": 64, "d_k": 4, "tokens": 4})
    else:
        run(4, {"d": 64, "d_k": 4, "coefficient_warps": 7, "tokens": 4}, {"coefficient_warps": 3})
    assert launch.found == []


@needs_dsl
def test_a_cluster_exchanges_what_it_has_read(watched):
    """
    A block sends to a place again after its peer has sent something that the peer read the place before: ordered if the count of
    ``st.async``, a release, comes after what its thread did before. By the stricter reading nothing else is left unordered.
    """
    launch = watched(carries=False)
    run(6, CLUSTER)
    (watch,) = launch.watches
    assert watch.found and all("st.async" in race for race in watch.found.values())


@needs_dsl
def test_hyper_connections(watched):
    import test_mhc_fast

    launch = watched(carries=True)
    test_mhc_fast.Emulated(17, test_mhc_fast.Spec(d=128, max_stages=2)).run(1, seed=1)
    assert launch.found == [] and launch.watches[0].n_checked > 1000


# The kernels with a synchronization taken out.

WARP_SYNC = r"bar\.warp\.sync\s+-1;(?=[^@]{0,200}@%p\d+ mbarrier\.arrive)"
WAITS = r"\{\s*\.reg \.pred done;\s*wait:.*?bra wait;\s*\}"
ARRIVALS = r"mbarrier\.arrive(?=\.shared::cta)"


def without(pattern: str, n: int, ptx: str, instead: str = "") -> str:
    """``ptx`` without match ``n``."""
    match = list(re.finditer(pattern, ptx, re.S))[n]
    return ptx[: match.start()] + instead + ptx[match.end() :]


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx, re.S))


@needs_dsl
def test_every_hand_over_of_a_warp_is_needed(watched):
    """Of the forward: the sums of the main warps, their last look at a tile, the coefficient warps' at the sums, the coefficients."""
    ptx = test_ldm_fast.compiled(Spec("forward", **SMALL))
    assert count(WARP_SYNC, ptx) == 4 and count(ARRIVALS, ptx) == 4
    for n in range(4):
        launch = watched(carries=True)
        launch.change = lambda text, n=n: without(WARP_SYNC, n, text)
        run(5, SMALL)
        assert launch.found, n
    for n in range(4):
        launch = watched(carries=True)
        launch.change = lambda text, n=n: without(ARRIVALS, n, text, "mbarrier.arrive.relaxed.cta")
        run(5, SMALL)
        assert launch.found, n


@needs_dsl
@pytest.mark.parametrize("exchange", ["all", "owner"])
def test_every_wait_of_the_decode_step_is_needed(watched, exchange):
    spec = DecodeSpec(d=128, d_k=8, cluster=2, warps=2, exchange=exchange)
    ptx = test_ldm_fast_inference.compiled(spec)
    n_waits, n_syncs = count(WAITS, ptx), count(r"bar\.warp\.sync\s+-1;", ptx)
    assert n_waits == 3 and n_syncs >= 3
    changes = [(WAITS, n) for n in range(n_waits)]
    changes += [(r"bar\.warp\.sync\s+-1;", n) for n in range(n_syncs)]
    changes += [(r"bar\.sync\s+0;", 0), (r"barrier\.cluster\.wait;", 0)]
    changes += [(r"fence\.mbarrier_init\S*;", 0)]
    for pattern, n in changes:
        launch = watched()
        launch.change = lambda text, pattern=pattern, n=n: without(pattern, n, text)
        test_ldm_fast_inference.Case(1, spec).run(seed=1, in_place=False)
        assert launch.found, (pattern, n)

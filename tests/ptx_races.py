"""
Finds data races in a kernel that runs in :mod:`ptx_emulator`, by the order that PTX's memory model gives ("Memory consistency model"
of NVIDIA's PTX ISA, 9.4): two accesses to a word, one of them a write, that are not ordered by a chain of

- program order of a thread, that is one lane: lanes of a warp are threads like any others, and neither ``shfl.sync`` nor ``mma.sync``
  orders their accesses;
- ``bar.warp.sync`` among the lanes of its mask, and ``bar.sync`` among the threads of a block;
- ``barrier.cluster.arrive`` (unless ``.relaxed``) before ``barrier.cluster.wait``;
- arrivals at an mbarrier with ``.release``, which is the default, before the waits with ``.acquire``, the default, that see the phase
  complete. Across blocks both must have the scope ``.cluster``; the default is ``.cta``;
- ``fence.mbarrier_init`` and a relaxed arrival at the cluster's barrier, for ``mbarrier.init`` alone;
- asynchronous copies and stores: the instruction comes after what its thread did before. Its own reads and writes come before the
  waits that see its bytes (or its thread's ``cp.async.mbarrier.arrive``) counted, and before nothing else, not even what its thread
  does next. As the model says of ``cp.async.bulk``, that count orders the copy alone, not what its thread did before; of
  ``st.async`` the model says only that the count is a release at the scope of the cluster. ``carries`` has the two readings.

Bulk copies use another proxy: they may touch what threads *wrote* in this launch only after ``fence.proxy.async``; that the completion
of a copy has one is part of the model. A copy over what threads have *read* is taken as ordered by the chain that frees the place, as
in CUTLASS's pipelines; the model's text asks for a fence there too.

Lanes of a warp that store the same bits by the same instruction do not count as a race: one of them takes effect (CUDA's programming
guide). Blocks of different clusters are never ordered. A run shows the races of the control flow that it takes, whatever the order of
its warps: the clocks do not depend on who came first, but for the order in which an mbarrier was reached.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from ptx_emulator import WARP, Block, Memory, Watch, u32


@dataclass(slots=True, eq=False)
class Access:
    cluster: int
    thread: int
    """In the cluster: who accessed, or who began the copy that did."""
    time: int
    """The thread's; a copy has none, and never is in its thread's program order."""
    event: int
    """A bit that whoever comes after a copy or an ``mbarrier.init`` knows of, or 0."""
    line: int
    bulk: bool
    """Through the proxy of the bulk copies."""
    first: int
    """The first word."""
    data: bytes

    def bits(self, word: int) -> bytes:
        at = 4 * (word - self.first)
        return self.data[at : at + 4]


COPY = -1
"""The time of a copy's accesses."""


@dataclass
class Phase:
    """What arrivals at an mbarrier hand to the waits that see the phase complete."""

    clock: np.ndarray | None = None
    events: int = 0

    def add(self, clock: np.ndarray | None, events: int) -> None:
        if clock is not None:
            self.clock = clock.copy() if self.clock is None else np.maximum(self.clock, clock)
        self.events |= events


@dataclass
class Arrivals:
    """An mbarrier: arrivals from its own block and from others, of the phase that is and of the one before it."""

    phase: int = 0
    now: tuple[Phase, Phase] = field(default_factory=lambda: (Phase(), Phase()))
    complete: tuple[Phase, Phase] = field(default_factory=lambda: (Phase(), Phase()))


class Word:
    """The last writes and the reads since, of 4 bytes."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.writes: tuple[Access, ...] = ()
        self.reads: dict[tuple[int, int], Access] = {}


class Thread:
    """What a thread has instead of its block and of global memory: the same, with its accesses recorded."""

    def __init__(self, races: "Races", block: Block, tid: int, memory: Memory):
        self.races, self.block, self.tid, self.memory = races, block, tid, memory
        self.index = block.index
        self.number = block.rank * races.n_threads + tid
        n = races.n_threads * len(races.blocks)
        # Row 1: what has passed a proxy fence.
        self.clock = np.zeros((2, n), np.int32)
        self.clock[0, self.number] = 1
        self.events = 0
        self.initialised = 0
        self.fenced = 0
        self.source: tuple[int, int] | None = None
        self.copies: list[int] = []

    def tick(self) -> None:
        self.clock[0, self.number] += 1

    # What translated PTX calls.

    def load(self, address: int, n: int) -> bytes:
        line = sys._getframe(1).f_lineno
        self.races.access(self, self.races.shared(self.block, u32(address), n), False, line)
        return self.block.load(address, n)

    def store(self, address: int, data: bytes) -> None:
        line = sys._getframe(1).f_lineno
        self.races.access(
            self, self.races.shared(self.block, u32(address), len(data)), True, line, data
        )
        self.block.store(address, data)

    def init(self, address: int, count: int) -> None:
        line = sys._getframe(1).f_lineno
        event = self.races.event()
        self.initialised |= event
        place = self.races.shared(self.block, u32(address), 8)
        self.races.access(self, place, True, line, event=event)
        self.block.init(address, count)

    def arrive(self, address: int, n_bytes: int = 0) -> None:
        line = sys._getframe(1).f_lineno
        self.races.arrive(self, u32(address), line)
        self.block.arrive(address, n_bytes)

    def fence(self) -> None:
        line = sys._getframe(1).f_lineno
        parts = self.races.modifiers(line)
        if parts[1] == "mbarrier_init":
            self.fenced |= self.initialised
        elif parts[1:3] == ["proxy", "async"]:
            np.maximum(self.clock[1], self.clock[0], out=self.clock[1])
            self.tick()
        else:
            raise AssertionError(f"races: what does {self.races.statements[line]} order?")

    def copy_later(self, address: int, data: bytes, barrier: int) -> None:
        self.races.copy(self, address, data, barrier, sys._getframe(1).f_lineno)
        self.block.copy_later(address, data, barrier)
        self.races.in_flight[id(self.block.in_flight[-1])] = self.races.last_copy

    def copy_of_thread(self, tid: int, address: int, data: bytes) -> None:
        self.races.copy(self, address, data, None, sys._getframe(1).f_lineno)
        self.copies.append(self.races.last_copy.event)
        self.block.copy_of_thread(tid, address, data)

    def arrive_later(self, tid: int, address: int) -> None:
        line = sys._getframe(1).f_lineno
        place = self.races.shared(self.block, u32(address), 8)
        self.races.access(self, place, False, line)
        self.block.arrive_later(tid, address)


class OfGlobal:
    """Global memory as a thread sees it."""

    def __init__(self, thread: Thread):
        self.thread = thread

    def load(self, address: int, n: int) -> bytes:
        line = sys._getframe(1).f_lineno
        t = self.thread
        if line in t.races.copying:
            t.source = (address, n)
        else:
            t.races.access(t, t.races.of_global(address, n), False, line)
        return t.memory.load(address, n)

    def store(self, address: int, data: bytes) -> None:
        t = self.thread
        place = t.races.of_global(address, len(data))
        t.races.access(t, place, True, sys._getframe(1).f_lineno, data)
        t.memory.store(address, data)


class Copy(NamedTuple):
    event: int
    own: bool
    """Whether the barrier is in the block of the thread that began it."""
    clock: np.ndarray | None
    """What ``st.async`` carries, if it carries more than itself."""
    events: int


class Races(Watch):
    """
    Give it to :func:`ptx_emulator.launch` as ``watch``, one for each launch; then :attr:`found` has the races, each once for a pair of
    PTX instructions.

    :param carries: Whether the count of an ``st.async`` on its mbarrier hands on what its thread did before, as an arrival with
        ``.release`` does, or only itself.
    """

    def __init__(self, carries: bool = False):
        self.carries = carries
        self.found: dict[tuple[str, str, str], str] = {}
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.n_checked = 0
        self.same_bits: Counter[str] = Counter()
        """Stores of the same bits by lanes of a warp that were let pass, by instruction."""
        self.unfenced_reuse: Counter[str] = Counter()
        """Bulk copies over what threads have read, ordered without a proxy fence, by instruction."""
        self.cluster = -1
        self.global_words: dict[int, Word] = {}

    def begin(self, blocks: list[Block], n_threads: int, statements: dict[int, str]) -> None:
        self.cluster += 1
        self.blocks, self.n_threads, self.statements = blocks, n_threads, statements
        self.copying = {
            n
            for n, s in statements.items()
            if re.match(r"(@!?%\w+ )?cp\.async\.(bulk\.shared|c)", s)
        }
        self.words: list[dict[int, Word]] = [{} for _ in blocks]
        self.threads: list[Thread] = []
        self.barriers: dict[tuple[int, int], Arrivals] = {}
        self.in_flight: dict[int, Copy] = {}
        self.n_events = 0
        self.cluster_now, self.cluster_complete = Phase(), Phase()
        self.n_arrived = 0
        self.sent: list[tuple[Block, int, int]] = []

    def view(self, block: Block, tid: int, memory: Memory) -> tuple[Any, Any]:
        thread = Thread(self, block, tid, memory)
        self.threads.append(thread)
        assert self.threads[thread.number] is thread
        return thread, OfGlobal(thread)

    def event(self) -> int:
        self.n_events += 1
        return 1 << self.n_events

    # Places, as pairs of a table of words and the names of some of them.

    def shared(self, block: Block, address: int, n: int) -> tuple[dict[int, Word], range, str]:
        assert address % 4 == 0 and n % 4 == 0, "races: words of 4 bytes only"
        words = range(address // 4, (address + n) // 4)
        return self.words[block.rank], words, f"shared memory of block {block.rank}"

    def of_global(self, address: int, n: int) -> tuple[dict[int, Word], range, str]:
        assert address % 4 == 0 and n % 4 == 0, "races: words of 4 bytes only"
        return self.global_words, range(address // 4, (address + n) // 4), "global memory"

    # Checks.

    def ordered(self, before: Access, thread: Thread) -> bool:
        if before.cluster != self.cluster:
            return False
        if before.event & thread.events:
            return True
        if before.time == COPY:
            return False
        return before.thread == thread.number or before.time <= thread.clock.item(0, before.thread)

    def access(
        self,
        thread: Thread,
        place: tuple[dict[int, Word], range, str],
        write: bool,
        line: int,
        data: bytes = b"",
        event: int = 0,
        bulk: bool = False,
        copied: bool = False,
    ) -> None:
        """
        An access of a thread, or (``copied``) of a copy that it begins now.

        :param event: Of the copy, or of an ``mbarrier.init``.
        :param bulk: Through the proxy of the bulk copies.
        """
        table, words, where = place
        self.n_checked += len(words)
        time = COPY if copied else thread.clock.item(0, thread.number)
        mine = Access(self.cluster, thread.number, time, event, line, bulk, words.start, data)
        key = (self.cluster, -event if copied else thread.number)
        last: tuple[Access, ...] = ()
        for name in words:
            word = table.get(name)
            if word is None:
                word = table[name] = Word()
            kept: tuple[Access, ...] = ()
            # Neighbours mostly have the same last write.
            if word.writes is not last:
                for w in word.writes:
                    if not self.ordered(w, thread):
                        if write and self.same_store(w, mine, name):
                            kept += (w,)
                            self.same_bits[self.statements[line]] += 1
                        else:
                            self.report("write", w, write, mine, where, name)
                    elif bulk and not w.bulk and w.time > thread.clock.item(1, w.thread):
                        self.report("write without a proxy fence", w, write, mine, where, name)
            if not write:
                last = word.writes
                word.reads[key] = mine
                continue
            for r in word.reads.values():
                if not self.ordered(r, thread):
                    self.report("read", r, True, mine, where, name)
                elif bulk and not r.bulk:
                    self.unfenced_reuse[self.statements[line]] += 1
            if word.reads:
                word.reads = {}
            word.writes = (*kept, mine)

    @staticmethod
    def same_store(a: Access, b: Access, word: int) -> bool:
        """Whether two lanes of a warp store the same by the same instruction."""
        warps = (a.cluster, a.thread // WARP) == (b.cluster, b.thread // WARP)
        stores = a.line == b.line and COPY not in (a.time, b.time) and bool(b.data)
        return warps and stores and a.bits(word) == b.bits(word)

    def report(self, of: str, a: Access, write: bool, b: Access, where: str, word: int) -> None:
        key = (
            f"{'write' if write else 'read'} after {of}",
            self.statements[a.line],
            self.statements[b.line],
        )
        self.counts[key] += 1
        if key in self.found:
            return

        def name(access: Access) -> str:
            rank, tid = divmod(access.thread, self.n_threads)
            who = (
                f"warp {tid // WARP} lane {tid % WARP} of block {rank} of cluster {access.cluster}"
            )
            return f"a copy begun by {who}" if access.time == COPY else who

        self.found[key] = (
            f"{key[0]}, not ordered, {where} at {4 * word:#x}: {key[1]} by {name(a)}, then {key[2]} by {name(b)}"
        )

    # mbarriers.

    def arrivals(self, block: Block, address: int) -> Arrivals:
        """The record of an mbarrier, its phase brought up to date: at most one ends between two looks."""
        arrivals = self.barriers.setdefault((block.rank, address), Arrivals())
        phase = block.barriers[address].phase
        if arrivals.phase != phase:
            arrivals.phase, arrivals.complete, arrivals.now = (
                phase,
                arrivals.now,
                (Phase(), Phase()),
            )
        return arrivals

    def modifiers(self, line: int) -> list[str]:
        statement = self.statements[line]
        return re.sub(r"^@!?%\w+ ", "", statement).split(" ")[0].split(".")

    def arrive(self, thread: Thread, address: int, line: int) -> None:
        parts = self.modifiers(line)
        assert "shared::cluster" not in parts, "races: an arrival at another block's mbarrier"
        self.access(thread, self.shared(thread.block, address, 8), False, line)
        if "relaxed" not in parts:
            self.arrivals(thread.block, address).now[0].add(thread.clock, thread.events)
            thread.tick()

    def waited(self, block: Block, tid: int, line: int, address: int) -> None:
        thread = self.threads[block.rank * self.n_threads + tid]
        parts = self.modifiers(line)
        self.access(thread, self.shared(block, address, 8), False, line)
        if "relaxed" in parts:
            return
        own, others = self.arrivals(block, address).complete
        self.acquire(thread, own)
        if "cluster" in parts:
            self.acquire(thread, others)

    @staticmethod
    def acquire(thread: Thread, phase: Phase) -> None:
        if phase.clock is not None:
            np.maximum(thread.clock, phase.clock, out=thread.clock)
        thread.events |= phase.events

    # Copies.

    def copy(
        self, thread: Thread, address: int, data: bytes, barrier: int | None, line: int
    ) -> None:
        statement = " ".join(self.modifiers(line))
        bulk = "bulk" in statement
        event = self.event()
        if thread.source is not None:
            place = self.of_global(*thread.source)
            self.access(thread, place, False, line, event=event, bulk=bulk, copied=True)
            thread.source = None
        block, at = thread.block.place(u32(address))
        place = self.shared(block, at, len(data))
        self.access(thread, place, True, line, data, event=event, bulk=bulk, copied=True)
        own, clock, events = True, None, 0
        if barrier is not None:
            owner, at = thread.block.place(u32(barrier))
            assert owner is block, "a copy's bytes count in another block than they land in"
            self.access(thread, self.shared(owner, at, 8), False, line)
            own = owner is thread.block
            if self.carries and statement.startswith("st async"):
                clock, events = thread.clock.copy(), thread.events
                thread.tick()
        if block is not thread.block:
            self.sent.append((block, event, line))
        self.last_copy = Copy(event, own, clock, events)

    def landed(self, copy: tuple) -> None:
        known = self.in_flight.pop(id(copy), None)
        _, _, (owner, at) = copy
        if known is not None and owner is not None:
            arrivals = self.arrivals(owner, at)
            arrivals.now[0 if known.own else 1].add(known.clock, known.event | known.events)

    def arrived_late(self, block: Block, tid: int, number: int, address: int) -> None:
        thread = self.threads[block.rank * self.n_threads + tid]
        events = 0
        for event in thread.copies[:number]:
            events |= event
        self.arrivals(block, u32(address)).now[0].add(None, events)

    # Barriers of a cluster, a block, a warp.

    def cluster_arrive(self, block: Block, tid: int, line: int) -> None:
        thread = self.threads[block.rank * self.n_threads + tid]
        if "relaxed" in self.modifiers(line):
            self.cluster_now.add(None, thread.fenced)
        else:
            self.cluster_now.add(thread.clock, thread.events)
            thread.tick()
        self.n_arrived += 1
        if self.n_arrived == len(self.threads):
            self.n_arrived, self.cluster_complete, self.cluster_now = 0, self.cluster_now, Phase()

    def cluster_wait(self, block: Block, tid: int) -> None:
        self.acquire(self.threads[block.rank * self.n_threads + tid], self.cluster_complete)

    def together(self, block: Block, tids: list[int], lines: set[int]) -> None:
        for line in lines:
            name, _, operands = self.statements[line].partition(" ")
            mask = operands.strip()
            whole = mask in ("-1", "0xffffffff") if name == "bar.warp.sync" else mask == "0"
            assert whole, f"races: {self.statements[line]} of some threads only"
        first = block.rank * self.n_threads
        threads = [self.threads[first + tid] for tid in tids]
        clock = np.maximum.reduce([t.clock for t in threads])
        events = 0
        for t in threads:
            events |= t.events
        for t in threads:
            t.clock, t.events = clock.copy(), events
            t.tick()

    def end(self) -> None:
        """What was sent to a block must have been seen there, or it may land when the block is gone."""
        for block, event, line in self.sent:
            first = block.rank * self.n_threads
            if not any(t.events & event for t in self.threads[first : first + self.n_threads]):
                key = ("a store that no thread of its block waits for", self.statements[line], "")
                self.counts[key] += 1
                self.found.setdefault(key, f"{key[0]}: {key[1]}")

"""
Runs the PTX of the CuTe DSL kernels (LDM's and mHC's) on a CPU, thread by thread, for tests of tiny shapes without a GPU.

It knows the instructions that those kernels use: arithmetic, shared and global memory, ``mma.m16n8k16``, shuffles, mbarriers, bulk
copies and those of single threads, asynchronous stores to other blocks of a cluster. Warps run in random order, and asynchronous copies land late and in
random order, so that a missing wait shows; :mod:`ptx_races` checks the memory model beyond that. FP32 arithmetic is not rounded until
a number is stored.
"""

import math
import random
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHARED_BASE = 1024
SHARED_BYTES = 227 * 1024
WARP = 32


def to_float(x: Any) -> float:
    """A register as FP32: registers hold bits, or the number that an FP32 instruction gave."""
    return x if type(x) is float else struct.unpack("<f", struct.pack("<I", x & 0xFFFFFFFF))[0]


def to_bits(x: Any) -> int:
    if type(x) is not float:
        return x
    try:
        return struct.unpack("<I", struct.pack("<f", x))[0]
    except OverflowError:
        return 0x7F800000 if x > 0 else 0xFF800000


def u32(x: Any) -> int:
    return to_bits(x) & 0xFFFFFFFF


def s32(x: Any) -> int:
    x = u32(x)
    return x - (1 << 32) if x >> 31 else x


def u16(x: Any) -> int:
    return u32(x) & 0xFFFF


def s16(x: Any) -> int:
    x = u16(x)
    return x - (1 << 16) if x >> 15 else x


def u64(x: int) -> int:
    return x & ((1 << 64) - 1)


def s64(x: int) -> int:
    x = u64(x)
    return x - (1 << 64) if x >> 63 else x


def to_bf16(x: Any) -> int:
    bits = u32(float(to_float(x)))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def from_bf16(x: int) -> float:
    return to_float(x << 16)


def mul_bf16x2(a: Any, b: Any) -> int:
    low, high = (
        to_bf16(from_bf16((u32(a) >> shift) & 0xFFFF) * from_bf16((u32(b) >> shift) & 0xFFFF))
        for shift in (0, 16)
    )
    return high << 16 | low


def permute_bytes(a: Any, b: Any, selector: Any) -> int:
    data = u32(a).to_bytes(4, "little") + u32(b).to_bytes(4, "little")
    return sum(data[u32(selector) >> 4 * i & 7] << 8 * i for i in range(4))


def from_e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = math.ldexp(8 * (exponent > 0) + mantissa, max(exponent, 1) - 10)
    return -size if byte >> 7 else size


def to_f16x2_of_e4m3x2(two: Any) -> int:
    data = struct.pack("<2e", from_e4m3(u32(two) & 0xFF), from_e4m3(u32(two) >> 8 & 0xFF))
    return struct.unpack("<I", data)[0]


def from_f16(x: Any) -> float:
    return struct.unpack("<e", struct.pack("<H", u16(x)))[0]


def to_e4m3(x: Any) -> int:
    """FP8, to nearest even; 448 at most."""
    x = to_float(x)
    if math.isnan(x):
        return 0x7F
    sign, x = 0x80 * (math.copysign(1.0, x) < 0), abs(x)
    exponent = max(math.frexp(x)[1] - 1, -6) if x else -6
    # In eighths of a power of two; round() is to even.
    steps = 448.0 if x > 448 else x
    eighths = round(math.ldexp(steps, 3 - exponent))
    return sign | min(((exponent + 6) << 3) + eighths, 0x7E)


def exp2(x: Any) -> float:
    x = to_float(x)
    return math.nan if x != x else math.inf if x > 127 else 2.0**x if x > -126 else 0.0


def log2(x: Any) -> float:
    x = to_float(x)
    return math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan


def reciprocal(x: Any) -> float:
    x = to_float(x)
    return math.copysign(math.inf, x) if x == 0 else 1.0 / x


def rsqrt(x: Any) -> float:
    x = to_float(x)
    return math.inf if x == 0 else x**-0.5 if x > 0 else math.nan


def maximum(a: Any, b: Any) -> float:
    a, b = to_float(a), to_float(b)
    return b if a != a else a if b != b else max(a, b)


class Memory:
    """Global memory: the arrays that were added, and nothing between them."""

    def __init__(self) -> None:
        self.arrays: list[tuple[int, np.ndarray]] = []
        self.next = 1 << 33

    def add(self, array: np.ndarray) -> int:
        """:returns: The address of ``array``, which the kernel reads and writes in place."""
        address = self.next
        self.arrays.append((address, array.reshape(-1).view(np.uint8)))
        self.next += (array.nbytes + 4096) // 256 * 256
        return address

    def _find(self, address: int, n: int) -> np.ndarray:
        for base, array in self.arrays:
            if base <= address and address + n <= base + array.size:
                return array[address - base : address - base + n]
        raise AssertionError(f"{n} bytes at {address:#x} are in no array")

    def load(self, address: int, n: int) -> bytes:
        assert address % (16 if n % 16 == 0 else n) == 0, f"misaligned {address:#x}"
        return bytes(self._find(address, n))

    def store(self, address: int, data: bytes) -> None:
        assert address % len(data) == 0, f"misaligned {address:#x}"
        self._find(address, len(data))[:] = np.frombuffer(data, np.uint8)


@dataclass
class Barrier:
    count: int
    pending: int
    n_bytes: int = 0
    phase: int = 0

    def check(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.n_bytes == 0:
            self.phase ^= 1
            self.pending = self.count


class Watch:
    """Is told what happens in a launch; this one does nothing with it."""

    def begin(self, blocks: list["Block"], n_threads: int, statements: dict[int, str]) -> None:
        """A cluster begins; ``statements`` has the PTX of each line of the translated code."""

    def view(self, block: "Block", tid: int, memory: Memory) -> tuple[Any, Any]:
        """What a thread uses in the place of its block and of global memory."""
        return block, memory

    def landed(self, copy: tuple) -> None:
        """An entry of :attr:`Block.in_flight`, before its bytes count on a barrier."""

    def arrived_late(self, block: "Block", tid: int, number: int, address: int) -> None:
        """The copies ``1 .. number`` of a thread have landed, before it arrives."""

    def waited(self, block: "Block", tid: int, line: int, address: int) -> None:
        """A thread's wait for an mbarrier has ended."""

    def cluster_arrive(self, block: "Block", tid: int, line: int) -> None: ...

    def cluster_wait(self, block: "Block", tid: int) -> None: ...

    def together(self, block: "Block", tids: list[int], lines: set[int]) -> None:
        """Threads leave a barrier of their warp or block."""

    def end(self) -> None:
        """All threads of the cluster have ended."""


@dataclass
class Block:
    index: int
    rank: int
    cluster: list["Block"]
    shared: bytearray = field(
        default_factory=lambda: bytearray(b"\xff" * (SHARED_BASE + SHARED_BYTES))
    )
    barriers: dict[int, Barrier] = field(default_factory=dict)
    in_flight: list[tuple] = field(default_factory=list)
    thread_copies: dict[int, int] = field(default_factory=dict)
    """Copies that a thread has begun by itself."""
    late_arrivals: list[tuple] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def place(self, address: int) -> tuple["Block", int]:
        """A block of the cluster, and the address there; ``mapa`` puts the rank above bit 24."""
        rank = address >> 24
        return (self.cluster[rank - 1] if rank else self), address & 0xFFFFFF

    def load(self, address: int, n: int) -> bytes:
        address = u32(address)
        assert address % n == 0 and SHARED_BASE <= address <= len(self.shared) - n, address
        return bytes(self.shared[address : address + n])

    def store(self, address: int, data: bytes) -> None:
        address, n = u32(address), len(data)
        assert address % n == 0 and SHARED_BASE <= address <= len(self.shared) - n, address
        self.shared[address : address + n] = data

    def init(self, address: int, count: int) -> None:
        self.barriers[u32(address)] = Barrier(count, count)

    def arrive(self, address: int, n_bytes: int = 0) -> None:
        barrier = self.barriers[u32(address)]
        barrier.n_bytes += n_bytes
        barrier.pending -= 1
        barrier.check()

    def fence(self) -> None:
        """For a :class:`Watch`."""

    def copy_later(self, address: int, data: bytes, barrier: int) -> None:
        assert u32(address) % 16 == 0 and len(data) % 16 == 0
        self.in_flight.append((self.place(u32(address)), data, self.place(u32(barrier))))

    def copy_of_thread(self, tid: int, address: int, data: bytes) -> None:
        """``cp.async``: only :meth:`arrive_later` tells of its end."""
        assert u32(address) % len(data) == 0
        number = self.thread_copies[tid] = self.thread_copies.get(tid, 0) + 1
        self.in_flight.append((self.place(u32(address)), data, (None, (tid, number))))

    def arrive_later(self, tid: int, address: int) -> None:
        """Arrive when all copies of the thread so far have landed."""
        self.late_arrivals.append((tid, self.thread_copies.get(tid, 0), address))

    def deliver(self, rng: random.Random) -> bool:
        n = rng.randint(0, len(self.in_flight))
        rng.shuffle(self.in_flight)
        for _ in range(n):
            copy = self.in_flight.pop()
            (block, address), data, (owner, at) = copy
            assert SHARED_BASE <= address <= len(block.shared) - len(data)
            block.shared[address : address + len(data)] = data
            self.watch.landed(copy)
            if owner is not None:
                owner.barriers[at].n_bytes -= len(data)
                owner.barriers[at].check()
        flying = [at for _, _, (owner, at) in self.in_flight if owner is None]
        waiting = []
        for tid, number, barrier in self.late_arrivals:
            if any(t == tid and k <= number for t, k in flying):
                waiting.append((tid, number, barrier))
            else:
                self.watch.arrived_late(self, tid, number, barrier)
                self.arrive(barrier)
        moved = n > 0 or len(waiting) < len(self.late_arrivals)
        self.late_arrivals = waiting
        return moved


def multiply_tiles(requests: list[tuple]) -> list[tuple]:
    """``mma.m16n8k16`` of a warp: BF16 times BF16 into FP32."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, (ra, rb, rc) in enumerate(requests):
        g, q = lane // 4, 2 * (lane % 4)
        for bits, row, k in zip(ra, (g, g + 8, g, g + 8), (q, q, q + 8, q + 8), strict=True):
            a[row, k], a[row, k + 1] = from_bf16(u32(bits) & 0xFFFF), from_bf16(u32(bits) >> 16)
        for bits, k in zip(rb, (q, q + 8), strict=True):
            b[k, g], b[k + 1, g] = from_bf16(u32(bits) & 0xFFFF), from_bf16(u32(bits) >> 16)
        c[g, q], c[g, q + 1], c[g + 8, q], c[g + 8, q + 1] = map(to_float, rc)
    with np.errstate(all="ignore"):
        out = c + np.einsum("ik,kj->ij", a, b)
    lanes = [(lane // 4, 2 * (lane % 4)) for lane in range(WARP)]
    return [tuple(float(out[g + i, q + j]) for i in (0, 8) for j in (0, 1)) for g, q in lanes]


# From PTX to a Python generator for one thread. It yields what needs others: waits, shuffles, products, block barriers.

_CODES = {"b32": "I", "u32": "I", "s32": "i", "f32": "f", "b64": "Q"}
_BYTES = {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8}
_CONVERSIONS = {
    "s16": ("s16", "u16"),
    "u16": ("u16", "u16"),
    "b16": ("u16", "u16"),
    "s32": ("s32", "u32"),
    "u32": ("u32", "u32"),
    "b32": ("u32", "u32"),
    "s64": ("s64", "u64"),
    "u64": ("u64", "u64"),
    "b64": ("u64", "u64"),
}
_SPECIAL = {
    "%tid.x": "tid",
    "%ctaid.x": "block.index",
    "%nctaid.x": "n_blocks",
    "%laneid": "(tid & 31)",
}
_FLOAT = {
    "add": "to_float({0}) + to_float({1})",
    "sub": "to_float({0}) - to_float({1})",
    "mul": "to_float({0}) * to_float({1})",
    "fma": "to_float({0}) * to_float({1}) + to_float({2})",
    "max": "maximum({0}, {1})",
    "neg": "-to_float({0})",
    "ex2": "exp2({0})",
    "lg2": "log2({0})",
    "rcp": "reciprocal({0})",
    "rsqrt": "rsqrt({0})",
    "mov": "{0}",
    "selp": "({0} if {2} else {1})",
}
_INTEGER = {
    "add": "{i}({0}) + {i}({1})",
    "sub": "{i}({0}) - {i}({1})",
    "mul": "{i}({0}) * {i}({1})",
    "mad": "{i}({0}) * {i}({1}) + {i}({2})",
    "and": "{i}({0}) & {i}({1})",
    "or": "{i}({0}) | {i}({1})",
    "xor": "{i}({0}) ^ {i}({1})",
    "not": "~{i}({0})",
    "neg": "-{i}({0})",
    "shl": "{i}({0}) << {1}",
    "shr": "{i}({0}) >> {1}",
    "min": "min({i}({0}), {i}({1}))",
    "max": "max({i}({0}), {i}({1}))",
    "div": "int({i}({0}) / {i}({1}))",
    "rem": "int(math.fmod({i}({0}), {i}({1})))",
}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_WAIT = re.compile(
    r"\{\s*\.reg \.pred done;\s*wait:\s*mbarrier\.try_wait\.parity(\S*) done, \[([^\]]*)\], ([^;]*);"
    r"\s*@!done bra wait;\s*\}"
)


def _value(operand: str) -> str:
    operand = operand.strip()
    if operand.startswith("%"):
        return _SPECIAL.get(operand) or operand.replace("%", "_")
    if operand.startswith("0f"):
        return f"to_float({int(operand[2:], 16)})"
    if operand.startswith("__dynamic_shmem"):
        return str(SHARED_BASE)
    return str(int(operand, 0))


def _address(operand: str) -> str:
    inner = operand.strip().strip("[]")
    sum_of = re.match(r"(%?\w+)\s*\+\s*(-?\w+)$", inner)
    return f"({_value(sum_of[1])} + {int(sum_of[2], 0)})" if sum_of else _value(inner)


def _list(operand: str) -> list[str]:
    return [_value(o) for o in operand.strip("{} ").split(",")]


def _operands(text: str) -> list[str]:
    return [o.strip() for o in re.split(r",\s*(?![^{\[]*[}\]])", text)] if text else []


def _translate(op: str, operands: list[str], parameters: list[str]) -> str:
    """One statement of Python for one instruction."""
    parts = op.split(".")
    name, kind = parts[0], parts[-1]
    o = operands
    if name == "wait":
        return f'yield ("wait", u32({_address(o[0])}), {_value(o[1])})'
    if name == "ld" and parts[1] == "param":
        return f"{_value(o[0])} = parameters[{parameters.index(o[1].strip('[]'))}]"
    if name == "ld":
        targets = _list(o[0])
        memory = "block" if parts[1] == "shared" else "memory"
        n = _BYTES[kind] * len(targets)
        code = f"<{_CODES[kind] * len(targets)}"
        return f'{", ".join(targets)}, = unpack("{code}", {memory}.load({_address(o[1])}, {n}))'
    if op.startswith("st.async"):
        values = [f"to_float({v})" for v in _list(o[1])]
        data = f'pack("<{len(values)}f", {", ".join(values)})'
        return f"block.copy_later({_address(o[0])}, {data}, {_address(o[2])})"
    if name == "st":
        convert = "to_float" if kind == "f32" else "u64" if kind == "b64" else "u32"
        values = [f"{convert}({v})" for v in _list(o[1])]
        memory = "block" if parts[1] == "shared" else "memory"
        data = f'pack("<{_CODES[kind] * len(values)}", {", ".join(values)})'
        return f"{memory}.store({_address(o[0])}, {data})"
    if op.startswith("mbarrier.init"):
        return f"block.init({_address(o[0])}, {_value(o[1])})"
    if op.startswith("mbarrier.arrive"):
        n_bytes = _value(o[2]) if "expect_tx" in op else "0"
        return f"block.arrive({_address(o[1])}, {n_bytes})"
    if op.startswith("cp.async.bulk.shared"):
        data = f"memory.load({_address(o[1])}, {_value(o[2])})"
        return f"block.copy_later({_address(o[0])}, {data}, {_address(o[3])})"
    if op.startswith("cp.async.mbarrier.arrive.noinc"):
        return f"block.arrive_later(tid, {_address(o[0])})"
    if op.startswith("cp.async.c"):
        data = f"memory.load({_address(o[1])}, {_value(o[2])})"
        return f"block.copy_of_thread(tid, {_address(o[0])}, {data})"
    if name == "mapa":
        return f"{_value(o[0])} = (({_value(o[2])} + 1) << 24) | u32({_value(o[1])})"
    if op == "elect.sync":
        return f"{_value(o[0].split('|')[1])} = (tid & 31) == 0"
    if op == "bar.warp.sync":
        return 'yield ("warp",)'
    if op == "bar.sync" or op.startswith("barrier.sync"):
        return 'yield ("block",)'
    if op.startswith("barrier.cluster"):
        return f'yield ("cluster {parts[2]}",)'
    if name == "fence":
        return "block.fence()"
    if name in ("setmaxnreg", "griddepcontrol"):
        return "pass"
    if name == "createpolicy":
        return f"{_value(o[0])} = 0"
    if name == "shfl":
        lane = f"{_value(o[2])}" if parts[2] == "idx" else f"((tid & 31) ^ {_value(o[2])})"
        return f'{_value(o[0].split("|")[0])} = yield ("shuffle", {_value(o[1])}, {lane})'
    if name == "mma":
        d, a, b, c = (", ".join(_list(x)) for x in o)
        return f'{d} = yield ("mma", ({a}), ({b}), ({c}))'
    if op == "mov.b32" and o[0].startswith("{"):
        halves = [x.strip() for x in o[0].strip("{}").split(",")]
        word = f"u32({_value(o[1])})"
        low, high = ("_unused" if h == "_" else _value(h) for h in halves)
        return f"{low}, {high} = {word} & 0xFFFF, {word} >> 16"
    target, values = _value(o[0]), [_value(x) for x in o[1:]]
    if op == "cvt.rn.bf16x2.f32":
        return f"{target} = (to_bf16({values[0]}) << 16) | to_bf16({values[1]})"
    if op == "cvt.rn.satfinite.e4m3x2.f32":
        return f"{target} = (to_e4m3({values[0]}) << 8) | to_e4m3({values[1]})"
    if op == "cvt.rn.f16x2.e4m3x2":
        return f"{target} = to_f16x2_of_e4m3x2({values[0]})"
    if op == "cvt.f32.f16":
        return f"{target} = from_f16({values[0]})"
    if op == "prmt.b32":
        return f"{target} = permute_bytes({', '.join(values)})"
    if op == "mul.rn.bf16x2":
        return f"{target} = mul_bf16x2({values[0]}, {values[1]})"
    if op.startswith("cvt.rn.f32"):
        return f"{target} = float({_CONVERSIONS[kind][0]}({values[0]}))"
    if name == "cvt":
        return f"{target} = {_CONVERSIONS[kind][0]}({values[0]})" + (
            " & 0xFFFFFFFFFFFFFFFF" if parts[1] in ("u64", "s64") else ""
        )
    if kind == "f32" and name in _FLOAT:
        return f"{target} = {_FLOAT[name].format(*values)}"
    if kind == "pred":
        sign = {"and": " and ", "or": " or ", "xor": " != "}.get(name)
        if name == "mov":
            return f"{target} = bool({values[0]})"
        return f"{target} = " + (sign.join(values) if sign else f"not {values[0]}")
    if name == "setp":
        convert = "to_float" if kind == "f32" else _CONVERSIONS[kind][0]
        return f"{target} = {convert}({values[0]}) {_COMPARE[parts[1]]} {convert}({values[1]})"
    if name == "selp":
        return f"{target} = {_FLOAT['selp'].format(*values)}"
    if name == "mov":
        return f"{target} = {values[0]}"
    convert, wrap = _CONVERSIONS[kind]
    if name == "mul" and parts[1] == "wide":
        return f"{target} = u64({convert}({values[0]}) * {convert}({values[1]}))"
    if name == "mul" and parts[1] == "hi":
        bits = int(kind[1:])
        return f"{target} = {wrap}(({convert}({values[0]}) * {convert}({values[1]})) >> {bits})"
    if name == "mad" and parts[1] == "wide":
        return f"{target} = u64({convert}({values[0]}) * {convert}({values[1]}) + s64({values[2]}))"
    return f"{target} = {wrap}({_INTEGER[name].format(*values, i=convert)})"


def translate(ptx: str) -> tuple[Callable[..., Any], int]:
    """
    :returns: The generator function of a thread, whose attribute ``statements`` has the PTX of each line, and the number of threads of
        a block.
    """
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)\s*(\.[^{]*)\{(.*)\n\}", ptx, re.S)
    assert entry is not None
    parameters = re.findall(r"\.param \.\w+ (\w+)", entry[1])
    threads = re.search(r"reqntid (\d+)", entry[2])
    assert threads is not None
    body = _WAIT.sub(r"wait\1 [\2], \3;", re.sub(r"//.*", "", entry[3]))
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for label, statement in re.findall(r"\s*(?:(\$L\w+):|([^;]+);)", body):
        if label:
            blocks.append([])
            labels[label] = len(blocks) - 1
            continue
        statement = " ".join(statement.split())
        if statement.startswith((".reg", ".pragma")):
            continue
        blocks[-1].append(statement)
        if re.search(r"(^|\s)bra", statement):
            blocks.append([])
    lines = ["def thread(block, tid, n_blocks, parameters, memory):", "  if 0: yield", "  at = 0"]
    lines.append("  while True:")
    of_line: dict[int, str] = {}
    for number, statements in enumerate(blocks):
        lines.append(f"    if at == {number}:")
        for statement in statements:
            of_line[len(lines) + 1] = statement
            guard = ""
            guarded = re.match(r"@(!?)(%\w+)\s+(.*)", statement)
            if guarded:
                guard = f"if {'not ' if guarded[1] else ''}{_value(guarded[2])}: "
                statement = guarded[3]
            op, _, rest = statement.partition(" ")
            if op == "ret":
                code = "return"
            elif op.startswith("bra"):
                code = f"at = {labels[rest.strip()]}; continue"
            else:
                code = _translate(op, _operands(rest), parameters)
            lines.append(f"      {guard}{code}")
        lines.append(f"      at = {number + 1}")
    names = {**globals(), "pack": struct.pack, "unpack": struct.unpack}
    exec(compile("\n".join(lines), "<ptx>", "exec"), names)
    names["thread"].statements = of_line
    return names["thread"], int(threads[1])


class _Warp:
    def __init__(self, block: Block, first: int, threads: list[Any]):
        self.block, self.first, self.threads = block, first, threads
        self.waits: list[tuple | None] = [None] * WARP
        self.answers: list[Any] = [None] * WARP
        self.done = [False] * WARP

    def run(self, cluster: dict[str, int]) -> bool:
        """Run every lane until it waits. Returns whether anything happened."""
        moved = False
        for lane in range(WARP):
            while not self.done[lane]:
                wait = self.waits[lane]
                if wait is not None:
                    if wait[0] == "wait":
                        if self.block.barriers[wait[1]].phase == wait[2]:
                            break
                    elif wait[0] == "cluster wait":
                        if cluster["phase"] == wait[1]:
                            break
                    elif wait[0] != "go on":
                        break
                moved = True
                tid = self.first + lane
                if wait is not None and wait[0] == "wait":
                    self.block.watch.waited(self.block, tid, self.line(lane), wait[1])
                elif wait is not None and wait[0] == "cluster wait":
                    self.block.watch.cluster_wait(self.block, tid)
                self.waits[lane] = None
                try:
                    request = self.threads[lane].send(self.answers[lane])
                except StopIteration:
                    self.done[lane] = True
                    break
                self.answers[lane] = None
                if request[0] == "cluster arrive":
                    self.block.watch.cluster_arrive(self.block, tid, self.line(lane))
                    self.phase = cluster["phase"]
                    cluster["arrived"] += 1
                    if cluster["arrived"] == cluster["threads"]:
                        cluster["arrived"], cluster["phase"] = 0, cluster["phase"] + 1
                    continue
                if request[0] == "cluster wait":
                    request = ("cluster wait", self.phase)
                self.waits[lane] = request
        return moved | self._together()

    def line(self, lane: int) -> int:
        """Where a lane waits, in the translated code."""
        return self.threads[lane].gi_frame.f_lineno

    def _together(self) -> bool:
        """What all lanes do at once."""
        kinds = {
            w[0] if w else None for w, done in zip(self.waits, self.done, strict=True) if not done
        }
        if len(kinds) != 1 or not kinds <= {"warp", "shuffle", "mma"}:
            return False
        assert not any(self.done), "a lane has left before a warp's common instruction"
        requests = [w[1:] for w in self.waits if w is not None]
        if kinds == {"mma"}:
            self.answers = list(multiply_tiles(requests))
        elif kinds == {"shuffle"}:
            self.answers = [requests[lane][0] for _, lane in requests]
        else:
            tids = list(range(self.first, self.first + WARP))
            self.block.watch.together(self.block, tids, {self.line(lane) for lane in range(WARP)})
        self.waits = [("go on",)] * WARP
        return True


def launch(
    ptx: str,
    grid: int,
    cluster: int,
    parameters: list[Any],
    memory: Memory,
    seed: int = 0,
    watch: Watch | None = None,
) -> None:
    """
    Run a kernel to its end, one cluster after the other.

    :param grid: Blocks.
    :param parameters: The kernel's, addresses by :meth:`Memory.add`.
    :raises AssertionError: On an access outside of memory or misaligned, and if all threads wait for ever.
    """
    thread, n_threads = translate(ptx)
    rng = random.Random(seed)
    watch = watch or Watch()
    for first in range(0, grid, cluster):
        blocks: list[Block] = []
        blocks += [Block(first + rank, rank, blocks, watch=watch) for rank in range(cluster)]
        watch.begin(blocks, n_threads, thread.statements)  # type: ignore[attr-defined]

        def start(block: Block, tid: int) -> Any:
            own, of_grid = watch.view(block, tid, memory)
            return thread(own, tid, grid, parameters, of_grid)

        warps = [
            _Warp(b, w, [start(b, w + lane) for lane in range(WARP)])
            for b in blocks
            for w in range(0, n_threads, WARP)
        ]
        state = {"arrived": 0, "phase": 0, "threads": n_threads * cluster}
        idle = 0
        while not all(all(w.done) for w in warps):
            rng.shuffle(warps)
            moved = False
            for b in blocks:
                moved |= b.deliver(rng)
            for w in warps:
                if rng.random() < 0.7:
                    moved |= w.run(state)
            for b in blocks:
                waiting = [w for w in warps if w.block is b and ("block",) in w.waits]
                if sum(w.waits.count(("block",)) for w in waiting) == n_threads:
                    moved = True
                    lines = {w.line(lane) for w in waiting for lane in range(WARP)}
                    watch.together(b, list(range(n_threads)), lines)
                    for w in waiting:
                        w.waits = [("go on",)] * WARP
            idle = 0 if moved else idle + 1
            assert idle < 100, (
                f"all threads wait: {sorted({str(x) for w in warps for x in w.waits})}"
            )
        assert not any(b.in_flight or b.late_arrivals for b in blocks), (
            "a block ended before its copies"
        )
        watch.end()

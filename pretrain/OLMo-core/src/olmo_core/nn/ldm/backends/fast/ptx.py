"""
PTX that the kernels are built from, one function for each instruction: shared memory by 32-bit and global memory by
64-bit byte addresses. Importing this module needs the CuTe DSL (``nvidia-cutlass-dsl``).
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint16, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import T, dsl_user_op

LOG2_E = 1.4426950408889634

Bits = Any
"""``Uint32``: two BF16 numbers, or the bits of an FP32 number."""


@dsl_user_op
def as_float(bits, *, loc=None, ip=None):
    return Float32(llvm.bitcast(T.f32(), Uint32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def unpack(bits):
    """The two BF16 numbers of a register as FP32."""
    return as_float(bits << Uint32(16)), as_float(bits & Uint32(0xFFFF0000))


def pack(low, high):
    """Two FP32 numbers as BF16, rounded to nearest."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[Float32(low), Float32(high)],
    )


def load_shared_4(address):
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(address)],
    )


def load_shared_float_4(address):
    return inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[Int32(address)],
    )


def load_shared_float(address):
    return inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[Int32(address)]
    )


def store_shared_float(address, value, predicate=None):
    inline_ptx(
        "st.shared.f32 [{$r0}], {$r1};",
        read_only_args=[Int32(address), Float32(value)],
        predicate=predicate,
    )


def store_shared_float_2(address, values, predicate=None):
    inline_ptx(
        "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[Int32(address), *map(Float32, values)],
        predicate=predicate,
    )


def store_shared_float_4(address, values, predicate=None):
    inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(address), *map(Float32, values)],
        predicate=predicate,
    )


def load_global_float(address):
    return inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[Int64(address)]
    )


def load_global_float_4(address):
    return inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[Int64(address)],
    )


def store_global_float(address, value, predicate=None):
    inline_ptx(
        "st.global.f32 [{$r0}], {$r1};",
        read_only_args=[Int64(address), Float32(value)],
        predicate=predicate,
    )


def store_global_4(address, values, predicate=None, policy=None):
    if policy is not None:
        inline_ptx(
            "st.global.L2::cache_hint.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, {$r5};",
            read_only_args=[Int64(address), *map(Uint32, values), policy],
            predicate=predicate,
        )
        return
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int64(address), *map(Uint32, values)],
        predicate=predicate,
    )


def mma(a, b, c):
    """
    ``c + a b`` for a tile ``a`` ``[16, 16]``, ``b`` ``[16, 8]`` of BF16 and ``c`` ``[16, 8]`` of FP32, spread over a warp as
    ``mma.sync.m16n8k16`` wants them: 4, 2 and 4 registers of a thread.
    """
    return inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*map(Uint32, a), *map(Uint32, b), *map(Float32, c)],
    )


def copy_to_shared(destination, source, n_bytes, barrier):
    """A bulk copy from global to this block's shared memory; its bytes count on ``barrier``."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[Int32(destination), Int64(source), Int32(n_bytes), Int32(barrier)],
    )


def barrier_init(barrier, count):
    inline_ptx(
        "mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[barrier, Int32(count)]
    )


def barrier_expect(barrier, n_bytes):
    """Arrive, and wait for that many bytes too."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[Int32(barrier), Int32(n_bytes)],
    )


def barrier_arrive(barrier, predicate=None):
    inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];",
        read_only_args=[Int32(barrier)],
        predicate=predicate,
    )


def barrier_wait(barrier, parity):
    inline_ptx(
        "{\n.reg .pred done;\nwait:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@!done bra wait;\n}",
        read_only_args=[Int32(barrier), Int32(parity)],
    )


def barrier_wait_cluster(barrier, parity):
    """As :func:`barrier_wait`, for what other blocks of the cluster have written."""
    inline_ptx(
        "{\n.reg .pred done;\nwait:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@!done bra wait;\n}",
        read_only_args=[Int32(barrier), Int32(parity)],
    )


def peer_address(address, rank):
    """The address of the same place in the shared memory of another block of the cluster."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(rank)],
    )


def store_peer_4(address, values, barrier):
    """16 bytes to another block's shared memory; they count on its ``barrier``. Both by :func:`peer_address`."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[Int32(address), *map(Float32, values), Int32(barrier)],
    )


def exp(x):
    return inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[x * Float32(LOG2_E)],
    )


def reciprocal(x):
    return inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def rsqrt(x):
    return inline_ptx(
        "rsqrt.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def sigmoid(x):
    return reciprocal(Float32(1.0) + exp(-x))


def maximum(a, b):
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


@dsl_user_op
def as_bits(value, *, loc=None, ip=None):
    return Uint32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def load_shared_bits(address):
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[Int32(address)]
    )


def load_shared_2(address):
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[Int32(address)],
    )


def store_global_bits(address, value, predicate=None):
    inline_ptx(
        "st.global.b32 [{$r0}], {$r1};",
        read_only_args=[Int64(address), Uint32(value)],
        predicate=predicate,
    )


def store_global_2(address, values, predicate=None):
    inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[Int64(address), *map(Uint32, values)],
        predicate=predicate,
    )


def pack8(values):
    """
    Four FP32 numbers as FP8 (e4m3: 448 at most, else that), rounded to nearest, in the bytes of a word: columns 0, 2, 1 and 3, for
    :func:`unpack8`.
    """

    def two(low, high):
        return Uint32(
            inline_ptx(
                "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};",
                write_only_types=[Uint16],
                read_only_args=[Float32(low), Float32(high)],
            )
        )

    a, b, c, d = values
    return two(a, c) | (two(b, d) << Uint32(16))


def unpack8(word) -> tuple:
    """
    What :func:`pack8` made, as two pairs of BF16 numbers, exactly. Sign, exponent and mantissa move to their places in BF16, whose
    exponents are 120 higher; the product sees to that, and to numbers below 2^-6, whose exponent is 0 in both.
    """
    sign, rest = Uint32(0x80008000), Uint32(0x07F007F0)
    low = ((word << Uint32(8)) & sign) | ((word << Uint32(4)) & rest)
    high = (word & sign) | ((word >> Uint32(4)) & rest)
    # 2^120, in a register: the instruction takes no constant.
    scale = inline_ptx("mov.b32 {$w0}, 0x7B807B80;", write_only_types=[Uint32])
    return tuple(
        inline_ptx(
            "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[bits, scale],
        )
        for bits in (low, high)
    )


def floats8(two) -> list:
    """The two FP8 numbers in the low half of ``two`` as FP32: by the conversion to FP16, fewer instructions than by :func:`unpack8`."""
    halves = inline_ptx(
        "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[Uint16(two)]
    )
    return [
        inline_ptx("cvt.f32.f16 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[half])
        for half in (Uint16(halves), Uint16(halves >> Uint32(16)))
    ]


def floats8_of_half_word(word, second) -> list:
    """Columns 0 and 1 of a word of :func:`pack8`, or 2 and 3, as FP32; ``second`` is 0 or 1."""
    # Byte ``second`` and the one two after it.
    two = inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[word, Uint32(0x20) + Uint32(0x11) * Uint32(second)],
    )
    return floats8(two)


def floats8_of_word(word) -> list:
    """The four numbers of a word of :func:`pack8` as FP32, in the order of their columns."""
    a, c = floats8(word)
    b, d = floats8(word >> Uint32(16))
    return [a, b, c, d]


def select(condition, a, b):
    """``a`` where ``condition`` holds, else ``b``; both ``Uint32``."""
    mask = Uint32(0) - Uint32(Int32(condition))
    return (a & mask) | (b & ~mask)


def keep_policy():
    """For loads and stores: keep what they touch in the L2 cache when others stream through it."""
    return inline_ptx(
        "createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64]
    )


def load_global_4(address, policy=None):
    if policy is not None:
        return inline_ptx(
            "ld.global.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
            write_only_types=[Uint32] * 4,
            read_only_args=[Int64(address), policy],
        )
    return inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int64(address)],
    )


def load_global_float_2(address):
    return inline_ptx(
        "ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[Int64(address)],
    )


def load_shared_float_2(address):
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[Int32(address)],
    )

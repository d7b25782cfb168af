"""
Small parts that the CuTe DSL kernels of this backend, of :mod:`..fast_inference` and of mHC's ``fast`` share. Importing this module needs
``nvidia-cutlass-dsl``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from . import ptx


def zeros() -> list:
    return [Float32(0.0)] * 4


def sum_over(value, n: int):
    """The sum over each group of ``n`` lanes, in all of them."""
    for i in range(n.bit_length() - 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=n >> (i + 1))
    return value


def max_over(value, n: int):
    for i in range(n.bit_length() - 1):
        value = ptx.maximum(value, cute.arch.shuffle_sync_bfly(value, offset=n >> (i + 1)))
    return value


def spread(value, n: int) -> list:
    """The values of lanes 0 .. n - 1, in all lanes."""
    return [cute.arch.shuffle_sync(value, offset=i) for i in range(n)]


def dot(u, v):
    out = u[0] * v[0]
    for a, b in zip(u[1:], v[1:], strict=True):
        out = out + a * b
    return out


def load_row(address, n: int) -> list:
    """``n`` floats from shared memory."""
    return [v for i in range(n // 4) for v in ptx.load_shared_float_4(address + 16 * i)]


def load_pairs(address):
    """8 columns of BF16 from shared memory as FP32."""
    return [f for r in ptx.load_shared_4(address) for f in ptx.unpack(r)]


def pack_pairs(values):
    return [ptx.pack(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def where_both(a, b):
    """Both conditions; ``None`` is one that always holds."""
    return b if a is None else a if b is None else a & b


def split(value):
    """Two numbers as BF16 pairs: the high parts and what they leave."""
    a, b = value
    high = ptx.pack(a, b)
    ha, hb = ptx.unpack(high)
    return high, ptx.pack(a - ha, b - hb)


def fold(values, upper, distance: int) -> list:
    """
    Half of ``values``, added over two lanes at a ``distance``: the lanes with ``upper`` keep the second half, the others the first.
    """
    n = len(values) // 2
    out = []
    for low, high in zip(values[:n], values[n:], strict=True):
        kept = cutlass.select_(upper, high, low)
        given = cutlass.select_(upper, low, high)
        out.append(kept + cute.arch.shuffle_sync_bfly(given, offset=distance))
    return out

"""
The memories that a window of the ``fast`` backend stores in FP8 (e4m3), for ``memory_dtype=float8``: each row in a unit of its own, a power of
two between an eighth and a sixteenth of its RMS. The kernels read and write them; here is the first one, and what PyTorch makes of
them. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl

from olmo_core.nn.depth.connection import upcast
from olmo_core.nn.depth.triton_ops import next_power_of_2, on_device

Tensor = torch.Tensor

ORDER = (0, 2, 1, 3)
"""In each four columns their bytes, so that a kernel makes two pairs of BF16 of a word with two shifts for each (``ptx.unpack8``)."""
LARGEST = 448.0
TINY = 1e-30


def encode(numbers: Tensor) -> Tensor:
    """
    :param numbers: ``[..., D]`` in their rows' units.

    :returns: ``[..., D]``, ``uint8``; numbers beyond 448 are 448.
    """
    rounded = numbers.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return rounded.unflatten(-1, (-1, 4))[..., ORDER].flatten(-2)


def decode(stored: Tensor) -> Tensor:
    """The numbers that :func:`encode` rounded, FP32, in their rows' units."""
    ordered = stored.unflatten(-1, (-1, 4))[..., ORDER].flatten(-2)
    return ordered.contiguous().view(torch.float8_e4m3fn).float()


def units_of(memory: Tensor) -> Tensor:
    """The units of the rows of ``memory`` ``[..., K, D]``: ``[..., K]``, FP32."""
    mean_square = memory.float().square().mean(dim=-1).clamp_min(TINY)
    bits = (0.125 * mean_square.sqrt()).view(torch.int32) & 0x7F800000
    return bits.view(torch.float32)


def store(memory: Tensor) -> tuple[Tensor, Tensor]:
    """
    :param memory: ``[..., K, D]``, ``D`` a multiple of 4.

    :returns: The rows ``[..., K, D]``, ``uint8``, and their units ``[..., K]``, FP32.
    """
    if not memory.is_cuda:
        units = units_of(memory)
        return encode(memory.float() / units[..., None]), units
    return store_on_gpu(memory)


def store_on_gpu(memory: Tensor) -> tuple[Tensor, Tensor]:
    memory = memory.contiguous()
    d = memory.shape[-1]
    n_rows = memory.numel() // d
    stored = torch.empty_like(memory, dtype=torch.uint8)
    units = memory.new_empty(memory.shape[:-1], dtype=torch.float32)
    block = next_power_of_2(d)
    rows = max(1, 4096 // block)
    if n_rows:
        with on_device(memory.get_device()):
            store_kernel[(-(-n_rows // rows),)](
                memory, stored, units, n_rows, d, BLOCK=block, ROWS=rows, num_warps=8
            )
    return stored, units


@triton.jit
def store_kernel(memory, stored, units, n_rows, d, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (column < d)
    x = tl.load(memory + row * d + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.maximum(tl.sum(x * x, axis=1) / d, 1e-30)
    bits = (0.125 * tl.sqrt(mean_square)).to(tl.int32, bitcast=True) & 0x7F800000
    unit = bits.to(tl.float32, bitcast=True)
    per_unit = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    x = x * per_unit[:, None]
    size = tl.minimum(tl.abs(x), 448.0)
    # To nearest even: of a normal number, and of one below 2^-6, whose steps are 2^-9 (what is added makes those the last bits).
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(size < 0.015625, small, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    place = (column & -4) | ((column & 1) << 1) | ((column >> 1) & 1)
    tl.store(stored + row * d + place, byte.to(tl.uint8), mask=inside)
    own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(units + own, unit, mask=own < n_rows)


def load(stored: Tensor, coefficients: Tensor, earlier: list[Tensor]) -> Tensor:
    """
    ``D S + sum_i c_i y_i``, FP32.

    :param stored: ``S``, ``[..., K, D]`` in units.
    :param coefficients: ``D`` and ``c_i``, ``[..., (1 + n) K]``, FP32.
    :param earlier: The ``n`` outputs ``y_i``, ``[..., D]``.
    """
    held = coefficients.unflatten(-1, (1 + len(earlier), stored.shape[-2]))
    out = held[..., 0, :, None] * decode(stored)
    for i, output in enumerate(earlier, start=1):
        out = out + held[..., i, :, None] * upcast(output)[..., None, :]
    return out

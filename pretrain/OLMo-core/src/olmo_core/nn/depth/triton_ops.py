"""
What the Triton backends of all depth connections share: sizes, the current device, and ops with a fast eager path.

Two ways lead to the same launches. Traced code (``torch.compile``, export, fake tensors, selective checkpointing) sees torch
ops. Eager code calls the launches from an :class:`torch.autograd.Function`: the dispatcher and the Python autograd of an op
cost the host several times what the launches do, and a model has a boundary for each sublayer.
"""

import contextlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_NOWHERE = contextlib.nullcontext()


def triton_unavailable(device: torch.device, *, interpreter: bool) -> str | None:
    """
    Why Triton kernels cannot run on a device, as one clause; ``None`` if they can. Imports no Triton.

    :param interpreter: Whether Triton's interpreter will do: it is for tests, and far slower than the reference.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu"
    if device.type != "cuda" and not (interpreter and interpreted):
        return f"it needs a CUDA device (or, if asked for by name, TRITON_INTERPRET=1 on a CPU), got '{device.type}'"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@cache
def multiprocessors(device: int) -> int:
    """The number of multiprocessors of a CUDA device; 1 for a negative number, the CPU of the interpreter."""
    if device < 0:
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def architecture(device: int) -> int:
    """The compute capability as in ``sm_90``; 0 for a negative number, the CPU of the interpreter."""
    if device < 0:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def on_device(device: int) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if device < 0 or device == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


def is_eager(t: torch.Tensor) -> bool:
    """
    Whether the launches may be called directly: nothing traces, no transform of :mod:`torch.func` is active, and the tensor has
    data of its own.
    """
    return not (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or type(t) is not torch.Tensor
        or t.is_meta
    )


class EagerFunction(torch.autograd.Function):
    """
    For calls that :func:`is_eager` allows, without ``setup_context``: ``apply`` goes past torch's Python layer, which looks at
    each argument for what transforms of :mod:`torch.func` left there, 3 us for those of a boundary.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.apply = super(torch.autograd.Function, cls).apply  # type: ignore[method-assign, misc]


def empty_like(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Contiguous. ``new_empty`` with a shape takes the host twice as long."""
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def define_op(name: str, schema: str, launch: Callable, fake: Callable) -> Any:
    """
    Define ``depth_memory::name`` for CPU (the interpreter) and CUDA. Below ``custom_op``, whose check for aliasing walks
    over all tensors of every call.

    :returns: The op's overload, to be called.
    """
    qualified = f"depth_memory::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, ("cpu", "cuda"), launch)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.depth_memory, name).default

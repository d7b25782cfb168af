"""
Launches of Triton kernels at a fraction of the host's time.

``JITFunction.run`` looks at every argument of every call to find the compiled kernel: 40-60 us for the 40 arguments of a
boundary, three times what the rest of its launch costs, and a model has a boundary for each sublayer. Here the compiled
kernel is remembered by what can change between calls: the device, the dtypes and which tensors are absent.
"""

import inspect
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

_KNOWN = tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7))
"""Triton's versions whose ``CompiledKernel.run`` takes what is passed here; others go through ``JITFunction.run``."""


def _observed() -> bool:
    """Whether a profiler has hooked launches: only ``JITFunction.run`` gives it what it wants to know."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class Launcher:
    """
    One Triton kernel with its compile-time arguments. The kernel's arguments are tensors from outside (or tuples of them),
    tensors of our own, numbers that it is not specialised on, and constants, in this order.

    :param constants: By name; those that the kernel has no argument for are left out.
    :param options: Triton's launch options, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any):
        self.kernel = kernel
        names = inspect.signature(kernel.fn).parameters
        self.constants = tuple(constants[name] for name in names if name.isupper())
        self.options = options
        self.compiled: dict[tuple, tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        given: tuple[torch.Tensor | tuple[torch.Tensor, ...] | None, ...],
        own: tuple[torch.Tensor | None, ...],
        *numbers: Any,
    ) -> None:
        """
        Launch on the current stream of the current device, which must be the tensors'.

        :param given: Of any layout: the kernel sees a contiguous copy if need be. All tensors of a tuple have one dtype.
        :param own: Just allocated and so contiguous and aligned; their dtypes and which are absent follow from ``given``
            and the constants. The first is not ``None``.
        """
        pointers: list[int | tuple[int, ...] | None] = []
        key: list[Any] = [own[0].get_device()]  # type: ignore[union-attr]
        copies: list[torch.Tensor] = []
        bits = 0
        for t in given:
            if t is None:
                pointers.append(None)
                key.append(None)
                continue
            if isinstance(t, tuple):
                members = [m if m.is_contiguous() else m.contiguous() for m in t]
                copies += members
                addresses = tuple([m.data_ptr() for m in members])
                for pointer in addresses:
                    bits |= pointer
                pointers.append(addresses)
                key.append((len(addresses), members[0].dtype))
                continue
            if not t.is_contiguous():
                t = t.contiguous()
                copies.append(t)  # keeps its memory until the launch
            pointer = t.data_ptr()
            bits |= pointer
            pointers.append(pointer)
            key.append(t.dtype)
        # Compiled for addresses that are multiples of 16, which all of torch's own allocations are.
        found = None if bits % 16 else self.compiled.get(tuple(key))
        if found is None or _observed():
            self._launch(grid, (*given, *own), numbers, None if bits % 16 else tuple(key))
            return
        run, function, metadata = found
        stream = triton.runtime.driver.active.get_current_stream(key[0])
        pointers += [None if t is None else t.data_ptr() for t in own]
        run(
            *grid, stream, function, metadata, None, None, None,
            *pointers, *numbers, *self.constants,
        )  # fmt: skip

    def _launch(self, grid, tensors, numbers, key: tuple | None) -> None:
        """As Triton does it, and remember what it compiled."""
        tensors = [
            tuple(m.contiguous() for m in t)
            if isinstance(t, tuple)
            else t
            if t is None
            else t.contiguous()
            for t in tensors
        ]
        kernel = self.kernel[grid](*tensors, *numbers, *self.constants, **self.options)
        if key is not None and _KNOWN and isinstance(kernel, CompiledKernel):
            self.compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)

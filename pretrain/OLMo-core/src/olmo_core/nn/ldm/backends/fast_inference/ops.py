"""
Launches, torch op and public functions of the ``fast_inference`` backend. Importing this module needs Triton, for boundary 0
and for prefill's packing, which are the flexible backend's.
"""

from functools import cache

import torch

from olmo_core.nn.depth.triton_ops import define_op, empty_like, is_eager, on_device

from ..fast import cache as kernel_cache
from ..fast import ops as fast
from ..fast.driver import Kernel
from ..flexible.options import BoundaryOptions
from ..reference import LDMParameters
from . import launch_table, packing
from .layout import Spec

Tensor = torch.Tensor

first_boundary = fast.first_boundary

OVERLAP = True
"""Whether a decode kernel starts, and loads its maps, while the kernel before it ends (programmatic dependent launch)."""


@cache
def _kernel(spec: Spec, device: int) -> Kernel:
    code = kernel_cache.get(spec, fast._architecture(device))
    return Kernel(
        code.cubin,
        code.entry,
        spec.arguments,
        device=device,
        threads=spec.threads,
        shared_bytes=spec.shared["size"],
        cluster=spec.cluster,
    )


@cache
def _plan(options: str, d: int, device: int, end: int) -> tuple[Spec, Kernel] | None:
    """The decode kernel of a bucket; ``None``: prefill."""
    o = BoundaryOptions.decode(options)
    launch = launch_table.launch(fast._architecture(device), d, o.d_k, end)
    if launch is None:
        raise RuntimeError(f"LDM's fast_inference backend has no kernel for d_model {d}")
    if launch.prefill:
        return None
    spec = launch_table.spec_of(launch, d, o.d_k, o.key_activation, o.forget)
    return spec, _kernel(spec, device)


def forget_plans() -> None:
    """Take changes of the launch table into account."""
    _plan.cache_clear()


def _plan_of(y: Tensor, options: str) -> tuple[Spec, Kernel] | None:
    d = y.shape[-1]
    return _plan(options, d, y.get_device(), launch_table.bucket(y.numel() // d))


def _launch(
    memory: Tensor,
    y: Tensor,
    parameters: LDMParameters,
    norm_weight: Tensor,
    eps: float,
    options: str,
    in_place: bool,
    plan: tuple[Spec, Kernel] | None,
) -> tuple[Tensor, Tensor]:
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    memory, y = fast._aligned(memory), fast._aligned(y)
    packed = packing.of(parameters)
    with on_device(device):
        if plan is None:
            rows = packed.rows(parameters, norm_weight, options)
            return fast.forward_without_saving(memory, y, rows, eps, options, in_place=in_place)
        spec, kernel = plan
        memory_out = memory if in_place else empty_like(memory)
        x = empty_like(y)
        if n_tokens == 0:
            return memory_out, x
        fragments, were_there = packed.fragments(spec, parameters, norm_weight)
        kernel(
            -(-n_tokens // spec.tokens) * spec.cluster,
            memory.data_ptr(),
            y.data_ptr(),
            fragments.data_ptr(),
            memory_out.data_ptr(),
            x.data_ptr(),
            n_tokens,
            eps,
            overlap=OVERLAP and were_there,
        )
    return memory_out, x


def _op_forward(memory, y, *arguments):
    *parameters, norm_weight, eps, options = arguments
    plan = _plan_of(y, options)
    return _launch(memory, y, LDMParameters(*parameters), norm_weight, eps, options, False, plan)


def _fake_forward(memory, y, *arguments):
    return empty_like(memory), empty_like(y)


_forward = define_op(
    "ldm_boundary_inference",
    "(Tensor memory, Tensor y, Tensor? w_key, Tensor? b_key, Tensor? w_query, Tensor b_query, Tensor? w_forget, "
    "Tensor? b_forget, Tensor? w_beta, Tensor? b_beta, Tensor norm_weight, float eps, str options) -> (Tensor, Tensor)",
    _op_forward,
    _fake_forward,
)


def boundary(
    memory: Tensor,
    y: Tensor,
    parameters: LDMParameters,
    options: str,
    norm_weight: Tensor,
    eps: float,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """
    Boundary 1 .. L of the default family, without gradients; see :func:`..reference.ldm_boundary`.

    :param memory: ``S``, ``[..., K, D]``, BF16.
    :param y: The output of the sublayer before, ``[..., D]``, BF16.
    :param options: :attr:`..flexible.options.BoundaryOptions.code`.
    :param in_place: Write the new memory over ``memory``, and return that. Traced code gets new memory whatever this says: an op
        may not return an input.

    :returns: The new memory and ``x`` ``[..., D]``, BF16.
    :raises RuntimeError: If the kernel neither is in the cache nor can be compiled, or the driver refuses it.
    """
    if is_eager(y):
        plan = _plan_of(y, options)
        return _launch(memory, y, parameters, norm_weight, eps, options, in_place, plan)
    return _forward(memory, y, *parameters, norm_weight, eps, options)


def window_boundary(
    state: tuple[Tensor, ...],
    y: Tensor,
    parameters: LDMParameters,
    options: str,
    norm_weight: Tensor,
    eps: float,
    window: int,
    *,
    in_place: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """
    As :func:`boundary`, but prefill stores the memory at every ``window``-th boundary only. The kernel goes by the number of tokens, which
    all boundaries of a forward share: a forward is either decode, which stores the memory each time, or prefill in windows.

    :param state: ``(S,)``; in the middle of a window as :func:`..fast.ops.window_boundary` has it.
    :param in_place: Write the new memory, where one is stored, over the state's.

    :returns: The new state and ``x`` ``[..., D]``, BF16.
    :raises ValueError: If the state is not one of this window and of the tokens of ``y``.
    :raises RuntimeError: If the kernel neither is in the cache nor can be compiled, or the driver refuses it.
    """
    memory, *rest = state
    if not is_eager(y):
        memory, x = _forward(fast.memory_of(state), y, *parameters, norm_weight, eps, options)
        return (memory,), x
    plan = _plan_of(y, options)
    if plan is not None:
        if rest:
            raise ValueError(
                f"LDM's decode kernel takes a stored memory, not a state in the middle of a window of {window} boundaries: "
                f"all boundaries of a forward must have the same tokens; here an output has shape {tuple(y.shape)}"
            )
        memory, x = _launch(memory, y, parameters, norm_weight, eps, options, in_place, plan)
        return (memory,), x
    with on_device(y.get_device()):
        rows = packing.of(parameters).rows(parameters, norm_weight, options)
        return fast.window_without_saving(state, y, rows, eps, options, window, in_place=in_place)

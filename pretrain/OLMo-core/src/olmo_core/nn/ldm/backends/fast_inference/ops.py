"""
Launches, torch op and public functions of the ``fast_inference`` backend. Importing this module needs Triton, for boundary 0
and for prefill's packing, which are the flexible backend's.
"""

from functools import cache

import torch

from olmo_core.nn.depth.triton_ops import define_op, is_eager, on_device

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


def _launch(
    memory: Tensor,
    y: Tensor,
    parameters: LDMParameters,
    norm_weight: Tensor,
    eps: float,
    options: str,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    memory, y = fast._aligned(memory), fast._aligned(y)
    plan = _plan(options, d, device, launch_table.bucket(n_tokens))
    packed = packing.of(parameters)
    with on_device(device):
        if plan is None:
            rows = packed.rows(parameters, norm_weight, options)
            return fast.forward_without_saving(memory, y, rows, eps, options, in_place=in_place)
        spec, kernel = plan
        memory_out = memory if in_place else memory.new_empty(memory.shape)
        x = y.new_empty(y.shape)
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
    return _launch(memory, y, LDMParameters(*parameters), norm_weight, eps, options, False)


def _fake_forward(memory, y, *arguments):
    return memory.new_empty(memory.shape), y.new_empty(y.shape)


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
        return _launch(memory, y, parameters, norm_weight, eps, options, in_place)
    return _forward(memory, y, *parameters, norm_weight, eps, options)

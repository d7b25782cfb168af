"""
Launch functions, torch ops and public functions of the ``fast`` backend. Importing this module needs Triton: the parameters are
packed, and boundary 0 is run, by the flexible backend, with which this one shares its buffers and its autograd.
"""

from functools import cache
from typing import Any

import torch

from olmo_core.nn.depth.triton_ops import define_op, is_eager, on_device

from ..flexible import ops as flexible
from ..flexible.options import BoundaryOptions
from ..reference import LDMParameters
from . import cache as kernel_cache
from . import launch_table
from .driver import Kernel
from .layout import Spec

Tensor = torch.Tensor

first_boundary = flexible.first_boundary


def _architecture(device: int) -> str:
    return kernel_cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]


@cache
def _kernel(spec: Spec, device: int) -> Kernel:
    code = kernel_cache.get(spec, _architecture(device))
    finish = spec.direction == "finish"
    return Kernel(
        code.cubin,
        code.entry,
        spec.arguments,
        device=device,
        threads=64 if finish else spec.threads,
        shared_bytes=0 if finish else spec.shared["size"],
        cluster=1 if finish else spec.cluster,
    )


class _Plan:
    """A kernel with what does not change between calls."""

    def __init__(self, spec: Spec, device: int):
        self.spec = spec
        self.kernel = _kernel(spec, device)
        self.max_clusters = self.kernel.max_clusters()

    def clusters(self, n_tokens: int) -> int:
        return min(self.max_clusters, -(-n_tokens // self.spec.tokens))


def _spec(
    direction: str, options: str, d: int, device: int, memory_gradient: bool = True
) -> Spec | None:
    o = BoundaryOptions.decode(options)
    return launch_table.spec(
        _architecture(device), direction, d, o.d_k, o.key_activation, o.forget, memory_gradient
    )


@cache
def _forward_plan(options: str, d: int, device: int) -> _Plan:
    spec = _spec("forward", options, d, device)
    if spec is None:
        raise RuntimeError(f"LDM's fast backend has no forward kernel for d_model {d}")
    return _Plan(spec, device)


@cache
def _backward_plan(
    options: str, d: int, device: int, memory_gradient: bool
) -> tuple[_Plan, Kernel] | None:
    """``None``: the flexible backend's kernel runs instead."""
    spec = _spec("backward", options, d, device, memory_gradient)
    if spec is None:
        return None
    finish = _spec("finish", options, d, device)
    assert finish is not None
    return _Plan(spec, device), _kernel(finish, device)


def forget_plans() -> None:
    """Take changes of the launch table into account."""
    _forward_plan.cache_clear()
    _backward_plan.cache_clear()


def _aligned(t: Tensor) -> Tensor:
    """Contiguous, and at an address for 16-byte accesses, as torch's own allocations are."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _extra_columns(d_k: int) -> int:
    return Spec("forward", 64, d_k).extra_columns


def _forward_outputs(o: BoundaryOptions, memory: Tensor, y: Tensor):
    d = y.shape[-1]
    n_tokens = y.numel() // d
    columns = o.n_rows + 4 + _extra_columns(o.d_k)
    return (
        y.new_empty(memory.shape),
        y.new_empty(y.shape),
        None,
        None,
        y.new_empty((o.n_rows + 1) * d + o.n_biases + n_tokens * columns, dtype=torch.float32),
    )


def _launch_forward(
    memory: Tensor,
    y: Tensor,
    key_input: Tensor | None,
    residual: Tensor | None,
    pending: Tensor | None,
    w_key: Tensor | None,
    b_key: Tensor | None,
    w_query: Tensor | None,
    b_query: Tensor,
    w_forget: Tensor | None,
    b_forget: Tensor | None,
    w_beta: Tensor | None,
    b_beta: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    options: str,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor]:
    """
    As :func:`..flexible.ops._launch_forward`; the last tensor is longer by what this backend's backward wants.
    """
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    o = BoundaryOptions.decode(options)
    memory_out, x, _, _, packed = out = _forward_outputs(o, memory, y)
    if n_tokens == 0:
        return out
    plan = _forward_plan(options, d, device)
    pack = flexible._forward_plan(options, d, device)
    memory, y = _aligned(memory), _aligned(y)
    start = packed.data_ptr()
    saved = start + 4 * ((o.n_rows + 1) * d + o.n_biases)
    with on_device(device):
        pack.pack(
            pack.pack_grid,
            (
                w_forget, w_beta, w_key, w_query, norm_weight, b_query, b_key, b_forget, b_beta,
            ),
            (packed,),
        )  # fmt: skip
        plan.kernel(
            plan.clusters(n_tokens) * plan.spec.cluster,
            memory.data_ptr(),
            y.data_ptr(),
            start,
            saved,
            saved + 4 * n_tokens * (o.n_rows + 4),
            memory_out.data_ptr(),
            x.data_ptr(),
            n_tokens,
            eps,
        )
    return out


def _launch_backward(
    memory: Tensor,
    y: Tensor,
    key_input: Tensor | None,
    residual: Tensor | None,
    packed: Tensor,
    d_memory_out: Tensor | None,
    d_x: Tensor,
    d_residual_out: Tensor | None,
    options: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """As :func:`..flexible.ops._launch_backward`."""
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    plans = _backward_plan(options, d, device, d_memory_out is not None) if n_tokens else None
    if plans is None:
        return flexible._launch_backward(
            memory, y, key_input, residual, packed, d_memory_out, d_x, d_residual_out, options
        )
    plan, finish = plans
    o, spec = BoundaryOptions.decode(options), plan.spec
    d_memory, d_y, _, _, d_parameters = out = flexible._backward_outputs(o, memory, y, None, None)
    clusters = plan.clusters(n_tokens)
    partials = packed.new_empty(clusters * spec.n_parameters)
    memory, y, d_x = _aligned(memory), _aligned(y), _aligned(d_x)
    if d_memory_out is not None:
        d_memory_out = _aligned(d_memory_out)
    start = packed.data_ptr()
    saved = start + 4 * ((o.n_rows + 1) * d + o.n_biases)
    with on_device(device):
        plan.kernel(
            clusters * spec.cluster,
            memory.data_ptr(),
            y.data_ptr(),
            start,
            saved,
            saved + 4 * n_tokens * (o.n_rows + 4),
            0 if d_memory_out is None else d_memory_out.data_ptr(),
            d_x.data_ptr(),
            d_memory.data_ptr(),
            d_y.data_ptr(),
            partials.data_ptr(),
            n_tokens,
        )
        finish(
            -(-spec.n_parameters // 256),
            partials.data_ptr(),
            d_parameters.data_ptr(),
            clusters,
        )
    return out


def _op_forward(memory, y, *arguments):
    return flexible._filled(y, _launch_forward(memory, y, *arguments))


def _fake_forward(memory, y, key_input, residual, pending, *arguments):
    return flexible._filled(y, _forward_outputs(BoundaryOptions.decode(arguments[-1]), memory, y))


def _op_backward(memory, y, *arguments):
    return flexible._filled(y, _launch_backward(memory, y, *arguments))


_forward = define_op("ldm_boundary_fast", flexible._FORWARD_SCHEMA, _op_forward, _fake_forward)
_backward = define_op(
    "ldm_boundary_fast_backward",
    flexible._BACKWARD_SCHEMA,
    _op_backward,
    flexible._fake_backward,
)


def _backward_boundary(ctx, *grads):
    return flexible._backward_boundary(ctx, *grads, launch=_launch_backward, op=_backward)


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        memory_out, x, residual_out, y_out, packed = _launch_forward(*inputs)
        flexible._save(ctx, inputs, residual_out, y_out, packed)
        return memory_out, x, residual_out

    @staticmethod
    def backward(ctx, *grads):
        return _backward_boundary(ctx, *grads)


torch.library.register_autograd(
    "depth_memory::ldm_boundary_fast", _backward_boundary, setup_context=flexible._setup_boundary
)
torch.library.register_autograd(
    "depth_memory::ldm_boundary_fast_backward", flexible._refuse_double_backward
)


def boundary(
    memory: Tensor,
    y: Tensor,
    parameters: LDMParameters,
    options: str,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """
    Boundary 1 .. L of the default family; see :func:`..reference.ldm_boundary`.

    :param memory: ``S``, ``[..., K, D]``, BF16.
    :param y: The output of the sublayer before, ``[..., D]``, BF16.
    :param options: :attr:`..flexible.options.BoundaryOptions.code`.

    :returns: The new memory and ``x`` ``[..., D]``, BF16.
    :raises RuntimeError: If the kernel neither is in the cache nor can be compiled, or the driver refuses it.
    """
    launch: Any
    if is_eager(y):
        launch = _Boundary.apply if torch.is_grad_enabled() else _launch_forward
    else:
        launch = _forward
    return launch(memory, y, None, None, None, *parameters, norm_weight, eps, options)[:2]

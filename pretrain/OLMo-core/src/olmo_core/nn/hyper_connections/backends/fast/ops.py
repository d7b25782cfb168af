"""
Launches, torch op, autograd and the public function of mHC's ``fast`` backend. Importing this module needs Triton: the
backward and the first and the last boundary are the flexible backend's, with which this one shares its buffers.
"""

from functools import cache
from typing import Any

import torch

from olmo_core.nn.depth.triton_ops import (
    EagerFunction,
    ceil_div,
    define_op,
    is_eager,
    on_device,
)

from ....ldm.backends.fast import cache as kernel_cache
from ....ldm.backends.fast.driver import Kernel
from ..flexible import ops as flexible
from ..flexible.options import BoundaryOptions
from . import launch_table
from .layout import TOKENS, Spec

Tensor = torch.Tensor


def has_kernel(options: str) -> bool:
    """Whether the boundary is one between the first and the last: the others are the flexible backend's."""
    o = BoundaryOptions.decode(options)
    return o.previous != "first" and o.has_maps


@cache
def _kernel(spec: Spec, device: int) -> Kernel:
    architecture = kernel_cache.ARCHITECTURES[torch.cuda.get_device_capability(device)[0]]
    code = kernel_cache.get(spec, architecture)
    return Kernel(
        code.cubin,
        code.entry,
        spec.arguments,
        device=device,
        threads=spec.threads,
        shared_bytes=spec.shared["size"],
        cluster=spec.cluster,
    )


class _Plan:
    """A kernel with what does not change between calls."""

    def __init__(self, spec: Spec, device: int):
        self.spec = spec
        self.kernel = _kernel(spec, device)
        self.max_clusters = self.kernel.max_clusters()
        if self.max_clusters < 1:
            raise RuntimeError(
                f"mHC's fast backend: this GPU runs no cluster of {spec.cluster} blocks of {spec.name}"
            )

    def clusters(self, n_tokens: int) -> int:
        return min(self.max_clusters, ceil_div(n_tokens, TOKENS))


@cache
def _plan(options: str, d: int, device: int) -> _Plan | None:
    """``None``: the flexible backend's kernels run instead."""
    if not has_kernel(options):
        return None
    o = BoundaryOptions.decode(options)
    assert o.previous == o.next
    spec = launch_table.spec(d, o.next)
    if spec is None:
        raise RuntimeError(f"mHC's fast backend has no kernel for d_model {d}")
    return _Plan(spec, device)


def _aligned(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in ``dtype``, and at an address for 16-byte accesses, as torch's own allocations are."""
    t = t.to(dtype).contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _launch_forward(
    streams: Tensor | None,
    y: Tensor,
    post: Tensor | None,
    res: Tensor | None,
    phi: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    options: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """As :func:`..flexible.ops._launch_forward`."""
    d, device = y.shape[-1], y.get_device()
    plan = _plan(options, d, device)
    if plan is None:
        return flexible._launch_forward(
            streams, y, post, res, phi, alpha, bias, norm_weight, eps, options
        )
    assert streams is not None and post is not None
    assert phi is not None and alpha is not None and bias is not None
    o, n_tokens = BoundaryOptions.decode(options), y.numel() // d
    flexible.check_state(o, streams, y)
    streams_out, x, post_out, res_out, saved = out = flexible._forward_outputs(
        o, y, streams, post, res
    )
    if n_tokens == 0:
        return out
    assert post_out is not None
    bf16, f32 = y.dtype, torch.float32
    given = [streams, y, post, y if res is None else res, phi, alpha, bias, norm_weight]
    dtypes = (bf16, bf16, f32, bf16 if res is None else f32, f32, f32, f32, f32)
    addresses = []
    for i, dtype in enumerate(dtypes):
        t = given[i]
        address = t.data_ptr()
        # Here and not in a function of its own: its calls take longer than the checks.
        if t.dtype is not dtype or address % 16 or not t.is_contiguous():
            t = given[i] = _aligned(t, dtype)  # kept until the launch
            address = t.data_ptr()
        addresses.append(address)
    with on_device(device):
        plan.kernel(
            plan.clusters(n_tokens) * plan.spec.cluster,
            *addresses,
            streams_out.data_ptr(),
            x.data_ptr(),
            post_out.data_ptr(),
            0 if res_out is None else res_out.data_ptr(),
            saved.data_ptr(),
            n_tokens,
            o.iterations,
            eps,
        )
    return out


def _op_forward(streams, y, *arguments):
    return flexible._filled(y, _launch_forward(streams, y, *arguments))


_forward = define_op(
    "mhc_boundary_fast",
    "(Tensor? streams, Tensor y, Tensor? post, Tensor? res, Tensor? phi, Tensor? alpha, Tensor? bias, "
    "Tensor norm_weight, float eps, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_forward,
    flexible._fake_forward,
)
torch.library.register_autograd(
    "depth_memory::mhc_boundary_fast", flexible._backward_boundary, setup_context=flexible._setup
)


class _Boundary(EagerFunction):
    @staticmethod
    def forward(ctx, *inputs):
        output = _launch_forward(*inputs)
        flexible._setup(ctx, inputs, output)
        return output[:4]

    backward = staticmethod(flexible._backward_boundary)


def boundary(
    streams: Tensor | None,
    y: Tensor,
    post: Tensor | None,
    res: Tensor | None,
    phi: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    options: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """
    One boundary; parameters and results are those of :func:`..flexible.ops.boundary`. The streams are BF16.

    :raises RuntimeError: If the kernel neither is in the cache nor can be compiled, or the driver refuses it.
    """
    launch: Any
    if is_eager(y):
        launch = _Boundary.apply if torch.is_grad_enabled() else _launch_forward
    else:
        launch = _forward
    return launch(streams, y, post, res, phi, alpha, bias, norm_weight, eps, options)[:4]

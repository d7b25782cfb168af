"""
The ``tile_kernels`` backend: DeepSeek's mHC kernels from the package tile-kernels 1.0.0 (MIT; TileLang) behind the boundary.

On an NVIDIA H200 (2026-12-01, tilelang 0.1.9, torch 2.11) its outputs and the gradients of its inputs are within 4.1e-3 of the FP32 reference, those of its parameters within 5.2e-2
(``fast``: 1.8e-2). A boundary at d = 1024 and 16,384 tokens takes 381 us forward and 2,370 backward, where ``fast`` takes 116 and 283. So ``auto`` never takes it. Its first
call compiles for two minutes. What differs from the other backends:

- Its maps are for ``comb = H_res^T``: the columns of ``phi`` for H_res are transposed on the way in, the result on the way out.
- It accumulates the streams' gradient through an attribute of their storage unless told not to, which breaks under activation
  checkpointing or with a second consumer of the streams. Here that is always off, at the price of additions by autograd.
- The product with ``phi`` is in TF32, and the mixture is rounded to BF16 before the norm.
- ``torch.compile`` cannot trace it: each boundary breaks the graph.
"""

import os
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from .flexible.options import BoundaryOptions

if TYPE_CHECKING:
    from ..config import HyperConnectionsConfig

Tensor = torch.Tensor

WIDTH_BLOCK = 256
"""The width must be a multiple of the blocks of its kernels."""
SINKHORN_EPS = 1e-20
"""Added to entries and sums: large enough that nothing is divided by zero, too small to change anything else."""


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.path.exists(os.path.join(home, "bin", "nvcc"))


def unavailable(
    device: torch.device,
    dtype: torch.dtype,
    config: "HyperConnectionsConfig",
    d_model: int,
    *,
    by_name: bool,
) -> str | None:
    """
    Why the backend cannot run for these, as one clause; ``None`` if it can.

    :param by_name: Whether this backend was asked for.
    """
    if not by_name:
        return "it is slower than the other kernels, ask for it by name"
    if config.n_streams != 4 or config.residual_map != "sinkhorn":
        return (
            "its kernels are for n_streams=4 and residual_map='sinkhorn', not "
            f"{config.n_streams} and '{config.residual_map}'"
        )
    if d_model % WIDTH_BLOCK:
        return f"d_model must be a multiple of {WIDTH_BLOCK}, got {d_model}"
    if dtype != torch.bfloat16:
        return f"its streams are BF16, not {dtype}"
    if device.type != "cuda":
        return f"it needs a CUDA device, got '{device.type}'"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs a GPU of compute capability 9.0 or above (Hopper, Blackwell)"
    for package in ("tile_kernels", "tilelang"):
        if find_spec(package) is None:
            return f"{package} is not installed (pip install tile-kernels==1.0.0)"
    if not _has_nvcc():
        return "it compiles its kernels at run time and finds no nvcc (set CUDA_HOME)"
    return None


class _PostMix(torch.autograd.Function):
    """The package's own function of this name keeps the streams' gradient in their storage."""

    @staticmethod
    def forward(ctx, y, streams, post, comb):
        from tile_kernels.modeling.mhc.ops import mhc_post_fwd

        ctx.save_for_backward(y, streams, post, comb)
        return mhc_post_fwd(y, streams, post, comb)

    @staticmethod
    def backward(ctx, *grads):
        from tile_kernels.modeling.mhc.ops import mhc_post_bwd

        return mhc_post_bwd(*ctx.saved_tensors, *grads, fuse_grad_acc=False)


def _transposed_columns(columns: Tensor, n: int) -> Tensor:
    """The last ``n * n`` rows, those of H_res, in the order of its transpose."""
    maps, res = columns[: 2 * n], columns[2 * n :]
    res = res.unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    return torch.cat([maps, res]).contiguous()


def _products(streams: Tensor, phi: Tensor, eps: float) -> Tensor:
    """``RMSNorm(X) phi``, ``[B, T, rows]``, for ``phi`` ``[rows, N * D]``, padded to the rows that the kernel is for."""
    from tile_kernels.modeling.mhc.ops import mhc_pre_norm_fn

    rows, n = phi.shape[0], streams.shape[-2]
    phi = F.pad(phi, (0, 0, 0, n * (n + 2) - rows))
    return mhc_pre_norm_fn(streams, phi, None, eps, fuse_grad_acc=False)[..., :rows].contiguous()


@torch.compiler.disable
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
    """As :func:`.flexible.ops.boundary`, with ``y`` ``[B, T, D]`` in BF16."""
    from tile_kernels.modeling.mhc import ops

    kernels: Any = ops
    o = BoundaryOptions.decode(options)
    n = o.n_streams
    y = y.contiguous()
    if streams is None:
        streams = y[..., None, :].expand(*y.shape[:-1], n, y.shape[-1]).contiguous()
    else:
        assert post is not None and res is not None
        comb = res.transpose(-1, -2).contiguous()
        streams = _PostMix.apply(y, streams.contiguous(), post[..., None].contiguous(), comb)
    new_post = new_res = None
    if phi is None or alpha is None or bias is None:
        gates = torch.ones(*y.shape[:-1], n, 1, dtype=torch.float32, device=y.device)
    elif not o.has_maps:
        products = _products(streams, phi.t().contiguous(), eps)
        gates = torch.sigmoid(alpha * products + bias)[..., None]
    else:
        products = _products(streams, _transposed_columns(phi.t(), n), eps)
        base = _transposed_columns(bias, n)
        gates, new_post, comb = kernels.mhc_pre_split_mixes(products, alpha, base, n, 2.0, 0.0)
        comb = kernels.sinkhorn_normalize(comb, repeat=o.iterations, eps=SINKHORN_EPS)
        if comb.requires_grad:
            # Its backward takes contiguous gradients only; that of a transpose is not.
            comb.register_hook(Tensor.contiguous)
        new_post, new_res = new_post[..., 0], comb.transpose(-1, -2)
    h = kernels.mhc_pre_apply_mix(streams, gates)
    x = F.rms_norm(h.float(), h.shape[-1:], norm_weight.float(), eps).to(y.dtype)
    return streams, x, new_post, new_res

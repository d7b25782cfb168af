"""
Launches of :mod:`.inference_kernels`: an mHC boundary of few tokens without gradients, as in a decode step. Importing this module
needs Triton. Not for ``torch.compile``: :func:`takes` says when :func:`boundary` may stand in for that of :mod:`.ops`.

Provenance of the times: microseconds of a middle boundary with N = 4 in a CUDA graph; NVIDIA H200, torch 2.11.0, triton 3.6.0,
2026-11-30, commit 2ea8dad, ``python -m olmo_core.nn.hyper_connections.backends.flexible.inference_tune --budget 36``.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from olmo_core.nn.depth import inference
from olmo_core.nn.depth.triton_launcher import Launcher
from olmo_core.nn.depth.triton_ops import (
    architecture,
    ceil_div,
    is_eager,
    multiprocessors,
    next_power_of_2,
    on_device,
)

from . import inference_kernels as kernels
from .options import BoundaryOptions

Tensor = torch.Tensor

MAX_TOKENS = 1024
"""Up to this many tokens these kernels are the faster ones: at 1,024 they take 52 us at D = 2048 and 32 at 1024, the training
forward, with steps of 32 columns, 128 and 67. More tokens are not timed."""
FEW_TOKENS = 4
"""Up to this many, a program has one token and multiplies without the tensor cores, which take 16 at least. One token at D = 2048:
4.5 us, 6.3 on the tensor cores; 8 tokens: 6.9 and 6.4. Between them not timed."""
EARLY = 2
"""What :attr:`Launch.early` is where nothing else is said. One token: 4.54, 4.24 and 4.11 us with 0, 1 and 2 at D = 2048, 5.19,
3.89 and 3.73 at 1024, and the results are equal bit by bit."""


@dataclass(frozen=True)
class Launch:
    tokens: int
    """Tokens of a program that mixes; 16, 32 or 64 multiply on the tensor cores, fewer do not."""
    width: int
    """Columns of such a program, a power of two; >= 16 on the tensor cores."""
    mix_warps: int
    finish_warps: int
    early: int = 0
    """Which kernels start before their predecessor has ended: none, 1 the finishing one, 2 both. Before Hopper always none."""


INTERPRETER_PROCESSORS = 4
"""On a CPU: so few that tests meet chunks of several widths."""


def launch(d_model: int, n_tokens: int, dtype: torch.dtype, device: int) -> Launch:
    """
    Launch numbers, by a rule. Without early starts it gives the fastest of those timed in BF16 at D = 1024 and 2048 with 1, 64 and
    1,024 tokens, and one within 6% of it with 8 and 256.

    :param device: A negative number is the CPU of the interpreter.
    """
    processors = multiprocessors(device) if device >= 0 else INTERPRETER_PROCESSORS
    # The chain of the Sinkhorn iteration runs in every warp alike: a second one on a scheduler would only slow the first, 5.5 us
    # for one token instead of 4.5 with 8 warps.
    finish_warps = max(4, min(16, next_power_of_2(d_model) * dtype.itemsize // 1024))
    if n_tokens <= FEW_TOKENS:
        # One token with 32, 16 and 8 columns, each with its best warps: 5.2, 5.4 and 5.4 us at D = 1024, 5.6, 4.5 and 5.9 at 2048.
        return Launch(1, 16 if d_model >= 2048 else 32, 4, finish_warps, EARLY)
    # Two programs for a multiprocessor.
    tiles = ceil_div(n_tokens, 16)
    width = next_power_of_2(ceil_div(d_model * tiles, 2 * processors))
    return Launch(16, max(16, min(32, width)), 4, finish_warps, EARLY)


class _Plan:
    """Launches of one kind of boundary."""

    def __init__(self, options: str, d: int, dtype: torch.dtype, device: int, launch: Launch):
        o = self.options = BoundaryOptions.decode(options)
        self.launch = launch
        self.chunks = ceil_div(d, launch.width)
        on_tensor_cores = launch.tokens >= 16
        self.columns = next_power_of_2(o.columns + 1)
        if on_tensor_cores:
            self.columns = max(16, self.columns)
        self.roles = 2 if o.next == "sinkhorn" else 1
        waits = architecture(device) >= 90
        exact = dtype in (torch.bfloat16, torch.float16)
        constants = {
            **o.constants,
            "D": d,
            "BN": self.columns,
            "BT": launch.tokens,
            "BD": launch.width,
            "BW": next_power_of_2(d),
            "CHUNKS": self.chunks,
            "BC": next_power_of_2(self.chunks),
            "PRODUCT": ("tf32x2" if exact else "tf32x3") if on_tensor_cores else "fma",
            "NATIVE": device >= 0,
            "WAITS": waits,
        }

        def launcher(kernel: Any, warps: int, early: bool) -> Launcher:
            options = {"launch_pdl": True} if early and waits else {}
            return Launcher(kernel, constants, num_warps=warps, **options)

        self.mix = launcher(kernels.mix_kernel, launch.mix_warps, launch.early >= 2)
        self.finish = launcher(kernels.finish_kernel, launch.finish_warps, launch.early >= 1)


_plan = cache(_Plan)
_launch = cache(launch)


def takes(y: Tensor) -> bool:
    """Whether :func:`boundary` can take this call, and is the faster one; those of the ``flexible`` backend hold as well."""
    return (
        not torch.is_grad_enabled()
        and (y.is_cuda or inference.INTERPRETER)
        and y.numel() <= MAX_TOKENS * y.shape[-1]
        and is_eager(y)
    )


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
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """
    One boundary, all forms of it; parameters and results are those of :func:`.ops.boundary`. May be captured in a CUDA graph.

    :param launch: Instead of :func:`launch`'s.
    """
    *lead, d = y.shape
    device, n_tokens = y.get_device(), y.numel() // d
    plan = _plan(options, d, y.dtype, device, launch or _launch(d, n_tokens, y.dtype, device))
    o = plan.options
    n = o.n_streams

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=y.device)

    streams_out = new(*lead, n, d, dtype=y.dtype)
    x = new(*lead, d, dtype=y.dtype)
    post_out = new(*lead, n) if o.has_maps else None
    res_out = new(*lead, n, n) if o.next == "sinkhorn" else None
    if n_tokens == 0:
        return streams_out, x, post_out, res_out
    partial = None if phi is None else new(n_tokens, plan.chunks, plan.columns)
    with on_device(device):
        plan.mix(
            (plan.chunks, ceil_div(n_tokens, plan.launch.tokens), 1),
            (streams, y, post, res, phi),
            (streams_out, partial),
            n_tokens,
        )
        plan.finish(
            (plan.roles, n_tokens, 1),
            (streams_out, partial, alpha, bias, norm_weight),
            (x, post_out, res_out),
            eps,
        )
    return streams_out, x, post_out, res_out

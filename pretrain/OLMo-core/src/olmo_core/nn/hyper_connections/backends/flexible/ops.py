"""
Launch functions, torch ops, autograd and the public function of mHC's ``flexible`` backend. Importing this module needs
Triton. Traced code sees torch ops, eager code an :class:`torch.autograd.Function`: see
:mod:`olmo_core.nn.depth.triton_ops`.
"""

from functools import cache
from typing import Any

import torch

from olmo_core.nn.depth.triton_launcher import Launcher
from olmo_core.nn.depth.triton_ops import (
    EagerFunction,
    architecture,
    ceil_div,
    define_op,
    empty_like,
    is_eager,
    multiprocessors,
    next_power_of_2,
    on_device,
)

from . import kernels, launch_table
from .options import BoundaryOptions

Tensor = torch.Tensor

# Plans: all that does not change between calls.


def _has_bf16_products(device: int) -> bool:
    """Not the interpreter: it multiplies the bits of BF16 numbers as integers."""
    return device >= 0


_SPLIT_BLOCK = 64
_SUM_BLOCK = 1024
_SUM_COLUMNS = 32


class _Sizes:
    """Grids and scratch memory at one number of tokens."""

    def __init__(self, plan: "_Plan", n_tokens: int):
        o, d, launches = plan.options, plan.d, plan.launches
        n, columns = o.n_streams, o.columns
        self.forward_grid = (ceil_div(n_tokens, launches.forward.tokens), 1, 1)
        maps = ceil_div(n_tokens, plan.collapse_maps) if o.has_maps else 0
        self.collapse_grid = (maps + ceil_div(n_tokens, launches.collapse.rows), 1, 1)

        rows, main, phi = launches.rows, launches.backward, launches.phi
        maps = ceil_div(n_tokens, plan.maps) if o.has_maps else 0
        self.programs = min(n_tokens, rows.programs_per_sm * plan.multiprocessors)
        self.rows_grid = (maps + self.programs, 1, 1)
        self.main_grid = (ceil_div(n_tokens, main.tokens), 1, 1)
        chunks = n * ceil_div(d, phi.width)
        splits = max(1, phi.programs_per_sm * plan.multiprocessors // chunks)
        splits = min(ceil_div(n_tokens, phi.tokens), splits)
        self.tokens_per_split = ceil_div(ceil_div(n_tokens, splits), phi.tokens) * phi.tokens
        self.splits = ceil_div(n_tokens, self.tokens_per_split)
        self.phi_grid = (chunks, self.splits, 1)
        others = columns - n + 2 if columns > n else 0
        self.elements = (
            n_tokens * (columns + 3 + o.iterations * n)
            + self.splits * n * d * columns
            + self.programs * (d + n + 1)
            + ceil_div(n_tokens, plan.maps) * others
        )
        own = d if o.next == "sum" else d + n + 1
        blocks = ceil_div(own, _SUM_COLUMNS) + int(o.has_maps)
        blocks += ceil_div(n * d * columns, _SUM_BLOCK)
        self.finish_grid = (blocks, 1, 1)


class _Plan:
    """Launches of one kind of boundary."""

    def __init__(self, options: str, d: int, device: int, dtype: torch.dtype):
        o = self.options = BoundaryOptions.decode(options)
        self.d = d
        self.multiprocessors = multiprocessors(device)
        launches = self.launches = launch_table.launches(
            architecture(device), dtype, d, o.n_streams
        )
        forward, collapse, rows = launches.forward, launches.collapse, launches.rows
        main, phi = launches.backward, launches.phi
        # Other dtypes take TF32x3 products.
        self.bf16 = dtype == torch.bfloat16 and _has_bf16_products(device)
        # The maps' programs have one token for each thread.
        self.collapse_maps, self.maps = 32 * collapse.warps, 32 * rows.warps
        self.split_grid = (ceil_div(o.n_streams * d, _SPLIT_BLOCK), 1, 1)
        self.split_phi = Launcher(
            kernels.split_kernel, {**o.constants, "D": d, "BLOCK": _SPLIT_BLOCK}, num_warps=4
        )
        self.sizes_of: dict[int, _Sizes] = {}
        shared = {
            **o.constants,
            "D": d,
            "BW": next_power_of_2(d),
            "BM": self.maps,
            "BF16": self.bf16,
        }
        self.forward = Launcher(
            kernels.boundary_forward_kernel,
            {
                **shared,
                "BT": forward.tokens,
                "BD": forward.width,
                "STAGES": forward.stages,
            },
            num_warps=forward.warps,
            maxnreg=forward.registers,
        )
        self.collapse = Launcher(
            kernels.collapse_kernel,
            {**shared, "ROWS": collapse.rows, "BM": self.collapse_maps},
            num_warps=collapse.warps,
        )
        self.rows = Launcher(
            kernels.rows_backward_kernel,
            {**shared, "STAGES": rows.stages},
            num_warps=rows.warps,
            maxnreg=rows.registers,
        )
        self.main = Launcher(
            kernels.streams_backward_kernel,
            {**shared, "BT": main.tokens, "BD": main.width, "STAGES": main.stages},
            num_warps=main.warps,
            maxnreg=main.registers,
        )
        self.phi = Launcher(
            kernels.phi_backward_kernel,
            {**shared, "BT": phi.tokens, "BD": phi.width, "STAGES": phi.stages},
            num_warps=phi.warps,
        )
        self.finish = Launcher(
            kernels.finish_kernel,
            {**shared, "BLOCK": _SUM_BLOCK, "BP": 256, "BS": _SUM_COLUMNS},
            num_warps=8,
        )

    def sizes(self, n_tokens: int) -> _Sizes:
        found = self.sizes_of.get(n_tokens)
        if found is None:
            found = self.sizes_of[n_tokens] = _Sizes(self, n_tokens)
        return found


@cache
def _plan(options: str, d: int, device: int, dtype: torch.dtype) -> _Plan:
    return _Plan(options, d, device, dtype)


def forget_plans() -> None:
    """Take changes of the launch table into account."""
    _plan.cache_clear()


# Launches: tensors in, tensors out.


def check_state(o: BoundaryOptions, streams: Tensor | None, y: Tensor) -> None:
    """
    The new state is made as large as the given one, which the kernels do not look at.

    :raises ValueError: If the streams are not those of the tokens of ``y``.
    """
    if streams is not None and streams.numel() != o.n_streams * y.numel():
        raise ValueError(
            f"mHC with {o.n_streams} streams cannot take streams of shape {tuple(streams.shape)} with an output of shape "
            f"{tuple(y.shape)}"
        )


def _empty(like: Tensor | None, y: Tensor, *own: int) -> Tensor:
    """``[..., *own]``, FP32: as ``like``, if there is one, which is faster than to put a shape together."""
    f32 = torch.float32
    return y.new_empty((*y.shape[:-1], *own), dtype=f32) if like is None else empty_like(like, f32)


def _forward_outputs(
    o: BoundaryOptions,
    y: Tensor,
    streams: Tensor | None = None,
    post: Tensor | None = None,
    res: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    d = y.shape[-1]
    n_tokens = y.numel() // d
    n = o.n_streams
    return (
        y.new_empty((*y.shape[:-1], n, d)) if streams is None else empty_like(streams, y.dtype),
        empty_like(y),
        _empty(post, y, n) if o.has_maps else None,
        _empty(res, y, n, n) if o.next == "sinkhorn" else None,
        y.new_empty(n_tokens * (o.columns + 2 + n), dtype=torch.float32),
    )


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
    """
    :returns: The new streams, ``x``, the new ``post`` and ``res`` (``None`` where the options leave one out), and for
        the backward the products with ``phi`` and the reciprocal RMS of streams and mixture.
    """
    d, device = y.shape[-1], y.get_device()
    plan = _plan(options, d, device, y.dtype)
    check_state(plan.options, streams, y)
    streams_out, x, post_out, res_out, saved = out = _forward_outputs(
        plan.options, y, streams, post, res
    )
    n_tokens = y.numel() // d
    if n_tokens == 0:
        return out
    sizes = plan.sizes(n_tokens)
    with on_device(device):
        if plan.bf16 and phi is not None:
            terms = y.new_empty(2 * phi.numel())
            plan.split_phi(plan.split_grid, (phi,), (terms,))
            phi = terms
        plan.forward(
            sizes.forward_grid,
            (streams, y, post, res, phi),
            (streams_out, saved),
            n_tokens,
            eps,
        )
        plan.collapse(
            sizes.collapse_grid,
            (alpha, bias, norm_weight),
            (streams_out, x, post_out, res_out, saved),
            n_tokens,
            eps,
        )
    return out


def _launch_backward(
    streams: Tensor | None,
    y: Tensor,
    post: Tensor | None,
    res: Tensor | None,
    streams_out: Tensor,
    phi: Tensor | None,
    alpha: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor,
    saved: Tensor,
    d_streams_out: Tensor | None,
    d_x: Tensor,
    d_post_out: Tensor | None,
    d_res_out: Tensor | None,
    options: str,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor]:
    """
    :returns: The gradients of the streams, ``y``, ``post``, ``res`` (``None`` where the options leave one out), and of
        all parameters in one FP32 buffer.
    """
    d, device = y.shape[-1], y.get_device()
    plan = _plan(options, d, device, y.dtype)
    o = plan.options
    d_streams, d_y, d_post, d_res, d_parameters = out = _backward_outputs(o, streams, y, post, res)
    n_tokens = y.numel() // d
    if n_tokens == 0:
        d_parameters.zero_()
        return out
    sizes = plan.sizes(n_tokens)
    scratch = saved.new_empty(sizes.elements)
    new_rows = y if o.previous == "first" else streams_out
    counts = (n_tokens, sizes.programs, sizes.splits)
    with on_device(device):
        plan.rows(
            sizes.rows_grid,
            (new_rows, alpha, bias, norm_weight, saved, d_x, d_post_out, d_res_out),
            (scratch,),
            *counts,
        )
        plan.main(
            sizes.main_grid,
            (streams, y, post, res, streams_out, phi, norm_weight, saved, d_streams_out, d_x),
            (d_y, d_streams, d_post, d_res, scratch),
            *counts,
        )
        if phi is not None:
            plan.phi(sizes.phi_grid, (new_rows,), (scratch,), *counts, sizes.tokens_per_split)
        plan.finish(sizes.finish_grid, (), (scratch, d_parameters), *counts)
    return out


def _backward_outputs(
    o: BoundaryOptions,
    streams: Tensor | None,
    y: Tensor,
    post: Tensor | None,
    res: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor]:
    f32 = torch.float32
    return (
        None if streams is None else empty_like(streams),
        empty_like(y),
        None if post is None or o.previous == "first" else empty_like(post, f32),
        None if res is None or o.previous != "sinkhorn" else empty_like(res, f32),
        y.new_empty(sum(o.parameter_sizes(y.shape[-1])), dtype=f32),
    )


# Ops.


def _filled(like: Tensor, out: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An op cannot return None: an empty tensor where the options leave an output out."""
    return tuple(like.new_empty(0) if t is None else t for t in out)


def _op_forward(streams, y, *arguments):
    return _filled(y, _launch_forward(streams, y, *arguments))


def _fake_forward(streams, y, post, res, *arguments):
    o = BoundaryOptions.decode(arguments[-1])
    return _filled(y, _forward_outputs(o, y, streams, post, res))


def _op_backward(streams, y, *arguments):
    return _filled(y, _launch_backward(streams, y, *arguments))


def _fake_backward(streams, y, post, res, *arguments):
    o = BoundaryOptions.decode(arguments[-1])
    return _filled(y, _backward_outputs(o, streams, y, post, res))


_forward = define_op(
    "mhc_boundary",
    "(Tensor? streams, Tensor y, Tensor? post, Tensor? res, Tensor? phi, Tensor? alpha, Tensor? bias, "
    "Tensor norm_weight, float eps, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_forward,
    _fake_forward,
)
_backward = define_op(
    "mhc_boundary_backward",
    "(Tensor? streams, Tensor y, Tensor? post, Tensor? res, Tensor streams_out, Tensor? phi, "
    "Tensor? alpha, Tensor? bias, Tensor norm_weight, Tensor saved, Tensor? d_streams_out, Tensor d_x, "
    "Tensor? d_post_out, Tensor? d_res_out, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_backward,
    _fake_backward,
)


# Autograd, shared by the op and the eager function.


def _setup(ctx, inputs, output) -> None:
    streams, y, post, res, phi, alpha, bias, norm_weight, _, options = inputs
    streams_out, _, _, _, saved = output
    ctx.options = options
    # The streams' gradient is as large as the streams: never make zeros for one that is not used.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(streams, y, post, res, streams_out, phi, alpha, bias, norm_weight, saved)


def _backward_boundary(ctx, d_streams_out, d_x, d_post_out, d_res_out, *_):
    arguments = ctx.saved_tensors  # once: activation checkpointing refuses a second look
    y = arguments[1]
    if d_x is None:
        d_x = torch.zeros_like(y)
    o = BoundaryOptions.decode(ctx.options)
    # With a graph of the backward to be made, the op refuses the second derivative.
    eager = is_eager(d_x) and not torch.is_grad_enabled()
    launch: Any = _launch_backward if eager else _backward
    d_streams, d_y, d_post, d_res, d_parameters = launch(
        *arguments,
        d_streams_out,
        d_x,
        d_post_out if o.has_maps else None,
        d_res_out if o.next == "sinkhorn" else None,
        ctx.options,
    )
    d_phi, d_gain, d_bias, d_alpha = d_parameters.split_with_sizes(o.parameter_sizes(y.shape[-1]))
    has_phi = o.columns > 0
    first = o.previous == "first"
    return (
        None if first else d_streams,
        d_y,
        None if first else d_post,
        d_res if o.previous == "sinkhorn" else None,
        d_phi.view(-1, o.columns) if has_phi else None,  # not phi.shape: torch reads a Size slowly
        d_alpha if has_phi else None,
        d_bias if has_phi else None,
        d_gain,
        None,
        None,
    )


class _Boundary(EagerFunction):
    @staticmethod
    def forward(ctx, *inputs):
        output = _launch_forward(*inputs)
        _setup(ctx, inputs, output)
        return output[:4]

    backward = staticmethod(_backward_boundary)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "mHC's flexible backend has no second derivative: use backend='reference' for one"
    )


torch.library.register_autograd(
    "depth_memory::mhc_boundary", _backward_boundary, setup_context=_setup
)
torch.library.register_autograd("depth_memory::mhc_boundary_backward", _refuse_double_backward)


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
    One boundary: post-mix of the last sublayer, the maps of the next one, pre-mix, norm; see :mod:`..reference`.

    :param streams: ``X``, ``[..., N, D]``, BF16, FP16 or FP32; ``None`` at the first boundary.
    :param y: The output of the sublayer before, ``[..., D]``.
    :param post: ``H_post`` of the boundary before, ``[..., N]``, FP32.
    :param res: Its ``H_res``, ``[..., N, N]``, FP32; ``None`` if it is the identity.
    :param phi: ``[N * D, columns]``; ``None``, as ``alpha`` and ``bias``, where the streams are only summed.
    :param options: :attr:`BoundaryOptions.code`.

    :returns: The new streams and ``x``, in the dtype of ``y``, and ``post`` and ``res`` for the next boundary (nothing
        of use where the options leave them out).
    """
    launch: Any
    if is_eager(y):
        launch = _Boundary.apply if torch.is_grad_enabled() else _launch_forward
    else:
        launch = _forward
    return launch(streams, y, post, res, phi, alpha, bias, norm_weight, eps, options)[:4]

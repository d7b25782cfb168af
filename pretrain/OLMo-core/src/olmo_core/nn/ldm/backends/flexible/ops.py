"""
Launch functions, torch ops and public functions of the ``flexible`` backend. Importing this module needs Triton.

In this order: launches (tensors in, tensors out), ops with fakes and autograd, public
functions.
"""

import contextlib
from functools import cache
from typing import Any

import torch
import triton

from ..reference import LDMParameters
from . import kernels
from .launch_table import (
    backward_launch,
    first_launch,
    forward_launch,
    map_gradient_launch,
    next_power_of_2,
    vector,
)
from .options import MAPS, BoundaryOptions

Tensor = torch.Tensor

# Launches.


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.contiguous() for t in tensors]


def _none(like: Tensor) -> Tensor:
    """What an op returns where the options leave an output out; an op cannot return None."""
    return like.new_empty(0)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    o = BoundaryOptions.decode(options)
    d = y.shape[-1]
    n_tokens = y.numel() // d
    memory_out, x, residual_out, y_out, saved, weights = _fake_forward(
        memory, y, key_input, residual, pending, w_key, b_key, w_query, b_query, w_forget, b_forget,
        w_beta, b_beta, norm_weight, eps, options,
    )  # fmt: skip
    if n_tokens == 0:
        return memory_out, x, residual_out, y_out, saved, weights
    launch = forward_launch(d, o.d_k, y.device.type)
    with _on(y.device):
        if o.n_rows:
            kernels.pack_kernel[(triton.cdiv(d, 64),)](
                *_contiguous(w_forget, w_beta, w_key, w_query),
                weights,
                D=d,
                K=o.d_k,
                GATES=o.gates,
                **o.rows,
                BD=64,
                num_warps=4,
            )
        kernels.boundary_forward_kernel[(triton.cdiv(n_tokens, launch.tokens),)](
            *_contiguous(memory, y, key_input, residual, pending),
            weights if o.n_rows else None,
            *_contiguous(b_key, b_query, b_forget, b_beta, norm_weight),
            memory_out if o.write else None,
            x,
            residual_out if o.write and o.residual else None,
            y_out if pending is not None else None,
            saved,
            n_tokens,
            eps,
            D=d,
            **o.constants,
            PENDING=pending is not None,
            BT=launch.tokens,
            BD=next_power_of_2(d),
            VEC=vector(launch, d),
            num_warps=launch.warps,
        )
    return memory_out, x, residual_out, y_out, saved, weights


def _fake_forward(
    memory, y, key_input, residual, pending, w_key, b_key, w_query, b_query, w_forget, b_forget,
    w_beta, b_beta, norm_weight, eps, options,
):  # fmt: skip
    o = BoundaryOptions.decode(options)
    lead = y.shape[:-1]
    return (
        y.new_empty(memory.shape) if o.write else _none(y),
        y.new_empty(y.shape),
        y.new_empty(y.shape) if o.write and o.residual else _none(y),
        y.new_empty(y.shape) if pending is not None else _none(y),
        y.new_empty((*lead, o.n_rows + 4), dtype=torch.float32),
        y.new_empty((o.n_rows, y.shape[-1]), dtype=torch.float32),
    )


def _launch_finish(
    o: BoundaryOptions,
    partial: Tensor | None,
    partial_norm_weight: Tensor,
    partial_bias: Tensor,
    d_maps: dict[str, Tensor],
    d_biases: dict[str, Tensor],
    d_norm_weight: Tensor,
) -> None:
    d = d_norm_weight.shape[0]
    kernels.finish_kernel[(triton.cdiv(d, 32),)](
        partial,
        partial_norm_weight,
        partial_bias,
        *(d_maps.get(name) for name in MAPS),
        d_norm_weight,
        *(d_biases.get(name) for name in ("query", "key", "forget", "beta")),
        0 if partial is None else partial.shape[0],
        partial_bias.shape[0],
        D=d,
        K=o.d_k,
        GATES=o.gates,
        ROWS=o.n_rows,
        BIASES=partial_bias.shape[1],
        **o.rows,
        BR=next_power_of_2(max(1, o.n_rows)),
        BB=next_power_of_2(partial_bias.shape[1]),
        BP=32,
        BD=32,
        num_warps=4,
    )


def _launch_backward(
    memory: Tensor,
    y: Tensor,
    key_input: Tensor | None,
    residual: Tensor | None,
    weights: Tensor,
    b_key: Tensor | None,
    b_query: Tensor,
    b_forget: Tensor | None,
    b_beta: Tensor | None,
    norm_weight: Tensor,
    saved: Tensor,
    d_memory_out: Tensor | None,
    d_x: Tensor,
    d_residual_out: Tensor | None,
    options: str,
) -> list[Tensor]:
    o = BoundaryOptions.decode(options)
    d = y.shape[-1]
    n_tokens = y.numel() // d
    out = _fake_backward(
        memory, y, key_input, residual, weights, b_key, b_query, b_forget, b_beta, norm_weight,
        saved, d_memory_out, d_x, d_residual_out, options,
    )  # fmt: skip
    if n_tokens == 0:
        for t in out[4:]:
            t.zero_()
        return out
    d_memory, d_y, d_key_input, d_residual = out[:4]
    # fmt: off
    (d_w_key, d_b_key, d_w_query, d_b_query, d_w_forget, d_b_forget, d_w_beta, d_b_beta,
     d_norm_weight) = out[4:]
    # fmt: on
    d_maps = {"forget": d_w_forget, "beta": d_w_beta, "key": d_w_key, "query": d_w_query}
    d_biases = {"query": d_b_query, "key": d_b_key, "forget": d_b_forget, "beta": d_b_beta}
    d_maps = {name: t for name, t in d_maps.items() if t.numel()}
    d_biases = {name: t for name, t in d_biases.items() if t.numel()}

    launch = backward_launch(d, o.d_k, y.device.type)
    multiprocessors = _multiprocessors(y.device)
    programs = min(triton.cdiv(n_tokens, launch.tokens), multiprocessors * launch.programs_per_sm)
    partial_norm_weight = weights.new_empty((programs, d))
    partial_bias = weights.new_empty((programs, o.n_biases))
    d_products = weights.new_empty((n_tokens, o.n_rows)) if o.n_rows else None
    slot_mean = torch.empty_like(d_y) if o.query_source == "memory" else None
    memory, y = memory.contiguous(), y.contiguous()
    key_input = None if key_input is None else key_input.contiguous()
    with _on(y.device):
        kernels.boundary_backward_kernel[(programs,)](
            memory,
            y,
            key_input,
            *_contiguous(residual),
            weights if o.n_rows else None,
            *_contiguous(b_key, b_query, b_forget, b_beta, norm_weight),
            saved,
            *_contiguous(d_memory_out, d_x, d_residual_out),
            d_memory,
            d_y,
            d_key_input if "key" in o.maps and o.key_source == "input" else None,
            d_residual if o.residual else None,
            slot_mean,
            d_products,
            partial_norm_weight,
            partial_bias,
            n_tokens,
            programs,
            D=d,
            **o.constants,
            BIASES=o.n_biases,
            BT=launch.tokens,
            BD=next_power_of_2(d),
            VEC=vector(launch, d),
            STAGES=launch.stages,
            RELOAD=launch.reload,
            maxnreg=launch.registers,
            num_warps=launch.warps,
        )
        partial = None
        if o.n_rows:
            maps = map_gradient_launch(d)
            splits = max(
                1,
                min(
                    triton.cdiv(n_tokens, maps.tokens),
                    2 * multiprocessors // triton.cdiv(d, maps.width),
                ),
            )
            tokens_per_split = triton.cdiv(triton.cdiv(n_tokens, splits), maps.tokens) * maps.tokens
            splits = triton.cdiv(n_tokens, tokens_per_split)
            partial = weights.new_empty((splits, d, o.n_rows))
            sources = {"output": y, "input": key_input, "memory": slot_mean}
            for source, (row, n) in o.groups.items():
                kernels.map_gradient_kernel[(triton.cdiv(d, maps.width), splits)](
                    sources[source],
                    d_products,
                    partial,
                    n_tokens,
                    tokens_per_split,
                    D=d,
                    ROWS=o.n_rows,
                    ROW=row,
                    N=n,
                    # The interpreter multiplies the bits of BF16 numbers.
                    SPLIT=y.dtype == torch.bfloat16 and y.is_cuda,
                    BN=max(16, next_power_of_2(n)),
                    BM=maps.tokens,
                    BD=maps.width,
                    num_warps=maps.warps,
                    num_stages=maps.stages,
                )
        _launch_finish(
            o, partial, partial_norm_weight, partial_bias, d_maps, d_biases, d_norm_weight
        )
    return out


def _fake_backward(
    memory, y, key_input, residual, weights, b_key, b_query, b_forget, b_beta, norm_weight, saved,
    d_memory_out, d_x, d_residual_out, options,
):  # fmt: skip
    o = BoundaryOptions.decode(options)
    d = y.shape[-1]

    def like(t: Tensor | None) -> Tensor:
        return _none(y) if t is None else t.new_empty(t.shape)

    def map_(name: str) -> Tensor:
        if name not in o.maps:
            return _none(weights)
        return weights.new_empty((d,) if name == "beta" else (d, o.maps[name][2]))

    return [
        like(memory),
        like(y),
        like(key_input if "key" in o.maps else None),
        like(residual),
        map_("key"),
        like(b_key),
        map_("query"),
        like(b_query),
        map_("forget"),
        like(b_forget),
        map_("beta"),
        like(b_beta),
        like(norm_weight),
    ]


def _launch_first_forward(
    y: Tensor, key_0: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    d, d_k = y.shape[-1], key_0.shape[0]
    n_tokens = y.numel() // d
    memory, x, rstd = _fake_first_forward(y, key_0, norm_weight, eps)
    if n_tokens == 0:
        return memory, x, rstd
    launch = first_launch(d, d_k, y.device.type)
    with _on(y.device):
        kernels.first_forward_kernel[(triton.cdiv(n_tokens, launch.tokens),)](
            *_contiguous(y, key_0, norm_weight),
            memory,
            x,
            rstd,
            n_tokens,
            eps,
            D=d,
            K=d_k,
            BT=launch.tokens,
            BD=next_power_of_2(d),
            VEC=vector(launch, d),
            num_warps=launch.warps,
        )
    return memory, x, rstd


def _fake_first_forward(y, key_0, norm_weight, eps):
    lead = y.shape[:-1]
    return (
        y.new_empty((*lead, key_0.shape[0], y.shape[-1])),
        y.new_empty(y.shape),
        y.new_empty(lead, dtype=torch.float32),
    )


def _launch_first_backward(
    y: Tensor,
    key_0: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    d_memory: Tensor | None,
    d_x: Tensor,
) -> list[Tensor]:
    d, d_k = y.shape[-1], key_0.shape[0]
    n_tokens = y.numel() // d
    out = _fake_first_backward(y, key_0, norm_weight, rstd, d_memory, d_x)
    d_y, d_key_0, d_norm_weight = out
    if n_tokens == 0:
        d_key_0.zero_()
        d_norm_weight.zero_()
        return out
    launch = first_launch(d, d_k, y.device.type)
    programs = min(
        triton.cdiv(n_tokens, launch.tokens), _multiprocessors(y.device) * launch.programs_per_sm
    )
    partial_norm_weight = rstd.new_empty((programs, d))
    partial_bias = rstd.new_empty((programs, d_k))
    with _on(y.device):
        kernels.first_backward_kernel[(programs,)](
            *_contiguous(y, key_0, norm_weight),
            rstd,
            *_contiguous(d_memory, d_x),
            d_y,
            partial_norm_weight,
            partial_bias,
            n_tokens,
            programs,
            D=d,
            K=d_k,
            BT=launch.tokens,
            BD=next_power_of_2(d),
            VEC=vector(launch, d),
            num_warps=launch.warps,
        )
        _launch_finish(
            _first_options(d_k),
            None,
            partial_norm_weight,
            partial_bias,
            {},
            {"query": d_key_0},
            d_norm_weight,
        )
    return out


def _fake_first_backward(y, key_0, norm_weight, rstd, d_memory, d_x):
    return [
        y.new_empty(y.shape),
        key_0.new_empty(key_0.shape),
        norm_weight.new_empty(d_x.shape[-1]),
    ]


@cache
def _first_options(d_k: int) -> BoundaryOptions:
    """For the sum of the partial gradients of boundary 0, where ``key_0`` stands in the place of the query's bias."""
    return BoundaryOptions(
        d_k, "none", "static", "static", "none", "none", d_k, False, False, False
    )


# Ops. Defined below custom_op, whose check for aliasing walks over all tensors of every call.


def _define(name: str, schema: str, launch, fake) -> Any:
    qualified = f"depth_memory::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, ("cpu", "cuda"), launch)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.depth_memory, name).default


_forward = _define(
    "ldm_boundary",
    "(Tensor memory, Tensor y, Tensor? key_input, Tensor? residual, Tensor? pending, "
    "Tensor? w_key, Tensor? b_key, Tensor? w_query, Tensor b_query, Tensor? w_forget, Tensor? b_forget, "
    "Tensor? w_beta, Tensor? b_beta, Tensor norm_weight, float eps, str options) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = _define(
    "ldm_boundary_backward",
    "(Tensor memory, Tensor y, Tensor? key_input, Tensor? residual, Tensor weights, Tensor? b_key, "
    "Tensor b_query, Tensor? b_forget, Tensor? b_beta, Tensor norm_weight, Tensor saved, "
    "Tensor? d_memory_out, Tensor d_x, Tensor? d_residual_out, str options) -> Tensor[]",
    _launch_backward,
    _fake_backward,
)
_first_forward = _define(
    "ldm_first_boundary",
    "(Tensor y, Tensor key_0, Tensor norm_weight, float eps) -> (Tensor, Tensor, Tensor)",
    _launch_first_forward,
    _fake_first_forward,
)
_first_backward = _define(
    "ldm_first_boundary_backward",
    "(Tensor y, Tensor key_0, Tensor norm_weight, Tensor rstd, Tensor? d_memory, Tensor d_x) -> Tensor[]",
    _launch_first_backward,
    _fake_first_backward,
)


def _setup_boundary(ctx, inputs, output) -> None:
    (memory, y, key_input, residual, pending, _, b_key, _, b_query, _, b_forget, _, b_beta,
     norm_weight, _, options) = inputs  # fmt: skip
    _, _, residual_out, y_out, saved, weights = output
    o = BoundaryOptions.decode(options)
    ctx.options = options
    ctx.has_pending = pending is not None
    # The memory's gradient is as large as the memory: never make zeros for one that is not used.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        memory,
        y if pending is None else y_out,
        key_input,
        residual_out if o.write and o.residual else residual,
        weights,
        b_key,
        b_query,
        b_forget,
        b_beta,
        norm_weight,
        saved,
    )


def _backward_boundary(ctx, d_memory_out, d_x, d_residual_out, *_):
    saved = ctx.saved_tensors  # once: activation checkpointing refuses a second look
    if d_x is None:
        d_x = torch.zeros_like(saved[1])
    o = BoundaryOptions.decode(ctx.options)
    grads = _backward(
        *saved,
        d_memory_out if o.write else None,
        d_x,
        d_residual_out if o.write and o.residual else None,
        ctx.options,
    )
    (d_memory, d_y, d_key_input, d_residual, d_w_key, d_b_key, d_w_query, d_b_query, d_w_forget,
     d_b_forget, d_w_beta, d_b_beta, d_norm_weight) = grads  # fmt: skip
    maps = o.maps
    return (
        d_memory,
        d_y,
        d_key_input if o.key_source == "input" and "key" in maps else None,
        d_residual if o.residual else None,
        d_y if ctx.has_pending else None,
        d_w_key if "key" in maps else None,
        d_b_key if o.write else None,
        d_w_query if "query" in maps else None,
        d_b_query,
        d_w_forget if "forget" in maps else None,
        d_b_forget if o.write and o.forget != "none" else None,
        d_w_beta if "beta" in maps else None,
        d_b_beta if o.write and o.delta else None,
        d_norm_weight,
        None,
        None,
    )


def _setup_first(ctx, inputs, output) -> None:
    y, key_0, norm_weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, key_0, norm_weight, output[2])


def _backward_first(ctx, d_memory, d_x, _):
    saved = ctx.saved_tensors
    if d_x is None:
        d_x = torch.zeros_like(saved[0])
    return (*_first_backward(*saved, d_memory, d_x), None)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "LDM's flexible backend has no second derivative: use backend='reference' for one"
    )


torch.library.register_autograd(
    "depth_memory::ldm_boundary", _backward_boundary, setup_context=_setup_boundary
)
torch.library.register_autograd(
    "depth_memory::ldm_first_boundary", _backward_first, setup_context=_setup_first
)
for _name in ("ldm_boundary_backward", "ldm_first_boundary_backward"):
    torch.library.register_autograd(f"depth_memory::{_name}", _refuse_double_backward)


# Public functions.


def first_boundary(
    y: Tensor, key_0: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """
    Boundary 0; see :func:`..reference.ldm_first_boundary`.

    :param y: ``[..., D]``, BF16, FP16 or FP32.
    :returns: ``S_0`` ``[..., K, D]`` and ``x`` ``[..., D]`` in the dtype of ``y``.
    """
    memory, x, _ = _first_forward(y, key_0, norm_weight, eps)
    return memory, x


def boundary(
    memory: Tensor,
    y: Tensor,
    parameters: LDMParameters,
    options: str,
    norm_weight: Tensor,
    eps: float,
    *,
    key_input: Tensor | None = None,
    residual: Tensor | None = None,
    pending: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Boundary 1 .. L: forget, write ``pending + y``, query, read, normalise; see :func:`..reference.ldm_boundary`.

    Unlike there, ``residual`` is the stream before this boundary. One that writes adds ``y`` to it and returns it; one
    that only reads adds ``residual + y`` (or ``y`` alone) to what it reads.

    :param memory: ``S``, ``[..., K, D]``.
    :param y: The output of the sublayer before, ``[..., D]``.
    :param options: :attr:`BoundaryOptions.code`.
    :param key_input: The input that the sublayer saw, ``[..., D]``, for ``key_source=input``.
    :param residual: ``[..., D]``, for ``residual=kept``.
    :param pending: Attention's output at a block's end, ``[..., D]``, for ``write_every=block``.

    :returns: The new memory (empty if this boundary only reads), ``x`` ``[..., D]`` and the new residual (empty if
        there is none), in the dtype of ``y``.
    """
    memory_out, x, residual_out, _, _, _ = _forward(
        memory, y, key_input, residual, pending, *parameters, norm_weight, eps, options
    )
    return memory_out, x, residual_out

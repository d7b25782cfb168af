"""
Launch functions, torch ops, autograd and public functions of the ``flexible`` backend. Importing this module needs
Triton.

Two ways lead to the same launches. Traced code (``torch.compile``, export, fake tensors, selective checkpointing) sees torch
ops. Eager code takes an :class:`torch.autograd.Function`: the dispatcher and the Python autograd of an op cost the host
several times what the launches do, and a model has a boundary for each sublayer.
"""

from functools import cache
from typing import Any

import torch

from olmo_core.nn.depth.triton_launcher import Launcher
from olmo_core.nn.depth.triton_ops import (
    EagerFunction,
    ceil_div,
    define_op,
    empty_like,
    is_eager,
    multiprocessors,
    next_power_of_2,
    on_device,
)

from ..reference import LDMParameters
from . import kernels
from .launch_table import (
    backward_launch,
    first_launch,
    forward_launch,
    map_gradient_launch,
    vector,
)
from .options import BoundaryOptions

Tensor = torch.Tensor

# Plans: all that does not change between calls.


class _Forward:
    """Launches of one kind of boundary."""

    def __init__(self, options: str, d: int, device: int):
        o = self.options = BoundaryOptions.decode(options)
        launch = forward_launch(d, o.d_k, "cpu" if device < 0 else "cuda")
        self.tokens = launch.tokens
        self.pack_grid = (ceil_div(d, 64), 1, 1)
        self.pack = Launcher(kernels.pack_kernel, {"D": d, "BD": 64, **o.constants}, num_warps=4)
        shared = {
            "D": d,
            "BT": launch.tokens,
            "BD": next_power_of_2(d),
            "VEC": vector(launch, d),
            **o.constants,
        }
        self.boundary, self.boundary_pending = (
            Launcher(
                kernels.boundary_forward_kernel,
                {**shared, "PENDING": p},
                num_warps=launch.warps,
                maxnreg=launch.registers,
            )
            for p in (False, True)
        )


class _Partials:
    """Sizes of the scratch memory of one backward."""

    def __init__(self, plan: "_Backward | _FirstBackward", n_tokens: int):
        o, d = plan.options, plan.d
        self.programs = min(ceil_div(n_tokens, plan.tokens), plan.max_programs)
        self.grid = (self.programs, 1, 1)
        self.splits = self.tokens_per_split = 0
        if o.n_rows:
            maps = plan.maps
            splits = min(ceil_div(n_tokens, maps.tokens), plan.max_splits)
            steps = ceil_div(ceil_div(n_tokens, splits), maps.tokens)
            self.tokens_per_split = steps * maps.tokens
            self.splits = ceil_div(n_tokens, self.tokens_per_split)
        self.maps_grid = (ceil_div(d, plan.maps.width), self.splits, len(o.groups))
        self.elements = (
            self.programs * (d + o.n_biases) + self.splits * d * o.n_rows + n_tokens * o.n_rows
        )


class _Backward:
    def __init__(self, options: BoundaryOptions, d: int, device: int, launch, maps_split: bool):
        o = self.options = options
        self.d = d
        self.tokens = launch.tokens
        self.max_programs = multiprocessors(device) * launch.programs_per_sm
        maps = self.maps = map_gradient_launch(d)
        self.max_splits = max(1, 2 * multiprocessors(device) // ceil_div(d, maps.width))
        self.partials: dict[int, _Partials] = {}
        constants = {
            "D": d,
            "BT": launch.tokens,
            "BD": next_power_of_2(d),
            "VEC": vector(launch, d),
            "STAGES": launch.stages,
            "RELOAD": launch.reload,
            **o.constants,
        }
        self.boundary = self._boundary(constants, launch)
        groups = {
            f"{source.upper()}_{name}": o.groups.get(source, (0, 0))[i]
            for source in ("output", "input", "memory")
            for i, name in enumerate(("ROW", "N"))
        }
        widest = max((n for _, n in o.groups.values()), default=0)
        self.map_gradient = Launcher(
            kernels.map_gradient_kernel,
            {
                **o.constants,
                **groups,
                "D": d,
                "SPLIT": maps_split,
                "BN": max(16, next_power_of_2(max(1, widest))),
                "BM": maps.tokens,
                "BD": maps.width,
            },
            num_warps=maps.warps,
            num_stages=maps.stages,
        )
        self.finish_grid = (ceil_div(d, 32), 1, 1)
        self.finish = Launcher(
            kernels.finish_kernel,
            {
                **o.constants,
                "D": d,
                "BR": next_power_of_2(max(1, o.n_rows)),
                "BB": next_power_of_2(o.n_biases),
                "BP": 32,
                "BD": 32,
            },
            num_warps=4,
        )

    def _boundary(self, constants: dict[str, Any], launch) -> Launcher:
        return Launcher(
            kernels.boundary_backward_kernel,
            constants,
            num_warps=launch.warps,
            maxnreg=launch.registers,
        )

    def sizes(self, n_tokens: int) -> _Partials:
        found = self.partials.get(n_tokens)
        if found is None:
            found = self.partials[n_tokens] = _Partials(self, n_tokens)
        return found


class _FirstBackward(_Backward):
    def _boundary(self, constants: dict[str, Any], launch) -> Launcher:
        return Launcher(kernels.first_backward_kernel, constants, num_warps=launch.warps)


@cache
def _forward_plan(options: str, d: int, device: int) -> _Forward:
    return _Forward(options, d, device)


@cache
def _backward_plan(options: str, d: int, device: int, dtype: torch.dtype) -> _Backward:
    o = BoundaryOptions.decode(options)
    launch = backward_launch(d, o.d_k, "cpu" if device < 0 else "cuda")
    # The interpreter multiplies the bits of BF16 numbers.
    split = dtype == torch.bfloat16 and device >= 0
    return _Backward(o, d, device, launch, split)


@cache
def _first_forward_plan(d: int, d_k: int, device: int) -> tuple[int, Launcher]:
    launch = first_launch(d, d_k, "cpu" if device < 0 else "cuda")
    constants = {
        "D": d,
        "K": d_k,
        "BT": launch.tokens,
        "BD": next_power_of_2(d),
        "VEC": vector(launch, d),
    }
    return launch.tokens, Launcher(kernels.first_forward_kernel, constants, num_warps=launch.warps)


@cache
def _first_options(d_k: int) -> BoundaryOptions:
    """Without maps; ``key_0`` stands in the place of the query's bias."""
    return BoundaryOptions(
        d_k, "none", "static", "static", "none", "none", d_k, False, False, False
    )


@cache
def _first_backward_plan(d: int, d_k: int, device: int) -> _FirstBackward:
    launch = first_launch(d, d_k, "cpu" if device < 0 else "cuda")
    return _FirstBackward(_first_options(d_k), d, device, launch, False)


def forget_plans() -> None:
    """Take changes of the launch table into account."""
    for plan in (_forward_plan, _backward_plan, _first_forward_plan, _first_backward_plan):
        plan.cache_clear()


# Launches: tensors in, tensors out.


def _forward_outputs(o, memory, y, pending):
    d = y.shape[-1]
    n_tokens = y.numel() // d
    return (
        empty_like(memory, y.dtype) if o.write else None,
        empty_like(y),
        empty_like(y) if o.write and o.residual else None,
        empty_like(y) if pending is not None else None,
        y.new_empty(
            (o.n_rows + 1) * d + o.n_biases + n_tokens * (o.n_rows + 4), dtype=torch.float32
        ),
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
    :returns: The new memory, ``x``, the new residual, ``pending + y`` (``None`` where the options leave one out), and
        the packed parameters with the saved products.
    """
    d = y.shape[-1]
    device = y.get_device()
    plan = _forward_plan(options, d, device)
    memory_out, x, residual_out, y_out, packed = out = _forward_outputs(
        plan.options, memory, y, pending
    )
    n_tokens = y.numel() // d
    if n_tokens == 0:
        return out
    with on_device(device):
        plan.pack(
            plan.pack_grid,
            (
                w_forget, w_beta, w_key, w_query, norm_weight, b_query, b_key, b_forget, b_beta,
            ),
            (packed,),
        )  # fmt: skip
        launcher = plan.boundary if pending is None else plan.boundary_pending
        launcher(
            (ceil_div(n_tokens, plan.tokens), 1, 1),
            (memory, y, key_input, residual, pending),
            (packed, memory_out, x, residual_out, y_out),
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
    """
    :returns: The gradients of the memory, ``y``, ``key_input``, the residual (``None`` where the options leave one
        out), and of all parameters in one FP32 buffer.
    """
    d = y.shape[-1]
    device = y.get_device()
    plan = _backward_plan(options, d, device, y.dtype)
    o = plan.options
    d_memory, d_y, d_key_input, d_residual, d_parameters = out = _backward_outputs(
        o, memory, y, key_input, residual
    )
    n_tokens = y.numel() // d
    if n_tokens == 0:
        d_parameters.zero_()
        return out
    sizes = plan.sizes(n_tokens)
    scratch = packed.new_empty(sizes.elements)
    slot_mean = empty_like(y) if o.query_source == "memory" else None
    with on_device(device):
        plan.boundary(
            sizes.grid,
            (memory, y, key_input, residual, packed, d_memory_out, d_x, d_residual_out),
            (d_memory, d_y, d_key_input, d_residual, slot_mean, scratch),
            n_tokens,
            sizes.programs,
            sizes.splits,
        )
        if o.n_rows:
            plan.map_gradient(
                sizes.maps_grid,
                (y, key_input),
                (scratch, slot_mean),
                n_tokens,
                sizes.programs,
                sizes.splits,
                sizes.tokens_per_split,
            )
        plan.finish(plan.finish_grid, (), (scratch, d_parameters), sizes.programs, sizes.splits)
    return out


def _backward_outputs(o, memory, y, key_input, residual):
    d = y.shape[-1]
    return (
        empty_like(memory, y.dtype),
        empty_like(y),
        empty_like(y) if key_input is not None and "key" in o.maps else None,
        empty_like(y) if residual is not None else None,
        y.new_empty((o.n_rows + 1) * d + o.n_biases, dtype=torch.float32),
    )


def _launch_first_forward(
    y: Tensor, key_0: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    memory, x, rstd = out = _fake_first_forward(y, key_0, norm_weight, eps)
    if n_tokens:
        tokens, launcher = _first_forward_plan(d, key_0.shape[0], device)
        with on_device(device):
            launcher(
                (ceil_div(n_tokens, tokens), 1, 1),
                (y, key_0, norm_weight),
                (memory, x, rstd),
                n_tokens,
                eps,
            )
    return out


def _fake_first_forward(y, key_0, norm_weight, eps):
    lead = y.shape[:-1]
    return (
        y.new_empty((*lead, key_0.shape[0], y.shape[-1])),
        empty_like(y),
        y.new_empty(lead, dtype=torch.float32),
    )


def _launch_first_backward(
    y: Tensor,
    key_0: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    d_memory: Tensor | None,
    d_x: Tensor,
) -> tuple[Tensor, Tensor]:
    """:returns: The gradients of ``y``, and of ``norm_weight`` and ``key_0`` in one FP32 buffer."""
    d, device = y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    plan = _first_backward_plan(d, key_0.shape[0], device)
    d_y = empty_like(y)
    d_parameters = rstd.new_empty(d + plan.options.n_biases)
    if n_tokens == 0:
        d_parameters.zero_()
        return d_y, d_parameters
    sizes = plan.sizes(n_tokens)
    scratch = rstd.new_empty(sizes.elements)
    with on_device(device):
        plan.boundary(
            sizes.grid,
            (y, key_0, norm_weight, rstd, d_memory, d_x),
            (d_y, scratch),
            n_tokens,
            sizes.programs,
        )
        plan.finish(plan.finish_grid, (), (scratch, d_parameters), sizes.programs, 0)
    return d_y, d_parameters


def _fake_first_backward(y, key_0, norm_weight, rstd, d_memory, d_x):
    n_biases = _first_options(key_0.shape[0]).n_biases
    return empty_like(y), rstd.new_empty(y.shape[-1] + n_biases)


# Ops.


def _filled(like: Tensor, out: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An op cannot return None: an empty tensor where the options leave an output out."""
    return tuple(like.new_empty(0) if t is None else t for t in out)


def _op_forward(memory, y, *arguments):
    return _filled(y, _launch_forward(memory, y, *arguments))


def _fake_forward(memory, y, key_input, residual, pending, *arguments):
    o = BoundaryOptions.decode(arguments[-1])
    return _filled(y, _forward_outputs(o, memory, y, pending))


def _op_backward(memory, y, *arguments):
    return _filled(y, _launch_backward(memory, y, *arguments))


def _fake_backward(memory, y, key_input, residual, *arguments):
    o = BoundaryOptions.decode(arguments[-1])
    return _filled(y, _backward_outputs(o, memory, y, key_input, residual))


_FORWARD_SCHEMA = (
    "(Tensor memory, Tensor y, Tensor? key_input, Tensor? residual, Tensor? pending, "
    "Tensor? w_key, Tensor? b_key, Tensor? w_query, Tensor b_query, Tensor? w_forget, Tensor? b_forget, "
    "Tensor? w_beta, Tensor? b_beta, Tensor norm_weight, float eps, str options) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor memory, Tensor y, Tensor? key_input, Tensor? residual, Tensor packed, "
    "Tensor? d_memory_out, Tensor d_x, Tensor? d_residual_out, str options) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_forward = define_op(
    "ldm_boundary",
    _FORWARD_SCHEMA,
    _op_forward,
    _fake_forward,
)
_backward = define_op(
    "ldm_boundary_backward",
    _BACKWARD_SCHEMA,
    _op_backward,
    _fake_backward,
)
_first_forward = define_op(
    "ldm_first_boundary",
    "(Tensor y, Tensor key_0, Tensor norm_weight, float eps) -> (Tensor, Tensor, Tensor)",
    _launch_first_forward,
    _fake_first_forward,
)
_first_backward = define_op(
    "ldm_first_boundary_backward",
    "(Tensor y, Tensor key_0, Tensor norm_weight, Tensor rstd, Tensor? d_memory, Tensor d_x) "
    "-> (Tensor, Tensor)",
    _launch_first_backward,
    _fake_first_backward,
)


# Autograd, shared by the ops and the eager functions.


def _save(ctx, inputs, residual_out, y_out, packed) -> None:
    memory, y, key_input, residual, pending = inputs[:5]
    options = inputs[-1]
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
        packed,
    )


def _setup_boundary(ctx, inputs, output) -> None:
    _, _, residual_out, y_out, packed = output
    _save(ctx, inputs, residual_out, y_out, packed)


@cache
def _parameter_sizes(options: str, d: int) -> list[int]:
    return BoundaryOptions.decode(options).parameter_sizes(d)


def _backward_boundary(
    ctx, d_memory_out, d_x, d_residual_out, *_, launch: Any = None, op: Any = None
):
    """:param launch, op: Another backend's, with the schema of this one's."""
    saved = ctx.saved_tensors  # once: activation checkpointing refuses a second look
    y = saved[1]
    if d_x is None:
        d_x = torch.zeros_like(y)
    o = BoundaryOptions.decode(ctx.options)
    # With a graph of the backward to be made, the op refuses the second derivative.
    eager = is_eager(d_x) and not torch.is_grad_enabled()
    call: Any = (launch or _launch_backward) if eager else (op or _backward)
    d_memory, d_y, d_key_input, d_residual, d_parameters = call(
        *saved,
        d_memory_out if o.write else None,
        d_x,
        d_residual_out if o.write and o.residual else None,
        ctx.options,
    )
    d = y.shape[-1]
    # A second width in one process makes a traced one symbolic, which is no key of a cache: int() makes it a constant of the graph.
    pieces = d_parameters.split_with_sizes(_parameter_sizes(ctx.options, int(d)))
    maps = dict(zip(o.maps, pieces, strict=False))
    d_norm_weight, d_b_query, d_b_key, d_b_forget, d_b_beta = pieces[len(maps) : len(maps) + 5]
    writes = o.write
    return (
        d_memory,
        d_y,
        d_key_input if o.key_source == "input" and "key" in maps else None,
        d_residual if o.residual else None,
        d_y if ctx.has_pending else None,
        maps["key"].view(d, o.d_k) if "key" in maps else None,
        d_b_key if writes else None,
        maps["query"].view(d, o.d_k) if "query" in maps else None,
        d_b_query,
        maps["forget"].view(d, o.gates) if "forget" in maps else None,
        d_b_forget if writes and o.forget != "none" else None,
        maps.get("beta"),
        d_b_beta if writes and o.delta else None,
        d_norm_weight,
        None,
        None,
    )


class _Boundary(EagerFunction):
    @staticmethod
    def forward(ctx, *inputs):
        memory_out, x, residual_out, y_out, packed = _launch_forward(*inputs)
        _save(ctx, inputs, residual_out, y_out, packed)
        return memory_out, x, residual_out

    @staticmethod
    def backward(ctx, *grads):
        return _backward_boundary(ctx, *grads)


def _setup_first(ctx, inputs, output) -> None:
    y, key_0, norm_weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, key_0, norm_weight, output[2])


def _backward_first(ctx, d_memory, d_x, *_):
    saved = ctx.saved_tensors
    y, key_0 = saved[:2]
    if d_x is None:
        d_x = torch.zeros_like(y)
    eager = is_eager(d_x) and not torch.is_grad_enabled()
    launch: Any = _launch_first_backward if eager else _first_backward
    d_y, d_parameters = launch(*saved, d_memory, d_x)
    d, d_k = y.shape[-1], key_0.shape[0]
    return d_y, d_parameters[d : d + d_k], d_parameters[:d], None


class _FirstBoundary(EagerFunction):
    @staticmethod
    def forward(ctx, *inputs):
        output = _launch_first_forward(*inputs)
        _setup_first(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx, *grads):
        return _backward_first(ctx, *grads)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError("LDM's kernels have no second derivative: use backend='reference' for one")


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
    launch: Any
    if is_eager(y):
        launch = _FirstBoundary.apply if torch.is_grad_enabled() else _launch_first_forward
    else:
        launch = _first_forward
    return launch(y, key_0, norm_weight, eps)[:2]


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

    :returns: The new memory (nothing of use if this boundary only reads), ``x`` ``[..., D]`` and the new residual
        (nothing of use if there is none), in the dtype of ``y``.
    """
    launch: Any
    if is_eager(y):
        launch = _Boundary.apply if torch.is_grad_enabled() else _launch_forward
    else:
        launch = _forward
    return launch(memory, y, key_input, residual, pending, *parameters, norm_weight, eps, options)[
        :3
    ]

"""
Launch functions, torch ops and public functions of the ``fast`` backend. Importing this module needs Triton: the parameters are
packed, and boundary 0 is run, by the flexible backend, with which this one shares its buffers and its autograd.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from olmo_core.nn.depth.connection import upcast
from olmo_core.nn.depth.triton_ops import (
    EagerFunction,
    define_op,
    empty_like,
    is_eager,
    on_device,
)

from ..flexible import ops as flexible
from ..flexible.options import BoundaryOptions
from ..reference import LDMParameters
from . import cache as kernel_cache
from . import launch_table, stored8
from .driver import Kernel
from .layout import FINISH_PARAMETERS, FINISH_THREADS, Spec

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
        threads=FINISH_THREADS if finish else spec.threads,
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


def _spec(direction: str, options: str, d: int, device: int, **values: Any) -> Spec | None:
    o = BoundaryOptions.decode(options)
    return launch_table.spec(
        _architecture(device), direction, d, o.d_k, o.key_activation, o.forget, **values
    )


@cache
def _forward_plan(
    options: str,
    d: int,
    device: int,
    saves: bool = True,
    earlier: int = 0,
    writes: bool = True,
    stored8: bool = False,
) -> _Plan:
    spec = _spec(
        "forward", options, d, device, saves=saves, earlier=earlier, writes=writes, stored8=stored8
    )
    if spec is None:
        raise RuntimeError(f"LDM's fast backend has no forward kernel for d_model {d}")
    return _Plan(spec, device)


@cache
def _backward_plan(
    options: str,
    d: int,
    device: int,
    memory_gradient: bool,
    earlier: int = 0,
    stored8: bool = False,
    gather: str = "",
    window: int = 0,
) -> tuple[_Plan, Kernel] | None:
    """``None``: the flexible backend's kernel runs instead."""
    spec = _spec(
        "backward", options, d, device,
        memory_gradient=memory_gradient, earlier=earlier, stored8=stored8, gather=gather,
        window=window,
    )  # fmt: skip
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


@cache
def _extra_columns(d_k: int, earlier: int = 0) -> int:
    return Spec("forward", 64, d_k, earlier=earlier).extra_columns


def _forward_outputs(o: BoundaryOptions, memory: Tensor, y: Tensor):
    d = y.shape[-1]
    n_tokens = y.numel() // d
    columns = o.n_rows + 4 + _extra_columns(o.d_k)
    return (
        empty_like(memory, y.dtype),
        empty_like(y),
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
            0,
            0,
            n_tokens,
            eps,
        )
    return out


def pack_parameters(
    parameters: LDMParameters, norm_weight: Tensor, options: str, out: Tensor | None = None
) -> Tensor:
    """
    All parameters of a boundary as the kernels read them: maps ``[rows, D]`` (forget, key, query), gain ``[D]``, biases (query,
    key, forget), FP32.

    :param out: Where to put them; else a new tensor.
    """
    p, o = parameters, BoundaryOptions.decode(options)
    d, device = norm_weight.shape[0], norm_weight.get_device()
    if out is None:
        out = norm_weight.new_empty((o.n_rows + 1) * d + o.n_biases, dtype=torch.float32)
    pack = flexible._forward_plan(options, d, device)
    with on_device(device):
        pack.pack(
            pack.pack_grid,
            (
                p.w_forget, p.w_beta, p.w_key, p.w_query, norm_weight, p.b_query, p.b_key, p.b_forget,
                p.b_beta,
            ),
            (out,),
        )  # fmt: skip
    return out


def forward_without_saving(
    memory: Tensor, y: Tensor, packed: Tensor, eps: float, options: str, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """
    A boundary without a backward: the training kernel, but nothing is saved.

    :param memory: ``[..., K, D]``, BF16.
    :param y: ``[..., D]``, BF16.
    :param packed: From :func:`pack_parameters`.
    :param in_place: Write the new memory over ``memory``, which must be contiguous. A token's rows are in shared memory before
        any block writes them: the only cluster that reads them is the one that writes them, and each block waits for its
        copies of a tile before it writes that tile's columns.

    :returns: The new memory (``memory`` itself with ``in_place``) and ``x``.
    """
    memory_out, x, _ = _run_forward(
        memory, y, None, (), packed, eps, options, writes=True, saves=False, in_place=in_place
    )
    assert memory_out is not None
    return memory_out, x


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
    d_memory, d_y, d_parameters = _launch_window_backward(
        memory, y, None, (), packed, d_memory_out, d_x, options
    )
    assert d_memory is not None
    return d_memory, d_y, None, None, d_parameters


# A window: the memory is stored by every so many boundaries, the anchor A. Between them it is D A + sum_i c_i y_i.


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _run_forward(
    memory: Tensor,
    y: Tensor,
    coefficients: Tensor | None,
    earlier: Sequence[Tensor],
    packed: Tensor,
    eps: float,
    options: str,
    *,
    writes: bool,
    saves: bool,
    in_place: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """
    One boundary with packed parameters, in a window or, without earlier outputs and with ``writes``, in the recurrent form.

    :param packed: From :func:`pack_parameters`; with ``saves``, what is saved goes behind them.
    :param in_place: Write the new memory over ``memory``; see :func:`forward_without_saving`. In a window, too, no block reads
        another's columns of the anchor, and the earlier outputs and the coefficients are only read.

    :returns: As :func:`_launch_window_forward`, without ``packed``.
    """
    o, d, device = BoundaryOptions.decode(options), y.shape[-1], y.get_device()
    n_tokens, n = y.numel() // d, len(earlier)
    in_units = memory.dtype == torch.uint8
    x, memory_out, coefficients_out = empty_like(y), None, None
    if not writes or in_units:
        shape = (*y.shape[:-1], o.d_k if writes else (2 + n) * o.d_k)
        coefficients_out = y.new_empty(shape, dtype=torch.float32)
    if not writes:
        pass
    elif not in_place:
        memory_out = empty_like(memory)
    elif not memory.is_contiguous() or memory.data_ptr() % 16:
        raise ValueError("LDM's fast backend updates only a contiguous, aligned memory in place")
    else:
        memory_out = memory
    if n_tokens:
        plan = _forward_plan(options, d, device, saves, n, writes, in_units)
        memory, y = _aligned(memory), _aligned(y)
        outputs = [_aligned(t) for t in earlier]  # kept until the launch
        start = packed.data_ptr()
        saved = extra = 0
        if saves:
            saved = start + 4 * ((o.n_rows + 1) * d + o.n_biases)
            extra = saved + 4 * n_tokens * (o.n_rows + 4)
        with on_device(device):
            plan.kernel(
                plan.clusters(n_tokens) * plan.spec.cluster,
                memory.data_ptr(),
                y.data_ptr(),
                start,
                saved,
                extra,
                _address(memory_out),
                x.data_ptr(),
                _address(coefficients),
                _address(coefficients_out),
                *(t.data_ptr() for t in outputs),
                n_tokens,
                eps,
            )
    return memory_out, x, coefficients_out


def _launch_window_forward(
    memory: Tensor,
    y: Tensor,
    coefficients: Tensor | None,
    earlier: tuple[Tensor, ...],
    parameters: LDMParameters,
    norm_weight: Tensor,
    eps: float,
    options: str,
    writes: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    """
    :param memory: The anchor, ``[..., K, D]``; ``uint8``: in FP8, as :mod:`.stored8` has it.
    :param coefficients: ``D`` and ``c`` of each of the ``n`` earlier outputs, ``[..., (1 + n) K]``, FP32; ``None`` at a window's first
        boundary, whose memory is the anchor. With FP8 they are the rows' units there.
    :param earlier: The outputs that the window's boundaries before this one wrote, ``[..., D]``.
    :param writes: Store the new memory.

    :returns: The new memory or ``None``, ``x``, ``None`` or the coefficients ``[..., (2 + n) K]`` of the new memory (with FP8, if it is
        stored, its rows' units ``[..., K]``), and the packed parameters with the saved products.
    """
    o, d = BoundaryOptions.decode(options), y.shape[-1]
    n_tokens = y.numel() // d
    n_saved = n_tokens * (o.n_rows + 4 + _extra_columns(o.d_k, len(earlier)))
    packed = y.new_empty((o.n_rows + 1) * d + o.n_biases + n_saved, dtype=torch.float32)
    if n_tokens:
        pack_parameters(parameters, norm_weight, options, packed)
    out = _run_forward(
        memory, y, coefficients, earlier, packed, eps, options, writes=writes, saves=True
    )
    return *out, packed


def _launch_window_backward(
    memory: Tensor,
    y: Tensor,
    coefficients: Tensor | None,
    earlier: tuple[Tensor, ...],
    packed: Tensor,
    d_memory_out: Tensor | None,
    d_x: Tensor,
    options: str,
    gather: str = "",
    window: int = 0,
    bundle: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """
    The backward of the recurrent form, too, which has no coefficients and no earlier outputs.

    :param d_memory_out: The gradient of the new memory as if it had been stored; with ``gather``, of the one at the window's end.
    :param gather: One of the ``window`` boundaries of a whole window: ``end``, ``middle`` or ``first``.
    :param bundle: With ``gather``, what its boundaries leave for each other, ``[..., rows, D]``, as :func:`bundle_shape` says; read and written.

    :returns: The gradients of the memory before the boundary, as if it had been stored (with ``gather``, at a window's first boundary; else
        ``None``), of ``y``, and of all parameters in one FP32 buffer.
    """
    o, d, device = BoundaryOptions.decode(options), y.shape[-1], y.get_device()
    n_tokens = y.numel() // d
    n_parameters = (o.n_rows + 1) * d + o.n_biases
    d_y = empty_like(y)
    d_memory = empty_like(memory, y.dtype) if gather in ("", "first") else None
    d_parameters = packed.new_empty(n_parameters)
    if n_tokens == 0:
        return d_memory, d_y, d_parameters.zero_()
    in_units = memory.dtype == torch.uint8
    plans = _backward_plan(
        options, d, device, d_memory_out is not None, len(earlier), in_units, gather, window
    )
    assert plans is not None, "a window has a kernel for each direction"
    plan, finish = plans
    spec, clusters = plan.spec, plan.clusters(n_tokens)
    partials = packed.new_empty(clusters * spec.n_parameters)
    memory, y, d_x = _aligned(memory), _aligned(y), _aligned(d_x)
    outputs = [_aligned(t) for t in earlier]
    if d_memory_out is not None:
        d_memory_out = _aligned(d_memory_out)
    start = packed.data_ptr()
    saved = start + 4 * n_parameters
    with on_device(device):
        plan.kernel(
            clusters * spec.cluster,
            memory.data_ptr(),
            y.data_ptr(),
            start,
            saved,
            saved + 4 * n_tokens * (o.n_rows + 4),
            _address(d_memory_out),
            d_x.data_ptr(),
            _address(d_memory),
            d_y.data_ptr(),
            partials.data_ptr(),
            _address(coefficients),
            *(() if bundle is None else (bundle.data_ptr(),)),
            *(t.data_ptr() for t in outputs),
            n_tokens,
        )
        blocks = -(-spec.n_parameters // FINISH_PARAMETERS)
        finish(blocks, partials.data_ptr(), d_parameters.data_ptr(), clusters, overlap=True)
    return d_memory, d_y, d_parameters


@cache
def bundle_shape(d: int, d_k: int, window: int) -> tuple[int, int]:
    """Vectors of a token, and their length, of what the boundaries of a whole window leave for each other in the backward."""
    spec = Spec("backward", d, d_k, earlier=window - 1, gather="end", window=window)
    return spec.bundle_rows, d


def _alias(t: Tensor) -> Tensor:
    """A new tensor of the same storage, for the gradient. Neither the tensor nor a view of it: FSDP2 warns of views."""
    return t.new_empty(0).set_(t)  # type: ignore[call-overload]


class _WindowBoundary(EagerFunction):
    """
    The memory that flows between boundaries is the anchor's storage, and its gradient that of the memory it stands for: each boundary
    writes the gradient of the memory before it from that of the memory after it, as if both had been stored. The earlier
    outputs have no gradient here; their own boundaries write it.

    In a whole window with a bundle the gradient that flows is that of the memory at the window's end, until the first boundary makes the
    gradient of the window's stored memory of it. What else the boundaries need of later ones is the bundle's gradient, a buffer that the
    last boundary makes and the others update; the bundle itself has a shape and no memory.
    """

    @staticmethod
    def forward(ctx, memory, y, coefficients, stored, bundle, earlier, *arguments):
        *parameters, norm_weight, eps, options, writes, window = arguments
        anchor = memory if stored is None else stored
        memory_out, x, coefficients_out, packed = _launch_window_forward(
            anchor, y, coefficients, earlier, LDMParameters(*parameters), norm_weight, eps, options,
            writes,
        )  # fmt: skip
        ctx.options, ctx.has_pending = options, False
        ctx.window, ctx.writes, ctx.has_bundle = window, writes, bundle is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor, y, packed, coefficients, *earlier)
        stored_out = bundle_out = None
        if stored is not None:
            memory_out, stored_out = None, memory_out
        ctx.mark_non_differentiable(*(t for t in (coefficients_out, stored_out) if t is not None))
        if memory_out is None:
            memory_out = _alias(memory)
        if bundle is not None and not writes:
            bundle_out = _alias(bundle)
        elif window and not earlier:
            shape = bundle_shape(y.shape[-1], anchor.shape[-2], window)
            bundle_out = _alias(y.new_zeros(1).expand(*y.shape[:-1], *shape))
        return memory_out, x, coefficients_out, stored_out, bundle_out

    @staticmethod
    def backward(ctx, d_memory_out, d_x, _coefficients, _stored, d_bundle):
        if ctx.has_bundle:
            gather = "end" if ctx.writes else "middle"
            if gather == "middle" and d_bundle is None and d_memory_out is not None:
                raise RuntimeError(
                    "LDM's fast backend: the memory in the middle of a whole window has a gradient; build the model with window=1"
                )
        else:
            gather = "first" if d_bundle is not None else ""

        def launch(memory, y, packed, coefficients, *rest):
            nonlocal d_bundle
            *earlier, d_memory_out, d_x, _, options = rest
            arguments = (
                memory,
                y,
                coefficients,
                tuple(earlier),
                packed,
                d_memory_out,
                d_x,
                options,
            )
            if not gather:
                d_memory, d_y, d_parameters = _launch_window_backward(*arguments)
            else:
                if d_memory_out is None:
                    # Nothing after the window counts, or after this boundary: FSDP2 makes zeros of such gradients, so these are
                    # the same.
                    d_memory_out = torch.zeros_like(memory, dtype=y.dtype)
                    arguments = (*arguments[:5], d_memory_out, *arguments[6:])
                if gather == "end" or d_bundle is None:
                    shape = bundle_shape(y.shape[-1], memory.shape[-2], ctx.window)
                    new = y.new_empty if gather == "end" else y.new_zeros
                    d_bundle = new((*y.shape[:-1], *shape))
                d_memory, d_y, d_parameters = _launch_window_backward(
                    *arguments, gather, ctx.window, d_bundle
                )
                if d_memory is None:
                    d_memory = d_memory_out
            return d_memory, d_y, None, None, d_parameters

        out = flexible._backward_boundary(
            ctx, d_memory_out, d_x, None, launch=launch, op=flexible._refuse_double_backward
        )
        d_bundle = d_bundle if gather in ("end", "middle") else None
        return *out[:2], None, None, d_bundle, None, *out[5:14], None, None, None, None


class _Store8(EagerFunction):
    """The memory in FP8, and a tensor without memory that stands for it: it has the gradient, in the memory's dtype."""

    @staticmethod
    def forward(ctx, memory):
        stored, units = stored8.store(memory)
        ctx.mark_non_differentiable(stored, units)
        return _alias(memory.new_zeros(1).expand(memory.shape)), units, stored

    @staticmethod
    def backward(ctx, d_memory, *_):
        return d_memory


class _Parts(NamedTuple):
    """A window's state; see :func:`window_boundary`."""

    coefficients: Tensor | None
    stored: Tensor | None
    bundle: Tensor | None
    earlier: list[Tensor]


def _parts(state: tuple[Tensor, ...]) -> _Parts:
    coefficients, stored, bundle, earlier = None, None, None, list(state[1:])
    if earlier:
        coefficients = earlier.pop(0)
    if earlier and earlier[0].dtype == torch.uint8:
        stored = earlier.pop(0)
    if earlier and earlier[0].ndim == state[0].ndim:
        bundle = earlier.pop(0)
    return _Parts(coefficients, stored, bundle, earlier)


def memory_of(state: tuple[Tensor, ...]) -> Tensor:
    """The memory that a window's state stands for, with the gradient of its first tensor."""
    p = _parts(state)
    if p.coefficients is None:
        return state[0]
    return _stored(state[0], p.coefficients, p.earlier, p.stored)


def _stored(
    memory: Tensor, coefficients: Tensor, earlier: list[Tensor], stored: Tensor | None = None
) -> Tensor:
    """The memory that an anchor and what came after it stand for, with the anchor's gradient."""
    if stored is not None:
        # ``memory`` is zeros.
        return memory + stored8.load(stored, coefficients, earlier).to(memory.dtype)
    S = upcast(memory.detach())
    held = coefficients.unflatten(-1, (1 + len(earlier), S.shape[-2]))
    new = held[..., 0, :, None] * S
    for i, output in enumerate(earlier, start=1):
        new = new + held[..., i, :, None] * upcast(output)[..., None, :]
    return (upcast(memory) + (new - S)).to(memory.dtype)


def window_without_saving(
    state: tuple[Tensor, ...],
    y: Tensor,
    packed: Tensor,
    eps: float,
    options: str,
    window: int,
    *,
    in_place: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """
    :func:`window_boundary` without a backward, as :func:`forward_without_saving` is :func:`boundary` without one.

    :param packed: From :func:`pack_parameters`.
    :param in_place: Write the new memory over the anchor at the boundary that stores one, the ``window``-th. The others write
        no memory.

    :returns: The new state, in which the anchor of a boundary that stores no memory is the given one itself, and ``x``.
    :raises ValueError: If the state is not one of this window and of the tokens of ``y``.
    """
    memory, *rest = state
    coefficients, earlier = (rest[0], rest[1:]) if rest else (None, [])
    n, K = len(earlier), memory.shape[-2]
    fits = n < window and memory.shape == (*y.shape[:-1], K, y.shape[-1])
    if coefficients is not None:
        fits = fits and n > 0 and coefficients.shape == (*y.shape[:-1], (1 + n) * K)
        fits = fits and all(t.shape == y.shape for t in earlier)
    if not fits:
        raise ValueError(
            f"LDM in windows of {window} boundaries cannot take a state of shapes {[tuple(t.shape) for t in state]} with an "
            f"output of shape {tuple(y.shape)}: all boundaries of a forward must have the same window and the same tokens"
        )
    # Now, not at every boundary of the window that reads them.
    memory, y = _aligned(memory), _aligned(y)
    writes = n == window - 1
    written, x, after = _run_forward(
        memory, y, coefficients, earlier, packed, eps, options,
        writes=writes, saves=False, in_place=in_place and writes,
    )  # fmt: skip
    return _window_state(memory, y, earlier, written, after), x


def _window_state(
    anchor: Tensor,
    y: Tensor,
    earlier: Sequence[Tensor],
    written: Tensor | None,
    after: Tensor | None,
) -> tuple[Tensor, ...]:
    """The state after a boundary that wrote either the memory or the coefficients."""
    if written is not None:
        return (written,)
    assert after is not None
    return (anchor, after, *earlier, y.detach())


def window_boundary(
    state: tuple[Tensor, ...],
    y: Tensor,
    parameters: LDMParameters,
    options: str,
    norm_weight: Tensor,
    eps: float,
    window: int,
    in_units: bool = False,
    gathers: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """
    As :func:`boundary`, but the memory is stored by every ``window``-th boundary only.

    :param state: ``(S,)``, or ``(S, coefficients, y_1, ..., y_n)`` for the memory ``D S + sum_i c_i y_i`` with ``coefficients``
        ``[..., (1 + n) K]`` FP32 (``D`` first) and ``n < window`` earlier outputs. The gradient of ``S`` is that of this memory;
        the others have none. In FP8 it is ``(S, coefficients, stored, y_1, ..., y_n)``, also with ``n = 0``: ``stored`` ``[..., K, D]``
        has the memory, as :mod:`.stored8` says, and ``S`` only its shape and gradient. With ``gathers`` there is a bundle before
        ``y_1``, ``[..., rows, D]``, and in whole windows the gradient of ``S`` is that of the memory at the window's end.
    :param in_units: Store memories in FP8.
    :param gathers: The window that begins here is a whole one, and boundaries follow it: its backward has kernels of its own.

    :returns: The new state and ``x`` ``[..., D]``, BF16.
    :raises RuntimeError: If the kernel neither is in the cache nor can be compiled, or the driver refuses it.
    """
    if not is_eager(y):
        # An op must not return one of its inputs; what is traced stores the memory every time.
        if _parts(state).bundle is not None:
            raise RuntimeError(
                "LDM's fast backend: a window whose backward is that of a whole window cannot be traced from its middle on"
            )
        memory = memory_of(state)
        new_memory, x = boundary(memory, y, parameters, options, norm_weight, eps)
        return (new_memory,), x
    memory = state[0]
    coefficients, stored, bundle, earlier = _parts(state)
    if in_units and stored is None:
        # The model's first memory, or what was traced.
        memory, coefficients, stored = _Store8.apply(memory_of(state))
        earlier = []
    writes = len(earlier) == window - 1
    arguments = (parameters, norm_weight, eps, options, writes)
    after: Tensor | None
    written: Tensor | None
    if torch.is_grad_enabled():
        whole = window if bundle is not None or (gathers and not earlier) else 0
        memory, x, after, written, bundle = _WindowBoundary.apply(
            memory, y, coefficients, stored, bundle, tuple(earlier), *parameters, *arguments[1:],
            whole,
        )  # fmt: skip
        if writes and stored is None:
            return (memory,), x
    else:
        # The same kernels and the same state as with gradients: what is saved (0.2 vectors) is dropped at once.
        anchor = memory if stored is None else stored
        written, x, after, _ = _launch_window_forward(
            anchor, y, coefficients, tuple(earlier), *arguments
        )
        if stored is None:
            return _window_state(memory, y, earlier, written, after), x
        bundle = None
    assert after is not None
    if stored is not None and writes:
        assert written is not None
        return (memory, after, written), x
    between = [t for t in (stored, bundle) if t is not None]
    return (memory, after, *between, *earlier, y.detach()), x


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


class _Boundary(EagerFunction):
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
        if not torch.is_grad_enabled():
            packed = pack_parameters(parameters, norm_weight, options)
            return forward_without_saving(memory, y, packed, eps, options)
        launch = _Boundary.apply
    else:
        launch = _forward
    return launch(memory, y, None, None, None, *parameters, norm_weight, eps, options)[:2]

"""
Launch functions, torch ops, autograd and public functions of AttnRes's ``flexible`` backend. Importing this module needs
Triton.

**How the gradients of the sources travel.** A source is read by every later boundary. Autograd would write one gradient
for each reader and add them up in pairs: ``5N`` vectors a boundary with ``N`` sources, and a rounding for each. Here the
sources pass from boundary to boundary without a gradient, and beside them go *channels*: tensors without memory of their
own (all strides zero), which nothing reads. Each boundary takes those of the one before and returns new ones, so that
autograd hands the gradient of the new ones to the boundary's backward, which passes its own on. It is plain data flow along
the state: no buffer is shared between autograd nodes, and so it holds under ``torch.compile``, FSDP2, activation checkpointing
and gradient accumulation. What it carries as the gradients of the channels between two boundaries:

- *rows* ``[..., C, D]``: the gradients of the committed sources, from all boundaries after this group;
- *partial* ``[..., D]``, in an open block: the gradient of the running sum, which is that of the next ``y``;
- for each later boundary of this group its ``g = dh`` ``[..., D]`` and a *ledger* of the coefficients of its part.

A boundary inside a group reads the sources (for its query's gradient, which FSDP2 wants now), leaves ``g`` and a ledger, and
gathers the whole gradient of its own ``y`` alone. The group's first boundary gathers all of them in the pass in which it
reads the sources anyway: each row is read and written, and rounded, once a group instead of once a boundary.

Traffic in vectors of ``D`` elements for each token at a boundary with ``N`` sources: ``N + 1`` forward (``N + 3`` in an open
block, whose partial sum it adds and stores). Backward, with ``k`` later boundaries in the group: ``N + 4 + k`` inside a group
(sources, ``d_x``, the gradient of ``y`` so far and in the end, ``g`` out, ``k`` in) and ``3N + 1 + k`` for its first one;
``1.5 N + 4.75`` on average in groups of four. The ledgers add ``12 N`` bytes in each direction. The backward reads the
sources twice, the second time from cache, unless ``keep_h`` saves the mixture in FP32 (two vectors more in each direction).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

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
from .launch_table import MOST_ARGUMENTS, Launch, Row, find_row, padded, vector

Tensor = torch.Tensor
Sources = tuple[Tensor, ...]


class Form(NamedTuple):
    """Where a boundary stands in its group and its block."""

    rows: int
    """Committed sources of the boundary after the group; 0: the last boundary of the model, which needs no channels."""
    later: int
    """Boundaries of the group after this one."""
    pitch: int
    """Sources of the last boundary of the group: the size of a ledger."""
    closes: bool
    """Whether later boundaries read the last source as it is, instead of adding to it first."""
    starts: bool
    """Whether this is the first boundary of its group."""


# Plans: all that does not change between calls.


class _Plan:
    """
    Launches for one width, dtype and padded number of sources.

    :param n_padded: 0 is the first boundary.
    """

    def __init__(self, row: Row, d: int, n_padded: int, device: int):
        self.row = row
        self.n_padded = n_padded
        self.table = None
        if n_padded > MOST_ARGUMENTS:
            self.table = Launcher(kernels.table_kernel, {"PADDED": n_padded}, num_warps=1)
        self.keep_h = row.keep_h and n_padded > 0
        self.multiprocessors = multiprocessors(device)
        self.width = next_power_of_2(d)
        # All that go through the table share one compiled kernel.
        self.constants = {"D": d, "PADDED": 1 if self.table else n_padded, "BD": self.width}
        self.forward = self._launcher(kernels.forward_kernel, row.forward)
        self.backwards: dict[tuple[int, bool, bool], Launcher] = {}
        self.finish_grid = (ceil_div(d, 32), 1, 1)
        self.finish = Launcher(kernels.finish_kernel, {"D": d, "BP": 32, "BD": 32}, num_warps=4)

    def _launcher(self, kernel: Any, launch: Launch, **constants: Any) -> Launcher:
        constants |= self.constants
        constants |= {
            "S": min(launch.sources, next_power_of_2(max(1, self.n_padded))),
            "BT": launch.tokens,
            "VEC": vector(launch, self.width),
            "STAGES": launch.stages,
        }
        return Launcher(kernel, constants, num_warps=launch.warps, maxnreg=launch.registers)

    def backward(self, later: int, closes: bool, defer: bool) -> Launcher:
        key = later, closes, defer
        found = self.backwards.get(key)
        if found is None:
            launch = self.row.deferring if defer else self.row.backward
            found = self.backwards[key] = self._launcher(
                kernels.backward_kernel, launch, LATER=later, CLOSES=closes, DEFER=defer
            )
        return found

    def forward_grid(self, n_tokens: int) -> tuple[int, int, int]:
        blocks = ceil_div(n_tokens, self.row.forward.tokens)
        programs = self.multiprocessors * self.row.forward.programs_per_sm
        return (min(blocks, programs or blocks), 1, 1)

    def backward_grid(self, n_tokens: int, defer: bool) -> tuple[int, int, int]:
        launch = self.row.deferring if defer else self.row.backward
        programs = self.multiprocessors * max(1, launch.programs_per_sm)
        return (min(ceil_div(n_tokens, launch.tokens), programs), 1, 1)


@cache
def _plan(d: int, itemsize: int, n_committed: int, device: int) -> _Plan:
    row = find_row(architecture(device), itemsize, next_power_of_2(d), n_committed + 1)
    return _plan_of(row, d, padded(n_committed) if n_committed else 0, device)


@cache
def _plan_of(row: Row, d: int, size: int, device: int) -> _Plan:
    return _Plan(row, d, size, device)


def forget_plans() -> None:
    """Take changes of the launch table into account."""
    launch_table.find_row.cache_clear()
    _plan.cache_clear()
    _plan_of.cache_clear()


@cache
def _keeps_h(d: int, itemsize: int, n_committed: int, device: torch.device) -> bool:
    """Also for fake tensors, whose index is None where the current device is meant."""
    index = -1
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    return _plan(d, itemsize, n_committed, index).keep_h


def _arguments(
    plan: _Plan, sources: Sources, like: Tensor
) -> tuple[Sources | None, Tensor | None, Sources]:
    """
    The kernels' first two arguments: the sources, or the first one and the table, which is written here. And what must
    be kept until the launch.
    """
    if not sources:
        return None, None, sources
    dtype = like.dtype
    for t in sources:
        if t.dtype is not dtype:
            raise TypeError(
                "AttnRes's flexible backend needs all sources in the dtype of y, "
                f"{dtype}, got {t.dtype}"
            )
    missing = plan.n_padded - len(sources)
    if plan.table is None:
        return sources + (sources[0],) * missing if missing else sources, None, sources
    # The table holds distances in units of 16 bytes, and the kernel below cannot see copies that the launcher makes.
    sources = tuple(
        [t if t.is_contiguous() and not t.data_ptr() % 16 else _copy(t) for t in sources]
    )
    table = like.new_empty(len(sources), dtype=torch.int64)
    plan.table((1, 1, 1), (sources + (sources[0],) * missing,), (table,), len(sources))
    return sources[:1], table, sources


def _copy(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t)


# Launches: tensors in, tensors out.


def _forward_outputs(y: Tensor, partial: Tensor | None, n_committed: int, keep_h: bool):
    n_tokens = y.numel() // y.shape[-1]
    return (
        empty_like(y),
        None if partial is None else empty_like(y),
        y.new_empty((n_tokens, 2 * n_committed + 4), dtype=torch.float32),
        # FP32: softmax's backward takes <g, v> - <g, h>, and where a column is 100 times the others BF16's rounding of h
        # would be larger than what is left.
        empty_like(y, torch.float32) if keep_h else None,
    )


def _launch_forward(
    y: Tensor,
    partial: Tensor | None,
    sources: Sources,
    query: Tensor | None,
    gain: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """:returns: ``x``, ``partial + y``, the statistics, and ``h``; the second and last ``None`` where there is none."""
    d = y.shape[-1]
    device = y.get_device()
    n_committed = len(sources)
    plan = _plan(d, y.element_size(), n_committed, device)
    x, partial_out, statistics, h = out = _forward_outputs(y, partial, n_committed, plan.keep_h)
    n_tokens = y.numel() // d
    if n_tokens:
        grid = plan.forward_grid(n_tokens)
        with on_device(device):
            pointers, table, _kept = _arguments(plan, sources, y)
            plan.forward(
                grid,
                (pointers, table, y, partial, query, gain, norm_weight),
                (x, partial_out, h, statistics),
                n_tokens,
                grid[0],
                n_committed,
                eps,
            )
    return out


def _backward_outputs(last: Tensor, n_committed: int, pitch: int, defer: bool):
    *lead, d = last.shape
    fp32 = torch.float32
    return (
        empty_like(last),
        None if defer or not n_committed else last.new_empty((*lead, n_committed, d)),
        empty_like(last) if defer else None,
        last.new_empty(_ledger_size(last, pitch), dtype=fp32) if defer else None,
        last.new_empty(3, d, dtype=fp32),
    )


def _ledger_size(y: Tensor, pitch: int) -> int:
    d = y.shape[-1]
    return d + y.numel() // d * 3 * pitch


def _launch_backward(
    last: Tensor,
    sources: Sources,
    query: Tensor | None,
    gain: Tensor | None,
    norm_weight: Tensor,
    statistics: Tensor,
    h: Tensor | None,
    d_x: Tensor,
    d_rows: Tensor | None,
    d_partial: Tensor | None,
    later: Sources,
    pitch: int,
    closes: bool,
    defer: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """
    :param last: The last source, ``[..., D]``.
    :param d_rows: The gradients of committed sources from after the group, ``[..., C or more, D]``.
    :param d_partial: The gradient of the last source if it does not close its block, ``[..., D]``.
    :param later: g and ledger of each later boundary of the group.
    :param defer: Whether to leave g and a ledger instead of the committed sources' gradients.

    :returns: The gradients of ``y`` and of the committed sources ``[..., C, D]``, g ``[..., D]``, the ledger (``None`` each
        where there is none), and the gradients of query, gain and norm weight in one FP32 buffer ``[3, D]``.
    """
    d = last.shape[-1]
    device = last.get_device()
    n_committed = len(sources)
    plan = _plan(d, last.element_size(), n_committed, device)
    out = _backward_outputs(last, n_committed, pitch, defer)
    d_parameters = out[-1]
    n_tokens = last.numel() // d
    if n_tokens == 0:
        d_parameters.zero_()
        return out
    grid = plan.backward_grid(n_tokens, defer)
    programs = grid[0]
    scratch = d_parameters.new_empty(programs * 2 * d)
    with on_device(device):
        pointers, table, _kept = _arguments(plan, sources, last)
        plan.backward(len(later) // 2, closes, defer)(
            grid,
            (
                pointers, table, last, query, gain, norm_weight, statistics, h, d_x, d_rows, d_partial,
                later[::2] or None, later[1::2] or None,
            ),
            (*out[:-1], scratch),
            n_tokens,
            programs,
            n_committed,
            0 if d_rows is None else d_rows.shape[-2],
            pitch,
        )  # fmt: skip
        plan.finish(plan.finish_grid, (query, gain), (scratch, d_parameters), programs)
    return out


# Channels.


@cache
def _channel_shapes(
    shape: torch.Size, dtype: torch.dtype, rows: int, later: int, pitch: int, closes: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Shape, strides and dtype of rows, partial, and pairs of g and ledger."""
    d = shape[-1]
    shapes: list[tuple[int, ...]] = [(*shape[:-1], rows, d)]
    if not closes:
        shapes.append(tuple(shape))
    out = [(s, (0,) * len(s), dtype) for s in shapes]
    size = d + shape.numel() // d * 3 * pitch
    return out + [(tuple(shape), (0,) * len(shape), dtype), ((size,), (0,), torch.float32)] * later


def _channels(
    y: Tensor, form: Sequence[int], shapes_of: Callable = _channel_shapes
) -> list[Tensor]:
    """Of one element's memory each. Not views: of those FSDP2 warns."""
    rows, later, pitch, closes, _ = form
    if rows == 0:
        return []
    empty = y.new_empty_strided
    shapes = shapes_of(y.shape, y.dtype, rows, later, pitch, bool(closes))
    return [empty(shape, strides, dtype=dtype) for shape, strides, dtype in shapes]


# Ops.


def _filled(like: Tensor, out: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """An op cannot return None: an empty tensor where there is nothing."""
    return tuple(like.new_empty(0) if t is None else t for t in out)


def _op_forward(y, partial, sources, channels, query, gain, norm_weight, eps, form):
    out = _launch_forward(y, partial, tuple(sources), query, gain, norm_weight, eps)
    return *_filled(y, out), _channels(y, form)


def _fake_forward(y, partial, sources, channels, query, gain, norm_weight, eps, form):
    n = len(sources)
    # int(): a symbolic width becomes a constant of the graph.
    keeps_h = _keeps_h(int(y.shape[-1]), y.element_size(), n, y.device)
    out = _forward_outputs(y, partial, n, keeps_h)
    # A second shape in one process makes a traced one symbolic, which is no key of a cache.
    return *_filled(y, out), _channels(y, form, _channel_shapes.__wrapped__)


def _op_backward(last, sources, *arguments):
    *before, later, pitch, closes, defer = arguments
    launch: Any = _launch_backward
    return _filled(last, launch(last, tuple(sources), *before, tuple(later), pitch, closes, defer))


def _fake_backward(last, sources, *arguments):
    pitch, _, defer = arguments[-3:]
    return _filled(last, _backward_outputs(last, len(sources), pitch, defer))


def _op_rows(sources):
    first = sources[0]
    shape = (*first.shape[:-1], len(sources), first.shape[-1])
    return first.new_empty_strided(shape, (0,) * len(shape))


_forward = define_op(
    "attnres_boundary",
    "(Tensor y, Tensor? partial, Tensor[] sources, Tensor[] channels, Tensor? query, Tensor? gain, Tensor norm_weight, "
    "float eps, int[] form) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    _op_forward,
    _fake_forward,
)
_backward = define_op(
    "attnres_boundary_backward",
    "(Tensor last, Tensor[] sources, Tensor? query, Tensor? gain, Tensor norm_weight, Tensor statistics, Tensor? h, "
    "Tensor d_x, Tensor? d_rows, Tensor? d_partial, Tensor[] later, int pitch, bool closes, bool defer) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _op_backward,
    _fake_backward,
)
_rows = define_op("attnres_rows", "(Tensor[] sources) -> Tensor", _op_rows, _op_rows)


# Autograd, shared by the ops and the eager functions.


def _save(
    ctx, y, partial, sources, n_channels, query, gain, norm_weight, form, partial_out, statistics, h
) -> None:
    ctx.form = form
    ctx.n_channels = n_channels
    ctx.n_committed = len(sources)
    ctx.has_partial = partial is not None
    # The channels' gradients are as large as all sources: never make zeros for one that is not used.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        y if partial is None else partial_out, query, gain, norm_weight, statistics, h, *sources
    )


def _setup_boundary(ctx, inputs, output) -> None:
    y, partial, sources, channels, query, gain, norm_weight, _, form = inputs
    _, partial_out, statistics, h, _ = output
    h = h if h.numel() or not y.numel() else None
    _save(
        ctx, y, partial, sources, len(channels), query, gain, norm_weight, form, partial_out, statistics, h
    )  # fmt: skip


def _gradients(ctx, d_x, d_channels):
    """:returns: The gradients of ``y``, the old channels, query, gain and norm weight."""
    # Once: activation checkpointing refuses a second look.
    last, query, gain, norm_weight, statistics, h, *sources = ctx.saved_tensors
    if d_x is None:
        d_x = torch.zeros_like(last)
    rows, _, pitch, closes, starts = ctx.form
    # Without an earlier boundary to leave it to, nobody wants the sources' gradients.
    defer = not starts and ctx.n_channels > 0
    d_rows = d_partial = None
    later: Sequence[Tensor | None] = ()
    if rows:
        d_rows, *later = d_channels
        if not closes:
            d_partial, *later = later
    present: list[Tensor | None] = []
    # Inside a group only the last source is gathered, which as a partial sum later boundaries do not read.
    if closes or not defer:
        for i in range(0, len(later), 2):
            # One whose x was not used leaves nothing.
            if later[i] is not None and later[i + 1] is not None:
                present += later[i : i + 2]
    # With a graph of the backward to be made, the op refuses the second derivative.
    eager = is_eager(d_x) and not torch.is_grad_enabled()
    launch: Any = _launch_backward if eager else _backward
    d_y, d_sources, g, ledger, d_parameters = launch(
        last,
        tuple(sources) if eager else sources,
        query,
        gain,
        norm_weight,
        statistics,
        h,
        d_x,
        d_rows,
        d_partial,
        tuple(present) if eager else present,
        pitch,
        bool(closes),
        defer,
    )
    d_old: list[Tensor | None] = []
    if ctx.n_channels:
        d_old.append(d_rows if defer else d_sources)
        if ctx.has_partial:
            d_old.append(d_y)
        if defer:
            d_old += (g, ledger, *later)
    d_query, d_gain, d_norm = d_parameters.unbind()
    if query is None:
        d_query = d_gain = None
    return d_y, d_old, d_query, d_gain, d_norm


def _backward_op(ctx, d_x, d_partial_out, d_statistics, d_h, d_channels):
    d_y, d_old, d_query, d_gain, d_norm = _gradients(ctx, d_x, d_channels)
    return d_y, None, [None] * ctx.n_committed, d_old, d_query, d_gain, d_norm, None, None


class _Boundary(EagerFunction):
    """The sources come as one tuple, so that autograd looks at none of them."""

    @staticmethod
    def forward(ctx, y, partial, sources, query, gain, norm_weight, eps, form, *channels):
        x, partial_out, statistics, h = _launch_forward(
            y, partial, sources, query, gain, norm_weight, eps
        )
        _save(
            ctx, y, partial, sources, len(channels), query, gain, norm_weight, form, partial_out, statistics, h
        )  # fmt: skip
        if partial_out is not None:
            ctx.mark_non_differentiable(partial_out)
        return x, partial_out, *_channels(y, form)

    @staticmethod
    def backward(ctx, d_x, d_partial_out, *d_channels):
        d_y, d_old, d_query, d_gain, d_norm = _gradients(ctx, d_x, d_channels)
        return d_y, None, None, d_query, d_gain, d_norm, None, None, *d_old


class _Rows(EagerFunction):
    @staticmethod
    def forward(ctx, *sources):
        return _op_rows(sources)

    @staticmethod
    def backward(ctx, d_rows):
        return d_rows.unbind(-2)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "AttnRes's flexible backend has no second derivative: use backend='reference' for one"
    )


torch.library.register_autograd(
    "depth_memory::attnres_boundary", _backward_op, setup_context=_setup_boundary
)
torch.library.register_autograd(
    "depth_memory::attnres_rows", lambda ctx, d_rows: (list(d_rows.unbind(-2)),)
)
torch.library.register_autograd("depth_memory::attnres_boundary_backward", _refuse_double_backward)


# Public functions.


def enter(sources: Sources, partial: Tensor | None) -> tuple[Tensor, ...]:
    """
    Channels for sources that come with gradients of their own, which the first boundary's do not.

    :param sources: ``C`` tensors ``[..., D]``.
    :param partial: ``[..., D]``.

    :returns: What carries the gradients of the sources, and that of the partial sum.
    """
    rows = _Rows.apply(*sources) if is_eager(sources[0]) else _rows(list(sources))
    return (rows,) if partial is None else (rows, partial)


def boundary(
    y: Tensor,
    partial: Tensor | None,
    sources: Sources,
    channels: tuple[Tensor, ...],
    query: Tensor | None,
    gain: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    form: tuple[int, int, int, bool, bool],
) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
    """
    One boundary: mix ``(*sources, partial + y)``, normalise; see :func:`..reference.attnres_read`.

    :param y: The output of the sublayer before, ``[..., D]``, BF16, FP16 or FP32.
    :param partial: The sum of the open block so far, ``[..., D]``; ``None`` if ``y`` opens one.
    :param sources: The embedding and the complete blocks, ``[..., D]`` each, in the dtype of ``y``; none at the first
        boundary, which has neither query nor gain. They and ``partial`` get no gradient.
    :param channels: What carries the gradients of the sources, from the boundary before or from :func:`enter`; empty: they
        need none.
    :param query: ``[D]``.
    :param gain: The gain of the key norm, ``[D]``.
    :param norm_weight: The gain of the norm that follows, ``[D]``.
    :param form: A :class:`Form`.

    :returns: ``x`` in the dtype of ``y``, ``partial + y`` without a gradient (``None`` without ``partial``), and
        the new channels (none where gradients are off).
    :raises TypeError: If a source has another dtype than ``y``.
    """
    if is_eager(y):
        if torch.is_grad_enabled():
            x, partial_out, *new = _Boundary.apply(
                y, partial, sources, query, gain, norm_weight, eps, form, *channels
            )
            return x, partial_out, new
        x, partial_out, _, _ = _launch_forward(y, partial, sources, query, gain, norm_weight, eps)
        return x, partial_out, ()
    if not torch.is_grad_enabled():
        form = (0, *form[1:])
    x, partial_out, _, _, new = _forward(
        y, partial, list(sources), list(channels), query, gain, norm_weight, eps, list(form)
    )
    return x, None if partial is None else partial_out.detach(), new

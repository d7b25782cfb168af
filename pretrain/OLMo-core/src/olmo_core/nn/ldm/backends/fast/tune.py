"""
Check and time the ``fast`` kernels on this GPU, beside the flexible ones, for ``launch_table.py``::

    python -m olmo_core.nn.ldm.backends.fast.tune --cache DIR --out FILE.json [--shapes 1024x8,2048x8] [--tokens 16384]
    python -m olmo_core.nn.ldm.backends.fast.tune --cache DIR --out FILE.json --only window

``DIR`` has kernels from ``precompile --candidates``; with the CuTe DSL installed, missing ones are compiled into it. First every
output and gradient against the FP64 reference and bit by bit on a repeat, with all new memory filled with NaN; then the times
of the launches by CUDA graph replay, the ratio to the byte floor (2K + 2 and 3K + 3 vectors of D BF16 elements for each token
at the bandwidth of a copy kernel in this run), and the host's time of an eager call. Each part runs in a process of its own that is
ended when it says nothing for a minute: a kernel that waits for ever does not stop the rest. The JSON is written anew after
every result; its ``table`` holds the best launches. Exit status 1 if something was wrong.

The parts ``window``, ``dots`` and ``coefficients`` (``--only``; kernels from ``precompile --window 4 --candidates``) do the same for windows, boundaries
alone and in a row, for launches whose dot products have warps of their own, and for launches with seven warps for the coefficients, in both forms;
each ends with a window beside the recurrent form. ``sizes`` is that last part alone, at each number of ``--tokens``. ``stored8`` (kernels from
``precompile --memory-dtype float8 --whole-windows``) checks windows whose memories are stored in FP8 and the backward of whole windows, and times them
beside the others.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from olmo_core.nn.depth.tune_report import machine, write_json

from ..flexible import ops as flexible_ops
from ..flexible import tune as common
from . import cache, launch_table, ops, precompile, stored8
from .launch_table import Launch

Tensor = torch.Tensor

CHECKS: list[tuple[int, int, int, dict[str, Any]]] = [
    # d, K, tokens, options
    (512, 8, 1, {}),
    (512, 8, 7, {}),
    (1024, 8, 7, {}),
    (1024, 8, 1061, {}),
    (1024, 8, 16387, {}),
    (1024, 4, 16387, {}),
    (512, 4, 1061, {}),
    (2048, 8, 7, {}),
    (2048, 8, 16387, {}),
    (2048, 4, 1061, {}),
    (1024, 16, 1061, {}),
    (2048, 16, 7, {}),
]
SHAPES = [(1024, 8), (2048, 8), (1024, 4), (2048, 4), (512, 8)]
SILENCE_S = 60

WINDOW_CHECKS: list[tuple[int, int, int, int, dict[str, Any]]] = [
    # d, K, tokens, window, options
    (1024, 8, 1, 4, {}),
    (1024, 8, 1061, 4, {}),
    (1024, 8, 8195, 4, {}),
    (2048, 8, 2051, 4, {}),
    (1024, 4, 1061, 4, {}),
    (2048, 4, 2051, 4, {}),
]
WINDOW_SHAPES = [(1024, 8), (2048, 8), (1024, 4), (2048, 4)]
WINDOW = 4


def say(kind: str, **values: Any) -> None:
    """A line for the parent."""
    print(json.dumps({"kind": kind, **values}), flush=True)


def check(d: int, d_k: int, n_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Errors of this backend and of the reference on the same BF16 inputs, against FP64; and what is wrong."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    inputs = common.draw(d, d_k, n_tokens, torch.bfloat16)
    truth = common.run(
        common.boundary(d, d_k, "reference", **options).double(), inputs, torch.float64
    )
    mine = common.run(common.boundary(d, d_k, "fast", **options), inputs)
    torch.cuda.synchronize()
    again = common.run(common.boundary(d, d_k, "fast", **options), inputs)
    reference = common.run(common.boundary(d, d_k, "reference", **options), inputs)
    errors, wrong = {}, []
    for kind, tensors in truth.items():
        for name, t in tensors.items():
            e = common.relative_rms(mine[kind][name], t)
            r = common.relative_rms(reference[kind][name], t)
            errors[f"{kind} {name}"] = (e, r)
            # A sum over few tokens is as good as its terms: then the reference's own error is the measure.
            if not e < max(common.TOLERANCE[kind], 1.5 * r):
                wrong.append(f"{kind} {name} {e:.2e} (reference {r:.2e})")
            if not torch.equal(mine[kind][name], again[kind][name]):
                wrong.append(f"{kind} {name} differs on repeat")
    torch.use_deterministic_algorithms(False)
    return {"errors": errors, "wrong": wrong}


def check_streams(d: int, d_k: int) -> list[str]:
    """The same bits on another stream and from a captured graph."""
    module = common.boundary(d, d_k, "fast")
    memory, y, gain, _, _ = common.draw(d, d_k, 1061, torch.bfloat16)
    wrong = []
    with torch.no_grad():
        (expected,), x = module((memory,), y, gain)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            (other,), other_x = module((memory,), y, gain)
        stream.synchronize()
        if not (torch.equal(other, expected) and torch.equal(other_x, x)):
            wrong.append("another stream gives another result")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (captured,), captured_x = module((memory,), y, gain)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not (torch.equal(captured, expected) and torch.equal(captured_x, x)):
            wrong.append("a replayed graph gives another result")
    return wrong


def check_large(d: int, d_k: int, n_tokens: int, last: int = 64) -> list[str]:
    """Addresses beyond 2^31 elements: tokens do not mix, so the last ones must come out as if alone."""
    assert n_tokens * d * d_k > 2**31
    module = common.boundary(d, d_k, "fast")
    inputs = common.draw(d, d_k, n_tokens, torch.bfloat16)
    full = common.run(module, inputs)
    memory, y, gain, d_memory, d_x = inputs
    end = [t[:, -last:].contiguous() for t in (memory, y, d_memory, d_x)]
    alone = common.run(module, [end[0], end[1], gain, end[2], end[3]])
    return [
        f"{kind} {name} of the last tokens"
        for kind in ("output", "source")
        for name, t in alone[kind].items()
        if not torch.equal(full[kind][name][:, -last:], t)
    ]


def work_check(args: argparse.Namespace) -> None:
    for d, d_k, n_tokens, options in CHECKS:
        if args.shapes and (d, d_k) not in precompile.parse_shapes(args.shapes):
            continue
        name = f"{d}x{d_k}, {n_tokens} tokens"
        say("start", name=name)
        try:
            result = check(d, d_k, n_tokens, options)
        except Exception as e:  # the others still run
            result = {"errors": {}, "wrong": [_first_line(e)]}
        say("check", name=name, **result)
    for name, call in (
        ("streams and graphs", lambda: check_streams(1024, 8)),
        ("addresses beyond 2^31", lambda: check_large(2048, 8, 140_000)),
    ):
        say("start", name=name)
        try:
            wrong = call()
        except Exception as e:
            wrong = [_first_line(e)]
        say("check", name=name, errors={}, wrong=wrong)


def run_chain(
    backend: str,
    d: int,
    d_k: int,
    window: int,
    options: dict[str, Any],
    inputs: dict[str, list[Tensor]],
    last: bool,
    dtype: torch.dtype | None = None,
    device: str = "cuda",
    rounds8: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """
    Outputs and all gradients of boundaries in a row, as many as there are ``y``.

    :param last: The last boundary is a model's: nothing follows it, and its memory has no gradient.
    :param rounds8: Round the memory to FP8 before each window, for a backend that does not.
    """
    n = len(inputs["y"])
    modules = [common.boundary(d, d_k, backend, device, window=window, **options) for _ in range(n)]
    generator = torch.Generator(device=device).manual_seed(3)
    for module in modules:
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, device=device)
            p.data.add_(0.1 * p.data.std().nan_to_num(1.0) * noise)
        if dtype is not None:
            module.to(dtype)
    tensors = {
        name: [t if dtype is None else t.to(dtype) for t in ts] for name, ts in inputs.items()
    }
    leaves = {
        name: [t.detach().requires_grad_() for t in tensors[name]]
        for name in ("memory", "y", "gain")
    }
    state: tuple[Tensor, ...] = (leaves["memory"][0],)
    outputs = {}
    for i, module in enumerate(modules):
        if rounds8 and i % window == 0:
            memory, units = stored8.store(state[0].detach())
            rounded = stored8.decode(memory) * units[..., None]
            state = (state[0] + (rounded - state[0].detach()).to(state[0].dtype),)
        state, outputs[f"x {i}"] = module(state, leaves["y"][i], leaves["gain"][i])
    ends, grads = list(outputs.values()), tensors["d_x"]
    if not last:
        # Whatever the state is then, the first tensor's gradient is that of the memory.
        ends, grads = [*ends, state[0]], [*grads, *tensors["d_memory"]]
        if len(state) == 1:
            outputs["memory"] = state[0]
    torch.autograd.backward(ends, grads)
    return {
        "output": {name: t.detach() for name, t in outputs.items()},
        "source": {
            "memory": leaves["memory"][0].grad,
            **{f"y {i}": t.grad for i, t in enumerate(leaves["y"])},
        },
        "parameter": {
            **{f"gain {i}": t.grad for i, t in enumerate(leaves["gain"])},
            **{f"{k} {i}": p.grad for i, m in enumerate(modules) for k, p in m.named_parameters()},
        },
    }  # type: ignore[return-value]


def draw_chain(
    d: int, d_k: int, n_tokens: int, n: int, device: str = "cuda"
) -> dict[str, list[Tensor]]:
    memory, y, gain, d_memory, d_x = common.draw(d, d_k, n_tokens, torch.bfloat16, device)
    generator = torch.Generator(device=device).manual_seed(4)

    def more(t: Tensor) -> list[Tensor]:
        noise = [torch.randn(t.shape, generator=generator, device=device) for _ in range(n - 1)]
        return [t, *(r.to(t.dtype) if t.ndim > 1 else t + 0.1 * r for r in noise)]

    return {
        "memory": [memory],
        "y": more(y),
        "gain": more(gain),
        "d_x": more(d_x),
        "d_memory": [d_memory],
    }


def check_window(
    d: int, d_k: int, n_tokens: int, window: int, options: dict[str, Any]
) -> dict[str, Any]:
    """
    A whole window, and a window and half of the next one that ends the model; as :func:`check`. With memories in FP8 the reference rounds them,
    too, and in BF16 often to another number than FP64 does.
    """
    rounds8 = options.get("memory_dtype") == "float8"
    others = {k: v for k, v in options.items() if k != "memory_dtype"}
    errors: dict[str, tuple[float, float]] = {}
    wrong: list[str] = []
    for n, last in ((window, False), (window + 2, True)):
        inputs = draw_chain(d, d_k, n_tokens, n)
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        runs = [
            run_chain("fast", d, d_k, window, options, inputs, last),
            run_chain("fast", d, d_k, window, options, inputs, last),
            run_chain("reference", d, d_k, window, others, inputs, last, rounds8=rounds8),
        ]
        torch.use_deterministic_algorithms(False)
        truth = run_chain(
            "reference", d, d_k, window, others, inputs, last, torch.float64, rounds8=rounds8
        )
        mine, again, reference = runs
        for kind, tensors in mine.items():
            for name, t in tensors.items():
                e = common.relative_rms(t, truth[kind][name])
                r = common.relative_rms(reference[kind][name], truth[kind][name])
                key = f"{kind} {name}, {n} in a row"
                errors[key] = (e, r)
                # Both errors are noise of the BF16 gradients between the boundaries. That of a bias, or from a few tokens, is a
                # few draws (up to 2e-2 were seen); what a wrong formula leaves out is far more.
                many = t.numel() >= 1000 and n_tokens >= 256
                limit = max(common.TOLERANCE[kind], 1.5 * r) if many else max(4e-2, 5 * r)
                if not e < limit:
                    wrong.append(f"{key} {e:.2e} (reference {r:.2e})")
                if not torch.equal(t, again[kind][name]):
                    wrong.append(f"{key} differs on repeat")
        del truth, runs, mine, again, reference
    return {"errors": errors, "wrong": wrong}


def check_position(
    d: int, d_k: int, n_tokens: int, window: int, earlier: int, options: dict[str, Any]
) -> dict[str, Any]:
    """
    One boundary in the middle or at the end of a window, alone, against FP64: no noise from others. With memories in FP8 also the first, and the
    one that is written is what FP64's is in its units but for one byte in a thousand.
    """
    options = dict(options)
    in_units = options.pop("memory_dtype", "model") == "float8"
    device = torch.device("cuda")
    memory, y, gain, d_memory, d_x = common.draw(d, d_k, n_tokens, torch.bfloat16)
    outputs = draw_chain(d, d_k, n_tokens, earlier + 1)["y"][1:]
    generator = torch.Generator(device=device).manual_seed(5)
    shape = (1, n_tokens, (1 + earlier) * d_k)
    coefficients = torch.rand(shape, generator=generator, device=device)
    module = common.boundary(d, d_k, "fast", window=window, **options)
    stored: tuple[Tensor, ...] = ()
    if in_units:
        stored, units = (stored8.store(memory)[0],), stored8.units_of(memory)
        coefficients[..., :d_k] = units * (0.5 + coefficients[..., :d_k])
        memory = memory.new_zeros(1).expand(memory.shape)
    written = in_units and earlier == window - 1

    def run() -> dict[str, Any]:
        module.zero_grad()
        leaves = [t.detach().requires_grad_() for t in (memory, y, gain)]
        state, x = ops.window_boundary(
            (leaves[0], coefficients, *stored, *outputs), leaves[1], module.ldm_parameters,
            module.options_code, leaves[2], common.EPS, window, in_units,
        )  # fmt: skip
        torch.autograd.backward((state[0], x), (d_memory, d_x))
        if written:
            new = {"written units": state[1].detach(), "written bytes": state[2]}
        else:
            new = {"output memory": ops.memory_of(state).detach()}
        return {
            **new,
            "output x": x.detach(),
            **{f"source {n}": t.grad for n, t in zip(("memory", "y"), leaves, strict=False)},
            "parameter norm_weight": leaves[2].grad,
            **{f"parameter {n}": p.grad for n, p in module.named_parameters()},
        }

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    mine, again = run(), run()
    torch.use_deterministic_algorithms(False)
    before = ops._stored(
        memory.double(), coefficients.double(), [t.double() for t in outputs], *stored
    )
    inputs = [before, *(t.double() for t in (y, gain, d_memory, d_x))]
    reference = common.boundary(d, d_k, "reference", **options).double()
    truth = {
        f"{kind} {name}": t
        for kind, tensors in common.run(reference, inputs, torch.float64).items()
        for name, t in tensors.items()
    }
    errors, wrong = {}, []
    if written:
        exact, units = truth["output memory"].float(), mine["written units"]
        truth["written bytes"] = stored8.encode(exact / units[..., None])
        truth["written units"] = stored8.units_of(exact)
    for name, t in mine.items():
        if name.startswith("written"):
            e = (t != truth[name]).double().mean().item()
            limit = 1e-3
        else:
            e = common.relative_rms(t, truth[name])
            limit = common.TOLERANCE[name.split()[0]]
        errors[name] = (e, 0.0)
        if not e < limit:
            wrong.append(f"{name} {e:.2e}")
        if not torch.equal(t, again[name]):
            wrong.append(f"{name} differs on repeat")
    return {"errors": errors, "wrong": wrong}


class WindowCase:
    """The launches of a window's boundaries at one size, each with tensors of its own, called without autograd."""

    def __init__(
        self,
        d: int,
        d_k: int,
        n_tokens: int,
        window: int,
        in_units: bool = False,
        whole: bool = False,
    ):
        module = common.boundary(d, d_k, "fast", window=window)
        inputs = draw_chain(d, d_k, n_tokens, window)
        (memory,), ys, gains = inputs["memory"], inputs["y"], inputs["gain"]
        p, code = module.ldm_parameters, module.options_code
        self.forwards: list[tuple] = []
        self.backwards: list[tuple] = []
        coefficients: Tensor | None = None
        earlier: tuple[Tensor, ...] = ()
        if in_units:
            memory, coefficients = stored8.store(memory)
        for i, (y, gain) in enumerate(zip(ys, gains, strict=True)):
            writes = i == window - 1
            arguments = (memory, y, coefficients, earlier, p, gain, common.EPS, code, writes)
            self.forwards.append(arguments)
            _, _, after, packed = ops._launch_window_forward(*arguments)
            (d_memory,), d_x = inputs["d_memory"], inputs["d_x"][i]
            backward: tuple = (memory, y, coefficients, earlier, packed, d_memory, d_x, code)
            if whole:
                if not i:
                    bundle = y.new_zeros((*y.shape[:-1], *ops.bundle_shape(d, d_k, window)))
                gather = "end" if writes else "middle" if i else "first"
                backward = (*backward, gather, window, bundle)
            self.backwards.append(backward)
            coefficients, earlier = after, (*earlier, y)

    def call(self, direction: str, i: int) -> None:
        if direction == "forward":
            ops._launch_window_forward(*self.forwards[i])
        else:
            ops._launch_window_backward(*self.backwards[i])

    def us(self, direction: str, i: int) -> float:
        """Microseconds of boundary ``i`` of the window."""
        ops.forget_plans()
        return common.graph_us(lambda: self.call(direction, i))

    def chain_us(self, direction: str) -> float:
        """Microseconds of a boundary when all of them run in the order of a step."""
        ops.forget_plans()
        n = len(self.forwards)
        order = range(n) if direction == "forward" else range(n - 1, -1, -1)

        def chain() -> None:
            for i in order:
                self.call(direction, i)

        return common.graph_us(chain) / n


def window_vectors(
    direction: str,
    d_k: int,
    earlier: int,
    window: int,
    in_units: bool = False,
    whole: bool = False,
) -> float:
    """Vectors of D BF16 elements that a window's boundary reads and writes for each token."""
    stored = d_k / 2 if in_units else d_k
    if whole and direction == "backward":
        if not earlier:
            return stored + 2 * d_k + 2 * window + 2
        read = stored + 2 + earlier + (d_k if earlier == window - 1 else 1 + earlier)
        return read + earlier + 3
    if direction == "forward":
        return stored + 2 + earlier + (stored if earlier == window - 1 else 0)
    return stored + 2 * d_k + 3 + earlier


def _run_checks(checks: list[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    for name, check_one in checks:
        say("start", name=name)
        try:
            result = check_one()
        except Exception as e:  # the others still run
            result = {"errors": {}, "wrong": [_first_line(e)]}
        say("check", name=name, **result)
        torch.cuda.empty_cache()


def work_window(args: argparse.Namespace, part: str = "window") -> None:
    """
    :param part: ``dots`` or ``coefficients``: launches whose dot products have warps of their own, or with more warps for the coefficients,
        of the recurrent form and of windows, beside the table's; ``window``: the other launches of windows.
    """
    shapes = precompile.parse_shapes(args.shapes) if args.shapes else WINDOW_SHAPES
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability()[0]]
    if part == "window":
        for d, d_k, n_tokens, window, options in WINDOW_CHECKS:
            if (d, d_k) in shapes:
                size = f"window {window}, {d}x{d_k}, {n_tokens} tokens"
                _run_checks(
                    [
                        (
                            f"boundary {e} of {size}",
                            partial(check_position, d, d_k, n_tokens, window, e, options),
                        )
                        for e in range(1, window)
                    ]
                    + [
                        (
                            f"chains of {size}",
                            partial(check_window, d, d_k, n_tokens, window, options),
                        )
                    ]
                )
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth=bandwidth)
    floor = max(bandwidth.values())
    rows = dict(launch_table.TABLE), dict(launch_table.WINDOWS)
    for d, d_k in shapes:
        plans = {
            (direction, earlier): _window_candidates(architecture, direction, d, d_k, earlier, part)
            for direction, earlier in product(("forward", "backward"), range(WINDOW))
        }
        if part != "window":
            for (direction, earlier), known in plans.items():
                _row(architecture, direction, d, d_k, earlier, known[-1])
            ops.forget_plans()
            n = 1061
            _run_checks(
                [(f"{d}x{d_k}, {n} tokens, {part}", partial(check, d, d_k, n, {}))]
                + [
                    (
                        f"boundary {e} of window {WINDOW}, {d}x{d_k}, {n} tokens, {part}",
                        partial(check_position, d, d_k, n, WINDOW, e, {}),
                    )
                    for e in range(1, WINDOW)
                ]
            )
            _restore(rows)
        for n_tokens in map(int, args.tokens.split(",")):
            try:
                with torch.no_grad():
                    time_window(architecture, d, d_k, n_tokens, plans, floor)
            except Exception as e:
                say(
                    "failed", d=d, K=d_k, M=n_tokens, direction="", launch="", reason=_first_line(e)
                )
            _restore(rows)
            torch.cuda.empty_cache()


def _window_candidates(
    architecture: str, direction: str, d: int, d_k: int, earlier: int, part: str
) -> list[Launch]:
    first = launch_table.launch(architecture, direction, d, d_k, earlier)
    assert first is not None
    if part == "dots":
        return [first, *launch_table.dots_candidates(architecture, direction, d, d_k, earlier)]
    if part == "coefficients":
        # A window's first boundary stores no memory, and has a row of its own for that forward.
        writes = direction == "backward" or earlier == WINDOW - 1
        here = (architecture, direction, d, d_k, earlier, writes)
        row = launch_table.launch(*here)
        assert row is not None
        return [row, *launch_table.coefficients_candidates(*here)]
    if not earlier:
        # The rows of the recurrent form, which the part "time" chooses.
        return [first]
    known = launch_table.candidates(architecture, direction, d, d_k, earlier)
    return [k for k in known if not k.dots_warps]


def _row(architecture: str, direction: str, d: int, d_k: int, earlier: int, launch: Launch) -> None:
    """A window's first boundary has the row of the recurrent form, or where it does not store the memory one of its own."""
    if not earlier:
        launch_table.TABLE[architecture, direction, d, d_k] = launch
    if earlier or direction == "forward":
        launch_table.WINDOWS[architecture, direction, d, d_k, earlier] = launch


def _restore(rows: tuple[dict, dict]) -> None:
    for table, before in zip((launch_table.TABLE, launch_table.WINDOWS), rows, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.update(before)  # type: ignore[attr-defined]
    ops.forget_plans()


def time_window(
    architecture: str,
    d: int,
    d_k: int,
    n_tokens: int,
    plans: dict[tuple[str, int], list[Launch]],
    floor: float,
) -> None:
    """The candidates of each boundary of a window, and a window of the best ones beside the recurrent form."""
    values: dict[str, Any] = {"d": d, "K": d_k, "M": n_tokens}
    say("start", name=f"{d}x{d_k} inputs")
    case = WindowCase(d, d_k, n_tokens, WINDOW)
    recurrent = Case(d, d_k, n_tokens, ops)
    best_recurrent: tuple[float, Launch] | None = None
    for (direction, earlier), known in plans.items():
        n_bytes = window_vectors(direction, d_k, earlier, WINDOW) * d * 2 * n_tokens
        best: tuple[float, Launch] | None = None
        for launch in known:
            say("start", name=f"{d}x{d_k} {direction} {earlier} {launch}")
            _row(architecture, direction, d, d_k, earlier, launch)
            part = {**values, "direction": f"{direction} {earlier}", "launch": repr(launch)}
            try:
                us = case.us(direction, earlier)
                if (direction, earlier) == ("forward", 0):
                    us_recurrent = common.graph_us(recurrent.forward)
                    part["recurrent_us"] = round(us_recurrent, 1)
                    if best_recurrent is None or us_recurrent < best_recurrent[0]:
                        best_recurrent = us_recurrent, launch
            except Exception as e:  # a candidate that does not launch is left out
                say("failed", reason=_first_line(e), **part)
                continue
            say(
                "time",
                us=round(us, 1),
                gbs=round(n_bytes / us / 1e3),
                ratio=round(us * 1e-6 * floor / n_bytes, 2),
                **part,
            )
            if best is None or us < best[0]:
                best = us, launch
        if best is not None:
            _row(architecture, direction, d, d_k, earlier, best[1])
    say("start", name=f"{d}x{d_k} windows in a row")
    us_of = {direction: case.chain_us(direction) for direction in ("forward", "backward")}
    say("chain", form="window", us={k: round(v, 1) for k, v in us_of.items()}, **values)
    if best_recurrent is not None:
        _row(architecture, "forward", d, d_k, 0, best_recurrent[1])
    ops.forget_plans()
    us_of = {k: common.graph_us(getattr(recurrent, k)) for k in ("forward", "backward")}
    say("chain", form="recurrent", us={k: round(v, 1) for k, v in us_of.items()}, **values)


WINDOW_FORMS = {
    "window": (False, False),
    "whole": (False, True),
    "window, FP8": (True, False),
    "whole, FP8": (True, True),
}
"""Memories in FP8; the backward of whole windows."""


def work_stored8(args: argparse.Namespace) -> None:
    """Memories in FP8, and the backward of whole windows: checks, then the times of a window beside those of the others."""
    shapes = precompile.parse_shapes(args.shapes) if args.shapes else WINDOW_SHAPES
    for d, d_k in shapes:
        for n_tokens in (7, 2051):
            size = f"window {WINDOW}, FP8, {d}x{d_k}, {n_tokens} tokens"
            options = {"memory_dtype": "float8"}
            one = partial(check_position, d, d_k, n_tokens, WINDOW, options=options)
            chains = partial(check_window, d, d_k, n_tokens, WINDOW, options)
            _run_checks(
                [(f"boundary {e} of {size}", partial(one, earlier=e)) for e in range(WINDOW)]
                + [(f"chains of {size}", chains)]
            )
            for memory_dtype in ("model", "float8"):
                launch_table.GATHER.add((d, d_k))
                name = f"chains of whole windows, {memory_dtype}, {d}x{d_k}, {n_tokens} tokens"
                options = {"memory_dtype": memory_dtype}
                _run_checks([(name, partial(check_window, d, d_k, n_tokens, WINDOW, options))])
                launch_table.GATHER.discard((d, d_k))
    work_sizes(args, tuple(WINDOW_FORMS))


def work_sizes(args: argparse.Namespace, forms: tuple[str, ...] = ("window", "recurrent")) -> None:
    """The table's launches at several numbers of tokens: a window's boundaries one after the other, and the recurrent form."""
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth=bandwidth)
    floor = max(bandwidth.values())
    shapes = precompile.parse_shapes(args.shapes) if args.shapes else WINDOW_SHAPES
    for (d, d_k), n_tokens in product(shapes, map(int, args.tokens.split(","))):
        vectors: dict[str, dict[str, float]] = {
            form: {
                direction: sum(
                    window_vectors(direction, d_k, e, WINDOW, *which) for e in range(WINDOW)
                )
                / WINDOW
                for direction in ("forward", "backward")
            }
            for form, which in WINDOW_FORMS.items()
        }
        vectors["recurrent"] = {"forward": 2 * d_k + 2, "backward": 3 * d_k + 3}
        for form in forms:
            count = vectors[form]
            say("start", name=f"{d}x{d_k} {n_tokens} tokens, {form}")
            ops.forget_plans()
            try:
                with torch.no_grad():
                    if form != "recurrent":
                        window = WindowCase(d, d_k, n_tokens, WINDOW, *WINDOW_FORMS[form])
                        us = {direction: window.chain_us(direction) for direction in count}
                        del window
                    else:
                        case = Case(d, d_k, n_tokens, ops)
                        us = {name: common.graph_us(getattr(case, name)) for name in count}
                        del case
            except Exception as e:
                say(
                    "failed", d=d, K=d_k, M=n_tokens, direction="", launch=form,
                    reason=_first_line(e),
                )  # fmt: skip
                continue
            finally:
                torch.cuda.empty_cache()
            ratio = {k: v * 1e-6 * floor / (count[k] * d * 2 * n_tokens) for k, v in us.items()}
            say(
                "chain", form=form, d=d, K=d_k, M=n_tokens,
                us={k: round(v, 1) for k, v in us.items()},
                ratio={k: round(v, 2) for k, v in ratio.items()},
            )  # fmt: skip


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:300]


class Case:
    """The forward and the backward op of one backend at one size, called without autograd."""

    def __init__(self, d: int, d_k: int, n_tokens: int, module_ops: Any):
        self.ops = module_ops
        module = common.boundary(d, d_k, "fast")
        memory, y, gain, d_memory, d_x = common.draw(d, d_k, n_tokens, torch.bfloat16)
        p, code = module.ldm_parameters, module.options_code
        self.forward_args = (memory, y, None, None, None, *p, gain, common.EPS, code)
        with torch.no_grad():
            packed = module_ops._launch_forward(*self.forward_args)[-1]
        self.backward_args = (memory, y, None, None, packed, d_memory, d_x, None, code)

    @torch.no_grad()
    def forward(self) -> None:
        self.ops._launch_forward(*self.forward_args)

    @torch.no_grad()
    def backward(self) -> None:
        self.ops._launch_backward(*self.backward_args)


def host_us(d: int, d_k: int) -> tuple[float, float]:
    """Microseconds of the host for one eager forward and backward of the module, at 64 tokens."""
    module = common.boundary(d, d_k, "fast")
    memory, y, gain, d_memory, d_x = common.draw(d, d_k, 64, torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (memory, y, gain)]
    inputs = [*leaves, *module.parameters()]
    total = [0.0, 0.0]
    n = 100
    for i in range(n + 10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        (new_memory,), x = module((leaves[0],), leaves[1], leaves[2])
        middle = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        torch.autograd.grad((new_memory, x), inputs, (d_memory, d_x))
        end = time.perf_counter()
        if i >= 10:
            total[0] += middle - start
            total[1] += end - again
    return total[0] / n * 1e6, total[1] / n * 1e6


def work_time(args: argparse.Namespace) -> None:
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth=bandwidth)
    floor = max(bandwidth.values())
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability()[0]]
    shapes = precompile.parse_shapes(args.shapes) if args.shapes else SHAPES
    rows = dict(launch_table.TABLE), dict(launch_table.WINDOWS)
    for d, d_k in shapes:
        for n_tokens in map(int, args.tokens.split(",")):
            for direction in ("forward", "backward"):
                vectors = 2 * d_k + 2 if direction == "forward" else 3 * d_k + 3
                n_bytes = vectors * d * 2 * n_tokens
                known = launch_table.candidates(architecture, direction, d, d_k)
                runs: list[tuple[str, Launch | None]] = [(repr(c), c) for c in known]
                for name, launch in [("flexible", None), *runs]:
                    say("start", name=f"{d}x{d_k} {n_tokens} {direction} {name}")
                    try:
                        if launch is not None:
                            launch_table.TABLE[architecture, direction, d, d_k] = launch
                            ops.forget_plans()
                        case = Case(d, d_k, n_tokens, ops if launch else flexible_ops)
                        us = common.graph_us(getattr(case, direction))
                    except (
                        Exception
                    ) as e:  # a candidate that does not launch is reported and left out
                        say(
                            "failed", d=d, K=d_k, M=n_tokens, direction=direction, launch=name,
                            reason=_first_line(e),
                        )  # fmt: skip
                        continue
                    finally:
                        _restore(rows)
                    say(
                        "time",
                        d=d,
                        K=d_k,
                        M=n_tokens,
                        direction=direction,
                        launch=name,
                        us=round(us, 1),
                        gbs=round(n_bytes / us / 1e3),
                        ratio=round(us * 1e-6 * floor / n_bytes, 2),
                    )
                    del case
        try:
            say("host", d=d, K=d_k, us=[round(u) for u in host_us(d, d_k)])
        except Exception as e:
            say("failed", d=d, K=d_k, M=64, direction="host", launch="", reason=str(e)[:300])
        torch.cuda.empty_cache()


def show(line: dict[str, Any]) -> str:
    kind = line["kind"]
    if kind == "check":
        worst: dict[str, float] = {}
        for name, (e, _) in line["errors"].items():
            group = name.split()[0]
            worst[group] = max(worst.get(group, 0.0), e)
        text = ", ".join(f"{g} {e:.1e}" for g, e in worst.items())
        verdict = "ok" if not line["wrong"] else "WRONG " + "; ".join(line["wrong"])
        return f"check {line['name']}: {text} {verdict}"
    if kind == "copy":
        return "copy: " + ", ".join(
            f"{k} {v / 1e12:.2f} TB/s" for k, v in line["bandwidth"].items()
        )
    if kind == "time":
        return (
            f"{line['d']:5d} {line['K']:2d} {line['M']:6d} {line['direction']:9s} {line['launch']:75s} "
            f"{line['us']:8.1f} us {line['gbs']:5d} GB/s {line['ratio']:5.2f} x floor"
            + (f", recurrent {line['recurrent_us']} us" if "recurrent_us" in line else "")
        )
    if kind == "chain":
        ratios = {k: f" ({v:.2f} x floor)" for k, v in line.get("ratio", {}).items()}
        text = ", ".join(f"{k} {v:7.1f} us{ratios.get(k, '')}" for k, v in line["us"].items())
        return f"{line['d']:5d} {line['K']:2d} {line['M']:6d} {line['form']:11s} {text} for each boundary"
    if kind == "host":
        return (
            f"host {line['d']}x{line['K']}: forward {line['us'][0]} us, backward {line['us'][1]} us"
        )
    if kind == "failed":
        return f"{line['d']:5d} {line['K']:2d} {line['M']:6d} {line['direction']:9s} {line['launch']}: {line['reason']}"
    return ""


def worker(name: str) -> list[str]:
    """The command of one part."""
    return [sys.executable, "-m", __spec__.name, "--work", name, *sys.argv[1:]]


def stage(
    name: str,
    out: str | os.PathLike | None,
    report: dict[str, Any],
    command: list[str] | None = None,
    show: Callable[[dict[str, Any]], str] = show,
) -> None:
    """
    Run one part in a process of its own, show and record its lines.

    :param command: The part's command, if it is another module's, and ``show`` what makes text of its lines.
    """
    command = worker(name) if command is None else command
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        doing = "starting"
        while True:
            if not selector.select(SILENCE_S):
                process.kill()
                report["wrong"].append(f"{name}: nothing for {SILENCE_S} s at {doing}; ended")
                print(f"WRONG {report['wrong'][-1]}", flush=True)
                break
            text = process.stdout.readline()
            if not text:
                break
            try:
                line = json.loads(text)
            except ValueError:
                print(text.rstrip(), flush=True)
                continue
            if line["kind"] == "start":
                doing = line["name"]
                continue
            print(show(line), flush=True)
            report["lines"].append(line)
            report["wrong"] += [f"{line.get('name')}: {w}" for w in line.get("wrong", [])]
            write_json(out, report)
    if process.returncode:
        report["wrong"].append(f"{name}: exit status {process.returncode} at {doing}")
        print(f"WRONG {report['wrong'][-1]}", flush=True)


def new_report() -> dict[str, Any]:
    """The machine and the command; results to come."""
    return {
        **machine(),
        "dsl": cache.dsl_version(),
        "lines": [],
        "wrong": [],
        "table": [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--cache", help="the folder of precompile")
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--shapes", help="widths and slots, such as 1024x8,2048x8")
    parser.add_argument("--tokens", default="16384", help="numbers of tokens, such as 16384,65536")
    parts = ["check", "time", "window", "dots", "coefficients", "sizes", "stored8"]
    parser.add_argument("--only", choices=parts, help="one part")
    parser.add_argument("--work", choices=parts, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    if args.cache:
        os.environ[cache.PLACES] = os.path.abspath(args.cache)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.work:
        work: dict[str, Callable[[argparse.Namespace], None]] = {
            "check": work_check,
            "time": work_time,
            "window": work_window,
            "dots": partial(work_window, part="dots"),
            "coefficients": partial(work_window, part="coefficients"),
            "sizes": work_sizes,
            "stored8": work_stored8,
        }
        work[args.work](args)
        return
    report = new_report()
    for name in (args.only,) if args.only else ("check", "time"):
        stage(name, args.out, report)
    best: dict[tuple, dict[str, Any]] = {}
    for line in report["lines"]:
        if line["kind"] == "time" and line["launch"] != "flexible":
            key = (line["direction"], line["d"], line["K"], line["M"])
            if key not in best or line["us"] < best[key]["us"]:
                best[key] = line
    report["table"] = list(best.values())
    for row in report["table"]:
        print(
            f"    {row['direction']} ({row['d']}, {row['K']}): {row['launch']},  # {row['M']} tokens: {row['us']} us, "
            f"{row['gbs']} GB/s, {row['ratio']} x floor"
        )
    write_json(args.out, report)
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} results are wrong: see WRONG above")


if __name__ == "__main__":
    main()

"""
Check and time AttnRes's ``flexible`` kernels on this GPU over candidate launches, for ``launch_table.py``::

    python -m olmo_core.nn.attnres.backends.flexible.tune --out tune.json [--quick] [--parts check,times,host,compile,stack,fla]

The parts: ``check``, outputs and every gradient against the FP64 reference with uninitialised memory full of NaN (exit 1
beyond the tolerance, or if a repeat differs in a bit); ``times``, forward and backward of each candidate by CUDA graph
replay at 16,384 tokens against the byte floor; ``host``, the host's time for one eager call; ``compile``, the reference under
``torch.compile``; ``stack``, forward and backward through all boundaries of a depth stack with identity sublayers, full and
block form, and its peak memory; ``fla``, fla-core in the same two settings, if it can be imported. ``--quick`` is the first
three, with fewer candidates. The JSON is written anew after every result.

Floors in vectors of ``D`` elements a token with ``N`` sources, at the bandwidth of the fastest large copy: ``N + 1`` forward;
backward ``3N + 4`` at the first boundary of a group of four (with what the three later ones left), ``N + 5`` inside a group
(one later boundary).
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.triton_ops import architecture, next_power_of_2
from olmo_core.nn.depth.tune_report import machine, write_json
from olmo_core.nn.ldm.backends.flexible.tune import (
    copy_bandwidth,
    events_us,
    graph_us,
    relative_rms,
    resources,
)

from ...config import AttnResConfig
from ...module import AttnResBoundary
from .. import fla, flexible
from . import kernels, launch_table, ops
from .launch_table import Launch, Row

Tensor = torch.Tensor

SHAPES = [(1024, 9), (2048, 9), (1024, 25), (2048, 25)]
"""Widths and numbers of sources."""
TOKENS = 16384
STACKS = [(24, 1), (24, 6), (28, 1), (28, 7)]
"""Blocks of a stack (two sublayers each) and AttnRes's ``block_size``."""
STACK_TOKENS, STACK_WIDTH = 8192, 1024
TOLERANCE = {"output": 2.5e-3, "source": 3e-3, "parameter": 5e-3}
"""Relative RMS error in BF16 by kind of tensor."""
EPS = 1e-6
PARTS = ("check", "times", "host", "compile", "stack", "fla")


def relaunch(row: Row | None) -> None:
    """Use these launch numbers for every shape; ``None``: those of the table."""
    ops.find_row = launch_table.find_row if row is None else lambda *shape: row  # type: ignore[assignment]
    ops.forget_plans()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Setting:
    """One boundary away from its start, so that every gradient counts, with inputs and gradients of its outputs."""

    def __init__(
        self,
        d: int,
        index: int,
        n_tokens: int,
        *,
        block_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ):
        self.d, self.index, self.dtype, self.device = d, index, dtype, device
        self.config = AttnResConfig(block_size=block_size)
        self.n_sources = self.config.num_sources(index)
        generator = torch.Generator(device=device).manual_seed(2)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        n_state = self.config.num_sources(index - 1) if index else 0
        self.state = [normal(1, n_tokens, d).to(dtype) for _ in range(n_state)]
        self.y = normal(1, n_tokens, d).to(dtype)
        self.norm_weight = 1 + 0.1 * normal(d)
        self.query, self.gain = d**-0.5 * normal(d), 1 + 0.3 * normal(d)
        self.d_x = normal(1, n_tokens, d).to(dtype)
        self.d_sources = normal(1, n_tokens, self.n_sources, d).to(dtype)

    def build(self, backend: str) -> AttnResBoundary:
        config = self.config.replace(backend=DepthBackend(backend))
        module = config.build(
            d_model=self.d, index=self.index, n_sublayers=self.index + 1, eps=EPS
        ).to(self.device)
        with torch.no_grad():
            for p, value in ((module.query, self.query), (module.gain, self.gain)):
                if p is not None:
                    p.copy_(value)
        return module

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The old state, ``y`` and the norm's gain."""
        return [
            t.detach().to(dtype or t.dtype).requires_grad_()
            for t in (*self.state, self.y, self.norm_weight)
        ]

    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Outputs and all gradients by name; computed in ``dtype`` if one is given."""
        module = self.build(backend).to(dtype)
        *state, y, norm_weight = leaves = self.leaves(dtype)
        new_state, x = module(tuple(state), y, norm_weight)
        d_sources = self.d_sources.to(x.dtype)
        outputs, grads = [x], [self.d_x.to(x.dtype)]
        channels = new_state[: -self.n_sources]
        if channels:
            committed = channels[0].shape[-2]
            outputs += channels
            grads += [d_sources[..., :committed, :], *d_sources[..., committed:, :].unbind(-2)]
        else:
            outputs += new_state
            grads += d_sources.unbind(-2)
        torch.autograd.backward(outputs, grads)
        names = [*range(len(state)), "y"]
        return {
            "output x": x.detach(),
            "output last": new_state[-1].detach(),
            **{f"source {name}": t.grad for name, t in zip(names, leaves, strict=False)},
            "parameter norm_weight": norm_weight.grad,
            **{f"parameter {name}": p.grad for name, p in module.named_parameters()},
        }

    def check(self, others: tuple[str, ...] = ()) -> dict[str, Any]:
        """Errors of this backend, the reference and other ones on the same inputs, against FP64."""
        truth = self.run("reference", torch.float64)
        backends = ["flexible", "reference", *others]
        results = {}
        with poisoned():
            for backend in backends:
                results[backend] = self.run(backend)
            again = self.run("flexible")
        errors = {
            backend: {name: relative_rms(result[name], t) for name, t in truth.items()}
            for backend, result in results.items()
        }
        scale = {torch.bfloat16: 1.0, torch.float16: 0.15, torch.float32: 0.005}[self.dtype]
        wrong = [
            f"{name} {e:.2e} (reference {errors['reference'][name]:.2e})"
            for name, e in errors["flexible"].items()
            if not e < scale * TOLERANCE[name.split()[0]]
        ]
        wrong += [
            f"{name} differs on repeat"
            for name, t in results["flexible"].items()
            if not torch.equal(t, again[name])
        ]
        return {"errors": errors, "wrong": wrong}

    # The launches alone, without autograd.

    @property
    def committed(self) -> tuple[Tensor, ...]:
        return tuple(self.state)

    @torch.no_grad()
    def forward(self) -> tuple:
        """Of the full form."""
        return ops._launch_forward(
            self.y, None, self.committed, self.query, self.gain, self.norm_weight, EPS
        )

    def backward_call(self, defer: bool, later: int, d_rows: bool = True) -> Callable[[], Any]:
        """
        :param defer: Of a boundary inside a group instead of its first one.
        :param later: The number of later boundaries in the group, with made-up ledgers.
        """
        _, _, statistics, h = self.forward()
        pitch = self.n_sources + flexible.GROUP - 1
        left = [
            t
            for _ in range(later)
            for t in (
                torch.randn_like(self.y),
                0.1 * torch.randn(ops._ledger_size(self.y, pitch), device=self.device),
            )
        ]

        def call() -> None:
            ops._launch_backward(
                self.y, self.committed, self.query, self.gain, self.norm_weight, statistics, h, self.d_x,
                self.d_sources if d_rows else None, None, tuple(left), pitch, True, defer,
            )  # fmt: skip

        return call


DIRECTIONS = ("forward", "backward", "deferring")


def vectors(direction: str, n: int) -> int:
    """Vectors a token at the floor."""
    return {"forward": n + 1, "backward": 3 * n + 4, "deferring": n + 5}[direction]


def calls(setting: Setting) -> dict[str, Callable[[], Any]]:
    return {
        "forward": setting.forward,
        "backward": setting.backward_call(False, flexible.GROUP - 1),
        "deferring": setting.backward_call(True, 1),
    }


def candidates(d: int, quick: bool) -> list[Row]:
    """
    Rows whose launches are timed independently. By columns of a thread: 16 or 32 forward, 8 or 16 backward; with and
    without software pipelining (``stages``), whose loads wait in shared memory instead of registers.
    """
    w = max(1, next_power_of_2(d) // 1024)
    forward = [
        Launch(2, w),
        Launch(4, w),
        Launch(2, 2 * w),
        Launch(4, 2 * w),
        Launch(2, w, stages=3),
        Launch(2, 2 * w, stages=3),
        Launch(1, w, stages=4),
        Launch(2, w, programs_per_sm=max(1, 12 // w), registers=168),
    ]
    backward = [
        Launch(2, 2 * w, programs_per_sm=max(1, 4 // w)),
        Launch(2, 4 * w, programs_per_sm=max(1, 3 // w)),
        Launch(4, 4 * w, programs_per_sm=max(1, 2 // w)),
        Launch(1, 4 * w, stages=3, programs_per_sm=max(1, 3 // w)),
        Launch(2, 4 * w, registers=128, programs_per_sm=max(1, 4 // w)),
        Launch(4, 8 * w, programs_per_sm=max(1, 2 // w)),
        Launch(2, 4 * w, stages=2, programs_per_sm=max(1, 3 // w)),
        Launch(1, 4 * w, programs_per_sm=max(1, 4 // w)),
    ]
    deferring = [
        Launch(2, 2 * w, programs_per_sm=max(1, 4 // w)),
        Launch(4, 4 * w, programs_per_sm=max(1, 4 // w)),
        Launch(2, 4 * w, programs_per_sm=max(1, 5 // w)),
        Launch(2, 2 * w, stages=3, programs_per_sm=max(1, 4 // w)),
        Launch(4, 2 * w, programs_per_sm=max(1, 4 // w)),
        Launch(1, 2 * w, stages=4, programs_per_sm=max(1, 5 // w)),
        Launch(8, 4 * w, programs_per_sm=max(1, 3 // w)),
        Launch(4, 4 * w, stages=2, programs_per_sm=max(1, 4 // w)),
    ]
    rows = [Row(*launches) for launches in zip(forward, backward, deferring, strict=True)]
    return rows[:6] if quick else rows


def describe(launch: Launch) -> str:
    return (
        f"S{launch.sources} w{launch.warps} t{launch.tokens} s{launch.stages} p{launch.programs_per_sm}"
        f" r{launch.registers or '-'}"
    )


def compile_row(job: tuple[int, int, Row]) -> tuple[tuple, dict[str, str], str]:
    """Fill Triton's cache on disk for one row; in a process of its own, since compiling takes seconds."""
    d, n, row = job
    try:
        relaunch(row)
        setting = Setting(d, n - 1, 1024)
        used = {}
        for direction, call in calls(setting).items():
            call()
            forward = direction == "forward"
            used[direction] = resources(
                kernels.forward_kernel if forward else kernels.backward_kernel
            )
        torch.cuda.synchronize()
        return job, used, ""
    except Exception as e:  # a candidate that does not compile or launch is reported and left out
        return job, {}, f"{type(e).__name__}: {e}".splitlines()[0][:200]


def time_shape(
    d: int, n: int, compiled: dict, bandwidth: float, quick: bool
) -> tuple[dict[str, Any], Row | None]:
    """Time every row that compiled; print and return the times, and the best row."""
    setting = Setting(d, n - 1, TOKENS)
    vector = TOKENS * d * 2
    report: dict[str, Any] = {"d": d, "sources": n, "M": TOKENS, "times": []}
    best: dict[str, tuple[float, Launch]] = {}

    def record(direction: str, launch: Launch, us: float, note: str) -> None:
        n_bytes = vectors(direction, n) * vector
        ratio = us * 1e-6 * bandwidth / n_bytes
        report["times"].append(
            {
                "direction": direction,
                "launch": asdict(launch),
                "us": us,
                "ratio": ratio,
                "note": note,
            }
        )
        print(
            f"{d:5d} {n:3d} {direction:9s} {describe(launch):26s}{note:>10s} {us:8.1f} us "
            f"{n_bytes / us / 1e3:6.0f} GB/s {ratio:6.2f} x floor",
            flush=True,
        )

    for row in candidates(d, quick):
        used, error = compiled[d, n, row]
        if error:
            continue
        relaunch(row)
        for direction, call in calls(setting).items():
            us = graph_us(call)
            launch = getattr(row, direction)
            record(direction, launch, us, used[direction])
            if direction not in best or us < best[direction][0]:
                best[direction] = us, launch
    if not best:
        return report, None
    row = Row(best["forward"][1], best["backward"][1], best["deferring"][1])
    relaunch(replace(row, keep_h=True))
    gain = 0.0
    for direction, call in calls(setting).items():
        us = graph_us(call)
        record(direction, getattr(row, direction), us, "keep_h")
        # As often as they are in a group.
        weight = {"forward": flexible.GROUP, "backward": 1, "deferring": flexible.GROUP - 1}
        gain += weight[direction] * (best[direction][0] - us)
    total = sum(weight[direction] * best[direction][0] for direction in DIRECTIONS)
    # It costs a vector a boundary of memory.
    row = replace(row, keep_h=gain > 0.05 * total)
    relaunch(None)
    report["best"] = repr(row)
    print(f"      best: {row}", flush=True)
    return report, row


def host_us(d: int, n: int, backend: str, repeats: int = 50) -> tuple[float, float]:
    """
    Microseconds of the host for one boundary, eager, forward and backward: of a group's boundaries in the middle of a model
    at 64 tokens, the first of which has ``n`` sources, divided by their number.
    """
    group = flexible.GROUP
    settings = [Setting(d, n - 1 + i, 64) for i in range(group)]
    config = AttnResConfig(backend=DepthBackend(backend))
    modules = [
        config.build(d_model=d, index=n - 1 + i, n_sublayers=2 * (n + group), eps=EPS).to(
            settings[0].device
        )
        for i in range(group)
    ]
    first = settings[0]
    state: tuple[Tensor, ...] = tuple(first.state)
    if backend == "flexible":
        state = (ops._op_rows(state).requires_grad_(), *state)
    else:
        state = tuple(t.requires_grad_() for t in state)
    y = [setting.y.requires_grad_() for setting in settings]
    norm_weight = first.norm_weight.requires_grad_()
    grads = [setting.d_x for setting in settings]
    inputs = [t for t in (*state, *y, norm_weight) if t.requires_grad]
    inputs += [p for module in modules for p in module.parameters()]
    forward = backward = 0.0
    for i in range(repeats + 5):
        torch.cuda.synchronize()
        a = time.perf_counter()
        now, outputs = state, []
        for module, y_i in zip(modules, y, strict=True):
            now, x = module(now, y_i, norm_weight)
            outputs.append(x)
        b = time.perf_counter()
        torch.cuda.synchronize()
        c = time.perf_counter()
        torch.autograd.grad(outputs, inputs, grads)
        e = time.perf_counter()
        if i >= 5:
            forward += b - a
            backward += e - c
    return forward / repeats / group * 1e6, backward / repeats / group * 1e6


def autograd_us(d: int, n: int, backend: str, compiled: bool) -> dict[str, float]:
    """
    Forward and backward of one boundary through autograd: one eager call between events, and by graph replay. The
    gradients of the sources are new tensors, to which nothing is added.
    """
    setting = Setting(d, n - 1, TOKENS)
    module = setting.build(backend)
    call = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
    leaves = setting.leaves()
    *state, y, norm_weight = leaves
    inputs = [*leaves, *module.parameters()]

    def forward() -> Tensor:
        return call(tuple(state), y, norm_weight)[1]

    def both() -> None:
        torch.autograd.grad(forward(), inputs, setting.d_x)

    out = {"forward eager": events_us(forward), "both eager": events_us(both)}
    try:
        out |= {"forward graph": graph_us(forward), "both graph": graph_us(both)}
    except Exception as e:  # not every backend can be captured
        print(f"      no graph of {backend}: {type(e).__name__}: {str(e)[:100]}", flush=True)
    return out


class Stack:
    """All boundaries of a model whose sublayers are the identity."""

    def __init__(self, n_blocks: int, block_size: int, backend: str, d: int, n_tokens: int):
        n_sublayers = 2 * n_blocks
        config = AttnResConfig(block_size=block_size, backend=DepthBackend(backend))
        generator = torch.Generator(device="cuda").manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.boundaries = [
            config.build(d_model=d, index=i, n_sublayers=n_sublayers, eps=EPS).to("cuda")
            for i in range(n_sublayers + 1)
        ]
        with torch.no_grad():
            for module in self.boundaries:
                if module.query is not None:
                    module.query.copy_(d**-0.5 * normal(d))
        self.y = normal(1, n_tokens, d).to(torch.bfloat16).requires_grad_()
        self.norm_weight = torch.ones(d, device="cuda", requires_grad=True)
        self.d_x = normal(1, n_tokens, d).to(torch.bfloat16)
        self.inputs = [self.y, self.norm_weight]
        self.inputs += [p for module in self.boundaries for p in module.parameters()]

    def forward(self) -> Tensor:
        state: tuple[Tensor, ...] = ()
        y = self.y
        for module in self.boundaries:
            state, y = module(state, y, self.norm_weight)
        return y

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.inputs, self.d_x)

    def measure(self) -> dict[str, float]:
        self.both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.both()
        torch.cuda.synchronize()
        out = {
            "peak MiB": (torch.cuda.max_memory_allocated() - before) / 2**20,
            "forward ms": median_ms(self.forward),
            "both ms": median_ms(self.both),
        }
        try:
            out["both graph ms"] = graph_ms(self.both)
        except Exception as e:
            print(f"      no graph: {type(e).__name__}: {str(e)[:100]}", flush=True)
        return out


def measure_stack(n_blocks: int, block_size: int, backend: str) -> dict[str, float]:
    return Stack(n_blocks, block_size, backend, STACK_WIDTH, STACK_TOKENS).measure()


def median_ms(call: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[repeats // 2]


def graph_ms(call: Callable[[], Any], repeats: int = 5) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_ms(graph.replay, repeats)


def stack_vectors(n_blocks: int, block_size: int) -> tuple[int, int]:
    """Vectors a token that the stack's boundaries move forward and backward at the floor of these kernels."""
    config = AttnResConfig(block_size=block_size)
    n_sublayers = 2 * n_blocks
    forward = backward = 0
    for index in range(n_sublayers + 1):
        n, last = config.num_sources(index), index == n_sublayers
        partial = index > 0 and (index - 1) % block_size != 0
        forward += n + 1 + 2 * partial
        start = index - index % flexible.GROUP
        later = 0 if last else min(start + flexible.GROUP, n_sublayers) - 1 - index
        if last:
            backward += 2 * n + 1
        elif index == start:
            backward += 3 * n + 1 + later
        else:
            backward += n + 4 + later
    return forward, backward


def check_stack(backend: str) -> dict[str, float]:
    """
    Relative RMS errors in BF16 of the gradients of a stack of 24 blocks against the reference in FP64. The roundings of the
    forward pass are in all backends' errors.
    """
    errors = {}
    for block_size in (1, 6):
        torch.manual_seed(0)
        stack = Stack(24, block_size, backend, 512, 256)
        truth = Stack(24, block_size, "reference", 512, 256)
        for module in truth.boundaries:
            module.double()
        truth.y = truth.y.detach().double().requires_grad_()
        truth.d_x, truth.norm_weight = truth.d_x.double(), truth.norm_weight.detach().double()
        truth.norm_weight.requires_grad_()
        truth.inputs = [truth.y, truth.norm_weight]
        truth.inputs += [p for module in truth.boundaries for p in module.parameters()]
        got, expected = stack.both(), truth.both()
        form = "full" if block_size == 1 else "block"
        errors[f"{form} y"] = relative_rms(got[0], expected[0])
        flat = [torch.cat([t.flatten().double() for t in side[2:]]) for side in (got, expected)]
        errors[f"{form} queries and gains"] = relative_rms(*flat)
    return errors


def fla_jobs(shapes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """One job for each of fla's 24 configurations of a kernel: they differ in nothing else."""
    return [(d, n, i) for d, n in shapes for i in range(24)]


def compile_fla(job: tuple[int, int, int]) -> str:
    """Fill Triton's cache on disk with one of fla's configurations, so that its own search finds them compiled."""
    d, n, i = job
    try:
        from fla.ops.attnres import fused

        for kernel in (fused.attnres_fwd_kernel, fused.attnres_bwd_kernel_dv):
            tuner = kernel
            while not hasattr(tuner, "configs"):
                tuner = tuner.fn
            tuner.configs = [tuner.configs[i % len(tuner.configs)]]
        setting = Setting(d, n - 1, 256)
        module = setting.build("fla")
        *state, y, norm_weight = setting.leaves()
        module(tuple(state), y, norm_weight)[1].sum().backward()
        torch.cuda.synchronize()
        return ""
    except Exception as e:
        return f"{type(e).__name__}: {e}".splitlines()[0][:200]


def guarded(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """The result, or ``None`` after a line that says what went wrong: the rest goes on."""
    try:
        return call(*args)
    except Exception as e:
        print(f"{name} failed: {type(e).__name__}: {str(e)[:300]}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="check, times and host only")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--shapes", help="widths and numbers of sources, such as 1024x9,2048x25")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", help="write the JSON here")
    args = parser.parse_args()
    parts = PARTS[:3] if args.quick else args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"--parts has {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    shapes = SHAPES
    if args.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]  # type: ignore[misc]
    began = time.time()
    report: dict[str, Any] = {
        **machine(),
    }

    def write() -> None:
        write_json(args.out, report)

    def say(text: str) -> None:
        print(f"[{time.time() - began:5.0f} s] {text}", flush=True)

    say(f"{report['device']}, torch {torch.__version__}, triton {report['triton']}")
    compiled: dict = {}
    has_fla = fla.unavailable(torch.device("cuda"), torch.bfloat16, 1024) is None
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        if "times" in parts:
            jobs = [(d, n, row) for d, n in shapes for row in candidates(d, args.quick)]
            for job, used, error in pool.imap_unordered(compile_row, jobs):
                compiled[job] = used, error
                if error:
                    print(f"left out {job}: {error}", flush=True)
            say(f"compiled {len(jobs)} rows")
        if "fla" in parts and has_fla:
            # The padded lengths 8 to 64 at the width of the stack, too.
            fla_shapes = [(1024, 3), *shapes, (1024, 40)]
            failures = [e for e in pool.imap_unordered(compile_fla, fla_jobs(fla_shapes)) if e]
            say(f"compiled fla ({len(failures)} failures{': ' + failures[0] if failures else ''})")

    failed = False
    if "check" in parts:
        report["checks"] = []
        for d, index, block_size, n_tokens, dtype in [
            (1024, 8, 1, 1061, torch.bfloat16),
            (1024, 24, 1, 517, torch.bfloat16),
            (2048, 8, 1, 517, torch.bfloat16),
            (1344, 10, 4, 1061, torch.bfloat16),
            (1024, 48, 6, 1061, torch.bfloat16),
            (1024, 0, 1, 1061, torch.bfloat16),
            (512, 56, 1, 131, torch.bfloat16),
            (1024, 8, 3, 517, torch.float16),
            (1024, 8, 1, 517, torch.float32),
        ]:
            name = f"d={d} sources={AttnResConfig(block_size=block_size).num_sources(index)} block={block_size} {dtype}"
            setting = Setting(d, index, n_tokens, block_size=block_size, dtype=dtype)
            others = ("fla",) if has_fla and "fla" in parts and d == 1024 and index else ()
            result = guarded(
                f"check {name}",
                setting.check,
                others,
            )
            failed |= result is None or bool(result["wrong"])
            if result is None:
                continue
            worst = {
                f"{backend} {kind}": max(e for n, e in errors.items() if n.startswith(kind))
                for backend, errors in result["errors"].items()
                for kind in TOLERANCE
            }
            line = " ".join(f"{k} {e:.1e}" for k, e in worst.items())
            say(
                f"check {name}: {line} "
                + ("WRONG: " + "; ".join(result["wrong"]) if result["wrong"] else "ok")
            )
            report["checks"].append({"name": name, **result})
        for backend in ("flexible", "reference", *(("fla",) if has_fla and "fla" in parts else ())):
            errors = guarded("check stack", check_stack, backend)
            report[f"stack errors {backend}"] = errors
            if errors is not None:
                say(
                    f"stack of 24 blocks, {backend}: "
                    + " ".join(f"{k} {e:.2e}" for k, e in errors.items())
                )
        write()

    copies = copy_bandwidth()
    bandwidth = max(copies.values())
    report["copy_bytes_per_s"] = copies
    say("copy: " + ", ".join(f"{name} {b / 1e12:.2f} TB/s" for name, b in copies.items()))

    rows: launch_table.Rows = {}
    if "times" in parts:
        report["cases"] = []
        for d, n in shapes:
            timed = guarded(f"times {d}x{n}", time_shape, d, n, compiled, bandwidth, args.quick)
            if timed is not None:
                report["cases"].append(timed[0])
                if timed[1] is not None:
                    rows[architecture(0), 2, next_power_of_2(d), launch_table.bucket(n)] = timed[1]
            write()
        say("rows:")
        for key, row in rows.items():
            print(f"    {key}: {row},", flush=True)
        # For the rest of this run.
        launch_table.ROWS.update(rows)
        relaunch(None)

    if "host" in parts:
        report["host_us"] = {}
        for n in (9, 25, 49):
            report["host_us"][n] = guarded("host", host_us, 1024, n, "flexible")
            if report["host_us"][n]:
                say(
                    "host, {} sources: forward {:.0f} us, backward {:.0f} us".format(
                        n, *report["host_us"][n]
                    )
                )
        write()

    def compare(
        backend: str, label: str, some: list[tuple[int, int]], compiled: bool = False
    ) -> None:
        for d, n in some:
            times = guarded(
                f"{label} {d}x{n}",
                autograd_us,
                d,
                n,
                backend,
                compiled,
            )
            report.setdefault("autograd", []).append(
                {"backend": label, "d": d, "sources": n, "us": times}
            )
            if times:
                say(f"{label} {d}x{n}: " + ", ".join(f"{k} {v:.0f} us" for k, v in times.items()))
            write()

    if "compile" in parts or "fla" in parts:
        compare("flexible", "flexible", shapes)
    if "compile" in parts:
        torch.compiler.reset()
        compare("reference", "reference + torch.compile", shapes[:1], compiled=True)
    if "fla" in parts:
        if has_fla:
            compare("fla", "fla", shapes)
        else:
            say("fla-core is not installed: no comparison with it")
    if "stack" in parts:
        report["stacks"] = []
        for n_blocks, block_size in STACKS:
            forward, backward = stack_vectors(n_blocks, block_size)
            unit = STACK_TOKENS * STACK_WIDTH * 2 / bandwidth * 1e3
            say(
                f"stack of {n_blocks} blocks, block_size {block_size}: floors {forward * unit:.2f} ms forward, "
                f"{(forward + backward) * unit:.2f} ms with backward"
            )
            for backend in ("flexible", *(("fla",) if has_fla and "fla" in parts else ())):
                result = guarded(
                    f"stack {backend}",
                    measure_stack,
                    n_blocks,
                    block_size,
                    backend,
                )
                report["stacks"].append(
                    {
                        "blocks": n_blocks,
                        "block_size": block_size,
                        "backend": backend,
                        "result": result,
                    }
                )
                if result:
                    say(f"  {backend}: " + ", ".join(f"{k} {v:.2f}" for k, v in result.items()))
                write()
    write()
    say("done")
    if failed:
        sys.exit("a gradient or output is beyond its tolerance: see WRONG or failed above")


if __name__ == "__main__":
    main()

"""
Check and time mHC's ``flexible`` kernels on this GPU over candidate launches, for ``launch_table.py``::

    python -m olmo_core.nn.hyper_connections.backends.flexible.tune --out tune.json [--quick] [--shapes 1024x4,2048x4]

Outputs and every gradient against the FP64 reference with poisoned allocations, and a bitwise repeat (exit 1 beyond the
tolerance), in other processes, which also compile the candidates. Then, for each width, the time of the forward and the
backward by CUDA graph replay, and its ratio to the byte floor: 2N + 2 vectors of D BF16 elements for each token forward
and, backward, 4N + 3 if no stream is read twice and 5N + 3 if the streams are read once more, at the bandwidth of an
elementwise kernel in the same run. (What the kernels do move: 3N + 2 forward, and 6N + 4 backward.) Then the host's time for
one eager call, and, unless quick, the reference under ``torch.compile`` in a process of its own, for as long as
``--compile-seconds``. After ``--seconds`` no further candidate is timed. The JSON is written anew after every step; its
``table`` holds the best launches.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.triton_ops import architecture
from olmo_core.nn.depth.tune_report import machine, write_json

from ...config import HyperConnectionsConfig
from ...module import HyperConnectionsBoundary
from . import kernels, launch_table, ops
from .launch_table import Backward, Collapse, Forward, Launches, Phi, Rows
from .options import BoundaryOptions

Tensor = torch.Tensor

SHAPES = [(1024, 4), (2048, 4), (512, 4)]
QUICK_SHAPES = [(1024, 4), (2048, 4)]
TOKENS = 16384
SUBLAYERS = 48
TOLERANCE = {
    torch.bfloat16: {"output": 2.5e-3, "source": 3e-3, "parameter": 5e-3},
    torch.float16: {"output": 4e-4, "source": 4e-4, "parameter": 7e-4},
    torch.float32: {"output": 1e-5, "source": 1e-5, "parameter": 3e-5},
}
"""Relative RMS error by dtype and kind of tensor."""
COEFFICIENTS = 2e-5
"""RMS error of ``post`` and ``res`` where the streams that they come from are the same: a rounding of a stream to the other
side, of which there are a few, is of this size."""
EPS = 1e-5


def boundary(
    d: int, n: int, backend: str, index: int = 1, device: str = "cuda", **options: Any
) -> HyperConnectionsBoundary:
    """A boundary with parameters away from their start, and maps' logits of about unit scale."""
    config = HyperConnectionsConfig(backend=DepthBackend(backend), n_streams=n, **options)
    module = config.build(d_model=d, index=index, n_sublayers=SUBLAYERS, eps=EPS).to(device)
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator, device=device)
            if name == "phi":
                p.copy_(noise * (n * d) ** -0.5)
            elif name == "alpha":
                p.copy_(1 + 0.1 * noise)
            else:
                p.copy_(0.3 * p + 0.5 * noise)
    return module


def draw(
    module: HyperConnectionsBoundary, n_tokens: int, dtype: torch.dtype, device: str = "cuda"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs of a boundary and gradients of its outputs, by name."""
    generator = torch.Generator(device=device).manual_seed(2)
    n, d = module.config.n_streams, module.d_model

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs = {"y": normal(1, n_tokens, d).to(dtype), "norm_weight": 1 + 0.1 * normal(d)}
    if not module.is_first:
        # Streams hold much the same, as in a model.
        shared = normal(1, n_tokens, 1, d)
        inputs["streams"] = (shared + 0.5 * normal(1, n_tokens, n, d)).to(dtype)
        inputs["post"] = 2 * torch.sigmoid(normal(1, n_tokens, n))
        if module.mixes_streams:
            inputs["res"] = torch.softmax(2 * normal(1, n_tokens, n, n), dim=-1)
    grads = {"x": normal(1, n_tokens, d).to(dtype)}
    if not module.is_last:
        grads["streams"] = normal(1, n_tokens, n, d).to(dtype)
        grads["post"] = normal(1, n_tokens, n)
        if module.mixes_streams:
            grads["res"] = normal(1, n_tokens, n, n)
    return inputs, grads


def run(
    module: HyperConnectionsBoundary,
    inputs: dict[str, Tensor],
    grads: dict[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Outputs, gradients of the sources, and of the parameters, by name; in ``dtype`` if one is given."""
    leaves = {
        name: (t if dtype is None else t.to(dtype)).detach().requires_grad_()
        for name, t in inputs.items()
    }
    module.zero_grad()
    state = tuple(leaves[name] for name in ("streams", "post", "res") if name in leaves)
    new_state, x = module(state, leaves["y"], leaves["norm_weight"])
    outputs = {"x": x} | dict(zip(("streams", "post", "res"), new_state, strict=False))
    used = {name: t for name, t in outputs.items() if name in grads}
    torch.autograd.backward(
        list(used.values()), [grads[name].to(t.dtype) for name, t in used.items()]
    )
    return {
        "output": {name: t.detach() for name, t in outputs.items()},
        "source": {name: t.grad for name, t in leaves.items() if name != "norm_weight"},  # type: ignore[misc]
        "parameter": {"norm_weight": leaves["norm_weight"].grad}  # type: ignore[dict-item]
        | {name: p.grad for name, p in module.named_parameters()},
    }


def relative_rms(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(
    d: int,
    n: int,
    n_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    index: int = 1,
    device: str = "cuda",
    backend: str = "flexible",
    **options: Any,
) -> dict[str, Any]:
    """Errors of a backend and of the reference on the same inputs, against FP64."""
    with poisoned_memory():
        module = boundary(d, n, "reference", index, device, **options)
        inputs, grads = draw(module, n_tokens, dtype, device)

        def result(name: str, precision: torch.dtype | None = None):
            module = boundary(d, n, name, index, device, **options)
            if precision is not None:
                module.to(precision)
            return run(module, inputs, grads, precision)

        truth = result("reference", torch.float64)
        mine, again, reference = result(backend), result(backend), result("reference")
    errors: dict[str, tuple[float, float]] = {}
    wrong = []
    for kind, tensors in truth.items():
        for name, t in tensors.items():
            if t is None:
                continue
            e, r = (relative_rms(other[kind][name], t) for other in (mine, reference))
            errors[f"{kind} {name}"] = (e, r)
            bound = TOLERANCE[dtype][kind]
            if kind == "parameter":
                bound = max(bound, 3 * r)  # a sum that cancels, in the reference too
            elif dtype != torch.float32:
                bound = min(bound, 1.5 * r + 1e-5)
            if not e <= bound:
                wrong.append(f"{kind} {name} {e:.2e} (reference {r:.2e})")
            if not torch.equal(mine[kind][name], again[kind][name]):
                wrong.append(f"{kind} {name} differs on repeat")
    if "res" in mine["output"]:
        off = (mine["output"]["res"].double().sum(dim=-1) - 1).abs().max().item()
        errors["output res row sum"] = (off, 0.0)
        if not off <= 2e-6:
            wrong.append(f"a row of H_res sums to 1 +- {off:.1e}")
    # The maps alone: from the streams as they were rounded, in FP64.
    streams = mine["output"]["streams"]
    if "post" in mine["output"]:
        from ..reference import mhc_controls

        module = boundary(d, n, "reference", index, device, **options).double()
        with torch.no_grad():
            controls = mhc_controls(
                streams.double(), module.phi, module.alpha, module.bias, EPS,  # type: ignore[arg-type]
                module.config.sinkhorn_iterations,
            )  # fmt: skip
        for name in ("post", "res"):
            if name in mine["output"]:
                exact = getattr(controls, name)
                e = (mine["output"][name] - exact).square().mean().sqrt().item()
                errors[f"output {name} from its streams"] = (e, 0.0)
                if not e <= COEFFICIENTS:
                    wrong.append(f"{name} is off by {e:.1e}")
    return {"errors": errors, "wrong": wrong}


CHECKS: list[tuple[str, dict[str, Any]]] = [
    ("d 1024", {"d": 1024, "n": 4, "n_tokens": 1061}),
    ("d 2048", {"d": 2048, "n": 4, "n_tokens": 531}),
    ("d 512", {"d": 512, "n": 4, "n_tokens": 1061}),
    ("first", {"d": 1024, "n": 4, "n_tokens": 517, "index": 0}),
    ("last", {"d": 1024, "n": 4, "n_tokens": 517, "index": SUBLAYERS}),
    ("identity", {"d": 1024, "n": 4, "n_tokens": 517, "residual_map": "identity"}),
    ("d 1544 n 2", {"d": 1544, "n": 2, "n_tokens": 97}),
    ("fp32", {"d": 264, "n": 4, "n_tokens": 97, "dtype": torch.float32}),
    ("fp16", {"d": 264, "n": 4, "n_tokens": 97, "dtype": torch.float16}),
]
QUICK_CHECKS = ("d 1024", "d 2048", "first", "last", "identity", "fp32")


KINDS = ("forward", "collapse", "rows", "backward", "phi")
"""Fields of a row of the launch table, in the order in which they are tuned."""
LAUNCHERS = {"backward": "main"}
"""Where the launcher of a kind has another name."""


def candidates(d: int, base: Launches) -> dict[str, list[Any]]:
    """By kind of kernel, at most six, the table's first."""
    w = max(1, d // 1024)
    found: tuple[list[Any], ...] = (
        [
            base.forward,
            Forward(64, 64, 8, 3),
            Forward(128, 32, 8, 3),
            Forward(64, 32, 8, 4),
            Forward(64, 64, 16, 3),
            Forward(32, 64, 4, 3),
        ],
        [base.collapse, Collapse(1, w), Collapse(1, 2 * w), Collapse(2, 2 * w)],
        [
            base.rows,
            Rows(2 * w, 6 // w, 3),
            Rows(w, 8 // w, 3),
            Rows(2 * w, 8 // w, 1),
        ],
        [
            base.backward,
            Backward(32, 64, 8, 3),
            Backward(16, 64, 4, 3),
            Backward(16, 64, 8, 3),
            Backward(32, 64, 16, 3),
        ],
        [base.phi, Phi(128, 128, 8, 1, 4), Phi(64, 256, 8, 1, 4), Phi(64, 128, 4, 2, 4)],
    )
    return {k: list(dict.fromkeys(f))[:6] for k, f in zip(KINDS, found, strict=True)}


class Case:
    """The middle boundary's forward and backward launches at one size, called without autograd."""

    def __init__(self, d: int, n: int, n_tokens: int, launches: Launches | None = None):
        """:param launches: Use these, and launch nothing yet."""
        self.d, self.n = d, n
        arch = architecture(torch.cuda.current_device())
        self.key = (arch, torch.bfloat16, d, n)
        module = boundary(d, n, "flexible")
        inputs, grads = draw(module, n_tokens, torch.bfloat16)
        self.options = module.options_code
        phi, alpha, bias = (p.detach() for p in (module.phi, module.alpha, module.bias))  # type: ignore[union-attr]
        sources = (inputs["streams"], inputs["y"], inputs["post"], inputs["res"])
        gain = inputs["norm_weight"]
        self.forward_args = (*sources, phi, alpha, bias, gain, EPS, self.options)
        if launches is None:
            outputs = ops._launch_forward(*self.forward_args)
        else:
            self.use(launches)
            outputs = ops._forward_outputs(BoundaryOptions.decode(self.options), inputs["y"])
        streams_out, _, _, _, saved = outputs
        self.backward_args = (
            *sources, streams_out, phi, alpha, bias, gain, saved, grads["streams"], grads["x"],
            grads["post"], grads["res"], self.options,
        )  # fmt: skip

    def use(self, launches: Launches) -> None:
        if launch_table.TABLE.get(self.key) != launches:
            launch_table.TABLE[self.key] = launches
            ops.forget_plans()

    def base(self) -> Launches:
        return launch_table.launches(*self.key)

    def forward(self) -> None:
        ops._launch_forward(*self.forward_args)

    def backward(self) -> None:
        ops._launch_backward(*self.backward_args)

    def only(self, kind: str) -> Callable[[], None]:
        """The forward or the backward with one of its kernels."""
        plan = ops._plan(self.options, self.d, torch.cuda.current_device(), torch.bfloat16)
        forward = kind in ("split_phi", "forward", "collapse")
        names = (
            ("split_phi", "forward", "collapse") if forward else ("rows", "main", "phi", "finish")
        )
        kernel = LAUNCHERS.get(kind, kind)

        def call() -> None:
            kept = {name: getattr(plan, name) for name in names if name != kernel}
            for name in kept:
                setattr(plan, name, lambda *a: None)
            try:
                self.forward() if forward else self.backward()
            finally:
                for name, launcher in kept.items():
                    setattr(plan, name, launcher)

        return call


def resources(kernel: Any) -> str:
    """Registers and spills of the kernel that was compiled last, where this version of Triton tells."""
    try:
        compiled = list(kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
        return f"{compiled.n_regs}/{compiled.n_spills}"
    except (AttributeError, KeyError, IndexError, TypeError):
        return "?"


def _compile_one(job: tuple[int, int, str, Launches]) -> tuple[Any, str, str]:
    """Fill Triton's cache on disk for one launch; in a process of its own, since compiling takes seconds."""
    d, n, kind, launches = job
    try:
        # Small, since it runs once.
        case = Case(d, n, 2048, launches)
        case.only(kind)()
        torch.cuda.synchronize()
        kernel = {
            "forward": kernels.boundary_forward_kernel,
            "collapse": kernels.collapse_kernel,
            "rows": kernels.rows_backward_kernel,
            "backward": kernels.streams_backward_kernel,
            "phi": kernels.phi_backward_kernel,
        }[kind]
        return job, resources(kernel), ""
    except Exception as e:  # a candidate that does not compile or launch is reported and left out
        return job, "?", f"{type(e).__name__}: {e}".splitlines()[0][:200]


def _check_one(name: str) -> tuple[str, dict[str, Any]]:
    """In a process of its own, as :func:`_compile_one`: each kind of boundary is compiled anew."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return name, check(**dict(CHECKS)[name])
    except Exception as e:  # report it, and go on with the others
        return name, {"errors": {}, "wrong": [f"{type(e).__name__}: {e}".splitlines()[0][:300]]}


def graph_us(call: Callable[[], None]) -> float:
    """Microseconds of one call by CUDA graph replay: the host's time does not count."""
    call()
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 5
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return sorted(times[2:])[len(times[2:]) // 2]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of an elementwise kernel over buffers far larger than L2."""
    buffers = [torch.randn(1 << 28, device="cuda").to(torch.bfloat16) for _ in range(4)]

    def call() -> None:
        for i in range(4):
            torch.neg(buffers[i], out=buffers[(i + 1) % 4])

    return 4 * 2 * buffers[0].numel() * 2 / (graph_us(call) * 1e-6)


def host_us(d: int, n: int, backend: str = "flexible") -> tuple[float, float]:
    """Microseconds of the host for one eager forward and backward of the module, at 64 tokens."""
    module = boundary(d, n, backend)
    inputs, grads = draw(module, 64, torch.bfloat16)
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    wanted = [*leaves.values(), *module.parameters()]
    state = (leaves["streams"], leaves["post"], leaves["res"])
    given = [grads[name] for name in ("streams", "post", "res", "x")]
    forward = backward = 0.0
    repeats = 100
    for i in range(repeats + 10):
        torch.cuda.synchronize()
        a = time.perf_counter()
        new_state, x = module(state, leaves["y"], leaves["norm_weight"])
        b = time.perf_counter()
        torch.cuda.synchronize()
        c = time.perf_counter()
        torch.autograd.grad((*new_state, x), wanted, given)
        e = time.perf_counter()
        if i >= 10:
            forward += b - a
            backward += e - c
    return forward / repeats * 1e6, backward / repeats * 1e6


def compiled_reference(d: int, n: int, n_tokens: int) -> tuple[float, float]:
    """Microseconds forward and backward of the reference under ``torch.compile``, between events."""
    module = boundary(d, n, "reference")
    call = torch.compile(module.reference, fullgraph=True, dynamic=False)
    inputs, grads = draw(module, n_tokens, torch.bfloat16)
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    wanted = [*leaves.values(), *module.parameters()]
    given = [grads[name] for name in ("streams", "post", "res", "x")]

    def forward() -> tuple[Tensor, ...]:
        state = (leaves["streams"], leaves["post"], leaves["res"])
        new_state, x, _, _ = call(state, leaves["y"], leaves["norm_weight"])
        return (*new_state, x)

    outputs = forward()
    times = []
    for step in (forward, lambda: torch.autograd.grad(outputs, wanted, given, retain_graph=True)):
        spans = []
        for _ in range(13):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            spans.append(start.elapsed_time(end) * 1e3)
        times.append(sorted(spans[3:])[5])
    return times[0], times[1]


def _time_compiled_reference(d: int, n: int, seconds: float) -> tuple[float, float] | str:
    """In a process of its own: compiling 40 normalisations may take longer than a lease has."""
    command = [sys.executable, "-m", __spec__.name, "--reference", f"{d}x{n}"]  # type: ignore[union-attr]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not compiled within {seconds:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1][:200]
    forward, backward = done.stdout.split()[-2:]
    return float(forward), float(backward)


def _describe(launch: Any) -> str:
    parts = [f"t{launch.tokens}"] if hasattr(launch, "tokens") else []
    parts += [f"d{launch.width}"] if hasattr(launch, "width") else []
    parts += [f"r{launch.rows}"] if hasattr(launch, "rows") else []
    parts += [f"w{launch.warps}"]
    parts += [f"p{launch.programs_per_sm}"] if hasattr(launch, "programs_per_sm") else []
    parts += [f"s{launch.stages}"] if hasattr(launch, "stages") else []
    parts += [f"reg{launch.registers}"] if getattr(launch, "registers", None) else []
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--quick", action="store_true", help="fewer checks and shapes")
    parser.add_argument("--shapes", help="widths and streams, such as 1024x4,2048x4")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument(
        "--compile-seconds",
        type=float,
        help="0 (quick: the default): without the compiled reference",
    )
    parser.add_argument(
        "--seconds", type=float, help="time no more candidates after this; quick: 80"
    )
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    if args.seconds is None:
        args.seconds = 80.0 if args.quick else 900.0
    if args.compile_seconds is None:
        args.compile_seconds = 0.0 if args.quick else 60.0
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.reference:
        d, n = map(int, args.reference.split("x"))
        print(*compiled_reference(d, n, args.tokens))
        return
    shapes = QUICK_SHAPES if args.quick else SHAPES
    if args.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]  # type: ignore[misc]
    begin = time.time()
    report: dict[str, Any] = {
        **machine(),
        "tokens": args.tokens,
        "checks": {},
        "cases": [],
        "table": [],
    }

    def say(line: str) -> None:
        print(f"[{time.time() - begin:4.0f} s] {line}", flush=True)

    def write() -> None:
        write_json(args.out, report)

    arch = architecture(torch.cuda.current_device())
    bases = {(d, n): launch_table.launches(arch, torch.bfloat16, d, n) for d, n in shapes}
    offered = {(d, n): candidates(d, base) for (d, n), base in bases.items()}
    jobs = [
        (d, n, kind, replace(bases[d, n], **{kind: launch}))
        for kind in KINDS
        for d, n in shapes
        for launch in offered[d, n][kind]
    ]
    pool = multiprocessing.get_context("spawn").Pool(args.jobs)
    names = [name for name, _ in CHECKS if not args.quick or name in QUICK_CHECKS]
    checking = pool.imap_unordered(_check_one, names)
    pending = pool.imap_unordered(_compile_one, jobs)

    failed = False
    for _ in names:
        try:
            name, result = checking.next(timeout=max(1.0, args.seconds - (time.time() - begin)))
        except multiprocessing.TimeoutError:
            failed = True
            say("WRONG: not all checks came to an end")
            break
        report["checks"][name] = result
        failed |= bool(result["wrong"])
        worst = {
            kind: max(
                (e for key, (e, _) in result["errors"].items() if key.startswith(kind)), default=0
            )
            for kind in ("output", "source", "parameter")
        }
        verdict = "WRONG: " + "; ".join(result["wrong"]) if result["wrong"] else "ok"
        say(f"check {name}: " + " ".join(f"{k} {e:.1e}" for k, e in worst.items()) + f"  {verdict}")
        write()

    compiled: dict[Any, tuple[str, str]] = {}
    for _ in jobs:
        try:
            job, used, error = pending.next(timeout=max(1.0, args.seconds - (time.time() - begin)))
        except multiprocessing.TimeoutError:
            break
        compiled[job] = (used, error)
    pool.terminate()
    say(f"{report['device']}: compiled {len(compiled)} of {len(jobs)} launches")
    for job, (_, error) in compiled.items():
        if error:
            say(f"left out {job[:3]} {_describe(getattr(job[3], job[2]))}: {error}")

    bandwidth = report["bytes_per_s"] = copy_bandwidth()
    torch.cuda.empty_cache()
    say(f"elementwise kernel: {bandwidth / 1e12:.2f} TB/s")
    print(
        "    d n kernel    launch                            regs/spill      us  x floor",
        flush=True,
    )
    for d, n in shapes:
        case = Case(d, n, args.tokens)
        unit_us = 2 * d * args.tokens / bandwidth * 1e6
        best, times = bases[d, n], []
        for kind in KINDS:
            forwards = kind in ("forward", "collapse")
            floor = (2 * n + 2) if forwards else (5 * n + 3)
            fastest: float | None = None
            for launch in offered[d, n][kind]:
                job = (d, n, kind, replace(bases[d, n], **{kind: launch}))
                used, error = compiled.get(job, ("?", "not compiled in time"))
                if error or (fastest is not None and time.time() - begin > args.seconds):
                    continue
                try:
                    case.use(replace(best, **{kind: launch}))
                    us = graph_us(case.forward if forwards else case.backward)
                except Exception as e:  # report it, and go on with the others
                    say(f"failed {kind} {_describe(launch)}: {e}"[:300])
                    continue
                row = {"kernel": kind, "launch": asdict(launch), "us": us, "registers": used}
                times.append(row | {"x_floor": us / (floor * unit_us)})
                print(
                    f"{d:5d} {n} {kind:9s} {_describe(launch):34s}{used:>9s} {us:7.1f} {us / (floor * unit_us):7.2f}",
                    flush=True,
                )
                if fastest is None or us < fastest:
                    fastest, best = us, replace(best, **{kind: launch})
            case.use(best)
            report["unfinished"] = {"d": d, "n": n, "times": times, "launches": repr(best)}
            write()
        del report["unfinished"]
        forward, backward = graph_us(case.forward), graph_us(case.backward)
        parts = {kernel: graph_us(case.only(kernel)) for kernel in ("split_phi", *KINDS, "finish")}
        low, high = (4 * n + 3) * unit_us, (5 * n + 3) * unit_us
        summary = {
            "d": d,
            "n": n,
            "forward_us": forward,
            "forward_x_floor": forward / ((2 * n + 2) * unit_us),
            "backward_us": backward,
            "backward_x_floor": [backward / high, backward / low],
            "parts_us": parts,
            "launches": repr(best),
        }
        print(
            f"{d:5d} {n} best: forward {forward:.1f} us, {summary['forward_x_floor']:.2f} x floor; backward "
            f"{backward:.1f} us, {backward / high:.2f} x {5 * n + 3} units, {backward / low:.2f} x {4 * n + 3}; "
            + ", ".join(f"{k} {us:.1f}" for k, us in parts.items()),
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
        host = host_us(d, n)
        summary["host_us"] = host
        print(
            f"      host, one eager call: forward {host[0]:.0f} us, backward {host[1]:.0f} us",
            flush=True,
        )
        report["cases"].append(summary | {"times": times})
        report["table"].append(
            f"({arch}, torch.bfloat16, {d}, {n}): {best!r},  # {forward:.0f} us, "
            f"{summary['forward_x_floor']:.2f} x floor; {backward:.0f} us, {backward / high:.2f}"
        )
        write()
    for line in report["table"]:
        print(f"    {line}", flush=True)
    if args.compile_seconds > 0:
        for d, n in shapes[:1] if args.quick else shapes:
            found = _time_compiled_reference(d, n, args.compile_seconds)
            report.setdefault("compiled_reference_us", {})[f"{d}x{n}"] = found
            if isinstance(found, str):
                say(f"reference + torch.compile, d={d}: {found}")
            else:
                say(
                    f"reference + torch.compile, d={d}: forward {found[0]:.0f} us, backward {found[1]:.0f} us"
                )
            write()
    write()
    if failed:
        sys.exit("an output or gradient is beyond its tolerance: see WRONG above")


if __name__ == "__main__":
    main()

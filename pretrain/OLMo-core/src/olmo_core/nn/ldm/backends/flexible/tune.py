"""
Check and time the ``flexible`` kernels on this GPU over candidate launches, for ``launch_table.py``::

    python -m olmo_core.nn.ldm.backends.flexible.tune [--quick] [--shapes 1024x8,2048x8] [--compile] [--out tune.json]

For each width and number of slots: forward and every gradient against the FP64 reference (exit 1 beyond the
tolerance), then the time of the forward and the backward launches by CUDA graph replay at 16384 tokens (of the best
at 65536 too), achieved GB/s, the ratio to the byte floor (2K + 2 and 3K + 3 vectors of D BF16 elements for each token
at the bandwidth of the fastest large copy), with ``--compile`` the same for the reference under ``torch.compile``, and
the host's time for one eager call. The JSON is written anew after every shape; its ``table`` holds the best launches.
"""

import argparse
import multiprocessing
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from olmo_core.nn.depth.triton_ops import next_power_of_2
from olmo_core.nn.depth.tune_report import machine, write_json
from olmo_core.nn.ldm.config import LDMConfig

from ...module import LDMBoundary
from . import kernels, launch_table, ops
from .launch_table import Launch

Tensor = torch.Tensor

SHAPES = [(d, d_k) for d_k in (8, 4, 16) for d in (1024, 2048, 512)]
QUICK_SHAPES = [(1024, 8), (2048, 8), (1024, 4)]
TOKENS = (16384, 65536)
TOLERANCE = {"output": 2.5e-3, "source": 3e-3, "parameter": 5e-3}
"""Relative RMS error in BF16 by kind of tensor."""
EPS = 1e-5


def boundary(d: int, d_k: int, backend: str, device: str = "cuda", **options: Any) -> LDMBoundary:
    """
    Boundary 1 of a model, with parameters away from their start so that every gradient counts; without ``window``, its memory is
    stored.
    """
    config = LDMConfig(backend=backend, d_k=d_k, **{"window": 1, **options})  # type: ignore[arg-type]
    module = config.build(d_model=d, index=1, n_sublayers=48, eps=EPS).to(device)
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for name, p in module.named_parameters():
            scale = 0.5 / d**0.5 if name.startswith("w_") else 0.3
            p.add_(torch.randn(p.shape, generator=generator, device=device) * scale)
    return module


def draw(d: int, d_k: int, n_tokens: int, dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    """``memory``, ``y``, ``norm_weight`` and the gradients of the new memory and of ``x``."""
    generator = torch.Generator(device=device).manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    y = normal(1, n_tokens, d)
    # Slots hold much the same, as in a model.
    memory = (normal(1, n_tokens, 1, d) + 0.3 * normal(1, n_tokens, d_k, d)).to(dtype)
    gain = 1 + 0.1 * torch.randn(d, generator=generator, device=device)
    return [memory, y, gain, normal(1, n_tokens, d_k, d), normal(1, n_tokens, d)]


def run(module: LDMBoundary, inputs: list[Tensor], dtype: torch.dtype | None = None):
    """Outputs, gradients of the sources, and of the parameters, by name; in ``dtype`` if one is given."""
    memory, y, gain, d_memory, d_x = (t if dtype is None else t.to(dtype) for t in inputs)
    memory, y, gain = (t.detach().requires_grad_() for t in (memory, y, gain))
    module.zero_grad()
    (new_memory,), x = module((memory,), y, gain)
    torch.autograd.backward((new_memory, x), (d_memory, d_x))
    return {
        "output": {"memory": new_memory.detach(), "x": x.detach()},
        "source": {"memory": memory.grad, "y": y.grad},
        "parameter": {
            "norm_weight": gain.grad,
            **{name: p.grad for name, p in module.named_parameters()},
        },
    }


def relative_rms(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


def check(d: int, d_k: int, n_tokens: int, device: str = "cuda") -> dict[str, Any]:
    """Errors of the flexible backend and of the reference on the same BF16 inputs, against FP64."""
    inputs = draw(d, d_k, n_tokens, torch.bfloat16, device)
    truth = run(boundary(d, d_k, "reference", device).double(), inputs, torch.float64)
    mine = run(boundary(d, d_k, "flexible", device), inputs)
    again = run(boundary(d, d_k, "flexible", device), inputs)
    reference = run(boundary(d, d_k, "reference", device), inputs)
    errors = {
        f"{kind} {name}": (
            relative_rms(mine[kind][name], t),
            relative_rms(reference[kind][name], t),
        )
        for kind, tensors in truth.items()
        for name, t in tensors.items()
    }
    wrong = [
        f"{name} {e:.2e} (reference {r:.2e})"
        for name, (e, r) in errors.items()
        if not e < TOLERANCE[name.split()[0]]
    ]
    wrong += [
        f"{kind} {name} differs on repeat"
        for kind, tensors in mine.items()
        for name, t in tensors.items()
        if not torch.equal(t, again[kind][name])
    ]
    return {"errors": errors, "wrong": wrong}


def forward_candidates(d: int, d_k: int, quick: bool) -> list[Launch]:
    """
    Six at most. By values of the memory in a thread and a cap on its registers: 128 values without one leave room for 8
    warps on a multiprocessor, which is too few to keep loads in flight while others reduce.
    """
    row = next_power_of_2(d) * d_k
    out = [launch_table.forward_launch(d, d_k)]
    for tokens, values, registers in [
        (1, 128, 168),
        (1, 64, None),
        (1, 64, 96),
        (1, 256, None),
        (2, 128, None),
        (1, 128, None),
        (2, 64, 128),
    ]:
        warps = row * tokens // (32 * values)
        if 1 <= warps <= 16 and (registers or 64) * warps * 32 <= 65536:
            out.append(Launch(tokens, warps, registers=registers))
    return list(dict.fromkeys(out))[: 4 if quick else 6]


def backward_candidates(d: int, d_k: int, quick: bool) -> list[Launch]:
    """
    Seven at most. The memory and its gradient are live together, so registers decide how many programs a
    multiprocessor holds; ``programs`` is in warps for each multiprocessor.
    """
    row = next_power_of_2(d) * d_k
    out = [launch_table.backward_launch(d, d_k)]
    for tokens, values, programs, registers, reload in [
        (1, 64, 8, None, True),
        (1, 32, 16, 128, True),
        (1, 64, 12, 168, True),
        (1, 64, 8, None, False),
        (1, 32, 12, 168, True),
        (1, 128, 8, None, True),
        (1, 32, 20, 96, True),
        (1, 32, 16, 128, False),
    ]:
        warps = row * tokens // (32 * values)
        if 1 <= warps <= 16 and (registers or 64) * warps * 32 <= 65536:
            out.append(
                Launch(
                    tokens,
                    warps,
                    programs_per_sm=max(1, programs // warps),
                    registers=registers,
                    reload=reload,
                )
            )
    return list(dict.fromkeys(out))[: 5 if quick else 7]


class Case:
    """The forward and the backward op at one size, called without autograd."""

    def __init__(self, d: int, d_k: int, n_tokens: int):
        self.key = (next_power_of_2(d), d_k)
        module = boundary(d, d_k, "flexible")
        self.module = module
        memory, y, gain, d_memory, d_x = self.inputs = draw(d, d_k, n_tokens, torch.bfloat16)
        p = module.ldm_parameters
        with torch.no_grad():
            self.forward_args = (memory, y, None, None, None, *p, gain, EPS, module.options_code)
            packed = ops._launch_forward(*self.forward_args)[-1]
        self.backward_args = (
            memory, y, None, None, packed, d_memory, d_x, None, module.options_code,
        )  # fmt: skip

    def _use(self, table: dict[tuple[int, int], Launch], launch: Launch) -> None:
        if table.get(self.key) != launch:
            table[self.key] = launch
            ops.forget_plans()

    @torch.no_grad()
    def forward(self, launch: Launch) -> None:
        self._use(launch_table.FORWARD, launch)
        ops._launch_forward(*self.forward_args)

    @torch.no_grad()
    def backward(self, launch: Launch) -> None:
        self._use(launch_table.BACKWARD, launch)
        ops._launch_backward(*self.backward_args)


def resources(kernel) -> str:
    """Registers and spills of the kernel that was compiled last, where this version of Triton tells."""
    try:
        compiled = list(kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
        return f"{compiled.n_regs}/{compiled.n_spills}"
    except (AttributeError, KeyError, IndexError, TypeError):
        return "?"


def compile_one(job: tuple[int, int, str, Launch]) -> tuple[tuple, str, str]:
    """Fill Triton's cache on disk for one launch; in a process of its own, since compiling takes seconds."""
    d, d_k, direction, launch = job
    try:
        case = Case(d, d_k, 4096)
        getattr(case, direction)(launch)
        torch.cuda.synchronize()
        kernel = getattr(kernels, f"boundary_{direction}_kernel")
        return job, resources(kernel), ""
    except Exception as e:  # a candidate that does not compile or launch is reported and left out
        return job, "?", f"{type(e).__name__}: {e}".splitlines()[0][:200]


def graph_us(call) -> float:
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


def events_us(call) -> float:
    """Median microseconds of one call between events."""
    times = []
    for _ in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[3:])[len(times[3:]) // 2]


def copy_bandwidth() -> dict[str, float]:
    """
    Bytes per second, read and written, of copies of 512 MiB (ten times the L2 cache) between four buffers in turn:
    by an elementwise kernel in a graph and by ``Tensor.copy_`` outside of one. Inside a graph ``copy_`` becomes a copy
    node, for which 2.77 TB/s were measured where kernels reach 4.2.
    """
    buffers = [torch.randn(1 << 28, device="cuda").to(torch.bfloat16) for _ in range(4)]

    def kernel() -> None:
        for i in range(4):
            torch.neg(buffers[i], out=buffers[(i + 1) % 4])

    def copy() -> None:
        for i in range(4):
            buffers[(i + 1) % 4].copy_(buffers[i])

    n_bytes = 4 * 2 * buffers[0].numel() * 2
    return {
        "elementwise kernel": n_bytes / (graph_us(kernel) * 1e-6),
        "copy_": n_bytes / (events_us(copy) * 1e-6),
    }


def compiled_reference(d: int, d_k: int, n_tokens: int) -> tuple[float, float]:
    """Microseconds forward and backward of the reference under ``torch.compile``."""
    torch.compiler.reset()
    module = boundary(d, d_k, "reference")
    call = torch.compile(module.reference, fullgraph=True, dynamic=False)
    memory, y, gain, d_memory, d_x = draw(d, d_k, n_tokens, torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (memory, y, gain)]
    parameters = [*leaves, *module.parameters()]

    def forward() -> tuple[Tensor, Tensor]:
        (new_memory,), x, _, _ = call((leaves[0],), leaves[1], leaves[2])
        return new_memory, x

    outputs = forward()

    def backward() -> None:
        torch.autograd.grad(outputs, parameters, (d_memory, d_x), retain_graph=True)

    backward()
    return events_us(forward), events_us(backward)


def host_us(d: int, d_k: int) -> tuple[float, float]:
    """Microseconds of the host for one eager forward and backward of the module, at 64 tokens."""
    module = boundary(d, d_k, "flexible")
    memory, y, gain, d_memory, d_x = draw(d, d_k, 64, torch.bfloat16)
    leaves = [t.detach().requires_grad_() for t in (memory, y, gain)]
    inputs = [*leaves, *module.parameters()]
    forward = backward = 0.0
    n = 100
    for i in range(n + 10):
        torch.cuda.synchronize()
        a = time.perf_counter()
        (new_memory,), x = module((leaves[0],), leaves[1], leaves[2])
        b = time.perf_counter()
        torch.cuda.synchronize()
        c = time.perf_counter()
        torch.autograd.grad((new_memory, x), inputs, (d_memory, d_x))
        e = time.perf_counter()
        if i >= 10:
            forward += b - a
            backward += e - c
    return forward / n * 1e6, backward / n * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--quick", action="store_true", help="three shapes, 16384 tokens, fewer launches"
    )
    parser.add_argument("--shapes", help="widths and slots, such as 1024x8,2048x8")
    parser.add_argument("--tokens", help="numbers of tokens, such as 16384,65536")
    parser.add_argument(
        "--compile", action="store_true", help="time the reference under torch.compile too"
    )
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", help="write the JSON here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = QUICK_SHAPES if args.quick else SHAPES
    if args.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")]  # type: ignore[misc]
    tokens = (
        tuple(map(int, args.tokens.split(",")))
        if args.tokens
        else (TOKENS[:1] if args.quick else TOKENS)
    )
    report: dict[str, Any] = {
        **machine(),
        "cases": [],
        "table": [],
    }

    def write() -> None:
        write_json(args.out, report)

    jobs = [
        (d, d_k, direction, launch)
        for d, d_k in shapes
        for direction, candidates in (
            ("forward", forward_candidates(d, d_k, args.quick)),
            ("backward", backward_candidates(d, d_k, args.quick)),
        )
        for launch in candidates
    ]
    start = time.time()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        compiled = {
            job: (used, error) for job, used, error in pool.imap_unordered(compile_one, jobs)
        }
    print(
        f"{report['device']}: compiled {len(jobs)} launches in {time.time() - start:.0f} s",
        flush=True,
    )
    for job, (_, error) in compiled.items():
        if error:
            print(f"left out {job}: {error}", flush=True)

    failed = False
    for d, d_k in shapes:
        result = check(d, d_k, 1061)
        worst = {
            kind: max(e for name, (e, _) in result["errors"].items() if name.startswith(kind))
            for kind in TOLERANCE
        }
        failed |= bool(result["wrong"])
        print(
            f"check d={d} K={d_k}: "
            + " ".join(f"{kind} {e:.1e}" for kind, e in worst.items())
            + ("  WRONG: " + "; ".join(result["wrong"]) if result["wrong"] else "  ok"),
            flush=True,
        )
        report["cases"].append({"d": d, "K": d_k, **result, "times": []})

    report["copy_bytes_per_s"] = copies = copy_bandwidth()
    bandwidth = max(copies.values())
    print("copy: " + ", ".join(f"{name} {b / 1e12:.2f} TB/s" for name, b in copies.items()))
    print("    d  K      M direction launch                      regs/spill      us   GB/s x floor")
    for case_report in report["cases"]:
        d, d_k = case_report["d"], case_report["K"]
        for n_tokens in tokens:
            case = Case(d, d_k, n_tokens)
            for direction, vectors, candidates in (
                ("forward", 2 * d_k + 2, forward_candidates(d, d_k, args.quick)),
                ("backward", 3 * d_k + 3, backward_candidates(d, d_k, args.quick)),
            ):
                n_bytes = vectors * d * 2 * n_tokens
                best = None
                table = launch_table.FORWARD if direction == "forward" else launch_table.BACKWARD
                if n_tokens != tokens[0]:
                    # The best at the first number of tokens.
                    candidates = [table[case.key]]
                for launch in candidates:
                    used, error = compiled[(d, d_k, direction, launch)]
                    if error:
                        continue
                    call = getattr(case, direction)
                    us = graph_us(lambda call=call, launch=launch: call(launch))
                    ratio = us * 1e-6 * bandwidth / n_bytes
                    row = {
                        "M": n_tokens,
                        "direction": direction,
                        "launch": asdict(launch),
                        "us": us,
                    }
                    case_report["times"].append(row | {"ratio": ratio, "registers": used})
                    name = (
                        f"BT{launch.tokens} w{launch.warps} s{launch.stages} p{launch.programs_per_sm}"
                        f" r{launch.registers or '-'}{' reload' if launch.reload else ''}"
                    )
                    line = f"{d:5d} {d_k:2d} {n_tokens:6d} {direction:9s} {name:28s}{used:>10s} {us:7.1f} {n_bytes / us / 1e3:6.0f} {ratio:7.2f}"
                    if best is None or us < best[0]:
                        best = (us, launch)
                    print(line, flush=True)
                if best is not None and n_tokens == tokens[0]:
                    table[case.key] = best[1]
                    print(f"      best {direction}: {best[1]}", flush=True)
                    report["table"].append(
                        {
                            "direction": direction,
                            "d": case.key[0],
                            "K": d_k,
                            "launch": repr(best[1]),
                            "us": round(best[0], 1),
                            "GB/s": round(n_bytes / best[0] / 1e3),
                            "ratio": round(best[0] * 1e-6 * bandwidth / n_bytes, 2),
                        }
                    )
            del case
            if args.compile and (n_tokens == tokens[0]):
                for direction, vectors, us in zip(
                    ("forward", "backward"),
                    (2 * d_k + 2, 3 * d_k + 3),
                    compiled_reference(d, d_k, n_tokens),
                    strict=True,
                ):
                    n_bytes = vectors * d * 2 * n_tokens
                    ratio = us * 1e-6 * bandwidth / n_bytes
                    case_report["times"].append(
                        {
                            "M": n_tokens,
                            "direction": direction,
                            "launch": "compile",
                            "us": us,
                            "ratio": ratio,
                        }
                    )
                    print(
                        f"{d:5d} {d_k:2d} {n_tokens:6d} {direction:9s} {'reference + torch.compile':38s} {us:7.1f} "
                        f"{n_bytes / us / 1e3:6.0f} {ratio:7.2f}",
                        flush=True,
                    )
                torch.cuda.empty_cache()
        case_report["host_us"] = host_us(d, d_k)
        print(
            f"      host, one eager call: forward {case_report['host_us'][0]:.0f} us, "
            f"backward {case_report['host_us'][1]:.0f} us",
            flush=True,
        )
        write()
    for row in report["table"]:
        print(
            f"    ({row['d']}, {row['K']}): {row['launch']},  # {row['direction']}: {row['us']} us, "
            f"{row['GB/s']} GB/s, {row['ratio']} x floor"
        )
    write()
    if failed:
        sys.exit("a gradient or output is beyond its tolerance: see WRONG above")


if __name__ == "__main__":
    main()

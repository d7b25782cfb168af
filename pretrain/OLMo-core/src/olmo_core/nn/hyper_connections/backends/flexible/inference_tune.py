"""
Check and time mHC's kernels for few tokens on this GPU::

    python -m olmo_core.nn.hyper_connections.backends.flexible.inference_tune --out OUT.json [--budget 58]

First the outputs against the FP64 reference with poisoned allocations, and a bitwise repeat (exit 1 beyond the tolerance). Then a
chain of boundaries in one CUDA graph, each with a ``phi`` of its own, together several times as large as L2, since a decode step
reads all other weights between two uses of one; and a small kernel in the place of each sublayer, whose time is taken off. The
result of a chain whose kernels start early must be that of the eager one. The training forward at the same sizes says up to how
many tokens these kernels are the better ones. The JSON is written anew after every step.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from olmo_core.nn.depth import triton_inference_ops
from olmo_core.nn.depth.tune_report import machine, write_json

from . import inference_ops, ops
from .inference_ops import Launch
from .tune import COEFFICIENTS, EPS, SUBLAYERS, boundary, draw, poisoned_memory, relative_rms

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

BF16 = torch.bfloat16
TOLERANCE = {BF16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5}
"""Relative RMS error of an output."""
CHAIN_BYTES = 200 << 20
"""Of all ``phi`` of a chain; L2 has 50 MB."""
CHECKS: list[dict[str, Any]] = [
    *({"d": d, "n_tokens": m} for d in (1024, 2048) for m in (1, 8, 64)),
    *({"d": 2048, "n_tokens": m, "index": i} for m in (1, 17) for i in (0, SUBLAYERS)),
    {"d": 2048, "n_tokens": 3, "residual_map": "identity"},
    {"d": 2048, "n_tokens": 33, "residual_map": "identity"},
    {"d": 1024, "n_tokens": 5, "index": SUBLAYERS, "collapse": "sum"},
    {"d": 1544, "n_tokens": 19, "n": 2},
    {"d": 1024, "n_tokens": 1, "dtype": torch.float32},
    {"d": 1024, "n_tokens": 19, "dtype": torch.float32},
    {"d": 1024, "n_tokens": 19, "dtype": torch.float16},
    {"d": 1024, "n_tokens": 300},
]
TOKENS = (1, 4, 8, 64, 256, 1024, 2048)


def check(
    d: int,
    n_tokens: int,
    n: int = 4,
    dtype: torch.dtype = BF16,
    index: int = 1,
    device: str = "cuda",
    **options: Any,
) -> dict[str, Any]:
    """Errors against FP64, and what is beyond its tolerance."""
    wrong = []
    errors: dict[str, float] = {}
    with torch.no_grad(), poisoned_memory():
        module = boundary(d, n, "reference", index, device, **options)
        inputs, _ = draw(module, n_tokens, dtype, device)
        state = tuple(inputs[name] for name in ("streams", "post", "res") if name in inputs)
        y, gain = inputs["y"], inputs["norm_weight"]

        def run_reference(precision: torch.dtype | None = None) -> dict[str, Tensor]:
            module = boundary(d, n, "reference", index, device, **options)
            given = (*state, y, gain)
            if precision is not None:
                module.to(precision)
                given = tuple(t.to(precision) for t in given)
            new_state, x, *_ = module.reference(given[:-2], *given[-2:])
            return dict(zip(("streams", "post", "res"), new_state, strict=False)) | {"x": x}

        def run() -> dict[str, Tensor]:
            # Not by way of the module, which has another path for more tokens than :data:`.inference_ops.MAX_TOKENS`.
            streams, post, res = (*state, None, None, None)[:3]
            streams, x, post, res = inference_ops.boundary(
                streams, y, post, res, module.phi, module.alpha, module.bias, gain, EPS,
                module.options_code,
            )  # fmt: skip
            found = {"streams": streams, "post": post, "res": res, "x": x}
            return {name: t for name, t in found.items() if t is not None}

        truth, reference = run_reference(torch.float64), run_reference()
        mine, again = run(), run()
        assert mine.keys() == truth.keys(), f"outputs {list(mine)}, expected {list(truth)}"
        for name, t in truth.items():
            e, r = relative_rms(mine[name], t), relative_rms(reference[name], t)
            errors[name] = e
            bound = TOLERANCE[dtype]
            if dtype != torch.float32 and name in ("streams", "x"):
                bound = min(bound, 1.5 * r + 1e-5)
            if not e <= bound:
                wrong.append(f"{name} {e:.2e} (reference {r:.2e})")
            if not torch.equal(mine[name], again[name]):
                wrong.append(f"{name} differs on repeat")
        if "post" in mine:
            from ..reference import mhc_controls

            module.double()
            controls = mhc_controls(
                mine["streams"].double(), module.phi, module.alpha, module.bias, EPS,  # type: ignore[arg-type]
                module.config.sinkhorn_iterations,
            )  # fmt: skip
            for name in ("post", "res"):
                if name in mine:
                    e = (mine[name] - getattr(controls, name)).square().mean().sqrt().item()
                    errors[f"{name} from its streams"] = e
                    if not e <= COEFFICIENTS:
                        wrong.append(f"{name} is off by {e:.1e}")
    return {"errors": errors, "wrong": wrong}


class Chain:
    """Middle boundaries, one after the other, with a kernel in the place of each sublayer."""

    def __init__(
        self, d: int, n_tokens: int, n: int = 4, length: int | None = None, device: str = "cuda"
    ):
        module = boundary(d, n, "flexible", device=device)
        inputs, _ = draw(module, n_tokens, BF16, device)
        self.state = (inputs["streams"], inputs["post"], inputs["res"])
        self.y, self.gain = inputs["y"], inputs["norm_weight"]
        self.options = module.options_code
        phi, self.alpha, self.bias = (p.detach() for p in (module.phi, module.alpha, module.bias))  # type: ignore[union-attr]
        length = length or max(8, CHAIN_BYTES // (4 * phi.numel()))
        self.phis = [phi.roll(i, 0) for i in range(length)]

    def run(self, call: Callable[..., Any] | None, sublayer: bool = True) -> tuple[Tensor, ...]:
        """:param call: The boundary, with the arguments of :func:`.ops.boundary`; ``None`` leaves the sublayers."""
        state: tuple[Tensor, ...] = self.state
        x, y = self.y, self.y
        for phi in self.phis:
            if call is not None:
                streams, x, post, res = call(
                    state[0], y, state[1], state[2], phi, self.alpha, self.bias, self.gain, EPS,
                    self.options,
                )[:4]  # fmt: skip
                state = (streams, post, res)
            if sublayer:
                y = torch.neg(x)
        return (*state, x)

    def graph(self, call: Callable[[], tuple[Tensor, ...]]) -> tuple[float, tuple[Tensor, ...]]:
        """Microseconds for one element of a chain by graph replay, and what it returned."""
        with torch.no_grad():
            # Everything is compiled and loaded outside the graph.
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call()
        times = []
        for _ in range(9):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(self.phis))
        kept = tuple(t.clone() for t in result)
        return sorted(times[2:])[3], kept


def launched(launch: Launch) -> Callable[..., Outputs]:
    return partial(inference_ops.boundary, launch=launch)


def candidates(d: int, n_tokens: int) -> list[Launch]:
    """At most six, that of the rule first."""
    own = inference_ops.launch(d, n_tokens, BF16, torch.cuda.current_device())
    if n_tokens <= inference_ops.FEW_TOKENS:
        sizes = [(1, 16, 4), (1, 32, 4), (1, 16, 1), (1, 32, 8), (16, 16, 4)]
    elif n_tokens <= 16:
        sizes = [(16, 16, 4), (16, 16, 2), (1, 16, 4), (1, 32, 4)]
    elif n_tokens <= 64:
        sizes = [(16, 16, 4), (16, 32, 4), (64, 16, 4)]
    else:
        sizes = [(16, 32, 4), (64, 16, 8), (64, 32, 8)]
    others = (replace(own, tokens=t, width=width, mix_warps=m) for t, width, m in sizes)
    return list(dict.fromkeys([own, *others]))


def variants(best: Launch) -> list[Launch]:
    """Of the fastest launch: the other early starts."""
    return [replace(best, early=early) for early in range(3) if early != best.early]


Job = tuple[int, int, Launch]


def _checked(arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """:func:`check` in a process of its own, since compiling takes seconds."""
    name = " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in arguments.items())
    try:
        return name, check(**arguments)
    except Exception as e:  # report it, and go on with the others
        return name, {
            "errors": {},
            "wrong": [f"{type(e).__name__}: {e}".splitlines()[0][:300]],
        }


def _compiled(job: Job) -> tuple[Job, str]:
    """Fill Triton's cache on disk."""
    d, n_tokens, launch = job
    try:
        chain = Chain(d, n_tokens, length=1)
        with torch.no_grad():
            chain.run(launched(launch))
        torch.cuda.synchronize()
        return job, ""
    except Exception as e:  # a candidate that does not compile or launch is reported and left out
        return job, f"{type(e).__name__}: {e}".splitlines()[0][:200]


def describe(launch: Launch) -> str:
    early = f" early{launch.early}" if launch.early else ""
    return (
        f"t{launch.tokens} d{launch.width} w{launch.mix_warps} finish w{launch.finish_warps}{early}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--widths", default="2048,1024")
    parser.add_argument("--budget", type=float, default=58, help="seconds (default: 58)")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("inference_tune needs a CUDA GPU: none is visible to torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.time()
    report: dict[str, Any] = {
        **machine(),
        "checks": {},
        "rows": [],
        "best": [],
    }

    def say(line: str) -> None:
        print(f"[{time.time() - begin:4.0f} s] {line}", flush=True)

    def write() -> None:
        write_json(args.out, report)

    def late() -> bool:
        return time.time() - begin > args.budget

    sizes = [(int(d), m) for m in TOKENS for d in args.widths.split(",")]
    offered = {size: candidates(*size) for size in sizes}
    jobs = [(*size, launch) for size, launches in offered.items() for launch in launches]
    pool = multiprocessing.get_context("spawn").Pool(args.jobs)
    checks = pool.imap_unordered(_checked, CHECKS)
    pending = pool.imap_unordered(_compiled, jobs)

    failed = False
    for name, result in checks:
        report["checks"][name] = result
        failed |= bool(result["wrong"])
        verdict = "WRONG: " + "; ".join(result["wrong"]) if result["wrong"] else "ok"
        errors = " ".join(f"{k} {e:.1e}" for k, e in result["errors"].items())
        say(f"check {name}: {errors}  {verdict}")
        write()

    broken: dict[Job, str] = {}

    def compiled(results: Any) -> None:
        for job, error in results:
            if error:
                broken[job] = error
                say(f"left out d={job[0]} M={job[1]} {describe(job[2])}: {error}")

    compiled(pending)
    say(f"{report['device']}: compiled {len(jobs)} launches")
    print("    d    M  launch                           us a boundary", flush=True)
    best: dict[tuple[int, int], tuple[float, Launch]] = {}
    sublayers: dict[tuple[int, int], float] = {}

    def measure(d: int, m: int, launches: list[Launch], others: bool) -> None:
        nonlocal failed
        chain = Chain(d, m, length=None if m <= 64 else 64)
        size = (d, m)
        if size not in sublayers:
            sublayers[size], _ = chain.graph(partial(chain.run, None))

        def record(name: str, us: float, **values: Any) -> None:
            report["rows"].append({"d": d, "tokens": m, "name": name, "us": us, **values})
            print(f"{d:5d} {m:4d}  {name:32s} {us:7.2f}", flush=True)

        for launch in launches:
            if late() or (d, m, launch) in broken:
                continue
            try:
                us, result = chain.graph(partial(chain.run, launched(launch)))
                us -= sublayers[size]
                record(describe(launch), us, launch=asdict(launch))
                if launch.early:
                    with torch.no_grad():
                        expected = chain.run(launched(replace(launch, early=0)))
                    if not all(map(torch.equal, result, expected)):
                        failed = True
                        say(
                            f"WRONG: d={d} M={m} {describe(launch)}: not what the eager chain gives"
                        )
                        continue
                if size not in best or us < best[size][0]:
                    best[size] = (us, launch)
            except Exception as e:  # report it, and go on with the others
                say(f"failed {describe(launch)}: {type(e).__name__}: {e}"[:300])
        if others and not late():
            us, _ = chain.graph(partial(chain.run, ops._launch_forward))
            record("training forward", us - sublayers[size])
            if m <= 64:
                plain = chain.graph(partial(_preln, chain))[0] - sublayers[size]
                record("PreLN's boundary", plain)
                own = launched(replace(launches[0], early=0))
                for kernel in ("mix", "finish"):
                    alone = _only(own, kernel)
                    us = chain.graph(partial(chain.run, alone, sublayer=False))[0]
                    record(f"{kernel} alone, back to back", us)
        write()

    for size in sizes:
        if not late():
            measure(*size, offered[size], True)
    again = [(*size, launch) for size, (_, b) in best.items() for launch in variants(b)]
    compiled(pool.imap_unordered(_compiled, again))
    pool.close()
    say(f"compiled {len(again)} more")
    for size in list(best):
        if not late():
            measure(*size, variants(best[size][1]), False)
    for (d, m), (us, launch) in best.items():
        report["best"].append({"d": d, "tokens": m, "us": us, "launch": asdict(launch)})
        print(f"best d={d} M={m}: {describe(launch)}, {us:.2f} us", flush=True)
    write()
    if late():
        say("out of time: the rest was left out")
    if failed:
        sys.exit("an output is beyond its tolerance: see WRONG above")


def _preln(chain: Chain) -> tuple[Tensor, ...]:
    h, y = chain.y, chain.y
    for _ in chain.phis:
        h, x = triton_inference_ops.add_rms_norm(h, y, chain.gain, EPS)
        y = torch.neg(x)
    return h, y


def _only(call: Callable[..., Outputs], kernel: str) -> Callable[..., Outputs]:
    """One of the two kernels; what the other would write holds whatever memory held."""

    def run(*arguments: Any) -> Outputs:
        other = "finish" if kernel == "mix" else "mix"
        plan_of = inference_ops._plan

        def planned(*key: Any) -> Any:
            plan = plan_of(*key)
            changed = object.__new__(type(plan))
            changed.__dict__.update(plan.__dict__)
            setattr(changed, other, lambda *a: None)
            return changed

        inference_ops._plan = planned  # type: ignore[assignment]
        try:
            return call(*arguments)
        finally:
            inference_ops._plan = plan_of

    return run


if __name__ == "__main__":
    main()

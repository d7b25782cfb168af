"""
Check and time the ``fast`` kernels on this GPU, beside the flexible ones, for ``launch_table.py``::

    python -m olmo_core.nn.ldm.backends.fast.tune --cache DIR --out FILE.json [--shapes 1024x8,2048x8] [--tokens 16384]

``DIR`` has kernels from ``precompile --candidates``; with the CuTe DSL installed, missing ones are compiled into it. First every
output and gradient against the FP64 reference and bit by bit on a repeat, with all new memory filled with NaN; then the times
of the launches by CUDA graph replay, the ratio to the byte floor (2K + 2 and 3K + 3 vectors of D BF16 elements for each token
at the bandwidth of a copy kernel in this run), and the host's time of an eager call. Each part runs in a process of its own that is
ended when it says nothing for a minute: a kernel that waits for ever does not stop the rest. The JSON is written anew after
every result; its ``table`` holds the best launches. Exit status 1 if something was wrong.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from typing import Any

import torch

from ..flexible import ops as flexible_ops
from ..flexible import tune as common
from . import cache, launch_table, ops, precompile
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
            result = {"errors": {}, "wrong": [f"{type(e).__name__}: {e}".splitlines()[0][:300]]}
        say("check", name=name, **result)
    for name, call in (
        ("streams and graphs", lambda: check_streams(1024, 8)),
        ("addresses beyond 2^31", lambda: check_large(2048, 8, 140_000)),
    ):
        say("start", name=name)
        try:
            wrong = call()
        except Exception as e:
            wrong = [f"{type(e).__name__}: {e}".splitlines()[0][:300]]
        say("check", name=name, errors={}, wrong=wrong)


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
                        reason = f"{type(e).__name__}: {e}".splitlines()[0][:300]
                        say("failed", d=d, K=d_k, M=n_tokens, direction=direction, launch=name, reason=reason)  # fmt: skip
                        continue
                    finally:
                        launch_table.TABLE.pop((architecture, direction, d, d_k), None)
                        ops.forget_plans()
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
        )
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


def stage(name: str, out: str | os.PathLike | None, report: dict[str, Any]) -> None:
    """Run one part in a process of its own, show and record its lines."""
    with subprocess.Popen(worker(name), stdout=subprocess.PIPE, text=True, bufsize=1) as process:
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
            write(out, report)
    if process.returncode:
        report["wrong"].append(f"{name}: exit status {process.returncode} at {doing}")
        print(f"WRONG {report['wrong'][-1]}", flush=True)


def write(path: str | os.PathLike | None, report: dict[str, Any]) -> None:
    if path:
        with open(f"{path}.tmp", "w") as f:
            json.dump(report, f, indent=1)
        os.replace(f"{path}.tmp", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--cache", help="the folder of precompile")
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--shapes", help="widths and slots, such as 1024x8,2048x8")
    parser.add_argument("--tokens", default="16384", help="numbers of tokens, such as 16384,65536")
    parser.add_argument("--only", choices=["check", "time"], help="one part")
    parser.add_argument("--work", choices=["check", "time"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    if args.cache:
        os.environ[cache.PLACES] = os.path.abspath(args.cache)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.work:
        (work_check if args.work == "check" else work_time)(args)
        return
    import triton

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dsl": cache.dsl_version(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "lines": [],
        "wrong": [],
        "table": [],
    }
    for name in ("check", "time"):
        if args.only in (None, name):
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
    write(args.out, report)
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} results are wrong: see WRONG above")


if __name__ == "__main__":
    main()

"""
Check and time the ``fast`` kernel on this GPU, beside the flexible ones::

    python -m olmo_core.nn.hyper_connections.backends.fast.tune --cache DIR --out FILE.json [--widths 1024,2048]

``DIR`` has kernels from ``precompile``; with the CuTe DSL installed, missing ones are compiled into it. First every output and
gradient against the FP64 reference and bit by bit on a repeat, with all new memory filled with NaN; addresses beyond 2^31
elements; another stream and a captured graph. Then times by CUDA graph replay: the flexible forward and its kernels, the fast
forward, the ratio to the byte floor (2N + 2 vectors of D BF16 elements for each token, at the bandwidth of an elementwise
kernel in this run), and the host's time of an eager call. Each part runs in a process of its own that is ended when it says
nothing for a while: a kernel that waits for ever does not stop the rest. The JSON is written anew after every result. Exit
status 1 if something was wrong. A width that is right and faster goes to ``launch_table.TIMED``.
"""

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from olmo_core.nn.depth.tune_report import write_json

from ....ldm.backends.fast import cache
from ....ldm.backends.fast import tune as ldm
from ....ldm.backends.fast.tune import say
from ..flexible import tune as common
from . import ops, precompile

Tensor = torch.Tensor

WIDTHS = [1024, 2048]
TOKENS = (16384, 65536)
N = 4
CHECKED_TOKENS = (37, 1061, 16384)
SILENCE_S = 60


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:300]


class Case(common.Case):
    """The middle boundary's forward at one size, by either backend, called without autograd."""

    def fast(self) -> tuple[Tensor | None, ...]:
        return ops._launch_forward(*self.forward_args)


def outputs(case: Case) -> tuple[Tensor | None, ...]:
    with common.poisoned_memory():
        out = case.fast()
    torch.cuda.synchronize()
    return out


def differences(mine: tuple[Tensor | None, ...], other: tuple[Tensor | None, ...]) -> list[str]:
    """The outputs that are not the same bit by bit."""
    return [
        name
        for name, a, b in zip(("streams", "x", "post", "res", "saved"), mine, other, strict=True)
        if a is not None and b is not None and not torch.equal(a, b)
    ]


def check_streams(d: int) -> list[str]:
    """The same bits on another stream and from a captured graph."""
    case = Case(d, N, 517)
    expected = outputs(case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = case.fast()
    stream.synchronize()
    wrong = [f"{n} differs on another stream" for n in differences(other, expected)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.fast()
    for t in captured:
        if t is not None:
            t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return wrong + [f"{n} differs from a graph" for n in differences(captured, expected)]


def check_large(d: int, n_tokens: int, last: int = 61) -> list[str]:
    """Addresses beyond 2^31 elements: tokens do not mix, so the last ones must come out as if alone."""
    assert n_tokens * d * N > 2**31
    case = Case(d, N, n_tokens)
    full = case.fast()[:4]
    arguments: list[Any] = list(case.forward_args)
    arguments[:4] = [t[:, -last:].contiguous() for t in arguments[:4]]
    alone = ops._launch_forward(*arguments)[:4]
    names = ("streams", "x", "post", "res")
    return [
        f"{name} of the last of {n_tokens} tokens"
        for name, a, b in zip(names, full, alone, strict=True)
        if a is not None and b is not None and not torch.equal(a[:, -last:], b)
    ]


def work_check(d: int, args: argparse.Namespace) -> None:
    for n_tokens in CHECKED_TOKENS:
        name = f"{d}, {n_tokens} tokens"
        say("start", name=name)
        try:
            result = common.check(d, N, n_tokens, backend="fast")
        except Exception as e:
            result = {"errors": {}, "wrong": [_first_line(e)]}
        say("check", name=name, **result)
        torch.cuda.empty_cache()
    checks: list[tuple[str, Callable[[], list[str]]]]
    checks = [("another stream, a graph", lambda: check_streams(d))]
    if d == 2048:
        checks += [("large addresses", lambda: check_large(d, 270_000))]
    for name, call in checks:
        say("start", name=name)
        try:
            wrong = call()
        except Exception as e:
            wrong = [_first_line(e)]
        say("check", name=f"{d}, {name}", errors={}, wrong=wrong)
        torch.cuda.empty_cache()


def time_size(d: int, n_tokens: int, bandwidth: float) -> None:
    """All times at one size."""
    values = {"d": d, "M": n_tokens}
    n_bytes = (2 * N + 2) * d * 2 * n_tokens
    say("start", name=f"{d} inputs")
    case = Case(d, N, n_tokens)

    def line(what: str, call: Callable[[], Any]) -> None:
        say("start", name=f"{d} {n_tokens} {what}")
        try:
            us = common.graph_us(call)
        except Exception as e:  # what does not launch is reported and left out
            say("failed", what=what, reason=_first_line(e), **values)
            return
        say(
            "time", what=what, us=round(us, 1), gbs=round(n_bytes / us / 1e3),
            ratio=round(us * 1e-6 * bandwidth / n_bytes, 2), **values,
        )  # fmt: skip

    line("flexible", case.forward)
    for kernel in ("split_phi", "forward", "collapse"):
        line(f"flexible {kernel}", case.only(kernel))
    line("fast", case.fast)
    line("flexible, once more", case.forward)
    line("fast, once more", case.fast)


def work_time(d: int, args: argparse.Namespace) -> None:
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth={"elementwise": bandwidth})
    for n_tokens in TOKENS:
        torch.cuda.empty_cache()
        time_size(d, n_tokens, bandwidth)
    for backend in ("flexible", "fast"):
        try:
            us_of = common.host_us(d, N, backend)
            say("host", d=d, backend=backend, us=[round(u) for u in us_of])
        except Exception as e:
            say("failed", what=f"host {backend}", reason=_first_line(e), d=d, M=64)


def show(line: dict[str, Any]) -> str:
    kind = line["kind"]
    if kind in ("check", "copy"):
        return ldm.show(line)
    start = f"{line.get('d', 0):5d} {line.get('M', 0):6d}"
    if kind == "time":
        return f"{start} {line['what']:20s} {line['us']:8.1f} us {line['gbs']:5d} GB/s {line['ratio']:5.2f} x floor"
    if kind == "host":
        return f"host {line['d']} {line['backend']}: forward {line['us'][0]} us, backward {line['us'][1]} us"
    return f"{start} FAILED {line.get('what')}: {line.get('reason')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--cache", help="the folder of precompile")
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="such as 1024,2048")
    parser.add_argument("--only", choices=("check", "time"), help="one part")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    if args.cache:
        os.environ[cache.PLACES] = os.path.abspath(args.cache)
    torch.backends.cuda.matmul.allow_tf32 = False
    work: dict[str, Callable[[int, argparse.Namespace], None]] = {
        "check": work_check,
        "time": work_time,
    }
    if args.work:
        name, d = args.work.split(":")
        work[name](int(d), args)
        return
    report = ldm.new_report()
    ldm.SILENCE_S = SILENCE_S
    widths = precompile.parse_widths(args.widths)

    def stage(part: str, out: str | None = args.out) -> None:
        command = [sys.executable, "-m", __spec__.name, "--work", part, *sys.argv[1:]]
        ldm.stage(part, out, report, command, show)

    if args.only != "time":
        # At the same time, since most of it is compiling Triton's kernels; two would write one file.
        with ThreadPoolExecutor(len(widths)) as pool:
            list(pool.map(lambda d: stage(f"check:{d}", None), widths))
        write_json(args.out, report)
    if args.only != "check":
        for d in widths:
            stage(f"time:{d}")
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} results are wrong: see WRONG above")


if __name__ == "__main__":
    main()

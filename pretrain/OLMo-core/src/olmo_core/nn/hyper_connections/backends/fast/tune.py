"""
Check and time the ``fast`` kernel on this GPU, beside the flexible ones, for ``launch_table.py``::

    python -m olmo_core.nn.hyper_connections.backends.fast.tune --cache DIR --out FILE.json [--widths 1024,2048]

``DIR`` has kernels from ``precompile --candidates``; with the CuTe DSL installed, missing ones are compiled into it. First every
output and gradient against the FP64 reference and bit by bit on a repeat, with all new memory filled with NaN; every launch
against the first one, bit by bit; addresses beyond 2^31 elements; another stream and a captured graph. Then times by CUDA graph
replay: the flexible forward and its kernels, the fast forward with every launch and its kernels, the ratio to the byte floor
(2N + 2 vectors of D BF16 elements for each token, at the bandwidth of an elementwise kernel in this run), and the host's time of
an eager call. Each part runs in a process of its own that is ended when it says nothing for a while: a kernel that waits for
ever does not stop the rest. The JSON is written anew after every result; its ``table`` holds the best launches. Exit status 1
if something was wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from olmo_core.nn.depth.tune_report import write_json

from ....ldm.backends.fast import cache
from ....ldm.backends.fast import tune as ldm
from ....ldm.backends.fast.tune import say
from ..flexible import tune as common
from . import launch_table, ops, precompile
from .launch_table import Launch

Tensor = torch.Tensor

WIDTHS = [1024, 2048]
TOKENS = (16384, 65536)
N = 4
CHECKED_TOKENS = (37, 1061, 16384)
SILENCE_S = 60
BUDGET_S = 20.0
"""Of one width's times: no further launch after it."""


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:300]


def _architecture() -> str:
    return cache.ARCHITECTURES[torch.cuda.get_device_capability()[0]]


def use(d: int, launch: Launch | None) -> None:
    """Take this launch for a width, or the rule's."""
    launch_table.TABLE.pop((_architecture(), d), None)
    if launch is not None:
        launch_table.TABLE[_architecture(), d] = launch
    ops.forget_plans()


class Case(common.Case):
    """The middle boundary's forward at one size, by either backend, called without autograd."""

    def fast(self) -> tuple[Tensor | None, ...]:
        return ops._launch_forward(*self.forward_args)

    def fast_only(self, kernel: str) -> Callable[[], None]:
        """The fast forward, where the maps have a kernel of their own, with one of its kernels: ``boundary`` or ``maps``."""
        device = torch.cuda.current_device()
        plan = ops._plan(self.options, self.d, device)
        maps = ops.flexible._plan(self.options, self.d, device, torch.bfloat16)

        def call() -> None:
            owner, name = (maps, "collapse") if kernel == "boundary" else (plan, "kernel")
            kept = getattr(owner, name)
            setattr(owner, name, lambda *a: None)
            try:
                self.fast()
            finally:
                setattr(owner, name, kept)

        return call


def outputs(case: Case) -> tuple[Tensor | None, ...]:
    with common.poisoned_memory():
        out = case.fast()
    torch.cuda.synchronize()
    return out


def differences(
    mine: tuple[Tensor | None, ...],
    other: tuple[Tensor | None, ...],
    names: tuple[str, ...] = ("streams", "x", "post", "res", "saved"),
) -> list[str]:
    """The outputs that are not the same bit by bit, of ``names``."""
    known = ("streams", "x", "post", "res", "saved")
    return [
        name
        for name, a, b in zip(known, mine, other, strict=True)
        if name in names and a is not None and b is not None and not torch.equal(a, b)
    ]


def check_launches(d: int) -> None:
    """Every launch against the first, bit by bit where a token is split in the same way."""
    expected: dict[int, tuple[Tensor | None, ...]] = {}
    case = Case(d, N, 1061)
    flexible = common.ops._launch_forward(*case.forward_args)
    for launch in launch_table.candidates(_architecture(), d):
        say("start", name=f"{d} {launch}")
        wrong, errors = [], {}
        try:
            use(d, launch)
            mine = outputs(case)
            # The other backend adds up in another order: now and then a rounding goes to the other side.
            limits = {"streams": 1e-3, "x": 1e-3, "post": 1e-4, "res": 1e-4}
            for (name, limit), a, b in zip(limits.items(), mine, flexible, strict=False):
                if a is not None and b is not None:
                    e = common.relative_rms(a, b)
                    errors[f"output {name}"] = (e, 0.0)
                    if not e < limit:
                        wrong.append(f"{name} is {e:.1e} from that of the flexible backend")
            same = expected.setdefault(launch.cluster, mine)
            # Another kernel makes the maps.
            names = ("streams", "x", "saved", *(("post", "res") if launch.maps else ()))
            wrong += [f"{name} differs" for name in differences(mine, same, names)]
        except Exception as e:  # a launch that fails is reported, and the others are checked
            wrong.append(_first_line(e))
        say("check", name=f"{d} {launch}", errors=errors, wrong=wrong)
    use(d, None)


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
    check_launches(d)
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


def time_size(d: int, n_tokens: int, bandwidth: float, end: float) -> None:
    """All times at one size. After ``end`` no further launch is tried."""
    values = {"d": d, "M": n_tokens}
    n_bytes = (2 * N + 2) * d * 2 * n_tokens
    say("start", name=f"{d} inputs")
    case = Case(d, N, n_tokens)

    def line(what: str, call: Callable[[], Any], launch: str = "") -> float | None:
        say("start", name=f"{d} {n_tokens} {what} {launch}")
        try:
            us = common.graph_us(call)
        except Exception as e:  # what does not launch is reported and left out
            say("failed", what=what, launch=launch, reason=_first_line(e), **values)
            return None
        say(
            "time", what=what, launch=launch, us=round(us, 1), gbs=round(n_bytes / us / 1e3),
            ratio=round(us * 1e-6 * bandwidth / n_bytes, 2), **values,
        )  # fmt: skip
        return us

    line("flexible", case.forward)
    for kernel in ("split_phi", "forward", "collapse"):
        line(f"flexible {kernel}", case.only(kernel))
    best: tuple[float, Launch] | None = None
    for launch in launch_table.candidates(_architecture(), d):
        if best is not None and time.time() > end:
            break
        use(d, launch)
        try:
            clusters = ops._plan(case.options, d, torch.cuda.current_device()).max_clusters
        except Exception as e:
            say("failed", what="fast", launch=repr(launch), reason=_first_line(e), **values)
            continue
        us = line("fast", case.fast, f"{launch} {clusters} clusters")
        if us is not None and (best is None or us < best[0]):
            best = us, launch
        if not launch.maps:
            for kernel in ("boundary", "maps"):
                line(f"fast {kernel}", case.fast_only(kernel), repr(launch))
    if best is not None:
        say("best", us=best[0], launch=repr(best[1]), **values)
        use(d, best[1])
        line("fast, once more", case.fast, repr(best[1]))
        line("flexible, once more", case.forward)


def work_time(d: int, args: argparse.Namespace) -> None:
    end = time.time() + BUDGET_S
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth={"elementwise": bandwidth})
    for n_tokens in TOKENS:
        torch.cuda.empty_cache()
        time_size(d, n_tokens, bandwidth, end)
    for backend in ("flexible", "fast"):
        try:
            us_of = common.host_us(d, N, backend)
            say("host", d=d, backend=backend, us=[round(u) for u in us_of])
        except Exception as e:
            say("failed", what=f"host {backend}", launch="", reason=_first_line(e), d=d, M=64)


def show(line: dict[str, Any]) -> str:
    kind = line["kind"]
    if kind in ("check", "copy"):
        return ldm.show(line)
    start = f"{line.get('d', 0):5d} {line.get('M', 0):6d}"
    if kind == "time":
        return (
            f"{start} {line['what']:20s} {line['us']:8.1f} us {line['gbs']:5d} GB/s {line['ratio']:5.2f} x floor "
            f"{line['launch']}"
        )
    if kind == "best":
        return f"{start} best {line['us']:.1f} us {line['launch']}"
    if kind == "host":
        return f"host {line['d']} {line['backend']}: forward {line['us'][0]} us, backward {line['us'][1]} us"
    return f"{start} FAILED {line.get('what')} {line.get('launch')}: {line.get('reason')}"


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
    report["table"] = [line for line in report["lines"] if line["kind"] == "best"]
    write_json(args.out, report)
    if report["wrong"]:
        sys.exit(f"{len(report['wrong'])} results are wrong: see WRONG above")


if __name__ == "__main__":
    main()

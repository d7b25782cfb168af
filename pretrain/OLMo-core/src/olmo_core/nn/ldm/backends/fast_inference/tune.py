"""
Check and time the inference kernels on this GPU, for ``launch_table.py``::

    python -m olmo_core.nn.ldm.backends.fast_inference.tune --cache DIR --out FILE.json [--shapes 1024x8,2048x8]

``DIR`` has kernels from ``precompile --candidates``; with the CuTe DSL installed, missing ones are compiled into it. First the new
memory and ``x`` against the FP64 reference, bit by bit on a repeat, in place, on another stream and from a graph, with all new
memory filled with NaN. Then microseconds for one boundary by CUDA graph replay of a chain of 57, in which a boundary's ``y`` is
the ``x`` of the one before, for each bucket of tokens: candidates with and without overlap of kernels, the flexible backend,
PreLN. ``among products``: the same with a product by a weight of its own before each boundary, as in a model, which leaves nothing
in the L2 cache, less the time of the products alone; by this the best launch is chosen. Also prefill, in windows (the mean of a window's
boundaries) and with the memory stored each time, beside the training forward, with the ratio to the floor of each, and the host's time of
an eager call. The part ``prefill`` (``--only``) has the checks of windows and the times of prefill alone. Each part runs in a process of its own that is
ended when it says nothing for a minute. The JSON is written anew after every result; its ``table`` holds the best launches.
Exit status 1 if something was wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from olmo_core.nn.depth.preln import PreLNConfig
from olmo_core.nn.depth.tune_report import write_json

from ..fast import cache
from ..fast import ops as fast_ops
from ..fast.precompile import parse_shapes
from ..fast.tune import WINDOW, draw_chain, new_report, say, stage, window_vectors
from ..flexible import tune as common
from . import launch_table, ops, packing
from .launch_table import BUCKETS, Launch

Tensor = torch.Tensor

CHECKS: list[tuple[int, int, int, dict[str, Any]]] = [
    # d, K, tokens, options
    *((2048, 8, n, {}) for n in (1, 3, 64, 255)),
    *((2048, 4, n, {}) for n in (1, 3, 64, 255)),
    *((1024, 8, n, {}) for n in (1, 17, 127, 1061)),
    *((1024, 4, n, {}) for n in (1, 17, 127, 1061)),
    (512, 8, 33, {}),
    (2048, 16, 1, {}),
    (2048, 16, 67, {}),
]
PREFILL_WINDOWS = (WINDOW, 2)
"""A window of 2 needs two vectors of d a token less than one of 4, and moves 14.5 instead of 13.5 at K = 8."""
WINDOW_CHECKS: list[tuple[int, int, int, int]] = [
    # d, K, tokens, window
    *(
        (d, K, n, w)
        for d in (2048, 1024)
        for K in (8, 4)
        for n in (1061, 8195)
        for w in PREFILL_WINDOWS
    ),
]
SHAPES = [(2048, 8), (1024, 8), (2048, 4), (1024, 4), (512, 8)]
N_BOUNDARIES = 57
"""Of the 1.7 billion parameter model: 28 blocks."""
PREFILL_TOKENS = (512, 4096, 16_384)
BESIDE_OTHERS = (1, 8, 64, 256)
"""Numbers of tokens at which the other methods and backends are timed too."""
TOLERANCE = 2.5e-3


def errors_of(
    truth: dict[str, Tensor], mine: dict[str, Tensor], mixed: dict[str, Tensor], wrong: list[str]
) -> dict[str, tuple[float, float]]:
    """Errors against ``truth`` of the kernels and of the BF16 reference, by output; adds to ``wrong``."""
    errors = {}
    for name, t in truth.items():
        e, r = (common.relative_rms(a[name], t) for a in (mine, mixed))
        errors[f"output {name}"] = (e, r)
        if not e < max(TOLERANCE, 1.5 * r):
            wrong.append(f"{name} {e:.2e} (reference {r:.2e})")
    return errors


def check(d: int, d_k: int, n_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Errors of this backend and of the reference on the same BF16 inputs, against FP64; and what is wrong."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    memory, y, gain, _, _ = common.draw(d, d_k, n_tokens, torch.bfloat16)
    # check_window has windows.
    module = common.boundary(d, d_k, "fast_inference", window=1, **options)
    reference = common.boundary(d, d_k, "reference", **options)
    wrong: list[str] = []

    def run(m: torch.nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
        (new_memory,), x = m((inputs[0],), *inputs[1:])
        return {"memory": new_memory, "x": x}

    def same(a: dict[str, Tensor], what: str) -> None:
        wrong.extend(f"{n} differs {what}" for n, t in a.items() if not torch.equal(t, mine[n]))

    with torch.no_grad():
        before = memory.clone()
        mine = run(module, memory, y, gain)
        same(run(module, memory, y, gain), "on a repeat")
        if not torch.equal(memory, before):
            wrong.append("the memory that was given has changed")
        module.owns_state = True
        given = memory.clone()
        same(run(module, given, y, gain), "in place")
        if not torch.equal(given, mine["memory"]):
            wrong.append("the new memory is not in the place of the old one")
        module.owns_state = False
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other = run(module, memory, y, gain)
        stream.synchronize()
        same(other, "on another stream")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(module, memory, y, gain)
        for t in captured.values():
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same(captured, "from a graph")
        mixed = run(reference, memory, y, gain)
        truth = run(reference.double(), memory.double(), y.double(), gain.double())
    torch.use_deterministic_algorithms(False)
    return {"errors": errors_of(truth, mine, mixed, wrong), "wrong": wrong}


def check_window(d: int, d_k: int, n_tokens: int, window: int) -> dict[str, Any]:
    """
    Prefill in a window and up to two boundaries of the next one, which does not end, as :func:`check`: ``x`` of each, the memory that is stored, and that which the
    last state stands for.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    inputs = draw_chain(d, d_k, n_tokens, window + min(2, window - 1))
    (memory,), ys, gains = inputs["memory"], inputs["y"], inputs["gain"]
    module = common.boundary(d, d_k, "fast_inference", window=window)
    reference = common.boundary(d, d_k, "reference")
    wrong: list[str] = []

    def run(
        m: torch.nn.Module, memory: Tensor, ys: list[Tensor], gains: list[Tensor] = gains
    ) -> dict[str, Tensor]:
        state: tuple[Tensor, ...] = (memory,)
        out = {}
        for i, (y, gain) in enumerate(zip(ys, gains, strict=True)):
            state, out[f"x {i}"] = m(state, y, gain)
            if i == window - 1:
                # In place, the next window writes over it.
                out["memory"] = state[0].clone()
        return {**out, "last memory": fast_ops.memory_of(state)}

    def same(a: dict[str, Tensor], what: str) -> None:
        wrong.extend(f"{n} differs {what}" for n, t in a.items() if not torch.equal(t, mine[n]))

    with torch.no_grad():
        before = memory.clone()
        mine = run(module, memory, ys)
        if module.prefill_window != window:
            wrong.append(f"prefill had a window of {module.prefill_window}, not {window}")
        same(run(module, memory, ys), "on a repeat")
        if not torch.equal(memory, before):
            wrong.append("the memory that was given has changed")
        module.owns_state = True
        given = memory.clone()
        same(run(module, given, ys), "in place")
        if not torch.equal(given, mine["memory"]):
            wrong.append("the new memory is not in the place of the old one")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        at_start = torch.cuda.memory_allocated()
        state: tuple[Tensor, ...] = (given,)
        for y, gain in zip(ys[:window], gains, strict=False):
            state, _ = module(state, y, gain)
        extra = torch.cuda.max_memory_allocated() - at_start
        if extra >= memory.nbytes:
            wrong.append(f"a window in place took {extra} bytes more, a memory has {memory.nbytes}")
        del state, given
        module.owns_state = False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(module, memory, ys)
        for t in captured.values():
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same(captured, "from a graph")
        del captured, graph
        mixed = run(reference, memory, ys)
        doubles = [[t.double() for t in ts] for ts in (ys, gains)]
        truth = run(reference.double(), memory.double(), *doubles)
    torch.use_deterministic_algorithms(False)
    return {"errors": errors_of(truth, mine, mixed, wrong), "wrong": wrong}


def check_changes(d: int, d_k: int) -> list[str]:
    """Parameters that change are packed anew, and a graph that packs leaves nothing behind."""
    memory, y, gain, _, _ = common.draw(d, d_k, 3, torch.bfloat16)
    wrong = []
    with torch.no_grad():
        module = common.boundary(d, d_k, "fast_inference")
        _, first = module((memory,), y, gain)
        packing.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module((memory,), y, gain)
        _, again = module((memory,), y, gain)
        if not torch.equal(first, again):
            wrong.append("a graph that packed and did not run has spoilt the packed parameters")
        module.w_query.mul_(-1)
        other = common.boundary(d, d_k, "fast_inference")
        other.w_query.mul_(-1)
        if not torch.equal(module((memory,), y, gain)[1], other((memory,), y, gain)[1]):
            wrong.append("a changed parameter was not packed")
    return wrong


def attempt(name: str, call: Callable[[], dict[str, Any]]) -> None:
    say("start", name=name)
    try:
        result = call()
    except Exception as e:  # the others still run
        result = {"errors": {}, "wrong": [f"{type(e).__name__}: {e}".splitlines()[0][:300]]}
    say("check", name=name, **result)


def check_windows(shapes: list[tuple[int, int]] | None) -> None:
    for d, d_k, n_tokens, window in WINDOW_CHECKS:
        if shapes is None or (d, d_k) in shapes:
            name = f"window {window}, {d}x{d_k}, {n_tokens} tokens"
            attempt(name, partial(check_window, d, d_k, n_tokens, window))
            torch.cuda.empty_cache()


def work_check(args: argparse.Namespace) -> None:
    shapes = parse_shapes(args.shapes) if args.shapes else None
    for d, d_k, n_tokens, options in CHECKS:
        if shapes is None or (d, d_k) in shapes:
            name = f"{d}x{d_k}, {n_tokens} tokens"
            attempt(name, lambda c=(d, d_k, n_tokens, options): check(*c))  # type: ignore[misc]
    check_windows(shapes)
    d, d_k = (shapes or SHAPES)[0]
    attempt("changed parameters", lambda: {"errors": {}, "wrong": check_changes(d, d_k)})


class Chain:
    """Boundaries one after the other, each with parameters of its own."""

    def __init__(self, d: int, d_k: int, method: str):
        config: Any = PreLNConfig()
        if method != "preln":
            config = common.boundary(d, d_k, method, "cpu").config
        self.modules = [
            config.build(d_model=d, index=i, n_sublayers=N_BOUNDARIES - 1, eps=common.EPS)
            .cuda()
            .eval()
            for i in range(N_BOUNDARIES)
        ]
        for m in self.modules:
            m.owns_state = True
            for p in m.parameters():
                if p.dim() == 2:
                    torch.nn.init.normal_(p, std=0.5 * d**-0.5)
        self.gain = torch.ones(d, device="cuda")

    @torch.no_grad()
    def __call__(
        self, y: Tensor, weights: Sequence[Tensor] = (), boundaries: bool = True
    ) -> Tensor:
        state: tuple[Tensor, ...] = ()
        for i, m in enumerate(self.modules):
            if weights:
                y = y @ weights[i]
            if boundaries:
                state, y = m(state, y, self.gain)
        return y


def chain_us(
    chain: Chain, y: Tensor, weights: Sequence[Tensor] = (), boundaries: bool = True
) -> float:
    """Microseconds for one boundary, by the median of graph replays."""
    chain(y, weights, boundaries)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(y, weights, boundaries)
    times = []
    for i in range(14):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 4:
            times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2] / len(chain.modules)


def use(key: tuple[str, int, int, int], launch: Launch | None) -> None:
    """Put a launch into the table, or take it out."""
    if launch is None:
        launch_table.TABLE.pop(key, None)
    else:
        launch_table.TABLE[key] = launch
    ops.forget_plans()


def name_of(launch: Launch) -> str:
    if launch.prefill:
        return "prefill"
    sizes = f"{launch.cluster} blocks {launch.warps} warps {launch.tokens} tokens"
    return f"{sizes} {launch.exchange} {launch.keep}"


def source_of(launch: Launch) -> str:
    """A launch as the table has it."""
    if launch.prefill:
        return "Launch(prefill=True)"
    names = f'"{launch.exchange}", "{launch.keep}"'
    return f"Launch({launch.cluster}, {launch.warps}, {launch.tokens}, {names})"


class Shape:
    """All times of one width and number of slots."""

    def __init__(self, d: int, d_k: int, architecture: str, floor: float):
        self.d, self.d_k, self.architecture, self.floor = d, d_k, architecture, floor

    @cached_property
    def chains(self) -> dict[str, Chain]:
        names = ("preln", "flexible", "fast_inference")
        return {name: Chain(self.d, self.d_k, name) for name in names}

    @cached_property
    def weights(self) -> list[Tensor]:
        weights = (torch.randn(self.d, self.d, device="cuda") for _ in range(N_BOUNDARIES))
        return [(w * self.d**-0.5).bfloat16() for w in weights]

    def timed(
        self,
        M: int,
        name: str,
        call: Callable[[], dict[str, float]],
        vectors: float | None = None,
        **values: Any,
    ) -> None:
        """
        :param call: Returns ``us`` and what else to report.
        :param vectors: Read and written for each token, where they are not a boundary's that stores the memory.
        """
        d, K = self.d, self.d_k
        vectors = 2 * K + 2 if vectors is None else vectors
        say("start", name=f"{d}x{K} {M} {name}")
        try:
            times = call()
        except Exception as e:  # a candidate that does not launch is reported and left out
            reason = f"{type(e).__name__}: {e}".splitlines()[0][:300]
            say("failed", d=d, K=K, M=M, launch=name, reason=reason)
            return
        n_bytes = vectors * d * 2 * M
        ratio = round(times["us"] * 1e-6 * self.floor / n_bytes, 2)
        times = {key: round(us, 2) for key, us in times.items()}
        say("time", d=d, K=K, M=M, launch=name, ratio=ratio, **times, **values)

    def outputs(self, n_tokens: int) -> Tensor:
        return torch.randn(n_tokens, 1, self.d, device="cuda").bfloat16()

    def bucket(self, end: int) -> None:
        y = self.outputs(end)
        say("start", name=f"{self.d}x{self.d_k} {end} products alone")
        alone = chain_us(self.chains["preln"], y, self.weights, boundaries=False)
        say("products", d=self.d, M=end, us=round(alone, 2))

        def both(chain: Chain) -> dict[str, float]:
            among = chain_us(chain, y, self.weights) - alone
            return {"us": chain_us(chain, y), "among": among}

        if end in BESIDE_OTHERS:
            for name in ("preln", "flexible"):
                vectors = 4 if name == "preln" else None
                self.timed(end, name, partial(both, self.chains[name]), vectors)
        key = (self.architecture, self.d, self.d_k, end)
        before = launch_table.TABLE.get(key)
        for launch in launch_table.candidates(self.architecture, self.d, self.d_k, end):
            use(key, launch)
            for overlap in (True,) if launch.prefill else (True, False):
                ops.OVERLAP = overlap
                self.timed(
                    end,
                    name_of(launch),
                    partial(both, self.chains["fast_inference"]),
                    overlap=overlap,
                    row=[self.architecture, source_of(launch)],
                )
        ops.OVERLAP = True
        use(key, before)

    def host(self) -> None:
        """Microseconds of the host for one eager call."""
        chain, y = self.chains["fast_inference"], self.outputs(1)
        chain(y)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            chain(y)
        us = (time.perf_counter() - start) / (10 * N_BOUNDARIES) * 1e6
        torch.cuda.synchronize()
        say("host", d=self.d, K=self.d_k, us=round(us, 1))

    @torch.no_grad()
    def prefill(self, n_tokens: int) -> None:
        """Beside the training forward, which saves."""
        inputs = draw_chain(self.d, self.d_k, n_tokens, WINDOW)
        (memory,), ys, gains = inputs["memory"], inputs["y"], inputs["gain"]
        y, gain = ys[0], gains[0]
        m = common.boundary(self.d, self.d_k, "fast_inference")
        p, code = m.ldm_parameters, m.options_code
        training = (memory, y, None, None, None, *p, gain, common.EPS, code)
        forward = partial(fast_ops._launch_forward, *training)
        self.timed(n_tokens, "training forward", lambda: {"us": common.graph_us(forward)})
        # The kernels of prefill, whatever the table has for so many tokens; the parameters packed before, as in a model.
        rows = packing.of(p).rows(p, gain, code)
        inference = partial(
            fast_ops.forward_without_saving, memory, y, rows, common.EPS, code, in_place=True
        )
        self.timed(n_tokens, "prefill in place", lambda: {"us": common.graph_us(inference)})

        def in_windows(window: int) -> None:
            state: tuple[Tensor, ...] = (memory,)
            for each in ys[:window]:
                state, _ = fast_ops.window_without_saving(
                    state, each, rows, common.EPS, code, window, in_place=True
                )

        def mean_us(window: int) -> dict[str, float]:
            return {"us": common.graph_us(partial(in_windows, window)) / window}

        for window in PREFILL_WINDOWS:
            vectors = [window_vectors("forward", self.d_k, e, window) for e in range(window)]
            self.timed(
                n_tokens,
                f"prefill in windows of {window} in place",
                partial(mean_us, window),
                sum(vectors) / window,
            )


def work_prefill(args: argparse.Namespace) -> None:
    check_windows(parse_shapes(args.shapes) if args.shapes else None)
    work_time(args, only_prefill=True)


def work_time(args: argparse.Namespace, only_prefill: bool = False) -> None:
    say("start", name="copy")
    bandwidth = common.copy_bandwidth()
    say("copy", bandwidth=bandwidth)
    architecture = cache.ARCHITECTURES[torch.cuda.get_device_capability()[0]]
    for d, d_k in parse_shapes(args.shapes) if args.shapes else SHAPES:
        shape = Shape(d, d_k, architecture, max(bandwidth.values()))
        for n_tokens in PREFILL_TOKENS:
            shape.prefill(n_tokens)
        if only_prefill:
            continue
        shape.host()
        for end in BUCKETS:
            shape.bucket(end)
        torch.cuda.empty_cache()


def show(line: dict[str, Any]) -> str:
    kind = line["kind"]
    if kind == "check":
        text = ", ".join(f"{n} {e:.1e} ({r:.1e})" for n, (e, r) in line["errors"].items())
        verdict = "ok" if not line["wrong"] else "WRONG " + "; ".join(line["wrong"])
        return f"check {line['name']}: {text} {verdict}"
    if kind == "copy":
        return "copy: " + ", ".join(
            f"{k} {v / 1e12:.2f} TB/s" for k, v in line["bandwidth"].items()
        )
    if kind == "products":
        return f"{line['d']:5d}    {line['M']:6d} product alone {line['us']:.2f} us"
    if kind == "host":
        return f"host {line['d']}x{line['K']}: {line['us']} us for an eager call"
    where = f"{line['d']:5d} {line['K']:2d} {line['M']:6d} {line['launch']:40s}"
    if kind == "time":
        overlap = {True: "overlap", False: "apart", None: ""}[line.get("overlap")]
        among = f", among products {line['among']:6.2f} us" if "among" in line else ""
        return f"{where} {overlap:8s} {line['us']:8.2f} us {line['ratio']:6.2f} x floor{among}"
    return f"{where} {line['reason']}"


def table_of(lines: list[dict[str, Any]]) -> list[str]:
    """The rows of the best launches, as the launch table has them."""
    best: dict[tuple[int, int, int], dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "time" and "row" in line and line["overlap"]:
            key = (line["d"], line["K"], line["M"])
            if key not in best or line["among"] < best[key]["among"]:
                best[key] = line
    return [
        f"    # {line['us']} us, {line['ratio']} x floor; among products {line['among']} us\n"
        f'    ("{line["row"][0]}", {d}, {d_k}, {end}): {line["row"][1]},'
        for (d, d_k, end), line in sorted(best.items())
    ]


def worker(name: str) -> list[str]:
    """The command of one part."""
    return [sys.executable, "-m", __spec__.name, "--work", name, *sys.argv[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--cache", help="the folder of precompile")
    parser.add_argument("--out", help="write the JSON here")
    parser.add_argument("--shapes", help="widths and slots, such as 1024x8,2048x8")
    work = {"check": work_check, "time": work_time, "prefill": work_prefill}
    parser.add_argument("--only", choices=list(work), help="one part")
    parser.add_argument("--work", choices=list(work), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune needs a CUDA GPU: none is visible to torch")
    if args.cache:
        os.environ[cache.PLACES] = os.path.abspath(args.cache)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.work:
        work[args.work](args)
        return
    report = new_report()
    for name in [args.only] if args.only else ["check", "time"]:
        stage(name, args.out, report, worker(name), show)
    report["table"] = table_of(report["lines"])
    print("\n".join(report["table"]))
    write_json(args.out, report)
    if report["wrong"]:
        print("\n".join(["WRONG", *report["wrong"]]), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

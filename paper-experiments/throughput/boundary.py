"""
Every method's boundary alone: time of its forward and backward on the device and of an eager call on the host, for each
backend that runs here and for the reference under torch.compile, beside the fewest bytes that it can move.

    python paper-experiments/throughput/boundary.py --out boundary.json
    python paper-experiments/throughput/boundary.py --methods "attnres_full ldm" --backends "flexible fla" --d-model 1024

The shape is a middle boundary of a model of 24 blocks; AttnRes (full) mixes 9 and 25 sources, AttnRes (block) the most that
it has there. One GPU; on a CPU it runs with small numbers and shows only that it works.
"""

import argparse
import copy
import datetime
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import measure
import timing
import torch

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info

METHODS = "preln attnres_block attnres_full mhc ldm ldm_k4"
"""Unless told otherwise; ``OWN_METHODS`` after them."""
SCALE = "400m"
"""Its 24 blocks give the number of sublayers, and of AttnRes's blocks."""
COMPILE = "compile"
"""The name here of the reference under torch.compile."""
HOST_CALLS = 12
"""Eager boundaries in a row, whose time on the host is taken."""
ROTATED_BYTES = 1 << 28
"""Sets of inputs are used in turn until they are this large together: several times the L2 cache of any GPU."""


def floor_units(depth: Any, index: int) -> tuple[float, float] | None:
    """
    The fewest vectors of ``d_model`` elements that one boundary alone must read and write for a token, forward and
    backward; ``None`` where nobody counted. Each input is read once, each output is written once, what the backward needs
    may be saved only if it is an input or an output, and what is of size K or n a token is free. Counted from the
    definitions (LDM: arXiv 2610.18809; AttnRes: 2603.15031; mHC: 2512.24880):

    - PreLN: reads h, y and writes h, x; backward reads dx, dh, h and writes dh, dy.
    - LDM, K slots: reads S (K), y and writes S (K), x; backward reads S, dS, y, dx and writes dS, dy.
    - AttnRes, n sources: reads them and writes x; where a block is open, it also reads its partial sum and y instead of one
      source and writes the new sum. Backward: reads the sources, dx and the gradients that later readers gave the
      sources, writes the sources' gradients. (Over a whole stack a backward that writes each of them once, at its
      source's own boundary, needs n + 3 a boundary; autograd's pairwise adds make it 5n.)
    - mHC, n streams: reads the streams, y and writes the streams, x; backward reads the streams, y, the streams' gradients,
      dx, writes the streams' gradients and dy, and reads the streams again for the gradient of the controllers' map.
    """
    from olmo_core.nn.attnres import AttnResConfig
    from olmo_core.nn.depth import PreLNConfig
    from olmo_core.nn.hyper_connections import HyperConnectionsConfig
    from olmo_core.nn.ldm import LDMConfig

    if isinstance(depth, PreLNConfig):
        return 4, 5
    if isinstance(depth, AttnResConfig):
        n = depth.num_sources(index)
        is_open = index > 0 and (index - 1) % depth.block_size != 0
        return (n + 3, 3 * n + 1) if is_open else (n + 1, 3 * n + 1)
    if isinstance(depth, HyperConnectionsConfig):
        n = depth.n_streams
        return 2 * n + 2, 4 * n + 3
    if isinstance(depth, LDMConfig):
        plain = LDMConfig(d_k=depth.d_k, backend=depth.backend)
        others = ("update", "write_every", "residual", "key_source")
        if any(getattr(depth, o) != getattr(plain, o) for o in others):
            return None
        return 2 * depth.d_k + 2, 3 * depth.d_k + 3
    return None


@dataclass(frozen=True)
class Case:
    """One boundary: of which method, which one, and how wide."""

    method: str
    depth: Any
    index: int
    d_model: int
    n_sublayers: int

    @property
    def label(self) -> str:
        from olmo_core.nn.attnres import AttnResConfig

        if isinstance(self.depth, AttnResConfig):
            return f"{self.method} n={self.depth.num_sources(self.index)}"
        return self.method


def build_cases(methods: list[str], widths: list[int], sources: list[int]) -> list[Case]:
    """
    :raises UserError: If a method is unknown or AttnRes has no boundary with that many sources.
    """
    from config_utils.methods import depth_connection
    from config_utils.scales import load_scale

    scale = load_scale(SCALE)
    n = scale.n_sublayers
    cases = []
    for d_model in widths:
        for method in methods:
            depth = depth_connection(method, scale)
            indices = [n // 2]
            if method == "attnres_full":
                if not all(2 <= s <= n for s in sources):
                    raise UserError(f"--sources must lie between 2 and {n}, got {sources}")
                indices = [s - 1 for s in sources]
            elif method == "attnres_block":
                indices = [n - 1]
            cases += [Case(method, depth, i, d_model, n) for i in indices]
    return cases


class _End(torch.autograd.Function):
    """
    A number with given gradients of what it comes from. ``torch.autograd.grad`` of many outputs would look at each of them in
    Python: 12 us a boundary (LDM on a CPU, stubs for the kernels) that no training step has.
    """

    @staticmethod
    def forward(ctx, gradients, *outputs):
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.gradients


class _Nothing(torch.autograd.Function):
    """What a boundary is to autograd: results like ``like`` of any inputs, and a gradient for each of them. All of it is unwritten memory."""

    @staticmethod
    def forward(ctx, like, *inputs):
        ctx.save_for_backward(*inputs)
        return tuple(torch.empty_like(t) for t in like)

    @staticmethod
    def backward(ctx, *gradients):
        return None, *(torch.empty_like(t) for t in ctx.saved_tensors)


@dataclass(frozen=True)
class InputSet:
    """What a boundary is given in one call, and the gradients of its outputs that have any."""

    state: tuple[torch.Tensor, ...]
    y: torch.Tensor
    gradients: list[torch.Tensor]


class Timed:
    """
    One boundary with one backend.

    :param case: Which.
    :param backend: A :class:`~olmo_core.nn.depth.DepthBackend`, or :data:`COMPILE`.
    :param n_tokens: Tokens ``M`` in a call.

    :raises measure.NotMeasured: If the backend cannot run here or is wrong.
    """

    def __init__(self, case: Case, backend: str, n_tokens: int, device: torch.device):
        from olmo_core.nn.depth import DepthBackend

        chosen = DepthBackend.reference if backend == COMPILE else DepthBackend(backend)
        depth = replace(case.depth, backend=chosen)
        gate = measure.check_backend(
            depth, d_model=case.d_model, n_sublayers=case.n_sublayers, device=device, gradients=True
        )
        self.error = gate["backend_error"]
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(2)
        *before, self.boundary = measure.build_boundaries(
            depth, case.index + 1, d_model=case.d_model, n_sublayers=case.n_sublayers,
            dtype=self.dtype, device=device, generator=generator,
        )  # fmt: skip

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        gain = (1 + 0.1 * draw(case.d_model)).requires_grad_()

        def next_y() -> torch.Tensor:
            return draw(1, n_tokens, case.d_model).to(self.dtype).requires_grad_()

        self.sets: list[InputSet] = []
        n_bytes = 0
        while not self.sets or (n_bytes < ROTATED_BYTES and device.type == "cuda"):
            # The state is what this backend's boundaries leave: its form is the backend's own affair.
            state: tuple[torch.Tensor, ...] = ()
            for boundary in before:
                new_state, _ = boundary(state, next_y(), gain)
                state = tuple(t.detach().requires_grad_(t.requires_grad) for t in new_state)
            y = next_y()
            new_state, x = self.boundary(state, y, gain)
            gradients = [draw(*t.shape).to(t.dtype) for t in (*new_state, x) if t.requires_grad]
            self.sets.append(InputSet(state, y, gradients))
            n_bytes += sum(t.untyped_storage().nbytes() for t in (*state, y))
            del new_state, x
        self.gain = gain
        self.parameters = [gain, *self.boundary.parameters()]
        self.call: Callable[..., Any] = self.boundary
        if backend == COMPILE:
            torch.compiler.reset()
            # The shape is one shape, and a first call must not be timed: it compiles.
            self.call = torch.compile(self.reference, fullgraph=True, dynamic=False)

    def reference(self, *arguments: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        state, x, _, _ = self.boundary.reference(*arguments)
        return state, x

    def forward(self, number: int) -> list[torch.Tensor]:
        """The outputs that have gradients."""
        given = self.sets[number]
        new_state, x = self.call(given.state, given.y, self.gain)
        return [t for t in (*new_state, x) if t.requires_grad]

    def backward(self, number: int, outputs: list[torch.Tensor]) -> None:
        given = self.sets[number]
        leaves = [t for t in (*given.state, given.y) if t.requires_grad]
        torch.autograd.grad(
            outputs, [*leaves, *self.parameters], given.gradients, allow_unused=True
        )

    def device_seconds(self, replays: int) -> tuple[float, float]:
        """Forward (as in training, with what the backward needs saved), and forward with backward less that."""
        numbers = [i % len(self.sets) for i in range(max(2, len(self.sets)))]

        def both(i: int) -> None:
            self.backward(i, self.forward(i))

        forward = timing.graph_seconds(
            [lambda i=i: self.forward(i) for i in numbers],  # type: ignore[misc]
            self.device,
            replays,
        )
        total = timing.graph_seconds(
            [lambda i=i: both(i) for i in numbers],  # type: ignore[misc]
            self.device,
            replays,
        )
        return forward, total - forward

    def host_seconds(self, laps: int = 10, *, nothing: bool = False) -> tuple[float, float]:
        """
        Median time of an eager call on the host, forward and backward, as training has it: ``HOST_CALLS`` boundaries in a row, each with
        parameters and inputs of its own, and one backward from a single number through all of them, which leaves each parameter
        its ``grad``. The device is idle before and is not waited for (on a CPU there is nothing else than its work). The compiled
        reference has one boundary, whose gradients autograd adds up.

        :param nothing: Instead of the boundary a function of the same tensors that allocates its results and computes nothing: what
            torch's autograd takes of that time.
        """
        calls = HOST_CALLS if self.device.type == "cuda" else 2
        compiled = self.call is not self.boundary
        given, leaves, gradients = [], [], []
        for i in range(calls):
            inputs = self.sets[i % len(self.sets)]
            state = tuple(t.detach().requires_grad_(t.requires_grad) for t in inputs.state)
            y = inputs.y.detach().requires_grad_()
            gain = self.gain.detach().requires_grad_()
            boundary = self.call if compiled else copy.deepcopy(self.boundary)
            own = [t for t in (*state, y, gain) if t.requires_grad]
            if not compiled:
                own += list(boundary.parameters())
            if nothing:
                given.append((_Nothing.apply, (inputs.gradients, *own)))
            else:
                given.append((boundary, (state, y, gain)))
            leaves += own
            gradients += inputs.gradients
        if compiled:
            leaves += list(self.boundary.parameters())
        forward, backward = [], []
        for i in range(laps + 2):
            timing.synchronize(self.device)
            a = time.perf_counter()
            returned = [function(*arguments) for function, arguments in given]
            b = time.perf_counter()
            if not nothing:
                returned = [(*state, x) for state, x in returned]
            outputs = [t for group in returned for t in group if t.requires_grad]
            del returned
            end = _End.apply(gradients, *outputs)
            del outputs
            timing.synchronize(self.device)
            c = time.perf_counter()
            end.backward()
            d = time.perf_counter()
            del end
            for leaf in leaves:
                leaf.grad = None
            if i >= 2:
                forward.append((b - a) / calls)
                backward.append((d - c) / calls)
        return timing.spread(forward)["median"], timing.spread(backward)["median"]


def run_case(
    case: Case, backend: str, n_tokens: int, device: torch.device, copy_speed: float, replays: int
) -> dict[str, Any]:
    """One row of the results."""
    units = floor_units(case.depth, case.index)
    row: dict[str, Any] = {
        "method": case.label,
        "backend": backend,
        "d_model": case.d_model,
        "tokens": n_tokens,
        "index": case.index,
        "status": "ok",
        "error": None,
    }
    started = time.perf_counter()
    try:
        timed = Timed(case, backend, n_tokens, device)
        row["relative_error"] = timed.error
        device_times = timed.device_seconds(replays)
        laps = 10 if device.type == "cuda" else 2
        host_times = timed.host_seconds(laps)
        torch_times = None if backend == COMPILE else timed.host_seconds(laps, nothing=True)
        vector = case.d_model * timed.dtype.itemsize * n_tokens
        for i, direction in enumerate(("forward", "backward")):
            floor = None if units is None else units[i] * vector / copy_speed
            row[direction] = {
                "device_us": 1e6 * device_times[i],
                "host_us": 1e6 * host_times[i],
                "host_torch_us": None if torch_times is None else 1e6 * torch_times[i],
                "floor_units": None if units is None else units[i],
                "floor_us": None if floor is None else 1e6 * floor,
                "times_floor": None if floor is None else device_times[i] / floor,
            }
    except measure.NotMeasured as e:
        row |= {"status": e.status, "error": str(e)}
    except torch.OutOfMemoryError as e:
        row |= {"status": "oom", "error": measure.first_line(e)}
    except Exception as e:  # someone else's kernel may fail in any way; the other rows still count
        row |= {"status": "failed", "error": measure.first_line(e)}
    timed = None  # type: ignore[assignment]  # frees its inputs before the next row
    if device.type == "cuda":
        torch.cuda.empty_cache()
    row["seconds"] = time.perf_counter() - started
    return row


HEAD = (
    f"{'method':18s} {'backend':14s} {'d':>5s} {'M':>6s} | {'fwd us':>8s} {'floor':>7s} {'x floor':>7s} {'host us':>7s} {'torch':>5s}"
    f" | {'bwd us':>8s} {'floor':>7s} {'x floor':>7s} {'host us':>7s} {'torch':>5s} | {'error':>8s}"
)


def line(row: dict[str, Any]) -> str:
    text = f"{row['method']:18s} {row['backend']:14s} {row['d_model']:5d} {row['tokens']:6d} | "
    if row["status"] != "ok":
        return text + f"{row['status']}: {row['error']}"
    for direction in ("forward", "backward"):
        t = row[direction]
        floor, times = t["floor_us"] or math.nan, t["times_floor"] or math.nan
        bare = t["host_torch_us"] or math.nan
        text += (
            f"{t['device_us']:8.1f} {floor:7.1f} {times:7.2f} {t['host_us']:7.0f} {bare:5.0f} | "
        )
    return text + ("" if row["relative_error"] is None else f"{row['relative_error']:8.1e}")


def backends_of(case: Case, asked: list[str] | None, device: torch.device) -> list[str]:
    """
    Those asked for that the method may have, else all of its kernels and the compiled reference.
    """
    boundary = case.depth.build(
        d_model=case.d_model, index=case.index, n_sublayers=case.n_sublayers, eps=1e-6,
        init_device="meta",
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    own = [str(b) for b in boundary.backend_candidates(device, dtype)]
    if asked is not None:
        return [b for b in asked if b in own or b == COMPILE]
    return [b for b in own if b != "reference"] + [
        COMPILE if device.type == "cuda" else "reference"
    ]


def main(argv: list[str] | None = None) -> int:
    from config_utils.methods import OWN_METHODS
    from olmo_core.nn.depth import DepthBackend

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", help=f"(default: {METHODS}, and your own)")
    parser.add_argument(
        "--backends",
        help=f"{', '.join(DepthBackend)}, {COMPILE}; all that a method has but reference",
    )
    parser.add_argument("--d-model", default="1024 2048")
    parser.add_argument("--tokens", default="16384", help="tokens M in a call")
    parser.add_argument("--sources", default="9 25", help="of attnres_full")
    parser.add_argument("--replays", default="20", help="timed replays of each graph")
    parser.add_argument("--budget", help="start no further row after this many seconds")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="write the JSON here, after every row")
    opts = parser.parse_args(argv)
    started = time.perf_counter()

    (n_tokens, *more), (replays, *_) = (
        measure.numbers(getattr(opts, name), f"--{name}") for name in ("tokens", "replays")
    )
    if more:
        raise UserError(f"--tokens is one number, got '{opts.tokens}'")
    budget = None if opts.budget is None else measure.numbers(opts.budget, "--budget")[0]
    asked = None if opts.backends is None else opts.backends.replace(",", " ").split()
    known = [*map(str, DepthBackend), COMPILE]
    if asked is not None and (unknown := [b for b in asked if b not in known]):
        raise UserError(f"unknown backend '{unknown[0]}': choose from {', '.join(known)}")
    device = torch.device(opts.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA GPU")
    cases = build_cases(
        (opts.methods or " ".join([METHODS, *OWN_METHODS])).replace(",", " ").split(),
        measure.numbers(opts.d_model, "--d-model"),
        measure.numbers(opts.sources, "--sources"),
    )
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cuda.matmul.allow_tf32 = False

    copy_speed = timing.copy_bytes_per_second(device)
    report: dict[str, Any] = {
        "device": timing.device_name(device),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "run": run_info(),
        "copy_bytes_per_s": copy_speed,
        "rows": [],
    }
    print(f"{report['device']}: an elementwise copy moves {copy_speed / 1e12:.2f} TB/s")
    print(HEAD, flush=True)
    # All kernels before anything is compiled: they are what a short run must not miss.
    jobs = [(case, backend) for case in cases for backend in backends_of(case, asked, device)]
    jobs.sort(key=lambda job: job[1] == COMPILE)
    for case, backend in jobs:
        if budget is not None and time.perf_counter() - started > budget:
            row: dict[str, Any] = {
                "method": case.label, "backend": backend, "d_model": case.d_model,
                "tokens": n_tokens, "index": case.index, "status": "skipped",
                "error": f"the budget of {budget} s was spent",
            }  # fmt: skip
        else:
            row = run_case(case, backend, n_tokens, device, copy_speed, replays)
        report["rows"].append(row)
        print(line(row), flush=True)
        if opts.out is not None:
            timing.write_json(opts.out, report)
    return 0


if __name__ == "__main__":
    run_cli(main)

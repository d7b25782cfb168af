"""
Prefill of LDM's ``fast_inference`` backend in windows. Without a GPU: which kernels run on which memory, what happens where they are
missing, a model with PyTorch in the place of the kernels; with the CuTe DSL installed, a window of compiled kernels in an emulator of
PTX against the reference in FP64. With a GPU, ``tune``'s checks of windows.
"""

import ctypes
import functools
import logging
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from olmo_core.nn.depth import connection
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.model import DepthTransformer
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.ldm.backends import fast_inference
from olmo_core.nn.ldm.backends.fast import cache
from olmo_core.nn.ldm.backends.fast.layout import Spec
from olmo_core.nn.ldm.backends.fast_inference import launch_table, packing, precompile
from olmo_core.nn.ldm.backends.reference import LDMParameters, ldm_first_boundary
from olmo_core.nn.ldm.module import LDMBoundary

pytest.importorskip("triton")

import helpers
import ptx_emulator
from test_ldm_fast import SlowKernels, compiled, relative_rms

from olmo_core.nn.ldm.backends.fast import ops as fast_ops
from olmo_core.nn.ldm.backends.fast_inference import ops, tune

EPS = 1e-5
CUDA, CPU, BF16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl: the extra 'cute'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def boundary(d: int = 64, *, runs: bool = True, **options: Any) -> LDMBoundary:
    """:param runs: As after the choice of the backend on a GPU."""
    module = LDMConfig(**options).build(d_model=d, index=1, n_sublayers=8, eps=EPS).eval()
    if runs:
        module.selected_backend, module.infers_fast = DepthBackend.fast, True
        module.prefill_window = module.window
    return module


@pytest.fixture
def prefill(monkeypatch):
    """Any number of tokens is prefill."""
    monkeypatch.setattr(ops, "_plan", lambda *a: None)


# Which kernels run, on which memory.


class Plans:
    """Stand where the kernels would."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[bool, int, bool, bool], tuple[Any, ...]]] = []

    def plan(self, options: str, d: int, device: int, *which: Any) -> "Plan":
        return Plan(self, which)


class Plan:
    spec = Spec("forward", 64, 8)

    def __init__(self, plans: Plans, which: tuple[bool, int, bool, bool]):
        self.kernel = lambda blocks, *values: plans.launches.append((which, values))

    def clusters(self, n_tokens: int) -> int:
        return 1


@pytest.fixture
def launches(prefill, monkeypatch):
    plans = Plans()
    monkeypatch.setattr(fast_ops, "_forward_plan", plans.plan)
    monkeypatch.setattr(fast_ops, "pack_parameters", lambda *a: torch.zeros(4))
    return plans.launches


def draw(n: int, d: int, d_k: int, outputs: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    memory = normal(1, n, 1, d) + 0.5 * normal(1, n, d_k, d)
    return memory.to(BF16), [normal(1, n, d).to(BF16) for _ in range(outputs)]


GAIN = torch.ones(64)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_order_of_the_kernels_and_their_memory(launches, in_place):
    """Two windows of three and the first boundary of another one; one memory, or one for each window."""
    module, n = boundary(window=3), 5
    module.owns_state = in_place
    memory, ys = draw(n, 64, 8, 7)
    states: list[tuple[torch.Tensor, ...]] = [(memory,)]
    xs = []
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:  # fmt: skip
        for y in ys:
            state, x = module(states[-1], y, GAIN)
            states.append(state)
            xs.append(x)
    assert [which for which, _ in launches] == [
        (False, earlier, earlier == 2, False) for earlier in (0, 1, 2, 0, 1, 2, 0)
    ]
    packed = launches[0][1][2]
    for i, (_, values) in enumerate(launches):
        before, after, earlier = states[i], states[i + 1], i % 3
        written = after[0].data_ptr() if earlier == 2 else 0
        assert values == (
            before[0].data_ptr(),
            ys[i].data_ptr(),
            packed,
            0,
            0,
            written,
            xs[i].data_ptr(),
            before[1].data_ptr() if earlier else 0,
            0 if written else after[1].data_ptr(),
            *(y.data_ptr() for y in ys[i - earlier : i]),
            n,
            EPS,
        )
        if written:
            assert len(after) == 1 and (after[0] is before[0]) == in_place
        else:
            assert after[0] is before[0] and after[1].shape == (1, n, (2 + earlier) * 8)
            assert after[1].dtype == torch.float32
            assert [t.data_ptr() for t in after[2:]] == [
                y.data_ptr() for y in ys[i - earlier : i + 1]
            ]
    sizes = [
        e.nbytes()
        for e in seen.profiler.kineto_results.events()
        if e.name() == "[memory]" and e.nbytes() >= ys[0].nbytes
    ]
    # x of each boundary, and the memories that were not written over an old one.
    assert sizes.count(memory.nbytes) == (0 if in_place else 2)
    assert len(sizes) == 7 + sizes.count(memory.nbytes)


def test_a_memory_that_cannot_be_updated_in_place_is_copied_once(launches):
    module = boundary(window=3)
    module.owns_state = True
    memory, ys = draw(6, 64, 8, 3)
    given = memory.view(2, 3, 8, 64).transpose(0, 1)
    assert not given.is_contiguous()
    state: tuple[torch.Tensor, ...] = (given,)
    anchors = []
    with torch.no_grad():
        for y in ys:
            state, _ = module(state, y.view(2, 3, 64).transpose(0, 1), GAIN)
            anchors.append(state[0].data_ptr())
    assert len(set(anchors)) == 1 and given.data_ptr() not in anchors
    with pytest.raises(ValueError, match="only a contiguous, aligned memory in place"):
        fast_ops._run_forward(
            given, ys[0].view(3, 2, 64), None, (), torch.zeros(4), EPS, module.options_code,
            writes=True, saves=False, in_place=True,
        )  # fmt: skip


def test_no_tokens(launches):
    """As decode: no kernel runs, and no state is in a window."""
    module = boundary(window=2)
    with torch.no_grad():
        (memory, *_), x = module(
            (torch.zeros(1, 0, 8, 64, dtype=BF16),), torch.zeros(1, 0, 64, dtype=BF16), GAIN
        )
    assert not launches and memory.shape == (1, 0, 8, 64) and x.shape == (1, 0, 64)


def test_states_that_do_not_fit(launches, monkeypatch):
    module = boundary(window=3)
    memory, ys = draw(5, 64, 8, 4)
    refused = pytest.raises(
        ValueError,
        match=r"windows of 3 boundaries cannot take a state of shapes .* same window and the same",
    )
    with torch.no_grad():
        state, _ = module((memory,), ys[0], GAIN)
        bad = [
            (memory[:, :4],),
            (memory[:, :4], *state[1:]),
            (memory, state[1][:, :4], *state[2:]),
            (memory, state[1][..., :8], *state[2:]),
            (memory, state[1], ys[0][:, :4]),
            (memory, state[1]),
            # Of a longer window.
            (memory, torch.zeros(1, 5, 32), *ys[:3]),
        ]
        for other in bad:
            with refused:
                module(other, ys[1], GAIN)
        assert len(launches) == 1
        # The number of tokens decides between the kernels, so it must not change on the way down.
        monkeypatch.setattr(ops, "_plan", lambda *a: (None, None))
        with pytest.raises(ValueError, match=r"decode kernel takes a stored memory.*same tokens"):
            module(state, ys[1], GAIN)


def test_decode_stores_the_memory(monkeypatch):
    """The plan goes by the number of tokens, the same for all boundaries."""
    decoded: list[Any] = []

    def decode(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decoded.append(arguments)
        return arguments[0], arguments[1]

    monkeypatch.setattr(ops, "_plan", lambda options, d, device, end: end or None)
    monkeypatch.setattr(ops, "_launch", decode)
    module = boundary(window=4)
    module.owns_state = True
    memory, ys = draw(5, 64, 8, 2)
    with torch.no_grad():
        for y in ys:
            state, _ = module((memory,), y, GAIN)
            assert state == (memory,)
    # in place, the plan of the bucket
    assert [a[-2:] for a in decoded] == [(True, 8)] * 2


def test_what_is_traced_stores_the_memory():
    module = boundary(window=4)
    arguments = (module.ldm_parameters, module.options_code, GAIN, EPS, 4)
    memory, ys = draw(3, 64, 8, 2)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y, memory = (mode.from_tensor(t) for t in (ys[0], memory))
        coefficients = torch.empty(1, 3, 16)
        for state in ((memory,), (memory, coefficients, y)):
            new, x = ops.window_boundary(state, y, *arguments, in_place=True)
            assert [t.shape for t in new] == [memory.shape] and x.shape == y.shape


# Where there are kernels, and where not.


@pytest.fixture
def hopper(monkeypatch):
    """A GPU, as far as the choice of backend can see, without the CuTe DSL."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    monkeypatch.setattr(connection, "_LOGGED", set())


OPTIONS = ("two_sigmoid", "dynamic")


def test_missing_kernels(hopper, monkeypatch, tmp_path, caplog):
    """Without those of windows prefill runs as before; without others the backend does not run."""
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    code = cache.Code("entry", b"code")

    def selected(**options: Any) -> tuple[bool, int]:
        module = boundary(2048, runs=False, backend="fast_inference", **options)
        module.select_backend(CUDA, BF16)
        return module.infers_fast, module.prefill_window

    def store(specs: list[cache.Spec]) -> None:
        for s in specs:
            cache.store(s, "sm_90a", code, tmp_path)

    windows = launch_table.window_specs("sm_90a", 2048, 8, *OPTIONS, 4)
    store(windows)
    reason = fast_inference.unavailable(CUDA, BF16, 2048, LDMConfig(), by_name=True)
    assert reason is not None and "no compiled inference kernels were found" in reason
    store(launch_table.all_specs("sm_90a", 2048, 8, *OPTIONS))
    assert selected() == (True, 4)
    assert selected(window=1) == (True, 1)
    with caplog.at_level(logging.INFO):
        assert selected(window=2) == (True, 1)
    assert "prefill without windows (no compiled kernels of a window of 2" in caplog.text
    (path,) = tmp_path.glob(f"*/{windows[2].name}.json")
    path.unlink()
    assert selected() == (True, 1)
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    assert selected() == (True, 4) and selected(d_k=16) == (True, 1)


def test_auto_has_windows_where_they_were_timed(hopper, monkeypatch):
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    monkeypatch.setattr(launch_table, "TIMED_WINDOWS", {})
    module = boundary(2048, runs=False)
    module.select_backend(CUDA, BF16)
    assert module.infers_fast and module.prefill_window == 1
    timed = {("sm_90a", 2048, 8): 4, ("sm_90a", 2048, 4): 2}
    monkeypatch.setattr(launch_table, "TIMED_WINDOWS", timed)
    for options, window in (({}, 4), ({"window": 1}, 1), ({"d_k": 4}, 2)):
        module = boundary(2048, runs=False, **options)
        assert module.select_backend(CUDA, BF16) == DepthBackend.fast
        assert module.infers_fast and module.prefill_window == window


@pytest.mark.parametrize("d_k", [4, 8, 16])
def test_specs(d_k):
    window = boundary(2048, d_k=d_k).window
    alone = launch_table.all_specs("sm_90a", 2048, d_k, *OPTIONS)
    windows = launch_table.all_specs("sm_90a", 2048, d_k, *OPTIONS, window)[len(alone) :]
    forms = [(s.earlier, s.writes) for s in windows if isinstance(s, Spec)]
    assert forms == ([] if d_k == 16 else [(0, False), (1, False), (2, False), (3, True)])
    for s in windows:
        assert isinstance(s, Spec)
        # Nothing of a backward, in the table's launch.
        assert s.direction == "forward" and not s.saves and not s.extra
        found = fast_ops.launch_table.launch("sm_90a", "forward", 2048, d_k, s.earlier, s.writes)
        assert found is not None and (s.cluster, s.tokens) == (found.cluster, found.tokens)


def test_precompile(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    monkeypatch.setattr(cache, "build", lambda *a: (cache.Code("entry", b"code"), ""))

    def names(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), *arguments])
        precompile.main()
        return int(capsys.readouterr().out.splitlines()[-1].split()[0])

    alone = len(launch_table.all_specs("sm_90a", 2048, 4, *OPTIONS))
    assert names("--shapes", "2048x4", "--window", "1") == alone
    assert names("--shapes", "2048x4") == 4
    assert names("--shapes", "2048x4", "--window", "4") == 0
    assert names("--shapes", "2048x16") > 0
    with pytest.raises(
        SystemExit, match="no kernels for a window of 6 with d_model 2048 and d_k 4"
    ):
        names("--shapes", "2048x4", "--window", "6")
    with pytest.raises(SystemExit, match="no kernels for d_model 2048 with d_k 2"):
        names("--shapes", "2048x2")


# Models on the CPU.


def run_boundaries_with(model: DepthTransformer) -> list[torch.Tensor]:
    """:returns: The memory of each boundary's state, filled as the model runs."""
    memories: list[torch.Tensor] = []
    for b in model.boundaries():
        assert isinstance(b, LDMBoundary)
        b.selected_backend, b.infers_fast = DepthBackend.fast, True
        b.prefill_window = b.window
        b.register_forward_hook(lambda m, a, out: memories.append(out[0][0]))
    return memories


def reference_first(y, key_0, norm_weight, eps):
    out = ldm_first_boundary(y, key_0, norm_weight, eps)
    return out.memory, out.x


@pytest.mark.parametrize("window", [3, 4])
def test_a_model(monkeypatch, window):
    """PyTorch computes in FP32 what the kernels would: prefill, decode of few tokens, both again."""
    config = helpers.tiny_config(LDMConfig(window=window), d_model=64, eps=EPS)
    slow = SlowKernels(config.depth, 64)
    ran: list[Any] = []

    def run_forward(
        memory, y, coefficients, earlier, packed, eps, options, *, writes, saves, in_place=False
    ):
        ran.append((len(earlier), writes, saves, in_place))
        new, x, after, _ = slow.forward(
            memory, y, coefficients, earlier, *packed, eps, options, writes
        )
        return (memory.copy_(new) if in_place else new), x, after

    def decode(memory, y, parameters, norm_weight, eps, options, in_place, plan):
        ran.append("decode")
        out = slow.boundary(memory, y, parameters, norm_weight)
        return memory.copy_(out.memory), out.x

    monkeypatch.setattr(fast_ops, "_run_forward", run_forward)
    monkeypatch.setattr(packing.Packed, "rows", lambda self, parameters, gain, _: (parameters, gain))  # fmt: skip
    monkeypatch.setattr(ops, "_launch", decode)
    monkeypatch.setattr(ops, "_plan", lambda options, d, device, end: end if end <= 8 else None)
    monkeypatch.setattr(ops, "first_boundary", reference_first)
    monkeypatch.setattr(DepthTransformer, "_select_backends", lambda model, y: None)
    model = config.build(init_device="cpu")
    model.init_weights(device=CPU)
    helpers.randomize_boundaries(model)
    ids = helpers.tokens(2, 7)
    short = ids[:, :3]
    with torch.no_grad():
        model.eval()
        expected = [model(i) for i in (ids, short)]
        memories = run_boundaries_with(model)
        for _ in range(2):
            for i, logits in zip((ids, short), expected, strict=True):
                ran.clear()
                memories.clear()
                assert helpers.relative_error(model(i), logits) < 1e-5
                assert len({m.data_ptr() for m in memories}) == 1, "more than one memory"
                last = window - 1
                windows = [
                    (n % window, n % window == last, False, n % window == last) for n in range(6)
                ]
                assert ran == (["decode"] * 6 if i is short else windows)
        # The recorder runs the reference, whatever ran before.
        assert len(model.record(ids)) == 7


# The kernels, compiled here.


class EmulatedPlan:
    """A training kernel without a backward that reads and writes the tensors of this process."""

    seed = 0

    def __init__(self, spec: Spec):
        self.spec = spec

    def clusters(self, n_tokens: int) -> int:
        return 1

    def kernel(self, blocks: int, *values: Any) -> None:
        s, n = self.spec, values[-2]
        vector, matrix, held = 2 * n * s.d, 2 * n * s.d * s.d_k, 4 * n * s.d_k
        sizes = [
            matrix, vector, 4 * s.n_parameters, 0, 0, matrix, vector, held * (1 + s.earlier),
            held * (2 + s.earlier), *[vector] * s.earlier,
        ]  # fmt: skip
        memory = ptx_emulator.Memory()
        for address, size in zip(values[:-2], sizes, strict=True):
            if address:
                array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
                memory.arrays.append((address, array))
        parameters = list(values)
        ptx_emulator.launch(compiled(s), blocks, s.cluster, parameters, memory, EmulatedPlan.seed)


def packed_parameters(parameters: LDMParameters, gain: torch.Tensor, options: str) -> torch.Tensor:
    """Dynamic forget gates, which have all parameters."""
    p = parameters
    maps = [w.t().reshape(-1) for w in (p.w_forget, p.w_key, p.w_query)]  # type: ignore[union-attr]
    packed = torch.cat([*maps, gain, p.b_query, p.b_key, p.b_forget]).float().detach()  # type: ignore[list-item]
    n = Spec("forward", gain.shape[0], p.b_query.shape[0]).n_parameters
    return torch.nn.functional.pad(packed, (0, n - packed.numel()))


@pytest.fixture
def emulated(prefill, monkeypatch):
    """:returns: Takes the shape and the launch numbers of a window's kernels, by the number of earlier outputs."""
    launched: list[Spec] = []

    def install(d: int, d_k: int, **numbers: Any) -> list[Spec]:
        @functools.cache
        def plan(options, d_, device, saves, earlier, writes, stored8):
            assert (d_, saves, stored8) == (d, False, False)
            given = {name: value(earlier) if callable(value) else value for name, value in numbers.items()}  # fmt: skip
            spec = Spec("forward", d, d_k, extra=False, saves=False, earlier=earlier, writes=writes, **given)  # fmt: skip
            return EmulatedPlan(spec)

        def recorded(*a):
            launched.append(plan(*a).spec)
            return plan(*a)

        monkeypatch.setattr(fast_ops, "_forward_plan", recorded)
        monkeypatch.setattr(fast_ops, "pack_parameters", packed_parameters)
        return launched

    return install


WINDOWS: list[tuple[int, int, dict[str, Any]]] = [
    # tokens, window, shape and launch numbers
    # The ring is shorter than the work, the last tile not full; two blocks share a token.
    (5, 4, {"d": 128, "d_k": 8, "cluster": 2, "tokens": 2, "max_stages": 2}),
    (5, 3, {"d": 64, "d_k": 4, "tokens": 4, "coefficient_warps": 3, "dots_warps": lambda e: 4 * (e < 2)}),
]  # fmt: skip


@needs_dsl
@pytest.mark.parametrize(("n_tokens", "window", "numbers"), WINDOWS, ids=["K=8", "K=4"])
def test_a_window_in_an_emulator(emulated, monkeypatch, n_tokens, window, numbers):
    """A whole window, in place and not, with the warps in two orders: the same bits, and FP64's values."""
    launched = emulated(**numbers)
    d, d_k = numbers["d"], numbers["d_k"]
    generator = torch.Generator().manual_seed(5)
    modules = [boundary(d, d_k=d_k, window=window) for _ in range(window)]
    with torch.no_grad():
        for m in modules:
            for name, p in m.named_parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.add_(noise * (1.5 * d**-0.5 if name.startswith("w_") else 0.5))
    gain = 1 + 0.1 * torch.randn(d, generator=generator)
    memory, ys = draw(n_tokens, d, d_k, window)
    runs = []
    for seed, in_place in ((1, True), (2, False)):
        monkeypatch.setattr(EmulatedPlan, "seed", seed)
        given = memory.clone()
        state: tuple[torch.Tensor, ...] = (given,)
        outputs = []
        with torch.no_grad():
            for m, y in zip(modules, ys, strict=True):
                m.owns_state = in_place
                state, x = m(state, y, gain)
                outputs += [x] if len(state) == 1 else [x, state[1]]
                if len(state) > 1:
                    assert torch.equal(given, memory), "written before the window's end"
        assert (state[0].data_ptr() == given.data_ptr()) == in_place
        assert torch.equal(given, memory) == (not in_place)
        runs.append([*outputs, state[0]])
    assert [(s.earlier, s.writes) for s in launched[:window]] == [
        (e, e == window - 1) for e in range(window)
    ]
    with torch.no_grad():
        state, truth = (memory.double(),), []
        held = torch.ones(1, n_tokens, 1, d_k, dtype=torch.float64)
        for i, (m, y) in enumerate(zip(modules, ys, strict=True)):
            state, x, _, c = m.double().reference(state, y.double(), gain.double())
            held = torch.cat([held * c["forget"][..., None, :], c["key"][..., None, :]], dim=-2)
            truth += [x] if i == window - 1 else [x, held.flatten(-2)]
        truth.append(state[0])
    for i, (t, other, expected) in enumerate(zip(*runs, truth, strict=True)):
        assert relative_rms(t, expected) < (2.5e-3 if t.dtype == BF16 else 2e-5), i
        assert torch.equal(t, other), f"{i} depends on the order of the warps, or on the place"


@needs_dsl
def test_a_model_in_an_emulator(emulated, monkeypatch):
    """Four sublayers in windows of 3 with one memory, BF16."""
    launched = emulated(**WINDOWS[1][2])
    monkeypatch.setattr(ops, "first_boundary", reference_first)
    monkeypatch.setattr(DepthTransformer, "_select_backends", lambda model, y: None)
    config = helpers.tiny_config(LDMConfig(d_k=4, window=3), d_model=64, n_layers=2, eps=EPS)
    model = config.build(init_device="cpu").eval()
    model.init_weights(device=CPU)
    model.bfloat16()
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    with torch.no_grad():
        expected = model(tokens)
        memories = run_boundaries_with(model)
        logits = model(tokens)
    assert [(s.earlier, s.writes) for s in launched] == [
        (0, False), (1, False), (2, True), (0, False),
    ]  # fmt: skip
    assert len({m.data_ptr() for m in memories}) == 1, "more than one memory"
    assert relative_rms(logits, expected) < 2e-2  # BF16 all through


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("d", "d_k", "n_tokens", "window"), tune.WINDOW_CHECKS, ids=str)
def test_windows_against_fp64(d, d_k, n_tokens, window):
    config = LDMConfig(d_k=d_k, window=window)
    reason = fast_inference.unavailable(CUDA, BF16, d, config, by_name=True)
    if reason is not None:
        pytest.skip(reason)
    if fast_inference.prefill_window(CUDA, d, config, window, by_name=True) != window:
        pytest.skip("no compiled kernels of windows were found")
    assert not tune.check_window(d, d_k, n_tokens, window)["wrong"]

"""
mHC's kernels for few tokens against the reference in FP64: every form of a boundary, and a whole model that generates.
Natively on a GPU, through Triton's interpreter elsewhere.
"""

from typing import Any

import pytest
import torch
from helpers import (
    VOCAB,
    build_model,
    draw_mhc_parameters,
    enlarge,
    randomize_boundaries,
    tiny_config,
    tokens,
)

from olmo_core.generate.generation_module import GenerationConfig
from olmo_core.nn.depth import inference
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.generation import DepthGenerationModule
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.hyper_connections.backends.reference import mhc_controls
from olmo_core.nn.hyper_connections.module import HyperConnectionsBoundary

pytest.importorskip("triton")

from olmo_core.nn.hyper_connections.backends.flexible import inference_ops as ops
from olmo_core.nn.hyper_connections.backends.flexible import inference_tune as tune
from olmo_core.nn.hyper_connections.backends.flexible import ops as training_ops
from olmo_core.nn.hyper_connections.backends.flexible.inference_ops import Launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
SUBLAYERS = 8
FIRST, MIDDLE, LAST = 0, 3, SUBLAYERS
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: 5e-6, BF16: 2.5e-3, FP16: 4e-4}
"""Relative RMS error."""
COEFFICIENTS = 1e-5
"""RMS error of post and res, from streams as they were rounded."""


@pytest.fixture(autouse=True)
def kernels_on_any_device(monkeypatch, poison_empty_memory):
    monkeypatch.setattr(inference, "INTERPRETER", True)


@pytest.fixture
def calls(monkeypatch) -> dict[str, int]:
    """How often each kind of kernels ran."""
    counts = {"few": 0, "training": 0}
    few, training = ops.boundary, training_ops._launch_forward

    def count(name, call):
        def counted(*args):
            counts[name] += 1
            return call(*args)

        return counted

    monkeypatch.setattr(ops, "boundary", count("few", few))
    monkeypatch.setattr(training_ops, "_launch_forward", count("training", training))
    return counts


class Case:
    """One boundary with random parameters and inputs."""

    def __init__(
        self,
        index: int = MIDDLE,
        d: int = 64,
        n_tokens: int = 3,
        dtype: torch.dtype = FP32,
        scale: float = 1.0,
        **options: Any,
    ):
        """:param scale: Standard deviation of the maps' logits, beside their bias."""
        self.d, self.index, self.dtype = d, index, dtype
        # The interpreter's time goes by operations; all 20 iterations have a test of their own.
        self.config = HyperConnectionsConfig(**{"sinkhorn_iterations": 3, **options})
        n = self.config.n_streams
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.parameters = draw_mhc_parameters(self.build("reference"), normal, scale)
        self.y = normal(n_tokens, 1, d).to(DEVICE, dtype)
        self.gain = (1 + 0.3 * normal(d)).to(DEVICE)
        self.state: tuple[torch.Tensor, ...] = ()
        if index > 0:
            # Streams hold much the same, as in a model.
            streams = normal(n_tokens, 1, 1, d) + 0.7 * normal(n_tokens, 1, n, d)
            post = 2 * torch.sigmoid(normal(n_tokens, 1, n))
            self.state = (streams.to(DEVICE, dtype), post.to(DEVICE))
            if self.config.residual_map == "sinkhorn":
                res = torch.softmax(2 * normal(n_tokens, 1, n, n), dim=-1)
                self.state = (*self.state, res.to(DEVICE))

    def build(self, backend: str) -> HyperConnectionsBoundary:
        config = self.config.replace(backend=DepthBackend(backend))
        return config.build(
            d_model=self.d, index=self.index, n_sublayers=SUBLAYERS, eps=EPS, init_device="cpu"
        ).to(DEVICE)

    @torch.no_grad()
    def run(self, backend: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """
        Outputs by name.

        :param dtype: Computes in it and in its precision, instead of the case's.
        """
        module = self.build(backend)
        module.load_state_dict(self.parameters)
        state, y, gain = self.state, self.y, self.gain
        if dtype is not None:
            module.to(dtype)
            state, y, gain = tuple(t.to(dtype) for t in state), y.to(dtype), gain.to(dtype)
        before = [t.clone() for t in (*state, y)]
        new_state, x = module(state, y, gain)
        assert all(map(torch.equal, before, (*state, y))), "an input was changed in place"
        names = ["streams", "post", "res"][: len(new_state)]
        return dict(zip(names, new_state, strict=True)) | {"x": x}

    def check(self) -> None:
        truth, reference = self.run("reference", torch.float64), self.run("reference")
        actual = self.run("flexible")
        bound = TOLERANCE[self.dtype]
        # The interpreter rounds to BF16 towards zero: twice the error of rounding to nearest.
        widened = 2.0 if self.dtype == BF16 and DEVICE.type == "cpu" else 1.0
        assert actual.keys() == reference.keys()
        for name, expected in truth.items():
            t = actual[name]
            assert t.dtype == reference[name].dtype and t.shape == expected.shape, name
            error = relative_rms(t, expected)
            other = relative_rms(reference[name], expected)
            assert error <= widened * bound, f"{name}: {error:.2e}, reference {other:.2e}"
            # Rounded where the reference is, and not once more.
            if self.dtype != FP32 and name in ("streams", "x"):
                assert error <= widened * 1.5 * other + 1e-5, (name, error, other)
        if "post" in actual:
            module = self.build("reference")
            module.load_state_dict(self.parameters)
            module.double()
            assert module.phi is not None and module.alpha is not None and module.bias is not None
            with torch.no_grad():
                exact = mhc_controls(
                    actual["streams"].double(), module.phi, module.alpha, module.bias, EPS,
                    self.config.sinkhorn_iterations,
                )  # fmt: skip
            for name in ("post", "res"):
                if name in actual:
                    off = (actual[name] - getattr(exact, name)).square().mean().sqrt()
                    assert off <= COEFFICIENTS, (name, off)


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@pytest.mark.parametrize(
    ("n_tokens", "options"),
    [
        (2, {}),
        (5, {}),
        (2, {"residual_map": "identity", "n_streams": 2}),
        (5, {"residual_map": "identity"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("index", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])
def test_every_boundary(index, options, n_tokens, calls):
    Case(index, n_tokens=n_tokens, **options).check()
    assert calls == {"few": 1, "training": 0}


@pytest.mark.parametrize("n_tokens", [2, 5])
def test_one_stream(n_tokens):
    Case(n_tokens=n_tokens, n_streams=1).check()


@pytest.mark.parametrize(("n_tokens", "residual_map"), [(2, "sinkhorn"), (5, "identity")])
def test_sum_collapse(residual_map, n_tokens):
    Case(LAST, n_tokens=n_tokens, residual_map=residual_map, collapse="sum").check()


@pytest.mark.parametrize(
    ("dtype", "index", "d", "n_tokens", "options"),
    [
        (BF16, MIDDLE, 96, 1, {}),
        (BF16, MIDDLE, 72, 17, {"n_streams": 2, "sinkhorn_iterations": 2}),
        (BF16, MIDDLE, 72, 33, {"n_streams": 1, "residual_map": "identity"}),
        (BF16, MIDDLE, 40, 5, {"residual_map": "identity"}),
        (BF16, FIRST, 96, 1, {"n_streams": 2}),
        (BF16, FIRST, 40, 5, {"n_streams": 2}),
        (BF16, LAST, 40, 1, {}),
        (BF16, LAST, 40, 17, {"collapse": "sum", "n_streams": 2}),
        (BF16, MIDDLE, 2048, 1, {"n_streams": 1, "sinkhorn_iterations": 1}),
        (FP16, MIDDLE, 72, 1, {"n_streams": 2}),
        (FP16, MIDDLE, 40, 5, {"sinkhorn_iterations": 1}),
        (FP32, MIDDLE, 96, 3, {"n_streams": 2}),
        (FP32, MIDDLE, 8, 5, {"sinkhorn_iterations": 1}),
    ],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_dtypes_and_shapes(dtype, index, d, n_tokens, options):
    Case(index, d, n_tokens, dtype, **options).check()


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_repeats_bitwise(n_tokens):
    case = Case(n_tokens=n_tokens, dtype=BF16, n_streams=2)
    first, second = case.run("flexible"), case.run("flexible")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(1, 8, 1, 4, 1),
        Launch(4, 128, 4, 8),
        Launch(32, 16, 4, 4),
        Launch(64, 64, 8, 4, 2),
    ],
    ids=lambda v: f"{v.tokens}x{v.width}",
)
def test_launches_do_not_change_the_result(launch, monkeypatch):
    monkeypatch.setattr(ops, "_launch", lambda *a: launch)
    Case(d=72, n_tokens=5, n_streams=2, sinkhorn_iterations=1).check()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("scale", "n_streams"), [(3.0, 4), (100.0, 4), (0.3, 2)])
def test_sinkhorn(scale, n_streams):
    """Rows of H_res sum to 1; columns to what they do in the reference, which is not 1. Whatever the logits, all is finite."""
    case = Case(d=32, scale=scale, n_streams=n_streams, sinkhorn_iterations=20)
    actual, expected = case.run("flexible"), case.run("reference", torch.float64)
    assert all(t.isfinite().all() for t in actual.values())
    res = actual["res"].double()
    assert (res.sum(dim=-1) - 1).abs().max() <= 2e-6
    if scale < 10:
        assert (res - expected["res"]).square().mean().sqrt() < COEFFICIENTS
        assert (res.sum(dim=-2) - expected["res"].sum(dim=-2)).abs().max() < 2e-5
        assert (actual["post"] - expected["post"]).square().mean().sqrt() < COEFFICIENTS


def test_of_any_layout():
    """Expanded, sliced and transposed inputs."""
    case = Case(n_tokens=2, n_streams=2)
    expected = case.run("flexible")
    case.state = tuple(torch.stack([t, t + 1], dim=-1)[..., 0] for t in case.state)
    case.y = case.y.transpose(0, 2).contiguous().transpose(0, 2)
    assert not any(t.is_contiguous() for t in (*case.state, case.y))
    actual = case.run("flexible")
    assert all(torch.equal(actual[name], t) for name, t in expected.items())


def test_who_takes_a_call(calls, monkeypatch):
    """Gradients, many tokens and, unless asked for, the interpreter have the training kernels."""
    case = Case(n_streams=2)
    module = case.build("flexible")
    module(case.state, case.y, case.gain)
    assert calls == {"few": 0, "training": 1}
    with torch.inference_mode():
        module(case.state, case.y, case.gain)
        assert calls == {"few": 1, "training": 1}
        monkeypatch.setattr(ops, "MAX_TOKENS", 2)
        module(case.state, case.y, case.gain)
        assert calls == {"few": 1, "training": 2}
        monkeypatch.setattr(ops, "MAX_TOKENS", 3)
        monkeypatch.setattr(inference, "INTERPRETER", False)
        module(case.state, case.y, case.gain)
        assert calls["few"] == (2 if DEVICE.type == "cuda" else 1)


def test_both_paths_agree(monkeypatch):
    """A prompt goes through the training kernels, its continuation through these."""
    case = Case(d=24, n_tokens=5, n_streams=2)
    few = case.run("flexible")
    monkeypatch.setattr(ops, "MAX_TOKENS", 0)
    many = case.run("flexible")
    for name, t in few.items():
        torch.testing.assert_close(t, many[name], rtol=2e-5, atol=2e-5)


def test_no_tokens():
    result = Case(n_tokens=0).run("flexible")
    assert result["x"].shape == (0, 1, 64) and result["res"].shape == (0, 1, 4, 4)


def test_the_tuner(monkeypatch):
    """Its check finds an error of the kernels, and none without one; its chain is a chain of boundaries."""
    arguments = {"d": 16, "n_tokens": 2, "n": 2, "device": DEVICE.type, "dtype": FP32}
    arguments["sinkhorn_iterations"] = 2
    # What it checks does not depend on how many tokens the kernels are taken for.
    monkeypatch.setattr(ops, "MAX_TOKENS", 1)
    assert not tune.check(**arguments)["wrong"]
    for launches in map(tune.candidates, (1024, 2048), (1, 64)) if DEVICE.type == "cuda" else ():
        assert len(set(launches)) == len(launches)
    chain = tune.Chain(16, 3, 2, length=2, device=DEVICE.type)
    with torch.no_grad():
        actual = chain.run(tune.launched(Launch(1, 8, 4, 4)))
        expected = chain.run(training_ops._launch_forward)
    for t, other in zip(actual, expected, strict=True):
        assert relative_rms(t, other) < (2e-2 if DEVICE.type == "cpu" else 5e-3)
    boundary = ops.boundary

    def wrong(*given, **options):
        streams, x, post, res = boundary(*given, **options)
        return streams, x * 1.001, post, res

    monkeypatch.setattr(ops, "boundary", wrong)
    assert any("x " in line for line in tune.check(**arguments)["wrong"])


@pytest.mark.parametrize("options", [{}, {"residual_map": "identity", "collapse": "sum"}], ids=str)
def test_generation_equals_the_reference(options, calls, monkeypatch):
    """The prompt through the training kernels, and each step after it through these."""
    monkeypatch.setattr(ops, "MAX_TOKENS", 2)
    ids = tokens(2, 3).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :1] = 0
    n_new, n_boundaries = 3, 3
    generation = GenerationConfig(
        pad_token_id=0, eos_token_id=VOCAB, max_new_tokens=n_new, use_cache=True
    )
    found = {}
    for backend in ("reference", "flexible"):
        depth = HyperConnectionsConfig(
            backend=DepthBackend(backend), sinkhorn_iterations=2, **options
        )
        model = build_model(tiny_config(depth, d_model=32, n_layers=1))
        enlarge(model)
        randomize_boundaries(model)
        module = DepthGenerationModule.from_model(model.to(DEVICE).eval(), generation)
        found[backend] = module.generate_batch(
            ids, attention_mask=mask, return_logits=True, log_timing=False
        )
        if backend == "reference":
            assert calls == {"few": 0, "training": 0}
    if DEVICE.type == "cpu":
        assert calls == {"few": n_boundaries * (n_new - 1), "training": n_boundaries}
    assert calls["few"] and calls["training"]
    assert found["flexible"][0].equal(found["reference"][0])
    torch.testing.assert_close(found["flexible"][1], found["reference"][1], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("n_tokens", [1, 17])
def test_in_a_cuda_graph(n_tokens, early, monkeypatch):
    """Replays with other inputs give what eager launches do; with every kind of early launch."""
    derived = ops.launch(256, n_tokens, BF16, 0)
    case = Case(d=256, n_tokens=n_tokens, dtype=BF16, sinkhorn_iterations=20)
    expected = case.run("flexible")
    launch = Launch(derived.tokens, derived.width, 4, 4, early)
    monkeypatch.setattr(ops, "_launch", lambda *a: launch)
    module = case.build("flexible")
    module.load_state_dict(case.parameters)
    y = torch.zeros_like(case.y)
    with torch.no_grad():
        module(case.state, y, case.gain)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state, x = module(case.state, y.clone(), case.gain)
    y.copy_(case.y)
    for _ in range(3):
        graph.replay()
        assert torch.equal(x, expected["x"])
        assert all(map(torch.equal, state, list(expected.values())[:3]))

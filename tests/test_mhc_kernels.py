"""
mHC's ``flexible`` backend against the reference in FP64: outputs and every gradient of first, middle and last boundaries.
Natively on a GPU, through Triton's interpreter elsewhere.
"""

import sys
import types
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    KERNEL_TOLERANCE,
    BoundaryResult,
    assert_same_gradients,
    build_model,
    captured_outputs,
    draw_mhc_parameters,
    logits_and_gradients,
    randomize_boundaries,
    tiny_config,
    tokens,
)
from torch.utils.checkpoint import checkpoint

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.hyper_connections.backends import tile_kernels
from olmo_core.nn.hyper_connections.module import HyperConnectionsBoundary

pytest.importorskip("triton")

from olmo_core.nn.hyper_connections.backends.flexible import launch_table, ops, tune, unavailable
from olmo_core.nn.hyper_connections.backends.flexible.launch_table import (
    Backward,
    Collapse,
    Forward,
    Launches,
    Phi,
    Rows,
)

pytestmark = pytest.mark.usefixtures("poison_empty_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
SUBLAYERS = 8
FIRST, MIDDLE, LAST = 0, 3, SUBLAYERS
TOLERANCE = {
    **KERNEL_TOLERANCE,
    # The products of the FP32 streams with phi are TF32 in three terms.
    torch.float32: {"output": 1e-5, "source": 1e-5, "parameter": 2e-5},
}


class Case:
    """One boundary with random parameters, inputs and gradients of its outputs."""

    def __init__(
        self,
        index: int = MIDDLE,
        d: int = 24,
        n_tokens: int = 5,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        seed: int = 1,
        **options: Any,
    ):
        """:param scale: Standard deviation of the maps' logits, beside their bias at the start."""
        self.d, self.index, self.dtype = d, index, dtype
        # The interpreter's time goes by operations; all 20 iterations have tests of their own.
        self.config = HyperConnectionsConfig(**{"sinkhorn_iterations": 3, **options})
        n = self.config.n_streams
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.parameters = draw_mhc_parameters(self.build("reference"), normal, scale)
        self.sources = {"y": normal(1, n_tokens, d), "norm_weight": 1 + 0.3 * normal(d)}
        if index > 0:
            # Streams hold much the same, as in a model.
            self.sources["streams"] = normal(1, n_tokens, 1, d) + 0.7 * normal(1, n_tokens, n, d)
            self.sources["post"] = 2 * torch.sigmoid(normal(1, n_tokens, n))
            if self.config.residual_map == "sinkhorn":
                self.sources["res"] = torch.softmax(2 * normal(1, n_tokens, n, n), dim=-1)
        self.sources = {
            name: t.to(dtype) if name in ("y", "streams") else t for name, t in self.sources.items()
        }
        self.generator_seed = seed + 1

    def build(self, backend: str) -> HyperConnectionsBoundary:
        config = self.config.replace(backend=DepthBackend(backend))
        return config.build(
            d_model=self.d, index=self.index, n_sublayers=SUBLAYERS, eps=EPS, init_device="cpu"
        ).to(DEVICE)

    def run(
        self, backend: str, dtype: torch.dtype | None = None, layout=lambda t: t
    ) -> BoundaryResult:
        """
        :param dtype: Computes in it and in its precision, instead of the case's.
        :param layout: Applied to each input and each gradient of an output.
        """
        module = self.build(backend)
        module.load_state_dict(self.parameters)
        leaves = {n: t.to(DEVICE).detach().requires_grad_() for n, t in self.sources.items()}
        inputs = {n: layout(t) for n, t in leaves.items()}
        if dtype is not None:
            module.to(dtype)
            leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
            inputs = leaves
        before = {n: t.detach().clone() for n, t in inputs.items()}
        state = tuple(t for n, t in inputs.items() if n not in ("y", "norm_weight"))
        new_state, x = module(state, inputs["y"], inputs["norm_weight"])
        names = ["streams", "post", "res"][: len(new_state)]
        outputs = dict(zip(names, new_state, strict=True)) | {"x": x}
        generator = torch.Generator().manual_seed(self.generator_seed)
        grads = []
        for name, t in outputs.items():
            g = torch.randn(t.shape, generator=generator)
            g = g.to(self.dtype) if name in ("streams", "x") else g
            grads.append(g.to(DEVICE, t.dtype) if dtype is not None else layout(g.to(DEVICE)))
        torch.autograd.backward(list(outputs.values()), grads)
        for name, t in inputs.items():
            assert torch.equal(t.detach(), before[name]), f"{name} was changed in place"
        source = {n: t.grad for n, t in leaves.items() if n != "norm_weight"}
        parameter = {"norm_weight": leaves["norm_weight"].grad} | {
            n: p.grad for n, p in module.named_parameters()
        }
        missing = [name for name, g in (source | parameter).items() if g is None]
        assert not missing, f"no gradient of {missing}"
        return BoundaryResult({n: t.detach() for n, t in outputs.items()}, source, parameter)  # type: ignore[arg-type]

    def check(self, layout=lambda t: t, widened: float = 1.0) -> None:
        truth = self.run("reference", torch.float64).named()
        actual = self.run("flexible", layout=layout).named()
        reference = self.run("reference").named()
        bounds = TOLERANCE[self.dtype]
        # With one stream the norm undoes the last gate: its gradients are 1e-4 of their terms.
        cancelled = self.config.n_streams == 1 and self.index == LAST
        # The interpreter rounds to BF16 towards zero: twice the error of rounding to nearest.
        if self.dtype == torch.bfloat16 and DEVICE == "cpu":
            widened *= 2.0
        for name, expected in truth.items():
            kind = name.split()[0]
            t = actual[name]
            assert t.dtype == reference[name].dtype and t.shape == expected.shape, name
            scale = expected
            if cancelled and name.split()[-1] in ("phi", "alpha", "bias"):
                # Differences of terms as large as those of the norm's gain, whose rounding is all that can be asked for.
                scale = truth["parameter norm_weight"]
            elif name == "parameter alpha":
                # A gate's scale gets a sum of small terms of both signs over few tokens: measured against its bias.
                scale = truth["parameter bias"]
            error = relative_rms(t, expected, scale)
            other = relative_rms(reference[name], expected, scale)
            bound = widened * bounds[kind]
            if kind == "parameter" or self.dtype == torch.float32:
                # Cancellation, in the reference too.
                bound = max(bound, 3.0 * widened * other)
            assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}, reference {other:.2e}"
            # Rounded where the reference is, and not once more.
            if self.dtype != torch.float32 and kind != "parameter":
                assert error <= widened * 1.5 * other + 1e-5, (
                    f"{name}: {error:.2e}, reference {other:.2e}"
                )


def relative_rms(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """RMS of the difference over that of ``scale``, or of ``b``."""
    a, b = a.double().cpu(), b.double().cpu()
    rms = (b if scale is None else scale.double().cpu()).square().mean().sqrt().item()
    return (a - b).square().mean().sqrt().item() / max(rms, 1e-12)


def name_of(options: Any) -> str:
    if isinstance(options, dict):
        return ",".join(f"{k}={v}" for k, v in options.items()) or "default"
    return str(options).removeprefix("torch.")


@pytest.mark.parametrize(
    ("n_streams", "residual_map"), [(4, "sinkhorn"), (2, "sinkhorn"), (2, "identity")]
)
@pytest.mark.parametrize("index", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])
def test_every_boundary(index, n_streams, residual_map):
    Case(index, n_streams=n_streams, residual_map=residual_map).check()


@pytest.mark.parametrize("index", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])
def test_one_stream(index):
    Case(index, n_tokens=3, n_streams=1).check()


def test_sum_collapse():
    Case(LAST, n_streams=2, collapse="sum").check()


@pytest.mark.parametrize(
    ("dtype", "index", "d", "n_tokens", "options"),
    [
        (torch.bfloat16, MIDDLE, 40, 17, {"sinkhorn_iterations": 1}),
        (torch.bfloat16, MIDDLE, 16, 1, {"n_streams": 2}),
        (torch.bfloat16, MIDDLE, 40, 3, {"residual_map": "identity"}),
        (torch.bfloat16, FIRST, 24, 17, {"n_streams": 2}),
        (torch.bfloat16, LAST, 24, 3, {}),
        (torch.bfloat16, LAST, 24, 5, {"collapse": "sum"}),
        (torch.float16, MIDDLE, 24, 5, {}),
        (torch.float16, MIDDLE, 40, 5, {"n_streams": 2, "residual_map": "identity"}),
        (torch.float32, MIDDLE, 72, 17, {"n_streams": 2}),
        (torch.float32, FIRST, 24, 3, {"residual_map": "identity"}),
        (torch.float32, MIDDLE, 16, 16, {"n_streams": 2, "sinkhorn_iterations": 1}),
    ],
    ids=name_of,
)
def test_dtypes_and_shapes(dtype, index, d, n_tokens, options):
    Case(index, d, n_tokens, dtype, **options).check()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes these products in all BF16 tests")
@pytest.mark.parametrize(("index", "n_streams"), [(FIRST, 2), (MIDDLE, 4), (MIDDLE, 1), (LAST, 2)])
def test_products_of_bf16_terms(index, n_streams, monkeypatch):
    """The GPU's way for BF16, with the interpreter taught what it lacks."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def numbers(handle):
        if handle.data.dtype != np.uint16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, d, *_):
        return TensorHandle(numbers(a) @ numbers(b) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)

    def assembly(code, constraints, arguments, dtype, **_):
        (t,) = arguments
        return 1.0 / t if "rcp" in code else t.to(dtype)

    monkeypatch.setattr(ops.kernels.tl, "inline_asm_elementwise", assembly)
    monkeypatch.setattr(ops, "_has_bf16_products", lambda device: True)
    ops.forget_plans()
    try:
        case = Case(index, 40, 17, torch.bfloat16, n_streams=n_streams, sinkhorn_iterations=2)
        assert ops._plan(case.build("flexible").options_code, 40, -1, torch.bfloat16).bf16
        case.check()
    finally:
        ops.forget_plans()


def test_logits_of_a_trained_model():
    """Far from converged: the gradient must be that of 20 iterations, not of their limit."""
    # FP32's own error grows with the logits: the reference's is 4e-6 at this scale.
    Case(scale=3.0, sinkhorn_iterations=20).check(widened=2.0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("scale", [3.0, 60.0])
def test_coefficients(scale):
    """Rows of H_res sum to 1; columns to what they do in the reference, which is not 1."""
    case = Case(scale=scale, d=16, sinkhorn_iterations=20)
    actual, expected = case.run("flexible").named(), case.run("reference", torch.float64).output
    assert all(t.isfinite().all() for t in actual.values())
    res = actual["output res"].double()
    assert (res.sum(dim=-1) - 1).abs().max() <= 2e-6
    if scale < 10:
        assert (actual["output post"] - expected["post"]).square().mean().sqrt() < 1e-5
        assert (res - expected["res"]).square().mean().sqrt() < 1e-5
        assert (res.sum(dim=-2) - expected["res"].sum(dim=-2)).abs().max() < 1e-5


def test_post_is_one_without_a_map():
    case = Case(n_tokens=3)
    case.parameters["phi"].zero_()
    case.parameters["bias"][4:8] = 0.0
    assert torch.equal(case.run("flexible").output["post"], torch.ones(1, 3, 4, device=DEVICE))


@pytest.mark.parametrize(
    ("n_tokens", "launches"),
    [
        (
            17,
            Launches(
                Forward(16, 16, 1),
                Collapse(1, 1),
                Rows(1, 1),
                Backward(16, 16, 1),
                Phi(16, 16, 1, 1),
            ),
        ),
        (
            33,
            Launches(
                Forward(32, 32, 4, stages=2),
                Collapse(8, 2),
                Rows(2, 5, stages=3),
                Backward(32, 16, 2, stages=3),
                Phi(32, 16, 2, 5, stages=3),
            ),
        ),
    ],
    ids=["small", "large"],
)
def test_launches_do_not_change_the_result(n_tokens, launches, monkeypatch):
    monkeypatch.setattr(launch_table, "launches", lambda *key: launches)
    ops.forget_plans()
    try:
        Case(n_tokens=n_tokens, n_streams=2, sinkhorn_iterations=1).check()
    finally:
        ops.forget_plans()


def test_layouts_of_the_inputs():
    """Transposed, sliced, and (as the gradient of a sum) expanded tensors."""

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]

    case = Case(n_tokens=3, n_streams=2)
    assert not strided(case.sources["y"]).is_contiguous()
    case.check(layout=strided)
    module = case.build("flexible")
    state = tuple(case.sources[n].to(DEVICE) for n in ("streams", "post", "res"))
    y = case.sources["y"].to(DEVICE).requires_grad_()
    _, x = module(state, y, case.sources["norm_weight"].to(DEVICE))
    x.sum().backward()
    assert y.grad is not None and y.grad.isfinite().all()


@pytest.mark.parametrize("used", ["x", "streams", "post", "res"])
def test_gradient_of_one_output(used, monkeypatch):
    """What nobody reads has no gradient: no zeros are made for it, and none of the others may depend on it."""
    seen: list = []
    launch = ops._launch_backward

    def seeing(*arguments):
        seen.extend(arguments[10:14])
        return launch(*arguments)

    monkeypatch.setattr(ops, "_launch_backward", seeing)
    case = Case(n_streams=2)
    results: dict[str, dict[str, Any]] = {}
    for backend in ("flexible", "reference"):
        module = case.build(backend)
        module.load_state_dict(case.parameters)
        leaves = {n: t.to(DEVICE).detach().requires_grad_() for n, t in case.sources.items()}
        state = (leaves["streams"], leaves["post"], leaves["res"])
        new_state, x = module(state, leaves["y"], leaves["norm_weight"])
        output = dict(zip(("streams", "post", "res"), new_state, strict=True)) | {"x": x}
        output[used].square().sum().backward()
        results[backend] = {n: t.grad for n, t in leaves.items()} | {
            n: p.grad for n, p in module.named_parameters()
        }
    given = [g is not None for g in seen]
    assert given == [used == "streams", True, used == "post", used == "res"]
    for name, expected in results["reference"].items():
        actual = results["flexible"][name]
        if expected is None:
            assert actual is None or not actual.any(), name
        elif expected.any():
            assert relative_rms(actual, expected) < 3e-5, name
        else:
            assert not actual.any(), name


def test_repeats_bitwise():
    case = Case(n_tokens=17, dtype=torch.bfloat16, n_streams=2, sinkhorn_iterations=1)
    first, second = case.run("flexible").named(), case.run("flexible").named()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_tokens():
    result = Case(n_tokens=0, n_streams=2).run("flexible")
    assert result.output["x"].shape == (1, 0, 24) and result.output["res"].shape == (1, 0, 2, 2)
    assert all(not t.any() for t in result.parameter.values())


def test_streams_of_other_tokens_are_refused():
    """The new state is made as large as the given one: the kernels would write past its end."""
    case = Case(n_streams=2)
    y = case.sources["y"].to(DEVICE)
    state = tuple(case.sources[n][:, 1:].to(DEVICE) for n in ("streams", "post", "res"))
    y.requires_grad_()
    with pytest.raises(ValueError, match=r"streams of shape \(1, 4, 2, 24\).*\(1, 5, 24\)"):
        case.build("flexible")(state, y, case.sources["norm_weight"].to(DEVICE))


def test_transforms_are_refused():
    """The eager functions do not look for wrapped tensors: under a transform the ops run, which refuse it."""
    case = Case(FIRST, n_streams=2)
    module, gain = case.build("flexible"), case.sources["norm_weight"].to(DEVICE)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda y: module((), y, gain)[1].sum())(case.sources["y"].to(DEVICE))


def test_second_derivative_is_refused():
    case = Case(n_streams=2)
    y = case.sources["y"].to(DEVICE).requires_grad_()
    state = tuple(case.sources[n].to(DEVICE) for n in ("streams", "post", "res"))
    _, x = case.build("flexible")(state, y, case.sources["norm_weight"].to(DEVICE))
    (grad,) = torch.autograd.grad(x.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("index", "dtype"),
    [(FIRST, torch.float32), (MIDDLE, torch.bfloat16), (LAST, torch.float32)],
    ids=name_of,
)
def test_registered_ops(index, dtype):
    """Schema, fake and autograd agree, with static shapes."""
    case = Case(index, 8, 2, dtype, n_streams=2, sinkhorn_iterations=2)
    module = case.build("flexible")
    s = {n: t.to(DEVICE).requires_grad_() for n, t in case.sources.items()}
    arguments = (
        s.get("streams"), s["y"], s.get("post"), s.get("res"), module.phi, module.alpha,
        module.bias, s["norm_weight"], EPS, module.options_code,
    )  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops._forward, arguments, test_utils=tests)


@pytest.mark.parametrize("index", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])
def test_compiled_in_one_graph(index, monkeypatch):
    """Traced code takes the ops, eager code the autograd functions; their results are the same."""
    case = Case(index, d=8, n_tokens=2, n_streams=2, sinkhorn_iterations=1)
    expected = case.run("flexible").named()

    def no_function(*args):
        raise AssertionError("compiled code called the eager path")

    build = case.build

    def compiled(backend: str) -> HyperConnectionsBoundary:
        module = build(backend)
        module.compile(fullgraph=True, backend="aot_eager")
        return module

    case.build = compiled  # type: ignore[method-assign]
    monkeypatch.setattr(ops._Boundary, "apply", no_function)
    actual = case.run("flexible").named()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_activation_checkpointing():
    case = Case(n_tokens=2, n_streams=2, sinkhorn_iterations=1)
    expected = case.run("flexible").named()
    build = case.build

    def checkpointed(backend: str) -> HyperConnectionsBoundary:
        module = build(backend)
        forward = module.forward
        module.forward = lambda *a: checkpoint(forward, *a, use_reentrant=False)  # type: ignore[method-assign]
        return module

    case.build = checkpointed  # type: ignore[method-assign]
    actual = case.run("flexible").named()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def flexible_model(backend: str = "flexible", **options: Any) -> Any:
    config = HyperConnectionsConfig(
        backend=DepthBackend(backend), **{"sinkhorn_iterations": 2, **options}
    )
    model = build_model(tiny_config(config, n_layers=1)).to(DEVICE)
    randomize_boundaries(model)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"residual_map": "identity", "collapse": "sum"}],
    ids=name_of,
)
def test_model_equals_reference(options):
    ids = tokens(1, 3).to(DEVICE)
    logits, grads = logits_and_gradients(flexible_model(**options), ids)
    model = flexible_model("reference", **options)
    expected_logits, expected_grads = logits_and_gradients(model, ids)
    assert relative_rms(logits, expected_logits) < 1e-5
    assert_same_gradients(grads, expected_grads, 1e-4)


def test_autocast():
    """The streams are BF16, the maps, the boundary's parameters and their gradients FP32."""
    model = flexible_model(n_streams=2)
    ids = tokens(1, 3).to(DEVICE)
    states: list = []
    model.final_boundary.register_forward_hook(lambda m, args, out: states.extend(args[0]))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits, grads = logits_and_gradients(model, ids)
    assert [s.dtype for s in states] == [torch.bfloat16, torch.float32, torch.float32]
    exact, _ = logits_and_gradients(flexible_model("reference", n_streams=2), ids)
    assert relative_rms(logits, exact) < 0.03
    assert grads["blocks.0.attention_boundary.phi"].dtype == torch.float32


def test_recording_runs_the_reference():
    model = flexible_model(n_streams=2)
    model(tokens(1, 3).to(DEVICE))
    records = model.record(tokens(1, 3).to(DEVICE))
    assert "res" in records[1].coefficients


def test_refusals():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def reason(device, dtype=torch.float32, d=64, n=4, interpreter=True):
        return unavailable(device, dtype, d, n, interpreter=interpreter)

    assert reason(cuda) is None
    assert "n_streams" in reason(cuda, n=3)
    assert "multiple of 8" in reason(cuda, d=20) and "at most" in reason(cuda, d=16384)
    assert "float64" in reason(cuda, torch.float64)
    assert "CUDA" in reason(cpu, interpreter=False)
    with pytest.raises(OLMoConfigurationError, match=r"'flexible' cannot run.*n_streams"):
        build = HyperConnectionsConfig(n_streams=3, backend=DepthBackend.flexible).build
        build(d_model=16, index=1, n_sublayers=4, eps=EPS).select_backend(cuda, torch.float32)


def test_auto_takes_it_on_a_gpu_and_never_the_interpreter():
    boundary = HyperConnectionsConfig().build(d_model=16, index=1, n_sublayers=4, eps=EPS)
    assert boundary.select_backend(torch.device("cpu"), torch.float32) == DepthBackend.reference
    assert boundary.select_backend(torch.device("cuda"), torch.float32) == DepthBackend.flexible


def test_the_nearest_launch_row_is_taken_and_named_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(launch_table, "log_once", said.append)
    row = launch_table.launches(90, torch.bfloat16, 1024, 4)
    assert row == launch_table.TABLE[90, torch.bfloat16, 1024, 4] and not said
    wide = launch_table.launches(90, torch.bfloat16, 8192, 4)
    assert "sm_90, bfloat16, d=8192, n=4" in said[0] and "sm_90, bfloat16, d=2048" in said[0]
    assert wide.forward == row.forward and wide.collapse == Collapse(1, 16)
    fp32 = launch_table.launches(90, torch.float32, 1000, 4)
    assert "d=1024" in said[1] and fp32.forward == Forward(32, 16, 8) and fp32.backward.tokens == 16
    fp16 = launch_table.launches(90, torch.float16, 512, 2)
    assert "d=512" in said[2] and fp16.forward == Forward(64, 16, 8) and fp16.collapse.rows == 4


def test_launches_fit_other_architectures(monkeypatch):
    """Shared memory, and what Triton compiles."""
    monkeypatch.setattr(launch_table, "log_once", lambda text: None)
    row = launch_table.launches(90, torch.bfloat16, 1024, 4)
    found = {a: launch_table.launches(a, torch.bfloat16, 1024, 4) for a in (80, 89, 100, 120)}
    assert all(other.collapse == row.collapse for other in found.values())
    assert found[80].backward == replace(row.backward, width=row.backward.width // 2)
    assert found[89].backward == replace(row.backward, stages=1) and found[89].phi.stages == 1
    assert found[100] == replace(row, forward=replace(row.forward, stages=1))
    assert found[120] == found[89]


def identity_model(**options: Any) -> Any:
    config = HyperConnectionsConfig(residual_map="identity", **options)  # type: ignore[arg-type]
    model = build_model(tiny_config(config, full_precision=False, eps=1e-12), fp64=True)
    randomize_boundaries(model)
    return model


def test_identity_map_is_the_limit_of_sinkhorn():
    """Against the other map with logits so large on the diagonal that it is the identity: same outputs and gradients."""
    model = identity_model()
    config = HyperConnectionsConfig()
    other = build_model(tiny_config(config, full_precision=False, eps=1e-12), fp64=True)
    state = dict(model.state_dict())
    n = config.n_streams
    for name, t in list(state.items()):
        if "boundary.phi" in name and "final" not in name:
            state[name] = torch.cat([t, t.new_zeros(t.shape[0], n * n)], dim=-1)
        elif "boundary.alpha" in name and "final" not in name:
            state[name] = torch.cat([t, t.new_ones(1)])
        elif "boundary.bias" in name and "final" not in name:
            state[name] = torch.cat([t, (200 * torch.eye(n, dtype=t.dtype)).flatten()])
    other.load_state_dict(state)
    ids = tokens(1, 5)
    logits, grads = logits_and_gradients(model, ids)
    expected, expected_grads = logits_and_gradients(other, ids)
    assert relative_rms(logits, expected) < 1e-12
    for name, g in grads.items():
        e = expected_grads[name]
        if g.shape != e.shape:
            e = e[..., : g.shape[-1]]
        assert relative_rms(g, e) < 1e-9 or not g.any(), name


def test_identity_map_counts():
    """Fewer columns of phi, no mixing of streams, and two tensors of state."""
    n, d, count = 4, 16, {"d_model": 16, "index": 3, "n_sublayers": 6}
    identity = HyperConnectionsConfig(residual_map="identity")  # type: ignore[arg-type]
    full = HyperConnectionsConfig()
    assert identity.num_params(**count) == n * d * 2 * n + 2 * n + 2
    fewer = full.num_params(**count) - identity.num_params(**count)
    assert fewer == n * d * n * n + n * n + 1
    flops = full.num_flops_per_token(**count) - identity.num_flops_per_token(**count)
    assert flops == 6 * fewer + 3 * 2 * n * n * d
    with pytest.raises(OLMoConfigurationError, match="residual_map must be one of"):
        HyperConnectionsConfig(residual_map="none")  # type: ignore[arg-type]
    records = identity_model().record(tokens(1, 3))
    assert set(records[1].coefficients) == {"pre", "post"}
    assert set(identity.statistics(records[1])) == {"hidden rms", "pre gate", "post gate"}


def test_identity_map_unrolls():
    """``h_l = sum_i M[l, i] y_i`` with ``M[l, i] = <H_pre,l, H_post,i>``."""
    model = identity_model()
    with captured_outputs(model) as outputs:
        records = model.record(tokens(1, 3))
    config = HyperConnectionsConfig(residual_map="identity")  # type: ignore[arg-type]
    unrolled = config.retrieval_map(records)
    h = torch.einsum("btli,ibtd->lbtd", unrolled, torch.stack(outputs))
    assert relative_rms(h, torch.stack([r.h for r in records])) < 1e-12


def test_tile_kernels_is_never_taken_unasked_and_says_what_it_lacks(monkeypatch):
    config = HyperConnectionsConfig(backend=DepthBackend.tile_kernels)
    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16

    def reason(device=cuda, dtype=bf16, config=config, d=1024, by_name=True):
        return tile_kernels.unavailable(device, dtype, config, d, by_name=by_name)

    assert "by name" in reason(by_name=False)
    assert "n_streams" in reason(config=config.replace(n_streams=2))
    assert "256" in reason(d=1032)
    assert "BF16" in reason(dtype=torch.float32)
    assert "CUDA device" in reason(device=cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "9.0" in reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if find_spec("tile_kernels") is None:
        assert "tile-kernels==1.0.0" in reason()
    monkeypatch.setattr(tile_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(tile_kernels, "_has_nvcc", lambda: False)
    assert "nvcc" in reason()
    boundary = config.build(d_model=256, index=1, n_sublayers=4, eps=EPS)
    with pytest.raises(OLMoConfigurationError, match=r"'tile_kernels' cannot run.*CUDA device"):
        boundary.select_backend(cpu, bf16)


def test_tile_kernels_conventions(monkeypatch):
    """The boundary around the package, with its operations replaced by their documented meaning in PyTorch."""
    ops_module = types.ModuleType("tile_kernels.modeling.mhc.ops")

    def post(x, residual, post_mix, comb):
        return torch.einsum("btjk,btjd->btkd", comb, residual) + post_mix * x[..., None, :]

    def post_backward(x, residual, post_mix, comb, d_o, fuse_grad_acc=True):
        assert not fuse_grad_acc
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (x, residual, post_mix, comb)]
            return torch.autograd.grad(post(*leaves), leaves, d_o)

    def norm_fn(residual, fn, weight, eps, fuse_grad_acc=True):
        assert weight is None and not fuse_grad_acc and fn.shape[0] == 24
        flat = residual.flatten(-2)
        return (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)) @ fn.t()

    def split_mixes(mixes, scale, base, n, post_mult, pre_eps):
        z = torch.cat([scale[i] * t for i, t in enumerate(mixes.split((n, n, n * n), -1))], -1)
        pre, post, comb = (z + base).split((n, n, n * n), -1)
        comb = comb.unflatten(-1, (n, n))
        return (pre.sigmoid() + pre_eps)[..., None], (post_mult * post.sigmoid())[..., None], comb

    def normalize(comb, repeat, eps):
        comb = comb.softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(repeat - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb

    contents = {
        "mhc_post_fwd": post,
        "mhc_post_bwd": post_backward,
        "mhc_pre_norm_fn": norm_fn,
        "mhc_pre_split_mixes": split_mixes,
        "sinkhorn_normalize": normalize,
        "mhc_pre_apply_mix": lambda x, mix: (mix * x).sum(-2),
    }
    for name, function in contents.items():
        setattr(ops_module, name, function)
    package = types.ModuleType("tile_kernels.modeling.mhc")
    package.ops = ops_module  # type: ignore[attr-defined]
    for name, module in (
        ("tile_kernels", types.ModuleType("tile_kernels")),
        ("tile_kernels.modeling", types.ModuleType("tile_kernels.modeling")),
        ("tile_kernels.modeling.mhc", package),
        ("tile_kernels.modeling.mhc.ops", ops_module),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(tile_kernels, "unavailable", lambda *a, **k: None)
    for index, collapse in ((FIRST, "head"), (MIDDLE, "head"), (LAST, "head"), (LAST, "sum")):
        case = Case(index, 24, 5, sinkhorn_iterations=20, collapse=collapse)
        actual, expected = case.run("tile_kernels").named(), case.run("reference").named()
        for name, t in expected.items():
            assert relative_rms(actual[name], t) < 1e-5, (index, name)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize(("name", "arguments"), tune.CHECKS, ids=[name for name, _ in tune.CHECKS])
def test_real_widths(name, arguments):
    assert not tune.check(**arguments)["wrong"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_addresses_beyond_2_to_the_31():
    """Tokens do not mix, so the last ones must come out as if they were alone."""
    d, n, n_tokens, last = 2048, 4, 270_000, 64
    assert n_tokens * d * n > 2**31
    module = tune.boundary(d, n, "flexible")
    inputs, grads = tune.draw(module, n_tokens, torch.bfloat16)

    def end(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: t if name == "norm_weight" else t[:, -last:].contiguous()
            for name, t in tensors.items()
        }

    full = tune.run(module, inputs, grads)
    alone = tune.run(module, end(inputs), end(grads))
    for kind in ("output", "source"):
        for name, t in alone[kind].items():
            assert torch.equal(full[kind][name][:, -last:], t), (kind, name)

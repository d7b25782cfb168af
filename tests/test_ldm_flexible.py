"""
LDM's ``flexible`` backend against the reference in FP64: outputs and every gradient, for every option. Natively on a
GPU, through Triton's interpreter elsewhere.
"""

from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import (
    KERNEL_TOLERANCE,
    LDM_VALUES,
    BoundaryResult,
    assert_same_gradients,
    build_model,
    logits_and_gradients,
    randomize_boundaries,
    tiny_config,
    tokens,
)
from torch.utils.checkpoint import checkpoint

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.ldm.module import LDMBoundary

pytest.importorskip("triton")

from olmo_core.nn.depth import triton_launcher
from olmo_core.nn.ldm.backends.flexible import launch_table, ops, tune, unavailable
from olmo_core.nn.ldm.backends.flexible.launch_table import Launch

pytestmark = pytest.mark.usefixtures("poison_empty_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


class Case:
    """One boundary with random parameters, inputs and gradients of its outputs."""

    def __init__(
        self,
        d: int = 24,
        n_tokens: int = 5,
        dtype: torch.dtype = torch.float32,
        index: int = 1,
        seed: int = 1,
        **options: Any,
    ):
        self.d, self.index, self.dtype = d, index, dtype
        # Keys in the middle of their range, where their gradients are largest; rows of their own have the default's start.
        self.config = LDMConfig(**{"key_start": "uniform", **options})
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        module = self.build("reference")
        self.parameters = {}
        for name, p in module.named_parameters():
            start = torch.zeros_like(p, device="cpu") if name == "b_forget" else p.detach().cpu()
            noise = normal(*p.shape)
            self.parameters[name] = start + noise * (d**-0.5 if name.startswith("w_") else 0.5)
        self.sources = {"y": normal(1, n_tokens, d), "norm_weight": 1 + 0.3 * normal(d)}
        if index > 0:
            K = self.config.d_k
            # Slots hold much the same, as in a model.
            memory = normal(1, n_tokens, 1, d) + 0.5 * normal(1, n_tokens, K, d)
            self.sources["memory"] = memory
            if self.config.key_source == "input":
                self.sources["key_input"] = normal(1, n_tokens, d)
            if self.config.residual == "kept":
                self.sources["residual"] = normal(1, n_tokens, d)
            if module.has_pending:
                self.sources["pending"] = normal(1, n_tokens, d)
        self.sources = {
            name: t if name == "norm_weight" else t.to(dtype) for name, t in self.sources.items()
        }
        self.generator_seed = seed + 1

    def build(self, backend: str) -> LDMBoundary:
        config = self.config.replace(backend=DepthBackend(backend))
        return config.build(
            d_model=self.d, index=self.index, n_sublayers=8, eps=EPS, init_device="cpu"
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
        y, gain = inputs["y"], inputs["norm_weight"]
        state = tuple(t for n, t in inputs.items() if n not in ("y", "norm_weight"))
        new_state, x = module(state, y, gain)
        generator = torch.Generator().manual_seed(self.generator_seed)
        outputs = {f"state {i}": t for i, t in enumerate(new_state)} | {"x": x}
        grads = [torch.randn(t.shape, generator=generator).to(self.dtype) for t in outputs.values()]
        grads = [g.to(DEVICE, t.dtype) for g, t in zip(grads, outputs.values(), strict=True)]
        if dtype is None:
            grads = [layout(g) for g in grads]
        # A state that is passed on may not need a gradient path of its own, but every one here does.
        torch.autograd.backward(list(outputs.values()), grads)
        for name, t in inputs.items():
            assert torch.equal(t.detach(), before[name]), f"{name} was changed in place"
        source = {n: t.grad for n, t in leaves.items() if n != "norm_weight"}
        parameter = {"norm_weight": leaves["norm_weight"].grad} | {
            n: p.grad for n, p in module.named_parameters()
        }
        return BoundaryResult(
            {n: t.detach() for n, t in outputs.items()},
            {n: torch.zeros(()) if g is None else g for n, g in source.items()},
            {n: torch.zeros(()) if g is None else g for n, g in parameter.items()},
        )

    def check(self, layout=lambda t: t) -> None:
        truth = self.run("reference", torch.float64)
        actual = self.run("flexible", layout=layout)
        reference = self.run("reference").named()
        bounds = KERNEL_TOLERANCE[self.dtype]
        # The interpreter rounds to BF16 towards zero: twice the error of rounding to nearest.
        widened = 2.0 if self.dtype == torch.bfloat16 and DEVICE == "cpu" else 1.0
        for name, expected in truth.named().items():
            kind = name.split()[0]
            t = actual.named()[name]
            assert t.dtype == reference[name].dtype and t.shape == expected.shape, name
            error = relative_rms(t, expected)
            bound = widened * bounds[kind]
            assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
            # One rounding at the end, as the reference; sums over few tokens in another order may differ by more.
            if self.dtype != torch.float32 and kind != "parameter":
                other = relative_rms(reference[name], expected)
                assert error <= widened * 1.5 * other + 1e-6, (
                    f"{name}: {error:.2e}, reference {other:.2e}"
                )


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    rms = b.square().mean().sqrt().item()
    return (a - b).square().mean().sqrt().item() / max(rms, 1e-12)


ROWS: list[dict[str, Any]] = [
    {},
    *({option: value} for option, values in LDM_VALUES.items() for value in values[1:]),
    *({"key_start": "embedding_block", "key_activation": k} for k in ("two_sigmoid", "softmax")),
    {"key_activation": "softmax", "query_source": "output", "update": "delta"},
    {"forget": "static", "forget_granularity": "scalar"},
    {"forget": "none", "update": "delta", "key_source": "static"},
    {"query_activation": "none", "key_activation": "none", "query_source": "static"},
    {"key_source": "static", "query_source": "static", "forget": "static"},
    {"key_source": "input", "residual": "kept", "update": "delta", "forget_granularity": "scalar"},
    {"query_activation": "sigmoid", "query_source": "output", "key_source": "input"},
    {"update": "delta", "residual": "kept", "query_source": "static"},
]
"""One row for each value of each option, then the pairs whose code paths meet in the kernels."""

BLOCK_ROWS: list[dict[str, Any]] = [
    {},
    {"residual": "kept"},
    {"query_source": "output", "key_source": "input"},
    {"residual": "kept", "query_source": "static", "update": "delta", "key_source": "input"},
]


def name_of(options: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) or "default"


@pytest.mark.parametrize("options", ROWS, ids=name_of)
def test_every_option(options):
    Case(**{"d_k": 4, **options}).check()


@pytest.mark.parametrize("index", [1, 2], ids=["read", "end of block"])
@pytest.mark.parametrize("options", BLOCK_ROWS, ids=name_of)
def test_block_write(options, index):
    Case(d_k=2, index=index, write_every="block", **options).check()


@pytest.mark.parametrize("residual", ["none", "kept"])
def test_first_boundary(residual):
    Case(index=0, d_k=4, residual=residual, n_tokens=37).check()


@pytest.mark.parametrize(
    ("dtype", "d_k", "d", "n_tokens", "options"),
    [
        (torch.bfloat16, 8, 96, 17, {}),
        (torch.bfloat16, 8, 96, 17, {"key_start": "embedding_block"}),
        (torch.bfloat16, 16, 8, 1, {}),
        (torch.bfloat16, 4, 136, 3, {"key_source": "input", "residual": "kept", "update": "delta"}),
        (torch.float16, 2, 24, 5, {"key_activation": "softmax"}),
        (torch.float16, 8, 96, 5, {"query_source": "output"}),
        (torch.float32, 1, 136, 3, {}),
        (torch.float32, 16, 40, 17, {}),
    ],
    ids=str,
)
def test_dtypes_and_shapes(dtype, d_k, d, n_tokens, options):
    Case(d, n_tokens, dtype, d_k=d_k, **options).check()


def test_first_boundary_bf16():
    Case(96, 17, torch.bfloat16, index=0, d_k=8).check()


@pytest.mark.parametrize(
    "launch",
    [Launch(1, 1), Launch(2, 2, reload=True, programs_per_sm=3), Launch(4, 1, stages=2)],
    ids=str,
)
def test_launches_do_not_change_the_result(launch, monkeypatch):
    if DEVICE == "cuda":
        monkeypatch.setitem(launch_table.FORWARD, (32, 4), launch)
        monkeypatch.setitem(launch_table.BACKWARD, (32, 4), launch)
    else:
        monkeypatch.setattr(launch_table, "INTERPRETER", launch)
    ops.forget_plans()
    try:
        Case(d_k=4, n_tokens=5).check()
    finally:
        ops.forget_plans()


def test_layouts_of_the_inputs():
    """Transposed, sliced, and (as the gradient of a sum) expanded tensors."""

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]

    case = Case(d_k=4, key_source="input", residual="kept")
    assert not strided(case.sources["y"]).is_contiguous()
    case.check(layout=strided)
    module = case.build("flexible")
    carried = tuple(case.sources[n].to(DEVICE) for n in ("memory", "key_input", "residual"))
    y = case.sources["y"].to(DEVICE).requires_grad_()
    _, x = module(carried, y, case.sources["norm_weight"].to(DEVICE))
    x.sum().backward()
    assert y.grad is not None and y.grad.isfinite().all()


def test_repeats_bitwise():
    case = Case(24, 9, torch.bfloat16, d_k=2)
    first, second = case.run("flexible").named(), case.run("flexible").named()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_no_tokens():
    case = Case(n_tokens=0, d_k=2)
    result = case.run("flexible")
    assert result.output["x"].shape == (1, 0, 24)
    assert all(not t.any() for t in result.parameter.values())


def test_memory_that_nobody_reads_gets_no_gradient_of_zeros(monkeypatch):
    """The last boundary's memory is not used: its gradient must be absent, not K d zeros for each token."""
    seen = []
    launch = ops._launch_backward
    monkeypatch.setattr(ops, "_launch_backward", lambda *a: seen.append(a[5]) or launch(*a))
    case = Case(d_k=2)
    results = {}
    for backend in ("flexible", "reference"):
        module = case.build(backend)
        module.load_state_dict(case.parameters)
        memory, y = (case.sources[n].to(DEVICE).requires_grad_() for n in ("memory", "y"))
        memory.grad = y.grad = None
        _, x = module((memory,), y, case.sources["norm_weight"].to(DEVICE))
        x.square().sum().backward()
        results[backend] = (memory.grad, y.grad)
    assert seen == [None]
    for a, b in zip(results["flexible"], results["reference"], strict=True):
        assert relative_rms(a, b) < 1e-5


def test_second_derivative_is_refused():
    case = Case(d_k=2)
    y = case.sources["y"].to(DEVICE).requires_grad_()
    _, x = case.build("flexible")(
        (case.sources["memory"].to(DEVICE),), y, case.sources["norm_weight"].to(DEVICE)
    )
    (grad,) = torch.autograd.grad(x.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_registered_ops():
    """Schema, fake and autograd agree, with static shapes."""
    case = Case(8, 2, d_k=2, residual="kept", key_source="input")
    module = case.build("flexible")
    s = {n: t.to(DEVICE).requires_grad_() for n, t in case.sources.items()}
    arguments = (
        s["memory"], s["y"], s["key_input"], s["residual"], None, *module.ldm_parameters,
        s["norm_weight"], EPS, module.options_code,
    )  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops._forward, arguments, test_utils=tests)
    torch.library.opcheck(
        ops._first_forward,
        (s["y"], torch.ones(2, device=DEVICE, requires_grad=True), s["norm_weight"], EPS),
        test_utils=tests,
    )


def flexible_model(**options: Any) -> nn.Module:
    config = LDMConfig(**{"d_k": 2, "backend": "flexible", **options})
    model = build_model(tiny_config(config, n_layers=2)).to(DEVICE)
    randomize_boundaries(model)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"write_every": "block", "residual": "kept", "key_source": "input"}],
    ids=name_of,
)
def test_model_equals_reference(options):
    ids = tokens(1, 3).to(DEVICE)
    logits, grads = logits_and_gradients(flexible_model(**options), ids)
    model = flexible_model(**options, backend="reference")
    expected_logits, expected_grads = logits_and_gradients(model, ids)
    assert relative_rms(logits, expected_logits) < 1e-5
    # The slots are still alike here: a query's gradient is the difference of products that nearly cancel.
    assert_same_gradients(grads, expected_grads, 1e-3)


@pytest.mark.parametrize("index", [0, 2], ids=["first", "end of block"])
def test_compiled_in_one_graph(index, monkeypatch):
    """Traced code takes the ops, eager code the autograd functions; their results are the same."""
    case = Case(d_k=2, index=index, write_every="block", residual="kept", key_source="input")
    expected = case.run("flexible").named()

    def no_function(*args):
        raise AssertionError("compiled code called the eager path")

    build = case.build

    def compiled(backend: str) -> LDMBoundary:
        module = build(backend)
        module.compile(fullgraph=True, backend="aot_eager")
        return module

    case.build = compiled  # type: ignore[method-assign]
    monkeypatch.setattr(ops._Boundary, "apply", no_function)
    monkeypatch.setattr(ops._FirstBoundary, "apply", no_function)
    actual = case.run("flexible").named()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_activation_checkpointing():
    case = Case(d_k=2, index=2, write_every="block", residual="kept", key_source="input")
    expected = case.run("flexible").named()
    build = case.build

    def checkpointed(backend: str) -> LDMBoundary:
        module = build(backend)
        forward = module.forward
        module.forward = lambda *a: checkpoint(forward, *a, use_reentrant=False)  # type: ignore[method-assign]
        return module

    case.build = checkpointed  # type: ignore[method-assign]
    actual = case.run("flexible").named()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_autocast():
    """The state is BF16, the boundary's parameters and their gradients FP32."""
    model = flexible_model()
    ids = tokens(1, 3).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits, grads = logits_and_gradients(model, ids)
    exact, exact_grads = logits_and_gradients(flexible_model(backend="reference"), ids)
    assert relative_rms(logits, exact) < 0.03
    name = "blocks.1.attention_boundary.w_key"
    assert grads[name].dtype == torch.float32
    assert relative_rms(grads[name], exact_grads[name]) < 0.1


def test_launcher_remembers_the_compiled_kernel(monkeypatch):
    """A known key skips Triton's own lookup; another dtype, a missing tensor or an odd address does not."""
    ran = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def run(self, *args):
            ran.append(args)

    class Kernel:
        def fn(given, maybe, own, n, D): ...

        def __getitem__(self, grid):
            return lambda *args, **options: asked.append((grid, args, options)) or Compiled()

    class Driver:
        get_current_stream = staticmethod(lambda device: 7)

    asked: list = []
    monkeypatch.setattr(triton_launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton_launcher, "_KNOWN", True)
    monkeypatch.setattr(triton_launcher.triton.runtime.driver, "_active", Driver, raising=False)
    launch = triton_launcher.Launcher(Kernel(), {"D": 64, "K": 2}, num_warps=1)
    a, own = torch.zeros(4, 8), torch.zeros(8)
    launch((3, 1, 1), (a, None), (own,), 5)
    assert asked == [((3, 1, 1), (a, None, own, 5, 64), {"num_warps": 1})] and not ran
    launch((4, 1, 1), (a, None), (own,), 6)
    pointers = (a.data_ptr(), None, own.data_ptr())
    assert ran == [(4, 1, 1, 7, "function", "metadata", None, None, None, *pointers, 6, 64)]
    for given in ((a.double(), None), (a, a), (a.view(-1)[1:], None)):
        before = len(asked)
        launch((3, 1, 1), given, (own,), 5)
        assert len(asked) == before + 1 and len(ran) == 1
    transposed = a.t()
    launch((3, 1, 1), (transposed, None), (own,), 5)
    assert ran[1][9] != transposed.data_ptr() and ran[1][9] % 16 == 0


def test_refusals():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fp32 = torch.float32

    def reason(device, dtype=fp32, d=64, d_k=8, interpreter=True):
        return unavailable(device, dtype, d, d_k, interpreter=interpreter)

    assert reason(cuda) is None
    assert "d_k" in reason(cuda, d_k=3)
    assert "multiple of 8" in reason(cuda, d=20)
    assert "float64" in reason(cuda, torch.float64)
    assert "CUDA" in reason(cpu, interpreter=False)
    with pytest.raises(OLMoConfigurationError, match=r"'flexible' cannot run.*d_k"):
        build = LDMConfig(d_k=3, backend="flexible").build  # type: ignore[arg-type]
        build(d_model=16, index=1, n_sublayers=4, eps=EPS).select_backend(cuda, fp32)


def test_auto_takes_it_on_a_gpu_and_never_the_interpreter():
    boundary = LDMConfig(d_k=2).build(d_model=16, index=1, n_sublayers=4, eps=EPS)
    assert boundary.select_backend(torch.device("cpu"), torch.float32) == DepthBackend.reference
    assert boundary.select_backend(torch.device("cuda"), torch.float32) == DepthBackend.flexible


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize(("d", "d_k"), [(1024, 8), (2048, 4), (1536, 16), (4096, 2)])
def test_real_widths(d, d_k):
    assert not tune.check(d, d_k, 1061)["wrong"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_addresses_beyond_2_to_the_31():
    """Tokens do not mix, so the last ones must come out as if they were alone."""
    d, d_k, n_tokens, last = 2048, 8, 140_000, 64
    assert n_tokens * d * d_k > 2**31
    module = tune.boundary(d, d_k, "flexible")
    memory, y, gain, d_memory, d_x = tune.draw(d, d_k, n_tokens, torch.bfloat16)
    full = tune.run(module, [memory, y, gain, d_memory, d_x])
    end = [t[:, -last:].contiguous() for t in (memory, y, d_memory, d_x)]
    alone = tune.run(module, [end[0], end[1], gain, end[2], end[3]])
    for kind in ("output", "source"):
        for name, t in alone[kind].items():
            assert torch.equal(full[kind][name][:, -last:], t), (kind, name)

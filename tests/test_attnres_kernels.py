"""
AttnRes's ``flexible`` backend against the reference in FP64: outputs and every gradient, full and block form. Natively on
a GPU, through Triton's interpreter elsewhere.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import (
    KERNEL_TOLERANCE,
    assert_same_gradients,
    build_model,
    logits_and_gradients,
    next_token_loss,
    randomize_boundaries,
    tiny_config,
    tokens,
)

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attnres import AttnResBoundary, AttnResConfig
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode

pytest.importorskip("triton")

from olmo_core.nn.attnres.backends import flexible
from olmo_core.nn.attnres.backends.flexible import MAX_SOURCES, launch_table, ops, unavailable
from olmo_core.nn.attnres.backends.flexible.launch_table import Launch, Row

pytestmark = pytest.mark.usefixtures("poison_empty_memory")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6

Results = dict[str, torch.Tensor]


@pytest.fixture
def launch_row(monkeypatch) -> Iterator[Callable[[Row], None]]:
    """Replace the launch numbers of every shape."""

    def use(row: Row) -> None:
        monkeypatch.setattr(ops, "find_row", lambda *a: row)
        ops._plan.cache_clear()

    try:
        yield use
    finally:
        monkeypatch.undo()
        ops._plan.cache_clear()


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    rms = b.square().mean().sqrt().item()
    return (a - b).square().mean().sqrt().item() / max(rms, 1e-12)


class Case:
    """
    One boundary with random parameters, inputs and gradients of its outputs.

    :param index: The boundary's number; with ``block_size`` 1 it mixes ``index + 1`` sources.
    """

    def __init__(
        self,
        index: int = 3,
        block_size: int = 1,
        d: int = 24,
        n_tokens: int = 5,
        dtype: torch.dtype = torch.float32,
        n_sublayers: int | None = None,
        query_scale: float = 1.0,
    ):
        self.d, self.index, self.dtype = d, index, dtype
        self.n_sublayers = index + 1 if n_sublayers is None else n_sublayers
        self.block_size = block_size
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        module = self.build("reference")
        self.parameters = {
            "query": query_scale * d**-0.5 * normal(d),
            "gain": 1 + 0.3 * normal(d),
        }
        if index == 0:
            self.parameters = {}
        n_state = index if block_size == 1 else len(module_state(block_size, index))
        # Sources of different sizes, as in a model.
        self.state = [
            (normal(1, n_tokens, d) * 2.0 ** (i % 3 - 1)).to(dtype) for i in range(n_state)
        ]
        self.y = normal(1, n_tokens, d).to(dtype)
        self.norm_weight = 1 + 0.3 * normal(d)
        n_out = len(module.sources(tuple(self.state), self.y))
        self.d_state = [normal(1, n_tokens, d).to(dtype) for _ in range(n_out)]
        self.d_x = normal(1, n_tokens, d).to(dtype)

    def build(self, backend: str) -> AttnResBoundary:
        config = AttnResConfig(backend=DepthBackend(backend), block_size=self.block_size)
        return config.build(
            d_model=self.d, index=self.index, n_sublayers=self.n_sublayers, eps=EPS
        ).to(DEVICE)

    def run(
        self,
        backend: str,
        dtype: torch.dtype | None = None,
        layout: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
        call: Callable[..., Any] = lambda module, *args: module(*args),
    ) -> Results:
        """
        :param dtype: Computes in it and in its precision, instead of the case's.
        :param layout: Applied to each input and each gradient of an output.
        :param call: Calls the module.
        """
        module = self.build(backend)
        module.load_state_dict(self.parameters)

        def cast(t: torch.Tensor) -> torch.Tensor:
            return t.to(DEVICE, dtype or t.dtype)

        if dtype is not None:
            module.to(dtype)
        leaves = [
            cast(t).detach().requires_grad_() for t in (*self.state, self.y, self.norm_weight)
        ]
        *state, y, norm_weight = [layout(t) for t in leaves]
        before = [t.detach().clone() for t in (*state, y)]
        new_state, x = call(module, tuple(state), y, norm_weight)
        d_state = [layout(cast(t)) for t in self.d_state]
        outputs, grads = [x], [layout(cast(self.d_x))]
        channels, new_state = new_state[: -len(d_state)], new_state[-len(d_state) :]
        if channels:
            rows, committed = channels[0], d_state
            outputs.append(rows)
            if self.index % self.block_size:
                # The last source is a partial sum.
                committed = d_state[:-1]
                outputs.append(channels[1])
            # Rows of sources that are not there yet belong to later boundaries.
            more = rows.shape[-2] - len(committed)
            committed = committed + [torch.full_like(self.d_x, float("nan")).to(x)] * more
            grads.append(torch.stack(committed, dim=-2))
            grads += d_state[-1:] if self.index % self.block_size else []
        elif not module.is_last:
            outputs += new_state
            grads += d_state
        torch.autograd.backward(outputs, grads)
        for t, expected in zip((*state, y), before, strict=True):
            assert torch.equal(t.detach(), expected), "an input was changed in place"
        results = {"output x": x} | {f"output state {i}": t for i, t in enumerate(new_state)}
        results |= {
            f"source {name}": t.grad
            for name, t in zip([*range(len(state)), "y"], leaves, strict=False)
        }
        results["parameter norm_weight"] = leaves[-1].grad
        results |= {f"parameter {n}": p.grad for n, p in module.named_parameters()}
        return {n: t.detach() for n, t in results.items()}

    def check(self, slack: float = 1.0, **options: Any) -> None:
        truth = self.run("reference", torch.float64)
        reference = self.run("reference")
        actual = self.run("flexible", **options)
        assert actual.keys() == truth.keys()
        # The interpreter rounds to BF16 towards zero: twice the error of rounding to nearest.
        widened = slack * (2.0 if self.dtype == torch.bfloat16 and DEVICE == "cpu" else 1.0)
        for name, expected in truth.items():
            kind = name.split()[0]
            t = actual[name]
            assert t.dtype == reference[name].dtype and t.shape == expected.shape, name
            error = relative_rms(t, expected)
            bound = widened * KERNEL_TOLERANCE[self.dtype][kind]
            assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"
            # One rounding at the end, as the reference; sums over few tokens in another order may differ by more.
            if self.dtype != torch.float32 and kind != "parameter":
                other = relative_rms(reference[name], expected)
                assert error <= widened * 1.5 * other + 1e-6, (
                    f"{name}: {error:.2e}, reference {other:.2e}"
                )


class Chain(Case):
    """
    All boundaries of a model. Each ``y`` is a leaf, so that its gradient is what its readers gave it, and nothing else.
    """

    def __init__(
        self,
        block_size: int = 1,
        n_sublayers: int = 6,
        d: int = 24,
        n_tokens: int = 4,
        dtype: torch.dtype = torch.float32,
    ):
        self.block_size, self.n_sublayers, self.d, self.dtype = block_size, n_sublayers, d, dtype
        generator = torch.Generator().manual_seed(1)
        n = n_sublayers + 1

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.y = [(normal(1, n_tokens, d) * 2.0 ** (i % 3 - 1)).to(dtype) for i in range(n)]
        self.d_x = [normal(1, n_tokens, d).to(dtype) for _ in range(n)]
        self.norm_weights = [1 + 0.3 * normal(d) for _ in range(n)]
        self.parameters = [(d**-0.5 * normal(d), 1 + 0.3 * normal(d)) for _ in range(n)]

    def run(self, backend: str, dtype: torch.dtype | None = None, skipped: int = -1) -> Results:  # type: ignore[override]
        """:param skipped: A boundary whose ``x`` nobody uses."""
        config = AttnResConfig(backend=DepthBackend(backend), block_size=self.block_size)
        results: Results = {}
        leaves, outputs, grads = {}, [], []
        state: tuple[torch.Tensor, ...] = ()
        for i, y in enumerate(self.y):
            module = config.build(d_model=self.d, index=i, n_sublayers=self.n_sublayers, eps=EPS)
            if i:
                query, gain = self.parameters[i]
                module.load_state_dict({"query": query, "gain": gain})
                leaves |= {f"parameter {n} {i}": p for n, p in module.named_parameters()}
            module.to(DEVICE, dtype)
            y, norm_weight = (
                t.to(DEVICE, dtype or t.dtype).detach().requires_grad_()
                for t in (y, self.norm_weights[i])
            )
            leaves |= {f"source y {i}": y, f"parameter norm_weight {i}": norm_weight}
            state, x = module(state, y, norm_weight)
            results[f"output x {i}"] = x.detach()
            if i != skipped:
                outputs.append(x)
                grads.append(self.d_x[i].to(x))
        torch.autograd.backward(outputs, grads)
        return results | {n: t.grad for n, t in leaves.items() if t.grad is not None}


def module_state(block_size: int, index: int) -> tuple[int, ...]:
    """The state before boundary ``index``, as the numbers of its tensors."""
    return tuple(range(AttnResConfig(block_size=block_size).num_sources(index - 1)))


def equal(a: Results, b: Results) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("index", [1, 2, 4, 8])
def test_full(index):
    Case(index).check()


@pytest.mark.parametrize("index", [1, 2, 3, 4])
def test_block(index):
    """Boundaries that open a block, are inside it, and close it."""
    Case(index, block_size=3).check()


def test_first_boundary():
    Case(index=0, n_tokens=37).check()


@pytest.mark.parametrize("block_size", [1, 2])
def test_last_boundary(block_size):
    """Nobody reads its state: its backward starts from nothing."""
    case = Case(index=4, block_size=block_size, n_sublayers=4)
    assert case.build("flexible").is_last
    case.check()


@pytest.mark.parametrize(
    ("dtype", "index", "block_size", "d", "n_tokens"),
    [
        (torch.bfloat16, 8, 1, 72, 17),
        (torch.bfloat16, 5, 4, 40, 9),
        (torch.bfloat16, 1, 1, 8, 17),
        (torch.float16, 6, 1, 136, 3),
        (torch.float16, 7, 3, 24, 5),
        (torch.float32, 8, 1, 8, 3),
        (torch.float32, 13, 4, 136, 3),
        (torch.bfloat16, 0, 1, 96, 17),
    ],
    ids=str,
)
def test_dtypes_and_shapes(dtype, index, block_size, d, n_tokens):
    Case(index, block_size, d, n_tokens, dtype).check()


def test_many_sources():
    """More than are arguments: their addresses come from a table. Not a multiple of those read together."""
    assert 37 > launch_table.MOST_ARGUMENTS
    Case(index=37, d=8, n_tokens=2).check()


def test_many_sources_of_any_layout():
    """The table's distances are multiples of 16 bytes, also of tensors that do not start at one."""

    def odd(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_full((1,), float("nan")), t.flatten()])[1:].view(t.shape)

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]

    case = Case(index=17, block_size=1, d=8, n_tokens=2)
    assert odd(case.y).data_ptr() % 16
    case.check(layout=odd)
    case.check(layout=strided)


def test_large_logits():
    """
    Logits of +-30, so that one source takes all the weight, and of +-100, whose exponentials overflow: FP32 holds
    their differences to 1e-5.
    """
    Case(index=6, query_scale=30.0).check(slack=10)
    Case(index=6, query_scale=100.0).check(slack=10)


@pytest.mark.parametrize(
    "row",
    [
        Row(Launch(1, 1), Launch(1, 1, programs_per_sm=1), Launch(1, 1, programs_per_sm=1)),
        Row(
            Launch(2, 2, tokens=2, programs_per_sm=1),
            Launch(4, 2, programs_per_sm=3, stages=2),
            Launch(8, 2, programs_per_sm=3),
        ),
        Row(
            Launch(8, 1),
            Launch(8, 1, tokens=2, programs_per_sm=2),
            Launch(2, 1, tokens=4),
            keep_h=True,
        ),
    ],
    ids=str,
)
def test_launches_do_not_change_the_result(row, launch_row):
    launch_row(row)
    Chain(2, 5, n_tokens=3).check()


def test_kept_mixture_in_bf16(launch_row):
    launch = Launch(2, 1, tokens=4, programs_per_sm=2)
    launch_row(Row(Launch(4, 1, tokens=8), launch, launch, keep_h=True))
    Case(index=8, d=72, n_tokens=17, dtype=torch.bfloat16).check()


def test_layouts_of_the_inputs():
    """Transposed, sliced, and (as the gradient of a sum) expanded tensors."""

    def strided(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0]

    case = Case(block_size=2)
    assert not strided(case.y).is_contiguous()
    case.check(layout=strided)
    y = case.y.to(DEVICE).requires_grad_()
    state = tuple(t.to(DEVICE) for t in case.state)
    _, x = case.build("flexible")(state, y, case.norm_weight.to(DEVICE))
    x.sum().backward()
    assert y.grad is not None and y.grad.isfinite().all()


@pytest.mark.parametrize(("group", "block_size"), [(1, 2), (2, 1), (2, 3), (4, 1), (4, 2), (8, 3)])
def test_groups(group, block_size, monkeypatch):
    """Who writes the sources' gradients does not change them; 6 sublayers: a last group that is not whole."""
    monkeypatch.setattr(flexible, "GROUP", group)
    Chain(block_size).check()


@pytest.mark.parametrize(
    ("dtype", "block_size", "n_sublayers", "d"),
    [
        (torch.bfloat16, 1, 6, 40),
        (torch.bfloat16, 3, 5, 72),
        (torch.float16, 2, 5, 24),
    ],
    ids=str,
)
def test_groups_in_half_precision(dtype, block_size, n_sublayers, d):
    """A source's gradient is rounded once a group: no worse than autograd's sums."""
    Chain(block_size, n_sublayers, d, 5, dtype).check(slack=1.5)


@pytest.mark.parametrize("skipped", [2, 5])
def test_an_unused_output(skipped):
    """Its boundary still passes on what later ones left."""
    chain = Chain(2, 5)
    expected = chain.run("reference", torch.float64, skipped)
    actual = chain.run("flexible", skipped=skipped)
    for name, t in expected.items():
        assert relative_rms(actual[name], t) < 1e-5, name


def test_repeats_bitwise():
    case = Chain(2, 5, 24, 5, torch.bfloat16)
    assert equal(case.run("flexible"), case.run("flexible"))


def test_no_tokens():
    case = Case(n_tokens=0)
    results = case.run("flexible")
    assert results["output x"].shape == (1, 0, 24)
    assert not results["parameter query"].any()


def test_sources_of_another_dtype_are_refused():
    case = Case()
    state = tuple(t.to(DEVICE).double() for t in case.state)
    with pytest.raises(TypeError, match="needs all sources in the dtype of y"):
        case.build("flexible")(state, case.y.to(DEVICE), case.norm_weight.to(DEVICE))


def test_second_derivative_is_refused():
    case = Case()
    y = case.y.to(DEVICE).requires_grad_()
    state = tuple(t.to(DEVICE) for t in case.state)
    _, x = case.build("flexible")(state, y, case.norm_weight.to(DEVICE))
    (grad,) = torch.autograd.grad(x.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("index", [0, 3])
def test_registered_ops(index):
    """Schema, fake and autograd agree, with static shapes."""
    case = Case(index, block_size=2)
    module = case.build("flexible")
    sources = [t.to(DEVICE) for t in case.state]
    partial = sources.pop() if module.has_partial else None
    y, norm_weight = (t.to(DEVICE).requires_grad_() for t in (case.y, case.norm_weight))
    channels = (
        [t.detach().requires_grad_() for t in ops.enter(tuple(sources), partial)] if sources else []
    )
    form = list(ops.Form(*module._form)._replace(starts=True))
    arguments = (
        y, partial, sources, channels, module.query, module.gain, norm_weight, EPS, form,
    )  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops._forward, arguments, test_utils=tests)
    if sources:
        leaves = [t.detach().requires_grad_() for t in sources]
        torch.library.opcheck(ops._rows, (leaves,), test_utils=tests)


@pytest.mark.parametrize(("index", "block_size"), [(0, 1), (3, 1), (3, 2)])
def test_compiled_in_one_graph(index, block_size, monkeypatch):
    """Traced code takes the ops, eager code the autograd functions; their results are the same."""
    case = Case(index, block_size)
    expected = case.run("flexible")

    def no_function(*args):
        raise AssertionError("compiled code called the eager path")

    def compiled(module, *args):
        module.compile(fullgraph=True, backend="aot_eager")
        return module(*args)

    monkeypatch.setattr(ops._Boundary, "apply", no_function)
    monkeypatch.setattr(ops._Rows, "apply", no_function)
    assert equal(case.run("flexible", call=compiled), expected)


def flexible_model(block_size: int, backend: str = "flexible", n_layers: int = 3) -> nn.Module:
    config = AttnResConfig(block_size=block_size, backend=DepthBackend(backend))
    model = build_model(tiny_config(config, n_layers=n_layers)).to(DEVICE)
    randomize_boundaries(model)
    return model


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_model_equals_reference(block_size):
    """Every source is read by many boundaries: the gradients of the embedding and of all weights."""
    ids = tokens(1, 5).to(DEVICE)
    logits, grads = logits_and_gradients(flexible_model(block_size), ids)
    expected_logits, expected = logits_and_gradients(flexible_model(block_size, "reference"), ids)
    assert relative_rms(logits, expected_logits) < 1e-5
    assert_same_gradients(grads, expected, 2e-5)


@pytest.mark.parametrize("how", ["checkpointed", "compiled and checkpointed"])
def test_model_under(how):
    """Blocks that are recomputed in the backward or compiled give the same bits."""
    ids = tokens(1, 3).to(DEVICE)
    logits, expected = logits_and_gradients(flexible_model(2, n_layers=2), ids)
    model = flexible_model(2, n_layers=2)
    if "checkpointed" in how:
        model.apply_activation_checkpointing(TransformerActivationCheckpointingMode.full)
    if "compiled" in how:
        for block in model.blocks.values():
            block.compile(fullgraph=True, backend="aot_eager")
    actual_logits, grads = logits_and_gradients(model, ids)
    actual = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in grads.items()}
    assert equal(actual, expected) and torch.equal(actual_logits, logits)


def test_gradients_accumulate():
    model = flexible_model(2, n_layers=2)
    total: dict[str, torch.Tensor] = {}
    for seed in (0, 1):
        _, grads = logits_and_gradients(model, tokens(1, 3, seed).to(DEVICE))
        total = {n: g + total.get(n, 0) for n, g in grads.items()}
    model.zero_grad(set_to_none=True)
    for seed in (0, 1):
        ids = tokens(1, 3, seed).to(DEVICE)
        next_token_loss(model(ids), ids).backward()
    assert equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, total)


def test_two_backwards_of_one_graph():
    """Nothing that a backward needs is consumed by the first one."""
    model = flexible_model(1, n_layers=2)
    ids = tokens(1, 3).to(DEVICE)
    loss = next_token_loss(model(ids), ids)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast():
    """The state is BF16, the boundary's parameters and their gradients FP32."""
    model = flexible_model(2, n_layers=2)
    ids = tokens(1, 3).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits, grads = logits_and_gradients(model, ids)
    exact, exact_grads = logits_and_gradients(flexible_model(2, "reference", 2), ids)
    assert relative_rms(logits, exact) < 0.03
    name = "blocks.1.attention_boundary.query"
    assert grads[name].dtype == torch.float32
    assert relative_rms(grads[name], exact_grads[name]) < 0.1


def test_without_gradients_there_are_no_channels():
    model = flexible_model(2, n_layers=2)
    ids = tokens(1, 3).to(DEVICE)
    logits, _ = logits_and_gradients(model, ids)
    seen = []
    model.final_boundary.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        assert torch.equal(model(ids), logits)
    assert [t.ndim for t in seen[0]] == [3] * 3


def test_the_channels_have_no_memory():
    case = Case(index=3, block_size=2, n_sublayers=9)
    leaves = tuple(t.to(DEVICE).requires_grad_() for t in case.state)
    (*channels, a, b, c), _ = case.build("flexible")(
        leaves, case.y.to(DEVICE).requires_grad_(), case.norm_weight.to(DEVICE)
    )
    assert [tuple(t.shape) for t in channels] == [(1, 5, 2, 24), (1, 5, 24)]
    assert {t.untyped_storage().nbytes() for t in channels} == {4}
    assert not any(t.requires_grad for t in (a, b, c))
    assert a.data_ptr() == leaves[0].data_ptr() and b.data_ptr() == leaves[1].data_ptr()


def test_refusals():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fp32 = torch.float32

    def reason(device, dtype=fp32, d=64, n=9, interpreter=True):
        return unavailable(device, dtype, d, n, interpreter=interpreter)

    assert reason(cuda) is None
    assert "multiple of 8" in reason(cuda, d=20)
    assert "at most 8192" in reason(cuda, d=16384)
    assert "sources" in reason(cuda, n=MAX_SOURCES + 1)
    assert "float64" in reason(cuda, torch.float64)
    assert "CUDA" in reason(cpu, interpreter=False)
    build = AttnResConfig(backend=DepthBackend.flexible).build
    with pytest.raises(OLMoConfigurationError, match=r"'flexible' cannot run.*at most 128 sources"):
        # Of the whole model, at the first boundary too: the state differs between backends.
        build(d_model=16, index=1, n_sublayers=200, eps=EPS).select_backend(cuda, fp32)


def test_auto_takes_it_on_a_gpu_and_never_the_interpreter():
    boundary = AttnResConfig().build(d_model=16, index=1, n_sublayers=4, eps=EPS)
    assert boundary.select_backend(torch.device("cpu"), torch.float32) == DepthBackend.reference
    assert boundary.select_backend(torch.device("cuda"), torch.float32) == DepthBackend.flexible


def test_launch_table(caplog):
    assert launch_table.padded(1) == 4
    assert launch_table.padded(9) == 12
    assert launch_table.padded(MAX_SOURCES - 1) == MAX_SOURCES - 1
    with pytest.raises(ValueError, match="at most"):
        launch_table.padded(MAX_SOURCES)
    row = launch_table.ROWS[(90, 2, 1024, 9)]
    assert launch_table.find_row(90, 2, 1024, 7) is row
    with caplog.at_level("INFO"):
        wide = launch_table.find_row(100, 2, 4096, 9)
        launch_table.find_row(100, 2, 4096, 9)
    assert wide.backward.warps == 2 * launch_table.ROWS[(90, 2, 2048, 9)].backward.warps
    assert sum("no launch numbers" in r.message for r in caplog.records) == 1


COMPILE = """
import importlib.util, inspect, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# By its path: importing OLMo-core takes longer than all the rest.
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

SHAPES = dict(D=200, BD=256, BT=1, VEC=8, S=2)
POINTERS = dict(query="*fp32", gain="*fp32", statistics="*fp32", scratch="*fp32", table="*i64", ledger="*fp32")
NUMBERS = ("n_tokens", "n_programs", "n_committed", "n_rows", "pitch")


def compile(kernel, absent, **constants):
    constants |= SHAPES
    signature, attrs, values = {}, {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants or name in absent:
            signature[name], values[name] = "constexpr", constants.get(name)
        elif name == "eps":
            signature[name] = "fp32"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            type = POINTERS.get(name, "*bf16")
            n = {"sources": constants["PADDED"], "later_g": constants.get("LATER"), "later_ledgers": constants.get("LATER")}.get(name)
            if name == "later_ledgers":
                type = "*fp32"
            signature[name] = type if n is None else (type,) * n
            for key in [(i,)] if n is None else [(i, j) for j in range(n)]:
                attrs[key] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=values, attrs=attrs)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    sources = [line for line in ptx.splitlines() if "ld.global" in line and ".v4" in line]
    assert sources, "rows are not loaded 16 bytes at a time"


forward = ("partial", "partial_out", "h_out")
compile(kernels.forward_kernel, (*forward, "table"), PADDED=4, STAGES=3)
backward = ("h_kept", "d_partial")
compile(kernels.backward_kernel, (*backward, "table", "g_out", "ledger"), PADDED=4, STAGES=1, LATER=2, CLOSES=True, DEFER=False)
compile(kernels.backward_kernel, (*backward, "d_sources"), PADDED=1, STAGES=1, LATER=1, CLOSES=True, DEFER=True)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_kernels_compile_for_a_gpu():
    """The interpreter takes code that Triton's compiler refuses, such as a loop that changes a variable's shape."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, ops.kernels.__file__],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]

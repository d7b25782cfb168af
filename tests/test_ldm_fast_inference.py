"""
LDM's ``fast_inference`` backend. Without a GPU: choice of backend, launch rule, packing, launches; with the CuTe DSL installed,
the compiled decode kernels' PTX, and the kernels themselves in an emulator of PTX against the reference in FP64. With a GPU,
all of ``tune``'s checks.
"""

import ctypes
import functools
import re
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth import DepthTransformerConfig
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.ldm.backends import fast_inference
from olmo_core.nn.ldm.backends.fast import cache
from olmo_core.nn.ldm.backends.fast.layout import SHARED_BYTES
from olmo_core.nn.ldm.backends.fast_inference import launch_table, packing, precompile
from olmo_core.nn.ldm.backends.fast_inference.layout import Spec, pack
from olmo_core.nn.ldm.backends.reference import LDMParameters, ldm_first_boundary

pytest.importorskip("triton")

import ptx_emulator
from test_ldm_fast import FakeDriver, fake_kernel, stack_bytes

from olmo_core.nn.ldm.backends.fast_inference import ops, tune

EPS = 1e-5
needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl: the extra 'cute'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def boundary(d: int = 64, **options: Any):
    return LDMConfig(**options).build(d_model=d, index=1, n_sublayers=8, eps=EPS)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU, as far as the choice of backend can see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    monkeypatch.setattr(launch_table, "TABLE", {})


CUDA, BF16 = torch.device("cuda"), torch.bfloat16


# The choice of the backend.


def test_refusals(hopper, monkeypatch):
    def reason(device=CUDA, dtype=BF16, d=1024, by_name=True, **options):
        config = LDMConfig(**options)
        return fast_inference.unavailable(device, dtype, d, config, by_name=by_name)

    assert reason() is None
    assert "d_k = 4, 8, 16, not 2" in reason(d_k=2)
    assert "BF16, not float32" in reason(dtype=torch.float32)
    assert "needs a CUDA device, got 'cpu'" in reason(torch.device("cpu"))
    assert "not 1088" in reason(d=1088)
    assert "was not timed on sm_90a" in reason(by_name=False)
    monkeypatch.setitem(launch_table.TABLE, ("sm_90a", 1024, 8, 1), launch_table.Launch(8, 4))
    assert reason(by_name=False) is None
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    monkeypatch.setenv(cache.PLACES, "nowhere")
    assert "no compiled inference kernels were found" in reason()


def test_auto_takes_it_beside_a_backend_that_can_train(hopper, monkeypatch):
    module = boundary(1024)
    assert module.select_backend(CUDA, BF16) == DepthBackend.fast and not module.infers_fast
    monkeypatch.setitem(launch_table.TABLE, ("sm_90a", 1024, 8, 1), launch_table.Launch(8, 4))
    assert module.select_backend(CUDA, BF16) == DepthBackend.fast and module.infers_fast
    assert module.inference_backend == DepthBackend.fast_inference
    # A choice by name stays what it is.
    module = boundary(1024, backend="flexible")
    assert module.select_backend(CUDA, BF16) == DepthBackend.flexible and not module.infers_fast
    assert module.inference_backend == DepthBackend.flexible
    module = boundary(1024)
    assert module.select_backend(torch.device("cpu"), BF16) == DepthBackend.reference
    assert not module.infers_fast


@pytest.mark.parametrize("backend", ["auto", "fast_inference"])
def test_it_runs_only_without_gradients(hopper, monkeypatch, backend):
    monkeypatch.setitem(launch_table.TABLE, ("sm_90a", 64, 8, 1), launch_table.Launch(1, 2))
    module = boundary(backend=backend)
    module.select_backend(CUDA, BF16)
    ran = []
    monkeypatch.setattr(module, "_infer", lambda *a: ran.append("inference") or a[:2])
    from olmo_core.nn.ldm.backends.fast import ops as fast_ops
    from olmo_core.nn.ldm.backends.flexible import ops as flexible_ops

    def training(name, n):
        return lambda *a, **k: ran.append("training") or (a[0],) * n

    monkeypatch.setattr(fast_ops, "boundary", training("fast", 2))
    monkeypatch.setattr(flexible_ops, "boundary", training("flexible", 3))
    arguments = ((torch.zeros(1, 1, 8, 64),), torch.zeros(1, 1, 64), torch.ones(64))
    with torch.no_grad():
        module.eval()(*arguments)
    with torch.inference_mode():
        module(*arguments)
    assert ran == ["inference"] * 2
    ran.clear()
    if backend == "auto":
        module(*arguments)
        with torch.no_grad():
            module.train()(*arguments)  # a check of a training step without gradients
        assert ran == ["training"] * 2
    else:
        with pytest.raises(OLMoConfigurationError, match=r"has no gradients.*no_grad.*'auto'"):
            module(*arguments)


# Launch numbers.


@pytest.mark.parametrize("d_k", (4, 8, 16))
@pytest.mark.parametrize("d", (64, 512, 576, 768, 1024, 1536, 2048, 4096, 8192))
def test_launches_fit_the_machine(d, d_k, monkeypatch):
    monkeypatch.setattr(launch_table, "TABLE", {})
    for end in launch_table.BUCKETS:
        found = launch_table.candidates("sm_90a", d, d_k, end)
        assert found
        for launch in found:
            if launch.prefill:
                continue
            s = launch_table.spec_of(launch, d, d_k, "two_sigmoid", "dynamic")
            assert s.columns * s.cluster == d and s.warps * s.steps * 32 == s.columns
            assert s.shared["size"] * s.blocks_per_multiprocessor <= SHARED_BYTES
            assert s.gain_offset % 16 == 0 and s.bias_offset % 16 == 0
    assert launch_table.launch("sm_90a", d, d_k, 0).prefill


def test_buckets():
    assert [launch_table.bucket(n) for n in (0, 1, 2, 8, 9, 65, 512, 513)] == [
        1, 1, 8, 8, 16, 128, 512, 0,
    ]  # fmt: skip


def test_widths_without_a_launch():
    assert launch_table.rule(1088 * 31, 8, 1) is None
    assert launch_table.rule(1024, 2, 1) is None
    with pytest.raises(ValueError, match="no decode kernel"):
        Spec(1024, 8, tokens=3)


@pytest.mark.parametrize("d_k", (4, 8, 16))
@pytest.mark.parametrize("forget", ("dynamic", "none"))
def test_all_launches_of_a_boundary_read_the_same_layout(d_k, forget):
    specs = launch_table.decode_specs("sm_90a", 2048, d_k, "two_sigmoid", forget)
    assert len(specs) > 1
    assert len({(s.unit_bytes, s.gain_offset, s.bias_offset, str(s.parts)) for s in specs}) == 1


def test_precompile_needs_the_compiler_and_a_shape(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["precompile", "--out", "x", "--shapes", "1088x8"])
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    with pytest.raises(SystemExit, match="extra 'cute'"):
        precompile.main()
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    with pytest.raises(SystemExit, match="no kernels for d_model 1088 with d_k 8"):
        precompile.main()


def test_kernels_of_the_two_backends_have_folders_of_their_own(tmp_path, monkeypatch):
    """A change of the training kernels leaves the inference kernels' code valid, unless they share the source."""
    from olmo_core.nn.ldm.backends.fast.layout import Spec as TrainingSpec

    code = cache.Code("entry", b"code")
    for spec in (Spec(2048, 8), TrainingSpec("forward", 2048, 8)):
        cache.store(spec, "sm_90a", code, tmp_path)
        assert cache.has_at(spec, "sm_90a", tmp_path)
    assert len({path.parent for path in tmp_path.glob("*/*.cubin")}) == 2


def test_tune_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        tune.main()


def test_tune_prints_rows_of_the_table():
    launch = launch_table.Launch(4, 16, 2, "owner", "all")
    lines: list[dict[str, Any]] = [
        {
            "kind": "time",
            "d": 2048,
            "K": 8,
            "M": 64,
            "us": us,
            "ratio": 1.0,
            "among": us,
            "overlap": overlap,
        }
        | {"row": ["sm_90a", tune.source_of(x)], "launch": tune.name_of(x)}
        for us, x, overlap in [
            (3.0, launch_table.Launch(), True),
            (2.0, launch, True),
            (1.0, launch_table.Launch(), False),
        ]
    ]
    (row,) = tune.table_of(lines)
    values: dict[Any, Any] = {}
    exec(f"values = {{{row}\n}}", vars(launch_table) | {"values": values}, namespace := {})
    assert namespace["values"] == {("sm_90a", 2048, 8, 64): launch}
    assert "overlap" in tune.show(lines[0]) and "apart" in tune.show(lines[2])


# Launches.


def test_overlap_and_large_clusters_reach_the_driver(monkeypatch):
    fake = FakeDriver("p")
    kernel = fake_kernel(monkeypatch, fake, threads=128, cluster=16)
    assert fake.shared == (14, 1)
    for overlap in (False, True, False):
        kernel(16, 0, overlap=overlap)
    kernel = fake_kernel(monkeypatch, fake, threads=128)
    kernel(1, 0, overlap=True)
    cluster, programmatic = (4, 16, 1, 1), (6, 1, 0, 0)
    assert [launch[4] for launch in fake.launches] == [
        [cluster], [cluster, programmatic], [cluster], [programmatic],
    ]  # fmt: skip


class Recorder:
    """Stands where a kernel would."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[Any, ...], bool]] = []

    def __call__(self, blocks: int, *values: Any, overlap: bool) -> None:
        self.launches.append((blocks, values, overlap))


@pytest.fixture
def recorded(monkeypatch):
    kernel, spec = Recorder(), Spec(64, 8, cluster=1, warps=2, tokens=2)
    monkeypatch.setattr(ops, "_plan", lambda *a: (spec, kernel))
    return kernel


def call(module, in_place=False, n=3):
    memory, y = torch.zeros(1, n, 8, 64, dtype=BF16), torch.zeros(1, n, 64, dtype=BF16)
    with torch.no_grad():
        out = ops.boundary(
            memory, y, module.ldm_parameters, module.options_code, GAIN, EPS, in_place=in_place
        )
    return memory, y, out


GAIN = torch.ones(64)


def test_a_launch_is_the_only_one_after_the_first(recorded):
    module = boundary()
    for in_place in (False, True):
        memory, y, (new_memory, x) = call(module, in_place)
        blocks, values, overlap = recorded.launches[-1]
        assert blocks == 2 and values[-2:] == (3, EPS)
        assert values[:2] == (memory.data_ptr(), y.data_ptr())
        assert values[3:5] == (new_memory.data_ptr(), x.data_ptr())
        assert (new_memory is memory) == in_place
        # The first one follows the kernels that pack, and must not start before they end.
        assert overlap == in_place
    assert recorded.launches[0][1][2] == recorded.launches[1][1][2]
    call(module, n=0)
    assert len(recorded.launches) == 2


def test_changed_parameters_are_packed_anew(recorded, monkeypatch):
    module = boundary()
    spec = Spec(64, 8, cluster=1, warps=2, tokens=2)

    def packed() -> torch.Tensor:
        parameters = module.ldm_parameters
        call(module)
        return packing.of(parameters).fragments(spec, parameters, GAIN)[0]

    buffer = packed()
    first = buffer.clone()
    assert packed() is buffer
    with torch.no_grad():
        module.w_query.add_(1)
    # In its place, for graphs that were captured before, and the kernel that follows must not overtake it.
    assert packed() is buffer and not torch.equal(buffer, first)
    assert [overlap for _, _, overlap in recorded.launches] == [False, True, False]
    module.b_key.data.fill_(3.0)
    second = buffer.clone()
    assert torch.equal(packed(), second)  # nobody can tell
    module.eval()
    assert not torch.equal(packed(), second)
    with torch.inference_mode():
        module.train()
        module.w_query.mul_(2)
        packed()
    packed()
    # Prefill, too: a graph of the decode step has the new values without a decode step outside of it.
    from olmo_core.nn.ldm.backends.fast import ops as fast_ops

    monkeypatch.setattr(fast_ops, "pack_parameters", lambda *a: torch.zeros(1))
    with torch.no_grad():
        module.w_key.fill_(0.5)
    second = buffer.clone()
    parameters = module.ldm_parameters
    packing.of(parameters).rows(parameters, GAIN, module.options_code)
    assert not torch.equal(buffer, second) and packed() is buffer
    assert recorded.launches[-1][2]
    # What a graph under capture packs is not kept.
    packing.forget()
    monkeypatch.setattr(packing, "_capturing", lambda t: True)
    assert packed() is not packed() and not recorded.launches[-1][2]


def test_gathered_parameters_are_packed_anew_after_a_training_step(recorded):
    """As FSDP2 has them: the call's tensors are not the module's, and are filled again with their version kept."""
    module = boundary()
    spec = Spec(64, 8, cluster=1, warps=2, tokens=2)
    gathered = LDMParameters(
        *(None if p is None else p.detach().clone() for p in module.ldm_parameters)
    )
    packed = packing.of(gathered).fragments(spec, gathered, GAIN)[0]
    first = packed.clone()
    with torch.autograd._unsafe_preserve_version_counter(gathered.w_query):
        gathered.w_query.fill_(3.0)
    module.train()
    module.eval()
    assert packing.of(gathered).fragments(spec, gathered, GAIN)[0] is packed
    assert not torch.equal(packed, first)


def test_packed_parameters_live_as_long_as_the_parameters(recorded):
    module = boundary()
    before = len(packing._PACKED)
    call(module)
    assert len(packing._PACKED) == before + 1
    del module
    assert len(packing._PACKED) == before


def test_inference_tensors_have_no_version(recorded):
    with torch.inference_mode():
        module = boundary()
        call(module)
        call(module)
    assert [overlap for _, _, overlap in recorded.launches] == [False, True]


def test_the_op_has_the_shapes_of_its_outputs_and_gives_new_memory(recorded):
    module = boundary()
    memory, y, expected = call(module)
    arguments = (*module.ldm_parameters, GAIN, EPS, module.options_code)
    with torch.no_grad():
        new_memory, x = ops._forward(memory, y, *arguments)
    assert new_memory.data_ptr() != memory.data_ptr()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = ops._forward(mode.from_tensor(memory), mode.from_tensor(y), *arguments)
    assert [t.shape for t in fakes] == [new_memory.shape, x.shape] == [t.shape for t in expected]


def test_a_compiled_boundary_is_one_graph(recorded):
    module = boundary().eval()
    module.infers_fast, module.selected_backend = True, DepthBackend.fast
    module.owns_state = True
    compiled_module = torch.compile(module, backend="aot_eager", fullgraph=True)
    memory, y = torch.zeros(1, 3, 8, 64, dtype=BF16), torch.zeros(1, 3, 64, dtype=BF16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            (new_memory,), x = compiled_module((memory,), y, GAIN)
        assert new_memory.shape == memory.shape and x.shape == y.shape
        # An op may not return its input, whoever owns the state.
        assert new_memory.data_ptr() != memory.data_ptr()
    assert [overlap for _, _, overlap in recorded.launches] == [False, True]


# The kernels, compiled here.


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@functools.cache
def compiled(spec: Spec) -> str:
    """The PTX for Hopper."""
    return cache.build(spec, "sm_90a")[1]


class Case:
    """One boundary with all its tensors."""

    def __init__(self, n_tokens: int, spec: Spec):
        self.n, self.spec = n_tokens, spec
        d, d_k = spec.d, spec.d_k
        self.module = boundary(d, d_k=d_k, key_activation=spec.key_activation, forget=spec.forget)
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.add_(normal(*p.shape) * (1.5 * d**-0.5 if name.startswith("w_") else 0.5))
        memory = normal(1, n_tokens, 1, d) + 0.5 * normal(1, n_tokens, d_k, d)
        self.memory = memory.bfloat16()
        self.y = normal(1, n_tokens, d).bfloat16()
        self.gain = 1 + 0.1 * normal(d)
        with torch.no_grad():
            self.packed = pack(spec, self.module.ldm_parameters, self.gain)

    @torch.no_grad()
    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        module = self.module.double()
        (memory,), x = module((self.memory.double(),), self.y.double(), self.gain.double())
        return memory, x

    def run(self, seed: int, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
        emulated = ptx_emulator.Memory()

        def add(t: torch.Tensor) -> tuple[np.ndarray, int]:
            bits = t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)
            array = bits.numpy().copy()
            return array, emulated.add(array)

        s = self.spec
        memory, at_memory = add(self.memory)
        _, at_y = add(self.y)
        _, at_packed = add(self.packed)
        out, at_out = memory, at_memory
        if not in_place:
            out, at_out = add(torch.full_like(self.memory, float("nan")))
        x, at_x = add(torch.full_like(self.y, float("nan")))
        grid = -(-self.n // s.tokens) * s.cluster
        parameters = [at_memory, at_y, at_packed, at_out, at_x, self.n, EPS]
        ptx_emulator.launch(compiled(s), grid, s.cluster, parameters, emulated, seed)
        if not in_place:
            assert np.array_equal(memory, self.memory.view(torch.int16).numpy())
        return tuple(torch.from_numpy(t).view(torch.bfloat16) for t in (out, x))  # type: ignore[return-value]


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"d": 256, "d_k": 8, "cluster": 4, "warps": 2}),
    (3, {"d": 256, "d_k": 8, "cluster": 1, "warps": 4, "tokens": 2, "keep": "all"}),
    (3, {"d": 256, "d_k": 4, "cluster": 2, "warps": 2, "keep": "nothing"}),
    (17, {"d": 64, "d_k": 8, "cluster": 2, "warps": 1, "tokens": 8, "exchange": "owner"}),
    (17, {"d": 128, "d_k": 4, "cluster": 2, "warps": 1, "tokens": 4, "forget": "static"}),
    (3, {"d": 192, "d_k": 4, "cluster": 2, "warps": 1, "tokens": 2, "exchange": "owner"}),
    (1, {"d": 256, "d_k": 16, "cluster": 4, "warps": 2}),
    (3, {"d": 256, "d_k": 16, "cluster": 2, "warps": 4, "tokens": 2, "exchange": "owner"}),
    (3, {"d": 256, "d_k": 16, "cluster": 1, "warps": 2, "tokens": 2, "forget": "none"}),
    (3, {"d": 256, "d_k": 8, "cluster": 8, "warps": 1, "key_activation": "softmax"}),
    (1, {"d": 2048, "d_k": 8, "cluster": 8, "warps": 8, "forget": "none"}),
    (1, {"d": 2048, "d_k": 4, "cluster": 16, "warps": 4, "key_activation": "softmax"}),
]


@needs_dsl
@pytest.mark.parametrize(("n_tokens", "options"), CASES, ids=str)
def test_kernels_in_an_emulator(n_tokens, options):
    case = Case(n_tokens, Spec(**options))
    results = case.run(seed=1, in_place=True)
    again = case.run(seed=2, in_place=False)
    for name, t, other, truth in zip(("memory", "x"), results, again, case.truth(), strict=True):
        assert relative_rms(t, truth) < 2.5e-3, name
        assert torch.equal(t, other), f"{name} depends on the order of the warps"


class EmulatedKernel:
    """A kernel that reads and writes the tensors of this process."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.n_launches = 0

    def __call__(self, blocks: int, *values: Any, overlap: bool) -> None:
        s, n = self.spec, values[-2]
        vector, matrix = 2 * n * s.d, 2 * n * s.d * s.d_k
        memory = ptx_emulator.Memory()
        for address, size in zip(
            values, (matrix, vector, 4 * s.packed_floats, matrix, vector), strict=False
        ):
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            memory.arrays.append((address, array))
        ptx_emulator.launch(compiled(s), blocks, s.cluster, list(values), memory)
        self.n_launches += 1


@needs_dsl
def test_a_model_with_one_memory(monkeypatch):
    """All boundaries of a model in one buffer, and the next call of the model."""
    kernel = EmulatedKernel(Spec(64, 4, cluster=2, warps=1, tokens=2))
    monkeypatch.setattr(ops, "_plan", lambda *a: (kernel.spec, kernel))
    firsts = []

    def first_boundary(y, key_0, norm_weight, eps):
        out = ldm_first_boundary(y, key_0, norm_weight, eps)
        firsts.append(out.memory)
        return out.memory, out.x

    monkeypatch.setattr(ops, "first_boundary", first_boundary)
    config = DepthTransformerConfig.llama_like(
        d_model=64, vocab_size=32, n_layers=2, n_heads=2
    ).with_depth(LDMConfig(d_k=4))
    model = config.build(init_device="cpu").bfloat16().eval()
    model.init_weights(device=torch.device("cpu"))
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    states = []
    with torch.no_grad():
        expected = model(tokens)
        for b in model.boundaries():
            b.infers_fast, b.selected_backend = True, DepthBackend.fast
            b.register_forward_hook(lambda m, a, out: states.append(out[0][0]))
        results = [model(tokens) for _ in range(2)]
    assert kernel.n_launches == 2 * 4
    assert len({s.data_ptr() for s in states[:5]}) == 1, "more than one memory"
    assert torch.equal(*results)
    assert relative_rms(results[0], expected) < 2e-2  # BF16 all through


@needs_dsl
@pytest.mark.parametrize(
    ("d", "d_k", "architecture"), [(2048, 8, "sm_90a"), (2048, 8, "sm_100f"), (1024, 4, "sm_90a")]
)
def test_compiled_code(d, d_k, architecture, tmp_path):
    for spec in launch_table.decode_specs(architecture, d, d_k, "two_sigmoid", "dynamic"):
        code, ptx = cache.build(spec, architecture)
        assert ".local" not in ptx
        before, after = ptx.split("griddepcontrol.wait;")
        # The maps and the gain come before the wait for the kernel ahead, all that it may have written after it.
        n = len(re.findall(r"ld\.global\.(?:L2::cache_hint\.)?v4\.b32", before))
        assert n == len(spec.parts) * 2 * spec.steps
        assert "st.global" not in before and "ld.global" in after
        assert "griddepcontrol.launch_dependents" in after
        for operand in re.findall(r"(?:ld|st)\.global\S* .*?\[([^\]]*)\]", ptx):
            assert operand.startswith("%rd"), operand  # 64 bits
        stack = stack_bytes(code.cubin, tmp_path)
        # Eight tokens keep a few addresses there.
        limit = 80 if spec.tokens == 8 else 0
        assert stack is None or stack <= limit, f"{spec.name}: {stack} bytes"


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("d", "d_k", "n_tokens", "options"), tune.CHECKS, ids=str)
def test_against_fp64(d, d_k, n_tokens, options):
    reason = fast_inference.unavailable(CUDA, BF16, d, LDMConfig(d_k=d_k, **options), by_name=True)
    if reason is not None:
        pytest.skip(reason)
    assert not tune.check(d, d_k, n_tokens, options)["wrong"]


@pytest.mark.gpu
@needs_gpu
def test_changes_of_parameters_and_graphs():
    reason = fast_inference.unavailable(CUDA, BF16, 2048, LDMConfig(), by_name=True)
    if reason is not None:
        pytest.skip(reason)
    assert not tune.check_changes(2048, 8)

"""
LDM's ``fast`` backend. Without a GPU: choice of backend, launch rule, cache, launches, fakes; with the CuTe DSL installed, the
compiled kernels' PTX, and the kernels themselves in an emulator of PTX against the reference in FP64. With a GPU, all of
``tune``'s checks.
"""

import ctypes
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.model import DepthTransformer
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.ldm.backends import fast
from olmo_core.nn.ldm.backends.fast import cache, driver, launch_table, precompile
from olmo_core.nn.ldm.backends.fast.layout import FINISH_PARAMETERS, MAIN_WARPS, SHARED_BYTES, Spec
from olmo_core.nn.ldm.backends.flexible.options import BoundaryOptions
from olmo_core.nn.ldm.backends.reference import LDMParameters, ldm_boundary
from olmo_core.nn.ldm.module import LDMBoundary
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode

pytest.importorskip("triton")

import helpers
import ptx_emulator

from olmo_core.nn.ldm.backends.fast import ops, stored8, tune

EPS = 1e-5
needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl: the extra 'cute'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
WIDTHS = (64, 512, 576, 768, 1024, 1536, 2048, 4096, 8192)


def boundary(d: int = 64, **options: Any):
    return LDMConfig(**options).build(d_model=d, index=1, n_sublayers=8, eps=EPS)


# The choice of the backend.


@pytest.mark.parametrize(
    "options",
    [
        {"d_k": 2},
        {"key_activation": "none"},
        {"key_source": "input"},
        {"query_source": "output"},
        {"query_activation": "sigmoid"},
        {"update": "delta"},
        {"write_every": "block"},
        {"residual": "kept"},
        {"forget_granularity": "scalar"},
    ],
    ids=str,
)
def test_other_families_are_refused_by_name(options):
    ((option, value),) = options.items()
    reason = fast.refused_option(LDMConfig(**options))
    assert reason is not None and option in reason and f"not {value}" in reason
    with pytest.raises(OLMoConfigurationError, match=rf"'fast' cannot run.*{option}"):
        boundary(backend="fast", **options).select_backend(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("forget", ["dynamic", "static", "none"])
@pytest.mark.parametrize("key_activation", ["two_sigmoid", "softmax"])
def test_the_default_family_is_taken(key_activation, forget):
    config = LDMConfig(key_activation=key_activation, forget=forget)
    assert fast.refused_option(config) is None


def test_refusals(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    bf16 = torch.bfloat16

    def reason(device=cuda, dtype=bf16, d=1024, by_name=True, **options):
        return fast.unavailable(device, dtype, d, LDMConfig(**options), by_name=by_name)

    assert "BF16, not float32" in reason(dtype=torch.float32)
    assert "needs a CUDA device, got 'cpu'" in reason(cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Hopper or Blackwell" in reason() and "8.0" in reason()
    assert "multiple of 64 columns, not 1088" in reason(d=1088)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    assert reason() is None
    monkeypatch.setattr(launch_table, "TABLE", {})
    assert "was not timed on sm_90a" in reason(by_name=False)
    row = launch_table.Launch(1, 2, timed=True)
    for direction in ("forward", "backward"):
        monkeypatch.setitem(launch_table.TABLE, ("sm_90a", direction, 1024, 8), row)
    assert reason(by_name=False) is None
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    monkeypatch.setenv(cache.PLACES, "nowhere")
    assert "no compiled kernels were found" in reason()


def test_auto_falls_back_to_flexible_and_reference(monkeypatch):
    module = boundary(1088)
    assert module.select_backend(torch.device("cpu"), torch.bfloat16) == DepthBackend.reference
    assert module.select_backend(torch.device("cuda"), torch.bfloat16) == DepthBackend.flexible


# Launch numbers.


@pytest.mark.parametrize("d_k", launch_table.SLOTS)
@pytest.mark.parametrize("d", WIDTHS)
def test_launches_fit_the_machine(d, d_k):
    for direction, earlier in product(("forward", "backward"), range(launch_table.MAX_WINDOW[d_k])):
        key = ("sm_90a", direction, d, d_k, earlier)
        known = launch_table.candidates(*key) + launch_table.coefficients_candidates(*key)
        for launch in known:
            s = launch_table.spec_of(launch, direction, d, d_k, earlier=earlier)
            assert s.output_tokens * s.output_tiles == s.tokens and s.output_tokens * d_k >= 8
            assert s.columns * s.cluster == d and s.columns % 64 == 0
            assert s.stages >= 2 and s.shared["size"] <= SHARED_BYTES
            assert s.barriers["exchange"] + 16 * s.coefficient_warps <= s.shared["gain"]
            assert s.row_bytes % 128 == 64  # no bank conflicts
            helpers = 1 + s.coefficient_warps
            if s.moves_registers:
                r = s.registers
                given = (
                    MAIN_WARPS * r["main"] + helpers * r["helper"] + s.dots_warps * r.get("dots", 0)
                )
                assert 32 * given <= s.start_registers * s.threads
                assert all(24 <= n <= 256 and n % 8 == 0 for n in r.values() if s.moves_registers)
            if direction == "backward":
                assert s.columns <= 32 * MAIN_WARPS * s.columns_per_thread


def test_widths_without_a_launch():
    assert launch_table.rule("forward", 1088, 8) is None
    assert launch_table.rule("forward", 16384, 8) is None
    assert launch_table.rule("backward", 1024, 16) is None  # the flexible backend's
    assert launch_table.max_width(8) == 8192
    assert launch_table.launch("sm_90a", "forward", 1024, 4, earlier=4) is None
    assert launch_table.window(1024, 8, 8) == 8 and launch_table.window(1024, 4, 8) == 1
    assert launch_table.window(1024, 16, 2) == launch_table.window(1088, 8, 2) == 1


# The cache.

C_TYPES: dict[str, Any] = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}
CODE = cache.Code("kernel_name", b"\x7fELF machine code")
SPEC = Spec("forward", 64, 8)


def test_cache_keeps_and_finds(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert cache.find(SPEC, "sm_90a") is None and not cache.has(SPEC, "sm_90a")
    cache.store(SPEC, "sm_90a", CODE, tmp_path / "b")
    assert cache.find(SPEC, "sm_90a") == CODE and cache.has(SPEC, "sm_90a")
    assert cache.find(SPEC, "sm_100f") is None
    assert cache.find(Spec("forward", 64, 8, forget="none"), "sm_90a") is None


def test_cache_does_not_take_a_damaged_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    cache.store(SPEC, "sm_90a", CODE, tmp_path)
    (code,) = tmp_path.glob("*/*.cubin")
    code.write_bytes(CODE.cubin[:-1])
    assert cache.find(SPEC, "sm_90a") is None
    code.write_bytes(CODE.cubin)
    assert cache.find(SPEC, "sm_90a") == CODE
    (record,) = tmp_path.glob("*/*.json")
    record.write_text(record.read_text()[:-3])
    assert cache.find(SPEC, "sm_90a") is None


def test_cache_forgets_kernels_of_other_sources(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    cache.store(SPEC, "sm_90a", CODE, tmp_path)
    monkeypatch.setattr(cache, "fingerprint", lambda: "other")
    assert cache.find(SPEC, "sm_90a") is None


def test_no_compiler_and_no_kernel_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    with pytest.raises(RuntimeError, match=r"install the extra 'cute'.*precompile"):
        cache.get(SPEC, "sm_90a")


def test_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    built = []
    monkeypatch.setattr(cache, "build", lambda *a: built.append(a) or (CODE, ""))
    assert cache.get(SPEC, "sm_90a") == cache.get(SPEC, "sm_90a") == CODE
    assert built == [(SPEC, "sm_90a")]
    assert precompile.compile_all([SPEC, SPEC], "sm_90a", tmp_path) == 0
    assert precompile.compile_all([SPEC], "sm_100a", tmp_path) == 1
    assert not list(tmp_path.glob("*/tmp*"))


def test_precompile_refuses_with_a_sentence(monkeypatch):
    with pytest.raises(SystemExit, match="'1024' is not one"):
        precompile.parse_shapes("1024")
    monkeypatch.setattr(sys, "argv", ["precompile", "--out", "x", "--shapes", "1088x8"])
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    with pytest.raises(SystemExit, match="extra 'cute'"):
        precompile.main()
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    with pytest.raises(SystemExit, match="no kernels for d_model 1088 with d_k 8"):
        precompile.main()


# Launches.


class FakeDriver:
    """Records launches as the CUDA driver would read them."""

    def __init__(self, arguments: str, status: int = 0):
        self.arguments, self.status, self.launches = arguments, status, []

    def cuModuleLoadData(self, module, image):
        assert image == CODE.cubin
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert name == b"kernel_name"
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.shared = (attribute, value)
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"too many registers"
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        c = config._obj
        values = [
            C_TYPES[t].from_address(p).value for t, p in zip(self.arguments, pointers, strict=True)
        ]
        cluster = [(a.id, a.x, a.y, a.z) for a in c.attributes[: c.n_attributes]]
        self.launches.append(
            (list(c.grid), list(c.block), c.shared_bytes, c.stream, cluster, values)
        )
        return self.status


def fake_kernel(monkeypatch, fake: FakeDriver, **options: Any) -> driver.Kernel:
    class Stream:
        def query(self): ...

    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: driver.threading.Lock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: Stream())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return driver.Kernel(CODE.cubin, CODE.entry, fake.arguments, device=0, **options)


def test_a_launch_reaches_the_driver_as_written(monkeypatch):
    fake = FakeDriver("ppif")
    kernel = fake_kernel(monkeypatch, fake, threads=384, shared_bytes=200_000, cluster=2)
    assert fake.shared == (8, 200_000)
    kernel(66, 1 << 47, 5, -3, 0.5)
    kernel(2, 1, 2, 3, 4.0)
    common = ([384, 1, 1], 200_000, 77, [(4, 2, 1, 1)])
    assert fake.launches == [
        ([66, 1, 1], *common, [1 << 47, 5, -3, 0.5]),
        ([2, 1, 1], *common, [1, 2, 3, 4.0]),
    ]
    with pytest.raises(driver.struct.error):
        kernel(2, 1)


def test_a_refused_launch_says_why(monkeypatch):
    fake = FakeDriver("p", status=701)
    kernel = fake_kernel(monkeypatch, fake, threads=64)
    with pytest.raises(RuntimeError, match=r"too many registers \(CUDA error 701\)"):
        kernel(1, 0)
    assert fake.launches[0][4] == []  # no cluster


def test_the_launch_structures_have_the_drivers_layout():
    assert ctypes.sizeof(driver._Attribute) == 72
    assert (driver._Config.shared_bytes.offset, driver._Config.stream.offset) == (24, 32)
    assert ctypes.sizeof(driver._Config) == 56


@pytest.mark.parametrize("forget", ["dynamic", "none"])
def test_fakes_have_the_shapes_of_the_buffers(forget):
    d, d_k, n = 64, 8, 6
    module = boundary(d, d_k=d_k, forget=forget)
    spec = Spec("forward", d, d_k, forget=forget)
    with FakeTensorMode(allow_non_fake_inputs=True):
        memory = torch.empty(2, 3, d_k, d, dtype=torch.bfloat16)
        y, gain = torch.empty(2, 3, d, dtype=torch.bfloat16), torch.empty(d)
        out = ops._forward(
            memory, y, None, None, None, *module.ldm_parameters, gain, EPS, module.options_code
        )
        assert [t.shape for t in out[:2]] == [memory.shape, y.shape]
        columns = spec.saved_columns + spec.extra_columns
        assert out[4].numel() == spec.n_parameters + n * columns
        assert (out[4].numel() - n * spec.extra_columns) % 4 == 0  # 16-byte stores
        grads = ops._backward(memory, y, None, None, out[4], memory, y, None, module.options_code)
        assert [t.shape for t in grads[:2]] == [memory.shape, y.shape]
        assert grads[4].shape == (spec.n_parameters,)


# Windows in a model on the CPU: PyTorch computes what the two kernels would.


class SlowKernels:
    """The launches of a window's boundary; ``packed`` has the parameters, the gain last."""

    def __init__(self, config: LDMConfig, d: int):
        self.config = config
        self.d = d
        self.between: dict[int, tuple[int, torch.Tensor]] = {}
        """Of a whole window, by its bundle: where the gradient at its end is, and the gradient of the memory after a boundary."""
        self.gathered: list[str] = []

    def memory(self, anchor, coefficients, earlier):
        if coefficients is None:
            return anchor
        held = coefficients.unflatten(-1, (-1, self.config.d_k))
        if anchor.dtype == torch.uint8:
            anchor = stored8.decode(anchor)
        return sum(
            (held[..., i, :, None] * y[..., None, :] for i, y in enumerate(earlier, start=1)),
            start=held[..., 0, :, None] * anchor,
        )

    def boundary(self, memory, y, parameters, norm_weight):
        return ldm_boundary(memory, y, parameters, self.config, norm_weight, EPS)

    def forward(
        self, memory, y, coefficients, earlier, parameters, norm_weight, eps, options, writes
    ):
        K = self.config.d_k
        out = self.boundary(self.memory(memory, coefficients, earlier), y, parameters, norm_weight)
        a, k = out.coefficients["forget"], out.coefficients["key"]
        before = torch.ones_like(a) if coefficients is None else coefficients
        after = (before.unflatten(-1, (-1, K)) * a[..., None, :]).flatten(-2)
        present = [p for p in parameters if p is not None]
        packed = torch.cat([p.reshape(-1) for p in (*present, norm_weight)])
        if writes and memory.dtype == torch.uint8:
            stored, units = stored8.store(out.memory)
            return stored, out.x, units, packed
        if writes:
            return out.memory, out.x, None, packed
        return None, out.x, torch.cat([after, k], dim=-1), packed

    def backward(
        self, memory, y, coefficients, earlier, packed, d_memory_out, d_x, options, gather="",
        window=0, bundle=None,
    ):  # fmt: skip
        self.gathered.append(gather)
        if not gather:
            return self.chained(
                memory, y, coefficients, earlier, packed, d_memory_out, d_x, options
            )
        assert bundle.shape == (*y.shape[:-1], *ops.bundle_shape(self.d, self.config.d_k, window))
        end = d_memory_out.data_ptr()
        if gather != "end":
            begun, d_memory_out = self.between.pop(bundle.data_ptr(), (end, None))
            assert begun == end
            # Made here, or of a gradient that is not there.
            assert d_memory_out is not None or not bundle.any()
        d_memory, *others = self.chained(
            memory, y, coefficients, earlier, packed, d_memory_out, d_x, options
        )
        if gather == "first":
            return d_memory, *others
        self.between[bundle.data_ptr()] = end, d_memory
        return None, *others

    def chained(self, memory, y, coefficients, earlier, packed, d_memory_out, d_x, options):
        K, d = self.config.d_k, self.d
        shapes = {n: (d, K) if n.startswith("w_") else (K,) for n in LDMParameters._fields}
        shapes |= {"w_beta": (0,), "b_beta": (0,), "gain": (d,)}
        pieces = packed.split([math.prod(s) for s in shapes.values()])
        values = dict(zip(shapes, pieces, strict=True))
        with torch.enable_grad():
            values = {
                n: t.detach().view(shapes[n]).requires_grad_() for n, t in values.items() if len(t)
            }
            memory = self.memory(memory, coefficients, earlier).detach().requires_grad_()
            y = y.detach().requires_grad_()
            parameters = LDMParameters(*(values.get(n) for n in LDMParameters._fields))
            out = self.boundary(memory, y, parameters, values["gain"])
        outputs = [(out.x, d_x), (out.memory, d_memory_out)]
        outputs = [pair for pair in outputs if pair[1] is not None]
        torch.autograd.backward(*zip(*outputs, strict=True))
        order = ["w_forget", "w_key", "w_query", "gain", "b_query", "b_key", "b_forget"]
        d_parameters = torch.cat([values[n].grad.reshape(-1) for n in order])
        size = sum(BoundaryOptions.decode(options).parameter_sizes(d))
        return memory.grad, y.grad, torch.nn.functional.pad(d_parameters, (0, size - len(d_parameters)))  # fmt: skip


@pytest.fixture(params=["model", "float8", "model, whole", "float8, whole"])
def windowed(monkeypatch, request):
    """A model of 7 boundaries whose second to last run in windows of 3; whole windows may have a backward of their own."""
    memory_dtype, _, whole = request.param.partition(", ")
    config = helpers.tiny_config(
        LDMConfig(window=3, memory_dtype=memory_dtype), d_model=64, eps=EPS
    )
    if whole:
        monkeypatch.setattr(launch_table, "GATHER", {(64, 8)})
    slow = SlowKernels(config.depth, 64)
    monkeypatch.setattr(ops, "_launch_window_forward", slow.forward)
    monkeypatch.setattr(ops, "_launch_window_backward", slow.backward)

    def select(model, y):
        for b in model.modules():  # model.boundaries() has checkpointing's wrappers of them
            if isinstance(b, LDMBoundary):
                b.selected_backend = DepthBackend.reference if b.is_first else DepthBackend.fast

    monkeypatch.setattr(DepthTransformer, "_select_backends", select)

    def build(checkpointing: dict[str, Any] | None = None):
        model = config.build(init_device="meta")
        assert all(b.stores8 == (memory_dtype == "float8") for b in model.boundaries())
        for i, b in enumerate(model.boundaries()):
            assert b.gathers == (bool(whole) and i <= 3)
        if checkpointing:
            model.apply_activation_checkpointing(**checkpointing)
        model.init_weights(device=torch.device("cpu"), max_seq_len=16)
        helpers.randomize_boundaries(model)
        return model

    return build


def gradients(model, *batches: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    for ids in batches:
        helpers.next_token_loss(model(ids), ids).backward()
    wrapper = "_checkpoint_wrapped_module."
    return {n.replace(wrapper, ""): p.grad for n, p in model.named_parameters()}


def test_a_window_changes_no_gradient(windowed, monkeypatch):
    model, ids = windowed(), helpers.tokens()
    mine, logits = gradients(model, ids), model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids), logits)
    monkeypatch.undo()
    reference = helpers.tiny_config(LDMConfig(), d_model=64, eps=EPS).build()
    reference.load_state_dict(model.state_dict())
    if model.depth.memory_dtype == "float8":
        expected = gradients(reference, ids)
        # Rounding to FP8 is no small thing: these are far from equal without it in the reference.
        with pytest.raises(AssertionError):
            helpers.assert_same_gradients(mine, expected, 2e-3)
        for boundary in list(reference.boundaries())[::3]:
            boundary.register_forward_hook(rounds_to_8_bits)
        # A number in the middle between two of FP8 may go either way: one of the 16,000 is 6e-4 of its row's RMS.
        helpers.assert_same_gradients(mine, gradients(reference, ids), 2e-4)
        assert helpers.relative_error(logits, reference(ids)) < 1e-4
        return
    helpers.assert_same_gradients(mine, gradients(reference, ids), 2e-5)
    assert helpers.relative_error(logits, reference(ids)) < 1e-5


def rounds_to_8_bits(module, arguments, out):
    (memory, *rest), x = out
    stored, units = stored8.store(memory.detach())
    rounded = stored8.decode(stored) * units[..., None]
    return (memory + (rounded - memory.detach()), *rest), x


@pytest.mark.parametrize(
    "mode",
    [
        {"mode": TransformerActivationCheckpointingMode.full},
        {"mode": TransformerActivationCheckpointingMode.selected_blocks, "block_interval": 2},
        {
            "mode": TransformerActivationCheckpointingMode.selected_modules,
            "modules": ["blocks.*.feed_forward", "blocks.*.attention_boundary"],
        },
    ],
    ids=["full", "selected_blocks", "selected_modules"],
)
def test_windows_and_activation_checkpointing(windowed, mode):
    expected = gradients(windowed(), helpers.tokens())
    checkpointed = gradients(windowed(mode), helpers.tokens())
    assert expected.keys() == checkpointed.keys()
    for name, g in expected.items():
        assert torch.equal(g, checkpointed[name]), name


def test_windows_and_micro_batches(windowed):
    model = windowed()
    batches = [helpers.tokens(seed=s) for s in (1, 2)]
    alone = [{n: g.clone() for n, g in gradients(model, b).items()} for b in batches]
    for name, g in gradients(model, *batches).items():
        assert torch.equal(g, alone[0][name] + alone[1][name]), name


def test_a_window_keeps_the_memory_once(windowed):
    """Boundary 0's memory and those of boundaries 3 and 6; the state's outputs are those that are saved anyway."""
    model, ids = windowed(), helpers.tokens()
    d_k, n = model.depth.d_k, ids.numel() * 64
    in_units = model.depth.memory_dtype == "float8"
    whole = next(model.boundaries()).gathers
    memories, outputs = set(), set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if t.shape == (*ids.shape, d_k, 64):
            assert storage.nbytes() == (1 if in_units else 4) * n * d_k
            memories.add(storage.data_ptr())
        return t

    y_seen = []
    boundaries = list(model.boundaries())
    hooks = [
        b.register_forward_hook(lambda m, arguments, out: y_seen.append((arguments[1], out[0])))
        for b in boundaries
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = model(ids)
    for hook in hooks:
        hook.remove()
    assert (
        len(memories) == 2
    )  # boundary 0's and 3's; 6 is the last one, and nobody reads its memory
    states = [state for _, state in y_seen]
    lengths = [1, 4, 5, 3, 4, 5, 3] if in_units else [1, 3, 4, 1, 3, 4, 1]
    if whole:
        # The bundle, which has no memory.
        lengths[1:3] = [n + 1 for n in lengths[1:3]]
        for i in (1, 2):
            assert states[i][2 + in_units].untyped_storage().nbytes() == 4
    assert [len(s) for s in states] == lengths
    if in_units:
        # The first of the state has a gradient and no memory.
        assert all(s[0].untyped_storage().nbytes() == 4 for s in states[1:])
        at = 2
    else:
        at = 0
    for i in (2, 4, 5) if in_units else (1, 2, 4, 5):
        assert states[i][at].data_ptr() == states[i - 1][at].data_ptr()
    for i in (1, 2, 4, 5):
        assert states[i][-1].data_ptr() == y_seen[i][0].data_ptr()
        outputs.add(states[i][-1].requires_grad)
    assert outputs == {False}
    logits.sum().backward()


def test_a_gradient_at_the_end_goes_through_a_whole_window_as_it_is(windowed, monkeypatch):
    """Six boundaries in two whole windows; the second one's end is the model's last memory, which has no gradient."""
    seen: list[str] = []
    model, ids = windowed(), helpers.tokens()
    launch = ops._launch_window_backward

    def recorded(*arguments):
        seen.append(arguments[8] if len(arguments) > 8 else "")
        return launch(*arguments)

    monkeypatch.setattr(ops, "_launch_window_backward", recorded)
    gradients(model, ids)
    whole = next(model.boundaries()).gathers
    assert seen == ["", "", "", *(("end", "middle", "first") if whole else ("", "", ""))]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_window_that_was_thought_whole_may_end_early(monkeypatch, n):
    """Nothing after a boundary in its middle counts: the gradients are those of single boundaries."""
    slow = SlowKernels(LDMConfig(), 64)
    monkeypatch.setattr(ops, "_launch_window_forward", slow.forward)
    monkeypatch.setattr(ops, "_launch_window_backward", slow.backward)
    module, gain = boundary(64, window=3), torch.ones(64)
    generator = torch.Generator().manual_seed(1)
    memory, *ys = (torch.randn(*s, 64, generator=generator) for s in ((2, 3, 8), *[(2, 3)] * n))
    found = []
    for gathers in (False, True):
        leaves = [t.clone().requires_grad_() for t in (memory, *ys)]
        state: tuple[torch.Tensor, ...] = (leaves[0],)
        total = torch.zeros(())
        for y in leaves[1:]:
            state, x = ops.window_boundary(
                state, y, module.ldm_parameters, module.options_code, gain, EPS, 3, False, gathers
            )
            total = total + x.square().sum() + x[..., 0].sum()
        found.append(torch.autograd.grad(total, leaves, retain_graph=True))
    for chained, whole in zip(*found, strict=True):
        torch.testing.assert_close(whole, chained)
    if n == 2:
        # Its memory in the middle is not the one whose gradient goes through a whole window.
        with pytest.raises(RuntimeError, match="window=1"):
            (total + state[0].sum()).backward()
    assert "middle" in slow.gathered if n > 1 else "first" not in slow.gathered


def test_what_is_traced_stores_the_memory():
    """An op must not return an input: a traced boundary in the middle of a window stores the memory, with its gradient."""
    memory = torch.randn(2, 3, 8, 64, requires_grad=True)
    coefficients = torch.rand(2, 3, 24)
    earlier = [torch.randn(2, 3, 64) for _ in range(2)]
    stored = ops._stored(memory, coefficients, earlier)
    expected = SlowKernels(LDMConfig(), 64).memory(memory, coefficients, earlier)
    torch.testing.assert_close(stored, expected)
    stored.square().sum().backward()
    torch.testing.assert_close(memory.grad, 2 * stored.detach())
    module = boundary(64, window=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = [torch.empty(2, 3, 8, 64, dtype=torch.bfloat16), torch.empty(2, 3, 16)]
        y, gain = torch.empty(2, 3, 64, dtype=torch.bfloat16), torch.empty(64)
        new, x = ops.window_boundary(
            (*state, y), y, module.ldm_parameters, module.options_code, gain, EPS, 4
        )
    assert [t.shape for t in new] == [state[0].shape] and x.shape == y.shape


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_memories_in_fp8(scale):
    """Rounded to nearest even, in units of powers of two, and stored as the kernels read it."""
    memory = scale * torch.randn(5, 3, 8, 192, generator=torch.Generator().manual_seed(1))
    memory[0, 0, 0] = 0
    memory[0, 0, 1, 3:] = 0  # few large numbers
    stored, units = stored8.store(memory)
    decoded = stored8.decode(stored) * units[..., None]
    exact = memory.double()
    fine = memory.square().mean(-1) > 0
    check_stored8(decoded.double()[fine], exact[fine], units.double()[fine])
    assert not decoded[0, 0, 0].any()
    ordered = (memory / units[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(stored[..., 0::4], ordered[..., 0::4])
    assert torch.equal(stored[..., 1::4], ordered[..., 2::4])
    assert torch.equal(stored[..., 2::4], ordered[..., 1::4])
    assert torch.equal(stored[..., 3::4], ordered[..., 3::4])


@pytest.mark.parametrize("d", [64, 192, 1024])
def test_the_kernel_of_the_first_memory(d):
    """In Triton's interpreter, or on a GPU: the bytes that PyTorch gives, and units but for where the RMS is a power of two."""
    memory = torch.randn(5, 8, d, generator=torch.Generator().manual_seed(1)).bfloat16()
    memory[0, 0], memory[1] = 0, 1e4 * memory[1]
    memory[2, :, 5:] = 0  # beyond 448 units, and exact zeros
    # Numbers in the middle between two of FP8, normal ones and the smallest.
    memory[3, 0] = torch.where(torch.arange(d) % 2 == 0, 17.0, 8.0)
    expected, units = stored8.store(memory)
    memory = memory.to("cuda" if torch.cuda.is_available() else "cpu")
    mine, mine_units = (t.cpu() for t in stored8.store_on_gpu(memory))
    assert torch.equal(mine, expected) and torch.equal(mine_units, units)


def test_every_byte_of_fp8_comes_back():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    again = stored8.decode(stored8.encode(numbers[: len(numbers) // 4 * 4]))
    assert torch.equal(again, numbers[: len(again)])


def test_the_option_memory_dtype(monkeypatch):
    with pytest.raises(OLMoConfigurationError, match=r"memory_dtype=float8.*needs a window"):
        LDMConfig(memory_dtype="float8", window=1)
    assert boundary(memory_dtype="float8").stores8 and not boundary().stores8
    assert not boundary(memory_dtype="float8", d_k=16).stores8  # no windows there
    said: list[str] = []
    monkeypatch.setattr("olmo_core.nn.depth.connection.log_once", said.append)
    boundary(memory_dtype="float8").select_backend(torch.device("cpu"), torch.bfloat16)
    assert any("memory_dtype=float8 changes nothing" in line for line in said)
    said.clear()
    boundary().select_backend(torch.device("cpu"), torch.bfloat16)
    assert not any("memory_dtype" in line for line in said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = boundary(d_k=16, memory_dtype="float8", backend="fast")
    with pytest.raises(OLMoConfigurationError, match=r"memory_dtype = float8 needs a window"):
        module.select_backend(torch.device("cuda"), torch.bfloat16)
    specs = launch_table.specs("sm_90a", 1024, 8, "two_sigmoid", "dynamic", 4, stored8=True)
    assert all(s.stored8 for s in specs if s.direction != "finish") and len(specs) == 13
    for s in specs[:-1]:
        assert s.memory_row_bytes % 128 == 32 and (s.rows_shift + s.d_k * s.row_bytes) % 128 == 0
        bf16 = dataclasses.replace(s, stored8=False)
        assert bf16.copied_bytes - s.copied_bytes == s.d_k * s.columns
        assert s.shared["size"] <= SHARED_BYTES and s.stages >= bf16.stages


def test_the_option_window(monkeypatch):
    with pytest.raises(OLMoConfigurationError, match="window must be one of 1, 2, 3, 4, 6, 8"):
        LDMConfig(window=5)
    assert boundary(window=8).window == 8 and boundary(window=1).window == 1
    # Not given: what was measured to be best, where there are kernels for it.
    assert boundary().window == launch_table.BEST_WINDOW and boundary(d_k=16).window == 1
    # K = 4 and K = 16 have shorter windows or none: auto goes without, an explicit choice is refused.
    assert boundary(d_k=4, window=4).window == 4 and boundary(d_k=4, window=6).window == 1
    assert boundary(d_k=16, window=2).window == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = boundary(d_k=4, window=6, backend="fast")
    with pytest.raises(
        OLMoConfigurationError, match=r"no window of 6 boundaries for d_k 4.*up to 4"
    ):
        module.select_backend(torch.device("cuda"), torch.bfloat16)
    # The state of a window grows, so blocks compile by their sublayers.
    assert LDMConfig(window=2).state_grows and not LDMConfig(window=1).state_grows
    block = next(iter(helpers.tiny_config(LDMConfig(window=2)).build().blocks.values()))
    assert block.compiles_sublayers


# The kernels, compiled here.


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


@functools.cache
def compiled(spec: Spec) -> str:
    """The PTX for Hopper."""
    return cache.build(spec, "sm_90a")[1]


class Emulated:
    """One boundary with all its tensors, forward and backward, in emulated memory."""

    def __init__(self, n_tokens: int, forward: Spec, backward: Spec | None):
        self.n, self.forward, self.backward = n_tokens, forward, backward
        d, d_k = forward.d, forward.d_k
        self.module = boundary(
            d, d_k=d_k, key_activation=forward.key_activation, forget=forward.forget
        )
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        with torch.no_grad():
            for name, p in self.module.named_parameters():
                p.add_(normal(*p.shape) * (1.5 * d**-0.5 if name.startswith("w_") else 0.5))
        memory = normal(1, n_tokens, 1, d) + 0.5 * normal(1, n_tokens, d_k, d)
        self.stored = memory.bfloat16()
        if forward.stored8:
            self.stored = stored8.encode(10 * memory)
        self.sources = {"memory": self.stored, "y": normal(1, n_tokens, d).bfloat16()}
        self.earlier = [normal(1, n_tokens, d).bfloat16() for _ in range(forward.earlier)]
        # D, then c of each earlier output
        self.window = torch.rand(1, n_tokens, 1 + forward.earlier, d_k, generator=generator)
        self.gain = 1 + 0.1 * normal(d)
        self.d_memory = normal(1, n_tokens, d_k, d).bfloat16()
        self.d_x = normal(1, n_tokens, d).bfloat16()
        p = self.module.ldm_parameters
        maps = [w.t().reshape(-1) for w in (p.w_forget, p.w_key, p.w_query) if w is not None]
        b_forget = torch.zeros(d_k) if p.b_forget is None else p.b_forget
        packed = torch.cat([*maps, self.gain, p.b_query, p.b_key, b_forget]).detach()
        self.packed = torch.nn.functional.pad(packed, (0, forward.n_parameters - packed.numel()))

    def truth(self) -> dict[str, torch.Tensor]:
        module = self.module.double()
        memory, y = self.stored.double(), self.sources["y"].double()
        if self.forward.stored8:
            memory = stored8.decode(self.stored).double()
        if self.forward.composed:
            held = self.window.double()
            memory = memory * held[..., 0, :, None]
            for i, other in enumerate(self.earlier, start=1):
                memory = memory + held[..., i, :, None] * other.double()[..., None, :]
        memory, y, gain = (t.requires_grad_() for t in (memory, y, self.gain.double()))
        (new_memory,), x, _, coefficients = module.reference((memory,), y, gain)
        forget = coefficients.get("forget", torch.ones(1)).detach()
        composed = self.forward.composed
        before = self.window if composed else self.window.new_ones(self.window.shape)
        after = [before * forget[..., None, :], coefficients["key"].detach()[..., None, :]]
        outputs, grads = [x], [self.d_x.double()]
        if self.backward is None or self.backward.memory_gradient:
            outputs, grads = [new_memory, x], [self.d_memory.double(), self.d_x.double()]
        torch.autograd.backward(outputs, grads)
        return {
            "new memory": new_memory.detach(),
            "coefficients": torch.cat(after, dim=-2),
            "x": x.detach(),
            "memory": memory.grad,
            "y": y.grad,
            "norm_weight": gain.grad,
            **{name: p.grad for name, p in module.named_parameters()},
        }

    def run(self, clusters: int, seed: int) -> dict[str, torch.Tensor]:
        memory = ptx_emulator.Memory()
        arrays: dict[str, np.ndarray] = {}
        addresses: dict[str, int] = {}

        def add(name: str, t: torch.Tensor) -> None:
            kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
            bits = t.contiguous().view(kinds[t.element_size()])
            arrays[name] = bits.numpy().copy()
            addresses[name] = memory.add(arrays[name])

        def empty(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            add(name, torch.full(shape, float("nan"), dtype=dtype))

        def get(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.from_numpy(arrays[name]).view(dtype)

        def launch(spec: Spec, grid: int, *parameters: Any) -> None:
            values = [addresses[p] if isinstance(p, str) else p for p in parameters]
            ptx_emulator.launch(compiled(spec), grid, spec.cluster, values, memory, seed)

        s = self.forward
        d, d_k, n = s.d, s.d_k, self.n
        bf16 = torch.bfloat16
        for name, t in {**self.sources, "packed": self.packed}.items():
            add(name, t)
        empty("saved", n, s.saved_columns)
        empty("extra", n, s.extra_columns)
        if s.stored8:
            add("new memory", torch.full((1, n, d_k, d), 0x7F, dtype=torch.uint8))
            empty("units", 1, n, d_k)
        else:
            empty("new memory", 1, n, d_k, d, dtype=bf16)
        empty("x", 1, n, d, dtype=bf16)
        earlier = [f"y_{i}" for i in range(s.earlier)]
        for name, t in zip(earlier, self.earlier, strict=True):
            add(name, t)
        add("window", self.window)
        empty("new window", 1, n, 2 + s.earlier, d_k)
        in_place = not s.saves
        out = "memory" if in_place else "new memory"
        before = "window" if s.composed else 0
        after = "new window" if not s.writes else "units" if s.stored8 else 0
        launch(
            s, clusters * s.cluster,
            "memory", "y", "packed", "saved" if s.saves else 0, "extra" if s.extra else 0,
            out if s.writes else 0, "x", before, after, *earlier, n, EPS,
        )  # fmt: skip
        results = {"x": get("x", bf16)}
        if s.writes and s.stored8:
            results["new memory"] = stored8.decode(get(out, torch.uint8)) * get("units")[..., None]
            self.units = get("units")
        elif s.writes:
            results["new memory"] = get(out, bf16)
        else:
            results["coefficients"] = get("new window")
        b = self.backward
        if b is None:
            return results
        add("d_memory_out", self.d_memory)
        add("d_x", self.d_x)
        empty("d_memory", 1, n, d_k, d, dtype=bf16)
        empty("d_y", 1, n, d, dtype=bf16)
        empty("partials", clusters, b.n_parameters)
        empty("d_parameters", b.n_parameters)
        launch(
            b, clusters * b.cluster,
            "memory", "y", "packed", "saved", "extra",
            "d_memory_out" if b.memory_gradient else 0, "d_x", "d_memory", "d_y", "partials",
            before, *earlier, n,
        )  # fmt: skip
        finish = Spec("finish", d, d_k, forget="none" if s.forget == "static" else s.forget)
        blocks = -(-b.n_parameters // FINISH_PARAMETERS)
        launch(finish, blocks, "partials", "d_parameters", clusters)
        results |= {"memory": get("d_memory", bf16), "y": get("d_y", bf16)}
        maps = [f"w_{m}" for m in ("forget", "key", "query") if m != "forget" or s.n_forget]
        sizes = [d * d_k] * len(maps) + [d, d_k, d_k, d_k]
        names = [*maps, "norm_weight", "b_query", "b_key", "b_forget"]
        pieces = get("d_parameters")[: sum(sizes)].split(sizes)
        return results | {
            name: t.view(d, d_k) if name in maps else t
            for name, t in zip(names, pieces, strict=True)
        }


@needs_dsl
@pytest.mark.parametrize(
    ("n_tokens", "clusters", "forward", "backward"),
    [
        (5, 2, {"d": 128, "d_k": 8}, {}),
        # Two blocks share a token; the ring is shorter than the work.
        (9, 1, {"d": 256, "d_k": 8, "cluster": 2, "max_stages": 2}, {"dots_warps": 4}),
        (7, 1, {"d": 128, "d_k": 4, "tokens": 4, "key_activation": "softmax"}, {}),
        # Columns that 8 warps do not share evenly, a tile that is not full, no gradient of the memory.
        (
            3,
            1,
            {"d": 576, "d_k": 8, "tokens": 4, "forget": "static"},
            {"cluster": 3, "tokens": 2, "memory_gradient": False},
        ),
        (3, 1, {"d": 640, "d_k": 4, "tokens": 2, "forget": "none"}, {"tokens": 4}),
        (3, 1, {"d": 128, "d_k": 16, "tokens": 1, "cluster": 2}, None),
        # For inference: nothing saved, the new memory over the old one.
        (
            9,
            1,
            {"d": 128, "d_k": 8, "cluster": 2, "max_stages": 2, "saves": False, "extra": False},
            None,
        ),
        # Windows: the first boundary of one, the last, one in the middle; tiles with the outputs of 4, 2 and 1 tokens.
        (9, 1, {"d": 128, "d_k": 8, "tokens": 4, "earlier": 1, "writes": False}, {"tokens": 2}),
        (
            9,
            1,
            {"d": 256, "d_k": 8, "tokens": 4, "cluster": 2, "earlier": 3, "max_stages": 2},
            {"tokens": 2, "memory_gradient": False},
        ),
        # Four warps for the dot products.
        (
            9,
            1,
            {"d": 128, "d_k": 4, "tokens": 4, "earlier": 2, "writes": False, "dots_warps": 4},
            {},
        ),
        # Seven for the coefficients: more than a tile has tokens.
        (
            9,
            1,
            {"d": 128, "d_k": 8, "cluster": 2, "tokens": 4, "earlier": 1, "coefficient_warps": 7},
            {"tokens": 2},
        ),
        (7, 2, {"d": 64, "d_k": 8, "tokens": 2, "coefficient_warps": 7}, {"tokens": 2}),
        (3, 1, {"d": 64, "d_k": 8, "earlier": 7, "forget": "static"}, {}),
        # Seven outputs of eight rows: all rows that a lane's first column can be have one.
        (3, 1, {"d": 64, "d_k": 8, "earlier": 6, "writes": False}, {}),
        (5, 2, {"d": 128, "d_k": 8, "writes": False, "forget": "none"}, None),
        # The stored memory in FP8: a window's first boundary, one in the middle, and last ones, which store it again.
        (5, 2, {"d": 128, "d_k": 8, "stored8": True, "writes": False}, {}),
        (
            9,
            1,
            {
                "d": 256,
                "d_k": 8,
                "tokens": 4,
                "cluster": 2,
                "earlier": 1,
                "writes": False,
                "stored8": True,
            },
            {"tokens": 2, "dots_warps": 4},
        ),
        (
            9,
            1,
            {"d": 128, "d_k": 8, "tokens": 4, "earlier": 3, "stored8": True, "max_stages": 2},
            {"tokens": 2, "memory_gradient": False},
        ),
        # Four columns for each thread of the backward, and widths that 8 warps do not share evenly.
        (3, 1, {"d": 640, "d_k": 4, "tokens": 2, "earlier": 2, "stored8": True}, {"tokens": 4}),
        (3, 1, {"d": 576, "d_k": 8, "stored8": True}, {"cluster": 3}),
    ],
    ids=str,
)
def test_kernels_in_an_emulator(n_tokens, clusters, forward, backward):
    spec = Spec("forward", **forward)
    other = None if backward is None else Spec("backward", **{**forward, **backward})
    case = Emulated(n_tokens, spec, other)
    results = case.run(clusters, seed=1)
    again = case.run(clusters, seed=2)
    truth = case.truth()
    for name, t in results.items():
        if name == "b_forget" and name not in truth:
            assert not t.any()
            continue
        bound = 2.5e-3 if t.dtype == torch.bfloat16 else 2e-5
        if name == "new memory" and spec.stored8:
            check_stored8(t, truth[name], case.units)
        else:
            assert relative_rms(t, truth[name]) < bound, name
        assert torch.equal(t, again[name]), f"{name} depends on the order of the warps"
    assert (
        set(truth) - set(results) == {"coefficients" if spec.writes else "new memory"} or not other
    )


class EmulatedWindow:
    """All boundaries of a window in emulated memory, forward and then backward by the kernels for whole windows."""

    def __init__(self, n_tokens: int, window: int, d: int, d_k: int, **numbers: Any):
        self.n, self.window, self.d, self.d_k, self.numbers = n_tokens, window, d, d_k, numbers
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        def vectors() -> list[torch.Tensor]:
            return [normal(1, n_tokens, d).bfloat16() for _ in range(window)]

        self.modules = [boundary(d, d_k=d_k) for _ in range(window)]
        with torch.no_grad():
            for module in self.modules:
                for name, p in module.named_parameters():
                    p.add_(normal(*p.shape) * (1.5 * d**-0.5 if name.startswith("w_") else 0.5))
        self.memory = (normal(1, n_tokens, 1, d) + 0.5 * normal(1, n_tokens, d_k, d)).bfloat16()
        self.units = None
        if numbers.get("stored8"):
            stored, self.units = stored8.store(self.memory)
            self.memory, self.stored = stored8.decode(stored) * self.units[..., None], stored
        self.y, self.d_x = vectors(), vectors()
        self.gain = [1 + 0.1 * normal(d) for _ in range(window)]
        self.d_memory = normal(1, n_tokens, d_k, d).bfloat16()

    def truth(self) -> dict[str, torch.Tensor]:
        leaves = [self.memory, *self.y, *self.gain]
        memory, *rest = (t.double().detach().requires_grad_() for t in leaves)
        ys, gains = rest[: self.window], rest[self.window :]
        state: tuple[torch.Tensor, ...] = (memory,)
        ends = []
        for module, y, gain in zip(self.modules, ys, gains, strict=True):
            state, x, _, _ = module.double().reference(state, y, gain)
            ends.append(x)
        torch.autograd.backward([*ends, state[0]], [t.double() for t in (*self.d_x, self.d_memory)])
        out = {"memory": memory.grad}
        for i, module in enumerate(self.modules):
            out |= {f"x {i}": ends[i].detach(), f"y {i}": ys[i].grad}
            out |= {f"norm_weight {i}": gains[i].grad}
            out |= {f"{name} {i}": p.grad for name, p in module.named_parameters()}
        return out

    def run(self, clusters: int, seed: int) -> dict[str, torch.Tensor]:
        memory = ptx_emulator.Memory()
        arrays: dict[str, np.ndarray] = {}
        addresses: dict[str, int] = {"": 0}
        bf16 = torch.bfloat16

        def add(name: str, t: torch.Tensor) -> None:
            kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
            bits = t.detach().contiguous().view(kinds[t.element_size()])
            arrays[name] = bits.numpy().copy()
            addresses[name] = memory.add(arrays[name])

        def empty(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            add(
                name, torch.full(shape, float("nan") if dtype != torch.uint8 else 0x7F, dtype=dtype)
            )

        def get(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.from_numpy(arrays[name]).view(dtype)

        def launch(spec: Spec, *parameters: Any) -> None:
            values = [addresses[p] if isinstance(p, str) else p for p in parameters]
            grid = clusters * spec.cluster
            ptx_emulator.launch(compiled(spec), grid, spec.cluster, values, memory, seed)

        n, d, d_k, c = self.n, self.d, self.d_k, self.window
        common = {"d": d, "d_k": d_k, **self.numbers}
        in_units = bool(self.numbers.get("stored8"))
        add("memory", self.stored if in_units else self.memory)
        if self.units is not None:
            add("window 0", self.units)
        else:
            addresses["window 0"] = 0
        empty("end", 1, n, d_k, d, dtype=torch.uint8 if in_units else bf16)
        for i in range(c):
            p = self.modules[i].float().ldm_parameters
            maps = [w.t().reshape(-1) for w in (p.w_forget, p.w_key, p.w_query)]
            packed = torch.cat([*maps, self.gain[i], p.b_query, p.b_key, p.b_forget])
            s = Spec("forward", earlier=i, writes=i == c - 1, **common)
            add(f"packed {i}", torch.nn.functional.pad(packed, (0, s.n_parameters - len(packed))))
            add(f"y {i}", self.y[i])
            add(f"d_x {i}", self.d_x[i])
            empty(f"saved {i}", n, s.saved_columns)
            empty(f"extra {i}", n, s.extra_columns)
            empty(f"x {i}", 1, n, d, dtype=bf16)
            empty(f"window {i + 1}", 1, n, d_k if s.writes else (2 + i) * d_k)
            earlier = [f"y {e}" for e in range(i)]
            launch(
                s, "memory", f"y {i}", f"packed {i}", f"saved {i}", f"extra {i}",
                "end" if s.writes else "", f"x {i}", f"window {i}",
                f"window {i + 1}" if not s.writes or in_units else "", *earlier, n, EPS,
            )  # fmt: skip
        add("d_end", self.d_memory)
        empty("d_memory", 1, n, d_k, d, dtype=bf16)
        results = {}
        for i in reversed(range(c)):
            gather = "end" if i == c - 1 else "middle" if i else "first"
            b = Spec("backward", earlier=i, gather=gather, window=c, **common)
            if i == c - 1:
                empty("bundle", n, b.bundle_rows, d, dtype=bf16)
            empty(f"d_y {i}", 1, n, d, dtype=bf16)
            empty(f"partials {i}", clusters, b.n_parameters)
            empty(f"d_parameters {i}", b.n_parameters)
            launch(
                b, "memory", f"y {i}", f"packed {i}", f"saved {i}", f"extra {i}",
                "d_end" if b.reads_gradient else "", f"d_x {i}", "d_memory" if not i else "",
                f"d_y {i}", f"partials {i}", f"window {i}", "bundle",
                *[f"y {e}" for e in range(i)], n,
            )  # fmt: skip
            blocks = -(-b.n_parameters // FINISH_PARAMETERS)
            values = [addresses[f"partials {i}"], addresses[f"d_parameters {i}"], clusters]
            finish = compiled(Spec("finish", d, d_k))
            ptx_emulator.launch(finish, blocks, 1, values, memory, seed)
            names = ["w_forget", "w_key", "w_query", "norm_weight", "b_query", "b_key", "b_forget"]
            sizes = [d * d_k] * 3 + [d] + [d_k] * 3
            pieces = get(f"d_parameters {i}")[: sum(sizes)].split(sizes)
            results |= {f"x {i}": get(f"x {i}", bf16), f"y {i}": get(f"d_y {i}", bf16)}
            results |= {
                f"{name} {i}": t.view(d, d_k) if name.startswith("w_") else t
                for name, t in zip(names, pieces, strict=True)
            }
        return results | {"memory": get("d_memory", bf16)}


@needs_dsl
@pytest.mark.parametrize(
    ("n_tokens", "clusters", "numbers"),
    [
        (3, 1, {"window": 4, "d": 128, "d_k": 8}),
        (5, 1, {"window": 3, "d": 256, "d_k": 8, "cluster": 2, "max_stages": 2, "dots_warps": 4}),
        (5, 2, {"window": 2, "d": 128, "d_k": 4, "tokens": 2}),
        (3, 1, {"window": 3, "d": 128, "d_k": 8, "stored8": True}),
        (3, 1, {"window": 4, "d": 640, "d_k": 4, "tokens": 2, "stored8": True}),
    ],
    ids=str,
)
def test_a_whole_window_in_an_emulator(n_tokens, clusters, numbers):
    """
    The gradients between the boundaries of a window are BF16: of dh, u and what is left for an output, each rounded to 2^-9 of itself at
    most, and what is left c - 2 times more.
    """
    case = EmulatedWindow(n_tokens, **numbers)
    results, again = case.run(clusters, seed=1), case.run(clusters, seed=2)
    truth = case.truth()
    assert set(results) == set(truth)
    for name, t in results.items():
        assert torch.equal(t, again[name]), f"{name} depends on the order of the warps"
        vectors = t.dtype == torch.bfloat16
        limit = 2.5e-3 if name.startswith("x") else 3.5e-3 if vectors else 2e-2
        assert relative_rms(t, truth[name]) < limit, (name, relative_rms(t, truth[name]))


def check_stored8(decoded: torch.Tensor, exact: torch.Tensor, units: torch.Tensor) -> None:
    """Rounded to nearest: a 16th of the number at most, and half of the smallest step; units are powers of two, 1/8 to 1/16 of the RMS."""
    rms = exact.square().mean(dim=-1).sqrt()
    assert torch.equal(units, torch.exp2(torch.log2(units).round()))
    assert ((rms / units > 7.99) & (rms / units < 16.01)).all()
    step = torch.maximum(exact.abs() / 16, 2.0**-10 * units[..., None])
    assert ((decoded - exact).abs() <= 1.001 * step + 1e-6 * rms[..., None]).all()


CUOBJDUMP = "backends/nvidia/bin/cuobjdump"


def stack_bytes(cubin: bytes, folder) -> int | None:
    """Local memory of a kernel; ``None`` without Triton's copy of the tool."""
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    tool = os.path.join(os.path.dirname(spec.origin), CUOBJDUMP)
    if not os.path.exists(tool):
        return None
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", shown.stdout)
    assert found is not None
    return int(found[1])


@needs_dsl
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("d", "d_k", "window"), [(1024, 8, 1), (2048, 4, 1), (1024, 16, 1), (2048, 8, 4)]
)
def test_compiled_code(d, d_k, window, architecture, tmp_path):
    specs = launch_table.specs(
        architecture, d, d_k, "two_sigmoid", "dynamic", window, gather=window > 1
    )
    for spec in specs if window == 1 else [s for s in specs if s.earlier == window - 1 or s.gather]:
        code, ptx = cache.build(spec, architecture)
        # 64-bit addresses of global memory, everywhere.
        for operand in re.findall(r"(?:ld|st)\.global\S* .*?\[([^\]]*)\]", ptx):
            assert operand.startswith("%rd"), operand
        assert ".local" not in ptx
        if spec.direction == "finish":
            continue
        sources = re.findall(r"cp\.async\.bulk\S* \[%r\d+\], \[(%\w+)\]", ptx)
        # One after the other from one lane, with addresses of the warp: not in a loop over the lanes.
        assert len(sources) == spec.rows and "elect.sync" in ptx
        assert all(s.startswith("%rd") for s in sources)
        if spec.direction == "forward":
            # 16 bytes for each row of the memory and x
            assert ptx.count("st.global.v4.b32") >= d_k * spec.writes + 1
        stack = stack_bytes(code.cubin, tmp_path)
        # The backward keeps a few addresses there, no sums; so does what stores the memory at the end of a window.
        # Of at most 14 loads from there, 8 are in the loop over tiles.
        # That of a whole window's end keeps what it leaves for the earlier outputs, too.
        limit = 0 if spec.direction == "forward" and not spec.earlier else 80
        limit = 128 if spec.gather else limit
        assert stack is None or stack <= limit, f"{spec.name}: {stack} bytes"


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("d", "d_k", "n_tokens", "options"), tune.CHECKS, ids=str)
def test_against_fp64(d, d_k, n_tokens, options):
    reason = fast.unavailable(
        torch.device("cuda"), torch.bfloat16, d, LDMConfig(d_k=d_k, **options), by_name=True
    )
    if reason is not None:
        pytest.skip(reason)
    assert not tune.check(d, d_k, n_tokens, options)["wrong"]


@pytest.mark.gpu
@needs_gpu
def test_streams_graphs_and_large_addresses():
    reason = fast.unavailable(torch.device("cuda"), torch.bfloat16, 2048, LDMConfig(), by_name=True)
    if reason is not None:
        pytest.skip(reason)
    assert not tune.check_streams(1024, 8)
    assert not tune.check_large(2048, 8, 140_000)


def test_tune_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        tune.main()


def test_tune_ends_a_part_that_says_nothing(monkeypatch, tmp_path):
    """A kernel that waits for ever must not take the rest of the machine's time."""
    part = tmp_path / "part.py"
    part.write_text(
        'import time\nprint(\'{"kind": "start", "name": "loop"}\', flush=True)\ntime.sleep(60)'
    )
    monkeypatch.setattr(tune, "SILENCE_S", 0.5)
    monkeypatch.setattr(tune, "worker", lambda name: [sys.executable, str(part)])
    report: dict[str, Any] = {"lines": [], "wrong": []}
    tune.stage("check", tmp_path / "out.json", report)
    assert any("at loop; ended" in w for w in report["wrong"])


def test_tune_records_what_its_parts_say(monkeypatch, tmp_path, capsys):
    line = {"kind": "check", "name": "a", "errors": {"output x": [1e-3, 2e-3]}, "wrong": ["b"]}
    part = tmp_path / "part.py"
    part.write_text(f"print({json.dumps(line)!r})\nprint('a warning')")
    monkeypatch.setattr(tune, "worker", lambda name: [sys.executable, str(part)])
    report: dict[str, Any] = {"lines": [], "wrong": []}
    tune.stage("check", tmp_path / "out.json", report)
    assert report == {"lines": [line], "wrong": ["a: b"]}
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert "output 1.0e-03 WRONG b" in capsys.readouterr().out

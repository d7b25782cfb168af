"""
mHC's ``fast`` backend. Without a GPU: choice of backend, launch rule, launches; with the CuTe DSL installed, the compiled
kernels' PTX, and the kernels themselves in an emulator of PTX against the reference in FP64. With a GPU, ``tune``'s checks.
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

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.hyper_connections.backends import fast
from olmo_core.nn.hyper_connections.backends.fast import launch_table, precompile
from olmo_core.nn.hyper_connections.backends.fast.layout import Spec
from olmo_core.nn.hyper_connections.backends.reference import mhc_controls
from olmo_core.nn.ldm.backends.fast import cache
from olmo_core.nn.ldm.backends.fast.layout import SHARED_BYTES

pytest.importorskip("triton")

import ptx_emulator
from test_ldm_fast import stack_bytes

from olmo_core.nn.hyper_connections.backends.fast import ops, tune
from olmo_core.nn.hyper_connections.backends.flexible import tune as flexible

EPS = 1e-5
needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl: the extra 'cute'"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# The choice of the backend.


def test_refusals(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def reason(device=cuda, dtype=torch.bfloat16, d=1024, by_name=True, **options):
        return fast.unavailable(
            device, dtype, d, HyperConnectionsConfig(**options), by_name=by_name
        )

    assert "n_streams = 4, not 2" in reason(n_streams=2)
    assert "BF16, not float32" in reason(dtype=torch.float32)
    assert "256 or 128 columns, not 1088" in reason(d=1088)
    assert "not 4096" in reason(d=4096)
    assert "needs a CUDA device, got 'cpu'" in reason(cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Hopper or Blackwell" in reason() and "8.0" in reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    assert reason() is None
    assert reason(by_name=False) is None and reason(by_name=False, d=2048) is None
    assert "512 with residual_map sinkhorn was not timed on sm_90a" in reason(by_name=False, d=512)
    assert "1024 with residual_map identity was not" in reason(
        by_name=False, residual_map="identity"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert reason() is None and "was not timed on sm_100f" in reason(by_name=False)
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    monkeypatch.setenv(cache.PLACES, "nowhere")
    assert "no compiled kernel was found" in reason()


def test_by_name_it_says_why_not_and_auto_goes_on(monkeypatch):
    def select(device: str, d_model: int = 1024, **options: Any):
        module = HyperConnectionsConfig(**options).build(
            d_model=d_model, index=1, n_sublayers=4, eps=EPS
        )
        return module.select_backend(torch.device(device), torch.bfloat16)

    with pytest.raises(OLMoConfigurationError, match=r"'fast' cannot run.*n_streams = 4, not 2"):
        select("cuda", backend="fast", n_streams=2)
    assert select("cpu") == DepthBackend.reference
    assert select("cuda", d_model=512) == DepthBackend.flexible
    monkeypatch.setattr(fast, "unavailable", lambda *a, **k: None)
    assert select("cuda") == DepthBackend.fast


@pytest.mark.parametrize("d", [128, 256, 384, 512, 768, 1024, 1536, 1792, 2048])
def test_launches_fit_the_machine(d):
    for residual in ("sinkhorn", "identity"):
        s = launch_table.spec(d, residual)
        assert s is not None and s.columns * s.cluster == d and 1 <= s.cluster <= 8
        assert s.stages >= 3 and s.shared["size"] <= SHARED_BYTES
        assert s.barriers["exchange"] + 64 <= s.shared["gain"]
        assert s.token_bytes % 128 == 64  # no bank conflicts
        r = s.registers
        given = s.main_warps * r["main"] + s.helper_warps * r["helper"]
        assert 32 * given <= s.start_registers * s.threads <= 65_536
        assert s.main_warps % 4 == s.helper_warps % 4 == 0  # registers move by groups of 4


def test_only_boundaries_between_the_first_and_the_last_have_a_kernel():
    for residual in ("sinkhorn", "identity"):
        codes = [
            HyperConnectionsConfig(residual_map=residual)
            .build(d_model=128, index=i, n_sublayers=3, eps=EPS)
            .options_code
            for i in range(4)
        ]
        assert [ops.has_kernel(code) for code in codes] == [False, True, True, False]


def test_no_compiler_and_no_kernel_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.PLACES, str(tmp_path))
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(
        RuntimeError, match=r"mhc_1024.*extra 'cute'.*hyper_connections.backends.fast.precompile"
    ):
        ops._kernel(Spec(1024, cluster=4), 0)


def test_precompile_and_tune_refuse_with_a_sentence(monkeypatch):
    with pytest.raises(SystemExit, match="'1024x4' is not that"):
        precompile.parse_widths("1024x4")
    monkeypatch.setattr(sys, "argv", ["precompile", "--out", "x", "--widths", "1088"])
    monkeypatch.setattr(cache, "dsl_version", lambda: None)
    with pytest.raises(SystemExit, match="extra 'cute'"):
        precompile.main()
    monkeypatch.setattr(cache, "dsl_version", lambda: cache.DSL_VERSION)
    with pytest.raises(SystemExit, match="no kernel for d_model 1088"):
        precompile.main()
    monkeypatch.setattr(sys, "argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        tune.main()


# The kernel in an emulator.


@functools.cache
def compiled(spec: Spec) -> str:
    return cache.build(spec, "sm_90a")[1]


class Emulated:
    """One boundary with all its tensors in emulated memory."""

    def __init__(self, n_tokens: int, spec: Spec):
        self.n, self.spec = n_tokens, spec
        # The two options can differ in the kernel, not in a module.
        self.module = flexible.boundary(
            spec.d, 4, "reference", device="cpu", residual_map=spec.next
        )
        self.inputs, _ = flexible.draw(self.module, n_tokens, torch.bfloat16, "cpu")
        assert spec.previous == spec.next

    def run(self, clusters: int, seed: int) -> dict[str, torch.Tensor]:
        memory = ptx_emulator.Memory()
        arrays: dict[str, np.ndarray] = {}
        addresses: dict[str, int] = {}

        def add(name: str, t: torch.Tensor) -> None:
            bits = t.contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)
            arrays[name] = bits.numpy().copy()
            addresses[name] = memory.add(arrays[name])

        s, n, d = self.spec, self.n, self.spec.d
        module = self.module
        for name, t in self.inputs.items():
            add(name, t)
        addresses.setdefault("res", 0)
        for name, p in module.named_parameters():
            add(name, p.detach())
        shapes = {"new streams": (n, 4, d), "x": (n, d)}
        for name, shape in shapes.items():
            add(name, torch.full(shape, float("nan"), dtype=torch.bfloat16))
        add("new post", torch.full((n, 4), float("nan")))
        add("new res", torch.full((n, 4, 4), float("nan")))
        add("saved", torch.full((n * (s.phi_columns + 6),), float("nan")))
        order = ("streams", "y", "post", "res", "phi", "alpha", "bias", "norm_weight")
        given = [
            addresses[name] for name in (*order, "new streams", "x", "new post", "new res", "saved")
        ]
        ptx_emulator.launch(
            compiled(s), clusters * s.cluster, s.cluster, [*given, n, 20, EPS], memory, seed
        )
        out = {name: torch.from_numpy(arrays[name]).view(torch.bfloat16) for name in shapes}
        sizes = [n * s.phi_columns, n, n, n * 4]
        parts = torch.from_numpy(arrays["saved"]).view(torch.float32).split(sizes)
        names = ("products", "rstd", "rstd_h", "pre")
        out["new post"] = torch.from_numpy(arrays["new post"]).view(torch.float32)
        if s.next == "sinkhorn":
            out["new res"] = torch.from_numpy(arrays["new res"]).view(torch.float32)
        return {**out, **dict(zip(names, parts, strict=True))}

    def truth(self, streams: torch.Tensor) -> dict[str, torch.Tensor]:
        """:param streams: The new streams as the kernel rounded them: what is saved comes from these."""
        module = self.module.double()
        i = {name: t.double() for name, t in self.inputs.items()}
        state = tuple(i[name] for name in ("streams", "post", "res") if name in i)
        (new, *_), x, h, _ = module.reference(state, i["y"], i["norm_weight"])
        rounded = streams.double().view(self.n, -1)
        products = rounded @ module.phi
        rstd = torch.rsqrt(rounded.square().mean(dim=-1) + EPS)
        pre = torch.sigmoid(module.alpha[0] * products[:, :4] * rstd[:, None] + module.bias[:4])
        h = (pre[..., None] * rounded.view(self.n, 4, -1)).sum(dim=1)
        rstd_h = torch.rsqrt(h.square().mean(dim=-1) + EPS)
        exact = {"products": products, "rstd": rstd, "rstd_h": rstd_h, "pre": pre}
        controls = mhc_controls(
            rounded.view(self.n, 4, -1), module.phi, module.alpha, module.bias, EPS, 20
        )
        exact["new post"] = controls.post
        if controls.res is not None:
            exact["new res"] = controls.res
        return {"new streams": new, "x": x} | {k: t.detach() for k, t in exact.items()}


def relative_rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return flexible.relative_rms(a.reshape(-1), b.reshape(-1))


@needs_dsl
@pytest.mark.parametrize(
    ("n_tokens", "clusters", "options"),
    [
        (1, 1, {"d": 128}),
        # The ring is shorter than the work; a tile that is not full.
        (37, 1, {"d": 128, "max_stages": 2}),
        # Two blocks share a token; nothing is loaded ahead.
        (17, 1, {"d": 256, "cluster": 2, "max_stages": 1}),
        # Two blocks, each with its own tokens.
        (17, 2, {"d": 128}),
        # Eight main warps.
        (9, 1, {"d": 512, "cluster": 2}),
        (9, 1, {"d": 512, "cluster": 4, "previous": "identity", "next": "identity"}),
    ],
    ids=str,
)
def test_kernel_in_an_emulator(n_tokens, clusters, options):
    case = Emulated(n_tokens, Spec(**options))
    results = case.run(clusters, seed=1)
    again = case.run(clusters, seed=2)
    truth = case.truth(results["new streams"])
    assert set(results) == set(truth)
    for name, t in results.items():
        bound = 2.5e-3 if t.dtype == torch.bfloat16 else 1e-5
        assert relative_rms(t, truth[name]) < bound, name
        assert torch.equal(t, again[name]), f"{name} depends on the order of the warps"


class EmulatedPlan:
    """In the place of the driver: runs a kernel on tensors of the CPU, at their own addresses."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.runs = 0

    def clusters(self, n_tokens: int) -> int:
        return 1

    def kernel(self, blocks: int, *values: Any) -> None:
        memory = ptx_emulator.Memory()
        n, d, c = values[13], self.spec.d, self.spec.phi_columns
        sizes = [8 * n * d, 2 * n * d, 16 * n, 64 * n, 16 * d * c, 12, 4 * c, 4 * d]
        sizes += [8 * n * d, 2 * n * d, 16 * n, 64 * n, 4 * n * (c + 6)]
        for address, size in zip(values[:13], sizes, strict=True):
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            memory.arrays.append((address, array))
        self.runs += 1
        ptx_emulator.launch(
            compiled(self.spec), blocks, self.spec.cluster, list(values), memory, self.runs
        )


@needs_dsl
def test_a_module_with_gradients(monkeypatch):
    """The kernel in the emulator, the rest in Triton's interpreter; against the reference in FP64."""
    if torch.cuda.is_available():
        pytest.skip("Triton does not interpret where there is a GPU")
    plan = EmulatedPlan(Spec(128))
    monkeypatch.setattr(ops, "_plan", lambda *key: plan)
    monkeypatch.setattr(fast, "unavailable", lambda *a, **k: None)
    found = flexible.check(128, 4, 9, device="cpu", backend="fast", sinkhorn_iterations=3)
    assert not any("repeat" in text for text in found["wrong"])
    # Triton's interpreter cuts BF16 numbers off instead of rounding them: the gradients are as good as flexible's there.
    bounds = {"output": 2.5e-3, "source": 4e-3, "parameter": 1.2e-2}
    for name, (error, _) in found["errors"].items():
        assert error < bounds[name.split()[0]], name
    assert plan.runs == 2 and len(found["errors"]) >= 15


# Compiled code.


@needs_dsl
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("d", [1024, 2048])
def test_compiled_code(d, architecture, tmp_path):
    spec = launch_table.spec(d, "sinkhorn")
    assert spec is not None
    code, ptx = cache.build(spec, architecture)
    # 64-bit addresses of global memory, everywhere.
    for operand in re.findall(r"(?:ld|st)\.global\S* .*?\[([^\]]*)\]", ptx):
        assert operand.startswith("%rd"), operand
    sources = re.findall(r"cp\.async\.bulk\S* \[%r\d+\], \[(%\w+)\]", ptx)
    assert sources and all(s.startswith("%rd") for s in sources)
    # 16 bytes for each new stream, x, the products and a row of H_res.
    assert ptx.count("st.global.v4.b32") == 7
    assert ".local" not in ptx and not stack_bytes(code.cubin, tmp_path)


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n_tokens", [1, 37, 1061, 16384])
@pytest.mark.parametrize("d", [512, 1024, 2048])
def test_against_fp64(d, n_tokens):
    reason = fast.unavailable(
        torch.device("cuda"), torch.bfloat16, d, HyperConnectionsConfig(), by_name=True
    )
    if reason is not None:
        pytest.skip(reason)
    for residual in ("sinkhorn", "identity"):
        found = flexible.check(d, 4, n_tokens, backend="fast", residual_map=residual)
        assert not found["wrong"], residual


@pytest.mark.gpu
@needs_gpu
def test_streams_graphs_and_large_addresses():
    reason = fast.unavailable(
        torch.device("cuda"), torch.bfloat16, 2048, HyperConnectionsConfig(), by_name=True
    )
    if reason is not None:
        pytest.skip(reason)
    assert not tune.check_streams(2048)
    assert not tune.check_large(2048, 270_000)

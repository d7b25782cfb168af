"""The Triton kernels that all methods share in inference, against PyTorch, with new memory and unused slots full of NaN."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import METHODS, VOCAB, build_model, enlarge, randomize_boundaries, tiny_config, tokens

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.generate.generation_module import GenerationConfig
from olmo_core.nn.depth import PreLNConfig, attention_cache, inference
from olmo_core.nn.depth.connection import rms_norm
from olmo_core.nn.depth.generation import DepthGenerationModule
from olmo_core.nn.depth.inference import PackedWeights
from olmo_core.nn.depth.input_gradient import join
from olmo_core.nn.depth.session import InferenceSession
from olmo_core.nn.feed_forward import FeedForward
from olmo_core.nn.rope import RotaryEmbedding

pytest.importorskip("triton")
from olmo_core.nn.depth import triton_inference_ops as ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("poison_empty_memory")


@pytest.fixture(autouse=True)
def kernels_on_any_device(monkeypatch):
    monkeypatch.setattr(inference, "INTERPRETER", True)


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def rope_tables(head_dim, n_slots):
    rope = RotaryEmbedding(head_size=head_dim, theta=100)
    table = rope.get_buffers(n_slots, DEVICE)
    return rope, table.pos_cos, table.pos_sin


def turned(rope, t, slots):
    """Upstream's RoPE of ``t``, ``[B, T, H, E]``, at positions ``slots``, ``[B, T]``, in FP64 but for the tables."""
    rows = []
    for row, at in zip(t, slots, strict=True):
        table = rope.get_buffers(int(slots.max()) + 1, DEVICE)
        cos, sin = table.pos_cos[at][:, None].double(), table.pos_sin[at][:, None].double()
        x = row.double()
        half = x.shape[-1] // 2
        rows.append(x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin)
    return torch.stack(rows)


def attention(q, k_cache, v_cache, slots, window):
    """``q`` ``[B, HG, E]`` to the slots up to ``slots`` ``[B]``, FP64."""
    out = torch.empty_like(q)
    n_groups = q.shape[1] // k_cache.shape[2]
    for b, slot in enumerate(slots.tolist()):
        first = 0 if window < 0 else max(0, slot - window)
        k = k_cache[b, first : slot + 1].repeat_interleave(n_groups, dim=1)
        v = v_cache[b, first : slot + 1].repeat_interleave(n_groups, dim=1)
        p = (torch.einsum("he,she->hs", q[b], k) * q.shape[-1] ** -0.5).softmax(dim=-1)
        out[b] = torch.einsum("hs,she->he", p, v)
    return out


@pytest.mark.parametrize(
    ("n_heads", "n_groups", "head_dim", "n_slots", "rows", "window", "rope", "dtype"),
    [
        (2, 1, 16, 64, [0, 40, 63], -1, True, torch.float32),
        (2, 3, 24, 64, [5, 17], -1, True, torch.float32),
        (1, 2, 8, 16, [3, 15], -1, True, torch.float32),  # one part
        (1, 2, 16, 64, [50], 5, True, torch.float32),
        (2, 2, 16, 64, [1, 63], 30, False, torch.float32),
        (3, 1, 16, 48, [31], -1, False, torch.float16),
        (1, 17, 16, 32, [20], -1, True, torch.float32),
    ],
)
def test_decode_attention(n_heads, n_groups, head_dim, n_slots, rows, window, rope, dtype):
    n_rows = len(rows)
    slots = torch.tensor(rows, device=DEVICE).unsqueeze(1)
    q = draw(n_rows, 1, n_heads * n_groups, head_dim, dtype=dtype)
    k, v = (draw(n_rows, 1, n_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    k_cache, v_cache = (
        draw(n_rows, n_slots, n_heads, head_dim, dtype=dtype, seed=s) for s in (3, 4)
    )
    beyond = torch.arange(n_slots, device=DEVICE) >= slots
    k_cache[beyond] = v_cache[beyond] = float("nan")
    module, cos, sin = rope_tables(head_dim, n_slots)
    expected_q, expected_k = q.double(), k.double()
    if rope:
        expected_q, expected_k = turned(module, q, slots), turned(module, k, slots)
    wanted_k, wanted_v = k_cache.double(), v_cache.double()
    index = torch.arange(n_rows, device=DEVICE)
    wanted_k[index, slots[:, 0]] = expected_k[:, 0]
    wanted_v[index, slots[:, 0]] = v[:, 0].double()
    expected = attention(expected_q[:, 0], wanted_k, wanted_v, slots[:, 0], window)

    for _ in range(2):  # the same step again writes the same
        out = ops.decode_attention(
            q, k, v, slots, cos if rope else None, sin if rope else None, k_cache, v_cache,
            head_dim**-0.5, window,
        )  # fmt: skip
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(out[:, 0].double(), expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            k_cache.double(), wanted_k, rtol=0, atol=tolerance, equal_nan=True
        )
        assert torch.equal(v_cache.double().nan_to_num(9), wanted_v.nan_to_num(9))


def test_one_position_for_all_rows():
    slots = torch.tensor([[9]], device=DEVICE)
    q, k, v = (draw(2, 1, 2, 16, seed=s) for s in range(3))
    _, cos, sin = rope_tables(16, 32)
    outs = []
    for s in (slots, slots.expand(2, 1).contiguous()):
        k_cache, v_cache = (draw(2, 32, 2, 16, seed=n) for n in (3, 4))
        outs.append(ops.decode_attention(q, k, v, s, cos, sin, k_cache, v_cache, 0.25))
        outs.append(k_cache)
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


@pytest.mark.parametrize("n_rows", [1, 3])
def test_decode_attention_reads_parts_of_one_product(n_rows, monkeypatch):
    H, G, E = 2, 3, 16
    slots = torch.tensor([[9]], device=DEVICE)
    qkv = draw(n_rows, 1, H * G + 2 * H, E)
    parts = qkv.split([H * G, H, H], dim=2)
    _, cos, sin = rope_tables(E, 32)
    outs, launched = [], []
    plan = ops._decode_plan

    def planned(*arguments):
        launched.append(arguments[-1])
        return plan(*arguments)

    monkeypatch.setattr(ops, "_decode_plan", planned)
    for q, k, v in (parts, [t.contiguous() for t in parts]):
        k_cache, v_cache = (draw(n_rows, 32, H, E, seed=n) for n in (3, 4))
        outs.append(ops.decode_attention(q, k, v, slots, cos, sin, k_cache, v_cache, 0.25))
        outs += [k_cache, v_cache]
    assert launched == [n_rows > 1, False]
    for packed, apart in zip(outs[:3], outs[3:], strict=True):
        assert torch.equal(packed, apart)


def test_parts_follow_the_size():
    launch = ops.AttentionLaunch()
    assert ops.n_splits(launch, 1, 16384, -1) == 4  # the interpreter's
    assert ops.n_splits(launch, 1, 100, -1) == 1
    assert ops.n_splits(launch, 8, 512, -1) == 4


@pytest.mark.parametrize("shared", [True, False])
def test_rope_store(shared):
    n_rows, n_tokens, n_slots, head_dim = 2, 5, 11, 12
    starts = torch.tensor([[3]] if shared else [[3], [6]], device=DEVICE)
    slots = starts + torch.arange(n_tokens, device=DEVICE)
    q = draw(n_rows, n_tokens, 6, head_dim)
    k, v = (draw(n_rows, n_tokens, 3, head_dim, seed=s) for s in (1, 2))
    k_cache, v_cache = (draw(n_rows, n_slots, 3, head_dim, seed=s) for s in (3, 4))
    module, cos, sin = rope_tables(head_dim, n_slots)
    every = slots.expand(n_rows, n_tokens)
    wanted_k, wanted_v = k_cache.clone().double(), v_cache.clone()
    for b in range(n_rows):
        wanted_k[b, every[b]] = turned(module, k, every)[b]
        wanted_v[b, every[b]] = v[b]
    out = ops.rope_store(q, k, v, slots, cos, sin, k_cache, v_cache)
    torch.testing.assert_close(out.double(), turned(module, q, every), rtol=0, atol=1e-6)
    torch.testing.assert_close(k_cache.double(), wanted_k, rtol=0, atol=1e-6)
    assert v_cache.equal(wanted_v)


@pytest.mark.parametrize("d", [16, 24, 600])
def test_add_rms_norm(d):
    for dtype in (torch.float32, torch.float16):
        h, y = draw(3, 2, d, dtype=dtype), draw(3, 2, d, dtype=dtype, seed=1)
        weight = draw(d, seed=2)
        h_out, x = ops.add_rms_norm(h, y, weight, 1e-6)
        assert h_out.equal(h + y)
        tolerance = 1e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(
            x, rms_norm(h + y, weight, 1e-6, dtype), rtol=tolerance, atol=tolerance
        )
        same, x = ops.add_rms_norm(None, y, weight, 1e-6)
        assert same is y
        torch.testing.assert_close(
            x, rms_norm(y, weight, 1e-6, dtype), rtol=tolerance, atol=tolerance
        )


def test_silu_mul():
    a, b = draw(3, 1300), draw(3, 1300, seed=1)
    torch.testing.assert_close(ops.silu_mul(a, b), F.silu(a) * b)
    assert ops.silu_mul(a[:0], b[:0]).shape == (0, 1300)
    # Not contiguous.
    torch.testing.assert_close(ops.silu_mul(a.T, b.T), (F.silu(a) * b).T)
    assert torch.equal(ops.silu_mul_packed(torch.cat([a, b], dim=-1)), ops.silu_mul(a, b))
    assert ops.silu_mul_packed(a[:0]).shape == (0, 650)


@pytest.mark.parametrize("joined", [False, True])
def test_packed_weights_are_the_layers_own(joined):
    """Also of layers that add up their input's gradient in their products: a model that trained so decodes as others do."""
    layers = [torch.nn.Linear(8, n, bias=False) for n in (6, 2)]
    if joined:
        join(*layers)
    before = [layer.weight.detach().clone() for layer in layers]
    packed = PackedWeights()
    with torch.inference_mode():
        matrix = packed.matrix(*layers)
    assert matrix is not None and torch.equal(matrix, torch.cat(before))
    assert packed.matrix(*layers) is matrix
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight, weight) and not layer.weight.is_inference()
    # What is loaded later is in the matrix, and a step of training goes through it.
    layers[1].load_state_dict({"weight": torch.full((2, 8), 3.0)})
    assert (matrix[6:] == 3).all()
    layers[0](torch.ones(1, 8)).sum().backward()
    assert layers[0].weight.grad is not None
    # New weights, not written into the old: packed anew.
    layers[0].weight = torch.nn.Parameter(torch.zeros(6, 8))
    new = packed.matrix(*layers)
    assert new is not matrix and (new[:6] == 0).all() and (new[6:] == 3).all()
    with torch.inference_mode():
        made = [torch.nn.Linear(8, n, bias=False) for n in (6, 2)]
        matrix = PackedWeights().matrix(*made)
    assert torch.equal(made[1].weight, matrix[6:])
    # As session.signature asks; a weight with half of an inference tensor has no version.
    assert [0 if layer.weight.is_inference() else layer.weight._version for layer in made] == [0, 0]
    for bad in (
        [layers[0], made[1]],
        [layers[0], torch.nn.Linear(8, 2)],
        [layers[0], torch.nn.Linear(8, 2, bias=False).half()],
        [torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False)],
    ):
        assert PackedWeights().matrix(*bad) is None


COMPILE = """
import importlib.util, inspect, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# By its path: importing OLMo-core takes longer than all the rest.
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

POINTERS = dict(slots="*i64", cos="*fp32", sin="*fp32", partial="*fp32")
NUMBERS = dict(n_slots="i32", slot_stride="i32", n_tokens="i32", scale="fp32", eps="fp32")


def compile(kernel, **constants):
    signature, attrs, values = {}, {}, {}
    for i, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            signature[name] = POINTERS.get(name, "*bf16")
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=values, attrs=attrs)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx, "nothing is loaded 16 bytes at a time"
    return ptx


shape = dict(Q_ROW=512, KV_ROW=512, K_AT=256, V_AT=384, H=2, G=2, BG=16, E=64, BE=64, BN=64, WINDOW=-1, ROPE=True, STAGES=3, PRECISION="tf32")
ptx = compile(kernels.decode_attention_kernel, SPLITS=4, **shape)
assert ptx.count("cp.async.cg") and "mma.sync" in ptx, "the loads of the cache are not pipelined"
compile(kernels.decode_attention_kernel, SPLITS=1, partial=None, **shape)
compile(kernels.combine_kernel, E=128, BE=128, SPLITS=16, BS=16)
compile(kernels.rope_store_kernel, HQ=16, BHQ=16, H=8, BH=8, E=128, BE=64)
compile(kernels.silu_mul_kernel, F=2736, BF=1024, ROW=5472, B_AT=2736)
compile(kernels.add_rms_norm_kernel, ADD=True, D=1024, BD=1024)
"""


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the other tests compile them")
def test_kernels_compile_for_a_gpu():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, ops.kernels.__file__],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# -- in a model --------------------------------------------------------------------------------


def make_model(depth=None, **kwargs):
    config = tiny_config(PreLNConfig() if depth is None else depth, d_model=32, **kwargs)
    model = build_model(config)
    enlarge(model)
    randomize_boundaries(model)
    return model.to(DEVICE).eval()


def module_of(model, n=4):
    return DepthGenerationModule.from_model(
        model,
        GenerationConfig(pad_token_id=0, eos_token_id=VOCAB, max_new_tokens=n, use_cache=True),
    )


@pytest.mark.parametrize(
    ("method", "n_kv_heads"), [("preln", 2), *((method, 1) for method in METHODS)]
)
def test_generation_with_the_kernels_equals_plain_pytorch(method, n_kv_heads, monkeypatch):
    model = make_model(METHODS[method], n_layers=1, n_kv_heads=n_kv_heads)
    ids = tokens(3, 9).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :7] = 0
    calls = []

    def count(name, op):
        monkeypatch.setattr(ops, name, lambda *a, **k: (calls.append(name), op(*a, **k))[1])

    for name in ("decode_attention", "rope_store", "silu_mul_packed"):
        count(name, getattr(ops, name))
    found = []
    for interpreter in (True, False):
        monkeypatch.setattr(inference, "INTERPRETER", interpreter)
        before = len(calls)
        found.append(
            module_of(model).generate_batch(
                ids, attention_mask=mask, return_logits=True, log_timing=False, prefill_chunk=5
            )
        )
        if DEVICE.type == "cpu":
            assert (len(calls) > before) == interpreter
    if DEVICE.type == "cpu":
        # Three steps after a prompt of two pieces.
        assert calls.count("decode_attention") == 3 and calls.count("rope_store") == 2
    assert found[0][0].equal(found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-4)


def test_a_first_pass_with_left_padding(monkeypatch):
    """What upstream's generation module asks for: slots that differ between rows, in another order than the columns."""
    model = make_model(n_layers=1, n_kv_heads=1)
    ids = tokens(2, 6).to(DEVICE)
    leftpad = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
    found = []
    for interpreter in (True, False):
        monkeypatch.setattr(inference, "INTERPRETER", interpreter)
        model.blocks["0"].attention.init_kv_cache_manager(2, 16)
        with torch.no_grad():
            parts = [model(ids, cache_leftpad=leftpad), model(ids[:, :1]), model(ids[:, 2:5])]
        found.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)


def test_prelns_kernel_is_for_inference(monkeypatch):
    calls = []
    monkeypatch.setattr(
        ops,
        "add_rms_norm",
        lambda *a, f=ops.add_rms_norm: (calls.append(1), f(*a))[1],
    )
    model = make_model(PreLNConfig(backend="flexible"), n_layers=1)
    ids = tokens(2, 4).to(DEVICE)
    with torch.no_grad():
        expected = model(ids)
    assert len(calls) == 3
    torch.testing.assert_close(model(ids), expected)
    model(ids).sum().backward()
    assert len(calls) == 3, "with gradients the reference runs"
    trained = make_model(PreLNConfig(backend="flexible"), n_layers=1)
    with pytest.raises(OLMoConfigurationError, match="no gradients"):
        trained(ids)


def test_what_the_kernels_cannot_take():
    x = draw(2, 8)
    with torch.no_grad():
        assert inference.inference_ops(x) is ops
        assert inference.inference_ops(x, x.half()) is None
        assert inference.inference_ops(x.double()) is None
        assert inference.inference_ops(x.to("meta")) is None or DEVICE.type == "cpu"
    assert inference.inference_ops(x) is None
    assert isinstance(make_model(n_layers=1).blocks["0"].feed_forward, FeedForward)
    # A head that no program holds.
    cache = attention_cache.StaticKVCache(attention_cache.CacheState(), 1, 8, 1, 512)
    with torch.no_grad():
        assert cache._ops(draw(1, 1, 1, 512)) is None


def test_a_session_for_a_model_that_was_made_in_inference_mode(monkeypatch):
    """As the benchmark makes its own: such weights have no version counter."""
    monkeypatch.setattr(inference, "INTERPRETER", True)
    with torch.inference_mode():
        model = tiny_config(PreLNConfig(), d_model=32, n_layers=1, n_kv_heads=1).build(
            init_device="meta"
        )
        model.init_weights(device=DEVICE, max_seq_len=16)
        model.eval()
        session = InferenceSession(model, 2, 16, cuda_graph=False)
        with session.attached():
            session.prefill(tokens(2, 5).to(DEVICE))
            session.begin(VOCAB, [])
            logits = session.step()
        # The step packed the weights; the next session finds them so.
        again = InferenceSession(model, 2, 16, cuda_graph=False)
    assert torch.isfinite(logits).all()
    assert again.fits(2, 16, greedy=True, n_stop_tokens=1, cuda_graph=None)

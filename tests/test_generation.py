"""Generation with the KV cache: equal to the forward pass without one, for every method, padding and option."""

import copy
import json
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import METHODS, VOCAB, build_model, enlarge, randomize_boundaries, tiny_config, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from olmo_core.config import DType
from olmo_core.data import TokenizerConfig
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.generate.generation_module import GenerationConfig, TransformerGenerationModule
from olmo_core.nn.attention import (
    Attention,
    AttentionType,
    FusedAttentionV2,
    SlidingWindowAttentionConfig,
)
from olmo_core.nn.attention.backend import TorchAttentionBackend
from olmo_core.nn.depth import DepthTransformerConfig, PreLNConfig, attention_cache, generation
from olmo_core.nn.depth import session as session_module
from olmo_core.nn.depth.attention_cache import CachedAttention, install_kv_cache
from olmo_core.nn.depth.generation import (
    DepthGenerationModule,
    NaNLogitsError,
    prompt_spans,
    select_token,
)
from olmo_core.nn.depth.session import InferenceSession
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.rope import RoPEType
from olmo_core.nn.transformer import TransformerConfig

CPU = torch.device("cpu")
PAD, EOS = 0, 1
TOLERANCE = 1e-5
"""Relative to the largest logit, FP32: the order of the sums differs."""

LDM_OPTIONS: dict[str, dict[str, Any]] = {
    "ldm_key_source_input": {"key_source": "input"},
    "ldm_write_every_block": {"d_k": 4, "write_every": "block"},
    "ldm_delta_kept": {"d_k": 2, "update": "delta", "residual": "kept"},
    "ldm_all_carried": {
        "d_k": 3,
        "key_source": "input",
        "write_every": "block",
        "residual": "kept",
        "query_source": "output",
    },
}
DEPTHS = {**METHODS, **{name: LDMConfig(**o) for name, o in LDM_OPTIONS.items()}}


def make_model(depth=None, *, config=None, **kwargs):
    """An FP32 model in which every path matters."""
    if config is None:
        config = tiny_config(PreLNConfig() if depth is None else depth, **kwargs)
    model = build_model(config)
    enlarge(model)
    randomize_boundaries(model)
    return model.eval()


def make_module(model, cls=DepthGenerationModule, **kwargs):
    """A generation module with the model's weights; upstream's constructor draws them anew."""
    config = GenerationConfig(pad_token_id=PAD, eos_token_id=EOS, **{"max_new_tokens": 6, **kwargs})
    if cls is DepthGenerationModule:
        return cls.from_model(model, config)
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    module = cls(model, config, device=CPU)
    model.load_state_dict(weights)
    return module


def never_ends(**kwargs):
    """Options with which no row stops early."""
    return {"log_timing": False, "return_logits": True, "eos_token_id": VOCAB, **kwargs}


def padded(prompts, side):
    """Prompts of different lengths as a batch: ids and mask, ``[B, longest]``."""
    longest = max(len(p) for p in prompts)
    ids, mask = [], []
    for i, p in enumerate(prompts):
        n = longest - len(p)
        left = {"left": n, "right": 0, "both": n // 2 + n % 2 * (i % 2)}[side]
        ids.append(F.pad(p, (left, n - left), value=PAD))
        mask.append(F.pad(torch.ones_like(p), (left, n - left)))
    return torch.stack(ids), torch.stack(mask)


def prompts():
    """Three of the lengths 5, 9 and 2."""
    return [tokens(1, n, seed=n)[0] for n in (5, 9, 2)]


@torch.no_grad()
def full(model, ids):
    """Logits of an ordinary forward pass, ``[B, T, V]``."""
    return model(ids)


def close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max())


def caches(model):
    return [block.attention.kv_cache_manager for block in model.blocks.values()]


def prepare(model, batch_size, length):
    for block in model.blocks.values():
        block.attention.init_kv_cache_manager(batch_size, length)


# -- cached equals uncached --------------------------------------------------------------------


@pytest.mark.parametrize("name", DEPTHS)
def test_cached_logits_are_those_of_the_full_forward_pass(name):
    model = make_model(DEPTHS[name], n_kv_heads=1)
    module = make_module(model)
    ids, logits, _ = module.generate_batch(tokens(2, 7), **never_ends())
    expected = full(model, ids)
    close(logits, expected[:, 6:-1])
    # The comparison means something: the logits depend on the prompt's first token.
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % VOCAB
    difference = (full(model, other) - expected)[:, -1].abs().max()
    assert difference > 100 * TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", DEPTHS)
def test_a_batch_of_different_lengths_equals_single_prompts(name, use_cache):
    module = make_module(make_model(DEPTHS[name], n_layers=2), use_cache=use_cache)
    single = [
        module.generate_batch(p[None], use_cache=False, **never_ends(completions_only=True))
        for p in prompts()
    ]
    for side in ("left", "right", "both"):
        ids, mask = padded(prompts(), side)
        out, logits, _ = module.generate_batch(ids, attention_mask=mask, **never_ends())
        assert out[:, : ids.shape[1]].equal(ids), "the prompts come back as they were given"
        for row, (expected_ids, expected_logits, _) in enumerate(single):
            assert out[row, ids.shape[1] :].equal(expected_ids[0]), (side, row)
            close(logits[row], expected_logits[0])


@pytest.mark.parametrize("name", DEPTHS)
def test_upstreams_generation_module_gets_the_cache(name):
    model = make_model(DEPTHS[name], n_layers=2)
    ids, mask = padded(prompts(), "left")
    upstream = make_module(model, TransformerGenerationModule)
    out, logits, _ = upstream.generate_batch(ids, attention_mask=mask, **never_ends())
    assert all(cache.k_cache.dtype == torch.float32 for cache in caches(model))
    upstream.free_inference_cache()
    for row, p in enumerate(prompts()):
        expected = full(model, torch.cat([p, out[row, ids.shape[1] :]])[None])
        close(logits[row], expected[0, len(p) - 1 : -1])


def grouped(config: DepthTransformerConfig) -> DepthTransformerConfig:
    """4 query heads, 2 key heads."""
    config.block.sequence_mixer.n_heads, config.block.sequence_mixer.n_kv_heads = 4, 2  # type: ignore[union-attr]
    return config


def windowed(config: DepthTransformerConfig) -> DepthTransformerConfig:
    """Window 3 in the first and last layer, all before it in the middle."""
    config.block.sequence_mixer.sliding_window = SlidingWindowAttentionConfig(  # type: ignore[union-attr]
        pattern=[3, -1, 3],
        force_full_attention_on_first_layer=False,
        force_full_attention_on_last_layer=False,
    )
    return config


def fused(config: DepthTransformerConfig) -> DepthTransformerConfig:
    config.block.sequence_mixer.name = AttentionType.fused_v2  # type: ignore[union-attr]
    return config


def complex_rope(config: DepthTransformerConfig) -> DepthTransformerConfig:
    config.block.sequence_mixer.rope.name = RoPEType.complex  # type: ignore[union-attr]
    return config


def qk_norm(config: DepthTransformerConfig) -> DepthTransformerConfig:
    config.block.sequence_mixer.qk_norm = LayerNormConfig(name=LayerNormType.rms, bias=False)  # type: ignore[union-attr]
    return config


def no_rope(config: DepthTransformerConfig) -> DepthTransformerConfig:
    config.block.sequence_mixer.rope = None  # type: ignore[union-attr]
    return config


VARIANTS = {
    "grouped": [grouped],
    "windowed": [windowed],
    "windowed_grouped": [windowed, grouped],
    "fused": [fused, grouped],
    "complex_rope": [complex_rope],
    "qk_norm": [qk_norm],
    "no_rope": [no_rope],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_variants(variant, monkeypatch):
    # Several roundings of the attended length in one generation.
    monkeypatch.setattr(attention_cache, "ATTENDED_MULTIPLE", 4)
    monkeypatch.setattr(attention_cache, "SLOT_MULTIPLE", 4)
    config = tiny_config(PreLNConfig(), d_model=32)
    for change in VARIANTS[variant]:
        config = change(config)
    model = make_model(config=config)
    module = make_module(model, max_new_tokens=9)
    ids, mask = padded(prompts(), "left")
    out, logits, _ = module.generate_batch(ids, attention_mask=mask, **never_ends())
    for row, p in enumerate(prompts()):
        expected = full(model, torch.cat([p, out[row, ids.shape[1] :]])[None])
        close(logits[row], expected[0, len(p) - 1 : -1])


@pytest.mark.parametrize("change", [grouped, windowed])
def test_several_tokens_at_once_after_the_prompt(change):
    model = make_model(config=change(tiny_config(PreLNConfig(), d_model=32)))
    ids, mask = padded(prompts(), "left")
    rest = tokens(3, 8, seed=5)
    with torch.no_grad():
        expected = [model(torch.cat([p, rest[i]])[None])[0] for i, p in enumerate(prompts())]
        prepare(model, 3, 20)
        leftpad = mask.shape[1] - mask.sum(dim=1)
        parts = [model(ids, cache_leftpad=leftpad)]
        parts += [model(part) for part in rest.split([3, 1, 4], dim=1)]
    got = torch.cat(parts, dim=1)
    for row, p in enumerate(prompts()):
        close(got[row, ids.shape[1] - len(p) :], expected[row])
    assert got.isfinite().all(), "padding rows stay finite"


# -- the cache itself --------------------------------------------------------------------------


class Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = tuple(
            tuple(t.shape)
            for t in torch.utils._pytree.tree_leaves((args, out))
            if isinstance(t, torch.Tensor)
        )
        self.calls.append((str(func), shapes))
        return out


@pytest.mark.parametrize("with_padding", [False, True])
def test_a_decode_step_has_static_shapes_and_never_reads_the_device(with_padding):
    model = make_model(LDMConfig(), n_layers=2)
    ids, mask = padded(prompts(), "left")
    with torch.inference_mode():
        prepare(model, 3, 32)
        model(ids, cache_leftpad=(mask.shape[1] - mask.sum(dim=1)) if with_padding else None)
        before = [(c.k_cache.data_ptr(), c.v_cache.data_ptr()) for c in caches(model)]
        steps = []
        for seed in range(2):
            with Record() as record:
                model(tokens(3, 1, seed=seed), logits_to_keep=1)
            steps.append(record.calls)
    names = [name for name, _ in steps[0]]
    assert len(names) > 50
    assert not [n for n in names if "local_scalar_dense" in n or "nonzero" in n]
    assert steps[0] == steps[1]
    assert before == [(c.k_cache.data_ptr(), c.v_cache.data_ptr()) for c in caches(model)]
    # Mask and RoPE rows are made once for all layers.
    assert sum("masked_fill" in n for n in names) == 1
    assert sum("index_select" in n for n in names) == 2


def test_cache_shape_and_dtype():
    model = make_model(config=grouped(tiny_config(PreLNConfig(), d_model=32)))
    prepare(model, 2, 70)
    with torch.no_grad():
        model(tokens(2, 3))
    for cache in caches(model):
        assert cache.k_cache.shape == cache.v_cache.shape == (2, 128, 2, 8)
        assert cache.k_cache.dtype == torch.float32
    prepare(model, 2, 70)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens(2, 3))
    assert all(cache.k_cache.dtype == torch.bfloat16 for cache in caches(model))


def test_the_cache_is_reused_and_a_nan_in_it_forgotten():
    model = make_model(n_layers=1)
    module = make_module(model, TransformerGenerationModule)
    expected = module.generate_batch(tokens(), **never_ends())[1]
    (cache,) = caches(model)
    pointer = cache.k_cache.data_ptr()
    cache.k_cache.fill_(float("nan"))
    cache.v_cache.fill_(float("nan"))
    close(module.generate_batch(tokens(), **never_ends())[1], expected, 0)
    assert caches(model)[0].k_cache.data_ptr() == pointer
    module.generate_batch(tokens(3), **never_ends())
    assert caches(model)[0].k_cache.shape[0] == 3


def test_a_full_or_wrong_cache_is_refused():
    model = make_model(n_layers=1)
    prepare(model, 2, 64)
    with torch.no_grad():
        model(tokens(2, 60))
        with pytest.raises(RuntimeError, match="64 slots, 60 in use, and cannot take 5 more"):
            model(tokens(2, 5))
        with pytest.raises(RuntimeError, match="the prompt"):
            model(tokens(2, 1), cache_leftpad=torch.zeros(2, dtype=torch.int32))
    prepare(model, 2, 64)
    with pytest.raises(RuntimeError, match="prepared for 2 rows, the batch has 3"):
        model(tokens(3, 4))


def test_left_padding_without_a_cache_is_not_ignored():
    with pytest.raises(RuntimeError, match="cache_leftpad needs a KV cache"):
        make_model(n_layers=1)(tokens(), cache_leftpad=torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize("option", ["scalable_softmax", "attention_sinks"])
def test_what_the_cache_cannot_do_is_refused(option):
    config = tiny_config(PreLNConfig(), n_layers=1)
    setattr(config.block.sequence_mixer, option, True)  # type: ignore[union-attr]
    module = make_module(build_model(config))
    with pytest.raises(OLMoConfigurationError, match="use_cache=False"):
        module.generate_batch(tokens(), log_timing=False)
    module.generate_batch(tokens(), log_timing=False, use_cache=False)


def test_installing_changes_no_name_and_only_torchs_attention():
    class OtherBackend(TorchAttentionBackend):
        pass

    config = tiny_config(PreLNConfig())
    model = build_model(config)
    assert all(type(b.attention) is CachedAttention for b in model.blocks.values())
    assert isinstance(model.blocks["0"].attention, Attention)
    plain: Any = TransformerConfig(
        **{
            **config.as_dict(recurse=False, exclude=("block",)),
            "block": TransformerConfig.llama_like(
                d_model=16, vocab_size=VOCAB, n_layers=3, n_heads=2
            ).block,
        }
    ).build()
    keys = list(plain.state_dict())
    plain.blocks["1"].attention.backend.__class__ = OtherBackend
    install_kv_cache(plain)
    install_kv_cache(plain)
    assert list(plain.state_dict()) == keys
    kinds = [type(b.attention) for b in plain.blocks.values()]
    assert kinds == [CachedAttention, Attention, CachedAttention]
    assert issubclass(attention_cache.CachedFusedAttentionV2, FusedAttentionV2)


def test_a_plain_transformer_in_our_module():
    config = TransformerConfig.llama_like(
        d_model=16, vocab_size=VOCAB, n_layers=2, n_heads=2, hidden_size_multiple_of=8
    )
    model = build_model(config)
    enlarge(model)
    ids, logits, _ = make_module(model).generate_batch(tokens(), **never_ends())
    close(logits, full(model, ids)[:, 6:-1])


def test_generation_leaves_the_model_as_it_was():
    model = make_model(LDMConfig(), n_layers=1)
    keys = list(model.state_dict())
    weights = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    ids = tokens(2, 40)
    expected = full(model, ids[:, :5])
    module = make_module(model)
    module.generate_batch(ids, log_timing=False)
    close(full(model, ids[:, :5]), expected, 0)
    close(module.model_forward(ids[:, :5]), expected, 0)
    assert list(model.state_dict()) == keys
    assert all(t.equal(weights[name]) for name, t in model.state_dict().items())
    # Training goes on: no tensor of inference mode stayed behind.
    model.train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.blocks["0"].attention.parameters())
    # A copy has a cache of its own.
    prepare(twin, 2, 8)
    assert twin.blocks["0"].attention.cache_state is not model.blocks["0"].attention.cache_state
    assert caches(model) == [None]


def test_a_module_from_a_model_in_a_distributed_process():
    # Upstream's constructor makes the world mesh, which a process can make once.
    model = make_model(n_layers=1)
    expected = make_module(model).generate_batch(tokens(), **never_ends())[1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            module = make_module(model)
            close(module.generate_batch(tokens(), **never_ends())[1], expected, 0)
    finally:
        dist.destroy_process_group()
    # It has everything that upstream's constructor sets.
    assert vars(module).keys() >= vars(make_module(model, TransformerGenerationModule)).keys()
    module.load_state_dict(module.state_dict())


def test_an_abandoned_stream_frees_the_cache():
    model = make_model(n_layers=1)
    stream = make_module(model).stream(tokens())
    next(stream)
    assert caches(model)[0] is not None
    stream.close()
    assert caches(model) == [None]


def test_compiled_blocks():
    model = make_model(n_layers=1)
    expected = make_module(model).generate_batch(tokens(), **never_ends())
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model.blocks["0"].compile(backend=backend)
    got = make_module(model).generate_batch(tokens(), **never_ends())
    torch._dynamo.reset()
    # Two pieces of the block around its attention, each for the prompt and for one token, whatever the position.
    assert 0 < len(graphs) <= 4
    assert got[0].equal(expected[0])
    close(got[1], expected[1])


# -- sessions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [grouped, windowed, no_rope])
def test_a_prompt_in_pieces(change):
    model = make_model(config=change(tiny_config(PreLNConfig(), d_model=32)))
    module = make_module(model)
    for side in ("left", "both"):
        ids, mask = padded(prompts(), side)
        options: dict[str, Any] = {"attention_mask": mask, **never_ends()}
        expected = module.generate_batch(ids, **options)
        for chunk in (1, 2, 4, 8, 9):
            out = module.generate_batch(ids, prefill_chunk=chunk, **options)
            assert out[0].equal(expected[0]), (side, chunk)
            close(out[1], expected[1])
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        module.generate_batch(ids, prefill_chunk=0, **options)


def test_a_session_serves_the_next_generation_that_fits():
    model = make_model(LDMConfig(), n_layers=2)
    module = make_module(model)

    def check(ids, **options):
        found = []
        for m in (make_module(model), module):
            torch.manual_seed(0)
            found.append(m.generate_batch(ids, **never_ends(**options)))
        assert found[0][0].equal(found[1][0])
        close(found[1][1], found[0][1])
        return module._session

    first = check(tokens(2, 9))
    assert check(tokens(2, 30, seed=3)) is first
    assert check(tokens(3, 9)) is not first, "another batch size"
    second = check(tokens(2, 9))
    assert check(tokens(2, 9), temperature=1.0) is not second, "the caller chooses the tokens"
    second = check(tokens(2, 9))
    assert check(tokens(2, 9), max_new_tokens=300) is not second, "too long"
    second = check(tokens(2, 9))
    assert check(tokens(2, 9), stop_token_ids=[VOCAB + 1] * 9) is not second
    second = check(tokens(2, 9))
    with torch.no_grad():
        model.lm_head.w_out.weight.neg_()
    assert check(tokens(2, 9)) is not second, "a backend may hold a copy of the weights"
    # A NaN of one generation does not reach the next.
    for cache in module._session.caches:
        cache.k_cache.fill_(float("nan"))
    second = module._session
    assert check(tokens(2, 9)) is second
    module.free_inference_cache()
    assert module._session is None and caches(model) == [None, None]


def test_a_session_step_reads_nothing_and_moves_nothing():
    model = make_model(LDMConfig(), n_layers=2)
    session = InferenceSession(model, 3, 32)
    assert session.no_graph_because == "no CUDA" and not session.captured
    ids, mask = padded(prompts(), "right")
    buffers = ("tokens", "lengths", "finished", "all_finished")
    with session.attached():
        session.begin(EOS, [])
        session.prefill(ids, mask.sum(dim=1))
        assert session.lengths.tolist() == [5, 9, 2]
        places = [getattr(session, name).data_ptr() for name in buffers]
        steps = []
        for _ in range(2):
            with Record() as record:
                session.step()
            steps.append(record.calls)
    assert session.lengths.tolist() == [7, 11, 4] and session.columns == 11
    assert [getattr(session, name).data_ptr() for name in buffers] == places
    assert steps[0] == steps[1]
    assert not [n for n, _ in steps[0] if "local_scalar_dense" in n or "nonzero" in n]
    assert caches(model) == [None, None]


def test_sessions_of_one_model_take_turns():
    model = make_model(LDMConfig(), n_layers=1)
    sessions = [InferenceSession(model, 2, 64), InferenceSession(model, 1, 128)]
    ids = [tokens(2, 5), tokens(1, 9)]
    for session, prompt in zip(sessions, ids, strict=True):
        with session.attached():
            session.begin(VOCAB, [])
            session.accept(session.prefill(prompt)[:, -1].argmax(dim=-1))
    for _ in range(3):
        for i, session in enumerate(sessions):
            ids[i] = torch.cat([ids[i], session.tokens[:, None]], dim=1)
            with session.attached():
                logits = session.step()[:, -1]
            close(logits, full(model, ids[i])[:, -1])


def test_the_books_of_a_replayed_step(monkeypatch):
    """
    What stands around a CUDA graph, on a CPU: the fake graph runs its step again, with the host's numbers as they were at its
    capture, and leaves the logits where they were.
    """
    model = make_model(n_layers=2)
    module = make_module(model, max_new_tokens=9)
    ids, mask = padded(prompts(), "left")
    options: dict[str, Any] = {"attention_mask": mask, **never_ends()}
    expected = module.generate_batch(ids, **options)
    captured: list[tuple[int, int]] = []

    class FakeGraph:
        def replay(self):
            session = module._session
            graph = next(g for g in session._graphs.values() if g.graph is self)
            attended, columns = captured[list(session._graphs.values()).index(graph)]
            now, session.state.attended = session.columns, attended
            session._set_columns(columns)
            graph.logits.copy_(session._step())
            session.state.attended = None
            session._set_columns(now)

    @contextmanager
    def fake_capture(graph, **kwargs):
        # A capture runs nothing: what it changes here must not show.
        session = sessions[-1]
        captured.append((session.state.attended, session.columns))
        yield

    sessions = []
    prepare = InferenceSession._prepare

    def as_on_a_gpu(self):
        sessions.append(self)
        self.no_graph_because = None
        prepare(self)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "current_stream": lambda device: stream,
        "Stream": lambda device: stream,
        "stream": lambda s: nullcontext(),
        "set_stream": lambda s: None,
        "synchronize": lambda device: None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": FakeGraph,
        "graph": fake_capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(InferenceSession, "_prepare", as_on_a_gpu)
    monkeypatch.setattr(session_module, "GRAPH_SLOTS", 4)
    module.free_inference_cache()
    for _ in range(2):
        out = module.generate_batch(ids, **options)
        assert out[0].equal(expected[0])
        close(out[1], expected[1])
        # A prompt of 9 columns and 8 steps: 12, 16 and 20 slots, captured once.
        assert captured == [(12, 9), (16, 12), (20, 16)]
        assert module.last_timing.cuda_graph and module._session.columns == 17


def test_a_session_has_an_end():
    session = InferenceSession(make_model(n_layers=1), 1, 64)
    with session.attached():
        with pytest.raises(ValueError, match="1 rows of at most 64 tokens"):
            session.prefill(tokens(1, 65))
        session.prefill(tokens(1, 64))
        with pytest.raises(RuntimeError, match="64 slots is full"):
            session.step()


@pytest.mark.parametrize("use_cache", [True, False])
def test_nan_logits_are_nothing_to_sample_from(use_cache):
    model = make_model(n_layers=1)
    with torch.no_grad():
        model.lm_head.w_out.weight.fill_(float("nan"))
    module = make_module(model, temperature=1.0, use_cache=use_cache)
    with pytest.raises(NaNLogitsError, match="NaN"):
        module.generate_batch(tokens(), log_timing=False)
    assert caches(model) == [None]


def test_tokens_come_to_the_host_too():
    module = make_module(make_model(n_layers=1))
    steps = list(module.stream(tokens(3), return_logits=False))
    assert all(step.token_ids == step.tokens.tolist() and step.logits is None for step in steps)


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.8},
        {"temperature": 2.0, "do_sample": False},
        {},
    ],
    ids=str,
)
def test_sampling_is_upstreams(options):
    model = make_model(n_layers=2)
    got = []
    for cls in (TransformerGenerationModule, DepthGenerationModule):
        for use_cache in (True, False):
            module = make_module(model, cls, max_new_tokens=12, **options)
            torch.manual_seed(0)
            got.append(module.generate_batch(tokens(4), use_cache=use_cache, log_timing=False)[0])
            module.free_inference_cache()
    assert all(g.equal(got[0]) for g in got)


def test_filters_keep_only_the_likely_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(400, 1)
    config = GenerationConfig(pad_token_id=0, eos_token_id=1, temperature=1.0)
    torch.manual_seed(0)
    assert select_token(logits, config).unique().tolist() == [0, 1, 2, 3]
    assert select_token(logits, config.replace(top_k=2)).unique().tolist() == [0, 1]
    assert select_token(logits, config.replace(top_p=0.7)).unique().tolist() == [0, 1]
    assert select_token(logits, config.replace(do_sample=False)).unique().tolist() == [0]
    with pytest.raises(NaNLogitsError, match="NaN"):
        select_token(logits * float("nan"), config)


@pytest.mark.parametrize(("use_cache", "ahead"), [(True, 0), (True, 1), (True, 3), (False, 0)])
def test_rows_end_at_eos_and_stop_tokens(use_cache, ahead, monkeypatch):
    monkeypatch.setattr(generation, "STEPS_AHEAD", {"cpu": ahead})
    module = make_module(make_model(n_layers=2), max_new_tokens=10, use_cache=use_cache)
    free, logits, _ = module.generate_batch(
        tokens(3), **never_ends(completions_only=True, return_logprobs=True)
    )
    assert logits.shape == (3, 10, VOCAB)
    # A token that row 0 has early ends the rows; EOS is one that none has.
    stop = int(free[0, 1])
    unused = next(t for t in range(VOCAB) if t not in free)
    ends = [(row == stop).nonzero().flatten()[:1].tolist() for row in free]
    for option in ({"stop_token_ids": [stop, 999]}, {"eos_token_id": stop}):
        out, _, logprobs = module.generate_batch(
            tokens(3), completions_only=True, log_timing=False, return_logprobs=True,
            **{"eos_token_id": unused, **option},
        )  # fmt: skip
        eos = option.get("eos_token_id", unused)
        longest = max(e[0] + 1 if e else 10 for e in ends)
        assert out.shape == logprobs.shape == (3, longest)
        for row, expected, end in zip(out, free, ends, strict=True):
            n = end[0] + 1 if end else longest
            assert row[:n].equal(expected[:n])
            assert (row[n:] == eos).all()


def test_logprobs_and_shapes():
    module = make_module(make_model(n_layers=1))
    for use_cache in (True, False):
        ids, logits, logprobs = module.generate_batch(
            tokens(), use_cache=use_cache, **never_ends(return_logprobs=True)
        )
        assert ids.shape == (2, 13) and logits.shape == (2, 6, VOCAB)
        expected = logits.log_softmax(-1).gather(2, ids[:, 7:, None])[..., 0]
        torch.testing.assert_close(logprobs, expected)
    ids, logits, logprobs = module.generate_batch(tokens(), log_timing=False)
    assert logits is None and logprobs is None
    ids = module.generate_batch(tokens(), log_timing=False, max_new_tokens=None, max_length=9)[0]
    assert ids.shape == (2, 9)
    # Nothing to generate.
    ids, logits, _ = module.generate_batch(
        tokens(), max_new_tokens=None, max_length=7, return_logits=True, log_timing=False
    )
    assert ids.equal(tokens()) and logits is None


def test_a_cache_needs_a_limit_and_no_cache_does_not():
    module = make_module(make_model(n_layers=1), max_new_tokens=None)
    with pytest.raises(OLMoConfigurationError, match="set max_new_tokens or max_length"):
        module.generate_batch(tokens(), log_timing=False)
    every = list(range(VOCAB))
    ids, _, _ = module.generate_batch(
        tokens(), use_cache=False, stop_token_ids=every, log_timing=False
    )
    assert ids.shape == (2, 8)


def test_the_defaults_work_on_a_cpu(capsys, caplog):
    module = make_module(make_model(n_layers=1), max_new_tokens=3)
    module.generate_batch(tokens(), eos_token_id=VOCAB)
    timing = module.last_timing
    assert (timing.batch_size, timing.prompt_tokens, timing.new_tokens) == (2, 7, 3)
    assert timing.prefill_seconds > 0 and timing.decode_seconds > 0
    assert timing.decode_tokens_per_second == pytest.approx(2 * 2 / timing.decode_seconds)
    # Printed, or logged where another test has set logging up.
    assert "tokens/s" in capsys.readouterr().out + caplog.text


def test_prompt_spans():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])
    first, lengths = prompt_spans(mask, mask.shape)
    assert first.tolist() == [2, 0, 1] and lengths.tolist() == [2, 4, 1]
    with pytest.raises(ValueError, match="row 1 of attention_mask has padding between"):
        prompt_spans(torch.tensor([[1, 1, 1], [1, 0, 1]]), torch.Size((2, 3)))
    with pytest.raises(ValueError, match="row 0 of attention_mask has no token"):
        prompt_spans(torch.tensor([[0, 0, 0], [1, 1, 1]]), torch.Size((2, 3)))
    with pytest.raises(ValueError, match="shape of input_ids"):
        prompt_spans(torch.ones(2, 4), torch.Size((2, 3)))
    module = make_module(make_model(n_layers=1))
    with pytest.raises(ValueError, match="at least one token"):
        module.generate_batch(tokens()[:, :0], log_timing=False)


# -- checkpoints -------------------------------------------------------------------------------


def write_checkpoint(folder, model, config, tokenizer):
    folder.mkdir()
    save_model_and_optim_state(folder / "model_and_optim", model)
    data = {"model": config.as_config_dict(), "dataset": {"tokenizer": tokenizer.as_config_dict()}}
    (folder / "config.json").write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["preln", "attnres_block", "mhc", "ldm_key_source_input"])
def test_from_checkpoint_with_both_modules(name, tmp_path):
    depth = replace(DEPTHS[name], backend="reference")
    config = tiny_config(depth, n_layers=2)
    model = make_model(config=config)
    write_checkpoint(
        tmp_path / "step5", model, config,
        TokenizerConfig(vocab_size=VOCAB, eos_token_id=EOS, pad_token_id=PAD),
    )  # fmt: skip
    ids = tokens(2, 9)
    expected = full(model, ids)[:, -1]
    out = []
    for cls in (TransformerGenerationModule, DepthGenerationModule):
        module: Any = cls.from_checkpoint(tmp_path / "step5", device=CPU, work_dir=tmp_path)
        out.append(module.generate_batch(ids, max_new_tokens=4, use_cache=True, **never_ends()))
        close(out[-1][1][:, 0], expected)
    assert out[0][0].equal(out[1][0])

    for cls in (TransformerGenerationModule, DepthGenerationModule):
        half: Any = cls.from_checkpoint(
            tmp_path / "step5", device=CPU, work_dir=tmp_path, dtype=DType.bfloat16
        )
        ids, logits, _ = half.generate_batch(
            tokens(2, 9), max_new_tokens=4, use_cache=True, **never_ends()
        )
        assert logits.dtype == torch.bfloat16
        if cls is TransformerGenerationModule:
            assert {c.k_cache.dtype for c in caches(half.model)} == {torch.bfloat16}
            half.free_inference_cache()
        # Cached against uncached in BF16: the rounding differs where the sums are ordered otherwise.
        close(logits.float(), full(half.model, ids)[:, 8:-1].float(), 0.03)
        close(logits[:, 0].float(), expected, 0.1)


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    """A tiny model with the real tokenizer, in FP32."""
    tokenizer = TokenizerConfig.gpt_neox_olmo_dolma_v1_5()
    config = tiny_config(LDMConfig(), n_layers=1)
    config.vocab_size = tokenizer.padded_vocab_size()
    folder = tmp_path_factory.mktemp("run") / "step7"
    write_checkpoint(folder, make_model(config=config), config, tokenizer)
    return folder


def test_cli_streams_text(text_checkpoint, capsys):
    from eval.generate import main

    texts = []
    for extra in ([], ["--no-cache"], ["--temperature", "1", "--top-k", "50", "--top-p", "0.9"]):
        arguments = ["--prompt", "A memory é", "--max-new-tokens", "8", "--device", "cpu", *extra]
        assert main([str(text_checkpoint), *arguments]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("A memory é") and len(out) > len("A memory é") + 5
        assert re.search(
            r"prefill: 1 x \d+ tokens in .*; decode: 1 x \d+ tokens in .* tokens/s", err
        )
        texts.append(out)
    assert texts[0] == texts[1] != texts[2]


def test_cli_times_a_random_prompt(text_checkpoint, tmp_path, capsys):
    from eval.generate import main

    out = tmp_path / "new" / "timing.json"
    arguments = "--random-prompt --prompt-tokens 12 --batch-size 2 --max-new-tokens 5 --repeat 3 --device cpu"
    assert main([str(text_checkpoint), *arguments.split(), "--json", str(out)]) == 0
    assert capsys.readouterr().out == ""
    data = json.loads(out.read_text())
    assert [r["new_tokens"] for r in data["runs"]] == [5, 5, 5]
    assert (data["method"], data["use_cache"], data["batch_size"]) == ("ldm", True, 2)
    assert data["depth_backend"] == ["reference"]
    assert data["attention_backend"] == "CachedTorchAttentionBackend"
    rates = sorted(r["decode_tokens_per_second"] for r in data["runs"][1:])
    assert data["median_decode_tokens_per_second"] == pytest.approx(sum(rates) / 2)


def test_cli_says_a_mistake_in_one_sentence(text_checkpoint, tmp_path, capsys):
    from config_utils.errors import UserError
    from eval.generate import main

    good = str(text_checkpoint)
    for arguments, message in (
        ([str(tmp_path / "nothing"), "--prompt", "x"], "does not exist"),
        ([good, "--prompt", "", "--device", "cpu"], "no token to continue"),
        ([good, "--random-prompt", "--json", str(tmp_path)], "is a folder"),
        ([good, "--random-prompt", "--depth-backend", "fla", "--device", "cpu"], "cannot run"),
    ):
        with pytest.raises(UserError, match=message):
            main(arguments)
    for arguments, message in (
        ([good], "required"),
        ([good, "--prompt", "x", "--prompt-tokens", "5"], "belong to --random-prompt"),
        ([good, "--prompt", "x", "--top-p", "1.5"], "at most 1"),
        ([good, "--prompt", "x", "--temperature", "-1"], "or more"),
        ([good, "--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        ([good, "--prompt", "x", "--cuda-graph", "--no-cache"], "leave --no-cache away"),
        ([good, "--prompt", "x", "--cuda-graph", "--device", "cpu"], "needs a CUDA GPU"),
    ):
        with pytest.raises(SystemExit) as e:
            main(arguments)
        assert e.value.code == 2
        assert message in capsys.readouterr().err


# -- GPU ---------------------------------------------------------------------------------------


def gpu_model(name, **kwargs):
    config = tiny_config(DEPTHS[name], d_model=128, n_layers=2, dtype=DType.bfloat16, **kwargs)
    model = config.build(init_device="cuda")
    model.init_weights(device=torch.device("cuda"))
    enlarge(model)
    randomize_boundaries(model)
    return model.eval()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("n_kv_heads", [2, 1])
@pytest.mark.parametrize("name", DEPTHS)
def test_cached_equals_uncached_on_a_gpu(name, n_kv_heads):
    model = gpu_model(name, n_kv_heads=n_kv_heads)
    module = make_module(model, max_new_tokens=20)
    ids, mask = padded([tokens(1, n, seed=n)[0] for n in (5, 300, 64)], "left")
    out, logits, _ = module.generate_batch(ids, attention_mask=mask, **never_ends())
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        expected = full(model, out[row : row + 1, ids.shape[1] - length :])
        close(logits[row].float(), expected[0, length - 1 : -1].float(), 0.03)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", DEPTHS)
def test_a_cuda_graph_gives_what_eager_steps_give(name):
    model = gpu_model(name)
    module = make_module(model, max_new_tokens=20)
    ids, mask = (t.cuda() for t in padded(prompts(), "left"))
    options: dict[str, Any] = {"attention_mask": mask, **never_ends()}
    eager = module.generate_batch(ids, cuda_graph=False, **options)
    for _ in range(2):  # the second time with the first one's graph
        got = module.generate_batch(ids, cuda_graph=True, **options)
        assert module.last_timing.cuda_graph
        assert got[0].equal(eager[0])
        close(got[1].float(), eager[1].float(), 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_eager_steps_never_wait_for_the_gpu():
    model = gpu_model("ldm")
    session = InferenceSession(model, 3, 64, cuda_graph=False)
    ids, mask = (t.cuda() for t in padded(prompts(), "right"))
    with session.attached():
        session.begin(VOCAB, [])
        session.prefill(ids, mask.sum(dim=1))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                session.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_older_graph_keeps_its_rope_tables():
    model = gpu_model("preln")
    ids = tokens(2, 7).cuda()

    def logits(session):
        with session.attached():
            session.begin(VOCAB, [])
            session.prefill(ids)
            session.tokens.copy_(ids[:, 0])
            return session.step().clone()

    old = InferenceSession(model, 2, 64)
    expected = logits(old)
    new = InferenceSession(model, 2, 5000)
    junk = [torch.full((64, 64), float("nan"), device="cuda") for _ in range(64)]
    assert logits(old).equal(expected)
    close(logits(new).float(), expected.float(), 1e-3)
    del junk


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_cannot_be_captured_runs_anyway(monkeypatch):
    model = gpu_model("preln")
    expected = make_module(model).generate_batch(tokens(2).cuda(), **never_ends())[0]
    accept = InferenceSession.accept

    def reads(self, sampled):
        assert int(sampled.sum()) >= 0
        accept(self, sampled)

    monkeypatch.setattr(InferenceSession, "accept", reads)
    module = make_module(model)
    out = module.generate_batch(tokens(2).cuda(), cuda_graph=True, **never_ends())[0]
    assert out.equal(expected) and not module.last_timing.cuda_graph

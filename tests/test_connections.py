"""
Depth connections inside OLMo-core: configs, counts, initialisation, dtypes, metrics, activation checkpointing,
compiled blocks, and what is refused.
"""

import json
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import (
    KNOWN,
    METHODS,
    OWN,
    VOCAB,
    ask_for_entry,
    build_model,
    ldm_variants,
    next_token_loss,
    randomize_boundaries,
    relative_error,
    shared_parameters,
    tiny_config,
    tokens,
    upstream_model,
)

from olmo_core.config import DType
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import (
    DepthBackend,
    DepthConnectionConfig,
    DepthTransformer,
    DepthTransformerConfig,
    PreLNConfig,
    retrieval_map,
)
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.moe import MoEConfig
from olmo_core.nn.transformer import (
    TransformerActivationCheckpointingMode,
    TransformerBlockType,
    TransformerConfig,
)
from olmo_core.optim import AdamWConfig, OptimGroupOverride

CONNECTIONS: dict[str, DepthConnectionConfig] = {**METHODS, **ldm_variants()}
CPU = torch.device("cpu")

every_connection = pytest.mark.parametrize("depth", CONNECTIONS.values(), ids=CONNECTIONS)
every_method = pytest.mark.parametrize("depth", METHODS.values(), ids=METHODS)


@every_connection
def test_config_survives_json(depth):
    config = tiny_config(depth)
    stored = json.loads(json.dumps(config.as_config_dict()))
    assert stored["_CLASS_"] == "olmo_core.nn.depth.model.DepthTransformerConfig"
    cls = type(depth)
    assert stored["block"]["depth"]["_CLASS_"] == f"{cls.__module__}.{cls.__name__}"
    loaded = TransformerConfig.from_dict(stored)
    assert type(loaded) is DepthTransformerConfig
    assert type(loaded.depth) is cls and loaded == config
    # Not only equal: the options come back as what the code compares with.
    assert loaded.depth.backend is DepthBackend.auto
    model, reloaded = build_model(config), build_model(loaded)
    for (name, p), (other, q) in zip(
        model.named_parameters(), reloaded.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(p, q), name


def test_options_can_be_overridden_by_dotted_names():
    config = tiny_config(LDMConfig()).merge(["block.depth.d_k=2", "block.depth.update=delta"])
    assert config.depth == LDMConfig(d_k=2, update="delta")  # type: ignore[arg-type]
    with pytest.raises(OLMoConfigurationError):
        tiny_config(LDMConfig()).merge(["block.depth.update=detla"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LDMConfig(d_k=0),
        lambda: AttnResConfig(block_size=0),
        lambda: HyperConnectionsConfig(n_streams=0),
        lambda: HyperConnectionsConfig(sinkhorn_iterations=0),
        lambda: LDMConfig(key_activation="softmx"),  # type: ignore[arg-type]
        lambda: LDMConfig(forget="nope"),  # type: ignore[arg-type]
        lambda: HyperConnectionsConfig(collapse="mean"),  # type: ignore[arg-type]
    ],
    ids=["d_k", "block_size", "n_streams", "iterations", "key", "forget", "collapse"],
)
def test_wrong_options_are_refused(wrong):
    """A misspelt option must not silently become another one."""
    with pytest.raises((OLMoConfigurationError, ValueError)):
        wrong()


def block_of(config: DepthTransformerConfig) -> Any:
    return config.block


def changed(**block_fields) -> DepthTransformerConfig:
    config = tiny_config(LDMConfig())
    return config.replace(block=block_of(config).replace(**block_fields))


NORM_WITH_BIAS = LayerNormConfig(name=LayerNormType.rms, bias=True)


@pytest.mark.parametrize(
    "config,says",
    [
        (lambda: changed(name=TransformerBlockType.reordered_norm), "before the sublayers"),
        (lambda: changed(name=TransformerBlockType.peri_norm), "before the sublayers"),
        (lambda: changed(dropout=0.1), "dropout"),
        (lambda: changed(attention_residual_alpha=0.5), "attention_residual_alpha"),
        (lambda: changed(layer_norm=NORM_WITH_BIAS), "without a bias"),
        (lambda: changed(layer_norm=LayerNormConfig(name=LayerNormType.default)), "RMSNorm"),
        (lambda: changed(feed_forward=None), "feed_forward"),
        (
            lambda: changed(
                feed_forward=None,
                name=TransformerBlockType.moe,
                feed_forward_moe=MoEConfig(num_experts=2, hidden_size=16),
            ),
            "name='default'",
        ),
        (
            lambda: changed(feed_forward_moe=MoEConfig(num_experts=2, hidden_size=16)),
            "mixture of experts",
        ),
        (
            lambda: tiny_config(LDMConfig()).replace(
                lm_head=tiny_config(LDMConfig()).lm_head.replace(layer_norm=NORM_WITH_BIAS)
            ),
            "norm of the LM head",
        ),
        (
            lambda: tiny_config(LDMConfig()).replace(
                block_overrides={1: block_of(tiny_config(LDMConfig(d_k=2)))}
            ),
            "same depth connection",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_models_that_a_boundary_cannot_serve_are_refused(config, says):
    with pytest.raises(OLMoConfigurationError, match=says):
        config().build(init_device="meta")


def test_with_depth_changes_nothing_else():
    config = tiny_config(LDMConfig())
    assert config.with_depth(PreLNConfig()).with_depth(LDMConfig()) == config
    plain = TransformerConfig.llama_like(d_model=16, vocab_size=VOCAB, n_layers=2, n_heads=2)
    ours = DepthTransformerConfig.llama_like(d_model=16, vocab_size=VOCAB, n_layers=2, n_heads=2)
    model = ours.with_depth(PreLNConfig()).build(init_device="meta")
    theirs = {
        n.replace("lm_head.norm.", "final_norm."): p.shape
        for n, p in plain.build().named_parameters()
    }
    assert {n: p.shape for n, p in model.named_parameters()} == theirs


def boundary_parameters(depth: DepthConnectionConfig, d: int, L: int) -> int:
    """The methods' parameter counts, from their papers and the design."""
    if isinstance(depth, AttnResConfig):
        return 2 * d * L  # a query and a gain for each reader but the first
    if isinstance(depth, HyperConnectionsConfig):
        n = depth.n_streams
        head = n * d * n + n + 1 if depth.collapse == "head" else 0
        return L * (n * d * (n * n + 2 * n) + n * n + 2 * n + 3) + head
    if isinstance(depth, LDMConfig):
        K = depth.d_k
        writers = L // 2 if depth.write_every == "block" else L
        gates = 1 if depth.forget_granularity == "scalar" else K
        query = K + (0 if depth.query_source == "static" else d * K)
        key = K + (0 if depth.key_source == "static" else d * K)
        forget = {"none": 0, "static": gates, "dynamic": gates + d * gates}[depth.forget]
        erase = d + 1 if depth.update == "delta" else 0
        return K + L * query + writers * (key + forget + erase)
    if isinstance(depth, PreLNConfig):
        return 0
    ask_for_entry(depth, "boundary_parameters")


@every_connection
def test_parameter_counts(depth):
    config = tiny_config(depth)
    model = config.build(init_device="meta")
    actual = sum(p.numel() for p in model.parameters())
    assert actual == config.num_params == model.num_params
    non_embedding = actual - VOCAB * config.d_model
    assert non_embedding == config.num_non_embedding_params == model.num_non_embedding_params
    shared = sum(p.numel() for p in shared_parameters(model).values())
    assert actual - shared == boundary_parameters(depth, config.d_model, 2 * config.n_layers)


@every_method
def test_active_parameter_counts(depth):
    """A dense model's parameters are all active."""
    config = tiny_config(depth)
    assert config.num_active_params == config.num_params
    assert config.num_active_non_embedding_params == config.num_non_embedding_params


def boundary_flops(depth: DepthConnectionConfig, d: int, L: int) -> float:
    """
    Forward FLOPs a token of all boundaries, counted anew: matrix products, and the passes over the state that grow with
    the number of slots, streams or sources (PreLN's one addition, which is all that it has).
    """
    if isinstance(depth, AttnResConfig):
        sources = [2 + (i - 1) // depth.block_size for i in range(1, L + 1)]
        return sum(n * (2 * d + 2 * d + 2 * d) for n in sources)  # square and sum, dot, mix
    if isinstance(depth, HyperConnectionsConfig):
        n = depth.n_streams
        return L * (2 * n * d * (n * n + 2 * n) + 2 * n * n * d + 2 * n * d + 2 * n * d)
    if isinstance(depth, LDMConfig):
        K = depth.d_k
        return L * (3 * 2 * d * K + K * d * (1 + 2 + 1 + 2))  # maps; forget, write, mean, read
    if isinstance(depth, PreLNConfig):
        return d * L
    ask_for_entry(depth, "boundary_flops")


@every_method
def test_flop_counts(depth):
    """Three times (forward and backward) an independent forward count, to within a fifth, on top of OLMo-core's count."""
    config = tiny_config(depth, d_model=64)
    d, L = config.d_model, 2 * config.n_layers
    # Of which the last norm's gain is a part there.
    base = upstream_model(config).num_flops_per_token(128) - 6 * d
    flops = config.build(init_device="meta").num_flops_per_token(128)
    ours = [depth.num_flops_per_token(d_model=d, index=i, n_sublayers=L) for i in range(L + 1)]
    assert flops - base == sum(ours)
    # No method does less than to add.
    assert min(ours[1:]) >= 3 * d and ours[0] >= 0
    assert sum(ours) / (3 * boundary_flops(depth, d, L)) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("name", ["ldm", "mhc", *OWN])
def test_flop_counts_cover_the_matrix_products_that_run(name):
    """torch's own counter sees the matrix products of a forward and backward pass; the rest is element-wise."""
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny_config(METHODS[name], d_model=64)
    model = build_model(config)
    ids = tokens(1, 8)
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model(ids), ids).backward()
    plain = build_model(config.with_depth(PreLNConfig()))
    with FlopCounterMode(display=False) as base:
        next_token_loss(plain(ids), ids).backward()
    ran = (counter.get_total_flops() - base.get_total_flops()) / ids.numel()
    claimed = model.num_flops_per_token(8) - plain.num_flops_per_token(8)
    assert ran <= claimed
    if name not in OWN:
        assert 0 < ran and claimed <= 3 * ran


NO_WEIGHT_DECAY: dict[type[DepthConnectionConfig], set[str]] = {
    PreLNConfig: set(),
    AttnResConfig: {"query", "gain"},
    HyperConnectionsConfig: {"alpha", "bias"},
    LDMConfig: {"key_0", "w_forget", "b_query", "b_key", "b_forget", "b_beta"},
}


@every_connection
def test_weight_decay_groups(depth):
    """OLMo-core refuses a pattern without a match; and exactly the intended parameters lose their decay."""
    model = tiny_config(depth).build()
    patterns = [f"*boundary.{glob}" for glob in depth.no_weight_decay()]
    for pattern in patterns:
        assert any(fnmatch(n, pattern) for n, _ in model.named_parameters()), pattern
    overrides = (
        [OptimGroupOverride(params=patterns, opts={"weight_decay": 0.0})] if patterns else None
    )
    optim = AdamWConfig(weight_decay=0.1, group_overrides=overrides).build(model)
    names = {id(p): n for n, p in model.named_parameters()}
    decay = {names[id(p)]: g["weight_decay"] for g in optim.param_groups for p in g["params"]}
    assert decay.keys() == set(names.values())
    for name, value in decay.items():
        exempt = any(fnmatch(name, pattern) for pattern in patterns)
        assert value == (0.0 if exempt else 0.1), name
        if (expected := NO_WEIGHT_DECAY.get(type(depth))) is not None:
            assert exempt == ("boundary" in name and name.rpartition(".")[2] in expected), name


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN, as ``to_empty`` leaves it: whatever nobody sets then shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@every_connection
def test_initialisation(depth, nan_memory):
    """The same for the same seed, on the meta device first or not, and complete."""
    config = tiny_config(depth)
    model, again, other = (
        build_model(config),
        build_model(config),
        build_model(config.replace(init_seed=1)),
    )
    meta = config.build(init_device="meta")
    meta.init_weights(device=CPU, max_seq_len=16)
    differing = 0
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        assert torch.equal(p, again.get_parameter(name)), name
        assert torch.equal(p, meta.get_parameter(name)), name
        differing += not torch.equal(p, other.get_parameter(name))
    assert differing > 10
    assert torch.equal(model(tokens()), meta(tokens()))
    # A model that was only built is usable too.
    assert all(
        torch.isfinite(p).all() for n, p in config.build().named_parameters() if "boundary" in n
    )


@every_method
def test_all_methods_share_their_start(depth):
    """What the methods have in common starts with the same values: they differ by the depth connection alone."""
    preln = build_model(tiny_config(PreLNConfig()))
    model = build_model(tiny_config(depth))
    shared = shared_parameters(model)
    assert shared.keys() == dict(preln.named_parameters()).keys()
    for name, p in shared.items():
        assert torch.equal(p, preln.get_parameter(name)), name


@every_connection
def test_bf16_model_keeps_boundaries_in_fp32(depth):
    model = build_model(tiny_config(depth, dtype=DType.bfloat16))
    for name, p in model.named_parameters():
        if "boundary" not in name:
            assert p.dtype == torch.bfloat16, name
        elif depth.keeps_fp32:
            assert p.dtype == torch.float32, name
    seen = []
    for boundary in model.boundaries():
        boundary.register_forward_hook(lambda m, args, out: seen.append((args, out)))
    ids = tokens()
    logits = model(ids)
    assert logits.dtype == torch.bfloat16
    for (state, y, _), (new, x) in seen:
        assert y.dtype == x.dtype == torch.bfloat16
        for s in (*state, *new):
            if s.shape[-1] == model.d_model:
                assert s.dtype == torch.bfloat16, "what is of the model's width has the dtype of y"
            elif isinstance(depth, KNOWN):
                # mHC's maps, [B, T, N] and [B, T, N, N].
                assert isinstance(depth, HyperConnectionsConfig) and s.dtype == torch.float32
    next_token_loss(logits.float(), ids).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype and torch.isfinite(p.grad).all(), name
    M = retrieval_map(model, ids)
    assert M.dtype == torch.float32 and M.shape == (7, 7) and torch.isfinite(M).all()
    assert torch.equal(M, M.tril())


@every_method
def test_autocast_keeps_the_state_in_bf16(depth):
    """FP32 weights under autocast: the embedding would otherwise make an FP32 state."""
    model = build_model(tiny_config(depth))
    states = []
    model.final_boundary.register_forward_hook(lambda m, args, out: states.extend(args[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    wide = [s for s in states if s.shape[-1] == model.d_model]
    assert wide and all(s.dtype == torch.bfloat16 for s in wide)


EXPECTED_STATISTICS = {
    "preln": {"hidden rms"},
    "attnres_full": {"hidden rms", "depth attention entropy (nats)"},
    "attnres_block": {"hidden rms", "depth attention entropy (nats)"},
    "mhc": {
        "hidden rms",
        "pre gate",
        "post gate",
        "sinkhorn row error",
        "sinkhorn column error",
        "largest res logit",
    },
    "ldm": {"hidden rms", "write key", "forget rate", "query entropy (nats)"},
}


def train(model: DepthTransformer, steps: int) -> tuple[list[float], list[dict[str, float]]]:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, metrics = [], []
    model.train()
    for step in range(steps):
        optim.zero_grad()
        loss = next_token_loss(model(tokens(seed=step)), tokens(seed=step))
        loss.backward()
        metrics.append({k: float(v) for k, (v, _) in model.compute_auxiliary_metrics().items()})
        optim.step()
        losses.append(loss.item())
    return losses, metrics


@pytest.mark.parametrize("name", [*EXPECTED_STATISTICS, *OWN])
def test_metrics(name):
    plain, measured = (build_model(tiny_config(METHODS[name])) for _ in range(2))
    measured.metrics_interval = 2
    losses, without = train(plain, 5)
    measured_losses, metrics = train(measured, 5)
    assert measured_losses == losses, "measuring must not change the training"
    assert without == [{}] * 5
    assert [bool(m) for m in metrics] == [True, False, True, False, True]
    expected = EXPECTED_STATISTICS.get(name)
    if expected is None:
        records = plain.record(tokens())
        expected = {s for record in records for s in METHODS[name].statistics(record)}
    keys = {f"depth/{s} ({how})" for s in expected for how in ("mean", "max")}
    for step in (0, 2, 4):
        assert metrics[step].keys() == keys
        assert all(map(math.isfinite, metrics[step].values()))
        for s in expected:
            assert metrics[step][f"depth/{s} (mean)"] <= metrics[step][f"depth/{s} (max)"] + 1e-6


def test_metrics_have_the_values_that_they_name():
    model = build_model(tiny_config(LDMConfig()))
    for boundary in model.boundaries():
        boundary.reset_parameters()
    model.metrics_interval = 1
    _, (metrics,) = train(model, 1)
    assert metrics["depth/query entropy (nats) (mean)"] == pytest.approx(math.log(8), rel=1e-5)
    key = (2 + 12 / (1 + math.exp(3))) / 8  # one slot with 2 sigmoid(3), seven with 2 sigmoid(-3)
    assert metrics["depth/write key (max)"] == pytest.approx(key, rel=1e-5)
    rates = [1e-4 * 100 ** (i / 7) for i in range(8)]
    assert metrics["depth/forget rate (mean)"] == pytest.approx(sum(rates) / 8, rel=1e-3)

    attnres = build_model(tiny_config(AttnResConfig()))
    attnres.metrics_interval = 1
    _, (metrics,) = train(attnres, 1)
    assert metrics["depth/depth attention entropy (nats) (max)"] == pytest.approx(
        math.log(7), rel=1e-5
    )

    preln = build_model(tiny_config(PreLNConfig()))
    preln.train()
    preln.metrics_interval = 1
    rms = []
    preln.final_boundary.register_forward_hook(
        lambda m, args, out: rms.append(out[0][0][:1].square().mean(-1).sqrt().mean().item())
    )
    preln(tokens())
    metrics = preln.compute_auxiliary_metrics()
    assert float(metrics["depth/hidden rms (max)"][0]) >= rms[0] * (1 - 1e-5)


def test_evaluation_leaves_the_metrics_alone():
    model = build_model(tiny_config(LDMConfig()))
    model.metrics_interval = 1
    model.eval()
    model(tokens())
    assert model.compute_auxiliary_metrics() == {}


@every_method
def test_a_backend_that_cannot_run_is_refused_by_name(depth):
    boundary = depth.build(d_model=16, index=1, n_sublayers=6, eps=1e-6)
    own = boundary.backend_candidates(CPU, torch.float32)
    refused = {*DepthBackend} - {DepthBackend.auto, *own}
    if isinstance(depth, HyperConnectionsConfig):
        refused.add(DepthBackend.fast)  # not on a CPU
    for lacking in sorted(refused):
        model = build_model(tiny_config(depth.replace(backend=lacking)))
        with pytest.raises(OLMoConfigurationError, match=f"'{lacking}' cannot run for .*'auto'"):
            model(tokens())


@every_method
def test_auto_is_the_reference_on_a_cpu(depth):
    model = build_model(tiny_config(depth))
    expected = build_model(tiny_config(depth.replace(backend=DepthBackend.reference)))
    assert torch.equal(model(tokens()), expected(tokens()))
    assert {b.selected_backend for b in model.boundaries()} == {DepthBackend.reference}


@pytest.mark.parametrize(
    "name", [*METHODS, "all carried", "update=delta", "key_source=input,write_every=block"]
)
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
def test_activation_checkpointing_changes_nothing(name, mode):
    config = tiny_config(CONNECTIONS[name])
    results = []
    for checkpointed in (False, True):
        model = config.build(init_device="meta")
        if checkpointed:
            model.apply_activation_checkpointing(**mode)
            assert any("_checkpoint_wrapped_module" in n for n, _ in model.named_parameters())
        model.init_weights(device=CPU, max_seq_len=16)
        randomize_boundaries(model)
        loss = next_token_loss(model(tokens()), tokens())
        loss.backward()
        grads = {
            n.replace("_checkpoint_wrapped_module.", ""): p.grad
            for n, p in model.named_parameters()
        }
        results.append((loss.item(), grads))
    (loss, grads), (checkpointed_loss, checkpointed_grads) = results
    assert loss == checkpointed_loss
    assert grads.keys() == checkpointed_grads.keys()
    for key, grad in grads.items():
        assert torch.equal(grad, checkpointed_grads[key]), key


class Graphs:
    """A dynamo backend that counts: graphs compiled, and runs of a compiled graph."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs) -> Callable:
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def compile_blocks(monkeypatch) -> Iterator[Callable[..., Any]]:
    """
    ``compile_blocks(model, backend, inputs)`` calls the model's own ``apply_compile``, and the model on ``inputs`` if there
    are any, with a backend that needs no C++ compiler in the place of inductor, and puts torch's settings back afterwards.
    """
    config, compiler = torch._dynamo.config, torch.compiler.config
    sources = compiler.dynamic_sources
    torch._dynamo.reset()
    original = nn.Module.compile

    def apply(model: DepthTransformer, backend: Any, inputs: tuple = ()) -> None:
        monkeypatch.setattr(
            nn.Module, "compile", lambda self, **kwargs: original(self, backend=backend, **kwargs)
        )
        model.apply_compile()
        if inputs:
            model(*inputs)  # the first step compiles what only then is known
        monkeypatch.setattr(nn.Module, "compile", original)

    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
        yield apply
    compiler.dynamic_sources = sources
    torch._dynamo.reset()


def built(depth: DepthConnectionConfig, n_layers: int) -> DepthTransformer:
    model = tiny_config(depth, n_layers=n_layers).build(init_device="meta")
    # As the trainer does; without it the first block fills RoPE's cache, which compiles every graph twice.
    model.init_weights(device=CPU, max_seq_len=16)
    return model


# They do not change the number of graphs, only the time that each takes.
FEW_ITERATIONS = HyperConnectionsConfig(sinkhorn_iterations=2)


OF_FEW_GRAPHS: dict[str, DepthConnectionConfig] = {
    "preln": PreLNConfig(),
    "ldm": LDMConfig(window=1),
    "mhc": FEW_ITERATIONS,
    **{name: depth for name, depth in OWN.items() if not depth.state_grows},
}


@pytest.mark.parametrize("depth", OF_FEW_GRAPHS.values(), ids=OF_FEW_GRAPHS)
def test_24_blocks_compile_to_four_graphs(depth, compile_blocks):
    """The first block, all others, the last boundary and the LM head; and every block runs a graph."""
    model, graphs = built(depth, 24), Graphs()
    compile_blocks(model, graphs)
    with torch.no_grad():
        model(tokens(2, 8))
        assert (graphs.compiled, graphs.runs) == (4, 24 + 2), (
            "forward() may depend on is_first and is_last, not on the index"
        )
        model(tokens(2, 8))
        assert (graphs.compiled, graphs.runs) == (4, 2 * (24 + 2)), (
            "compiled again after the first step"
        )
        # Recording runs eagerly and compiles nothing.
        model.record(tokens(2, 8))
    assert (graphs.compiled, graphs.runs) == (4, 2 * (24 + 2))


def joined(depth: DepthConnectionConfig, **kwargs) -> Any:
    config = tiny_config(depth, **kwargs)
    config.block.joint_input_gradient = True  # type: ignore[union-attr]
    return config


@pytest.mark.parametrize("autocast", [False, True])
def test_joint_input_gradients_are_the_same(autocast):
    """Outputs and all gradients, in FP64, and under autocast within the rounding of BF16; 3 additions a block are in the products."""
    results = []
    for make in (tiny_config, joined):
        model = build_model(make(LDMConfig(d_k=2), full_precision=False), fp64=not autocast)
        randomize_boundaries(model)
        ids = tokens(2, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids)
            loss = next_token_loss(logits, ids)
        with torch.profiler.profile() as profile:
            loss.backward()
        counts = {e.key: e.count for e in profile.key_averages()}
        assert counts.get("aten::addmm_", 0) == (3 * model.n_layers if make is joined else 0)
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits, gradients))
    (logits, gradients), (same, joint) = results
    assert joint.keys() == gradients.keys()
    if autocast:
        assert torch.equal(same, logits)
    else:
        torch.testing.assert_close(same, logits, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        assert joint[name].dtype == gradient.dtype
        if autocast:
            # Each of the two ways rounds sums to BF16 a few times, 2^-9 each, on the way through four sublayers.
            assert relative_error(joint[name], gradient) < 2e-2, name
        else:
            torch.testing.assert_close(joint[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("depth", [PreLNConfig(), LDMConfig(d_k=2)], ids=["preln", "ldm"])
def test_joint_input_gradients_compile_as_before(depth, compile_blocks):
    """No more graphs, no graph break, and none compiled again."""
    counts = []
    for make in (tiny_config, joined):
        model, graphs = make(depth, n_layers=4).build(init_device="meta"), Graphs()
        model.init_weights(device=CPU, max_seq_len=16)
        compile_blocks(model, graphs, (tokens(2, 8),))
        for _ in range(3):
            model(tokens(2, 8))
        counts.append((graphs.compiled, graphs.runs))
        torch._dynamo.reset()
    assert counts[0] == counts[1]


def test_joint_input_gradients_refuse_others():
    config = joined(LDMConfig())
    config.block.feed_forward.bias = True
    with pytest.raises(OLMoConfigurationError, match="without a bias"):
        config.build(init_device="meta")
    model = joined(LDMConfig()).build(init_device="cpu")
    with pytest.raises(RuntimeError, match="the first one first"):
        model.blocks["0"].feed_forward.w3(torch.zeros(1, 16))


@pytest.mark.parametrize(
    "depth",
    [
        LDMConfig(backend="flexible"),
        AttnResConfig(block_size=2, backend="flexible"),
        HyperConnectionsConfig(backend="flexible"),
    ],  # type: ignore[arg-type]
    ids=["ldm", "attnres", "mhc"],
)
def test_kernels_in_graphs_of_two_widths(depth):
    """After a second width in one process, dynamo traces the width as a symbol."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    torch.manual_seed(0)
    for d in (16, 24):
        state: tuple[torch.Tensor, ...] = ()
        ys = [torch.randn(1, 3, d, requires_grad=True) for _ in range(3)]
        gain = torch.ones(d, requires_grad=True)
        for index, y in enumerate(ys):
            boundary = depth.build(d_model=d, index=index, n_sublayers=4, eps=1e-6)
            boundary.select_backend(torch.device("cpu"), torch.float32)
            boundary.compile(fullgraph=True, backend="aot_eager")
            state, x = boundary(state, y, gain)
        x.square().sum().backward()
        assert all(torch.isfinite(y.grad).all() for y in ys)
    torch._dynamo.reset()


def test_attnres_full_compiles_every_boundary(compile_blocks):
    """
    Each boundary has another number of sources and so a graph of its own; the sublayers of all blocks share one. torch's
    limit on graphs is lowered below the number of boundaries, as 8 is below 49: apply_compile must lift it, and an excess
    must raise.
    """
    config = torch._dynamo.config
    with config.patch(recompile_limit=2):
        model, graphs = built(AttnResConfig(), 3), Graphs()
        with torch.no_grad():
            compile_blocks(model, graphs, (tokens(2, 8),))
        # 7 boundaries, attention, feed-forward, LM head.
        assert (graphs.compiled, graphs.runs) == (7 + 3, 7 + 6 + 1)
        assert config.fail_on_recompile_limit_hit

    # The control: with torch's own behaviour the blocks beyond the limit run eagerly, without an error.
    torch._dynamo.reset()
    with config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        model, graphs = built(AttnResConfig(), 3), Graphs()
        for block in model.blocks.values():
            block.compile(backend=graphs)
        with torch.no_grad():
            model(tokens(2, 8))
        assert graphs.runs == 2


@pytest.mark.parametrize("n_layers", [24, 28])
def test_the_limit_on_graphs_is_above_the_number_of_blocks(n_layers, compile_blocks):
    model = tiny_config(AttnResConfig(), n_layers=n_layers).build(init_device="meta")
    compile_blocks(model, Graphs())
    assert torch._dynamo.config.recompile_limit > n_layers
    assert torch._dynamo.config.accumulated_recompile_limit > n_layers
    assert torch._dynamo.config.fail_on_recompile_limit_hit


@pytest.mark.parametrize("depth", [LDMConfig(d_k=2), *OWN.values()], ids=["ldm", *OWN])
def test_compiled_blocks_equal_eager_ones(depth, compile_blocks):
    """Through AOT autograd: the backward graph too."""
    eager, model = (built(depth, 1) for _ in range(2))
    compile_blocks(model, "aot_eager")
    results = []
    for m in (eager, model):
        randomize_boundaries(m)
        loss = next_token_loss(m(tokens()), tokens())
        loss.backward()
        results.append((loss.item(), {n: p.grad for n, p in m.named_parameters()}))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert results[0][1].keys() == results[1][1].keys()
    for name, grad in results[0][1].items():
        assert grad is not None
        assert torch.allclose(grad, results[1][1][name], rtol=1e-4, atol=1e-7), name


@every_method
def test_tensor_and_pipeline_parallelism_are_refused(depth):
    model = tiny_config(depth).build(init_device="meta")
    for refused, says in (("apply_tp", "tensor parallelism"), ("apply_pp", "pipeline parallelism")):
        for part in (model, model.blocks["0"]):
            with pytest.raises(NotImplementedError, match=f"{says}.*use FSDP"):
                getattr(part, refused)(None)


@every_method
def test_ddp_in_bf16_is_refused_where_parameters_stay_fp32(depth):
    model = tiny_config(depth).build()
    if depth.keeps_fp32:
        with pytest.raises(OLMoConfigurationError, match="must stay FP32"):
            model.apply_ddp(param_dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    elif isinstance(depth, KNOWN):
        assert not [n for n, _ in model.named_parameters() if "boundary" in n]


def test_tied_embeddings_work():
    config = tiny_config(LDMConfig(), tie_word_embeddings=True)
    model = build_model(config)
    assert model.lm_head.w_out.weight is model.embeddings.weight
    assert config.num_params == sum(p.numel() for p in model.parameters())
    next_token_loss(model(tokens()), tokens()).backward()


def test_a_block_pattern_may_vary_what_is_not_the_depth_connection():
    config = tiny_config(LDMConfig(), n_layers=2)
    wide = block_of(config).replace(feed_forward=FeedForwardConfig(hidden_size=24, bias=False))
    mixed = config.replace(block={"a": config.block, "b": wide}, block_pattern=["a", "b"])
    model = build_model(mixed)
    assert model.blocks["1"].feed_forward.w1.out_features == 24
    assert mixed.num_params == sum(p.numel() for p in model.parameters())
    assert torch.isfinite(model(tokens())).all()


@pytest.mark.parametrize("activation", ["two_sigmoid", "softmax", "none"])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        # Sublayers 0 .. 8 write at boundaries 1 .. 9; the embedding belongs to the first slot.
        ("block", [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]),
        ("embedding_block", [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    ],
)
def test_block_start_of_the_keys_makes_slots_of_runs_of_sublayers(start, expected, activation):
    K, L, d = 4, 9, 16
    config = LDMConfig(d_k=K, key_start=start, key_activation=activation, forget="none")
    torch.manual_seed(0)
    state, y, gain = (), torch.randn(1, 3, d), torch.ones(d)
    slots = []
    for index in range(L + 1):
        boundary = config.build(d_model=d, index=index, n_sublayers=L, eps=1e-6)
        state, _, _, coefficients = boundary.reference(state, y, gain)
        key = coefficients["key"].reshape(-1, K)[0]
        slots.append(int(key.argmax()))
        assert key.max() > 10 * key.sort().values[-2]
    assert slots == expected


@pytest.mark.parametrize(("start", "first", "last"), [("narrow", 1e-4, 1e-2), ("wide", 1e-3, 1.0)])
def test_forget_rates_start_log_spaced(start, first, last):
    config = LDMConfig(d_k=5, forget_start=start)
    b = config.build(d_model=16, index=2, n_sublayers=4, eps=1e-6).b_forget
    rates = torch.nn.functional.softplus(b.detach().double())
    ratio = (last / first) ** 0.25
    torch.testing.assert_close(
        rates, first * ratio ** torch.arange(5.0).double(), rtol=1e-3, atol=0
    )

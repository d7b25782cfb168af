"""
The mathematics of the four methods, mostly in FP64: against OLMo-core's own PreLN, against forward passes written here
straight from the equations, and against each method's unrolled form ``h_l = sum_i M[l, i] y_i``.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import (
    LDM_VALUES,
    METHODS,
    OWN,
    VOCAB,
    assert_same_gradients,
    build_model,
    captured_outputs,
    ldm_variants,
    logits_and_gradients,
    next_token_loss,
    randomize_boundaries,
    relative_error,
    shared_parameters,
    tiny_config,
    tokens,
    upstream_model,
    upstream_names,
)

from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthBoundary, DepthConnectionConfig, DepthTransformer, retrieval_map
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.hyper_connections.backends.reference import sinkhorn
from olmo_core.nn.ldm import LDMConfig

VARIANTS = ldm_variants()


def fp64_config(depth: DepthConnectionConfig, **kwargs):
    return tiny_config(depth, full_precision=False, **kwargs)


# An epsilon that is not small makes a wrong one, or a missing one, show.
LARGE_EPS = 0.1


@pytest.fixture(scope="module")
def upstream() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of OLMo-core's own transformer."""
    model = upstream_model(fp64_config(METHODS["preln"], eps=1e-12))
    logits, grads = logits_and_gradients(model, tokens())
    return logits, upstream_names(grads)


def assert_equals_preln(model: DepthTransformer, upstream, tolerance: float = 1e-9) -> None:
    logits, grads = logits_and_gradients(model, tokens())
    expected_logits, expected_grads = upstream
    assert relative_error(logits, expected_logits) < tolerance
    shared = shared_parameters(model)
    assert "embeddings.weight" in shared
    assert_same_gradients(
        {n: g for n, g in grads.items() if n in shared}, expected_grads, tolerance
    )


def test_preln_is_the_transformer_of_olmo_core():
    """Also with an epsilon large enough to matter: the boundary must use that of the block's norm."""
    config = fp64_config(METHODS["preln"], eps=LARGE_EPS)
    model, other = build_model(config, fp64=True), upstream_model(config)
    logits, grads = logits_and_gradients(model, tokens())
    expected, expected_grads = logits_and_gradients(other, tokens())
    assert relative_error(logits, expected) < 1e-13
    assert_same_gradients(grads, upstream_names(expected_grads), 1e-11)


@torch.no_grad()
def stop_forgetting(model: DepthTransformer) -> None:
    for boundary in model.boundaries():
        if getattr(boundary, "b_forget", None) is not None:
            boundary.b_forget.fill_(-math.inf)


LDM_AS_PRELN = {
    "no forget": LDMConfig(forget="none"),
    "dynamic, b = -inf": LDMConfig(forget="dynamic"),
    "static, b = -inf": LDMConfig(forget="static"),
    "scalar, b = -inf": LDMConfig(forget_granularity="scalar"),
    "delta, beta = 0": LDMConfig(forget="none", update="delta"),
    "block writes": LDMConfig(forget="none", write_every="block"),
    "block writes, input key": LDMConfig(forget="none", write_every="block", key_source="input"),
    "residual kept": LDMConfig(forget="none", residual="kept"),
    **{
        f"k {k}, q {q}, K {K}": LDMConfig(
            d_k=K, key_activation=k, query_activation=q, forget=("none", "dynamic")[K % 3 == 0]
        )
        for k in LDM_VALUES["key_activation"]
        for q in LDM_VALUES["query_activation"]
        for K in (1, 3, 8)
    },
    **{f"key from {s}": LDMConfig(forget="none", key_source=s) for s in ("input", "static")},
    **{f"query from {s}": LDMConfig(forget="none", query_source=s) for s in ("output", "static")},
}


def starts(config: LDMConfig) -> list[str]:
    """The starts of the keys at which the model is PreLN."""
    if config.residual == "kept" or config.write_every == "block":
        return [
            "uniform"
        ]  # what is read beside the memory has weight 1, a source in the slots' mean 0.3 with the others
    return ["uniform", "block", "embedding_block"]


@pytest.mark.parametrize(
    ("name", "start"), [(n, s) for n, config in LDM_AS_PRELN.items() for s in starts(config)]
)
def test_ldm_without_weights_and_forgetting_is_preln(name, start, upstream):
    config = replace(LDM_AS_PRELN[name], key_start=start)
    model = build_model(fp64_config(config, eps=1e-12), fp64=True)
    for boundary in model.boundaries():
        boundary.reset_parameters()  # W = 0, and the biases at their start
        if getattr(boundary, "b_beta", None) is not None:
            torch.nn.init.constant_(boundary.b_beta, -math.inf)
    stop_forgetting(model)
    # Keys other than 1 are FP32 parameters: the embedding's weight is another one than the sublayers' by 2^-24 of it.
    assert_equals_preln(model, upstream, 1e-9 if start == "uniform" else 1e-6)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 7])
def test_attnres_with_zero_queries_is_preln(block_size, upstream):
    """6 sublayers, so that blocks of 4 and 5 leave a short last block."""
    model = build_model(fp64_config(AttnResConfig(block_size=block_size), eps=1e-12), fp64=True)
    randomize_boundaries(model)
    for boundary in list(model.boundaries())[1:]:
        torch.nn.init.zeros_(boundary.query)  # the gains keep their noise: they must not matter
    assert_equals_preln(model, upstream)


@pytest.mark.parametrize("n_streams", [1, 4])
@pytest.mark.parametrize("collapse", ["head", "sum"])
@pytest.mark.parametrize("b_pre", [-0.7, 2.0])
def test_mhc_with_equal_streams_is_preln(n_streams, collapse, b_pre, upstream):
    config = HyperConnectionsConfig(n_streams=n_streams, collapse=collapse)
    model = build_model(fp64_config(config, eps=1e-12), fp64=True)
    randomize_boundaries(model, std=2.0)  # any alpha, any b_res
    with torch.no_grad():
        for boundary in model.boundaries():
            if boundary.phi is not None:
                boundary.phi.zero_()
                boundary.bias[:n_streams] = b_pre
                boundary.bias[n_streams : 2 * n_streams] = 0.0
    assert_equals_preln(model, upstream)


def rms(v: torch.Tensor, eps: float) -> torch.Tensor:
    return v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)


class Oracle:
    """
    Runs a model's sublayers, and mixes what they read here from the full history: no state is carried.

    :param read: ``(boundary, index, ys, xs) -> h_l``.
    """

    def __init__(self, model: DepthTransformer, read, eps: float):
        self.model, self.read, self.eps = model, read, eps

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        model = self.model
        steps = []
        for block in model.blocks.values():
            steps.append((block.attention_boundary, block.attention_norm, block.attention))
            steps.append((block.feed_forward_boundary, block.feed_forward_norm, block.feed_forward))
        steps.append((model.final_boundary, model.final_norm, model.lm_head))
        ys, xs = [model.embeddings(ids)], []
        for index, (boundary, norm, sublayer) in enumerate(steps):
            h = self.read(boundary, index, ys, xs)
            xs.append(rms(h, self.eps) * norm.weight)
            ys.append(sublayer(xs[-1]))
        return ys[-1]


def attnres_read_from_paper(block_size: int):
    """arXiv 2603.15031: the embedding, the sums of the complete blocks, and the partial sum of the open one."""

    def read(boundary, index, ys, xs):
        del xs
        if index == 0:
            return ys[0]
        sources = [ys[0]]
        for start in range(1, index + 1, block_size):
            sources.append(sum(ys[start : min(start + block_size, index + 1)]))
        scores = torch.stack(
            [(boundary.query * boundary.gain * rms(v, boundary.eps)).sum(-1).exp() for v in sources]
        )
        weights = scores / scores.sum(0)
        return sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))

    return read


def mhc_read_from_paper(n: int, iterations: int, collapse: str):
    """arXiv 2512.24880, eq. 3 to 9, with the Sinkhorn iteration on probabilities; the streams anew for every reader."""

    def maps(boundary, X):
        flat = rms(X.flatten(-2), boundary.eps)
        phi, (a_pre, a_post, a_res), b = boundary.phi, boundary.alpha, boundary.bias
        pre = torch.sigmoid(a_pre * (flat @ phi[:, :n]) + b[:n])
        post = 2 * torch.sigmoid(a_post * (flat @ phi[:, n : 2 * n]) + b[n : 2 * n])
        res = torch.exp(a_res * (flat @ phi[:, 2 * n :]) + b[2 * n :]).unflatten(-1, (n, n))
        for _ in range(iterations):
            res = res / res.sum(-2, keepdim=True)
            res = res / res.sum(-1, keepdim=True)
        return pre, post, res

    def read(boundary, index, ys, xs):
        del xs
        model = boundary.model
        X = torch.stack([ys[0]] * n, dim=-2)
        for earlier, y in zip(model, ys[1:], strict=False):
            _, post, res = maps(earlier, X)
            X = torch.einsum("...ij,...jd->...id", res, X) + post[..., :, None] * y[..., None, :]
        if index == len(model) - 1:
            if collapse == "sum":
                return X.sum(-2)
            gate = torch.sigmoid(
                boundary.alpha * (rms(X.flatten(-2), boundary.eps) @ boundary.phi) + boundary.bias
            )
            return torch.einsum("...n,...nd->...d", gate, X)
        pre, _, _ = maps(boundary, X)
        return torch.einsum("...n,...nd->...d", pre, X)

    return read


def ldm_read_from_design(c: LDMConfig, boundaries: list):
    """
    LDM as a gated linear recurrence ``S_l = A_l S_{l-1} + k_l y_l^T`` with dense ``A_l`` ``[K, K]``, from the first
    boundary again for every reader.
    """
    K = c.d_k

    def key(b, y, x):
        z = b.b_key
        if c.key_source != "static":
            z = z + rms(x if c.key_source == "input" else y, b.eps) @ b.w_key
        if c.key_activation == "two_sigmoid":
            return 2 / (1 + torch.exp(-z))
        if c.key_activation == "softmax":
            return K * z.exp() / z.exp().sum(-1, keepdim=True)
        return z

    def transition(b, y, k):
        A = torch.eye(K, dtype=y.dtype).expand(*y.shape[:-1], K, K)
        if c.forget != "none":
            z = b.b_forget
            if c.forget == "dynamic":
                z = z + rms(y, b.eps) @ b.w_forget
            A = torch.exp(-torch.log1p(torch.exp(z)))[..., None] * A
        if c.update == "delta":
            beta = 1 / (1 + torch.exp(-(rms(y, b.eps) @ b.w_beta + b.b_beta)))
            kk = k[..., :, None] * k[..., None, :] / (k * k).sum(-1)[..., None, None]
            A = A - beta[..., None, None] * (kk @ A)
        return A

    def query(b, y, S):
        z = b.b_query
        if c.query_source == "memory":
            z = z + rms(S.mean(-2), b.eps) @ b.w_query
        elif c.query_source == "output":
            z = z + rms(y, b.eps) @ b.w_query
        if c.query_activation == "softmax":
            return z.exp() / z.exp().sum(-1, keepdim=True)
        return 1 / (1 + torch.exp(-z)) if c.query_activation == "sigmoid" else z

    def read(boundary, index, ys, xs):
        if index == 0:
            return ys[0]
        S = boundaries[0].key_0[:, None] * ys[0][..., None, :]
        y = ys[0]
        for i in range(1, index + 1):
            y = ys[i]
            if c.write_every == "block":
                if i % 2:
                    continue
                y = ys[i - 1] + ys[i]
            b = boundaries[i]
            k = key(b, y, xs[i - 1]).expand(*y.shape[:-1], K)
            S = transition(b, y, k) @ S + k[..., :, None] * y[..., None, :]
        h = torch.einsum("...k,...kd->...d", query(boundary, y, S).expand(*y.shape[:-1], K), S)
        if c.write_every == "block" and index % 2:
            h = h + ys[index]
        if c.residual == "kept":
            # With block writes attention's output is in the read once, not twice.
            h = h + sum(ys[: index if c.write_every == "block" and index % 2 else index + 1])
        return h

    return read


def assert_equals_oracle(model: DepthTransformer, oracle: Oracle, tolerance: float = 1e-9) -> None:
    logits, grads = logits_and_gradients(model, tokens(2, 5))
    expected, expected_grads = logits_and_gradients(model, tokens(2, 5), oracle)
    assert relative_error(logits, expected) < tolerance
    assert set(grads) == {n for n, _ in model.named_parameters()}, "a parameter without a gradient"
    assert_same_gradients(grads, expected_grads, tolerance)


@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 9])
def test_attnres_follows_the_paper(block_size):
    """Block size 1 against full AttnRes: every earlier output is a source."""
    config = fp64_config(AttnResConfig(block_size=block_size), eps=LARGE_EPS)
    model = build_model(config, fp64=True)
    randomize_boundaries(model)
    assert_equals_oracle(model, Oracle(model, attnres_read_from_paper(block_size), LARGE_EPS))


@pytest.mark.parametrize("n_streams,collapse", [(4, "head"), (3, "sum"), (1, "head")])
def test_mhc_follows_the_paper(n_streams, collapse):
    config = HyperConnectionsConfig(n_streams=n_streams, collapse=collapse, sinkhorn_iterations=7)
    model = build_model(fp64_config(config, eps=LARGE_EPS), fp64=True)
    randomize_boundaries(model)
    boundaries = list(model.boundaries())
    for boundary in boundaries:
        object.__setattr__(boundary, "model", boundaries)
    assert_equals_oracle(
        model, Oracle(model, mhc_read_from_paper(n_streams, 7, collapse), LARGE_EPS)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_ldm_follows_the_design(name):
    model = build_model(fp64_config(VARIANTS[name], eps=LARGE_EPS, n_layers=2), fp64=True)
    randomize_boundaries(model)
    read = ldm_read_from_design(VARIANTS[name], list(model.boundaries()))
    assert_equals_oracle(model, Oracle(model, read, LARGE_EPS))


@pytest.mark.parametrize(
    "depth",
    [*METHODS.values(), AttnResConfig(block_size=3), *VARIANTS.values()],
    ids=[*METHODS, "attnres_block_3", *VARIANTS],
)
def test_retrieval_map_reproduces_what_is_read(depth):
    model = build_model(fp64_config(depth, eps=LARGE_EPS), fp64=True)
    randomize_boundaries(model)
    ids = tokens(2, 5)
    with captured_outputs(model) as outputs:
        records = model.record(ids)
    assert [r.index for r in records] == list(range(7))
    M = depth.retrieval_map(records)
    assert M.shape == (2, 5, 7, 7) and M.dtype == torch.float64
    assert torch.equal(M, M.tril()), "a reader cannot see a later output"
    h = torch.stack([r.h for r in records], dim=-2)
    y = torch.stack(outputs, dim=-2)
    if depth.exact_map:
        assert relative_error(M @ y, h) < 1e-12, (
            "M y is not h: weights by channel need exact_map = False"
        )
    assert relative_error(retrieval_map(model, ids), M.mean(dim=(0, 1))) < 1e-12


@pytest.mark.parametrize("depth", METHODS.values(), ids=METHODS)
def test_recording_changes_nothing(depth):
    model = build_model(fp64_config(depth), fp64=True)
    ids = tokens()
    model.train()
    before = model(ids).detach()
    retrieval_map(model, ids)
    assert model.training, "retrieval_map must restore the mode"
    assert torch.equal(model(ids).detach(), before)
    assert all(p.grad is None for p in model.parameters())


def one_write(update: str, beta: float, d_k: int = 3, d: int = 5):
    """A boundary with a static key and a given erase rate; returns the old memory, y, the key and the new memory."""
    config = LDMConfig(d_k=d_k, update=update, key_source="static", forget="none")
    boundary = config.build(d_model=d, index=1, n_sublayers=4, eps=1e-6).double()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        boundary.b_key.copy_(torch.randn(d_k, generator=g))
        if update == "delta":
            boundary.b_beta.fill_(math.log(beta / (1 - beta)) if beta < 1 else math.inf)
    S = torch.randn(1, 1, d_k, d, generator=g, dtype=torch.float64)
    y = torch.randn(1, 1, d, generator=g, dtype=torch.float64)
    (new, *_), _ = boundary((S,), y, torch.ones(d, dtype=torch.float64))
    key = 2 * torch.sigmoid(boundary.b_key.detach())
    return S[0, 0], y[0, 0], key, new[0, 0].detach()


def test_delta_rule_solves_for_the_memory_that_returns_y():
    """
    With an erase rate of 1 the new memory is the one that a read along the key answers with ``|k| y`` and that answers
    every orthogonal read as before: a dense linear system.
    """
    S, y, key, new = one_write("delta", beta=1.0)
    unit = key / key.norm()
    orthogonal = torch.linalg.qr(
        torch.cat([unit[:, None], torch.eye(3, dtype=torch.float64)], dim=1)
    )[0][:, 1:3]
    system = torch.cat([unit[None], orthogonal.T])
    right = torch.cat([key.norm() * y[None], orthogonal.T @ S])
    assert relative_error(new, torch.linalg.solve(system, right)) < 1e-12


def test_delta_rule_with_a_partial_erase_is_a_matrix_product():
    S, y, key, new = one_write("delta", beta=0.3)
    erase = torch.eye(3, dtype=torch.float64) - 0.3 * torch.outer(key, key) / key.dot(key)
    assert relative_error(new, erase @ S + torch.outer(key, y)) < 1e-12
    S, y, key, new = one_write("additive", beta=0.3)
    assert relative_error(new, S + torch.outer(key, y)) < 1e-12


@pytest.mark.parametrize("K", [1, 2, 4, 8, 16])
def test_forget_rates_start_log_spaced(K):
    boundary = LDMConfig(d_k=K).build(d_model=8, index=3, n_sublayers=4, eps=1e-6)
    rates = torch.nn.functional.softplus(boundary.b_forget.detach().double()).numpy()
    expected = np.geomspace(1e-4, 1e-2, K) if K > 1 else np.array([1e-3])
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    scalar = LDMConfig(d_k=K, forget_granularity="scalar").build(
        d_model=8, index=3, n_sublayers=4, eps=1e-6
    )
    assert scalar.w_forget.shape == (8, 1) and scalar.b_forget.shape == (1,)
    assert math.log1p(math.exp(scalar.b_forget.item())) == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.parametrize("K", [1, 2, 8])
@pytest.mark.parametrize("key_activation", LDM_VALUES["key_activation"])
@pytest.mark.parametrize("query_activation", LDM_VALUES["query_activation"])
@pytest.mark.parametrize("start", ["embedding_block", "block", "uniform"])
def test_ldm_starts_as_the_mean_of_alike_sources(K, key_activation, query_activation, start):
    """
    All keys sum to the same, each is 1 in a uniform start, and q = 1/K (a sigmoid cannot reach 1 for K = 1 and starts at
    sigmoid(4)).
    """
    config = LDMConfig(
        d_k=K, key_start=start, key_activation=key_activation, query_activation=query_activation
    )
    model = build_model(fp64_config(config), fp64=True)
    for boundary in model.boundaries():
        boundary.reset_parameters()
    q = 1 / (1 + math.exp(-4)) if (K, query_activation) == (1, "sigmoid") else 1 / K
    records = model.record(tokens())
    total = records[0].coefficients["key"].sum(-1).reshape(-1)[0]
    for record in records:
        c = record.coefficients
        assert torch.allclose(c["key"].sum(-1), total, rtol=1e-6)
        if start == "uniform" or K == 1:
            assert torch.allclose(c["key"], torch.ones_like(c["key"]), rtol=1e-6)
        if record.index:
            assert torch.allclose(c["query"], torch.full_like(c["query"], q), rtol=1e-6)


def test_ldm_initialisation_breaks_the_symmetry_between_slots():
    config = LDMConfig(update="delta")
    model = build_model(tiny_config(config, d_model=64))
    boundary = model.blocks["1"].feed_forward_boundary
    for w in (boundary.w_key, boundary.w_query):
        assert w.std().item() == pytest.approx(0.1 / math.sqrt(64), rel=0.15)
        assert w.unique().numel() == w.numel()
    assert not torch.equal(boundary.w_key, boundary.w_query)
    assert not torch.equal(boundary.w_key, model.blocks["0"].feed_forward_boundary.w_key)
    assert boundary.w_forget.abs().max() == 0 and boundary.w_beta.abs().max() == 0
    assert boundary.b_beta.item() == -4.0


def test_ldm_boundary_0_has_only_its_key():
    first = LDMConfig().build(d_model=8, index=0, n_sublayers=4, eps=1e-6)
    assert [n for n, _ in first.named_parameters()] == ["key_0"]
    middle = LDMConfig(write_every="block").build(d_model=8, index=1, n_sublayers=4, eps=1e-6)
    assert sorted(n for n, _ in middle.named_parameters()) == ["b_query", "w_query"]


def attnres_inputs(n: int = 5, d: int = 6, eps: float = 1e-6):
    boundary = AttnResConfig().build(d_model=d, index=n - 1, n_sublayers=9, eps=eps).double()
    randomize = torch.Generator().manual_seed(5)
    with torch.no_grad():
        boundary.query.copy_(torch.randn(d, generator=randomize))
        boundary.gain.copy_(torch.randn(d, generator=randomize))
    sources = [torch.randn(2, 3, d, generator=randomize, dtype=torch.float64) for _ in range(n)]
    return boundary, sources


def read(boundary: DepthBoundary, sources: list[torch.Tensor]):
    weight = torch.ones(sources[0].shape[-1], dtype=torch.float64)
    _, _, h, coefficients = boundary.reference(tuple(sources[:-1]), sources[-1], weight)
    return h.detach(), coefficients["weights"].detach()


def test_attnres_ignores_the_order_of_the_sources():
    boundary, sources = attnres_inputs()
    h, weights = read(boundary, sources)
    order = [3, 1, 4, 0, 2]
    permuted, permuted_weights = read(boundary, [sources[i] for i in order])
    assert torch.allclose(h, permuted, rtol=0, atol=1e-14)
    assert torch.allclose(weights[..., order], permuted_weights, rtol=0, atol=1e-14)
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-14)
    assert weights.std() > 0.05, "the queries must matter in this test"


def test_attnres_scaling_a_source_scales_its_share_only():
    """Keys are normalised, values are not."""
    boundary, sources = attnres_inputs(eps=1e-14)
    h, weights = read(boundary, sources)
    scaled_h, scaled_weights = read(
        boundary, [7.0 * s if i == 2 else s for i, s in enumerate(sources)]
    )
    assert torch.allclose(weights, scaled_weights, rtol=0, atol=1e-12)
    expected = h + 6.0 * weights[..., 2, None] * sources[2]
    assert relative_error(scaled_h, expected) < 1e-12


@pytest.mark.parametrize("scale", [0.5, 2.0, 40.0])
def test_sinkhorn_rows_sum_to_one(scale, record_property):
    """Columns only as far as 20 iterations reach: compared with an independent iteration, and reported."""
    logits = scale * np.random.default_rng(0).standard_normal((200, 4, 4))
    m = np.exp(logits)
    for _ in range(20):
        m = m / m.sum(axis=-2, keepdims=True)
        m = m / m.sum(axis=-1, keepdims=True)
    for dtype, rows, entries in ((torch.float64, 1e-14, 1e-11), (torch.float32, 2e-6, 2e-3)):
        res = sinkhorn(torch.tensor(logits, dtype=dtype), 20)
        assert (res.sum(-1) - 1).abs().max() < rows
        assert np.abs(res.double().numpy() - m).max() < entries * max(1.0, scale / 4)
    column_error = float(np.abs(m.sum(axis=-2) - 1).max())
    record_property(f"largest column error at {scale} x N(0, 1)", column_error)
    assert column_error < (1e-6 if scale < 1 else 1.0 if scale < 10 else 4.0)


def test_sinkhorn_survives_logits_beyond_the_range_of_exp():
    res = sinkhorn(torch.tensor([[200.0, -200.0], [150.0, 100.0]]), 20)
    assert torch.isfinite(res).all() and (res.sum(-1) - 1).abs().max() < 2e-6


def test_mhc_reports_the_sinkhorn_error():
    config = HyperConnectionsConfig()
    model = build_model(fp64_config(config), fp64=True)
    randomize_boundaries(model, std=2.0)
    for record in model.record(tokens())[:-1]:
        statistics = config.statistics(record)
        res = record.coefficients["res"]
        assert statistics["sinkhorn row error"] < 1e-14
        expected = max(abs(float(s) - 1) for s in res.sum(-2).flatten())
        assert float(statistics["sinkhorn column error"]) == pytest.approx(expected, rel=1e-12)


def spread(model: DepthTransformer, ids: torch.Tensor) -> float:
    """The largest difference between two streams that reach the LM head."""
    seen = []
    hook = model.final_boundary.register_forward_hook(lambda *a: seen.append(a[-1][0][0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return (seen[0] - seen[0][..., :1, :]).abs().max().item()


def train(model: DepthTransformer, steps: int) -> None:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optim.zero_grad()
        next_token_loss(model(tokens()), tokens()).backward()
        optim.step()


@pytest.mark.parametrize("random_phi", [True, False])
def test_mhc_streams_part_with_the_default_start(random_phi):
    """The one-hot biases alone must do it too."""
    model = build_model(fp64_config(HyperConnectionsConfig()), fp64=True)
    if not random_phi:
        for boundary in model.boundaries():
            boundary.reset_parameters()
    train(model, 1)
    assert spread(model, tokens()) > 1e-4


def test_mhc_streams_stay_identical_with_a_uniform_start():
    """The trap that the default start avoids: by symmetry nothing ever parts the streams."""
    model = build_model(fp64_config(HyperConnectionsConfig()), fp64=True)
    with torch.no_grad():
        for boundary in model.boundaries():
            boundary.phi.zero_()
            boundary.bias.zero_()
    train(model, 3)
    assert spread(model, tokens()) < 1e-10


def test_mhc_starts_with_one_home_stream_for_each_sublayer():
    """arXiv 2512.24880, appendix: H_pre is large at stream (sublayer mod n), H_post = 1, H_res near the identity."""
    model = build_model(fp64_config(HyperConnectionsConfig()), fp64=True)
    for boundary in model.boundaries():
        boundary.reset_parameters()
    for record in model.record(tokens())[:-1]:
        c = record.coefficients
        pre = torch.full((4,), 1 / (1 + math.exp(3.0)), dtype=torch.float64)
        pre[record.index % 4] = 1 / (1 + math.exp(-3.0))
        assert torch.allclose(c["pre"], pre.expand_as(c["pre"]), rtol=1e-6)
        assert torch.allclose(c["post"], torch.ones_like(c["post"]), rtol=1e-6)
        off = 1 / (math.exp(6.0) + 3)
        expected = torch.full((4, 4), off, dtype=torch.float64).fill_diagonal_(1 - 3 * off)
        assert torch.allclose(c["res"], expected.expand_as(c["res"]), rtol=1e-6)


@pytest.mark.parametrize("index", [3, 6])
def test_mhc_is_equivariant_under_a_permutation_of_the_streams(index):
    n, d = 4, 5
    config = HyperConnectionsConfig()
    boundary = config.build(d_model=d, index=index, n_sublayers=6, eps=1e-6).double()
    other = config.build(d_model=d, index=index, n_sublayers=6, eps=1e-6).double()
    g = torch.Generator().manual_seed(7)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    p = torch.tensor([2, 0, 3, 1])
    res_columns = torch.arange(2 * n, 2 * n + n * n).view(n, n)[p][:, p].flatten()
    columns = p if index == 6 else torch.cat([p, n + p, res_columns])
    with torch.no_grad():
        boundary.phi.copy_(noise(*boundary.phi.shape))
        boundary.alpha.copy_(noise(*boundary.alpha.shape))
        boundary.bias.copy_(noise(*boundary.bias.shape))
        other.phi.copy_(boundary.phi.view(n, d, -1)[p].flatten(0, 1)[:, columns])
        other.alpha.copy_(boundary.alpha)
        other.bias.copy_(boundary.bias[columns])
    X, post, res = noise(2, n, d), noise(2, n).exp(), noise(2, n, n).softmax(-1)
    y, weight = noise(2, d), noise(d)
    (X1, *maps1), x1 = boundary((X, post, res), y, weight)
    (X2, *maps2), x2 = other((X[:, p], post[:, p], res[:, p][:, :, p]), y, weight)
    assert relative_error(x2, x1) < 1e-12
    assert relative_error(X2, X1[:, p]) < 1e-12
    if index != 6:
        assert relative_error(maps2[0], maps1[0][:, p]) < 1e-12
        assert relative_error(maps2[1], maps1[1][:, p][:, :, p]) < 1e-12


def boundary_inputs(depth: DepthConnectionConfig, index: int, n_sublayers: int, d: int):
    """A boundary in FP64 with random parameters, and the state that the boundaries before it make."""
    g = torch.Generator().manual_seed(11)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    state: tuple[torch.Tensor, ...] = ()
    for i in range(index + 1):
        boundary = depth.build(d_model=d, index=i, n_sublayers=n_sublayers, eps=0.1).double()
        with torch.no_grad():
            for p in boundary.parameters():
                p.add_(0.5 * noise(*p.shape))
        if i < index:
            state, _ = boundary(state, noise(1, 2, d), noise(d))
    return boundary, tuple(s.detach() for s in state), noise(1, 2, d), noise(d)


GRADCHECKS = [
    *((f"{name}[{i}]", METHODS[name], i) for name in ("preln", "attnres_full") for i in (0, 1, 4)),
    *((f"attnres_block[{i}]", AttnResConfig(block_size=2), i) for i in (1, 2, 3, 4)),
    *(
        (f"mhc[{i}]", HyperConnectionsConfig(n_streams=2, sinkhorn_iterations=4), i)
        for i in (0, 1, 4)
    ),
    ("mhc_sum[4]", HyperConnectionsConfig(n_streams=2, collapse="sum"), 4),
    *((f"ldm {name}[{i}]", c, i) for name, c in VARIANTS.items() for i in (1, 2)),
    ("ldm[0]", LDMConfig(d_k=3, key_source="input", residual="kept"), 0),
    *((f"{name}[{i}]", c, i) for name, c in OWN.items() for i in (0, 1, 4)),
]


@pytest.mark.parametrize(
    "depth,index", [(c, i) for _, c, i in GRADCHECKS], ids=[n for n, _, _ in GRADCHECKS]
)
def test_gradients_of_a_boundary(depth, index):
    """With respect to the state, y, the norm's gain and every parameter."""
    boundary, state, y, weight = boundary_inputs(depth, index, n_sublayers=4, d=3)
    parameters = dict(boundary.named_parameters())
    n_state = len(state)

    def run(*tensors):
        values = dict(zip(parameters, tensors[n_state + 2 :], strict=True))
        new, x = torch.func.functional_call(
            boundary, values, (tensors[:n_state], tensors[n_state], tensors[n_state + 1])
        )
        return (*new, x)

    inputs = [*state, y, weight, *(p.detach() for p in parameters.values())]
    torch.autograd.gradcheck(run, [t.clone().requires_grad_() for t in inputs], fast_mode=True)


def test_vocabulary_of_the_tests_is_used():
    """Guards the fixtures: the random tokens must reach most rows of the embedding, or its gradient tests nothing."""
    assert tokens(2, 7).unique().numel() > 10 and int(tokens().max()) < VOCAB

"""Builders that the tests share: tiny models of every depth connection, and the means to compare two of them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn as nn
import torch.nn.functional as F

from config_utils.methods import OWN_METHODS, depth_connection
from config_utils.scales import load_scale
from olmo_core.config import DType
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import (
    DepthConnectionConfig,
    DepthTransformer,
    DepthTransformerConfig,
    PreLNConfig,
)
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.transformer import Transformer, TransformerConfig

VOCAB = 48

OWN: dict[str, DepthConnectionConfig] = {
    name: depth_connection(name, load_scale("tiny")) for name in OWN_METHODS
}
"""The methods of ``config_utils.methods.OWN_METHODS``: every list of connections in the tests has them too."""

METHODS: dict[str, DepthConnectionConfig] = {
    "preln": PreLNConfig(),
    "attnres_full": AttnResConfig(),
    # 6 sublayers of the default model: two blocks of 4, the second one short.
    "attnres_block": AttnResConfig(block_size=4),
    "mhc": HyperConnectionsConfig(),
    "mhc_sum": HyperConnectionsConfig(n_streams=3, collapse="sum"),  # type: ignore[arg-type]
    "ldm": LDMConfig(),
    **OWN,
}
"""One config of each depth connection, by name."""

KNOWN = (PreLNConfig, AttnResConfig, HyperConnectionsConfig, LDMConfig)
"""The classes whose numbers the tests know; of any other they can only ask what holds for all."""


def ask_for_entry(depth: DepthConnectionConfig, table: str) -> NoReturn:
    """Skip the rest of a test that compares a method with numbers of its own, and ask for them."""
    import pytest

    pytest.skip(f"{table} has no entry for {type(depth).__name__}: add one to have it compared")


LDM_VALUES: dict[str, list[Any]] = {
    "d_k": [8, 1, 2, 4, 16],
    "key_activation": ["two_sigmoid", "softmax", "none"],
    "key_source": ["output", "input", "static"],
    "query_source": ["memory", "output", "static"],
    "query_activation": ["softmax", "sigmoid", "none"],
    "forget": ["dynamic", "static", "none"],
    "forget_granularity": ["slot", "scalar"],
    "update": ["additive", "delta"],
    "write_every": ["sublayer", "block"],
    "residual": ["none", "kept"],
}
"""Every option of LDM and its values, the default first (design: the option table)."""


def ldm_variants() -> dict[str, LDMConfig]:
    """
    LDM configs that cover every value of every option, and every *pair* of values of two options whose code paths
    meet (what is written, what the state carries, what is erased).
    """
    variants = {"default": LDMConfig()}
    for option, values in LDM_VALUES.items():
        for value in values[1:]:
            variants[f"{option}={value}"] = LDMConfig(**{option: value})
    meeting = {
        "key_source": ["input", "static"],
        "write_every": ["block"],
        "residual": ["kept"],
        "update": ["delta"],
        "forget_granularity": ["scalar"],
        "query_source": ["output"],
    }
    for (a, a_values), (b, b_values) in itertools.combinations(meeting.items(), 2):
        for x, y in itertools.product(a_values, b_values):
            variants[f"{a}={x},{b}={y}"] = LDMConfig(d_k=3, **{a: x, b: y})
    variants["all carried"] = LDMConfig(
        d_k=2, key_source="input", write_every="block", residual="kept", update="delta"
    )  # type: ignore[arg-type]
    return variants


def tiny_config(
    depth: DepthConnectionConfig,
    *,
    d_model: int = 16,
    n_layers: int = 3,
    eps: float = 1e-6,
    dtype: DType = DType.float32,
    full_precision: bool = True,
    **kwargs,
) -> DepthTransformerConfig:
    """
    A Llama-style model with a depth connection.

    :param full_precision: ``False`` for an FP64 model: OLMo-core's RoPE would round it to FP32.
    """
    config = DepthTransformerConfig.llama_like(
        d_model=d_model,
        vocab_size=VOCAB,
        n_layers=n_layers,
        n_heads=2,
        hidden_size_multiple_of=8,
        layer_norm_eps=eps,
        rope_full_precision=full_precision,
        dtype=dtype,
        **kwargs,
    )
    assert isinstance(config, DepthTransformerConfig)
    return config.with_depth(depth)


def build_model(config: TransformerConfig, *, fp64: bool = False) -> Any:
    """Build and initialise on the CPU; ``fp64`` also makes the weights large, so that every path matters."""
    model = config.build()
    model.init_weights(device=torch.device("cpu"))
    if fp64:
        model.double()
        enlarge(model)
    return model


@torch.no_grad()
def enlarge(model: nn.Module, seed: int = 1) -> None:
    """
    Draw every parameter outside the boundaries anew, by name and so equal in all methods: at OLMo-core's start the
    sublayers' outputs are too small beside the embedding for a wrong coefficient to show.
    """
    for name, p in sorted(shared_parameters(model).items()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * (1.0 / p.shape[-1] ** 0.5))
        if "embeddings" in name:
            p.copy_(noise)


@torch.no_grad()
def randomize_boundaries(model: nn.Module, std: float = 0.4, seed: int = 2) -> None:
    """Add noise to every parameter of every boundary, so that no gate stays at its symmetric start."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "boundary" in name:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.add_(std * noise.to(p))


def shared_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters but those of the boundaries: PreLN's."""
    return {n: p for n, p in model.named_parameters() if "boundary" not in n}


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Token ids, ``[batch, length]``, int64."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in the dtype of the logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def logits_and_gradients(
    model: nn.Module,
    ids: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward once; parameters without a gradient are left out."""
    model.zero_grad(set_to_none=True)
    logits = (forward or model)(ids)
    next_token_loss(logits, ids).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    scale = expected.abs().max().item()
    return (actual - expected).abs().max().item() / max(scale, 1e-30)


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    # A gradient that is zero up to rounding (a softmax over one slot) is measured against the largest one.
    floor = 1e-4 * max(float(g.abs().max()) for g in expected.values())
    errors = {
        name: float((actual[name] - g).abs().max()) / max(float(g.abs().max()), floor)
        for name, g in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"gradient of {worst}: relative error {errors[worst]:.2e}"


def upstream_model(config: DepthTransformerConfig) -> Transformer:
    """OLMo-core's own PreLN transformer of the same shape, FP64, with the parameters of :func:`enlarge`."""
    block = config.block
    layer_norm = block.layer_norm  # type: ignore[union-attr]
    # full_precision would round an FP64 norm to FP32.
    norm = LayerNormConfig(
        name=LayerNormType.rms, eps=layer_norm.eps, bias=False, full_precision=False
    )
    fields = block.as_dict(recurse=False, exclude=("depth", "layer_norm", "joint_input_gradient"))  # type: ignore[union-attr]
    from olmo_core.nn.transformer import TransformerBlockConfig

    plain = TransformerConfig(
        **config.as_dict(recurse=False, exclude=("block", "lm_head")),
        block=TransformerBlockConfig(**fields, layer_norm=norm),
        lm_head=replace(config.lm_head, layer_norm=norm),
    )
    model = plain.build()
    model.double()
    rename = {"lm_head.norm.weight": "final_norm.weight"}
    source = build_model(config.with_depth(PreLNConfig()), fp64=True).state_dict()
    model.load_state_dict({n: source[rename.get(n, n)] for n in model.state_dict()})
    return model


def upstream_names(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """OLMo-core's name of the last norm -> ours."""
    return {n.replace("lm_head.norm.", "final_norm."): v for n, v in values.items()}


@contextmanager
def captured_outputs(model: DepthTransformer) -> Iterator[list[torch.Tensor]]:
    """Collect ``y_0 .. y_L``: the embedding, then the output of each sublayer in order."""
    outputs: list[torch.Tensor] = []
    modules: list[nn.Module] = [model.embeddings]
    for block in model.blocks.values():
        modules += [block.attention, block.feed_forward]  # type: ignore[list-item]
    hooks = [m.register_forward_hook(lambda *a: outputs.append(a[-1].detach())) for m in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


KERNEL_TOLERANCE = {
    torch.float32: {"output": 1e-5, "source": 1e-5, "parameter": 1e-5},
    torch.bfloat16: {"output": 2.5e-3, "source": 3e-3, "parameter": 5e-3},
    # 8 times finer than BF16.
    torch.float16: {"output": 4e-4, "source": 4e-4, "parameter": 7e-4},
}
"""Largest relative RMS error of a tensor against FP64. BF16 rounds to 1.7e-3, FP16 to 2.1e-4."""


@dataclass
class BoundaryResult:
    """What a boundary gave, and the gradients of its inputs and parameters, by name."""

    output: dict[str, torch.Tensor]
    source: dict[str, torch.Tensor]
    parameter: dict[str, torch.Tensor]

    def named(self) -> dict[str, torch.Tensor]:
        return {
            f"{kind} {name}": t
            for kind in ("output", "source", "parameter")
            for name, t in getattr(self, kind).items()
        }


def draw_mhc_parameters(
    boundary: torch.nn.Module, normal: Callable[..., torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """
    Parameters of an mHC boundary away from their start.

    :param normal: Random numbers of a shape.
    :param scale: About the size of the maps' logits.
    """
    drawn = {}
    for name, p in boundary.named_parameters():
        if name == "phi":
            drawn[name] = normal(*p.shape) * p.shape[0] ** -0.5
        elif name == "alpha":
            drawn[name] = scale * (1 + 0.2 * normal(*p.shape))
        else:
            drawn[name] = 0.3 * p.detach().cpu() + 0.5 * normal(*p.shape)
    return drawn

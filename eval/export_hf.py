"""
Converts a PreLN checkpoint into a Hugging Face Llama checkpoint: ``config.json``, ``model.safetensors``, tokenizer.

    python -m eval.export_hf CHECKPOINT OUT_DIR [--dtype bfloat16]

PreLN with RMSNorm, SwiGLU and RoPE is a Llama; the other methods have no equivalent there. Needs no ``transformers``.
"""

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from config_utils.errors import UserError, run_cli
from eval.checkpoint import LoadedCheckpoint, load_checkpoint, method_name, read_checkpoint
from eval.run import find_tokenizer
from olmo_core.nn.attention import AttentionConfig, AttentionType
from olmo_core.nn.feed_forward import ActivationFunction, FeedForwardConfig, FeedForwardType
from olmo_core.nn.lm_head import LMHeadType
from olmo_core.nn.rope import RoPEType
from olmo_core.nn.transformer import TransformerBlockConfig

BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Our names -> Llama's, within a block."""

MODEL_NAMES = {
    "embeddings": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head.norm": "model.norm",
    "lm_head.w_out": "lm_head",
}


def llama_name(name: str) -> str | None:
    """The name of one of our parameters in a Llama; ``None`` if a Llama has none like it."""
    module, _, kind = name.rpartition(".")
    if kind != "weight":
        return None
    if module.startswith("blocks."):
        _, index, rest = module.split(".", 2)
        return f"model.layers.{index}.{BLOCK_NAMES[rest]}.weight" if rest in BLOCK_NAMES else None
    return f"{MODEL_NAMES[module]}.weight" if module in MODEL_NAMES else None


def llama_config(loaded: LoadedCheckpoint, dtype: torch.dtype) -> dict[str, Any]:
    """
    ``config.json`` of the Llama.

    :raises UserError: If the model has anything that a Llama has not.
    """
    config = loaded.model_config
    block = config.block
    problems = []
    if not isinstance(block, TransformerBlockConfig) or config.block_overrides:
        raise UserError(
            f"{loaded.path}: a Llama's blocks are all alike, this model's are not; it cannot be exported"
        )
    attention, feed_forward, norm = (
        block.sequence_mixer,
        block.feed_forward,
        config.lm_head.layer_norm,
    )
    if not isinstance(attention, AttentionConfig) or attention.name != AttentionType.default:
        problems.append("attention other than the default")
    elif (
        not isinstance(feed_forward, FeedForwardConfig)
        or feed_forward.name != FeedForwardType.default
    ):
        problems.append("a feed-forward other than the default")
    else:
        rope = attention.rope
        problems += [
            what
            for what, present in {
                "biases": attention.bias is not False
                or feed_forward.bias is not False
                or config.lm_head.bias,
                "gated attention": attention.gate,
                "clipped queries and keys": attention.clip_qkv,
                "normalised queries and keys": attention.qk_norm,
                "sliding windows": attention.sliding_window,
                "attention sinks": attention.attention_sinks,
                "scalable softmax": attention.scalable_softmax,
                "no plain RoPE": rope is None
                or rope.name != RoPEType.default
                or rope.scaling is not None
                or rope.no_global_rope
                or rope.partial_rotary_factor != 1.0,
                "an activation other than SiLU": feed_forward.activation != ActivationFunction.silu,
                "scaled or normalised embeddings": config.embed_scale or config.embedding_norm,
                "tied embeddings (as this exporter writes it)": config.tie_word_embeddings,
                "an LM head other than the default": config.lm_head.name != LMHeadType.default,
                "norms of different epsilon": block.layer_norm is None
                or norm is None
                or block.layer_norm.eps != norm.eps,
            }.items()
            if present
        ]
    if problems:
        raise UserError(
            f"{loaded.path}: a Llama does not have {', '.join(problems)}; it cannot be exported"
        )
    assert isinstance(attention, AttentionConfig) and attention.rope is not None
    assert feed_forward is not None and norm is not None
    theta = float(attention.rope.theta)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": feed_forward.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or config.d_model // attention.n_heads,
        "max_position_embeddings": loaded.sequence_length,
        "rms_norm_eps": 1e-5 if norm.eps is None else norm.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        # The second is where transformers 5 looks, the first where older versions do.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": loaded.tokenizer_config.bos_token_id,
        "eos_token_id": loaded.tokenizer_config.eos_token_id,
        "pad_token_id": loaded.tokenizer_config.pad_token_id,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export_hf(checkpoint: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """
    Write the Llama folder; it appears under its name only when it is complete.

    :raises UserError: If the checkpoint is not PreLN, or ``out`` is in use.
    """
    from safetensors.torch import save_file

    stored = read_checkpoint(checkpoint)
    if method_name(stored.model_config) != "preln":
        raise UserError(
            f"{checkpoint} is a checkpoint of {stored.method}, which no Hugging Face architecture can run: only preln exports"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists and is not an empty folder; choose another name or remove it"
        )
    # FP32 first: a checkpoint is exported with the values that it has, then rounded once.
    loaded = load_checkpoint(checkpoint, "cpu", torch.float32)
    config = llama_config(loaded, dtype)
    tokenizer = find_tokenizer(loaded)
    tensors, unknown = {}, []
    for name, tensor in loaded.model.state_dict().items():
        theirs = llama_name(name)
        if theirs is None:
            unknown.append(name)
        else:
            tensors[theirs] = tensor.to(dtype).contiguous()
    if unknown:
        raise UserError(
            f"{checkpoint}: a Llama has no place for {', '.join(unknown[:4])}; it cannot be exported"
        )

    vocabulary = tokenizer.tokenizer
    ids = loaded.tokenizer_config
    special = {
        "eos_token": vocabulary.id_to_token(ids.eos_token_id),
        "pad_token": vocabulary.id_to_token(ids.pad_token_id),
    }
    if ids.bos_token_id is not None:
        special["bos_token"] = vocabulary.id_to_token(ids.bos_token_id)
    files = {
        "config.json": config,
        "generation_config.json": {
            k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")
        },
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": loaded.sequence_length,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    }
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")
        (partial / "tokenizer.json").write_bytes(tokenizer.data)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # it is written for its owner alone
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.export_hf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a stepN folder, or one learning rate of a release"
    )
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights (float32)",
    )
    args = parser.parse_args(argv)
    export_hf(args.checkpoint, args.out, getattr(torch, args.dtype))
    size = sum(p.stat().st_size for p in args.out.iterdir())
    print(f"written: {args.out} ({size / math.pow(10, 6):.1f} MB), a LlamaForCausalLM")
    return 0


if __name__ == "__main__":
    run_cli(main)

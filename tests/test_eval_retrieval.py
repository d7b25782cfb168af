"""The command for the retrieval map, against the maps of its windows one by one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_helpers import (
    METHODS,
    SEQUENCE_LENGTH,
    TEXTS,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_corpus,
)

from config_utils.errors import UserError
from eval import retrieval
from olmo_core.nn.depth import PreLNConfig, retrieval_map
from olmo_core.nn.transformer import Transformer, TransformerConfig

SHARDS = [TEXTS, ["Second shard. " * 5, "End."]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    root = tmp_path_factory.mktemp("corpus") / "data"
    return root, write_corpus(root, SHARDS)


def checkpoint(folder: Path, method: str) -> tuple[Path, Transformer]:
    config = tiny_config(METHODS[method])
    model = tiny_model(config)
    return write_checkpoint(folder / "run" / "step7", model, config), model


@pytest.fixture(scope="module")
def mhc(tmp_path_factory) -> tuple[Path, Transformer]:
    return checkpoint(tmp_path_factory.mktemp("mhc"), "mhc")


@pytest.mark.parametrize("method", METHODS)
def test_files_hold_the_map_of_every_method(method, corpus, tmp_path, capsys):
    path, model = checkpoint(tmp_path, method)
    out, png = tmp_path / "new" / "map.json", tmp_path / "map.png"
    args = [str(path), "--data-dir", str(corpus[0]), "--tokens", str(SEQUENCE_LENGTH + 5)]
    assert retrieval.main([*args, "--json", str(out), "--png", str(png)]) == 0

    stream = torch.from_numpy(corpus[1][0].astype(np.int64))
    parts = stream[:SEQUENCE_LENGTH], stream[SEQUENCE_LENGTH : SEQUENCE_LENGTH + 5]
    total = sum(len(p) * retrieval_map(model, p[None]).double() for p in parts)  # type: ignore[arg-type]
    expected = total.numpy() / (SEQUENCE_LENGTH + 5)

    written = json.loads(out.read_text())
    weights = np.array(written["mean_weight_by_reader_and_output"])
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)
    assert written["method"] == method and written["step"] == 7
    assert written["tokens"] == SEQUENCE_LENGTH + 5
    assert written["sequence_length_tokens"] == SEQUENCE_LENGTH
    assert written["exact"] == METHODS[method].exact_map
    layers = [f"layer {i} {kind}" for i in (0, 1) for kind in ("attention", "feed-forward")]
    assert written["readers"] == [*layers, "LM head"]
    assert written["outputs"] == ["embedding", *layers]
    assert {"git", "versions", "hardware", "date_utc"} <= written.keys()
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map.png", "new", "run"]

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "0", "attention", "embedding", f"{expected[0, 0]:.3f}"]
    assert f"{method}: the largest weights of each reader, mean over 29 tokens" in lines[5]


def test_all_tokens_are_read_where_there_are_fewer(mhc, corpus, capsys):
    assert retrieval.main([str(mhc[0]), "--data-dir", str(corpus[0]), "--tokens", "100000"]) == 0
    # The last token of a shard is only predicted.
    n = sum(len(ids) - 1 for ids in corpus[1])
    assert f"mean over {n:,} tokens" in capsys.readouterr().out


def test_largest_weights_whatever_their_sign():
    weights = np.array([[1.0, 0, 0], [0.5, -2.0, 0], [0.1, 0.3, -0.2]])
    text = retrieval.describe(weights, ["a", "b", "head"], ["emb", "a", "b"], most=2)
    assert text.splitlines() == [
        "a     emb 1.000",
        "b     a -2.000, emb 0.500",
        "head  a 0.300, b -0.200",
    ]


def test_a_mean_over_channels_is_called_one(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PreLNConfig, "exact_map", False)
    path, _ = checkpoint(tmp_path, "preln")
    out = tmp_path / "map.json"
    retrieval.main([str(path), "--data-dir", str(corpus[0]), "--tokens", "9", "--json", str(out)])
    assert "mean over 9 tokens and channels" in capsys.readouterr().out
    assert json.loads(out.read_text())["exact"] is False


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("nowhere --data-dir data", "nowhere does not exist"),
        ("run/step7 --data-dir nowhere", "nowhere"),
        ("run/step7 --data-dir data --json data", "--json data is a folder"),
        ("run/step7 --data-dir data --png data", "--png data is a folder"),
        ("run/step7 --data-dir data --json data/manifest.json/x", "cannot make the folder of"),
        ("run/step7 --data-dir other", "was tokenised with vocabulary size 32000"),
        ("run/step7 --data-dir short", "no token to read"),
        ("nan/step7 --data-dir data", "the retrieval map is not finite"),
        ("plain/step7 --data-dir data", "without a depth connection of ours"),
    ],
)
def test_bad_input_gets_one_sentence(args, says, bad_inputs, monkeypatch):
    monkeypatch.chdir(bad_inputs)
    before = sorted(bad_inputs.rglob("*"))
    with pytest.raises(UserError) as refusal:
        retrieval.main(args.split())
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
    assert sorted(bad_inputs.rglob("*")) == before


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("run/step7", "give --data-dir (or set DATA_DIR)"),
        ("run/step7 --data-dir data --tokens 0", "must be at least 1, got 0"),
        ("run/step7 --data-dir data --device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_wrong_arguments_are_named(args, says, bad_inputs, monkeypatch, capsys):
    monkeypatch.chdir(bad_inputs)
    monkeypatch.delenv("DATA_DIR", raising=False)
    with pytest.raises(SystemExit) as end:
        retrieval.main(args.split())
    assert end.value.code == 2 and says in capsys.readouterr().err


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bad")
    _, model = checkpoint(root, "ldm_k4")
    write_corpus(root / "data", [TEXTS])
    write_corpus(root / "other", [TEXTS], vocab_size=32_000)
    write_corpus(root / "short", [[""]])  # EOS alone
    config = tiny_config(METHODS["ldm_k4"])
    with torch.no_grad():
        model.embeddings.weight.fill_(torch.nan)
    write_checkpoint(root / "nan" / "step7", model, config)
    plain = TransformerConfig.llama_like(d_model=32, vocab_size=50_304, n_layers=2, n_heads=2)
    write_checkpoint(root / "plain" / "step7", tiny_model(plain), plain)
    return root

"""The check of generated text: trained checkpoints of every method pass, and everything that can be wrong is told."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_helpers import EOS, tiny_config, tiny_model, write_checkpoint, write_config, write_corpus
from test_launch import corpus

from config_utils.errors import UserError, run_cli
from eval.checkpoint import read_checkpoint
from olmo_core.nn.depth import PreLNConfig, inference, triton_inference_ops
from olmo_core.nn.depth.preln import PreLNBoundary
from olmo_core.nn.depth.session import InferenceSession

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "paper-experiments" / "throughput"
METHODS = ("preln", "ldm", "attnres_block", "attnres_full", "mhc")
STEPS = 20
CYCLE = 1000 + 7 * np.arange(37)
"""The text that the trained models have read, over and over: so few steps teach them to go on with it (to about 1 nat)."""

sys.path.insert(0, str(FOLDER))
check_text = importlib.import_module("check_text")
sys.path.remove(str(FOLDER))

TRAIN = """
import sys
from pathlib import Path

import train

methods, small = sys.argv[1].split(), sys.argv[2:]
for method in methods:
    sys.argv = ["train.py", "tiny", method, "0.05", "--gpu", "cpu", *small]
    assert train.main() == 0
"""
"""train.py once for each method, in one process: most of a short run is imports."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """A checkpoint of the trainer for each method, and the corpus that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    data = corpus(folder / "data")
    for shard in data.glob("*/a.npy"):
        ids = np.resize(CYCLE, shard.stat().st_size // 2)
        ids[99::100] = EOS
        ids.astype("<u2").tofile(shard)
    small = (
        "model.d_model=16",
        "model.n_layers=2",
        "model.block.feed_forward.hidden_size=32",
        "dataset.sequence_length=64",
        "data_loader.global_batch_size=64",
        "train_module.max_sequence_length=64",
        "train_module.rank_microbatch_size=64",
        "trainer.callbacks.held_out.sequence_length=64",
        "trainer.callbacks.held_out.max_windows=1",
    )
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'paper-experiments' / 'pretrain'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "DATA_DIR": str(data),
        "CHECKPOINT_DIR": str(folder / "runs"),
        "STEPS": str(STEPS),
        "OMP_NUM_THREADS": "1",
        # As launch.sh sets them.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "268435456",
    }
    env.pop("SEED", None)
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, " ".join(METHODS), *small],
        env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    runs = {m: folder / "runs" / f"tiny-{m}-lr5e-2-seed42" / f"step{STEPS}" for m in METHODS}
    return {"data": data, **runs}


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """PreLN with weights so large that the text depends on every token before it."""
    config = tiny_config(PreLNConfig())
    folder = tmp_path_factory.mktemp("large") / "run" / "step7"
    return write_checkpoint(folder, tiny_model(config), config)


def check(
    tmp_path: Path, *args: Any, new_tokens: int = 6, prompts: int = 2
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the rows of the file."""
    out = tmp_path / "out.json"
    options = ["--gpu", "cpu", "--new-tokens", str(new_tokens), "--prompts", str(prompts)]
    code = check_text.main([*map(str, args), *options, "--json", str(out)])
    return code, json.loads(out.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "methods"), [("float32", METHODS), ("bfloat16", ("ldm", "mhc"))])
def test_trained_checkpoints_pass(trained, tmp_path, capsys, dtype, methods):
    paths = [trained[m] for m in methods]
    options = ("--tokens", trained["data"], "--prompt-length", 9, "--dtype", dtype)
    code, rows = check(tmp_path, *paths, *options, new_tokens=12)
    printed = capsys.readouterr().out
    assert code == 0 and printed.endswith("all ok\n")
    assert printed.count("first prompt: ") == printed.count("goes on with: ") == len(methods)
    assert [(r["method"], r["batch"], r["step"]) for r in rows] == [
        (m, n, STEPS) for m in methods for n in (2, 1)
    ]
    for row in rows:
        text = row["text"]
        assert row["prompts"] == "held-out documents" and row["prompt_tokens"] == [9, 9]
        assert (row["status"], row["dtype"], row["backend"]) == ("ok", dtype, ["reference"])
        assert text["tokens"] == 12 * row["batch"] and text["wrong"] == 0
        assert row["distinct_tokens"] >= 8, "a text that repeats itself shows little"
        assert row["prompt_nats_per_token"] < 3, "untrained it has 10.8"
        if dtype == "float32":
            assert text["differs"] == text["ties"] == 0 and text["equal_rows"] == row["batch"]
            assert row["prefill_error_of_reference"] == 0 and row["decode_error"] < 1e-6
        else:
            # BF16 with and without the cache is about as far from FP32, and not nearer than its rounding.
            for kind in ("prefill", "decode"):
                own = row[f"{kind}_error_of_reference"]
                assert 1e-3 < own < 0.02 and row[f"{kind}_error"] == pytest.approx(own, rel=0.3)


def test_sentences_of_different_lengths(large, tmp_path, capsys):
    code, (both, _) = check(tmp_path, large, "--prompt-length", 15)
    assert code == 0 and both["prompts"] == "sentences of our own"
    lengths = both["prompt_tokens"]
    assert max(lengths) == 15, "none is longer than asked for"
    assert both["text"]["equal_rows"] == 2 and both["distinct_tokens"] >= 10
    assert "'The river had been rising" in capsys.readouterr().out
    assert len(check_text.TEXTS) == len(set(check_text.TEXTS))


# -- what is wrong is told -----------------------------------------------------------------------


def no_tie(found: dict[str, Any]) -> None:
    assert found["status"] == "wrong" and found["text"]["wrong"] > 0
    assert any(d["verdict"] == "wrong" for d in found["text"]["first"])


def test_a_cache_that_is_off_by_one(large, tmp_path, monkeypatch, capsys):
    resume = InferenceSession.resume
    monkeypatch.setattr(
        InferenceSession, "resume", lambda self, lengths, n: resume(self, lengths - 1, n)
    )
    for dtype in ("float32", "bfloat16"):
        code, rows = check(tmp_path, large, "--dtype", dtype)
        assert code == 1
        for row in rows:
            no_tie(row)
            assert "the logits of decode" in row["problems"]
            assert "the logits of prefill" not in row["problems"]
    assert "not ok: run/step7" in capsys.readouterr().out


def test_a_boundary_that_is_wrong_only_in_generation(large, tmp_path, monkeypatch):
    run_backend = PreLNBoundary.run_backend

    def off(self, state, y, norm_weight):
        state, x = run_backend(self, state, y, norm_weight)
        return state, x if torch.is_grad_enabled() or not self.is_last else x.roll(1, -1)

    monkeypatch.setattr(PreLNBoundary, "run_backend", off)
    code, rows = check(tmp_path, large)
    assert code == 1
    for row in rows:
        no_tie(row)
        assert row["prefill_error"] > 0.1 and "the logits of prefill" in row["problems"]


def test_a_kernel_that_all_of_generation_shares(large, tmp_path, monkeypatch):
    """The reference has none of these kernels, so that one that is wrong shows."""
    monkeypatch.setattr(inference, "INTERPRETER", True)
    small = (large, "--prompt-length", 3)
    code, _ = check(tmp_path, *small, new_tokens=2, prompts=1)
    assert code == 0
    silu_mul_packed = triton_inference_ops.silu_mul_packed
    monkeypatch.setattr(
        triton_inference_ops, "silu_mul_packed", lambda ab: 1.02 * silu_mul_packed(ab)
    )
    code, rows = check(tmp_path, *small, new_tokens=2, prompts=1)
    assert code == 1 and "the logits of decode" in rows[0]["problems"]


def test_a_token_that_its_own_logits_did_not_choose(large, tmp_path, monkeypatch):
    accept = InferenceSession.accept
    monkeypatch.setattr(
        InferenceSession, "accept", lambda self, sampled: accept(self, (sampled + 1) % 50_000)
    )
    code, rows = check(tmp_path, large)
    assert code == 1
    no_tie(rows[0])
    problems = rows[0]["problems"]
    assert problems[0] == "the choice of a token by its own logits", "the logits are right"


def test_ties_by_hand():
    """Noise of 0.1: a gap below 0.2 is a tie."""
    truth = torch.zeros(4, 8)
    truth[:, 0] = 5.0
    truth[0, 1] = 4.85  # below the noise
    truth[1, 1] = 4.7  # above
    reference = truth.clone()
    reference[2, 0] += 0.1  # the noise
    reference[3, 5] = 9.0  # large, but of a token that is neither generated nor FP32's choice
    text, noise = check_text.compare_text([(torch.tensor([1, 1, 0, 0]), reference, truth)], 1e-5)
    assert noise == pytest.approx(0.1)
    assert (text.tokens, text.equal_rows) == (4, 0)
    # Positions 0 and 1 against both; position 3 against the reference alone, which is wrong there by 5.
    assert (text.differs, text.differs_from_fp32, text.reference_from_fp32) == (3, 2, 1)
    assert (text.ties, text.wrong) == (2, 3)
    first = [(d["against"], d["new_token"], d["verdict"]) for d in text.first]
    assert first == [(a, *d) for a in ("reference", "fp32") for d in ((0, "tie"), (1, "wrong"))]
    assert text.first[0]["gap"] == pytest.approx(0.15)

    same, _ = check_text.compare_text([(torch.zeros(4, dtype=torch.int64), truth, truth)], 1e-5)
    assert (same.equal_rows, same.differs, same.ties, same.wrong, same.first) == (1, 0, 0, 0, [])
    truth[0, 1] = float("nan")
    text, _ = check_text.compare_text([(torch.tensor([1, 0, 0, 0]), truth * 1, truth)], 1e-5)
    assert text.wrong == 0 and text.differs == 0, "argmax takes a NaN; the logits' error tells"
    error = check_text.Error()
    error.add(truth, truth)
    assert error.relative_rms == float("inf")


def test_error_by_hand():
    error = check_text.Error()
    error.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    error.add(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    assert error.relative_rms == pytest.approx((1 / 35) ** 0.5)
    assert error.worst == pytest.approx((1 / 34) ** 0.5)


# -- prompts, budget, bad input ------------------------------------------------------------------


def test_held_out_documents(large, tmp_path):
    texts = [["A", "one two three four five six seven", "B"], ["eight nine ten eleven twelve 13"]]
    first, second = write_corpus(tmp_path / "data", texts)
    checkpoint = read_checkpoint(large)
    found = check_text.find_prompts(checkpoint, tmp_path / "data", 2, 5)
    # The first shard has two tokens (A, EOS) before the only document that is long enough.
    assert found.ids == [first[2:7].tolist(), second[:5].tolist()]
    with pytest.raises(UserError, match="2 held-out documents of 5 tokens or more, not 3"):
        check_text.find_prompts(checkpoint, tmp_path / "data", 3, 5)
    write_corpus(tmp_path / "other", texts, vocab_size=50_281)
    with pytest.raises(UserError, match="tokenised with 50281"):
        check_text.find_prompts(checkpoint, tmp_path / "other", 2, 5)
    with pytest.raises(UserError, match=r"no manifest\.json"):
        check_text.find_prompts(checkpoint, tmp_path, 2, 5)


def test_random_tokens_without_a_tokenizer(large, tmp_path):
    write_config(tmp_path / "step1", tiny_config(PreLNConfig()))
    path = tmp_path / "step1" / "config.json"
    config = json.loads(path.read_text())
    config["dataset"]["tokenizer"]["identifier"] = None
    path.write_text(json.dumps(config))
    found = check_text.find_prompts(read_checkpoint(tmp_path / "step1"), None, 3, 5)
    assert found.source.startswith("random tokens (no tokenizer: UserError: ")
    assert found.tokenizer is None and [len(ids) for ids in found.ids] == [5, 5, 5]
    assert len({i for ids in found.ids for i in ids}) > 10


def test_other_checkpoints_are_checked_after_one_that_fails(large, tmp_path, monkeypatch, capsys):
    check_batch, calls = check_text.check_batch, []

    def fails_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no kernel")
        return check_batch(*args)

    monkeypatch.setattr(check_text, "check_batch", fails_first)
    code, rows = check(tmp_path, large, large)
    assert code == 1 and [r["status"] for r in rows] == ["failed", "ok", "ok"]
    assert rows[0]["error"] == "RuntimeError: no kernel"
    assert "failed: RuntimeError: no kernel" in capsys.readouterr().out
    code, rows = check(tmp_path, large, "--budget", 0)
    assert code == 1 and [r["status"] for r in rows] == ["no time left"]


def test_bad_input_is_one_sentence(large, tmp_path, capsys):
    def told(*args: Any) -> str:
        with pytest.raises(SystemExit) as e:
            run_cli(lambda: check_text.main([*map(str, args)]))
        assert e.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    cpu = ("--gpu", "cpu")
    assert "nowhere does not exist; a checkpoint is a folder" in told(tmp_path / "nowhere", *cpu)
    assert "is a run folder, not a checkpoint: add one of step7" in told(large.parent, *cpu)
    write_config(tmp_path / "step3", tiny_config(PreLNConfig()))
    assert "has a config.json but no weights" in told(large, tmp_path / "step3", *cpu)
    assert "unknown GPU 'abacus'" in told(large, "--gpu", "abacus")
    assert "unknown backend 'abacus'" in told(large, "--backend", "abacus", *cpu)
    assert "--prompts 99: there are 8 of our own" in told(large, *cpu, "--prompts", 99)
    assert "--new-tokens must be at least 2, got 1" in told(large, *cpu, "--new-tokens", 1)
    assert "is a folder; give the file to write" in told(large, *cpu, "--json", tmp_path)
    if not torch.cuda.is_available():
        assert "--gpu cpu runs on the CPU" in told(large)

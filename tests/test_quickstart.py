"""The quickstart's arguments and commands; CI runs the script itself, shortened."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "paper-experiments" / "quickstart" / "quickstart.sh"


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    ours = ("DATA_DIR", "STEPS", "METHODS", "LR", "LIMIT", "HELDOUT_TOKENS", "SEED")
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(
        ["bash", str(SCRIPT), *args],
        env={**clean, "SKIP_SETUP": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_dry_run_prints_the_whole_path(tmp_path):
    done = run(DRY_RUN="1", OUT=str(tmp_path / "out"), METHODS="preln ldm mhc")
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert "build_corpus.py" in commands[0]
    assert "tokenize_from_pretrain_datasets.py" in commands[1]
    assert [c.split()[-2] for c in commands if "launch.sh" in c] == ["preln", "ldm", "mhc"]
    assert sum("evaluation/run.sh" in c for c in commands) == 3
    assert "summarize.py" in commands[-1] and commands[-1].count("eval-") == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("env", "tokens"),
    [({"STEPS": "20"}, "20480"), ({"STEPS": "110"}, "100000"), ({"STEPS": "20", "HELDOUT_TOKENS": "7"}, "7")],
)  # fmt: skip
def test_no_more_held_out_text_than_the_training_reads(tmp_path, env, tokens):
    done = run(DRY_RUN="1", OUT=str(tmp_path / "out"), LIMIT="2", **env)
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if "evaluation/run.sh" in line]
    assert len(commands) == 2
    assert all(c.endswith(f"--limit 2 --heldout-tokens {tokens}") for c in commands)
    assert all(f"seed42/step{env['STEPS']} " in c for c in commands)


def test_own_corpus_takes_the_place_of_the_built_one(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "held.parquet").touch()
    done = run("--corpus", str(tmp_path), DRY_RUN="1", OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "build_corpus.py" not in done.stdout
    assert f"--eval-parquet-path {tmp_path}/eval/held.parquet" in done.stdout


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        (("--corpus",), "--corpus needs a folder"),
        (("--corpus", "nowhere"), "--corpus nowhere is not a folder"),
        (("--fast",), "unknown argument '--fast'"),
    ],
)
def test_bad_input(args, needle):
    done = run(*args)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and needle in done.stderr


def test_settings_that_are_no_numbers(tmp_path):
    done = run(STEPS="few", OUT=str(tmp_path / "out"))
    assert done.returncode == 2 and "STEPS must be a positive whole number" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_corpus_without_held_out_text_is_refused(tmp_path):
    done = run("--corpus", str(tmp_path), OUT=str(tmp_path / "out"))
    assert done.returncode == 2 and "holds no parquet file" in done.stderr


@pytest.mark.parametrize("policy", [None, "active"])
def test_on_a_cpu_waiting_threads_do_not_spin(tmp_path, policy):
    """Beside other work they would take the cores; a setting of the user's stays."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "policy $OMP_WAIT_POLICY"\n')
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    env |= {"PYTHON": str(python), "DATA_DIR": str(tmp_path)}
    env |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    for script, *args in (
        ("pretrain/launch.sh", "--gpu", "cpu", "tiny", "ldm", "0.004"),
        ("throughput/rounds.sh", "train", "tiny", "cpu", "1"),
    ):
        command = ["bash", str(SCRIPT.parents[1] / script), *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == f"policy {policy or 'passive'}", done.stderr


def test_summary_reads_a_run(tmp_path):
    spec = importlib.util.spec_from_file_location("summarize", SCRIPT.parent / "summarize.py")
    assert spec is not None and spec.loader is not None
    summarize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(summarize)
    run_folder = tmp_path / "tiny-ldm"
    (run_folder / "step2").mkdir(parents=True)
    lines = [{"step": 0, "system/x": 1}, *({"step": s, "train/CE loss": 11.0 - s} for s in (1, 2))]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    result = {
        "checkpoint": str(run_folder / "step2"),
        "method": "ldm",
        "parameters": 5,
        "step": 2,
        "heldout": {"cross_entropy_nats_per_token": 8.5, "bits_per_byte": 2.5},
        "lm_eval": None,
    }
    (tmp_path / "eval.json").write_text(json.dumps(result))
    row = summarize.summarise(tmp_path / "eval.json")
    assert row["curve"] == [[1, 10.0], [2, 9.0]]
    # ln 50280 = 10.825
    assert row["heldout_fall_from_uniform_nats"] == pytest.approx(10.825 - 8.5, abs=1e-3)
    assert summarize.task_cell({"acc": 0.25, "acc_stderr": 0.1}) == "0.25 ± 0.10"
    assert summarize.task_cell({"acc": 0.25, "acc_stderr": None}) == "0.25"

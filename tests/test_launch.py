"""The path from a launcher's arguments to a config: every scale and method, and what bad input is told."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from config_utils.errors import UserError
from config_utils.experiment import build_experiment, scale_depth_lr
from config_utils.methods import (
    ABLATIONS,
    ALL_METHODS,
    OWN_METHODS,
    PAPER_METHODS,
    depth_connection,
)
from config_utils.run_info import format_lr, run_name
from config_utils.scales import available_scales, load_scale
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import PreLNConfig
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.transformer import TransformerConfig

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "paper-experiments" / "pretrain" / "launch.sh"
SCALES = ["tiny", "90m", "400m", "1p5b", "1p7b"]


def launch(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("DATA_DIR", "CHECKPOINT_DIR", "SEED", "STEPS", "DRY_RUN", "NPROC")
    }
    return subprocess.run(
        ["bash", str(LAUNCH), *args],
        env={**clean, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_sentence(done: subprocess.CompletedProcess[str], *needles: str) -> None:
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    for needle in needles:
        assert needle in errors[0]


def test_scales_smallest_first():
    assert available_scales() == SCALES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("method", [*PAPER_METHODS, "delta_rule", *OWN_METHODS])
def test_every_method_at_every_scale_round_trips(scale, method):
    world_size = 4 if scale == "tiny" else 8  # a tiny batch has four sequences
    config = build_experiment(scale, method, 1e-3, gpu="b200", world_size=world_size)
    data = json.loads(json.dumps(config.as_config_dict()))
    assert TransformerConfig.from_dict(data["model"]) == config.model
    per_rank = config.data_loader.global_batch_size // world_size
    assert per_rank % config.train_module.rank_microbatch_size == 0


def test_sizes_of_the_paper():
    """Parameter counts by hand: embedding and head, 4 d^2 attention, 3 d ffn, two norms a block and the last one."""

    def llama(d: int, n: int, ffn: int) -> int:
        return 2 * 50_304 * d + n * (4 * d * d + 3 * d * ffn + 2 * d) + d

    def built(scale: str, method: str) -> int:
        return build_experiment(scale, method, 1e-3, gpu="b200").model.num_params

    assert built("400m", "preln") == llama(1024, 24, 2736)
    assert built("1p5b", "preln") == llama(2048, 24, 5472)
    # 48 boundaries with three maps of K columns and their biases, and the first one's key.
    assert built("400m", "ldm") - built("400m", "preln") == 48 * 3 * 8 * (1024 + 1) + 8
    assert built("400m", "attnres_full") - built("400m", "preln") == 48 * 2 * 1024
    # arXiv 2512.24880: 96 C + 27 for each of 48 sublayers; the head has 4 C x 4 + 4 + 1.
    assert built("400m", "mhc") - built("400m", "preln") == 48 * (96 * 1024 + 27) + 16 * 1024 + 5


def test_block_attnres_has_about_eight_blocks():
    for name in SCALES[1:]:
        scale = load_scale(name)
        config = depth_connection("attnres_block", scale)
        assert isinstance(config, AttnResConfig)
        assert scale.n_sublayers / config.block_size == 8


def test_an_ablation_changes_what_its_name_says():
    scale = load_scale("90m")
    default = LDMConfig()
    for name in ABLATIONS:
        config = depth_connection(name, scale)
        changed = [
            k for k, v in config.as_dict().items() if v != default.as_dict()[k] and k != "backend"
        ]
        assert len(changed) == 1 + name.endswith("block_key_wide_forget"), (name, changed)
    assert len(PAPER_METHODS) + len(ABLATIONS) == 28


def test_own_methods_are_named_beside_the_others(monkeypatch):
    assert len(ALL_METHODS) == 28 + len(OWN_METHODS), "a name of OWN_METHODS is taken already"
    monkeypatch.setitem(OWN_METHODS, "highway", lambda scale: PreLNConfig())
    with pytest.raises(UserError, match=r"ldm_k4, one of yours: .*highway, or an ablation: ldm_k1"):
        depth_connection("moe", load_scale("tiny"))


def test_run_names():
    assert run_name("400m", "ldm", 0.001, 42) == "400m-ldm-lr1e-3-seed42"
    cases = {0.0005: "5e-4", 0.002: "2e-3", 0.0025: "2.5e-3", 0.01: "1e-2", 0.1: "1e-1"}
    for lr, text in cases.items():
        assert format_lr(lr) == text


def test_the_seed_reaches_weights_and_data():
    config = build_experiment("tiny", "ldm", 1e-3, gpu="cpu", seed=7)
    assert config.model.init_seed == config.data_loader.seed == config.seed == 7


def test_hardware_changes_no_maths():
    def recipe(gpu: str, world_size: int) -> dict:
        config = build_experiment("400m", "ldm", 1e-3, gpu=gpu, world_size=world_size)
        return {
            "batch": config.data_loader.global_batch_size,
            "optim": config.train_module.optim.as_config_dict(),
            "schedule": config.train_module.scheduler,
            "steps": config.trainer.max_duration,
        }

    assert recipe("h100", 1) == recipe("b200", 8) == recipe("h200", 64)


def test_dry_run_prints_command_and_config():
    done = launch("400m", "mhc", "0.002", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    first, *config = done.stdout.splitlines()
    assert first.startswith("# ") and "400m mhc 0.002 --gpu b200" in first
    assert "run_name: 400m-mhc-lr2e-3-seed42" in config
    assert "      n_streams: 4" in config


def test_overrides_reach_the_config():
    done = launch("tiny", "ldm", "0.002", "model.block.depth.d_k=4", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "      d_k: 4" in done.stdout.splitlines()


@pytest.mark.parametrize("method", ["preln", "attnres_block", "mhc", "ldm", "static_forget"])
def test_depth_lr_scale_reaches_the_boundaries_and_nothing_else(method):
    def groups(scale: float) -> dict[str, dict[str, float]]:
        config = build_experiment("tiny", method, 0.002, gpu="cpu")
        model = config.model.build(init_device="meta")
        names = [name for name, _ in model.named_parameters()]
        optim = config.train_module.optim
        scale_depth_lr(optim, names, scale)
        of_parameter = {id(p): name for name, p in model.named_parameters()}
        built = optim.build(model)
        out = {of_parameter[id(p)]: g for g in built.param_groups for p in g["params"]}
        assert out.keys() == set(names)
        return out

    before, after = groups(1.0), groups(0.25)
    scaled = 0
    for name, group in after.items():
        expected = 0.0005 if "boundary." in name else 0.002
        assert group["lr"] == group["initial_lr"] == expected, name
        assert group["weight_decay"] == before[name]["weight_decay"], name
        scaled += "boundary." in name
    assert (scaled > 0) == (method != "preln")


@pytest.mark.parametrize(
    ("args", "env", "needles"),
    [
        ((), {}, ("SCALE METHOD LR",)),
        (("400m", "ldm"), {}, ("SCALE METHOD LR",)),
        (("--gpu", "a100", "400m", "ldm", "0.001"), {}, ("unknown GPU 'a100'", "h200")),
        (("--gpu",), {}, ("--gpu needs a value",)),
        (("--gpu", "cpu", "tiny", "ldm", "0.001"), {}, ("DATA_DIR is not set",)),
        (("--gpu", "cpu", "tiny", "ldm", "0.001"), {"DATA_DIR": "nowhere"}, ("DATA_DIR=nowhere",)),
        (("--gpu", "cpu", "3b", "ldm", "0.1"), {"DRY_RUN": "1"}, ("scale '3b'", "400m")),
        (("--gpu", "cpu", "tiny", "moe", "0.1"), {"DRY_RUN": "1"}, ("method 'moe'", "attnres")),
        (("--gpu", "cpu", "tiny", "ldm", "3"), {"DRY_RUN": "1"}, ("between 0 and 1",)),
        (("tiny", "ldm", "0.1"), {"DRY_RUN": "1", "SEED": "x"}, ("SEED must be a whole",)),
        (("tiny", "ldm", "0.1"), {"DRY_RUN": "1", "STEPS": "0"}, ("STEPS must be",)),
        (("tiny", "ldm", "0.1", "model.nothing=1"), {"DRY_RUN": "1"}, ("model.nothing",)),
        (("tiny", "ldm", "0.1", "--fast"), {"DRY_RUN": "1"}, ("unknown option '--fast'",)),
    ],
)
def test_bad_input_gets_one_sentence(args, env, needles):
    one_sentence(launch(*args, **env), *needles)


@pytest.mark.skipif(
    subprocess.run("nvidia-smi", shell=True, capture_output=True).returncode == 0,
    reason="only where there is no GPU",
)
def test_a_large_scale_needs_a_gpu():
    one_sentence(launch("400m", "ldm", "0.001"), "no GPU is here", "tiny")
    one_sentence(
        launch("--gpu", "h200", "tiny", "ldm", "0.001", DATA_DIR="."), "no CUDA GPU", "--gpu cpu"
    )


def corpus(folder: Path, **changes) -> Path:
    """A tokenised corpus as the tokeniser writes it, with random ids."""
    from data_utils.shards import CorpusManifest, ShardSummary, TokenizerIdentity

    shards = {}
    for split, n in (("train", 40_000), ("eval", 4_000)):
        (folder / split).mkdir(parents=True)
        ids = np.random.default_rng(0).integers(2, 50_279, n, dtype=np.uint16)
        ids[99::100] = 50_279
        ids.tofile(folder / split / "a.npy")
        shards[split] = [
            ShardSummary(
                path=f"{split}/a.npy", tokens=n, documents=n // 100, text_bytes=4 * n, sha256=""
            )
        ]
    identity = {
        "name": "t",
        "sha256": "",
        "vocab_size": 50_280,
        "eos_token_id": 50_279,
        "pad_token_id": 1,
    }
    manifest = CorpusManifest(
        format_version=1,
        tokenizer=TokenizerIdentity(**{**identity, **changes}),
        dtype="uint16",
        totals={},
        **shards,
    )
    (folder / "manifest.json").write_text(json.dumps(dataclasses.asdict(manifest)))
    return folder


def test_data_must_be_complete_and_of_this_tokenizer(tmp_path):
    def build(folder: Path):
        return build_experiment("tiny", "ldm", 1e-3, gpu="cpu", data_dir=folder)

    good = corpus(tmp_path / "good")
    assert [Path(p).name for p in build(good).dataset.paths] == ["a.npy"]
    with pytest.raises(UserError, match="vocab_size is 32000"):
        build(corpus(tmp_path / "vocab", vocab_size=32_000))
    with pytest.raises(UserError, match=r"manifest\.json"):
        build(tmp_path)
    with (good / "train" / "a.npy").open("ab") as f:
        f.write(b"1234")
    with pytest.raises(UserError, match=r"a\.npy"):
        build(good)


def test_processes_must_share_the_batch():
    with pytest.raises(UserError, match="3 processes"):
        build_experiment("400m", "ldm", 1e-3, gpu="b200", world_size=3)


def test_trains_resumes_and_refuses_another_model(tmp_path):
    """Three steps of a very small model through launch.sh, then the same command again, then one that does not fit."""
    env = {
        "DATA_DIR": str(corpus(tmp_path / "data")),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "STEPS": "3",
        "OMP_NUM_THREADS": "1",
    }
    small = (
        "model.d_model=16",
        "model.n_layers=2",
        "model.block.feed_forward.hidden_size=32",
        "data_loader.global_batch_size=512",
        "train_module.rank_microbatch_size=256",
        "trainer.metrics_collect_interval=1",
    )
    args = ("--gpu", "cpu", "tiny", "ldm", "0.004", *small)
    done = launch(*args, **env)
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "checkpoints" / "tiny-ldm-lr4e-3-seed42"
    assert (run / "step3" / ".metadata.json").is_file()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {m["step"]: m["train/CE loss"] for m in lines if "train/CE loss" in m}
    assert sorted(losses) == [1, 2, 3] and abs(losses[1] - np.log(50_304)) < 0.2
    assert any("train/depth/query entropy (nats) (mean)" in m for m in lines)
    assert any("eval/held-out/CE loss" in m for m in lines)

    (run / "step3").rename(run / "kept")  # as if it had stopped before the end
    done = launch(*args, **env)
    assert done.returncode == 0 and (run / "step3").is_dir(), done.stderr[-2000:]
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {m["step"]: m["train/CE loss"] for m in again if "train/CE loss" in m} == losses
    infos = [json.loads(line) for line in (run / "runs.jsonl").read_text().splitlines()]
    assert len(infos) == 2 and infos[0]["versions"]["ai2-olmo-core"] == "3.0.0"

    done = launch(*args, **env)
    assert done.returncode == 0 and "going on from step 3" in done.stdout + done.stderr
    one_sentence(
        launch(*args, "model.block.depth.d_k=4", **env),
        "another model",
        "model.block.depth.d_k is 8 there and 4 here",
    )


def test_no_default_device_while_training():
    """OLMo-core sets one where a process trains alone: a mode of torch that takes a boundary of the host 2.5 times as long."""
    script = (
        "import sys, torch; sys.path.insert(0, 'paper-experiments/pretrain')\n"
        "import train; train.prepare_environment('cpu')\n"
        "print(torch._C._len_torch_function_stack())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0"

"""
A table of bad inputs to every launcher and script: arguments, environment, files, configs, shapes, checkpoints. Each must end
with one sentence on stderr and a non-zero exit code, without a traceback, and leave nothing behind that looks whole.

Most cases call ``main`` in this process (starting Python with torch takes seconds). More are in test_launch, test_tokenize,
test_eval_*, test_ablations, test_throughput and test_quickstart; none of them is repeated here.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from eval_helpers import METHODS, tiny_config, tiny_model, write_checkpoint
from test_launch import corpus

import config_utils.scales
from config_utils.errors import run_cli
from config_utils.scales import load_scale
from data_utils import build_corpus, tokenize_from_pretrain_datasets
from data_utils.shards import read_corpus
from eval import export_hf, generate, release, run
from eval.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "paper-experiments"
for folder in ("pretrain", "ablations", "throughput", "quickstart"):
    sys.path.insert(0, str(EXPERIMENTS / folder))

import boundary  # noqa: E402
import collect  # noqa: E402
import measure  # noqa: E402
import overlap  # noqa: E402
import rounds  # noqa: E402
import series  # noqa: E402
import train  # noqa: E402


class Place(NamedTuple):
    """Good inputs to break."""

    root: Path
    data: Path
    """A tokenised corpus."""
    checkpoint: Path
    """``run/step7`` of a PreLN model."""
    ldm: Path


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Place:
    root = tmp_path_factory.mktemp("good")
    for method in ("preln", "ldm_k4"):
        config = tiny_config(METHODS[method])
        write_checkpoint(root / method / "step7", tiny_model(config), config, scale="tiny")
    return Place(root, corpus(root / "data"), root / "preln" / "step7", root / "ldm_k4" / "step7")


@pytest.fixture
def place(originals: Place, tmp_path, monkeypatch) -> Place:
    shutil.copytree(originals.data, tmp_path / "data")
    for method in ("preln", "ldm_k4"):
        shutil.copytree(originals.root / method, tmp_path / method, copy_function=os.link)
    for name in (
        "DATA_DIR",
        "CHECKPOINT_DIR",
        "SEED",
        "STEPS",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "SCALE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, tmp_path / "data", tmp_path / "preln/step7", tmp_path / "ldm_k4/step7")


def refusal(main: Callable[[], Any], capsys) -> str:
    """The one sentence of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        run_cli(main)
    assert e.value.code not in (0, None)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    # Argparse names the program first, after a line on the usage.
    errors = [line for line in err.splitlines() if "error: " in line]
    assert len(errors) == 1, err
    assert errors[0].startswith("error: ") or err.startswith("usage: ")
    return errors[0]


def command(monkeypatch, main: Callable[[], Any], *argv: str) -> Callable[[], Any]:
    def call() -> Any:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, argv)])
        return main()

    return call


# -- training -----------------------------------------------------------------------------------

TRAIN = "tiny ldm 0.004 --dry-run"
TRAINING = [
    ("tiny ldm lr=0.1 --dry-run", {}, "the learning rate must be a number such as 0.001, got 'lr=0.1'"),
    ("tiny ldm", {}, "the following arguments are required: lr"),
    ("tiny ldm nan --dry-run", {}, "between 0 and 1, got nan"),
    ("tiny ldm -1 --dry-run", {}, "between 0 and 1, got -1.0"),
    ("tiny ldm 0 --dry-run", {}, "between 0 and 1, got 0.0"),
    ("tiny ldm inf --dry-run", {}, "between 0 and 1, got inf"),
    ("../tiny ldm 0.1 --dry-run", {}, "unknown scale '../tiny'"),
    ("tiny LDM 0.1 --dry-run", {}, "unknown method 'LDM'"),
    ("tiny ldm 0.1 --gpu tpu --dry-run", {}, "unknown GPU 'tpu'"),
    (TRAIN, {"WORLD_SIZE": "x"}, "WORLD_SIZE must be a whole number, got 'x'"),
    (TRAIN, {"WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1"),
    (TRAIN, {"WORLD_SIZE": "-2"}, "WORLD_SIZE must be at least 1"),
    (TRAIN, {"WORLD_SIZE": "3"}, "3 processes cannot share a batch"),
    (TRAIN, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE must be at least 1"),
    (TRAIN, {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE must be a whole number"),
    (TRAIN, {"SEED": "-1"}, "SEED must be at least 0"),
    (TRAIN, {"SEED": "99999999999"}, "SEED must be at least 0 and at most 4294967295"),
    (TRAIN, {"SEED": "1.5"}, "SEED must be a whole number, got '1.5'"),
    (TRAIN, {"STEPS": "1e3"}, "STEPS must be a whole number, got '1e3'"),
    (TRAIN, {"STEPS": "-4"}, "STEPS must be at least 1"),
    (f"{TRAIN} model.d_model=abc", {}, "Failed to coerce value abc at key 'd_model'"),
    (f"{TRAIN} model.d_model=[1", {}, "cannot apply model.d_model=[1 to the config"),
    (f"{TRAIN} model.d_model=0", {}, "model.d_model must be at least 1, got 0"),
    (f"{TRAIN} model.n_layers=-1", {}, "model.n_layers must be at least 1, got -1"),
    (f"{TRAIN} model.dtype=float7", {}, "float7"),
    (f"{TRAIN} model", {}, "cannot apply model to the config"),
    (f"{TRAIN} =3", {}, "has no attribute ''"),
    (f"{TRAIN} model.block.nothing.d=1", {}, "'nothing'"),
    (f"{TRAIN} model.block.depth.d_k=0", {}, "d_k >= 1 memory slots, got 0"),
    (f"{TRAIN} model.block.depth.forget=maybe", {}, "Failed to coerce value maybe"),
    (f"{TRAIN} model.block.depth.backend=quick", {}, "Failed to coerce value quick"),
    (f"{TRAIN} model.vocab_size=100", {}, "but the tokenizer has 50280 tokens"),
    (f"{TRAIN} dataset.tokenizer.pad_token_id=99999", {}, "pad_token_id is 99999"),
    (f"{TRAIN} data_loader.global_batch_size=0", {}, "global_batch_size must be at least 1"),
    (f"{TRAIN} train_module.rank_microbatch_size=0", {}, "rank_microbatch_size must be at least 1"),
    (f"{TRAIN} train_module.max_grad_norm=-1", {}, "max_grad_norm must be above 0"),
    (f"{TRAIN} depth_lr_scale=0", {}, "depth_lr_scale must lie between 0 and 100, got 0"),
    (f"{TRAIN} trainer.metrics_collect_interval=0", {}, "metrics_collect_interval must be at least"),
    (f"{TRAIN} trainer.cancel_check_interval=0", {}, "cancel_check_interval must be at least 1"),
    (f"{TRAIN} metrics_interval=0", {}, "metrics_interval must be at least 1"),
    (f"{TRAIN} trainer.callbacks.held_out.eval_interval=0", {}, "eval_interval must be at least 1"),
    (f"{TRAIN} trainer.callbacks.checkpointer.save_interval=0", {}, "'save_interval' must be at least"),
    (f"{TRAIN} trainer.max_duration.unit=years", {}, "years"),
    ("tiny ldm 0.004", {"DATA_DIR": "nowhere"}, "DATA_DIR=nowhere is not a folder"),
    ("tiny ldm 0.004", {"DATA_DIR": "preln"}, "is not a tokenised corpus"),
    ("tiny ldm 0.004", {"DATA_DIR": "data", "CHECKPOINT_DIR": "data/manifest.json"}, "cannot be made"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "env", "needle"), TRAINING)
def test_training(place, monkeypatch, capsys, argv, env, needle):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert needle in refusal(command(monkeypatch, train.cli, *argv.split()), capsys)
    assert not (place.root / "checkpoints").exists()


BUILDING = [
    ("model.n_layers=1 model.block.depth.backend=fast", "backend 'fast' cannot run"),
    ("model.n_layers=1 train_module.rank_microbatch_size=100", "must be divisible by"),
    ("model.n_layers=1 data_loader.global_batch_size=100", "must be divisible by sequence length"),
    ("model.n_layers=1 data_loader.global_batch_size=100000000", "must be divisible by micro-batch"),
    ("model.n_layers=1 dataset.sequence_length=0", "'sequence_length' must be positive"),
    ("model.n_layers=1 dataset.paths=[]", "At least one path is required"),
    ("model.n_layers=1 train_module.optim.lr=-1", "Invalid learning rate"),
    ("model.n_layers=1 train_module.optim.betas=[2,3]", "Invalid beta"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "needle"), BUILDING)
def test_building(place, monkeypatch, capsys, overrides, needle):
    """What only the classes of the model and the trainer notice."""
    monkeypatch.setenv("DATA_DIR", "data")
    small = ("model.d_model=16", "model.block.feed_forward.hidden_size=16")
    argv = ("tiny", "ldm", "0.004", *small, *overrides.split())
    # It sets up logging to the stderr of the first test.
    monkeypatch.setattr(train, "prepare_training_environment", lambda **options: None)
    assert needle in refusal(command(monkeypatch, train.cli, *argv), capsys)
    assert not list(place.root.glob("checkpoints/*/step*"))


# -- corpus manifests ---------------------------------------------------------------------------


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file; a new file, since others share the old one's content."""
    data = json.loads(path.read_text())
    replaced = change(data)
    path.unlink()
    path.write_text(json.dumps(data if replaced is None else replaced))


def put(*keys: Any, to: Any) -> Callable[[Any], Any]:
    """Set a value deep in a JSON object."""

    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return change


MANIFESTS = [
    (put("train", 0, "path", to="../outside.npy"), "which is not train/NAME or eval/NAME"),
    (put("train", 0, "path", to="train/../../outside.npy"), "which is not train/NAME"),
    (put("train", 0, "path", to="/etc/passwd"), "which is not train/NAME"),
    (put("train", 0, "path", to="train/.."), "which is not train/NAME"),
    (put("train", 0, "path", to="train/"), "which is not train/NAME"),
    (put("train", 0, "path", to="train/a\0.npy"), "which is not train/NAME"),
    (put("train", 0, "path", to=7), "ShardSummary.path is 7"),
    (put("train", 0, "path", to="train/b.npy"), "b.npy is missing"),
    (put("train", 0, "tokens", to=None), "ShardSummary.tokens is None"),
    (put("train", 0, "tokens", to="many"), "ShardSummary.tokens is 'many'"),
    (put("train", 0, "tokens", to=True), "ShardSummary.tokens is True"),
    (put("train", 0, "tokens", to=39_999), "80000 bytes long, not 79998 bytes"),
    (put("train", to={}), "CorpusManifest.train is no list"),
    (put("train", to=[3]), "ShardSummary is a int"),
    (put("train", to="train"), "CorpusManifest.train is no list"),
    (put("dtype", to="float64"), "neither uint16 nor uint32"),
    (put("dtype", to="uint32"), "bytes long"),
    (put("tokenizer", to=None), "TokenizerIdentity is a NoneType"),
    (put("tokenizer", "vocab_size", to="50280"), "TokenizerIdentity.vocab_size is '50280'"),
    (put("format_version", to=99), "format version 99, not 1"),
    (lambda data: data.pop("eval") and None, "it has no 'eval'"),
    (lambda data: [], "format version None"),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_manifests(place, capsys, number):
    change, needle = MANIFESTS[number]
    edit(place.data / "manifest.json", change)
    assert needle in refusal(lambda: read_corpus(place.data), capsys)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 5000, b"null", b'{"a": 1'])
def test_manifests_that_are_no_json(place, capsys, content):
    (place.data / "manifest.json").write_bytes(content)
    assert "manifest" in refusal(lambda: read_corpus(place.data), capsys)


# -- scales -------------------------------------------------------------------------------------

SCALES = [
    (put("model", to=None), "expected a mapping for ModelShape"),
    (put("model", "d_modell", to=5), "ModelShape has no key 'd_modell'"),
    (put("model", "d_model", to="wide"), "d_model must be a whole number, got 'wide'"),
    (put("model", "n_heads", to=2.5), "n_heads must be a whole number, got 2.5"),
    (lambda data: data["model"].pop("n_layers") and None, "ModelShape needs 'n_layers'"),
    (put("recipe", "steps", to=None), "steps must be a whole number, got None"),
    (put("recipe", "eps", to="1e-8"), "eps must be a number, got '1e-8'"),
    (put("recipe", "steps", to=-3), "steps must be above 0, got -3"),
    (put("rank_microbatch_size", to=5), "rank_microbatch_size must be a mapping"),
    (lambda data: ["a", "list"], "expected a mapping for Scale"),
]


@pytest.mark.parametrize("number", range(len(SCALES)))
def test_scales(tmp_path, monkeypatch, capsys, number):
    change, needle = SCALES[number]
    data = yaml.safe_load((config_utils.scales.CONFIG_DIR / "tiny.yaml").read_text())
    replaced = change(data)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data if replaced is None else replaced))
    monkeypatch.setattr(config_utils.scales, "CONFIG_DIR", tmp_path)
    message = refusal(lambda: load_scale("mine"), capsys)
    assert needle in message and "mine.yaml" in message


def test_a_scale_that_is_no_yaml(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text("model: [1, {")
    monkeypatch.setattr(config_utils.scales, "CONFIG_DIR", tmp_path)
    assert "mine.yaml is no YAML" in refusal(lambda: load_scale("mine"), capsys)


# -- checkpoints --------------------------------------------------------------------------------

CONFIGS = [
    (put("model", to=5), "'model' cannot be read"),
    (put("model", "d_model", to="wide"), "cannot be read"),
    (put("model", "d_model", to=-8), "cannot be built"),
    (put("model", "vocab_size", to=0), "the weights do not fit"),
    (put("model", "n_layers", to=1), "the weights do not fit"),
    (put("model", "block", "depth", to=None), "cannot be"),
    (put("model", "_CLASS_", to="os.system"), "names the class 'os.system'"),
    (put("model", "_CLASS_", to="olmo_core..os"), "which this version does not have"),
    (put("model", "_CLASS_", to="olmo_core."), "which this version does not have"),
    (put("model", "_CLASS_", to="config_utils.run_info.git_state"), "is not a config class"),
    (put("dataset", "tokenizer", to=3), "'dataset.tokenizer' cannot be read"),
    (put("dataset", "tokenizer", "_CLASS_", to="builtins.eval"), "names the class"),
    (put("dataset", to="text"), "is not the config of a training run"),
    (put("train_module", to="text"), "'train_module' is not a mapping"),
    (put("release", to=[1]), "'release' is not a mapping"),
    (lambda data: 7, "is not the config of a training run"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_configs_of_checkpoints(place, capsys, number):
    change, needle = CONFIGS[number]
    edit(place.ldm / "config.json", change)
    message = refusal(lambda: load_checkpoint(place.ldm, "cpu"), capsys)
    assert needle in message


def test_the_trainers_checkpoint_of_another_kind(place, capsys):
    """A run folder whose newest checkpoint has a config.json that says nothing of a model."""
    from config_utils.experiment import build_experiment

    config = build_experiment("tiny", "ldm", 1e-3, gpu="cpu", data_dir=place.data)
    for text in ("{", "[]", '{"model": 3}', "{}"):
        (place.ldm / "config.json").unlink()
        (place.ldm / "config.json").write_text(text)
        message = refusal(lambda: train.check_same_model(config, place.ldm), capsys)
        assert "config.json is damaged" in message


# -- evaluation, generation, export, release ----------------------------------------------------

OFFLINE = "--offline --tasks none"
EVALUATION = [
    (run.main, "nowhere out.json", "nowhere does not exist"),
    (run.main, "data/manifest.json out.json", "is a file; a checkpoint is a folder"),
    (run.main, "preln/step7/model_and_optim out.json", "is a part of a checkpoint"),
    (run.main, "data out.json", "is not a checkpoint"),
    (run.main, "preln/step7", "the following arguments are required: out"),
    (run.main, "preln/step7 out.json --limit x", "invalid positive value: 'x'"),
    (run.main, "preln/step7 out.json --batch-size 0", "must be at least 1, got 0"),
    (run.main, "preln/step7 out.json --max-length -1", "must be at least 1, got -1"),
    (run.main, "preln/step7 out.json --dtype int8", "invalid choice: 'int8'"),
    (run.main, "preln/step7 out.json --heldout-windows round", "invalid choice: 'round'"),
    (run.main, "preln/step7 out.json --num-fewshot -1", "must not be negative, got -1"),
    (run.main, "preln/step7 out.json --data-dir nowhere --offline", "nowhere is not a tokenised"),
    (run.main, "preln/step7 out.json --offline --tasks piqa", "raise --max-length"),
    (generate.main, "preln/step7", "one of the arguments --prompt --random-prompt is required"),
    (generate.main, "preln/step7 --prompt a --random-prompt", "not allowed with argument"),
    (generate.main, "preln/step7 --prompt a --batch-size 2", "belong to --random-prompt"),
    (generate.main, "preln/step7 --prompt a --temperature -1", "must be 0 (greedy) or more"),
    (generate.main, "preln/step7 --prompt a --temperature nan", "must be 0 (greedy) or more"),
    (generate.main, "preln/step7 --prompt a --top-p 2", "must be above 0 and at most 1"),
    (generate.main, "preln/step7 --prompt a --top-k 0", "must be at least 1"),
    (generate.main, "preln/step7 --prompt a --max-new-tokens 0", "must be at least 1"),
    (generate.main, "preln/step7 --prompt a --json data", "--json data is a folder"),
    (generate.main, "preln --prompt a", "is a run folder, not a checkpoint"),
    (export_hf.main, "preln out", "is a run folder, not a checkpoint"),
    (export_hf.main, "preln/step7 data", "data exists and is not an empty folder"),
    (export_hf.main, "preln/step7 data/manifest.json", "exists and is not an empty folder"),
    (export_hf.main, "preln/step7 out --dtype float16", "invalid choice: 'float16'"),
    (release.main, "preln", "the following arguments are required: OUT_DIR"),
    (release.main, "nowhere out", "nowhere does not exist"),
    (release.main, "preln/step7 ldm_k4/step7 out", "are different models"),
    (release.main, "preln/step7 preln/step7 out", "both have the learning rate"),
    (release.main, "preln/step7 data", "data exists and is not an empty folder"),
    (release.main, "preln/step7 out --results data/manifest.json", "is not a results file"),
    (release.main, "preln/step7 out --results nowhere.json", "is not a results file"),
    (release.main, "preln/step7 out --data-dir nowhere", "nowhere is not a tokenised corpus"),
]  # fmt: skip


@pytest.mark.parametrize(("main", "argv", "needle"), EVALUATION)
def test_evaluation(place, capsys, main, argv, needle):
    before = sorted(place.root.iterdir())
    assert needle in refusal(lambda: main(argv.split()), capsys)
    assert sorted(place.root.iterdir()) == before, "something was left behind"


# -- ablations, throughput, quickstart, data ----------------------------------------------------

RUN_FILES = {
    "empty": {},
    "half": {"metrics.jsonl": '{"step": 1', "runs.jsonl": "{}"},
    "unfinished": {"metrics.jsonl": '{"step": 1}', "runs.jsonl": "{}"},
    "no-config": {
        "metrics.jsonl": '{"step": 1}',
        "runs.jsonl": "{}",
        "step1/config.json": '{"trainer": 3}',
    },
}
SCRIPTS = [
    (collect.main, "save empty", "is not a run folder"),
    (collect.main, "save half", "metrics.jsonl is damaged"),
    (collect.main, "save unfinished", "has no checkpoint, so the run has not finished"),
    (collect.main, "save no-config", "config.json is not the config of a run"),
    (collect.main, "table --results empty", "holds no results"),
    (collect.main, "table --results bad-results", "is not a result of collect.py"),
    (collect.main, "", "the following arguments are required: command"),
    (series.main, "--gpu h200 --out s ldm@", "is no arm"),
    (series.main, "--gpu h200 --out s ldm@fast", "is no"),
    (series.main, "--gpu h200 --out s nothing", "unknown variant 'nothing'"),
    (series.main, "--gpu h200 --out s ldm:x", "is no"),
    (series.main, "--gpu h200 --out s --slots 0 ldm", "--slots must be at least 1"),
    (rounds.main, "train tiny cpu 0", "ROUNDS must be positive whole numbers"),
    (rounds.main, "train tiny cpu 1,2", "ROUNDS is one number"),
    (rounds.main, "train tiny cpu 1 --nproc x", "NPROC must be positive whole numbers"),
    (rounds.main, "train tiny cpu 1 --out data/manifest.json", "cannot be made"),
    (rounds.main, "train tiny cpu 1 --out bad-rounds", "is damaged"),
    (measure.main, "fly tiny ldm", "invalid choice: 'fly'"),
    (measure.main, "train tiny ldm --batch x", "must be positive whole numbers, got 'x'"),
    (measure.main, "train tiny ldm:", "unknown"),
    (boundary.main, "--device tpu", "tpu"),
    (overlap.main, "--tokens 0", "--tokens must be at least 1"),
    (tokenize_from_pretrain_datasets.main, "--output-dir o --workers 0", "is not at least 1"),
    (tokenize_from_pretrain_datasets.main, "--output-dir o --batch-size x", "invalid"),
    (tokenize_from_pretrain_datasets.main, "", "--output-dir"),
    (tokenize_from_pretrain_datasets.main, "--verify --output-dir nowhere", "nowhere has no manifest"),
    (build_corpus.main, "data/manifest.json/x", "cannot be written"),
]  # fmt: skip


@pytest.mark.parametrize(("main", "argv", "needle"), SCRIPTS)
def test_scripts(place, monkeypatch, capsys, main, argv, needle):
    for folder, files in RUN_FILES.items():
        (place.root / folder).mkdir()
        for name, content in files.items():
            (place.root / folder / name).parent.mkdir(exist_ok=True)
            (place.root / folder / name).write_text(content)
    for name in ("bad-results/a.json", "bad-rounds/round-1.json"):
        (place.root / name).parent.mkdir()
        (place.root / name).write_text('{"a": ')
    before = sorted(place.root.rglob("*"))
    argument = argv.split()
    takes_argv = main not in (collect.main, series.main, build_corpus.main)

    def call() -> Any:
        monkeypatch.setattr(sys, "argv", ["script.py", *argument])
        return main(argument) if takes_argv else main()

    assert needle in refusal(call, capsys)
    assert sorted(place.root.rglob("*")) == before, "something was left behind"


# -- launchers ----------------------------------------------------------------------------------

LAUNCHERS = [
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"NPROC": "two", "DATA_DIR": "."}, "NPROC must be a number"),
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"NPROC": "0", "DATA_DIR": "."}, "NPROC must be a number"),
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"NNODES": "x", "DATA_DIR": "."}, "NNODES must be a number"),
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"NNODES": "2", "DATA_DIR": "."}, "set NODE_RANK"),
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"NNODES": "2", "NODE_RANK": "0", "DATA_DIR": "."}, "set MASTER_ADDR"),
    ("pretrain/launch.sh", "--gpu cpu tiny ldm 0.1", {"PYTHON": "no-such-python", "DATA_DIR": "."}, "no 'no-such-python' here"),
    ("pretrain/launch.sh", "--gpu=a100 tiny ldm 0.1", {}, "unknown GPU 'a100'"),
    ("pretrain/evaluation/run.sh", "x y", {"NPROC": "0"}, "NPROC must be a number"),
    ("throughput/rounds.sh", "train tiny cpu -1", {}, "ROUNDS must be a positive whole number"),
    ("throughput/rounds.sh", "train tiny", {}, "need MODE SCALE GPU ROUNDS"),
    ("throughput/tables.sh", "", {}, "need a GPU"),
    ("throughput/tables.sh", "h200 decode64", {}, "unknown table 'decode64'"),
    ("quickstart/quickstart.sh", "now", {}, "unknown argument 'now'"),
    ("ablations/launch.sh", "", {}, "need VARIANT GPU"),
    ("offline/pack.sh", "", {}, "need one folder for the result"),
    ("offline/pack.sh", "packed", {"PYTHON_VERSION": "three"}, "PYTHON_VERSION is a version such as 3.12"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "argv", "env", "needle"), LAUNCHERS)
def test_launchers(tmp_path, script, argv, env, needle):
    done = subprocess.run(
        ["bash", str(EXPERIMENTS / script), *argv.split()],
        env={**os.environ, "PYTHON": sys.executable, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and needle in line
    assert not list(tmp_path.iterdir())


def test_the_readme_counts_them():
    tables = (TRAINING, BUILDING, MANIFESTS, SCALES, CONFIGS, EVALUATION, SCRIPTS, LAUNCHERS)
    text = (ROOT / "tests" / "README.md").read_text()
    assert f"a table of {sum(map(len, tables))} bad inputs" in text

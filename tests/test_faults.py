"""
What keeps a long run alive: the guard against losses and gradients that are not finite, damaged checkpoints, full disks, and
hostile files. The campaign of ``faults.py`` kills real processes; its cases are here as tests marked ``campaign``, the cheapest ones always.
"""

import contextlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from eval_helpers import METHODS, tiny_config, tiny_model, write_checkpoint
from test_launch import corpus

from config_utils.callbacks import (
    GuardCallback,
    NonFiniteError,
    WindowSpeedMonitorCallback,
    find_origin,
)
from config_utils.errors import UserError
from config_utils.experiment import ExperimentConfig, build_experiment
from eval.checkpoint import damage, restrict_unpickling
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paper-experiments" / "pretrain"))
import train

# -- training guards ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus") / "data")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Training in this process sets a hook and a variable."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)


def small_run(data: Path, folder: Path, *more: str) -> ExperimentConfig:
    config = build_experiment(
        "tiny", "ldm", 4e-3, gpu="cpu", data_dir=data, checkpoint_dir=folder, steps=faults.STEPS
    )
    return config.merge([*faults.SMALL, *more])


def break_at(monkeypatch, step: int, action: Any) -> list[torch.Tensor]:
    """Act on the model from one step of the training on, after that step's batch is known; gives that batch's indices."""
    indices: list[torch.Tensor] = []
    original = GuardCallback.pre_step

    def pre_step(self: GuardCallback, batch: dict[str, Any]) -> None:
        original(self, batch)
        if self.step == step:
            indices.append(batch["index"])
            action(self.trainer.train_module.model)

    monkeypatch.setattr(GuardCallback, "pre_step", pre_step)
    return indices


@pytest.mark.parametrize("interval", [1, 10])
def test_an_output_that_is_not_finite(data, tmp_path, monkeypatch, interval):
    """The second micro-batch's only sequence, at a step between two collections of metrics."""
    calls = [0]

    def action(model: torch.nn.Module) -> None:
        def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return output * math.inf if calls[0] % 2 == 0 else output

        model.blocks["1"].feed_forward.w2.register_forward_hook(hook)

    indices = break_at(monkeypatch, 6, action)
    config = small_run(data, tmp_path, f"trainer.metrics_collect_interval={interval}")
    with pytest.raises(NonFiniteError) as e:
        train.train(config)
    run = Path(config.trainer.save_folder)
    second = indices[0].flatten().tolist()[1]
    assert str(e.value).startswith("step 6: the loss or a gradient is not finite; it began in the ")
    assert f"output of blocks.1.feed_forward.w2 (data indices {second});" in str(e.value)
    assert f"the last good checkpoint is {run / 'step4'}, and nothing was saved" in str(e.value)
    assert [p.name for p in sorted(run.glob("step*"))] == ["step4"]
    assert damage(run / "step4") is None


def test_a_gradient_that_is_not_finite(data, tmp_path, monkeypatch):
    """The loss is finite and stays it; the parameters are those of the step before."""
    models = []

    def action(model: torch.nn.Module) -> None:
        models.append((model, {k: v.clone() for k, v in model.state_dict().items()}))
        parameter = model.blocks["0"].feed_forward.w1.weight
        parameter.register_hook(lambda grad: grad * math.nan)

    indices = break_at(monkeypatch, 5, action)
    config = small_run(data, tmp_path, "trainer.metrics_collect_interval=10")
    with pytest.raises(NonFiniteError) as e:
        train.train(config)
    shown = ", ".join(map(str, indices[0].flatten().tolist()))
    assert "it began in the gradient of blocks.0.feed_forward.w1.weight" in str(e.value)
    assert f"(data indices {shown})" in str(e.value)
    (model, before), *_ = models
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_find_origin_without_a_fault(data, tmp_path):
    config = small_run(data, tmp_path)
    module = config.train_module.build(config.model.build(init_device="meta"))
    batch = {"input_ids": torch.randint(0, 50_000, (4, 64)), "index": torch.arange(4)}

    class Trainer:
        global_step = 1

        def record_metric(self, *args: Any, **kwargs: Any) -> None:
            pass

    module._trainer = Trainer()  # type: ignore[assignment]
    assert find_origin(module, batch) is None
    with torch.no_grad():
        module.model.lm_head.w_out.weight[3] = math.inf
    assert "parameter lm_head.w_out.weight" in find_origin(module, batch).what  # type: ignore[union-attr]


def test_spikes_are_reported(caplog):
    guard = GuardCallback()
    losses = [5 + 0.1 * math.sin(i) for i in range(60)]
    seen = []
    for step, loss in enumerate([*losses, 5.1, 7.0, 5.1]):
        metrics = {TRAIN_CE_LOSS_METRIC: loss}
        guard.pre_log_metrics(step, metrics)
        seen += [step] if "train/CE loss spike" in metrics else []
    assert seen == [61]
    assert "Loss spike at step 61: 7.0000, against 5.0" in caplog.text
    again = GuardCallback()
    again.load_state_dict({"losses": list(guard._losses)})
    metrics = {TRAIN_CE_LOSS_METRIC: 9.0}
    again.pre_log_metrics(63, metrics)  # the losses before a resume count
    assert "train/CE loss spike" in metrics


# -- a training run that goes on ----------------------------------------------------------------


def test_damaged_checkpoints_are_set_aside(data, tmp_path, monkeypatch):
    """In this process: train, damage the newest two checkpoints, go on from the third, with the same losses."""
    monkeypatch.setenv("DATA_DIR", str(data))
    config = small_run(data, tmp_path)
    assert train.train(config) == 0
    run = Path(config.trainer.save_folder)
    whole = faults.losses(run)
    faults.cut(faults.largest(run / "step12"))
    state = run / "step8" / "train" / "rank0.pt"
    faults.flip(state, state.read_bytes().index(b"global_step"))
    assert train.train(config) == 0
    assert faults.losses(run) == whole
    names = {p.name for p in run.glob("step*")}
    assert names == {"step4", "step8", "step12", "step8.damaged", "step12.damaged"}
    infos = [json.loads(line) for line in (run / "runs.jsonl").read_text().splitlines()]
    assert [i["resumed_from_step"] for i in infos] == [None, 4]
    assert (
        len(infos[0]["data_manifest_sha256"]) == 64 if "data_manifest_sha256" in infos[0] else True
    )
    for step in (4, 8, 12):
        faults.cut(run / f"step{step}" / "model_and_optim" / ".metadata")
    with pytest.raises(UserError, match="has no whole checkpoint left"):
        train.train(config)
    assert len(list(run.glob("*.damaged*"))) == 5


def test_write_errors_are_recognised():
    def raised(function: Any) -> BaseException:
        try:
            function()
        except BaseException as e:
            return e
        raise AssertionError

    def full() -> None:
        with open("/dev/full", "w", buffering=1) as f:
            f.write("x\n")

    def full_within() -> None:
        try:
            full()
        except OSError as e:
            raise RuntimeError("An error occurred") from e

    assert train.write_error(raised(full)) == "No space left on device"
    assert train.write_error(raised(full_within)) == "No space left on device"
    assert train.write_error(
        RuntimeError("Original error:\nOSError: [Errno 28] No space left on device")
    )
    assert train.write_error(ValueError("anything else")) is None


# -- hostile files ------------------------------------------------------------------------------


class Attack:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    config = tiny_config(METHODS["preln"])
    path = write_checkpoint(tmp_path / "run" / "step1", tiny_model(config), config)
    (path / "train").mkdir()
    torch.save({"global_step": 1}, path / "train" / "rank0.pt")
    return path


def test_damage_is_named(checkpoint):
    assert damage(checkpoint) is None
    state = checkpoint / "train" / "rank0.pt"
    faults.flip(state, state.read_bytes().index(b"global_step"))
    assert "rank0.pt" in str(damage(checkpoint))
    torch.save({"global_step": 1}, checkpoint / "train" / "rank0.pt")
    largest = faults.largest(checkpoint)
    for offset in (0.1, 0.5, 0.9):
        position = int(offset * largest.stat().st_size)
        faults.flip(largest, position)
        assert "is cut off or changed" in str(damage(checkpoint))
        faults.flip(largest, position)
    assert damage(checkpoint) is None
    largest.unlink()
    assert "is cut off or changed" in str(damage(checkpoint))
    shutil.rmtree(checkpoint / "train")
    assert damage(checkpoint) == "train/rank0.pt is missing"


def test_a_resume_unpickles_no_strangers(checkpoint, tmp_path, monkeypatch):
    """The index, the trainer's state and a tensor of the checkpoint, through the readers that a resume uses."""
    marker = tmp_path / "attacked"
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    index = checkpoint / "model_and_optim" / ".metadata"
    good = index.read_bytes()
    index.write_bytes(pickle.dumps(Attack(marker)))
    assert "it refers to posix.mkdir" in str(damage(checkpoint))
    index.write_bytes(good)

    for state in (Attack(marker), {"rng": [Attack(marker)]}):
        torch.save(state, checkpoint / "train" / "rank0.pt")
        assert damage(checkpoint) is None  # it is whole; what it holds must not run
        restrict_unpickling()
        with pytest.raises(pickle.UnpicklingError):
            torch.load(checkpoint / "train" / "rank0.pt", weights_only=False)
        assert not marker.exists()
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    torch.load(checkpoint / "train" / "rank0.pt", weights_only=False)
    assert marker.exists()  # the attack works where nothing stops it


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "..", "a/b.distcp", ""])
def test_an_index_stays_in_its_folder(checkpoint, name):
    index = checkpoint / "model_and_optim" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    key, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[key] = type(info)(name, info.offset, info.length)
    index.write_bytes(pickle.dumps(metadata))
    assert "refers to a file outside the checkpoint" in str(damage(checkpoint))


def test_a_run_folder_has_one_run(tmp_path, monkeypatch, caplog):
    """A process of another machine may be gone, so a start waits for it; one of this machine holds the lock and lives."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        monkeypatch.setattr(train, "_HELD", [])
        monkeypatch.setattr(train.socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(UserError, match=r"going on \(process 123 on elsewhere\)"):
            train.hold(tmp_path)
        monkeypatch.setattr(train.socket, "gethostname", lambda: "here")
        monkeypatch.setattr(train, "LOCK_WAIT_S", 0.0)
        with pytest.raises(UserError, match="process 123 on elsewhere"):
            train.hold(tmp_path)
        monkeypatch.setattr(train, "LOCK_WAIT_S", 60.0)
        monkeypatch.setattr(train.time, "sleep", lambda s: (holder.kill(), holder.wait()))
        train.hold(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    assert "waiting 60 s" in caplog.text
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()} here\n"
    train._HELD[0].close()


HOLDER = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
lock.write("123 elsewhere")
lock.flush()
print("held", flush=True)
time.sleep(600)
"""


def test_a_checkpoint_of_an_older_version_has_defaults_for_what_it_does_not_know(data, tmp_path):
    config = small_run(data, tmp_path)
    model = json.loads(json.dumps(config.model.as_config_dict()))
    del model["tie_word_embeddings"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": model}))
    train.check_same_model(config, tmp_path)
    config.model.tie_word_embeddings = True
    with pytest.raises(UserError, match="tie_word_embeddings is False there and True here"):
        train.check_same_model(config, tmp_path)


# -- speeds -------------------------------------------------------------------------------------


class Clock:
    """A trainer whose host launches a step in 0.1 s and waits for a device that needs 1 s for each."""

    def __init__(self, interval: int, steps: int):
        self.metrics_collect_interval, self.max_steps, self.global_step = interval, steps, 0
        self.host = self.device = 0.0
        self.metrics: dict[int, dict[str, float]] = {}
        self.dp_process_group = self.global_train_tokens_seen = None
        self.global_train_petaflops = 0.0
        self.train_module = None

    def record_metric(self, name, value, reduce_type=None, merge_strategy="warn"):
        here = self.metrics.setdefault(self.global_step, {})
        assert name not in here or merge_strategy == "latest"
        here[name] = value


def test_speeds_where_the_host_is_ahead(monkeypatch):
    """It waits at every fifth step, as the guard has it; in between it is up to four steps ahead."""
    trainer = Clock(interval=5, steps=17)
    monkeypatch.setattr(time, "perf_counter", lambda: trainer.host)
    monitor = WindowSpeedMonitorCallback(num_flops_per_token=3, device_peak_flops_per_second=10**4)
    monitor.trainer = trainer  # type: ignore[assignment]
    batch = {"input_ids": torch.zeros(2, 50)}
    for step in range(1, 18):
        trainer.global_step = step
        monitor.pre_load_batch()
        trainer.host += 0.01
        monitor.pre_step(batch)
        trainer.host += 0.09
        trainer.device = max(trainer.device, trainer.host) + 1.0
        if step == 1 or step % 5 == 0 or step == 17:
            trainer.host = trainer.device
        monitor.post_step()
    assert {s for s, m in trainer.metrics.items() if "throughput/device/TPS" in m} == {
        5,
        10,
        15,
        17,
    }
    for step, n in ((5, 4), (10, 5), (15, 5), (17, 2)):
        m = trainer.metrics[step]
        seconds = n + 0.1  # the device waits for the first launch after each wait
        assert m["throughput/device/TPS"] == pytest.approx(100 * n / seconds)
        assert m["throughput/device/BPS"] == pytest.approx(n / seconds)
        assert m["throughput/device/MFU"] == pytest.approx(100 * 300 * n / seconds / 1e4)
        assert m["throughput/device/data loading (s)"] == pytest.approx(0.01)
        assert m["throughput/device/data loading (%)"] == pytest.approx(n / seconds)
    assert trainer.metrics[17]["throughput/device/TPS (actual avg)"] == pytest.approx(1600 / 16.4)


# -- the campaign -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> faults.Campaign:
    return faults.Campaign(tmp_path_factory.mktemp("campaign"))


CHEAP = ("kill_in_tokenising", "full_disk_tokenising")


@pytest.mark.parametrize(
    "name",
    [n if n in CHEAP else pytest.param(n, marks=pytest.mark.campaign) for n in faults.CASES],
)
def test_campaign(campaign, name):
    try:
        outcome = faults.CASES[name](campaign)
    except faults.Skipped as e:
        pytest.skip(str(e))
    assert outcome.equal.startswith(("yes", "round 1 unchanged", "to "))


def processes_of(group: int) -> list[int]:
    """The living processes of a process group; Linux."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rsplit(")", 1)[1].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_data_workers_end_with_the_trainer(data, tmp_path):
    """Killed, it can tell nobody; the workers' parent is the fork server, which waits for them."""
    more = ("data_loader.num_workers=2", "trainer.callbacks.checkpointer.save_interval=100000")
    command = ["bash", str(faults.PRETRAIN / "launch.sh"), "--gpu", "cpu", "tiny", "ldm", "4e-3"]
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, *faults.SMALL, *more],
            env={
                **os.environ, "PYTHON": sys.executable, "DATA_DIR": str(data), "CHECKPOINT_DIR": str(tmp_path / "runs"),
                "STEPS": "100000", "WANDB_MODE": "disabled",
            },
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + faults.DEADLINE
        while "[step=3/" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        # The trainer, the fork server, its two workers, and what tracks their shared memory.
        assert len(processes_of(process.pid)) >= 4
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while left := processes_of(process.pid):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

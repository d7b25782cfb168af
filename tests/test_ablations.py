"""The ablation series: configs that are current, and the statistics of its table."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from config_utils.run_info import result_name

FOLDER = Path(__file__).resolve().parents[1] / "paper-experiments" / "ablations"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"ablations_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


collect = load("collect")


def test_configs_are_current():
    generate = load("generate")
    from config_utils.methods import ABLATIONS, ALL_METHODS, PAPER_METHODS

    variants = {p.stem for p in (FOLDER / "configs").glob("*.yaml")}
    # One's own methods may be left out.
    assert {*PAPER_METHODS, *ABLATIONS} <= variants <= set(ALL_METHODS)
    for variant in variants:
        import yaml

        assert yaml.safe_load(
            (FOLDER / "configs" / f"{variant}.yaml").read_text()
        ) == generate.config(variant)


def test_readme_defines_every_variant():
    from config_utils.methods import ABLATIONS, PAPER_METHODS

    text = (FOLDER / "README.md").read_text()
    assert [v for v in (*PAPER_METHODS, *ABLATIONS) if f"`{v}`" not in text] == []


def result(variant: str, seed: int, loss: float, speed: float | None = 100.0) -> dict:
    return {
        "scale": "90m",
        "steps": 400,
        "tokens": 26_214_400,
        "learning_rate": 0.002,
        "variant": variant,
        "seed": seed,
        "heldout_loss_nats": loss,
        "tokens_per_s_per_gpu_median": speed,
        "peak_active_memory_gib": 10.0,
    }


def test_means_errors_and_paired_differences():
    rows = collect.summarise(
        [
            *(result("ldm", s, x) for s, x in enumerate((4.0, 4.2, 4.4))),
            *(result("preln", s, x) for s, x in enumerate((4.5, 4.7, 4.9))),
            result("mhc", 0, 4.3),
        ]
    )
    by_name = {r["variant"]: r for r in rows}
    assert [r["variant"] for r in rows] == ["ldm", "mhc", "preln"]
    assert by_name["ldm"]["heldout_loss_nats"] == pytest.approx(4.2)
    # Standard deviation 0.2 over three seeds.
    assert by_name["ldm"]["heldout_loss_standard_error"] == pytest.approx(0.2 / 3**0.5)
    # Every seed differs by 0.5, so the paired error is zero although each mean's is not.
    assert by_name["preln"]["difference_to_ldm_nats"] == pytest.approx(0.5)
    assert by_name["preln"]["difference_standard_error"] == pytest.approx(0.0, abs=1e-12)
    # One seed against the mean of three: no error can be given.
    assert by_name["mhc"]["difference_to_ldm_nats"] == pytest.approx(0.1)
    assert by_name["mhc"]["difference_standard_error"] is None
    table = collect.markdown(rows)
    assert "| preln | 3 | 4.700 ± 0.115 | +0.500 ± 0.000 | 0k | 10.0 |" in table


def test_an_option_as_an_override_is_a_variant_of_the_same_recipe():
    recipe, option = "model.init_method=llama", "model.block.depth.forget_start=wide"
    rows = collect.summarise(
        [
            result("ldm", 0, 4.0),
            {**result("ldm", 0, 3.9), "overrides": [option]},
            {**result("ldm", 0, 5.0), "overrides": [recipe]},
            {**result("ldm_k4", 0, 5.2), "overrides": [recipe, option]},
        ]
    )
    found = [(r["overrides"], r["variant"], r["difference_to_ldm_nats"]) for r in rows]
    assert found == [
        ("", "ldm forget_start=wide", pytest.approx(-0.1)),
        ("", "ldm", 0.0),
        (recipe, "ldm", 0.0),
        (recipe, "ldm_k4 forget_start=wide", pytest.approx(0.2)),
    ]


def test_a_run_becomes_a_result(tmp_path):
    run = tmp_path / "90m-ldm-lr2e-3-seed1"
    (run / "step40").mkdir(parents=True)
    config = {
        "run_name": run.name,
        "scale": "90m",
        "method": "ldm",
        "seed": 1,
        "trainer": {"max_duration": {"value": 40}},
        "data_loader": {"global_batch_size": 1000},
        "train_module": {"optim": {"lr": 0.002}},
        "model": {"block": {"depth": {"d_k": 8}}},
    }
    (run / "step40" / "config.json").write_text(json.dumps(config))
    (run / "runs.jsonl").write_text(json.dumps({"git": {"commit": "abc"}}) + "\n")
    lines = [
        {"step": s, "train/CE loss": 10 - s / 10, "throughput/device/TPS": 5.0 if s <= 20 else 9.0}
        for s in range(1, 41)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines))
    with pytest.raises(collect.UserError, match="not finished"):
        collect.collect(run)
    with (run / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"step": 40, "eval/held-out/CE loss": 5.5}) + "\n")
    out = collect.collect(run)
    assert out["heldout_loss_nats"] == 5.5 and out["train_loss_last_nats"] == 6.0
    assert out["tokens"] == 40_000 and out["tokens_per_s_per_gpu_median"] == 9.0
    with pytest.raises(collect.UserError, match="not a run folder"):
        collect.collect(tmp_path)


def test_series_parses_arms():
    series = load("series")
    runs = series.parse_arm("ldm@0.001:42,43x100", "90m")
    assert [(r.variant, r.lr, r.seed, r.steps) for r in runs] == [
        ("ldm", 0.001, 42, 100),
        ("ldm", 0.001, 43, 100),
    ]
    (run,) = series.parse_arm("ldm_k4", "90m")
    assert run.result == "90m-ldm_k4-lr2e-3-seed42-steps400.json"
    (run,) = series.parse_arm("ldm:42x100+model.init_method=llama+model.block.depth.d_k=2", "90m")
    assert run.overrides == ("model.init_method=llama", "model.block.depth.d_k=2")
    assert run.result == (
        "90m-ldm-lr2e-3-seed42-steps100+model.init_method=llama+model.block.depth.d_k=2.json"
    )
    for arm, needle in (
        ("ldm+init_method", "is no arm"),
        ("huge", "unknown variant 'huge'"),
        ("ldm@x", "is no arm"),
        (":3", "is no arm"),
    ):
        with pytest.raises(series.UserError, match=needle):
            series.parse_arm(arm, "90m")


def test_series_overlaps_the_start_of_one_run_with_the_training_of_the_one_before(tmp_path):
    series = load("series")
    turn = series.StartTurn(0.5)
    log = tmp_path / "log"
    log.write_text("")

    def start():
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    turn.wait()
    first = start()
    watcher = threading.Thread(target=turn.watch, args=(first, log, 100, None))
    watcher.start()
    second_may_start = threading.Event()
    waiter = threading.Thread(target=lambda: (turn.wait(), second_may_start.set()))
    waiter.start()
    log.write_text("[step=49/100]\n")
    assert not second_may_start.wait(1.5)
    log.write_text("[step=49/100]\n[step=50/100]\n")
    assert second_may_start.wait(10) and first.poll() is None
    first.communicate(b"\n")
    watcher.join()
    waiter.join()

    # A run that hangs before its first step gives the turn away too.
    second = start()
    log.write_text("")
    with pytest.raises(subprocess.TimeoutExpired):
        turn.watch(second, log, 100, 0.2)
    assert turn._turn.acquire(timeout=1)
    second.communicate(b"\n")


def test_series_skips_what_has_a_result_and_says_what_failed(tmp_path, monkeypatch, capsys):
    series = load("series")
    (tmp_path / "90m-ldm-lr2e-3-seed42-steps400.json").write_text("{}")
    started = []

    def execute(run, device, opts, turn, processes):
        started.append((run.variant, run.seed, device))
        if run.variant == "mhc":
            return "failed with exit status 1"
        (opts.out / run.result).write_text("{}")
        return "done"

    monkeypatch.setattr(series, "execute", execute)
    arms = ["ldm:42,43", "mhc", "preln"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["series.py", "--gpu", "h200", "--devices", "0,1", "--out", str(tmp_path), *arms],
    )
    with pytest.raises(series.UserError, match="1 runs have no result: 90m-mhc-lr2e-3-seed42"):
        series.main()
    assert {s[:2] for s in started} == {("ldm", 43), ("mhc", 42), ("preln", 42)}
    assert {s[2] for s in started} <= {"0", "1"}
    said = capsys.readouterr().out.splitlines()[0]
    assert f"4 runs, 1 of them have a result already in {tmp_path}: skipped" in said
    assert "to run them anew, give another --out and CHECKPOINT_DIR" in said


def test_the_committed_results_are_no_default(tmp_path, monkeypatch, capsys):
    """The README's command trains in a clone: what is committed is not taken for the user's own results."""
    series = load("series")
    assert series.RESULTS == collect.RESULTS == FOLDER.parents[1] / "results" / "ablations"
    monkeypatch.setattr(series, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    committed = [p.name for p in (FOLDER / "results").glob("*.json")]
    started = []

    def execute(run, device, opts, turn, processes):
        started.append(run.result)
        (opts.out / run.result).write_text("{}")
        return "done"

    monkeypatch.setattr(series, "execute", execute)
    monkeypatch.setattr(sys, "argv", ["series.py", "--gpu", "h200", "preln:42,43", "ldm:42,43"])
    assert series.main() == 0 and len(started) == 4 and set(started) <= set(committed)
    assert "4 runs, 0 of them have a result already" in capsys.readouterr().out
    assert series.main() == 0 and len(started) == 4
    assert "4 runs, 4 of them have a result already" in capsys.readouterr().out

    # The committed ones by name; a copy, since the table is written beside them.
    shutil.copytree(FOLDER / "results", tmp_path / "committed")
    monkeypatch.setattr(sys, "argv", ["x", "table", "--results", str(tmp_path / "committed")])
    assert collect.main() == 0
    table = (tmp_path / "committed" / "table.md").read_text()
    assert table == (FOLDER / "results" / "table.md").read_text()


def test_tiny_is_a_scale_of_the_series(tmp_path):
    series = load("series")
    (run,) = series.parse_arm("ldm", "tiny")
    assert run.result == "tiny-ldm-lr4e-3-seed42-steps110.json"
    from config_utils.scales import load_scale

    assert series.DEFAULT_STEPS["tiny"] == load_scale("tiny").recipe.steps
    done = subprocess.run(
        ["bash", str(FOLDER / "launch.sh"), "static_key", "cpu"],
        env={
            **{k: v for k, v in os.environ.items() if k not in ("STEPS", "LR")},
            "SCALE": "tiny",
            "DRY_RUN": "1",
            "PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny static_key 0.004 --gpu cpu" in done.stdout and "value: 110" in done.stdout
    assert (collect.amount(110 * 1024), collect.amount(400 * 65_536)) == ("113k", "26M")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_series_that_is_stopped_stops_its_runs(tmp_path, number):
    (tmp_path / "launch.sh").write_text('sleep 100 & echo $! > "$CHECKPOINT_DIR/../pid"; wait\n')
    program = (
        "import importlib.util, pathlib, signal, sys\n"
        f"spec = importlib.util.spec_from_file_location('series', {str(FOLDER / 'series.py')!r})\n"
        "series = importlib.util.module_from_spec(spec); sys.modules['series'] = series\n"
        "spec.loader.exec_module(series)\n"
        "configs = series.HERE / 'configs'\n"
        f"series.HERE = pathlib.Path({str(tmp_path)!r})\n"
        "(series.HERE / 'configs').symlink_to(configs)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job\n"
        "series.run_cli(series.main)\n"
    )
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "steps400").mkdir(parents=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", program, "--gpu", "cpu", "--overlap", "0.5"),
            *("--out", str(tmp_path / "results"), "ldm:42,43"),
        ],
        env={**os.environ, "CHECKPOINT_DIR": str(checkpoints)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = checkpoints / "pid"
    deadline = time.monotonic() + 30
    while not (pid.is_file() and pid.read_text().strip()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err.splitlines()[-1].startswith("stopped: "), err
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(
    ("args", "env", "needle"),
    [
        (("ldm",), {}, "need VARIANT GPU"),
        (("huge", "b200"), {}, "unknown variant 'huge'"),
        (("ldm", "b200"), {"SCALE": "1p5b"}, "unknown SCALE '1p5b': choose 400m, 90m or tiny"),
    ],
)
def test_bad_input(args, env, needle):
    done = subprocess.run(
        ["bash", str(FOLDER / "launch.sh"), *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and needle in done.stderr


def test_a_method_without_a_config_is_told_of_generate(tmp_path):
    folder = tmp_path / "paper-experiments" / "ablations"
    (folder / "configs").mkdir(parents=True)
    (folder / "launch.sh").write_text((FOLDER / "launch.sh").read_text())
    (tmp_path / "config_utils").symlink_to(FOLDER.parents[1] / "config_utils")
    for variant, needle in (
        ("ldm", "'ldm' has no config here yet: run paper-experiments/ablations/generate.py"),
        ("huge", "unknown variant 'huge'"),
    ):
        done = subprocess.run(
            ["bash", str(folder / "launch.sh"), variant, "b200"],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stderr.startswith("error: ") and needle in done.stderr


def test_dry_run_is_the_series_recipe():
    done = subprocess.run(
        ["bash", str(FOLDER / "launch.sh"), "softmax_key", "b200"],
        env={**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "400m softmax_key 0.001 --gpu b200" in done.stdout
    assert "      key_activation: softmax" in done.stdout and "value: 14305" in done.stdout


def test_curves_are_compared_at_the_steps_that_all_have(tmp_path):
    curves = {
        "a": [[10, 5.0], [20, 4.0], [30, 3.0]],
        "b": [[10, 5.1], [20, 3.7]],
    }
    arguments = []
    for label, curve in curves.items():
        (tmp_path / f"{label}.json").write_text(json.dumps({"curve": curve}))
        arguments.append(f"{label}={tmp_path / label}.json")
    text = collect.save_curves(arguments, tmp_path / "out")
    assert "| b | a | 0.3000 | 20 | 0.2000 | -0.1000 |" in text
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    for bad, needle in [
        (arguments[:1], "two runs"),
        ([arguments[0], "c=missing.json"], "not LABEL=FILE"),
        ([arguments[0], "no equals sign"], "not LABEL=FILE"),
    ]:
        with pytest.raises(collect.UserError, match=needle):
            collect.save_curves(bad, tmp_path / "out")


def test_names_of_results_fit_a_file_system():
    """Many overrides: the name is cut, and stays one of its own."""
    overrides = [f"trainer.callbacks.held_out.eval_interval={n}" for n in range(9)]
    names = {
        result_name("90m-ldm-lr2e-3-seed42", 400, [*overrides, last]) for last in ("a=1", "a=2")
    }
    assert len(names) == 2 and all(len(name) < 200 for name in names)
    assert (
        result_name("90m-ldm-lr2e-3-seed42", 400, ["a=1"])
        == "90m-ldm-lr2e-3-seed42-steps400+a=1.json"
    )

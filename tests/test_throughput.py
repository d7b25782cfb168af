"""The speed benchmark: a round on a CPU, its statistics against numbers by hand, and what failures and bad input give."""

import importlib
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config_utils.errors import UserError, run_cli
from config_utils.experiment import GPUS, PEAK_BF16_FLOPS, build_experiment
from config_utils.methods import depth_connection
from config_utils.scales import load_scale
from olmo_core.nn.depth import DepthBackend, PreLNConfig
from olmo_core.nn.depth.preln import PreLNBoundary
from olmo_core.nn.depth.session import InferenceSession

FOLDER = Path(__file__).resolve().parents[1] / "paper-experiments" / "throughput"
SMALL = ("model.d_model=16", "model.n_layers=2", "model.block.feed_forward.hidden_size=32")
CPU = torch.device("cpu")

sys.path.insert(0, str(FOLDER))
boundary, check_decode, check_gradients, measure, rounds, summarize, timing = (
    importlib.import_module(name)
    for name in (
        "boundary",
        "check_decode",
        "check_gradients",
        "measure",
        "rounds",
        "summarize",
        "timing",
    )
)
sys.path.remove(str(FOLDER))


def run(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """measure.py in this process: its exit code and row."""
    out = tmp_path / "row.json"
    code = measure.main([*args, "--out", str(out), *SMALL])
    return code, json.loads(out.read_text())


# -- end to end --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_round_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "run"
    options = ("--methods", "preln ldm", "--steps", "2", "--seq", "32", "--tokens", "32")
    assert rounds.main(["train", "tiny", "cpu", "1", "--out", str(out), *options, *SMALL]) == 0

    assert sorted(p.name for p in out.iterdir()) == [
        "log.txt", "round-1.json", "summary.json", "summary.md", "throughput.png",
    ]  # fmt: skip
    (one,) = summarize.read_rounds(out)
    assert one["complete"] and one["order"] == ["preln", "ldm"]
    for reading in (one["canary_before"], one["canary_after"]):
        assert reading["matmul_flops_per_s"] > 0 and reading["copy_bytes_per_s"] > 0
    for row in one["rows"]:
        assert (row["status"], row["backend"], row["world_size"]) == ("ok", "reference", 1)
        (case,) = row["cases"]
        assert len(case["laps_ms"]) == 2
        assert case["tokens_per_s"] == pytest.approx(32e3 / case["ms"]["median"])
        assert abs(case["first_loss"] - 10.826) < 0.1
    speeds = {row["method"]: row["cases"][0]["tokens_per_s"] for row in one["rows"]}
    summary = json.loads((out / "summary.json").read_text())
    ratio = summary["rows"][1]["ratio_to_preln"]
    assert ratio["median"] == ratio["max"] == pytest.approx(speeds["ldm"] / speeds["preln"])
    assert (out / "throughput.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "summary.md").read_text()
    assert "rounds.sh train tiny cpu 1" in text and "| ldm | reference |" in text
    printed = capsys.readouterr().out
    assert "round 1/1  ldm: " in printed and "x PreLN" in printed

    with pytest.raises(UserError, match="holds the rounds of another run"):
        rounds.main(["train", "tiny", "cpu", "1", "--out", str(out), *options, *SMALL])


def test_prefill(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "peak_bf16_flops", lambda name: 1e12)
    code, row = run(
        tmp_path, "prefill", "tiny", "attnres_full", "--batch", "2", "--context", "16", "--steps", "2"
    )  # fmt: skip
    (case,) = row["cases"]
    assert code == 0 and row["status"] == case["status"] == "ok"
    assert case["tokens_per_s"] == pytest.approx(32e3 / case["ms"]["median"])
    # Forward: 2 FLOPs a weight and token in the blocks (4 d^2 attention, 3 d ffn), 4 d a token and pair of the causal half
    # of attention, 6 n d for a read of n sources; the head for one position of each prompt.
    d, ffn, n_layers, tokens = 16, 32, 2, 32
    pairs = tokens * (16 + 1) / 2
    flops = n_layers * (tokens * 2 * (4 * d * d + 3 * d * ffn) + 4 * d * pairs)
    flops += tokens * sum(6 * n * d for n in range(2, 2 * n_layers + 2))
    flops += 2 * 2 * 50_304 * d
    assert case["mfu"] == pytest.approx(flops / (case["ms"]["median"] * 1e-3) / 1e12, rel=0.02)


def test_decode(tmp_path):
    code, row = run(
        tmp_path, "decode", "tiny", "ldm", "--batches", "1 3", "--context", "300", "--steps", "2"
    )  # fmt: skip
    assert code == 0
    assert [(c["batch"], c["context"], c["status"]) for c in row["cases"]] == [
        (1, 300, "ok"),
        (3, 300, "ok"),
    ]
    for case in row["cases"]:
        assert case["tokens_per_s"] == pytest.approx(case["batch"] * 1e3 / case["ms"]["median"])
        assert not case["cuda_graph"] and case["no_cuda_graph_because"] == "no CUDA"
        # FP32: all weights but the embedding, of which a row for each sequence, and keys and values.
        weights = row["parameters"] - 50_304 * 16 + case["batch"] * 16
        assert case["bytes_per_step"] == 4 * (weights + case["batch"] * 300 * 2 * 2 * 16)


@pytest.mark.parametrize("method", ["preln", "attnres_block", "mhc", "ldm"])
def test_inference_is_in_bf16_throughout(method):
    """What decode and prefill run on a GPU, here on the CPU."""
    config = build_experiment("tiny", method, 1e-3, gpu="cpu").model
    model = measure.inference_model(config, torch.bfloat16, CPU)
    fp32 = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert all("boundary" in n for n in fp32)
    ids = torch.randint(0, 1000, (2, 7))
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=1)
    assert logits.shape[:2] == (2, 1) and torch.isfinite(logits).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["train", "prefill", "decode"])
def test_on_a_gpu(tmp_path, mode):
    out = tmp_path / "row.json"
    assert (
        measure.main([mode, "tiny", "ldm", "--gpu", "h200", "--steps", "3", "--out", str(out)]) == 0
    )
    row = json.loads(out.read_text())
    assert row["compiled"]
    for case in row["cases"]:
        assert case["peak_reserved_gib"] >= case["peak_allocated_gib"] > 0
        assert mode != "decode" or case["cuda_graph"], case["no_cuda_graph_because"]


# -- order and statistics ----------------------------------------------------------------------


def test_every_method_comes_first_once():
    methods = ["a", "b", "c"]
    orders = [rounds.rotated(methods, n) for n in range(1, 5)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_spread():
    assert timing.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "median": 3.0, "q1": 2.0, "q3": 4.0, "min": 1.0, "max": 5.0,
    }  # fmt: skip
    assert set(timing.spread([7.0]).values()) == {7.0}


def row(method: str, *speeds: float, **more: Any) -> dict[str, Any]:
    """A measured row: in training one speed, in decode one for each batch 1, 2, ..."""
    cases = []
    for i, speed in enumerate(speeds):
        where = {"batch": i + 1, "context": 64} if len(speeds) > 1 else {}
        ms = timing.spread([1e3 / speed])
        cases.append({**where, "status": "ok", "tokens_per_s": speed, "ms": ms, **more})
    return {"method": method, "status": "ok", "error": None, "cases": cases, "backend": "reference"}


def one_round(number: int, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    methods = ["preln", "ldm", "mhc"]
    settings = {
        "mode": "train", "scale": "tiny", "device": "cpu", "world_size": 1, "methods": methods,
        "date": "", "command": "",
    }  # fmt: skip
    canary = {"matmul_flops_per_s": 100e12, "copy_bytes_per_s": 4e12}
    return {
        "round": number, "complete": True, "settings": settings, "rows": rows,
        "canary_before": canary, "canary_after": canary, **more,
    }  # fmt: skip


FAILED = {"method": "mhc", "status": "oom", "error": "no memory"}


def test_ratios_are_paired_within_rounds():
    summary = summarize.summarise(
        [
            one_round(1, [row("preln", 100.0), row("ldm", 90.0), FAILED]),
            # A machine at half the speed: the tokens/s say so, the ratios do not.
            one_round(2, [row("preln", 50.0), row("ldm", 46.0), FAILED]),
            # No pair here.
            one_round(3, [{**FAILED, "method": "preln"}, row("ldm", 10.0), FAILED]),
        ]
    )
    preln, ldm, mhc = summary["rows"]
    assert ldm["ratio_to_preln"] == pytest.approx(
        {"median": 0.91, "q1": 0.905, "q3": 0.915, "min": 0.90, "max": 0.92}
    )
    assert ldm["tokens_per_s"]["median"] == 46.0 and ldm["rounds"] == 3
    assert preln["tokens_per_s"]["median"] == 75.0
    assert (preln["rounds"], preln["failed_rounds"]) == (2, 1)
    assert (mhc["status"], mhc["error"]) == ("oom", "no memory")
    assert summarize.ratio_cell(ldm["ratio_to_preln"]) == "0.910 (0.900 to 0.920)"
    _, lines = summarize.table(summary)
    assert [cells[:2] for cells in lines] == [
        ["preln", "reference"],
        ["ldm", "reference"],
        ["mhc", "oom"],
    ]
    assert "mhc: oom: no memory" in summarize.notes(summary)


def test_decode_is_paired_at_the_same_batch():
    decode = one_round(
        1,
        [
            row("preln", 100.0, 180.0, bytes_per_s=2e12),
            row("ldm", 95.0, 180.0, bytes_per_s=1e12, cuda_graph=True),
        ],
    )
    decode["settings"]["mode"] = "decode"
    del decode["rows"][1]["cases"][1]["ms"]
    decode["rows"][1]["cases"][1] |= {"status": "oom", "error": "no memory"}
    rows = summarize.summarise([decode])["rows"]
    ldm = [r for r in rows if r["method"] == "ldm"]
    assert [(r["batch"], r["status"]) for r in ldm] == [(1, "ok"), (2, "oom")]
    assert ldm[0]["ratio_to_preln"]["median"] == pytest.approx(0.95)
    assert ldm[0]["of_copy"] == pytest.approx(0.25)


def test_a_slow_machine_is_seen():
    slow = {"matmul_flops_per_s": 90e12, "copy_bytes_per_s": 4e12}
    rows = [row("preln", 1.0)]
    summary = summarize.summarise(
        [
            one_round(1, rows),
            one_round(2, rows, canary_after=slow),
            one_round(3, rows, complete=False, canary_after=None),
        ]
    )
    assert summary["canary"]["slow_rounds"] == [2] and summary["incomplete_rounds"] == [3]
    notes = " ".join(summarize.notes(summary))
    assert "slower than its best in round 2: trust the ratios" in notes
    assert "before the end: round 3" in notes and "not steady" not in notes
    assert summary["canary"]["unsteady_rounds"] == []


def test_clock_and_power_stand_beside_the_speeds():
    def gpu(clock: float) -> dict[str, Any]:
        return {
            "readings": 1,
            "sm_clock_mhz": timing.spread([clock]),
            "power_w": timing.spread([700.0]),
        }

    summary = summarize.summarise(
        [
            one_round(1, [row("preln", 1.0, gpu=gpu(1500.0)), row("ldm", 0.9, gpu=None)]),
            one_round(2, [row("preln", 1.0, gpu=gpu(1700.0)), row("ldm", 0.9)]),
        ]
    )
    preln, ldm = summary["rows"]
    assert (preln["sm_clock_mhz"], preln["power_w"]) == (1600.0, 700.0)
    assert ldm["sm_clock_mhz"] is None
    assert "SM clock and power while timed: preln 1600 MHz at 700 W" in summarize.notes(summary)


def test_sensors_read_what_nvidia_smi_says_while_something_runs(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
echo "$@" > {tmp_path}/arguments
n=1000
while :; do echo "$n, 2619, [N/A], 40"; n=$((n + 1)); sleep 0.02; done
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234")
    )
    with timing.GpuSensors(torch.device("cuda:0")) as sensors:
        deadline = time.monotonic() + 20
        while not sensors._readings and time.monotonic() < deadline:
            time.sleep(0.01)
        before = len(sensors._readings)
        result, gpu = sensors.during(lambda: time.sleep(0.3) or "done")
        process = sensors._process
    assert result == "done" and gpu is not None
    # Those from before the call do not count.
    assert gpu["sm_clock_mhz"]["min"] >= 1000 + before
    assert 1 < gpu["readings"] <= len(sensors._readings) - before
    assert gpu["memory_clock_mhz"]["median"] == 2619 and gpu["temperature_c"]["max"] == 40
    assert "power_w" not in gpu
    assert process.returncode is not None
    arguments = (tmp_path / "arguments").read_text()
    assert "--id=GPU-1234" in arguments and "clocks.sm,clocks.mem,power.draw" in arguments


def test_no_sensors_without_a_gpu_or_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234")
    )
    for device in (CPU, torch.device("cuda:0")):
        with timing.GpuSensors(device) as sensors:
            assert sensors.during(lambda: 3) == (3, None)


def test_an_unsteady_machine_is_said_in_words():
    half = {"matmul_flops_per_s": 50e12, "copy_bytes_per_s": 4e12}
    mild = {"matmul_flops_per_s": 90e12, "copy_bytes_per_s": 4e12}
    rows = [row("preln", 1.0), row("ldm", 0.9)]
    after = (half, mild, {"matmul_flops_per_s": 100e12, "copy_bytes_per_s": 4e12})
    before = (after[2], half, mild)
    summary = summarize.summarise(
        [one_round(i + 1, rows, canary_before=before[i], canary_after=after[i]) for i in range(3)]
    )
    assert summary["canary"]["slow_rounds"] == [1, 2, 3]
    assert summary["canary"]["unsteady_rounds"] == [1, 2]
    notes = summarize.notes(summary)
    (unsteady,) = (n for n in notes if "not steady" in n)
    assert "more than 20% slower than its best in round 1, 2, whose ratios mean little" in unsteady
    assert any("5% slower than its best in round 3: trust the ratios" in n for n in notes)


def test_one_round_has_no_spread_and_a_cpu_ranks_nothing():
    rows = [row("preln", 100.0), row("ldm", 91.0)]
    one = summarize.summarise([one_round(1, rows)])
    head, lines = summarize.table(one)
    assert "x PreLN" in head and lines[1][head.index("x PreLN")] == "0.910"
    assert one["rows"][1]["ratio_to_preln"]["min"] == pytest.approx(0.91)  # the JSON keeps its keys
    assert "1 round, " in summarize.markdown(one)
    notes = " ".join(summarize.notes(one))
    assert "no spread" in notes and "only show that the benchmark works" in notes

    gpu = [one_round(n, [row("preln", 100.0), row("ldm", 90.0 + n)]) for n in (1, 2)]
    for r in gpu:
        r["settings"]["device"] = "NVIDIA H200"
    two = summarize.summarise(gpu)
    head, lines = summarize.table(two)
    cells = [cells[head.index("x PreLN (min to max)")] for cells in lines]
    assert cells == ["1.000", "0.915 (0.910 to 0.920)"]
    assert len(summarize.notes(two)) == 1  # the canary


def test_one_run_in_a_folder(tmp_path):
    def write(number: int, **more: Any) -> None:
        (tmp_path / f"round-{number}.json").write_text(json.dumps(one_round(number, [], **more)))

    with pytest.raises(UserError, match=r"no round-\*\.json"):
        summarize.read_rounds(tmp_path)
    for number in (10, 2, 1):
        write(number)
    assert [r["round"] for r in summarize.read_rounds(tmp_path)] == [1, 2, 10]
    write(3, settings={"mode": "decode"})
    with pytest.raises(UserError, match="other settings"):
        summarize.read_rounds(tmp_path)
    (tmp_path / "round-3.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        summarize.read_rounds(tmp_path)


def test_peaks_are_of_the_gpu_that_is_here():
    for name, peak in PEAK_BF16_FLOPS.items():
        assert timing.PEAK_BF16_FLOPS[name.upper()] == peak
    assert timing.peak_bf16_flops("NVIDIA H200") == 989e12
    assert timing.peak_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert timing.peak_bf16_flops("NVIDIA B200") == 2250e12
    assert timing.peak_bf16_flops("NVIDIA H100 PCIe") is timing.peak_bf16_flops("cpu") is None
    assert measure.GPUS == GPUS


# -- failures are rows -------------------------------------------------------------------------


def test_out_of_memory_is_a_row(tmp_path, monkeypatch, capsys):
    def no_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")

    monkeypatch.setitem(measure.MEASUREMENTS, "train", no_memory)
    code, result = run(tmp_path, "train", "tiny", "preln")
    assert code == 1 and result["status"] == "oom"
    assert result["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    assert "preln: oom: " in capsys.readouterr().err

    # In decode the other batch sizes still count.
    original = measure.decode_case

    def second_is_too_large(run: Any, opts: Any, batch: int, *rest: Any) -> dict[str, Any]:
        return original(run, opts, batch, *rest) if batch == 1 else no_memory()  # type: ignore[return-value]

    monkeypatch.setattr(measure, "decode_case", second_is_too_large)
    code, result = run(tmp_path, "decode", "tiny", "preln", "--batches", "1 2")
    assert code == 0 and [c["status"] for c in result["cases"]] == ["ok", "oom"]


def test_a_missing_backend_is_a_row(tmp_path):
    code, result = run(tmp_path, "train", "tiny", "ldm:fast_inference")
    assert code == 1 and result["status"] == "unavailable"
    assert "fast_inference" in result["error"] and "cases" not in result


class OffBoundary(PreLNBoundary):
    """A boundary with a second backend that is off by a factor."""

    factor = 1.0

    def backend_candidates(self, device, dtype):
        return {DepthBackend.flexible: lambda: None}

    def run_backend(self, state, y, norm_weight):
        state, x, _, _ = self.reference(state, y, norm_weight)
        return state, x * self.factor


@dataclass
class OffConfig(PreLNConfig):
    def build(self, *, init_device="cpu", **kwargs):
        del init_device
        return OffBoundary(backend=self.backend, **kwargs)


@pytest.mark.parametrize("gradients", [True, False])
def test_no_number_for_a_wrong_backend(monkeypatch, gradients):
    def check(factor: float) -> dict[str, Any]:
        monkeypatch.setattr(OffBoundary, "factor", factor)
        return measure.check_backend(
            OffConfig(), d_model=32, n_sublayers=4, device=CPU, gradients=gradients
        )

    assert check(1.001)["backend_error"] == pytest.approx(1e-3, rel=0.05)
    assert check(1.001)["backend"] == "flexible"
    for factor in (1.05, float("nan")):
        with pytest.raises(measure.NotMeasured, match="against the reference") as e:
            check(factor)
        assert e.value.status == "wrong"


def test_decode_checks_a_backend_at_its_batch_sizes(monkeypatch):
    def run_backend(self, state, y, norm_weight):
        state, x, _, _ = self.reference(state, y, norm_weight)
        return state, x * (1.5 if y.shape[1] == 3 else 1)

    monkeypatch.setattr(OffBoundary, "run_backend", run_backend)
    check = {"d_model": 32, "n_sublayers": 4, "device": CPU, "gradients": False}
    assert measure.check_backend(OffConfig(), **check, n_tokens=[1, 8])["backend_error"] == 0
    with pytest.raises(measure.NotMeasured, match="of 3 tokens is off by 5"):
        measure.check_backend(OffConfig(), **check, n_tokens=[1, 3])


def test_decode_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_decode, "PROMPTS", (2, 9))
    monkeypatch.setattr(check_decode, "NEW_TOKENS", 4)
    out = tmp_path / "check.json"
    args = ["--gpu", "cpu", "--methods", "preln", "--json", str(out)]
    assert check_decode.main(args) == 0
    (found,) = json.loads(out.read_text())["rows"]
    assert (found["status"], found["tokens_equal"], found["captured"]) == ("ok", True, False)
    assert 0 < found["cached_to_uncached"] < 1e-5
    assert "all ok" in capsys.readouterr().out

    # A cache that is off by one, and a check that breaks.
    resume = InferenceSession.resume
    monkeypatch.setattr(
        InferenceSession, "resume", lambda self, lengths, n: resume(self, lengths - 1, n)
    )
    assert check_decode.main(args) == 1
    assert json.loads(out.read_text())["rows"][0]["status"] == "wrong"
    monkeypatch.setattr(InferenceSession, "resume", None)
    assert check_decode.main(args) == 1
    assert "status=failed" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown GPU"):
        check_decode.main(["--gpu", "abacus"])


def test_no_number_for_a_wrong_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "LOSS_TOLERANCE", 1e-7)
    code, result = run(tmp_path, "train", "tiny", "preln", "--seq", "16", "--tokens", "16")
    assert code == 1 and result["status"] == "wrong" and "random weights give" in result["error"]


def test_profile_has_the_time_of_each_operator(tmp_path):
    arguments = ("--seq", "16", "--tokens", "16", "--steps", "1", "--profile", "1")
    code, result = run(tmp_path, "train", "tiny", "preln", *arguments)
    assert code == 0
    kernels = result["cases"][0]["kernels"]
    times = [k["ms_per_step"] for k in kernels]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    (products,) = (k for k in kernels if k["name"] == "aten::mm")
    # Queries, keys, values, output, gate, up and down of each block, and the LM head; each with two gradients.
    assert products["calls_per_step"] == 3 * (7 * 2 + 1)


def test_a_process_without_a_result(tmp_path):
    log, part = tmp_path / "log.txt", tmp_path / "part.json"

    def result(code: str, timeout: float = 60) -> dict[str, Any]:
        return rounds.run_to_json(rounds.Process([sys.executable, "-c", code], log), part, timeout)

    assert result("print('first'); print('the reason'); print(); raise SystemExit(3)") == {
        "status": "failed",
        "error": "the reason",
    }
    assert result("raise SystemExit(3)")["error"] == "exit code 3"
    killed = result("import os; os.kill(os.getpid(), 9)")
    assert killed["status"] == "failed" and "signal 9" in killed["error"]
    good = f'import pathlib; pathlib.Path({str(part)!r}).write_text(\'{{"status": "ok"}}\')'
    assert result(good) == {"status": "ok"} and not part.exists()
    # A result of the process before is never taken for this one's.
    part.write_text('{"status": "ok"}')
    assert result("raise SystemExit(1)")["status"] == "failed"
    # What it started ends with it.
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys; p = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(pid)!r}).write_text(str(p.pid)); p.wait()"
    )
    assert result(code, 3)["status"] == "timeout"
    for _ in range(50):
        state = Path(f"/proc/{pid.read_text()}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the process that it started still runs")


# -- arguments ---------------------------------------------------------------------------------


def sh(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    # echo in the place of python prints the command.
    return subprocess.run(
        ["bash", str(FOLDER / "rounds.sh"), *args], env={**clean, "PYTHON": "echo", **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_launcher_passes_everything_on():
    done = sh("train", "tiny", "cpu", "2", "a.b=1", METHODS="preln ldm", STEPS="5", DRY_RUN="1")
    assert done.returncode == 0
    assert done.stdout.split() == [
        str(FOLDER / "rounds.py"), *"train tiny cpu 2 a.b=1 --methods preln ldm --steps 5 --dry-run".split(),
    ]  # fmt: skip
    knobs = (*rounds.KNOBS, "methods", "nproc", "timeout", "out")
    done = sh("decode", "1p7b", "h200", "1", COMPILE="0", **{k.upper(): "7" for k in knobs})
    assert "--no-compile" in done.stdout and all(f"--{k} 7" in done.stdout for k in knobs)
    for knob in knobs:
        assert knob.upper() in sh("--help").stdout


@pytest.mark.parametrize(
    ("args", "env", "needle"),
    [
        ((), {}, "need MODE SCALE GPU ROUNDS"),
        (("fly", "tiny", "cpu", "1"), {}, "unknown mode 'fly'"),
        (("train", "tiny", "a100", "1"), {}, "unknown GPU 'a100'"),
        (("train", "tiny", "cpu", "x"), {}, "ROUNDS must be"),
        (("train", "tiny", "cpu", "1"), {"PYTHON": "no-such-python"}, "no 'no-such-python' here"),
    ],
)
def test_the_launcher_refuses_in_one_sentence(args, env, needle):
    done = sh(*args, **env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and needle in line


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        ("train 3b cpu 1", "unknown scale '3b'"),
        ("train tiny cpu 1 --methods moe", "unknown method 'moe'"),
        ("train tiny cpu 1 --methods ldm:quick", "unknown backend 'quick'"),
        ("train tiny cpu 1 --methods ldm,ldm", "name each method once"),
        ("train tiny cpu 1 --steps 0", "--steps must be positive whole numbers, got '0'"),
        ("train tiny cpu 1 --timeout 1,2", "TIMEOUT is one number"),
        ("train tiny cpu 1 --quick", "unknown argument '--quick'"),
        ("prefill tiny cpu 1 --context 8,16", "prefill takes one --context"),
        ("prefill tiny cpu 1 --nproc 2", "prefill runs on one GPU"),
        ("decode tiny cpu 1 --steps 130", "context 64 is too short for 130 steps"),
        ("prefill tiny cpu 1 --chunk 0", "--chunk must be positive"),
    ],
)
def test_bad_input_gets_one_sentence(args, needle, capsys):
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: rounds.main(args.split()))
    assert e.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and needle in line


def test_measure_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(UserError, match="no whole number of sequences"):
        run(tmp_path, "train", "tiny", "ldm", "--seq", "48", "--tokens", "64")
    with pytest.raises(UserError, match=r"model\.nothing"):
        run(tmp_path, "train", "tiny", "ldm", "model.nothing=1")
    with pytest.raises(UserError, match="need MODE SCALE METHOD"):
        measure.main(["train", "tiny"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_a_gpu_that_is_not_here(tmp_path):
    with pytest.raises(UserError, match="no CUDA GPU"):
        rounds.main(["train", "tiny", "h200", "1", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="no CUDA GPU"):
        measure.main(["train", "tiny", "ldm", "--gpu", "h200"])
    with pytest.raises(UserError, match="no CUDA GPU"):
        boundary.main(["--device", "cuda"])


def test_dry_run_prints_the_commands(tmp_path, capsys):
    out = tmp_path / "run"
    args = "train 400m h200 2 --methods preln,ldm:flexible --nproc 8 --batch 2 --dry-run"
    assert rounds.main([*args.split(), "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not out.exists() and len(lines) == 5
    assert "--nproc-per-node 8" in lines[1] and "train 400m preln --gpu h200 --batch 2" in lines[1]
    assert lines[3].startswith("round 2: ") and "ldm:flexible" in lines[3]


def test_a_backend_by_name_and_sizes_reach_the_config():
    opts = measure.parse_args(
        ["train", "400m", "ldm:flexible", "--gpu", "h200", "--seq", "1024", "model.block.depth.d_k=4"]
    )  # fmt: skip
    method = measure.parse_method(opts.method, opts.scale)
    config = measure.build_config(opts, method, 1)
    assert config.model.depth.backend == DepthBackend.flexible and config.model.depth.d_k == 4
    train_module = config.train_module
    assert train_module.max_sequence_length == 1024
    expected = build_experiment("400m", "ldm", 1e-3, gpu="h200").train_module
    assert train_module.rank_microbatch_size == expected.rank_microbatch_size
    assert train_module.compile_model and train_module.autocast_precision == "bfloat16"
    opts = measure.parse_args(["train", "400m", "ldm", "--gpu", "h200", "--no-compile"])
    assert not measure.build_config(opts, measure.Method("ldm"), 1).train_module.compile_model


def test_a_method_with_an_override_is_a_row_of_its_own(tmp_path, capsys):
    label = "ldm:flexible+model.block.depth.window=2+model.block.depth.d_k=4"
    method = measure.parse_method(label, "400m")
    opts = measure.parse_args(["train", "400m", label, "--gpu", "h200"])
    depth = measure.build_config(opts, method, 1).model.depth
    assert (depth.backend, depth.window, depth.d_k) == (DepthBackend.flexible, 2, 4)
    assert method.label == label
    args = ["train", "400m", "h200", "1", "--methods", f"ldm {label}", "--dry-run"]
    assert rounds.main([*args, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "400m ldm --gpu" in lines[1] and f"400m {label} --gpu" in lines[2]
    with pytest.raises(UserError, match=r"'window' in 'ldm.window' is no override"):
        measure.parse_method("ldm+window", "400m")
    # What only one of the methods has is refused before anything is measured.
    args = ["train", "400m", "h200", "1", "model.block.depth.window=2", "--methods", "ldm preln"]
    with pytest.raises(UserError, match=r"^preln: cannot apply .*window=2.* goes behind these"):
        rounds.main(args)


# -- the boundary alone ------------------------------------------------------------------------


def test_byte_floors():
    scale = load_scale("400m")

    def floor(method: str, index: int = 24, **changes: Any):
        return boundary.floor_units(replace(depth_connection(method, scale), **changes), index)

    assert floor("preln") == (4, 5)
    assert floor("ldm") == (18, 27)
    assert floor("ldm_k4") == (10, 15)
    assert floor("mhc") == (10, 19)
    assert floor("attnres_full", 8) == (10, 28)  # 9 sources
    assert floor("attnres_full", 24) == (26, 76)
    # The last block's sum is open: 7 complete ones, the embedding, and the sum with y in it.
    assert floor("attnres_block", 47) == (12, 28)
    assert floor("attnres_block", 43) == (10, 28)  # a new block: y is its sum
    assert floor("delta_rule") is None


def test_boundaries_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "boundary.json"
    args = "--methods preln,attnres_full,ldm --backends reference,fla,tile_kernels --d-model 32 --tokens 8 --sources 3"
    assert boundary.main([*args.split(), "--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    found = {(r["method"], r["backend"]): r for r in rows}
    for method in ("preln", "attnres_full n=3", "ldm"):
        r = found[method, "reference"]
        assert r["status"] == "ok", r["error"]
        for direction in ("forward", "backward"):
            assert r[direction]["host_us"] > 0 and r[direction]["floor_us"] > 0
            assert r[direction]["host_torch_us"] > 0
            if method == "ldm":  # 50 small products and sums
                assert r[direction]["host_torch_us"] < r[direction]["host_us"]
    assert ("preln", "fla") not in found and ("ldm", "tile_kernels") not in found
    assert all(r["status"] == "unavailable" for r in rows if r["backend"] != "reference")
    assert "x floor" in capsys.readouterr().out


def test_boundary_rows_that_fail(monkeypatch):
    (case,) = boundary.build_cases(["ldm"], [32], [9])

    def fail(error: Exception):
        def init(*args: Any) -> None:
            raise error

        monkeypatch.setattr(boundary, "Timed", init)
        return boundary.run_case(case, "flexible", 8, CPU, 1e9, 5)

    assert fail(torch.OutOfMemoryError("full"))["status"] == "oom"
    row = fail(RuntimeError("no such instruction\nat 0x0"))
    assert (row["status"], row["error"]) == ("failed", "RuntimeError: no such instruction")
    assert "failed: RuntimeError" in boundary.line(row)
    with pytest.raises(UserError, match="between 2 and 48"):
        boundary.build_cases(["attnres_full"], [32], [60])
    with pytest.raises(UserError, match="unknown backend 'quick'"):
        boundary.main(["--backends", "quick"])


def test_a_state_of_another_form_passes_the_gate_and_is_timed(monkeypatch):
    """A backend may keep its state as it likes, with tensors that carry no gradient."""

    def run_backend(self, state, y, norm_weight):
        state, x, _, _ = self.reference(state[1:], y, norm_weight)
        return (y.detach(), *state), x

    monkeypatch.setattr(OffBoundary, "run_backend", run_backend)
    check = {"d_model": 32, "n_sublayers": 4, "device": CPU, "gradients": True}
    assert measure.check_backend(OffConfig(), **check)["backend_error"] == 0
    case = boundary.Case("off", OffConfig(), 2, 32, 4)
    result = boundary.run_case(case, "flexible", 8, CPU, 1e9, 4)
    assert result["status"] == "ok", result["error"]
    timed = boundary.Timed(case, "flexible", 8, CPU)
    assert [t.requires_grad for t in timed.sets[0].state] == [False, True]
    assert len(timed.forward(0)) == len(timed.sets[0].gradients) == 2


def test_the_next_process_waits_for_its_turn(tmp_path):
    log, part, began = tmp_path / "log.txt", tmp_path / "part.json", tmp_path / "began"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(measure.__file__).parent)!r}); import measure, pathlib; "
        f"measure.wait_for_turn('decode'); pathlib.Path({str(began)!r}).touch(); "
        f'pathlib.Path({str(part)!r}).write_text(\'{{"status": "ok"}}\')'
    )
    command = [sys.executable, "-c", code]
    processes = rounds.Processes(
        [[sys.executable, "-c", "print(1)"], command, command], log, ahead=True
    )
    first = processes.take()
    assert first.run(60) == (0, "1") and not began.exists()
    second = processes.take()
    assert rounds.run_to_json(second, part, 60) == {"status": "ok"} and began.exists()
    began.unlink()
    processes.close()  # as when the rounds are interrupted: the third has waited in vain
    assert not began.exists()
    assert log.read_text().count("\n$ ") == 2


def test_a_waiting_process_ends_with_the_one_that_started_it(monkeypatch):
    monkeypatch.setenv(measure.WAIT_VARIABLE, "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="has ended"):
        measure.wait_for_turn("decode")
    measure.wait_for_turn("decode")  # not asked for


def test_the_gradients_of_a_whole_model_by_backend(tmp_path, monkeypatch, capsys):
    args = ["--backends", "flexible", "--no-compile", "--tokens", "16", "--length", "8"]
    report = tmp_path / "gradients.json"
    assert check_gradients.main([*args, "--out", str(report)]) == 0
    kinds = json.loads(report.read_text())["backends"]["flexible"]["relative_errors_of_kinds"]
    assert {"w_query", "w_key", "w_forget", "key_0", "weight"} <= kinds.keys()
    assert all(0 < e < 0.3 for e in kinds.values())
    # A backend with one wrong gradient, and one that leaves a parameter out.
    real = check_gradients.gradients

    def wrong(method, *rest, **how):
        loss, found = real(method.replace("flexible", "reference"), *rest, **how)
        if "flexible" in method:
            found = {n: g * (1.5 if n.endswith("w_forget") else 1) for n, g in found.items()}
            found.pop("final_norm.weight")
        return loss, found

    monkeypatch.setattr(check_gradients, "gradients", wrong)
    capsys.readouterr()
    assert check_gradients.main(args) == 1
    out = capsys.readouterr().out
    assert "no gradient, or one too many, of final_norm.weight" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("WRONG")] == ["w_forget"]

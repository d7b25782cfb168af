"""How everything in this folder is timed, and the two speeds (matmul and copy) that say whether the machine was itself."""

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""
Dense BF16 FLOP/s by a part of the device's name, from the vendor's datasheets (SXM boards). The same numbers as
``config_utils.experiment.PEAK_BF16_FLOPS``, which cannot be imported without OLMo-core; a test compares them.
"""
OTHER_BOARDS = ("PCIe", "NVL", "GH200")
"""Boards of the same names with other limits: no peak is claimed for them."""


def peak_bf16_flops(device_name: str) -> float | None:
    """The dense BF16 peak of the GPU that is really here, FLOP/s; ``None`` where it is not known (a CPU too)."""
    if any(board in device_name for board in OTHER_BOARDS):
        return None
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in device_name), None)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def write_json(path: Path, data: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes; the quartiles are inside the data (``method="inclusive"``)."""
    low, _, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else (values[0], values[0], values[0])
    )
    return {
        "median": statistics.median(values),
        "q1": low,
        "q3": high,
        "min": min(values),
        "max": max(values),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def lap_seconds(call: Callable[[], Any], n: int, device: torch.device) -> list[float]:
    """
    Seconds of each of ``n`` calls that follow one another without a synchronisation between them: from the end of the work
    of one to the end of the work of the next, on the device's clock. What the device waits for the host counts.
    """
    if device.type != "cuda":
        laps = []
        for _ in range(n):
            start = time.perf_counter()
            call()
            laps.append(time.perf_counter() - start)
        return laps
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def kernel_times(step: Callable[[], Any], n: int, device: torch.device) -> list[dict[str, Any]]:
    """
    What runs on the device in a step, by name, longest first: ``n`` steps under ``torch.profiler``, after one that is not counted. On a
    CPU, PyTorch's operators.
    """
    from torch.profiler import ProfilerActivity, profile

    on_cpu = device.type == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    step()
    synchronize(device)
    with profile(activities=[activity], acc_events=True) as profiler:
        for _ in range(n):
            step()
        synchronize(device)
    rows = []
    for event in profiler.key_averages():
        us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        if us > 0:
            rows.append(
                {"name": event.key, "ms_per_step": us / 1e3 / n, "calls_per_step": event.count / n}
            )
    return sorted(rows, key=lambda r: -r["ms_per_step"])


def graph_seconds(calls: list[Callable[[], Any]], device: torch.device, replays: int = 20) -> float:
    """
    Seconds of one of ``calls`` on the device: the median over replays of one CUDA graph that holds all of them, so that
    the host's time does not count. Give several calls with inputs of their own where one set would fit in the L2 cache.
    On a CPU, the median of plain calls.
    """
    if device.type != "cuda":
        for call in calls:
            call()
        return statistics.median(lap_seconds(calls[0], max(3, replays // 4), device))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and tunes where a library does so at its first calls
            for call in calls:
                call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    del graph
    return statistics.median(times)


def copy_bytes_per_second(device: torch.device, n_bytes: int | None = None) -> float:
    """
    Bytes read and written per second by an elementwise kernel that copies between four buffers in turn, each far
    larger than the L2 cache. Not ``Tensor.copy_``: in a graph that is a copy node, which reached 2.8 TB/s on an H200
    where kernels reach 4.2.
    """
    n_bytes = n_bytes or ((1 << 29) if device.type == "cuda" else (1 << 24))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n = n_bytes // dtype.itemsize
    buffers = [torch.randn(n, device=device).to(dtype) for _ in range(4)]

    def copy(i: int) -> None:
        torch.neg(buffers[i], out=buffers[(i + 1) % 4])

    seconds = graph_seconds([lambda i=i: copy(i) for i in range(4)], device)  # type: ignore[misc]
    return 2 * n_bytes / seconds


def matmul_flops_per_second(device: torch.device, n: int | None = None) -> float:
    """FLOP/s of an ``n x n x n`` product of random BF16 matrices (FP32 on a CPU); 8192 and 512 are the defaults."""
    n = n or (8192 if device.type == "cuda" else 512)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    for _ in range(3):
        torch.mm(a, b, out=out)
    seconds = statistics.median(lap_seconds(lambda: torch.mm(a, b, out=out), 20, device))
    return 2 * n**3 / seconds


T = TypeVar("T")


class GpuSensors:
    """
    The GPU's clocks, power and temperature while something is timed, from nvidia-smi in a process of its own. A product at full power
    lowers the clock of what runs after it, so that a kernel takes longer in a model than alone. Without a GPU or nvidia-smi there
    are no readings. A context manager: nvidia-smi needs a second to start, so enter it well before the timing.
    """

    QUERIES: ClassVar[dict[str, str]] = {
        "clocks.sm": "sm_clock_mhz",
        "clocks.mem": "memory_clock_mhz",
        "power.draw": "power_w",
        "temperature.gpu": "temperature_c",
    }
    PERIOD_MS = 200

    def __init__(self, device: torch.device):
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._readings: list[tuple[float, dict[str, float]]] = []

    def __enter__(self) -> "GpuSensors":
        if self._device.type != "cuda":
            return self
        command = [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties(self._device).uuid}",
            f"--query-gpu={','.join(self.QUERIES)}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={self.PERIOD_MS}",
        ]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, lines: Any) -> None:
        for line in lines:
            reading = {}
            for name, text in zip(self.QUERIES.values(), line.split(","), strict=False):
                # One that this GPU does not have is "[N/A]".
                with contextlib.suppress(ValueError):
                    reading[name] = float(text)
            if reading:
                self._readings.append((time.perf_counter(), reading))

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def during(self, call: Callable[[], T]) -> tuple[T, dict[str, Any] | None]:
        """
        What ``call`` returns, and what was read while it ran: the number of readings, and for each quantity its :func:`spread`.
        """
        start = time.perf_counter()
        result = call()
        end = time.perf_counter()
        found = [reading for at, reading in list(self._readings) if start <= at <= end]
        if not found:
            return result, None
        summary: dict[str, Any] = {"readings": len(found)}
        for name in self.QUERIES.values():
            if values := [reading[name] for reading in found if name in reading]:
                summary[name] = spread(values)
        return result, summary


def canary(device: torch.device) -> dict[str, Any]:
    """The speed of a fixed product and of a copy, before and after each round: a slow machine shows here first."""
    return {
        "device": device_name(device),
        "matmul_flops_per_s": matmul_flops_per_second(device),
        "copy_bytes_per_s": copy_bytes_per_second(device),
    }

"""
Two gloo processes against one: FSDP, HSDP and DDP of every depth connection, with and without activation
checkpointing and compiled blocks. The processes start once (the import costs more than all cases together).
"""

import math
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from helpers import OWN, VOCAB, next_token_loss, tiny_config
from torch.distributed.tensor import DTensor, distribute_tensor

from olmo_core.config import DType
from olmo_core.distributed import parallel
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.distributed.utils import init_distributed
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig, DepthTransformer, PreLNConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import LDMConfig
from olmo_core.train.train_module.transformer import (
    TransformerActivationCheckpointingConfig,
    TransformerActivationCheckpointingMode,
    TransformerDataParallelConfig,
)
from olmo_core.train.train_module.transformer.common import parallelize_model

WORLD_SIZE = 2
STEPS = 2
CPU = torch.device("cpu")

CONNECTIONS: dict[str, DepthConnectionConfig] = {
    "preln": PreLNConfig(),
    "attnres_full": AttnResConfig(),
    "attnres_block": AttnResConfig(block_size=3),
    # Few iterations: they do not matter here, and compiling 20 of them takes seconds.
    "mhc": HyperConnectionsConfig(sinkhorn_iterations=3),
    "ldm": LDMConfig(d_k=4),
    "ldm_options": LDMConfig(
        d_k=4,
        key_source="input",  # type: ignore[arg-type]
        update="delta",  # type: ignore[arg-type]
        write_every="block",  # type: ignore[arg-type]
        residual="kept",  # type: ignore[arg-type]
    ),
    **OWN,
}
FULL = TransformerActivationCheckpointingConfig(mode=TransformerActivationCheckpointingMode.full)
KEEPS_FP32 = [name for name, c in CONNECTIONS.items() if c.keeps_fp32]


def data() -> torch.Tensor:
    """One sequence for each process and step, ``[STEPS, WORLD_SIZE, T]``."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCAB, (STEPS, WORLD_SIZE, 8), generator=g)


@torch.no_grad()
def move_from_start(model: nn.Module) -> None:
    """Noise on every parameter: at their start, many gradients are exactly zero."""
    for name, p in model.named_parameters():
        g = torch.Generator().manual_seed(
            sum(map(ord, name.replace("_checkpoint_wrapped_module.", "")))
        )
        noise = 0.2 * torch.randn(p.shape, generator=g)
        if isinstance(p, DTensor):
            noise = distribute_tensor(noise, p.device_mesh, p.placements)
        p.add_(noise.to(p.dtype))


def full(t: torch.Tensor) -> torch.Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def by_name(
    model: nn.Module, value: Callable[[nn.Parameter], torch.Tensor | None]
) -> dict[str, Any]:
    out = {}
    for name, p in model.named_parameters():
        v = value(p)
        if v is not None:
            out[name.replace("_checkpoint_wrapped_module.", "")] = full(v)
    return out


def train(model: DepthTransformer, rows: slice) -> dict[str, Any]:
    """:data:`STEPS` steps of AdamW; ``rows`` of each batch are this process's."""
    out: dict[str, Any] = {"start": by_name(model, lambda p: p), "losses": []}
    move_from_start(model)
    # A large epsilon: Adam would turn a gradient that is zero up to rounding into a whole step.
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for batch in data():
        loss = next_token_loss(model(batch[rows]), batch[rows])
        loss.backward()
        if model.metrics_interval:
            out["metrics"] = {
                n: float(v) for n, (v, _) in model.compute_auxiliary_metrics().items()
            }
        out.setdefault("gradients", by_name(model, lambda p: p.grad))
        out["gradient dtypes"] = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
        if rows != slice(None):
            dist.all_reduce(loss)
            loss = loss / WORLD_SIZE
        out["losses"].append(loss.item())
    out["parameters"] = by_name(model, lambda p: p)
    return out


def one_process(depth: DepthConnectionConfig, n_layers: int = 2) -> dict[str, Any]:
    model = tiny_config(depth, n_layers=n_layers).build(init_device="meta")
    model.init_weights(device=CPU)
    return train(model, slice(None))


@contextmanager
def compiled_with(backend: str):
    """OLMo-core compiles with inductor, which needs a C++ compiler and minutes."""
    original = nn.Module.compile
    nn.Module.compile = lambda self, **kwargs: original(self, backend=backend, **kwargs)  # type: ignore
    try:
        yield
    finally:
        nn.Module.compile = original  # type: ignore[method-assign]


def two_processes(
    depth: DepthConnectionConfig,
    dp: TransformerDataParallelConfig,
    ac: TransformerActivationCheckpointingConfig | None = None,
    compile: str | None = None,
    metrics: bool = False,
    watch: Callable[[DepthTransformer], None] | None = None,
) -> dict[str, Any]:
    parallel._WORLD_MESH = None  # one mesh a process, says OLMo-core; here one a case
    # Compiling costs seconds for each block; one block has all the kinds of graph break.
    model = tiny_config(depth, n_layers=1 if compile else 2).build(init_device="meta")
    if compile:
        assert ac is None
        torch._dynamo.reset()
        with compiled_with(compile):
            model.apply_compile()
    parallelize_model(
        model,
        world_mesh=build_world_mesh(dp=dp, device_type="cpu"),
        device=CPU,
        max_sequence_length=8,
        dp_config=dp,
        ac_config=ac,
    )
    model.metrics_interval = int(metrics)
    if watch is not None:
        watch(model)
    rank = dist.get_rank()
    out = train(model, slice(rank, rank + 1))
    if compile:
        out["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return out


def fsdp(**kwargs) -> TransformerDataParallelConfig:
    return TransformerDataParallelConfig(name=DataParallelType.fsdp, **kwargs)


def watch_dtypes(seen: dict[str, set[torch.dtype]]) -> Callable[[DepthTransformer], None]:
    """Record the dtypes that the boundaries' arithmetic sees inside a forward pass."""

    def watch(model: DepthTransformer) -> None:
        def wrap(boundary):
            reference = boundary.reference

            def recorded(state, y, norm_weight):
                for kind, tensors in (
                    ("parameters", boundary.parameters()),
                    ("y", [y]),
                    ("norm weight", [norm_weight]),
                ):
                    seen.setdefault(kind, set()).update(t.dtype for t in tensors)
                out = reference(state, y, norm_weight)
                seen.setdefault("x", set()).add(out[1].dtype)
                for i, t in enumerate(out[0]):
                    seen.setdefault(f"state {min(i, 3)}", set()).add(t.dtype)
                for i, t in enumerate(state):
                    seen.setdefault(f"state {min(i, 3)}", set()).add(t.dtype)
                return out

            boundary.reference = recorded

        for boundary in model.boundaries():
            wrap(boundary)
        model.blocks["1"].attention.register_forward_pre_hook(
            lambda m, args: seen.setdefault("attention", set()).update(
                p.dtype for p in m.parameters()
            )
        )

    return watch


def bf16_fsdp(depth: DepthConnectionConfig, **kwargs) -> dict[str, Any]:
    seen: dict[str, set[torch.dtype]] = {}
    out = two_processes(depth, fsdp(param_dtype=DType.bfloat16), watch=watch_dtypes(seen), **kwargs)
    return {**out, "dtypes": seen}


def ddp_in_bf16(depth: DepthConnectionConfig) -> str:
    dp = TransformerDataParallelConfig(name=DataParallelType.ddp, param_dtype=DType.bfloat16)
    try:
        two_processes(depth, dp)
    except OLMoConfigurationError as error:
        return str(error)
    return ""


def cases() -> dict[str, Callable[[], Any]]:
    ddp = TransformerDataParallelConfig(name=DataParallelType.ddp)
    hsdp = TransformerDataParallelConfig(name=DataParallelType.hsdp, num_replicas=2)
    out: dict[str, Callable[[], Any]] = {}
    for name, c in CONNECTIONS.items():
        out[f"one {name}"] = lambda c=c: one_process(c)
        out[f"fsdp {name}"] = lambda c=c: two_processes(
            c, fsdp(param_dtype=DType.float32), metrics=True
        )
        out[f"bf16 {name}"] = lambda c=c: bf16_fsdp(c)
        out[f"bf16 checkpointed {name}"] = lambda c=c: bf16_fsdp(c, ac=FULL)
    for name in ("ldm", "mhc"):
        c = CONNECTIONS[name]
        out[f"hsdp {name}"] = lambda c=c: two_processes(c, hsdp)
        out[f"fine {name}"] = lambda c=c: two_processes(
            c, fsdp(wrapping_strategy="fine_grained", prefetch_factor=1)
        )
        out[f"ddp {name}"] = lambda c=c: two_processes(c, ddp)
    # With AOT autograd, whose backward graphs keep gathered weights, where it costs least.
    for name, backend in (("ldm", "aot_eager"), ("mhc", "eager")):
        c = CONNECTIONS[name]
        out[f"one block {name}"] = lambda c=c: one_process(c, n_layers=1)
        out[f"compiled {name}"] = lambda c=c, b=backend: two_processes(c, fsdp(), compile=b)
    for name in ("preln", "ldm", "mhc"):
        out[f"ddp in bf16 {name}"] = lambda c=CONNECTIONS[name]: ddp_in_bf16(c)
    return out


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(WORLD_SIZE), NUM_NODES="1",
    )  # fmt: skip
    init_distributed(
        backend="gloo",
        # A process that fails leaves the other one waiting.
        timeout=timedelta(seconds=300),
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=WORLD_SIZE,
        rank=rank,
    )
    results: dict[str, Any] = {}
    for name, case in cases().items():
        try:
            start = time.process_time()
            results[name] = case()
            if rank == 0:
                print(f"{name}: {time.process_time() - start:.2f} s of CPU", flush=True)
        except Exception:
            # The processes may be out of step now: stop here.
            results[name] = traceback.format_exc()
            break
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(worker, args=(port, str(folder)), nprocs=WORLD_SIZE, start_method="spawn")
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]

    def get(name: str) -> Any:
        for rank in ranks:
            for case, value in rank.items():
                if isinstance(value, str) and value.startswith("Traceback"):
                    pytest.fail(f"case {case!r} failed:\n{value}")
        return ranks[0][name]

    return get


def assert_same_training(actual: dict, expected: dict, tolerance: float = 2e-5) -> None:
    assert actual["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    for kind in ("start", "gradients", "parameters"):
        assert actual[kind].keys() == expected[kind].keys()
        # A gradient that is zero up to rounding is measured against the largest one.
        floor = 1e-4 * max(float(v.abs().max()) for v in expected[kind].values())
        for name, value in expected[kind].items():
            scale = max(float(value.abs().max()), floor)
            error = float((actual[kind][name] - value).abs().max()) / scale
            limit = 0.0 if kind == "start" else tolerance
            assert error <= limit, f"{kind} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("name", CONNECTIONS)
def test_fsdp_equals_one_process(name, results):
    """
    Initial values, loss, gradients and two optimizer steps. The pass that measures the connection runs between the
    backward pass and the optimizer step, as in OLMo-core's train module, and must leave no gathered weights behind.
    """
    actual = results(f"fsdp {name}")
    assert_same_training(actual, results(f"one {name}"))
    assert actual["metrics"] and all(map(math.isfinite, actual["metrics"].values()))


@pytest.mark.parametrize("case", ["hsdp", "ddp", "fine"])
@pytest.mark.parametrize("name", ["ldm", "mhc"])
def test_other_data_parallelism_equals_one_process(case, name, results):
    assert_same_training(results(f"{case} {name}"), results(f"one {name}"))


@pytest.mark.parametrize("name", ["ldm", "mhc"])
def test_fsdp_with_compiled_blocks_equals_one_process(name, results):
    """The FP32 unit inside a block breaks the graph; the results must not change."""
    compiled = results(f"compiled {name}")
    assert compiled["graphs"] > 0
    assert_same_training(compiled, results(f"one block {name}"))


@pytest.mark.parametrize("name", CONNECTIONS)
@pytest.mark.parametrize("case", ["bf16", "bf16 checkpointed"])
def test_bf16_fsdp_keeps_the_boundary_in_fp32(case, name, results):
    out = results(f"{case} {name}")
    seen = out["dtypes"]
    fp32, bf16 = {torch.float32}, {torch.bfloat16}
    if name in KEEPS_FP32:
        assert seen["parameters"] == fp32
    assert seen["y"] == seen["x"] == seen["norm weight"] == seen["attention"] == bf16
    if name.startswith("mhc"):
        assert seen["state 0"] == bf16
        assert seen["state 1"] == seen["state 2"] == fp32
    elif name not in OWN:
        assert all(dtypes == bf16 for kind, dtypes in seen.items() if kind.startswith("state"))
    assert out["gradient dtypes"] == fp32
    expected = results(f"one {name}")
    assert out["losses"] == pytest.approx(expected["losses"], rel=2e-2)
    assert out["losses"] != expected["losses"]


@pytest.mark.parametrize("name", CONNECTIONS)
def test_bf16_checkpointing_changes_nothing(name, results):
    plain, checkpointed = results(f"bf16 {name}"), results(f"bf16 checkpointed {name}")
    assert plain["losses"] == checkpointed["losses"]
    for key, value in plain["gradients"].items():
        assert torch.equal(value, checkpointed["gradients"][key]), key


@pytest.mark.parametrize("name", ["preln", "ldm", "mhc"])
def test_ddp_in_bf16_is_refused_where_it_would_cast_fp32_parameters(name, results):
    message = results(f"ddp in bf16 {name}")
    if name == "preln":
        assert message == ""
    else:
        assert "must stay FP32" in message and "FSDP" in message

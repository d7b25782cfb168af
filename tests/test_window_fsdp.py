"""LDM's windows under FSDP2: two gloo processes against one, PyTorch in the place of the kernels."""

import os
import socket
import warnings

import helpers
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_ldm_fast import EPS, SlowKernels

from olmo_core.nn.depth.connection import DepthBackend
from olmo_core.nn.depth.model import DepthTransformer
from olmo_core.nn.ldm import LDMConfig
from olmo_core.nn.ldm.backends.fast import launch_table, ops
from olmo_core.nn.ldm.module import LDMBoundary

CPU = torch.device("cpu")
WORLD_SIZE, MICRO_BATCHES = 2, 2


def install_slow_kernels(memory_dtype: str, whole: bool):
    """A model whose windows of 3 end in the middle of a block; this process keeps the slow kernels."""
    config = helpers.tiny_config(
        LDMConfig(window=3, memory_dtype=memory_dtype), d_model=64, eps=EPS
    )
    slow = SlowKernels(config.depth, 64)
    launch_table.GATHER = {(64, 8)} if whole else set()
    ops._launch_window_forward = slow.forward
    ops._launch_window_backward = slow.backward

    def select(model, y):
        for b in model.modules():
            if isinstance(b, LDMBoundary):
                b.selected_backend = DepthBackend.reference if b.is_first else DepthBackend.fast

    DepthTransformer._select_backends = select
    return config


def gradients(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    for _ in range(MICRO_BATCHES):
        helpers.next_token_loss(model(ids), ids).backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        )
        for name, p in model.named_parameters()
    }


def work(rank: int, checkpointing: bool, memory_dtype: str, whole: bool, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    config = install_slow_kernels(memory_dtype, whole)
    sharded, alone = (config.build(init_device="meta") for _ in range(2))
    if checkpointing:
        sharded.apply_activation_checkpointing(mode="full")
    sharded.apply_fsdp(dist.device_mesh.init_device_mesh("cpu", (WORLD_SIZE,)))
    for model in (sharded, alone):
        model.init_weights(device=CPU, max_seq_len=16)
    ids = helpers.tokens()
    with warnings.catch_warnings():
        # FSDP2 says so when a view comes back from a module that it wraps.
        warnings.filterwarnings("error", message=".*view.*")
        ours = gradients(sharded, ids[rank : rank + 1])
    helpers.assert_same_gradients(ours, gradients(alone, ids[:WORLD_SIZE]), 1e-4)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("checkpointing", "memory_dtype", "whole"),
    [(False, "model", False), (True, "model", False), (True, "float8", True)],
)
def test_two_processes_have_the_gradients_of_one(checkpointing, memory_dtype, whole):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(checkpointing, memory_dtype, whole, port), nprocs=WORLD_SIZE)

import os
from collections.abc import Iterator

import pytest
import torch

# One of several workers (pytest -n): each has a core, and so have the processes that it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

# Triton decides at import whether it interprets: before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def poison_empty_memory() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)

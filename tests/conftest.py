import os
from collections.abc import Iterator

import pytest
import torch

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

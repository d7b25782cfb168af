"""
What only a GPU can show, for the kernels of every method: the same bits on a stream of its own and from a CUDA graph, and
addresses beyond 2^31 elements (LDM's and mHC's are beside their other tests).
"""

from collections.abc import Callable

import pytest
import torch

from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig, PreLNConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import LDMConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
EPS = 1e-6
N_BOUNDARIES = 7
CONFIGS: dict[str, Callable[[], DepthConnectionConfig]] = {
    "preln": PreLNConfig,
    "attnres_full flexible": lambda: AttnResConfig(block_size=1, backend="flexible"),  # type: ignore[arg-type]
    "attnres_block flexible": lambda: AttnResConfig(block_size=2, backend="flexible"),  # type: ignore[arg-type]
    "mhc flexible": lambda: HyperConnectionsConfig(backend="flexible"),  # type: ignore[arg-type]
    "ldm flexible": lambda: LDMConfig(backend="flexible"),  # type: ignore[arg-type]
    "ldm fast": lambda: LDMConfig(backend="fast"),  # type: ignore[arg-type]
    "ldm_k4 fast": lambda: LDMConfig(d_k=4, backend="fast"),  # type: ignore[arg-type]
}


class Stack:
    """Boundaries away from their start with identity sublayers, forward and backward."""

    def __init__(self, config: DepthConnectionConfig, d: int, n_tokens: int, n: int = N_BOUNDARIES):
        generator = torch.Generator(device="cuda").manual_seed(0)
        self.boundaries = []
        for index in range(n):
            boundary = config.build(
                d_model=d, index=index, n_sublayers=n - 1, eps=EPS, init_device="cuda"
            )
            boundary.init_weights(generator)
            with torch.no_grad():
                for p in boundary.parameters():
                    p.add_(0.02 * torch.randn(p.shape, generator=generator, device="cuda"))
            self.boundaries.append(boundary)

        def draw() -> torch.Tensor:
            shape = (1, n_tokens, d)
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self.ys = [draw().requires_grad_() for _ in range(n)]
        self.gradient = draw()
        self.gain = torch.ones(d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.leaves = [*self.ys, self.gain] + [p for b in self.boundaries for p in b.parameters()]

    def __call__(self) -> list[torch.Tensor]:
        state: tuple[torch.Tensor, ...] = ()
        xs = []
        for boundary, y in zip(self.boundaries, self.ys, strict=True):
            state, x = boundary(state, y, self.gain)
            xs.append(x)
        gradients = torch.autograd.grad(
            xs, self.leaves, [self.gradient] * len(xs), allow_unused=True
        )
        return [*(x.detach() for x in xs), *(g for g in gradients if g is not None)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.isfinite(e).all(), i
        assert torch.equal(a, e), (i, (a.float() - e.float()).abs().max().item())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_side_stream_and_a_cuda_graph_give_the_same_bits(name):
    stack = Stack(CONFIGS[name](), 1024, 513)
    expected = stack()
    torch.cuda.synchronize()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work in flight on the default stream would overtake kernels that were launched there by mistake.
        on_stream = stack()
    stream.synchronize()
    assert_same(on_stream, expected)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stack()
    for t in captured:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, expected)


def test_attnres_addresses_beyond_2_to_the_31():
    """Tokens do not mix, so the last ones must come out as if they were alone."""
    d, n_tokens, last = 2048, 1_060_000, 64
    assert n_tokens * d > 2**31
    config = AttnResConfig(block_size=1, backend="flexible")  # type: ignore[arg-type]
    full = Stack(config, d, n_tokens, 3)
    alone = Stack(config, d, last, 3)
    with torch.no_grad():
        for a, f in zip(alone.ys, full.ys, strict=True):
            a.copy_(f[:, -last:])
        alone.gradient.copy_(full.gradient[:, -last:])
    n = len(full.boundaries)
    for i, (f, a) in enumerate(zip(full(), alone(), strict=True)):
        if i < n or f.shape == full.ys[0].shape:  # outputs and sources' gradients
            assert torch.equal(f[:, -last:], a), i


def test_sinkhorn_maps_of_the_kernel_are_doubly_stochastic(record_property):
    stack = Stack(HyperConnectionsConfig(backend="flexible"), 1024, 513)  # type: ignore[arg-type]
    state: tuple[torch.Tensor, ...] = ()
    worst = {"row": 0.0, "column": 0.0}
    spread = []
    with torch.no_grad():
        for boundary, y in zip(stack.boundaries, stack.ys, strict=True):
            state, _ = boundary(state, y, stack.gain)
            for t in state:
                if t.shape[-2:] == (4, 4):
                    maps = t.double()
                    worst["row"] = max(worst["row"], float((maps.sum(-1) - 1).abs().max()))
                    worst["column"] = max(worst["column"], float((maps.sum(-2) - 1).abs().max()))
                elif t.shape[-2:] == (4, 1024):
                    streams = t.float()
                    spread.append(
                        float((streams - streams.mean(-2, keepdim=True)).norm() / streams.norm())
                    )
    record_property("largest error of a row sum", worst["row"])
    record_property("largest error of a column sum", worst["column"])
    print(
        f"Sinkhorn: row sums within {worst['row']:.1e}, column sums within {worst['column']:.1e} of 1; spread of streams {spread}"
    )
    # The last half-step normalises rows; the columns are as far as 20 iterations got them.
    assert worst["row"] < 1e-5 and 0 < worst["column"] < 1e-2
    assert spread and spread[0] == 0 and min(spread[2:]) > 1e-3

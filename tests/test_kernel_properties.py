"""
Properties of the Triton kernels of every method: random options, shapes and strides, and extreme values. A stack of boundaries
runs in FP32 through the kernels, in FP32 through the reference and in FP64 through the reference; the kernels may be as far from
FP64 as the reference in FP32 is. Natively on a GPU, through Triton's interpreter elsewhere.
"""

import random
from typing import Any

import pytest
import torch
from helpers import LDM_VALUES

from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.nn.attnres import AttnResConfig
from olmo_core.nn.depth import DepthConnectionConfig
from olmo_core.nn.hyper_connections import HyperConnectionsConfig
from olmo_core.nn.ldm import LDMConfig

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poison_empty_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-6
MODES = ("normal", "zeros", "large", "small", "one large column", "one large token", "a zero token")
FACTOR, FLOOR = 4.0, 2e-5
"""How much worse than the reference in FP32: other orders of sums differ by that; FP32 resolves 6e-8 and sums lose some of it."""
OUTLIER_FLOOR = 4e-3
"""
With one value 1e4 times the others. The kernels take the inner product of a mixture and its gradient from the mixture, as flash
attention does; the reference sums over the sources, where a large column cancels exactly. Seen: 1.9e-3, what BF16 rounds.
"""
SIGNIFICANT = 1e-3
"""Gradients of less than this part of the largest one are compared with that part: what cancels to nothing has no digits."""


def draw_config(method: str, rng: random.Random) -> DepthConnectionConfig:
    if method == "attnres":
        return AttnResConfig(block_size=rng.randint(1, 4), backend="flexible")
    if method == "mhc":
        return HyperConnectionsConfig(
            n_streams=rng.choice((2, 4)),
            collapse=rng.choice(("head", "sum")),
            residual_map=rng.choice(("sinkhorn", "identity")),
            phi_init_std=0.02,
            backend="flexible",
        )
    while True:
        options: dict[str, Any] = {k: rng.choice(v) for k, v in LDM_VALUES.items()}
        options["d_k"] = rng.choice((1, 2, 4, 8))
        try:
            return LDMConfig(**options, backend="flexible")
        except OLMoConfigurationError:
            continue  # options that exclude each other


def draw_outputs(
    mode: str, n: int, shape: tuple[int, int], d: int, generator
) -> list[torch.Tensor]:
    """The sublayers' outputs, FP64, not contiguous."""
    ys = []
    for i in range(n):
        wide = torch.randn(*shape, 2 * d, generator=generator, dtype=torch.float64)
        y = wide[..., :d] if i % 2 else wide[..., ::2]
        if mode == "zeros":
            y = y * 0
        elif mode == "large":
            y = y * 1e4
        elif mode == "small":
            y = y * 1e-30  # its square is below FP32's smallest number
        elif mode == "one large column":
            y = torch.cat([y[..., :1] * 1e4, y[..., 1:]], dim=-1)
        elif mode == "one large token" and i == 1:
            y = torch.cat([y[:, :1] * 1e4, y[:, 1:]], dim=1)
        elif mode == "a zero token":
            y = torch.cat([y[:, :1] * 0, y[:, 1:]], dim=1)
        # Exact in FP32, so that all three runs have the same inputs.
        ys.append(y.float().double())
    return ys


def run(boundaries, ys, gain, dtype, reference: bool) -> dict[str, torch.Tensor]:
    ys = [y.to(DEVICE, dtype).requires_grad_() for y in ys]
    gain = gain.to(DEVICE, dtype).requires_grad_()
    state: tuple[torch.Tensor, ...] = ()
    xs = []
    for boundary, y in zip(boundaries, ys, strict=True):
        out = boundary.reference(state, y, gain) if reference else boundary(state, y, gain)
        state = out[0]
        xs.append(out[1])
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(x.shape, generator=generator).to(x) for x in xs]
    parameters = {f"{i} {n}": p for i, b in enumerate(boundaries) for n, p in b.named_parameters()}
    inputs = {f"y {i}": y for i, y in enumerate(ys)} | {"gain": gain} | parameters
    gradients = torch.autograd.grad(xs, list(inputs.values()), given, allow_unused=True)
    found = {f"x {i}": x.detach() for i, x in enumerate(xs)}
    for (name, t), g in zip(inputs.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(t) if g is None else g
    return found


def stack(config, n: int, d: int, seed: int, std: float = 0.3, extreme: bool = False) -> list:
    boundaries = []
    for index in range(n):
        b = config.build(d_model=d, index=index, n_sublayers=n - 1, eps=EPS, init_device="cpu")
        generator = torch.Generator().manual_seed(seed + index)
        with torch.no_grad():
            b.init_weights(generator)
            for name, p in b.named_parameters():
                p.add_(std * torch.randn(p.shape, generator=generator))
                if extreme and name.startswith(("b_", "bias")):
                    p.copy_(40.0 * torch.randn(p.shape, generator=generator).sign())
        boundaries.append(b.to(DEVICE))
    return boundaries


def error(a: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """Relative to the norm of what is expected, or to ``least`` if that is larger."""
    norm = max(float(expected.norm()), least)
    return float((a.double() - expected).norm()) / norm if norm else float(a.double().norm())


def compare(config, d: int, shape: tuple[int, int], mode: str, seed: int, extreme=False) -> None:
    n = 5
    generator = torch.Generator().manual_seed(seed)
    ys = draw_outputs(mode, n, shape, d, generator)
    gain = 1 + 0.1 * torch.randn(d, generator=generator, dtype=torch.float64)
    boundaries = stack(config, n, d, seed, extreme=extreme)
    kernels = run(boundaries, ys, gain, torch.float32, reference=False)
    reference = run(boundaries, ys, gain, torch.float32, reference=True)
    truth = run([b.double() for b in boundaries], ys, gain, torch.float64, reference=True)
    what = f"{config}, d={d}, {shape}, {mode}, seed={seed}"
    largest = max(float(t.norm()) for name, t in truth.items() if name.startswith("gradient"))
    floor = OUTLIER_FLOOR if mode.startswith("one large") else FLOOR
    for name, t in truth.items():
        assert torch.isfinite(kernels[name]).all(), f"{name} is not finite: {what}"
        least = SIGNIFICANT * largest if name.startswith("gradient") else 0.0
        ours, theirs = error(kernels[name], t, least), error(reference[name], t, least)
        assert ours <= FACTOR * theirs + floor, f"{name}: {ours:.1e} against {theirs:.1e}: {what}"


@pytest.mark.parametrize("method", ["ldm", "attnres", "mhc"])
@pytest.mark.parametrize("mode", MODES)
def test_random_options_shapes_and_values(method, mode):
    rng = random.Random(f"{method} {mode}")
    for _ in range(2):
        config = draw_config(method, rng)
        d = 8 * rng.randint(2, 9)
        shape = (rng.randint(1, 2), rng.randint(2, 5))
        compare(config, d, shape, mode, rng.randint(0, 10**6))


@pytest.mark.parametrize("method", ["ldm", "mhc"])
def test_gates_at_the_ends_of_their_range(method):
    """Biases of +-40: softmaxes are one-hot and sigmoids 0 or 1 to FP32; their gradients are finite and right."""
    rng = random.Random(method)
    config = (
        LDMConfig(backend="flexible")
        if method == "ldm"
        else HyperConnectionsConfig(backend="flexible")
    )
    compare(config, 24, (1, 5), "normal", rng.randint(0, 10**6), extreme=True)

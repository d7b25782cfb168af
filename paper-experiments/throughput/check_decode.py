"""
Whether decode on this GPU is right, and what a step takes: run it before decode is measured.

    python paper-experiments/throughput/check_decode.py --json OUT.json

1. Kernels: the shared inference kernels against FP64, the cache beyond a row's length full of NaN.
2. Steps: a model of each method with random weights in BF16 continues prompts of different lengths (padded on the left) by
   32 tokens: the tokens and logits of the CUDA graph equal those of eager steps, and the logits are those of a forward pass
   without a cache within BF16's rounding.
3. Time of a step with the graph and without it, at batch 1 and 64.
4. Time of the decode attention alone for a few launch settings, and of the products that share an input one by one and as one,
   beside the least for as many bytes.

On a CPU the first two run with a tiny model, to see that this file works.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import measure
import timing
import torch

from config_utils.errors import UserError, run_cli

METHODS = "preln ldm ldm_k4 mhc attnres_block attnres_full"
"""Those that take longest to compile come last; ``OWN_METHODS`` after them."""
NEW_TOKENS = 32
PROMPTS = (9, 300, 64)
KERNEL_TOLERANCE = 1e-2
"""Largest error over the largest value, BF16."""
NOISE_FACTOR, LOGITS_LIMIT = 2.0, 0.12
"""
Logits with a cache and without one, both BF16, may differ by this much times the distance of the latter from the same model in
FP32: each has that distance by roundings of its own. Whatever the noise, a cache that is off by one gives 0.14 to 0.79.
"""
REPLAY_TOLERANCE = 1e-3
"""The same, for a replayed step and an eager one: the same kernels."""


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value; infinite if there is a NaN."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(torch.nan_to_num(error, nan=float("inf")))


def say(text: str) -> None:
    print(text, flush=True)


class Report:
    """Rows as they come, each printed; a check that fails or raises is a row too."""

    def __init__(self, budget: float):
        self.end = time.perf_counter() + budget
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if time.perf_counter() > self.end:
            row: dict[str, Any] = {"status": "no time left"}
        else:
            try:
                row = {"status": "ok"} | call()
            except torch.OutOfMemoryError as e:
                row = {"status": "oom", "error": measure.first_line(e)}
            except Exception as e:
                # Whatever it is, the other rows are worth having.
                row = {"status": "failed", "error": measure.first_line(e)}
        row = {"name": name} | row
        self.rows.append(row)
        say(
            "  ".join(
                f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
            )
        )
        return row


# 1. Kernels.


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """``q`` ``[B, HG, E]``, caches ``[B, S, H, E]``: FP64, a row at a time."""
    rows = []
    n_groups = q.shape[1] // k.shape[2]
    for b, slot in enumerate(slots.tolist()):
        keys, values = (
            t[b, : slot + 1].double().repeat_interleave(n_groups, dim=1) for t in (k, v)
        )
        p = torch.einsum("he,she->hs", q[b].double(), keys) * q.shape[-1] ** -0.5
        rows.append(torch.einsum("hs,she->he", p.softmax(dim=-1), values))
    return torch.stack(rows)


def check_attention(
    n_heads: int, n_groups: int, head_dim: int, n_slots: int, lengths: list[int], device: Any
) -> dict[str, Any]:
    from olmo_core.nn.depth import triton_inference_ops as ops

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n = len(lengths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    slots = torch.tensor(lengths, device=device).unsqueeze(1)
    q, k, v = (draw(n, 1, h, head_dim) for h in (n_heads * n_groups, n_heads, n_heads))
    k_cache, v_cache = (draw(n, n_slots, n_heads, head_dim) for _ in range(2))
    beyond = torch.arange(n_slots, device=device) >= slots
    k_cache[beyond] = v_cache[beyond] = float("nan")
    out = ops.decode_attention(q, k, v, slots, None, None, k_cache, v_cache, head_dim**-0.5)
    again = ops.decode_attention(q, k, v, slots, None, None, k_cache, v_cache, head_dim**-0.5)
    error = error_of(out[:, 0], reference_attention(q[:, 0], k_cache, v_cache, slots[:, 0]))
    ok = error <= KERNEL_TOLERANCE and torch.equal(out, again)
    return {"status": "ok" if ok else "wrong", "error": error, "repeats": torch.equal(out, again)}


def check_pointwise(device: torch.device) -> dict[str, Any]:
    """RoPE into the cache, SwiGLU's product and PreLN's boundary."""
    from olmo_core.nn.depth import triton_inference_ops as ops
    from olmo_core.nn.depth.connection import rms_norm
    from olmo_core.nn.rope import RotaryEmbedding

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    rope = RotaryEmbedding(head_size=64)
    table = rope.get_buffers(50, device)
    q, k, v = draw(3, 7, 8, 64), draw(3, 7, 4, 64), draw(3, 7, 4, 64)
    k_cache, v_cache = draw(3, 50, 4, 64), draw(3, 50, 4, 64)
    slots = torch.arange(20, 27, device=device).unsqueeze(0)
    assert table.pos_cos is not None and table.pos_sin is not None
    turned = ops.rope_store(q, k, v, slots, table.pos_cos, table.pos_sin, k_cache, v_cache)
    cos, sin = table.pos_cos[20:27], table.pos_sin[20:27]
    expected_q, expected_k = rope(q, k, head_first=False, pos_cos=cos, pos_sin=sin)
    a, b = draw(5, 2736), draw(5, 2736)
    h, y, weight = draw(5, 1024), draw(5, 1024), draw(1024)
    h_out, x = ops.add_rms_norm(h, y, weight, 1e-6)
    errors = {
        "rope_q": error_of(turned, expected_q),
        "rope_k": error_of(k_cache[:, 20:27], expected_k),
        "stored_v": error_of(v_cache[:, 20:27], v),
        "silu_mul": error_of(ops.silu_mul(a, b), torch.nn.functional.silu(a.double()) * b.double()),
        "h": error_of(h_out, h + y),
        "x": error_of(x, rms_norm(h + y, weight, 1e-6, torch.float32)),
    }
    worst = max(errors.values())
    return {"status": "ok" if worst <= KERNEL_TOLERANCE else "wrong", **errors}


# 2 and 3. Steps.


def build(method: str, scale: str, gpu: str, device: torch.device) -> Any:
    """
    A model whose every path matters: at its start the boundaries' maps are zero and attention looks at everything alike, so
    that a cache that is off by one changes the logits less than BF16 does.
    """
    opts = measure.parse_args(["decode", scale, method, "--gpu", gpu])
    config = measure.build_config(opts, measure.parse_method(method, scale), 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = measure.inference_model(config.model, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for boundary in model.boundaries():
        measure.randomize(boundary, generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "boundary" in name or p.ndim < 2:
                continue
            p.normal_(std=1.0 if "embeddings" in name else p.shape[-1] ** -0.5)
    return model


@torch.inference_mode()
def check_steps(model: Any, device: torch.device) -> dict[str, Any]:
    from config_utils.scales import VOCAB_SIZE
    from olmo_core.generate.generation_module import GenerationConfig
    from olmo_core.nn.depth.generation import DepthGenerationModule

    longest = max(PROMPTS)
    ids = measure.random_tokens(len(PROMPTS), longest, 0).to(device)
    mask = torch.ones_like(ids)
    for row, n in enumerate(PROMPTS):
        mask[row, : longest - n] = 0
    module = DepthGenerationModule.from_model(
        model,
        GenerationConfig(
            pad_token_id=VOCAB_SIZE - 1, eos_token_id=10 * VOCAB_SIZE, max_new_tokens=NEW_TOKENS
        ),
    )

    def generate(cuda_graph: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
        out, logits, _ = module.generate_batch(
            ids, attention_mask=mask, return_logits=True, log_timing=False,
            cuda_graph=cuda_graph, prefill_chunk=128,
        )  # fmt: skip
        assert logits is not None and module.last_timing is not None
        return out, logits, module.last_timing.cuda_graph

    eager, eager_logits, _ = generate(False)
    graph, graph_logits, captured = generate(True)
    again, again_logits, _ = generate(True)  # the same graph once more
    module.free_inference_cache()
    exact = copy.deepcopy(model).float()
    uncached = noise = 0.0
    for row, n in enumerate(PROMPTS):
        text = graph[row : row + 1, longest - n :]
        expected = model(text)[:, n - 1 : -1]
        uncached = max(uncached, error_of(graph_logits[row : row + 1], expected))
        noise = max(noise, error_of(expected, exact(text)[:, n - 1 : -1]))
    del exact
    found: dict[str, Any] = {
        "captured": captured,
        "tokens_equal": torch.equal(eager, graph),
        "graph_to_eager": error_of(graph_logits, eager_logits),
        "repeats": torch.equal(again, graph) and torch.equal(again_logits, graph_logits),
        "cached_to_uncached": uncached,
        "uncached_to_fp32": noise,
        "backend": sorted(
            {measure.running_backend(b, gradients=False) for b in model.boundaries()}
        ),
    }
    ok = (
        found["tokens_equal"]
        and found["repeats"]
        and found["graph_to_eager"] <= REPLAY_TOLERANCE
        and uncached <= min(NOISE_FACTOR * noise + REPLAY_TOLERANCE, LOGITS_LIMIT)
        and captured == (device.type == "cuda")
    )
    return {"status": "ok" if ok else "wrong", **found}


@torch.inference_mode()
def time_steps(model: Any, batch: int, context: int, device: torch.device) -> dict[str, Any]:
    from olmo_core.nn.depth.session import InferenceSession

    n = 40
    session = InferenceSession(model, batch, context + 3 * n)
    measure.fill_caches(session)
    row: dict[str, Any] = {"prepare_seconds": session.prepare_seconds}
    with session.attached():
        for name, replay in (("graph_us", True), ("eager_us", False)):
            session.resume(torch.full_like(session.lengths, context), context)
            for _ in range(3):
                session.step(replay=replay)
            laps = timing.lap_seconds(lambda r=replay: session.step(replay=r), n, device)  # type: ignore[misc]
            row[name] = 1e6 * timing.spread(laps)["median"]
    n_bytes = measure.decode_bytes(model, batch, context, 2)
    return {**row, "graph_TB_s": n_bytes / row["graph_us"] / 1e6}


# 4. The attention alone.


@torch.inference_mode()
def time_attention(
    n_heads: int, n_groups: int, head_dim: int, batch: int, context: int, device: torch.device
) -> dict[str, Any]:
    """Microseconds of one layer for each launch setting; several caches in turn, so that none stays in the L2 cache."""
    from olmo_core.nn.depth import triton_inference_ops as ops

    n_bytes = 4 * batch * context * n_heads * head_dim
    sets = max(2, min(16, 3 * 2**26 // n_bytes + 1))
    dtype = torch.bfloat16
    shape = (batch, context + 64, n_heads, head_dim)
    caches = [
        [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)] for _ in range(sets)
    ]
    q = torch.randn(batch, 1, n_heads * n_groups, head_dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, 1, n_heads, head_dim, device=device, dtype=dtype) for _ in range(2))
    slots = torch.full((batch, 1), context - 1, device=device)
    cos, sin = (torch.rand(context + 64, head_dim, device=device) for _ in range(2))
    row: dict[str, Any] = {"floor_us": 1e6 * n_bytes / 4.25e12}
    base = ops.ATTENTION
    for label, launch in {
        "default": base,
        "128x4x2": replace(base, slots=128, stages=2),
        "64x8x3": replace(base, warps=8),
        "64x4x4": replace(base, stages=4),
        "half the parts": replace(base, programs_per_sm=4),
    }.items():

        def call(i: int, launch: Any = launch) -> Callable[[], Any]:
            k_cache, v_cache = caches[i]
            return lambda: ops.decode_attention(
                q, k, v, slots, cos, sin, k_cache, v_cache, head_dim**-0.5, launch=launch
            )

        try:
            seconds = timing.graph_seconds([call(i) for i in range(sets)], device, replays=10)
            row[label] = 1e6 * seconds
        except Exception as e:
            row[label] = measure.first_line(e)

    mask = torch.zeros(1, 1, n_groups, context, device=device, dtype=dtype)
    grouped = q.view(batch, n_heads, n_groups, head_dim)

    def sdpa(i: int) -> torch.Tensor:
        """Without RoPE and the store."""
        keys, values = (t[:, :context].transpose(1, 2) for t in caches[i])
        return torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask
        )

    calls: list[Callable[[], Any]] = [partial(sdpa, i) for i in range(sets)]
    return {**row, "sdpa": 1e6 * timing.graph_seconds(calls, device, replays=10)}


@torch.inference_mode()
def time_projections(
    d: int, widths: tuple[int, ...], batch: int, device: torch.device
) -> dict[str, Any]:
    """Matrix products of one input with several weights: one by one, as the model has them, and as one of all their rows."""
    n_bytes = 2 * d * sum(widths)
    sets = max(2, 3 * 2**26 // n_bytes + 1)
    x = torch.randn(batch, d, device=device, dtype=torch.bfloat16)

    def weight(n: int) -> torch.Tensor:
        return torch.randn(n, d, device=device, dtype=torch.bfloat16)

    apart = [[weight(n) for n in widths] for _ in range(sets)]
    packed = [torch.cat(weights) for weights in apart]

    def each(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.nn.functional.linear(x, w) for w in weights]

    return {
        "floor_us": 1e6 * n_bytes / 4.25e12,
        "apart_us": 1e6 * timing.graph_seconds([partial(each, w) for w in apart], device),
        "packed_us": 1e6 * timing.graph_seconds([partial(each, [w]) for w in packed], device),
    }


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", help=f"(default: {METHODS}, and your own)")
    parser.add_argument("--scale", help="(default: 90m, on a CPU tiny)")
    parser.add_argument("--gpu", default="h200", help="h100, h200, b200 or cpu (default: h200)")
    parser.add_argument(
        "--budget", type=float, default=140, help="seconds after which nothing new starts (140)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to this file")
    args = parser.parse_args(argv)
    if args.gpu not in measure.GPUS:
        raise UserError(f"unknown GPU '{args.gpu}': choose one of {', '.join(measure.GPUS)}")
    if args.gpu != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"--gpu {args.gpu}: this machine has no CUDA GPU; --gpu cpu runs on the CPU"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    from config_utils.methods import OWN_METHODS

    args = parse_args(argv)
    device = torch.device("cpu" if args.gpu == "cpu" else "cuda:0")
    cuda = device.type == "cuda"
    scale = args.scale or ("90m" if cuda else "tiny")
    methods = (args.methods or " ".join([METHODS, *OWN_METHODS])).replace(",", " ").split()
    for method in methods:
        measure.parse_method(method, scale)
    report = Report(args.budget)
    torch.manual_seed(0)
    say(f"{timing.device_name(device)}, torch {torch.__version__}, {scale}")

    if cuda:
        shapes: dict[str, tuple[int, int, int, int, list[int]]] = {
            "attention 8x2 heads of 128, 16k": (8, 2, 128, 16384, [3, 16000, 777]),
            "attention 8x1 heads of 64, 2k": (8, 1, 64, 2048, [0, 2047, 64, 65]),
            "attention 32x1 heads of 64, one part": (32, 1, 64, 256, [17, 200] * 40),
        }
        for name, shape in shapes.items():
            report.run(name, partial(check_attention, *shape, device=device))
        report.run("rope, silu, norm", lambda: check_pointwise(device))
        if not all(row["status"] == "ok" for row in report.rows):
            say("the kernels are not right here: what follows would say the same")
    if cuda:
        # 1p7b's heads.
        for batch, context in ((1, 16384), (64, 2048)):
            report.run(
                f"time attention 8x2 heads of 128, {batch} x {context}",
                partial(time_attention, 8, 2, 128, batch, context, device),
            )
        for batch in (1, 64):
            for what, widths in {
                "queries, keys and values": (2048, 1024, 1024),
                "SwiGLU": (6144, 6144),
            }.items():
                report.run(
                    f"time products of 1p7b's {what}, batch {batch}",
                    partial(time_projections, 2048, widths, batch, device),
                )
    for method in methods:
        built: dict[str, Any] = {}

        def make(method: str = method, built: dict[str, Any] = built) -> dict[str, Any]:
            built["model"] = build(method, scale, args.gpu, device)
            return check_steps(built["model"], device)

        report.run(f"steps {method}", make)
        if "model" not in built or not cuda:
            continue
        for batch in (1, 64):
            report.run(
                f"time {method} {batch} x 1024",
                partial(time_steps, built["model"], batch, 1024, device),
            )
        built.clear()
        torch.cuda.empty_cache()
    bad = [row["name"] for row in report.rows if row["status"] != "ok"]
    say(f"not ok: {', '.join(bad)}" if bad else "all ok")
    if args.json is not None:
        from config_utils.run_info import run_info

        timing.write_json(
            args.json,
            {
                "device": timing.device_name(device),
                "torch": torch.__version__,
                "scale": scale,
                "rows": report.rows,
                "run": run_info(),
            },
        )
    return 1 if bad else 0


if __name__ == "__main__":
    run_cli(main)

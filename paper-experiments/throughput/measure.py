"""
Measures one method in one process. ``rounds.sh`` is the way to start it; by hand:

one GPU    python paper-experiments/throughput/measure.py train 400m ldm --gpu h200
8 GPUs     torchrun --nproc-per-node 8 paper-experiments/throughput/measure.py train 1p7b ldm --gpu b200
prefill    python paper-experiments/throughput/measure.py prefill 1p7b ldm:reference --gpu h200 --context 2048 --batch 8
profile    python paper-experiments/throughput/measure.py train 400m ldm --gpu h200 --profile 3
decode     python paper-experiments/throughput/measure.py decode 1p7b mhc --gpu h200 --batches "1 8 64" --context "2048 16384"
canary     python paper-experiments/throughput/measure.py canary --gpu h200

Further arguments override the experiment's config as in train.py: ``model.block.depth.d_k=4``. README.md defines every
number. A method that runs out of memory or whose backend cannot run gives a row with that status.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import timing
import torch

from config_utils.errors import UserError, run_cli

MODES = ("train", "prefill", "decode")
GPUS = ("h100", "h200", "b200", "cpu")
GATE_TOKENS = 256
GATE_SUBLAYERS = 8
GATE_TOLERANCE = 2e-2
"""Relative RMS error of a backend's outputs and gradients against the reference, on random data."""
LOSS_TOLERANCE = 0.3
"""Nats between the first loss on random tokens and what random weights give."""


class NotMeasured(Exception):
    """
    A measurement that gives a row without numbers.

    :param status: ``unavailable``, ``oom`` or ``wrong``.
    """

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Method:
    """``name`` of ``config_utils.methods``, ``name:backend``, and either with config overrides after it: ``ldm+model.block.depth.window=2``."""

    name: str
    backend: str | None = None
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        named = self.name if self.backend is None else f"{self.name}:{self.backend}"
        return "+".join([named, *self.overrides])


def parse_method(text: str, scale_name: str) -> Method:
    """
    :raises UserError: If there is no such scale, method or backend, or an override has no value.
    """
    from config_utils.methods import depth_connection
    from config_utils.scales import load_scale
    from olmo_core.nn.depth import DepthBackend

    named, *overrides = text.split("+")
    name, colon, backend = named.partition(":")
    depth_connection(name, load_scale(scale_name))
    for override in overrides:
        if "=" not in override:
            raise UserError(
                f"'{override}' in '{text}' is no override: write METHOD[:BACKEND][+KEY=VALUE ...]"
            )
    if colon and backend not in list(DepthBackend):
        raise UserError(
            f"unknown backend '{backend}' in '{text}': choose one of {', '.join(DepthBackend)}"
        )
    return Method(name, backend or None, tuple(overrides))


def numbers(text: str, name: str) -> list[int]:
    """
    Positive whole numbers, separated by spaces or commas.

    :raises UserError: If they are not.
    """
    parts = text.replace(",", " ").split()
    if not parts or not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise UserError(f"{name} must be positive whole numbers, got '{text}'")
    return [int(p) for p in parts]


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=(*MODES, "canary"))
    parser.add_argument("scale", nargs="?", help="tiny, 90m, 400m, 1p5b or 1p7b")
    parser.add_argument(
        "method", nargs="?", help="METHOD[:BACKEND][+OVERRIDE ...], such as preln, ldm:reference"
    )
    parser.add_argument("--gpu", default="cpu", help=", ".join(GPUS))
    parser.add_argument("--out", type=Path, help="write the JSON here; default: print it")
    parser.add_argument("--seq", help="train: tokens in a sequence (the recipe's)")
    parser.add_argument(
        "--tokens", help="train: tokens in one forward pass on one GPU (the scale's)"
    )
    parser.add_argument("--batch", help="train: forward passes in a step (1); prefill: prompts (8)")
    parser.add_argument("--batches", help="decode: rows of the batch ('1 8 64')")
    parser.add_argument(
        "--context", help="prefill: tokens in a prompt (2048); decode: cached tokens ('2048')"
    )
    parser.add_argument("--chunk", help="prefill: tokens of each prompt in one forward pass (4096)")
    parser.add_argument("--steps", help="timed steps (train 10, prefill 10, decode 64)")
    parser.add_argument("--warmup", help="untimed steps before (3)")
    parser.add_argument("--no-compile", action="store_true", help="train: without torch.compile")
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        help="train: so many steps more under torch.profiler, for the time of each kernel (0)",
    )
    parser.add_argument("--seed", help="of weights and tokens (42)")
    opts, overrides = parser.parse_known_args(argv)
    opts.overrides = overrides
    for override in opts.overrides:
        if override.startswith("-") or "=" not in override:
            raise UserError(f"unknown argument '{override}'; see --help")
    if opts.gpu not in GPUS:
        raise UserError(f"unknown GPU '{opts.gpu}': choose one of {', '.join(GPUS)}")
    if opts.mode != "canary" and (opts.scale is None or opts.method is None):
        raise UserError("need MODE SCALE METHOD, for example: measure.py train 400m ldm --gpu h200")
    on_cpu = opts.gpu == "cpu"
    defaults = {
        "seq": None,
        "tokens": None,
        "batch": "8" if opts.mode == "prefill" and not on_cpu else "1",
        "chunk": "4096",
        "steps": "3" if on_cpu else {"decode": "64"}.get(opts.mode, "10"),
        "warmup": "1" if on_cpu else "3",
        "profile": None,
        "seed": "42",
    }
    for name, default in defaults.items():
        text = getattr(opts, name) or default
        values = None if text is None else numbers(text, f"--{name}")
        if values is not None and len(values) > 1:
            raise UserError(f"--{name} is one number, got '{text}'")
        setattr(opts, name, None if values is None else values[0])
    opts.batches = numbers(opts.batches or ("1" if on_cpu else "1 8 64"), "--batches")
    opts.context = numbers(opts.context or ("64" if on_cpu else "2048"), "--context")
    if opts.mode == "prefill" and len(opts.context) > 1:
        raise UserError("prefill takes one --context; use --batch to keep the tokens the same")
    if opts.mode == "decode" and min(opts.context) <= opts.steps // 2:
        raise UserError(
            f"context {min(opts.context)} is too short for {opts.steps} steps around it: take fewer steps or more context"
        )
    return opts


def build_config(opts: argparse.Namespace, method: Method, world_size: int) -> Any:
    """The experiment's config as ``launch.sh`` would run it, with this benchmark's changes."""
    from config_utils.experiment import build_experiment
    from olmo_core.nn.depth import DepthBackend

    config: Any = build_experiment(
        opts.scale,
        method.name,
        1e-3,
        gpu=opts.gpu,
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        seed=opts.seed,
    )
    if overrides := [*opts.overrides, *method.overrides]:
        try:
            config = config.merge(overrides)
        except Exception as e:  # the decoder raises many kinds
            raise UserError(f"cannot apply {' '.join(overrides)} to the config: {e}") from None
    if method.backend is not None:
        depth = replace(config.model.depth, backend=DepthBackend(method.backend))
        config.model = config.model.with_depth(depth)
    train_module = config.train_module
    if opts.seq is not None:
        train_module.max_sequence_length = opts.seq
        # The scale's tokens, as far as whole sequences go.
        whole = max(1, train_module.rank_microbatch_size // opts.seq)
        train_module.rank_microbatch_size = whole * opts.seq
    if opts.tokens is not None:
        train_module.rank_microbatch_size = opts.tokens
    if train_module.rank_microbatch_size % train_module.max_sequence_length:
        raise UserError(
            f"{train_module.rank_microbatch_size} tokens in a forward pass are no whole number of sequences of "
            f"{train_module.max_sequence_length}: change TOKENS or SEQ"
        )
    if opts.no_compile:
        train_module.compile_model = False
    return config


# Correctness gates: no number without them.


def randomize(boundary: torch.nn.Module, generator: torch.Generator) -> None:
    """Move a boundary's parameters from their start, where many maps are zero and much would go unseen."""
    with torch.no_grad():
        for p in boundary.parameters():
            std = p.shape[0] ** -0.5 if p.shape[0] >= 32 else 0.3
            p.add_(std * torch.randn(p.shape, generator=generator, device=p.device))


def build_boundaries(
    depth: Any,
    n: int,
    *,
    d_model: int,
    n_sublayers: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> list[Any]:
    """The first ``n`` boundaries of a model with random parameters, each with its backend chosen."""
    boundaries = []
    for index in range(n):
        boundary = depth.build(
            d_model=d_model, index=index, n_sublayers=n_sublayers, eps=1e-6, init_device=device.type
        )
        randomize(boundary, generator)
        boundary.select_backend(device, dtype)
        boundaries.append(boundary)
    return boundaries


def running_backend(boundary: Any, *, gradients: bool) -> str:
    """What a boundary that has chosen its backend runs: LDM's ``auto`` may take another one for inference."""
    chosen = boundary.selected_backend
    if not gradients:
        chosen = getattr(boundary, "inference_backend", None) or chosen
    return str(chosen)


def run_stack(
    calls: list[Callable[..., Any]], ys: list[torch.Tensor], gain: torch.Tensor, *, gradients: bool
) -> dict[str, torch.Tensor]:
    """
    Boundaries one after the other, each given the state of the one before and an output ``y`` that is not a function of
    any ``x``. What the state consists of is the backend's own affair, so only the ``x`` and, for random gradients of
    them, the gradients of the ``y`` are returned.
    """
    ys = [y.detach().clone().requires_grad_(gradients) for y in ys]
    xs: list[torch.Tensor] = []
    state: tuple[torch.Tensor, ...] = ()
    with torch.inference_mode(not gradients):
        for call, y in zip(calls, ys, strict=True):
            state, x = call(state, y, gain)[:2]
            xs.append(x)
    found = {f"x {i}": x.detach() for i, x in enumerate(xs)}
    if gradients:
        generator = torch.Generator(gain.device).manual_seed(1)
        given = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in xs]
        found |= {f"gradient of y {i}": g for i, g in enumerate(torch.autograd.grad(xs, ys, given))}
    return found


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|`` in FP64; not a number never passes a gate."""
    a, e = actual.double(), expected.double()
    norm = e.norm()
    return float((a - e).norm() / norm) if norm > 0 else float(a.norm())


def check_backend(
    depth: Any,
    *,
    d_model: int,
    n_sublayers: int,
    device: torch.device,
    gradients: bool,
    n_tokens: Iterable[int] = (GATE_TOKENS,),
) -> dict[str, Any]:
    """
    The backend that runs here, and its largest relative error against the reference over all boundaries of a model of
    :data:`GATE_SUBLAYERS` sublayers.

    :param n_sublayers: Of the model that will be measured; a backend may refuse it.
    :param gradients: Check the gradients too; an inference backend has none.
    :param n_tokens: How many tokens to check it with; a backend may have another kernel for few.

    :raises NotMeasured: ``unavailable`` if the backend cannot run, ``wrong`` if it is beyond
        :data:`GATE_TOLERANCE`.
    """
    from olmo_core.exceptions import OLMoConfigurationError
    from olmo_core.nn.depth import DepthBackend

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    try:
        middle = depth.build(
            d_model=d_model, index=n_sublayers // 2, n_sublayers=n_sublayers, eps=1e-6,
            init_device="meta",
        )  # fmt: skip
        middle.select_backend(device, dtype)
    except (OLMoConfigurationError, ImportError) as e:
        raise NotMeasured("unavailable", str(e)) from None
    selected = running_backend(middle, gradients=gradients)
    if selected == "reference":
        return {"backend": selected, "backend_error": None}
    boundaries = build_boundaries(
        replace(depth, backend=DepthBackend(selected)), GATE_SUBLAYERS + 1, d_model=d_model,
        n_sublayers=GATE_SUBLAYERS, dtype=dtype, device=device, generator=generator,
    )  # fmt: skip

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    errors: dict[str, float] = {}
    gain = 1 + 0.1 * draw(d_model)  # one for all: a backend knows parameters by their addresses
    for n in n_tokens:
        ys = [draw(1, n, d_model).to(dtype) for _ in boundaries]
        expected = run_stack([b.reference for b in boundaries], ys, gain, gradients=gradients)
        actual = run_stack(boundaries, ys, gain, gradients=gradients)
        errors |= {
            f"{name} of {n} tokens": relative_rms(actual[name], t) for name, t in expected.items()
        }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if not errors[worst] <= GATE_TOLERANCE:
        raise NotMeasured(
            "wrong",
            f"backend '{selected}': {worst} is off by {errors[worst]:.1e} of its size against the reference "
            f"(at most {GATE_TOLERANCE:.0e})",
        )
    return {"backend": selected, "backend_error": errors[worst]}


# The three measurements.


def gib(n_bytes: float) -> float:
    return n_bytes / 2**30


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Of the process since the last reset, GiB; the largest over all ranks."""
    if device.type != "cuda":
        return {"peak_allocated_gib": None, "peak_reserved_gib": None}
    peaks = torch.tensor(
        [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)],
        dtype=torch.float64,
        device=device,
    )
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(peaks, op=torch.distributed.ReduceOp.MAX)
    allocated, reserved = peaks.tolist()
    return {"peak_allocated_gib": gib(allocated), "peak_reserved_gib": gib(reserved)}


def reset_peak_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what compiling left must not count as reserved
        torch.cuda.reset_peak_memory_stats(device)


def utilisation(flops_per_second: float, device: torch.device) -> float | None:
    """MFU: of the dense BF16 peak of the GPU that is here."""
    peak = timing.peak_bf16_flops(timing.device_name(device))
    return None if peak is None else flops_per_second / peak


class StepRecorder:
    """What a train module asks of its trainer in one step, without data loader, checkpoints and callbacks."""

    def __init__(self, max_steps: int):
        self.global_step = 1
        self.max_steps = max_steps
        self.metrics: dict[str, Any] = {}

    def record_metric(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.metrics[name] = value

    def record_ce_loss(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self.record_metric("CE loss", value)


def random_tokens(n_rows: int, n_tokens: int, seed: int) -> torch.Tensor:
    """``[n_rows, n_tokens]``, int64, uniform over the vocabulary, on the CPU."""
    from config_utils.scales import VOCAB_SIZE

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (n_rows, n_tokens), generator=generator, device="cpu")


def measure_train(
    opts: argparse.Namespace, config: Any, device: torch.device, sensors: timing.GpuSensors
) -> dict[str, Any]:
    distributed = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    world_size = torch.distributed.get_world_size() if distributed else 1
    sequence, tokens = (
        config.train_module.max_sequence_length,
        config.train_module.rank_microbatch_size,
    )
    model = config.model.build(init_device="meta")
    train_module = config.train_module.build(model, device=device)
    recorder = StepRecorder(config.trainer.max_duration.value)
    train_module._attach_trainer(recorder)  # type: ignore[arg-type]

    # The profiler's own first step is not counted.
    n_profiled = 1 + opts.profile if opts.profile else 0
    n_steps = opts.warmup + 1 + opts.steps + n_profiled
    rows = opts.batch * tokens // sequence
    ids = random_tokens(n_steps * rows, sequence, opts.seed + 1000 * rank).split(rows)
    if device.type == "cuda":
        ids = tuple(t.pin_memory() for t in ids)  # as the data loader does
    batches = iter(ids)

    def step() -> None:
        # One iteration of OLMo-core's Trainer, without its callbacks.
        train_module.train_batch({"input_ids": next(batches)})
        train_module.optim_step()
        train_module.zero_grads()
        recorder.global_step += 1

    def loss() -> float:
        return float(recorder.metrics["CE loss"])

    def gradient_norm() -> float:
        return float(recorder.metrics["total grad norm"])

    start = time.perf_counter()
    step()
    timing.synchronize(device)
    first_step = time.perf_counter() - start
    first_loss = loss()
    # Random weights give Gaussian logits of variance d * std^2 over the padded vocabulary.
    expected = math.log(config.model.vocab_size)
    expected += 0.5 * config.model.d_model * config.model.init_std**2
    if not abs(first_loss - expected) <= LOSS_TOLERANCE:
        raise NotMeasured(
            "wrong",
            f"the first loss is {first_loss:.3f} nats, random weights give {expected:.3f} "
            f"(at most {LOSS_TOLERANCE} apart)",
        )
    if not math.isfinite(gradient_norm()):
        raise NotMeasured("wrong", f"the first gradient's norm is {gradient_norm()}")

    for _ in range(opts.warmup - 1):
        step()
    gc.disable()  # as OLMo-core's garbage-collector callback does
    reset_peak_memory(device)
    step()  # fills the allocator's cache again
    laps, gpu = sensors.during(lambda: timing.lap_seconds(step, opts.steps, device))
    gc.enable()
    memory = peak_memory(device)
    kernels = timing.kernel_times(step, opts.profile, device) if opts.profile else None
    last_loss, grad_norm = loss(), gradient_norm()
    if not (math.isfinite(last_loss) and math.isfinite(grad_norm) and last_loss < first_loss + 1):
        raise NotMeasured(
            "wrong",
            f"after {n_steps} steps the loss is {last_loss}, the gradient's norm {grad_norm}",
        )

    seconds = timing.spread(laps)
    per_gpu = opts.batch * tokens / seconds["median"]
    case = {
        "ms": {k: 1e3 * v for k, v in seconds.items()},
        "tokens_per_s": per_gpu * world_size,
        "tokens_per_s_per_gpu": per_gpu,
        "mfu": utilisation(per_gpu * model.num_flops_per_token(sequence), device),
        "first_loss": first_loss,
        "last_loss": last_loss,
        "laps_ms": [1e3 * lap for lap in laps],
        "gpu": gpu,
        **memory,
    }
    if kernels is not None:
        case["kernels"] = kernels
    return {
        "world_size": world_size,
        "sequence_length": sequence,
        "tokens_per_forward": tokens,
        "forwards_per_step": opts.batch,
        "parameters": model.num_params,
        "compiled": bool(config.train_module.compile_model and device.type == "cuda"),
        "compile_seconds": max(0.0, first_step - seconds["median"]),
        "cases": [case],
    }


def inference_model(model_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model with random weights of ``dtype``, but for the depth connection's that stay FP32, in evaluation mode."""
    from olmo_core.config import DType

    model_config = model_config.copy()

    # Every module's config has a dtype of its own.
    def adapt(c: Any) -> None:
        if hasattr(c, "dtype"):
            c.dtype = DType.from_pt(dtype)

    model_config.apply(adapt)
    model = model_config.build(init_device="meta")
    model.init_weights(device=device)
    return model.eval()


class Inference:
    """
    A model in BF16 (FP32 on a CPU) as generation runs it: no torch.compile, which takes minutes; in its place a few Triton
    kernels, the same for all methods.
    """

    def __init__(self, opts: argparse.Namespace, config: Any, device: torch.device):
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = inference_model(config.model, self.dtype, device)
        self.seed = opts.seed
        self.check_cache()

    def session(self, batch: int, max_seq_len: int, *, cuda_graph: bool) -> Any:
        from olmo_core.nn.depth.session import InferenceSession

        return InferenceSession(self.model, batch, max_seq_len, cuda_graph=cuda_graph)

    def tokens(self, n_rows: int, n_tokens: int) -> torch.Tensor:
        return random_tokens(n_rows, n_tokens, self.seed).to(self.device)

    def check_cache(self) -> None:
        """
        :raises NotMeasured: If the logits of a token with the cache, after a prompt in two pieces, are not those without it.
        """
        ids = self.tokens(2, 33)
        expected = self.model(ids, logits_to_keep=1)
        session = self.session(2, 64, cuda_graph=False)
        with session.attached():
            session.prefill(ids[:, :-1], chunk=20)
            session.tokens.copy_(ids[:, -1])
            actual = session.step()
        self.compare(actual, expected, "the logits with the KV cache and without it")

    def compare(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        tolerance = 0.05 if self.dtype == torch.bfloat16 else 1e-3
        error = float((actual - expected).abs().max().float() / expected.abs().max().float())
        if not error <= tolerance:
            raise NotMeasured(
                "wrong", f"{what} differ by {error:.1e} of the largest (at most {tolerance})"
            )


@torch.inference_mode()
def measure_prefill(
    opts: argparse.Namespace, config: Any, device: torch.device, sensors: timing.GpuSensors
) -> dict[str, Any]:
    batch, (context,) = opts.batch, opts.context
    run = Inference(opts, config, device)
    ids = run.tokens(batch, context)
    session = run.session(batch, context, cuda_graph=False)

    def prefill() -> torch.Tensor:
        return session.prefill(ids, chunk=opts.chunk)

    with session.attached():
        start = time.perf_counter()
        logits = prefill()
        timing.synchronize(device)
        first = time.perf_counter() - start
        if not bool(logits.isfinite().all()):
            raise NotMeasured("wrong", "the logits of the prompt are not finite")
        del logits
        for _ in range(opts.warmup - 1):
            prefill()
        reset_peak_memory(device)
        prefill()  # fills the allocator's cache again
        laps, gpu = sensors.during(lambda: timing.lap_seconds(prefill, opts.steps, device))
        memory = peak_memory(device)

    seconds = timing.spread(laps)
    model = run.model
    # A third of a training step's, and the head sees one position of each prompt.
    head = model.lm_head.num_flops_per_token(context) / 3
    body = model.num_flops_per_token(context) / 3 - head
    case = {
        "batch": batch,
        "context": context,
        "chunk": min(opts.chunk, context),
        "ms": {k: 1e3 * v for k, v in seconds.items()},
        "tokens_per_s": batch * context / seconds["median"],
        "mfu": utilisation(batch * (context * body + head) / seconds["median"], device),
        "laps_ms": [1e3 * lap for lap in laps],
        "gpu": gpu,
        **memory,
    }
    return {
        "parameters": model.num_params,
        "compiled": False,
        "compile_seconds": max(0.0, first - seconds["median"]),
        "cases": [case],
    }


def decode_bytes(model: Any, batch: int, context: int, itemsize: int) -> int:
    """
    Bytes that a decode step cannot avoid to read: every weight once (of the embedding, a row for each sequence) and the keys
    and values of ``context`` tokens of each sequence.
    """
    embedding = model.embeddings.weight
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= embedding.numel() * embedding.element_size()
    weights += batch * model.d_model * embedding.element_size()
    cached = sum(
        2 * block.attention.n_kv_heads * block.attention.head_dim for block in model.blocks.values()
    )
    return weights + batch * context * cached * itemsize


def fill_caches(session: Any) -> None:
    """
    Random keys and values in all slots: a prompt of a million tokens (batch 64, 16k) would take longer than all the rest and
    change no time of a decode step.
    """
    with session.attached():
        # A session on a CPU allocates with the first keys.
        session.model(session.tokens.unsqueeze(1), logits_to_keep=1)
    for cache in session.caches:
        cache.rewind()
        cache.k_cache.normal_()
        cache.v_cache.normal_()


def decode_case(
    run: Inference,
    opts: argparse.Namespace,
    batch: int,
    context: int,
    sensors: timing.GpuSensors,
) -> dict[str, Any]:
    device = run.device
    session = run.session(batch, context + opts.steps + opts.warmup, cuda_graph=True)
    fill_caches(session)
    first_tokens = run.tokens(batch, 1)[:, 0]

    def rewind(position: int) -> None:
        session.resume(torch.full_like(session.lengths, position), position)
        session.tokens.copy_(first_tokens)

    with session.attached():
        rewind(context)
        expected = session.step(replay=False).clone()
        rewind(context)
        # From embedding to logits, and the most likely tokens as the next input.
        actual = session.step()
        run.compare(actual, expected, "the logits of the captured decode step and the eager one")
        # The steps' mean length is the context.
        rewind(max(1, context - opts.steps // 2 - opts.warmup))
        for _ in range(opts.warmup):
            session.step()
        reset_peak_memory(device)
        laps, gpu = sensors.during(lambda: timing.lap_seconds(session.step, opts.steps, device))
        memory = peak_memory(device)
    seconds = timing.spread(laps)
    n_bytes = decode_bytes(run.model, batch, context, run.dtype.itemsize)
    return {
        "status": "ok",
        "ms": {k: 1e3 * v for k, v in seconds.items()},
        "tokens_per_s": batch / seconds["median"],
        "bytes_per_step": n_bytes,
        "bytes_per_s": n_bytes / seconds["median"],
        "cuda_graph": session.captured and session.no_graph_because is None,
        "no_cuda_graph_because": session.no_graph_because,
        "compile_seconds": session.prepare_seconds,
        "gpu": gpu,
        **memory,
    }


@torch.inference_mode()
def measure_decode(
    opts: argparse.Namespace, config: Any, device: torch.device, sensors: timing.GpuSensors
) -> dict[str, Any]:
    run = Inference(opts, config, device)
    cases = []
    for batch in opts.batches:
        for context in opts.context:
            case: dict[str, Any] = {"batch": batch, "context": context}
            try:
                case |= decode_case(run, opts, batch, context, sensors)
            except torch.OutOfMemoryError as e:
                case |= {"status": "oom", "error": first_line(e)}
            reset_peak_memory(device)
            cases.append(case)
    if all(case["status"] == "oom" for case in cases):
        raise NotMeasured("oom", cases[0]["error"])
    return {
        "parameters": run.model.num_params,
        "compiled": False,
        "compile_seconds": sum(case.get("compile_seconds", 0.0) for case in cases),
        "cases": cases,
    }


MEASUREMENTS: dict[
    str, Callable[[argparse.Namespace, Any, torch.device, timing.GpuSensors], dict[str, Any]]
] = {
    "train": measure_train,
    "prefill": measure_prefill,
    "decode": measure_decode,
}


def first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}".strip().splitlines()[0][:400]


def measure(
    opts: argparse.Namespace, method: Method, config: Any, device: torch.device
) -> dict[str, Any]:
    """One row: the measurement's numbers, or its status and the reason."""
    row: dict[str, Any] = {
        "mode": opts.mode,
        "scale": opts.scale,
        "method": method.label,
        "device": timing.device_name(device),
        "status": "ok",
        "error": None,
    }
    started = time.perf_counter()
    try:
        training = opts.mode == "train"
        with torch.set_grad_enabled(training):  # a backend for inference may be another one
            row |= check_backend(
                config.model.depth,
                d_model=config.model.d_model,
                n_sublayers=2 * config.model.n_layers,
                device=device,
                gradients=training,
                n_tokens=opts.batches if opts.mode == "decode" else (GATE_TOKENS,),
            )
        with timing.GpuSensors(device) as sensors:
            row |= MEASUREMENTS[opts.mode](opts, config, device, sensors)
        for case in row["cases"]:
            case.setdefault("status", "ok")
    except NotMeasured as e:
        row |= {"status": e.status, "error": str(e)}
    except torch.OutOfMemoryError as e:
        row |= {"status": "oom", "error": first_line(e)}
    row["seconds"] = time.perf_counter() - started
    return row


WAIT_VARIABLE = "DEPTH_MEMORY_MEASURE_WAITS"


def wait_for_turn(mode: str) -> None:
    """
    With :data:`WAIT_VARIABLE` set, wait here for a line on the standard input: ``rounds.py`` starts the next process while one
    measures, so that its imports (15 of 30 to 45 s of a process on an H200) cost no time. Nothing has touched the GPU yet.
    """
    if not os.environ.pop(WAIT_VARIABLE, ""):
        return
    if mode == "train":
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401
    if not sys.stdin.readline():
        sys.exit("the process that started this one has ended")


def main(argv: list[str] | None = None) -> int:
    opts = parse_args(sys.argv[1:] if argv is None else argv)
    if opts.gpu == "cpu" and argv is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif opts.gpu != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"--gpu {opts.gpu}: this machine has no CUDA GPU; --gpu cpu runs on the CPU"
        )
    device = torch.device("cpu" if opts.gpu == "cpu" else "cuda:0")
    if opts.mode == "canary":
        row: dict[str, Any] = timing.canary(device)
    else:
        method = parse_method(opts.method, opts.scale)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1 and opts.mode != "train":
            raise UserError(f"{opts.mode} runs on one GPU: start it without torchrun")
        config = build_config(opts, method, world_size)
        if world_size > 1:
            from olmo_core.train import prepare_training_environment

            backend = "gloo" if opts.gpu == "cpu" else "cpu:gloo,cuda:nccl"
            prepare_training_environment(backend=backend, shared_filesystem=True)
            if opts.gpu != "cpu":
                device = torch.device("cuda", torch.cuda.current_device())
        wait_for_turn(opts.mode)
        try:
            row = measure(opts, method, config, device)
        except Exception as e:
            # One that nobody foresaw: the log keeps the traceback, the row says what it was.
            row = {"method": method.label, "status": "failed", "error": first_line(e)}
            if opts.out is not None:
                timing.write_json(opts.out, row)
            if world_size == 1:
                raise
            import traceback

            traceback.print_exc()
        if world_size > 1 and row["status"] != "ok":
            # The other ranks wait in a collective for this one, and would for ever: torchrun ends them.
            if opts.out is not None:
                timing.write_json(opts.out, row)
            sys.stderr.write(f"{row['status']}: {row['error']}\n")
            sys.stderr.flush()
            os._exit(1)
        if world_size > 1:
            from olmo_core.train import teardown_training_environment

            rank = torch.distributed.get_rank()
            teardown_training_environment()
            if rank != 0:
                return 0
    if opts.out is not None:
        timing.write_json(opts.out, row)
    else:
        print(json.dumps(row, indent=1))
    if row.get("status", "ok") != "ok":
        print(f"{row['method']}: {row['status']}: {row['error']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run_cli(main)

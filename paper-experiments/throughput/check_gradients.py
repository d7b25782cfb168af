"""
Does a whole model have the same gradients by each backend? One batch of random tokens, one backward as training does it (autocast
to BF16 on a GPU, torch.compile unless told otherwise), and every parameter's gradient beside that of the reference backend in FP32.

    python paper-experiments/throughput/check_gradients.py --gpu h200 --scale 90m --backends "reference flexible fast" --out gradients.json
    TRITON_INTERPRET=1 python paper-experiments/throughput/check_gradients.py --backends "reference flexible"    # tiny, on a CPU

The reference in BF16 says what BF16 costs: a backend is wrong when the error of all parameters of a kind (their name's last part) is more than
three times that (six in Triton's interpreter, which rounds to BF16 towards zero; in either case three times as much for a kind of fewer
than 100 numbers, whose rounding is one draw) and above 1e-2. Single parameters are in the JSON. The boundaries' parameters stand at their
start, or, with ``--move``, away from it. Exit status 1 if a backend is wrong.
"""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import measure
import timing
import torch
import torch.nn.functional as F

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info

TIMES_REFERENCE = 3.0
"""Two gradients that each differ from FP32's by rounding differ in the directions of their errors, not by more than a factor like this."""
SMALLEST_ERROR = 1e-2
FEW = 100


def gradients(
    method: str, args: argparse.Namespace, device: torch.device, *, full_precision: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and every parameter's gradient by its name, in FP32."""
    opts = measure.parse_args(["train", args.scale, method, "--gpu", args.gpu])
    config = measure.build_config(opts, measure.parse_method(method, args.scale), 1)
    length = min(args.length, config.train_module.max_sequence_length)
    if args.tokens % length:
        raise UserError(f"--tokens {args.tokens} is no multiple of the sequences' {length}")
    torch.compiler.reset()
    model = config.model.build(init_device=str(device))
    model.init_weights(device=device, max_seq_len=length)
    if args.move:
        generator = torch.Generator(device).manual_seed(0)
        for boundary in model.boundaries():
            measure.randomize(boundary, generator)
    if args.compile and not full_precision:
        model.apply_compile()
    tokens = torch.randint(
        0,
        config.model.vocab_size,
        (args.tokens // length, length),
        generator=torch.Generator().manual_seed(1),
    ).to(device)
    precision: Any = (
        contextlib.nullcontext()
        if full_precision
        else torch.autocast(device.type, dtype=torch.bfloat16)
    )
    with precision:
        logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    found = {
        name.replace("_orig_mod.", ""): p.grad.float().cpu()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return loss.item(), found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="cpu", help=", ".join(measure.GPUS))
    parser.add_argument("--scale", help="tiny, 90m, ... (90m on a GPU, tiny on a CPU)")
    parser.add_argument("--method", default="ldm")
    parser.add_argument("--backends", default="reference flexible fast")
    parser.add_argument("--tokens", type=int, help="in the batch (65536 on a GPU, 96 on a CPU)")
    parser.add_argument("--length", type=int, help="of a sequence (2048 on a GPU, 48 on a CPU)")
    parser.add_argument("--move", action="store_true", help="parameters away from their start")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    cuda = args.gpu != "cpu"
    if cuda and not torch.cuda.is_available():
        raise UserError(f"--gpu {args.gpu}: this machine has no CUDA GPU")
    device = torch.device("cuda:0" if cuda else "cpu")
    args.scale = args.scale or ("90m" if cuda else "tiny")
    args.tokens = args.tokens or (65_536 if cuda else 96)
    args.length = args.length or (2048 if cuda else 48)
    backends = args.backends.replace(",", " ").split()
    if "reference" not in backends:
        backends.insert(0, "reference")
    for backend in backends:
        measure.parse_method(f"{args.method}:{backend}", args.scale)
    torch.backends.cuda.matmul.allow_tf32 = False

    loss, exact = gradients(f"{args.method}:reference", args, device, full_precision=True)
    report: dict[str, Any] = {
        "device": timing.device_name(device),
        "run": run_info(),
        "method": args.method,
        "scale": args.scale,
        "tokens": args.tokens,
        "moved": args.move,
        "compiled": args.compile,
        "fp32_loss_nats": loss,
        "norms": {name: g.norm().item() for name, g in exact.items()},
        "backends": {},
    }
    bad = False
    interpreted = not cuda and os.environ.get("TRITON_INTERPRET") == "1"
    times = TIMES_REFERENCE * (2 if interpreted else 1)
    for backend in sorted(backends, key=lambda b: b != "reference"):
        loss, found = gradients(f"{args.method}:{backend}", args, device, full_precision=False)
        if missing := exact.keys() ^ found.keys():
            print(f"{backend}: no gradient, or one too many, of {', '.join(sorted(missing))}")
            bad = True
        squares = {
            name: ((found[name] - g).square().sum().item(), g.square().sum().item())
            for name, g in exact.items()
            if name in found
        }
        kinds: dict[str, float] = {}
        for kind in sorted({name.rsplit(".", 1)[-1] for name in squares}):
            pairs = [pair for name, pair in squares.items() if name.rsplit(".", 1)[-1] == kind]
            error, size = (sum(column) for column in zip(*pairs, strict=True))
            kinds[kind] = math.sqrt(error / max(size, 1e-60))
        report["backends"][backend] = {
            "loss_nats": loss,
            "relative_errors_of_kinds": kinds,
            "relative_errors": {n: math.sqrt(e / max(g, 1e-60)) for n, (e, g) in squares.items()},
        }
        rounding = report["backends"]["reference"]["relative_errors_of_kinds"]
        print(f"{backend}: loss {loss:.6f} nats (FP32 {report['fp32_loss_nats']:.6f})")
        for kind, e in kinds.items():
            # Not "more than": an error that is not a number is wrong.
            numbers = sum(g.numel() for n, g in exact.items() if n.rsplit(".", 1)[-1] == kind)
            allowed = times * (3 if numbers < FEW else 1)
            wrong = not e <= max(allowed * rounding[kind], SMALLEST_ERROR)
            bad |= wrong
            print(
                f"    {kind:10s} {e:.1e}, reference in BF16 {rounding[kind]:.1e}"
                + (" WRONG" if wrong else "")
            )
        if args.out is not None:
            timing.write_json(args.out, report)
    return int(bad)


if __name__ == "__main__":
    run_cli(main)

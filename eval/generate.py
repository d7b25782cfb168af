"""
Generates text with a checkpoint, and says how fast: tokens/s of the prompt (prefill) and of the new tokens (decode).

text      python -m eval.generate CHECKPOINT --prompt "Photosynthesis is" --temperature 0.8 --top-p 0.95
timing    python -m eval.generate CHECKPOINT --random-prompt --prompt-tokens 2048 --batch-size 8 --repeat 5 --json OUT.json
without a CUDA graph   the same with --no-cuda-graph; without the KV cache --no-cache
"""

import argparse
import contextlib
import logging
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info
from eval.checkpoint import LoadedCheckpoint, default_device, load_checkpoint, read_checkpoint
from olmo_core.exceptions import OLMoConfigurationError
from olmo_core.generate.generation_module import GenerationConfig
from olmo_core.nn.depth import DepthBackend, DepthTransformer
from olmo_core.nn.depth.generation import DepthGenerationModule, GenerationTiming, NaNLogitsError
from olmo_core.nn.depth.session import PREFILL_CHUNK

SCHEMA_VERSION = 1


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or more, got {text}")
    return value


def probability(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a stepN folder of a run, or one learning rate of a release"
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue; - reads standard input")
    prompt.add_argument(
        "--random-prompt",
        action="store_true",
        help="random tokens, no text: for timing; generation never stops early",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        metavar="N",
        help="length of a random prompt (default: 128)",
    )
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="rows of a random prompt (default: 1)"
    )
    how = parser.add_argument_group("how to generate")
    how.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="(default: 128)"
    )
    how.add_argument(
        "--temperature", type=temperature, default=0.0, help="0 is greedy, the default"
    )
    how.add_argument(
        "--top-k", type=positive, metavar="N", help="sample among the N most likely tokens"
    )
    how.add_argument(
        "--top-p",
        type=probability,
        default=1.0,
        help="sample among the most likely tokens that together have this probability",
    )
    how.add_argument(
        "--seed", type=int, default=0, help="of sampling and random prompts (default: 0)"
    )
    how.add_argument(
        "--no-cache", action="store_true", help="run the whole sequence again for every token"
    )
    how.add_argument(
        "--prefill-chunk",
        type=positive,
        default=PREFILL_CHUNK,
        metavar="N",
        help=f"tokens of the prompt in one forward pass, with the KV cache (default: {PREFILL_CHUNK})",
    )
    how.add_argument(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="replay decode steps as a CUDA graph (default: on a GPU, from 8 new tokens on)",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device", choices=("cpu", "cuda"), help="(default: a GPU if there is one)"
    )
    machine.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    machine.add_argument(
        "--depth-backend",
        choices=[b.value for b in DepthBackend],
        default=DepthBackend.auto.value,
        help="implementation of the depth connection (default: auto)",
    )
    measure = parser.add_argument_group("measurement")
    measure.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="R",
        help="generate R times; the first is the warm-up of the others",
    )
    measure.add_argument("--json", type=Path, metavar="OUT", help="write the timings to this file")
    args = parser.parse_args(argv)
    if args.prompt is not None and (args.prompt_tokens or args.batch_size):
        parser.error("--prompt-tokens and --batch-size belong to --random-prompt")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: this machine has no CUDA GPU; leave it away or pass --device cpu"
        )
    if args.cuda_graph and args.no_cache:
        parser.error("--cuda-graph holds steps with the KV cache: leave --no-cache away")
    if args.cuda_graph and (args.device == "cpu" or not torch.cuda.is_available()):
        parser.error("--cuda-graph needs a CUDA GPU: leave it away")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Everything that can be wrong, before the weights are read.
    checkpoint = read_checkpoint(args.checkpoint)
    config = checkpoint.tokenizer_config
    tokenizer = None
    if args.random_prompt:
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.batch_size or 1, args.prompt_tokens or 128)
        ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    else:
        from eval.run import find_tokenizer

        tokenizer = find_tokenizer(checkpoint).tokenizer
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
        if ids.numel() == 0:
            raise UserError("the prompt has no token to continue; give some text")
    if args.json is not None:
        check_output(args.json, "--json")

    device = default_device() if args.device is None else torch.device(args.device)
    loaded = load_checkpoint(
        args.checkpoint, device, None if args.dtype is None else getattr(torch, args.dtype)
    )
    set_depth_backend(loaded, DepthBackend(args.depth_backend))
    # No model produces the id after its last: a random prompt runs to the full length.
    never = checkpoint.model_config.vocab_size
    eos = never if args.random_prompt else config.eos_token_id
    module = DepthGenerationModule.from_model(
        loaded.model,
        GenerationConfig(
            # There is no padding here, but OLMo-core wants an id that is not EOS.
            pad_token_id=config.pad_token_id if config.pad_token_id != eos else never,
            eos_token_id=eos,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=-1 if args.top_k is None else args.top_k,
            top_p=args.top_p,
            use_cache=not args.no_cache,
        ),
    )
    torch.manual_seed(args.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    timings: list[GenerationTiming] = []
    with one_sentence_errors():
        for run in range(args.repeat):
            generate(
                module,
                ids,
                tokenizer if run == 0 else None,
                args.prompt,
                prefill_chunk=args.prefill_chunk,
                cuda_graph=args.cuda_graph,
            )
            assert module.last_timing is not None
            timings.append(module.last_timing)
            print(module.last_timing, file=sys.stderr)
    if args.json is not None:
        write_json_result(args, loaded, timings)
    return 0


def generate(
    module: DepthGenerationModule,
    ids: torch.Tensor,
    tokenizer: Any,
    prompt: str | None,
    **options: Any,
) -> None:
    """
    Generate once.

    :param ids: ``[B, T]``, int64.
    :param tokenizer: Prints the prompt and the new tokens as they come; ``None`` prints nothing.
    :param options: For :meth:`DepthGenerationModule.stream`.
    """
    if tokenizer is None:
        for _ in module.stream(ids, return_logits=False, **options):
            pass
        return
    from tokenizers.decoders import DecodeStream

    # Gives nothing while a character is incomplete.
    text = DecodeStream(ids=ids[0].tolist(), skip_special_tokens=True)
    print(tokenizer.decode(ids[0].tolist()) if prompt == "-" else prompt, end="", flush=True)
    for step in module.stream(ids, return_logits=False, **options):
        if piece := text.step(tokenizer, step.token_ids[0]):
            print(piece, end="", flush=True)
    print(flush=True)


def set_depth_backend(loaded: LoadedCheckpoint, backend: DepthBackend) -> None:
    """
    :raises UserError: If it cannot run here.
    """
    if not isinstance(loaded.model, DepthTransformer):
        return
    for boundary in loaded.model.boundaries():
        boundary.backend = backend
        try:
            boundary.select_backend(loaded.device, loaded.dtype)
        except OLMoConfigurationError as e:
            raise UserError(str(e)) from None


@contextlib.contextmanager
def one_sentence_errors() -> Iterator[None]:
    """What generation can meet with a good command, as a :class:`UserError`."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        needed = str(e).split(". ")[0]
        raise UserError(
            f"the GPU's memory does not hold the model, the batch and the KV cache ({needed}): use a smaller "
            "--batch-size, --prompt-tokens or --max-new-tokens"
        ) from None
    except NaNLogitsError as e:
        raise UserError(str(e)) from None


def check_output(path: Path, option: str) -> None:
    """
    :raises UserError: Before any work, if the result could not be written.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; give the file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder of {path} ({e.strerror})") from None
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: no permission for its folder")


def write_json_result(
    args: argparse.Namespace, loaded: LoadedCheckpoint, timings: list[GenerationTiming]
) -> None:
    """The timings with what they were measured on; medians leave the first run out if there are others."""
    from eval.run import write_json

    warm = timings[1:] or timings
    boundaries = loaded.model.boundaries() if isinstance(loaded.model, DepthTransformer) else ()
    attention = cast(Any, next(iter(loaded.model.blocks.values()))).attention
    cuda = loaded.device.type == "cuda"
    write_json(
        args.json,
        {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": str(args.checkpoint.resolve()),
            "run": loaded.run,
            "method": loaded.method,
            "scale": loaded.scale,
            "parameters": loaded.model.num_params,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": loaded.device.type,
            "attention_backend": type(attention.backend).__name__,
            "depth_backend": sorted(
                # LDM may run another one without gradients than it chose.
                {
                    str(getattr(b, "inference_backend", None) or b.selected_backend)
                    for b in boundaries
                }
            ),
            "use_cache": not args.no_cache,
            "prefill_chunk": args.prefill_chunk,
            "cuda_graph": timings[-1].cuda_graph,
            "random_prompt": args.random_prompt,
            "batch_size": timings[0].batch_size,
            "prompt_tokens": timings[0].prompt_tokens,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": args.seed,
            "median_prefill_tokens_per_second": statistics.median(
                t.prefill_tokens_per_second for t in warm
            ),
            "median_decode_tokens_per_second": statistics.median(
                t.decode_tokens_per_second for t in warm
            ),
            "runs": [
                asdict(t)
                | {
                    "prefill_tokens_per_second": t.prefill_tokens_per_second,
                    "decode_tokens_per_second": t.decode_tokens_per_second,
                }
                for t in timings
            ],
            "peak_memory_bytes": torch.cuda.max_memory_allocated(loaded.device) if cuda else None,
            **run_info(),
            "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


if __name__ == "__main__":
    run_cli(main)

"""
Whether generation continues text as the model itself would: greedy text and logits of trained checkpoints.

    python paper-experiments/throughput/check_text.py RUN/step5000 [...] --gpu h200 --tokens DATA_DIR --json OUT.json

Each checkpoint is read twice in BF16 (FP32 on a CPU). Once it generates as it would for anybody: the backends that it picks by
itself, a KV cache, and on a GPU the whole decode step in one CUDA graph; all prompts as one batch, then the first one alone. Once
it is the reference: every depth connection's readable PyTorch, no cache, no kernel of ours, one row at a time, one forward pass
over prompt and new tokens together. A copy of that in FP32, with the same weights, is taken for the truth.

1. Text: at every new token, the generated one against the most likely one by the reference and by its FP32 copy. Where they
   differ, the gap of the two tokens' FP32 logits is set against the noise, which is the most that the reference's logit of one
   of these tokens is away from FP32 anywhere in the text: below twice the noise the difference is a tie, otherwise it is wrong.
   Up to the first difference this is the text that the reference would write; beyond it, the test goes on with the generated text.
2. Logits: relative RMS error to FP32 over the prompts (read in two pieces, the second on top of the first's cache) and over the
   decode steps, each beside the reference's own: at most 1.5 times that.

The exit code is 1 if anything is wrong, failed, or did not come to its turn within the budget.
"""

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_utils, uninstalled

import measure
import numpy as np
import timing
import torch

from config_utils.errors import UserError, run_cli

TEXTS = (
    "The river had been rising since noon, and by the time the lamps were lit in the village",
    "To make bread you need flour, water, salt and a little patience. First, mix the flour and",
    "In mathematics, a prime number is a whole number greater than one that",
    "def read_lines(path):\n    with open(path) as f:\n        return [line.strip() for line in f",
    "The committee met on Tuesday to discuss the new budget. Its chair said that",
    '"I have never seen the sea," she said, and the old man laughed. "Then we must',
    "Plants turn sunlight, water and carbon dioxide into sugar. This process is called",
    "Dear Sir, I am writing about the parcel that should have arrived last week. So far",
)
"""Prompts where no token files are given."""
TIE_FACTOR = 2.0
"""Both logits may be off by the noise, towards each other."""
ERROR_FACTOR = 1.5
"""
The kernels' logits may be this much further from FP32 than the reference's: both round their activations in BF16, but at
places of their own.
"""
FLOOR = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
"""
Errors, relative to the logits, that are nothing: of BF16 half a rounding of the logits themselves; of FP32 another order of
sums, since the reference in FP32 is its own truth.
"""


class Prompts(NamedTuple):
    """What a checkpoint continues."""

    source: str
    """Where they come from, for the report."""
    ids: list[list[int]]
    """At least one token each; the lengths may differ."""
    tokenizer: Any
    """Of the ``tokenizers`` library, or ``None``."""


class Job(NamedTuple):
    name: str
    path: Path
    prompts: Prompts


@dataclass
class Error:
    """Sums for the relative RMS error of logits over many positions."""

    squares: float = 0.0
    total: float = 0.0
    worst: float = 0.0
    """The largest at one position."""
    finite: bool = True

    def add(self, logits: torch.Tensor, truth: torch.Tensor) -> None:
        """Both ``[T, V]``."""
        squares = (logits.float() - truth).square().sum(dim=-1, dtype=torch.float64)
        total = truth.square().sum(dim=-1, dtype=torch.float64)
        self.finite &= bool(squares.isfinite().all())
        self.squares += float(squares.sum())
        self.total += float(total.sum())
        self.worst = max(self.worst, float((squares / total).max().sqrt()))

    @property
    def relative_rms(self) -> float:
        """Infinite if a logit is no number."""
        if not self.finite:
            return float("inf")
        return (self.squares / self.total) ** 0.5 if self.total else 0.0


@dataclass
class Text:
    """How the generated tokens compare with the most likely ones, over the rows of a batch."""

    tokens: int = 0
    equal_rows: int = 0
    """Rows whose text is the reference's at every position."""
    differs: int = 0
    """Positions where the reference would have chosen another token."""
    differs_from_fp32: int = 0
    reference_from_fp32: int = 0
    """Positions where the reference itself would have chosen another token than its FP32 copy."""
    ties: int = 0
    """Differences, from one or the other, that rounding explains."""
    wrong: int = 0
    first: list[dict[str, Any]] = field(default_factory=list)
    """The first difference of each row from the reference and from FP32."""


def compare_text(
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], floor: float
) -> tuple[Text, float]:
    """
    Judge every generated token.

    :param rows: For each row of the batch the new tokens ``[n]``, int64, and what the reference and its FP32 copy say where
        each of them was chosen, ``[n, V]`` both.
    :param floor: Noise, relative to the largest logit, that is assumed even where none is measured.

    :returns: The counts, and the noise of a logit.
    """
    noise = 0.0
    for tokens, reference, truth in rows:
        for chosen in (tokens, truth.argmax(dim=-1)):
            off = (reference.float() - truth).gather(-1, chosen.unsqueeze(-1)).abs().max()
            noise = max(noise, float(off), floor * float(truth.abs().max()))
    text = Text()
    for row, (tokens, reference, truth) in enumerate(rows):
        best = {"reference": reference.argmax(dim=-1), "fp32": truth.argmax(dim=-1)}
        text.tokens += tokens.numel()
        text.differs += int((tokens != best["reference"]).sum())
        text.differs_from_fp32 += int((tokens != best["fp32"]).sum())
        text.reference_from_fp32 += int((best["reference"] != best["fp32"]).sum())
        text.equal_rows += bool(tokens.equal(best["reference"]))
        for name, expected in best.items():
            values = [truth.gather(-1, t.unsqueeze(-1)).squeeze(-1) for t in (expected, tokens)]
            gap = (values[0] - values[1]).abs()
            different = tokens != expected
            # Not "larger than": a gap that is no number is wrong too.
            wrong = different & ~(gap < TIE_FACTOR * noise)
            text.wrong += int(wrong.sum())
            text.ties += int((different & ~wrong).sum())
            found = different.nonzero().flatten().tolist()
            # The first one, and the first one that is wrong.
            for i in sorted({*found[:1], *wrong.nonzero().flatten().tolist()[:1]}):
                text.first.append(
                    {
                        "row": row,
                        "new_token": i,
                        "against": name,
                        "token": int(tokens[i]),
                        "expected": int(expected[i]),
                        "gap": float(gap[i]),
                        "verdict": "wrong" if bool(wrong[i]) else "tie",
                    }
                )
    return text, noise


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """
    The forward pass of ``ids`` (``[T]``, int64) in plain PyTorch: ``[T, V]``.

    With gradients enabled, for then no kernel of inference runs; the parameters are frozen, so nothing is kept.
    """
    with torch.enable_grad():
        return model(ids.unsqueeze(0))[0]


def padded(prompts: list[list[int]], device: torch.device, *, left: bool) -> list[torch.Tensor]:
    """Token ids and mask, ``[B, longest]`` each, int64."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        columns = slice(longest - len(prompt), longest) if left else slice(len(prompt))
        ids[row, columns] = torch.tensor(prompt)
        mask[row, columns] = 1
    return [ids.to(device), mask.to(device)]


@torch.inference_mode()
def prompt_logits(model: Any, prompts: list[list[int]], device: torch.device) -> torch.Tensor:
    """All logits of the prompts, ``[B, longest, V]``, by the path with the cache and in two pieces; padding is on the right."""
    from olmo_core.nn.depth.session import InferenceSession

    ids, _ = padded(prompts, device, left=False)
    session = InferenceSession(model, *ids.shape, cuda_graph=False)
    with session.attached():
        for cache in session.caches:
            cache.rewind()
        return torch.cat([model(piece) for piece in ids.chunk(2, dim=1)], dim=1)


def check_batch(
    module: Any, reference: Any, exact: Any, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """One batch: its row of the report, and under ``ids`` the generated tokens of its first row."""
    device, n_prompts = module.device, len(prompts)
    ids, mask = padded(prompts, device, left=True)
    generated, logits, _ = module.generate_batch(
        ids, attention_mask=mask, return_logits=True, completions_only=True, log_timing=False,
        max_new_tokens=new_tokens,
    )  # fmt: skip
    graph, backend = module.last_timing.cuda_graph, backends(module.model)
    decode_seconds = module.last_timing.decode_seconds
    module.free_inference_cache()
    # The graph must hand on the token that its own logits make the most likely.
    best = logits.max(dim=-1).values
    follows = bool((logits.gather(-1, generated.unsqueeze(-1)).squeeze(-1) == best).all())
    of_prompts = prompt_logits(module.model, prompts, device)

    prefill, decode, prefill_noise, decode_noise = (Error() for _ in range(4))
    rows, nats, n_predicted = [], 0.0, 0
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        text = torch.cat([torch.tensor(prompt, device=device), generated[row]])
        truth, plain = reference_logits(exact, text), reference_logits(reference, text)
        prefill.add(of_prompts[row, :n], truth[:n])
        prefill_noise.add(plain[:n], truth[:n])
        # The last column of the prompt's logits chose the first token, and nothing follows the last one.
        chosen = slice(n - 1, n - 1 + new_tokens)
        decode.add(logits[row, 1:], truth[chosen][1:])
        decode_noise.add(plain[chosen][1:], truth[chosen][1:])
        rows.append((generated[row], plain[chosen], truth[chosen]))
        if n > 1:
            loss = torch.nn.functional.cross_entropy(truth[: n - 1], text[1:n], reduction="sum")
            nats, n_predicted = nats + float(loss), n_predicted + n - 1
    dtype = logits.dtype
    text_found, noise = compare_text(rows, FLOOR[torch.float32])
    problems = []
    for what, error, own in (
        ("prefill", prefill, prefill_noise),
        ("decode", decode, decode_noise),
    ):
        if not error.relative_rms <= ERROR_FACTOR * own.relative_rms + FLOOR[dtype]:
            problems.append(f"the logits of {what}")
    if not follows:
        problems.append("the choice of a token by its own logits")
    if text_found.wrong:
        problems.append(f"{text_found.wrong} tokens")
    if graph != (device.type == "cuda"):
        problems.append("no CUDA graph")
    return {
        "status": "wrong" if problems else "ok",
        "problems": problems,
        "batch": n_prompts,
        "new_tokens": new_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "cuda_graph": graph,
        "prompt_nats_per_token": nats / n_predicted if n_predicted else None,
        "distinct_tokens": int(generated.unique().numel()),
        "text": vars(text_found),
        "logit_noise": noise,
        "prefill_error": prefill.relative_rms,
        "prefill_error_of_reference": prefill_noise.relative_rms,
        "prefill_worst_position": [prefill.worst, prefill_noise.worst],
        "decode_error": decode.relative_rms,
        "decode_error_of_reference": decode_noise.relative_rms,
        "decode_worst_position": [decode.worst, decode_noise.worst],
        "decode_seconds": decode_seconds,
        "ids": generated[0].tolist(),
    }


def backends(model: Any) -> list[str]:
    """What the boundaries run in evaluation; a plain transformer has none."""
    boundaries = model.boundaries() if hasattr(model, "boundaries") else ()
    return sorted({measure.running_backend(b, gradients=False) for b in boundaries})


def check_checkpoint(
    job: Job, device: torch.device, dtype: torch.dtype, new_tokens: int, backend: str | None
) -> Iterator[dict[str, Any]]:
    """
    The rows of a checkpoint: all prompts as one batch, and the first alone.

    :param backend: Of the depth connections that generate, instead of what generation picks by itself.
    """
    from eval.checkpoint import load_checkpoint
    from eval.generate import set_depth_backend
    from olmo_core.generate.generation_module import GenerationConfig
    from olmo_core.nn.depth import DepthBackend
    from olmo_core.nn.depth.generation import DepthGenerationModule
    from olmo_core.nn.depth.session import supports_session

    plain = load_checkpoint(job.path, device, dtype)
    set_depth_backend(plain, DepthBackend.reference)
    reference = plain.model.requires_grad_(False)
    exact = copy.deepcopy(reference).float()
    loaded = load_checkpoint(job.path, device, dtype)
    if backend is not None:
        set_depth_backend(loaded, DepthBackend(backend))
    never = loaded.model_config.vocab_size  # no model produces the id after its last
    module = DepthGenerationModule.from_model(
        loaded.model, GenerationConfig(pad_token_id=never + 1, eos_token_id=never)
    )
    if not supports_session(loaded.model):
        raise UserError(
            f"{job.path}: its attention is not torch's, so that generation runs without a CUDA graph: nothing to check here"
        )
    everything = job.prompts.ids
    for ids in (everything, everything[:1])[: len(everything)]:
        row = {"method": loaded.method, "scale": loaded.scale, "step": loaded.step}
        row |= check_batch(module, reference, exact, ids, new_tokens)
        show(row, job)
        yield row


def show(row: dict[str, Any], job: Job) -> None:
    """What a batch gave; the first differences; for the batch with all prompts, the text."""
    text = row["text"]
    say(
        f"  batch {row['batch']}: {row['status']}"
        + (f" ({', '.join(row['problems'])})" if row["problems"] else "")
        + f"; {text['equal_rows']} of {row['batch']} texts equal the reference's; {row['distinct_tokens']} distinct tokens; "
        f"noise of a logit {row['logit_noise']:.3g}; decode {row['decode_seconds']:.2f} s"
    )
    for d in text["first"]:
        say(
            f"    row {d['row']}, new token {d['new_token']}: {d['token']}, by {d['against']} {d['expected']}; "
            f"FP32 logits {d['gap']:.3g} apart: {d['verdict']}"
        )
    ids = row.pop("ids")
    tokenizer = job.prompts.tokenizer
    if tokenizer is not None and row["batch"] == len(job.prompts.ids):
        say(f"  first prompt: {tokenizer.decode(job.prompts.ids[0])!r}")
        say(f"  goes on with: {tokenizer.decode(ids)!r}")


# Prompts.


def find_prompts(
    checkpoint: Any, tokens: Path | None, n_prompts: int, prompt_length: int
) -> Prompts:
    """
    Of the held-out documents if there are any; else :data:`TEXTS`, if there is a tokenizer; else random tokens.

    :raises UserError: If the token files are not those of a corpus of the checkpoint's tokenizer, or have too few documents.
    """
    tokenizer, reason = None, ""
    try:
        from eval.run import find_tokenizer

        tokenizer = find_tokenizer(checkpoint).tokenizer
    except (ImportError, UserError) as e:
        reason = measure.first_line(e)
    if tokens is not None:
        ids = held_out_documents(checkpoint, tokens, n_prompts, prompt_length)
        return Prompts("held-out documents", ids, tokenizer)
    if tokenizer is not None:
        if n_prompts > len(TEXTS):
            raise UserError(
                f"--prompts {n_prompts}: there are {len(TEXTS)} of our own; give --tokens DATA_DIR for more"
            )
        texts = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS[:n_prompts]]
        return Prompts("sentences of our own", [t[:prompt_length] for t in texts], tokenizer)
    size = checkpoint.tokenizer_config.vocab_size
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, size, (n_prompts, prompt_length), generator=generator).tolist()
    return Prompts(f"random tokens (no tokenizer: {reason})", random, None)


def held_out_documents(
    checkpoint: Any, folder: Path, n_prompts: int, prompt_length: int
) -> list[list[int]]:
    """The starts of the first documents of at least ``prompt_length`` tokens, in the order of the held-out shards."""
    from data_utils.errors import BadInput
    from data_utils.shards import read_corpus

    try:
        manifest = read_corpus(folder)
    except BadInput as e:
        raise UserError(str(e)) from None
    ours, theirs = checkpoint.tokenizer_config, manifest.tokenizer
    if (theirs.vocab_size, theirs.eos_token_id) != (ours.vocab_size, ours.eos_token_id):
        raise UserError(
            f"{folder} was tokenised with {theirs.vocab_size} tokens and EOS {theirs.eos_token_id}, {checkpoint.path} was "
            f"trained with {ours.vocab_size} and {ours.eos_token_id}: give a corpus of the checkpoint's tokenizer"
        )
    found: list[list[int]] = []
    for path in manifest.paths(folder, "eval"):
        stream = np.memmap(path, mode="r", dtype=np.dtype(manifest.dtype).newbyteorder("<"))
        start = 0
        for end in np.flatnonzero(stream == ours.eos_token_id).tolist():
            if end - start >= prompt_length:
                found.append(stream[start : start + prompt_length].astype(int).tolist())
                if len(found) == n_prompts:
                    return found
            start = end + 1
    raise UserError(
        f"{folder} has {len(found)} held-out documents of {prompt_length} tokens or more, not {n_prompts}: lower --prompts "
        "or --prompt-length"
    )


# The command.


def say(text: str) -> None:
    print(text, flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="+", help="a stepN folder of a run")
    parser.add_argument("--gpu", default="h200", help="h100, h200, b200 or cpu (default: h200)")
    parser.add_argument(
        "--backend",
        help="generate with this backend of the depth connections (default: what generation picks by itself)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="(default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="DATA_DIR",
        help="a tokenised corpus: prompts are starts of its held-out documents (default: sentences of our own)",
    )
    for name, default, what in (
        ("--new-tokens", 256, "tokens to generate"),
        ("--prompts", 4, "rows of the batch"),
        ("--prompt-length", 128, "tokens of a prompt, at most"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} ({default})"
        )
    parser.add_argument(
        "--budget", type=float, default=140, help="seconds after which nothing new starts (140)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to this file")
    args = parser.parse_args(argv)
    for name, least in (("new_tokens", 2), ("prompts", 1), ("prompt_length", 2)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise UserError(f"--{option} must be at least {least}, got {getattr(args, name)}")
    if args.backend is not None:
        from olmo_core.nn.depth import DepthBackend

        if args.backend not in list(DepthBackend):
            raise UserError(
                f"unknown backend '{args.backend}': choose one of {', '.join(DepthBackend)}"
            )
    if args.gpu not in measure.GPUS:
        raise UserError(f"unknown GPU '{args.gpu}': choose one of {', '.join(measure.GPUS)}")
    if args.gpu != "cpu" and not torch.cuda.is_available():
        raise UserError(
            f"--gpu {args.gpu}: this machine has no CUDA GPU; --gpu cpu runs on the CPU"
        )
    return args


def table(rows: list[dict[str, Any]]) -> str:
    """One line for a batch: counts of text, and the errors of logits with the reference's own beside them."""
    head = (
        "checkpoint", "backend", "graph", "batch", "tokens", "differ", "from FP32", "ties", "wrong",
        "prefill (reference)", "decode (reference)", "status",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        if "text" not in row:
            lines.append((row["name"], *["-"] * (len(head) - 2), row["status"]))
            continue
        text = row["text"]
        cells = (
            row["name"], "/".join(row["backend"]) or "-", "yes" if row["cuda_graph"] else "no",
            row["batch"], text["tokens"], text["differs"],
            f"{text['differs_from_fp32']} ({text['reference_from_fp32']})", text["ties"], text["wrong"],
            *(f"{row[f'{k}_error']:.2e} ({row[f'{k}_error_of_reference']:.2e})" for k in ("prefill", "decode")),
            row["status"],
        )  # fmt: skip
        lines.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from eval.checkpoint import check_weights, default_dtype, open_weights, read_checkpoint
    from eval.generate import check_output

    device = torch.device("cpu" if args.gpu == "cpu" else "cuda:0")
    dtype = default_dtype(device) if args.dtype is None else getattr(torch, args.dtype)
    # Everything that can be wrong, before a weight is read.
    jobs = []
    for path in args.checkpoint:
        checkpoint = read_checkpoint(path)
        check_weights(checkpoint, open_weights(path))
        prompts = find_prompts(checkpoint, args.tokens, args.prompts, args.prompt_length)
        jobs.append(Job(f"{checkpoint.run or checkpoint.method}/{path.name}", path, prompts))
    if args.json is not None:
        check_output(args.json, "--json")
    torch.manual_seed(0)
    # FP32 is the truth here.
    torch.set_float32_matmul_precision("highest")
    end = time.perf_counter() + args.budget
    say(f"{timing.device_name(device)}, torch {torch.__version__}, {dtype}")

    rows: list[dict[str, Any]] = []
    for job in jobs:
        row: dict[str, Any] = {"name": job.name, "prompts": job.prompts.source}
        row["prompt_tokens"] = [len(ids) for ids in job.prompts.ids]
        say(f"{job.name}: {args.new_tokens} tokens after {job.prompts.source}")
        if time.perf_counter() > end:
            rows.append(row | {"status": "no time left"})
            continue
        try:
            for one in check_checkpoint(job, device, dtype, args.new_tokens, args.backend):
                rows.append(row | one)
        except torch.OutOfMemoryError as e:
            rows.append(row | {"status": "oom", "error": measure.first_line(e)})
        except Exception as e:
            # Whatever it is, the other checkpoints are worth having.
            rows.append(row | {"status": "failed", "error": measure.first_line(e)})
        if "error" in rows[-1]:
            say(f"  {rows[-1]['status']}: {rows[-1]['error']}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    say("")
    say(table(rows))
    say(
        "differ: tokens that are not the reference's choice; from FP32: (and in brackets the reference's own) that are not its "
        "FP32 copy's; ties, wrong: both kinds together; prefill, decode: relative RMS errors of logits to FP32"
    )
    bad = [row["name"] for row in rows if row["status"] != "ok"]
    say(f"not ok: {', '.join(dict.fromkeys(bad))}" if bad else "all ok")
    if args.json is not None:
        from config_utils.run_info import run_info

        timing.write_json(
            args.json,
            {
                "device": timing.device_name(device),
                "torch": torch.__version__,
                "rows": rows,
                "run": run_info(),
            },
        )
    return 1 if bad else 0


if __name__ == "__main__":
    run_cli(main)

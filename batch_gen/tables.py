"""Every Parquet table that batch-gen writes beside plans: fixed schemas, parts, and the two tables merged from them.

A part is written with its schema, never with one inferred from its rows, so that parts of different hours, workers and
versions read as one table. Times in seconds, sizes in bytes, instants in UTC.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from batch_gen import rules

Row: TypeAlias = Mapping[str, object]
Source: TypeAlias = bytes | Path

ROW_GROUP_ROWS: Final = 10_000
MESSAGE_MAX_CHARS: Final = 2_000
MAX_EXTRA_COLUMNS: Final = 64
EXTRA_PREFIX: Final = "extra."
FOREIGN_BATCH_ROWS: Final = 1_000

EXTRA_TYPES: Final[dict[str, pa.DataType]] = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "bytes": pa.binary(),
}
"""Types of carried-through columns by the Python type of their cells."""

_ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "fps": pa.string(),
    "media": pa.string(),
}

_IDENTITY: Final = [("clip_id", pa.string()), ("row_id", pa.string()), ("sample", pa.int32())]
_RESULT: Final = [
    ("status", pa.string()),
    ("url", pa.string()),
    ("key", pa.string()),
    ("frames_hash", pa.string()),
    ("bytes", pa.int64()),
    ("sha256", pa.string()),
    ("duration_s", pa.float64()),
]
_STAGES: Final = ("queue_wait", "text", "denoise", "decode", "encode", "verify", "upload", "total")
_SAMPLING: Final = [
    ("prompt", pa.string()),
    ("seed", pa.int64()),
    ("width", pa.int32()),
    ("height", pa.int32()),
    ("num_frames", pa.int32()),
    ("fps", pa.string()),
    ("steps", pa.int32()),
    ("guidance_high", pa.float64()),
    ("guidance_low", pa.float64()),
    ("flow_shift", pa.float64()),
    ("preset", pa.string()),
]
_ATTEMPT: Final = [
    ("attempt", pa.int32()),
    ("epoch", pa.int32()),
    ("worker", pa.string()),
    ("replica", pa.int32()),
    ("chunk", pa.string()),
]
_FAILURE: Final = [("class", pa.string()), ("kind", pa.string()), ("message", pa.string())]
_EXTRA: Final = [("extra", pa.string())]

METRICS_SCHEMA: Final = pa.schema(
    [
        *_IDENTITY,
        *_RESULT,
        *((f"{stage}_s", pa.float64()) for stage in _STAGES),
        ("step_p50_s", pa.float64()),
        ("step_p95_s", pa.float64()),
        ("supervisor_peak_bytes", pa.int64()),
        ("engine_peak_bytes", pa.int64()),
        ("device_peak_bytes", pa.int64()),
        ("skipped_steps", pa.int32()),
        *_ATTEMPT,
        *_SAMPLING,
        ("tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("flags", pa.string()),
        ("request_digest", pa.string()),
        ("fingerprint", pa.string()),
        ("numerics_key", pa.string()),
        ("started_at", pa.timestamp("ms", tz="UTC")),
        ("finished_at", pa.timestamp("ms", tz="UTC")),
        *_EXTRA,
    ]
)
ERRORS_SCHEMA: Final = pa.schema(
    [
        *_IDENTITY,
        ("status", pa.string()),
        *_FAILURE,
        *_ATTEMPT,
        *_SAMPLING,
        ("request_digest", pa.string()),
        ("failed_at", pa.timestamp("ms", tz="UTC")),
        *_EXTRA,
    ]
)
CLIPS_SCHEMA: Final = pa.schema(
    [*_IDENTITY, *_RESULT, *_SAMPLING, *_FAILURE, ("attempt", pa.int32()), ("epoch", pa.int32()), *_EXTRA]
)


def manifest_schema(
    columns: Sequence[str] = rules.COLUMNS,
    extra: Mapping[str, pa.DataType] | None = None,
    *,
    binary: Collection[str] = (),
) -> pa.Schema:
    """The canonical schema of a manifest with the given schema columns, extra columns after them.

    Image columns named in `binary` hold bytes, otherwise paths and URIs.
    """
    types = {name: pa.binary() if name in binary else _ARROW[rules.BY_COLUMN[name].type] for name in columns}
    known = [pa.field(name, kind) for name, kind in types.items()]
    return pa.schema([*known, *(pa.field(name, kind) for name, kind in (extra or {}).items())])


def table_of(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table of exactly this schema; a missing cell is null, `extra` may be given as a mapping.

    Raises:
        ValueError: A row has a column that the schema lacks, or a value that does not fit.
    """
    names = set(schema.names)
    prepared = [_prepared(row, names) for row in rows]
    try:
        return pa.Table.from_pylist(prepared, schema=schema)
    except pa.ArrowException as error:
        raise ValueError(f"a row does not fit the table's schema: {error}") from error


def _prepared(row: Row, names: set[str]) -> dict[str, object]:
    unknown = row.keys() - names
    if unknown:
        raise ValueError(f"columns {sorted(unknown)} are not in the table's schema {sorted(names)}")
    cells = dict(row)
    for name in ("extra", "flags"):
        if cells.get(name) is not None and not isinstance(cells[name], str):
            cells[name] = json.dumps(cells[name], sort_keys=True, ensure_ascii=False, default=dict)
    message = cells.get("message")
    if isinstance(message, str):
        cells["message"] = message[:MESSAGE_MAX_CHARS]
    return cells


def to_bytes(table: pa.Table) -> bytes:
    """The table as Parquet; the same table gives the same bytes."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP_ROWS)
    return sink.getvalue()


def metrics_part(rows: Iterable[Row]) -> bytes:
    """One metrics part as Parquet; columns of `METRICS_SCHEMA`, unknown columns are a ValueError."""
    return to_bytes(table_of(rows, METRICS_SCHEMA))


def errors_part(rows: Iterable[Row]) -> bytes:
    """One errors part as Parquet; columns of `ERRORS_SCHEMA`, unknown columns are a ValueError."""
    return to_bytes(table_of(rows, ERRORS_SCHEMA))


def read_table(source: Source, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole Parquet file or body as a table."""
    return pq.read_table(pa.BufferReader(source) if isinstance(source, bytes) else source, columns=columns)


def read_rows(source: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """A whole Parquet file or body as dicts; for small tables and tests."""
    rows: list[dict[str, Any]] = read_table(source, columns).to_pylist()
    return rows


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of any Parquet file as dicts, in order.

    Raises:
        ValueError: The file is not sound Parquet.
    """
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=FOREIGN_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot be read as Parquet ({str(error).splitlines()[0][:200]})") from error


def column_types(path: Path) -> dict[str, pa.DataType]:
    """Names and Arrow types of a Parquet file's columns."""
    return {field.name: field.type for field in pq.read_schema(path)}


def merge_metrics(parts: Iterable[Source]) -> bytes:
    """metrics.parquet from its parts: one row per clip, the last epoch's; carried columns as `extra.<name>`."""
    return to_bytes(_with_extra_columns(_latest(_conform_all(parts, METRICS_SCHEMA), METRICS_SCHEMA)))


def merge_clips(metrics: Iterable[Source], errors: Iterable[Source]) -> bytes:
    """clips.parquet, the one index of results: every clip with a verdict, in clip_id order.

    A committed clip stands with its metrics; one that never was, with its last error.
    """
    committed = _latest(_conform_all(metrics, METRICS_SCHEMA), METRICS_SCHEMA)
    failed = _latest(_conform_all(errors, ERRORS_SCHEMA), ERRORS_SCHEMA)
    done = set(committed.column("clip_id").to_pylist())
    keep = pa.array([clip_id not in done for clip_id in failed.column("clip_id").to_pylist()], pa.bool_())
    both = pa.concat_tables([_conform(committed, CLIPS_SCHEMA), _conform(failed.filter(keep), CLIPS_SCHEMA)])
    return to_bytes(_with_extra_columns(both.sort_by("clip_id")))


def _conform_all(parts: Iterable[Source], schema: pa.Schema) -> Iterator[pa.Table]:
    for part in parts:
        yield _conform(read_table(part), schema)


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with exactly the schema's columns: parts of older versions lack some, newer ones have more."""
    present = set(table.column_names)
    columns = [
        table.column(field.name).cast(field.type) if field.name in present else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _latest(tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    """One row per clip_id: that of the highest (epoch, attempt), the later part on a tie."""
    whole = pa.concat_tables([schema.empty_table(), *tables])
    chosen: dict[str, tuple[tuple[int, int], int]] = {}
    keys = zip(*(whole.column(name).to_pylist() for name in ("clip_id", "epoch", "attempt")), strict=True)
    for index, (clip_id, epoch, attempt) in enumerate(keys):
        rank = (epoch or 0, attempt or 0)
        if clip_id not in chosen or rank >= chosen[clip_id][0]:
            chosen[clip_id] = (rank, index)
    order = [chosen[clip_id][1] for clip_id in sorted(chosen)]
    return whole.take(pa.array(order, pa.int64()))


def _with_extra_columns(table: pa.Table) -> pa.Table:
    """The table with one text column `extra.<name>` per carried-through column (the first 64 by name)."""
    bodies = [json.loads(text) if text else {} for text in table.column("extra").to_pylist()]
    names = sorted({name for body in bodies for name in body})[:MAX_EXTRA_COLUMNS]
    for name in names:
        cells = [_as_text(body.get(name)) for body in bodies]
        table = table.append_column(EXTRA_PREFIX + name, pa.array(cells, pa.string()))
    return table


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class ManifestWriter:
    """Writes a manifest part by part, row groups of 10,000 rows; a context manager.

    The same rows give the same bytes, however they are cut into calls.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            self._flush(at_least=1)
        self._writer.close()

    def write(self, table: pa.Table) -> None:
        """Append a table of the writer's schema."""
        self._pending.append(table.cast(self._schema))
        self._num_pending += table.num_rows
        self._flush(at_least=ROW_GROUP_ROWS)

    def _flush(self, at_least: int) -> None:
        if self._num_pending < at_least:
            return
        whole = pa.concat_tables(self._pending)
        start = 0
        while self._num_pending - start >= at_least:
            self._writer.write_table(whole.slice(start, ROW_GROUP_ROWS).combine_chunks())
            start += min(ROW_GROUP_ROWS, self._num_pending - start)
        self._pending = [whole.slice(start)]
        self._num_pending -= start


def write_manifest(path: Path, rows: Sequence[Row], extra: Mapping[str, pa.DataType] | None = None) -> None:
    """A small manifest: the schema columns that any row fills, and the given extra columns."""
    used = {name for row in rows for name in row}
    schema = manifest_schema([name for name in rules.COLUMNS if name in used], extra)
    with ManifestWriter(path, schema) as writer:
        writer.write(table_of(rows, schema))

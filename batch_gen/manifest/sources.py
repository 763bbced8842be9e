"""Opens the manifest's files: folders expanded, footers checked, columns matched, batches of bounded size."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batch_gen import rules
from batch_gen.errors import Fault
from batch_gen.manifest.canon import canonical, flat, type_problem
from batch_gen.manifest.options import ManifestSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batch_gen.manifest.faults import FaultLog

BATCH_ROWS: Final = 32_768
BATCH_BYTES: Final = 64 * 2**20

# Names of other tools that would be carried through unread without a word.
FOREIGN: Final = {
    "caption": "prompt",
    "text": "prompt",
    "num_inference_steps": "steps",
    "sample_steps": "steps",
    "guidance_scale": "guidance_high",
    "guidance_scale_2": "guidance_low",
    "frame_num": "num_frames",
    "sample_shift": "flow_shift",
    "size": "width and height",
    "id": "row_id",
    "base_seed": "seed",
}


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One Parquet file of the manifest.

    Attributes:
        index: Its place in the manifest.
        source: Where it lies and how it is called.
        group_rows: Rows of each row group.
        columns: Schema columns that it has and that can be read.
        extra: Its other columns.
        batch_rows: Rows that are read at once, so that a batch stays near 64 MB.
        first_global: Number of its first row in the whole manifest.
    """

    index: int
    source: ManifestSource
    group_rows: tuple[int, ...]
    columns: tuple[str, ...]
    extra: tuple[str, ...]
    batch_rows: int
    first_global: int

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.group_rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of one row group.

    Attributes:
        file: The file.
        row_group: Index of the row group.
        first_row: Row number in the file of the first row.
        num_rows: Rows in the batch.
        cells: Canonical cells by schema column; columns that the file lacks are absent.
        extra: Other columns, as stored.
    """

    file: ManifestFile
    row_group: int
    first_row: int
    num_rows: int
    cells: dict[str, pa.Array]
    extra: dict[str, pa.Array]

    @property
    def first_global(self) -> int:
        """Number of the first row in the whole manifest."""
        return self.file.first_global + self.first_row


def open_files(sources: Sequence[ManifestSource], log: FaultLog) -> list[ManifestFile]:
    """The files behind the sources, in order; whatever is wrong with one goes to the log."""
    files: list[ManifestFile] = []
    seen: set[Path] = set()
    for source in _expanded(sources, log):
        real = source.path.resolve()
        if real in seen:
            log.add(Fault(source.name, None, None, None, "is given twice; each row would render twice"))
            continue
        seen.add(real)
        first_global = files[-1].first_global + files[-1].num_rows if files else 0
        opened = _open(source, len(files), first_global, log)
        if opened is not None:
            files.append(opened)
    return files


def _expanded(sources: Sequence[ManifestSource], log: FaultLog) -> Iterator[ManifestSource]:
    for source in sources:
        if not source.path.is_dir():
            yield source
            continue
        inside = [path for path in sorted(source.path.rglob("*.parquet")) if not _hidden(path, source.path)]
        if not inside:
            log.add(Fault(source.name, None, None, None, "is a folder without a .parquet file"))
        for path in inside:
            relative = path.relative_to(source.path)
            base = f"{source.base.rstrip('/')}/{relative.parent}" if relative.parent != Path() else source.base
            yield ManifestSource(path, f"{source.name.rstrip('/')}/{relative}", base)


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def _open(source: ManifestSource, index: int, first_global: int, log: FaultLog) -> ManifestFile | None:
    problem = _not_parquet(source.path)
    if problem is None:
        try:
            with pq.ParquetFile(source.path) as file:
                return _inspected(source, index, first_global, file, log)
        except (pa.ArrowException, OSError, ValueError) as error:
            problem = f"cannot be read as Parquet; it is torn or of an unknown version ({_first_line(error)})"
    log.add(Fault(source.name, None, None, None, problem))
    return None


def _not_parquet(path: Path) -> str | None:
    """Why a file is no Parquet file, told from its first and last bytes; None when it looks like one."""
    try:
        with open(path, "rb") as file:
            head = file.read(4)
            file.seek(0, 2)
            size_bytes = file.tell()
            file.seek(max(0, size_bytes - 4))
            tail = file.read(4)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be opened ({error.strerror})"
    if size_bytes == 0:
        return "is empty (0 bytes)"
    if head == b"PARE":
        return "is an encrypted Parquet file; decrypt it first"
    if head != b"PAR1":
        return "is not a Parquet file; batch-gen import makes one of text, CSV, JSONL or another table"
    if tail != b"PAR1" or size_bytes < 12:
        return f"is a Parquet file that was cut short ({size_bytes:,} bytes); copy or write it again"
    return None


def _inspected(
    source: ManifestSource, index: int, first_global: int, file: pq.ParquetFile, log: FaultLog
) -> ManifestFile:
    schema: pa.Schema = file.schema_arrow
    metadata = file.metadata
    columns, extra = _matched(source.name, schema, log)
    sizes = [metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups)]
    row_bytes = sum(sizes) / max(1, metadata.num_rows)
    return ManifestFile(
        index=index,
        source=source,
        group_rows=tuple(metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)),
        columns=columns,
        extra=extra,
        batch_rows=max(1, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, row_bytes)))),
        first_global=first_global,
    )


def _matched(name: str, schema: pa.Schema, log: FaultLog) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Columns by the rules and columns beside them; doubled names and wrong types are faults."""
    columns: list[str] = []
    extra: list[str] = []
    for field in schema:
        if schema.names.count(field.name) > 1:
            if field.name not in [*columns, *extra]:
                log.add(Fault(name, None, field.name, None, "stands twice in the file; keep one of the two columns"))
                extra.append(field.name)
            continue
        rule = rules.BY_COLUMN.get(field.name)
        if rule is None:
            extra.append(field.name)
            continue
        problem = type_problem(rule, field.type)
        if problem is None:
            columns.append(field.name)
        else:
            log.add(Fault(name, None, field.name, None, problem))
    if "prompt" not in schema.names:
        log.add(Fault(name, None, "prompt", None, f"this column is required and missing{_near_prompt(schema.names)}"))
    return tuple(columns), tuple(extra)


def _near_prompt(names: Sequence[str]) -> str:
    near = [name for name in names if looks_like(name) == "prompt"]
    return f"; rename {near[0]!r}, or use batch-gen import" if near else f"; the file has {', '.join(names) or 'none'}"


def looks_like(name: str) -> str | None:
    """The schema column that another name probably means, or None."""
    folded = name.strip().lower().replace("-", "_").replace(" ", "_")
    if folded in rules.BY_COLUMN:
        return folded
    if folded in FOREIGN:
        return FOREIGN[folded]
    near = difflib.get_close_matches(folded, rules.COLUMNS, n=1, cutoff=0.84)
    return near[0] if near else None


def batches(
    file: ManifestFile,
    columns: Sequence[str],
    log: FaultLog,
    *,
    extra: Sequence[str] = (),
    row_groups: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """The file's rows in order, only the named columns read; a part that cannot be read is a fault.

    Args:
        file: The file.
        columns: Schema columns; those that the file lacks are left out.
        log: Takes what is wrong with the file's body.
        extra: Other columns, likewise.
        row_groups: Only these.
    """
    known = [name for name in columns if name in file.columns]
    others = [name for name in extra if name in file.extra]
    chosen = range(len(file.group_rows)) if row_groups is None else row_groups
    group = 0
    try:
        with pq.ParquetFile(file.source.path) as handle:
            for group in chosen:
                yield from _group_batches(file, handle, group, known, others)
    except (pa.ArrowException, OSError) as error:
        message = f"row group {group} cannot be read; the file is torn ({_first_line(error)})"
        log.add(Fault(file.source.name, None, None, None, message))


def _group_batches(
    file: ManifestFile, handle: pq.ParquetFile, group: int, known: list[str], others: list[str]
) -> Iterator[Batch]:
    first_row = sum(file.group_rows[:group])
    if not known and not others:
        yield Batch(file, group, first_row, file.group_rows[group], {}, {})
        return
    for piece in handle.iter_batches(batch_size=file.batch_rows, row_groups=[group], columns=[*known, *others]):
        cells = {name: canonical(rules.BY_COLUMN[name], piece.column(name)) for name in known}
        beside = {name: flat(piece.column(name)) for name in others}
        yield Batch(file, group, first_row, piece.num_rows, cells, beside)
        first_row += piece.num_rows


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__

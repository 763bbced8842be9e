"""The import itself: two passes over the sources, the first for their names, the second into a manifest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from batch_gen import rule_checks, tables
from batch_gen.errors import Fault, ManifestError, UsageError
from batch_gen.importing import grid as sweeps
from batch_gen.importing.mapping import (
    SOURCE_ID,
    Plan,
    Row,
    RowFault,
    Scan,
    check_engine,
    map_record,
    plan,
    schema_columns,
)
from batch_gen.importing.sources import Record, records
from batch_gen.request import ModelLimits, check_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

WRITE_ROWS: Final = 10_000
MAX_KEPT_FAULTS: Final = 1_000
FAULTS_TITLE: Final = "in the sources; nothing was written"
MIXED_IMAGES: Final = "is a path where other rows hold bytes; import the two kinds apart"
ANY_MODEL: Final = ModelLimits(name="any checkpoint", conditionings=("text", "image", "first_last"))


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What to import and how.

    Attributes:
        sources: Files, in order.
        destination: The manifest to write; replaced when it exists.
        engine: Whose names the files use where names are ambiguous.
        dedupe: Drop rows that are equal to an earlier one.
        grid: Sweeps, see `grid.parse`.
    """

    sources: tuple[Path, ...]
    destination: Path
    engine: str | None = None
    dedupe: bool = False
    grid: sweeps.Grid = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What an import did."""

    num_records: int = 0
    num_rows: int = 0
    num_equal: int = 0
    mapped: dict[str, dict[str, str]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "records": self.num_records,
            "rows": self.num_rows,
            "equal_rows": self.num_equal,
            "mapped": self.mapped,
            "extra": self.extra,
            "notes": self.notes,
        }


def import_files(options: ImportOptions) -> Report:
    """Write a canonical manifest of all sources; the same sources give the same bytes.

    Raises:
        UsageError: A source cannot be read, a name is ambiguous, or the destination is no .parquet file.
        ManifestError: Cells that no manifest may have, every one of them; nothing is written.
    """
    _check_paths(options)
    check_engine(options.engine)
    report = Report()
    plans, scans = [], []
    for source in options.sources:
        scan = _scanned(source)
        how = plan(str(source), scan.kinds, options.engine)
        scans.append(scan)
        plans.append(how)
        _note_names(report, str(source), how)
    report.num_records = sum(scan.num_records for scan in scans)
    writer = _Writer(options, plans, scans, report)
    writer.run()
    return report


def _check_paths(options: ImportOptions) -> None:
    if options.destination.suffix.lower() != ".parquet":
        raise UsageError(f"{options.destination}: the destination, the last argument, must end with .parquet")
    if not options.destination.resolve().parent.is_dir():
        raise UsageError(f"{options.destination}: the folder {options.destination.parent} does not exist")
    for source in options.sources:
        if source.resolve() == options.destination.resolve():
            raise UsageError(f"{source}: is source and destination at once; choose another destination")


def _scanned(source: Path) -> Scan:
    scan = Scan()
    for record in records(source):
        scan.add(record)
    if scan.num_records == 0:
        raise UsageError(f"{source}: holds no rows")
    return scan


def _note_names(report: Report, source: str, how: Plan) -> None:
    report.mapped[source] = {name: ", ".join(entry.columns) for name, entry in how.mapped.items()}
    report.extra[source] = list(how.extra)
    if any(entry.engine == "vllm-omni" for entry in how.mapped.values()):
        report.notes.append(
            f"{source}: guidance_scale went to guidance_high and guidance_scale_2 to guidance_low, "
            "as vLLM-Omni's code has it; numbers chosen by the words of its pages need --from vllm-omni-docs"
        )
    late = [name for name in how.extra if name.lower() in {"seconds", "duration"}]
    report.notes += [
        f"{source}: {name!r} needs a frame rate to become frames; it stays an extra column" for name in late
    ]


class _Writer:
    """The second pass; one object per import."""

    def __init__(self, options: ImportOptions, plans: Sequence[Plan], scans: Sequence[Scan], report: Report) -> None:
        self._options = options
        self._plans = plans
        self._report = report
        self._seen: Counter[bytes] = Counter()
        self._ids: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._num_faults = 0
        types = _extra_types(options.sources, plans, scans)
        columns = schema_columns(plans, [*options.grid, "row_id"] if options.grid else [])
        self._images = {column for column in ("image", "last_image") if _holds_bytes(column, plans, scans)}
        self._schema = tables.manifest_schema(columns, types, binary=self._images)
        self._texts = {name for name, kind in types.items() if kind == tables.EXTRA_TYPES["str"]}

    def run(self) -> None:
        destination = self._options.destination
        partial = destination.with_name(f".{destination.name}.part")
        try:
            with tables.ManifestWriter(partial, self._schema) as writer:
                for rows in _batched(self._rows()):
                    writer.write(tables.table_of(rows, self._schema))
            if self._num_faults:
                raise ManifestError(self._faults, num_faults=self._num_faults, title=FAULTS_TITLE)
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)

    def _rows(self) -> Iterator[Row]:
        for source, how in zip(self._options.sources, self._plans, strict=True):
            for record in records(source):
                yield from self._of_record(record, how, source)

    def _of_record(self, record: Record, how: Plan, source: Path) -> Iterator[Row]:
        where = f"{source} {record.place}"
        try:
            cells, extra = map_record(record, how, source, self._options.destination)
        except RowFault as error:
            self._fault(where, error.name, error.value, error.message)
            return
        broken = check_values(cells, ANY_MODEL)
        broken += [(name, MIXED_IMAGES) for name in sorted(self._images) if isinstance(cells.get(name), str)]
        for column, message in broken:
            self._fault(where, column, cells.get(column), message)
        if broken:
            return
        digest = _digest(cells)
        self._seen[digest] += 1
        repeat = self._seen[digest]
        if repeat > 1:
            self._report.num_equal += 1
            if self._options.dedupe:
                return
            if "row_id" in cells:
                cells["row_id"] = f"{cells['row_id']}-{repeat}"
        for row in sweeps.expand(cells, self._options.grid):
            if repeat > 1 and self._options.grid and "row_id" not in cells:
                row["row_id"] = f"{row['row_id']}-{repeat}"
            yield from self._named(row, extra, where)

    def _named(self, row: Row, extra: Row, where: str) -> Iterator[Row]:
        name = row.get("row_id")
        if isinstance(name, str):
            if name in self._ids:
                self._fault(where, "row_id", name, f"is already the id of {self._ids[name]}, whose row differs")
                return
            self._ids[name] = where
        self._report.num_rows += 1
        yield {**{key: self._extra_cell(key, cell) for key, cell in extra.items()}, **row}

    def _extra_cell(self, name: str, cell: object) -> object:
        if name in self._texts and not isinstance(cell, str):
            return json.dumps(cell, ensure_ascii=False, sort_keys=True, default=str)
        return cell

    def _fault(self, where: str, column: str, value: object, message: str) -> None:
        self._num_faults += 1
        if len(self._faults) < MAX_KEPT_FAULTS:
            text = None if value is None else rule_checks.shown(value)
            self._faults.append(Fault(where, None, column, text, message))


def _digest(cells: Row) -> bytes:
    body = sorted((column, repr(value)) for column, value in cells.items())
    return hashlib.sha256(repr(body).encode("utf-8", "surrogatepass")).digest()[:16]


def _batched(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == WRITE_ROWS:
            yield batch
            batch = []
    yield batch


def _holds_bytes(column: str, plans: Sequence[Plan], scans: Sequence[Scan]) -> bool:
    """Whether some cells of an image column are bytes: bytes themselves or a data set's {bytes, path}."""
    return any(
        name in scan.byte_images
        for how, scan in zip(plans, scans, strict=True)
        for name, entry in how.mapped.items()
        if entry.columns == (column,)
    )


def _extra_types(sources: Sequence[Path], plans: Sequence[Plan], scans: Sequence[Scan]) -> dict[str, Any]:
    """Arrow types of the extra columns: as in a Parquet source, else by the cells; mixed and nested ones are JSON."""
    found: dict[str, list[Any]] = {}
    for source, how, scan in zip(sources, plans, scans, strict=True):
        stored = tables.column_types(source) if source.suffix.lower() == ".parquet" else {}
        for name in how.extra:
            kinds = scan.kinds[name]
            only = "float" if kinds == {"int", "float"} else next(iter(kinds)) if len(kinds) == 1 else "str"
            found.setdefault(name, []).append(stored.get(name, tables.EXTRA_TYPES.get(only, tables.EXTRA_TYPES["str"])))
    text = tables.EXTRA_TYPES["str"]
    types = {name: kinds[0] if all(kind == kinds[0] for kind in kinds) else text for name, kinds in found.items()}
    if any(_odd_ids(how, scan) for how, scan in zip(plans, scans, strict=True)):
        types[SOURCE_ID] = text
    return types


def _odd_ids(how: Plan, scan: Scan) -> bool:
    return any(name in scan.odd_ids for name, entry in how.mapped.items() if entry.convert == "id")

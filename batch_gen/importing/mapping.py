"""Decides per file what each name means, then turns records into manifest rows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from batch_gen import rules
from batch_gen.errors import UsageError
from batch_gen.importing import convert
from batch_gen.importing.names import AMBIGUOUS, ENGINES, Name, folded, meanings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from batch_gen.importing.sources import Record

Row: TypeAlias = dict[str, object]

SOURCE_ID: Final = "source_id"
_CHOSEN_ONCE: Final = ("row_id", "prompt")
# These fill only what no other name of the row fills.
_WEAK: Final = frozenset({"both", "low_high", "seconds"})


@dataclass(slots=True)
class Scan:
    """What one pass over a file found: its names in order, and the kinds of cells under each."""

    kinds: dict[str, set[str]] = field(default_factory=dict)
    num_records: int = 0
    odd_ids: set[str] = field(default_factory=set)
    byte_images: set[str] = field(default_factory=set)

    def add(self, record: Record) -> None:
        """Note one record."""
        self.num_records += 1
        for name, cell in record.cells.items():
            self.kinds.setdefault(name, set()).add(_kind(cell))
            if _converts_as(name, "id") and _is_odd(cell):
                self.odd_ids.add(name)
            if _converts_as(name, "media") and _is_bytes(cell):
                self.byte_images.add(name)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the names of one file mean.

    Attributes:
        mapped: Source name to meaning.
        extra: Names that are carried through as they are.
    """

    mapped: dict[str, Name]
    extra: tuple[str, ...]

    @property
    def columns(self) -> set[str]:
        """Schema columns that some name fills."""
        return {column for entry in self.mapped.values() for column in entry.columns}


@lru_cache(maxsize=1024)
def _converts_as(name: str, how: str) -> bool:
    return any(entry.convert == how for entry in meanings(name))


def _kind(cell: object) -> str:
    """The cell's Python type; whole numbers beyond 64 bits are a kind of their own."""
    if isinstance(cell, int) and not -(2**63) <= cell < 2**63:
        return "bigint"
    return type(cell).__name__


def _is_bytes(cell: object) -> bool:
    try:
        return isinstance(convert.media(cell), bytes)
    except ValueError:
        return False


def _is_odd(cell: object) -> bool:
    """Whether an id changes when it becomes a file name; cells that are no ids are refused later."""
    try:
        return convert.identity(cell) != str(cell).strip()
    except ValueError:
        return False


class RowFault(ValueError):
    """One cell of a record is wrong: its source name, its value, and what would be right."""

    def __init__(self, name: str, value: object, message: str) -> None:
        super().__init__(message)
        self.name, self.value, self.message = name, value, message


def plan(file: str, names: Iterable[str], engine: str | None) -> Plan:
    """Decide what every name of a file means.

    Raises:
        UsageError: A name means different things in different engines, no engine is given, or the given one lacks it;
            or the file has no prompt.
    """
    mapped: dict[str, Name] = {}
    extra: list[str] = []
    unclear: list[str] = []
    for name in names:
        found = meanings(name)
        chosen = [entry for entry in found if entry.engine in {"", engine}]
        if not found:
            extra.append(name)
        elif chosen:
            mapped[name] = chosen[0]
        else:
            unclear.append(name)
    if unclear:
        raise UsageError(_unclear(file, unclear, engine))
    _choose_once(mapped, extra)
    _needs_rate(mapped, extra)
    if not any("prompt" in entry.columns for entry in mapped.values()):
        listed = ", ".join([*mapped, *extra]) or "none"
        raise UsageError(f"{file}: no column holds prompts; it has {listed}. Rename one to prompt")
    return Plan(mapped, tuple(extra))


def _unclear(file: str, names: list[str], engine: str | None) -> str:
    lines = []
    for name in names:
        choices = ", ".join(entry.engine for entry in meanings(name))
        asked = f"--from {engine} does not say" if engine else "say which"
        lines.append(f"{file}: {name!r} {AMBIGUOUS[folded(name)]}; {asked}: --from {choices}, or rename the column")
    return "\n".join(lines)


def _choose_once(mapped: dict[str, Name], extra: list[str]) -> None:
    """Of several names for the id or the prompt only one counts: ours first, then in the file's order."""
    for column in _CHOSEN_ONCE:
        names = [name for name, entry in mapped.items() if entry.columns == (column,)]
        best = next((name for name in names if folded(name) == column), names[0] if names else None)
        for name in names:
            if name != best:
                del mapped[name]
                extra.append(name)


def _needs_rate(mapped: dict[str, Name], extra: list[str]) -> None:
    """Durations become frames only beside a frame rate."""
    if any("fps" in entry.columns for entry in mapped.values()):
        return
    for name in [name for name, entry in mapped.items() if entry.convert == "seconds"]:
        del mapped[name]
        extra.append(name)


def check_engine(engine: str | None) -> None:
    """Refuse an engine that the table does not know."""
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--from {engine!r}: unknown engine; known: {', '.join(ENGINES)}")


def map_record(record: Record, how: Plan, source: Path, destination: Path) -> tuple[Row, Row]:
    """One record as (schema cells, extra cells).

    Raises:
        RowFault: A cell cannot be converted, or two names of the record disagree about a column.
    """
    row: Row = {}
    origin: dict[str, str] = {}
    extra: Row = {name: record.cells[name] for name in how.extra if name in record.cells}
    cells = _one_phase(record.cells)
    ordered = sorted(how.mapped.items(), key=lambda item: item[1].convert in _WEAK)
    for name, entry in ordered:
        if name not in cells:
            continue
        for column, value in _converted(name, entry, cells[name], row).items():
            _put(row, origin, column, value, name, weak=entry.convert in _WEAK)
        if entry.convert == "id" and row.get("row_id") != str(cells[name]).strip():
            extra[SOURCE_ID] = str(cells[name])
    for column in ("image", "last_image"):
        row[column] = _moved(row.get(column), source, destination)
    return {column: value for column, value in row.items() if value is not None}, extra


def _one_phase(cells: Mapping[str, object]) -> Mapping[str, object]:
    """Wan2GP settings of one guidance phase: the second scale has no effect there."""
    if str(cells.get("guidance_phases", "")) in {"1", "1.0"}:
        return {name: cell for name, cell in cells.items() if folded(name) != "guidance2_scale"}
    return cells


def _converted(name: str, entry: Name, cell: object, row: Mapping[str, object]) -> Row:
    try:
        if entry.convert in {"size", "low_high"}:
            pair = convert.size(cell) if entry.convert == "size" else convert.low_high(cell)
            columns = entry.columns if entry.convert == "size" else reversed(entry.columns)
            return dict(zip(columns, pair, strict=True))
        if entry.convert == "both":
            return dict.fromkeys(entry.columns, convert.number(cell))
        if entry.convert == "seconds" or (isinstance(cell, str) and entry.convert == "frames" and cell.endswith("s")):
            return {"num_frames": convert.frames_of(str(cell).removesuffix("s"), row.get("fps"))}
        if entry.convert == "frames":
            return {entry.columns[0]: convert.whole(cell)}
        return {entry.columns[0]: convert.SINGLE[entry.convert](cell)}
    except (ValueError, TypeError) as error:
        raise RowFault(name, cell, str(error)) from error


def _put(row: Row, origin: dict[str, str], column: str, value: object, name: str, *, weak: bool) -> None:
    if value is None or (weak and row.get(column) is not None):
        return
    if column in origin and row[column] != value:
        raise RowFault(name, value, f"disagrees with {origin[column]} = {row[column]}; both mean {column}; keep one")
    row[column] = value
    origin[column] = name


def _moved(value: object, source: Path, destination: Path) -> object:
    """A relative image path, seen from the manifest's folder in place of the source's."""
    if not isinstance(value, str) or "://" in value or Path(value).is_absolute():
        return value
    here, there = source.resolve().parent, destination.resolve().parent
    return value if here == there else Path(os.path.relpath(here / value, there)).as_posix()


def schema_columns(plans: Iterable[Plan], beside: Iterable[str]) -> list[str]:
    """The schema columns of the manifest, in their order."""
    used = {"prompt", *beside}.union(*(how.columns for how in plans))
    return [column for column in rules.COLUMNS if column in used]

"""Readers: text, CSV, JSON lines, JSON and foreign Parquet -> records of plain cells, with their place in the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batch_gen import tables
from batch_gen.errors import UsageError
from batch_gen.importing.names import ENVELOPES, IGNORED, folded

if TYPE_CHECKING:
    from pathlib import Path

MAX_CELL_CHARS: Final = 10_000_000
DELIMITERS: Final = ",;\t|"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a source: where it stands (`line 3`, `item 3`, `row 3`) and its cells by the source's own names."""

    place: str
    cells: Mapping[str, object]


def records(path: Path) -> Iterator[Record]:
    """The rows of a file, by its suffix.

    Raises:
        UsageError: An unknown suffix, or a file that is not of its suffix's kind.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise UsageError(f"{path}: do not know how to read {path.suffix or 'a file without a suffix'}; known: {known}")
    if not path.is_file():
        raise UsageError(f"{path}: {'is a folder; name its files' if path.is_dir() else 'does not exist'}")
    return reader(path)


def _decoded(path: Path) -> str:
    body = path.read_bytes()
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        return body.decode("utf-16")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise UsageError(f"{path} line {line}: is not UTF-8 text; save the file as UTF-8") from error


def _text(path: Path) -> Iterator[Record]:
    """One prompt a line; blank lines are left out."""
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        prompt = line.rstrip("\r")
        if prompt.strip():
            yield Record(f"line {number}", {"prompt": prompt.strip()})


def _csv(path: Path) -> Iterator[Record]:
    """A table with a head line; the delimiter is the most frequent of comma, semicolon, tab and bar in it."""
    csv.field_size_limit(MAX_CELL_CHARS)
    lines = _decoded(path).splitlines(keepends=True)
    head = next((line for line in lines if line.strip()), "")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(DELIMITERS, key=head.count)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    try:
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            if names is None:
                names = _head(path, [cell.strip() for cell in cells])
                continue
            if len(cells) != len(names):
                where = f"{path} line {rows.line_num}"
                raise UsageError(
                    f"{where}: has {len(cells)} cells, the head line {len(names)}; quote cells with {delimiter!r}"
                )
            filled = {name: cell for name, cell in zip(names, cells, strict=True) if cell != ""}
            yield Record(f"line {rows.line_num}", filled)
    except csv.Error as error:
        raise UsageError(f"{path} line {rows.line_num}: is no sound CSV ({error})") from error


def _head(path: Path, names: list[str]) -> list[str]:
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"{path}: the head line has {doubled[0]!r} twice")
    return names


def _json_lines(path: Path) -> Iterator[Record]:
    """One JSON object (or one prompt as a JSON text) a line."""
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} line {number}: is no JSON ({error.msg}); expected one object a line") from error
        yield _record(path, f"line {number}", value)


def _json(path: Path) -> Iterator[Record]:
    """A JSON list of objects or prompts, one object of settings, or an object with one list of objects in it."""
    try:
        value = json.loads(_decoded(path))
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl" if error.msg == "Extra data" else ""
        raise UsageError(f"{path} line {error.lineno}: is no JSON ({error.msg}){hint}") from error
    if isinstance(value, Mapping):
        lists = [
            inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], Mapping)
        ]
        value = lists[0] if len(lists) == 1 and not any(folded(name) == "prompt" for name in value) else [value]
    if not isinstance(value, list):
        raise UsageError(f"{path}: expected a list of objects or prompts, found {type(value).__name__}")
    for number, one in enumerate(value, start=1):
        yield _record(path, f"item {number}", one)


def _record(path: Path, place: str, value: object) -> Record:
    if isinstance(value, str):
        return Record(place, {"prompt": value})
    if not isinstance(value, Mapping):
        raise UsageError(f"{path} {place}: expected an object or a prompt, found {type(value).__name__}")
    return Record(place, {name: cell for name, cell in _opened(value) if cell is not None})


def _opened(value: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Names and cells with envelopes such as `body` or `params` opened."""
    for name, cell in value.items():
        if folded(name) in ENVELOPES and isinstance(cell, Mapping):
            yield from _opened(cell)
        elif not ("custom_id" in value and name in IGNORED):
            yield name, cell


def _parquet(path: Path) -> Iterator[Record]:
    """A Parquet table that is not one of our manifests; rows count from 0."""
    try:
        for number, cells in enumerate(tables.iter_rows(path)):
            yield Record(f"row {number}", {name: cell for name, cell in cells.items() if cell is not None})
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


READERS: Final[dict[str, Callable[[Path], Iterator[Record]]]] = {
    ".txt": _text,
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
}

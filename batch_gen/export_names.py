"""Names for exported clips: a template over a record's fields, checked as a whole before anything is written."""

import re
import string
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from batch_gen.errors import UsageError
from batch_gen.records import Record

DEFAULT_TEMPLATE: Final = "{clip_id}"
MAX_VALUE_BYTES: Final = 120
"""A prompt in a file name is cut here: file systems take 255 bytes, and Chinese needs three a character."""
MAX_NAME_BYTES: Final = 240
MAX_SHOWN: Final = 10
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]+')


@dataclass(frozen=True, slots=True)
class Named:
    """A committed clip and where its export goes, relative to the export folder."""

    record: Record
    target: PurePosixPath


def name_all(records: Iterable[Record], template: str, suffix: str | None) -> list[Named]:
    """Give every record a name.

    Args:
        records: The clips to export.
        template: `{shot}/{shot}_{take:03}`: any field of the request or carried-through column; `/` makes folders.
        suffix: Of the files, None to keep each clip's own.

    Raises:
        UsageError: the template names an unknown field or does not fit a value, a name is empty or leaves the folder,
            or two clips get one name; every clash is found before anything is written.
    """
    named = [Named(record, _target(record, template, suffix)) for record in records]
    _refuse_clashes(named)
    return named


def refuse_existing(named: Sequence[Named], folder: Path) -> None:
    """Raise UsageError when a name is taken in `folder`: an export never replaces anything."""
    taken = [str(item.target) for item in named if (folder / item.target).exists()]
    if taken:
        more = "" if len(taken) <= MAX_SHOWN else f" and {len(taken) - MAX_SHOWN} more"
        shown = ", ".join(taken[:MAX_SHOWN])
        raise UsageError(f"{folder} has {shown}{more} already; choose another folder or --skip-existing")


def fields_of(record: Record) -> dict[str, Any]:
    """What a template may use: the request's fields and the row's carried-through columns."""
    fields = dict(record.extra) | dict(record.request) | {"frames_hash": record.frames_hash}
    return {name: value for name, value in fields.items() if name != "extra"}


def clean_value(value: object) -> str:
    """A value as part of a file name on any system: no separators or control characters, at most 120 bytes."""
    text = unicodedata.normalize("NFC", "" if value is None else str(value))
    return _UNSAFE.sub("_", text).encode()[:MAX_VALUE_BYTES].decode(errors="ignore").strip()


def _target(record: Record, template: str, suffix: str | None) -> PurePosixPath:
    name = "".join(_expand(record, template))
    own_suffix = PurePosixPath(record.file.key).suffix if suffix is None else suffix
    target = PurePosixPath(name + own_suffix)
    bad = [part for part in name.split("/") if part.strip(". ") == "" or part != part.rstrip(". ")]
    if target.is_absolute() or bad:
        raise UsageError(f"template {template!r} gives clip {record.clip_id} the name {name!r}, which is no file name")
    if len(target.name.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"template {template!r} gives clip {record.clip_id} a name above {MAX_NAME_BYTES} bytes")
    return target


def _expand(record: Record, template: str) -> Iterable[str]:
    """The template's pieces with values filled in; plain fields only, no attributes, indices or conversions."""
    fields = fields_of(record)
    try:
        for literal, field, spec, conversion in string.Formatter().parse(template):
            yield literal
            if field is None:
                continue
            if field not in fields or conversion:
                legal = ", ".join(sorted(fields))
                raise UsageError(f"template {template!r}: clip {record.clip_id} has no field {field!r}; it has {legal}")
            yield clean_value(format(_number(fields[field], spec), spec or ""))
    except ValueError as error:
        raise UsageError(f"template {template!r} does not fit clip {record.clip_id}: {error}") from error


def _number(value: Any, spec: str | None) -> Any:
    """Carried-through columns are often text; `{take:03}` should still pad them."""
    if value is None:
        return ""
    if spec and isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return value if isinstance(value, int | float | str) else str(value)


def _refuse_clashes(named: Sequence[Named]) -> None:
    by_name: dict[str, list[Named]] = defaultdict(list)
    for item in named:
        by_name[str(item.target).casefold()].append(item)  # on many disks names that differ in case alone are one
    clashes = [items for items in by_name.values() if len(items) > 1]
    if not clashes:
        return
    lines = [
        f"  {items[0].target}: {', '.join(item.record.clip_id for item in items[:4])}" for items in clashes[:MAX_SHOWN]
    ]
    more = f"\n  and {len(clashes) - MAX_SHOWN} more" if len(clashes) > MAX_SHOWN else ""
    raise UsageError(
        "the template gives several clips one name; add {sample}, {seed} or {clip_id} to it\n" + "\n".join(lines) + more
    )

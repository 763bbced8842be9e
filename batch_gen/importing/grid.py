"""Sweeps: `--grid seed=1..4 guidance_high=3,4,5` makes one row per combination, with readable ids."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import TYPE_CHECKING, Final, TypeAlias

from batch_gen import rule_checks, rules
from batch_gen.errors import UsageError
from batch_gen.manifest.options import OVERRIDABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Grid: TypeAlias = dict[str, list[object]]

MAX_COMBINATIONS: Final = 10_000
MAX_BASE_CHARS: Final = 40
MAX_ID_CHARS: Final = 120
_SIZE_MULTIPLE: Final = 16


def parse(items: Iterable[str]) -> Grid:
    """`seed=1..4`, `guidance_high=3,4,5` as column -> values; several may stand in one text, blanks between.

    Raises:
        UsageError: No such column, no values, an illegal one, or too many combinations.
    """
    grid: Grid = {}
    for item in (part for text in items for part in text.split()):
        column, equals, text = item.partition("=")
        if not equals or not text:
            raise UsageError(f"--grid {item!r}: expected COLUMN=VALUES, such as seed=1..4 or guidance_high=3,4,5")
        if column not in OVERRIDABLE or column == "samples":
            known = ", ".join(name for name in OVERRIDABLE if name != "samples")
            raise UsageError(f"--grid {item!r}: {column!r} is not one of {known}")
        if column in grid:
            raise UsageError(f"--grid {item!r}: {column} stands twice")
        grid[column] = _values(item, rules.BY_COLUMN[column], text)
    total = 1
    for values in grid.values():
        total *= len(values)
    if total > MAX_COMBINATIONS:
        raise UsageError(f"--grid: {total:,} combinations for every row; at most {MAX_COMBINATIONS:,}")
    return grid


def _values(item: str, rule: rules.Rule, text: str) -> list[object]:
    span = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text)
    if span:
        first, last = int(span.group(1)), int(span.group(2))
        if last < first or last - first >= MAX_COMBINATIONS:
            raise UsageError(f"--grid {item!r}: the range must go up and have at most {MAX_COMBINATIONS:,} values")
        parts = [str(number) for number in range(first, last + 1)]
    else:
        parts = text.split(",")
    values = [_value(item, rule, part) for part in parts]
    if len(set(values)) != len(values):
        raise UsageError(f"--grid {item!r}: a value stands twice")
    return values


def _value(item: str, rule: rules.Rule, part: str) -> object:
    value: object = part
    if rule.type in {"int32", "int64", "float64"}:
        try:
            value = float(rule_checks.plain(part)) if rule.type == "float64" else int(rule_checks.plain(part))
        except ValueError:
            raise UsageError(f"--grid {item!r}: {part!r} is no legal {rule.column}; {rule.text}") from None
    message = rule_checks.first_broken(rule, value, _SIZE_MULTIPLE)
    if message is not None:
        raise UsageError(f"--grid {item!r}: {rule.column} = {part} {message}")
    return value


def expand(row: Mapping[str, object], grid: Grid) -> Iterator[dict[str, object]]:
    """The rows of a sweep over one row; without a grid the row itself."""
    if not grid:
        yield dict(row)
        return
    base = str(row.get("row_id") or slug(row))
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        tail = "".join(f"-{column}{_in_name(value)}" for column, value in chosen.items())
        yield {**row, **chosen, "row_id": _fitted(base, tail)}


def slug(row: Mapping[str, object]) -> str:
    """A readable name for a row without an id: the prompt's first words and six digits of the row's content."""
    words = re.findall(r"[a-z0-9]+", str(row.get("prompt", "")).lower())
    name = ""
    for word in words:
        if len(name) + len(word) + 1 > MAX_BASE_CHARS:
            break
        name = f"{name}-{word}" if name else word
    content = repr(sorted((column, repr(value)) for column, value in row.items()))
    digits = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{name}-{digits}" if name else digits


def _in_name(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-") or hashlib.sha256(text.encode()).hexdigest()[:6]


def _fitted(base: str, tail: str) -> str:
    if len(base) + len(tail) <= MAX_ID_CHARS:
        return base + tail
    digits = hashlib.sha256(base.encode()).hexdigest()[:6]
    kept = base[: MAX_ID_CHARS - len(tail) - len(digits) - 1].rstrip("-.")
    if not kept:
        return hashlib.sha256((base + tail).encode()).hexdigest()[:20]
    return f"{kept}-{digits}{tail}"

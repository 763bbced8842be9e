"""What a caller tells the manifest reader, and how a row is named inside a manifest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from batch_gen import rule_checks, rules
from batch_gen.errors import UsageError

if TYPE_CHECKING:
    from batch_gen.request import ModelLimits, SamplingDefaults

TokenCounter: TypeAlias = Callable[[Sequence[str]], Sequence[int]]
"""Counts the tokens of many prompts at once, as the model will see them (after cleaning, end mark included)."""

OVERRIDABLE: Final = (*rules.SAMPLING_COLUMNS, "seed", "samples", "priority", "preset")


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """One manifest file or folder on this machine.

    Attributes:
        path: The Parquet file, or a folder of them.
        name: How messages name it: what the user typed.
        base: What relative image paths start from: a folder, or `s3://bucket/prefix` for a file that came from there.
    """

    path: Path
    name: str
    base: str


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Where a request stands: index of the file in the manifest, row group in the file, row in the file (from 0)."""

    file_index: int
    row_group: int
    row: int


@dataclass(frozen=True, slots=True)
class ManifestOptions:
    """Everything beside the files that decides which requests a manifest gives.

    Attributes:
        run_seed: Seeds of rows without one derive from it and the clip_id.
        preset: Name of the run's preset.
        presets: Presets that a cell of the column `preset` may name, with their sampling values.
        overrides: Column to value, stronger than a cell; see `parse_overrides`.
        where: An expression over the manifest's columns, such as `tag = 'hero'`.
        ids: Only these row_ids or clip_ids.
        limit: Only so many clips, the first in manifest order.
        fold_case: Ids must differ by more than case (outputs in a folder).
        count_tokens: None leaves token counts unchecked.
        long_prompt: What a prompt above the model's tokens is: a warning or a fault.
        check_files: Local images must exist.
    """

    run_seed: int = 0
    preset: str = ""
    presets: Mapping[str, SamplingDefaults] = field(default_factory=dict)
    overrides: Mapping[str, object] = field(default_factory=dict)
    where: str | None = None
    ids: frozenset[str] | None = None
    limit: int | None = None
    fold_case: bool = False
    count_tokens: TokenCounter | None = None
    long_prompt: Literal["truncate", "fail"] = "truncate"
    check_files: bool = True

    @property
    def selects(self) -> bool:
        """Whether some rows may be left out."""
        return self.where is not None or self.ids is not None or self.limit is not None


def local_source(path: str | Path) -> ManifestSource:
    """A file or folder on this machine; its images are relative to the folder it lies in."""
    found = Path(path)
    folder = found if found.is_dir() else found.parent
    return ManifestSource(found, str(path), str(folder))


def parse_overrides(items: Iterable[str], limits: ModelLimits) -> dict[str, object]:
    """`steps=10` and its like as column -> value, each checked by the column's rule.

    Raises:
        UsageError: No `=`, an unknown column, one that cannot be overridden, or an illegal value.
    """
    overrides: dict[str, object] = {}
    for item in items:
        column, equals, text = item.partition("=")
        column = column.strip()
        if not equals or not column:
            raise UsageError(f"--override {item!r}: expected COLUMN=VALUE, such as steps=10")
        if column not in OVERRIDABLE:
            raise UsageError(f"--override {item!r}: {column!r} is not one of {', '.join(OVERRIDABLE)}")
        overrides[column] = _override_value(item, rules.BY_COLUMN[column], text.strip(), limits)
    return overrides


def _override_value(item: str, rule: rules.Rule, text: str, limits: ModelLimits) -> object:
    value: object = text
    if rule.type in {"int32", "int64", "float64"}:
        try:
            number = float(rule_checks.plain(text))
        except ValueError:
            raise UsageError(f"--override {item!r}: {text!r} is no number; {rule.column} must be {rule.text}") from None
        whole = rule.type != "float64" and math.isfinite(number) and number.is_integer()
        value = int(number) if whole else number
    message = rule_checks.first_broken(rule, value, limits.size_multiple)
    if message is not None:
        raise UsageError(f"--override {item!r}: {rule.column} {message}")
    return value


def read_ids(path: Path) -> frozenset[str]:
    """The ids of a text file, one per line; blank lines and lines that start with # do not count.

    Raises:
        UsageError: The file cannot be read as text, or holds no id.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ids {path}: {error}; expected a text file with one row_id or clip_id per line") from error
    ids = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not ids:
        raise UsageError(f"--ids {path}: the file holds no id; expected one row_id or clip_id per line")
    return ids

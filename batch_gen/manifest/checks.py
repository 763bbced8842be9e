"""The vectorised check: the table of `rules` applied to whole columns with pyarrow.compute and NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batch_gen import rule_checks, rules
from batch_gen.manifest.canon import Mask, filled, invalid_utf8, mask_by_unique, numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_UTF8: Final = "is not UTF-8 text"
NO_SUCH_FILE: Final = "does not exist beside the manifest"

# What `clean` may take away even where it holds a letter or digit: HTML entities and terminal escapes.
_VANISHING: Final = r"&[#;0-9A-Za-z]*|\x1b\[?[^A-Za-z]*[A-Za-z]?"
# Characters that `clean` always leaves something of: ASCII letters and digits, and scripts that no single-byte
# encoding holds (text of those cannot be mojibake that turns into spaces).
_SOLID: Final = (
    r"[0-9A-Za-z\x{05D0}-\x{05EA}\x{0620}-\x{064A}\x{0904}-\x{0939}"
    r"\x{3041}-\x{3096}\x{30A1}-\x{30FA}\x{4E00}-\x{9FFF}\x{AC00}-\x{D7A3}]"
)


@dataclass(frozen=True, slots=True)
class Broken:
    """Rows of a batch that break one condition of one column; `check` None means the type, or a fixed `message`."""

    column: str
    indices: npt.NDArray[np.intp]
    check: rules.Check | None = None
    message: str | None = None

    def explain(self, rule: rules.Rule, value: object, size_multiple: int) -> str:
        """The message for one of the rows, the same that the row check gives."""
        if self.message is not None:
            return self.message
        if self.check is None:
            return rule_checks.type_fault(rule, value) or ""
        return rule_checks.explain(self.check, value, size_multiple)


def check_column(rule: rules.Rule, cells: pa.Array, size_multiple: int) -> Iterator[Broken]:
    """The rows that break the rule, each row once, by the first condition that it breaks.

    Args:
        rule: The column's rule.
        cells: Canonical cells of the column, `[rows]`.
        size_multiple: The model's, in pixels.
    """
    open_rows = filled(cells)
    if rule.required and not open_rows.all():
        yield Broken(rule.column, np.flatnonzero(~open_rows), message=rules.MISSING)
    bad = invalid_utf8(cells)
    if bad.any():
        yield Broken(rule.column, np.flatnonzero(bad), message=NOT_UTF8)
        cells = pc.if_else(pa.array(bad), pa.scalar(None, cells.type), cells)
        open_rows &= ~bad
    for check, passed in _verdicts(rule, cells, size_multiple):
        wrong = open_rows & ~passed
        if wrong.any():
            yield Broken(rule.column, np.flatnonzero(wrong), check=check)
            open_rows &= passed


def _verdicts(rule: rules.Rule, cells: pa.Array, size_multiple: int) -> Iterator[tuple[rules.Check | None, Mask]]:
    if rule.type in {"int32", "int64", "float64"}:
        values = numbers(cells)
        if rule.type != "float64":
            yield None, values == np.floor(np.where(np.isinf(values), np.nan, values))
        for check in rule.checks:
            yield check, _number_passes(check, values, size_multiple)
        return
    for check in rule.checks:
        yield check, _cell_passes(check, cells)


def _number_passes(check: rules.Check, values: npt.NDArray[np.float64], size_multiple: int) -> Mask:
    with np.errstate(invalid="ignore"):
        if check.kind == "multiple":
            return np.asarray(values % size_multiple == 0, bool)
        if check.kind == "frames":
            return np.asarray(values % rules.FRAMES_STEP == 1, bool)
        above = values > check.low if check.open_low else values >= check.low
        return np.asarray(np.isfinite(values) & above & (values <= check.high), bool)


def _cell_passes(check: rules.Check, cells: pa.Array) -> Mask:
    match check.kind:
        case "chars":
            lengths = numbers(pc.utf8_length(cells))
            return (lengths >= check.low) & (lengths <= check.high)
        case "no_nul":
            return _true(pc.invert(pc.match_substring(cells, "\0")))
        case "pattern":
            return _true(pc.match_substring_regex(cells, rf"\A(?:{check.pattern})\z"))
        case "not_in":
            return _true(pc.invert(pc.is_in(cells, value_set=pa.array(check.words, cells.type))))
        case "not_blank":
            return _not_blank(cells)
        case "fps":
            return mask_by_unique(cells, lambda value: rule_checks.fps_fault(value) is None)
        case _:
            return mask_by_unique(cells, lambda value: rule_checks.media_fault(value) is None)


def _true(verdict: pa.Array) -> Mask:
    return np.asarray(verdict.fill_null(True).to_numpy(zero_copy_only=False), bool)


def _not_blank(cells: pa.Array) -> Mask:
    """Cells that hold more than spaces after cleaning; only doubtful ones are cleaned one by one."""
    passed = _true(pc.match_substring_regex(cells, r"\A\s*[0-9A-Za-z]"))
    doubtful = np.flatnonzero(~passed)
    if len(doubtful) == 0:
        return passed
    some = cells.take(pa.array(doubtful))
    passed[doubtful] = _true(pc.match_substring_regex(pc.replace_substring_regex(some, _VANISHING, ""), _SOLID))
    for index in np.flatnonzero(~passed).tolist():
        passed[index] = rule_checks.clean(cells[index].as_py()) != ""
    return passed

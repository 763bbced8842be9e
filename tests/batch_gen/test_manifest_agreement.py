"""The vectorised check and the row check are two readings of one table; here they are held against each other."""

from __future__ import annotations

import string

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batch_gen import rule_checks, rules
from batch_gen.manifest.canon import canonical, type_problem
from batch_gen.manifest.checks import check_column

ODD_TEXT = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from(" \t\r\n\u00a0\u3000\u2028\ufeff\x1f&;#x"), max_size=8),
    st.text(st.sampled_from("\u00c2\u00a0\u00e2\u20ac\u2039 \u0432\u0420"), max_size=6),
    st.sampled_from(
        ["", " ", ".", "..", "...", "\0", "a\0b", "&nbsp;", "&amp;nbsp;", "&#0;", "&#32;", "&#x20", "&zwnj;", "&copy;"]
    ),
    st.sampled_from(
        ["\x1b[36m", "\x1b[0m \x1b[1;4m", "\x1b", "\x1b[", "\x1b[31mfox", "\u0430\u043d", "\u72d0", "\u200b"]
    ),
    st.text(string.ascii_letters + string.digits + "._-/", max_size=8),
    st.sampled_from(["x" * 120, "x" * 121, "y" * 10_000, "y" * 10_001, "fox\n"]),
)
RATES = st.one_of(
    st.sampled_from(
        ["24", "23.976", "30000/1001", "0", "-1", "1/0", "0/5", ".5", "5.", "1e3", " 24 ", "inf", "nan", ""]
    ),
    st.from_regex(r"[0-9]{1,3}([./][0-9]{0,4})?", fullmatch=True),
    ODD_TEXT,
)
PLACES = st.one_of(
    st.sampled_from(
        ["a.png", "s3://b/k", "s3://b/", "S3://b/k", "http://x/y", "data:image/png;base64,", "C:a", "file:///a"]
    ),
    ODD_TEXT,
)
WHOLE = (
    st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 2000) | st.sampled_from([2**32 - 1, 2**32, 2**31, -(2**31) - 1])
)
REAL = st.floats(width=64) | st.integers(-5, 200).map(float) | st.sampled_from([0.0, -0.0, 100.0, 2.0**63])


def verdicts(rule: rules.Rule, array: pa.Array, multiple: int) -> dict[int, str]:
    """What the vectorised check says: row -> message."""
    assert type_problem(rule, array.type) is None
    cells = canonical(rule, array)
    found: dict[int, str] = {}
    for broken in check_column(rule, cells, multiple):
        for row in broken.indices.tolist():
            assert row not in found, "a row is reported once"
            found[row] = broken.explain(rule, cells[row].as_py(), multiple)
    return found


def expected(rule: rules.Rule, values: list[object], multiple: int) -> dict[int, str]:
    """What the row check says: row -> message."""
    found = {}
    for row, value in enumerate(values):
        if value is None:
            message = rules.MISSING if rule.required else None
        else:
            message = rule_checks.first_broken(rule, value, multiple)
        if message is not None:
            found[row] = message
    return found


@pytest.mark.parametrize("column", ["row_id", "prompt", "negative_prompt", "preset"])
@given(values=st.lists(st.none() | ODD_TEXT, max_size=12), wide=st.booleans())
@settings(max_examples=120, deadline=None)
@example(values=["\u00c2\u00a0", "\u00e2\u20ac\u2039", "&amp;amp;nbsp;"], wide=False)
def test_text_columns_agree(column: str, values: list[str | None], wide: bool) -> None:
    """Both checks give the same message for every text, however odd."""
    rule = rules.BY_COLUMN[column]
    array = pa.array(values, pa.large_string() if wide else pa.string())
    assert verdicts(rule, array, 16) == expected(rule, values, 16)
    assert verdicts(rule, array.dictionary_encode(), 16) == expected(rule, values, 16)


@pytest.mark.parametrize("column", [rule.column for rule in rules.RULES if rule.type in {"int32", "int64", "float64"}])
@given(values=st.lists(st.none() | WHOLE, max_size=12), multiple=st.sampled_from([16, 32]))
@settings(max_examples=60, deadline=None)
def test_whole_number_columns_agree(column: str, values: list[int | None], multiple: int) -> None:
    """Both checks give the same message for every whole number."""
    rule = rules.BY_COLUMN[column]
    assert verdicts(rule, pa.array(values, pa.int64()), multiple) == expected(rule, values, multiple)


@pytest.mark.parametrize("column", [rule.column for rule in rules.RULES if rule.type in {"int32", "int64", "float64"}])
@given(values=st.lists(st.none() | REAL, max_size=12), multiple=st.sampled_from([16, 32]))
@settings(max_examples=60, deadline=None)
def test_float_columns_agree(column: str, values: list[float | None], multiple: int) -> None:
    """Both checks give the same message for every float, NaN and infinities included."""
    rule = rules.BY_COLUMN[column]
    assert verdicts(rule, pa.array(values, pa.float64()), multiple) == expected(rule, values, multiple)


@pytest.mark.parametrize(("column", "texts"), [("fps", RATES), ("image", PLACES), ("last_image", PLACES)])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_rates_and_images_agree(column: str, texts: st.SearchStrategy[str], data: st.DataObject) -> None:
    """Both checks give the same message for every frame rate and every image source."""
    rule = rules.BY_COLUMN[column]
    values = data.draw(st.lists(st.none() | texts, max_size=12))
    assert verdicts(rule, pa.array(values, pa.string()), 16) == expected(rule, values, 16)


@given(values=st.lists(st.none() | REAL, max_size=12))
@settings(max_examples=60, deadline=None)
def test_number_rates_agree(values: list[float | None]) -> None:
    """Both checks give the same message for frame rates that are numbers."""
    rule = rules.BY_COLUMN["fps"]
    assert verdicts(rule, pa.array(values, pa.float64()), 16) == expected(rule, values, 16)


@given(values=st.lists(st.none() | st.binary(max_size=4), max_size=8))
@settings(max_examples=40, deadline=None)
def test_image_bytes_agree(values: list[bytes | None]) -> None:
    """Both checks give the same message for images given as bytes."""
    rule = rules.BY_COLUMN["image"]
    assert verdicts(rule, pa.array(values, pa.binary()), 16) == expected(rule, values, 16)

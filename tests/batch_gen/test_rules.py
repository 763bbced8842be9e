from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from batch_gen import rule_checks, rules
from batch_gen.request import ModelLimits, check_values


def fault_of(column: str, value: object, multiple: int = 16) -> str | None:
    return rule_checks.first_broken(rules.BY_COLUMN[column], value, multiple)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("row_id", "fox-1_a.b"),
        ("row_id", "x" * 120),
        ("prompt", "a fox"),
        ("prompt", "\u72d0\u72f8"),
        ("prompt", "\U0001f98a"),
        ("prompt", "\u05e9\u05c1\u05dc\u05d5\u05dd"),
        ("prompt", "line\nline"),
        ("prompt", "x" * 10_000),
        ("negative_prompt", ""),
        ("seed", 0),
        ("seed", 2**32 - 1),
        ("width", 16),
        ("width", 832.0),
        ("num_frames", 1),
        ("num_frames", 81),
        ("fps", "30000/1001"),
        ("fps", 24),
        ("fps", 23.976),
        ("steps", 1000),
        ("guidance_high", 0),
        ("guidance_low", 100.0),
        ("flow_shift", 0.001),
        ("image", "frames/first.png"),
        ("image", "s3://bucket/first.png"),
        ("image", b"\x89PNG"),
        ("samples", 1000),
        ("priority", -5),
    ],
)
def test_legal(column: str, value: object) -> None:
    """A legal cell breaks no rule."""
    assert fault_of(column, value) is None


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("row_id", "", "has 0 characters; must have 1 to 120"),
        ("row_id", "x" * 121, "has 121 characters; must have 1 to 120"),
        ("row_id", "a/b", "may hold only letters, digits, dot, dash and underscore"),
        ("row_id", "a/b", "try 'a-b'"),
        ("row_id", "fox\n", "may hold only letters"),
        ("row_id", "../x", "try 'x'"),
        ("row_id", "..", "is a path, not a name"),
        ("row_id", 7, "is a number; must be text"),
        ("prompt", "", "has 0 characters"),
        ("prompt", "x" * 10_001, "has 10,001 characters; must have 1 to 10,000"),
        ("prompt", " \t\n", "is blank once cleaned"),
        ("prompt", "&nbsp;&#160;", "is blank once cleaned"),
        ("prompt", "a\0b", "holds a NUL character"),
        ("seed", -1, "must be 0 to 4294967295; nearest is 0"),
        ("seed", 2**32, "must be 0 to 4294967295; nearest is 4294967295"),
        ("seed", 1.5, "must be a whole number"),
        ("seed", float("nan"), "must be a whole number"),
        ("seed", True, "is true/false; must be a whole number"),
        ("seed", "7", "is text; must be a whole number"),
        ("width", 830, "is not a multiple of 16; nearest are 816 and 832"),
        ("height", 7, "is not a multiple of 16; nearest is 16"),
        ("width", 0, "must be at least 1"),
        ("num_frames", 80, "is not 4k+1; nearest are 77 and 81"),
        ("num_frames", -3, "must be at least 1"),
        ("fps", "fast", "is no frame rate; write 24, 23.976 or 30000/1001"),
        ("fps", "0", "must be above 0"),
        ("fps", "-24", "must be above 0"),
        ("fps", "24/0", "is no frame rate"),
        ("fps", float("inf"), "is no frame rate"),
        ("fps", b"24", "is bytes; write 24"),
        ("steps", 0, "must be 1 to 1000; nearest is 1"),
        ("steps", 1001, "must be 1 to 1000; nearest is 1000"),
        ("guidance_high", float("nan"), "must be a finite number"),
        ("guidance_low", -0.5, "must be 0 to 100; nearest is 0"),
        ("guidance_low", "3", "is text; must be a number"),
        ("flow_shift", 0.0, "must be above 0"),
        ("flow_shift", float("inf"), "must be a finite number"),
        ("image", "http://example.org/a.png", "is a http: address; only a local path, an s3:// URI or bytes"),
        ("image", "data:image/png;base64,AAAA", "is a data: address"),
        ("image", "s3://bucket", "must be s3://bucket/key"),
        ("image", "  ", "is blank"),
        ("image", b"", "holds no bytes"),
        ("image", 3, "is a number; must be a local path"),
        ("samples", 0, "must be 1 to 1000; nearest is 1"),
    ],
)
def test_illegal(column: str, value: object, message: str) -> None:
    """An illegal cell gets the message that says what is wrong and what is nearest."""
    found = fault_of(column, value)
    assert found is not None
    assert message in found


def test_size_multiple_comes_from_the_model() -> None:
    """A model with 32-pixel steps refuses 720 and names 704 and 736."""
    assert fault_of("height", 720) is None
    assert fault_of("height", 720, 32) == "is not a multiple of 32; nearest are 704 and 736"


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ("24", Fraction(24)),
        (24, Fraction(24)),
        (24.0, Fraction(24)),
        ("23.976", Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (23.975999832153320, Fraction(24000, 1001)),
        (" 30000/1001 ", Fraction(30000, 1001)),
        ("12.5", Fraction(25, 2)),
        ("48/2", Fraction(24)),
    ],
)
def test_fps_is_exact(value: object, rate: Fraction) -> None:
    """A frame rate is an exact fraction, the decimal NTSC rates and their float32 forms included."""
    assert rule_checks.parse_fps(value) == rate


def test_parse_fps_refuses() -> None:
    """A cell that is no rate is a ValueError that names the column."""
    with pytest.raises(ValueError, match="fps is no frame rate"):
        rule_checks.parse_fps("quick")


def test_cross_rules() -> None:
    """Rules over two cells: last image without first, inputs that the checkpoint cannot serve, seeds that overflow."""
    served = ModelLimits(name="wan2.2-i2v-a14b", conditionings=("image", "first_last"))
    text = ModelLimits(name="wan2.2-t2v-a14b")
    both = {"prompt": "a fox", "image": "a.png", "last_image": "b.png"}
    assert check_values(both, served) == []
    assert check_values({"prompt": "a fox"}, served) == [
        ("prompt", "has no image, which wan2.2-i2v-a14b needs; use wan2.2-t2v-a14b or wan2.2-ti2v-5b")
    ]
    assert check_values({"prompt": "a fox", "last_image": "b.png"}, served)[0][1].startswith("needs a first image too")
    assert "which wan2.2-t2v-a14b cannot take; use wan2.2-i2v-a14b" in check_values(both, text)[0][1]
    assert check_values(both | {"num_frames": 1}, served) == [
        ("num_frames", "is too short for a first and a last image, which need at least 5 frames")
    ]
    assert check_values(both | {"num_frames": 5}, served) == []
    assert check_values({"prompt": "a fox", "image": "a.png", "num_frames": 1}, served) == []
    over = check_values({"prompt": "a fox", "seed": 2**32 - 1, "samples": 2}, text)
    assert over == [("seed", "with 2 samples goes past 4294967295; at most 4294967294")]


def test_shown_is_short_and_plain() -> None:
    """A value in a message is printable ASCII of at most 60 characters."""
    text = rule_checks.shown("\u202e\0" * 100)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= rule_checks.MAX_VALUE_CHARS
    assert rule_checks.shown(b"12345") == "5 bytes"


def test_docs_table_is_in_step() -> None:
    """manifests/README.md and docs/manifest.md hold the column table that the rules generate."""
    root = Path(__file__).parents[2]
    for page in ("manifests/README.md", "docs/manifest.md"):
        assert rules.docs_table() in (root / page).read_text("utf-8"), f"{page}: paste the output of rules.docs_table()"

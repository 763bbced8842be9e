"""The rules of a manifest row, once, as data.

`manifest` makes the vectorised check of this table, `rule_checks` the row check, the docs their table; a property test
proves that the first two agree. No pyarrow and no torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

MAX_SEED: Final = 2**32 - 1
MAX_INT32: Final = 2**31 - 1
MAX_SIDE_PX: Final = 16_384
"""The largest side that H.264 encoders take (x264 refuses more); a larger clip could be rendered and never written."""
MAX_FRAMES: Final = 65_537
"""Over an hour at 16 frames a second, in one clip that is denoised as a whole; what is longer is a typing error."""
FRAMES_STEP: Final = 4
WARN_TOKENS: Final = 320

MISSING: Final = "is required and the cell is empty"
NTSC: Final[dict[str, Fraction]] = {
    "11.988": Fraction(12000, 1001),
    "14.985": Fraction(15000, 1001),
    "23.976": Fraction(24000, 1001),
    "23.98": Fraction(24000, 1001),
    "29.97": Fraction(30000, 1001),
    "47.952": Fraction(48000, 1001),
    "47.95": Fraction(48000, 1001),
    "59.94": Fraction(60000, 1001),
    "119.88": Fraction(120000, 1001),
}

Type = Literal["string", "int32", "int64", "float64", "fps", "media"]
CheckKind = Literal["chars", "not_blank", "no_nul", "pattern", "not_in", "range", "multiple", "frames", "fps", "media"]


@dataclass(frozen=True, slots=True)
class Check:
    """One condition on one cell; `kind` says which of the other fields count.

    Attributes:
        kind: chars (low..high characters), not_blank, no_nul, pattern (whole match), not_in (words), range (low..high,
            `open_low` excludes low itself, NaN and Inf never pass), multiple (of the model's size multiple),
            frames (4k+1), fps (a positive number or fraction), media (path, s3:// URI or bytes).
    """

    kind: CheckKind
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    pattern: str = ""
    words: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything known about one column.

    Attributes:
        column: Its name.
        type: Canonical type of a cell.
        default: Where the value comes from when the cell is empty, for the docs.
        text: The rule in words, for the docs.
        checks: The rule as conditions, in the order in which they are tried; the first broken one is reported.
        required: An empty cell is a fault.
        sampling: The column decides what the clip looks like and can come from the preset.
    """

    column: str
    type: Type
    default: str
    text: str
    checks: tuple[Check, ...] = ()
    required: bool = False
    sampling: bool = False


def _range(low: float, high: float, *, open_low: bool = False, why: str = "") -> Check:
    return Check("range", low=low, high=high, open_low=open_low, message=why)


_SIDE: Final = _range(1, MAX_SIDE_PX, why="the largest side that video encoders take")
_FRAMES: Final = _range(1, MAX_FRAMES, why="more than an hour of video in one clip")
_PATH_LIKE: Final = (".", "..")

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "row_id",
        "string",
        "hash of the row's schema columns before defaults, suffix `-2`, `-3` for equal rows",
        "1 to 120 of letters, digits, `.`, `-`, `_`; not `.` or `..`; unique (without case on folder outputs)",
        (
            Check("chars", low=1, high=120),
            Check(
                "pattern",
                pattern="[A-Za-z0-9._-]+",
                message="may hold only letters, digits, dot, dash and underscore (it names the file); try {near}",
            ),
            Check("not_in", words=_PATH_LIKE, message="is a path, not a name"),
        ),
    ),
    Rule(
        "prompt",
        "string",
        "required",
        "1 to 10,000 characters, not blank after cleaning, no NUL; a warning above 320 tokens",
        (Check("chars", low=1, high=10_000), Check("no_nul"), Check("not_blank")),
        required=True,
    ),
    Rule(
        "negative_prompt",
        "string",
        "preset",
        "0 to 10,000 characters, no NUL; empty stays empty, null means the preset's",
        (Check("chars", low=0, high=10_000), Check("no_nul")),
        sampling=True,
    ),
    Rule(
        "seed",
        "int64",
        "low 32 bits of sha256(run seed, clip_id)",
        "0 to 4294967295 (2^32 - 1); sample k adds k",
        (_range(0, MAX_SEED),),
    ),
    Rule(
        "width",
        "int32",
        "preset",
        "1 to 16384 (the largest side that H.264 encoders take), a multiple of the model's (16; 32 for the 5B)",
        (_SIDE, Check("multiple")),
        sampling=True,
    ),
    Rule(
        "height",
        "int32",
        "preset",
        "1 to 16384 (the largest side that H.264 encoders take), a multiple of the model's (16; 32 for the 5B)",
        (_SIDE, Check("multiple")),
        sampling=True,
    ),
    Rule(
        "num_frames",
        "int32",
        "preset",
        "4k+1: 1, 5, 9, ... 81; at most 65537, over an hour of video",
        (_FRAMES, Check("frames")),
        sampling=True,
    ),
    Rule(
        "fps",
        "fps",
        "preset",
        "above 0; `24`, `23.976`, `30000/1001`; kept as a fraction",
        (Check("fps"),),
        sampling=True,
    ),
    Rule("steps", "int32", "preset", "1 to 1000", (_range(1, 1000),), sampling=True),
    Rule(
        "guidance_high",
        "float64",
        "preset",
        "finite, 0 to 100; the scale at high noise, the early steps",
        (_range(0, 100),),
        sampling=True,
    ),
    Rule(
        "guidance_low",
        "float64",
        "preset",
        "finite, 0 to 100; the scale at low noise, the late steps",
        (_range(0, 100),),
        sampling=True,
    ),
    Rule(
        "flow_shift",
        "float64",
        "preset",
        "finite, above 0; moves the split between the experts, so it is recorded",
        (_range(0, math.inf, open_low=True),),
        sampling=True,
    ),
    Rule(
        "image",
        "media",
        "none",
        "local path (relative to the manifest), s3:// URI or bytes: the first frame",
        (Check("media"),),
    ),
    Rule(
        "last_image",
        "media",
        "none",
        "local path (relative to the manifest), s3:// URI or bytes: the last frame; needs `image`",
        (Check("media"),),
    ),
    Rule("samples", "int32", "1", "1 to 1000: so many clips of the row", (_range(1, 1000),)),
    Rule("priority", "int32", "0", "orders the chunks, higher first", (_range(-MAX_INT32 - 1, MAX_INT32),)),
    Rule(
        "preset", "string", "the run's", "only one that differs in sampling values", (Check("chars", low=1, high=120),)
    ),
)

BY_COLUMN: Final[dict[str, Rule]] = {rule.column: rule for rule in RULES}
COLUMNS: Final[tuple[str, ...]] = tuple(BY_COLUMN)
SAMPLING_COLUMNS: Final[tuple[str, ...]] = tuple(rule.column for rule in RULES if rule.sampling)

SERVED_BY: Final[dict[str, str]] = {
    "text": "wan2.2-t2v-a14b or wan2.2-ti2v-5b",
    "image": "wan2.2-i2v-a14b or wan2.2-ti2v-5b",
    "first_last": "wan2.2-i2v-a14b",
}


def docs_table() -> str:
    """The column table of the docs, as Markdown."""
    lines = ["| column | type | default | rule |", "|---|---|---|---|"]
    names = {"fps": "string or number", "media": "string or binary"}
    lines += [f"| {r.column} | {names.get(r.type, r.type)} | {r.default} | {r.text} |" for r in RULES]
    lines.append("| anything else | any | | carried through unread to records and metrics |")
    return "\n".join(lines)

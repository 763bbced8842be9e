"""The row check: the table of `rules` applied to one cell or one row, and every message that it can give."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from batch_gen.rules import FRAMES_STEP, MAX_INT32, MAX_SEED, NTSC, SERVED_BY

if TYPE_CHECKING:
    from batch_gen.rules import Check, Rule

MAX_VALUE_CHARS: Final = 60
FLOAT32_SLACK: Final = 2e-5
TOO_SHORT_FOR_LAST: Final = "is too short for a first and a last image, which need at least 5 frames"
LAST_WITHOUT_FIRST: Final = "needs a first image too; fill the column image"


def first_broken(rule: Rule, value: object, size_multiple: int) -> str | None:
    """The message of the first condition that a non-empty cell breaks, or None."""
    message = type_fault(rule, value)
    if message is not None:
        return message
    for check in rule.checks:
        if not passes(check, value, size_multiple):
            return explain(check, value, size_multiple)
    return None


def type_fault(rule: Rule, value: object) -> str | None:
    """Why a cell is not of the column's type, or None; whole-number floats are whole numbers, booleans never."""
    if rule.type == "string":
        return None if isinstance(value, str) else f"is {_kind_of(value)}; must be text"
    if rule.type in {"fps", "media"}:
        return None  # their own conditions name every accepted form
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "a number" if rule.type == "float64" else "a whole number"
        return f"is {_kind_of(value)}; must be {wanted}"
    if rule.type != "float64" and not float(value).is_integer():
        return "must be a whole number"
    return None


def passes(check: Check, value: object, size_multiple: int) -> bool:
    """Whether one cell of the right type meets one condition."""
    match check.kind:
        case "chars":
            return check.low <= len(str(value)) <= check.high
        case "not_blank":
            return bool(re.match(r"\s*[0-9A-Za-z]", str(value))) or clean(str(value)) != ""
        case "no_nul":
            return "\0" not in str(value)
        case "pattern":
            return re.fullmatch(check.pattern, str(value)) is not None
        case "not_in":
            return value not in check.words
        case "fps":
            return fps_fault(value) is None
        case "media":
            return media_fault(value) is None
        case _:
            return _passes_number(check, float(value), size_multiple)  # type: ignore[arg-type]


def _passes_number(check: Check, number: float, size_multiple: int) -> bool:
    if check.kind == "multiple":
        return number % size_multiple == 0
    if check.kind == "frames":
        return number % FRAMES_STEP == 1
    above = number > check.low if check.open_low else number >= check.low
    return math.isfinite(number) and above and number <= check.high


def explain(check: Check, value: object, size_multiple: int) -> str:
    """What is wrong with a cell that fails the condition, and the nearest legal value."""
    match check.kind:
        case "chars":
            return f"has {len(str(value)):,} characters; must have {check.low:,.0f} to {check.high:,.0f}"
        case "not_blank":
            return "is blank once cleaned of spaces, entities and control characters"
        case "no_nul":
            return "holds a NUL character; remove it"
        case "pattern":
            return check.message.format(near=repr(near_id(str(value))))
        case "not_in":
            return check.message
        case "multiple":
            return f"is not a multiple of {size_multiple}; {_nearest(value, size_multiple, 0)}"
        case "frames":
            return f"is not 4k+1; {_nearest(value, FRAMES_STEP, 1)}"
        case "fps":
            return fps_fault(value) or ""
        case "media":
            return media_fault(value) or ""
        case _:
            return _explain_range(check, value)


def _explain_range(check: Check, value: object) -> str:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        return "must be a finite number"
    if check.high == MAX_INT32 and number < check.low:
        return f"must be at least {check.low:.0f}"
    if math.isinf(check.high):
        return f"must be above {check.low:g}" if check.open_low else f"must be at least {check.low:g}"
    nearest = check.low if number < check.low else check.high
    return f"must be {check.low:.0f} to {check.high:.0f}; nearest is {nearest:.0f}"


def _nearest(value: object, step: int, offset: int) -> str:
    number = int(value)  # type: ignore[call-overload]
    low = (number - offset) // step * step + offset
    if low < max(offset, 1):
        return f"nearest is {low + step}"
    return f"nearest are {low} and {low + step}"


def near_id(value: str) -> str:
    """The legal row_id nearest to a text."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-.")[:120] or "row-1"


def _kind_of(value: object) -> str:
    names: list[tuple[type | tuple[type, ...], str]] = [
        (bool, "true/false"),
        (str, "text"),
        (bytes, "bytes"),
        ((int, float), "a number"),
        (Mapping, "a structure"),
        (Sequence, "a list"),
    ]
    return next((name for kind, name in names if isinstance(value, kind)), f"a {type(value).__name__}")


def parse_fps(value: object) -> Fraction:
    """Frames per second as an exact fraction; `23.976` and its kin are NTSC rates (24000/1001).

    Raises:
        ValueError: The value is no positive number or fraction.
    """
    message = fps_fault(value)
    if message is not None:
        raise ValueError(f"fps {message}")
    return _fps_fraction(value)


def _fps_fraction(value: object) -> Fraction:
    if isinstance(value, Fraction):
        return value
    if isinstance(value, float) and value.is_integer():
        return Fraction(int(value))
    text = str(value).strip()
    if isinstance(value, float) and abs(value - round(value, 3)) < FLOAT32_SLACK:
        text = str(round(value, 3))  # 23.976 that went through float32 is 23.97599983
    if text in NTSC:
        return NTSC[text]
    return Fraction(text)


def plain(text: str) -> str:
    """The text of a number; ValueError for what Python alone reads as one, such as 1_6 or other scripts' digits."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return text


def fps_fault(value: object) -> str | None:
    """Why a cell is no frame rate, or None."""
    hint = "write 24, 23.976 or 30000/1001"
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        return f"is {_kind_of(value)}; {hint}"
    if isinstance(value, str) and not re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{0,9}|/[0-9]{1,9})?\s*", value):
        negative = value.strip().startswith("-")
        return f"must be above 0; {hint}" if negative else f"is no frame rate; {hint}"
    try:
        rate = _fps_fraction(value)
    except (ValueError, ZeroDivisionError, OverflowError):
        return f"is no frame rate; {hint}"
    return None if rate > 0 else f"must be above 0; {hint}"


def media_fault(value: object) -> str | None:
    """Why a cell is no image source, or None; only the form is looked at, not the file."""
    if isinstance(value, bytes | bytearray | memoryview):
        return None if len(value) else "holds no bytes"
    if not isinstance(value, str):
        return f"is {_kind_of(value)}; must be a local path, an s3:// URI or bytes"
    if not value.strip():
        return "is blank; leave the cell empty for no image"
    if "\0" in value:
        return "holds a NUL character; remove it"
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", value)
    if scheme is None:
        return None
    if scheme.group(1).lower() != "s3":
        return f"is a {scheme.group(1)}: address; only a local path, an s3:// URI or bytes: download it first"
    return None if re.fullmatch(r"s3://[^/]+/.+", value, re.DOTALL) else "must be s3://bucket/key"


def conditioning_of(image: object, last_image: object) -> str:
    """`text`, `image` or `first_last`, from which of the two cells is filled."""
    if image is None:
        return "text"
    return "image" if last_image is None else "first_last"


def cross_faults(values: Mapping[str, object], served: Sequence[str], model: str) -> list[tuple[str, str]]:
    """Faults that need more than one cell of a row whose cells are each legal, as (column, message)."""
    faults: list[tuple[str, str]] = []
    image, last_image = values.get("image"), values.get("last_image")
    if last_image is not None and image is None:
        faults.append(("last_image", LAST_WITHOUT_FIRST))
    else:
        kind = conditioning_of(image, last_image)
        if kind not in served:
            faults.append(("image" if image is not None else "prompt", unserved(kind, model)))
        elif kind == "first_last" and values.get("num_frames") == 1:
            faults.append(("num_frames", TOO_SHORT_FOR_LAST))
    seed, samples = values.get("seed"), values.get("samples")
    if seed is not None and samples is not None and int(seed) + int(samples) - 1 > MAX_SEED:  # type: ignore[call-overload]
        faults.append(("seed", seed_overflow(int(samples))))  # type: ignore[call-overload]
    return faults


def unserved(kind: str, model: str) -> str:
    """Why the run's checkpoint cannot serve a row, and which can."""
    what = {
        "text": "has no image, which {model} needs",
        "image": "is an image, which {model} cannot take",
        "first_last": "with last_image gives a first and a last image, which {model} cannot take",
    }[kind]
    return f"{what.format(model=model)}; use {SERVED_BY[kind]}"


def seed_overflow(samples: int) -> str:
    """Why a seed is too large for its number of samples."""
    return f"with {samples} samples goes past {MAX_SEED}; at most {MAX_SEED - samples + 1}"


def clean(text: str) -> str:
    """Text as the encoder sees it: ftfy, HTML-unescaped twice, whitespace collapsed, stripped."""
    import ftfy  # costs 30 ms at start-up, and most commands never clean text

    fixed = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", fixed.strip()).strip()


def shown(value: object) -> str:
    """A cell for a message: printable ASCII, at most 60 characters."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value):,} bytes"
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."

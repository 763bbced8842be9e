"""One foreign cell -> cells of our columns. A ValueError says what is wrong; None and blanks are empty cells."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final, TypeAlias

from batch_gen import rule_checks, rules

Cells: TypeAlias = dict[str, object]

_EMPTY_WORDS: Final = {"", "none", "null", "nan"}
_SIZE: Final = re.compile(r"\s*(\d{1,5})\s*[x*X,\u00d7]\s*(\d{1,5})\s*")
_NAMED_SIZE: Final = "names no width and height; write 1280x720"


def text(value: object) -> str:
    """Text as it is; numbers as their digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | Mapping | list | bytes):
        raise ValueError(f"is {_kind(value)}; must be text")  # noqa: TRY004  the importer collects ValueErrors
    return str(value)


def number(value: object) -> float | None:
    """A number, or digits as text; None for an empty cell."""
    if isinstance(value, bool | Mapping | list | bytes):
        raise ValueError(f"is {_kind(value)}; must be a number")  # noqa: TRY004
    if isinstance(value, str):
        word = value.strip()
        if word.lower() in _EMPTY_WORDS:
            return None
        try:
            return float(word)
        except ValueError:
            hint = "; write a decimal point" if re.fullmatch(r"-?\d+,\d+", word) else ""
            raise ValueError(f"is no number{hint}") from None
    return float(value)  # type: ignore[arg-type]


def whole(value: object) -> object:
    """A whole number as int; a fraction as float, for the rules to refuse."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) and found.is_integer() else found


def seed(value: object) -> object:
    """A seed; -1, which means random elsewhere, is an empty cell."""
    found = whole(value)
    return None if found == -1 else found


def fps(value: object) -> str | None:
    """A frame rate as text of an exact fraction; `auto` is an empty cell."""
    if isinstance(value, str) and value.strip().lower() in {*_EMPTY_WORDS, "auto"}:
        return None
    message = rule_checks.fps_fault(value)
    if message is not None:
        raise ValueError(message)
    return str(rule_checks.parse_fps(value))


def size(value: object) -> tuple[int, int]:
    """Width and height in pixels from `1280*720`, `1280x720`, a pair, or an object with width and height."""
    if isinstance(value, Mapping) and {"width", "height"} <= value.keys():
        value = [value["width"], value["height"]]
    if isinstance(value, list | tuple):
        value = "x".join(str(part) for part in value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_NAMED_SIZE)
    return int(match.group(1)), int(match.group(2))


def low_high(value: object) -> tuple[float | None, float | None]:
    """Wan's guide scale: one number for both, or a pair of (low noise, high noise)."""
    if isinstance(value, str) and "," in value:
        value = value.strip("()[] ").split(",")
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ValueError("must be one number or a pair (low, high)")
        return number(value[0]), number(value[1])
    both = number(value)
    return both, both


def identity(value: object) -> str:
    """A name that files may have; what they cannot have becomes `-`."""
    found = whole(value) if isinstance(value, float) else value
    plain = text(found).strip()
    return plain if re.fullmatch(r"[A-Za-z0-9._-]*", plain) else rule_checks.near_id(plain)


def media(value: object) -> object:
    """An image: path, URI, bytes, or the first of a list; data sets wrap them as {bytes, path}, services as {url}."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"holds {len(value)} images; must be one")
        value = value[0]
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "image_url", "url") if value.get(key)), None)
        if isinstance(value, Mapping):
            value = value.get("url")
    if isinstance(value, str):
        return value.strip() or None
    return value


def messages(value: object) -> str:
    """The text of the last user message of a chat."""
    if isinstance(value, str):
        value = json.loads(value)
    users = (
        [one for one in value if isinstance(one, Mapping) and one.get("role") == "user"]
        if isinstance(value, list)
        else []
    )
    if not users:
        raise ValueError("holds no user message")
    content = users[-1].get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"
        ]
        content = "\n".join(str(part) for part in parts if part)
    return text(content)


def frames_of(duration_s: object, rate: object) -> int | None:
    """The 4k+1 frames nearest to a duration in seconds at a rate; None without a rate."""
    found = number(duration_s)
    if found is None or rate is None:
        return None
    count = Fraction(str(found)) * rule_checks.parse_fps(rate)
    return max(0, round((count - 1) / rules.FRAMES_STEP)) * rules.FRAMES_STEP + 1


SINGLE: Final[dict[str, Callable[[object], object]]] = {
    "text": text,
    "whole": whole,
    "number": number,
    "seed": seed,
    "fps": fps,
    "id": identity,
    "media": media,
    "messages": messages,
}


def _kind(value: object) -> str:
    kinds = {bool: "true/false", list: "a list", bytes: "bytes"}
    return kinds.get(type(value), "a structure")

"""The one door through which documents of a regress root are read: strict, in their own place, one clear error.

What lies in an output root may be truncated, edited, copied to another place or written by a newer version. Nothing
behind this door has to expect that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import AfterValidator, ValidationError

from batch_gen.errors import CheckFailed, UsageError
from batch_gen.records import Strict
from batch_gen.request import RenderRequest
from batch_gen.storage.base import Store

FORMAT: Final = 1
MAX_FAULTS: Final = 3
_TEXTS: Final = ("clip_id", "prompt", "negative_prompt")
_LEAST: Final = {"seed": 0, "width": 1, "height": 1, "num_frames": 1, "steps": 1}


class Document(Strict):
    """A whole file of a regress root.

    Attributes:
        ADVICE: What to do when one is damaged.
    """

    ADVICE: ClassVar[str]
    format: int = FORMAT

    @property
    def key(self) -> str | None:
        """Where it lies, by what it says; None when it does not say so."""
        return None


D = TypeVar("D", bound=Document)


def load_document(store: Store, kind: type[D], key: str) -> D | None:
    """The document of a key, None when there is none.

    Raises:
        CheckFailed: it is damaged, of a newer version or of another place; names the file and what to do.
    """
    blob = store.get(key)
    if blob is None:
        return None
    place = f"{store.url}/{key}"
    try:
        body = json.loads(blob.body)
        version = body.get("format", FORMAT) if isinstance(body, dict) else FORMAT
        if version != FORMAT:
            raise CheckFailed(f"{place} has format {version}, this version reads {FORMAT}; use its batch-gen")
        found = kind.model_validate_json(blob.body, strict=True)
    except ValidationError as error:
        raise CheckFailed(f"{place} is damaged: {faults(error)}; {kind.ADVICE}") from error
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"{place} is damaged: it is no JSON ({error}); {kind.ADVICE}") from error
    if found.key not in (None, key):
        raise CheckFailed(f"{place} is damaged: by what it says it belongs to {found.key}; {kind.ADVICE}")
    return found


def checked_part(what: str, text: str) -> str:
    """Raises UsageError for a name from the command line that is no single part of a key."""
    if text in ("", ".", "..") or "/" in text or "\0" in text:
        raise UsageError(f"{what} {text!r} is no name")
    return text


def faults(error: ValidationError, prefix: str = "") -> str:
    """`key: what is wrong` for the first faults of a model, in one line.

    Args:
        error: Of pydantic.
        prefix: Goes before every key, `limits.`.
    """
    found = []
    for fault in error.errors(include_url=False):
        where = prefix + ".".join(map(str, fault["loc"]))
        said = fault["msg"].removeprefix("Value error, ")
        found.append(f"{where}: {said}" if where else said)
    more = len(found) - MAX_FAULTS
    return "; ".join([*found[:MAX_FAULTS], *([f"and {more} more"] if more > 0 else [])])


def _request(body: dict[str, Any]) -> dict[str, Any]:
    try:
        RenderRequest.from_json(body)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"no request ({type(error).__name__}: {error})") from error
    wrong = [name for name in _TEXTS if not isinstance(body[name], str)]
    wrong += [name for name, least in _LEAST.items() if not _is_whole(body[name], least)]
    if wrong:
        raise ValueError(f"no request: {', '.join(wrong)}")
    return body


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


RequestJson = Annotated[dict[str, Any], AfterValidator(_request)]
"""What `RenderRequest.to_json` wrote."""
Moment = Annotated[str, AfterValidator(_moment)]
"""UTC, ISO 8601."""


def clip_shape(request: Mapping[str, Any], num_frames: int) -> tuple[int, ...]:
    """Shape of the frames of a request, [F, H, W, 3]."""
    return num_frames, request["height"], request["width"], 3

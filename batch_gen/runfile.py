"""run.json: what all clips of a run have in common, written once, and the guard that compares with it.

The settings that decide pixels form the fingerprint; a resume with another one stops before any work, with the
difference. Everything else in the file is for people and for warnings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, ValidationError

from batch_gen.errors import ConfigError, UsageError
from batch_gen.layout import RUN_KEY, is_ours
from batch_gen.records import Strict
from batch_gen.storage.base import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batch_gen.storage.base import Store

OUTPUT_FORMAT: Final = 1
MAX_SHOWN: Final = 3
MEND: Final = (
    "bring the file back from a copy or from an older version of the object; without one, render into another --out:"
    " the clips that are committed here stay readable"
)


class RunFile(Strict):
    """The head of an output root.

    Attributes:
        format: Of the whole root; readers refuse a newer one.
        settings: Everything that decides pixels (checkpoint and adapter digests, solver, dtype, decode, codec, ...).
        fingerprint: SHA-256 over `settings`.
        profile: Operational settings of the worker that began the run.
        versions: Of its code and libraries.
        created: UTC, ISO 8601; for people.
    """

    format: int = OUTPUT_FORMAT
    settings: dict[str, Any]
    fingerprint: str
    profile: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    created: str = ""


def new_run(settings: Mapping[str, Any], **facts: Any) -> RunFile:
    """A run file of these settings; `facts` are the fields that do not count (profile, versions, created)."""
    plain = json.loads(json.dumps(settings))
    return RunFile(settings=plain, fingerprint=fingerprint_of(plain), **facts)


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """SHA-256 in hex over the settings as sorted JSON."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def open_run(store: Store, mine: RunFile) -> RunFile:
    """Begin the run, or join it when it has the same fingerprint; return the file that stands in the store.

    Raises:
        ConfigError: The root belongs to a run with other settings (the message names them) or to a newer version.
        UsageError: It holds other people's files.
    """
    refuse_foreign(store)
    try:
        store.create(RUN_KEY, mine.to_bytes(), content_type="application/json")
    except AlreadyExists:
        standing = load_run(store)
        if standing is None:
            raise ConfigError(f"{store.url}/{RUN_KEY} vanished while it was read; start again") from None
        if standing.fingerprint != mine.fingerprint:
            raise ConfigError(_difference_message(store.url, standing, mine)) from None
        return standing
    return mine


def refuse_foreign(store: Store) -> None:
    """A run begins in an empty place, or in one that holds nothing but parts of a run.

    Raises:
        UsageError: With some of the foreign files.
    """
    if store.head(RUN_KEY) is not None:
        return
    foreign = list(itertools.islice((each.key for each in store.list("") if not is_ours(each.key)), MAX_SHOWN))
    if foreign:
        raise UsageError(
            f"{store.url} is no output root of batch-gen and not empty ({', '.join(foreign)} ...); "
            "name an empty or new folder or prefix as --out"
        )


def what_is_wrong(error: Exception) -> str:
    """The first fault of a document that cannot be read, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def load_run(store: Store) -> RunFile | None:
    """The run file of a root, None when no run began there.

    Raises:
        ConfigError: The file is damaged or of a newer version.
    """
    blob = store.get(RUN_KEY)
    if blob is None:
        return None
    place = f"{store.url}/{RUN_KEY}"
    try:
        version = json.loads(blob.body)["format"]
        if version != OUTPUT_FORMAT:
            raise ConfigError(f"{place} has format {version}, this version reads {OUTPUT_FORMAT}; use its batch-gen")
        return RunFile.model_validate_json(blob.body)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{place} is damaged ({what_is_wrong(error)}); {MEND}") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`crf: 16 -> 18` for every setting that differs, in order of name."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "unset"), new.get(name, "unset")
        if before != after:
            lines.append(f"{name}: {_shown(before)} -> {_shown(after)}")
    return lines


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _difference_message(url: str, standing: RunFile, mine: RunFile) -> str:
    lines = "\n".join(f"  {line}" for line in differences(standing.settings, mine.settings))
    return f"{url} holds a run with other settings (run's -> yours):\n{lines}\nuse the run's settings or another --out"

"""`--config job.yaml`: settings in a file, here or on S3; every value is checked against the kind of its flag.

YAML guesses types (`off` is false, `11:30` is 690, a later key silently wins over an equal earlier one), so what is
read is held against what the flag of that name takes before anything else sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

import yaml

from batch_gen import strict_yaml
from batch_gen.errors import ConfigError, UsageError
from batch_gen.flags import BY_KEY, FLAGS, Flag
from batch_gen.reach import reach
from batch_gen.storage.address import check_address
from batch_gen.storage.base import StoreOptions, open_store

_MAPPINGS: Final = ("mesh",)
_SHORT: Final = Repr()
_SHORT.maxlevel = 2
_WORDS: Final = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def read_job_file(path: str | None, options: StoreOptions | None = None) -> dict[str, Any]:
    """Read `--config job.yaml`; keys are flag names, with dashes or underscores. Keys without a value are left out.

    Args:
        path: a file or an s3:// URL; None is an empty file.
        options: how S3 is reached.

    Raises:
        ConfigError: unreadable, no mapping, a key that is no setting or stands twice, or a value of another kind.
    """
    if path is None:
        return {}
    try:
        raw = strict_yaml.load(read_text("config", path, options))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path}: expected a mapping of settings, found {type(raw).__name__}")
    found: dict[str, Any] = {}
    for name, value in raw.items():
        key = str(name).replace("-", "_")
        if key not in BY_KEY or key == "config":
            raise ConfigError(f"config {path}: {key!r} is no setting{_suggest(key)}")
        if key in found:
            raise ConfigError(f"config {path}: {key!r} stands there twice, with a dash and with an underscore")
        if value is not None:
            found[key] = _checked(path, BY_KEY[key], value)
    return found


def check_texts(layers: Mapping[str, Any]) -> None:
    """No setting is an empty text: a variable of a script that was not set must not mean the default.

    Raises:
        UsageError: with the flag's name; values that may hold a secret are not repeated.
    """
    for flag in (BY_KEY[key] for key in layers if key in BY_KEY):
        if flag.kind not in ("str", "path"):
            continue
        values = layers[flag.key] if flag.multiple else (layers[flag.key],)
        for text in (value for value in values if isinstance(value, str)):
            if not text.strip():
                raise UsageError(f"--{flag.name} is empty; give it a value or leave it out")
            if flag.key not in ("on_clip", "s3_endpoint", "where", "override"):
                check_address(f"--{flag.name}", text)


def blame(key: str, value: Any, given: Mapping[str, Any]) -> str:
    """Who said a setting, for messages: the job file with its key, the flag, or nobody (a default).

    Args:
        key: of the setting; `value` is what was refused.
        given: all that was said, `config` among it.
    """
    name = BY_KEY[key].name if key in BY_KEY else key
    path = given.get("config")
    if path is not None and key in given and read_job_file(str(path), reach(given)).get(key) == value:
        return f"config {path}: {key}"
    return f"--{name}" if key in given else f"settings: {key}"


def read_text(what: str, path: str, options: StoreOptions | None) -> str:
    """The text of a local file or of an object.

    Raises:
        ConfigError: there is no such object; `what` it would have been is the message's first word.
        UsageError: the address is none, or holds what may be a secret.
        OSError, UnicodeDecodeError: the file cannot be read, or is no text.
    """
    if "://" not in path:
        return Path(path).read_text("utf-8")
    check_address(f"--{what}", path)
    root, _, name = path.rpartition("/")
    if not name or root.endswith(":/"):
        raise ConfigError(f"{what} {path}: names no object; use s3://bucket/prefix/file.yaml")
    blob = open_store(root, options).get(name)
    if blob is None:
        raise ConfigError(f"{what} {path}: no such object")
    return blob.body.decode("utf-8")


def _checked(path: str, flag: Flag, value: Any) -> Any:
    """The value as the flag takes it."""
    if flag.multiple:
        items = value if isinstance(value, list) else [value]
        return tuple(_one(path, flag, item) for item in items)
    if isinstance(value, dict) and flag.key in _MAPPINGS:
        return value
    return _one(path, flag, value)


def _one(path: str, flag: Flag, value: Any) -> Any:
    place = f"config {path}: {flag.key}: {_SHORT.repr(value)}"
    if isinstance(flag.kind, tuple):
        plain = "off" if value is False else value  # what somebody wrote as off
        if plain not in flag.kind:
            raise ConfigError(f"{place} is not one of {', '.join(flag.kind)}")
        return plain
    if flag.kind in ("str", "path"):
        return _as_text(place, flag, value)
    fits = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
    }
    if not fits[flag.kind]:
        raise ConfigError(f"{place} is not {_WORDS[flag.kind]}")
    return value


def _as_text(place: str, flag: Flag, value: Any) -> str:
    """Text; a number or a moment only where it cannot have been meant as anything else."""
    if isinstance(value, str):
        return value
    if flag.key == "drain_at" and isinstance(value, datetime):
        return value.isoformat()
    if flag.key == "max_failures" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{place} is not text (YAML made a {type(value).__name__} of it); put it in quotes")


def _suggest(name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, [flag.key for flag in FLAGS], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""`--lora PATH[@strength][:high|low]`: which files, how much of each, for which expert; one set per run.

In the run's fingerprint an adapter is the SHA-256 of its bytes with strength and expert, so that a file may move.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from batch_gen.environment import cache_folder
from batch_gen.errors import CheckpointError, UsageError
from batch_gen.storage.base import StoreOptions, open_store, sha256_of

_FORM = re.compile(r"(?P<path>.+?)(?:@(?P<strength>[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))?(?::(?P<stage>high|low))?")
MAX_STRENGTH = 100.0


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """One LoRA file on this machine; `stage` is "high", "low" or "" for every expert that the file names."""

    path: Path
    strength: float
    stage: str

    @property
    def identity(self) -> str:
        """What counts for the fingerprint: `<sha256>@<strength>:<expert>`."""
        return f"{sha256_of(self.path)}@{self.strength:g}:{self.stage or 'each'}"

    def to_json(self) -> dict[str, str | float]:
        """For the rank process."""
        return {"path": str(self.path), "strength": self.strength, "stage": self.stage}


def find_adapters(given: tuple[str, ...], options: StoreOptions) -> tuple[AdapterFile, ...]:
    """The adapters that `--lora` names, in that order; those on S3 are fetched first.

    Raises:
        UsageError: A value of another form.
        CheckpointError: A file is missing or no safetensors file.
    """
    return tuple(_find(text, options) for text in given)


@cache
def _find(text: str, options: StoreOptions) -> AdapterFile:
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f"--lora {text!r}: expected PATH, PATH@STRENGTH or PATH@STRENGTH:high (or :low)")
    strength = float(found["strength"] or 1.0)
    if abs(strength) > MAX_STRENGTH:
        raise UsageError(f"--lora {text!r}: strength {strength:g} is not within {-MAX_STRENGTH:g} to {MAX_STRENGTH:g}")
    place = found["path"]
    if not place.endswith(".safetensors"):
        raise CheckpointError(f"--lora {place}: only .safetensors files are read; convert it first")
    path = _fetched(place, options) if place.startswith("s3://") else Path(place).resolve()
    if not path.is_file():
        raise CheckpointError(f"--lora {place}: no such file")
    return AdapterFile(path, strength, found["stage"] or "")


def _fetched(url: str, options: StoreOptions) -> Path:
    folder, _, name = url.rpartition("/")
    path = cache_folder() / "adapters" / hashlib.sha256(url.encode()).hexdigest()[:16] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if open_store(folder, options).download(name, path) is None:
        raise CheckpointError(f"--lora {url}: no such object")
    return path

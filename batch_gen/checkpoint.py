"""Which checkpoint a run uses: name -> folder, sizes and limits from its config files, digest. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import filelock

from batch_gen.environment import PACKAGE_ROOT, cache_folder, child_environment
from batch_gen.errors import CheckpointError, ConfigError, UsageError
from batch_gen.request import ModelLimits
from batch_gen.storage.address import check_address
from batch_gen.storage.base import StoreOptions
from batch_gen.weights import fetch_from_hub, fetch_from_store
from models.entry import ConfigFiles, Limits
from models.errors import ModelError
from models.registry import entry_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batch_gen.request import Conditioning

BUILT_IN = ("pocket", "tiny", "fake")
_FILES = (".json", ".safetensors", ".model", ".txt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run can use.

    Args:
        name: what the user called it.
        folder: where its files lie; None for the fake engine.
        digest: SHA-256 over its files (names, sizes, contents).
        preset: the preset that fits it.
        limits: what it can serve.
        facts: configuration values that validation and planning read.
    """

    name: str
    folder: Path | None
    digest: str
    preset: str
    limits: ModelLimits
    facts: dict[str, Any]


def pocket_folder() -> Path:
    """The trained checkpoint that ships with the product."""
    return PACKAGE_ROOT / "models" / "pocket" / "weights"


def default_model(out: str) -> str:
    """The model when none is named: the trained pocket, else the random tiny one.

    Raises:
        UsageError: the output is on S3; such a run must say which model it means.
    """
    if out.startswith("s3://"):
        raise UsageError(f"--model must be given when the output is on S3 ({out})")
    return "pocket" if (pocket_folder() / "model_index.json").exists() else "tiny"


def open_checkpoint(name: str, store_options: StoreOptions | None = None, *, weights: bool = True) -> Checkpoint:
    """Find a checkpoint by name, read its configuration and compute its digest.

    Args:
        name: an existing folder, else `pocket`, `tiny` or `fake[:options.json]`, else `s3://...` or `owner/name`.
        store_options: how `s3://` is reached.
        weights: False where only sizes and tokens count: no weights are fetched or read, and the digest is empty.

    Raises:
        CheckpointError: not found, torn or of another kind; the message names the file.
        UsageError: an address that may hold a secret.
    """
    check_address("--model", name)
    if name == "fake" or name.startswith("fake:"):
        return Checkpoint(name, None, hashlib.sha256(name.encode()).hexdigest(), "pocket", ModelLimits(name="fake"), {})
    folder = _folder_of(name, store_options or StoreOptions(), weights=weights)
    facts = read_facts(folder)
    limits = read_limits(facts, folder)
    digest = digest_folder(folder) if weights else ""
    return Checkpoint(name, folder, digest, limits.preset, model_limits(name, limits), facts)


def read_facts(folder: Path) -> dict[str, Any]:
    """Read the sizes that planning needs from the config files of a diffusers-layout folder.

    Raises:
        CheckpointError: a file is missing or no JSON.
    """
    index = _read_json(folder / "model_index.json")
    transformer = _read_json(folder / "transformer" / "config.json")
    vae = _read_json(folder / "vae" / "config.json")
    missing = [part for part in ("text_encoder", "tokenizer", "scheduler") if not (folder / part).is_dir()]
    if missing:
        raise CheckpointError(
            f"{folder}: not a complete checkpoint in diffusers layout: no folder {', '.join(missing)}"
        )
    stray = sorted(path.name for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if stray and not any(folder.rglob("*.safetensors")):
        raise CheckpointError(f"{folder}: holds {stray[0]}; weights load from safetensors only: convert it first")
    return {"index": index, "transformer": transformer, "vae": vae}


def digest_folder(folder: Path) -> str:
    """SHA-256 over all configuration and weight files, cached per file by path, size and time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _FILES)
    cache_path = cache_folder() / "digests.json"
    cache_path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache_path.with_suffix(".lock")):
        cache = _read_cache(cache_path)
        total = hashlib.sha256()
        for path in files:
            stat = path.stat()
            key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
            if key not in cache:
                with path.open("rb") as file:
                    cache[key] = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()} {cache[key]}\n".encode())
        partial = cache_path.with_suffix(".part")
        partial.write_text(json.dumps(cache), "utf-8")
        partial.replace(cache_path)
    return total.hexdigest()


def _folder_of(name: str, store_options: StoreOptions, *, weights: bool) -> Path:
    if Path(name).is_dir():
        return Path(name).resolve()
    if name == "pocket":
        if not (pocket_folder() / "model_index.json").exists():
            raise CheckpointError("the pocket checkpoint is not part of this installation; use --model tiny")
        return pocket_folder()
    if name == "tiny":
        return _build_tiny()
    if name.startswith("s3://"):
        return fetch_from_store(name, store_options, weights=weights)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return fetch_from_hub(name, weights=weights)
    near = get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "built-in names are pocket and tiny; or s3://..., or owner/name"
    raise CheckpointError(f"--model {name}: no such folder; {hint}")


def _build_tiny() -> Path:
    """Build the random checkpoint once per machine, in a process of its own: building needs torch."""
    folder = cache_folder() / "checkpoints"
    code = "import sys, pathlib, models.wan.tiny as tiny; print(tiny.ensure_tiny(pathlib.Path(sys.argv[1])))"
    folder.mkdir(parents=True, exist_ok=True)
    known = sorted(folder.glob("tiny-default-*/model_index.json"))
    if known:
        return known[-1].parent
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    if done.returncode != 0:
        raise CheckpointError(f"the tiny checkpoint could not be built: {done.stderr.strip()[-500:]}")
    return Path(done.stdout.strip().splitlines()[-1])


def read_limits(facts: Mapping[str, Any], where: Path) -> Limits:
    """What the checkpoint's own kind of pipeline says of its config files.

    Raises:
        CheckpointError: no pipeline of ours renders it, or its sizes do not fit together.
    """
    try:
        return entry_of(facts["index"], where).limits(ConfigFiles(**facts))
    except ModelError as error:
        raise CheckpointError(f"{where}: {error.message.removeprefix(f'{where}: ')}") from error


def model_limits(name: str, limits: Limits) -> ModelLimits:
    """The limits as the manifest's rules take them; no official sizes: every row would be warned about otherwise."""
    return ModelLimits(
        name=name,
        size_multiple=limits.size_multiple,
        max_tokens=limits.max_tokens,
        conditionings=cast("tuple[Conditioning, ...]", limits.conditionings),
        fps=None if limits.fps is None else Fraction(limits.fps),
        trained_frames=limits.trained_frames,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; expected a checkpoint in diffusers layout") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return body


def _read_cache(path: Path) -> dict[str, str]:
    try:
        body = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}

"""JSON files of a checkpoint folder; imports no torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from models.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint folder; raises ModelError("checkpoint")."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError("checkpoint", f"{path}: file not found; the checkpoint folder is incomplete") from error
    except (OSError, ValueError) as error:
        raise ModelError("checkpoint", f"{path}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError("checkpoint", f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 1 << 20


def folder_digest(folder: Path) -> str:
    """Hex SHA-256 that identifies a checkpoint: names, sizes and contents of its files.

    A file above 64 MiB counts with its first, middle and last MiB, so that 100 GB do not have to be read twice.
    """
    digest = hashlib.sha256()
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors", ".model"))
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            whole = size <= _WHOLE_BYTES
            for offset in [0] if whole else [0, size // 2, size - _SAMPLE_BYTES]:
                file.seek(offset)
                digest.update(file.read(size if whole else _SAMPLE_BYTES))
    return digest.hexdigest()

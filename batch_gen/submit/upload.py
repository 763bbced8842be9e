"""What a fleet reads, on S3 and named by its content, so that a resubmission finds it where it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_gen.errors import UsageError
from batch_gen.layout import SUBMIT_PREFIX
from batch_gen.storage.base import AlreadyExists, Body, Store, sha256_of


@dataclass(frozen=True, slots=True)
class Upload:
    """One object to be: its key below the output root, and its body."""

    key: str
    body: Body


def manifest_uploads(sources: Sequence[str], root: str) -> tuple[list[str], list[Upload]]:
    """The URLs that workers read the manifest from, and what must be uploaded for them.

    A folder becomes one prefix, so that a command stays short however many files there are.

    Args:
        sources: Files, folders of Parquet files, or s3:// URLs, which stay as they are.
        root: URL of the output root.

    Raises:
        UsageError: no such file, or a folder without Parquet files.
    """
    urls: list[str] = []
    uploads: list[Upload] = []
    for source in sources:
        if source.startswith("s3://"):
            urls.append(source)
            continue
        found = list(_folder(Path(source)) if Path(source).is_dir() else _file(Path(source)))
        uploads += found
        urls.append(f"{root}/{found[0].key.rpartition('/')[0] if Path(source).is_dir() else found[0].key}")
    return urls, uploads


def json_upload(body: Mapping[str, Any], name: str) -> Upload:
    """A JSON document (which is YAML, too) by the hash of its content."""
    text = json.dumps(body, indent=1, sort_keys=True, default=str).encode() + b"\n"
    return Upload(f"{SUBMIT_PREFIX}{sha256_of(text)[:16]}-{name}", text)


def upload(store: Store, uploads: Sequence[Upload]) -> int:
    """Bring them there; returns how many were new."""
    count = 0
    for each in uploads:
        with contextlib.suppress(AlreadyExists):  # the same content: its name says so
            store.create(each.key, each.body, sha256=sha256_of(each.body))
            count += 1
    return count


def _file(path: Path) -> Iterator[Upload]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    yield Upload(f"{SUBMIT_PREFIX}{sha256_of(path)[:16]}-{_safe(path.name)}", path)


def _folder(path: Path) -> Iterator[Upload]:
    files = sorted(path.rglob("*.parquet"))
    if not files:
        raise UsageError(f"{path}: holds no .parquet file")
    names = [f"{number:05d}-{_safe('-'.join(file.relative_to(path).parts))}" for number, file in enumerate(files)]
    digest = hashlib.sha256("\n".join(f"{n} {sha256_of(f)}" for n, f in zip(names, files, strict=True)).encode())
    prefix = f"{SUBMIT_PREFIX}{digest.hexdigest()[:16]}-{_safe(path.resolve().name)}"
    yield from (Upload(f"{prefix}/{name}", file) for name, file in zip(names, files, strict=True))


def _safe(name: str) -> str:
    kept = "".join(char for char in name if char.isascii() and (char.isalnum() or char in ".-_"))
    return kept or hashlib.sha256(name.encode()).hexdigest()[:8]

"""Manifest and config on S3, named by their content, so that a resubmission finds them where they are."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from batch_gen.errors import UsageError
from batch_gen.storage.base import AlreadyExists, Store, sha256_of

PREFIX = "submit"


def upload_files(store: Store, paths: Sequence[str], *, dry_run: bool = False) -> list[str]:
    """Bring local files below the output root; returns their URLs, s3:// ones as they are.

    Args:
        store: The output root.
        paths: Files, folders of Parquet files, or s3:// URLs.
        dry_run: Say the URLs, upload nothing.

    Raises:
        UsageError: a folder, or no such file.
    """
    urls = []
    for path in paths:
        if path.startswith("s3://"):
            urls.append(path)
            continue
        for file in _files(Path(path)):
            key = f"{PREFIX}/{sha256_of(file)[:16]}-{_safe(file.name)}"
            if not dry_run:
                with contextlib.suppress(AlreadyExists):  # the same content: its name says so
                    store.create(key, file, sha256=sha256_of(file))
            urls.append(f"{store.url}/{key}")
    return urls


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.parquet"))
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    return [path]


def _safe(name: str) -> str:
    kept = "".join(char for char in name if char.isascii() and (char.isalnum() or char in ".-_"))
    return kept or hashlib.sha256(name.encode()).hexdigest()[:8]

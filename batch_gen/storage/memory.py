"""A store in memory: for tests, and the plainest statement of what a store is."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from batch_gen.storage.base import AlreadyExists, Blob, Body, ChecksumMismatch, Conflict, Head, ListedKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from batch_gen.storage.base import OnBlock


@dataclass(frozen=True, slots=True)
class _Entry:
    body: bytes
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


class MemoryStore:
    """Keeps the store's promises under one lock."""

    _named: ClassVar[dict[str, MemoryStore]] = {}

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The one store of this name in this process, so that `memory://name` can be opened twice."""
        return cls._named.setdefault(name, cls(name))

    @property
    def url(self) -> str:
        """The root, as a user may type it."""
        return f"memory://{self._name}"

    def get(self, key: str) -> Blob | None:
        """See `Store.get`."""
        entry = self._entries.get(key)
        return None if entry is None else Blob(entry.body, entry.etag)

    def head(self, key: str) -> Head | None:
        """See `Store.head`."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return Head(len(entry.body), entry.etag, entry.etag, dict(entry.metadata))

    def download(self, key: str, path: Path) -> Head | None:
        """See `Store.download`."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        path.write_bytes(entry.body)
        return Head(len(entry.body), entry.etag, entry.etag, dict(entry.metadata))

    def read_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """See `Store.read_range`."""
        entry = self._entries.get(key)
        return None if entry is None else entry.body[start : start + num_bytes]

    def create(
        self,
        key: str,
        body: Body,
        *,
        content_type: str = "application/octet-stream",  # noqa: ARG002 - nobody reads it back from memory
        metadata: Mapping[str, str] | None = None,
        sha256: str | None = None,
        on_block: OnBlock | None = None,
    ) -> str:
        """See `Store.create`."""
        if on_block is not None:
            on_block()
        entry = _Entry(_read(body), dict(metadata or {}))
        if sha256 is not None and entry.etag != sha256:
            raise ChecksumMismatch(f"{key}: the body has SHA-256 {entry.etag}, announced was {sha256}")
        with self._lock:
            if key in self._entries:
                raise AlreadyExists(key)
            self._entries[key] = entry
        return entry.etag

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """See `Store.replace`."""
        entry = _Entry(body)
        with self._lock:
            old = self._entries.get(key)
            if old is None or old.etag != etag:
                raise Conflict(key)
            self._entries[key] = entry
        return entry.etag

    def put(self, key: str, body: Body, *, content_type: str = "application/octet-stream") -> str:  # noqa: ARG002
        """See `Store.put`."""
        entry = _Entry(_read(body))
        with self._lock:
            self._entries[key] = entry
        return entry.etag

    def list(self, prefix: str) -> Iterator[ListedKey]:
        """See `Store.list`."""
        with self._lock:
            found = sorted((key, entry) for key, entry in self._entries.items() if key.startswith(prefix))
        for key, entry in found:
            yield ListedKey(key, len(entry.body))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._entries.pop(key, None)

    def clock_offset_s(self) -> float | None:
        """See `Store.clock_offset_s`."""
        return None


def _read(body: Body) -> bytes:
    return body if isinstance(body, bytes) else body.read_bytes()

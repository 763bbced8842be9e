"""The one interface to outputs: small atomic objects, created once or replaced against their last version.

The protocol of runs (plans, leases, commits) needs three promises, and every store here keeps them:

- `create` writes a key that does not exist yet, whole or not at all; of many concurrent creators one wins.
- `replace` writes a key only while it still has the version (etag) that the caller saw.
- what `get` returns is one whole body that somebody wrote.

`batch_gen.storage.probe` tests a store for them before a run trusts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from batch_gen.errors import StoreError, UsageError
from batch_gen.storage.address import check_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

COPY_BLOCK_BYTES: Final = 1 << 20

Body = bytes | Path
OnBlock = Callable[[], object]


class AlreadyExists(Exception):
    """`create` found the key taken by somebody else; nothing was written."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} exists already")
        self.key = key


class NoKey(UsageError, ValueError):
    """A name that somebody gave leads out of the store; nothing was read or written."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key!r} is no key of a store: a name in it is empty or leads elsewhere")


class Conflict(Exception):
    """`replace` found another version, or none; nothing was written."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} was changed or removed by somebody else")
        self.key = key


class ChecksumMismatch(StoreError):
    """The body that arrived is not the body whose SHA-256 was announced; nothing was written."""


@dataclass(frozen=True, slots=True)
class Blob:
    """One whole object."""

    body: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Head:
    """What a store knows of an object without reading it.

    Attributes:
        size_bytes: Length of the body.
        etag: Version for `replace`.
        sha256: SHA-256 of the body in hex as the store holds it, None when it keeps none.
        metadata: What the creator attached; keys are lower case.
    """

    size_bytes: int
    etag: str
    sha256: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One line of a listing."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store; all but the first block concern S3 alone.

    Attributes:
        conditional: False for a store that failed the probe: `create` and `replace` then look before they write, which
            is safe only while one process writes a key (`--assign static`).
        read_back: Read every uploaded file back and compare, for servers that do not check SHA-256 themselves.
        durable: Folder only: fsync files and folders before a write counts.
        endpoint_url: Of an S3-compatible server.
        region: Signing region; None leaves it to the environment.
        path_style: True for servers without bucket host names; None means True exactly when there is an endpoint.
        checksum: "when_supported" or "when_required" (servers older than 2025 choke on trailing checksums).
        kms_key: Encrypt every object with this KMS key (id or ARN).
        storage_class: Of every object, such as INTELLIGENT_TIERING.
        tags: Of every object, `key=value&key=value`.
        bucket_owner: Account that must own the bucket; another owner is refused by S3.
        requester_pays: Pay for requests to somebody else's bucket.
        small_read_timeout_s: Patience for an answer about leases, records and plans.
        large_read_timeout_s: The same for clips.
    """

    conditional: bool = True
    read_back: bool = False
    durable: bool = True
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    checksum: str = "when_supported"
    kms_key: str | None = None
    storage_class: str | None = None
    tags: str | None = None
    bucket_owner: str | None = None
    requester_pays: bool = False
    connect_timeout_s: float = 5.0
    small_read_timeout_s: float = 10.0
    large_read_timeout_s: float = 60.0
    max_attempts: int = 8
    max_connections: int = 32


class Store(Protocol):
    """Where a run keeps everything. Keys are relative, with `/` between their parts.

    All methods raise `StoreError` when the store cannot be reached or refuses, `EnvironmentFault` when that will not
    change by waiting (no such bucket, no permission), and `DiskFull` when there is no space. They are safe to call from
    several threads.
    """

    @property
    def url(self) -> str:
        """The root, as a user may type it."""
        ...

    def get(self, key: str) -> Blob | None:
        """Read a whole object, None when there is none."""
        ...

    def head(self, key: str) -> Head | None:
        """Size, version, checksum and metadata, None when there is no such object."""
        ...

    def download(self, key: str, path: Path) -> Head | None:
        """Copy an object to a local file, None when there is no such object."""
        ...

    def read_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """Some bytes of an object, fewer at its end; None when there is no such object."""
        ...

    def create(
        self,
        key: str,
        body: Body,
        *,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
        sha256: str | None = None,
        on_block: OnBlock | None = None,
    ) -> str:
        """Write an object that does not exist yet; return its etag.

        Args:
            key: Where.
            body: The bytes, or a file of them.
            content_type: For readers that care.
            metadata: ASCII names and values kept beside the body; some 1,500 bytes in all.
            sha256: Of the body in hex; computed when absent. The store refuses a body with another one.
            on_block: Called as the bytes of a file leave, block by block: a sign of life of a long write.

        Raises:
            AlreadyExists: The key is taken by another writer. A write of our own whose answer got lost does not count.
            ChecksumMismatch: The body does not have that SHA-256.
        """
        ...

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """Write a new version over version `etag`; return the new etag.

        Bodies must never repeat (leases count a sequence up): an etag may be a hash of the content.

        Raises:
            Conflict: The key is gone or has another version.
        """
        ...

    def put(self, key: str, body: Body, *, content_type: str = "application/octet-stream") -> str:
        """Write without condition: only what is rebuilt at will (closing tables, report, probe)."""
        ...

    def list(self, prefix: str) -> Iterator[ListedKey]:
        """Every key that starts with `prefix`, in ascending order."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error when there is none."""
        ...

    def clock_offset_s(self) -> float | None:
        """Clock of the store minus ours, None where both are one."""
        ...


def sha256_of(body: Body) -> str:
    """SHA-256 of bytes or of a file, in hex."""
    if isinstance(body, bytes):
        return hashlib.sha256(body).hexdigest()
    with body.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(body: Body) -> int:
    """Length in bytes of bytes or of a file."""
    return len(body) if isinstance(body, bytes) else body.stat().st_size


def join_url(root: str, key: str) -> str:
    """The address of a key below a root URL or folder."""
    return f"{root.rstrip('/')}/{key}"


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """The store behind a URL: `s3://bucket/prefix`, `memory://name`, `file:///path` or a folder.

    Raises:
        UsageError: The URL has another scheme, names no bucket, or holds what may be a secret.
    """
    from batch_gen.storage.folder import FolderStore
    from batch_gen.storage.memory import MemoryStore

    if not url.strip():
        raise UsageError("an empty output root; use s3://bucket/prefix or a folder")
    check_address("the address of a store", url)
    options = options or StoreOptions()
    scheme, separator, rest = url.partition("://")
    if not separator:
        return FolderStore(Path(url), options)
    if scheme == "file":
        return FolderStore(Path(rest), options)
    if scheme == "memory":
        return MemoryStore.named(rest)
    if scheme == "s3":
        from batch_gen.storage.s3 import S3Store

        return S3Store.open(rest, options)
    raise UsageError(f"{url}: no store with scheme {scheme}://; use s3://bucket/prefix or a folder")

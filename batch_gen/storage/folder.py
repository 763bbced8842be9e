"""A store in a folder: temporary file, fsync, then one atomic step.

- `create` links the finished temporary file to its name; a link fails when the name is taken, on local disks and on NFS
  alike, and no lock is held, so a stopped process blocks nobody. Where a file system has no links (some FUSE mounts,
  exFAT), the name is checked and the file renamed under the key's lock.
- `replace` compares and renames under the key's lock (`filelock`, which the kernel frees when its holder dies).

Network folders: links and renames are atomic there; locks are only as good as the mount (`nolock` and `local_lock` make
them per machine). The probe names such file systems; use S3, or `--assign static`, if in doubt.

Everything that is not an object of the run lives in `.store/` below the root: temporary files, locks, metadata.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
import uuid
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from filelock import FileLock, Timeout

from batch_gen.errors import DiskFull, StoreError
from batch_gen.storage.base import (
    COPY_BLOCK_BYTES,
    AlreadyExists,
    Blob,
    Body,
    ChecksumMismatch,
    Conflict,
    Head,
    ListedKey,
    NoKey,
    StoreOptions,
    sha256_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batch_gen.storage.base import OnBlock

PRIVATE_FOLDER: Final = ".store"
LOCK_PATIENCE_S: Final = 10.0
STALE_TEMPORARY_S: Final = 24 * 3600.0
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EXDEV}
_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
_NOT_FOR_FILES: Final = ("/proc/", "/sys/")  # they answer a new folder with "no such file"
_LASTING: Final = {errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}


class FolderStore:
    """Objects are the files below `root`; see the module for how they get there.

    Args:
        root: The folder; made at the first write.
        options: Only `durable` matters here.
    """

    def __init__(self, root: Path, options: StoreOptions | None = None) -> None:
        self.root = root.absolute()
        self._private = self.root / PRIVATE_FOLDER
        self._durable = (options or StoreOptions()).durable

    @property
    def url(self) -> str:
        """The root, as a user may type it."""
        return str(self.root)

    def get(self, key: str) -> Blob | None:
        """See `Store.get`."""
        with self._explained(key):
            try:
                body = self.path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Blob(body, sha256_of(body))

    def head(self, key: str) -> Head | None:
        """See `Store.head`; reads the file, so its checksum is never a stale one."""
        path = self.path(key)
        with self._explained(key):
            try:
                sha256, size_bytes = sha256_of(path), path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Head(size_bytes, sha256, sha256, self._metadata(key, sha256))

    def download(self, key: str, path: Path) -> Head | None:
        """See `Store.download`."""
        with self._explained(key):
            try:
                sha256 = _copy(self.path(key), path, None, durable=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Head(path.stat().st_size, sha256, sha256, self._metadata(key, sha256))

    def read_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """See `Store.read_range`."""
        with self._explained(key):
            try:
                with self.path(key).open("rb") as file:
                    file.seek(start)
                    return file.read(num_bytes)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def create(
        self,
        key: str,
        body: Body,
        *,
        content_type: str = "application/octet-stream",  # noqa: ARG002 - a file has its suffix
        metadata: Mapping[str, str] | None = None,
        sha256: str | None = None,
        on_block: OnBlock | None = None,
    ) -> str:
        """See `Store.create`."""
        path = self.path(key)
        with self._explained(key), self._temporary(body, on_block) as (temporary, written):
            if sha256 is not None and written != sha256:
                raise ChecksumMismatch(f"{self.path(key)}: SHA-256 of the body is {written}, announced was {sha256}")
            if path.exists():
                raise AlreadyExists(key)
            if metadata:
                self._write_metadata(key, written, metadata)
            self._link(temporary, path, key)
        return written

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """See `Store.replace`."""
        path = self.path(key)
        with self._explained(key), self._temporary(body) as (temporary, written), self._locked(key):
            if not path.exists() or sha256_of(path) != etag:
                raise Conflict(key)
            self._rename(temporary, path)
        return written

    def put(self, key: str, body: Body, *, content_type: str = "application/octet-stream") -> str:  # noqa: ARG002
        """See `Store.put`."""
        path = self.path(key)
        with self._explained(key), self._temporary(body) as (temporary, written):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rename(temporary, path)
        return written

    def list(self, prefix: str) -> Iterator[ListedKey]:
        """See `Store.list`."""
        found = (path.relative_to(self.root).as_posix() for path in self._files(prefix))
        for key in sorted(found):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                yield ListedKey(key, self.path(key).stat().st_size)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._explained(key):
            self.path(key).unlink(missing_ok=True)

    def clock_offset_s(self) -> float | None:
        """See `Store.clock_offset_s`."""
        return None

    def path(self, key: str) -> Path:
        """The file of a key; `NoKey` for one that would leave the root."""
        parts = PurePosixPath(key).parts
        if not parts or ".." in parts or key.startswith("/") or "\0" in key:
            raise NoKey(key)
        return self.root.joinpath(*parts)

    def sweep(self, older_than_s: float = STALE_TEMPORARY_S) -> int:
        """Remove temporary files that killed processes left; return how many."""
        removed = 0
        for path in (self._private / "tmp").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > older_than_s:
                    path.unlink()
                    removed += 1
        return removed

    def _files(self, prefix: str) -> Iterator[Path]:
        """Files whose keys start with a prefix; looks only into folders where such may be."""
        folder, _, name = prefix.rpartition("/")
        for top in (self.root / folder).glob("*"):
            if not top.name.startswith(name) or top == self._private:
                continue
            yield from (path for path in (top, *top.rglob("*")) if os.path.isfile(path))  # noqa: PTH113 - no error where we may not look

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn what the operating system says into an error of the product."""
        try:
            yield
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFull(f"{self.root}: no space left while writing {key}; free space and start again") from error
            said = f"{self.root / key}: {error.strerror or error}"
            if error.errno in _LASTING or str(self.root).startswith(
                _NOT_FOR_FILES
            ):  # starting again would meet the same
                advice = "name a folder that this user can write"
                raise StoreError(f"{said}; {advice}", kind="environment") from error
            raise StoreError(said) from error

    @contextlib.contextmanager
    def _temporary(self, body: Body, on_block: OnBlock | None = None) -> Iterator[tuple[Path, str]]:
        """A finished file of this body beside the root's objects, and its SHA-256; gone afterwards."""
        folder = self._private / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / uuid.uuid4().hex
        try:
            yield path, _copy(body, path, on_block, durable=self._durable)
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        folder = self._private / "lock"
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        lock = FileLock(folder / name, timeout=LOCK_PATIENCE_S, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            message = (
                f"{self.root / key}: its lock {lock.lock_file} was held for {LOCK_PATIENCE_S:g} s by another process"
            )
            raise StoreError(message) from error
        try:
            yield
        finally:
            lock.release()

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(key) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_if_free(temporary, path, key)
        self._sync_folder(path.parent)

    def _rename_if_free(self, temporary: Path, path: Path, key: str) -> None:
        with self._locked(key):
            if path.exists():
                raise AlreadyExists(key)
            temporary.rename(path)

    def _rename(self, temporary: Path, path: Path) -> None:
        temporary.replace(path)
        self._sync_folder(path.parent)

    def _sync_folder(self, folder: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _metadata_path(self, key: str, sha256: str) -> Path:
        name = hashlib.sha256(f"{key}\n{sha256}".encode()).hexdigest()
        return self._private / "meta" / name[:2] / f"{name}.json"

    def _write_metadata(self, key: str, sha256: str, metadata: Mapping[str, str]) -> None:
        """Metadata goes first, under a name made of key and content, so that racing creators never mix theirs."""
        path = self._metadata_path(key, sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._temporary(json.dumps(dict(metadata), sort_keys=True).encode()) as (temporary, _):
            self._rename(temporary, path)

    def _metadata(self, key: str, sha256: str) -> dict[str, str]:
        try:
            return dict(json.loads(self._metadata_path(key, sha256).read_bytes()))
        except (FileNotFoundError, ValueError):
            return {}


def _copy(body: Body, path: Path, on_block: OnBlock | None, *, durable: bool) -> str:
    """Write a body to a new file and return the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with path.open("wb") as target:
        for block in _blocks(body):
            digest.update(block)
            target.write(block)
            if on_block is not None:
                on_block()
        target.flush()
        if durable:
            os.fsync(target.fileno())
    return digest.hexdigest()


def _blocks(body: Body) -> Iterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    with body.open("rb") as source:
        while block := source.read(COPY_BLOCK_BYTES):
            yield block

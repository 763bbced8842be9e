"""The probe: stores that break a promise are found, and the right thing follows."""

from __future__ import annotations

import threading

import pytest

from batch_gen.errors import StoreError
from batch_gen.storage.base import Head, StoreOptions
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from batch_gen.storage.probe import file_system_of, probe


class IgnoresCreate(MemoryStore):
    """A server that takes no notice of If-None-Match."""

    def create(self, key, body, **options):
        self.delete(key)
        return super().create(key, body, **options)


class RacyCreate(MemoryStore):
    """A server that looks, waits for the others to look as well, and then writes (SeaweedFS before 4.18)."""

    def __init__(self):
        super().__init__()
        self._gate = threading.Barrier(2)

    def create(self, key, body, **options):
        if body.startswith(b"racer"):
            try:
                self._gate.wait(timeout=2)
            except threading.BrokenBarrierError:
                return super().create(key, body, **options)
            self.delete(key)
        return super().create(key, body, **options)


class IgnoresReplace(MemoryStore):
    """A server that takes no notice of If-Match."""

    def replace(self, key, body, etag):
        return self.put(key, body)


class WritesMissing(MemoryStore):
    """A server that lets If-Match create a missing key (minio issue 21526)."""

    def replace(self, key, body, etag):
        if self.head(key) is None:
            return self.put(key, body)
        return super().replace(key, body, etag)


class KnowsNoConditions(MemoryStore):
    """A server that answers 501 to any condition it does not know."""

    def replace(self, key, body, etag):
        raise StoreError("NotImplemented")


class TakesWrongChecksums(MemoryStore):
    """A server that does not look at the SHA-256 (moto)."""

    def create(self, key, body, *, sha256=None, **options):
        return super().create(key, body, **options)


class AddsTrailer(MemoryStore):
    """A server that stores the checksum trailer inside the body (boto3 issue 4398)."""

    def put_trailer(self, body):
        return body + b"0\r\nx-amz-checksum-crc32:AAAA\r\n"

    def create(self, key, body, **options):
        return super().create(key, self.put_trailer(body), **options)


class Forgets(MemoryStore):
    """A server whose listing is late."""

    def list(self, prefix):
        return iter(())


class WrongClock(MemoryStore):
    """A server whose clock is far from ours."""

    def __init__(self, offset_s):
        super().__init__()
        self._offset_s = offset_s

    def clock_offset_s(self):
        return self._offset_s


class LosesLength(MemoryStore):
    """A server whose HEAD lies about the length."""

    def head(self, key):
        head = super().head(key)
        return None if head is None else Head(head.size_bytes + 1, head.etag, None)


@pytest.mark.parametrize(
    ("store", "verdict", "broken"),
    [
        (MemoryStore(), "leases", []),
        (IgnoresCreate(), "static", ["a key is created once", "one of eight racing creates wins"]),
        (RacyCreate(), "static", ["one of eight racing creates wins"]),
        (IgnoresReplace(), "static", ["only the last version", "a missing key", "one of eight racing replaces"]),
        (WritesMissing(), "static", ["a missing key is not replaced"]),
        (KnowsNoConditions(), "static", ["only the last version", "a missing key", "one of eight racing replaces"]),
        (TakesWrongChecksums(), "leases", ["a body with a wrong SHA-256 is refused"]),
        (AddsTrailer(), "refuse", ["what is written is read back"]),
        (Forgets(), "refuse", ["a listing shows"]),
        (LosesLength(), "refuse", ["what is written is read back"]),
        (WrongClock(10.0), "leases", ["the clocks"]),
        (WrongClock(-400.0), "refuse", ["the clocks"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryStore) else "",
)
def test_broken_promises_are_found(store, verdict, broken):
    """Each way in which a server may be half-right is named, and decides: share, keep apart, or refuse."""
    report = probe(store)
    found = [finding.name for finding in report.findings if not finding.ok]
    assert report.verdict == verdict
    for name in broken:
        assert any(name in line for line in found), found
    if store.__class__ is MemoryStore:
        assert found == []


def test_server_without_checksums_is_read_back():
    """Where the server does not check SHA-256, the run reads uploads back; where conditions fail, it looks first."""
    options = probe(TakesWrongChecksums()).options(StoreOptions(region="x"))
    assert (options.conditional, options.read_back, options.region) == (True, True, "x")
    options = probe(IgnoresCreate()).options(StoreOptions())
    assert (options.conditional, options.read_back) == (False, False)


def test_folder_passes_and_is_left_clean(tmp_path):
    """A local folder keeps every promise; nothing of the probe stays."""
    report = probe(FolderStore(tmp_path))
    assert report.verdict == "leases"
    assert report.checks_sha256
    assert list(FolderStore(tmp_path).list("")) == []


@pytest.mark.s3
def test_seaweedfs_passes(s3_store):
    """The real server of the tests keeps every promise, checksums included."""
    report = probe(s3_store)
    assert [finding for finding in report.findings if not finding.ok] == []
    assert report.verdict == "leases"
    assert list(s3_store.list("")) == []


def test_report_says_what_to_do():
    """The lines name the broken promise, what follows, and the limits of static assignment."""
    lines = probe(WritesMissing()).lines()
    assert any(line.startswith("FAIL a missing key is not replaced: If-Match") for line in lines)
    assert "--assign static" in lines[-1]
    assert "twice" in lines[-1]


def test_network_folders_are_named(tmp_path):
    """The file system of a folder is that of the deepest mount above it."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nfs:/x /mnt/shared\\040disk nfs4 rw 0 0\n")
    from pathlib import Path

    assert file_system_of(Path("/mnt/shared disk/out"), mounts) == "nfs4"
    assert file_system_of(Path("/home/x"), mounts) == "ext4"
    assert file_system_of(Path("/home/x"), tmp_path / "none") is None

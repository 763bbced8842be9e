"""One contract for every store: memory, folder and S3 (a real SeaweedFS)."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from batch_gen.errors import StoreError, UsageError
from batch_gen.storage.base import (
    AlreadyExists,
    ChecksumMismatch,
    Conflict,
    StoreOptions,
    open_store,
)
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return FolderStore(tmp_path / "out")
    return request.getfixturevalue("s3_store")


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def race(count, call):
    """Run `call(number)` in `count` threads; return (results, exceptions)."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(call, number) for number in range(count)]
    errors = [future.exception() for future in futures]
    return [f.result() for f, e in zip(futures, errors, strict=True) if e is None], [e for e in errors if e is not None]


def test_missing_key_is_none(store, tmp_path):
    """What is not there reads as None, never as an error."""
    assert store.get("run.json") is None
    assert store.head("clips/ab/x.mp4") is None
    assert store.download("clips/ab/x.mp4", tmp_path / "x") is None
    store.delete("clips/ab/x.mp4")


def test_created_body_comes_back_whole(store):
    """What is created is read back byte for byte, with its size and a usable etag."""
    body = bytes(range(256)) * 40
    etag = store.create("clips/ab/x.bin", body)
    blob, head = store.get("clips/ab/x.bin"), store.head("clips/ab/x.bin")
    assert blob.body == body
    assert blob.etag == head.etag == etag
    assert head.size_bytes == len(body)


def test_file_body_with_metadata_and_checksum(store, tmp_path):
    """A clip is stored from a file with its metadata, and the store tells its SHA-256 without reading it out."""
    source = tmp_path / "clip.mp4"
    source.write_bytes(b"frames" * 100_000)
    digest = sha256(source.read_bytes())
    store.create("clips/ab/x.mp4", source, content_type="video/mp4", metadata={"frames-hash": "f1"}, sha256=digest)
    head = store.head("clips/ab/x.mp4")
    assert head.sha256 == digest
    assert head.metadata == {"frames-hash": "f1"}
    copy = tmp_path / "copy.mp4"
    assert store.download("clips/ab/x.mp4", copy).size_bytes == copy.stat().st_size == 600_000
    assert copy.read_bytes() == source.read_bytes()


def test_a_long_write_gives_signs_of_life(store, tmp_path):
    """While a file's bytes leave, the writer is told, block by block; what arrives is the file."""
    path, told = tmp_path / "body", []
    path.write_bytes(bytes(range(256)) * 20_000)
    store.create("clips/ab/x.mp4", path, on_block=lambda: told.append(1))
    assert store.get("clips/ab/x.mp4").body == path.read_bytes()
    assert len(told) > (0 if isinstance(store, MemoryStore) else 4)


def test_second_create_is_refused(store):
    """A key is created once; the first body stays."""
    store.create("run.json", b"first")
    with pytest.raises(AlreadyExists):
        store.create("run.json", b"second")
    assert store.get("run.json").body == b"first"


def test_wrong_checksum_is_refused(store):
    """A body that is not what its SHA-256 says is not stored."""
    with pytest.raises(ChecksumMismatch):
        store.create("run.json", b"body", sha256=sha256(b"another"))
    assert store.get("run.json") is None


def test_replace_needs_the_last_version(store):
    """A version is replaced once; whoever holds an older etag loses, and nothing is written."""
    first = store.create("lease/0-0.json", b"one")
    second = store.replace("lease/0-0.json", b"two", first)
    with pytest.raises(Conflict):
        store.replace("lease/0-0.json", b"late", first)
    assert store.get("lease/0-0.json").body == b"two"
    store.replace("lease/0-0.json", b"three", second)
    assert store.get("lease/0-0.json").body == b"three"


def test_replace_of_nothing_is_a_conflict(store):
    """A missing key cannot be replaced, however the server words it (404 or 412)."""
    etag = store.create("lease/0-0.json", b"one")
    with pytest.raises(Conflict):
        store.replace("lease/0-1.json", b"two", etag)
    assert store.get("lease/0-1.json") is None


def test_one_of_many_creators_wins(store):
    """Of eight creators at once exactly one succeeds, and its body is the one that stays."""
    won, lost = race(8, lambda number: store.create("plan-0.json", b"%d" % number) and number)
    assert len(won) == 1
    assert all(isinstance(error, AlreadyExists) for error in lost)
    assert store.get("plan-0.json").body == b"%d" % won[0]


def test_one_of_many_replacers_wins(store):
    """Of eight writers that saw the same version exactly one replaces it."""
    etag = store.create("lease/0-0.json", b"seen by all")
    won, lost = race(8, lambda number: store.replace("lease/0-0.json", b"by %d" % number, etag) and number)
    assert len(won) == 1
    assert all(isinstance(error, Conflict) for error in lost)
    assert store.get("lease/0-0.json").body == b"by %d" % won[0]


def test_put_overwrites(store, tmp_path):
    """Closing tables are rebuilt at will: put has no condition."""
    (tmp_path / "table").write_bytes(b"newer")
    store.put("metrics.parquet", b"old")
    store.put("metrics.parquet", tmp_path / "table")
    assert store.get("metrics.parquet").body == b"newer"


def test_list_by_prefix_in_order(store):
    """A listing gives exactly the keys of a prefix, sorted, with sizes, and nothing private."""
    for key in ("done/0-2.json", "done/0-10.json", "done/0-1.json", "lease/0-1.json"):
        store.create(key, key.encode(), metadata={"a": "b"})
    assert [entry.key for entry in store.list("done/")] == ["done/0-1.json", "done/0-10.json", "done/0-2.json"]
    assert [entry.key for entry in store.list("done/0-1")] == ["done/0-1.json", "done/0-10.json"]
    assert len(list(store.list(""))) == 4
    assert next(store.list("lease/")).size_bytes == len(b"lease/0-1.json")


def test_deleted_key_can_be_created_again(store):
    """Delete removes, and the key is free afterwards."""
    store.create("stop.json", b"1")
    store.delete("stop.json")
    assert store.get("stop.json") is None
    store.create("stop.json", b"2")


def test_awkward_names_survive(store):
    """Every legal row id works as a key: dots, dashes, long names."""
    key = f"clips/ab/{'a.B-_' * 24}.json"
    store.create(key, b"x")
    assert [entry.key for entry in store.list("clips/")] == [key]


def test_folder_key_cannot_leave_the_root(tmp_path):
    """A key with `..` or a leading slash is refused before any file is touched."""
    for key in ("../x", "/etc/x", "clips/../../x", ""):
        with pytest.raises(ValueError, match="no key"):
            FolderStore(tmp_path).get(key)


def test_folder_metadata_needs_the_same_content(tmp_path):
    """A file that changed on disk has lost its metadata, so it is never taken for what was committed."""
    store = FolderStore(tmp_path)
    store.create("clips/ab/x.mp4", b"good", metadata={"frames-hash": "f"})
    (tmp_path / "clips/ab/x.mp4").write_bytes(b"damaged")
    assert store.head("clips/ab/x.mp4").metadata == {}


def test_folder_unusable_root_is_an_error_with_its_path(tmp_path):
    """A root that is a file gives a store error that names the path."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        FolderStore(tmp_path / "file" / "out").create("run.json", b"x")


def test_what_no_restart_mends_is_no_transient_error(tmp_path):
    """A root below a file, and a name too long: exit 2, not "start me again"."""
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="name a folder") as caught:
            FolderStore(root).create("a", b"x")
        assert caught.value.exit_code == 2


def test_folder_leaves_no_temporary_files(tmp_path):
    """Won, lost and refused writes all clean up after themselves."""
    store = FolderStore(tmp_path)
    store.create("a", b"1")
    for call in (lambda: store.create("a", b"2"), lambda: store.create("b", b"2", sha256="0" * 64)):
        with pytest.raises((AlreadyExists, ChecksumMismatch)):
            call()
    assert list((tmp_path / ".store" / "tmp").iterdir()) == []


def test_sweep_removes_only_old_temporary_files(tmp_path):
    """Files that a killed process left go after a day, younger ones may be in use."""
    store = FolderStore(tmp_path)
    store.create("a", b"1")
    (tmp_path / ".store" / "tmp" / "left").write_bytes(b"x")
    assert store.sweep() == 0
    assert store.sweep(older_than_s=-1.0) == 1


def test_open_store_knows_its_schemes(tmp_path):
    """Folders, file:// and memory:// open; anything else says what is possible."""
    assert open_store(str(tmp_path)).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert open_store("memory://a") is open_store("memory://a")
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        open_store("gs://bucket/x")
    with pytest.raises(UsageError, match="no bucket"):
        open_store("s3:///x", StoreOptions())

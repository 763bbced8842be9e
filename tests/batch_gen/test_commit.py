"""Commit: file first, record last, nothing overwritten, orphans taken over."""

from __future__ import annotations

import pytest

from batch_gen.commit import adopt_orphan, commit_clip, load_record
from batch_gen.errors import CheckFailed, ClipFailed
from batch_gen.layout import clip_key, record_key
from batch_gen.records import Record
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from tests.making import make_record, make_request


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return FolderStore(tmp_path / "out")
    return request.getfixturevalue("s3_store")


@pytest.fixture
def clip(tmp_path):
    """Writes a body to a local file and returns (record, path)."""

    def make(body: bytes, **changes):
        path = tmp_path / "clip.mp4"
        path.write_bytes(body)
        return make_record(make_request(), body, **changes), path

    return make


def orphan(store, record, body: bytes) -> None:
    """What a worker leaves that dies between file and record."""

    class Dies(Exception):
        pass

    class DyingStore:
        def __getattr__(self, name):
            return getattr(store, name)

        def create(self, key, *args, **kwargs):
            if key.endswith(".json"):
                raise Dies
            return store.create(key, *args, **kwargs)

    with pytest.raises(Dies):
        commit_clip(DyingStore(), record, body)


def test_file_and_record_stand_in_the_store(store, clip):
    """A commit leaves the file, its checksum, and a record that names both."""
    record, path = clip(b"body")
    assert commit_clip(store, record, path).outcome == "committed"
    assert store.get(record.file.key).body == b"body"
    assert load_record(store, "fox") == record


def test_record_is_written_last(store, clip):
    """A worker that dies between the two leaves a file without a record: the clip does not exist yet."""
    orphan(store, *clip(b"body"))
    assert load_record(store, "fox") is None
    assert store.head(clip_key("fox", ".mp4")) is not None


def test_same_render_again_is_a_duplicate(store, clip):
    """The same frames once more change nothing and count as a duplicate."""
    record, path = clip(b"body")
    commit_clip(store, record, path)
    again = record.model_copy(update={"worker": "w2", "attempt": 2})
    receipt = commit_clip(store, again, path)
    assert receipt.outcome == "duplicate"
    assert receipt.record.worker == load_record(store, "fox").worker == "w1"


def test_other_frames_are_kept_out(store, clip):
    """A second render with other frames never overwrites, and is reported as such."""
    commit_clip(store, *clip(b"body"))
    receipt = commit_clip(store, *clip(b"other"))
    assert receipt.outcome == "nondeterministic_duplicate"
    assert store.get(clip_key("fox", ".mp4")).body == b"body"
    assert load_record(store, "fox").frames_hash == receipt.record.frames_hash


def test_other_bytes_of_the_same_frames_are_a_plain_duplicate(store, clip):
    """Another encoder build may write other bytes; only the frames decide what counts as nondeterministic."""
    commit_clip(store, *clip(b"body", frames_hash="f"))
    assert commit_clip(store, *clip(b"other bytes", frames_hash="f")).outcome == "duplicate"


def test_commit_over_the_own_orphan_finishes_it(store, clip):
    """The same bytes as an orphan's only lack the record; it is added."""
    orphan(store, *clip(b"body"))
    record, path = clip(b"body", attempt=2)
    assert commit_clip(store, record, path).outcome == "committed"
    assert load_record(store, "fox").attempt == 2


def test_commit_over_a_different_orphan_describes_the_orphan(store, clip):
    """An orphan of this run with other frames stays; the record tells of it, and ours is reported as kept out."""
    orphan(store, *clip(b"first frames"))
    record, path = clip(b"second frames", attempt=2, worker="w2")
    receipt = commit_clip(store, record, path)
    stored = load_record(store, "fox")
    assert receipt.outcome == "nondeterministic_duplicate"
    assert (stored.attempt, stored.worker, stored.file.bytes) == (1, "w1", len(b"first frames"))


def test_foreign_file_in_the_way_fails_the_clip(store, clip):
    """A file that no worker of this run wrote is not described by a record, and the message says what to do."""
    store.create(clip_key("fox", ".mp4"), b"a holiday video")
    with pytest.raises(ClipFailed, match="verify --fix"):
        commit_clip(store, *clip(b"body"))
    assert load_record(store, "fox") is None


def test_orphan_is_adopted_before_a_render(store, clip):
    """The next attempt takes a verified file over instead of rendering again."""
    record, path = clip(b"body", attempt=3, epoch=2)
    orphan(store, record, path)
    draft = record.model_copy(update={"worker": "w2", "attempt": 4, "frames_hash": "", "timings": {"denoise": 9.0}})
    adopted = adopt_orphan(store, make_request(), ".mp4", draft)
    assert adopted == load_record(store, "fox")
    assert (adopted.attempt, adopted.worker, adopted.frames_hash) == (3, "w1", record.frames_hash)
    assert adopted.timings == {}


def test_orphan_of_another_request_is_not_adopted(store, clip):
    """Tags must name this request and this run."""
    record, path = clip(b"body", fingerprint="another run")
    orphan(store, record, path)
    assert adopt_orphan(store, make_request(), ".mp4", record.model_copy(update={"fingerprint": "fp"})) is None
    assert adopt_orphan(store, make_request("hare"), ".mp4", record) is None


def test_damaged_orphan_is_not_adopted(tmp_path, clip):
    """A file whose content is no longer what its writer announced is not taken over."""
    store = FolderStore(tmp_path / "out")
    record, path = clip(b"body")
    orphan(store, record, path)
    store.path(record.file.key).write_bytes(b"bod")
    assert adopt_orphan(store, make_request(), ".mp4", record) is None


def test_damaged_record_is_named(tmp_path):
    """Something under a record's name that is no record is an error with its address."""
    store = MemoryStore()
    store.create(record_key("fox"), b"{}")
    with pytest.raises(CheckFailed, match=r"fox\.json"):
        load_record(store, "fox")


def test_record_survives_its_json(clip):
    """A record read back is the record written, to the last field; unknown fields are refused."""
    record, _ = clip(b"body", timings={"denoise": 1.25}, extra={"tag": "hero", "n": [1, None]})
    assert Record.model_validate_json(record.to_bytes()) == record
    with pytest.raises(ValueError, match="extra"):
        Record.model_validate({**record.model_dump(), "surprise": 1})

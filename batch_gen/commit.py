"""Commit: the file first, the record last; whoever comes second changes nothing.

Three writers may meet at one clip: we, an earlier attempt of ours that was killed in between, and a worker whose lease
was taken over while it slept. All of them may try; the first file stays, the first record stays, and a second render
with other frames is kept out and reported, so that it can be counted (`nondeterministic_duplicate`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import ValidationError

from batch_gen.errors import CheckFailed, ClipFailed, StoreError
from batch_gen.layout import clip_key, record_key
from batch_gen.records import FileEntry, Record
from batch_gen.storage.base import AlreadyExists, sha256_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batch_gen.request import RenderRequest
    from batch_gen.storage.base import OnBlock, Store

Outcome = Literal["committed", "duplicate", "nondeterministic_duplicate"]
CONTENT_TYPES: Final = {".mp4": "video/mp4", ".mkv": "video/x-matroska"}


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a commit ended.

    Attributes:
        outcome: "committed" by this call; "duplicate" when the clip stood there already with the same frames;
            "nondeterministic_duplicate" when it stands there with other frames than ours.
        record: The record that stands in the store now, whoever wrote it.
    """

    outcome: Outcome
    record: Record


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A clip's file in the store, with or without a record."""

    entry: FileEntry
    tags: Mapping[str, str]

    def belongs_to(self, request_digest: str, fingerprint: str) -> bool:
        """Whether its writer made it for this request in this run, and it is still what was written."""
        wanted = (request_digest, fingerprint, self.entry.sha256)
        return wanted == tuple(self.tags.get(name) for name in ("request-digest", "fingerprint", "sha256"))


def commit_clip(store: Store, record: Record, path: Path, on_block: OnBlock | None = None) -> Receipt:
    """Store the file at `path` and then its record.

    Args:
        store: The output root.
        record: Complete, with the file's key, length and SHA-256.
        path: The verified file on local disk.
        on_block: Called as the file's bytes leave.

    Raises:
        StoreError: The store does not answer; nothing is lost, the same call may be made again.
        ClipFailed: ("upload") A foreign file without a record blocks the key.
    """
    content_type = CONTENT_TYPES.get(Path(record.file.key).suffix, "application/octet-stream")
    try:
        store.create(
            record.file.key,
            path,
            content_type=content_type,
            metadata=_tags(record),
            sha256=record.file.sha256,
            on_block=on_block,
        )
    except AlreadyExists:
        return _meet_file(store, record)
    return _write_record(store, record, record)


def adopt_orphan(store: Store, request: RenderRequest, suffix: str, draft: Record) -> Record | None:
    """Take over a file that an attempt stored before it died ahead of its record; None when there is none to take.

    The file counts when the tags that its writer attached name this request and this run, and the store's checksum is
    the one that the writer announced: it had been verified before it was sent.

    Args:
        store: The output root.
        request: The clip.
        suffix: Of the file.
        draft: The record as this worker would write it; what was measured then comes from the file's tags.
    """
    found = find_file(store, clip_key(request.clip_id, suffix))
    if found is None or not found.belongs_to(draft.request_digest, draft.fingerprint):
        return None
    return _write_record(store, _adopted(draft, found), draft).record


def load_record(store: Store, clip_id: str) -> Record | None:
    """The record of a clip, None when it is not committed.

    Raises:
        CheckFailed: There is something under the record's name that is no record.
    """
    blob = store.get(record_key(clip_id))
    if blob is None:
        return None
    try:
        return Record.model_validate_json(blob.body)
    except ValidationError as error:
        message = f"{store.url}/{record_key(clip_id)} is no record ({error.error_count()} faults); see batch-gen verify"
        raise CheckFailed(message) from error


def find_file(store: Store, key: str) -> StoredFile | None:
    """What stands under a clip's file name; reads the body only where the store keeps no checksum."""
    head = store.head(key)
    if head is None:
        return None
    sha256 = head.sha256 or _sha256_by_reading(store, key)
    return StoredFile(FileEntry(key=key, bytes=head.size_bytes, sha256=sha256), head.metadata)


def _sha256_by_reading(store: Store, key: str) -> str:
    with tempfile.TemporaryDirectory(prefix="batch-gen-") as folder:
        copy = Path(folder) / "file"
        if store.download(key, copy) is None:
            raise StoreError(f"{store.url}/{key} vanished while it was read")
        return sha256_of(copy)


def _tags(record: Record) -> dict[str, str]:
    """What travels with the file, enough to write its record should we die in between."""
    return {
        "clip-id": record.clip_id,
        "request-digest": record.request_digest,
        "fingerprint": record.fingerprint,
        "numerics-key": record.numerics_key,
        "frames-hash": record.frames_hash,
        "sha256": record.file.sha256,
        "attempt": str(record.attempt),
        "epoch": str(record.epoch),
        "worker": record.worker,
    }


def _adopted(draft: Record, found: StoredFile) -> Record:
    tags = found.tags
    changes = {
        "file": found.entry,
        "frames_hash": tags["frames-hash"],
        "numerics_key": tags["numerics-key"],
        "attempt": int(tags["attempt"]),
        "epoch": int(tags["epoch"]),
        "worker": tags["worker"],
        "timings": {},
        "metrics": {"adopted_by": draft.worker},
    }
    return draft.model_copy(update=changes)


def _meet_file(store: Store, record: Record) -> Receipt:
    """Somebody's file is there: with a record we are second, without one we finish what they began."""
    standing = load_record(store, record.clip_id)
    if standing is not None:
        return _second(standing, record)
    found = find_file(store, record.file.key)
    if found is None:
        raise StoreError(f"{store.url}/{record.file.key} vanished while the clip was committed")
    if found.entry.sha256 == record.file.sha256:
        return _write_record(store, record, record)
    if not found.belongs_to(record.request_digest, record.fingerprint):
        place = f"{store.url}/{record.file.key}"
        raise ClipFailed("upload", f"{place} is in the way and not of this run; batch-gen verify --fix sets it aside")
    return _write_record(store, _adopted(record, found), record)


def _write_record(store: Store, record: Record, ours: Record) -> Receipt:
    try:
        store.create(record_key(record.clip_id), record.to_bytes(), content_type="application/json")
    except AlreadyExists:
        standing = load_record(store, record.clip_id)
        if standing is None:
            raise StoreError(f"{store.url}/{record_key(record.clip_id)} vanished while it was read") from None
        return _second(standing, ours)
    if ours.frames_hash != record.frames_hash and record is not ours:
        return _second(record, ours)
    return Receipt("committed", record)


def _second(standing: Record, ours: Record) -> Receipt:
    same = standing.frames_hash == ours.frames_hash
    return Receipt("duplicate" if same else "nondeterministic_duplicate", standing)

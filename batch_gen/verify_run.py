"""Is everything there that the run says is there? Plan, done log, records and files are held against each other.

This is the one reader that lists clips. It writes nothing; `repair` mends what it finds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batch_gen.commit import find_file, load_record
from batch_gen.donelog import DoneLog
from batch_gen.errors import CheckFailed, ClipFailed, ConfigError
from batch_gen.layout import CLIPS_PREFIX, LEASE_PREFIX, lease_key, record_key
from batch_gen.lease import read_lease
from batch_gen.plan import load_plan
from batch_gen.request import RenderRequest
from batch_gen.runfile import load_run

if TYPE_CHECKING:
    from batch_gen.commit import StoredFile
    from batch_gen.plan import Plan
    from batch_gen.records import Record, Verdict
    from batch_gen.storage.base import Store

NUM_READERS: Final = 16
FILE_SUFFIXES: Final = (".mp4", ".mkv")

DeepCheck = Callable[["Record", Path], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be.

    Attributes:
        kind: missing_record, damaged_record, missing_file, damaged_file, wrong_request, foreign_file, orphan_file,
            unknown_key, unlogged_chunk, or undecodable.
        chunk: The chunk to which it belongs, empty for keys that belong to none.
        key: Where in the store.
    """

    kind: str
    chunk: str
    clip_id: str
    key: str
    message: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A clip as the plan has it; the last round counts."""

    clip_id: str
    chunk: str
    digest: str
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found; `num_pending` clips have no verdict yet and are no fault."""

    url: str
    num_clips: int
    num_committed: int
    num_quarantined: int
    num_pending: int
    num_bytes: int
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """For `verify --json`."""
        fields = ("url", "num_clips", "num_committed", "num_quarantined", "num_pending", "num_bytes")
        problems = [{name: getattr(p, name) for name in Problem.__slots__} for p in self.problems]
        return {**{name: getattr(self, name) for name in fields}, "ok": self.ok, "problems": problems}


@dataclass(slots=True)
class _Look:
    """What one pass over the store needs."""

    store: Store
    fingerprint: str
    log: DoneLog
    sizes: dict[str, int]
    quarantined: dict[str, Verdict]
    deep: DeepCheck | None
    problems: list[Problem] = field(default_factory=list)

    def found(self, kind: str, planned: Planned, key: str, message: str) -> None:
        self.problems.append(Problem(kind, planned.chunk, planned.clip_id, key, message))


def verify_run(store: Store, deep: DeepCheck | None = None) -> VerifyReport:
    """Compare a whole run with what its plan and done log say.

    Args:
        store: The output root.
        deep: Called with record and local copy of each committed file; ClipFailed for a bad one (`decode_again`).

    Raises:
        ConfigError: No run began here.
    """
    run = load_run(store)
    if run is None:
        raise ConfigError(f"{store.url} holds no run (no run.json); give the --out of a run")
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    sizes = {entry.key: entry.size_bytes for entry in store.list(CLIPS_PREFIX)}
    look = _Look(store, run.fingerprint, log, sizes, log.tally().quarantined, deep)
    planned = planned_clips(plan)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        records = list(pool.map(lambda clip: _check_clip(look, clip), planned.values()))
    committed = {record.clip_id for record in records if record is not None}
    _check_chunks(look, plan, committed)
    _check_unknown(look, planned)
    set_aside = {clip_id for clip_id in look.quarantined if clip_id not in committed}
    return VerifyReport(
        url=store.url,
        num_clips=len(planned),
        num_committed=len(committed),
        num_quarantined=len(set_aside),
        num_pending=len(planned) - len(committed) - len(set_aside),
        num_bytes=sum(record.file.bytes for record in records if record is not None),
        problems=tuple(sorted(look.problems, key=lambda p: (p.chunk, p.clip_id, p.kind, p.key))),
    )


def planned_clips(plan: Plan) -> dict[str, Planned]:
    """Every clip of a run."""
    found: dict[str, Planned] = {}
    for plan_round in plan.rounds:
        names = (chunk.id for chunk in plan_round.chunks for _ in range(chunk.num_clips))
        columns = zip(plan_round.column("clip_id"), names, plan_round.column("digest"), strict=True)
        for clip_id, chunk, digest in columns:
            earlier = found[clip_id].chunks if clip_id in found else ()
            found[clip_id] = Planned(clip_id, chunk, digest, (*earlier, chunk))
    return found


def decode_again(record: Record, path: Path) -> None:
    """The deep check: decode the whole file; ClipFailed when it is not what the request asked for."""
    from batch_gen.encode import VideoSpec
    from batch_gen.verify import verify_file

    request = RenderRequest.from_json(record.request)
    lossless = record.frames_hash if path.suffix == ".mkv" else None
    spec = VideoSpec(request.width, request.height, request.fps, request.num_frames)
    verify_file(path, spec, frames_hash=lossless)


def _check_clip(look: _Look, clip: Planned) -> Record | None:
    """The clip's record when the clip is good."""
    key = record_key(clip.clip_id)
    if key not in look.sizes:
        _check_absent(look, clip)
        return None
    try:
        record = load_record(look.store, clip.clip_id)
    except CheckFailed as error:
        look.found("damaged_record", clip, key, error.message)
        return None
    if record is None:
        look.found("missing_record", clip, key, "the record vanished while it was read")
        return None
    if record.request_digest != clip.digest or record.fingerprint != look.fingerprint:
        look.found("wrong_request", clip, key, "the record is of another request or another run")
        return None
    return record if _check_file(look, clip, record) else None


def _check_absent(look: _Look, clip: Planned) -> None:
    """A clip without record: is it said to be committed, and what lies under its file's name?"""
    said = clip.chunk in look.log and clip.clip_id not in look.quarantined
    if said:
        look.found("missing_record", clip, record_key(clip.clip_id), f"chunk {clip.chunk} says it is committed")
    stem = record_key(clip.clip_id).removesuffix(".json")
    for key in (stem + suffix for suffix in FILE_SUFFIXES):
        if key not in look.sizes:
            continue
        stored = find_file(look.store, key)
        if stored is not None and not stored.belongs_to(clip.digest, look.fingerprint):
            look.found("foreign_file", clip, key, "a file without record that no worker of this run wrote")
        elif clip.clip_id in look.quarantined:
            look.found("orphan_file", clip, key, "a file without record of a clip that is quarantined")


def _check_file(look: _Look, clip: Planned, record: Record) -> bool:
    key = record.file.key
    if key not in look.sizes:
        look.found("missing_file", clip, key, "the record names a file that is not there")
        return False
    stored: StoredFile | None = find_file(look.store, key)
    if stored is None or (stored.entry.bytes, stored.entry.sha256) != (record.file.bytes, record.file.sha256):
        look.found("damaged_file", clip, key, "length or SHA-256 is not the record's")
        return False
    if look.deep is None:
        return True
    with tempfile.TemporaryDirectory(prefix="batch-gen-verify-") as folder:
        path = Path(folder) / Path(key).name
        look.store.download(key, path)
        try:
            look.deep(record, path)
        except ClipFailed as error:
            look.found("undecodable", clip, key, error.message)
            return False
    return True


def _check_chunks(look: _Look, plan: Plan, committed: set[str]) -> None:
    """Chunks whose clips are all there although the done log does not have them, and nobody works on them."""
    leases = {entry.key for entry in look.store.list(LEASE_PREFIX)}
    for chunk in (chunk for chunk in plan.chunks if chunk.id not in look.log):
        open_clips = {request.clip_id for request in plan.requests(chunk)} - committed
        seen = read_lease(look.store, chunk.id) if lease_key(chunk.id) in leases else None
        settled = seen is not None and seen.body.owner is None and open_clips <= seen.body.quarantined.keys()
        if settled or (seen is None and not open_clips):
            message = "every clip has its verdict, but the done log does not have the chunk"
            look.problems.append(Problem("unlogged_chunk", chunk.id, "", f"done/{chunk.id}.json", message))


def _check_unknown(look: _Look, planned: dict[str, Planned]) -> None:
    for key in _unknown(look.sizes, planned):
        look.problems.append(Problem("unknown_key", "", "", key, "belongs to no clip of this run"))


def _unknown(sizes: dict[str, int], planned: dict[str, Planned]) -> Iterator[str]:
    known = {record_key(clip_id).removesuffix(".json") for clip_id in planned}
    for key in sizes:
        stem = next((key.removesuffix(s) for s in (".json", *FILE_SUFFIXES) if key.endswith(s)), None)
        if stem not in known:
            yield key

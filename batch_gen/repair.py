"""Mend what `verify_run` found: move damaged things aside, reopen their chunks, write what the done log lacks.

Nothing is thrown away: what is in the way goes below `aside/`, under its old key. The next `run` renders what is
missing then, and takes over files that only lack their record.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ValidationError

from batch_gen.clock import utc_now
from batch_gen.donelog import Compact, DoneChunk, DoneLog
from batch_gen.held import COMMITTED, find_committed
from batch_gen.layout import ASIDE_PREFIX, COMPACT_PREFIX, DONE_PREFIX, LEASE_PREFIX, record_key
from batch_gen.lease import LeaseBody, read_lease
from batch_gen.plan import load_plan
from batch_gen.runfile import load_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batch_gen.plan import Plan
    from batch_gen.storage.base import Store
    from batch_gen.verify_run import Problem

_SET_ASIDE: Final = {
    "damaged_record",
    "missing_file",
    "damaged_file",
    "wrong_request",
    "foreign_file",
    "orphan_file",
    "unknown_key",
    "undecodable",
}
_WITH_RECORD: Final = {"missing_file", "damaged_file", "undecodable"}
_WITH_FILES: Final = {"wrong_request"}
_REOPEN: Final = {"missing_record", "damaged_record", "missing_file", "damaged_file", "wrong_request", "undecodable"}


def repair(store: Store, problems: Sequence[Problem]) -> list[str]:
    """Mend these problems; returns what was done, one line each."""
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    done: list[str] = []
    for problem in problems:
        done += [f"{key} -> {ASIDE_PREFIX}{key}" for key in _in_the_way(problem) if set_aside(store, key)]
    for chunk in sorted({problem.chunk for problem in problems if problem.kind in _REOPEN}):
        planned = plan.chunk(chunk)
        if planned is not None and chunk in log:
            log.reopen(chunk, {request.clip_id for request in plan.requests(planned)})
            done.append(f"chunk {chunk} reopened; the next run makes what is missing")
    for problem in problems:
        if problem.kind == "unlogged_chunk" and write_entry(store, plan, log, problem.chunk):
            done.append(f"chunk {problem.chunk} entered into the done log")
    return done


def clear_log(store: Store) -> list[str]:
    """Move leases and entries of the done log that nobody can read aside; `repair` writes entries anew from records.

    Raises:
        ConfigError: The run is of a newer version, whose files may be sound.
    """
    done: list[str] = []
    if load_run(store) is None:
        return done
    models: dict[str, type[BaseModel]] = {COMPACT_PREFIX: Compact, DONE_PREFIX: DoneChunk, LEASE_PREFIX: LeaseBody}
    for entry in [*store.list(DONE_PREFIX), *store.list(LEASE_PREFIX)]:
        blob = store.get(entry.key)
        if blob is None:
            continue
        model = next(model for prefix, model in models.items() if entry.key.startswith(prefix))
        try:
            model.model_validate_json(blob.body)
        except ValidationError:
            if set_aside(store, entry.key):
                done.append(f"{entry.key} -> {ASIDE_PREFIX}{entry.key}")
    return done


def set_aside(store: Store, key: str) -> bool:
    """Move an object below `aside/`; False when there is none."""
    with tempfile.TemporaryDirectory(prefix="batch-gen-aside-") as folder:
        copy = Path(folder) / "object"
        if store.download(key, copy) is None:
            return False
        store.put(f"{ASIDE_PREFIX}{key}", copy)
    store.delete(key)
    return True


def write_entry(store: Store, plan: Plan, log: DoneLog, chunk_id: str) -> bool:
    """Enter a chunk whose clips all have records, or are quarantined by its lease; False when that is not so."""
    chunk = plan.chunk(chunk_id)
    if chunk is None:
        return False
    clip_ids = [request.clip_id for request in plan.requests(chunk)]
    seen = read_lease(store, chunk_id)
    verdicts = {} if seen is None else dict(seen.body.quarantined)
    verdicts |= dict.fromkeys(find_committed(store, clip_ids), COMMITTED)
    if set(clip_ids) - verdicts.keys():
        return False
    epoch = 1 if seen is None else seen.body.epoch
    clips = {clip_id: verdicts[clip_id] for clip_id in clip_ids}
    return log.add(DoneChunk(chunk=chunk_id, epoch=epoch, worker="verify", clips=clips, finished=utc_now()))


def _in_the_way(problem: Problem) -> list[str]:
    """The keys that must go for this problem."""
    if problem.kind not in _SET_ASIDE:
        return []
    keys = [problem.key]
    if problem.kind in _WITH_RECORD:
        keys.append(record_key(problem.clip_id))
    if problem.kind in _WITH_FILES:
        keys += [record_key(problem.clip_id).removesuffix(".json") + suffix for suffix in (".mp4", ".mkv")]
    return keys

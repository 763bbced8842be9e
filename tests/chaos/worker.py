"""A worker without an engine: the whole protocol, with work that only takes time. Also a process of its own:

python -m tests.chaos.worker '{"url": ..., "name": ..., "log": ..., "clip_s": 0.05, ...}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from batch_gen.claims import Assignment, ClaimOptions, ClaimSource, Wait
from batch_gen.clock import monotonic_s
from batch_gen.commit import adopt_orphan, commit_clip
from batch_gen.errors import BatchGenError, StoreError
from batch_gen.layout import metrics_key
from batch_gen.lease import LostLease
from batch_gen.plan import load_plan
from batch_gen.storage.base import AlreadyExists, StoreOptions, open_store
from tests.making import make_record


@dataclass(frozen=True)
class Job:
    """What a test worker does.

    Attributes:
        log: File that gets a line for every start and end of a render.
        clip_s: How long a clip takes.
        threads: Replicas, each with a clip in flight.
        clock_offset_s: What is wrong with this machine's clock.
        poison: A clip that kills the process.
    """

    url: str
    name: str
    log: str
    clip_s: float = 0.05
    threads: int = 1
    ttl_s: float = 2.0
    grace_s: float = 0.5
    endpoint: str | None = None
    clock_offset_s: float = 0.0
    poison: str = ""


def body_of(clip_id: str) -> bytes:
    """The one right file of a clip."""
    return f"frames of {clip_id} ".encode() * 50


def work_off(job: Job) -> None:
    """Work until there is nothing left to do."""
    store = open_store(job.url, StoreOptions(endpoint_url=job.endpoint, small_read_timeout_s=5.0, durable=False))
    options = ClaimOptions(
        ttl_s=job.ttl_s,
        grace_s=job.grace_s,
        clock=lambda: monotonic_s() + job.clock_offset_s,
        on_chunk_end=lambda end: part(store, end),
        store_patience_s=60.0,
    )
    with ClaimSource(store, load_plan(store), job.name, options) as source, tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=replica, args=(job, store, source, Path(folder) / str(n)))
            for n in range(job.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def part(store, end) -> None:
    """A stand-in for the metrics part of a chunk."""
    try:
        store.create(metrics_key(end.chunk, end.epoch), json.dumps(sorted(end.verdicts)).encode())
    except AlreadyExists:
        return


def replica(job: Job, store, source: ClaimSource, path: Path) -> None:
    """One loop of claims."""
    while (work := source.next()) is not None:
        if isinstance(work, Wait):
            source.wait_for_change(work.seconds)
            continue
        try:
            source.started(work.clip_id)
            outcome = render(job, store, source, work, path)
        except LostLease:
            continue
        except StoreError as error:
            source.failed(work.clip_id, "store", error.message)
            continue
        except BatchGenError as error:
            source.failed(work.clip_id, error.kind, error.message)
            continue
        source.committed(work.clip_id, outcome)


def render(job: Job, store, source: ClaimSource, work: Assignment, path: Path) -> str:
    """Take over an orphan, or make the clip and commit it."""
    body = body_of(work.clip_id)
    record = make_record(work.request, body, attempt=work.attempt, epoch=work.epoch, worker=job.name)
    if work.begun_before and adopt_orphan(store, work.request, ".mp4", record) is not None:
        note(job, "adopt", work.clip_id)
        return "committed"
    note(job, "start", work.clip_id)
    if work.clip_id == job.poison:
        os._exit(9)
    for _ in range(4):
        time.sleep(job.clip_s / 4)
        source.heartbeat()
    path.write_bytes(body)
    outcome = commit_clip(store, record, path).outcome
    note(job, outcome, work.clip_id)
    return outcome


def note(job: Job, event: str, clip_id: str) -> None:
    """One line, appended whole."""
    with open(job.log, "ab", buffering=0) as log:
        log.write(f"{event} {clip_id} {job.name}\n".encode())


if __name__ == "__main__":
    work_off(Job(**json.loads(sys.argv[1])))

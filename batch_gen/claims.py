"""What a worker does next: chunks claimed by lease, clips handed out one by one, verdicts brought home.

The worker's loop needs this and nothing else of the protocol; every method may be called from any of its threads:

    with ClaimSource(store, plan, worker, ClaimOptions(on_chunk_end=write_parts)) as source:
        while True:
            work = source.next(loaded_bucket)      # str(request.bucket) of what the engine has compiled, or None
            if work is None:                       # every clip is finished, or the rest is in live leases of others
                break
            if isinstance(work, Wait):             # nothing for this thread now; ask again then, or when woken
                source.wait_for_change(work.seconds)
                continue
            source.started(work.clip_id)           # writes the attempt down; LostLease: drop the clip, ask again
            try:                                   # work.begun_before: try commit.adopt_orphan first
                receipt = render_and_commit(work)  # calls source.heartbeat() at every sign of progress
            except ClipFailed as error:
                source.failed(work.clip_id, error.kind, error.message)
            else:
                source.committed(work.clip_id, receipt.outcome)
    summary = source.summary()                     # counts and quarantined clips: exit code 0 or 3

- `next` raises `RunStopped` when stop.json appears, `StoreError` when the store was away for `store_patience_s`.
- `work.alone`: a process died while this clip was in flight; nothing else is handed out until it has its verdict.
- `holds(clip_id)`: ask right before a commit and at will while rendering; False means stop, the clip is another's.
  A commit without asking harms nothing (clips are create-only), it may only be wasted.
- `failed` takes any kind of `errors.KINDS`. The clip comes again, or is quarantined, by its budgets. Kinds of class
  host and systemic do not count against a clip: they are handled as `abandoned`.
- `abandoned(clip_id)`: given up without verdict (drain, engine restarted for another reason); it does not count.
- `release()`: at drain, after the clips in flight were reported: parts are written, leases freed for others at once.
- `on_chunk_end(ChunkEnd)` is called before a chunk is finished or released, with what the caller needs for its parts;
  it may be called again for the same chunk and epoch when the store failed in between.
- Leases are renewed by a thread of this object while `heartbeat` (or any report) came within `silence_s`; a worker
  whose engine hangs loses its chunks to others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Final, Self

from batch_gen.budget import ErrorBudget, after_failure, verdict_on
from batch_gen.clock import utc_now
from batch_gen.donelog import DoneChunk, DoneLog, Tally
from batch_gen.errors import KINDS, RetryClass, StoreError
from batch_gen.held import COMMITTED, Held, find_committed, open_chunk
from batch_gen.lease import LostLease, Owner
from batch_gen.roster import Roster
from batch_gen.seeker import Seeker
from batch_gen.stop import check_stop, stop_run
from batch_gen.work import Assignment, ChunkEnd, ClaimOptions, Wait

if TYPE_CHECKING:
    from batch_gen.lease import Attempts, LeaseBody
    from batch_gen.plan import Plan
    from batch_gen.records import Verdict
    from batch_gen.storage.base import Store

LOG: Final = logging.getLogger(__name__)
STORE_PAUSE_S: Final = 2.0
_NOT_THE_CLIP: Final = {RetryClass.HOST, RetryClass.SYSTEMIC}

__all__ = ["Assignment", "ChunkEnd", "ClaimOptions", "ClaimSource", "Wait"]


class ClaimSource:
    """See the module.

    Args:
        store: The output root.
        plan: Its rounds; new ones are picked up while the worker runs.
        worker: Name of this worker for people and records.
        options: Times, budgets, and the writer of parts.
    """

    def __init__(self, store: Store, plan: Plan, worker: str, options: ClaimOptions | None = None) -> None:
        self._store = store
        self._plan = plan
        self._options = options = options or ClaimOptions()
        self._owner = Owner(uuid.uuid4().hex, worker, options.ttl_s, options.grace_s, options.clock, options.utc)
        self._done = DoneLog(store)
        self._seeker = Seeker(store, plan, self._done, self._owner, options.shard)
        self._roster = Roster(options.clock)
        self._errors = ErrorBudget(options.max_failures)
        self._late: Counter[str] = Counter()
        self._progress_at = options.clock()
        self._store_failed_at: float | None = None
        self._audited = False
        self._claiming = threading.Lock()
        self._starting = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Start the thread that renews leases."""
        self._thread = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the renewals; leases that are still held run out by themselves (`release` frees them at once)."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def next(self, bucket: str | None = None) -> Assignment | Wait | None:
        """The next clip, preferably of the loaded bucket; a pause; or None when this worker is not needed any more."""
        with self._claiming:
            try:
                work = self._next(bucket)
            except StoreError as error:
                return self._store_away(error)
            self._store_failed_at = None
            return work

    def wait_for_change(self, seconds: float) -> None:
        """Sleep so long, or until a report of another thread may have changed what `next` says."""
        with self._roster.changed:
            self._roster.changed.wait(seconds)

    def started(self, clip_id: str) -> None:
        """Write the attempt down, before it happens.

        Raises:
            LostLease: The chunk is another's; the clip is no longer ours to report on.
            StoreError: It could not be written; call `abandoned`.
        """
        roster = self._roster
        with self._starting:
            with roster.changed:
                held = roster.held_of(clip_id)
                others = [h for h in roster.held.values() if h is not held and len(h.lease.body.in_flight) == 1]
                before = held.attempts_of(clip_id)
                held.attempts[clip_id] = before.model_copy(update={"started": before.started + 1})
                roster.running.add(clip_id)
            for other in others:  # none of them may look as if its clip had died alone
                self._write(other)
            try:
                self._write(held, must=True)
            except StoreError:
                held.attempts[clip_id] = before
                raise
        self.heartbeat()

    def committed(self, clip_id: str, outcome: str = "committed") -> bool:
        """The clip has its record; False when the chunk is another's by now."""
        self.heartbeat()
        with self._roster.changed:
            held = self._roster.land(clip_id)
            counts = self._late if held is None else held.counts
            if outcome != "committed":
                counts[outcome] += 1
            if held is None:
                return False
            attempts = held.attempts_of(clip_id).started
            held.settle(clip_id, COMMITTED.model_copy(update={"attempts": attempts}))
        self._note(failed=False)
        self._finish_complete()
        return True

    def failed(self, clip_id: str, kind: str, message: str) -> Verdict | None:
        """The clip failed; its verdict when its budgets are spent, None when it will come again (or is another's)."""
        self.heartbeat()
        if KINDS[kind].retry in _NOT_THE_CLIP:
            self.abandoned(clip_id)
            return None
        with self._roster.changed:
            was_alone = len(self._roster.flying) == 1
            held = self._roster.land(clip_id)
            if held is None:
                return None
            verdict = self._judge(held, clip_id, after_failure(held.attempts_of(clip_id), kind, message, was_alone))
        self._write(held)
        if verdict is not None:
            self._note(failed=True)
        self._finish_complete()
        return verdict

    def count(self, name: str, amount: int) -> None:
        """Note what was spent beside the clips: it joins the counts of the next chunk that this worker finishes."""
        with self._roster.changed:
            self._late[name] += amount

    def abandoned(self, clip_id: str) -> None:
        """The clip was given up without verdict; it will come again, here or elsewhere, and nothing counts."""
        with self._roster.changed:
            held = self._roster.land(clip_id)
            if held is None:
                return
            held.counts["abandoned"] += 1
            held.waiting.append(clip_id)
        self._write(held)

    def heartbeat(self) -> None:
        """Something moved: text, a step, a slab, an encoded frame, an uploaded byte. Cheap; call it often."""
        self._progress_at = self._options.clock()

    def holds(self, clip_id: str) -> bool:
        """Whether the clip is still ours to commit."""
        return self._roster.find(clip_id) is not None

    def release(self) -> None:
        """Free everything for others, with parts of what was done; what is still in flight counts as abandoned."""
        for clip_id in list(self._roster.flying):
            self.abandoned(clip_id)
        self._finish_complete()
        for held in self._roster.take(lambda _: True):
            with contextlib.suppress(StoreError, LostLease):
                self._options.on_chunk_end(_end_of(held, finished=False))
                self._free(held, finished=False)
            self._drop(held)

    def summary(self) -> Tally:
        """The whole run by its done log: committed and quarantined clips of finished chunks."""
        with self._claiming:
            self._done.refresh()
            self._done.compact()
            return self._done.tally()

    def num_unfinished(self) -> int:
        """Chunks of the plan (of this shard) without an entry in the done log."""
        with self._claiming:
            self._seeker.refresh()
            return len(self._seeker.open_chunks(()))

    def renew_due(self) -> None:
        """Renew what is old enough, if something moved lately. The thread of this object calls it."""
        options = self._options
        renew_s = options.ttl_s / 3 if options.renew_s is None else options.renew_s
        silence_s = options.ttl_s if options.silence_s is None else options.silence_s
        moving = options.clock() - self._progress_at < silence_s
        for held in list(self._roster.held.values()):
            if not held.lease.is_held or (moving and held.lease.age_s >= renew_s):
                self._write(held)

    def _keep_renewing(self) -> None:
        period_s = max(0.02, self._options.ttl_s / 12)
        while not self._closed.wait(period_s):
            self.renew_due()

    def _next(self, bucket: str | None) -> Assignment | Wait | None:
        check_stop(self._store)
        for held in [held for held in self._roster.held.values() if not held.lease.is_held]:
            self._drop(held)
        self._finish_complete()
        self._audit()
        for want in (None,) if bucket is None else (bucket, None):
            work = self._roster.hand_out(want)
            while work is None and self._claim(want):
                work = self._roster.hand_out(want)
            if work is not None:
                return work
        return self._roster.pause() or self._idle()

    def _claim(self, bucket: str | None) -> bool:
        """Own one more chunk; False when none can be had."""
        found = self._seeker.find(self._roster.held.keys(), bucket)
        if found is None:
            return False
        chunk, lease = found
        held = open_chunk(self._store, chunk, lease, self._plan.requests(chunk), self._options.budgets)
        held.opened_at = self._options.clock()
        self._roster.add(held)
        self._finish_complete()
        return True

    def _idle(self) -> Wait | None:
        options = self._options
        linger_s = options.ttl_s + options.grace_s if options.linger_s is None else options.linger_s
        seconds = self._seeker.idle_s(self._roster.held.keys(), linger_s)
        return None if seconds is None else Wait(seconds)

    def _audit(self) -> None:
        """Once, when a small run looks finished from the start: chunks whose records are gone are opened again."""
        if self._audited:
            return
        self._seeker.refresh()
        if not self._seeker.open_chunks(()) and self._plan.num_clips <= self._options.audit_clips:
            entries = [entry for entry in self._done.entries() if self._seeker.is_mine(entry.chunk)]
            clips = {c: entry for entry in entries for c, v in entry.clips.items() if v.status == "committed"}
            gone = {clips[c].chunk: clips[c].clips for c in clips.keys() - find_committed(self._store, clips)}
            for chunk, clip_ids in gone.items():
                self._done.reopen(chunk, clip_ids)
            self._seeker.refresh()
        self._audited = True

    def _judge(self, held: Held, clip_id: str, attempts: Attempts) -> Verdict | None:
        """Set the clip aside when its budgets are spent, else let it wait for its next start."""
        held.attempts[clip_id] = attempts
        verdict = verdict_on(attempts, self._options.budgets)
        if verdict is not None:
            held.settle(clip_id, verdict)
            return verdict
        if KINDS[attempts.kind].retry is RetryClass.TRANSIENT:
            pause_s = self._options.budgets.transient_pause_s * 2.0 ** (attempts.transient - 1)
            held.not_before[clip_id] = self._options.clock() + pause_s
        held.waiting.append(clip_id)
        return None

    def _write(self, held: Held, *, must: bool = False) -> None:
        """Bring the lease up to date; a lost one is dropped, a silent store is only logged unless `must`."""
        try:
            held.lease.write(lambda body: self._snapshot(held, body))
        except LostLease:
            LOG.warning("lost the lease of chunk %s", held.chunk.id)
            self._drop(held)
            if must:
                raise
        except StoreError as error:
            if must:
                raise
            LOG.warning("could not renew chunk %s: %s", held.chunk.id, error.message)

    def _drop(self, held: Held) -> None:
        self._roster.drop(held)
        self._seeker.forget(held.chunk.id)

    def _finish_complete(self) -> None:
        """Write the last objects of chunks whose clips all have verdicts; what fails is tried again at the next."""
        for held in self._roster.take(lambda held: held.is_complete):
            try:
                self._finish(held)
            except StoreError as error:
                held.closing = False
                LOG.warning("could not finish chunk %s: %s", held.chunk.id, error.message)

    def _finish(self, held: Held) -> None:
        if held.lease.is_held:
            self._options.on_chunk_end(_end_of(held, finished=True))
            with self._roster.changed:
                held.counts.update(self._late)
                self._late.clear()
            entry = DoneChunk(
                chunk=held.chunk.id,
                epoch=held.lease.body.epoch,
                worker=self._owner.worker,
                clips=held.verdicts,
                counts=held.totals(self._options.clock()),
                finished=utc_now(),
            )
            self._done.add(entry)
            with contextlib.suppress(LostLease, StoreError):
                self._free(held, finished=True)
        self._drop(held)

    def _free(self, held: Held, *, finished: bool) -> None:
        changes = {"owner": None, "finished": finished, "in_flight": ()}
        held.lease.write(lambda body: self._snapshot(held, body).model_copy(update=changes))

    def _snapshot(self, held: Held, body: LeaseBody) -> LeaseBody:
        with self._roster.changed:
            return held.snapshot(body, self._roster.running)

    def _note(self, *, failed: bool) -> None:
        with self._roster.changed:
            reason = self._errors.note(failed=failed)
        if reason is not None:
            with contextlib.suppress(StoreError):
                stop_run(self._store, "error_budget", reason, self._owner.worker)

    def _store_away(self, error: StoreError) -> Wait:
        now = self._options.clock()
        since = self._store_failed_at = now if self._store_failed_at is None else self._store_failed_at
        if now - since >= self._options.store_patience_s:
            raise error
        LOG.warning("the store does not answer, trying again: %s", error.message)
        return Wait(STORE_PAUSE_S)


def _end_of(held: Held, *, finished: bool) -> ChunkEnd:
    return ChunkEnd(
        chunk=held.chunk.id,
        epoch=held.lease.body.epoch,
        finished=finished,
        verdicts=dict(held.verdicts),
        inherited=held.inherited,
        requests=held.requests,
    )

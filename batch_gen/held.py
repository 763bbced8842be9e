"""A chunk that this worker owns: which of its clips wait, and what becomes known of them. Memory only."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from batch_gen.budget import Budgets, verdict_on
from batch_gen.layout import record_key
from batch_gen.lease import Attempts
from batch_gen.records import Verdict

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from batch_gen.lease import Lease, LeaseBody
    from batch_gen.plan import Chunk
    from batch_gen.request import RenderRequest
    from batch_gen.storage.base import Store

NUM_HEADS_AT_ONCE: Final = 16
COMMITTED: Final = Verdict(status="committed")


@dataclass(slots=True)
class Held:
    """One owned chunk; the caller holds the lock of its `ClaimSource`.

    Attributes:
        waiting: Clips without verdict that are not handed out, in order.
        not_before: Clip -> moment on the worker's clock before which it is not tried again.
        inherited: Clips that earlier owners committed.
        closing: Somebody is writing the chunk's last objects.
        opened_at: When this owner began, on its own clock.
    """

    chunk: Chunk
    lease: Lease
    requests: dict[str, RenderRequest]
    attempts: dict[str, Attempts]
    verdicts: dict[str, Verdict]
    inherited: frozenset[str]
    waiting: list[str] = field(default_factory=list)
    not_before: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    closing: bool = False
    opened_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every clip has its verdict."""
        return len(self.verdicts) == len(self.requests)

    def ready(self, now: float, flying: Container[str], *, alone: bool) -> str | None:
        """The next clip that may start now, among those that must run alone or among the others.

        A clip in `flying` runs still, since before this chunk was lost and claimed again.
        """
        for clip_id in self.waiting:
            fits = self.attempts_of(clip_id).alone == alone and self.not_before.get(clip_id, 0.0) <= now
            if fits and clip_id not in flying:
                return clip_id
        return None

    def ready_in_s(self, now: float) -> float | None:
        """Seconds until some waiting clip may start, None when none waits."""
        return min((max(0.0, self.not_before.get(clip_id, 0.0) - now) for clip_id in self.waiting), default=None)

    def attempts_of(self, clip_id: str) -> Attempts:
        """What happened to a clip so far."""
        return self.attempts.get(clip_id) or Attempts()

    def settle(self, clip_id: str, verdict: Verdict) -> None:
        """The clip is finished."""
        self.verdicts[clip_id] = verdict
        if clip_id in self.waiting:
            self.waiting.remove(clip_id)

    def snapshot(self, body: LeaseBody, in_flight: Iterable[str]) -> LeaseBody:
        """The lease as it should be now."""
        quarantined = {clip_id: v for clip_id, v in self.verdicts.items() if v.status == "quarantined"}
        changes = {
            "in_flight": tuple(sorted(in_flight)),
            "attempts": dict(self.attempts),
            "quarantined": quarantined,
            "num_committed": len(self.verdicts) - len(quarantined),
        }
        return body.model_copy(update=changes)

    def totals(self, now: float) -> dict[str, float]:
        """What the chunk took, for its entry in the done log; `seconds` and `own_clips` are this owner's."""
        totals: Counter[str] = Counter(self.counts)
        for attempts in self.attempts.values():
            totals.update(started=attempts.started, failed=attempts.failed, died=attempts.died)
            totals.update(transient=attempts.transient)
        totals["own_clips"] = len(self.verdicts.keys() - self.inherited)
        counts = {name: float(value) for name, value in sorted(totals.items()) if value}
        return {**counts, "seconds": round(now - self.opened_at, 3)}


def open_chunk(store: Store, chunk: Chunk, lease: Lease, requests: list[RenderRequest], budgets: Budgets) -> Held:
    """Find out what is left of a chunk that was just claimed: heads of its records, budgets of its clips."""
    by_id = {request.clip_id: request for request in requests}
    committed = find_committed(store, by_id)
    verdicts = {clip_id: COMMITTED for clip_id in by_id if clip_id in committed}
    attempts = dict(lease.body.attempts)
    for clip_id in by_id.keys() - committed:
        verdict = lease.body.quarantined.get(clip_id) or verdict_on(attempts.get(clip_id) or Attempts(), budgets)
        if verdict is not None:
            verdicts[clip_id] = verdict
    waiting = [clip_id for clip_id in by_id if clip_id not in verdicts]
    return Held(chunk, lease, by_id, attempts, verdicts, committed, waiting)


def find_committed(store: Store, clip_ids: Iterable[str]) -> frozenset[str]:
    """Those of the clips that have a record, by one HEAD each."""
    ids = list(clip_ids)
    with ThreadPoolExecutor(NUM_HEADS_AT_ONCE) as pool:
        heads = pool.map(lambda clip_id: store.head(record_key(clip_id)), ids)
        return frozenset(clip_id for clip_id, head in zip(ids, heads, strict=True) if head is not None)

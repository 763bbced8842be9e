"""How a run stands, from its plan, its done log and the leases of unfinished chunks; reads, writes nothing.

Times of day come from the workers' clocks and are shown to people; no decision rests on them.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from batch_gen.commit import load_record
from batch_gen.donelog import DoneLog
from batch_gen.errors import ConfigError
from batch_gen.layout import LEASE_PREFIX
from batch_gen.lease import read_lease
from batch_gen.plan import load_plan
from batch_gen.runfile import load_run
from batch_gen.stop import load_stop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batch_gen.donelog import DoneChunk
    from batch_gen.lease import LeaseBody
    from batch_gen.plan import Chunk, Plan
    from batch_gen.records import Verdict
    from batch_gen.storage.base import Store

NUM_READERS: Final = 16
SLOW_SHARE: Final = 0.6
SLOW_AFTER_CHUNKS: Final = 3
RATE_WINDOW_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One unfinished chunk that was claimed.

    Attributes:
        state: "working", "silent" (older than its ttl: it may be taken over), or "free" (released).
        age_s: Since its last renewal, by the clock of whoever looks; None when that cannot be told.
    """

    chunk: str
    state: str
    worker: str
    epoch: int
    age_s: float | None
    num_clips: int
    num_committed: int
    num_quarantined: int
    in_flight: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker's pace: work done (cost) per second over the chunks that it finished."""

    name: str
    num_chunks: int
    cost_per_s: float
    slow: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run stands.

    Attributes:
        num_committed: By the done log and, for chunks under way, by their leases as of the last renewal.
        quarantined: Clip -> verdict.
        waste: What was spent beside the clips: starts, failures, deaths, duplicates.
        eta_s: Seconds until the end at the pace of the last hour of work; None when nothing tells.
        stopped: Why the run was stopped, None while it may go on.
    """

    url: str
    created: str
    num_clips: int
    num_committed: int
    num_chunks: int
    num_finished_chunks: int
    num_rounds: int
    quarantined: dict[str, Verdict] = field(default_factory=dict)
    leases: tuple[LeaseView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    waste: dict[str, float] = field(default_factory=dict)
    eta_s: float | None = None
    stopped: str | None = None

    @property
    def num_remaining(self) -> int:
        """Clips without verdict."""
        return self.num_clips - self.num_committed - len(self.quarantined)

    @property
    def is_finished(self) -> bool:
        """Whether every chunk is finished."""
        return self.num_finished_chunks == self.num_chunks

    def to_json(self) -> dict[str, Any]:
        """For `status --json`."""
        body = asdict(self)
        body["quarantined"] = {clip_id: verdict.model_dump() for clip_id, verdict in self.quarantined.items()}
        return {**body, "num_remaining": self.num_remaining, "finished": self.is_finished}


def run_status(store: Store, now: datetime | None = None) -> RunStatus:
    """Look at a run.

    Args:
        store: The output root.
        now: The moment to which ages refer; the present one when absent.

    Raises:
        ConfigError: No run began here.
    """
    now = now or datetime.now(UTC)
    run = load_run(store)
    if run is None:
        raise ConfigError(f"{store.url} holds no run (no run.json); give the --out of a run")
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    tally, entries = log.tally(), list(log.entries())
    open_chunks = [chunk for chunk in plan.chunks if chunk.id not in log]
    leases = tuple(_leases(store, open_chunks, now))
    under_way = {lease.chunk: lease for lease in leases}
    stop = load_stop(store)
    return RunStatus(
        url=store.url,
        created=run.created,
        num_clips=plan.num_clips,
        num_committed=tally.num_committed + sum(lease.num_committed for lease in leases),
        num_chunks=len(plan.chunks),
        num_finished_chunks=len(plan.chunks) - len(open_chunks),
        num_rounds=len(plan.rounds),
        quarantined=_quarantined(plan, tally.quarantined, open_chunks),
        leases=leases,
        workers=_workers(plan, entries),
        waste=tally.counts,
        eta_s=_eta_s(plan, entries, _open_cost(open_chunks, under_way)),
        stopped=None if stop is None else f"{stop.reason}: {stop.message}",
    )


def clip_story(store: Store, clip_id: str) -> dict[str, Any]:
    """Everything that the store knows of one clip: where it is planned, its attempts, its verdict, its record.

    Raises:
        ConfigError: The run does not have this clip.
    """
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    places = plan.find(clip_id)
    if not places:
        raise ConfigError(f"{store.url}: no clip {clip_id} in the plan of this run")
    finished = {entry.chunk: entry for entry in log.entries()}
    story: dict[str, Any] = {"clip_id": clip_id, "request": plan.request(clip_id).to_json(), "rounds": []}
    for place in places:
        seen = read_lease(store, place["chunk"])
        attempts = None if seen is None else seen.body.attempts.get(clip_id)
        entry = finished.get(place["chunk"])
        verdict = None if entry is None else entry.clips.get(clip_id)
        facts = {"attempts": attempts, "verdict": verdict}
        story["rounds"].append(place | {name: fact.model_dump() if fact else None for name, fact in facts.items()})
    record = load_record(store, clip_id)
    story["record"] = None if record is None else record.model_dump()
    return story


def _quarantined(plan: Plan, verdicts: dict[str, Verdict], open_chunks: list[Chunk]) -> dict[str, Verdict]:
    """Clips that are set aside now: those that a retry has under way are not."""
    again = {r.clip_id for chunk in open_chunks if chunk.round > 0 for r in plan.requests(chunk)}
    return {clip_id: verdict for clip_id, verdict in verdicts.items() if clip_id not in again}


def _leases(store: Store, chunks: list[Chunk], now: datetime) -> Iterable[LeaseView]:
    claimed = {entry.key.removeprefix(LEASE_PREFIX).removesuffix(".json") for entry in store.list(LEASE_PREFIX)}
    wanted = [chunk for chunk in chunks if chunk.id in claimed]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for chunk, seen in zip(wanted, pool.map(lambda chunk: read_lease(store, chunk.id), wanted), strict=True):
            if seen is not None:
                yield _view(chunk, seen.body, now)


def _view(chunk: Chunk, body: LeaseBody, now: datetime) -> LeaseView:
    renewed = _moment(body.renewed)
    age_s = None if renewed is None else (now - renewed).total_seconds()
    silent = age_s is not None and age_s > body.ttl_s
    return LeaseView(
        chunk=chunk.id,
        state="free" if body.owner is None else "silent" if silent else "working",
        worker=body.worker,
        epoch=body.epoch,
        age_s=age_s,
        num_clips=chunk.num_clips,
        num_committed=body.num_committed,
        num_quarantined=len(body.quarantined),
        in_flight=body.in_flight,
    )


def _workers(plan: Plan, entries: list[DoneChunk]) -> tuple[WorkerView, ...]:
    """Paces, and who is slow: below 0.6 of the median of all workers with three chunks or more."""
    spent: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        chunk = plan.chunk(entry.chunk)
        seconds, own = entry.counts.get("seconds", 0.0), entry.counts.get("own_clips", 0.0)
        if chunk is not None and seconds > 0 and own > 0:
            spent.setdefault(entry.worker, []).append((chunk.cost * own / chunk.num_clips, seconds))
    paces = {name: sum(c for c, _ in pairs) / sum(s for _, s in pairs) for name, pairs in spent.items()}
    sure = [pace for name, pace in paces.items() if len(spent[name]) >= SLOW_AFTER_CHUNKS]
    limit = SLOW_SHARE * statistics.median(sure) if len(sure) > 1 else 0.0
    return tuple(
        WorkerView(name, len(spent[name]), pace, len(spent[name]) >= SLOW_AFTER_CHUNKS and pace < limit)
        for name, pace in sorted(paces.items())
    )


def _open_cost(chunks: list[Chunk], leases: dict[str, LeaseView]) -> float:
    """Work that remains, the committed clips of chunks under way taken off."""
    total = 0.0
    for chunk in chunks:
        lease = leases.get(chunk.id)
        settled = 0 if lease is None else lease.num_committed + lease.num_quarantined
        total += chunk.cost * (1 - settled / chunk.num_clips)
    return total


def _eta_s(plan: Plan, entries: list[DoneChunk], open_cost: float) -> float | None:
    """What remains at the pace at which chunks were finished in the last hour that saw any."""
    moments = sorted((moment, entry.chunk) for entry in entries if (moment := _moment(entry.finished)) is not None)
    if open_cost == 0.0:
        return 0.0
    if not moments:
        return None
    recent = [(m, chunk) for m, chunk in moments if (moments[-1][0] - m).total_seconds() <= RATE_WINDOW_S]
    span_s = (recent[-1][0] - recent[0][0]).total_seconds()
    done = sum(chunk.cost for _, name in recent[1:] if (chunk := plan.chunk(name)) is not None)
    return open_cost * span_s / done if done > 0 else None


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None

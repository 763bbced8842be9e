"""`workers/`: one small file for every start of a worker: where it runs, what it spent, how it ended.

Written by its worker alone, every minute and at the end, so that what a killed machine cost is known to the minute.
Whoever is started again as the same child of an array reads how its last start ended: without a word means that
something killed it, and on the same machine or close to its memory limit that is most likely memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, ValidationError

from batch_gen.layout import WORKERS_PREFIX
from batch_gen.metrics import USES
from batch_gen.records import Strict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batch_gen.environment import WorkerHint
    from batch_gen.storage.base import Store

LEDGER_FORMAT: Final = 1
NUM_READERS: Final = 16
NEAR_LIMIT: Final = 0.8
FRAMES_BUDGET_BYTES: Final = 1 << 30
UNFINISHED_PER_REPLICA: Final = 2
MAX_HALVINGS: Final = 2


class Start(Strict):
    """`workers/<start>.json`.

    Attributes:
        job, attempt: the array job's child and which start of it this is; empty and 1 outside of one.
        host: the machine, so that a later start knows whether it came back to it.
        queue, instance: for people and metrics.
        price_per_hour: of the machine, as that start was told.
        lead_s: seconds from the process's start to the first look at the run: imports, weights, manifest.
        wall_s: seconds since; `render_s` and the other uses are of engines, of which there are `num_replicas`.
        memory_bytes, memory_limit_bytes: held when this was written, by all processes of the worker.
        ended: how it ended, empty while it runs or when it died without a word.
        exit_code: None as long.
        started, updated: UTC, for people.
    """

    format: int = LEDGER_FORMAT
    worker: str
    job: str = ""
    attempt: int = Field(1, ge=1)
    host: str = ""
    queue: str = "none"
    instance: str = "none"
    num_replicas: int = Field(1, ge=1)
    price_per_hour: float | None = None
    lead_s: float = 0.0
    wall_s: float = 0.0
    render_s: float = 0.0
    cold_start_s: float = 0.0
    failed_s: float = 0.0
    duplicate_s: float = 0.0
    num_committed: int = 0
    num_failed: int = 0
    video_s: float = 0.0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    ended: str = ""
    exit_code: int | None = None
    started: str = ""
    updated: str = ""

    @property
    def key(self) -> str:
        """Its place: by job and attempt, so that the next attempt finds it without a listing."""
        return start_key(self.job, self.attempt) if self.job else f"{WORKERS_PREFIX}{self.worker}.json"

    @property
    def machine_s(self) -> float:
        """Seconds of the machine."""
        return self.lead_s + self.wall_s


@dataclass(frozen=True, slots=True)
class HostLoad:
    """How much a worker keeps in the host's memory at once.

    Attributes:
        unfinished_per_replica: clips that are rendering, waiting for the encoder or being written.
        frames_budget_bytes: decoded frames that may wait.
        one_by_one: engines are loaded one after the other.
        kills: earlier starts in a row that memory probably killed.
    """

    unfinished_per_replica: int = UNFINISHED_PER_REPLICA
    frames_budget_bytes: int = FRAMES_BUDGET_BYTES
    one_by_one: bool = False
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run has cost.

    Attributes:
        machine_s: seconds of machines, by use; `idle` among them.
        usd: of everything, None where some start has no price.
        num_starts, num_silent: starts, and those that ended without a word or still run.
    """

    machine_s: dict[str, float] = field(default_factory=dict)
    usd: float | None = None
    num_committed: int = 0
    video_s: float = 0.0
    num_starts: int = 0
    num_silent: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of machines."""
        return sum(self.machine_s.values())

    def to_json(self) -> dict[str, Any]:
        """Rounded, with shares and the prices of a clip and of a second of video."""
        shares = {use: round(seconds / self.total_s, 4) for use, seconds in self.machine_s.items() if self.total_s}
        priced = self.usd is not None
        return {
            "machine_hours": round(self.total_s / 3600, 4),
            "shares": shares,
            "usd": round(self.usd, 4) if self.usd is not None else None,
            "usd_by_use": {use: round(share * self.usd, 4) for use, share in shares.items()}
            if self.usd is not None
            else None,
            "usd_per_clip": _ratio(self.usd, self.num_committed) if priced else None,
            "usd_per_video_s": _ratio(self.usd, self.video_s) if priced else None,
            "starts": self.num_starts,
            "silent_starts": self.num_silent,
        }

    def lines(self) -> list[str]:
        """For people; empty when nothing was counted."""
        if not self.total_s:
            return []
        body = self.to_json()
        uses = ", ".join(
            f"{share:.0%} {use.replace('_', ' ')}" for use, share in body["shares"].items() if share >= 0.005
        )
        line = f"cost: {body['machine_hours']:.2f} machine hours in {self.num_starts} starts: {uses}"
        if self.usd is None:
            return [f"{line}; --price-per-hour turns them into money"]
        money = f"{self.usd:,.2f} USD"
        if body["usd_per_clip"] is not None and body["usd_per_video_s"] is not None:
            money += f", {body['usd_per_clip']:.4f} a clip, {body['usd_per_video_s']:.4f} a second of video"
        return [line, f"      {money}"]


def start_key(job: str, attempt: int) -> str:
    """The file of one attempt of an array job's child."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "." for char in job)
    return f"{WORKERS_PREFIX}{plain}-a{attempt}.json"


def read_starts(store: Store) -> list[Start]:
    """Every start of every worker, in order of their keys; what cannot be read only costs its figures."""
    keys = [listed.key for listed in store.list(WORKERS_PREFIX)]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        found = pool.map(lambda key: read_start(store, key), keys)
        return [start for start in found if start is not None]


def read_start(store: Store, key: str) -> Start | None:
    """One start, None when there is none that can be read."""
    blob = store.get(key)
    if blob is None:
        return None
    try:
        return Start.model_validate_json(blob.body)
    except ValidationError:
        return None


def kills_before(store: Store, hint: WorkerHint, host: str) -> int:
    """How many starts of this child before this one, in a row, something killed that was not the end of a machine."""
    count = 0
    for attempt in range(hint.attempt - 1, 0, -1):
        last = read_start(store, start_key(hint.job, attempt)) if hint.job else None
        if last is None or last.exit_code is not None or not _was_killed(last, host):
            break
        count += 1
    return count


def host_load(kills: int) -> HostLoad:
    """Less at once after each kill: the same settings would die again. Frames are the same, only slower to come."""
    if kills == 0:
        return HostLoad()
    return HostLoad(1, FRAMES_BUDGET_BYTES >> min(kills, MAX_HALVINGS), one_by_one=True, kills=kills)


def add_up(starts: Iterable[Start], price_per_hour: float | None = None) -> Costs:
    """The costs of a run.

    Args:
        starts: of all its workers.
        price_per_hour: of every machine; None takes what each start was told.
    """
    machine_s = dict.fromkeys((*USES, "idle"), 0.0)
    all_starts = list(starts)
    usd: float | None = 0.0
    for start in all_starts:
        for use in USES:
            machine_s[use] += getattr(start, f"{use}_s") / start.num_replicas
        machine_s["cold_start"] += start.lead_s
        busy_s = sum(getattr(start, f"{use}_s") for use in USES) / start.num_replicas
        machine_s["idle"] += max(0.0, start.wall_s - busy_s)
        price = start.price_per_hour if price_per_hour is None else price_per_hour
        usd = None if usd is None or price is None else usd + price * start.machine_s / 3600
    return Costs(
        machine_s={use: seconds for use, seconds in machine_s.items() if seconds > 0},
        usd=usd if all_starts else None,
        num_committed=sum(start.num_committed for start in all_starts),
        video_s=sum(start.video_s for start in all_starts),
        num_starts=len(all_starts),
        num_silent=sum(start.exit_code is None for start in all_starts),
    )


def _was_killed(last: Start, host: str) -> bool:
    same_machine = not last.host or not host or last.host == host
    near_limit = last.memory_limit_bytes > 0 and last.memory_bytes >= NEAR_LIMIT * last.memory_limit_bytes
    return same_machine or near_limit


def _ratio(amount: float | None, count: float) -> float | None:
    return round(amount / count, 6) if amount is not None and count else None

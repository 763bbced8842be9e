"""Everything that a report is made of, read from an output root: a few objects a chunk, none a clip."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from batch_gen import tables
from batch_gen.donelog import DoneChunk, DoneLog
from batch_gen.errors import ConfigError
from batch_gen.layout import ERRORS_PREFIX, LEASE_PREFIX, METRICS_PREFIX, chunk_id
from batch_gen.lease import LeaseBody, read_lease
from batch_gen.plan import Plan, load_plan
from batch_gen.runfile import RunFile, load_run
from batch_gen.stop import load_stop
from batch_gen.storage.base import Store

NUM_READERS: Final = 16
Row = dict[str, Any]
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Planned:
    """A clip as its last round plans it: the whole request, and the manifest's file and row."""

    request: Row
    chunk: str
    source: str
    row: int


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as its output root tells it.

    Attributes:
        run: run.json, None where only parts are left.
        planned: clip_id -> its last plan.
        metrics, errors: The rows of all parts, of every epoch.
        chunks: Entries of the done log that are not folded yet; `counts` are the totals of all.
        leases: Of all chunks that were claimed.
        stopped: Why the run was stopped, "" while it may go on.
    """

    url: str
    run: RunFile | None = None
    planned: dict[str, Planned] = field(default_factory=dict)
    metrics: list[Row] = field(default_factory=list)
    errors: list[Row] = field(default_factory=list)
    chunks: list[DoneChunk] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    leases: list[LeaseBody] = field(default_factory=list)
    stopped: str = ""


def read_run(store: Store) -> RunData:
    """Read a run; writes nothing.

    Raises:
        ConfigError: Nothing began here, or the root is of a newer version.
        CheckFailed: The done log is damaged.
    """
    run = load_run(store)
    metrics, errors = _rows(store, METRICS_PREFIX), _rows(store, ERRORS_PREFIX)
    if run is None and not metrics and not errors:
        raise ConfigError(f"{store.url} holds no run (no run.json, no metrics); give the --out of a run")
    log = DoneLog(store)
    log.refresh()
    stop = load_stop(store)
    return RunData(
        url=store.url,
        run=run,
        planned=_planned(load_plan(store)),
        metrics=metrics,
        errors=errors,
        chunks=list(log.entries()),
        counts=log.tally().counts,
        leases=_leases(store),
        stopped="" if stop is None else f"{stop.reason}: {stop.message}",
    )


def _rows(store: Store, prefix: str) -> list[Row]:
    keys = sorted(listed.key for listed in store.list(prefix))
    blobs = at_once(store.get, keys)
    return [row for blob in blobs if blob is not None for row in tables.read_rows(blob.body)]


def _planned(plan: Plan) -> dict[str, Planned]:
    found: dict[str, Planned] = {}
    for plan_round in plan.rounds:
        names = ("clip_id", "request", "chunk", "source", "row")
        for clip_id, request, number, source, row in zip(*map(plan_round.column, names), strict=True):
            chunk = chunk_id(plan_round.head.round, number)
            found[clip_id] = Planned(json.loads(request), chunk, source or "", row)
    return found


def _leases(store: Store) -> list[LeaseBody]:
    chunks = [listed.key.removeprefix(LEASE_PREFIX).removesuffix(".json") for listed in store.list(LEASE_PREFIX)]
    seen = at_once(lambda chunk: read_lease(store, chunk), chunks)
    return [each.body for each in seen if each is not None]


def at_once(work: Callable[[T], U], items: Iterable[T], num_threads: int = NUM_READERS) -> list[U]:
    """The results of `work` in the order of the items, made by some threads."""
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))

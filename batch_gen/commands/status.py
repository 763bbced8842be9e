"""`batch-gen status`: how a run stands, or the whole story of one clip."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from batch_gen.errors import EXIT_OK
from batch_gen.layout import SUBMIT_PREFIX
from batch_gen.ledger import Costs, add_up, read_starts
from batch_gen.metrics import duration
from batch_gen.reach import reach
from batch_gen.runfile import load_run
from batch_gen.status import LeaseView, RunStatus, clip_story, run_status
from batch_gen.storage.base import Store, open_store

WATCH_S = 10.0
MAX_SHOWN = 20
NO_WASTE = ("started", "own_clips", "seconds", "failed_ms", "cold_start_ms")  # counts of work, and what `cost` tells


def status(out: str, clip_id: str | None, given: Mapping[str, Any], *, watch: bool, as_json: bool) -> int:
    """Print the state of a run, once or every ten seconds until it is finished."""
    store = open_store(out, reach(given))
    if clip_id is not None:
        click.echo(json.dumps(clip_story(store, clip_id), indent=1, default=str))
        return EXIT_OK
    price = given.get("price_per_hour")
    while True:
        found = look(store)
        costs = add_up(read_starts(store), price)
        click.echo(as_text(store, found, costs) if not as_json else as_json_text(store, found, costs))
        if not watch or (found is not None and (found.is_finished or found.stopped)):
            return EXIT_OK
        time.sleep(WATCH_S)


def look(store: Store) -> RunStatus | None:
    """How the run stands; None when it was submitted and no worker has begun yet.

    Raises:
        ConfigError: no run, and none was submitted.
    """
    if load_run(store) is None and was_submitted(store):
        return None
    return run_status(store)


def was_submitted(store: Store) -> bool:
    """Whether `submit` sent a job for this root."""
    return next(iter(store.list(f"{SUBMIT_PREFIX}jobs/")), None) is not None


def as_text(store: Store, found: RunStatus | None, costs: Costs) -> str:
    """The run, its jobs and its costs for people."""
    told = [f"{store.url}: submitted; no worker has begun yet"] if found is None else list(lines(found))
    if was_submitted(store):
        from batch_gen.submit.jobs import lines as job_lines

        told += job_lines(store, time.time())
    return "\n".join([*told, *costs.lines()])


def as_json_text(store: Store, found: RunStatus | None, costs: Costs) -> str:
    """The same for programs; `batch` is empty where nothing was submitted, the run's own keys are absent before it."""
    jobs = []
    if was_submitted(store):
        from batch_gen.submit.jobs import as_json as jobs_as_json

        jobs = jobs_as_json(store)
    body = {} if found is None else found.to_json()
    return json.dumps({**body, "costs": costs.to_json(), "batch": jobs}, indent=1, default=str)


def lines(found: RunStatus) -> Iterator[str]:
    """The state for people."""
    eta = "" if found.eta_s is None or found.is_finished else f", about {duration(found.eta_s)} left"
    made = f"{found.num_committed} of {found.num_clips} clips committed"
    yield f"{found.url}: {made}, {len(found.quarantined)} quarantined{eta}"
    yield f"{found.num_finished_chunks} of {found.num_chunks} chunks finished, begun {found.created}"
    if found.stopped:
        yield f"STOPPED: {found.stopped}; go on with run --continue"
    yield from _some(found.leases, _lease_line, "leases")
    yield from _some(
        [worker for worker in found.workers if worker.slow], lambda w: f"  slow worker {w.name}", "slow workers"
    )
    shown = [f"  {clip_id}: {verdict.kind}: {verdict.message}" for clip_id, verdict in found.quarantined.items()]
    yield from _some(shown, str, "quarantined clips")
    waste = {name: count for name, count in found.waste.items() if count and name not in NO_WASTE}
    if waste:
        yield "waste: " + ", ".join(f"{name.replace('_', ' ')} {count:g}" for name, count in waste.items())


def _lease_line(lease: LeaseView) -> str:
    age = "" if lease.age_s is None else f", renewed {lease.age_s:.0f} s ago"
    flying = f", in flight: {', '.join(lease.in_flight)}" if lease.in_flight else ""
    return (
        f"  chunk {lease.chunk} {lease.state} by {lease.worker}: {lease.num_committed}/{lease.num_clips}{age}{flying}"
    )


def _some(items: Any, show: Any, name: str) -> Iterator[str]:
    found = list(items)
    yield from (show(item) for item in found[:MAX_SHOWN])
    if len(found) > MAX_SHOWN:
        yield f"  ... and {len(found) - MAX_SHOWN} more {name}; --json lists them"

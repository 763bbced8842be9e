"""`batch-gen status`: how a run stands, or the whole story of one clip."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from batch_gen.errors import EXIT_OK
from batch_gen.metrics import duration
from batch_gen.reach import reach
from batch_gen.status import LeaseView, RunStatus, clip_story, run_status
from batch_gen.storage.base import open_store

WATCH_S = 10.0
MAX_SHOWN = 20


def status(out: str, clip_id: str | None, given: Mapping[str, Any], *, watch: bool, as_json: bool) -> int:
    """Print the state of a run, once or every ten seconds until it is finished."""
    store = open_store(out, reach(given))
    if clip_id is not None:
        click.echo(json.dumps(clip_story(store, clip_id), indent=1, default=str))
        return EXIT_OK
    while True:
        found = run_status(store)
        click.echo(json.dumps(found.to_json(), indent=1, default=str) if as_json else "\n".join(lines(found)))
        if not watch or found.is_finished or found.stopped:
            return EXIT_OK
        time.sleep(WATCH_S)


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
    waste = {name: count for name, count in found.waste.items() if count}
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

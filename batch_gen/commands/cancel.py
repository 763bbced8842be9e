"""`batch-gen cancel`: every worker of a run drains and stops, and what waits for a machine never gets one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from batch_gen.errors import EXIT_OK, UsageError
from batch_gen.layout import SUBMIT_PREFIX
from batch_gen.reach import reach
from batch_gen.runfile import load_run
from batch_gen.stop import stop_run
from batch_gen.storage.base import open_store


def cancel(out: str, given: Mapping[str, Any], message: str, *, now: bool = False) -> int:
    """Write stop.json; workers see it before their next clip and exit 4, jobs without a machine are ended."""
    store = open_store(out, reach(given))
    was_submitted = next(iter(store.list(f"{SUBMIT_PREFIX}jobs/")), None) is not None
    if load_run(store) is None and not was_submitted:
        raise UsageError(f"{out}: no run began there")
    stop = stop_run(store, "cancel", message)
    click.echo(f"stopped ({stop.reason}): {stop.message}; go on with: batch-gen run ... --out {out} --continue")
    if was_submitted:
        from batch_gen.submit.jobs import cancel_jobs

        for line in cancel_jobs(store, f"batch-gen cancel: {message}", now=now):
            click.echo(line)
    return EXIT_OK

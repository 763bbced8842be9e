"""`batch-gen cancel`: every worker of a run drains and stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from batch_gen.errors import EXIT_OK, UsageError
from batch_gen.reach import reach
from batch_gen.runfile import load_run
from batch_gen.stop import stop_run
from batch_gen.storage.base import open_store


def cancel(out: str, given: Mapping[str, Any], message: str) -> int:
    """Write stop.json; workers see it at their next renewal or claim and exit 4."""
    store = open_store(out, reach(given))
    if load_run(store) is None:
        raise UsageError(f"{out}: no run began there")
    stop = stop_run(store, "cancel", message)
    click.echo(f"stopped ({stop.reason}): {stop.message}; go on with: batch-gen run ... --out {out} --continue")
    return EXIT_OK

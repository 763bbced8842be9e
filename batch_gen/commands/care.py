"""`batch-gen verify`, `retry` and `clean`: looking after an output root."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from batch_gen.clean import clean
from batch_gen.clock import utc_now
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError
from batch_gen.manifest import read_ids
from batch_gen.metrics import rebuild_tables
from batch_gen.plan import PlanOptions
from batch_gen.reach import reach
from batch_gen.repair import clear_log, repair
from batch_gen.retry import Choice, retry
from batch_gen.runfile import load_run
from batch_gen.storage.base import Store, open_store
from batch_gen.verify_run import decode_again, verify_run

MAX_SHOWN = 40


def verify_out(out: str, given: Mapping[str, Any], *, deep: bool, fix: bool, as_json: bool) -> int:
    """Hold records, files, plan and done log against each other; exit 5 when something is wrong and stays so."""
    store = _open(out, given)
    mended = clear_log(store) if fix else []
    report = verify_run(store, decode_again if deep else None)
    mended += repair(store, report.problems) if fix and report.problems else []
    left = verify_run(store).problems if fix and report.problems else report.problems
    if fix:
        rebuild_tables(store)
    if as_json:
        click.echo(json.dumps(report.to_json() | {"mended": mended, "left": len(left)}, indent=1))
    else:
        head = f"{report.num_committed} of {report.num_clips} clips committed, {report.num_bytes:,} bytes"
        click.echo(f"{head}, {report.num_quarantined} quarantined, {report.num_pending} without verdict")
        for problem in report.problems[:MAX_SHOWN]:
            click.echo(f"  {problem.kind}: {problem.key}: {problem.message}")
        for line in mended:
            click.echo(f"  mended: {line}")
        if fix and left:
            click.echo(f"{len(left)} problems cannot be mended, first {left[0].kind}: {left[0].key}")
        click.echo("everything is as recorded" if report.ok else f"{len(report.problems)} problems")
    return EXIT_CHECK_FAILED if left else EXIT_OK


def retry_clips(out: str, given: Mapping[str, Any], errors: tuple[str, ...], as_json: bool) -> int:
    """Plan quarantined clips once more; the next `run` makes them."""
    ids = read_ids(Path(given["ids"])) if given.get("ids") else None
    options = PlanOptions(facts={"worker": "retry", "created": utc_now()})
    head = retry(_open(out, given), Choice(frozenset(errors), ids), options)
    body = {"round": head.round, "clips": head.num_clips, "chunks": head.num_chunks}
    text = f"round {head.round}: {head.num_clips} clips planned again; the next batch-gen run makes them"
    click.echo(json.dumps(body) if as_json else text)
    return EXIT_OK


def clean_out(out: str, given: Mapping[str, Any], *, really: bool, aside: bool, as_json: bool) -> int:
    """Remove what a run does not need any more; a dry run unless `really`."""
    cleaned = clean(_open(out, given), aside=aside, dry_run=not really)
    if as_json:
        click.echo(json.dumps({"keys": cleaned.keys, "bytes": cleaned.num_bytes, "removed": really}, indent=1))
    else:
        verb = "removed" if really else "would be removed (give --yes)"
        click.echo(f"{len(cleaned.keys)} objects, {cleaned.num_bytes:,} bytes {verb}")
        for key in cleaned.keys[:MAX_SHOWN]:
            click.echo(f"  {key}")
    return EXIT_OK


def _open(out: str, given: Mapping[str, Any]) -> Store:
    store = open_store(out, reach(given))
    if load_run(store) is None:
        raise UsageError(f"{out}: no run began there")
    return store

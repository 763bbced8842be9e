"""`batch-gen report`: a gallery, a page for every clip and a page about the run, as static HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from batch_gen.errors import EXIT_OK
from batch_gen.reach import reach
from batch_gen.report.build import Built, ReportOptions, build_report
from batch_gen.report.posters import DEFAULT_LIMIT
from batch_gen.storage.base import open_store


def report(out: str, given: Mapping[str, Any], as_json: bool) -> int:
    """Build or rebuild the report of the run under `out`."""
    options = ReportOptions(
        to=Path(given["to"]) if given.get("to") else None,
        with_clips=bool(given.get("with_clips")),
        clips_url=given.get("clips_url"),
        price_per_hour=given.get("price_per_hour"),
        max_new_posters=given.get("max_posters", DEFAULT_LIMIT),
    )
    built = build_report(open_store(out, reach(given)), options)
    click.echo(json.dumps(built.to_json(), indent=1) if as_json else closing(built))
    return EXIT_OK


def closing(built: Built) -> str:
    """What was made, and how to see it."""
    made = f"{built.num_clips:,} clips, {built.num_posters:,} posters, {built.bytes / 1e6:.1f} MB of pages and data"
    return f"{made}\nopen       {built.page}"

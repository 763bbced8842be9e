"""`batch-gen export`: committed clips in a folder, under names that people chose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from batch_gen import tables
from batch_gen.commit import load_record
from batch_gen.errors import EXIT_OK, UsageError
from batch_gen.export import ExportOptions, Kind, export
from batch_gen.layout import CLIPS_TABLE_KEY
from batch_gen.manifest import read_ids
from batch_gen.metrics import rebuild_tables
from batch_gen.reach import reach
from batch_gen.records import Record
from batch_gen.storage.base import Store, open_store


def export_clips(out: str, folder: str, given: Mapping[str, Any], as_json: bool) -> int:
    """Export every committed clip, or those of an id file."""
    store = open_store(out, reach(given))
    ids = read_ids(Path(given["ids"])) if given.get("ids") else None
    options = ExportOptions(
        kind=cast("Kind", given.get("kind", "copy")),
        template=given.get("template", "{clip_id}"),
        skip_existing=bool(given.get("skip_existing")),
    )
    records = list(committed(store, ids))
    if not records:
        raise UsageError(f"{out}: no committed clip to export")
    done = [(item.clip_id, str(item.path)) for item in export(store, records, Path(folder), options)]
    if as_json:
        click.echo(json.dumps([{"clip_id": clip_id, "path": path} for clip_id, path in done], indent=1))
    else:
        click.echo(f"{len(done)} clips exported to {folder}")
    return EXIT_OK


def committed(store: Store, ids: frozenset[str] | None) -> Iterator[Record]:
    """Records of all committed clips, by the index of the run.

    Raises:
        UsageError: an id that is not committed.
    """
    rebuild_tables(store)
    blob = store.get(CLIPS_TABLE_KEY)
    assert blob is not None
    rows = [row for row in tables.read_rows(blob.body) if row["status"] == "committed"]
    known = {row["clip_id"] for row in rows} | {row["row_id"] for row in rows}
    if ids is not None and ids - known:
        raise UsageError(f"--ids: not committed: {', '.join(sorted(ids - known)[:10])}")
    for row in rows:
        if ids is not None and not {row["clip_id"], row["row_id"]} & ids:
            continue
        record = load_record(store, row["clip_id"])
        if record is not None:
            yield record

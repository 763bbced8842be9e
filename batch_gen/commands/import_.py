"""`batch-gen import`: other tools' prompt lists and job files into a canonical manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batch_gen.errors import EXIT_OK
from batch_gen.importing import grid as sweeps
from batch_gen.importing.write import ImportOptions, Report, import_files
from batch_gen.storage.address import check_address

if TYPE_CHECKING:
    from collections.abc import Sequence


def import_(
    sources: Sequence[str],
    destination: str,
    *,
    engine: str | None = None,
    dedupe: bool = False,
    grid: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Import files and print what was mapped and what was left.

    Args:
        sources: Text, CSV, JSON lines, JSON or Parquet files.
        destination: The manifest to write.
        engine: Whose names the files use where names are ambiguous.
        dedupe: Drop rows that are equal to an earlier one.
        grid: Sweeps such as `seed=1..4`.
        as_json: Print the report as JSON.

    Raises:
        UsageError, ManifestError: Exit code 2; nothing is written.
    """
    for place in (*sources, destination):
        check_address("a file to import or to write", place)
    options = ImportOptions(
        sources=tuple(Path(source) for source in sources),
        destination=Path(destination),
        engine=engine,
        dedupe=dedupe,
        grid=sweeps.parse(grid),
    )
    report = import_files(options)
    click.echo(json.dumps(report.to_json(), indent=1) if as_json else as_text(report, options))
    return EXIT_OK


def as_text(report: Report, options: ImportOptions) -> str:
    """The report for people."""
    lines = []
    for source, names in report.mapped.items():
        renamed = {name: columns for name, columns in names.items() if name != columns}
        lines.append(f"{source}: {', '.join(names) or 'nothing'} read")
        lines += [f"  {name} -> {columns}" for name, columns in renamed.items()]
        if report.extra[source]:
            lines.append(f"  carried through unread: {', '.join(report.extra[source])}")
    if report.num_equal:
        noun = "row" if report.num_equal == 1 else "rows"
        what = "dropped" if options.dedupe else "kept with a suffix -2, -3 (--dedupe drops them)"
        lines.append(f"{report.num_equal:,} {noun} equal to an earlier one: {what}")
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"wrote {options.destination}: {report.num_rows:,} rows from {report.num_records:,} records")
    return "\n".join(lines)

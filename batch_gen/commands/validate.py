"""`batch-gen validate`: the whole manifest checked, every fault at once; nothing is rendered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from batch_gen.errors import EXIT_OK, ManifestError
from batch_gen.prepare import Prepared, prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_BUCKETS_SHOWN = 12


def validate(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Check a manifest as `run` would, and print what it amounts to.

    Args:
        sources: Manifest files, folders or s3:// URLs.
        given: The flags that somebody set, by key.
        as_json: One JSON object on stdout in place of text: faults too.

    Raises:
        BatchGenError: Exit code 2, unless the faults went to stdout as JSON.
    """
    try:
        prepared = prepare(sources, given, weights=False)
    except ManifestError as error:
        if not as_json:
            raise
        faults = [fault.to_json() for fault in error.faults]
        click.echo(json.dumps({"ok": False, "num_faults": error.num_faults, "faults": faults}, indent=1))
        return error.exit_code
    body = describe(prepared)
    click.echo(json.dumps(body, indent=1) if as_json else as_text(body))
    return EXIT_OK


def describe(prepared: Prepared) -> dict[str, Any]:
    """What the manifest amounts to, as JSON values."""
    manifest, settings = prepared.manifest, prepared.settings
    survey = manifest.survey
    return {
        "ok": True,
        "files": [file.source.name for file in manifest.files],
        "rows": manifest.num_rows,
        "selected_rows": survey.num_rows,
        "clips": survey.num_clips,
        "blocked": prepared.num_blocked(),
        "video_s": float(survey.duration_s),
        "cost": survey.cost,
        "model": settings.model,
        "preset": settings.preset,
        "buckets": {str(bucket): survey.buckets[bucket] for bucket in sorted(survey.buckets)},
        "warnings": [found.to_json() for found in survey.warnings],
        "warned": [str(found) for found in survey.warnings],
    }


def as_text(body: Mapping[str, Any]) -> str:
    """The same for people."""
    num_files = len(body["files"])
    chosen = "" if body["selected_rows"] == body["rows"] else f", {body['selected_rows']:,} of them selected"
    files = f"{num_files:,} {'file' if num_files == 1 else 'files'}"
    lines = [
        f"{body['rows']:,} rows in {files}{chosen}: {body['clips']:,} clips, {body['video_s']:,.1f} s of video",
        f"model {body['model']}, preset {body['preset']}",
    ]
    if body["blocked"]:
        lines.append(f"{body['blocked']:,} clips will be set aside by the block list")
    buckets = list(body["buckets"].items())
    lines += [f"  {name:<24} {count:>10,} clips" for name, count in buckets[:MAX_BUCKETS_SHOWN]]
    if len(buckets) > MAX_BUCKETS_SHOWN:
        lines.append(f"  ... and {len(buckets) - MAX_BUCKETS_SHOWN:,} more shapes (--json lists them)")
    lines += [f"warning: {text}" for text in body["warned"]]
    return "\n".join([*lines, "no faults"])

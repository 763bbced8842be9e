"""`batch-gen plan`: what a run would do, without doing it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click

from batch_gen.chunks import ChunkRules, cut
from batch_gen.prepare import Prepared, prepare


def plan(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Check the manifest and print clips, chunks, buckets and work; writes nothing."""
    body = describe(prepare(sources, given))
    if as_json:
        click.echo(json.dumps(body, indent=1))
        return 0
    click.echo(f"{body['clips']:,} clips in {body['chunks']:,} chunks, {body['video_s']:.1f} s of video")
    click.echo(f"model {body['model']}, preset {body['preset']}, profile {body['profile']}, output {body['out']}")
    for bucket in body["buckets"]:
        click.echo(f"  {bucket['bucket']:<24} {bucket['clips']:>8,} clips {bucket['cost']:>16,} frame-pixel-steps")
    for text in body["warnings"]:
        click.echo(f"warning: {text}")
    return 0


def describe(prepared: Prepared) -> dict[str, Any]:
    """The plan as JSON values."""
    clips: Counter[str] = Counter()
    costs: Counter[str] = Counter()
    video_s = 0.0
    for row in prepared.rows():
        bucket = str(row.request.bucket)
        clips[bucket] += 1
        costs[bucket] += row.request.cost
        video_s += row.request.duration_s
    rules = ChunkRules(sum(clips.values()), prepared.settings.chunk_requests)
    num_chunks = sum(1 for _ in cut(prepared.rows(), rules))
    settings = prepared.settings
    return {
        "clips": sum(clips.values()),
        "chunks": num_chunks,
        "video_s": video_s,
        "model": settings.model,
        "preset": settings.preset,
        "profile": settings.profile,
        "out": settings.out,
        "buckets": [{"bucket": name, "clips": clips[name], "cost": costs[name]} for name in sorted(clips)],
        "warnings": [str(warned) for warned in prepared.manifest.survey.warned.values()],
    }

"""`batch-gen plan`: what a run would do and take, without doing it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import click

from batch_gen.chunks import MAX_REQUESTS, ChunkRules, cut
from batch_gen.config import RATE_KEY, Settings, load_profile
from batch_gen.estimate.choose import Work, check_cores, check_memory, degrees_of, question_of
from batch_gen.estimate.page import as_lines
from batch_gen.estimate.ranking import Question, judge, rank, swings
from batch_gen.estimate.results import Estimate, estimate
from batch_gen.estimate.spend import price_of
from batch_gen.prepare import Prepared, prepare, prepare_preset

EXACT_CHUNKS = 20_000
MAX_BUCKETS_SHOWN = 12
NO_SIZES = "no estimate: --model fake has no sizes"


def plan(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Check the manifest, say what it takes, and print it; writes nothing. Without a manifest: one clip of the preset.

    Raises:
        ConfigError: more ranks than the machine has cores.
        MemoryTooSmall: after printing, when it does not fit on the mesh and nobody gave `--ignore-memory`.
    """
    if sources:
        prepared = prepare(sources, given, weights=False)
        settings, question, body = prepared.settings, prepared.question, describe(prepared)
    else:
        settings, checkpoint, work = prepare_preset(given)
        question = question_of(settings, checkpoint, work)
        body = _facts(settings, work, 1, Fraction(0))
    if question is not None:
        check_cores(settings, question)
    found = None if question is None else estimated(settings, question, body["chunks"])
    if as_json:
        click.echo(json.dumps(body | {"estimate": None if found is None else found.to_json()}, indent=1))
    else:
        click.echo("\n".join([*_head(body), *([NO_SIZES] if found is None else as_lines(found))]))
    if question is not None:
        check_memory(settings, question)
    return 0


def describe(prepared: Prepared) -> dict[str, Any]:
    """Clips, chunks and buckets of a manifest as JSON values."""
    survey = prepared.manifest.survey
    body = _facts(prepared.settings, prepared.work, num_chunks(prepared), survey.duration_s)
    return body | {"warnings": [str(warned) for warned in survey.warnings]}


def num_chunks(prepared: Prepared) -> int:
    """Chunks of the plan; above 20,000 clips the least that there can be, since making every request takes minutes."""
    survey, settings = prepared.manifest.survey, prepared.settings
    rate = load_profile(settings.profile).get(RATE_KEY)
    rules = ChunkRules(survey.num_clips, settings.chunk_requests, None if rate is None else float(rate))
    if survey.num_clips <= EXACT_CHUNKS:
        return sum(1 for _ in cut(prepared.rows(), rules))
    sizes: Counter[str] = Counter()
    for (bucket, steps, _), count in prepared.work.items():
        cost = bucket.width * bucket.height * bucket.num_frames * steps
        most = max(
            1, min(rules.size, MAX_REQUESTS, int(rules.cost // cost) if rules.cost < float("inf") else rules.size)
        )
        sizes[str(bucket)] += -(-count // most)
    return sizes.total()


def _facts(settings: Settings, work: Work, chunks: int, duration_s: Fraction) -> dict[str, Any]:
    clips: Counter[str] = Counter()
    costs: Counter[str] = Counter()
    for (bucket, steps, _), count in work.items():
        clips[str(bucket)] += count
        costs[str(bucket)] += count * bucket.width * bucket.height * bucket.num_frames * steps
    return {
        "clips": clips.total(),
        "chunks": chunks,
        "video_s": float(duration_s),
        "model": settings.model,
        "preset": settings.preset,
        "profile": settings.profile,
        "out": settings.out,
        "buckets": [{"bucket": name, "clips": clips[name], "cost": costs[name]} for name in sorted(clips)],
        "warnings": [],
    }


def estimated(settings: Settings, question: Question, chunks: int) -> Estimate:
    """Memory, seconds and money of a whole manifest."""
    return estimate(
        question,
        judge(question, degrees_of(settings), settings.replicas),
        rank(question, settings.for_),
        swings(question, settings.for_),
        settings,
        price_of(question.machine, settings.price_per_hour),
        chunks,
    )


def _head(body: Mapping[str, Any]) -> list[str]:
    if body["out"]:
        about = "" if body["clips"] <= EXACT_CHUNKS else "at least "
        clips, chunks = (f"{body[n]:,} {n if body[n] != 1 else n[:-1]}" for n in ("clips", "chunks"))
        lines = [f"{clips} in {about}{chunks}, {body['video_s']:,.1f} s of video"]
        where = f", output {body['out']}"
    else:
        lines, where = ["no manifest: one clip of the preset"], ""
    lines.append(f"model {body['model']}, preset {body['preset']}, profile {body['profile']}{where}")
    shown = body["buckets"][:MAX_BUCKETS_SHOWN]
    lines += [f"  {b['bucket']:<24} {b['clips']:>8,} clips {b['cost']:>22,} frame-pixel-steps" for b in shown]
    if len(body["buckets"]) > len(shown):
        lines.append(f"  ... and {len(body['buckets']) - len(shown):,} more shapes (--json lists them)")
    return lines + [f"warning: {text}" for text in body["warnings"]]

"""`batch-gen run`: check everything, then render as one worker."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from batch_gen.drain import again_on_sigterm
from batch_gen.errors import BatchGenError
from batch_gen.flags import FLAGS
from batch_gen.notify import target_of
from batch_gen.preflight import preflight
from batch_gen.prepare import prepare
from batch_gen.presence import last_words
from batch_gen.worker import Result, work

_NOT_AGAIN: Final = {"out", "continue", "on-clip", "drain-at", "limit", "quiet"}  # --on-clip may hold a secret


def run(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Render every clip of the manifest that is not committed yet; returns the exit code."""
    again_on_sigterm()
    try:
        result = _render(sources, given)
    except BatchGenError as error:
        last_words(given, error)
        raise
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1))
    else:
        click.echo(closing(result, sources, given))
    return result.exit_code


def _render(sources: Sequence[str], given: Mapping[str, Any]) -> Result:
    """Everything that can be refused, then the work."""
    prepared = prepare(sources, given)
    if prepared.settings.on_clip is not None:
        target_of(prepared.settings.on_clip)
    for warned in prepared.manifest.survey.warned.values():
        click.echo(f"warning: {warned}", err=True)
    supply = preflight(prepared)
    if supply is not None and not prepared.settings.quiet:
        click.echo(f"graphs: {supply}", err=True)
    return work(prepared, supply)


def closing(result: Result, sources: Sequence[str], given: Mapping[str, Any]) -> str:
    """The lines that end a run: what was made, where it is, what to try next; commands may be pasted into a shell."""
    cost = result.costs.lines() if result.costs.usd is not None else []
    made = f"{result.num_committed} of {result.num_clips} clips committed"
    if result.num_quarantined:
        made += f", {result.num_quarantined} quarantined"
    out = shlex.quote(result.out)
    lines = [f"{made}; this worker: {result.summary}", f"clips      {result.out}/clips"]
    lines += [f"index      {result.out}/clips.parquet", f"metrics    {result.out}/metrics.parquet"]
    if result.graphs is not None:
        lines.append(f"graphs     {result.graphs['hits']} in the cache before, {result.graphs['misses']} compiled here")
    lines.append(f"report     batch-gen report {out}   (then open {result.out}/report/index.html)")
    lines += cost
    if result.reason:
        lines.append(f"{result.reason}; start the same command again to go on")
    if result.num_quarantined:
        lines.append(f"next       batch-gen status {out}   (why clips were set aside)")
        lines.append(f"           batch-gen retry {out}   (another round for them)")
    else:
        again = shlex.join(["batch-gen", "run", *sources, *flags_again(given), "--out", result.out])
        lines.append(f"next       {again}   (resumes; renders nothing twice)")
    return "\n".join(lines)


def flags_again(given: Mapping[str, Any]) -> list[str]:
    """The flags of a command that goes on with a run: those that were given, without the root and what holds once."""
    found: list[str] = []
    for flag in FLAGS:
        value = given.get(flag.key)
        if value is None or flag.name in _NOT_AGAIN:
            continue
        if flag.kind == "bool":
            found.append(f"--{flag.name if value else flag.opposite}")
            continue
        for one in value if flag.multiple else (value,):
            found += [f"--{flag.name}", str(one)]
    return found

"""`batch-gen run`: check everything, then render as one worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from batch_gen.drain import again_on_sigterm
from batch_gen.errors import EnvironmentFault
from batch_gen.estimate.published import refuse_published
from batch_gen.prepare import check_run_memory, prepare
from batch_gen.worker import Result, work


def run(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Render every clip of the manifest that is not committed yet; returns the exit code."""
    again_on_sigterm()
    prepared = prepare(sources, given)
    refuse_published(prepared.checkpoint)
    check_device(prepared.settings.device)
    check_run_memory(prepared)
    for warned in prepared.manifest.survey.warned.values():
        click.echo(f"warning: {warned}", err=True)
    result = work(prepared)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1))
    else:
        click.echo(closing(result, sources))
    return result.exit_code


def check_device(name: str) -> None:
    """Raise EnvironmentFault for a device that this machine lacks: no restart of an engine would find it."""
    if name == "cuda" and not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        raise EnvironmentFault("--device cuda: this machine has no CUDA device; use --device cpu or check the driver")


def closing(result: Result, sources: Sequence[str]) -> str:
    """The lines that end a run: what was made, where it is, what to try next."""
    made = f"{result.num_committed} of {result.num_clips} clips committed"
    if result.num_quarantined:
        made += f", {result.num_quarantined} quarantined"
    lines = [f"{made}; this worker: {result.summary}", f"clips      {result.out}/clips"]
    lines += [f"index      {result.out}/clips.parquet", f"metrics    {result.out}/metrics.parquet"]
    lines.append(f"report     batch-gen report {result.out}   (then open {result.out}/report/index.html)")
    if result.reason:
        lines.append(f"{result.reason}; start the same command again to go on")
    if result.num_quarantined:
        lines.append(f"next       batch-gen status {result.out}   (why clips were set aside)")
    else:
        lines.append(
            f"next       batch-gen run {' '.join(sources)} --out {result.out}   (resumes; renders nothing twice)"
        )
    return "\n".join(lines)

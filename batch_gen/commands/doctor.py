"""`batch-gen doctor`: one line for each thing that a run needs, with the fix beside what is wrong."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from batch_gen.checkpoint import open_checkpoint
from batch_gen.config import Mesh, load_profile
from batch_gen.environment import cache_folder
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, BatchGenError
from batch_gen.health import Line, Mark, View, folder_line, machine_lines
from batch_gen.reach import reach
from batch_gen.storage.base import Store, open_store
from batch_gen.storage.probe import Finding, probe

MIN_SCRATCH_BYTES: Final = 2 << 30
_CLOCK: Final = "the clocks of store and machine agree"


def doctor(out: str | None, given: Mapping[str, Any], as_json: bool) -> int:
    """Check this machine; exit code 5 when a line is red."""
    lines = list(diagnose(out, given, View()))
    if as_json:
        click.echo(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        for line in lines:
            click.echo(f"{line.mark:<5}{line.name:<16}{line.text}{'  ->  ' + line.fix if line.fix else ''}")
    return EXIT_CHECK_FAILED if any(line.mark == "red" for line in lines) else EXIT_OK


def diagnose(out: str | None, given: Mapping[str, Any], view: View) -> Iterator[Line]:
    """All lines, in order of what stops a run first.

    Raises:
        ConfigError: no such profile.
    """
    yield from machine_lines(view, profile_needs(given.get("profile")))
    scratch = Path(given.get("scratch") or tempfile.gettempdir())
    yield folder_line("scratch", scratch, MIN_SCRATCH_BYTES, "free space or use --scratch")
    yield folder_line("cache", cache_folder(), 0, "set BATCH_GEN_CACHE to a folder that can be written")
    if given.get("model"):
        yield model_line(str(given["model"]), given)
    if out:
        yield from store_lines(out, given)


def profile_needs(name: str | None) -> dict[str, Any]:
    """The device and the cores that a profile takes; nothing special when none is named."""
    if name is None:
        return {}
    profile = load_profile(name)
    return {"device": profile["device"], "cores": Mesh.parse(str(profile["mesh"])).num_ranks * profile["replicas"]}


def model_line(name: str, given: Mapping[str, Any]) -> Line:
    """Whether the checkpoint is there and complete."""
    try:
        found = open_checkpoint(name, reach(given))
    except BatchGenError as error:
        return Line("model", "red", error.message, error.hint)
    return Line("model", "ok", f"{name}: preset {found.preset}, sizes in multiples of {found.limits.size_multiple}")


def store_lines(out: str, given: Mapping[str, Any]) -> Iterator[Line]:
    """What the store of an output root promises, tried."""
    try:
        yield from probed_lines(open_store(out, reach(given)))
    except BatchGenError as error:
        yield Line("store", "red", error.message, error.hint)


def probed_lines(store: Store) -> Iterator[Line]:
    """One line for the verdict, one for each promise, one for the clock."""
    report = probe(store)
    mark: Mark = {"leases": "ok", "static": "warn", "refuse": "red"}[report.verdict]  # type: ignore[assignment]
    fix = {"ok": "", "warn": "run with --assign static, one worker a shard", "red": "use another store"}[mark]
    yield Line("store", mark, f"{report.url}: {report.verdict}", fix)
    yield from (_promise(finding) for finding in report.findings)
    if not any(finding.name == _CLOCK for finding in report.findings):
        yield Line("clock", "ok", "this store tells no time; nothing is signed by the clock")


def _promise(finding: Finding) -> Line:
    mark: Mark = "ok" if finding.ok else "red" if finding.weight == "needed" else "warn"
    if finding.name == _CLOCK:
        fix = "" if finding.ok else "set the clock: chronyc makestep, or timedatectl set-ntp true"
        return Line("clock", mark, f"{finding.name}{': ' + finding.detail if finding.detail else ''}", fix)
    return Line("store", mark, f"{finding.name}{': ' + finding.detail if finding.detail else ''}")

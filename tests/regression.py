"""Suites for tests of regress: small manifests, a memory store, engines in this process, clocks that move when told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from batch_gen.engine import Engine
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.regress.night import run_night
from batch_gen.regress.render import Bench
from batch_gen.regress.results import Night
from batch_gen.regress.suite import Setup, prepare_suite
from batch_gen.storage.memory import MemoryStore
from batch_gen.tables import write_manifest
from tests.making import FakeClock

ROWS: list[dict[str, Any]] = [
    {"row_id": "base", "prompt": "a red circle moving right on a black background", "seed": 1},
    {"row_id": "still", "prompt": "a white square standing still on a navy background", "seed": 2},
]
SMALL = {"width": 64, "height": 64, "num_frames": 9, "steps": 4}


def write_suite(
    folder: Path, limits: Mapping[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **values: Any
) -> Path:
    """A manifest of small cases, with limits beside it."""
    path = folder / "small.parquet"
    write_manifest(path, [{**SMALL, **row, **values} for row in (rows or ROWS)])
    (folder / "small.yaml").write_text(yaml.safe_dump(dict(limits or {})))
    return path


def make_setup(folder: Path, limits: Mapping[str, Any] | None = None, **flags: Any) -> Setup:
    """A suite for the fake engine; its store lives in memory under the folder's name."""
    path = write_suite(folder, limits)
    return prepare_suite([str(path)], {"model": "fake", "out": f"memory://{folder}", "threads": 1, **flags})


def store_of(setup: Setup) -> MemoryStore:
    """The setup's store, to look into."""
    assert isinstance(setup.store, MemoryStore)
    return setup.store


def fake_bench(options: FakeOptions | None = None, wrap: Callable[[Engine], Engine] = lambda engine: engine) -> Bench:
    """A bench of fake engines whose delays move a clock of their own."""
    clock = FakeClock()
    return Bench(start=lambda: wrap(FakeEngine(options, clock.pass_s)), now=clock)


def render_night(setup: Setup, name: str, options: FakeOptions | None = None, **bench: Any) -> Night:
    """One night with a fake engine."""
    return run_night(setup, fake_bench(options, **bench), name)

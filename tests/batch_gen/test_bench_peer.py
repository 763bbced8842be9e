"""The bench beside diffusers: its arithmetic by hand, and one tiny run of both sides."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_peer.py"
KEYS = {"clips_per_hour_fp32", "whole_run_fp32", "cpu_a_clip_fp32", "peak_memory", "time_to_first_clip", "engine_idle"}


def load():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bench_peer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_peer"] = module
    spec.loader.exec_module(module)
    return module


PEER = load()


def row(began, busy, finished, **stages):
    """A row of metrics: seconds since the epoch."""
    moments = {"started_at": datetime.fromtimestamp(began, UTC), "finished_at": datetime.fromtimestamp(finished, UTC)}
    return {**moments, "text_s": 0.0, "denoise_s": busy, "decode_s": 0.0, "upload_s": 0.5, **stages}


def test_figures_of_a_run_by_hand():
    """Three clips: the rate counts from the first end to the last, the stages leave out the first clip."""
    rows = [row(100, 10, 112), row(110, 10, 122), row(121, 10, 132)]
    watch = PEER.Watch(1, 7, [(100.0, 3.0), (112.0, 10.0), (113.0, 11.0), (132.4, 30.0), (133.0, 31.0)])
    run = PEER.measured(rows, PEER.Ended(90.0, 45.0, 30.0, watch, ""))
    assert run.clips_per_hour == pytest.approx(3600 * 2 / 20)
    assert run.first_s == pytest.approx(22.5)
    assert run.stages["denoise"] == pytest.approx(10.0)
    assert run.idle == pytest.approx(1 / 31)
    assert (run.peak_bytes, run.cpu_s) == (7, 30.0)
    assert run.clip_cpu_s == pytest.approx((30 - 10) / 2)


def test_overlapping_clips_are_not_counted_twice():
    """Two clips that one call denoises are busy once."""
    assert PEER.idle_share([row(0, 10, 11), row(0, 12, 13)]) == pytest.approx(0.0)
    assert PEER.idle_share([row(0, 10, 11), row(15, 5, 21)]) == pytest.approx(5 / 20)


def test_ratios_are_medians_over_rounds():
    """Each round is held against its own peer, so a slow round does not count twice."""
    peer = [
        PEER.Run(100.0, 10.0, 100.0, 50, {}, 90.0, 4.0),
        PEER.Run(200.0, 20.0, 50.0, 50, {}, 90.0, 4.0),
        PEER.Run(100.0, 10.0, 90.0, 50, {}, 90.0, 4.0),
    ]
    ours = [
        PEER.Run(50.0, 5.0, 200.0, 25, {}, 50.0, 2.0, 0.01),
        PEER.Run(80.0, 5.0, 150.0, 25, {}, 50.0, 2.0, 0.0),
        PEER.Run(50.0, 5.0, 180.0, 25, {}, 50.0, 2.0, 0.02),
    ]
    found = PEER.ratios({"peer float32": peer, "fp32": ours}, ["fp32"])
    assert found == {
        "clips_per_hour_fp32": 2.0,
        "whole_run_fp32": 2.0,
        "cpu_a_clip_fp32": 0.5,
        "peak_memory": 0.5,
        "time_to_first_clip": 0.5,
        "engine_idle": 0.01,
    }


def test_bench_runs_tiny():
    """Both sides render the same three clips, their files agree, and the last line has the frozen keys."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(done.stdout.splitlines()[-1])
    assert (body["name"], body["ok"]) == ("peer", True)
    assert set(body["ratios"]) == KEYS

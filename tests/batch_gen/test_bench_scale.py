"""The benches of scale: each runs tiny, its figures are right, and the keys of its last line are frozen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name):
    """A module beside the benches."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


BUDGET = load("request_budget")


def last_line(name):
    """The JSON at the end of a tiny run."""
    command = [sys.executable, str(SCRIPTS / name), "--tiny"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bench_claims.py", {"writes_vs_formula", "claims_per_chunk", "requests_per_clip"}),
        ("bench_planning.py", {"check_bytes_per_row", "plan_bytes_per_row", "join_bytes_per_row"}),
        ("bench_resume.py", {"requests_per_unfinished_clip_single", "requests_per_unfinished_clip_folded"}),
    ],
)
def test_bench_runs(name, keys):
    """Every clip is made once, the resume looks only at what is missing, and the keys are the frozen ones."""
    body = last_line(name)
    assert body["ok"] is True
    assert set(body["ratios"]) == keys


@pytest.mark.s3
def test_a_run_asks_what_the_formula_says():
    """A real run through a counting proxy makes the requests of the formula, and the keys are the frozen ones."""
    body = last_line("bench_requests.py")
    assert body["ok"] is True
    assert set(body["ratios"]) == {"put_vs_formula", "get_vs_formula", "head_vs_formula"}
    assert body["ratios"]["head_vs_formula"] == 1.0


def test_the_budget_by_hand():
    """The formula on figures that can be done by hand: one worker, then time, then a log that is folded."""
    quiet = BUDGET.undisturbed(BUDGET.Shape(clips=128, chunks=2))
    per_worker = BUDGET.PER_WORKER
    assert quiet["PUT"] == 3 * 128 + 4 * 2 + per_worker["PUT"]
    assert quiet["HEAD"] == 128 + per_worker["HEAD"]
    hour = BUDGET.over_time(BUDGET.Shape(clips=6400, chunks=100, workers=1, hours=1.0))
    assert hour["PUT"] == 60 + 60  # a lease of 180 s is renewed each minute, and figures are written
    assert hour["LIST"] == 20
    assert hour["GET"] == 20 + 2 * 100
    assert hour["DELETE"] == 0
    long = BUDGET.over_time(BUDGET.Shape(clips=6_400_000, chunks=100_000, workers=10, hours=1000.0))
    assert long["LIST"] == 15 * 100_000
    assert long["GET"] == 100_000 + 100_000 + 2 * 10 * 15_000
    assert long["DELETE"] == 100_000
    assert BUDGET.dollars({"PUT": 1000.0, "GET": 1000.0, "DELETE": 1000.0}) == pytest.approx(0.0054)


def test_claims_write_what_the_formula_says():
    """Writes of a crowd of workers: the formula's, and at most one more for each chunk that two of them wanted."""
    body = last_line("bench_claims.py")
    clips, chunks = 256, 16
    expected = 2 * clips + 3 * chunks
    in_vain = (body["ratios"]["claims_per_chunk"] - 1) * chunks
    assert expected <= round(body["ratios"]["writes_vs_formula"] * expected) <= expected + in_vain + chunks

"""The benches of scale: each runs tiny, its figures are right, and the keys of its last line are frozen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def last_line(name):
    """The JSON at the end of a tiny run."""
    command = [sys.executable, str(SCRIPTS / name), "--tiny"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bench_claims.py", {"writes_vs_formula", "claims_per_chunk", "requests_per_clip"}),
        ("bench_resume.py", {"requests_per_unfinished_clip_single", "requests_per_unfinished_clip_folded"}),
    ],
)
def test_bench_runs(name, keys):
    """Every clip is made once, the resume looks only at what is missing, and the keys are the frozen ones."""
    body = last_line(name)
    assert body["ok"] is True
    assert set(body["ratios"]) == keys


def test_claims_write_what_the_formula_says():
    """Writes of a crowd of workers: the formula's, and at most one more for each chunk that two of them wanted."""
    body = last_line("bench_claims.py")
    clips, chunks = 256, 16
    expected = 2 * clips + 3 * chunks
    in_vain = (body["ratios"]["claims_per_chunk"] - 1) * chunks
    assert expected <= round(body["ratios"]["writes_vs_formula"] * expected) <= expected + in_vain + chunks

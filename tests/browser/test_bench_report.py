from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_report.py"


@pytest.mark.browser
def test_bench_ends_with_one_line_of_json() -> None:
    """The bench runs at a small size, finds its pages sound, and its last line has the frozen keys."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, check=True)
    body = json.loads(done.stdout.splitlines()[-1])
    assert body["name"] == "report"
    assert body["ok"] is True
    assert set(body["ratios"]) == {"build_cpu", "rebuild_cpu", "gallery_bytes", "first_paint_s", "ready_s"}

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/bench_chaos.py"


@pytest.mark.s3
def test_bench_ends_with_one_line_of_json():
    """The bench runs at its smallest, keeps every promise, and its last line has the frozen keys."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, check=True)
    body = json.loads(done.stdout.splitlines()[-1])
    assert (body["name"], body["ok"]) == ("chaos", True)
    assert set(body["ratios"]) == {
        "committed", "quarantined", "double_renders_of_bound", "renders_begun_per_clip",
    }  # fmt: skip
    assert body["ratios"]["committed"] == 1.0

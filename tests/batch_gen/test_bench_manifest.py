from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/bench_manifest.py"


def test_bench_ends_with_one_line_of_json() -> None:
    """The bench runs at a small size, counts right, loads no torch, and its last line has the frozen keys."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--tiny"], capture_output=True, text=True, check=True)
    body = json.loads(done.stdout.splitlines()[-1])
    assert body["name"] == "manifest"
    assert body["ok"] is True
    assert set(body["ratios"]) == {
        f"{kind}_{what}" for kind in ("ids", "hashed", "faulty") for what in ("cpu", "memory")
    }

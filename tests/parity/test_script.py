"""The proof script prints its verdict as one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prove_parity.py"


@pytest.mark.slow
def test_prove_parity_ends_with_json():
    """The last line has the agreed keys, and no ratio is above its bound."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert set(verdict) == {"name", "ok", "ratios"}
    assert set(verdict["ratios"]) == {"velocity", "trajectory", "float64", "components", "bfloat16"}
    assert verdict["ok"]
    assert max(verdict["ratios"].values()) <= 1

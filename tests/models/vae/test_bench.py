"""The bench of the decode."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/bench_vae.py"


@pytest.mark.slow
def test_bench_ends_with_one_line_of_json():
    """At a tiny size the bench finds equal frames and flat memory, and its last line has the frozen keys."""
    command = [sys.executable, str(SCRIPT), "--tiny", "--rounds", "1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout.splitlines()[-1])
    assert (body["name"], body["ok"]) == ("vae", True)
    assert set(body["ratios"]) == {
        "fp32_exact_vs_untiled",
        "bf16_exact_vs_untiled",
        "fp32_exact_vs_untiled_480p",
        "fp32_exact_vs_tiled",
        "fp32_4_strips_vs_untiled_480p",
        "fp32_share_of_peak",
        "bf16_share_of_peak",
        "memory_untiled_vs_exact_480p",
        "memory_tiled_vs_exact_480p",
        "memory_161_vs_17_frames",
    }

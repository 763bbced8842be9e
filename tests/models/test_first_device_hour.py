"""The script of a user's first hour on a device: it stops where something is wrong, and leaves a report either way."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def walk(out, *flags):
    """Exit code, the report and the last line of one call."""
    command = [sys.executable, "scripts/first_device_hour.py", "--model", "none", "--out", str(out), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, json.loads((out / "report.json").read_text()), json.loads(done.stdout.splitlines()[-1])


def test_a_machine_without_the_device_gets_one_clear_error(tmp_path):
    """Without the Neuron stack the first tier says what to install, the others are not tried, the exit code is 5."""
    code, report, last = walk(tmp_path, "--device", "neuron")
    assert (code, report["ok"], last["ok"]) == (5, False, False)
    assert [tier["tier"] for tier in report["tiers"]] == ["machine"]
    assert report["tiers"][0]["kind"] == "unsupported"
    assert "the extra 'neuron' is not installed" in report["tiers"][0]["message"]


def test_the_rehearsal_opens_and_compiles_on_a_cpu(tmp_path):
    """On a CPU the first tier compiles a function for each role and finds its numbers right."""
    code, report, last = walk(tmp_path, "--device", "cpu", "--compile-backend", "eager", "--tiers", "machine")
    assert report["rehearsal"] is True
    tier = report["tiers"][0]
    assert set(tier["errors"]) == {"transformer", "vae", "text", "combine"}
    assert tier["errors"] == dict.fromkeys(tier["errors"], 0.0)
    assert (code == 0) == report["ok"] == last["ok"] == (not tier["red"])

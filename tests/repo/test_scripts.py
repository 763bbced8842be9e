"""Benchmark and proof scripts: each explains itself and ends with one line of JSON whose keys are frozen here."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"bench_startup.py": {"help_vs_nothing", "torch_vs_help"}}


def scripts():
    """Every bench, prove, build and train script."""
    return sorted(path for path in (ROOT / "scripts").glob("*.py") if path.name.split("_")[0] in ("bench", "prove"))


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_scripts_say_how_to_run_them(path):
    """Each script's docstring says what it shows and how it is run."""
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    assert f"scripts/{path.name}" in doc


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_scripts_end_with_a_line_of_json(path):
    """Each script prints name, ok and ratios as its last line."""
    text = path.read_text("utf-8")
    assert "json.dumps" in text or "_json" in text
    assert '"ok"' in text
    assert '"ratios"' in text


@pytest.mark.parametrize(("name", "keys"), QUICK.items())
def test_quick_scripts_run(name, keys):
    """The quick ones run here, with --tiny, and their ratios have these names."""
    done = subprocess.run(
        [sys.executable, f"scripts/{name}", "--tiny"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == {"name", "ok", "ratios"}
    assert set(last["ratios"]) == keys

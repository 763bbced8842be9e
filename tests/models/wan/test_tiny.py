"""The random checkpoint `tiny`: always the same, built once, small."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.checkpoint_files import folder_digest, read_json
from models.wan.tiny import build_tiny, ensure_tiny

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "build_tiny_checkpoint.py"


def test_every_build_is_the_same(tiny_variant, tmp_path):
    """Two builds of a variant have the same bytes."""
    assert folder_digest(build_tiny(tmp_path / "again", "single")) == folder_digest(tiny_variant("single"))


def test_it_is_small_and_whole(tiny_checkpoint):
    """A few MB; both experts, all up-samplings of the VAE, a boundary."""
    assert sum(path.stat().st_size for path in tiny_checkpoint.rglob("*") if path.is_file()) < 12e6
    assert read_json(tiny_checkpoint / "model_index.json")["boundary_ratio"] == 0.875
    assert read_json(tiny_checkpoint / "vae" / "config.json")["temperal_downsample"] == [False, True, True]


def test_processes_may_build_at_the_same_time(tmp_path):
    """Callers that meet in one cache folder all get the whole checkpoint, and no scratch is left."""
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: ensure_tiny(tmp_path, "single"), range(2)))
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir()] == [folders.pop().name]


def test_it_is_built_once(tiny_checkpoint):
    """A cached checkpoint is taken as it is."""
    before = (tiny_checkpoint / "model_index.json").stat().st_mtime_ns
    assert ensure_tiny(tiny_checkpoint.parent) == tiny_checkpoint
    assert (tiny_checkpoint / "model_index.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("arguments", [["somewhere", "huge"], ["FULL"]])
def test_the_script_refuses_what_it_cannot_do(arguments, tiny_checkpoint, tmp_path):
    """An unknown variant, or a folder that holds a checkpoint, ends with code 2 and a sentence."""
    arguments = [str(tiny_checkpoint) if argument == "FULL" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "unknown" in done.stderr or "already holds" in done.stderr

"""Whole runs over a mesh of real rank processes: launched, rendered, killed, replicated."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import hashes, kill, rank_pids, records, run, small_manifest, start, wait_for

pytestmark = pytest.mark.mesh


def test_eight_ranks_render_a_manifest(tmp_path, tiny_checkpoint):
    """tp=2,cp=2,cfg=2 starts eight ranks, commits every clip, and the records say which mesh it was."""
    manifest = small_manifest(tmp_path / "m.parquet", 2)
    code, body, errors = run(manifest, tmp_path / "out", "--model", str(tiny_checkpoint), "--mesh", "tp=2,cp=2,cfg=2")
    assert code == 0, errors
    assert body["num_committed"] == 2
    profile = json.loads((tmp_path / "out" / "run.json").read_text())["profile"]
    assert profile["mesh"] == {"tp": 2, "cp": 2, "cfg": 2}


def test_replicas_of_a_mesh(tmp_path, tiny_checkpoint):
    """Two replicas of tp=2 render each clip once, with the frames of one such pipeline alone."""
    manifest = small_manifest(tmp_path / "m.parquet", 4)
    flags = ("--model", str(tiny_checkpoint), "--mesh", "tp=2", "--threads", "1")
    assert run(manifest, tmp_path / "one", *flags)[0] == 0
    code, body, errors = run(manifest, tmp_path / "two", *flags, "--replicas", "2")
    assert code == 0, errors
    assert body["num_committed"] == 4
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert {record.metrics["replica"] for record in records(tmp_path / "two").values()} <= {0, 1}


def test_a_killed_rank_ends_its_group_and_the_run_goes_on(tmp_path, tiny_checkpoint):
    """kill -9 of a rank other than 0 is noticed, the group starts again, and every clip is committed once."""
    manifest = small_manifest(tmp_path / "m.parquet", 3, steps=12)
    process = start(manifest, tmp_path / "out", "--model", str(tiny_checkpoint), "--mesh", "tp=2")
    wait_for(lambda: list((tmp_path / "out").glob("lease/*.json")), "the first claim", 240)
    ranks = wait_for(lambda: rank_pids(process.pid), "the ranks")
    kill(ranks[-1])
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads(out)["num_committed"] == 3
    assert len(list((tmp_path / "out").glob("clips/*/*.mp4"))) == 3

"""The simulated fleet: its arithmetic on cases that can be done by hand, and the bench around it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load():
    """The module beside the bench."""
    spec = importlib.util.spec_from_file_location("fleet_model", SCRIPTS / "fleet_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MODEL = load()
CALM = {"slow": (0.0, 1.0), "claim_s": 0.0, "cold_s": 600.0, "classes": ((60.0, 1.0),)}


def run(**settings):
    return MODEL.Simulation(MODEL.Fleet(**(CALM | settings)), 0).run()


def test_one_node_by_hand():
    """One node, ten clips of a minute: ten minutes of cold start, ten of work, both paid, a tail of nothing."""
    life = run(nodes=1, rows=10, lease=4)
    assert life.hours * 60 == pytest.approx(20.0)
    assert life.ideal_hours * 60 == pytest.approx(10.0)
    assert life.node_hours * 60 == pytest.approx(20.0)
    assert (life.made_hours * 60, life.cold_hours * 60) == pytest.approx((10.0, 10.0))
    assert life.waste == pytest.approx(0.5)


def test_two_nodes_wait_for_the_larger_share():
    """Three chunks of four clips on two nodes: eight minutes of work, and the idle node leaves after ttl + grace."""
    life = run(nodes=2, rows=12, lease=4, cold_s=0.0)
    assert life.hours * 60 == pytest.approx(8.0)
    left_after_min = MODEL.STALE_S / 60
    assert life.node_hours * 60 == pytest.approx(8.0 + 4.0 + left_after_min)
    assert life.idle_hours * 60 == pytest.approx(left_after_min)


def test_static_shards_belong_to_their_node():
    """Static: node 0 has chunks 0 and 2, node 1 has chunk 1 and leaves at once when it is made."""
    life = run(nodes=2, rows=12, lease=4, cold_s=0.0, assign="static")
    assert life.hours * 60 == pytest.approx(8.0)
    assert life.node_hours * 60 == pytest.approx(12.0)


def test_replicas_share_a_node():
    """Four replicas take four times as long for a clip and make four at once; a gain shortens that."""
    assert run(nodes=1, rows=8, lease=8, replicas=4, cold_s=0.0).hours * 60 == pytest.approx(8.0)
    assert run(nodes=1, rows=8, lease=8, replicas=4, cold_s=0.0, replica_gain=0.25).hours * 60 == pytest.approx(6.0)


def test_a_slow_node_is_slow():
    """A node of 1.3 times the time takes it, and the ideal knows."""
    life = run(nodes=1, rows=10, slow=(1.0, 1.3), cold_s=0.0)
    assert life.hours * 60 == pytest.approx(13.0)
    assert life.hours == pytest.approx(life.ideal_hours)


@pytest.mark.parametrize("notice_s", [0.0, 120.0])
@pytest.mark.parametrize("assign", ["lease", "static", "blocks"])
def test_losses_lose_time_and_no_clips(notice_s, assign):
    """Whatever is lost is made again: the run ends, time made is all the work, and paid time adds up."""
    fleet = {"nodes": 4, "rows": 400, "lease": 8, "between_losses_s": 1800.0, "notice_s": notice_s, "assign": assign}
    life = run(**fleet)
    assert life.num_losses > 0
    assert life.made_hours * 60 == pytest.approx(400.0)
    assert (life.lost_hours > 0) == (notice_s == 0.0)  # a minute's clip fits into the notice
    assert life.hours >= life.ideal_hours
    assert life.idle_hours >= -1e-9


def test_chunks_are_those_of_the_planner():
    """Chunks keep to the lease size, hold one class of clips each, and hold every row once."""
    fleet = MODEL.Fleet(rows=1000, lease=16, row_group=500, order="sorted")
    chunks = MODEL.cut_chunks(fleet, MODEL.random.Random(0))
    assert max(map(len, chunks)) == 16
    assert all(len(set(chunk)) == 1 for chunk in chunks)
    assert sorted(clip for chunk in chunks for clip in chunk) == [25.0] * 500 + [60.0] * 300 + [180.0] * 200


def test_the_bench_runs():
    """The bench runs tiny, ends with one line of JSON, no run beat its ideal, and the keys are frozen."""
    command = [sys.executable, str(SCRIPTS / "bench_fleet.py"), "--tiny"]
    body = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert (body["name"], body["ok"]) == ("fleet", True)
    assert set(body["ratios"]) == {
        "static_vs_lease_16_spot",
        "blocks_vs_lease_16_spot",
        "lease_64_vs_16_spot",
        "lease_16_vs_ideal_spot",
        "largest_fleet_64_vs_ideal",
        "largest_fleet_16_vs_ideal",
    }

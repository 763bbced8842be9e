"""The ledger of starts: what a run costs, and what a start learns from the end of the last one."""

import pytest

from batch_gen.environment import WorkerHint
from batch_gen.ledger import FRAMES_BUDGET_BYTES, Start, add_up, host_load, kills_before, read_starts
from batch_gen.storage.memory import MemoryStore

JOB = "11-22:3"


def start(attempt=1, **changes):
    """A start of the third child of a job."""
    facts = {"worker": f"w{attempt}", "job": JOB, "attempt": attempt, "host": "i-1", "price_per_hour": 36.0}
    return Start(**{**facts, **changes})


def store_of(*starts):
    """A store that holds these starts."""
    store = MemoryStore()
    for each in starts:
        store.put(each.key, each.to_bytes())
    return store


def test_the_parts_of_a_cost_are_the_whole():
    """Render, cold start, failed, duplicate and idle seconds add up to the machines', and so does the money."""
    one = start(num_replicas=2, lead_s=100, wall_s=1000, render_s=1200, cold_start_s=200, failed_s=100, duplicate_s=50)
    two = start(2, lead_s=10, wall_s=490, render_s=400, num_committed=5, video_s=25.0, exit_code=0, ended="finished")
    costs = add_up([one, two])
    assert costs.machine_s == {
        "render": 600 + 400, "cold_start": 100 + 100 + 10, "failed": 50, "duplicate": 25, "idle": 225 + 90,
    }  # fmt: skip
    assert costs.total_s == one.machine_s + two.machine_s == 1600
    assert costs.usd == pytest.approx(36.0 * 1600 / 3600)
    body = costs.to_json()
    assert body["usd_per_clip"] == pytest.approx(16.0 / 5)
    assert body["usd_per_video_s"] == pytest.approx(16.0 / 25)
    assert sum(body["usd_by_use"].values()) == pytest.approx(16.0, abs=0.01)
    assert (body["starts"], body["silent_starts"]) == (2, 1)


def test_a_price_may_be_given_later_and_one_missing_price_is_no_guess():
    """Without a price for every start there is no sum; a price of whoever asks counts for all."""
    starts = [start(wall_s=3600), start(2, wall_s=3600, price_per_hour=None)]
    assert add_up(starts).usd is None
    assert "--price-per-hour turns them into money" in add_up(starts).lines()[0]
    assert add_up(starts, 10.0).usd == 20.0
    assert add_up([]).lines() == []


@pytest.mark.parametrize(
    ("before", "kills"),
    [
        ([], 0),
        ([start(1)], 1),
        ([start(1, exit_code=75, ended="draining")], 0),
        ([start(1, host="i-9")], 0),
        ([start(1, host="i-9", memory_bytes=90, memory_limit_bytes=100)], 1),
        ([start(1), start(2)], 2),
        ([start(1), start(2, exit_code=75)], 0),
        ([start(1, exit_code=75), start(2)], 1),
    ],
)
def test_how_the_last_starts_ended(before, kills):
    """No word, on this machine or near the limit of memory: killed. A drain, or another machine lost: not."""
    attempt = len(before) + 1
    assert kills_before(store_of(*before), WorkerHint(3, 8, attempt, "", JOB), "i-1") == kills
    assert kills_before(store_of(*before), WorkerHint(attempt=attempt), "i-1") == 0


def test_each_kill_lowers_the_load():
    """Fewer clips and frames at once, engines one by one; bounded, and never below one clip."""
    loads = [host_load(kills) for kills in range(5)]
    assert [load.unfinished_per_replica for load in loads] == [2, 1, 1, 1, 1]
    assert [FRAMES_BUDGET_BYTES // load.frames_budget_bytes for load in loads] == [1, 2, 4, 4, 4]
    assert [load.one_by_one for load in loads] == [False, True, True, True, True]


def test_starts_are_read_whatever_lies_there():
    """A damaged file costs its own figures and nothing else."""
    store = store_of(start(1), start(2))
    store.put("workers/x.json", b"{")
    assert [each.attempt for each in read_starts(store)] == [1, 2]

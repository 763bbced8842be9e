"""Plans: every request once, no chunk across a border, rounds written once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_gen.chunks import ChunkRules, PlanRow, cut
from batch_gen.errors import ConfigError, ManifestError
from batch_gen.plan import PlanOptions, load_plan, plan_retry, plan_run
from batch_gen.storage.memory import MemoryStore
from tests.making import make_request, make_rows

row_shapes = st.tuples(
    st.integers(0, 3),  # row group
    st.sampled_from([(64, 48, 5), (48, 64, 5), (64, 48, 9)]),
    st.integers(-1, 1),  # priority
    st.sampled_from([1, 4, 40]),  # steps
)


def rows_of(shapes):
    """PlanRows in manifest order from drawn shapes."""
    return [
        PlanRow(make_request(f"c{n}", width=w, height=h, num_frames=f, priority=priority, steps=steps), "m", group, n)
        for n, (group, (w, h, f), priority, steps) in enumerate(sorted(shapes, key=lambda shape: shape[0]))
    ]


@given(
    shapes=st.lists(row_shapes, max_size=120),
    max_requests=st.none() | st.integers(1, 64),
    cost_per_s=st.none() | st.floats(0.01, 1e5),
)
@settings(max_examples=150, deadline=None)
def test_chunks_cover_every_request_once(shapes, max_requests, cost_per_s):
    """For any row groups, buckets and limits: each request in one chunk, none crosses a group or a bucket."""
    rows = rows_of(shapes)
    rules = ChunkRules(len(rows), max_requests, cost_per_s)
    chunks = list(cut(rows, rules))
    assert sorted(row.row for chunk in chunks for row in chunk) == list(range(len(rows)))
    for chunk in chunks:
        assert 1 <= len(chunk) <= min(64, rules.size)
        assert len({(row.source, row.row_group, row.request.bucket) for row in chunk}) == 1
        assert len(chunk) == 1 or sum(row.request.cost for row in chunk) <= rules.cost


@given(shapes=st.lists(row_shapes, min_size=1, max_size=60))
@settings(max_examples=25, deadline=None)
def test_plan_gives_back_every_request(shapes):
    """What a worker reads from a plan is what the manifest said, chunk by chunk."""
    rows = rows_of(shapes)
    store = MemoryStore()
    plan_run(store, lambda: rows, PlanOptions(max_requests=7))
    plan = load_plan(store)
    found = [request for chunk in plan.chunks for request in plan.requests(chunk)]
    assert sorted(found, key=lambda r: r.clip_id) == sorted((r.request for r in rows), key=lambda r: r.clip_id)
    for chunk in plan.chunks:
        requests = plan.requests(chunk)
        assert {str(request.bucket) for request in requests} == {chunk.bucket}
        assert chunk.cost == sum(request.cost for request in requests)
        assert chunk.priority == max(request.priority for request in requests)


@pytest.mark.parametrize(("num_clips", "size"), [(1, 1), (64, 1), (500, 8), (4096, 64), (1_000_000, 64)])
def test_small_runs_feed_many_workers(num_clips, size):
    """Chunks of a small run are small, so that a fleet is busy; a large run's hold 64."""
    assert ChunkRules(num_clips).size == size


def test_rate_ends_chunks_at_twenty_minutes():
    """With a known rate a chunk holds about twenty minutes of work, and a single long request its own chunk."""
    rows = make_rows(100)
    cost = rows[0].request.cost
    chunks = list(cut(rows, ChunkRules(10_000, cost_per_s=cost / 120)))
    assert [len(chunk) for chunk in chunks] == [10] * 10
    assert len(list(cut(rows, ChunkRules(10_000, cost_per_s=cost / 5000)))) == 100


def test_many_rows_are_read_by_chunk():
    """A plan longer than one write still finds every chunk's requests, in any order of reading."""
    rows = make_rows(9000, group_size=3000)
    store = MemoryStore()
    plan = plan_run(store, lambda: rows, PlanOptions())
    assert plan.num_clips == 9000
    for chunk in (plan.chunks[-1], plan.chunks[0], plan.chunks[70]):
        assert plan.requests(chunk)[0].clip_id == rows[chunk.start].request.clip_id
    assert plan.chunk("0-00001").start == 64
    assert plan.chunk("5-00001") is None


def test_racing_planners_agree():
    """Eight workers that plan at once end up with one plan of one round."""
    rows, store = make_rows(50), MemoryStore()
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda _: plan_run(store, lambda: rows, PlanOptions()), range(8)))
    assert {len(plan.rounds) for plan in plans} == {1}
    assert len({plan.rounds[0].head.sha256 for plan in plans}) == 1
    assert [entry.key for entry in store.list("plan-0.json")] == ["plan-0.json"]


def test_same_manifest_plans_nothing_new():
    """A resume reads the plan; the manifest's order does not matter, and with equal inputs it is not even read."""
    rows, store = make_rows(20), MemoryStore()
    plan_run(store, lambda: rows, PlanOptions(facts={"inputs": "sha-of-manifest"}))
    assert len(plan_run(store, lambda: rows[::-1], PlanOptions()).rounds) == 1

    def unread():
        raise AssertionError("the manifest was read")

    assert len(plan_run(store, unread, PlanOptions(facts={"inputs": "sha-of-manifest"})).rounds) == 1


def test_new_rows_add_a_round():
    """Rows added to the manifest are planned in a round of their own; rows that went missing stay as they are."""
    rows, store = make_rows(30), MemoryStore()
    plan_run(store, lambda: rows[:20], PlanOptions())
    plan = plan_run(store, lambda: rows[10:], PlanOptions())
    assert [r.head.num_clips for r in plan.rounds] == [20, 10]
    added = [r.clip_id for chunk in plan.rounds[1].chunks for r in plan.requests(chunk)]
    assert added == [row.request.clip_id for row in rows[20:]]
    assert plan.rounds[1].chunks[0].id == "1-00000"


def test_changed_request_is_an_error_of_its_row():
    """A known clip_id with another request stops the run with file, row and what changed."""
    rows, store = make_rows(5), MemoryStore()
    plan_run(store, lambda: rows, PlanOptions())
    changed = [*rows[:3], PlanRow(make_request("clip-00003", steps=9), "m.parquet", 0, 3), rows[4]]
    with pytest.raises(ManifestError, match="steps 4 -> 9") as caught:
        plan_run(store, lambda: changed, PlanOptions())
    assert (caught.value.faults[0].file, caught.value.faults[0].row) == ("m.parquet", 3)
    assert caught.value.exit_code == 2
    assert len(load_plan(store).rounds) == 1


def test_carried_columns_may_change():
    """What does not decide pixels may differ between manifest and plan."""
    rows, store = make_rows(3), MemoryStore()
    plan_run(store, lambda: rows, PlanOptions())
    changed = [PlanRow(make_request(r.request.clip_id, priority=5, extra={"tag": "x"}), "m", 0, r.row) for r in rows]
    assert len(plan_run(store, lambda: changed, PlanOptions()).rounds) == 1


def test_retry_plans_chosen_clips_again():
    """A retry is a round of its own with the requests of the first plan."""
    rows, store = make_rows(20), MemoryStore()
    plan = plan_run(store, lambda: rows, PlanOptions())
    head = plan_retry(store, plan, {"clip-00004", "clip-00011"}, PlanOptions())
    assert (head.round, head.reason, head.num_clips) == (1, "retry", 2)
    again = load_plan(store)
    assert [r for chunk in again.rounds[1].chunks for r in again.requests(chunk)] == [rows[4].request, rows[11].request]
    assert again.num_clips == 20
    with pytest.raises(ConfigError, match="no clip nope"):
        plan_retry(store, plan, {"nope"}, PlanOptions())


def test_workers_see_rounds_that_are_added():
    """A worker that loaded the plan earlier finds the new round by a refresh."""
    rows, store = make_rows(4), MemoryStore()
    early = plan_run(store, lambda: rows[:2], PlanOptions())
    plan_run(store, lambda: rows, PlanOptions())
    assert early.refresh(store)
    assert not early.refresh(store)
    assert early.chunk("1-00000") is not None


def test_damaged_table_is_refused():
    """A plan table whose bytes changed is never rendered from."""
    store = MemoryStore()
    plan = plan_run(store, lambda: make_rows(3), PlanOptions())
    store.put(plan.rounds[0].head.table, b"PAR1")
    with pytest.raises(ConfigError, match="SHA-256"):
        load_plan(store)


def test_empty_root_has_a_plan_without_rounds():
    """Nothing planned reads as nothing, so that status can say so."""
    assert load_plan(MemoryStore()).chunks == []

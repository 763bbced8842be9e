"""What a worker is told to do next, with time in the test's hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_gen.claims import Assignment, ClaimOptions, ClaimSource, Wait
from batch_gen.commit import commit_clip
from batch_gen.donelog import DoneLog
from batch_gen.errors import RunStopped, StoreError
from batch_gen.layout import lease_key, record_key
from batch_gen.lease import LostLease, read_lease
from batch_gen.plan import PlanOptions, load_plan, plan_retry, plan_run
from batch_gen.stop import retire_stop, stop_run
from batch_gen.storage.memory import MemoryStore
from tests.making import FakeClock, PlanRow, make_record, make_request, make_rows


class World:
    """One store, one clock, and workers that come and go."""

    def __init__(self, tmp_path, rows, *, chunk=4):
        self.store, self.clock, self.folder = MemoryStore(), FakeClock(), tmp_path
        self.ends = []
        self.plan = plan_run(self.store, lambda: rows, PlanOptions(max_requests=chunk))

    def worker(self, name="w1", store=None, **options):
        options = ClaimOptions(clock=self.clock, on_chunk_end=self.ends.append, **options)
        store = store or self.store
        return ClaimSource(store, load_plan(store), name, options)

    def commit(self, work, body=None):
        body = body or work.clip_id.encode()
        path = self.folder / "clip"
        path.write_bytes(body)
        return commit_clip(self.store, make_record(work.request, body, attempt=work.attempt), path).outcome

    def make(self, source, work):
        source.started(work.clip_id)
        source.committed(work.clip_id, self.commit(work))

    def run(self, source, bucket=None):
        """Work until there is nothing to do now; return the clips made and the last answer."""
        made = []
        while isinstance(work := source.next(bucket), Assignment):
            self.make(source, work)
            made.append(work.clip_id)
        return made, work


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, make_rows(10))


def test_one_worker_makes_everything_once(world):
    """A worker alone gets every clip once, finishes every chunk, and is told that it is done."""
    made, last = world.run(world.worker())
    assert sorted(made) == [f"clip-{n:05d}" for n in range(10)]
    assert last is None
    summary = world.worker().summary()
    assert (summary.num_committed, summary.quarantined) == (10, {})
    assert [end.finished for end in world.ends] == [True] * 3


def test_second_run_makes_nothing(world):
    """A resume of a finished run reads the done log, counts the records, and is done."""
    world.run(world.worker())
    assert world.run(world.worker("w2")) == ([], None)


def test_deleted_record_is_made_again(world):
    """A clip whose record is gone does not exist: the next run of a small manifest makes exactly that one."""
    world.run(world.worker())
    world.store.delete(record_key("clip-00003"))
    assert world.run(world.worker("w2")) == (["clip-00003"], None)
    assert world.run(world.worker("w3")) == ([], None)


def test_two_workers_share(world):
    """Two workers never get the same clip."""
    one, two = world.worker("one"), world.worker("two")
    first = [one.next(), two.next(), one.next(), two.next()]
    assert len({work.clip_id for work in first}) == 4
    assert {first[0].chunk} == {first[2].chunk} != {first[1].chunk}


def test_attempt_is_written_before_the_start(world):
    """When `started` returns, the store knows the attempt and all clips in flight."""
    source = world.worker()
    work, other = source.next(), source.next()
    source.started(work.clip_id)
    source.started(other.clip_id)
    body = read_lease(world.store, work.chunk).body
    assert body.attempts[work.clip_id].started == 1
    assert body.in_flight == (work.clip_id, other.clip_id)
    assert (work.attempt, work.epoch, work.begun_before) == (1, 1, False)


def test_resume_takes_up_an_unfinished_chunk(world):
    """A worker that died leaves its chunk to the next, who makes only what has no record."""
    dead = world.worker("dead")
    for _ in range(2):
        world.make(dead, dead.next())
    lost = dead.next()
    dead.started(lost.clip_id)
    heir = world.worker("heir")
    made, last = world.run(heir)
    assert len(made) == 6
    assert isinstance(last, Wait)
    world.clock.pass_s(211)
    made, last = world.run(heir)
    assert len(made) == 2
    assert last is None
    assert lost.clip_id in made
    assert world.worker().summary().num_committed == 10


def test_heir_knows_of_the_earlier_start(world):
    """The clip that was in flight at a death comes as a second attempt, alone, with a hint to look for its file."""
    dead = world.worker("dead")
    lost = dead.next()
    dead.started(lost.clip_id)
    heir = world.worker("heir")
    world.run(heir)
    world.clock.pass_s(211)
    work = None
    while work is None or work.clip_id != lost.clip_id:
        work = heir.next()
        if work.clip_id != lost.clip_id:
            world.make(heir, work)
    assert (work.attempt, work.epoch, work.alone, work.begun_before) == (2, 2, True, True)


def test_living_worker_is_not_robbed(world):
    """As long as a worker renews, nobody takes its chunk, however long a clip lasts."""
    slow, other = world.worker("slow"), world.worker("other")
    work = slow.next()
    slow.started(work.clip_id)
    made, _ = world.run(other)
    for _ in range(30):
        world.clock.pass_s(60)
        slow.heartbeat()
        slow.renew_due()
        assert slow.holds(work.clip_id)
        assert not isinstance(other.next(), Assignment)
    assert len(made) == 6


def test_silent_worker_is_not_renewed(world):
    """Without progress nothing is renewed, whatever threads are alive: a hung engine loses its chunk."""
    hung, other = world.worker("hung"), world.worker("other")
    work = hung.next()
    hung.started(work.clip_id)
    world.run(other)
    for _ in range(8):
        world.clock.pass_s(60)
        hung.renew_due()
        other.next()
    assert not hung.holds(work.clip_id)
    assert read_lease(world.store, work.chunk).body.worker == "other"


def test_sleeper_finds_its_clip_taken(world):
    """A worker that slept longer than its lease is told so at its next report, and harms nothing."""
    sleeper, other = world.worker("sleeper"), world.worker("other")
    work, later = sleeper.next(), sleeper.next()
    sleeper.started(work.clip_id)
    world.run(other)
    world.clock.pass_s(500)
    made, _ = world.run(other)
    assert work.clip_id in made
    assert not sleeper.holds(work.clip_id)
    assert sleeper.committed(work.clip_id, world.commit(work, b"other frames")) is False
    with pytest.raises(LostLease):
        sleeper.started(later.clip_id)
    assert world.store.get(f"{record_key(work.clip_id)}").body.count(b'"attempt": 2') == 1
    assert world.run(sleeper) == ([], None)


def test_late_duplicates_are_counted(tmp_path):
    """A second render with other frames is kept out and counted with the next chunk that its worker finishes."""
    world = World(tmp_path, make_rows(8))
    sleeper, other = world.worker("sleeper"), world.worker("other")
    work = sleeper.next()
    sleeper.started(work.clip_id)
    world.run(other)
    world.clock.pass_s(250)
    world.run(other)
    outcome = world.commit(work, b"other frames")
    sleeper.committed(work.clip_id, outcome)
    assert outcome == "nondeterministic_duplicate"
    world.plan = plan_run(world.store, lambda: make_rows(9), PlanOptions())
    world.run(sleeper)
    assert world.worker().summary().counts["nondeterministic_duplicate"] == 1


def test_failed_clip_comes_again_and_is_set_aside(world):
    """A clip that fails by itself twice is quarantined with its reason; the rest is made; the summary tells."""
    source, tries = world.worker(), 0
    while (work := source.next()) is not None:
        source.started(work.clip_id)
        if work.clip_id == "clip-00002":
            tries += 1
            source.failed(work.clip_id, "nonfinite", "the latents hold NaN")
        else:
            source.committed(work.clip_id, world.commit(work))
    summary = source.summary()
    assert (tries, summary.num_committed) == (2, 9)
    verdict = summary.quarantined["clip-00002"]
    assert (verdict.kind, verdict.retry_class, verdict.message) == ("nonfinite", "clip", "the latents hold NaN")
    assert any(end.verdicts.get("clip-00002") == verdict for end in world.ends)


def test_failures_survive_the_worker(world):
    """A verdict against a clip is in the store at once: the next worker does not start counting anew."""
    first = world.worker("first")
    work = first.next()
    first.started(work.clip_id)
    first.failed(work.clip_id, "nonfinite", "NaN")
    first.release()
    second = world.worker("second")
    verdict = None
    while (again := second.next()) is not None:
        second.started(again.clip_id)
        if again.clip_id == work.clip_id:
            verdict = second.failed(again.clip_id, "nonfinite", "NaN")
        else:
            second.committed(again.clip_id, world.commit(again))
    assert verdict.status == "quarantined"


def test_transient_failure_pauses(tmp_path):
    """After trouble with the store the clip waits, longer each time, and nothing else does."""
    world = World(tmp_path, make_rows(1))
    source = world.worker()
    for pause_s in (2.0, 4.0, 8.0):
        work = source.next()
        source.started(work.clip_id)
        source.failed(work.clip_id, "upload", "503")
        wait = source.next()
        assert isinstance(wait, Wait)
        assert wait.seconds <= pause_s
        world.clock.pass_s(pause_s)
    work = source.next()
    source.started(work.clip_id)
    assert source.failed(work.clip_id, "upload", "503").kind == "upload"
    assert source.next() is None


def kill(world, poison, name, max_rounds=50):
    """Workers that die at the poison clip until the run is finished; returns (workers, clips that were in flight)."""
    for number in range(max_rounds):
        source = world.worker(f"{name}{number}")
        while True:
            work = source.next()
            if work is None:
                return number + 1
            if isinstance(work, Wait):
                world.clock.pass_s(work.seconds)
                continue
            second = source.next() if not work.alone else None
            flying = [w for w in (work, second) if isinstance(w, Assignment)]
            for each in flying:
                source.started(each.clip_id)
            if any(each.clip_id == poison for each in flying):
                break
            for each in flying:
                source.committed(each.clip_id, world.commit(each))
    raise AssertionError("the run never ended")


def test_poison_clip_is_found_among_innocent_neighbours(world):
    """A clip that kills its worker dies three times alone and is set aside; its neighbours are all made."""
    kill(world, "clip-00005", "victim")
    summary = world.worker().summary()
    assert summary.num_committed == 9
    assert set(summary.quarantined) == {"clip-00005"}
    assert summary.quarantined["clip-00005"].kind == "engine_died"


def test_alone_means_alone(world):
    """While a suspected clip runs, no other clip is handed out, from no chunk."""
    dead = world.worker("dead")
    for _ in range(2):
        dead.started(dead.next().clip_id)
    heir = world.worker("heir")
    world.run(heir)
    world.clock.pass_s(211)
    normal = [heir.next(), heir.next()]
    for work in normal:
        heir.started(work.clip_id)
    assert not any(work.alone for work in normal)
    assert isinstance(heir.next(), Wait)
    for work in normal:
        heir.committed(work.clip_id, world.commit(work))
    alone = heir.next()
    assert alone.alone
    assert isinstance(heir.next(), Wait)
    heir.started(alone.clip_id)
    heir.committed(alone.clip_id, world.commit(alone))
    assert heir.next().alone


def test_engine_death_in_company_is_not_counted(world):
    """An engine that dies while other clips are in flight makes its clip a suspect, no more."""
    source = world.worker()
    work, other = source.next(), source.next()
    for each in (work, other):
        source.started(each.clip_id)
    source.failed(work.clip_id, "engine_died", "signal 9")
    attempts = read_lease(world.store, work.chunk).body.attempts[work.clip_id]
    assert (attempts.died, attempts.alone) == (0, True)


def test_loaded_bucket_is_preferred(tmp_path):
    """A worker gets clips of the shape that it has compiled while there are any, then the others."""
    rows = [PlanRow(make_request(f"c{n}", width=64 if n % 2 else 80), "m", 0, n) for n in range(12)]
    world = World(tmp_path, rows, chunk=2)
    made, _ = world.run(world.worker(), bucket="64x48x5-text")
    assert [int(clip[1:]) % 2 for clip in made] == [1] * 6 + [0] * 6


def test_priority_then_cost_order_the_claims(tmp_path):
    """Urgent chunks go first, then the most expensive, so that the tail is short."""
    rows = [
        PlanRow(make_request("cheap", steps=1), "m", 0, 0),
        PlanRow(make_request("dear", steps=50), "m", 1, 1),
        PlanRow(make_request("urgent", steps=2, priority=9), "m", 2, 2),
    ]
    world = World(tmp_path, rows, chunk=1)
    assert world.run(world.worker())[0] == ["urgent", "dear", "cheap"]


def test_release_frees_the_chunk_at_once(world):
    """After a drain another worker goes on without waiting, and nothing counts against the clip that was given up."""
    source = world.worker("drained")
    work = source.next()
    source.started(work.clip_id)
    source.release()
    assert read_lease(world.store, work.chunk).body.owner is None
    assert [end.finished for end in world.ends] == [False]
    made, last = world.run(world.worker("next"))
    assert len(made) == 10
    assert last is None


def test_stop_file_stops_every_worker(world):
    """stop.json ends the loop of every worker with exit code 4; retired, the run goes on."""
    source = world.worker()
    world.make(source, source.next())
    stop_run(world.store, "cancel", "by hand")
    with pytest.raises(RunStopped, match="by hand") as caught:
        source.next()
    assert caught.value.exit_code == 4
    assert retire_stop(world.store).reason == "cancel"
    assert isinstance(source.next(), Assignment)


def test_run_that_only_fails_is_stopped(world):
    """When the first clips all fail the worker stops the run for all, with the reason."""
    source = world.worker()
    for _ in range(5):
        work = source.next()
        source.started(work.clip_id)
        source.failed(work.clip_id, "input", "no such image")
    with pytest.raises(RunStopped, match="first 5 clips"):
        source.next()


def test_static_shards_cover_everything_without_overlap(tmp_path):
    """With --assign static each worker takes its chunks only, and the shards together make every clip."""
    world = World(tmp_path, make_rows(40), chunk=2)
    made = [world.run(world.worker(f"w{i}", shard=(i, 3))) for i in range(3)]
    assert all(last is None for _, last in made)
    assert sorted(clip for clips, _ in made for clip in clips) == [f"clip-{n:05d}" for n in range(40)]


def test_static_worker_takes_its_own_leases_over_at_once(tmp_path):
    """A restarted static worker need not wait for the lease of its former self."""
    world = World(tmp_path, make_rows(4), chunk=4)
    dead = world.worker("before", shard=(0, 1))
    dead.started(dead.next().clip_id)
    assert len(world.run(world.worker("after", shard=(0, 1)))[0]) == 4


def test_idle_worker_leaves_when_the_rest_is_in_good_hands(world):
    """A worker without work stays until every other owner has shown that it lives, then goes."""
    busy, idle = world.worker("busy"), world.worker("idle")
    work = busy.next()
    busy.started(work.clip_id)
    world.run(idle)
    waited = 0.0
    while (answer := idle.next()) is not None:
        assert isinstance(answer, Wait)
        world.clock.pass_s(answer.seconds)
        waited += answer.seconds
        busy.heartbeat()
        busy.renew_due()
    assert 210 <= waited < 400
    assert idle.num_unfinished() == 1


def test_idle_worker_inherits_from_the_dead(world):
    """A worker without work that sees a lease stand still stays, and takes the chunk over."""
    dead, idle = world.worker("dead"), world.worker("idle")
    dead.started(dead.next().clip_id)
    world.run(idle)
    answer = idle.next()
    while isinstance(answer, Wait):
        world.clock.pass_s(answer.seconds)
        answer = idle.next()
    assert isinstance(answer, Assignment)


def test_rows_added_while_running_are_seen(world):
    """A round that is planned while a worker runs is worked on by it."""
    source = world.worker()
    world.run(source)
    plan_run(world.store, lambda: make_rows(13), PlanOptions())
    assert isinstance(source.next(), Wait)
    made, last = world.run(source)
    assert sorted(made) == ["clip-00010", "clip-00011", "clip-00012"]
    assert last is None


def test_retry_round_makes_quarantined_clips_again(world):
    """A retry gives a clip fresh budgets; made, it is quarantined no longer."""
    source = world.worker()
    while (work := source.next()) is not None:
        source.started(work.clip_id)
        if work.clip_id == "clip-00001":
            source.failed(work.clip_id, "input", "no image")
        else:
            source.committed(work.clip_id, world.commit(work))
    plan_retry(world.store, load_plan(world.store), {"clip-00001"}, PlanOptions())
    assert world.run(world.worker("again")) == (["clip-00001"], None)
    summary = world.worker().summary()
    assert (summary.num_committed, summary.quarantined) == (10, {})


class Flaky(MemoryStore):
    """Fails every call while `away`."""

    away = False

    def __getattribute__(self, name):
        if name in {"get", "head", "create", "replace", "list"} and object.__getattribute__(self, "away"):
            raise StoreError("away")
        return object.__getattribute__(self, name)


def test_store_outage_is_waited_out(tmp_path):
    """A store that is away for a while costs time only; one that stays away ends the worker with its error."""
    world = World(tmp_path, make_rows(3))
    flaky = Flaky()
    flaky._entries = world.store._entries
    source = world.worker(store=flaky)
    world.make(source, source.next())
    flaky.away = True
    assert isinstance(source.next(), Wait)
    world.clock.pass_s(100)
    assert isinstance(source.next(), Wait)
    flaky.away = False
    assert isinstance(source.next(), Assignment)
    flaky.away = True
    source.next()
    world.clock.pass_s(301)
    with pytest.raises(StoreError):
        source.next()


def test_chunk_end_is_tried_again(world):
    """When the last objects of a chunk cannot be written the chunk stays ours and is finished at the next call."""
    calls = []

    def fails_once(end):
        calls.append(end.chunk)
        if len(calls) == 1:
            raise StoreError("away")

    options = ClaimOptions(clock=world.clock, on_chunk_end=fails_once)
    source = ClaimSource(world.store, load_plan(world.store), "w1", options)
    made, last = world.run(source)
    assert len(made) == 10
    assert last is None
    assert calls.count(calls[0]) == 2


def test_parts_tell_what_earlier_owners_committed(world):
    """The owner that finishes a chunk is told which clips were committed before it, so that its parts hold all."""
    first = world.worker("first")
    work = first.next()
    world.make(first, work)
    first.release()
    world.run(world.worker("second"))
    end = next(end for end in world.ends if end.chunk == work.chunk and end.finished)
    assert end.inherited == {work.clip_id}
    assert set(end.verdicts) == set(end.requests)
    assert end.epoch == 2


def test_death_between_last_commit_and_done_costs_no_render(world):
    """A chunk whose clips are all committed is only finished by its heir."""
    dead = world.worker("dead")
    for _ in range(4):
        work = dead.next()
        dead.started(work.clip_id)
        world.commit(work)
    made, _ = world.run(world.worker("heir"))
    world.clock.pass_s(300)
    heir = world.worker("heir2")
    heir.next()
    world.clock.pass_s(300)
    assert world.run(heir)[0] == []
    assert len(made) == 6
    assert world.worker().summary().num_committed == 10


def test_leases_of_two_chunks_never_show_a_clip_alone_that_is_not(tmp_path):
    """When a worker has clips of two chunks in flight, each lease names both: no false single suspect."""
    world = World(tmp_path, make_rows(2), chunk=1)
    source = world.worker()
    one, two = source.next(), source.next()
    source.started(one.clip_id)
    source.started(two.clip_id)
    for work in (one, two):
        assert set(read_lease(world.store, work.chunk).body.in_flight) == {one.clip_id, two.clip_id}


def test_lease_that_vanished_is_claimed_anew(world):
    """Old leases may be expired by a rule of the bucket; the chunk is simply claimed again."""
    source = world.worker()
    work = source.next()
    source.release()
    world.store.delete(lease_key(work.chunk))
    assert len(world.run(world.worker("next"))[0]) == 10


def test_summary_needs_no_plan(world):
    """The done log alone tells how the run ended."""
    world.run(world.worker())
    log = DoneLog(world.store)
    log.refresh()
    assert log.tally().num_committed == 10


def test_thread_renews_and_ends(world):
    """As a context manager the source renews by a thread that ends with it."""
    with world.worker() as source:
        assert isinstance(source.next(), Assignment)
        thread = source._thread
        assert thread.is_alive()
    assert not thread.is_alive()


def test_options_are_plain_values():
    """Options can be changed field by field for tests and profiles."""
    assert replace(ClaimOptions(), ttl_s=5.0).ttl_s == 5.0

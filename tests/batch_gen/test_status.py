"""status, verify, repair, retry and clean: what can be said of a run from its output root, and mended there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from batch_gen.claims import Assignment, ClaimOptions, ClaimSource
from batch_gen.clean import clean
from batch_gen.commands import care
from batch_gen.commit import commit_clip, load_record
from batch_gen.donelog import DoneLog
from batch_gen.errors import ClipFailed, ConfigError, UsageError
from batch_gen.layout import STOP_KEY, clip_key, done_key, latents_key, lease_key, record_key
from batch_gen.plan import PlanOptions, load_plan, plan_run
from batch_gen.repair import repair
from batch_gen.retry import Choice, retry
from batch_gen.runfile import new_run, open_run
from batch_gen.status import clip_story, run_status
from batch_gen.stop import stop_run
from batch_gen.storage.base import StoreOptions
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from batch_gen.verify_run import verify_run
from tests.making import FakeClock, make_record, make_rows

RUN = new_run({"model": "m"}, created="2026-01-01T00:00:00.000Z")


class Root:
    """An output root with a run of ten clips in three chunks."""

    def __init__(self, tmp_path, store=None):
        self.store, self.clock, self.path = store or MemoryStore(), FakeClock(), tmp_path / "clip"
        open_run(self.store, RUN)
        plan_run(self.store, lambda: make_rows(10), PlanOptions(max_requests=4))

    def worker(self, name="w1"):
        return ClaimSource(self.store, load_plan(self.store), name, ClaimOptions(clock=self.clock))

    def make(self, source, work):
        source.started(work.clip_id)
        body = work.clip_id.encode()
        self.path.write_bytes(body)
        record = make_record(work.request, body, fingerprint=RUN.fingerprint, attempt=work.attempt)
        self.clock.pass_s(10)
        source.committed(work.clip_id, commit_clip(self.store, record, self.path).outcome)

    def run(self, bad=(), name="w1"):
        source, made = self.worker(name), []
        while isinstance(work := source.next(), Assignment):
            if work.clip_id in bad:
                source.started(work.clip_id)
                source.failed(work.clip_id, bad[work.clip_id], "why")
            else:
                self.make(source, work)
                made.append(work.clip_id)
        return made


@pytest.fixture(params=["memory", "folder"])
def root(request, tmp_path):
    folder = FolderStore(tmp_path / "out", StoreOptions(durable=False))
    return Root(tmp_path, folder if request.param == "folder" else None)


def test_status_of_a_finished_run(root):
    """A finished run shows its counts, who was set aside and why, and that nothing remains."""
    root.run(bad={"clip-00002": "input"})
    status = run_status(root.store)
    assert (status.num_clips, status.num_committed, status.num_remaining) == (10, 9, 0)
    assert status.is_finished
    assert status.eta_s == 0.0
    assert status.quarantined["clip-00002"].retry_class == "input"
    assert status.waste["failed"] == 1
    assert status.to_json()["quarantined"]["clip-00002"]["kind"] == "input"


def test_status_of_a_run_under_way(root):
    """Clips of unfinished chunks count by their leases, which are shown with owner, age and what is in flight."""
    source = root.worker()
    for _ in range(5):
        root.make(source, source.next())
    flying = source.next()
    source.started(flying.clip_id)
    status = run_status(root.store, now=datetime.now(UTC) + timedelta(seconds=60))
    assert (status.num_committed, status.num_remaining, status.num_finished_chunks) == (5, 5, 1)
    (lease,) = status.leases
    assert (lease.state, lease.worker, lease.in_flight) == ("working", "w1", (flying.clip_id,))
    assert lease.age_s == pytest.approx(60, abs=30)
    later = run_status(root.store, now=datetime.now(UTC) + timedelta(seconds=1000))
    assert later.leases[0].state == "silent"
    source.release()
    assert run_status(root.store).leases[0].state == "free"


def test_status_knows_slow_workers(tmp_path):
    """A worker whose pace is far below the others' is named."""
    root = Root(tmp_path)
    plan_run(root.store, lambda: make_rows(60), PlanOptions(max_requests=4))
    sources = {name: root.worker(name) for name in ("fast", "quick", "slow")}
    for _ in range(20):
        for name, source in sources.items():
            root.clock.pass_s(100 if name == "slow" else 0)
            work = source.next()
            if isinstance(work, Assignment):
                source.heartbeat()
                root.make(source, work)
    paces = {worker.name: worker for worker in run_status(root.store).workers}
    assert paces["fast"].num_chunks >= 3
    assert {name for name, worker in paces.items() if worker.slow} <= {"slow"}


def test_status_says_that_a_run_was_stopped(root):
    """A stopped run says why."""
    stop_run(root.store, "cancel", "by hand")
    assert run_status(root.store).stopped == "cancel: by hand"


def test_status_of_nothing_is_an_error(tmp_path):
    """A folder without a run is named, with what to do."""
    with pytest.raises(ConfigError, match=r"no run\.json"):
        run_status(FolderStore(tmp_path))


def test_story_of_a_clip(root):
    """One clip's row, attempts, verdict and record in one answer."""
    root.run(bad={"clip-00002": "input"})
    story = clip_story(root.store, "clip-00002")
    assert (story["rounds"][0]["source"], story["rounds"][0]["row"]) == ("m.parquet", 2)
    assert story["rounds"][0]["attempts"]["failed"] == 1
    assert story["rounds"][0]["verdict"]["kind"] == "input"
    assert story["record"] is None
    assert clip_story(root.store, "clip-00003")["record"]["clip_id"] == "clip-00003"
    with pytest.raises(ConfigError, match="no clip nope"):
        clip_story(root.store, "nope")


def test_verify_of_a_good_run(root):
    """A whole run has no problems; every clip is accounted for."""
    root.run(bad={"clip-00002": "input"})
    report = verify_run(root.store)
    assert report.ok
    assert (report.num_committed, report.num_quarantined, report.num_pending) == (9, 1, 0)
    assert report.num_bytes == 9 * len("clip-00000")


def test_verify_of_a_run_under_way(root):
    """What is not made yet is pending, no fault."""
    source = root.worker()
    for _ in range(5):
        root.make(source, source.next())
    report = verify_run(root.store)
    assert report.ok
    assert (report.num_committed, report.num_pending) == (5, 5)


def spoil_record(store):
    store.put(record_key("clip-00001"), b"{}")


def lose_record(store):
    store.delete(record_key("clip-00001"))


def lose_file(store):
    store.delete(clip_key("clip-00001", ".mp4"))


def spoil_file(store):
    store.put(clip_key("clip-00001", ".mp4"), b"clip-0000X")


def lose_done(store):
    for chunk in load_plan(store).chunks:
        store.delete(done_key(chunk.id))


def swap_record(store):
    record = load_record(store, "clip-00001")
    store.put(record_key("clip-00001"), record.model_copy(update={"request_digest": "other"}).to_bytes())


def add_stranger(store):
    store.create("clips/00/holiday.mp4", b"beach")


DAMAGES = [
    (spoil_record, {"damaged_record"}, 1),
    (lose_record, {"missing_record"}, 1),
    (lose_file, {"missing_file"}, 1),
    (spoil_file, {"damaged_file"}, 1),
    (swap_record, {"wrong_request"}, 1),
    (add_stranger, {"unknown_key"}, 0),
    (lose_done, {"unlogged_chunk"}, 0),
]


@pytest.mark.parametrize(("damage", "kinds", "num_made"), DAMAGES, ids=lambda v: getattr(v, "__name__", ""))
def test_damage_is_found_and_mended(root, damage, kinds, num_made):
    """Each kind of damage is named with its key; after a repair the next run makes what is missing and all is well."""
    root.run()
    damage(root.store)
    report = verify_run(root.store)
    assert {problem.kind for problem in report.problems} == kinds
    assert not report.ok
    assert repair(root.store, report.problems) != []
    made = root.run(name="w2")
    assert len(made) == num_made
    assert verify_run(root.store).problems == ()
    log = DoneLog(root.store)
    log.refresh()
    assert log.tally().num_committed == 10


@pytest.mark.parametrize("damage", [damage for damage, *_ in DAMAGES], ids=lambda v: v.__name__)
def test_fix_is_exit_0_when_everything_is_mended(root, monkeypatch, damage):
    """`verify --fix` looks again after mending; what it could mend is no failure."""
    root.run()
    damage(root.store)
    monkeypatch.setattr(care, "open_store", lambda *_: root.store)
    assert care.verify_out("here", {}, deep=False, fix=False, as_json=False) == 5
    assert care.verify_out("here", {}, deep=False, fix=True, as_json=False) == 0


def test_fix_is_exit_5_when_something_stays_wrong(root, monkeypatch, capsys):
    """What could not be mended is exit 5 and named, as without --fix."""
    root.run()
    lose_file(root.store)
    monkeypatch.setattr(care, "open_store", lambda *_: root.store)
    monkeypatch.setattr(care, "repair", lambda *_: [])
    assert care.verify_out("here", {}, deep=False, fix=True, as_json=False) == 5
    assert "1 problems cannot be mended, first missing_file" in capsys.readouterr().out


def test_foreign_file_in_the_way_is_set_aside(root):
    """A file that blocks a clip's key is moved aside, kept, and the clip can be made."""
    key = clip_key("clip-00001", ".mp4")
    root.store.create(key, b"a holiday video")
    report = verify_run(root.store)
    assert [(problem.kind, problem.clip_id) for problem in report.problems] == [("foreign_file", "clip-00001")]
    repair(root.store, report.problems)
    assert root.store.get(f"aside/{key}").body == b"a holiday video"
    assert "clip-00001" in root.run()


def test_deep_check_is_called_for_each_file(root):
    """The deep check sees every committed file; what it refuses is a problem."""
    root.run()
    seen = []

    def deep(record, path):
        seen.append(path.read_bytes().decode())
        if record.clip_id == "clip-00004":
            raise ClipFailed("verify", "too short")

    report = verify_run(root.store, deep)
    assert sorted(seen) == [f"clip-{n:05d}" for n in range(10)]
    assert [(problem.kind, problem.message) for problem in report.problems] == [("undecodable", "too short")]


def test_retry_of_everything_quarantined(root):
    """A retry plans the quarantined clips anew and retires the stop; run makes them and nobody is set aside any more."""
    root.run(bad={"clip-00002": "input", "clip-00007": "flat"})
    stop_run(root.store, "error_budget", "too many")
    head = retry(root.store, Choice())
    assert (head.num_clips, head.reason) == (2, "retry")
    assert root.store.get(STOP_KEY) is None
    assert sorted(root.run(name="w2")) == ["clip-00002", "clip-00007"]
    assert run_status(root.store).quarantined == {}
    assert run_status(root.store).num_committed == 10
    assert verify_run(root.store).ok


def test_retry_by_class_and_by_name(root):
    """Only clips of the chosen class, or only those named, come again."""
    root.run(bad={"clip-00002": "input", "clip-00007": "flat"})
    assert retry(root.store, Choice(errors=frozenset({"clip"}))).num_clips == 1
    assert root.run(name="w2") == ["clip-00007"]
    assert retry(root.store, Choice(clip_ids=frozenset({"clip-00002"}))).num_clips == 1
    assert root.run(name="w3") == ["clip-00002"]


def test_retry_refuses_what_makes_no_sense(root):
    """Nothing quarantined, a committed clip, one that is planned again already, an unknown class: each says so."""
    root.run(bad={"clip-00002": "input"})
    with pytest.raises(ConfigError, match="clip-00003 is not quarantined"):
        retry(root.store, Choice(clip_ids=frozenset({"clip-00003"})))
    with pytest.raises(ConfigError, match="matches"):
        retry(root.store, Choice(errors=frozenset({"hang"})))
    retry(root.store, Choice())
    with pytest.raises(ConfigError, match="planned again already"):
        retry(root.store, Choice(clip_ids=frozenset({"clip-00002"})))
    assert run_status(root.store).quarantined == {}
    with pytest.raises(UsageError, match="no retry class"):
        Choice(errors=frozenset({"bad luck"}))


def test_clip_that_fails_again_is_quarantined_again(root):
    """A retry that fails leaves the clip set aside, and it can be tried once more."""
    root.run(bad={"clip-00002": "input"})
    retry(root.store, Choice())
    assert root.run(bad={"clip-00002": "input"}, name="w2") == []
    assert set(run_status(root.store).quarantined) == {"clip-00002"}
    retry(root.store, Choice())
    assert root.run(name="w3") == ["clip-00002"]
    assert verify_run(root.store).ok


def test_clean_removes_only_what_nobody_needs(root):
    """Latents of committed clips and leases of finished chunks go; clips, records, plan and done log stay."""
    source = root.worker()
    for _ in range(5):
        root.make(source, source.next())
    flying = source.next()
    source.started(flying.clip_id)
    made = next(f"clip-{n:05d}" for n in range(10) if root.store.head(record_key(f"clip-{n:05d}")))
    root.store.create(latents_key(made), b"x" * 100)
    root.store.create(latents_key(flying.clip_id), b"x")
    finished = next(chunk.id for chunk in load_plan(root.store).chunks if root.store.head(done_key(chunk.id)))
    would = clean(root.store, dry_run=True)
    assert clean(root.store).keys == would.keys
    assert set(would.keys) == {lease_key(finished), latents_key(made)}
    assert verify_run(root.store).num_committed == 5
    root.make(source, flying)
    source.release()
    assert len(root.run(name="w2")) == 4

"""A worker that dies before or after any single store call: the next one always completes the run."""

from __future__ import annotations

import itertools

import pytest

from batch_gen.claims import ClaimOptions, ClaimSource, Wait
from batch_gen.commit import adopt_orphan, commit_clip
from batch_gen.layout import metrics_key
from batch_gen.plan import PlanOptions, load_plan, plan_run
from batch_gen.runfile import new_run, open_run
from batch_gen.storage.base import AlreadyExists
from batch_gen.storage.memory import MemoryStore
from tests.chaos.checks import check_finished
from tests.chaos.worker import body_of
from tests.making import FakeClock, make_record, make_rows

METHODS = {"get", "head", "download", "create", "replace", "put", "list", "delete"}
ROWS = make_rows(5)
CLIPS = [row.request.clip_id for row in ROWS]


class Crash(BaseException):
    """The process is gone."""


class CrashingStore:
    """Passes calls on until call number `at`, and dies before it or right after it."""

    def __init__(self, inner, at: int, *, after: bool) -> None:
        self._inner, self._at, self._after = inner, at, after
        self._numbers = itertools.count()
        self.crashed = False

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if name not in METHODS:
            return value

        def call(*args, **kwargs):
            number = next(self._numbers)
            if self.crashed or (number >= self._at and not self._after):
                self.crashed = True
                raise Crash
            result = value(*args, **kwargs)
            if number >= self._at:
                self.crashed = True
                raise Crash
            return result

        return call


def life_of_a_worker(store, clock, path, name="w") -> None:
    """Everything that a worker does to a store, from the first call to the last."""
    open_run(store, new_run({"model": "m"}))
    plan_run(store, lambda: ROWS, PlanOptions(max_requests=2))

    def parts(end):
        try:
            store.create(metrics_key(end.chunk, end.epoch), b"part")
        except AlreadyExists:
            return

    source = ClaimSource(store, load_plan(store), name, ClaimOptions(clock=clock, on_chunk_end=parts))
    while (work := source.next()) is not None:
        if isinstance(work, Wait):
            clock.pass_s(work.seconds)
            continue
        source.started(work.clip_id)
        body = body_of(work.clip_id)
        record = make_record(work.request, body, attempt=work.attempt)
        outcome = "committed"
        if not (work.begun_before and adopt_orphan(store, work.request, ".mp4", record)):
            path.write_bytes(body)
            outcome = commit_clip(store, record, path).outcome
        source.committed(work.clip_id, outcome)
    source.summary()


def num_calls(tmp_path) -> int:
    """Store calls of an undisturbed run."""
    store = CrashingStore(MemoryStore(), 10**9, after=False)
    life_of_a_worker(store, FakeClock(), tmp_path / "clip")
    return next(store._numbers)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_every_store_call(tmp_path, after):
    """For each call n: a worker dies there, another one finishes, and the run is whole, with the same files."""
    total = num_calls(tmp_path)
    assert total > 40
    for at in range(total):
        inner, clock = MemoryStore(), FakeClock()
        with pytest.raises(Crash):
            life_of_a_worker(CrashingStore(inner, at, after=after), clock, tmp_path / "clip", "dies")
        life_of_a_worker(inner, clock, tmp_path / "clip", "heir")
        check_finished(inner, CLIPS)


def test_death_of_heirs_too(tmp_path):
    """Workers that all die after a few more calls still finish the run between them, and blame no clip."""
    inner, clock = MemoryStore(), FakeClock()
    for number in range(60):
        try:
            life_of_a_worker(
                CrashingStore(inner, 25 + 9 * number, after=number % 2 == 0), clock, tmp_path / "clip", f"w{number}"
            )
        except Crash:
            clock.pass_s(1)
        else:
            break
    check_finished(inner, CLIPS)

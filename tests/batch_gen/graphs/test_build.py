"""Who builds a key: one worker, while the others wait; and what a rehearsal runs."""

import itertools
import threading

import pytest

from batch_gen.engine import Done, Step
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.graphs.artefact import GraphSet, get_document
from batch_gen.graphs.build import Wanted, Yard, build, build_all, rehearse
from batch_gen.graphs.keys import Variant
from batch_gen.images import ImageReader
from batch_gen.lease import Owner, claim, read_lease
from batch_gen.storage.base import StoreOptions
from batch_gen.storage.memory import MemoryStore
from tests.making import make_request

REQUEST = make_request(steps=4)
WANTED = Wanted(Variant(REQUEST.bucket, guided=True), {"bucket": str(REQUEST.bucket)}, (REQUEST,))


def yard(store, tmp_path, name="a", start=None, **owner):
    """A worker that builds with a fake engine, whose compiler leaves one file."""

    def compile_one(cache):
        (cache / "kernel.so").write_bytes(b"code")
        return FakeEngine(FakeOptions())

    reader = ImageReader(None, StoreOptions())
    who = Owner(name, name, **owner)
    return Yard(store, who, start or compile_one, reader, "crop", tmp_path, {"torch": "2.13.0"}, poll_s=0.01)


def never(_cache):
    """An engine that must not be started."""
    raise AssertionError("this worker was not to build")


def test_a_key_is_built_once_and_found_afterwards(tmp_path):
    """The first worker builds and releases its lease; the next finds the artefact; both name the same set."""
    store, told = MemoryStore(), []
    first = build_all(yard(store, tmp_path), [WANTED], told.append)
    second = build_all(yard(store, tmp_path, "b", never), [WANTED], told.append)
    assert [built.status for built in told] == ["built", "found"]
    assert first == second
    assert get_document(store, "sets", first, GraphSet).artefacts == {WANTED.key: told[0].artefact}
    assert read_lease(store, WANTED.key).body.owner is None
    assert list(tmp_path.iterdir()) == []


def test_others_wait_while_one_builds(tmp_path):
    """A second worker that comes during the build starts no engine; it gets the first one's artefact."""
    store = MemoryStore()
    building, looked, results = threading.Event(), threading.Event(), {}
    ticks = itertools.count()

    def slowly(cache):
        (cache / "kernel.so").write_bytes(b"code")
        building.set()
        assert looked.wait(30.0)
        return FakeEngine(FakeOptions())

    def clock():
        if building.is_set() and next(ticks) > 3:  # the waiting worker has looked at the lease more than once
            looked.set()
        return 0.0

    def work(name, place):
        results[name] = build(place, WANTED)

    one = threading.Thread(target=work, args=("one", yard(store, tmp_path, "one", slowly)))
    one.start()
    assert building.wait(30.0)
    two = threading.Thread(target=work, args=("two", yard(store, tmp_path, "two", never, clock=clock)))
    two.start()
    one.join(30.0)
    two.join(30.0)
    assert (results["one"].status, results["two"].status) == ("built", "found")
    assert results["one"].artefact == results["two"].artefact


def test_a_dead_builder_is_replaced(tmp_path):
    """A lease that nobody renews goes stale, and the next worker builds."""
    store = MemoryStore()
    claim(store, Owner("dead", "dead", ttl_s=10.0, grace_s=1.0), WANTED.key)
    minutes = itertools.count(step=60)
    built = build(yard(store, tmp_path, "heir", ttl_s=10_000.0, clock=lambda: float(next(minutes))), WANTED)
    assert built.status == "built"
    assert read_lease(store, WANTED.key).body.epoch == 2


def test_a_failed_build_leaves_no_artefact(tmp_path):
    """An engine that dies while it compiles leaves lease and folder free for the next one."""
    store = MemoryStore()

    def broken(_cache):
        raise RuntimeError("compiler error")

    with pytest.raises(RuntimeError, match="compiler error"):
        build(yard(store, tmp_path, "a", broken), WANTED)
    assert store.get(f"keys/{WANTED.key}.json") is None
    assert list(tmp_path.iterdir()) == []
    assert build(yard(store, tmp_path, "b"), WANTED).status == "built"


@pytest.mark.parametrize("steps", [1, 4, 200])
def test_a_rehearsal_runs_both_ends_of_a_clip(steps):
    """Whatever a clip's own steps are, its first two and last two of a full schedule run, then all frames."""
    engine = Listening(FakeOptions())
    rehearse(engine, make_request(steps=steps), ())
    total = max(steps, 40)
    assert engine.seen == [1, 2, total - 1, total]
    assert engine.decoded


class Listening(FakeEngine):
    """A fake engine that notes which steps ran."""

    def __init__(self, options):
        super().__init__(options)
        self.seen, self.decoded = [], False

    def denoise(self, request, text, options):
        """Steps as they are told."""
        for event in super().denoise(request, text, options):
            if isinstance(event, Step):
                self.seen.append(event.index)
            yield event

    def decode(self, request, latents):
        """Whether the end was reached."""
        for event in super().decode(request, latents):
            self.decoded = self.decoded or isinstance(event, Done)
            yield event

"""Who a start is, how much it may hold at once, and what it says when it ends early."""

import threading

import pytest

from batch_gen.config import load_preset, resolve
from batch_gen.errors import EnvironmentFault
from batch_gen.ledger import Start, read_starts
from batch_gen.presence import begin, last_words, machine, one_at_a_time, run_name
from batch_gen.storage.memory import MemoryStore

FAULT = EnvironmentFault("--device neuron: no Neuron devices in this container\nmore")


@pytest.fixture
def child(monkeypatch):
    """The environment of the second start of an array's third child."""
    names = {"AWS_BATCH_JOB_ID": "j:2", "AWS_BATCH_JOB_ARRAY_INDEX": "2", "AWS_BATCH_JOB_ATTEMPT": "2"}
    for name, value in {**names, "AWS_BATCH_JQ_NAME": "batch-gen"}.items():
        monkeypatch.setenv(name, value)


def test_a_start_after_a_kill_holds_less(child):
    """The second start of a child reads how the first one ended on this machine, and says who it is."""
    settings = resolve({"model": "fake", "out": "o", "price_per_hour": 2.0}, load_preset("pocket", "pocket"), "cpu")
    store = MemoryStore()
    start, load = begin(store, settings, "w2")
    assert (start.job, start.attempt, start.queue, start.price_per_hour) == ("j:2", 2, "batch-gen", 2.0)
    assert load.kills == 0
    first = Start(worker="w1", job="j:2", attempt=1, host=machine()[0])
    store.put(first.key, first.to_bytes())
    assert begin(store, settings, "w2")[1].kills == 1
    assert begin(store, settings, "w2")[1].unfinished_per_replica == 1


def test_a_child_that_ends_early_says_why(child):
    """The reason stands where status looks for it; one line, once, and never in a place that nothing was submitted to."""
    foreign, store = MemoryStore.named("last-words-foreign"), MemoryStore.named("last-words")
    last_words({"out": "memory://last-words-foreign"}, FAULT)
    assert read_starts(foreign) == []
    store.put("submit/m.parquet", b"x")
    last_words({"out": "memory://last-words"}, FAULT)
    (start,) = read_starts(store)
    assert (start.job, start.attempt, start.exit_code) == ("j:2", 2, 2)
    assert start.ended == "environment: --device neuron: no Neuron devices in this container"
    last_words({"out": "memory://last-words"}, EnvironmentFault("later"))
    assert "later" not in read_starts(store)[0].ended


def test_nobody_else_writes_last_words(monkeypatch):
    """Outside of AWS Batch an error is told on the terminal alone."""
    monkeypatch.delenv("AWS_BATCH_JOB_ID", raising=False)
    store = MemoryStore.named("last-words-alone")
    store.put("submit/m.parquet", b"x")
    last_words({"out": "memory://last-words-alone"}, FAULT)
    assert read_starts(store) == []


def test_engines_load_one_after_the_other():
    """Never two at once, and each gets its own number."""
    inside, most, lock = [], [], threading.Lock()

    def start(index):
        with lock:
            inside.append(index)
            most.append(len(inside))
        with lock:
            inside.remove(index)
        return index

    waiting = one_at_a_time(start)
    threads = [threading.Thread(target=waiting, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert waiting(9) == 9


def test_names_of_runs(tmp_path):
    """Bucket and prefix, or the folder's own name: few values, no address of a machine."""
    assert run_name("s3://bucket/runs/r1/") == "bucket/runs/r1"
    assert run_name(str(tmp_path / "demo-out")) == "demo-out"

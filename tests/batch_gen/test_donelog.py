"""The done log: what is finished, in one listing, however long the run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_gen.donelog import DoneChunk, DoneLog, Folder
from batch_gen.errors import CheckFailed
from batch_gen.layout import chunk_id, done_key
from batch_gen.records import Verdict
from batch_gen.storage.memory import MemoryStore

OK = Verdict(status="committed")
BAD = Verdict(status="quarantined", kind="flat", retry_class="clip", message="one colour", attempts=2)


def entry(chunk: str, **clips: Verdict) -> DoneChunk:
    return DoneChunk(chunk=chunk, clips=clips or {f"clip-{chunk}": OK}, counts={"started": 1.0})


def log_with(store, numbers, round_number=0, **options) -> DoneLog:
    log = DoneLog(store, **options)
    for number in numbers:
        log.add(entry(chunk_id(round_number, number)))
    return log


def test_finished_chunks_are_known_to_others():
    """Another worker learns what is finished from one listing."""
    store = MemoryStore()
    log_with(store, [0, 2])
    other = DoneLog(store)
    other.refresh()
    assert ["0-00000" in other, "0-00001" in other, "0-00002" in other] == [True, False, True]


def test_first_entry_stands():
    """A chunk is finished once; a late second entry changes nothing."""
    store = MemoryStore()
    assert DoneLog(store).add(entry("0-00000", fox=OK))
    late = DoneLog(store)
    assert not late.add(entry("0-00000", fox=BAD))
    assert "0-00000" in late
    assert next(iter(late.entries())).clips["fox"] == OK


def test_tally_counts_and_a_retry_heals():
    """Quarantined clips are named; one that a later round committed is no longer among them."""
    store = MemoryStore()
    log = DoneLog(store)
    log.add(entry("0-00000", fox=OK, hare=BAD, owl=BAD))
    assert log.tally().quarantined == {"hare": BAD, "owl": BAD}
    log.add(entry("1-00000", hare=OK))
    tally = log.tally()
    assert (tally.num_chunks, tally.num_committed, set(tally.quarantined)) == (2, 2, {"owl"})
    assert tally.counts == {"started": 2.0}


def test_many_entries_are_folded_into_one_object():
    """Above the limit the log is one summary; what it says is the same as before."""
    store = MemoryStore()
    log = log_with(store, range(30), compact_above=20)
    log.add(entry("0-00077", fox=BAD))
    before = log.tally()
    assert log.compact()
    assert [e.key for e in store.list("done/")] == ["done/compact-00000.json"]
    fresh = DoneLog(store)
    fresh.refresh()
    assert fresh.tally() == log.tally() == before
    assert "0-00029" in fresh
    assert "0-00030" not in fresh
    assert "0-00077" in fresh


def test_folding_goes_on_from_the_last_summary():
    """Later entries are folded on top of earlier summaries, and a short log is left alone."""
    store = MemoryStore()
    log = log_with(store, range(5), compact_above=3)
    assert log.compact()
    assert not log.compact()
    for number in range(5, 10):
        log.add(entry(chunk_id(0, number)))
    assert log.compact()
    fresh = DoneLog(store)
    fresh.refresh()
    assert fresh.tally().num_chunks == 10
    assert all(chunk_id(0, number) in fresh for number in range(10))


def test_racing_folders_lose_nothing():
    """Of many workers that fold at once one wins, and every chunk stays finished for all."""
    store = MemoryStore()
    log_with(store, range(40))
    logs = [DoneLog(store, compact_above=10) for _ in range(6)]

    def fold(log):
        log.refresh()
        return log.compact()

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(fold, logs))
    assert sum(won) >= 1
    for log in [*logs, DoneLog(store)]:
        log.refresh()
        assert log.tally().num_chunks == 40
        assert log.tally().num_committed == 40


def test_a_long_log_is_folded_beside_the_work():
    """A worker that finds the log long folds it in the background, once for a look; a short one is left alone."""
    store = MemoryStore()
    log = log_with(store, range(10))
    folder = Folder(store, compact_above=10)
    folder.look(log)
    folder.wait()
    assert len(list(store.list("done/"))) == 10
    for number in range(10, 16):
        log.add(entry(chunk_id(0, number)))
    folder.look(log)
    folder.look(log)
    folder.wait()
    assert [e.key for e in store.list("done/")] == ["done/compact-00000.json"]
    log.refresh()
    assert log.num_single == 0
    assert log.tally().num_chunks == 16


def test_late_entry_of_a_folded_chunk_is_ignored():
    """A sleeper that finishes a chunk again after it was folded changes no count."""
    store = MemoryStore()
    log = log_with(store, range(5), compact_above=3)
    log.compact()
    DoneLog(store).add(entry("0-00002", fox=BAD))
    fresh = DoneLog(store)
    fresh.refresh()
    assert fresh.tally().num_chunks == 5
    assert fresh.tally().quarantined == {}


def test_reopened_chunk_is_open_for_everybody():
    """A chunk whose clips are gone is taken back and can be finished again."""
    store = MemoryStore()
    log = log_with(store, [0, 1])
    log.reopen("0-00001", ["clip-0-00001"])
    other = DoneLog(store)
    other.refresh()
    assert "0-00001" not in other
    assert "0-00001" not in log
    assert log.add(entry("0-00001"))


def test_damaged_entry_is_named():
    """An entry that cannot be read is an error with its address, never a finished chunk without clips."""
    store = MemoryStore()
    store.create(done_key("0-00000"), b"{")
    log = DoneLog(store)
    log.refresh()
    with pytest.raises(CheckFailed, match=r"0-00000\.json"):
        log.tally()


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 60)), min_size=1), st.data())
def test_folded_log_knows_exactly_what_was_finished(chunks, data):
    """For any set of chunks over several rounds and folds: in the log exactly when finished."""
    store = MemoryStore()
    names = [chunk_id(*chunk) for chunk in sorted(chunks)]
    log = DoneLog(store, compact_above=0)
    for name in names:
        log.add(entry(name))
        if data.draw(st.booleans()):
            log.compact()
    fresh = DoneLog(store)
    fresh.refresh()
    for round_number in range(3):
        for number in range(62):
            assert (chunk_id(round_number, number) in fresh) == ((round_number, number) in chunks)
    assert fresh.tally().num_committed == len(chunks)


def test_folded_chunk_can_be_reopened_too():
    """A chunk inside a summary is taken out of it again, with its counts, and the rest stays finished."""
    store = MemoryStore()
    log = log_with(store, range(9), compact_above=5)
    log.add(entry("0-00009", fox=BAD, hare=OK))
    log.compact()
    log.reopen("0-00009", ["fox", "hare"])
    log.reopen("0-00004", ["clip-0-00004"])
    fresh = DoneLog(store)
    fresh.refresh()
    assert [n for n in range(10) if chunk_id(0, n) not in fresh] == [4, 9]
    assert (fresh.tally().num_committed, fresh.tally().quarantined) == (8, {})
    fresh.add(entry("0-00009", fox=OK, hare=OK))
    assert fresh.tally().num_committed == 10

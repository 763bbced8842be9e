import datetime as dt
import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_gen import layout, tables
from batch_gen.metrics import Meter, RunSummary, duration, rebuild_tables, summarise, write_parts
from batch_gen.storage.memory import MemoryStore

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def metrics_row(clip_id: str, **cells: object) -> dict[str, object]:
    """A committed clip of 2 s of video: 10 s of engine time from noon on."""
    row = {"clip_id": clip_id, "row_id": clip_id, "sample": 0, "status": "committed", "epoch": 1, "attempt": 1}
    row |= {"duration_s": 2.0, "text_s": 1.0, "denoise_s": 6.0, "decode_s": 3.0, "worker": "w", "replica": 0}
    return row | {"started_at": NOON, "finished_at": NOON + dt.timedelta(seconds=20)} | cells


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


@st.composite
def summaries(draw: st.DrawFn) -> RunSummary:
    """Summaries of whole numbers, for which addition is exact."""
    return RunSummary(**{field.name: draw(st.integers(0, 10**6)) for field in fields(RunSummary)})


@given(summaries(), summaries(), summaries())
def test_summaries_add_in_any_grouping(a: RunSummary, b: RunSummary, c: RunSummary) -> None:
    """Addition is associative and commutative and the empty summary changes nothing."""
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + RunSummary() == a


@given(st.lists(summaries()))
def test_any_sum_can_be_shown(parts: list[RunSummary]) -> None:
    """Every sum, the empty one too, has finite rates, a JSON form and a line of text."""
    total = sum(parts, RunSummary())
    json.dumps(total.to_json(), allow_nan=False)
    assert "clips/h" in str(total)


def test_rates_and_shares() -> None:
    """Rates go by wall time, shares by the seconds that engines existed, and what is not used is idle."""
    total = RunSummary(
        num_committed=8, video_s=27, engine_s=200, render_s=150, failed_s=20, started_at=1000, finished_at=1100
    )
    assert total.clips_per_hour == 288
    assert total.video_s_per_hour == 972
    assert total.shares == {
        "render": 0.75,
        "cold_start": 0.0,
        "failed": 0.1,
        "duplicate": 0.0,
        "idle": pytest.approx(0.15),
    }
    assert str(total) == (
        "8 clips, 27.0 s of video in 0:01:40: 288.0 clips/h, 972.0 s of video/h; engine 75% render, 10% failed, 15% idle"
    )


def test_meter_splits_engine_time() -> None:
    """The meter books each second under its use and counts the rest of both replicas' time as idle."""
    clock = Clock()
    meter = Meter(num_replicas=2, now=clock, wall=lambda: 5000.0)
    with meter.spending("cold_start"):
        clock.pass_s(10)
    with meter.spending("render"):
        clock.pass_s(30)
    meter.committed(video_s=5.0)
    meter.spent("failed", 5)
    meter.failed()
    total = meter.summary()
    assert (total.num_committed, total.num_failed, total.video_s) == (1, 1, 5.0)
    assert (total.cold_start_s, total.render_s, total.failed_s, total.engine_s) == (10, 30, 5, 80)
    assert (total.started_at, total.finished_at) == (5000, 5040)
    assert total.idle_share == pytest.approx(35 / 80)


def test_time_is_booked_when_the_block_fails() -> None:
    """An exception inside a block does not lose its seconds."""
    clock = Clock()
    meter = Meter(now=clock)
    with pytest.raises(KeyError):
        stumble(meter, clock)
    assert meter.summary().render_s == 7


def stumble(meter: Meter, clock: Clock) -> None:
    """Fail after 7 s of rendering."""
    with meter.spending("render"):
        clock.pass_s(7)
        raise KeyError


def test_unknown_use_is_a_defect() -> None:
    """Time cannot be booked under a name that no summary has."""
    with pytest.raises(ValueError, match="not on 'coffee'"):
        Meter().spent("coffee", 1)


def test_summary_of_rows_counts_each_engine_once() -> None:
    """From rows, an engine's time is its first start to its last end; a duplicate is waste, no clip."""
    rows = [
        metrics_row("a"),
        metrics_row("b", started_at=NOON + dt.timedelta(seconds=20), finished_at=NOON + dt.timedelta(seconds=40)),
        metrics_row("c", replica=1),
        metrics_row("d", replica=1, status="duplicate"),
    ]
    total = summarise(rows, num_failed=1)
    assert (total.num_committed, total.num_failed, total.video_s, total.wall_s) == (3, 1, 6.0, 40)
    assert (total.render_s, total.duplicate_s, total.engine_s) == (30, 10, 60)


def test_summary_of_nothing() -> None:
    """A run without rows has a summary of zeros."""
    assert summarise([]).to_json()["num_committed"] == 0


def test_parts_become_tables() -> None:
    """Parts of several owners merge into one row per clip, and merging again changes no byte."""
    store = MemoryStore()
    failure = {"clip_id": "b", "row_id": "b", "sample": 0, "status": "quarantined", "epoch": 1, "kind": "flat"}
    write_parts(store, "0-00000", 1, [metrics_row("a", bytes=1)], [failure])
    write_parts(store, "0-00000", 2, [metrics_row("a", bytes=1, epoch=2, attempt=2), metrics_row("c")], [])
    rows = rebuild_tables(store)
    assert [(row["clip_id"], row["epoch"]) for row in rows] == [("a", 2), ("c", 1)]
    clips = store.get(layout.CLIPS_TABLE_KEY).body
    assert [row["clip_id"] for row in tables.read_rows(clips)] == ["a", "b", "c"]
    rebuild_tables(store)
    assert store.get(layout.CLIPS_TABLE_KEY).body == clips


def test_owner_without_rows_writes_no_part() -> None:
    """An owner that neither made nor failed a clip leaves no empty part behind."""
    store = MemoryStore()
    write_parts(store, "0-00000", 1, [], [])
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (61.4, "0:01:01"), (3723, "1:02:03"), (360_000, "100:00:00")]
)
def test_duration(seconds: float, text: str) -> None:
    """Durations read as hours, minutes and seconds."""
    assert duration(seconds) == text


def test_render_that_came_to_nothing_is_moved() -> None:
    """A clip that another worker had committed first, or whose file failed, was no render: the whole stays the same."""
    meter = Meter(1, now=lambda: 0.0, wall=lambda: 0.0)
    meter.spent("render", 30.0)
    meter.moved("duplicate", 20.0)
    meter.moved("failed", 5.0)
    total = meter.summary()
    assert (total.render_s, total.duplicate_s, total.failed_s) == (5.0, 20.0, 5.0)

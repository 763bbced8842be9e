"""Figures of a run: what a worker's engines spent their seconds on, and the tables rebuilt from the parts.

A summary adds: `a + b` is that of two workers, or of one worker's two lives, in any grouping. Counts and seconds are
never taken from two attempts at one clip, because the parts are merged by clip first.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from batch_gen import layout, tables
from batch_gen.storage.base import Store

RENDER: Final = "render"
USES: Final = (RENDER, "cold_start", "failed", "duplicate")
"""What an engine's second may be spent on: committed clips, loading and compiling, attempts that failed, clips that
another worker had committed first. The rest is idle."""
COMMITTED: Final = "committed"
NUM_READERS: Final = 16
_ENGINE_STAGES: Final = ("text_s", "denoise_s", "decode_s")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Totals of any number of workers; all of it adds.

    Attributes:
        num_committed: Clips that were committed here.
        num_failed: Attempts or clips that ended in an error.
        video_s: Seconds of committed video.
        engine_s: Seconds that engines existed, summed over replicas.
        render_s, cold_start_s, failed_s, duplicate_s: What they were busy with (see `USES`).
        started_at, finished_at: First and last moment, Unix seconds.
    """

    num_committed: int = 0
    num_failed: int = 0
    video_s: float = 0.0
    engine_s: float = 0.0
    render_s: float = 0.0
    cold_start_s: float = 0.0
    failed_s: float = 0.0
    duplicate_s: float = 0.0
    started_at: float = float("inf")
    finished_at: float = float("-inf")

    def __add__(self, other: Self) -> Self:
        combine = {"started_at": min, "finished_at": max}
        joined = {
            name: combine.get(name, lambda a, b: a + b)(getattr(self, name), getattr(other, name))
            for name in (each.name for each in fields(self))
        }
        return type(self)(**joined)

    @property
    def wall_s(self) -> float:
        """From the first moment to the last."""
        return max(0.0, self.finished_at - self.started_at)

    @property
    def clips_per_hour(self) -> float:
        """Committed clips per hour of wall time, of all workers together."""
        return 3600 * self.num_committed / self.wall_s if self.wall_s else 0.0

    @property
    def video_s_per_hour(self) -> float:
        """Seconds of committed video per hour of wall time, of all workers together."""
        return 3600 * self.video_s / self.wall_s if self.wall_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of the engines' seconds for each use, and `idle` for the rest; empty without engines."""
        if self.engine_s <= 0:
            return {}
        used = {use: getattr(self, f"{use}_s") / self.engine_s for use in USES}
        return used | {"idle": max(0.0, 1.0 - sum(used.values()))}

    @property
    def idle_share(self) -> float:
        """Share of the engines' time in which they stood idle."""
        return self.shares.get("idle", 0.0)

    def to_json(self) -> dict[str, Any]:
        """Totals and rates, rounded for people; the shares under `shares`."""
        totals = {
            name: getattr(self, name) for name in (each.name for each in fields(self)) if not name.endswith("_at")
        }
        rates = {name: getattr(self, name) for name in ("wall_s", "clips_per_hour", "video_s_per_hour", "idle_share")}
        rounded = {name: round(value, 4) for name, value in (totals | rates).items()}
        return rounded | {"shares": {use: round(share, 4) for use, share in self.shares.items()}}

    def __str__(self) -> str:
        """`8 clips, 27.0 s of video in 0:01:43: 279.6 clips/h, 943.7 s of video/h; engine 85 % busy, 15 % idle`."""
        noun = "clip" if self.num_committed == 1 else "clips"
        made = f"{self.num_committed} {noun}, {self.video_s:.1f} s of video in {duration(self.wall_s)}"
        rates = f"{self.clips_per_hour:.1f} clips/h, {self.video_s_per_hour:.1f} s of video/h"
        uses = [f"{share:.0%} {use.replace('_', ' ')}" for use, share in self.shares.items() if share >= 0.005]
        return f"{made}: {rates}" + (f"; engine {', '.join(uses)}" if uses else "")


def duration(seconds: float) -> str:
    """`1:02:03`."""
    whole = round(max(0.0, seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@dataclass(slots=True)
class Meter:
    """Counts a worker's clips and its engines' seconds as they happen; may be told from several threads.

    Args:
        num_replicas: Engines of this worker.
        now: Monotonic seconds; `wall` is Unix time.
    """

    num_replicas: int = 1
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    _totals: RunSummary = field(default_factory=RunSummary)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _started: float = field(init=False)
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started, self._started_at = self.now(), self.wall()

    def spent(self, use: str, seconds: float) -> None:
        """One engine was busy for so long with `use`, one of `USES`."""
        if use not in USES:
            raise ValueError(f"an engine's time is spent on one of {USES}, not on {use!r}")
        added: dict[str, Any] = {f"{use}_s": seconds}
        self._add(RunSummary(**added))

    @contextmanager
    def spending(self, use: str) -> Iterator[None]:
        """The time inside the block is spent on `use`."""
        before = self.now()
        try:
            yield
        finally:
            self.spent(use, self.now() - before)

    def moved(self, use: str, seconds: float) -> None:
        """Seconds that were counted as rendering turned out to be spent on another use."""
        self.spent(RENDER, -seconds)
        self.spent(use, seconds)

    def committed(self, video_s: float) -> None:
        """A clip of so many seconds of video is committed."""
        self._add(RunSummary(num_committed=1, video_s=video_s))

    def failed(self) -> None:
        """An attempt ended in an error."""
        self._add(RunSummary(num_failed=1))

    def _add(self, more: RunSummary) -> None:
        with self._lock:
            self._totals += more

    def summary(self) -> RunSummary:
        """The totals up to now."""
        elapsed = self.now() - self._started
        here = RunSummary(
            engine_s=elapsed * self.num_replicas, started_at=self._started_at, finished_at=self._started_at + elapsed
        )
        return self._totals + here


def summarise(rows: Iterable[Mapping[str, Any]], num_failed: int = 0) -> RunSummary:
    """The summary of a finished run from its merged metrics rows, for `report`; knows no cold starts.

    An engine's time runs from its first clip's start to its last clip's end.
    """
    by_engine: dict[tuple[object, object], list[RunSummary]] = {}
    for row in rows:
        by_engine.setdefault((row.get("worker"), row.get("replica")), []).append(_of_row(row))
    engines = [sum(clips, RunSummary()) for clips in by_engine.values()]
    alive = (RunSummary(engine_s=engine.wall_s) for engine in engines)
    return sum(itertools.chain(engines, alive), RunSummary(num_failed=num_failed))


def _of_row(row: Mapping[str, Any]) -> RunSummary:
    busy_s = sum(row.get(stage) or 0.0 for stage in _ENGINE_STAGES)
    times = {name: row[name].timestamp() for name in ("started_at", "finished_at") if row.get(name) is not None}
    if row.get("status") != COMMITTED:
        return RunSummary(duplicate_s=busy_s, **times)
    return RunSummary(num_committed=1, video_s=row.get("duration_s") or 0.0, render_s=busy_s, **times)


def write_parts(
    store: Store,
    chunk: str,
    epoch: int,
    metrics: Iterable[Mapping[str, object]],
    errors: Iterable[Mapping[str, object]],
) -> None:
    """Write one owner's rows of a chunk, at its end and on drain; a later call of the same owner replaces them.

    Raises ValueError for a row that does not fit the schema.
    """
    written = (layout.metrics_key(chunk, epoch), list(metrics), tables.metrics_part)
    failed = (layout.errors_key(chunk, epoch), list(errors), tables.errors_part)
    for key, rows, encode in (written, failed):
        if rows:
            store.put(key, encode(rows))


def rebuild_tables(store: Store) -> list[dict[str, Any]]:
    """Merge all parts into `metrics.parquet` and `clips.parquet`; returns the merged metrics rows.

    The same parts give the same tables, whoever merges them and how often.
    """
    metrics, errors = _parts(store, layout.METRICS_PREFIX), _parts(store, layout.ERRORS_PREFIX)
    merged = tables.merge_metrics(metrics)
    store.put(layout.METRICS_TABLE_KEY, merged)
    store.put(layout.CLIPS_TABLE_KEY, tables.merge_clips(metrics, errors))
    return tables.read_rows(merged)


def _parts(store: Store, prefix: str) -> list[bytes]:
    keys = sorted(listed.key for listed in store.list(prefix))
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return [blob.body for blob in pool.map(store.get, keys) if blob is not None]

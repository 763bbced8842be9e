"""Figures of a whole run: pace, stages, what engines spent their seconds on, waste, cost, failures."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from batch_gen.report.clips import PENDING, QUARANTINED, STAGES, Clip
from batch_gen.report.source import RunData

NUM_SLOWEST: Final = 10
MAX_BINS: Final = 48
NICE_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 604800)
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage over all committed clips: its seconds, its share of all stages, and the usual and the slow clip."""

    name: str
    total_s: float
    share: float
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Clips that were set aside for one reason."""

    retry_class: str
    kind: str
    clips: tuple[Clip, ...]

    @property
    def message(self) -> str:
        """What the first of them said."""
        return str(self.clips[0].row.get("message", ""))


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine on the time line.

    Attributes:
        busy: (start, end) of its clips, Unix seconds, ascending.
        failed: Moments at which a clip was set aside.
    """

    worker: str
    replica: int
    busy: tuple[Span, ...]
    failed: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """`worker` or `worker/replica`."""
        return self.worker if self.replica == 0 else f"{self.worker}/{self.replica}"


@dataclass(frozen=True, slots=True)
class Pace:
    """Clips finished in each of some equal stretches of time; `start` is Unix seconds."""

    start: float
    width_s: float
    committed: tuple[int, ...]
    failed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that the run page says.

    Attributes:
        uses: What engines' seconds went into, `idle` among them; seconds.
        machine_s: Seconds of presence, summed over workers, the loading of engines included.
        num_starts: Attempts that were begun, 0 when nothing counted them.
    """

    num_clips: int
    num_committed: int
    num_quarantined: int
    num_pending: int
    video_s: float
    span: Span
    machine_s: float
    num_workers: int
    uses: dict[str, float]
    num_starts: int
    num_duplicates: int
    num_deaths: int
    stages: tuple[Stage, ...]
    failures: tuple[Failure, ...]
    slowest: tuple[Clip, ...]
    lanes: tuple[Lane, ...]
    pace: Pace | None
    bytes: int = 0
    price_per_hour: float | None = None

    @property
    def wall_s(self) -> float:
        """From the first clip's start to the last one's end."""
        return self.span[1] - self.span[0]

    @property
    def clips_per_hour(self) -> float:
        """Committed clips per hour of wall time."""
        return 3600 * self.num_committed / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def engine_s(self) -> float:
        """Seconds that engines existed, summed over replicas."""
        return sum(self.uses.values())

    @property
    def idle_share(self) -> float:
        """Share of the engines' seconds without work."""
        return self.share_of("idle")

    def share_of(self, use: str) -> float:
        """Share of the engines' seconds for one use."""
        return self.uses.get(use, 0.0) / self.engine_s if self.engine_s > 0 else 0.0

    @property
    def cost(self) -> float | None:
        """Price of all workers' hours, None without a price."""
        return None if self.price_per_hour is None else self.machine_s / 3600 * self.price_per_hour

    def cost_of(self, use: str) -> float | None:
        """The part of the cost that one use took."""
        return None if self.cost is None else self.cost * self.share_of(use)

    @property
    def slowest_stage(self) -> Stage | None:
        """The stage that takes most."""
        return max(self.stages, key=lambda stage: stage.total_s, default=None)


@dataclass(slots=True)
class _Presence:
    """When a worker was seen: spans of its clips and chunks, and its engines."""

    spans: list[Span] = field(default_factory=list)
    replicas: set[int] = field(default_factory=set)

    @property
    def seconds(self) -> float:
        return max(end for _, end in self.spans) - min(start for start, _ in self.spans)


def figure_out(data: RunData, clips: Sequence[Clip], price_per_hour: float | None = None) -> Figures:
    """The figures of a run; a price per hour of one worker's machine gives costs."""
    done = [clip for clip in clips if clip.is_committed]
    failures = failures_of(clips)
    presence = _presence(data, done)
    moments = [moment for worker in presence.values() for span in worker.spans for moment in span]
    cold_s = data.counts.get("cold_start_ms", 0.0) / 1000
    status = Counter(clip.status for clip in clips)
    duplicates = [row for row in data.metrics if row["status"] != "committed"]
    return Figures(
        num_clips=len(clips),
        num_committed=len(done),
        num_quarantined=status[QUARANTINED],
        num_pending=status[PENDING],
        video_s=sum(clip.row.get("duration_s") or 0.0 for clip in done),
        span=(min(moments, default=0.0), max(moments, default=0.0)),
        machine_s=sum(worker.seconds for worker in presence.values()) + cold_s,
        num_workers=len(presence),
        uses=_uses(data, done, presence, cold_s),
        num_starts=int(data.counts.get("started", 0)),
        num_duplicates=len(duplicates),
        num_deaths=int(data.counts.get("died", 0)),
        stages=tuple(stages_of(done)),
        failures=tuple(failures),
        slowest=tuple(sorted(done, key=lambda clip: -(clip.row.get("total_s") or 0.0))[:NUM_SLOWEST]),
        lanes=tuple(lanes_of(done, [clip for failure in failures for clip in failure.clips])),
        pace=pace_of(clips),
        bytes=sum(clip.row.get("bytes") or 0 for clip in done),
        price_per_hour=price_per_hour,
    )


def stages_of(done: Sequence[Clip]) -> list[Stage]:
    """The stages that were timed, in the order of a clip's life."""
    timed = {name: [clip.row.get(f"{name}_s") or 0.0 for clip in done] for name in STAGES}
    whole = sum(map(sum, timed.values()))
    return [
        Stage(name, sum(times), sum(times) / whole, statistics.median(times), quantile(times, 0.95))
        for name, times in timed.items()
        if sum(times) > 0
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def failures_of(clips: Iterable[Clip]) -> list[Failure]:
    """Clips that were set aside by class and kind, the most frequent first."""
    found: dict[tuple[str, str], list[Clip]] = defaultdict(list)
    for clip in clips:
        if clip.status == QUARANTINED:
            found[(clip.row.get("class", ""), clip.row.get("kind", ""))].append(clip)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Failure(retry_class, kind, tuple(those)) for (retry_class, kind), those in ordered]


def lanes_of(done: Iterable[Clip], failed: Iterable[Clip]) -> list[Lane]:
    """One lane per engine that finished a clip, in order of names."""
    busy: dict[tuple[str, int], list[Span]] = defaultdict(list)
    deaths: dict[tuple[str, int], list[float]] = defaultdict(list)
    for clip in done:
        if (span := _span(clip)) is not None:
            busy[_engine(clip)].append(span)
    for clip in failed:
        if "failed_at" in clip.row:
            deaths[_engine(clip)].append(clip.row["failed_at"])
    return [
        Lane(*engine, tuple(sorted(busy.get(engine, ()))), tuple(sorted(deaths.get(engine, ()))))
        for engine in sorted({*busy, *deaths})
    ]


def pace_of(clips: Sequence[Clip]) -> Pace | None:
    """How many clips ended in each stretch of the run; None before the first."""
    ends = [(clip.row["finished_at"], True) for clip in clips if clip.is_committed and "finished_at" in clip.row]
    ends += [(clip.row["failed_at"], False) for clip in clips if not clip.is_committed and "failed_at" in clip.row]
    if not ends:
        return None
    first, last = min(ends)[0], max(ends)[0]
    width_s = next((float(width) for width in NICE_S if (last - first) / width < MAX_BINS), (last - first) / MAX_BINS)
    start = first // width_s * width_s
    num_bins = int((last - start) // width_s) + 1
    counted = Counter((int((moment - start) // width_s), good) for moment, good in ends)
    committed, failed = ([counted[(place, good)] for place in range(num_bins)] for good in (True, False))
    return Pace(start, width_s, tuple(committed), tuple(failed))


def _engine(clip: Clip) -> tuple[str, int]:
    return clip.row.get("worker", "unknown"), clip.row.get("replica", 0)


def _span(clip: Clip) -> Span | None:
    start, end = clip.row.get("started_at"), clip.row.get("finished_at")
    return None if start is None or end is None else (start, end)


def _presence(data: RunData, done: Iterable[Clip]) -> dict[str, _Presence]:
    """Workers by name: the spans of their clips, and of the chunks that they finished."""
    found: dict[str, _Presence] = defaultdict(_Presence)
    for clip in done:
        if (span := _span(clip)) is not None:
            worker, replica = _engine(clip)
            found[worker].spans.append(span)
            found[worker].replicas.add(replica)
    for entry in data.chunks:
        seconds = entry.counts.get("seconds", 0.0)
        if entry.finished and seconds > 0:
            end = datetime.fromisoformat(entry.finished).timestamp()
            found[entry.worker].spans.append((end - seconds, end))
    return dict(found)


def _uses(data: RunData, done: Iterable[Clip], presence: dict[str, _Presence], cold_s: float) -> dict[str, float]:
    engine_s = sum(worker.seconds * max(1, len(worker.replicas)) for worker in presence.values())
    duplicate_s = sum(
        row.get(f"{stage}_s") or 0.0
        for row in data.metrics
        if row["status"] != "committed"
        for stage in ("text", "denoise", "decode")
    )
    uses = {
        "render": sum(clip.engine_s for clip in done),
        "failed": data.counts.get("failed_ms", 0.0) / 1000,
        "duplicate": duplicate_s,
    }
    return {**uses, "cold_start": cold_s, "idle": max(0.0, engine_s - sum(uses.values()))}


def merged(spans: Sequence[Span], gap_s: float) -> list[Span]:
    """Ascending spans with those joined whose gap nobody would see."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= gap_s:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined

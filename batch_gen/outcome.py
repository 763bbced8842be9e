"""What an attempt was, what it measured, and how that becomes a record and a row of metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batch_gen import memory
from batch_gen.encode import EncodedFile
from batch_gen.layout import clip_key
from batch_gen.records import FileEntry, Record, Verdict
from batch_gen.request import RenderRequest
from batch_gen.verify import VerifyReport


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a request: what to make and under which name it counts."""

    request: RenderRequest
    chunk: str
    epoch: int
    number: int
    replica: int = 0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What every record of a run repeats."""

    fingerprint: str
    numerics_key: str
    model: str
    worker: str
    versions: dict[str, str]
    decode: dict[str, Any]


@dataclass(slots=True)
class Clock:
    """Seconds of one attempt, by stage; `mark` closes a stage."""

    now: Callable[[], float] = time.monotonic
    started_at: float = field(default_factory=time.time)
    stages: dict[str, float] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    _last: float = 0.0
    _first: float = 0.0

    def __post_init__(self) -> None:
        self._first = self._last = self.now()

    def mark(self, stage: str) -> None:
        """The time since the last mark belongs to `stage`."""
        current = self.now()
        self.stages[stage] = self.stages.get(stage, 0.0) + current - self._last
        self._last = current

    def step(self) -> None:
        """One denoising step is over."""
        current = self.now()
        self.step_s.append(current - self._last - sum(self.step_s))

    @property
    def total_s(self) -> float:
        """Seconds since the attempt started."""
        return self.now() - self._first


def make_record(
    attempt: Attempt, encoded: EncodedFile, report: VerifyReport, facts: RunFacts, clock: Clock, info: dict[str, Any]
) -> Record:
    """The record of a verified file."""
    request = attempt.request
    key = clip_key(request.clip_id, encoded.path.suffix)
    metrics = measured(clock, info) | {"decode": info.get("decode", facts.decode), "model": facts.model}
    metrics |= {name: info[name] for name in ("images", "skipped_steps") if info.get(name)}
    metrics |= {"flags": list(report.flags), "replica": attempt.replica, "chunk": attempt.chunk}
    metrics |= {name: round(getattr(report, name), 3) for name in ("luma_mean", "luma_jump", "motion_mean")}
    return Record(
        clip_id=request.clip_id,
        row_id=request.row_id,
        sample=request.sample,
        request=request.to_json(),
        request_digest=request.digest,
        fingerprint=facts.fingerprint,
        numerics_key=facts.numerics_key,
        frames_hash=encoded.frames_hash,
        file=FileEntry(key=key, bytes=encoded.bytes, sha256=encoded.sha256),
        timings={f"{stage}_s": round(seconds, 6) for stage, seconds in clock.stages.items()},
        metrics=metrics,
        attempt=attempt.number,
        epoch=attempt.epoch,
        worker=facts.worker,
        versions=facts.versions,
        extra=dict(request.extra),
    )


def measured(clock: Clock, info: dict[str, Any]) -> dict[str, Any]:
    """What was counted and timed beside the stages."""
    steps = np.array(clock.step_s or [0.0])
    return {
        "step_p50_s": round(float(np.percentile(steps, 50)), 6),
        "step_p95_s": round(float(np.percentile(steps, 95)), 6),
        "supervisor_peak_bytes": memory.peak_rss_bytes(),
        "engine_peak_bytes": info.get("peak_rss_bytes"),
        "device_peak_bytes": info.get("device_peak_bytes"),
        "tokens": (info.get("tokens") or [None])[0],
        "truncated": (info.get("truncated") or [None])[0],
        "total_s": round(clock.total_s, 6),
        "started_at": int(clock.started_at * 1000),
        "finished_at": int(time.time() * 1000),
    }


_REQUEST = (
    "clip_id", "row_id", "sample", "prompt", "seed", "width", "height", "num_frames", "fps", "steps",
    "guidance_high", "guidance_low", "flow_shift", "preset",
)  # fmt: skip
_MEASURED = (
    "step_p50_s", "step_p95_s", "supervisor_peak_bytes", "engine_peak_bytes", "device_peak_bytes",
    "tokens", "truncated", "total_s", "started_at", "finished_at", "flags", "replica", "chunk",
)  # fmt: skip
_RECORD = ("status", "frames_hash", "attempt", "epoch", "worker", "request_digest", "fingerprint", "numerics_key")


def metrics_row(record: Record, url: str) -> dict[str, Any]:
    """A row of the metrics part, by the schema in tables.py, from the record alone.

    Args:
        record: the clip's record, ours or one that an earlier owner of the chunk wrote.
        url: the output root.
    """
    request = RenderRequest.from_json(record.request)
    row: dict[str, Any] = {name: record.request[name] for name in _REQUEST}
    row |= {name: getattr(record, name) for name in _RECORD}
    row |= {name: record.metrics[name] for name in _MEASURED if record.metrics.get(name) is not None}
    if skipped := record.metrics.get("skipped_steps"):
        row["skipped_steps"] = sum(skipped.values())
    row |= record.timings
    row |= {"url": f"{url}/{record.file.key}", "key": record.file.key, "duration_s": request.duration_s}
    row |= {"bytes": record.file.bytes, "sha256": record.file.sha256, "extra": record.extra}
    return row


def error_row(request: RenderRequest, verdict: Verdict, chunk: str, epoch: int, worker: str) -> dict[str, Any]:
    """A row of the errors part: a clip that was set aside."""
    body = request.to_json()
    row: dict[str, Any] = {name: body[name] for name in _REQUEST}
    row |= {"status": verdict.status, "class": verdict.retry_class, "kind": verdict.kind, "message": verdict.message}
    row |= {"attempt": verdict.attempts, "epoch": epoch, "worker": worker, "chunk": chunk}
    row |= {"request_digest": request.digest, "failed_at": int(time.time() * 1000), "extra": dict(request.extra)}
    return row

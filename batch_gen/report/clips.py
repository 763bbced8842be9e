"""The clips of a run as the report shows them: a verdict, its figures, and every attempt that is known."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batch_gen.lease import Attempts
from batch_gen.report.source import Planned, Row, RunData

COMMITTED: Final = "committed"
QUARANTINED: Final = "quarantined"
PENDING: Final = "pending"
STAGES: Final = ("text", "denoise", "decode", "encode", "verify", "upload")
ENGINE_STAGES: Final = ("text", "denoise", "decode")
MAX_EXTRA_COLUMNS: Final = 40

INDEX_COLUMNS: Final = (
    "clip_id", "prompt", "status", "class", "kind", "message", "sample", "seed", "width", "height", "num_frames",
    "fps", "steps", "guidance_high", "guidance_low", "flow_shift", "preset", "duration_s", "bytes", "total_s",
    *(f"{stage}_s" for stage in STAGES), "queue_wait_s", "step_p50_s", "step_p95_s", "engine_peak_bytes",
    "device_peak_bytes", "tokens", "attempt", "worker", "chunk", "flags", "key", "finished_at",
)  # fmt: skip
"""What the gallery searches, filters and sorts by; the rest of a clip waits in its detail file."""
DETAIL_COLUMNS: Final = (
    "row_id", "frames_hash", "sha256", "request_digest", "fingerprint", "numerics_key", "epoch", "replica",
    "supervisor_peak_bytes", "truncated", "started_at",
)  # fmt: skip
_ATTEMPT_COLUMNS: Final = (
    "attempt", "epoch", "status", "class", "kind", "message", "worker", "replica", "chunk", "total_s",
    "started_at", "finished_at", "failed_at",
)  # fmt: skip
_LABELS: Final = {"committed": 2, "duplicate": 1, "nondeterministic_duplicate": 1}


@dataclass(frozen=True, slots=True)
class Clip:
    """One clip.

    Attributes:
        row: Its row of metrics, else its last error, else what the plan says of it; instants as Unix seconds.
        planned: None when the plan is gone.
        attempts: Rows of all its attempts that ended in a verdict, oldest first.
        tally: What its chunk's lease counted of it, None when it was never started.
    """

    clip_id: str
    status: str
    row: Row
    planned: Planned | None = None
    attempts: list[Row] = field(default_factory=list)
    tally: Attempts | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """The columns of the manifest that are not ours."""
        found: dict[str, Any] = self.row["extra"]
        return found

    @property
    def is_committed(self) -> bool:
        """Whether the clip exists."""
        return self.status == COMMITTED

    @property
    def engine_s(self) -> float:
        """Seconds that an engine spent on it."""
        return sum(self.row.get(f"{stage}_s") or 0.0 for stage in ENGINE_STAGES)


def collect(data: RunData) -> list[Clip]:
    """Every clip with a verdict or a plan, in clip_id order."""
    done, failed = _by_clip(data.metrics), _by_clip(data.errors)
    tallies = {clip_id: tally for lease in data.leases for clip_id, tally in lease.attempts.items()}
    return [
        _clip(clip_id, done.get(clip_id, []), failed.get(clip_id, []), data.planned.get(clip_id), tallies.get(clip_id))
        for clip_id in sorted({*done, *failed, *data.planned})
    ]


def _by_clip(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["clip_id"]].append(_plain(row))
    for attempts in found.values():
        attempts.sort(key=lambda row: (_LABELS.get(row["status"], 0), row["epoch"] or 0, row["attempt"] or 0))
    return found


def _clip(clip_id: str, done: list[Row], failed: list[Row], planned: Planned | None, tally: Attempts | None) -> Clip:
    status = COMMITTED if done else failed[-1]["status"] if failed else PENDING
    request = {} if planned is None else planned.request
    row = {**request, **(done or failed or [{"chunk": planned.chunk if planned else ""}])[-1]}
    row["extra"] = row.get("extra") or {}
    row["status"] = status
    return Clip(clip_id, status, row, planned, _attempts([*failed, *done]), tally)


def _attempts(rows: Sequence[Row]) -> list[Row]:
    """Each attempt once: the next owner of a chunk writes the rows of its committed clips again."""
    known: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        shown = {name: row[name] for name in _ATTEMPT_COLUMNS if row.get(name) not in {None, ""}}
        known[(row["epoch"], row["attempt"], row["status"])] = shown
    return sorted(known.values(), key=lambda row: (row.get("epoch", 0), row.get("attempt", 0)))


def _plain(row: Row) -> Row:
    """A row without nulls: instants as Unix seconds, JSON columns as what they hold."""
    plain = {name: value for name, value in row.items() if value is not None}
    for name in ("started_at", "finished_at", "failed_at"):
        if name in plain:
            plain[name] = plain[name].timestamp()
    plain["extra"] = json.loads(plain.get("extra") or "{}")
    plain["flags"] = ", ".join(map(str, json.loads(plain.get("flags") or "[]")))
    return {"epoch": 0, "attempt": 0, **plain}


def extra_columns(clips: Iterable[Clip]) -> list[str]:
    """Names of the manifest's other columns, in order, at most 40."""
    return sorted({name for clip in clips for name in clip.extra})[:MAX_EXTRA_COLUMNS]


def index_columns(clips: Sequence[Clip], extra: Sequence[str], posters: Mapping[str, str]) -> dict[str, list[Any]]:
    """The gallery's table as columns; columns without any value are left out."""
    columns = {name: [_rounded(clip.row.get(name)) for clip in clips] for name in INDEX_COLUMNS}
    columns["poster"] = [posters.get(clip.clip_id) for clip in clips]
    columns |= {f"extra.{name}": [_as_text(clip.extra.get(name)) for clip in clips] for name in extra}
    return {name: cells for name, cells in columns.items() if any(cell not in {None, ""} for cell in cells)}


def details(clip: Clip) -> Row:
    """What only the clip's own page shows."""
    body: Row = {name: clip.row[name] for name in DETAIL_COLUMNS if clip.row.get(name) is not None}
    body |= {"extra": {name: _as_text(value) for name, value in clip.extra.items()}, "attempts": clip.attempts}
    if clip.planned is not None:
        names = ("negative_prompt", "image", "last_image", "priority")
        body |= {name: value for name in names if (value := clip.planned.request.get(name)) is not None}
        body |= {"source": clip.planned.source, "row": clip.planned.row}
    if clip.tally is not None:
        counted = clip.tally.model_dump()
        body["tally"] = {name: value for name, value in counted.items() if value}
    return body


def packed(columns: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Columns for the wire: one value for a constant column, a dictionary for repetitive text."""
    return dict(_packed(columns))


def _packed(columns: Mapping[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    for name, cells in columns.items():
        distinct = list(dict.fromkeys(cells))
        if len(distinct) == 1:
            yield name, {"all": distinct[0]}
        elif len(distinct) <= len(cells) // 2 and any(isinstance(value, str) for value in distinct):
            places = {value: place for place, value in enumerate(distinct)}
            yield name, {"values": distinct, "places": [places[cell] for cell in cells]}
        else:
            yield name, cells


def _rounded(value: Any) -> Any:
    """Four decimals are enough to sort and to show, and half the page's weight."""
    return round(value, 4) if isinstance(value, float) else value


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=dict)

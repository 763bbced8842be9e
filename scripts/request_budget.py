"""How many S3 requests a run makes, from what the code does; `bench_requests.py` holds it against a counted run.

Per clip: its attempt is written into the lease (PUT), file and record are stored (PUT, PUT), the record is looked for
when the chunk is opened (HEAD), and stop.json before the clip is handed out (GET).
Per chunk: the lease is claimed and freed (PUT, PUT), its part of the metrics and its entry of the done log are written
(PUT, PUT); whoever closes the run reads the part (GET). An entry is read and deleted once when the log is folded.
Per worker: the probe of the store, run.json, the plan, its figures at start and end; the entries of the done log that
are not folded, at its start and its end.
Over time: a lease that nothing else wrote for a third of its ttl is renewed (PUT), and each minute the worker's figures
are written (PUT). A claim that finds its view of the
run older than the ttl lists the done log anew, a thousand keys a page (LIST), and looks for another round (GET).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batch_gen.donelog import COMPACT_ABOVE, FOLD_BY
from batch_gen.telemetry import EVERY_S
from batch_gen.work import ClaimOptions

KEYS_PER_PAGE = 1000
# Dollars a request: Amazon's list price for S3 Standard in us-east-1; DELETE is free.
DOLLARS = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "POST": 0.005 / 1000, "GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000}
# Requests a second that one prefix takes before it is split, by Amazon's documentation.
WRITES_PER_S, READS_PER_S = 3500.0, 5500.0
PER_CLIP = {"PUT": 3, "HEAD": 1, "GET": 1}
PER_CHUNK = {"PUT": 4, "GET": 1}
PER_WORKER = {"PUT": 35, "GET": 14, "HEAD": 3, "LIST": 11, "DELETE": 8}
TTL_S = ClaimOptions().ttl_s
KINDS = ("PUT", "GET", "HEAD", "LIST", "DELETE")
Counts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A run: clips, chunks, workers, and the hours that each of them works."""

    clips: int
    chunks: int
    workers: int = 1
    hours: float = 0.0


def undisturbed(shape: Shape) -> Counts:
    """What clips, chunks and workers cost where nothing is lost and no lease grows old."""
    parts = ((PER_CLIP, shape.clips), (PER_CHUNK, shape.chunks), (PER_WORKER, shape.workers))
    return {kind: float(sum(per.get(kind, 0) * times for per, times in parts)) for kind in KINDS}


def pages(shape: Shape) -> int:
    """Pages of one listing of the done log, which is folded soon after it holds `COMPACT_ABOVE` entries."""
    return max(1, math.ceil(min(shape.chunks, FOLD_BY * COMPACT_ABOVE) / KEYS_PER_PAGE))


def over_time(shape: Shape) -> Counts:
    """Renewals, looks at the done log, its folding, what each worker reads of it at its start and end; upper bounds."""
    periods = shape.workers * shape.hours * 3600.0 / TTL_S
    looks = min(float(shape.chunks), periods)
    folded = shape.chunks if shape.chunks > COMPACT_ABOVE else 0
    left = min(shape.chunks, int(FOLD_BY * COMPACT_ABOVE))
    gets = looks + folded + 2 * shape.workers * left
    told = shape.workers * shape.hours * 3600.0 / EVERY_S
    return {"PUT": 3 * periods + told, "GET": gets, "HEAD": 0.0, "LIST": looks * pages(shape), "DELETE": float(folded)}


def total(shape: Shape) -> Counts:
    """Everything."""
    fixed, moving = undisturbed(shape), over_time(shape)
    return {kind: fixed[kind] + moving[kind] for kind in KINDS}


def dollars(counts: Counts) -> float:
    """What the requests cost."""
    return sum(DOLLARS.get(kind, 0.0) * count for kind, count in counts.items())

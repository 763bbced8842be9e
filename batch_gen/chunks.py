"""How requests are cut into chunks: a pure function of the manifest, never of the number of workers.

A chunk holds requests of one row group of one file and of one bucket. It ends at `--chunk-requests`, at 20 minutes of
expected work where a rate is known, and in small runs early enough that many workers find something to do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batch_gen.request import Bucket, RenderRequest

MAX_REQUESTS: Final = 64
TARGET_S: Final = 20 * 60.0
SMALL_RUN_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One request and where it came from: file as the user named it, row group and row in it, from 0."""

    request: RenderRequest
    source: str = ""
    row_group: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """Where chunks end.

    Attributes:
        num_clips: Requests of the whole round; small rounds get small chunks.
        max_requests: `--chunk-requests`, None for the default.
        cost_per_s: Work (frames x pixels x steps) that one replica does in a second, None when unknown.
    """

    num_clips: int
    max_requests: int | None = None
    cost_per_s: float | None = None

    @property
    def size(self) -> int:
        """Requests in a chunk at most."""
        if self.max_requests is not None:
            return self.max_requests
        return max(1, min(MAX_REQUESTS, -(-self.num_clips // SMALL_RUN_CHUNKS)))

    @property
    def cost(self) -> float:
        """Work in a chunk at most; a single request may have more."""
        return float("inf") if self.cost_per_s is None else self.cost_per_s * TARGET_S


def cut(rows: Iterable[PlanRow], rules: ChunkRules) -> Iterator[list[PlanRow]]:
    """Cut a stream of rows, in manifest order, into chunks; holds one row group at a time.

    Inside a row group, requests of a bucket stay together, higher priorities first, in order of their rows.
    """
    for _, group in itertools.groupby(rows, key=lambda row: (row.source, row.row_group)):
        yield from _cut_group(group, rules)


def _cut_group(group: Iterable[PlanRow], rules: ChunkRules) -> Iterator[list[PlanRow]]:
    buckets: dict[Bucket, list[PlanRow]] = {}
    for row in group:
        buckets.setdefault(row.request.bucket, []).append(row)
    for bucket in sorted(buckets):
        yield from _cut_bucket(sorted(buckets[bucket], key=lambda row: -row.request.priority), rules)


def _cut_bucket(rows: Sequence[PlanRow], rules: ChunkRules) -> Iterator[list[PlanRow]]:
    chunk: list[PlanRow] = []
    cost = 0.0
    for row in rows:
        if chunk and (len(chunk) >= rules.size or cost + row.request.cost > rules.cost):
            yield chunk
            chunk, cost = [], 0.0
        chunk.append(row)
        cost += row.request.cost
    yield chunk

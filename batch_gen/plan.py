"""Plan rounds: which clips a run has, cut into chunks, written once and read by every worker.

A round is a Parquet table named by its content, written first, and `plan-<k>.json` that names the table, written
create-only: whoever wins that write has planned, everyone else reads. The table holds whole requests, so that a worker
needs no manifest. A later run with new clip_ids adds a round; `retry` adds one too, with clips of earlier rounds.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from batch_gen.chunks import ChunkRules, PlanRow, cut
from batch_gen.errors import ConfigError, Fault, ManifestError, StoreError
from batch_gen.layout import chunk_id, plan_key, plan_table_key
from batch_gen.records import Strict
from batch_gen.request import RenderRequest
from batch_gen.runfile import MEND, what_is_wrong
from batch_gen.storage.base import AlreadyExists, Store, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLAN_FORMAT: Final = 1
ROWS_PER_WRITE: Final = 4096
_COMPACT: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
TABLES_KEPT: Final = 2

SCHEMA: Final = pa.schema(
    [
        ("chunk", pa.int32()),
        ("clip_id", pa.string()),
        ("row_id", pa.string()),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("row_group", pa.int32()),
        ("row", pa.int64()),
        ("bucket", pa.dictionary(pa.int32(), pa.string())),
        ("cost", pa.float64()),
        ("priority", pa.int32()),
        ("digest", pa.string()),
        ("request", pa.string()),
    ]
)
_INDEX_COLUMNS: Final = ["chunk", "bucket", "cost", "priority"]


class RoundHead(Strict):
    """`plan-<k>.json`.

    Attributes:
        table: Key of the Parquet table; `sha256` is of its bytes.
        inputs: Digest of the manifest's bytes and the selection; a later run with the same one need not compare rows.
        created: UTC, ISO 8601, and `worker` who planned; for people.
    """

    format: int = PLAN_FORMAT
    round: int
    reason: Literal["manifest", "retry"] = "manifest"
    table: str
    sha256: str
    num_chunks: int = Field(ge=0)
    num_clips: int = Field(ge=0)
    inputs: str = ""
    worker: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Requests that are claimed and finished together; `start` is the first one's row in the round's table."""

    id: str
    round: int
    bucket: str
    num_clips: int
    cost: float
    priority: int
    start: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a round is made; `facts` are the fields of `RoundHead` that the caller knows (inputs, worker, created),
    `num_clips` counts the manifest's clips where the caller did.
    """

    max_requests: int | None = None
    cost_per_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    num_clips: int | None = None

    @property
    def inputs(self) -> str:
        """Digest of what is planned, empty when unknown."""
        return str(self.facts.get("inputs", ""))


class PlanRound:
    """One round, its chunks in memory and its requests read on demand.

    Args:
        head: The round's JSON.
        table: Its Parquet table, mapped from a local file; the file may be gone by now.
    """

    def __init__(self, head: RoundHead, table: pa.MemoryMappedFile) -> None:
        self.head = head
        self._parquet = pq.ParquetFile(table)
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        self._starts = [0, *np.cumsum(sizes).tolist()]
        self._kept: dict[int, list[str]] = {}
        self.chunks = self._read_chunks()

    def requests(self, chunk: Chunk) -> list[RenderRequest]:
        """The requests of a chunk, in order."""
        return [self.request(row) for row in range(chunk.start, chunk.start + chunk.num_clips)]

    def column(self, name: str) -> list[Any]:
        """One column over all clips of the round, in table order."""
        values: list[Any] = self._parquet.read(columns=[name]).column(name).to_pylist()
        return values

    def find(self, clip_id: str) -> list[dict[str, Any]]:
        """Where a clip stands in this round: chunk, source, row, and its place in the table."""
        table = self._parquet.read(columns=["clip_id", "chunk", "source", "row"])
        places = pc.indices_nonzero(pc.equal(table.column("clip_id"), clip_id)).to_pylist()
        rows = table.take(pa.array(places, pa.int64())).to_pylist()
        return [
            {
                "chunk": chunk_id(self.head.round, row["chunk"]),
                "source": row["source"],
                "row": row["row"],
                "place": place,
            }
            for place, row in zip(places, rows, strict=True)
        ]

    def request(self, row: int) -> RenderRequest:
        """The request in one row of the table."""
        group = bisect.bisect_right(self._starts, row) - 1
        if group not in self._kept:
            while len(self._kept) >= TABLES_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[group] = self._parquet.read_row_group(group, columns=["request"]).column(0).to_pylist()
        return RenderRequest.from_json(json.loads(self._kept[group][row - self._starts[group]]))

    def _read_chunks(self) -> list[Chunk]:
        table = self._parquet.read(columns=_INDEX_COLUMNS)
        numbers = table.column("chunk").to_numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        if starts.size == 0:
            return []
        sizes = np.diff(starts, append=numbers.size)
        costs = np.add.reduceat(table.column("cost").to_numpy(), starts)
        priorities = np.maximum.reduceat(table.column("priority").to_numpy(), starts)
        buckets = table.column("bucket").take(pa.array(starts)).to_pylist()
        number = self.head.round
        return [
            Chunk(
                chunk_id(number, int(numbers[start])), number, bucket, int(size), float(cost), int(priority), int(start)
            )
            for start, size, cost, priority, bucket in zip(starts, sizes, costs, priorities, buckets, strict=True)
        ]


class Plan:
    """All rounds of a run, as one worker sees them."""

    def __init__(self, rounds: Iterable[PlanRound] = ()) -> None:
        self.rounds = list(rounds)
        self._by_id = {chunk.id: chunk for chunk in self.chunks}

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk of every round, in order of their ids."""
        return [chunk for plan_round in self.rounds for chunk in plan_round.chunks]

    @property
    def num_clips(self) -> int:
        """Clips of the run; a clip that a retry plans again counts once."""
        return sum(r.head.num_clips for r in self.rounds if r.head.reason == "manifest")

    def chunk(self, chunk: str) -> Chunk | None:
        """The chunk of this id, None when no known round has it."""
        return self._by_id.get(chunk)

    def requests(self, chunk: Chunk) -> list[RenderRequest]:
        """The requests of a chunk, in order."""
        return self.rounds[chunk.round].requests(chunk)

    def find(self, clip_id: str) -> list[dict[str, Any]]:
        """Every place where a clip is planned, first round first: chunk, source file, row number."""
        return [place for plan_round in self.rounds for place in plan_round.find(clip_id)]

    def request(self, clip_id: str) -> RenderRequest:
        """The request of a clip that the plan has; KeyError when it has not."""
        for plan_round in self.rounds:
            for place in plan_round.find(clip_id):
                return plan_round.request(place["place"])
        raise KeyError(clip_id)

    def refresh(self, store: Store) -> bool:
        """Read the rounds that were added meanwhile; return whether there were any."""
        before = len(self.rounds)
        while (plan_round := _load_round(store, len(self.rounds))) is not None:
            self.rounds.append(plan_round)
            self._by_id.update({chunk.id: chunk for chunk in plan_round.chunks})
        return len(self.rounds) > before


def load_plan(store: Store) -> Plan:
    """Every round that was planned so far; a plan without rounds when none was.

    Raises:
        ConfigError: A round is damaged or of a newer version.
    """
    plan = Plan()
    plan.refresh(store)
    return plan


def plan_run(store: Store, rows: Callable[[], Iterable[PlanRow]], options: PlanOptions) -> Plan:
    """Plan what the manifest has and the run does not: the first round, a further one, or nothing.

    Args:
        store: The output root; run.json stands there already.
        rows: Gives the manifest's requests in order, anew at every call.
        options: Limits, rate, and who plans.

    Raises:
        ManifestError: A clip_id of the run comes with another request now; every such row is named.
    """
    plan = load_plan(store)
    while not _covered(plan, options):
        if not plan.rounds:  # all of it is new: nothing of it is kept in memory
            num_clips = sum(1 for _ in rows()) if options.num_clips is None else options.num_clips
            if num_clips == 0:
                break
            _write_round(store, rows(), 0, num_clips, options)
            plan.refresh(store)
            continue
        known = _Known(plan)
        new = known.compare(rows())
        if not new:
            break
        fresh = (row for row in rows() if row.request.clip_id in new)
        _write_round(store, fresh, len(plan.rounds), len(new), options)
        plan.refresh(store)
    return plan


def plan_retry(store: Store, plan: Plan, clip_ids: set[str], options: PlanOptions) -> RoundHead:
    """Plan clips of earlier rounds once more; their attempts begin at zero.

    Raises:
        ConfigError: A clip is not in the plan, or another round was added at the same moment.
    """
    known = _Known(plan)
    missing = sorted(clip_ids - known.places.keys())
    if missing:
        raise ConfigError(f"{store.url}: no clip {', '.join(missing[:10])} in the plan of this run")
    rows = [PlanRow(known.request(clip_id), "retry", 0, place) for place, clip_id in enumerate(sorted(clip_ids))]
    options = PlanOptions(options.max_requests, options.cost_per_s, {**options.facts, "reason": "retry"})
    head = _write_round(store, rows, len(plan.rounds), len(rows), options)
    if head is None:
        raise ConfigError(f"{store.url}: another round was planned at the same moment; try again")
    plan.refresh(store)
    return head


def _covered(plan: Plan, options: PlanOptions) -> bool:
    return bool(options.inputs) and any(r.head.inputs == options.inputs for r in plan.rounds)


class _Known:
    """Where each clip of a plan stands: (round, row in its table), and the digest of its request."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.places: dict[str, tuple[int, int]] = {}
        self._digests: list[list[str]] = []
        for number, plan_round in enumerate(plan.rounds):
            self._digests.append(plan_round.column("digest"))
            self.places.update((clip_id, (number, row)) for row, clip_id in enumerate(plan_round.column("clip_id")))

    def request(self, clip_id: str) -> RenderRequest:
        number, row = self.places[clip_id]
        return self._plan.rounds[number].request(row)

    def compare(self, rows: Iterable[PlanRow]) -> set[str]:
        """The clip_ids that are new; a known one with another request is a fault of its row."""
        new: set[str] = set()
        faults: list[Fault] = []
        for row in rows:
            place = self.places.get(row.request.clip_id)
            if place is None:
                new.add(row.request.clip_id)
            elif self._digests[place[0]][place[1]] != row.request.digest:
                faults.append(self._fault(row))
        if faults:
            raise ManifestError(faults)
        return new

    def _fault(self, row: PlanRow) -> Fault:
        old, new = self.request(row.request.clip_id).to_json(), row.request.to_json()
        changed = [f"{name} {old[name]!r} -> {new[name]!r}" for name in new if old.get(name) != new[name]]
        what = f"clip {row.request.clip_id} is planned in this run with another request: {'; '.join(changed)}"
        return Fault(row.source, row.row, None, None, f"{what}; give it a new row_id or use another --out")


def _write_round(
    store: Store, rows: Iterable[PlanRow], number: int, num_clips: int, options: PlanOptions
) -> RoundHead | None:
    """Write table and head of a round; None when somebody else wrote this round first."""
    rules = ChunkRules(num_clips, options.max_requests, options.cost_per_s)
    with tempfile.TemporaryDirectory(prefix="batch-gen-plan-") as folder:
        path = Path(folder) / "plan.parquet"
        num_chunks, num_rows = _write_table(path, cut(rows, rules))
        sha256 = sha256_of(path)
        key = plan_table_key(number, sha256)
        with contextlib.suppress(AlreadyExists):  # the same content: its name says so
            store.create(key, path, sha256=sha256)
    head = RoundHead(round=number, table=key, sha256=sha256, num_chunks=num_chunks, num_clips=num_rows, **options.facts)
    try:
        store.create(plan_key(number), head.to_bytes(), content_type="application/json")
    except AlreadyExists:
        return None
    return head


def _write_table(path: Path, chunks: Iterable[list[PlanRow]]) -> tuple[int, int]:
    """Write the table of a round; return the numbers of chunks and clips."""
    num_chunks = num_rows = 0
    pending: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for number, chunk in enumerate(chunks):
            pending += [_cells(number, row) for row in chunk]
            num_chunks, num_rows = number + 1, num_rows + len(chunk)
            if len(pending) >= ROWS_PER_WRITE:
                writer.write_table(_table(pending))
                pending = []
        if pending:
            writer.write_table(_table(pending))
    return num_chunks, num_rows


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({name: [row[name] for row in rows] for name in SCHEMA.names}, schema=SCHEMA)


def _cells(number: int, row: PlanRow) -> dict[str, Any]:
    request = row.request
    return {
        "chunk": number,
        "clip_id": request.clip_id,
        "row_id": request.row_id,
        "source": row.source,
        "row_group": row.row_group,
        "row": row.row,
        "bucket": str(request.bucket),
        "cost": float(request.cost),
        "priority": request.priority,
        "digest": request.digest,
        "request": _COMPACT.encode(request.to_json()),
    }


def _load_round(store: Store, number: int) -> PlanRound | None:
    blob = store.get(plan_key(number))
    if blob is None:
        return None
    place = f"{store.url}/{plan_key(number)}"
    try:
        head = RoundHead.model_validate_json(blob.body)
    except ValidationError as error:
        raise ConfigError(f"{place} is damaged or of another version ({what_is_wrong(error)}); {MEND}") from error
    with tempfile.TemporaryDirectory(prefix="batch-gen-plan-") as folder:
        path = Path(folder) / "plan.parquet"
        if store.download(head.table, path) is None:
            raise StoreError(f"{place} names {head.table}, which is missing; was the output root copied in part?")
        if sha256_of(path) != head.sha256:
            text = f"{store.url}/{head.table} is damaged: its SHA-256 is not the one that {place} names"
            raise ConfigError(f"{text}; {MEND}")
        return PlanRound(head, pa.memory_map(str(path)))


__all__ = ["Chunk", "Plan", "PlanOptions", "PlanRow", "RoundHead", "load_plan", "plan_retry", "plan_run"]

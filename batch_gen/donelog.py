"""The done log: which chunks are finished, and how each of their clips ended.

`done/<chunk>.json` is written once, when every clip of the chunk has a verdict. A resume lists this log and nothing
else, so its cost does not grow with clips; above 10,000 entries they are folded into `done/compact-<n>.json` (ranges of
chunk numbers and the quarantined clips by name), so that it does not grow with chunks either.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from pydantic import Field, ValidationError

from batch_gen.errors import BatchGenError, CheckFailed
from batch_gen.layout import COMPACT_PREFIX, DONE_PREFIX, compact_key, done_key
from batch_gen.records import Strict, Verdict
from batch_gen.storage.base import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from batch_gen.storage.base import Store

LOG: Final = logging.getLogger(__name__)
DONE_FORMAT: Final = 1
COMPACT_ABOVE: Final = 10_000
FOLD_BY: Final = 1.5
NUM_READERS: Final = 16


class DoneChunk(Strict):
    """`done/<chunk>.json`.

    Attributes:
        clips: Every clip of the chunk.
        counts: What the chunk cost beside its clips: starts, failures, deaths, duplicates, seconds; and milliseconds of
            engines that failed or were being started since the worker's last chunk.
        finished: UTC; for people and for the estimate of what remains.
    """

    format: int = DONE_FORMAT
    chunk: str
    epoch: int = 1
    worker: str = ""
    clips: dict[str, Verdict]
    counts: dict[str, float] = Field(default_factory=dict)
    finished: str = ""


class Compact(Strict):
    """`done/compact-<n>.json`: everything up to some moment in one object.

    Attributes:
        rounds: Round -> ranges [first, last] of finished chunk numbers.
        quarantined: The clips that were set aside, with the chunk that says so.
    """

    format: int = DONE_FORMAT
    number: int
    rounds: dict[str, list[tuple[int, int]]] = Field(default_factory=dict)
    num_committed: int = 0
    quarantined: dict[str, Verdict] = Field(default_factory=dict)
    counts: dict[str, float] = Field(default_factory=dict)


class Tally(Strict):
    """The done log in figures."""

    num_chunks: int
    num_committed: int
    quarantined: dict[str, Verdict]
    counts: dict[str, float]


class DoneLog:
    """One worker's view of the log; `refresh` brings it up to date.

    Args:
        store: The output root.
        compact_above: Number of single entries above which `compact` folds them.
    """

    def __init__(self, store: Store, compact_above: int = COMPACT_ABOVE) -> None:
        self._store = store
        self._compact_above = compact_above
        self._compact = Compact(number=-1)
        self._single: set[str] = set()
        self._read: dict[str, DoneChunk] = {}

    def refresh(self) -> None:
        """List the log; read the newest summary when there is a new one."""
        keys = [entry.key for entry in self._store.list(DONE_PREFIX)]
        newest = max((key for key in keys if key.startswith(COMPACT_PREFIX)), default=None)
        if newest is not None and newest != compact_key(self._compact.number):
            self._compact = self._load_compact(newest)
        names = (key[len(DONE_PREFIX) : -len(".json")] for key in keys if not key.startswith(COMPACT_PREFIX))
        self._single = {name for name in names if not _within(self._compact, name)}

    @property
    def num_single(self) -> int:
        """Entries that no summary holds."""
        return len(self._single)

    def __contains__(self, chunk: str) -> bool:
        """Whether a chunk is finished, as far as we know."""
        return chunk in self._single or _within(self._compact, chunk)

    def add(self, entry: DoneChunk) -> bool:
        """Finish a chunk; False when another worker finished it first, whose entry then stands."""
        try:
            self._store.create(done_key(entry.chunk), entry.to_bytes(), content_type="application/json")
        except AlreadyExists:
            self._single.add(entry.chunk)
            return False
        self._single.add(entry.chunk)
        self._read[entry.chunk] = entry
        return True

    def reopen(self, chunk: str, clip_ids: Collection[str]) -> None:
        """Take a chunk with these clips back, because some of them are gone; the next claim renders those.

        Raises:
            CheckFailed: Another process folded the log at the same moment; try again.
        """
        if _within(self._compact, chunk):
            self._write_compact(_without(self._compact, chunk, clip_ids))
        self._store.delete(done_key(chunk))
        self._single.discard(chunk)
        self._read.pop(chunk, None)

    def entries(self) -> Iterator[DoneChunk]:
        """The entries that no summary holds, in order of chunks; what was read once is not read again."""
        missing = sorted(self._single - self._read.keys())
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for chunk, entry in zip(missing, pool.map(self._load, missing), strict=True):
                if entry is not None:
                    self._read[chunk] = entry
        for chunk in sorted(self._single):
            if chunk in self._read:
                yield self._read[chunk]

    def tally(self) -> Tally:
        """Counts over summary and entries; a clip that a later chunk committed is no longer quarantined."""
        folded = _fold(self._compact, self.entries())
        num_chunks = len(self._single) + sum(b - a + 1 for ranges in self._compact.rounds.values() for a, b in ranges)
        return Tally(
            num_chunks=num_chunks,
            num_committed=folded.num_committed,
            quarantined=folded.quarantined,
            counts=folded.counts,
        )

    def compact(self) -> bool:
        """Fold the entries when there are too many; True when this call did it.

        The summary is written first (create-only: one of many folders wins), then the folded entries are removed.
        """
        if len(self._single) <= self._compact_above:
            return False
        entries = list(self.entries())
        try:
            self._write_compact(_fold(self._compact, entries))
        except CheckFailed:
            self.refresh()
            return False
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(lambda entry: self._store.delete(done_key(entry.chunk)), entries))
        self._single -= {entry.chunk for entry in entries}
        self._read.clear()
        return True

    def _write_compact(self, folded: Compact) -> None:
        """The next summary; the newest one counts, so a race for its number is lost by all but one."""
        folded = folded.model_copy(update={"number": self._compact.number + 1})
        try:
            self._store.create(compact_key(folded.number), folded.to_bytes(), content_type="application/json")
        except AlreadyExists:
            raise CheckFailed(f"{self._store.url}/{compact_key(folded.number)} was just written; try again") from None
        self._compact = folded

    def _load(self, chunk: str) -> DoneChunk | None:
        blob = self._store.get(done_key(chunk))
        if blob is None:  # folded since we listed
            return None
        try:
            return DoneChunk.model_validate_json(blob.body)
        except ValidationError as error:
            raise CheckFailed(f"{self._store.url}/{done_key(chunk)} is damaged; see batch-gen verify --fix") from error

    def _load_compact(self, key: str) -> Compact:
        blob = self._store.get(key)
        try:
            return Compact.model_validate_json(b"" if blob is None else blob.body)
        except ValidationError as error:
            raise CheckFailed(f"{self._store.url}/{key} is damaged; see batch-gen verify --fix") from error


class Folder:
    """Folds a long log beside a worker's own work, so that no listing grows with the run.

    Each worker has a limit of its own between once and `FOLD_BY` times `compact_above`: rarely do two fold at once, and
    then one of them has only looked.
    """

    def __init__(self, store: Store, compact_above: int = COMPACT_ABOVE, dice: random.Random | None = None) -> None:
        self._store = store
        self._compact_above = compact_above
        self._limit = compact_above * (dice or random.Random()).uniform(1.0, FOLD_BY)
        self._thread: threading.Thread | None = None

    def look(self, log: DoneLog) -> None:
        """Begin to fold when the log that was just refreshed is too long and nothing is being folded here."""
        if log.num_single > self._limit and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fold, name="fold", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until what was begun is over."""
        if self._thread is not None:
            self._thread.join()

    def _fold(self) -> None:
        log = DoneLog(self._store, self._compact_above)  # a view of its own: the worker's is read meanwhile
        with contextlib.suppress(BatchGenError):
            log.refresh()
            if log.compact():
                LOG.info("folded the done log")


def _split(chunk: str) -> tuple[str, int]:
    round_name, _, number = chunk.partition("-")
    return round_name, int(number)


def _within(compact: Compact, chunk: str) -> bool:
    round_name, number = _split(chunk)
    ranges = compact.rounds.get(round_name, [])
    index = bisect.bisect_right(ranges, (number, float("inf"))) - 1
    return index >= 0 and ranges[index][0] <= number <= ranges[index][1]


def _without(compact: Compact, chunk: str, clip_ids: Collection[str]) -> Compact:
    """The summary without one chunk; what it cost stays spent."""
    round_name, number = _split(chunk)
    kept: list[tuple[int, int]] = []
    for first, last in compact.rounds[round_name]:
        if first <= number <= last:
            kept += [(a, b) for a, b in ((first, number - 1), (number + 1, last)) if a <= b]
        else:
            kept.append((first, last))
    changes = {
        "rounds": {**compact.rounds, round_name: kept},
        "num_committed": compact.num_committed - sum(clip_id not in compact.quarantined for clip_id in clip_ids),
        "quarantined": {clip_id: v for clip_id, v in compact.quarantined.items() if clip_id not in clip_ids},
    }
    return compact.model_copy(update=changes)


def _fold(compact: Compact, entries: Iterable[DoneChunk]) -> Compact:
    """A summary of the summary and these entries."""
    numbers: dict[str, list[tuple[int, int]]] = {name: list(ranges) for name, ranges in compact.rounds.items()}
    num_committed = compact.num_committed
    quarantined, counts = dict(compact.quarantined), dict(compact.counts)
    for entry in sorted(entries, key=lambda entry: _split(entry.chunk)[0].zfill(9)):
        round_name, number = _split(entry.chunk)
        numbers.setdefault(round_name, []).append((number, number))
        for name, value in entry.counts.items():
            counts[name] = counts.get(name, 0.0) + value
        for clip_id, verdict in entry.clips.items():
            if verdict.status == "committed":
                num_committed += 1
                quarantined.pop(clip_id, None)
            else:
                quarantined[clip_id] = verdict
    rounds = {name: _merged(ranges) for name, ranges in numbers.items()}
    return compact.model_copy(
        update={"rounds": rounds, "num_committed": num_committed, "quarantined": quarantined, "counts": counts}
    )


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in as few ranges as possible."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged

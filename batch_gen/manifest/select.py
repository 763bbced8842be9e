"""Which clips of a manifest are wanted: where, ids and limit, applied batch by batch in manifest order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch_gen import rules
from batch_gen.errors import UsageError
from batch_gen.manifest import where as where_language
from batch_gen.manifest.canon import filled
from batch_gen.manifest.identity import Digests, hashed_id, sample_counts
from batch_gen.request import clip_id_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batch_gen.manifest.options import ManifestOptions
    from batch_gen.manifest.sources import Batch, ManifestFile

Rows = npt.NDArray[np.intp]

_ARROW: Final = {
    "string": pa.large_string(),
    "fps": pa.large_string(),
    "int32": pa.int64(),
    "int64": pa.int64(),
    "float64": pa.float64(),
}


@dataclass(frozen=True, slots=True)
class Names:
    """Where row_ids come from: the cells, or the content of the rows without one.

    Attributes:
        content: 16-byte digests of the rows of the whole manifest, `[rows]`; None when every row has its own id.
        repeats: Row number in the whole manifest -> 2, 3, ... for rows equal to an earlier one.
    """

    content: Digests | None
    repeats: Mapping[int, int]

    def of(self, batch: Batch, rows: Sequence[int]) -> list[str]:
        """row_ids of some rows of a batch."""
        cells = batch.cells.get("row_id")
        own = [None] * len(rows) if cells is None else cells.take(pa.array(rows, pa.int64())).to_pylist()
        return [
            self._hashed(batch.first_global + row) if name is None else name
            for row, name in zip(rows, own, strict=True)
        ]

    def _hashed(self, number: int) -> str:
        assert self.content is not None
        return hashed_id(self.content[number], self.repeats.get(number, 1))


@dataclass(frozen=True, slots=True)
class Picked:
    """Wanted clips of one batch: row index in the batch and sample number, both `[clips]`."""

    batch: Batch
    rows: Rows
    samples: Rows
    counts: Rows

    def only(self, rows: Sequence[int]) -> Picked:
        """The clips of these rows of the batch alone."""
        kept = np.isin(self.rows, rows)
        return replace(self, rows=self.rows[kept], samples=self.samples[kept])

    def clip_rows(self) -> Rows:
        """The rows with at least one wanted clip, each once, in order."""
        return np.unique(self.rows)


class Selection:
    """The wanted part of a manifest; one object serves one pass over the batches, in order."""

    def __init__(self, options: ManifestOptions, names: Names) -> None:
        self._options = options
        self._names = names
        self._where = None if options.where is None else where_language.parse(options.where)
        self._left = options.limit
        self.found: set[str] = set()

    @property
    def extra_columns(self) -> frozenset[str]:
        """Columns beside the rules' that the expression reads."""
        return frozenset() if self._where is None else self._where.columns - set(rules.COLUMNS)

    @property
    def schema_columns(self) -> frozenset[str]:
        """Columns of the rules that selecting needs."""
        needed = {"samples"} if self._options.ids is None else {"samples", "row_id"}
        return frozenset(needed if self._where is None else needed | (self._where.columns & set(rules.COLUMNS)))

    @property
    def exhausted(self) -> bool:
        """Whether the limit is reached."""
        return self._left is not None and self._left <= 0

    def check_columns(self, files: Sequence[ManifestFile]) -> None:
        """Refuse an expression over a column that no file has.

        Raises:
            UsageError: With the columns that there are.
        """
        known = set(rules.COLUMNS).union(*(file.extra for file in files))
        unknown = sorted((set() if self._where is None else self._where.columns) - known)
        if unknown:
            raise UsageError(f"--where: no column {unknown[0]!r} in the manifest; it has {', '.join(sorted(known))}")

    def pick(self, batch: Batch) -> Picked:
        """The wanted clips of the next batch."""
        kept = np.arange(batch.num_rows)
        if self._where is not None:
            kept = np.flatnonzero(self._where.mask(self._columns(batch)).to_numpy(zero_copy_only=False))
        counts = sample_counts(overridden(batch, self._options))
        rows = np.repeat(kept, counts[kept])
        ends = np.cumsum(counts[kept])
        samples = np.arange(len(rows)) - np.repeat(ends - counts[kept], counts[kept])
        picked = Picked(batch, rows, samples, counts)
        if self._options.ids is not None:
            picked = self._with_ids(picked, self._options.ids)
        if self._left is not None:
            picked = replace(picked, rows=picked.rows[: self._left], samples=picked.samples[: self._left])
            self._left -= len(picked.rows)
        return picked

    def _columns(self, batch: Batch) -> dict[str, pa.Array]:
        assert self._where is not None
        have = {**batch.extra, **batch.cells}
        return {name: have.get(name, pa.nulls(batch.num_rows)) for name in self._where.columns}

    def _with_ids(self, picked: Picked, ids: frozenset[str]) -> Picked:
        unique, place = np.unique(picked.rows, return_inverse=True)
        names = self._names.of(picked.batch, unique.tolist())
        wanted = []
        for at, row, sample in zip(place.tolist(), picked.rows.tolist(), picked.samples.tolist(), strict=True):
            clip_id = clip_id_of(names[at], sample, int(picked.counts[row]))
            hits = ids & {names[at], clip_id}
            self.found |= hits
            wanted.append(bool(hits))
        mask = np.array(wanted, bool)
        return replace(picked, rows=picked.rows[mask], samples=picked.samples[mask])


def overridden(batch: Batch, options: ManifestOptions) -> Batch:
    """The batch with `--override` values in place of its cells."""
    if not options.overrides:
        return batch
    constants = {
        name: pa.repeat(pa.scalar(value, _ARROW[rules.BY_COLUMN[name].type]), batch.num_rows)
        for name, value in options.overrides.items()
    }
    return replace(batch, cells={**batch.cells, **constants})


def unnamed(batch: Batch) -> npt.NDArray[np.bool_]:
    """Which rows have no row_id of their own: `[rows]` bool."""
    cells = batch.cells.get("row_id")
    return np.ones(batch.num_rows, bool) if cells is None else ~filled(cells)


def in_order(files: Sequence[ManifestFile]) -> Iterator[tuple[ManifestFile, int]]:
    """Every (file, row group) of the manifest, in order."""
    for file in files:
        for group in range(len(file.group_rows)):
            yield file, group

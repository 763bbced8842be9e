"""The first pass over a manifest: every rule on every row, and the names of rows and clips."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from batch_gen import rule_checks, rules
from batch_gen.errors import Fault
from batch_gen.manifest.canon import Mask, filled, mask_by_unique, numbers
from batch_gen.manifest.checks import NO_SUCH_FILE, Broken, check_column
from batch_gen.manifest.identity import (
    DIGEST_BYTES,
    content_digests,
    hashed_id,
    name_digests,
    sample_counts,
    twins,
)
from batch_gen.manifest.select import Names, overridden, unnamed
from batch_gen.manifest.sources import Batch, ManifestFile, batches
from batch_gen.manifest.survey import Survey
from batch_gen.request import clip_id_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batch_gen.manifest.faults import FaultLog
    from batch_gen.manifest.options import ManifestOptions
    from batch_gen.request import ModelLimits

EQUAL_ROWS = "equal to an earlier row; their ids got suffixes -2, -3 (batch-gen import --dedupe drops them)"
SAME_CLIP = "render the same clip as an earlier row: equal in everything, the seed too"


class Inspector:
    """Takes every batch in order, then `finish` tells the names; faults go to the log."""

    def __init__(
        self, files: Sequence[ManifestFile], limits: ModelLimits, options: ManifestOptions, log: FaultLog
    ) -> None:
        num_rows = sum(file.num_rows for file in files)
        self._files = files
        self._limits = limits
        self._options = options
        self._log = log
        self._content = np.zeros(num_rows, f"V{DIGEST_BYTES}")
        self._name = np.zeros(num_rows, f"V{DIGEST_BYTES}")  # of rows with an id of their own and one sample
        self._hashed = np.zeros(num_rows, bool)
        self._single = np.zeros(num_rows, bool)
        self._seeded = np.zeros(num_rows, bool)
        self._many: dict[int, tuple[str | None, int]] = {}  # row -> (own id, samples)
        self._known_presets = frozenset({*options.presets, options.preset})
        self.used_presets: set[str] = set()
        self.survey = Survey()

    def add(self, batch: Batch) -> None:
        """Check a batch and note its rows' digests."""
        checked = overridden(batch, self._options)
        bad = np.zeros(batch.num_rows, bool)
        nameless = np.zeros(batch.num_rows, bool)
        for name in rules.COLUMNS:
            self._check(checked, name, nameless if name in {"row_id", "samples"} else bad)
        bad |= nameless
        for broken in self._cross(checked, ~bad):
            self._report(checked, broken)
            bad[broken.indices] = True
        self._note(batch, checked, nameless)

    def _check(self, batch: Batch, name: str, bad: Mask) -> None:
        rule, cells = rules.BY_COLUMN[name], batch.cells.get(name)
        if cells is None:
            return  # a missing or unreadable column is one fault of the file, not one per row
        found = list(check_column(rule, cells, self._limits.size_multiple))
        for broken in found:
            self._report(batch, broken)
            bad[broken.indices] = True
        if not found and name == "preset":
            self._check_preset(batch, cells, bad)
        if (
            not found
            and rule.type == "media"
            and self._options.check_files
            and not batch.file.source.base.startswith("s3:")
        ):
            self._check_files(batch, name, cells, bad)

    def _check_preset(self, batch: Batch, cells: pa.Array, bad: Mask) -> None:
        self.used_presets |= self._known_presets.intersection(cells.unique().to_pylist())
        unknown = ~mask_by_unique(cells, lambda value: value in self._known_presets)
        if unknown.any():
            names = ", ".join(sorted(name for name in self._known_presets if name))
            message = f"is no preset for this run's checkpoint; a row may name {names}"
            self._report(batch, Broken("preset", np.flatnonzero(unknown), message=message))
            bad |= unknown

    def _check_files(self, batch: Batch, name: str, cells: pa.Array, bad: Mask) -> None:
        base = Path(batch.file.source.base)

        def exists(value: object) -> bool:
            if not isinstance(value, str) or value.lower().startswith("s3://"):
                return True
            return (base / value).is_file()

        lost = ~mask_by_unique(cells, exists)
        if lost.any():
            self._report(batch, Broken(name, np.flatnonzero(lost), message=NO_SUCH_FILE))
            bad |= lost

    def _cross(self, batch: Batch, good: Mask) -> list[Broken]:
        """Faults that need two cells, among rows whose cells are each legal."""
        empty = np.zeros(batch.num_rows, bool)
        image, last = (filled(batch.cells[name]) if name in batch.cells else empty for name in ("image", "last_image"))
        found = [Broken("last_image", np.flatnonzero(good & last & ~image), message=rule_checks.LAST_WITHOUT_FIRST)]
        kinds = {"text": ~image & ~last, "image": image & ~last, "first_last": image & last}
        for kind, rows in kinds.items():
            if kind not in self._limits.conditionings:
                message = rule_checks.unserved(kind, self._limits.name)
                found.append(
                    Broken("prompt" if kind == "text" else "image", np.flatnonzero(good & rows), message=message)
                )
            elif kind == "first_last" and "num_frames" in batch.cells:
                short = good & rows & (numbers(batch.cells["num_frames"]) == 1)
                found.append(Broken("num_frames", np.flatnonzero(short), message=rule_checks.TOO_SHORT_FOR_LAST))
        if "seed" in batch.cells and "samples" in batch.cells:
            seeds, samples = numbers(batch.cells["seed"]), numbers(batch.cells["samples"])
            with np.errstate(invalid="ignore"):
                over = np.flatnonzero(good & (seeds + samples - 1 > rules.MAX_SEED))
            found += [
                Broken("seed", over[k : k + 1], message=rule_checks.seed_overflow(int(samples[row])))
                for k, row in enumerate(over.tolist())
            ]
        return [broken for broken in found if len(broken.indices)]

    def _report(self, batch: Batch, broken: Broken) -> None:
        room = self._log.room(broken.column)
        rule, cells = rules.BY_COLUMN[broken.column], batch.cells.get(broken.column)
        for row in broken.indices[:room].tolist():
            value = None if cells is None else _value(cells, row)
            message = broken.explain(rule, value, self._limits.size_multiple)
            text = None if value is None else rule_checks.shown(value)
            self._log.add(Fault(batch.file.source.name, batch.first_row + row, broken.column, text, message))
        self._log.count(max(0, len(broken.indices) - room))

    def _note(self, batch: Batch, checked: Batch, nameless: Mask) -> None:
        here = slice(batch.first_global, batch.first_global + batch.num_rows)
        own = ~unnamed(batch)
        self._content[here] = content_digests(batch)
        self._hashed[here] = ~own & ~nameless
        if "seed" in checked.cells:
            self._seeded[here] = filled(checked.cells["seed"]) & own & ~nameless
        counts = np.where(nameless, 1, sample_counts(checked))
        single = own & ~nameless & (counts == 1)
        self._single[here] = single
        ids = batch.cells.get("row_id")
        if ids is not None and single.any():
            names = ids.filter(pa.array(single)).to_pylist()
            self._name[np.flatnonzero(single) + here.start] = name_digests(names, fold_case=self._options.fold_case)
        for row in np.flatnonzero(counts > 1).tolist():
            self._many[here.start + row] = (None if ids is None else ids[row].as_py(), int(counts[row]))

    def finish(self) -> Names:
        """Suffixes for equal rows and faults for ids that stand twice; call once, after the last batch."""
        hashed = np.flatnonzero(self._hashed)
        content = self._content if len(hashed) == len(self._content) else self._content[hashed]
        repeats = {int(hashed[twin.second]): twin.repeat for twin in twins(content)}
        if repeats:
            self.survey.warn("equal_rows", EQUAL_ROWS, len(repeats), self._place(min(repeats)))
        names = Names(self._content if len(hashed) else None, repeats)
        self._check_unique(hashed, repeats)
        self._warn_same_clips()
        return names

    def _check_unique(self, hashed: np.ndarray[tuple[int], np.dtype[np.intp]], repeats: dict[int, int]) -> None:
        """Every clip_id once. Hashed ids cannot clash among themselves, so they count only beside other ids."""
        if self._single.all():
            self._report_clashes([(twin.first, twin.second) for twin in twins(self._name)])
            return
        owner = np.flatnonzero(self._single)
        digests = [self._name[owner]]
        owners = [owner]
        if len(hashed) and (len(owner) or self._many):
            alone = [row for row in hashed.tolist() if row not in self._many]
            ids = [hashed_id(self._content[row], repeats.get(row, 1)) for row in alone]
            digests.append(name_digests(ids, fold_case=self._options.fold_case))
            owners.append(np.array(alone, np.intp))
        for row, (own, samples) in self._many.items():
            name = hashed_id(self._content[row], repeats.get(row, 1)) if own is None else own
            clip_ids = [clip_id_of(name, sample, samples) for sample in range(samples)]
            digests.append(name_digests(clip_ids, fold_case=self._options.fold_case))
            owners.append(np.full(samples, row, np.intp))
        clashes = twins(np.concatenate(digests))
        whose = np.concatenate(owners)
        pairs = dict.fromkeys((int(whose[twin.first]), int(whose[twin.second])) for twin in clashes)
        self._report_clashes([(min(pair), max(pair)) for pair in pairs])

    def _report_clashes(self, pairs: list[tuple[int, int]]) -> None:
        room = self._log.room("row_id")
        shown = sorted(pairs, key=lambda pair: pair[1])[:room]
        values = self._ids_of({row for pair in shown for row in pair})
        for first, second in shown:
            file, row = self._locate(second)
            message = f"is already the id of {self._place(first)}"
            if values.get(first) != values.get(second):
                message += (
                    f" ({rule_checks.shown(values.get(first))}); with case ignored or samples expanded they are one"
                )
            value = values.get(second)
            text = None if value is None else rule_checks.shown(value)
            self._log.add(Fault(file.source.name, row, "row_id", text, message))
        self._log.count(len(pairs) - len(shown))

    def _ids_of(self, rows: set[int]) -> dict[int, str | None]:
        """The row_id cells of a few rows, read again."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for number in rows:
            file, row = self._locate(number)
            ends = np.cumsum(file.group_rows)
            wanted.setdefault((file.index, int(np.searchsorted(ends, row, side="right"))), []).append(number)
        found: dict[int, str | None] = {}
        for (index, group), numbers_here in sorted(wanted.items()):
            for batch in batches(self._files[index], ["row_id"], self._log, row_groups=[group]):
                for number in numbers_here:
                    at = number - batch.first_global
                    if "row_id" in batch.cells and 0 <= at < batch.num_rows:
                        found[number] = batch.cells["row_id"][at].as_py()
        return found

    def _warn_same_clips(self) -> None:
        seeded = np.flatnonzero(self._seeded)
        same = [int(seeded[twin.second]) for twin in twins(self._content[seeded])]
        if same:
            self.survey.warn("same_clip", SAME_CLIP, len(same), self._place(min(same)))

    def _locate(self, number: int) -> tuple[ManifestFile, int]:
        starts = [file.first_global for file in self._files]
        file = self._files[bisect.bisect_right(starts, number) - 1]
        return file, number - file.first_global

    def _place(self, number: int) -> str:
        file, row = self._locate(number)
        return f"{file.source.name} row {row}"


def _value(cells: pa.Array, row: int) -> object:
    try:
        return cells[row].as_py()
    except UnicodeDecodeError:
        return cells[row].as_buffer().to_pybytes()

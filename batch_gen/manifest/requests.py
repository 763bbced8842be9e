"""Rows -> requests: one frozen RenderRequest per wanted clip, every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batch_gen import rules
from batch_gen.manifest.faults import FaultLog
from batch_gen.manifest.options import Location, ManifestOptions
from batch_gen.manifest.resolve import media_location, preset_values, to_json_value
from batch_gen.manifest.select import Names, Picked, overridden
from batch_gen.manifest.sources import Batch, ManifestFile, batches
from batch_gen.request import RenderRequest, SamplingDefaults, clip_id_of, default_seed
from batch_gen.rule_checks import parse_fps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from fractions import Fraction

_WHOLE = ("width", "height", "num_frames", "steps")
MEDIA_COLUMNS = ("image", "last_image")
_REAL = ("guidance_high", "guidance_low", "flow_shift")


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Makes requests of picked rows."""

    defaults: SamplingDefaults
    options: ManifestOptions
    names: Names

    def requests(self, picked: Picked) -> Iterator[tuple[Location, RenderRequest]]:
        """The requests of the wanted clips of one batch, in order."""
        rows = picked.clip_rows().tolist()
        if not rows:
            return
        batch = overridden(picked.batch, self.options)
        cells = _taken(batch, rows)
        row_ids = self.names.of(picked.batch, rows)
        presets = preset_values(self.options.presets, self.options.preset, self.defaults)
        place = {row: at for at, row in enumerate(rows)}
        shared: dict[str, Any] = {}
        current = -1
        for row, sample in zip(picked.rows.tolist(), picked.samples.tolist(), strict=True):
            at = place[row]
            if at != current:
                shared, current = self._shared(batch, cells, presets, at), at
            samples = int(picked.counts[row])
            clip_id = clip_id_of(row_ids[at], sample, samples)
            seed = cells["seed"][at]
            location = Location(batch.file.index, batch.row_group, batch.first_row + row)
            yield (
                location,
                RenderRequest(
                    clip_id=clip_id,
                    row_id=row_ids[at],
                    sample=sample,
                    seed=default_seed(self.options.run_seed, clip_id) if seed is None else int(seed) + sample,
                    **shared,
                ),
            )

    def _shared(
        self, batch: Batch, cells: Mapping[str, list[Any]], presets: Mapping[str, SamplingDefaults], at: int
    ) -> dict[str, Any]:
        """What all samples of a row have in common."""
        preset = cells["preset"][at] or self.options.preset
        defaults = presets[preset]

        def cell(name: str) -> Any:
            value = cells[name][at]
            return getattr(defaults, name) if value is None else value

        base = batch.file.source.base
        media = {name: cells[name][at] for name in MEDIA_COLUMNS}
        shared: dict[str, Any] = {
            "prompt": cells["prompt"][at],
            "negative_prompt": cell("negative_prompt"),
            "fps": _fps(cell("fps")),
            "priority": int(cells["priority"][at] or 0),
            "preset": preset,
            "extra": {name: to_json_value(column[at]) for name, column in cells.items() if name in batch.extra},
        }
        shared |= {name: int(cell(name)) for name in _WHOLE}
        shared |= {name: float(cell(name)) for name in _REAL}
        shared |= {name: None if value is None else media_location(base, value) for name, value in media.items()}
        return shared


def _taken(batch: Batch, rows: list[int]) -> dict[str, list[Any]]:
    """Every column as Python values of the given rows: `[rows]` each; absent schema columns are all None."""
    taken = pa.array(rows, pa.int64())
    columns = {name: [None] * len(rows) for name in rules.COLUMNS}
    columns |= {name: cells.take(taken).to_pylist() for name, cells in batch.cells.items()}
    extra = {name: cells.take(taken).to_pylist() for name, cells in batch.extra.items()}
    return {**columns, **extra}


@lru_cache(maxsize=256)
def _fps(value: str | float | Fraction) -> Fraction:
    return parse_fps(value)


def binary_cells(batch: Batch) -> Iterator[tuple[str, bytes]]:
    """The binary image cells of a batch as (`bytes:<sha256>`, their bytes); a cell's text is no bytes."""
    for name in MEDIA_COLUMNS:
        cells = batch.cells.get(name)
        if cells is None or not pa.types.is_large_binary(cells.type):
            continue
        for value in cells.drop_null().to_pylist():
            yield media_location("", value), value


def image_bytes(file: ManifestFile, location: Location, column: str) -> bytes | None:
    """The bytes of one binary image cell, read again from its row group; None for a path or an empty cell."""
    log = FaultLog()
    for batch in batches(file, [column], log, row_groups=[location.row_group]):
        at = location.row - batch.first_row
        if column in batch.cells and 0 <= at < batch.num_rows:
            value = batch.cells[column][at].as_py()
            return value if isinstance(value, bytes) else None
    log.raise_if_any()
    return None

"""Reads and checks whole manifests; the result streams the requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batch_gen import rules
from batch_gen.errors import ConfigError, Fault, ManifestError, UsageError
from batch_gen.manifest.faults import FaultLog
from batch_gen.manifest.inspector import Inspector
from batch_gen.manifest.options import Location, ManifestOptions, ManifestSource, local_source
from batch_gen.manifest.requests import MEDIA_COLUMNS, RequestBuilder, binary_cells, image_bytes
from batch_gen.manifest.resolve import preset_values
from batch_gen.manifest.select import Names, Selection
from batch_gen.manifest.sources import ManifestFile, batches, looks_like, open_files
from batch_gen.manifest.survey import Survey, Surveyor, Warned
from batch_gen.request import ModelLimits, RenderRequest, SamplingDefaults, check_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

_SURVEYED = tuple(name for name in rules.COLUMNS if name not in {"row_id", "seed", "priority"})


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest without a fault; iterating reads the files again, row group by row group.

    Attributes:
        files: Its files, in order.
        num_rows: All rows, wanted or not.
        survey: Totals and warnings over the wanted clips.
    """

    files: tuple[ManifestFile, ...]
    defaults: SamplingDefaults
    limits: ModelLimits
    options: ManifestOptions
    names: Names
    num_rows: int
    survey: Survey

    def iter_located_requests(self) -> Iterator[tuple[Location, RenderRequest]]:
        """Every wanted request with its place, in manifest order."""
        selection = Selection(self.options, self.names)
        builder = RequestBuilder(self.defaults, self.options, self.names)
        log = FaultLog()
        for file in self.files:
            for batch in batches(file, rules.COLUMNS, log, extra=file.extra):
                yield from builder.requests(selection.pick(batch))
                if selection.exhausted:
                    return
            log.raise_if_any()

    def iter_requests(self) -> Iterator[RenderRequest]:
        """Every wanted request, in manifest order."""
        for _, request in self.iter_located_requests():
            yield request

    def requests_in(self, file_index: int, row_group: int, rows: Collection[int]) -> list[RenderRequest]:
        """The requests of some rows of one row group, every sample, wanted or not: what a chunk of a plan names."""
        whole = Selection(replace(self.options, where=None, ids=None, limit=None), self.names)
        builder = RequestBuilder(self.defaults, self.options, self.names)
        log = FaultLog()
        file = self.files[file_index]
        found: list[RenderRequest] = []
        for batch in batches(file, rules.COLUMNS, log, extra=file.extra, row_groups=[row_group]):
            picked = whole.pick(batch).only([row - batch.first_row for row in rows])
            found += [request for _, request in builder.requests(picked)]
        log.raise_if_any()
        return found

    def iter_image_bytes(self) -> Iterator[tuple[str, bytes]]:
        """Every distinct binary image cell as (`bytes:<sha256>`, its bytes), of all rows, wanted or not."""
        seen: set[str] = set()
        log = FaultLog()
        for file in self.files:
            for batch in batches(file, MEDIA_COLUMNS, log):
                for source, body in binary_cells(batch):
                    if source not in seen:
                        seen.add(source)
                        yield source, body
            log.raise_if_any()

    def image_bytes(self, location: Location, column: str) -> bytes | None:
        """The bytes of a binary image cell, or None when the cell holds no bytes."""
        return image_bytes(self.files[location.file_index], location, column)


def read_manifest(
    sources: Sequence[ManifestSource | Path | str],
    defaults: SamplingDefaults,
    limits: ModelLimits,
    options: ManifestOptions | None = None,
) -> Manifest:
    """Read and check a whole manifest before anything is rendered.

    Args:
        sources: Files and folders, in order; plain paths are files of this machine.
        defaults: The run preset's sampling values.
        limits: What the run's checkpoint can serve.
        options: Selection, overrides, seeds and checks.

    Raises:
        ManifestError: With every fault of every file.
        ConfigError: A preset does not fit the checkpoint.
        UsageError: --where, --ids or --limit cannot be met.
    """
    options = options or ManifestOptions()
    _check_presets([options.preset], defaults, limits, options)
    log = FaultLog()
    given = [source if isinstance(source, ManifestSource) else local_source(source) for source in sources]
    files = open_files(given, log)
    num_rows = sum(file.num_rows for file in files)
    inspector = Inspector(files, limits, options, log)
    for file in files:
        for batch in batches(file, rules.COLUMNS, log):
            inspector.add(batch)
    names = inspector.finish()
    log.raise_if_any()
    _check_presets(sorted(inspector.used_presets), defaults, limits, options)
    if num_rows == 0:
        where = ", ".join(file.source.name for file in files) or "the manifest"
        raise ManifestError([Fault(where, None, None, None, "has zero rows; there is nothing to render")])
    survey = _surveyed(files, defaults, limits, options, names)
    survey.warned = {**_column_warnings(files), **inspector.survey.warned, **survey.warned}
    return Manifest(tuple(files), defaults, limits, options, names, num_rows, survey)


def _surveyed(
    files: Sequence[ManifestFile],
    defaults: SamplingDefaults,
    limits: ModelLimits,
    options: ManifestOptions,
    names: Names,
) -> Survey:
    log = FaultLog()
    selection = Selection(options, names)
    selection.check_columns(files)
    surveyor = Surveyor(defaults, limits, options, Survey(), log)
    columns = [name for name in rules.COLUMNS if name in {*_SURVEYED, *selection.schema_columns}]
    for file in files:
        for batch in batches(file, columns, log, extra=sorted(selection.extra_columns)):
            surveyor.add(selection.pick(batch))
            if selection.exhausted:
                break
        if selection.exhausted:
            break
    log.raise_if_any()
    _check_selection(surveyor.survey, selection, options)
    return surveyor.survey


def _check_selection(survey: Survey, selection: Selection, options: ManifestOptions) -> None:
    if options.ids is not None and options.where is None and options.limit is None:
        lost = sorted(options.ids - selection.found)
        if lost:
            listed = ", ".join(lost[:10]) + (", ..." if len(lost) > 10 else "")
            raise UsageError(f"--ids: {len(lost):,} of {len(options.ids):,} ids are not in the manifest: {listed}")
    if survey.num_clips == 0:
        raise UsageError("--where, --ids and --limit leave no clip of the manifest; batch-gen validate shows its rows")


def _check_presets(
    names: Sequence[str], defaults: SamplingDefaults, limits: ModelLimits, options: ManifestOptions
) -> None:
    """Presets that the run or a row names must be within the rules and the model's limits."""
    known = preset_values(options.presets, options.preset, defaults)
    for name in names:
        cells: dict[str, object] = {column: getattr(known[name], column) for column in rules.SAMPLING_COLUMNS}
        broken = check_values({**cells, **options.overrides, "prompt": "any"}, replace(limits, conditionings=("text",)))
        if broken:
            text = "; ".join(f"{column} = {cells.get(column)} {message}" for column, message in broken)
            raise ConfigError(f"preset {name!r} does not fit {limits.name}: {text}")


def _column_warnings(files: Sequence[ManifestFile]) -> dict[str, Warned]:
    survey = Survey()
    for file in files:
        for name in file.extra:
            meant = looks_like(name)
            if meant is not None:
                message = f"column {name!r} is carried through unread; is {meant} meant? (batch-gen import maps names)"
                survey.warn(f"column:{name}", message, 0, file.source.name)
    return survey.warned

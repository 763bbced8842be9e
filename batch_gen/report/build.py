"""`build_report`: read the run, make posters, write data and pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

from batch_gen import metrics
from batch_gen.clock import utc_now
from batch_gen.errors import UsageError
from batch_gen.report import pages
from batch_gen.report.clips import Clip, collect
from batch_gen.report.figures import Figures, figure_out
from batch_gen.report.plots import draw_all
from batch_gen.report.posters import DEFAULT_LIMIT, make_posters
from batch_gen.report.source import RunData, at_once, read_run
from batch_gen.report.target import REPORT_PREFIX, Target
from batch_gen.storage.base import Store, StoreOptions, open_store
from batch_gen.storage.folder import FolderStore

UP_TO_ROOT: Final = "../"
START_PAGE: Final = "index.html"


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """How a report is built.

    Attributes:
        to: A folder of its own; None is `report/` below the output root.
        with_clips: Copy the clips into that folder too, so that it can be sent somewhere.
        clips_url: Where browsers find the output root, for a report that does not lie there.
        price_per_hour: Of one worker's machine.
        max_new_posters: A build makes so many at most; the next one goes on.
    """

    to: Path | None = None
    with_clips: bool = False
    clips_url: str | None = None
    price_per_hour: float | None = None
    max_new_posters: int = DEFAULT_LIMIT


@dataclass(frozen=True, slots=True)
class Built:
    """What a build made; sizes in bytes, without posters and copied clips."""

    page: str
    num_clips: int
    num_posters: int
    num_files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def build_report(store: Store, options: ReportOptions) -> Built:
    """Build or rebuild the report of a run, also while it goes on; the tables of the root are rebuilt beside it.

    A report in a folder of its own leaves the output root as it is.

    Raises:
        ConfigError: There is no run.
        UsageError: The options do not go together.
    """
    target = _target(store, options)
    data = read_run(store)
    if options.to is None and (data.metrics or data.errors):
        metrics.rebuild_tables(store)
    clips = collect(data)
    posters = dict(make_posters(store, target, clips, options.max_new_posters))
    if options.with_clips:
        _copy_clips(store, target, clips)
    figures = figure_out(data, clips, _price(data, options))
    files = {**pages.assets(), **pages.index_files(clips, posters), **pages.detail_files(clips)}
    named = target.put_all(files)
    shared = _shared(data, figures, named, _root_url(store, options))
    shared["plots"] = draw_all(figures)
    target.close({name: pages.render(name, **shared) for name in pages.PAGES})
    page = f"{options.to or store.url + '/' + REPORT_PREFIX.rstrip('/')}/{START_PAGE}"
    return Built(page, len(clips), len(posters), len(target.used), sum(target.used.values()))


def _target(store: Store, options: ReportOptions) -> Target:
    if options.with_clips and options.to is None:
        raise UsageError("--with-clips copies clips into the folder of --to; below the output root they lie anyway")
    if options.with_clips and options.clips_url is not None:
        raise UsageError("--with-clips and --clips-url exclude each other: clips are played from one place")
    if options.to is None:
        return Target(store, REPORT_PREFIX)
    return Target(open_store(str(options.to.absolute()), StoreOptions(durable=False)), "")


def _root_url(store: Store, options: ReportOptions) -> str | None:
    """Where pages find the output root: relative, absolute, or None when no browser can reach it."""
    if options.clips_url is not None:
        return options.clips_url.rstrip("/") + "/"
    if options.to is None:
        return UP_TO_ROOT
    if options.with_clips:
        return ""
    if isinstance(store, FolderStore):
        relative = os.path.relpath(store.root, options.to)
        return quote(str(PurePosixPath(relative))) + "/"
    return None


def _price(data: RunData, options: ReportOptions) -> float | None:
    """The price that was given now, else the one that the run was started with."""
    if options.price_per_hour is not None or data.run is None:
        return options.price_per_hour
    price = data.run.profile.get("price_per_hour")
    return float(price) if price is not None else None


def _shared(data: RunData, figures: Figures, named: Mapping[str, str], root_url: str | None) -> dict[str, Any]:
    """What every page gets."""
    run = data.run
    return {
        "files": {name.removeprefix("assets/"): place for name, place in named.items() if name.startswith("assets/")},
        "blocks": _in_order(named, "data/clips-"),
        "details": _in_order(named, "data/details-"),
        "root_url": root_url,
        "media": root_url.split("/")[2] if root_url and "://" in root_url else "",
        "title": data.url.rstrip("/").rsplit("/", 1)[-1] or data.url,
        "url": data.url,
        "built": utc_now()[:19].replace("T", " "),
        "stopped": data.stopped,
        "settings": {} if run is None else run.settings,
        "profile": {} if run is None else {k: v for k, v in run.profile.items() if v not in (None, "", [], {})},
        "versions": {} if run is None else run.versions,
        "created": "" if run is None else run.created,
        "figures": figures,
        "chunk_clips": pages.DETAIL_CLIPS,
    }


def _in_order(named: Mapping[str, str], prefix: str) -> list[str]:
    found = {int(name[len(prefix) : -len(".js")]): place for name, place in named.items() if name.startswith(prefix)}
    return [found[number] for number in sorted(found)]


def _copy_clips(store: Store, target: Target, clips: Sequence[Clip]) -> None:
    """Copy the clips that the folder does not have in this size."""
    assert isinstance(target.store, FolderStore)
    folder = target.store
    keys = {clip.row["key"]: clip.row.get("bytes") for clip in clips if clip.is_committed and clip.row.get("key")}
    missing = [key for key in keys if not (path := folder.path(key)).exists() or path.stat().st_size != keys[key]]

    def copy(key: str) -> None:
        path = folder.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        if store.download(key, part) is not None:
            part.replace(path)

    at_once(copy, missing)

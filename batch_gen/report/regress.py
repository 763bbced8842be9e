"""The regress page: one night on static HTML, beside the night's results or in a folder of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from batch_gen.clock import utc_now
from batch_gen.errors import CheckFailed, UsageError
from batch_gen.regress.artifacts import Frames, load_arrays, load_frames
from batch_gen.regress.baseline import history
from batch_gen.regress.locate import compare_kept, limits_between, locate
from batch_gen.regress.replay import frozen_of
from batch_gen.regress.results import Approval, CaseResult, Night, last_nights, list_nights, load_night, night_key
from batch_gen.report import pages
from batch_gen.report.regress_frames import AMPLIFY, EQUAL_FRAMES, MAX_FRAMES, case_pictures, shown_frames
from batch_gen.report.regress_view import CaseView, NightView, in_order, tone, word
from batch_gen.report.target import Target
from batch_gen.request import RenderRequest
from batch_gen.storage.base import Store, StoreOptions, open_store

ASSETS: Final = ("app.css", "theme.js", "regress.css", "regress.js")
START_PAGE: Final = "index.html"
NUM_NIGHTS: Final = 30
FOLDER: Final = "report/"


class _Seen(BaseModel):
    """What the page needs of an answer of `regress bisect`; a newer version may say more."""

    model_config = ConfigDict(strict=True)


class _Stage(_Seen):
    stage: str
    step: int | None
    distance: float | None
    largest: float | None
    cosine: float | None
    moved: bool


class _Trend(_Seen):
    kind: str


class _Located(_Seen):
    first: str | None
    words: str
    stages: list[_Stage]
    trend: _Trend | None


@dataclass(frozen=True, slots=True)
class BuiltPage:
    """What a build made; `bytes` counts everything."""

    page: str
    night: str
    verdict: str
    num_cases: int
    num_pictures: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def build_page(store: Store, suite: str, night: str | None = None, to: Path | None = None) -> BuiltPage:
    """Build the page of a night.

    Args:
        store: The regress root.
        suite: Its name.
        night: Which; None for the last one.
        to: A folder of its own; None is `report/` beside the night's results.

    Raises:
        UsageError: There is no such night.
        CheckFailed: Its results are damaged. Objects that are gone or damaged only cost their pictures.
    """
    found = _night(store, suite, night)
    past = [*last_nights(store, suite, NUM_NIGHTS - 1, before=found.night), found]
    past = [other for other in past if other.platform.key == found.platform.key]
    target = Target(store, night_key(suite, found.night, FOLDER)) if to is None else _folder(to)
    views = [_case(store, target, found, number, case) for number, case in enumerate(in_order(found.cases))]
    view = NightView(found, views, past)
    named = target.put_all(_assets())
    page = pages.render("regress.html", **_values(store, view, named))
    target.close({START_PAGE: page})
    where = f"{to or store.url.rstrip('/') + '/' + night_key(suite, found.night, FOLDER).rstrip('/')}/{START_PAGE}"
    num_pictures = sum(name.startswith("frames/") for name in target.used)
    return BuiltPage(where, found.night, found.verdict, len(views), num_pictures, sum(target.used.values()))


def _night(store: Store, suite: str, name: str | None) -> Night:
    names = list_nights(store, suite)
    if not names:
        raise UsageError(f"{store.url} has no finished night of suite {suite!r}; batch-gen regress run makes one")
    wanted = name or names[-1]
    found = load_night(store, suite, wanted) if wanted in names else None
    if found is None:
        raise UsageError(
            f"{store.url} has no night {name!r} of suite {suite!r}; the last ones are {', '.join(names[-3:])}"
        )
    return found


def _folder(to: Path) -> Target:
    return Target(open_store(str(to.absolute()), StoreOptions(durable=False)), "")


def _case(store: Store, target: Target, night: Night, number: int, case: CaseResult) -> CaseView:
    """A case with its pictures; what cannot be read is told on the page instead."""
    try:
        baseline = _baseline(store, night, case)
    except CheckFailed as error:
        return CaseView(number, case, problem=error.message)
    equal = baseline is not None and baseline.frames_hash == case.frames_hash
    if case.artifacts.frames is None:
        return CaseView(number, case, baseline)
    try:
        new = load_frames(store, case.artifacts.frames)
        reference = None if baseline is None or equal else _frames_of(store, baseline)
        replayed = read_bisect(store, night, case.case)
        location = replayed or _location(store, night, case, None if equal else baseline, (reference, new))
    except CheckFailed as error:
        return CaseView(number, case, baseline, equal=equal, problem=error.message)
    limit = EQUAL_FRAMES if equal else MAX_FRAMES
    shown = shown_frames(len(new), limit, (case.first_bad_frame, case.worst_frame))
    pictures = list(case_pictures(number, new, reference, shown))
    named = target.put_all({name: body for _, _, name, body in pictures})
    by_frame: dict[int, dict[str, Any]] = {frame: {"frame": frame} for frame in shown}
    for kind, frame, name, _ in pictures:
        by_frame[frame][kind] = named[name]
    return CaseView(number, case, baseline, location, replayed is not None, list(by_frame.values()), equal)


def _baseline(store: Store, night: Night, case: CaseResult) -> Approval | None:
    if case.baseline is None:
        return None
    every = history(store, night.suite, case.case, night.platform.key)
    return next((approval for approval, _ in every if approval.variant == case.baseline), None)


def _frames_of(store: Store, baseline: Approval) -> Frames | None:
    return None if baseline.artifacts.frames is None else load_frames(store, baseline.artifacts.frames)


def _location(
    store: Store, night: Night, case: CaseResult, baseline: Approval | None, frames: tuple[Frames | None, Frames]
) -> dict[str, Any] | None:
    """The first stage that moved, by what both nights kept; None where there is nothing to compare."""
    arrays = case.artifacts.arrays
    if baseline is None or arrays is None or baseline.artifacts.arrays is None or frames[0] is None:
        return None
    request = RenderRequest.from_json(case.request)
    old = frozen_of(request, load_arrays(store, baseline.artifacts.arrays), frames[0])
    new = frozen_of(request, load_arrays(store, arrays), frames[1])
    limits = limits_between(baseline.fingerprint, night.fingerprint)
    return locate(compare_kept(old.arrays, new.arrays, request.steps), limits).to_json()


def bisect_key(night: Night, case: str) -> str:
    """Where the answer of `regress bisect` about a case of a night lies."""
    return night_key(night.suite, night.night, f"bisect/{case}.json")


def read_bisect(store: Store, night: Night, case: str) -> dict[str, Any] | None:
    """The answer of `regress bisect`, None when nobody asked or it is damaged: it is made again at will."""
    blob = store.get(bisect_key(night, case))
    if blob is None:
        return None
    try:
        _Located.model_validate_json(blob.body)
    except ValidationError:
        return None
    body: dict[str, Any] = json.loads(blob.body)
    return body


def _assets() -> dict[str, bytes]:
    folder = resources.files("batch_gen.report") / "assets"
    return {f"assets/{name}": (folder / name).read_bytes() for name in ASSETS}


def _values(store: Store, view: NightView, named: dict[str, str]) -> dict[str, Any]:
    """What the template gets."""
    night = view.night
    return {
        "files": {name.removeprefix("assets/"): place for name, place in named.items()},
        "media": "",
        "title": f"{night.suite} {night.night}",
        "url": store.url,
        "built": utc_now()[:19].replace("T", " "),
        "stopped": "",
        "view": view,
        "night": night,
        "amplify": AMPLIFY,
        "word": word,
        "tone": tone,
        "data": view.data(),
    }

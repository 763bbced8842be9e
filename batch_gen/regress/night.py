"""One night: render every case, hold it against its baselines, write one answer that says what changed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, Final

import numpy.typing as npt

from batch_gen import clock
from batch_gen.encode import frames_hash
from batch_gen.engine import Engine
from batch_gen.errors import (
    EXIT_AGAIN,
    EXIT_BASELINE,
    EXIT_CHECK_FAILED,
    EXIT_OK,
    KINDS,
    BatchGenError,
    CheckFailed,
    ClipFailed,
    EngineLost,
    RetryClass,
    UsageError,
)
from batch_gen.notify import Notifier
from batch_gen.regress import junit, speed, summary
from batch_gen.regress.artifacts import load_arrays, load_frames, store_arrays, store_frames, store_log
from batch_gen.regress.baseline import find_baselines
from batch_gen.regress.gates import Clip, Judged, differing, judge_clip
from batch_gen.regress.quarantine import apply_quarantine
from batch_gen.regress.render import Bench, Rendered, open_bench
from batch_gen.regress.replay import FILE, encoded
from batch_gen.regress.results import (
    EARNEST,
    RESULTS_NAME,
    Approval,
    Artifacts,
    CaseError,
    CaseResult,
    Fingerprint,
    GateResult,
    Night,
    Verdict,
    last_nights,
    night_key,
    worst,
)
from batch_gen.regress.suite import NAME, Setup
from batch_gen.request import RenderRequest
from batch_gen.runfile import differences
from batch_gen.storage.base import AlreadyExists
from batch_gen.worker import encode_settings

log = logging.getLogger(__name__)
REMEMBERED: Final = 30
"""Nights that are read back: enough for seven on this machine, the last green one, and the trend."""
_OUR_FAULT: Final = (RetryClass.CLIP, RetryClass.INPUT)
"""Failures of the pipeline itself; all others are the machine's or the store's, and no regression. Nor is an ffmpeg
that cannot keep the frames: they were rendered."""


def night_name() -> str:
    """A name that sorts by time: `20261129T020000Z`."""
    return clock.utc_now().partition(".")[0].replace("-", "").replace(":", "") + "Z"


@contextmanager
def open_engine(setup: Setup) -> Iterator[Engine]:
    """An engine as the night's renders have it, for replays."""
    with open_bench(setup) as bench:
        yield bench.engine


def check_name(setup: Setup, name: str) -> None:
    """Refuse a name that is taken or none, before anything is rendered.

    Raises:
        UsageError: with what to use instead.
    """
    if not NAME.fullmatch(name) or name in ("objects", "baselines", "calibration", "mutations"):
        raise UsageError(f"--night {name}: expected letters, digits, '.', '-', '_', such as {night_name()}")
    if setup.store.head(night_key(setup.name, name)) is not None:
        raise UsageError(f"--night {name}: {setup.store.url} has that night already; nights are written once")


def run_night(setup: Setup, bench: Bench, name: str, said: Callable[[str], None] = lambda _: None) -> Night:
    """Render and judge a suite, and write the night.

    Args:
        setup: The suite on this machine.
        bench: Where it renders.
        name: Of the night.
        said: Gets a line for each case.

    Raises:
        BatchGenError: of the store; a failing case raises nothing.
    """
    started = clock.utc_now()
    past = last_nights(setup.store, setup.name, REMEMBERED, before=name)
    fingerprint, platform = setup.fingerprint, setup.platform
    alike = speed.comparable(past, fingerprint.numerics, platform.key)
    with contextlib.suppress(EngineLost):  # each case tries again and says so; what no start can mend ends the night
        _ = bench.engine
    cases = []
    for request in setup.requests:
        case = run_case(setup, bench, request, fingerprint, alike)
        said(f"{case.case}: {summary.sentence(case)}")
        cases.append(case)
    limits = setup.file.limits_of("")
    gates = [*speed.night_speed(cases, alike, limits), *speed.night_memory(cases, alike, limits)]
    verdict = worst([*(case.verdict for case in cases), *(gate.verdict for gate in gates)])
    before = [night for night in past if night.platform.key == platform.key]
    green = next((night for night in reversed(before) if night.verdict == "pass"), None)
    night = Night(
        suite=setup.name,
        night=name,
        started=started,
        finished=clock.utc_now(),
        platform=platform,
        fingerprint=fingerprint,
        verdict=verdict,
        exit_code=exit_code(cases, gates),
        cases=tuple(cases),
        gates=tuple(gates),
        changed=tuple(changes(before[-1] if before else None, cases, gates)),
        since_green=() if green is None else tuple(fingerprint_differences(green.fingerprint, fingerprint)),
        last_green=None if green is None else green.night,
    )
    write_night(setup, night)
    return night


def run_case(
    setup: Setup, bench: Bench, request: RenderRequest, fingerprint: Fingerprint, alike: Sequence[Night]
) -> CaseResult:
    """Render and judge one case; whatever happens to it, the night goes on."""
    facts: dict[str, Any] = {
        "case": request.clip_id,
        "request": request.to_json(),
        "request_digest": request.digest,
    }
    try:
        rendered, attempts = bench.render(request, setup.taps_of(request))
        artifacts = Artifacts(
            frames=store_frames(setup.store, setup.name, rendered.frames, request.fps),
            arrays=store_arrays(setup.store, setup.name, kept_arrays(setup, rendered)),
        )
        facts |= {"attempts": attempts, "timings": rendered.timings, "peak_rss_bytes": rendered.peak_rss_bytes}
        facts |= {"artifacts": artifacts, "num_frames": len(rendered.frames)}
        facts["frames_hash"] = frames_hash(rendered.frames)
        variant, judged = judge_rendered(setup, rendered, fingerprint)
    except BatchGenError as error:
        return broken_case(setup, facts, error)
    case = CaseResult(
        **facts,
        verdict="pass",
        baseline=variant,
        curves=judged.curves,
        first_bad_frame=judged.first_bad_frame,
        worst_frame=judged.worst_frame,
    )
    slow = speed.case_speed(case, alike, setup.file.limits_of(request.clip_id))
    return settled(setup, case, [*judged.gates, *slow])


def kept_arrays(setup: Setup, rendered: Rendered) -> dict[str, npt.NDArray[Any]]:
    """Latents, taps and the delivered file's bytes, so that `bisect` can tell the encoder from the decoder."""
    if setup.file.taps == "none":
        return rendered.arrays
    return {**rendered.arrays, FILE: encoded(rendered.frames, rendered.request, encode_settings(setup.settings))}


def settled(setup: Setup, case: CaseResult, gates: Sequence[GateResult]) -> CaseResult:
    """The case with its last word: quarantine applied, the most earnest gate as its verdict."""
    entry = next((entry for entry in setup.file.quarantine if entry.case == case.case), None)
    kept = apply_quarantine(gates, entry, date.fromisoformat(clock.utc_now()[:10]))
    return case.model_copy(update={"gates": tuple(kept), "verdict": worst([gate.verdict for gate in kept])})


def broken_case(setup: Setup, facts: Mapping[str, Any], error: BatchGenError) -> CaseResult:
    """A case without a clip: red when the pipeline broke it, `infra` when the machine or the store did."""
    is_ours = isinstance(error, ClipFailed) and KINDS[error.kind].retry in _OUR_FAULT and error.kind != "encode"
    verdict: Verdict = "fail" if is_ours else "infra"
    message = error.message
    if isinstance(error, EngineLost) and error.log:
        with contextlib.suppress(BatchGenError):  # the case is told without it too
            message += f"; its log: {setup.store.url}/{store_log(setup.store, setup.name, error.log)}"
    log.warning("case without a clip", extra={"fields": {"case": facts["case"], "kind": error.kind}})
    gate = GateResult(gate="render", level="count", verdict=verdict, note=f"{error.kind}: {message}")
    case = CaseResult(**facts, verdict=verdict, error=CaseError(kind=error.kind, message=message))
    return settled(setup, case, [gate])


def judge_rendered(setup: Setup, rendered: Rendered, fingerprint: Fingerprint) -> tuple[str | None, Judged]:
    """Hold a clip against the approved variants, those of equal numerics if there are any.

    The kindest comparison counts, and its variant is named.
    """
    request = rendered.request
    limits = setup.file.limits_of(request.clip_id)
    new = Clip(request.prompt, rendered.frames, rendered.latents, fingerprint)
    every = find_baselines(setup.store, setup.name, request.clip_id, setup.platform.key)
    usable = [approval for approval in every if approval.request_digest == request.digest]
    if not usable:
        return None, Judged((new_gate(request, every),))
    # Variants of other numerics must not excuse bits that changed under these.
    usable = [approval for approval in usable if not differing(fingerprint, approval.fingerprint)] or usable
    judged = [(approval, judge_clip(new, baseline_clip(setup, approval, new), limits)) for approval in usable]
    approval, kindest = max(judged, key=lambda pair: _kindness(pair[1]))
    return approval.variant, kindest


def new_gate(request: RenderRequest, every: Sequence[Approval]) -> GateResult:
    """The answer of a case that has nothing to be compared with; never a pass."""
    note = "no baseline on this platform; look at the clip, then approve it"
    if every:
        then, now = every[-1].request, request.to_json()
        changed = [line for line in differences(then, now) if not line.startswith(("extra", "priority", "preset"))]
        note = f"the case is another one than its baseline's: {'; '.join(changed)}"
    return GateResult(gate="baseline", level="exact", verdict="new", note=note)


def baseline_clip(setup: Setup, approval: Approval, new: Clip) -> Clip:
    """An approved variant as the gates see it; frames that are those of the new clip were read when that was stored.

    Raises:
        CheckFailed: its objects are gone or damaged, and not those of the new clip, which replaced them.
    """
    kept = approval.artifacts
    assert kept.frames is not None  # as the document promises
    try:
        same = kept.frames.digest == frames_hash(new.frames)
        frames = new.frames if same else load_frames(setup.store, kept.frames)
        latents = None if kept.arrays is None else load_arrays(setup.store, kept.arrays).get("latents")
    except CheckFailed as error:
        way = f"if none does, remove {setup.store.url}/{approval.key} and approve the case again"
        raise CheckFailed(f"{error.message}; {way}") from error
    return Clip(approval.request["prompt"], frames, latents, approval.fingerprint)


def exit_code(cases: Sequence[CaseResult], gates: Sequence[GateResult]) -> int:
    """5 when a gate failed, else 75 when something was not rendered, else 6 when something is new, else 0.

    A regression that was found stays one, whatever else the machine did.
    """
    found = {*(case.verdict for case in cases), *(gate.verdict for gate in gates)}
    codes = {"fail": EXIT_CHECK_FAILED, "infra": EXIT_AGAIN, "new": EXIT_BASELINE}
    return next((code for verdict, code in codes.items() if verdict in found), EXIT_OK)


def changes(before: Night | None, cases: Sequence[CaseResult], gates: Sequence[GateResult]) -> Iterator[str]:
    """`base: pass -> fail` for every case and gate of the night whose state is another than the night before.

    What was not there before is silent when it passes.
    """
    old = {} if before is None else states(before.cases, before.gates)
    for name, verdict in states(cases, gates).items():
        if old.get(name, "pass") != verdict:
            yield f"{name}: {old.get(name, 'none')} -> {verdict}"


def states(cases: Sequence[CaseResult], gates: Sequence[GateResult]) -> dict[str, Verdict]:
    """State by name; a speed gate without enough nights has none."""
    found: dict[str, Verdict] = {case.case: case.verdict for case in cases}
    return found | {gate.gate: gate.verdict for gate in gates if gate.verdict != "not_comparable"}


def fingerprint_differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    """`numerics.mesh: tp=1,cp=1,cfg=1 -> tp=2,cp=1,cfg=1` for everything that differs."""
    lines = differences({"checkpoint": old.checkpoint}, {"checkpoint": new.checkpoint})
    for part in ("settings", "numerics", "versions"):
        lines += [f"{part}.{line}" for line in differences(getattr(old, part), getattr(new, part))]
    return lines


def write_night(setup: Setup, night: Night) -> None:
    """Write the results, then Markdown and JUnit of the same: only who created the results may write beside them.

    Raises:
        UsageError: another process wrote a night of that name meanwhile; nothing was written.
    """
    key = night_key(night.suite, night.night, RESULTS_NAME)
    try:
        setup.store.create(key, night.to_bytes(), content_type="application/json")
    except AlreadyExists:
        raise UsageError(f"{setup.store.url}/{key} exists: another process ran a night of that name") from None
    for name, body, kind in (
        ("summary.md", summary.markdown(night), "text/markdown"),
        ("junit.xml", junit.xml(night), "application/xml"),
    ):
        setup.store.put(night_key(night.suite, night.night, name), body.encode(), content_type=kind)


def tell(night: Night, notifier: Notifier | None) -> bool:
    """Notify when a state changed; True when something was said. Closes the notifier."""
    if notifier is None:
        return False
    if night.changed:
        body = {"event": "regress", "suite": night.suite, "night": night.night, "verdict": night.verdict}
        notifier.clip({**body, "exit_code": night.exit_code, "changed": list(night.changed)})
    notifier.close()
    return bool(night.changed)


def _kindness(judged: Judged) -> tuple[int, int, float]:
    """Order of comparisons: the verdict, the number of passed gates, the worst frame."""
    verdict = worst([gate.verdict for gate in judged.gates])
    passed = sum(gate.verdict == "pass" for gate in judged.gates)
    return EARNEST.index(verdict), passed, min(judged.curves.psnr, default=0.0)

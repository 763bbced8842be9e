"""Speed and memory of a night against the median of the last seven, stage by stage, so that a slow one has a name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from batch_gen.regress.results import CaseResult, GateResult, Night
from batch_gen.regress.suite import Limits

WINDOW: Final = 7
TOTAL: Final = "total"


def comparable(past: Iterable[Night], tonight: Mapping[str, object], platform_key: str) -> list[Night]:
    """Nights on the same class of machine, mesh and threads; other libraries and kernels are what shall be seen."""
    hardware = ("device", "cpu", "mesh", "threads")
    return [
        night
        for night in past
        if night.platform.key.rpartition("_torch")[0] == platform_key.rpartition("_torch")[0]
        and all(night.fingerprint.numerics.get(key) == tonight.get(key) for key in hardware)
    ]


def case_speed(case: CaseResult, past: Sequence[Night], limits: Limits) -> list[GateResult]:
    """The stages of one case; its limit is wide, because the seconds of one clip are noisy."""
    history = [found.timings for night in past if (found := _like(night, case)) is not None][-WINDOW:]
    return _stages(case.timings, history, limits, limits.case_speed_ratio)


def night_speed(cases: Sequence[CaseResult], past: Sequence[Night], limits: Limits) -> list[GateResult]:
    """The stages of the whole night: sums over the cases that were rendered tonight and in each night before."""
    tonight = _sum(case.timings for case in cases)
    history = [_sum(case.timings for case in found) for _, found in _same_cases(cases, past)][-WINDOW:]
    return _stages(tonight, history, limits, limits.speed_ratio)


def night_memory(cases: Sequence[CaseResult], past: Sequence[Night], limits: Limits) -> list[GateResult]:
    """The largest memory of rank 0; none where the engine does not say.

    A peak holds everything that its engine rendered before, so a night counts only when it rendered the same requests
    as tonight and no others.
    """
    rendered = [case for case in cases if case.timings]
    peak = _peak(rendered)
    if not peak:
        return []
    history = [
        _peak(found)
        for night, found in _same_cases(cases, past)
        if len(found) == sum(bool(case.timings) for case in night.cases)
    ]
    known = [value for value in history if value][-WINDOW:]
    if len(known) < limits.min_nights:
        return [_too_few("memory", float(peak), len(known), limits)]
    median = statistics.median(known)
    limit = median * limits.memory_ratio
    note = f"{peak / median - 1:+.0%} on the median of {len(known)} nights"
    return [_answer("memory", float(peak), limit, passed=peak <= limit, note=note)]


def _stages(
    tonight: Mapping[str, float], history: Sequence[Mapping[str, float]], limits: Limits, ratio: float
) -> list[GateResult]:
    results = []
    for stage in (*tonight, TOTAL) if tonight else ():
        seconds = _seconds(tonight, stage)
        past = [_seconds(timings, stage) for timings in history if stage == TOTAL or stage in timings]
        if len(past) < limits.min_nights:
            results.append(_too_few(f"speed.{stage}", seconds, len(past), limits))
            continue
        median = statistics.median(past)
        limit = max(median * ratio, median + limits.speed_floor_s)
        note = f"stage {stage}: {seconds:.3g} s, median of {len(past)} nights {median:.3g} s"
        results.append(_answer(f"speed.{stage}", seconds, limit, passed=seconds <= limit, note=note))
    return results


def _answer(gate: str, value: float, limit: float, *, passed: bool, note: str) -> GateResult:
    verdict = "pass" if passed else "fail"
    return GateResult.model_validate(
        {"gate": gate, "level": "speed", "value": value, "limit": limit, "verdict": verdict, "note": note}
    )


def _too_few(gate: str, value: float, count: int, limits: Limits) -> GateResult:
    note = f"{count} of {limits.min_nights} nights to compare with"
    return GateResult(gate=gate, level="speed", value=value, verdict="not_comparable", note=note)


def _seconds(timings: Mapping[str, float], stage: str) -> float:
    return sum(timings.values()) if stage == TOTAL else timings[stage]


def _sum(all_timings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for timings in all_timings:
        for stage, seconds in timings.items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def _peak(cases: Iterable[CaseResult]) -> int:
    return max((case.peak_rss_bytes for case in cases), default=0)


def _same_cases(cases: Sequence[CaseResult], past: Sequence[Night]) -> Iterator[tuple[Night, list[CaseResult]]]:
    """The nights that rendered every request that was rendered tonight, each with its results of those.

    A case whose request changed is another case: with it, neither sums nor peaks can be compared.
    """
    rendered = [case for case in cases if case.timings]
    for night in past:
        found = [like for case in rendered if (like := _like(night, case)) is not None]
        if len(found) == len(rendered):
            yield night, found


def _like(night: Night, case: CaseResult) -> CaseResult | None:
    """The same request in another night, if it was rendered."""
    found = night.case(case.case)
    return found if found is not None and found.timings and found.request_digest == case.request_digest else None

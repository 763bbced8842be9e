"""Learn the noise before setting limits: render the suite several times and see how far the repeats lie apart.

A limit inside the noise is a gate that cries at random; one that cannot be told from noise is refused and a wider one
proposed. Limits are never made narrower: repeats on one machine say nothing of other machines.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from batch_gen.errors import UsageError
from batch_gen.regress import images
from batch_gen.regress.gates import Clip, judge_clip
from batch_gen.regress.render import Bench, Rendered
from batch_gen.regress.results import GateResult
from batch_gen.regress.suite import Limits, Setup, SuiteFile, with_dtype
from batch_gen.regress.vectors import WORST, relative_l2

MARGIN: Final = 2.0
"""A limit must lie this many times as far from perfection as the noise does."""
SPREADS: Final = 3.0
"""Speed limits lie so many standard deviations above the mean of the repeats."""
BEST: Final[Mapping[str, float]] = {
    "psnr_min": images.PSNR_EQUAL,
    "ssim_min": 1.0,
    "latents_cosine": 1.0,
    "vmaf": 100.0,
}
"""Gates whose values fall with the error, and what equal clips have."""
LIMIT_OF: Final[Mapping[str, str]] = {
    "frames_hash": "exact",
    **dict.fromkeys(("drift_red", "drift_green", "drift_blue"), "drift_channel"),
}
"""Limits that have another name than their gate."""
GOOD: Final = (("good_psnr", "psnr_min", 3.0), ("good_ssim", "ssim_min", 0.0))
"""What makes a frame good lies so far above the least that any may have."""
PSNR_MARGIN_DB: Final = 6.0
"""Twice the error."""

OpenBench = Callable[[Setup], AbstractContextManager[Bench]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the repeats showed.

    Attributes:
        repeats: Renders of each case.
        identical: Whether all repeats had equal bits.
        noise: The worst value of each gate between two repeats of any case.
        speed: Relative standard deviation of the seconds: `night` of the sums, `case` of the noisiest case.
        bf16_error: By case, when it was measured.
        proposals: Limits of the suite that should be wider, by name.
        case_proposals: The same of the limits that a case has of its own, by case.
        refused: Limits that lie inside the noise, `psnr_min 35: noise 33.2, propose 27.2`; those of a case begin with
            `cases.<case>.`.
    """

    repeats: int
    identical: bool
    noise: dict[str, float]
    speed: dict[str, float]
    bf16_error: dict[str, float] = field(default_factory=dict)
    proposals: dict[str, Any] = field(default_factory=dict)
    case_proposals: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For `--json` and the store."""
        return {
            "repeats": self.repeats,
            "identical": self.identical,
            "noise": self.noise,
            "speed": self.speed,
            "bf16_error": self.bf16_error,
            "proposals": self.proposals,
            "case_proposals": self.case_proposals,
            "refused": list(self.refused),
        }


def calibrate(
    setup: Setup,
    repeats: int,
    open_bench: OpenBench,
    *,
    bf16: bool = False,
    said: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Render the suite `repeats` times with a fresh engine each, and compare all pairs.

    Raises:
        UsageError: fewer than two repeats, or a bfloat16 yardstick for renders that are bfloat16 themselves.
        ClipFailed, EngineLost: a case that cannot be rendered cannot be calibrated.
    """
    if repeats < 2:
        raise UsageError(f"--repeats {repeats}: noise needs at least 2 renders; 3 to 5 are usual")
    if bf16 and setup.settings.dtype == "bfloat16":
        raise UsageError("--bf16 measures bfloat16 against float32; render with --dtype float32")
    lower = with_dtype(setup, "bfloat16") if bf16 else None  # what cannot start is refused before the first repeat
    rounds = []
    for number in range(repeats):
        rounds.append(render_round(setup, open_bench))
        said(f"repeat {number + 1} of {repeats}: {len(setup.requests)} cases")
    errors = {} if lower is None else bf16_errors(lower, rounds[0], open_bench)
    return conclude(setup, rounds, errors)


def render_round(setup: Setup, open_bench: OpenBench) -> list[Rendered]:
    """All cases, by one fresh engine."""
    with open_bench(setup) as bench:
        return [bench.render(request)[0] for request in setup.requests]


def bf16_errors(lower: Setup, reference: Sequence[Rendered], open_bench: OpenBench) -> dict[str, float]:
    """Relative L2 error of the final latents of a bfloat16 render of each case."""
    found = render_round(lower, open_bench)
    return {
        exact.request.clip_id: round(min(relative_l2(rough.latents, exact.latents), WORST), 6)
        for rough, exact in zip(found, reference, strict=True)
    }


def conclude(setup: Setup, rounds: Sequence[Sequence[Rendered]], bf16_error: dict[str, float]) -> Calibration:
    """Noise, proposals and refusals of finished rounds.

    A limit of the suite is held against the noise of the cases that it holds for; one that a case has of its own,
    against the noise of that case alone.
    """
    results = {case[0].request.clip_id: list(pair_gates(setup, case)) for case in zip(*rounds, strict=True)}
    spreads = case_spreads(rounds)
    suite = Noise.of(results, setup.file.cases, spreads, whole_night=_spread(_totals(rounds)))
    proposals, refused = suite.judged(setup.file.limits_of(""))
    by_case = {}
    for case, gates in results.items():
        own = frozenset(setup.file.cases.get(case, {}))
        found, more = Noise.of({case: gates}, {}, spreads, only=own).judged(setup.file.limits_of(case))
        if found:
            by_case[case] = found
        refused += [f"cases.{case}.{line}" for line in more]
    every = [gate for gates in results.values() for gate in gates]
    return Calibration(
        repeats=len(rounds),
        identical=is_identical(every),
        noise=worst_values(every),
        speed=speed_spread(rounds),
        bf16_error=bf16_error,
        proposals=proposals,
        case_proposals=by_case,
        refused=tuple(refused),
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """What some limits are held against.

    Attributes:
        values: The worst value by name of the limit.
        is_identical: Whether the repeats had equal bits.
        speed: The relative spread that `speed_ratio` and `case_speed_ratio` must allow, where they are asked.
    """

    values: dict[str, float]
    is_identical: bool
    speed: dict[str, float]

    @classmethod
    def of(
        cls,
        results: Mapping[str, Sequence[GateResult]],
        overridden: Mapping[str, Mapping[str, Any]],
        spreads: Mapping[str, float],
        *,
        only: frozenset[str] | None = None,
        whole_night: float | None = None,
    ) -> Noise:
        """The noise of some cases, each without the limits that it overrides.

        Args:
            results: Gates between repeats, by case.
            overridden: Limits that cases have of their own, which are judged apart.
            spreads: Of the seconds, by case.
            only: The limits that are asked; None for all.
            whole_night: Spread of the seconds of the rounds.
        """
        asked = [
            gate for case, gates in results.items() for gate in gates if limit_of(gate) not in overridden.get(case, ())
        ]
        values = worst_values(asked)
        for good, least, _ in GOOD:
            held = [gate for case, gates in results.items() for gate in gates if good not in overridden.get(case, ())]
            if (value := worst_values(held).get(least)) is not None:
                values[good] = value
        slow = [spreads[case] for case in results if "case_speed_ratio" not in overridden.get(case, ())]
        speed = {"case_speed_ratio": max(slow, default=0.0), "speed_ratio": whole_night or 0.0}
        if only is None:
            return cls(values, is_identical(asked), speed)
        values, speed = ({name: value for name, value in part.items() if name in only} for part in (values, speed))
        return cls(values, "exact" not in only or is_identical(asked), speed)

    def judged(self, limits: Limits) -> tuple[dict[str, Any], list[str]]:
        """(wider limits by name, what was refused and why)."""
        found: dict[str, Any] = {}
        refused: list[str] = []
        if limits.exact and not self.is_identical:
            found["exact"] = False
            refused.append("exact: repeats on this machine have different bits")
        wider = propose(limits, self.values, self.speed)
        refused += [
            f"{name} {getattr(limits, name)}: noise {self.values[name]:.6g}, propose {value:.6g}"
            for name, value in wider.items()
            if name in self.values
        ]
        return found | wider, refused


def limit_of(gate: GateResult) -> str:
    """The limit that a gate is held against."""
    return LIMIT_OF.get(gate.gate, gate.gate)


def is_identical(gates: Iterable[GateResult]) -> bool:
    """Whether all repeats had equal bits."""
    return all(gate.verdict == "pass" for gate in gates if gate.gate == "frames_hash")


def pair_gates(setup: Setup, case: Sequence[Rendered]) -> Iterable[GateResult]:
    """All gates between all pairs of repeats of one case; the exact gate is asked whatever the limits say."""
    limits = setup.file.limits_of(case[0].request.clip_id).model_copy(update={"exact": True})
    clips = [Clip(one.request.prompt, one.frames, one.latents, setup.fingerprint) for one in case]
    for first, second in itertools.combinations(clips, 2):
        yield from judge_clip(second, first, limits).gates


def worst_values(results: Iterable[GateResult]) -> dict[str, float]:
    """Of each gate with a limit that can be proposed, the value farthest from perfection; `bad_frames` is a share."""
    found: dict[str, float] = {}
    for result in results:
        name = limit_of(result)
        if result.value is None or name not in Limits.model_fields or name in ("exact", "bad_frames"):
            continue
        pick = min if name in BEST else max
        found[name] = pick(found.get(name, result.value), result.value)
    return found


def propose(limits: Limits, noise: Mapping[str, float], speed: Mapping[str, float]) -> dict[str, Any]:
    """Wider limits for all that lie within `MARGIN` times the noise; each is a value that the limit may have."""
    found: dict[str, Any] = {}
    for name, value in noise.items():
        limit, wanted = getattr(limits, name), with_margin(name, value)
        if (falls(name) and wanted < limit) or (not falls(name) and wanted > limit):
            found[name] = wanted
    for name, spread in speed.items():
        wanted = round(1 + SPREADS * spread, 3)
        if wanted > getattr(limits, name):
            found[name] = wanted
    return found


def falls(name: str) -> bool:
    """Whether the values that a limit is for fall with the error."""
    return name in BEST or name.startswith("good_")


def with_margin(name: str, noise: float) -> Any:
    """The limit that noise of this size asks for, inside the bounds of that limit."""
    for good, least, above in GOOD:
        if name == good:
            return clamped(name, with_margin(least, noise) + above)
    if name == "psnr_min":
        return clamped(name, round(noise - PSNR_MARGIN_DB, 2))
    if name in BEST:
        return clamped(name, round(BEST[name] - MARGIN * (BEST[name] - noise), 6))
    if isinstance(Limits.model_fields[name].default, int):
        return clamped(name, int(MARGIN * noise))
    return clamped(name, float(f"{MARGIN * noise:.4g}"))


def clamped(name: str, value: Any) -> Any:
    """The value, or the nearest one that the limit may have."""
    for bound in Limits.model_fields[name].metadata:
        value = max(value, getattr(bound, "ge", value))
        value = min(value, getattr(bound, "le", value))
    return value


def case_spreads(rounds: Sequence[Sequence[Rendered]]) -> dict[str, float]:
    """Relative standard deviation of the seconds of each case."""
    return {
        case[0].request.clip_id: round(_spread([sum(one.timings.values()) for one in case]), 4)
        for case in zip(*rounds, strict=True)
    }


def speed_spread(rounds: Sequence[Sequence[Rendered]]) -> dict[str, float]:
    """Relative standard deviation of the seconds of the rounds, and of the noisiest case."""
    return {"night": round(_spread(_totals(rounds)), 4), "case": max(case_spreads(rounds).values())}


def with_proposals(file: SuiteFile, found: Calibration) -> dict[str, Any]:
    """The suite's YAML file with what was proposed and measured."""
    body = file.model_dump(mode="json", exclude_defaults=True)
    if found.proposals:
        body["limits"] = {**body.get("limits", {}), **found.proposals}
    for case, wider in found.case_proposals.items():
        body["cases"] = {**body.get("cases", {}), case: {**body.get("cases", {}).get(case, {}), **wider}}
    for case, error in found.bf16_error.items():
        if 0 < error < WORST:
            body.setdefault("cases", {}).setdefault(case, {})["bf16_error"] = error
    return body


def _totals(rounds: Sequence[Sequence[Rendered]]) -> list[float]:
    """Seconds of each round."""
    return [sum(sum(one.timings.values()) for one in rendered) for rendered in rounds]


def _spread(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if mean else 0.0

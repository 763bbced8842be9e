"""Learn the noise before setting limits: render the suite several times and see how far the repeats lie apart.

A limit inside the noise is a gate that cries at random; one that cannot be told from noise is refused and a wider one
proposed. Limits are never made narrower: repeats on one machine say nothing of other machines.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from batch_gen.errors import UsageError
from batch_gen.regress import images
from batch_gen.regress.gates import Clip, judge_clip
from batch_gen.regress.render import Bench, Rendered
from batch_gen.regress.results import GateResult
from batch_gen.regress.suite import Limits, Setup, SuiteFile
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
LIMIT_OF: Final[Mapping[str, str]] = dict.fromkeys(("drift_red", "drift_green", "drift_blue"), "drift_channel")
"""Limits that have another name than their gate."""
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
        proposals: Limits that should be wider, by name.
        refused: Limits of the suite that lie inside the noise, `psnr_min 35: noise 33.2, propose 27.2`.
    """

    repeats: int
    identical: bool
    noise: dict[str, float]
    speed: dict[str, float]
    bf16_error: dict[str, float] = field(default_factory=dict)
    proposals: dict[str, Any] = field(default_factory=dict)
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
    rounds = []
    for number in range(repeats):
        rounds.append(render_round(setup, open_bench))
        said(f"repeat {number + 1} of {repeats}: {len(setup.requests)} cases")
    errors = bf16_errors(setup, rounds[0], open_bench) if bf16 else {}
    return conclude(setup, rounds, errors)


def render_round(setup: Setup, open_bench: OpenBench) -> list[Rendered]:
    """All cases, by one fresh engine."""
    with open_bench(setup) as bench:
        return [bench.render(request)[0] for request in setup.requests]


def bf16_errors(setup: Setup, reference: Sequence[Rendered], open_bench: OpenBench) -> dict[str, float]:
    """Relative L2 error of the final latents of a bfloat16 render of each case."""
    lower = replace(setup, settings=setup.settings.model_copy(update={"dtype": "bfloat16"}))
    found = render_round(lower, open_bench)
    return {
        exact.request.clip_id: round(min(relative_l2(rough.latents, exact.latents), WORST), 6)
        for rough, exact in zip(found, reference, strict=True)
    }


def conclude(setup: Setup, rounds: Sequence[Sequence[Rendered]], bf16_error: dict[str, float]) -> Calibration:
    """Noise, proposals and refusals of finished rounds."""
    limits = setup.file.limits_of("")
    results = [result for case in zip(*rounds, strict=True) for result in pair_gates(setup, case)]
    noise = worst_values(results)
    speed = speed_spread(rounds)
    proposals = propose(limits, noise, speed)
    refused = [
        f"{name} {getattr(limits, name)}: noise {noise[name]:.6g}, propose {value:.6g}"
        for name, value in proposals.items()
        if name in noise
    ]
    identical = all(result.verdict == "pass" for result in results if result.gate == "frames_hash")
    if not identical and limits.exact:
        proposals = {"exact": False, **proposals}
        refused.insert(0, "exact: repeats on this machine have different bits")
    return Calibration(len(rounds), identical, noise, speed, bf16_error, proposals, tuple(refused))


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
        name = LIMIT_OF.get(result.gate, result.gate)
        if result.value is None or name not in Limits.model_fields or name in ("exact", "bad_frames"):
            continue
        pick = min if name in BEST else max
        found[name] = pick(found.get(name, result.value), result.value)
    return found


def propose(limits: Limits, noise: Mapping[str, float], speed: Mapping[str, float]) -> dict[str, Any]:
    """Wider limits for all that lie within `MARGIN` times the noise."""
    found: dict[str, Any] = {}
    for name, value in noise.items():
        limit, wanted = getattr(limits, name), with_margin(name, value)
        if (name in BEST and wanted < limit) or (name not in BEST and wanted > limit):
            found[name] = wanted
    if "psnr_min" in found or "ssim_min" in found:
        found |= {"good_psnr": min(limits.good_psnr, with_margin("psnr_min", noise["psnr_min"]) + 3.0)}
        found |= {"good_ssim": min(limits.good_ssim, with_margin("ssim_min", noise["ssim_min"]))}
    for name, spread in (("speed_ratio", speed.get("night", 0.0)), ("case_speed_ratio", speed.get("case", 0.0))):
        wanted = round(1 + SPREADS * spread, 3)
        if wanted > getattr(limits, name):
            found[name] = wanted
    return found


def with_margin(name: str, noise: float) -> Any:
    """The limit that noise of this size asks for."""
    if name == "psnr_min":
        return round(max(0.0, noise - PSNR_MARGIN_DB), 2)
    if name in BEST:
        return round(BEST[name] - MARGIN * (BEST[name] - noise), 6)
    if isinstance(Limits.model_fields[name].default, int):
        return int(MARGIN * noise)
    return float(f"{MARGIN * noise:.4g}")


def speed_spread(rounds: Sequence[Sequence[Rendered]]) -> dict[str, float]:
    """Relative standard deviation of the seconds of the rounds, and of the noisiest case."""
    seconds = [[sum(one.timings.values()) for one in rendered] for rendered in rounds]
    cases = [_spread(column) for column in zip(*seconds, strict=True)]
    return {"night": round(_spread([sum(row) for row in seconds]), 4), "case": round(max(cases), 4)}


def with_proposals(file: SuiteFile, found: Calibration) -> dict[str, Any]:
    """The suite's YAML file with what was proposed and measured."""
    body = file.model_dump(mode="json", exclude_defaults=True)
    if found.proposals:
        body["limits"] = {**body.get("limits", {}), **found.proposals}
    for case, error in found.bf16_error.items():
        if error > 0:
            body.setdefault("cases", {}).setdefault(case, {})["bf16_error"] = error
    return body


def _spread(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if mean else 0.0

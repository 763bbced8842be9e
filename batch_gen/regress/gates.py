"""The gates of one case: each asks one question about a clip and its baseline, and none hides behind a mean.

Frame count comes first, for nothing else can be paired without it. Means over a clip are never asked alone: a black box
in one frame, a lost frame and one percent of brightness all pass mean PSNR, SSIM and VMAF.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batch_gen.encode import frames_hash
from batch_gen.regress import images
from batch_gen.regress.images import Comparison, Frames
from batch_gen.regress.results import Curves, Fingerprint, GateResult, Level, Verdict
from batch_gen.regress.suite import Limits
from batch_gen.regress.vectors import WORST, cosine, relative_l2
from batch_gen.verify import LUMA
from models.pocket.grammar import parse
from models.pocket.judge import judge

LEVELS: Final[Mapping[str, Level]] = {
    "render": "count",
    "frame_count": "count",
    "baseline": "exact",
    "frames_hash": "exact",
    "latents_cosine": "numeric",
    "latents_error": "numeric",
    "latents_ratio": "numeric",
    "psnr_min": "near",
    "ssim_min": "near",
    "bad_frames": "near",
    "vmaf": "near",
    "drift_luma": "near",
    "drift_red": "near",
    "drift_green": "near",
    "drift_blue": "near",
    "black": "temporal",
    "frozen": "temporal",
    "flicker": "temporal",
    "prompt_following": "semantic",
}
NUMERICS_ORDER: Final = ("mesh", "device", "cpu", "attention", "kernels", "compile", "tp_sequence_parallel", "torch")
CHANNELS: Final = ("red", "green", "blue")
DARK: Final = 4.0
"""Drift of what is darker than this mean, 0..255, is measured against it: a share of nothing says nothing."""
CURVE_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip as the gates see it.

    Args:
        prompt: What it should show.
        frames: uint8 [F, H, W, 3], before any encoder.
        latents: Final, float32 [C, T, h, w]; None where nobody kept them.
        fingerprint: What made it.
    """

    prompt: str
    frames: Frames
    latents: npt.NDArray[Any] | None
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Judged:
    """The answers of all gates, and what the report draws."""

    gates: tuple[GateResult, ...]
    curves: Curves = field(default_factory=Curves)
    first_bad_frame: int | None = None
    worst_frame: int | None = None


def judge_clip(new: Clip, base: Clip, limits: Limits) -> Judged:
    """Hold a clip against one approved variant."""
    head = [_frame_count(new, base), _exact(new, base, limits), *_latents(new, base, limits)]
    if new.frames.shape != base.frames.shape:
        rest = [name for name, level in LEVELS.items() if level in ("near", "temporal", "semantic") and name != "vmaf"]
        why = "frame count" if len(new.frames) != len(base.frames) else "frame size"
        gates = (*head, *(_incomparable(name, f"not comparable: {why}") for name in rest))
        return Judged(gates, Curves(motion=_curve(images.motion(new.frames))))
    compared = images.compare(new.frames, base.frames)
    gates = (
        *head,
        *_near(compared, limits),
        *_vmaf(new, base, limits),
        *_drift(compared, base.frames, limits),
        *_temporal(new.frames, base.frames, limits),
        *_prompt_following(new, base, limits),
    )
    bad = compared.bad(limits.good_psnr, limits.good_ssim)
    curves = Curves(
        psnr=_curve(compared.psnr),
        ssim=_curve(compared.ssim),
        luma=_curve(compared.luma),
        motion=_curve(images.motion(new.frames)),
    )
    first = int(np.argmax(bad)) if bad.any() else None
    return Judged(gates, curves, first, compared.worst if compared.psnr.min() < images.PSNR_EQUAL else None)


def at_least(gate: str, value: float, limit: float, **facts: Any) -> GateResult:
    """Green at or above the limit; no number is red."""
    return _result(gate, value, limit, passed=value >= limit, **facts)


def at_most(gate: str, value: float, limit: float, **facts: Any) -> GateResult:
    """Green at or below the limit; no number is red."""
    return _result(gate, value, limit, passed=value <= limit, **facts)


def differing(new: Fingerprint, base: Fingerprint) -> list[str]:
    """What makes bits incomparable: the checkpoint, semantic settings, then numerics, the mesh first.

    A setting that one side does not know is younger than the baseline and had its default then.
    """
    names = ["checkpoint"] if new.checkpoint != base.checkpoint else []
    names += [key for key in sorted({*new.settings} & {*base.settings}) if new.settings[key] != base.settings[key]]
    keys = {*new.numerics} & {*base.numerics}
    ordered = [*(key for key in NUMERICS_ORDER if key in keys), *sorted(keys - {*NUMERICS_ORDER})]
    found = [key for key in ordered if new.numerics[key] != base.numerics[key]]
    one_sided = "" in (new.numerics.get("attention"), base.numerics.get("attention"))
    if "mesh" in found and "attention" in found and one_sided:
        found.remove("attention")  # one rank has no attention over ranks: that is the mesh's difference
    return names + found


def _frame_count(new: Clip, base: Clip) -> GateResult:
    count, wanted = len(new.frames), len(base.frames)
    return _result("frame_count", float(count), float(wanted), passed=count == wanted)


def _exact(new: Clip, base: Clip, limits: Limits) -> GateResult:
    """Equal bits, whatever the commit; asked only within one numerics key."""
    others = differing(new.fingerprint, base.fingerprint)
    if others:
        return _incomparable("frames_hash", f"not comparable: {', '.join(others)}")
    if not limits.exact:
        return _incomparable("frames_hash", "not comparable: the suite's limits say that this hardware has noise")
    equal = frames_hash(new.frames) == frames_hash(base.frames)
    note = "" if equal else "the same settings gave other bits"
    return _result("frames_hash", float(equal), 1.0, passed=equal, note=note)


def _latents(new: Clip, base: Clip, limits: Limits) -> Iterator[GateResult]:
    if new.latents is None or base.latents is None:
        return
    if new.latents.shape != base.latents.shape:
        yield _incomparable("latents_cosine", "not comparable: shape of the latents")
        return
    error = min(relative_l2(new.latents, base.latents), WORST)
    yield at_least("latents_cosine", cosine(new.latents, base.latents), limits.latents_cosine)
    yield at_most("latents_error", error, limits.latents_error)
    if limits.bf16_error is not None:
        yield at_most("latents_ratio", error / limits.bf16_error, limits.latents_ratio)


def _near(compared: Comparison, limits: Limits) -> Iterator[GateResult]:
    dim = int(np.argmin(compared.ssim))
    num_bad = int(compared.bad(limits.good_psnr, limits.good_ssim).sum())
    allowed = int(limits.bad_frames * len(compared.psnr))
    yield at_least("psnr_min", float(compared.psnr.min()), limits.psnr_min, frame=compared.worst)
    yield at_least("ssim_min", float(compared.ssim[dim]), limits.ssim_min, frame=dim)
    yield at_most("bad_frames", float(num_bad), float(allowed))


def _vmaf(new: Clip, base: Clip, limits: Limits) -> Iterator[GateResult]:
    if limits.vmaf is None:
        return
    if images.has_vmaf():
        yield at_least("vmaf", images.vmaf(new.frames, base.frames), limits.vmaf)
    else:
        yield _incomparable("vmaf", "this ffmpeg has no libvmaf")


def _drift(compared: Comparison, base: Frames, limits: Limits) -> Iterator[GateResult]:
    """A whole clip that became brighter or took a tint; every frame passes PSNR then.

    Drift is a share of the baseline's own mean: one percent of a dark clip is far below one level.
    """
    means, drifts = images.channel_means(base).mean(axis=0), compared.means.mean(axis=0)
    levels = {"luma": means @ LUMA, **dict(zip(CHANNELS, means, strict=True))}
    shifts = {"luma": drifts @ LUMA, **dict(zip(CHANNELS, drifts, strict=True))}
    for name, shift in shifts.items():
        drift = abs(float(shift)) / max(float(levels[name]), DARK)
        yield at_most(f"drift_{name}", drift, limits.drift_luma if name == "luma" else limits.drift_channel)


def _temporal(new: Frames, base: Frames, limits: Limits) -> Iterator[GateResult]:
    for gate, marks, allowed in (
        ("black", images.black_frames(new) & ~images.black_frames(base), limits.black),
        ("frozen", images.frozen_frames(new) & ~images.frozen_frames(base), limits.frozen),
    ):
        first = int(np.argmax(marks)) if marks.any() else None
        yield at_most(gate, float(marks.sum()), float(allowed), frame=first)
    yield at_most("flicker", max(0.0, images.flicker(new) - images.flicker(base)), limits.flicker)


def _prompt_following(new: Clip, base: Clip, limits: Limits) -> Iterator[GateResult]:
    """What the baseline shows of its prompt must still be seen; only prompts of pocket's grammar can be judged."""
    try:
        caption = parse(new.prompt)
    except ValueError:
        return
    before, after = judge(base.frames).agrees(caption), judge(new.frames).agrees(caption)
    lost = [slot for slot in before if before[slot] and not after[slot]]
    note = f"no longer shown: {', '.join(lost)}" if lost else f"{sum(after.values())} of {len(after)} slots shown"
    yield at_most("prompt_following", float(len(lost)), float(limits.prompt_following), note=note)


def _result(
    gate: str, value: float, limit: float, *, passed: bool, note: str = "", frame: int | None = None
) -> GateResult:
    level, verdict = _level(gate), _verdict(passed)
    finite = bool(np.isfinite(value))
    return GateResult(
        gate=gate,
        level=level,
        value=value if finite else None,
        limit=limit,
        verdict=verdict,
        note=note if finite else "not a finite number",
        frame=frame,
    )


def _verdict(passed: bool) -> Verdict:
    return "pass" if passed else "fail"


def _incomparable(gate: str, why: str) -> GateResult:
    return GateResult(gate=gate, level=_level(gate), verdict="not_comparable", note=why)


def _level(gate: str) -> Level:
    return LEVELS.get(gate, "speed")


def _curve(values: npt.NDArray[Any]) -> tuple[float, ...]:
    return tuple(round(float(value), CURVE_DIGITS) for value in values)

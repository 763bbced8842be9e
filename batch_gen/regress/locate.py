"""Which stage moved first, from replays on frozen inputs or from what two nights kept.

A replayed stage answers for itself: its inputs are frozen. Two exceptions, both resolved by order: the text cannot be
handed in, so steps after a text that moved say nothing; the free trajectory moves with any step. When it moved although
no step did, the cause is between the kept steps or in the solver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batch_gen.encode import EncodeSettings
from batch_gen.engine import Array, Engine
from batch_gen.regress import trend
from batch_gen.regress.replay import (
    DECODE,
    FINAL,
    FRAMES,
    NOISE,
    STAGES,
    TEXT,
    Difference,
    Frozen,
    Images,
    compare,
    replay,
    stage_of_step,
)
from batch_gen.regress.results import Fingerprint

EXACT: Final[Mapping[str, float]] = {}
"""No limits: a stage moved when a bit did. Right within one numerics key."""
NUMERIC: Final[Mapping[str, float]] = dict.fromkeys(STAGES, 1e-5) | {NOISE: 0.0, FINAL: 1e-4, DECODE: 2e-3}
"""Limits on relative L2 between float32 runs of two numerics keys (docs/parity.md); frames may differ by rounding."""

ROUNDED: Final[Mapping[str, float]] = dict.fromkeys(STAGES, 5e-2) | {NOISE: 0.0, FINAL: 0.2, DECODE: 2e-3}
"""The same between bfloat16 runs: about twice the error that bfloat16 itself makes in one step."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where drift begins.

    Attributes:
        first: The first stage that moved, None when none did.
        step: Its first step, for stages that have one.
        moved: Every stage that moved, in the pipeline's order.
        words: One sentence for people.
        differences: All that was compared.
        limits: Relative L2 per stage that counted as unmoved; stages that are not named had to be equal in every bit.
        steps: Trend of the teacher-forced velocity errors over the kept steps; None with fewer than one step.
    """

    first: str | None
    step: int | None
    moved: tuple[str, ...]
    words: str
    differences: tuple[Difference, ...]
    limits: Mapping[str, float]
    steps: trend.Trend | None

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "first": self.first,
            "step": self.step,
            "moved": list(self.moved),
            "words": self.words,
            "limits": dict(self.limits),
            "stages": [
                {**difference.to_json(), "moved": has_moved(difference, self.limits)} for difference in self.differences
            ],
            "trend": None if self.steps is None else self.steps.to_json(),
        }


def bisect(
    engine: Engine,
    frozen: Frozen,
    limits: Mapping[str, float] = EXACT,
    images: Images = (),
    codec: EncodeSettings | None = None,
) -> Location:
    """Replay every stage of a clip on this engine and say which moved first.

    Args:
        engine: What is judged.
        frozen: A clip as it was.
        limits: Relative L2 per stage; `EXACT` or `NUMERIC`, or calibrated ones.
        images: First and last image of the request.
        codec: How files are written now; None for the frozen settings.
    """
    return locate(replay(engine, frozen, images, codec), limits)


def locate(differences: Iterable[Difference], limits: Mapping[str, float] = EXACT) -> Location:
    """The first stage that moved, by the pipeline's order and then by step."""
    ordered = tuple(sorted(differences, key=_order))
    moved = [difference for difference in ordered if has_moved(difference, limits)]
    first = moved[0] if moved else None
    stages = tuple(dict.fromkeys(difference.stage for difference in moved))
    return Location(
        first=None if first is None else first.stage,
        step=None if first is None else first.step,
        moved=stages,
        words=_words(first, stages, ordered),
        differences=ordered,
        limits=limits,
        steps=_trend(ordered),
    )


def compare_kept(old: Mapping[str, Array], new: Mapping[str, Array], total: int) -> list[Difference]:
    """What two renderings kept, without an engine: nothing here is teacher-forced, so only the first stage is sound.

    Args:
        old, new: Arrays by tap name, as in `Frozen.arrays`.
        total: Steps of the clip.
    """
    found = []
    for name in sorted(set(old) & set(new)):
        kind, _, number = name.partition(".")
        if kind == "velocity":
            step = int(number)
            found.append(compare(stage_of_step(step, total), name, old[name], new[name], step))
        elif stage := {TEXT: TEXT, "latents.0": NOISE, f"latents.{total}": FINAL, FRAMES: DECODE}.get(name):
            found.append(compare(stage, name, old[name], new[name]))
    return found


def limits_between(old: Fingerprint, new: Fingerprint) -> Mapping[str, float]:
    """What may differ between two machines: nothing within one numerics key, else rounding of the working dtype."""
    if old.numerics_key == new.numerics_key:
        return EXACT
    return NUMERIC if new.settings.get("dtype") == "float32" else ROUNDED


def has_moved(difference: Difference, limits: Mapping[str, float]) -> bool:
    """Whether a stage is further away than it may be."""
    return not difference.equal and not difference.distance <= limits.get(difference.stage, 0.0)


def _order(difference: Difference) -> tuple[int, int]:
    return STAGES.index(difference.stage), difference.step or 0


def _words(first: Difference | None, stages: Sequence[str], all_of: Sequence[Difference]) -> str:
    if first is None:
        return f"no stage moved ({len(all_of)} compared)"
    far = (
        f"{first.distance:.1e} relative"
        if math.isfinite(first.distance)
        else "other shapes or values that are no numbers"
    )
    far = first.note or far
    where = "" if first.step is None else f" (step {first.step})"
    frame = f", from frame {first.place} on" if first.stage == DECODE else ""
    said = f"{first.stage}{where} moved first: {far}{frame}"
    if first.stage == FINAL:
        kept = [difference.step for difference in all_of if difference.step is not None]
        said += f"; none of the steps {', '.join(map(str, kept))} did: a step between them, or the solver"
    later = [stage for stage in stages if stage != first.stage]
    if first.stage == TEXT and later:
        said += "; the stages after it see another text"
    elif later:
        said += f"; also {', '.join(later)}"
    return said


def _trend(differences: Sequence[Difference]) -> trend.Trend | None:
    errors = {difference.step: difference.distance for difference in differences if difference.step is not None}
    return trend.classify(errors) if errors else None

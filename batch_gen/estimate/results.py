"""One estimate with everything that `plan` prints, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batch_gen.config import Settings
from batch_gen.estimate.memory import Footprint, footprint
from batch_gen.estimate.ranking import Aim, Choice, Question, Swing
from batch_gen.estimate.speed import Rates, Seconds, clip_seconds, efficiency, ideal_denoise_s
from batch_gen.estimate.spend import Price, spend
from batch_gen.estimate.subject import Clips


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of the mix on the chosen mesh."""

    clips: Clips
    memory: Footprint
    seconds: Seconds
    ideal_denoise_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What `plan` knows.

    Args:
        question: what was asked.
        aim: what the ranking is by.
        chosen: the settings' mesh and replicas.
        efficiency: share of the arithmetic peak.
        shapes: memory and seconds of each shape on it.
        ranked: every combination, best first.
        swings: the best one under other assumptions.
        totals: of the manifest, see `spend`.
        layout: name of the rank table.
        notes: settings that the estimate leaves out.
    """

    question: Question
    aim: Aim
    chosen: Choice
    efficiency: float
    shapes: tuple[Shape, ...]
    ranked: tuple[Choice, ...]
    swings: tuple[Swing, ...]
    totals: dict[str, Any]
    layout: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "machine": self.question.machine.name,
            "efficiency": self.efficiency,
            "for": self.aim,
            "chosen": _choice(self.chosen),
            "shapes": [_shape(shape) for shape in self.shapes],
            "ranked": [_choice(choice) for choice in self.ranked],
            "sensitivity": [{"what": s.what, "best": _choice(s.best), "flips": s.flips} for s in self.swings],
            "totals": self.totals,
            "notes": list(self.notes),
        }


def estimate(
    question: Question,
    chosen: Choice,
    ranked: Sequence[Choice],
    swings: Sequence[Swing],
    settings: Settings,
    price: Price | None,
    num_chunks: int,
) -> Estimate:
    """Put the parts together."""
    share = efficiency(question.machine.kind)
    placement = question.placed(chosen.degrees, chosen.replicas)
    subject, machine = question.subject, question.machine
    shapes = tuple(
        Shape(
            clips,
            footprint(subject, clips, placement, machine),
            clip_seconds(subject, clips, placement, machine, Rates(share)),
            ideal_denoise_s(subject, clips, placement, machine),
        )
        for clips in question.mix
    )
    totals = spend(question, chosen, price, num_chunks=num_chunks, codec=settings.codec, lease_ttl_s=settings.lease_ttl)
    return Estimate(
        question,
        settings.for_,
        chosen,
        share,
        shapes,
        tuple(ranked),
        tuple(swings),
        totals,
        settings.layout,
        tuple(_left_out(settings)),
    )


def _left_out(settings: Settings) -> Iterator[str]:
    """Settings that change time or memory in ways that nothing here counts."""
    if settings.decode != "exact":
        yield f"--decode {settings.decode} is not counted: memory and seconds of decoding are those of exact"
    if settings.experts == "swap":
        yield "--experts swap: one expert in memory; reading the other, twice a clip, is not in the seconds"
    if settings.step_cache is not None:
        yield "--step-cache: seconds are those of all steps; what it skips depends on the clips"


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "mesh": str(choice.degrees),
        "replicas": choice.replicas,
        "seconds_per_clip": choice.seconds_per_clip,
        "clips_per_machine_hour": choice.clips_per_hour,
        "peak_bytes": int(choice.fullest.peak_bytes),
        "limit_bytes": int(choice.fullest.limit_bytes),
        "fits": choice.fits,
    }


def _shape(shape: Shape) -> dict[str, Any]:
    parts = [
        {"name": p.name, "bytes": int(p.num_bytes), "stage": p.stage, "source": p.source} for p in shape.memory.parts
    ]
    seconds = {
        name: getattr(shape.seconds, name) for name in ("text", "encode", "denoise", "exposed", "decode", "total")
    }
    return {
        "bucket": str(shape.clips.bucket),
        "steps": shape.clips.steps,
        "guided": shape.clips.guided,
        "clips": shape.clips.count,
        "memory": parts,
        "peak_bytes": int(shape.memory.peak_bytes),
        "fits": shape.memory.fits,
        "seconds": seconds,
        "ideal_denoise_s": shape.ideal_denoise_s,
    }

"""Public measurements that the estimate never saw, beside what it predicts. Misses are printed as they are.

Source: warm medians of three of a public fork of vllm-omni-neuron on trn2.48xlarge, bfloat16 (TI2V-5B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import Placement
from batch_gen.estimate.speed import Rates, Seconds, clip_seconds, efficiency
from batch_gen.estimate.subject import Clips, published
from batch_gen.request import Bucket
from models.parallel.layout import Degrees

MODEL: Final = "wan2.2-ti2v-5b"


@dataclass(frozen=True, slots=True)
class Holdout:
    """One measurement."""

    clips: Clips
    degrees: Degrees
    total_s: float
    denoise_s: float
    decode_s: float


_HD: Final = Clips(Bucket(1280, 704, 121, "text"), 50)
_SD: Final = Clips(Bucket(832, 480, 81, "text"), 50)
_FAST: Final = Clips(Bucket(1280, 704, 121, "text"), 3, guided=False)
HOLDOUTS: Final = (
    Holdout(_HD, Degrees(4, 8, 2), 23.6, 16.8, 4.3),
    Holdout(_HD, Degrees(8, 4, 2), 23.6, 16.7, 4.3),
    Holdout(_HD, Degrees(4, 16, 1), 25.9, 19.1, 4.3),
    Holdout(_HD, Degrees(8, 8, 1), 28.9, 21.9, 4.4),
    Holdout(_HD, Degrees(4, 4, 1), 68.4, 61.3, 8.2),
    Holdout(_FAST, Degrees(8, 8, 1), 7.8, 0.68, 4.35),
    Holdout(_SD, Degrees(4, 4, 1), 15.6, 13.8, 1.78),
)


@dataclass(frozen=True, slots=True)
class Miss:
    """A measurement and its prediction."""

    holdout: Holdout
    predicted: Seconds

    @property
    def denoise_s(self) -> float:
        """Predicted denoising with its communication."""
        return self.predicted.denoise + self.predicted.exposed

    @property
    def denoise_share(self) -> float:
        """Predicted over measured denoising, less 1."""
        return self.denoise_s / self.holdout.denoise_s - 1

    @property
    def total_share(self) -> float:
        """Predicted over measured total, less 1."""
        return self.predicted.total / self.holdout.total_s - 1


def misses() -> list[Miss]:
    """Every hold-out predicted, with gathered keys and values as they were measured."""
    subject, rates = published(MODEL), Rates(efficiency("neuron"))
    return [
        Miss(found, clip_seconds(subject, found.clips, Placement(found.degrees, "gather"), TRN2, rates))
        for found in HOLDOUTS
    ]


def as_text() -> str:
    """A table of all misses: measured, predicted, miss."""
    lines = ["clip                     steps  mesh              denoising, s                total, s"]
    for miss in misses():
        found = miss.holdout
        lines.append(
            f"{found.clips.bucket!s:<25}{found.clips.steps:>5}  {found.degrees!s:<17}"
            f"{found.denoise_s:>6.2f} {miss.denoise_s:>6.2f} {miss.denoise_share:>+6.0%}      "
            f"{found.total_s:>6.1f} {miss.predicted.total:>6.1f} {miss.total_share:>+6.0%}"
        )
    return "\n".join(lines)

"""What a pipeline's generators yield while they work."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Denoising step `index` (from 0) of `total` is done; `stage` names the expert that did it."""

    index: int
    total: int
    stage: str


@dataclass(frozen=True, slots=True)
class TapEvent:
    """A named intermediate: `value` is a float32 tensor on the CPU."""

    name: str
    value: Tensor


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The last event of a denoising: latents [C, T, h, w] float32 on the CPU.

    skipped: steps that the step cache skipped, by expert and text (`high.0`), as this rank saw them; None: it is off.
    """

    latents: Tensor
    skipped: dict[str, int] | None = None


Event = StepEvent | TapEvent | DoneEvent

"""One walk through an engine that keeps everything: taps, the last latents, the expert of each step, the frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batch_gen.engine import ALL_STEPS, Array, DenoiseOptions, Done, Engine, Event, Slab, Step, Tap
from batch_gen.errors import ClipFailed
from batch_gen.request import RenderRequest

Seen = Callable[[Event], None]


def unseen(_: Event) -> None:
    """Nobody watches."""


@dataclass(slots=True)
class Collected:
    """What text and denoising of one clip gave.

    Attributes:
        name: Of the last latents: `latents.<steps done>`.
        latents: Those, float32 [C, T, h, w]; None when the engine ended without them.
        taps: The inner values that were asked for.
        stages: The stage of each step, in order.
    """

    name: str
    latents: npt.NDArray[np.float32] | None = None
    taps: dict[str, Array] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)

    @property
    def arrays(self) -> dict[str, Array]:
        """Taps and last latents by name."""
        return self.taps if self.latents is None else {**self.taps, self.name: self.latents}


def collect(
    engine: Engine, request: RenderRequest, options: DenoiseOptions = ALL_STEPS, seen: Seen = unseen
) -> Collected:
    """Encode the text and denoise.

    Args:
        engine: Does it.
        request: The clip.
        options: Where to start and stop, which taps, which images.
        seen: Gets every event as it comes, the text's `Done` first.

    Raises:
        ClipFailed, EngineLost: The engine's own.
    """
    texts: tuple[str, ...] = ()
    for event in engine.text([request]):
        if isinstance(event, Done):
            texts = event.value
        seen(event)
    last = request.steps if options.stop is None else min(options.stop, request.steps)
    found = Collected(f"latents.{last}")
    for event in engine.denoise(request, texts[0], options):
        if isinstance(event, Tap):
            found.taps[event.name] = event.array
        elif isinstance(event, Step):
            found.stages.append(event.stage)
        elif isinstance(event, Done):
            found.latents = event.value
        seen(event)
    return found


def decoded(
    engine: Engine, request: RenderRequest, latents: npt.NDArray[np.float32], seen: Seen = unseen
) -> npt.NDArray[np.uint8]:
    """Frames uint8 [F, H, W, 3] of final latents.

    Raises:
        ClipFailed: "verify" for no frames and for frames of another size, and the engine's own.
    """
    slabs = []
    for event in engine.decode(request, latents):
        if isinstance(event, Slab):
            slabs.append(event.frames)
        seen(event)
    size = (request.height, request.width, 3)
    if not slabs or any(slab.shape[1:] != size for slab in slabs):
        raise ClipFailed("verify", f"clip {request.clip_id}: the decoder gave no frames of {size[1]}x{size[0]} pixels")
    return np.concatenate(slabs)

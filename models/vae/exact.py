"""The exact decode: the front on whole frames, the rear on strips, a few latent frames at a time.

Every rank of a group runs the front (it is a small part of the work) and the strips of its share; the strips' edges,
the frames per call and so every bit depend on the plan alone, not on the number of ranks.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models.errors import ModelError
from models.vae.group import StripGroup
from models.vae.model import Cut, Decoder, Memory
from models.vae.strips import Plan, Strip

Finish = Callable[[Tensor], Tensor]  # pixels [1, 3, f, H, W] in about -1..1 -> [f, H, W, 3] on the CPU


def call_spans(num_latent_frames: int, frames_per_call: int) -> list[tuple[int, int]]:
    """Latent frames [start, end) of each call: the first frame alone, then `frames_per_call` at a time."""
    starts = [0, *range(1, num_latent_frames, frames_per_call)]
    return list(zip(starts, [*starts[1:], num_latent_frames], strict=True))


def nonfinite(latent_frame: int) -> ModelError:
    """The failure of a clip whose pixels are no numbers."""
    return ModelError("nonfinite", f"latent frame {latent_frame}: the decoder made NaN or infinite pixels")


class StripDecoder:
    """The rear of the decoder on one strip of a clip: takes features call by call, remembers its own caches."""

    def __init__(self, decoder: Decoder, plan: Plan, strip: Strip) -> None:
        self._decoder, self._plan, self._strip = decoder, plan, strip
        self._cut = Cut(plan.dim, strip.low, strip.high, plan.reach.excess)
        self._caches: list[Tensor] | None = None

    def __call__(self, features: Tensor) -> Tensor:
        """Features [1, C, t, H, W] of whole frames -> the strip's own pixels [1, 3, f, H', W']."""
        dim, strip = self._plan.dim, self._strip
        memory = Memory(self._caches)
        frames = self._decoder.rear(features.narrow(dim, strip.start, strip.stop - strip.start), memory, self._cut)
        self._caches = memory.new
        return frames.narrow(dim, strip.skip, strip.keep)


@torch.no_grad()
def exact_slabs(
    decoder: Decoder, latents: Tensor, plan: Plan, group: StripGroup, finish: Finish, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Latents [1, z, T, h, w] on the checkpoint's scale -> slabs [f, H, W, 3] on rank 0, none elsewhere.

    `finish` makes `dtype` of the pixels. Raises ModelError("nonfinite") on all ranks at the same slab.
    """
    strips = {index: StripDecoder(decoder, plan, plan.strips[index]) for index in plan.shares(group.size)[group.rank]}
    caches: list[Tensor] | None = None
    for start, end in call_spans(latents.shape[2], plan.frames_per_call):
        parts, finite = {}, True
        if strips:
            memory = Memory(caches)
            features = decoder.front(latents[:, :, start:end], memory)
            caches = memory.new
        for index, decode in strips.items():
            pixels = decode(features)
            finite = finite and bool(pixels.isfinite().all())
            parts[index] = finish(pixels)
        if group.any(not finite):
            raise nonfinite(start)
        whole = group.gather(parts, plan.shapes(start, end), dtype)
        if whole is not None:
            yield torch.cat(whole, dim=plan.dim - 2)

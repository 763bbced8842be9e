"""What images add to a clip, in both ways of Wan2.2.

Channels (I2V-A14B): a mask of the frames that are given and the encoded video of given and grey frames stand beside
the noise. Tokens (TI2V-5B): the encoded image takes the place of the first latent frame, whose tokens have timestep 0.
Source: diffusers' `WanImageToVideoPipeline.prepare_latents`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.errors import ModelError
from models.vae.decode import Vae
from models.vae.encode import encode


@dataclass(frozen=True, slots=True, eq=False)
class Still:
    """One image at the clip's own size: uint8 [H, W, 3], RGB."""

    pixels: NDArray[np.uint8]

    def frame(self) -> Tensor:
        """[3, 1, H, W] float32 in -1..1, as diffusers' image processor makes it."""
        scaled = torch.from_numpy(self.pixels.astype(np.float32) / 255.0)
        return (2.0 * scaled - 1.0).permute(2, 0, 1).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a clip's steps get beside the noisy latents; at most one of the two is there.

    channels: [1, 4 + C, T, h, w] float32, concatenated to the latents. first: [1, C, 1, h, w] float32, the latent
    frame that stands in place of the first one.
    """

    channels: Tensor | None = None
    first: Tensor | None = None

    def model_input(self, latents: Tensor) -> Tensor:
        """What the transformer sees of latents [1, C, T, h, w]."""
        if self.channels is not None:
            return torch.cat([latents, self.channels], dim=1)
        return self.placed(latents)

    def placed(self, latents: Tensor) -> Tensor:
        """Latents [1, C, T, h, w] with the given first latent frame in its place."""
        if self.first is None:
            return latents
        return torch.cat([self.first, latents[:, :, 1:]], dim=2)

    def timesteps(self, timestep: float) -> list[float]:
        """One timestep for all tokens, or that of the first latent frame and that of the others."""
        return [timestep] if self.first is None else [0.0, timestep]


NOTHING = Condition()


def check_conditioning(
    image: Still | None, last_image: Still | None, supported: tuple[str, ...], num_frames: int
) -> None:
    """Raise ModelError("input") unless the checkpoint does text, image or first_last, whichever these images mean.

    All that can be refused is refused here, where every rank of a mesh looks, and not where rank 0 alone encodes.
    """
    if image is None:
        if last_image is not None:
            raise ModelError("input", "a last image needs a first image too")
        kind = "text"
    else:
        kind = "image" if last_image is None else "first_last"
    if kind not in supported:
        raise ModelError("input", f"conditioning {kind!r}: this checkpoint does {', '.join(supported)}")
    if last_image is not None and num_frames == 1:
        raise ModelError("input", "num_frames 1: a first and a last image need at least 5 frames")


def encode_channels(vae: Vae, image: Still, last_image: Still | None, num_frames: int) -> Tensor:
    """Mask and encoded video [1, 4 + C, T, h, w] float32 on the CPU: given frames, grey ones (zeros) between them."""
    latents = encode(vae, _video(image, last_image, num_frames, vae.spec.scale_temporal))
    known = torch.zeros(num_frames)
    known[0] = 1.0
    if last_image is not None:
        known[-1] = 1.0
    scale, (_, frames, rows, columns) = vae.spec.scale_temporal, latents.shape
    # The first frame counts for a whole latent frame: its mask fills all `scale` channels.
    mask = torch.cat([known[:1].repeat(scale), known[1:]]).view(frames, scale).T.reshape(scale, frames, 1, 1)
    return torch.cat([mask.expand(-1, -1, rows, columns), latents]).unsqueeze(0)


def encode_first(vae: Vae, image: Still) -> Tensor:
    """The image as one latent frame, [1, C, 1, h, w] float32 on the CPU."""
    return encode(vae, [image.frame()]).unsqueeze(0)


def _video(image: Still, last_image: Still | None, num_frames: int, scale: int) -> Iterator[Tensor]:
    """The frames in the calls in which the encoder takes them; most are grey, so none are kept."""
    first = image.frame()
    yield first
    for start in range(1, num_frames, scale):
        chunk = first.new_zeros(3, scale, *first.shape[2:])
        if last_image is not None and start + scale == num_frames:
            chunk[:, -1:] = last_image.frame()
        yield chunk

"""Latents to uint8 frames, a few at a time, in one of three modes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.vae.model import Decoder, Encoder, Memory
from models.vae.spec import VaeSpec
from models.vae.weights import load_parts

MODES = ("exact", "tiled", "reference")


@dataclass(frozen=True, slots=True)
class Vae:
    """A loaded autoencoder."""

    spec: VaeSpec
    decoder: Decoder
    encoder: Encoder

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        return self.decoder.conv_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.decoder.conv_in.weight.device

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Normalised float32 [C, T, h, w] -> [1, C, T, h, w] on the checkpoint's scale, in the model's dtype."""
        mean, std = self._statistics(latents)
        return (latents * std + mean).unsqueeze(0).to(self.device, self.dtype)

    def normalised(self, latents: Tensor) -> Tensor:
        """The inverse of `raw_latents` for means [1, C, T, h, w]: float32 [C, T, h, w] on the CPU."""
        wide = latents[0].float().cpu()
        mean, std = self._statistics(wide)
        return (wide - mean) / std

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        pair = (self.spec.latents_mean, self.spec.latents_std)
        mean, std = (torch.tensor(values, dtype=like.dtype).view(-1, 1, 1, 1) for values in pair)
        return mean, std


def load_vae(folder: Path, dtype: torch.dtype) -> Vae:
    """The autoencoder of a diffusers `vae` folder, on the CPU; raises ModelError("checkpoint" or "unsupported")."""
    return Vae(*load_parts(folder, dtype))


def to_uint8(frames: Tensor) -> Tensor:
    """Frames [B, 3, T, H, W] in about -1..1 -> uint8 [T, H, W, 3] of the first clip: the one place where rounding is.

    As diffusers' image processor: x / 2 + 0.5 clamped to 0..1, times 255, rounded half to even, in float32.
    """
    wide = frames[0].float().mul(0.5).add_(0.5).clamp_(0.0, 1.0).mul_(255.0).round_()
    return wide.to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def decode_stream(vae: Vae, latents: Tensor, mode: str = "exact") -> Iterator[np.ndarray]:
    """Normalised latents float32 [C, T, h, w] -> slabs uint8 [f, H, W, 3] in the order of time.

    Raises ModelError("unsupported") for an unknown mode.
    """
    for frames in decode_frames(vae, latents, mode):
        yield to_uint8(frames).numpy()


@torch.no_grad()
def decode_frames(vae: Vae, latents: Tensor, mode: str, frames_per_call: int = 4) -> Iterator[Tensor]:
    """As `decode_stream`, before rounding: [1, 3, f, H, W] in the model's dtype, not clamped."""
    del mode
    raw = vae.raw_latents(latents)
    front: list[Tensor] | None = None
    rear: list[Tensor] | None = None
    starts = [0, *range(1, raw.shape[2], frames_per_call)]
    for start, end in zip(starts, [*starts[1:], raw.shape[2]], strict=True):
        memory = Memory(front)
        features = vae.decoder.front(raw[:, :, start:end], memory)
        front, memory = memory.new, Memory(rear)
        yield vae.decoder.rear(features, memory)
        rear = memory.new

"""Frames to latents, exactly: float32, no tiles, the causal caches of the decoder's twin."""

from collections.abc import Iterable

import torch
from torch import Tensor

from models.errors import ModelError
from models.vae.decode import Vae
from models.vae.model import Memory


@torch.no_grad()
def encode(vae: Vae, chunks: Iterable[Tensor]) -> Tensor:
    """Normalised means of a clip's latents: float32 [C, T, h, w] on the CPU.

    chunks: frames [3, f, H, W] float32 in -1..1 in the order of time: the first frame alone (f = 1), then as many
    frames at a time as make one latent frame (f = 4). The mean is what diffusers calls the mode; nothing is sampled. On
    a mesh every rank encodes the whole clip, to the same bits. Raises ModelError("unsupported") without an encoder.
    """
    if vae.encoder is None:
        raise ModelError("unsupported", "the autoencoder was loaded without its encoder: load it for image inputs")
    means: list[Tensor] = []
    caches: list[Tensor] | None = None
    for chunk in chunks:
        memory = Memory(caches)
        moments = vae.encoder(chunk.unsqueeze(0).to(vae.device, vae.dtype), memory)
        caches = memory.new
        means.append(moments[:, : vae.spec.z_dim])
    return vae.normalised(torch.cat(means, dim=2))

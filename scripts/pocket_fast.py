"""Render pocket prompts in batches: diffusers' arithmetic, whole clips at once.

Several times faster than diffusers' pipeline and equal to it within rounding (a test holds
that); used where hundreds of clips are judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pocket_dit
import pocket_vae
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from torch import Tensor, nn

from models.pocket import spec

BATCH = 10
LATENT_SHAPE = (16, (spec.NUM_FRAMES - 1) // 4 + 1, spec.HEIGHT // 8, spec.WIDTH // 8)
Clip = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Settings:
    """How the solver is run: the preset, or a planted fault."""

    steps: int = spec.STEPS
    shift: float = spec.FLOW_SHIFT
    guidance: tuple[float, float] = (spec.GUIDANCE_HIGH, spec.GUIDANCE_LOW)
    swapped: bool = False


@dataclass(frozen=True)
class Parts:
    """The networks of one checkpoint."""

    text: nn.Module
    experts: tuple[nn.Module, nn.Module]
    tokenizer: Any


def clips(pipe: WanPipeline, prompts: list[str], settings: Settings, first_seed: int = 0) -> list[Clip]:
    """One clip per prompt, seeds counted up: [frames, height, width, 3] uint8 each."""
    parts = Parts(pipe.text_encoder, (pipe.transformer, pipe.transformer_2), pipe.tokenizer)
    result: list[Clip] = []
    for begin in range(0, len(prompts), BATCH):
        some = prompts[begin : begin + BATCH]
        latents = sample(parts, some, settings, noise(range(first_seed + begin, first_seed + begin + len(some))))
        result += frames(pipe.vae, denormal(pipe.vae, latents))
    return result


def noise(seeds: range) -> Tensor:
    """[len(seeds), 16, T, h, w] float32, each clip from its own generator as diffusers draws it."""
    draws = [torch.randn((1, *LATENT_SHAPE), generator=torch.Generator("cpu").manual_seed(seed)) for seed in seeds]
    return torch.cat(draws)


@torch.no_grad()
def sample(parts: Parts, prompts: list[str], settings: Settings, latents: Tensor) -> Tensor:
    """Denoise B prompts from noise [B, 16, T, h, w] to normalised latents of that shape."""
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=settings.shift)
    solver.set_timesteps(settings.steps)
    count = len(prompts)
    tokens = parts.tokenizer([*prompts, *[spec.NEGATIVE_PROMPT] * count], padding=True, return_tensors="pt")
    mask = tokens.attention_mask
    rows = parts.text(tokens.input_ids, mask).last_hidden_state
    for t in solver.timesteps:
        side = int(t < spec.BOUNDARY * 1000)
        expert = parts.experts[1 - side if settings.swapped else side]
        times = t.expand(2 * count).float()
        velocity = pocket_dit.forward(expert, torch.cat([latents, latents]), times, rows, mask)
        told, untold = velocity.float().chunk(2)
        guided = untold + settings.guidance[side] * (told - untold)
        latents = solver.step(guided, t, latents, return_dict=False)[0]
    return latents


def denormal(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Undo the normalisation that the autoencoder's config records."""
    mean, deviation = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return latents * deviation + mean


@torch.no_grad()
def frames(vae: AutoencoderKLWan, latents: Tensor) -> list[Clip]:
    """Decode [B, 16, T, h, w] to B clips [frames, height, width, 3] uint8."""
    result = []
    for one in latents.split(1):
        video = pocket_vae.decode(vae, one.contiguous(memory_format=torch.channels_last_3d)).clamp(-1, 1)[0]
        pixels = ((video.permute(1, 2, 3, 0) + 1) * 127.5).round().to(torch.uint8)
        result.append(pixels.numpy())
    return result

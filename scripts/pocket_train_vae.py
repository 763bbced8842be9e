"""The stage `vae-frames` of `train_pocket.py`, and what the two autoencoder stages share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pocket_pair
import pocket_vae
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from models.pocket import draw, grammar

CONFIG = {"base_dim": 16, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1}
CROP = 64
EDGE_WEIGHT = 2.0  # extra weight of pixels near an edge: the rest is flat colour and easy
LATENT_PENALTY = 1e-4


@dataclass(frozen=True)
class Phase:
    """One run of the optimiser over clips of one size."""

    steps: int
    batch: int
    frames: int
    side: int
    peak: float
    noise: float  # added to the latents, so that the decoder forgives a denoiser's errors
    floor: float = 0.02  # share of the peak step size that the cosine ends at
    warmup: int = 100


FRAMES_PHASE = Phase(steps=1500, batch=16, frames=1, side=64, peak=1e-3, noise=0.05)


def train_frames(work: Path, log: Callable[[str], None]) -> None:
    """Stage `vae-frames`: from nothing to an autoencoder of single frames."""
    torch.manual_seed(1)
    vae = AutoencoderKLWan(**CONFIG)
    fit(vae, FRAMES_PHASE, 1, log, work / "vae-frames.pt")


def fit(vae: AutoencoderKLWan, phase: Phase, seed: int, log: Callable[[str], None], result: Path) -> None:
    """Train in place; the weights end as their moving average, which also goes to `result`."""
    pocket_vae.use_compiled_norm()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=phase.peak, betas=(0.9, 0.98), weight_decay=1e-3)
    average = deepcopy(vae)
    torch.manual_seed(1000 * seed + pocket_pair.rank())
    clips = batches(phase, np.random.default_rng([seed, pocket_pair.rank()]))
    begin, seen = time.time(), 0.0
    for step in range(phase.steps):
        for group in optimizer.param_groups:
            group["lr"] = phase.peak * schedule(step, phase)
        loss = reconstruction(vae, next(clips), phase.noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        pocket_pair.average_weights(vae, step)
        blend(average, vae, min(0.995, step / (step + 20)))
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if step % 50 == 49:
            log(f"step {step + 1}/{phase.steps} loss {seen:.4f} {time.time() - begin:.0f} s")
        if (step % 200 == 199 or step + 1 == phase.steps) and pocket_pair.is_first():
            log(f"  PSNR of 4 clips: {psnr(average, phase.frames):.2f} dB")
            torch.save(average.state_dict(), result.with_suffix(".partial"))
    vae.load_state_dict(average.state_dict())
    if pocket_pair.is_first():
        result.with_suffix(".partial").rename(result)


def load(work: Path, name: str = "vae-clips.pt") -> AutoencoderKLWan:
    """The autoencoder that a stage left in the work folder."""
    vae = AutoencoderKLWan(**CONFIG)
    vae.load_state_dict(torch.load(work / name))
    return vae.eval()


def schedule(step: int, phase: Phase) -> float:
    """Linear warm-up, then a cosine down to the floor; a share of the peak."""
    if step < phase.warmup:
        return (step + 1) / phase.warmup
    done = (step - phase.warmup) / max(1, phase.steps - phase.warmup)
    return phase.floor + (1 - phase.floor) * 0.5 * (1 + math.cos(math.pi * done))


def blend(average: torch.nn.Module, module: torch.nn.Module, keep: float) -> None:
    """Move every parameter of `average` a little towards `module`."""
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), 1 - keep)


def batches(phase: Phase, rng: np.random.Generator) -> Iterator[Tensor]:
    """Endless [B, 3, T, side, side] in -1..1, channels last."""
    captions = grammar.training()
    while True:
        clips = [
            window(captions[rng.integers(len(captions))], phase, rng)
            for _ in range(-(-phase.batch // pocket_pair.size()))
        ]
        yield to_tensor(np.stack(clips))


def window(caption: grammar.Caption, phase: Phase, rng: np.random.Generator) -> draw.Frames:
    """A whole small clip, or a window of a large one near its shape: [T, side, side, 3]."""
    scene = draw.sample_scene(caption, rng)
    first = int(rng.integers(draw.CLIP_FRAMES - phase.frames + 1))
    frames = tuple(range(first, first + phase.frames))
    side = phase.side
    if side == 128 or rng.random() < 0.5:
        return draw.draw(scene, draw.View(side, 0, 0, side, side, frames))
    share = first / (draw.CLIP_FRAMES - 1)
    center = [128 * (a + (b - a) * share) for a, b in zip(scene.start, scene.end, strict=True)]
    left, top = (int(np.clip(c + rng.uniform(-32, 32) - side / 2, 0, 128 - side)) for c in center)
    return draw.draw(scene, draw.View(128, left, top, side, side, frames))


def to_tensor(clips: draw.Frames) -> Tensor:
    """[B, T, H, W, 3] in 0..1 -> [B, 3, T, H, W] in -1..1, channels last."""
    video = torch.from_numpy(clips).permute(0, 4, 1, 2, 3) * 2 - 1
    return video.contiguous(memory_format=torch.channels_last_3d)


def reconstruction(vae: AutoencoderKLWan, video: Tensor, noise: float) -> Tensor:
    """Weighted L1 + L2 of a round trip through slightly noisy posterior means."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, log_variance = pocket_vae.encode(vae, video)
        noisy = mean + noise * torch.randn_like(mean)
        output = pocket_vae.decode(vae, noisy)
    error = output.float() - video
    weight = edge_weight(video)
    fit_loss = (weight * (error.abs() + 4 * error.square())).mean() / weight.mean()
    return fit_loss + latent_penalty(mean, log_variance, noise)


def latent_penalty(mean: Tensor, log_variance: Tensor, noise: float) -> Tensor:
    """Keeps latents small, and the (unused) posterior variance at the noise that it stands for."""
    spread = (log_variance.float() - 2 * math.log(noise)).square().mean()
    return LATENT_PENALTY * (mean.float().square().mean() + 0.01 * spread)


def edge_weight(video: Tensor) -> Tensor:
    """[B, 1, T, H, W]: 1 on flat colour, 1 + EDGE_WEIGHT within four pixels of an edge."""
    high = F.max_pool3d(video, (1, 9, 9), stride=1, padding=(0, 4, 4))
    low = -F.max_pool3d(-video, (1, 9, 9), stride=1, padding=(0, 4, 4))
    return 1 + EDGE_WEIGHT * ((high - low).amax(dim=1, keepdim=True) > 0.1).float()


@torch.no_grad()
def psnr(vae: AutoencoderKLWan, frames: int, count: int = 4, side: int = 128) -> float:
    """Mean PSNR in dB over drawn clips of held-out captions, round trip in float32."""
    rng = np.random.default_rng(99)
    captions = grammar.held_out()
    values = []
    for index in range(count):
        scene = draw.sample_scene(captions[index * 7 % len(captions)], rng)
        video = to_tensor(draw.draw(scene, draw.View(side, 0, 0, side, side, tuple(range(frames))))[None])
        output = pocket_vae.decode(vae, pocket_vae.encode(vae, video)[0]).clamp(-1, 1)
        values.append(-10 * math.log10(((output - video) / 2).square().mean().item()))
    return float(np.mean(values))

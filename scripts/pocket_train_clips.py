"""The stage `vae-clips` of `train_pocket.py`: teach the autoencoder time, in feature space.

After the stage on single frames, a frame's features on the decoder's way to pixels are
known. The parts that see time (the encoder's lower half and the decoder's upper half) are
trained to give those features for every frame of a clip. Full resolution, where most of
the arithmetic is, is computed once and cached, so a step costs a fifth of one on pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pocket_pair
import pocket_train_vae
import pocket_vae
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from models.pocket import grammar

CLIPS = 400  # per process
PHASE = pocket_train_vae.Phase(steps=500, batch=4, frames=9, side=64, peak=5e-4, noise=0.08, warmup=50)


@dataclass(frozen=True)
class Features:
    """Inputs [N, 32, T, H/4, W/4] and targets [N, 32, T, H/2, W/2] of the parts that see time, bfloat16."""

    stem: Tensor
    wanted: Tensor


def train_clips(work: Path, log: Callable[[str], None]) -> None:
    """Inflate the frame autoencoder in time and train its inner half on features."""
    torch.manual_seed(2)
    vae = pocket_train_vae.load(work, "vae-frames.pt")
    features = make_features(vae, log)
    pocket_vae.inflate(vae)
    average = deepcopy(vae)
    inner = [p for part in inner_parts(vae) for p in part.parameters()]
    optimizer = torch.optim.AdamW(inner, lr=PHASE.peak, betas=(0.9, 0.98), weight_decay=1e-3)
    torch.manual_seed(20 + pocket_pair.rank())
    pocket_vae.use_compiled_norm()
    begin, seen = time.time(), 0.0
    for step in range(PHASE.steps):
        for group in optimizer.param_groups:
            group["lr"] = PHASE.peak * pocket_train_vae.schedule(step, PHASE)
        loss = feature_loss(vae, features, torch.randint(CLIPS, (PHASE.batch,)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(inner, 1.0)
        optimizer.step()
        pocket_pair.average_weights(vae, step)
        pocket_train_vae.blend(average, vae, min(0.995, step / (step + 20)))
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if step % 50 == 49:
            log(f"step {step + 1}/{PHASE.steps} loss {seen:.4f} {time.time() - begin:.0f} s")
        if (step % 200 == 199 or step + 1 == PHASE.steps) and pocket_pair.is_first():
            log(f"  PSNR of 4 clips: {pocket_train_vae.psnr(average, PHASE.frames):.2f} dB")
            torch.save(average.state_dict(), work / "vae-clips.partial")
    if pocket_pair.is_first():
        (work / "vae-clips.partial").rename(work / "vae-clips.pt")


def inner_parts(vae: AutoencoderKLWan) -> list[torch.nn.Module]:
    """The modules between the encoder's stem and the decoder's crown."""
    encoder, decoder = vae.encoder, vae.decoder
    return [
        encoder.down_blocks[pocket_vae.STEM_BLOCKS].time_conv,
        encoder.down_blocks[pocket_vae.STEM_BLOCKS + 1 :],
        encoder.mid_block,
        encoder.norm_out,
        encoder.conv_out,
        vae.quant_conv,
        vae.post_quant_conv,
        decoder.conv_in,
        decoder.mid_block,
        decoder.up_blocks[:2],
    ]


@torch.no_grad()
def make_features(vae: AutoencoderKLWan, log: Callable[[str], None]) -> Features:
    """Draw this process's clips and run the frame autoencoder on every frame by itself."""
    rng = np.random.default_rng([2, pocket_pair.rank()])
    captions = grammar.training()
    stems, wanted = [], []
    for index in range(CLIPS):
        clip = pocket_train_vae.window(captions[rng.integers(len(captions))], PHASE, rng)
        frames = torch.from_numpy(clip).permute(0, 3, 1, 2).unsqueeze(2) * 2 - 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stem = pocket_vae.encoder_stem(vae, frames)
            mean, _ = pocket_vae.encoder_trunk(vae, stem)
            target = pocket_vae.decoder_trunk(vae, mean)
        stems.append(stem.squeeze(2).transpose(0, 1).bfloat16())
        wanted.append(target.squeeze(2).transpose(0, 1).bfloat16())
        if index % 100 == 99:
            log(f"features of {index + 1}/{CLIPS} clips")
    return Features(torch.stack(stems), torch.stack(wanted))


def feature_loss(vae: AutoencoderKLWan, features: Features, index: Tensor) -> Tensor:
    """Squared error of the trunk's features relative to their variance, latents slightly noisy."""
    stem = features.stem[index].contiguous(memory_format=torch.channels_last_3d)
    wanted = features.wanted[index].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, log_variance = pocket_vae.encoder_trunk(vae, stem)
        output = pocket_vae.decoder_trunk(vae, mean + PHASE.noise * torch.randn_like(mean))
    error = (output.float() - wanted).square().mean() / wanted.var()
    return error + pocket_train_vae.latent_penalty(mean, log_variance, PHASE.noise)

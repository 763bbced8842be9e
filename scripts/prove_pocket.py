"""Does `pocket` follow its prompt? Renders the held-out prompts and reads the pixels.

Run: python scripts/prove_pocket.py

Sixty combinations that training never saw, one seed each, no retries, rendered by this
repository and by diffusers' pipeline from the same files. Beside the preset: guidance 1,
the guidance's sign flipped, the experts swapped (the last two must fail).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import diffusers
import numpy as np
import pocket_fast
import torch

from models.pocket import draw, grammar, judge, spec
from models.wan.pipeline import Sampling, WanPipeline

SLOTS = ("color", "motion", "shape", "background")
NEEDED = {"color": 0.95, "motion": 0.90, "shape": 0.80}
FAULT_MOTION = 0.50
NEEDED_PSNR = 27.0
VARIANTS = {
    "guidance 1": pocket_fast.Settings(guidance=(1.0, 1.0)),
    "flipped sign": pocket_fast.Settings(guidance=(-spec.GUIDANCE_HIGH, -spec.GUIDANCE_LOW)),
    "swapped experts": pocket_fast.Settings(swapped=True),
}
Clip = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Rendered:
    """One clip of one engine: latents [16, T, h, w] float32, frames [F, H, W, 3] uint8, and its wall time."""

    latents: np.ndarray[Any, np.dtype[np.float32]]
    frames: Clip
    seconds: float


def main() -> int:
    """Print the table and the JSON line; 0 when every figure holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=spec.WEIGHTS)
    parser.add_argument("--count", type=int, default=grammar.HELD_OUT_COUNT)
    options = parser.parse_args()
    captions = grammar.held_out()[: options.count]
    pipe = load(options.weights)
    ours = list(own_clips(options.weights, captions))
    theirs = [diffusers_clip(pipe, caption, seed) for seed, caption in enumerate(captions)]
    scores = {
        "batch-gen": show("batch-gen", captions, [one.frames for one in ours]),
        "diffusers": show("diffusers", captions, [one.frames for one in theirs]),
    }
    for name, settings in VARIANTS.items():
        scores[name] = show(name, captions, pocket_fast.clips(pipe, [c.prompt for c in captions], settings))
    ratios = summary(scores, len(captions)) | agreement(ours, theirs)
    ratios["psnr_reconstruction"] = round(reconstruction(pipe.vae), 2)
    for name, rendered in (("batch-gen", ours), ("diffusers", theirs)):
        print(f"{name}: {np.median([one.seconds for one in rendered]):.2f} s a clip (median, text to frames)")
    ok = holds(ratios)
    print(json.dumps({"name": "prove_pocket", "ok": ok, "ratios": ratios}))
    return 0 if ok else 5


def load(weights: Path) -> diffusers.WanPipeline:
    """Diffusers' own pipeline on the committed files, in float32."""
    pipe = diffusers.WanPipeline.from_pretrained(weights, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def own_clips(weights: Path, captions: list[grammar.Caption]) -> Iterator[Rendered]:
    """The preset's clips as this repository renders them; seed k for prompt k."""
    pipe = WanPipeline.load(weights)
    for seed, caption in enumerate(captions):
        begin = time.perf_counter()
        sampling = Sampling(
            prompt=caption.prompt,
            negative_prompt=spec.NEGATIVE_PROMPT,
            seed=seed,
            width=spec.WIDTH,
            height=spec.HEIGHT,
            num_frames=spec.NUM_FRAMES,
            steps=spec.STEPS,
            guidance_high=spec.GUIDANCE_HIGH,
            guidance_low=spec.GUIDANCE_LOW,
            flow_shift=spec.FLOW_SHIFT,
        )
        *_, done = pipe.denoise(sampling)
        frames = np.concatenate(list(pipe.decode(done.latents, spec.NUM_FRAMES)))
        yield Rendered(done.latents.numpy(), frames, time.perf_counter() - begin)


def diffusers_clip(pipe: diffusers.WanPipeline, caption: grammar.Caption, seed: int) -> Rendered:
    """The same clip from diffusers' pipeline."""
    begin = time.perf_counter()
    latents = pipe(
        caption.prompt,
        negative_prompt=spec.NEGATIVE_PROMPT,
        height=spec.HEIGHT,
        width=spec.WIDTH,
        num_frames=spec.NUM_FRAMES,
        num_inference_steps=spec.STEPS,
        guidance_scale=spec.GUIDANCE_HIGH,
        guidance_scale_2=spec.GUIDANCE_LOW,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="latent",
    ).frames
    with torch.no_grad():
        video = pipe.vae.decode(pocket_fast.denormal(pipe.vae, latents)).sample
    frames = pipe.video_processor.postprocess_video(video, output_type="np")[0]
    pixels = np.asarray((frames * 255).round(), np.uint8)
    return Rendered(latents[0].numpy(), pixels, time.perf_counter() - begin)


def agreement(ours: list[Rendered], theirs: list[Rendered]) -> dict[str, float]:
    """Worst relative L2 of the final latents, and worst PSNR in dB of the frames (120 when equal)."""
    pairs = list(zip(ours, theirs, strict=True))
    latents = max(np.linalg.norm(a.latents - b.latents) / np.linalg.norm(b.latents) for a, b in pairs)
    errors = [np.square(a.frames.astype(np.float64) - b.frames).mean() for a, b in pairs]
    return {
        "latents_relative_l2": float(latents),
        "frames_psnr": round(10 * math.log10(255**2 / max(*errors, 255**2 * 1e-12)), 2),
    }


def tally(captions: list[grammar.Caption], clips: list[Clip]) -> dict[str, int]:
    """How many clips are right, slot by slot."""
    verdicts = [judge.judge(clip).agrees(caption) for clip, caption in zip(clips, captions, strict=True)]
    return {slot: sum(verdict[slot] for verdict in verdicts) for slot in SLOTS}


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share."""
    z = 1.96
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def show(name: str, captions: list[grammar.Caption], clips: list[Clip]) -> dict[str, int]:
    """Judge the clips and print one block of the table."""
    score, count = tally(captions, clips), len(captions)
    for slot in SLOTS:
        low, high = wilson(score[slot], count)
        share = score[slot] / count
        print(f"{name:16} {slot:10} {score[slot]:3}/{count}  {share:6.1%}  [{low:.1%}, {high:.1%}]", flush=True)
    return score


def reconstruction(vae: diffusers.AutoencoderKLWan, count: int = 20) -> float:
    """Mean PSNR in dB of drawn clips of held-out captions after encode and decode."""
    rng = np.random.default_rng(99)
    values = []
    for caption in grammar.held_out()[:count]:
        clip = draw.draw(draw.sample_scene(caption, rng))
        video = torch.from_numpy(clip).permute(3, 0, 1, 2)[None] * 2 - 1
        with torch.no_grad():
            output = vae.decode(vae.encode(video).latent_dist.mode()).sample
        values.append(-10 * math.log10(((output - video) / 2).square().mean().item()))
    return float(np.mean(values))


def summary(scores: dict[str, dict[str, int]], count: int) -> dict[str, float]:
    """The shares under frozen names: every slot of both engines, the motion of every variant."""
    ratios = {}
    for name, score in scores.items():
        for slot in SLOTS if name not in VARIANTS else ("motion",):
            ratios[f"{slot}_{name}".replace(" ", "_").replace("-", "_")] = round(score[slot] / count, 4)
    return ratios


def holds(ratios: dict[str, float]) -> bool:
    """Every figure on its side of its bound."""
    return (
        all(ratios[f"{slot}_batch_gen"] >= needed for slot, needed in NEEDED.items())
        and all(ratios[f"{slot}_batch_gen"] == ratios[f"{slot}_diffusers"] for slot in SLOTS)
        and all(ratios[f"motion_{fault}"] <= FAULT_MOTION for fault in ("flipped_sign", "swapped_experts"))
        and ratios["psnr_reconstruction"] >= NEEDED_PSNR
        and ratios["frames_psnr"] >= 60
        and ratios["latents_relative_l2"] <= 1e-4
    )


if __name__ == "__main__":
    sys.exit(main())

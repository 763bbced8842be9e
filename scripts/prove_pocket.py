"""Does `pocket` follow its prompt? Renders the held-out prompts and reads the pixels.

Sixty combinations that training never saw, one seed each, no retries. Beside the preset:
guidance 1, the guidance's sign flipped, the experts swapped (the last two must fail).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline

import pocket_fast
from models.pocket import draw, grammar, judge, spec

SLOTS = ("color", "motion", "shape", "background")
NEEDED = {"color": 0.95, "motion": 0.90, "shape": 0.80}
FAULT_MOTION = 0.50
NEEDED_PSNR = 27.0
Clip = np.ndarray[Any, np.dtype[np.uint8]]


def main() -> int:
    """Print the table and the JSON line; 0 when every figure holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=spec.WEIGHTS)
    parser.add_argument("--count", type=int, default=grammar.HELD_OUT_COUNT)
    parser.add_argument("--keep", type=Path, help="folder for the preset's clips (.npy)")
    options = parser.parse_args()
    pipe = load(options.weights)
    captions = grammar.held_out()[: options.count]
    scores: dict[str, dict[str, int]] = {}
    seconds = []
    for name, clips in variants(pipe, captions, seconds):
        scores[name] = tally(captions, clips)
        show(name, scores[name], len(captions))
        if options.keep and name == "diffusers":
            np.save(options.keep, np.stack(clips))
    psnr = reconstruction(pipe.vae)
    ratios = summary(scores, len(captions), psnr)
    print(f"reconstruction {psnr:.2f} dB; diffusers {np.median(seconds):.2f} s a clip")
    ok = holds(ratios)
    print(json.dumps({"name": "prove_pocket", "ok": ok, "ratios": ratios}))
    return 0 if ok else 5


def load(weights: Path) -> WanPipeline:
    """diffusers' own pipeline on the committed files, in float32."""
    pipe = WanPipeline.from_pretrained(weights, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def variants(
    pipe: WanPipeline, captions: list[grammar.Caption], seconds: list[float]
) -> Iterator[tuple[str, list[Clip]]]:
    """Each way of rendering, with its clips; `seconds` collects diffusers' times."""
    yield "diffusers", [timed(diffusers_clip, seconds)(pipe, caption, seed) for seed, caption in enumerate(captions)]
    high, low = spec.GUIDANCE_HIGH, spec.GUIDANCE_LOW
    faults = {
        "guidance 1": pocket_fast.Settings(guidance=(1.0, 1.0)),
        "flipped sign": pocket_fast.Settings(guidance=(-high, -low)),
        "swapped experts": pocket_fast.Settings(swapped=True),
    }
    for name, settings in faults.items():
        yield name, pocket_fast.clips(pipe, [c.prompt for c in captions], settings)


def timed(function: Callable[..., Clip], seconds: list[float]) -> Callable[..., Clip]:
    """The function, its wall time appended to `seconds`."""

    def run(*arguments: Any) -> Clip:
        begin = time.perf_counter()
        clip = function(*arguments)
        seconds.append(time.perf_counter() - begin)
        return clip

    return run


def diffusers_clip(pipe: WanPipeline, caption: grammar.Caption, seed: int) -> Clip:
    """One clip of the preset, [frames, height, width, 3] uint8."""
    frames = pipe(
        caption.prompt,
        negative_prompt=spec.NEGATIVE_PROMPT,
        height=spec.HEIGHT,
        width=spec.WIDTH,
        num_frames=spec.NUM_FRAMES,
        num_inference_steps=spec.STEPS,
        guidance_scale=spec.GUIDANCE_HIGH,
        guidance_scale_2=spec.GUIDANCE_LOW,
        generator=torch.Generator("cpu").manual_seed(seed),
    ).frames[0]
    return np.asarray((frames * 255).round(), np.uint8)


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


def show(name: str, score: dict[str, int], count: int) -> None:
    """One block of the table."""
    for slot in SLOTS:
        low, high = wilson(score[slot], count)
        share = score[slot] / count
        print(f"{name:16} {slot:10} {score[slot]:3}/{count}  {share:6.1%}  [{low:.1%}, {high:.1%}]", flush=True)


def reconstruction(vae: AutoencoderKLWan, count: int = 20) -> float:
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


def summary(scores: dict[str, dict[str, int]], count: int, psnr: float) -> dict[str, float]:
    """The figures under frozen names."""
    ratios = {slot: scores["diffusers"][slot] / count for slot in SLOTS}
    for name, score in scores.items():
        if name != "diffusers":
            ratios[f"motion_{name.replace(' ', '_')}"] = score["motion"] / count
    return {name: round(value, 4) for name, value in {**ratios, "psnr_db": psnr}.items()}


def holds(ratios: dict[str, float]) -> bool:
    """Every figure on its side of its bound."""
    faults = ("motion_flipped_sign", "motion_swapped_experts")
    return (
        all(ratios[slot] >= needed for slot, needed in NEEDED.items())
        and all(ratios[fault] <= FAULT_MOTION for fault in faults)
        and ratios["psnr_db"] >= NEEDED_PSNR
    )


if __name__ == "__main__":
    sys.exit(main())

"""What each part of the denoise loop saves: CPU seconds a clip with the part and without it, taking turns.

Run: python scripts/bench_parts.py [--tiny] [--model pocket] [--rounds N] [--threads N]
One process, one clip of the checkpoint's preset, CPU seconds (`time.process_time`), so that other work on the machine
matters little. `base` is what `run` does. The last line is one JSON object; its ratios are CPU seconds over the base's,
`ok` says that no variant changed the latents by more than float32 rounding (bfloat16 is not held to that).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SAME = 1e-4
Clip = Callable[[], Any]


def variants(model: Path, sampling: Any) -> dict[str, tuple[Clip, int]]:
    """Name -> (denoises, how many clips that is)."""
    import torch

    from models.events import DoneEvent
    from models.wan import pipeline as module
    from models.wan.pipeline import PipelineOptions, WanPipeline

    pipe = WanPipeline.load(model)
    half = WanPipeline.load(model, PipelineOptions(dtype="bfloat16"))

    def latents_of(events: Any, each: Callable[[], None] = lambda: None) -> Any:
        found = []
        for event in events:
            each()
            if isinstance(event, DoneEvent):
                found.append(event.latents)
        return found[0]

    def with_tokens(limit: int) -> Any:
        kept, module.BATCHED_TOKENS = module.BATCHED_TOKENS, limit
        try:
            return latents_of(pipe.denoise(sampling))
        finally:
            module.BATCHED_TOKENS = kept

    def forget_text() -> Any:
        pipe.text_encoder._cached.clear()  # noqa: SLF001 - what a run without the cache would do
        return latents_of(pipe.denoise(sampling))

    def with_grad_mode() -> Any:
        step = WanPipeline._step  # noqa: SLF001
        WanPipeline._step = torch.no_grad()(step.__wrapped__)  # noqa: SLF001
        try:
            return latents_of(pipe.denoise(sampling))
        finally:
            WanPipeline._step = step  # noqa: SLF001

    def together(count: int) -> Any:
        clips = [dataclasses.replace(sampling, seed=sampling.seed + n) for n in range(count)]
        return latents_of(pipe.denoise_several(clips))

    def keys_each_step() -> Any:
        return latents_of(pipe.denoise(sampling), pipe.experts._texts.clear)  # noqa: SLF001

    def tables_each_step() -> Any:
        def forget() -> None:
            pipe._rope.clear()  # noqa: SLF001
            pipe._tables(sampling)  # noqa: SLF001

        return latents_of(pipe.denoise(sampling), forget)

    return {
        "base": (lambda: latents_of(pipe.denoise(sampling)), 1),
        "text_not_cached": (forget_text, 1),
        "text_keys_each_step": (keys_each_step, 1),
        "rope_tables_each_step": (tables_each_step, 1),
        "texts_one_by_one": (lambda: with_tokens(0), 1),
        "no_grad_instead_of_inference": (with_grad_mode, 1),
        "two_clips_per_step": (lambda: together(2), 2),
        "four_clips_per_step": (lambda: together(4), 4),
        "bfloat16": (lambda: latents_of(half.denoise(sampling)), 1),
    }


def measure(found: dict[str, tuple[Clip, int]], rounds: int) -> tuple[dict[str, float], bool]:
    """Median CPU seconds a clip of each variant, and whether the float32 ones agree with the base."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    base = found["base"][0]()
    ok = True
    for round_number in range(rounds + 1):  # the first warms up
        for name, (clip, count) in found.items():
            began = time.process_time()
            latents = clip()
            if round_number:
                seconds[name].append((time.process_time() - began) / count)
            error = float((latents - base).norm() / base.norm())
            ok = ok and (error < SAME or name == "bfloat16")
    return {name: statistics.median(values) for name, values in seconds.items()}, ok


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the random checkpoint, one round: the script works")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    import torch

    from batch_gen.checkpoint import open_checkpoint
    from batch_gen.config import load_preset
    from models.wan.pipeline import Sampling

    torch.set_num_threads(options.threads)
    checkpoint = open_checkpoint("tiny" if options.tiny else options.model)
    preset = load_preset(checkpoint.preset, checkpoint.preset).sampling
    names = ("negative_prompt", "width", "height", "num_frames", "steps", "guidance_high", "guidance_low", "flow_shift")
    values = {name: getattr(preset, name) for name in names}
    if options.tiny:
        values |= {"width": 64, "height": 64, "num_frames": 5, "steps": 2}
    sampling = Sampling(prompt="a red circle moves left on blue", seed=0, **values)
    seconds, ok = measure(variants(checkpoint.folder, sampling), 1 if options.tiny else options.rounds)
    print(f"{checkpoint.name}, {options.threads} threads, torch {torch.__version__}: {values}")
    for name, value in seconds.items():
        print(f"{name:30} {value:8.3f} CPU s a clip  {value / seconds['base']:6.3f}")
    ratios = {name: round(value / seconds["base"], 3) for name, value in seconds.items() if name != "base"}
    print(json.dumps({"name": "parts", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

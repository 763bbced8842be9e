"""Render 100 clips of the tiny checkpoint in one pipeline and print how its memory grows; takes minutes.

Run: python scripts/soak.py

Clips differ in prompt, seed and steps and come in two shapes, as in a long run. The first clip is rendered again at the
end: it must have the same frames. `--clips N` and `--variant V` make it shorter or another model's.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from batch_gen.memory import MemoryTrend, rss_bytes
from models.events import DoneEvent
from models.wan.condition import Still
from models.wan.pipeline import Sampling, WanPipeline
from models.wan.tiny import ensure_tiny

WARM_UP_CLIPS = 10
MAX_SLOPE_BYTES = 64 << 10  # a clip's frames alone are more


def clip(number: int, variant: str) -> Sampling:
    """One of the clips; half have an image where the model takes one."""
    width, height = ((64, 64), (96, 64))[number % 2]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    needs_image = variant == "i2v" or (variant == "ti2v" and number % 4 < 2)
    prompt = f"a {('red', 'blue', 'golden')[number % 3]} fox number {number}"
    image = Still(pixels) if needs_image else None
    return Sampling(prompt, "blurry", number, width, height, 5, 2 + number % 2, 4.0, 3.0, 5.0, image)


def frames_hash(pipeline: WanPipeline, sampling: Sampling) -> str:
    """SHA-256 of a clip's frames."""
    digest = hashlib.sha256()
    for event in pipeline.denoise(sampling):
        if isinstance(event, DoneEvent):
            for frames in pipeline.decode(event.latents, sampling.num_frames):
                digest.update(frames.tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=100)
    parser.add_argument("--variant", default="default")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pipeline = WanPipeline.load(ensure_tiny(Path(folder), given.variant))
        trend, hashes = MemoryTrend(), []
        for number in range(given.clips):
            hashes.append(frames_hash(pipeline, clip(number, given.variant)))
            if number >= WARM_UP_CLIPS:
                trend.add(rss_bytes())
        same = frames_hash(pipeline, clip(0, given.variant)) == hashes[0]
    print(f"{given.clips} clips, memory grows by {trend.slope_bytes / 1024:.1f} KiB a clip; first clip again: {same}")
    ratios = {"slope": trend.slope_bytes / MAX_SLOPE_BYTES}
    print(json.dumps({"name": "soak", "ok": bool(same and ratios["slope"] <= 1), "ratios": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

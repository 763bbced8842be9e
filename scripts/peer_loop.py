"""The peer of `bench_peer.py`: a plain loop around diffusers' `WanPipeline` and its `export_to_video`.

Run by the bench: python scripts/peer_loop.py JSON. Prints one line of JSON for each clip: its seconds by stage and the
moment at which its file was there. The autoencoder stays float32, as in diffusers' own examples.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

# imageio turns a quality q into crf int(51 * (1 - q / 10)); this one is our default of 16.
QUALITY = 6.765


def load(model: str, dtype: str, flow_shift: float) -> Any:
    """The pipeline as its documentation loads it."""
    import torch
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(model, vae=vae, dtype=getattr(torch, dtype))
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=flow_shift)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Stages:
    """Seconds inside the text encoder and the decoder; the rest of a call is denoising."""

    def __init__(self, pipe: Any) -> None:
        self.seconds = {"text": 0.0, "decode": 0.0}
        pipe.encode_prompt = self._timed("text", pipe.encode_prompt)
        pipe.vae.decode = self._timed("decode", pipe.vae.decode)

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed

    def take(self) -> dict[str, float]:
        """What was spent since the last call."""
        spent, self.seconds = dict(self.seconds), dict.fromkeys(self.seconds, 0.0)
        return spent


def main() -> None:
    """Render the rows, one after the other."""
    spec = json.loads(sys.argv[1])
    import torch
    from diffusers.utils import export_to_video

    torch.set_num_threads(spec["threads"])
    pipe = load(spec["model"], spec["dtype"], spec["sampling"]["flow_shift"])
    two = pipe.config.boundary_ratio is not None
    stages, sampling = Stages(pipe), spec["sampling"]
    for number, prompt in enumerate(spec["prompts"]):
        began = time.perf_counter()
        frames = pipe(
            prompt=prompt,
            negative_prompt=sampling["negative_prompt"],
            width=sampling["width"],
            height=sampling["height"],
            num_frames=sampling["num_frames"],
            num_inference_steps=sampling["steps"],
            guidance_scale=sampling["guidance_high"],
            guidance_scale_2=sampling["guidance_low"] if two else None,
            generator=torch.Generator().manual_seed(number),
        ).frames[0]
        rendered = time.perf_counter()
        export_to_video(frames, str(Path(spec["out"]) / f"clip-{number}.mp4"), fps=8, quality=QUALITY)
        spent = stages.take()
        spent["denoise"] = rendered - began - sum(spent.values())
        spent["encode"] = time.perf_counter() - rendered
        print(json.dumps({"stages": spent, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main()

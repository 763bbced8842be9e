"""diffusers' own modules behind the interface of `WanPipeline`: the reference legs of the three-way comparison.

Text encoder, transformers and VAE are those of diffusers and transformers, loaded by them; only the loop over the steps
is ours, so that a step can be entered in the middle. CPU, one process, text to video. For checks, not for rendering.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.checkpoint_files import folder_digest, read_json
from models.device import dtype_named
from models.errors import ModelError
from models.events import DoneEvent, Event, StepEvent, TapEvent
from models.umt5.spec import MAX_TOKENS
from models.vae.decode import to_uint8
from models.wan.experts import HIGH, LOW
from models.wan.pipeline import PipelineOptions, Sampling
from models.wan.solver import initial_noise, make_solver, num_train_timesteps

CLASS = "WanPipeline"  # what it loads, by the `_class_name` of model_index.json


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceText:
    """One encoded prompt; the fields that `TextHandle` has too, and `embeds` [1, 512, E]."""

    id: str
    num_tokens: int
    truncated: bool
    embeds: Tensor


class ReferencePipeline:
    """A loaded checkpoint; make it with `load`."""

    def __init__(self, folder: Path, options: PipelineOptions) -> None:
        from diffusers import AutoencoderKLWan, WanPipeline
        from diffusers.utils import logging

        index = read_json(folder / "model_index.json")
        if index.get("_class_name") != CLASS:
            name = index.get("_class_name")
            raise ModelError("unsupported", f"{folder}: the diffusers reference does {CLASS} alone, not {name}")
        if options.device != "cpu":
            raise ModelError("unsupported", f"the diffusers reference runs on the CPU, not on {options.device}")
        self.folder, self.options = folder, options
        self.scheduler_config = read_json(folder / "scheduler" / "scheduler_config.json")
        logging.disable_progress_bar()
        vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae", dtype=dtype_named(options.vae_dtype))
        self.pipe = WanPipeline.from_pretrained(folder, vae=vae, dtype=dtype_named(options.dtype))
        ratio = self.pipe.config.boundary_ratio
        self.boundary = None if ratio is None else ratio * num_train_timesteps(self.scheduler_config)
        self._texts: dict[str, ReferenceText] = {}

    @classmethod
    def load(cls, folder: Path, options: PipelineOptions | None = None) -> "ReferencePipeline":
        """Read a diffusers-layout folder; raises ModelError("unsupported")."""
        return cls(folder, options or PipelineOptions())

    @torch.inference_mode()
    def text(self, prompts: Sequence[str]) -> list[ReferenceText]:
        """The prompts' embeddings, each alone and once."""
        for prompt in prompts:
            if prompt not in self._texts:
                embeds, _ = self.pipe.encode_prompt(
                    [prompt], do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS
                )
                used = int((embeds[0] != 0).any(dim=1).sum())
                self._texts[prompt] = ReferenceText(f"reference-{len(self._texts)}", used, False, embeds)
        return [self._texts[prompt] for prompt in prompts]

    def denoise(
        self,
        sampling: Sampling,
        start: tuple[int, Tensor] | None = None,
        stop: int | None = None,
        taps: frozenset[str] = frozenset(),
    ) -> Iterator[Event]:
        """As `WanPipeline.denoise`: events, taps, the same rule of guidance; raises ModelError("input")."""
        if sampling.image is not None or sampling.last_image is not None:
            raise ModelError("input", "the diffusers reference does text alone; leave the image out")
        shape = self._latent_shape(sampling)
        first, latents = (
            (0, initial_noise(sampling.seed, shape)) if start is None else (start[0], start[1][None].float())
        )
        last = sampling.steps if stop is None else min(stop, sampling.steps)
        solver = make_solver(self.scheduler_config, self.options.solver, sampling.flow_shift, sampling.steps, first)
        texts = self.text((sampling.prompt, sampling.negative_prompt))
        if "text" in taps:
            yield TapEvent("text", texts[0].embeds[0].float())
        for step in range(first, last):
            if f"latents.{step}" in taps:
                yield TapEvent(f"latents.{step}", latents[0].clone())
            timestep = solver.timesteps[step]
            stage = HIGH if self.boundary is None or timestep >= self.boundary else LOW
            velocity = self._velocity(texts, timestep, stage, latents, guidance(sampling, stage))
            latents = solver.step(step, velocity, latents)
            if f"velocity.{step}" in taps:
                yield TapEvent(f"velocity.{step}", velocity[0].clone())
            yield StepEvent(step, sampling.steps, stage)
        if f"latents.{last}" in taps:
            yield TapEvent(f"latents.{last}", latents[0].clone())
        yield DoneEvent(latents[0])

    @torch.inference_mode()
    def decode(self, latents: Tensor | NDArray[np.float32], num_frames: int) -> Iterator[NDArray[np.uint8]]:
        """Latents [C, T, h, w] float32 -> all frames at once, uint8 [F, H, W, 3]; diffusers' untiled decode."""
        config = self.pipe.vae.config
        mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
        frames = self.pipe.vae.decode(torch.as_tensor(latents)[None].float() * std + mean).sample
        if frames.shape[2] != num_frames:
            raise ModelError("input", f"{frames.shape[2]} frames come of these latents, not {num_frames}")
        array = to_uint8(frames).numpy()
        array.flags.writeable = False
        yield array

    def decode_plan(self, latents: Tensor | NDArray[np.float32]) -> dict[str, Any]:
        """How latents are decoded."""
        del latents
        return {"mode": "reference"}

    def describe(self) -> dict[str, Any]:
        """What identifies this pipeline, as JSON values."""
        return {
            "pipeline": "diffusers",
            "model_digest": folder_digest(self.folder),
            "dtype": self.options.dtype,
            "device": "cpu",
            "solver": self.options.solver,
            "decode": "reference",
        }

    @torch.inference_mode()
    def _velocity(
        self, texts: Sequence[ReferenceText], timestep: float, stage: str, latents: Tensor, factor: float | None
    ) -> Tensor:
        """The guided velocity [1, C, T, h, w] float32, combined in the working dtype as diffusers does."""
        model = self.pipe.transformer if stage == HIGH else self.pipe.transformer_2
        time = torch.tensor([timestep])
        if self.pipe.config.expand_timesteps:  # TI2V-5B: a timestep for each token, all alike without an image
            time = time.expand(1, latents[0, 0, :, ::2, ::2].numel())
        used = texts[:1] if factor is None else texts
        parts = [model(latents.to(text.embeds.dtype), time, text.embeds, return_dict=False)[0] for text in used]
        out: Tensor = parts[0] if factor is None else parts[1] + factor * (parts[0] - parts[1])
        return out.float()

    def _latent_shape(self, sampling: Sampling) -> tuple[int, int, int, int]:
        stride, frames = self.pipe.vae_scale_factor_spatial, self.pipe.vae_scale_factor_temporal
        size = (sampling.height // stride, sampling.width // stride)
        return (self.pipe.vae.config.z_dim, (sampling.num_frames - 1) // frames + 1, *size)


def guidance(sampling: Sampling, stage: str) -> float | None:
    """The factor of a step, None when only the prompt runs: the rule of `WanPipeline.denoise`."""
    if stage == LOW:
        return sampling.guidance_low if sampling.guidance_high > 1 or sampling.guidance_low > 1 else None
    return sampling.guidance_high if sampling.guidance_high > 1 else None

"""diffusers' Wan pipelines as the reference: one run with everything recorded, and single velocities."""

from dataclasses import dataclass, field

import numpy as np
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers.utils import logging
from PIL import Image
from torch.utils._python_dispatch import _disable_current_modes

from models.checkpoint_files import read_json
from models.wan.condition import Still
from models.wan.pipeline import Sampling
from tests.parity.float64 import float64_reference, lift_module

logging.disable_progress_bar()

PROMPT = "A red fox jumps over the golden river at sunset, caf\u00e9 \u96ea \U0001f98a"
NEGATIVE = "blurry, low quality, static"


def sampling(**changes):
    """A small clip with both experts at work and different guidance for each."""
    values = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "seed": 7,
        "width": 96,
        "height": 64,
        "num_frames": 9,
        "steps": 8,
        "guidance_high": 4.0,
        "guidance_low": 3.0,
        "flow_shift": 5.0,
    }
    return Sampling(**(values | changes))


def still(seed, width=96, height=64):
    """A picture that is smooth here and noisy there."""
    noise = np.random.default_rng(seed).random((height, width, 3))
    ramp = np.linspace(0, 1, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
    return Still(np.round(255 * np.where(np.arange(3) == seed % 3, ramp, 0.3 * noise + 0.5 * ramp)).astype(np.uint8))


@dataclass
class Trace:
    """One denoising: latents[k] enter step k, velocities[k] is that step's guided velocity.

    boundary: the timestep at which diffusers changed experts; None for a checkpoint with one.
    """

    boundary: float | None = None
    timesteps: list = field(default_factory=list)
    latents: list = field(default_factory=list)
    velocities: list = field(default_factory=list)
    final: torch.Tensor | None = None

    def named_steps(self):
        """The steps that are compared: the ends, and both sides of the switch between the experts."""
        high = [k for k, t in enumerate(self.timesteps) if self.boundary is None or t >= self.boundary]
        low = [k for k in range(len(self.timesteps)) if k not in high]
        steps = {"first": 0, "last": len(self.timesteps) - 1}
        if high and low:
            steps |= {"last high": high[-1], "first low": low[0]}
        return steps


def load_reference(folder, solver, flow_shift, dtype=torch.float32, *, with_image=False):
    """diffusers' pipeline with the solver of a clip; float64 is made of the float32 one.

    with_image: the image pipeline, for a checkpoint that does both.
    """
    is_image = with_image or read_json(folder / "model_index.json")["_class_name"] == "WanImageToVideoPipeline"
    kind = WanImageToVideoPipeline if is_image else WanPipeline
    pipe = kind.from_pretrained(folder, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    config = pipe.scheduler.config
    if solver == "unipc":
        pipe.scheduler = UniPCMultistepScheduler.from_config(config, flow_shift=flow_shift)
    else:
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(config.num_train_timesteps, shift=flow_shift)
    pipe.set_progress_bar_config(disable=True)
    if dtype == torch.float64:
        for module in (pipe.text_encoder, pipe.transformer, pipe.transformer_2, pipe.vae if is_image else None):
            if module is not None:
                lift_module(module)
    return pipe


def record(pipe, trace):
    """Make the pipeline's scheduler write each step into `trace`."""
    scheduler = pipe.scheduler
    step = scheduler.step

    def recorded(velocity, timestep, latents, **options):
        trace.timesteps.append(float(timestep))
        trace.velocities.append(velocity.clone())
        trace.latents.append(latents.clone())
        return step(velocity, timestep, latents, **options)

    scheduler.step = recorded


def lift_sigmas(scheduler):
    """Keep sigmas and timesteps in float64 after they are set; the values stay those that float32 runs use."""
    set_timesteps = scheduler.set_timesteps

    def lifted(*args, **options):
        with _disable_current_modes():
            set_timesteps(*args, **options)
            scheduler.sigmas = scheduler.sigmas.double()
            if scheduler.timesteps.is_floating_point():
                scheduler.timesteps = scheduler.timesteps.double()

    scheduler.set_timesteps = lifted


def run_reference(folder, clip, solver="unipc", dtype=torch.float32):
    """Denoise a clip with diffusers and record it: (pipeline, Trace)."""
    pipe = load_reference(folder, solver, clip.flow_shift, dtype, with_image=clip.image is not None)
    ratio = pipe.config.boundary_ratio
    trace = Trace(None if ratio is None else ratio * pipe.scheduler.config.num_train_timesteps)
    record(pipe, trace)
    settings = {
        "prompt": clip.prompt,
        "negative_prompt": clip.negative_prompt,
        "width": clip.width,
        "height": clip.height,
        "num_frames": clip.num_frames,
        "num_inference_steps": clip.steps,
        "guidance_scale": clip.guidance_high,
        "guidance_scale_2": clip.guidance_low if pipe.config.boundary_ratio is not None else None,
        "output_type": "latent",
    } | image_settings(clip, dtype)
    if dtype == torch.float64:
        lift_sigmas(pipe.scheduler)
        scale = pipe.vae_scale_factor_spatial
        size = ((clip.num_frames - 1) // 4 + 1, clip.height // scale, clip.width // scale)
        shape = (1, pipe.vae.config.z_dim, *size)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(clip.seed)).double()
        with float64_reference():
            trace.final = pipe(**settings, latents=noise).frames
    else:
        generator = torch.Generator().manual_seed(clip.seed)
        trace.final = pipe(**settings, generator=generator).frames
    return pipe, trace


def image_settings(clip, dtype):
    """The clip's images as diffusers takes them: PIL, or for float64 (which PIL's way does not know) a tensor in 0..1."""
    given = {"image": clip.image, "last_image": clip.last_image}
    present = {name: value.pixels for name, value in given.items() if value is not None}
    if dtype != torch.float64:
        return {name: Image.fromarray(pixels) for name, pixels in present.items()}
    scaled = {name: torch.from_numpy(pixels.astype(np.float32) / 255.0) for name, pixels in present.items()}
    return {name: pixels.double().permute(2, 0, 1)[None] for name, pixels in scaled.items()}


@torch.no_grad()
def reference_velocity(pipe, clip, timestep, latents, guidance):
    """The velocity of diffusers' own modules at given latents; a guidance of None runs the prompt alone."""
    boundary = pipe.config.boundary_ratio
    is_high = boundary is None or timestep >= boundary * pipe.scheduler.config.num_train_timesteps
    model = pipe.transformer if is_high else pipe.transformer_2
    prompts = [clip.prompt] if guidance is None else [clip.prompt, clip.negative_prompt]
    embeds, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
    time = torch.tensor([timestep])
    parts = [
        model(latents.to(embeds.dtype), time, embeds[k : k + 1], return_dict=False)[0] for k in range(len(prompts))
    ]
    return parts[0] if guidance is None else parts[1] + guidance * (parts[0] - parts[1])

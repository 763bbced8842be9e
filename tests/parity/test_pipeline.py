"""The pipeline agrees with diffusers' `WanPipeline`, clip by clip and step by step."""

import dataclasses

import numpy as np
import pytest
import torch

from models.events import StepEvent, TapEvent
from tests.parity.cases import CASES
from tests.parity.compare import VELOCITY_BOUND, judge, our_latents, our_velocity, relative
from tests.parity.reference import load_reference, reference_velocity, sampling


@pytest.mark.parametrize("name", CASES)
def test_clip_agrees_with_diffusers(name, ours, traces):
    """Velocity within 1e-5 at four steps, trajectory within 1e-4, error against float64 at most 10 times diffusers' own."""
    variant, changes, solver = CASES[name]
    clip = sampling(**changes)
    verdict = judge(ours(variant, solver=solver), clip, *traces(variant, clip, solver))
    assert verdict.faults == []


def test_both_experts_work_in_the_cases(traces):
    """The four named steps are four different steps: both experts do some, so a fault of either shows."""
    trace, _ = traces("default", sampling())
    assert len(set(trace.named_steps().values())) == 4


def test_noise_is_what_diffusers_draws(ours, traces):
    """The latents that enter step 0 are bit for bit those of WanPipeline with a CPU generator."""
    clip = sampling()
    events = ours().denoise(clip, stop=0, taps=frozenset({"latents.0"}))
    noise = next(event.value for event in events if isinstance(event, TapEvent))
    assert torch.equal(noise, traces("default", clip)[0].latents[0][0])


def test_low_guidance_alone_guides_the_low_noise_steps(ours, tiny_variant, traces):
    """With guidance 1 above the boundary and 3 below, only the steps below combine both prompts."""
    clip = sampling(guidance_high=1.0, guidance_low=3.0)
    pipe = load_reference(tiny_variant("default"), "unipc", clip.flow_shift)
    trace, pipeline = traces("default", sampling())[0], ours()
    steps = trace.named_steps()
    for name, step in steps.items():
        guidance = 3.0 if name in ("first low", "last") else None
        latents = trace.latents[step]
        theirs = reference_velocity(pipe, clip, trace.timesteps[step], latents, guidance)
        assert relative(our_velocity(pipeline, clip, step, latents), theirs[0]) <= VELOCITY_BOUND


def test_stages_follow_the_timesteps(ours, traces):
    """Each step is done by the expert that its timestep asks for."""
    clip = sampling()
    pipeline = ours()
    stages = [event.stage for event in pipeline.denoise(clip) if isinstance(event, StepEvent)]
    timesteps = traces("default", clip)[0].timesteps
    assert stages == ["high" if timestep >= 875 else "low" for timestep in timesteps]


def test_full_text_and_compact_text_agree(ours):
    """Cross-attention over one padding row that counts many times is cross-attention over all 512 rows."""
    clip = sampling(steps=3)
    compact = ours()
    full = type(compact).load(compact.folder)
    full.experts.device = dataclasses.replace(full.experts.device, name="neuron")
    assert relative(our_latents(compact, clip), our_latents(full, clip)) <= VELOCITY_BOUND


def test_frames_agree_with_diffusers(ours, tiny_variant):
    """From prompt to pixels: no value is more than one level off, and fewer than one in a thousand are off at all."""
    clip = sampling(width=64, height=48, num_frames=5, steps=3)
    pipe = load_reference(tiny_variant("default"), "unipc", clip.flow_shift)
    video = pipe(
        prompt=clip.prompt,
        negative_prompt=clip.negative_prompt,
        width=clip.width,
        height=clip.height,
        num_frames=clip.num_frames,
        num_inference_steps=clip.steps,
        guidance_scale=clip.guidance_high,
        guidance_scale_2=clip.guidance_low,
        generator=torch.Generator().manual_seed(clip.seed),
    ).frames[0]
    theirs = np.round(video * 255).astype(int)
    frames = np.concatenate(list(ours().decode(our_latents(ours(), clip), clip.num_frames))).astype(int)
    off = np.abs(frames - theirs)
    assert off.max() <= 1
    assert (off > 0).mean() < 1e-3

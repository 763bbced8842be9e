"""Several clips in one denoise call have the bits of each alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.events import DoneEvent, StepEvent
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline

CLIP = Sampling("a red fox", "", 1, 64, 48, 9, 3, 4.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def pipeline(tiny_checkpoint):
    return WanPipeline.load(tiny_checkpoint)


def results(events):
    return [event.latents for event in events if isinstance(event, DoneEvent)]


@pytest.mark.parametrize("guidance_high", [4.0, 1.0])
def test_bits_are_those_of_each_clip_alone(pipeline, guidance_high):
    """Three clips with other prompts and seeds, with and without guidance: all bits as alone, in their order."""
    prompts = [f"a red fox {n}" for n in range(3)]
    clips = [
        dataclasses.replace(CLIP, prompt=prompt, seed=seed, guidance_high=guidance_high)
        for seed, prompt in enumerate(prompts)
    ]
    assert len({pipeline.alike(clip) for clip in clips}) == 1
    events = list(pipeline.denoise_several(clips))
    assert sum(isinstance(event, StepEvent) for event in events) == CLIP.steps
    alone = [results(pipeline.denoise(clip))[0] for clip in clips]
    assert not torch.equal(alone[0], alone[1])
    for together, single in zip(results(events), alone, strict=True):
        assert torch.equal(together, single)


def test_texts_of_another_length_are_not_alike(pipeline, tiny_checkpoint):
    """Clips whose text has another number of rows, and all clips under a step cache or with an image, stay alone."""
    longer = dataclasses.replace(CLIP, prompt="a red fox in the snow")
    assert pipeline.alike(CLIP) != pipeline.alike(longer)
    from models.wan.step_cache import CacheSettings

    cached = WanPipeline.load(tiny_checkpoint, PipelineOptions(step_cache=CacheSettings(0.1, warm_up=1)))
    assert cached.alike(CLIP) is None

import numpy as np
import pytest
import torch

from models.pocket import grammar, judge, spec

# One held-out prompt per motion: enough to tell the preset from a fault.
MOVING = [next(c for c in grammar.held_out() if c.motion == motion) for motion in grammar.MOTIONS]


def right_motions(pipe, settings):
    import pocket_fast

    clips = pocket_fast.clips(pipe, [caption.prompt for caption in MOVING], settings)
    return sum(judge.judge(clip).motion == caption.motion for clip, caption in zip(clips, MOVING, strict=True))


def test_the_preset_follows_its_prompts(pipe):
    """With the preset's settings the motion is right in at least six of seven held-out prompts."""
    import pocket_fast

    assert right_motions(pipe, pocket_fast.Settings()) >= 6


@pytest.mark.parametrize("fault", [{"guidance": (-spec.GUIDANCE_HIGH, -spec.GUIDANCE_LOW)}, {"swapped": True}])
def test_a_planted_fault_is_seen(pipe, fault):
    """A flipped guidance sign and swapped experts each bring the motion to half or less."""
    import pocket_fast

    assert right_motions(pipe, pocket_fast.Settings(**fault)) <= len(MOVING) / 2


def test_the_fast_renderer_equals_diffusers(pipe):
    """The batch renderer behind these figures gives diffusers' frames, at least 60 dB apart."""
    import pocket_fast

    prompt = MOVING[0].prompt
    theirs = pipe(
        prompt,
        height=spec.HEIGHT,
        width=spec.WIDTH,
        num_frames=spec.NUM_FRAMES,
        num_inference_steps=spec.STEPS,
        guidance_scale=spec.GUIDANCE_HIGH,
        guidance_scale_2=spec.GUIDANCE_LOW,
        generator=torch.Generator("cpu").manual_seed(0),
    ).frames[0]
    ours = pocket_fast.clips(pipe, [prompt], pocket_fast.Settings())[0]
    error = np.square((theirs * 255).round() - ours.astype(np.float64)).mean()
    assert error <= 255**2 / 10**6

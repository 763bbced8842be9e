"""The parity check has teeth: each planted fault fails it."""

import dataclasses
import json
import shutil

import pytest
import torch

from models.umt5.spec import MAX_TOKENS
from models.wan.pipeline import WanPipeline
from models.wan.text import TextHandle
from tests.parity.compare import judge
from tests.parity.reference import sampling


@pytest.fixture
def judged(ours, traces):
    """A function that judges a clip, perhaps rendered by another pipeline, against the sound reference."""

    def run(clip=None, pipeline=None):
        sound = sampling()
        return judge(pipeline or ours(), clip or sound, *traces("default", sound))

    return run


def copy_checkpoint(source, target, **changes):
    """A checkpoint that differs in its model_index.json."""
    shutil.copytree(source, target)
    path = target / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


def velocity_faults(verdict):
    """The named steps whose velocity breaks its bound."""
    return {fault for fault in verdict.faults if fault.startswith("velocity")}


def test_sound_run_passes(judged):
    """Without a fault the check passes, so it is the faults that it sees below."""
    assert judged().faults == []


def test_guidance_off_by_one_percent_is_seen(judged):
    """A guidance factor that is 1 % too high breaks the velocity bound at every step."""
    clip = sampling(guidance_high=4.04, guidance_low=3.03)
    assert len(velocity_faults(judged(clip))) == 4


def test_flipped_sign_of_guidance_is_seen(judged):
    """Guiding away from the prompt breaks the velocity bound at every step."""
    sound = sampling()
    clip = dataclasses.replace(sound, prompt=sound.negative_prompt, negative_prompt=sound.prompt)
    assert len(velocity_faults(judged(clip))) == 4


def test_swapped_experts_are_seen(judged, tiny_checkpoint, tmp_path):
    """The low-noise expert at high noise and the other way round break the velocity bound at every step."""
    folder = copy_checkpoint(tiny_checkpoint, tmp_path / "swapped")
    (folder / "transformer").rename(folder / "other")
    (folder / "transformer_2").rename(folder / "transformer")
    (folder / "other").rename(folder / "transformer_2")
    assert len(velocity_faults(judged(pipeline=WanPipeline.load(folder)))) == 4


@pytest.mark.parametrize("side", ["last high", "first low"])
def test_boundary_one_step_off_is_seen(side, judged, traces, tiny_checkpoint, tmp_path):
    """One step on the wrong expert, on either side of the boundary, breaks the velocity bound there and only there."""
    trace = traces("default", sampling())[0]
    timestep = trace.timesteps[trace.named_steps()[side]]
    boundary = timestep + 1 if side == "last high" else timestep
    folder = copy_checkpoint(tiny_checkpoint, tmp_path / "moved", boundary_ratio=boundary / 1000)
    (fault,) = velocity_faults(judged(pipeline=WanPipeline.load(folder)))
    assert side in fault


class PadRows:
    """A text encoder that forgets to zero the rows behind the prompt."""

    def __init__(self, encoder):
        self.encoder = encoder

    def encode(self, prompt, long_prompt):
        """The sound rows, then what the encoder makes of padding tokens."""
        sound = self.encoder.encode(prompt, long_prompt)
        padding = torch.zeros(1, MAX_TOKENS - len(sound.rows), dtype=torch.int64)
        with torch.inference_mode():
            rows = torch.cat([sound.rows, self.encoder.model(padding)[0]])
        return TextHandle("padded " + sound.id, sound.num_tokens, sound.truncated, rows)


def test_padding_that_is_not_zero_is_seen(judged, tiny_checkpoint):
    """Rows behind the prompt that are not zero break the velocity bound at every step."""
    pipeline = WanPipeline.load(tiny_checkpoint)
    pipeline.text_encoder = PadRows(pipeline.text_encoder)
    assert len(velocity_faults(judged(pipeline=pipeline))) == 4

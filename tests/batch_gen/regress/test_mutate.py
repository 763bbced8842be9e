"""Faults planted into really rendered clips of the random checkpoint are caught by the gates that are named for them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batch_gen.engine import DenoiseOptions, finish
from batch_gen.errors import UsageError
from batch_gen.placement import spec_of
from batch_gen.ranks import PipelineSpec, build_pipeline_engine
from batch_gen.regress.mutate import another_prompt, choose_case, flipped_guidance, run_mutations
from batch_gen.regress.render import Bench, Rendered
from models.pocket.draw import draw, sample_scene
from models.pocket.grammar import parse
from tests.regression import make_setup

NAMED = {
    "dropped_frame": "frame_count",
    "black_box": "psnr_min",
    "brightness": "drift_luma",
    "shifted_strip": "bad_frames",
    "swapped_prompt": "latents_cosine",  # prompt_following where the checkpoint shows what it is asked for
    "cfg_sign": "latents_cosine",
    "late_step_noise": "latents_error",
    "experts_swapped": "latents_cosine",
}


@contextmanager
def here(setup):
    """A bench with a pipeline in this process."""
    spec = PipelineSpec(**spec_of(setup.settings, setup.checkpoint, Path("unused"), 0).options)
    yield Bench(start=lambda: build_pipeline_engine(spec)[0])


@pytest.fixture(scope="module")
def setup(tmp_path_factory, tiny_checkpoint):
    """Two small cases for the random checkpoint."""
    return make_setup(tmp_path_factory.mktemp("suite"), model=str(tiny_checkpoint))


def test_every_mutation_is_caught_by_its_gate(setup, tmp_path):
    """All eight, on a clip of the real pipeline; the unchanged clip of a fresh engine passes the exact gate."""
    found, unchanged = run_mutations(setup, None, here, tmp_path)
    assert {one.mutation: one.gate for one in found} == NAMED
    assert [one.mutation for one in found if not one.caught] == []
    assert unchanged
    assert found[0].to_json() == {
        "mutation": "dropped_frame", "caught": True, "gate": "frame_count", "value": 8.0, "limit": 9.0,
    }  # fmt: skip


def test_gates_that_are_too_wide_are_told(setup, tmp_path):
    """With limits that let everything pass, the mutations are NOT caught: the proof can fail."""
    wide = {"psnr_min": 0, "latents_cosine": -1, "latents_error": 9, "drift_luma": 1, "bad_frames": 1}
    found, _ = run_mutations(
        replace(setup, file=setup.file.model_copy(update={"limits": wide})), "base", here, tmp_path
    )
    assert {one.mutation for one in found if one.caught} == {"dropped_frame"}


def test_exchanged_prompts_are_the_flipped_sign(setup):
    """The velocity of the mutated request is neg - g (pos - neg), computed from unguided velocities."""
    request = setup.requests[0]
    with here(setup) as bench:
        velocity = _velocity(bench, replace(request, **flipped_guidance(request)))
        plain = {"guidance_high": 1.0, "guidance_low": 1.0}
        positive = _velocity(bench, replace(request, **plain))
        negative = _velocity(bench, replace(request, prompt=request.negative_prompt, **plain))
    expected = negative - request.guidance_high * (positive - negative)
    assert np.linalg.norm(velocity - expected) <= 1e-4 * np.linalg.norm(expected)


def test_the_other_prompt_contradicts_what_is_shown(setup):
    """Of all prompts of the suite, the one that differs in most of the slots that the clip shows."""
    request = setup.requests[0]
    near = replace(request, clip_id="near", prompt="a red circle moving right on a gray background")
    scene = sample_scene(parse(request.prompt), np.random.default_rng(7))
    frames = np.rint(draw(scene) * 255).astype(np.uint8)
    shown = Rendered(request, frames, np.zeros((1, 1, 1, 1), np.float32))
    assert another_prompt([request, near, setup.requests[1]], request, shown) == setup.requests[1].prompt


def test_a_suite_that_cannot_be_mutated_is_refused(setup):
    """One case, or none with guidance and frames enough: the message says what is there."""
    still = [replace(request, num_frames=1) for request in setup.requests]
    with pytest.raises(UsageError, match="fit: none"):
        choose_case(still, None)
    with pytest.raises(UsageError, match="fit: base, still"):
        choose_case(setup.requests, "fox")
    with pytest.raises(UsageError, match="this suite has 1 cases"):
        choose_case(setup.requests[:1], None)


def _velocity(bench, request):
    text = finish(bench.engine.text([request])).value[0]
    events = bench.engine.denoise(request, text, DenoiseOptions(stop=1, taps=("velocity.0",)))
    return next(event.array for event in events if getattr(event, "name", "") == "velocity.0")

"""Which stage moved first: a change is planted in each stage of the real pipeline."""

import json

import numpy as np
import pytest

from batch_gen.encode import EncodeSettings
from batch_gen.regress.locate import NUMERIC, bisect, compare_kept, locate
from batch_gen.regress.replay import Difference, freeze, replay
from tests.batch_gen.regress.planted import REQUEST, Planting

CODEC = EncodeSettings(crf=20)
PLANTS = {
    "text": ("text", None),
    "noise": ("noise", None),
    "0": ("first step", 0),
    "2": ("mid step", 2),
    "4": ("last step", 4),
    "decode": ("decode", None),
}


@pytest.fixture(scope="module")
def planted(tiny_checkpoint):
    """The pipeline, loaded once."""
    return Planting(tiny_checkpoint)


@pytest.fixture(scope="module")
def frozen(planted):
    """A clip as it was."""
    return freeze(planted(), REQUEST, CODEC)


def test_nothing_moved(planted, frozen):
    """The same pipeline: no stage moved, and the steps are stable."""
    found = bisect(planted(), frozen)
    assert (found.first, found.moved) == (None, ())
    assert found.steps.kind == "stable"
    assert "no stage moved" in found.words


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_change_is_found_in_its_stage(planted, frozen, plant):
    """0.1 % in the text, the noise, one step's velocity, or one level in the frames: that stage is named, with its step,
    by every bit and by the limits that hold between machines."""
    found = bisect(planted(plant), frozen)
    assert (found.first, found.step) == PLANTS[plant]
    assert found.words.startswith(PLANTS[plant][0])
    assert locate(found.differences, NUMERIC).first == PLANTS[plant][0]


@pytest.mark.parametrize("codec", [EncodeSettings(crf=24), EncodeSettings(codec="ffv1")], ids=["crf", "codec"])
def test_a_change_of_the_encoder_is_found_in_the_encoder(planted, frozen, codec):
    """Another quality or codec moves the encode stage alone."""
    found = bisect(planted(), frozen, codec=codec)
    assert (found.first, found.moved) == ("encode", ("encode",))


def test_one_step_is_a_spike(planted, frozen):
    """A fault of one step is a spike over the steps, at that step."""
    found = bisect(planted("4"), frozen)
    assert (found.steps.kind, found.steps.step) == ("spike", 4)


def test_a_fault_between_kept_steps_is_said_to_be_there(planted):
    """With steps 0, 2 and 4 kept, a fault of step 3 moves the trajectory alone, and the words say where it can be."""
    frozen = freeze(planted(), REQUEST, CODEC, steps=[0, 2, 4])
    found = bisect(planted("3"), frozen)
    assert found.first == "final latents"
    assert "none of the steps 0, 2, 4" in found.words


def test_a_step_that_breaks_the_clip_is_found(planted, frozen):
    """A step whose latents are not finite is the stage that moved, with the engine's words, and no crash."""
    engine = planted("2")
    planted.pipeline.factor = float("nan")
    found = bisect(engine, frozen)
    planted.pipeline.factor = 1.001
    assert (found.first, found.step) == ("mid step", 2)
    assert "nonfinite" in found.words
    assert "final latents" in found.moved


def test_the_replay_stops_where_the_caller_does(planted, frozen):
    """Stages are replayed one by one: who wants the first that moved pays for no later one."""
    found = next(item for item in replay(planted("text"), frozen) if not item.equal)
    assert found.stage == "text"


def test_two_nights_are_compared_without_an_engine(planted, frozen):
    """What two renderings kept is enough for the first stage: the last step that was planted, nothing before it."""
    again = freeze(planted("4"), REQUEST, CODEC)
    found = locate(compare_kept(frozen.arrays, again.arrays, REQUEST.steps))
    assert (found.first, found.step) == ("last step", 4)
    assert found.moved == ("last step", "final latents", "decode")


def test_limits_let_noise_pass_and_order_is_the_pipelines():
    """What is within its limit did not move; of the others the earliest in the pipeline is first, however small."""
    found = [
        Difference("decode", "frames", None, False, 0.5, 9.0, 0.9, 3),
        Difference("mid step", "velocity.3", 3, False, 2e-5, 1e-4, 1.0, 0),
        Difference("mid step", "velocity.2", 2, False, 3e-5, 1e-4, 1.0, 0),
        Difference("text", "text", None, False, 1e-7, 1e-7, 1.0, 0),
    ]
    located = locate(found, NUMERIC)
    assert (located.first, located.step, located.moved) == ("mid step", 2, ("mid step", "decode"))


def test_the_answer_is_json(planted, frozen):
    """The whole answer is plain JSON, also where values are not finite."""
    broken = dict(frozen.arrays) | {"frames": np.zeros((2, 32, 48, 3), np.uint8)}
    body = json.loads(json.dumps(locate(compare_kept(frozen.arrays, broken, 5)).to_json(), allow_nan=False))
    assert body["first"] == "decode"
    assert [stage["moved"] for stage in body["stages"]].count(True) == 1

"""Replays on frozen inputs, with the real pipeline on random weights."""

import numpy as np
import pytest

from batch_gen.encode import EncodeSettings
from batch_gen.errors import CheckFailed, UsageError
from batch_gen.fake_engine import FakeEngine
from batch_gen.regress import replay
from batch_gen.regress.replay import compare, freeze, kept_steps
from tests.batch_gen.regress.planted import REQUEST, Planting
from tests.making import make_request

LOSSLESS = EncodeSettings(codec="ffv1")


@pytest.fixture(scope="module")
def planted(tiny_checkpoint):
    """The pipeline, loaded once."""
    return Planting(tiny_checkpoint)


@pytest.fixture(scope="module")
def frozen(planted):
    """A clip with every stage kept."""
    return freeze(planted(), REQUEST, LOSSLESS)


def test_every_stage_is_kept(frozen):
    """A frozen clip holds text, latents and velocity of its steps, final latents, frames and its file."""
    names = {f"{kind}.{step}" for step in range(5) for kind in ("latents", "velocity")}
    assert set(frozen.arrays) == names | {"text", "latents.5", "frames", "file"}
    assert frozen.steps == [0, 1, 2, 3, 4]
    assert frozen.array("frames").shape == (5, 32, 48, 3)
    assert np.array_equal(replay.pixels(frozen.array("file"), REQUEST, 5), frozen.array("frames"))


def test_a_replay_of_the_same_engine_is_equal_in_every_bit(planted, frozen):
    """Teacher-forced steps, final latents, frames and file of the same pipeline are the frozen ones, bit for bit."""
    found = list(replay.replay(planted(), frozen))
    stages = ["text", "noise", "first step", "mid step", "mid step", "mid step", "last step", "final latents"]
    assert [difference.stage for difference in found] == [*stages, "decode", "encode"]
    assert all(difference.equal for difference in found)


def test_a_fake_engine_replays_what_it_shows():
    """An engine without text and velocity is replayed by its latents, frames and file alone."""
    request = make_request(steps=3)
    found = list(replay.replay(FakeEngine(), freeze(FakeEngine(), request, LOSSLESS)))
    assert [difference.stage for difference in found] == ["noise", "final latents", "decode", "encode"]
    assert all(difference.equal for difference in found)


def test_what_a_night_keeps_is_a_frozen_clip(frozen):
    """Arrays as nights keep them, with the final latents under their own name, make the same frozen clip."""
    kept = {name: array for name, array in frozen.arrays.items() if name not in ("frames", "latents.5")}
    again = replay.frozen_of(REQUEST, kept | {"latents": frozen.final}, frozen.array("frames"), LOSSLESS)
    assert set(again.arrays) == set(frozen.arrays)
    assert np.array_equal(again.final, frozen.final)


def test_what_was_not_kept_is_named(frozen):
    """A missing array is one clear error that says what there is."""
    with pytest.raises(CheckFailed, match=r"no 'velocity\.9'.*frames.*record them again"):
        frozen.array("velocity.9")


@pytest.mark.parametrize(
    ("total", "steps"),
    [(1, [0]), (2, [0, 1]), (5, [0, 1, 2, 3, 4]), (40, [0, 5, 10, 15, 20, 24, 29, 34, 39])],
)
def test_the_kept_steps(total, steps):
    """The first and the last step are kept, and at most seven between them."""
    assert kept_steps(total) == steps


def test_a_clip_without_steps_is_refused():
    """Zero steps are a usage error."""
    with pytest.raises(UsageError, match="at least"):
        kept_steps(0)


def test_differences_say_how_much_and_where():
    """Distance, largest difference, cosine and the first frame that differs; other shapes and NaN are infinitely far."""
    old = np.ones((4, 2, 2), np.float32)
    new = old.copy()
    new[2, 0, 0] = 1.5
    found = compare("decode", "frames", old, new)
    assert not found.equal
    assert (found.place, found.largest) == (2, 0.5)
    assert found.distance == pytest.approx(0.125)
    assert 0.98 < found.cosine < 1
    shorter = compare("decode", "frames", old, old[:3])
    assert shorter.place == 3
    assert shorter.to_json()["distance"] is None
    new[1] = np.nan
    assert compare("decode", "frames", old, new).distance == np.inf


def test_uint8_frames_do_not_wrap():
    """Frames of bytes are subtracted as numbers: 0 and 255 are 255 apart, not 1."""
    old = np.zeros((1, 1, 1, 3), np.uint8)
    assert compare("decode", "frames", old, old + 255).largest == 255.0

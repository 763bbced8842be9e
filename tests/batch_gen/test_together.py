"""Clips that go through one denoise call: who goes with whom, the self-check, and what happens when it fails."""

from __future__ import annotations

import numpy as np
import pytest

from batch_gen.engine import Step
from batch_gen.errors import BatchGenError
from batch_gen.together import Ahead
from models.errors import ModelError
from tests.making import make_request


def latents_of(request):
    """A function of the request."""
    return np.full((1, 2), request.seed, np.float32)


class Machine:
    """An engine that counts what it is asked; `off` is added to what clips get together."""

    def __init__(self, off=0.0, fails=None, alike=lambda request: len(request.prompt)):
        self.alone_calls, self.groups, self.off, self.fails = [], [], off, fails
        self.ahead = Ahead(self.alone, self.several, alike)

    def alone(self, request):
        self.alone_calls.append(request.clip_id)
        return latents_of(request)

    def several(self, requests):
        self.groups.append([request.clip_id for request in requests])
        yield Step(1, 1)
        if self.fails:
            raise ModelError(self.fails, "planted")
        for request in requests:
            yield latents_of(request) + np.float32(self.off)

    def made(self, request, *others):
        found = self.ahead.made(request, others)
        return None if found is None else list(found)


def clips(count, **changes):
    return [make_request(f"c{n}", seed=n, **changes) for n in range(count)]


def test_others_are_kept_until_they_come():
    """Two clips go together once; the second one's latents are there without another call, and only once."""
    machine, (one, two) = Machine(), clips(2)
    steps, found = machine.made(one, two)
    assert (steps, found.tolist()) == (Step(1, 1), [[0.0, 0.0]])
    assert [latents.tolist() for latents in machine.made(two)] == [[[1.0, 1.0]]]
    assert machine.made(two) is None
    assert machine.groups == [["c0", "c1"]]


def test_each_shape_and_number_is_checked_once():
    """The first group of a shape is made alone as well; later ones of the same size are not."""
    machine, made = Machine(), clips(7)
    machine.made(made[0], made[1])
    assert machine.alone_calls == ["c0", "c1"]
    machine.made(made[2], made[3])
    assert machine.alone_calls == ["c0", "c1"]
    machine.made(made[4], made[5], made[6])
    assert machine.alone_calls == ["c0", "c1", "c4", "c5", "c6"]


def test_other_bits_are_refused_with_the_reason():
    """A clip whose bits change in company ends the run: the message names clip, shape, difference and the way out."""
    machine, (one, two) = Machine(off=1e-6), clips(2)
    with pytest.raises(
        BatchGenError, match=r"2 clips of .* clip c0 alone \(latents differ.*--clips-per-step 1"
    ) as caught:
        machine.made(one, two)
    assert caught.value.exit_code == 2


def test_clips_that_differ_in_more_than_prompt_and_seed_stay_alone():
    """Other sizes, steps or guidance, other text lengths, and clips that must be alone are left out of the group."""
    (one,) = clips(1)
    others = [
        make_request("a", steps=one.steps + 1),
        make_request("b", guidance_high=9.0),
        make_request("c", num_frames=one.num_frames + 4),
        make_request("d", prompt=one.prompt + " and more"),
    ]
    machine = Machine()
    assert machine.made(one, *others) is None
    machine = Machine(alike=lambda _: None)
    assert machine.made(one, *clips(2)[1:]) is None
    assert machine.groups == []


def test_one_bad_clip_does_not_fail_the_other():
    """Latents that are not finite in a group: the first clip is made alone, and so will be the others."""
    machine, (one, two) = Machine(fails="nonfinite"), clips(2)
    assert machine.made(one, two)[-1].tolist() == [[0.0, 0.0]]
    assert machine.alone_calls == ["c0"]
    assert machine.made(two) is None
    with pytest.raises(ModelError, match="planted"):
        Machine(fails="device").made(one, two)

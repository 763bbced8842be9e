"""The one walk through an engine: what it keeps and how it is named."""

from __future__ import annotations

import numpy as np
import pytest

from batch_gen.engine import DenoiseOptions, Done, Slab, Step
from batch_gen.errors import ClipFailed
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.regress.collect import collect, decoded
from batch_gen.regress.render import render_case
from tests.making import FakeClock, make_request

REQUEST = make_request(steps=4, width=64, height=48, num_frames=5)


class Short(FakeEngine):
    """An engine whose frames lack a row, or that shows none."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def decode(self, request, latents):
        """Cut."""
        for event in super().decode(request, latents):
            if not isinstance(event, Slab):
                yield event
            elif self.rows:
                yield Slab(event.frames[:, : -self.rows])


@pytest.mark.parametrize(("stop", "name"), [(None, "latents.4"), (2, "latents.2"), (0, "latents.0"), (9, "latents.4")])
def test_the_last_latents_are_named_by_the_steps_done(stop, name):
    """Whoever stops after two steps finds `latents.2`; nobody does more steps than the clip has."""
    found = collect(FakeEngine(), REQUEST, DenoiseOptions(stop=stop, taps=("latents.1",)))
    done = int(name.partition(".")[2])
    assert found.name == name
    assert len(found.stages) == done
    assert set(found.arrays) == {name} | ({"latents.1"} if done > 1 else set())
    assert found.arrays[name] is found.latents


def test_everything_is_seen_in_order():
    """The text's end comes first, then the steps, then the end of the denoising."""
    seen = []
    collect(FakeEngine(), REQUEST, seen=lambda event: seen.append(type(event)))
    assert seen == [Done, Step, Step, Step, Step, Done]


@pytest.mark.parametrize("rows", [0, 1])
def test_frames_of_another_size_are_no_clip(rows):
    """No frames at all, and frames that lack a row, are a broken clip and never compared."""
    latents = collect(FakeEngine(), REQUEST).latents
    with pytest.raises(ClipFailed, match="no frames of 64x48 pixels"):
        decoded(Short(rows), REQUEST, latents)
    assert decoded(FakeEngine(), REQUEST, latents).shape == (5, 48, 64, 3)


def test_seconds_belong_to_their_stage():
    """Text, steps and frames take the seconds that they took, and a tap is kept once."""
    clock = FakeClock()
    engine = FakeEngine(FakeOptions(text_s=0.5, step_s=2.0, slab_s=1.0, frames_per_slab=5), clock.pass_s)
    rendered = render_case(engine, REQUEST, DenoiseOptions(taps=("latents.0",)), clock)
    assert rendered.timings == {"text": 0.5, "denoise": 8.0, "decode": 1.0}
    assert set(rendered.arrays) == {"latents", "latents.0"}
    assert np.isfinite(rendered.latents).all()

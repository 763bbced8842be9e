"""The parity check of clips with images has teeth: each fault of the condition fails it."""

import dataclasses

import pytest
import torch

from models.wan.condition import Condition
from models.wan.pipeline import WanPipeline
from tests.parity.compare import judge
from tests.parity.reference import sampling, still

FIRST = sampling(steps=6, image=still(1))
BOTH = sampling(steps=6, image=still(1), last_image=still(2))
IMAGE_5B = sampling(steps=5, image=still(1))


class Spoiled(WanPipeline):
    """A pipeline whose conditions go through `spoil`."""

    spoil = None

    def _condition(self, sampling):
        return self.spoil(super()._condition(sampling))


class OneTime(Condition):
    """Image tokens that get the noise's timestep."""

    def timesteps(self, timestep):
        """One for all."""
        return [timestep]


class NotPlaced(Condition):
    """An image that only the result shows."""

    def model_input(self, latents):
        """Noise where the image should be."""
        return latents


def changed(channels, index, value):
    """Condition channels with some of them set."""
    copy = channels.clone()
    copy[index] = value
    return Condition(channels=copy)


MASK = (slice(None), slice(0, 4))
FAULTS = {
    "mask is one everywhere": ("i2v", FIRST, lambda c: changed(c.channels, MASK, 1.0)),
    "mask is zero everywhere": ("i2v", FIRST, lambda c: changed(c.channels, MASK, 0.0)),
    "mask of the first frame in one channel of four": (
        "i2v",
        FIRST,
        lambda c: changed(c.channels, (slice(None), slice(1, 4), 0), 0.0),
    ),
    "mask behind the video": ("i2v", FIRST, lambda c: Condition(torch.cat([c.channels[:, 4:], c.channels[:, :4]], 1))),
    "last frame not marked": ("i2v", BOTH, lambda c: changed(c.channels, (slice(None), 3, -1), 0.0)),
    "an empty video": ("i2v", FIRST, lambda c: changed(c.channels, (slice(None), slice(4, None)), 0.0)),
    "image tokens with the noise's timestep": ("ti2v", IMAGE_5B, lambda c: OneTime(first=c.first)),
    "image not in the model's input": ("ti2v", IMAGE_5B, lambda c: NotPlaced(first=c.first)),
    "image a little off": ("ti2v", IMAGE_5B, lambda c: Condition(first=c.first * 1.01)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_condition_is_seen(name, tiny_variant, traces):
    """Each fault breaks the velocity bound at every named step."""
    variant, clip, spoil = FAULTS[name]
    pipeline = Spoiled.load(tiny_variant(variant))
    pipeline.spoil = torch.inference_mode()(spoil)
    verdict = judge(pipeline, clip, *traces(variant, clip))
    assert len([fault for fault in verdict.faults if fault.startswith("velocity")]) == len(verdict.velocity)


def test_images_swapped_are_seen(ours, traces):
    """First and last image in each other's place break the bound, too."""
    swapped = dataclasses.replace(BOTH, image=BOTH.last_image, last_image=BOTH.image)
    verdict = judge(ours("i2v"), swapped, *traces("i2v", BOTH))
    assert len([fault for fault in verdict.faults if fault.startswith("velocity")]) == len(verdict.velocity)

"""The real pipeline with a change planted in one stage."""

from __future__ import annotations

import dataclasses

from batch_gen.ranks import PipelineEngine
from models.wan.pipeline import PipelineOptions, WanPipeline
from tests.making import make_request

REQUEST = make_request(width=48, height=32, num_frames=5, steps=5, guidance_high=3.0, guidance_low=2.0, flow_shift=5.0)


class PlantedPipeline(WanPipeline):
    """`plant` names what is changed: `text`, `decode`, `noise`, or the number of a step whose velocity grows by `factor`."""

    plant = ""
    factor = 1.001

    def text(self, prompts):
        """The text, a little too large."""
        handles = super().text(prompts)
        if self.plant != "text":
            return handles
        return [dataclasses.replace(handle, id=handle.id + "x", rows=handle.rows * self.factor) for handle in handles]

    def velocity(self, clip, timestep, stage, latents):
        """The velocity, a little too large at one step."""
        found = super().velocity(clip, timestep, stage, latents)
        return found * self.factor if self.plant == str(clip.solver.timesteps.index(timestep)) else found

    def _enter(self, sampling, start):
        """The noise, a little too large."""
        step, latents = super()._enter(sampling, start)
        return step, latents * self.factor if self.plant == "noise" and start is None else latents

    def decode(self, latents, num_frames):
        """The frames, one level too light from the second slab on."""
        for number, frames in enumerate(super().decode(latents, num_frames)):
            yield frames + (frames < 255) if self.plant == "decode" and number else frames


class Planting:
    """One pipeline of a checkpoint, loaded once; called with a plant, it is an engine with that change alone."""

    def __init__(self, folder, **options):
        self.pipeline = PlantedPipeline.load(folder, PipelineOptions(**options))

    def __call__(self, plant=""):
        """The engine; earlier ones change with it."""
        self.pipeline.plant = plant
        return PipelineEngine(self.pipeline)

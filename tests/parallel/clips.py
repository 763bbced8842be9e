"""One clip through the pipeline, alone and on a mesh: what is compared, and by which rule.

The rule is the design's: guided velocities at the first, last-high, first-low and last step, each started from the latents
of the run in one process (teacher-forced), relative L2 <= 1e-5 in float32; free trajectory <= 1e-4.
"""

import itertools
from dataclasses import dataclass, field

import torch

from models.errors import ModelError
from models.events import DoneEvent, StepEvent, TapEvent
from models.parallel.layout import Degrees
from models.parallel.mesh import Mesh
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline

VELOCITY_BOUND = 1e-5
TRAJECTORY_BOUND = 1e-4
PROMPT = "a golden fox running through the snow"
NEGATIVE = "blurry, static"
# Token counts that neither 2 nor 3 nor 4 divides: 5 x 5 x 7 = 175, and one frame of 5 x 7 = 35.
ODD = Sampling(PROMPT, NEGATIVE, 11, 112, 80, 17, 6, 4.0, 3.0, 5.0)
FRAME = Sampling(PROMPT, NEGATIVE, 12, 112, 80, 1, 6, 4.0, 3.0, 5.0)
# Fewer tokens than ranks of the context axis.
SPECK = Sampling(PROMPT, NEGATIVE, 13, 32, 16, 1, 3, 4.0, 3.0, 5.0)
CLIPS = {"odd": ODD, "frame": FRAME, "speck": SPECK}

MESHES = [
    Degrees(tp, cp, cfg) for tp, cp, cfg in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2)) if 1 < tp * cp * cfg <= 8
]


def matrix():
    """Every mesh of up to 8 ranks with every way in which it can compute: (degrees, attention, sequence_parallel)."""
    return [
        (degrees, attention, sequence)
        for degrees in MESHES
        for attention in (("ring", "gather") if degrees.cp > 1 else ("auto",))
        for sequence in ((False, True) if degrees.tp > 1 else (False,))
    ]


@dataclass(frozen=True)
class Reference:
    """What one process makes of a clip."""

    sampling: Sampling
    latents: dict[int, torch.Tensor]  # by step: as they enter it; the last entry is the result
    velocities: dict[int, torch.Tensor]  # guided, each from `latents` of its step and a fresh solver
    stages: list[str]


@dataclass(frozen=True)
class Rendered:
    """What one rank of a mesh makes of it."""

    velocities: dict[int, torch.Tensor]
    result: torch.Tensor
    description: dict = field(default_factory=dict)


def judged_steps(stages: list[str]) -> list[int]:
    """The first, last-high, first-low and last step."""
    low = stages.index("low") if "low" in stages else len(stages)
    return sorted({0, max(low - 1, 0), min(low, len(stages) - 1), len(stages) - 1})


def reference(pipeline: WanPipeline, sampling: Sampling) -> Reference:
    """The clip in one process."""
    taps = frozenset(f"latents.{step}" for step in range(sampling.steps + 1))
    events = list(pipeline.denoise(sampling, taps=taps))
    latents = {int(event.name.split(".")[1]): event.value for event in events if isinstance(event, TapEvent)}
    stages = [event.stage for event in events if isinstance(event, StepEvent)]
    velocities = {step: velocity(pipeline, sampling, step, latents[step]) for step in judged_steps(stages)}
    return Reference(sampling, latents, velocities, stages)


def velocity(pipeline: WanPipeline, sampling: Sampling, step: int, latents: torch.Tensor) -> torch.Tensor:
    """The guided velocity of one step from given latents."""
    name = f"velocity.{step}"
    events = pipeline.denoise(sampling, start=(step, latents), stop=step + 1, taps=frozenset({name}))
    return next(event.value for event in events if isinstance(event, TapEvent) and event.name == name)


def render(mesh: Mesh, folder, options: PipelineOptions, expected: Reference, fault=None) -> Rendered:
    """The clip on this rank: the judged velocities, then the free trajectory. `fault` spoils the pipeline first."""
    pipeline = WanPipeline.load(folder, options, mesh)
    if fault is not None:
        fault(mesh, pipeline)
    steps = {step: latents for step, latents in expected.latents.items() if step in expected.velocities}
    velocities = {step: velocity(pipeline, expected.sampling, step, latents) for step, latents in steps.items()}
    *_, done = pipeline.denoise(expected.sampling)
    assert isinstance(done, DoneEvent)
    description = pipeline.describe() if mesh.is_first else {}
    return Rendered(velocities, done.latents, description)


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def worst(rendered: Rendered, expected: Reference) -> tuple[float, float]:
    """The largest velocity distance over the judged steps, and the distance of the trajectory's end."""
    velocities = max(distance(rendered.velocities[step], value) for step, value in expected.velocities.items())
    return velocities, distance(rendered.result, expected.latents[expected.sampling.steps])


def refused(mesh: Mesh, folder, bad: Sampling, good: Sampling) -> list:
    """What this rank says of a clip that nobody can encode, of one that rank 0 cannot encode, and of one after them."""

    def broken(*_given):
        raise MemoryError("planted")

    pipeline = WanPipeline.load(folder, PipelineOptions(), mesh)
    found = [_refusal(pipeline, bad)]
    encoder = pipeline.vae.encoder.forward
    pipeline.vae.encoder.forward = broken
    found.append(_refusal(pipeline, good))
    pipeline.vae.encoder.forward = encoder
    return [*found, _refusal(pipeline, good)]


def _refusal(pipeline: WanPipeline, sampling: Sampling) -> tuple[str, str] | str:
    try:
        *_, done = pipeline.denoise(sampling)
    except ModelError as error:
        return error.kind, error.message
    return "rendered" if isinstance(done, DoneEvent) else "nothing"

"""bfloat16 three ways: the float32 reference, diffusers in bfloat16, and ours in bfloat16."""

import torch

from tests.parity.compare import our_velocity, relative
from tests.parity.reference import load_reference, reference_velocity

FACTOR = 1.25  # two roundings of the same computation differ by chance


def three_way(folder, pipeline, clip, trace):
    """Named step -> (our distance from the float32 velocity, diffusers' own), teacher-forced; `trace` is in float32."""
    theirs = load_reference(folder, "unipc", clip.flow_shift, torch.bfloat16)
    found = {}
    for name, step in trace.named_steps().items():
        latents, reference = trace.latents[step], trace.velocities[step][0]
        guidance = clip.guidance_low if name in ("first low", "last") else clip.guidance_high
        their_velocity = reference_velocity(theirs, clip, trace.timesteps[step], latents, guidance)[0]
        own_velocity = our_velocity(pipeline, clip, step, latents)
        found[name] = (relative(own_velocity, reference), relative(their_velocity, reference))
    return found

"""In bfloat16 the pipeline is as close to the float32 reference as diffusers' own bfloat16 is."""

import torch

from tests.parity.compare import our_velocity, relative
from tests.parity.reference import load_reference, reference_velocity, sampling

FACTOR = 1.25  # two roundings of the same computation differ by chance


def test_bfloat16_is_as_good_as_diffusers(ours, tiny_variant, traces):
    """Three ways at each named step: our bfloat16 error is at most 1.25 times diffusers' bfloat16 error."""
    clip = sampling()
    trace = traces("head128", clip)[0]
    theirs = load_reference(tiny_variant("head128"), "unipc", clip.flow_shift, torch.bfloat16)
    pipeline = ours("head128", dtype="bfloat16")
    for name, step in trace.named_steps().items():
        latents, reference = trace.latents[step], trace.velocities[step][0]
        guidance = clip.guidance_low if name in ("first low", "last") else clip.guidance_high
        their_error = relative(reference_velocity(theirs, clip, trace.timesteps[step], latents, guidance)[0], reference)
        own_error = relative(our_velocity(pipeline, clip, step, latents), reference)
        assert own_error <= FACTOR * their_error, name
        assert their_error < 0.1

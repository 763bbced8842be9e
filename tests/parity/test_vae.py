"""The exact decode against diffusers' untiled one: how far both are from a decode in float64."""

from copy import deepcopy
from functools import cache

import pytest
import torch

from models.vae.strips import FRONT_SCALE, plan_strips
from tests.models.vae.vaes import decoded, latents, ours, theirs
from tests.parity.float64 import float64_reference, lift_module

# family, latent frames, height, width, strips; odd sizes, single frames, both axes, more strips than rows
SIZES = [
    ("wan21", 1, 1, 1, 1), ("wan21", 1, 5, 7, 1), ("wan21", 2, 7, 5, 2), ("wan21", 3, 9, 13, 1), ("wan21", 3, 9, 13, 5),
    ("wan21", 5, 16, 3, 4), ("wan21", 6, 11, 11, 3), ("wan21", 2, 2, 21, 42), ("wan22", 1, 3, 5, 2),
    ("wan22", 3, 5, 8, 3), ("wan22", 4, 7, 3, 1), ("wan22", 6, 5, 5, 4), ("medium", 2, 6, 10, 2),
]  # fmt: skip
LARGE = [("medium", 3, 24, 40, 1), ("medium", 3, 24, 40, 4), ("medium", 3, 33, 21, 3), ("wan22", 5, 22, 15, 4)]
MAX_RATIO = 2.0  # of diffusers' own error, by the root mean square and by the worst pixel
MAX_BF16_RATIO = 1.25
SCALE = 2.0**-6


@cache
def unclamped(family, dtype):
    """diffusers' model whose frames are SCALE times too small, so that its clamp, which would hide errors, never acts."""
    model = deepcopy(theirs(family))
    for parameter in model.decoder.conv_out.parameters():
        parameter.data.mul_(SCALE)  # a power of two changes no digit
    return lift_module(model) if dtype == torch.float64 else model.to(dtype)


def reference(family, values, dtype=torch.float32):
    """diffusers' untiled decode without its clamp, [1, 3, F, H, W] float64."""
    raw, model = ours(family).raw_latents(values).to(dtype), unclamped(family, dtype)
    with float64_reference() if dtype == torch.float64 else torch.no_grad():
        return model.decode(raw).sample.double() / SCALE


@cache
def both_references(family, *size):
    """The decode in float64, and the errors of diffusers' own in float32."""
    values = latents(family, *size)
    truth = reference(family, values, torch.float64)
    return truth, error(reference(family, values), truth)


def error(found, truth):
    """Root mean square and largest difference."""
    difference = (found.double() - truth).abs()
    return difference.square().mean().sqrt().item(), difference.max().item()


def check_exact(family, frames, height, width, count):
    """Both errors within MAX_RATIO of diffusers' own."""
    truth, own = both_references(family, frames, height, width)
    plan = plan_strips(ours(family).spec, height, width, min(count, FRONT_SCALE * max(height, width)))
    found = error(decoded(ours(family), latents(family, frames, height, width), plan=plan), truth)
    assert found[0] <= MAX_RATIO * own[0]
    assert found[1] <= MAX_RATIO * own[1]


@pytest.mark.parametrize("case", SIZES, ids=lambda case: "-".join(map(str, case)))
def test_exact_decode_errs_no_more_than_twice_diffusers(case):
    """In float32, clamp off, the error against float64 is at most twice that of diffusers' untiled decode."""
    check_exact(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda case: "-".join(map(str, case)))
def test_exact_decode_of_larger_clips_errs_no_more_than_twice_diffusers(case):
    """The same at sizes where diffusers' convolutions take their fast path."""
    check_exact(*case)


@pytest.mark.parametrize("family", ["wan21", "wan22", "medium"])
def test_bfloat16_errs_as_much_as_diffusers_in_bfloat16(family):
    """Three ways: in bfloat16, strips and all, we are as far from the float32 decode as diffusers in bfloat16 is."""
    values = latents(family, 3, 6, 10)
    vae = ours(family, torch.bfloat16)
    values = vae.normalised(vae.raw_latents(values))  # what bfloat16 holds exactly, for all three
    truth = reference(family, values)
    own = error(reference(family, values, torch.bfloat16), truth)
    found = error(decoded(vae, values, plan=plan_strips(vae.spec, 6, 10, 2)), truth)
    assert found[0] <= MAX_BF16_RATIO * own[0]
    assert found[0] > 0

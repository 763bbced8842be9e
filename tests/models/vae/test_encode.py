"""Frames to latents."""

import pytest
import torch

from models.vae.encode import encode
from tests.models.vae.vaes import ours, theirs


def chunks(video):
    """The first frame [3, 1, H, W], then four at a time."""
    return [video[:, :1], *(video[:, start : start + 4] for start in range(1, video.shape[1], 4))]


@pytest.mark.parametrize("family", ["wan21", "wan22"])
@pytest.mark.parametrize("num_frames", [1, 9])
def test_encoder_is_that_of_diffusers(family, num_frames):
    """Normalised means are those of diffusers' mode within float32 rounding, for both autoencoders."""
    video = torch.rand(3, num_frames, 48, 80, generator=torch.Generator().manual_seed(0)) * 2 - 1
    vae, model = ours(family), theirs(family)
    with torch.no_grad():
        expected = vae.normalised(model.encode(video.unsqueeze(0)).latent_dist.mode())
    found = encode(vae, chunks(video))
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_normalising_is_undone_by_the_decoder():
    """What `normalised` does to means, `raw_latents` undoes."""
    vae = ours("wan21", torch.float64)
    raw = torch.randn(1, 4, 2, 3, 3, dtype=torch.float64)
    assert torch.allclose(vae.raw_latents(vae.normalised(raw)), raw, atol=1e-5)

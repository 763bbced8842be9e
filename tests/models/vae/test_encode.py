"""Frames to latents."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.vae.decode import load_vae
from models.vae.encode import encode
from tests.models.vae.vaes import decoded, latents, ours, theirs


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


def test_a_decoder_alone_reads_and_keeps_less(tmp_path):
    """Without the encoder the same checkpoint loads, decodes, and refuses images; a key too many is still an error."""
    theirs("wan21").save_pretrained(tmp_path)
    alone = load_vae(tmp_path, torch.float32, with_encoder=False)
    values = latents("wan21", 2, 3, 3)
    assert torch.equal(decoded(alone, values), decoded(ours("wan21"), values))
    with pytest.raises(ModelError, match="without its encoder"):
        encode(alone, [torch.zeros(3, 1, 16, 16)])
    weights = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    save_file({**weights, "decoder.extra": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelError, match=r"1 unexpected: decoder\.extra"):
        load_vae(tmp_path, torch.float32, with_encoder=False)

"""Configs of autoencoders, legal and not."""

import pytest

from models.errors import ModelError
from models.vae.spec import WAN21_VAE, WAN22_VAE, vae_spec
from tests.models.vae.vaes import config

WAN22 = {
    "_class_name": "AutoencoderKLWan", "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True,
    "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}  # fmt: skip


def test_published_configs_are_read():
    """An empty config means Wan2.1, as in diffusers; that of the 5B is read as published."""
    assert vae_spec({}) == WAN21_VAE
    assert vae_spec(WAN22) == WAN22_VAE
    assert (WAN21_VAE.scale_temporal, WAN21_VAE.scale_spatial) == (4, 8)
    assert (WAN22_VAE.scale_temporal, WAN22_VAE.scale_spatial) == (4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "AutoencoderKLHunyuan"}, "'AutoencoderKLHunyuan' is not supported"),
        ({"attn_scales": [0.5]}, "attn_scales"),
        ({"latents_mean": [0.0]}, "latents_mean has 1 values, z_dim is 4"),
        ({"temperal_downsample": [True]}, "temperal_downsample needs 3 values"),
        ({"scale_factor_spatial": 16}, "scale factors"),
    ],
)
def test_configs_that_do_not_fit_are_refused(change, message):
    """What this code cannot decode is refused when it is loaded, with the file's name."""
    with pytest.raises(ModelError, match=message):
        vae_spec({**config("wan21"), **change}, "vae/config.json")


def test_frame_counts():
    """4k+1 frames make k+1 latent frames and come back."""
    assert [WAN21_VAE.num_latent_frames(frames) for frames in (1, 5, 81)] == [1, 2, 21]
    assert [WAN21_VAE.num_frames(latents) for latents in (1, 2, 21)] == [1, 5, 81]
    with pytest.raises(ModelError, match="80 frames"):
        WAN21_VAE.num_latent_frames(80)

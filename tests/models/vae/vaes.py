"""Small random autoencoders: diffusers' and ours with the same weights."""

import tempfile
from functools import cache
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from models.vae.decode import decode_frames, load_vae

FAMILIES = {
    "wan21": {"base_dim": 8, "num_res_blocks": 1, "z_dim": 4},
    "wan22": {
        "base_dim": 8, "decoder_base_dim": 12, "num_res_blocks": 1, "z_dim": 6, "is_residual": True,
        "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16,
    },
    "medium": {"base_dim": 32, "num_res_blocks": 2, "z_dim": 16},
}  # fmt: skip


def config(family):
    """The config of a family, with statistics of the latents that are not neutral."""
    sizes = FAMILIES[family]
    steps = [0.1 * place for place in range(sizes["z_dim"])]
    return {**sizes, "latents_mean": steps, "latents_std": [1.0 + step / 4 for step in steps]}


@cache
def theirs(family, dtype=torch.float32):
    """diffusers' model; the same weights in every dtype."""
    torch.manual_seed(0)
    return AutoencoderKLWan(**config(family)).eval().to(dtype)


@cache
def ours(family, dtype=torch.float32):
    """Our model with the weights of `theirs`."""
    with tempfile.TemporaryDirectory() as folder:
        theirs(family).save_pretrained(folder)
        return load_vae(Path(folder), dtype)


def latents(family, frames, height, width, seed=0):
    """Normal latents [C, T, h, w]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(FAMILIES[family]["z_dim"], frames, height, width, generator=generator)


def decoded(vae, values, mode="exact", plan=None):
    """The whole clip [1, 3, F, H, W], not clamped."""
    return torch.cat(list(decode_frames(vae, values, mode, plan)), dim=2)

"""The decoder against diffusers' AutoencoderKLWan on the same random weights; see tests/parity for the full table."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from models.vae.decode import decode_frames, decode_stream, load_vae


def test_frames_equal_diffusers(tmp_path: Path) -> None:
    """A decoded clip is diffusers' within float32 rounding, slab by slab."""
    torch.manual_seed(0)
    theirs = AutoencoderKLWan(base_dim=8, num_res_blocks=1).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_vae(tmp_path, torch.float32)
    latents = torch.randn(16, 4, 5, 6)
    frames = torch.cat(list(decode_frames(ours, latents, "reference")), dim=2).clamp(-1, 1)
    with torch.no_grad():
        expected = theirs.decode(ours.raw_latents(latents)).sample
    assert torch.allclose(frames, expected, atol=1e-5, rtol=0)
    slabs = list(decode_stream(ours, latents))
    assert sum(len(slab) for slab in slabs) == 13
    assert slabs[0].shape[1:] == (40, 48, 3)

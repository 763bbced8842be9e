"""Sizes of a Wan autoencoder, read from a diffusers-layout config; imports no torch.

Published sizes: `vae/config.json` of Wan-AI/Wan2.1-T2V-14B-Diffusers (also used by Wan2.2 A14B) and of
Wan-AI/Wan2.2-TI2V-5B-Diffusers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint_files import read_json
from models.errors import ModelError

CLASS_NAME = "AutoencoderKLWan"


@dataclass(frozen=True, slots=True)
class VaeSpec:
    """Sizes of one autoencoder; the names are those of diffusers' config.json."""

    base_dim: int = 96
    decoder_base_dim: int = 96
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = ()
    latents_std: tuple[float, ...] = ()
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int = 1

    @property
    def scale_temporal(self) -> int:
        """Frames per latent frame, the first excepted."""
        factor: int = 2 ** sum(self.temporal_downsample)
        return factor

    @property
    def scale_spatial(self) -> int:
        """Pixels per latent row or column."""
        factor: int = self.patch_size * 2 ** (len(self.dim_mult) - 1)
        return factor

    def num_frames(self, num_latent_frames: int) -> int:
        """Frames that a clip of this many latent frames decodes to."""
        return 1 + self.scale_temporal * (num_latent_frames - 1)

    def num_latent_frames(self, num_frames: int) -> int:
        """Latent frames of a clip of 4k+1 frames; raises ModelError("input") for another count."""
        count, rest = divmod(num_frames - 1, self.scale_temporal)
        if num_frames < 1 or rest:
            raise ModelError("input", f"{num_frames} frames: the autoencoder needs {self.scale_temporal}k+1")
        return count + 1


def vae_spec(config: Mapping[str, Any], where: str = "vae/config.json") -> VaeSpec:
    """Read diffusers' config of an AutoencoderKLWan; raises ModelError("checkpoint" or "unsupported")."""
    name = config.get("_class_name", CLASS_NAME)
    if name != CLASS_NAME:
        raise ModelError("unsupported", f"{where}: autoencoder {name!r} is not supported; supported: {CLASS_NAME}")
    if config.get("attn_scales"):
        raise ModelError("unsupported", f"{where}: attn_scales {config['attn_scales']} are not supported; use none")
    fields: dict[str, Any] = {key: config[key] for key in VaeSpec.__dataclass_fields__ if key in config}
    fields["temporal_downsample"] = config.get("temperal_downsample", WAN21_VAE.temporal_downsample)  # their spelling
    fields["decoder_base_dim"] = config.get("decoder_base_dim") or config.get("base_dim", WAN21_VAE.base_dim)
    fields["patch_size"] = config.get("patch_size") or 1
    for key in ("latents_mean", "latents_std", "dim_mult", "temporal_downsample"):
        fields[key] = tuple(fields.get(key, getattr(WAN21_VAE, key)))
    spec = VaeSpec(**fields)
    _check(spec, config, where)
    return spec


def _check(spec: VaeSpec, config: Mapping[str, Any], where: str) -> None:
    for key in ("latents_mean", "latents_std"):
        if len(getattr(spec, key)) != spec.z_dim:
            raise ModelError(
                "checkpoint", f"{where}: {key} has {len(getattr(spec, key))} values, z_dim is {spec.z_dim}"
            )
    if len(spec.temporal_downsample) != len(spec.dim_mult) - 1:
        raise ModelError("checkpoint", f"{where}: temperal_downsample needs {len(spec.dim_mult) - 1} values")
    stated = (config.get("scale_factor_temporal") or 4, config.get("scale_factor_spatial") or 8)
    if stated != (spec.scale_temporal, spec.scale_spatial):
        found = (spec.scale_temporal, spec.scale_spatial)
        raise ModelError("checkpoint", f"{where}: scale factors {stated} are stated, the sizes make {found}")


def read_spec(folder: Path) -> VaeSpec:
    """The spec of a `vae` folder; raises ModelError("checkpoint" or "unsupported")."""
    path = folder / "config.json"
    return vae_spec(read_json(path), str(path))


WAN21_VAE = VaeSpec(
    latents_mean=(
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ),
    latents_std=(
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ),
)

# The latent statistics of the 5B autoencoder come with its checkpoint; neutral ones here, for plans and counts only.
WAN22_VAE = VaeSpec(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=(0.0,) * 48,
    latents_std=(1.0,) * 48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
)

"""What is estimated: the sizes of a checkpoint's parts, and the clips that it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batch_gen.checkpoint import Checkpoint
from batch_gen.errors import CheckpointError
from batch_gen.request import Bucket
from models.checkpoint_files import read_json
from models.errors import ModelError
from models.registry import architectures
from models.umt5.spec import UMT5_XXL, Umt5Spec, umt5_spec
from models.vae.spec import WAN21_VAE, WAN22_VAE, VaeSpec, vae_spec
from models.wan.spec import WanSpec, transformer_spec


@dataclass(frozen=True, slots=True)
class Subject:
    """The parts of a checkpoint by their sizes."""

    wan: WanSpec
    vae: VaeSpec

    @property
    def name(self) -> str:
        """Published name, or what the checkpoint is called."""
        return self.wan.name

    def has_own_first_time(self, bucket: Bucket) -> bool:
        """Whether an image stands in place of the first latent frame, whose tokens then have a timestep of their own.

        So in TI2V-5B; in I2V-A14B images are channels beside the noise (models/wan/condition.py).
        """
        spec = self.wan.transformer
        return bucket.conditioning != "text" and spec.in_channels == spec.out_channels


@dataclass(frozen=True, slots=True)
class Clips:
    """Clips of one shape and one number of steps.

    Args:
        bucket: their shape.
        steps: solver steps of each.
        guided: whether each step evaluates the negative prompt too.
        count: how many there are.
    """

    bucket: Bucket
    steps: int
    guided: bool = True
    count: int = 1

    @property
    def num_passes(self) -> int:
        """Evaluations of the DiT for one step."""
        return 2 if self.guided else 1


def published(name: str) -> Subject:
    """The subject of a published name.

    Raises:
        CheckpointError: no such name.
    """
    spec = architectures().get(name)
    if not isinstance(spec, WanSpec):
        raise CheckpointError(f"no sizes are known of {name!r}; known: {', '.join(sorted(architectures()))}")
    return Subject(spec, WAN21_VAE if spec.transformer.out_channels == WAN21_VAE.z_dim else WAN22_VAE)


def subject_of(checkpoint: Checkpoint) -> Subject | None:
    """The sizes of a checkpoint from its configuration; None for the fake engine, which has none.

    Raises:
        CheckpointError: its configuration is not understood.
    """
    facts = checkpoint.facts
    if not facts:
        return None
    if facts.get("published"):
        return published(checkpoint.name)
    try:
        vae = vae_spec(facts["vae"])
        wan = WanSpec(
            name=checkpoint.name,
            transformer=transformer_spec(facts["transformer"]),
            text_encoder=_text_encoder(checkpoint.folder),
            num_experts=2 if (facts["index"].get("transformer_2") or [None])[0] else 1,
            boundary_ratio=facts["index"].get("boundary_ratio"),
            vae_stride=(vae.scale_temporal, vae.scale_spatial, vae.scale_spatial),
        )
    except ModelError as error:
        raise CheckpointError(f"--model {checkpoint.name}: {error}") from error
    return Subject(wan, vae)


def _text_encoder(folder: Path | None) -> Umt5Spec:
    path = None if folder is None else folder / "text_encoder" / "config.json"
    return umt5_spec(read_json(path)) if path is not None and path.exists() else UMT5_XXL

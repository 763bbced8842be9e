"""A checkpoint that is a name alone: published sizes without weights, enough to plan and to validate with."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

from batch_gen.checkpoint import Checkpoint
from batch_gen.config import load_preset, preset_names
from batch_gen.errors import CheckpointError
from batch_gen.request import ModelLimits
from models.registry import architectures
from models.wan.spec import WanSpec


def published_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint of a published name; None for any other name, and for a folder that is called so."""
    spec = architectures().get(name)
    if not isinstance(spec, WanSpec) or Path(name).is_dir():
        return None
    official = spec.official
    limits = ModelLimits(
        name=name,
        size_multiple=spec.size_multiple,
        conditionings=spec.conditionings,  # type: ignore[arg-type]
        fps=Fraction(official.fps) if official else None,
        trained_frames=spec.trained_frames,
    )
    return Checkpoint(name, None, hashlib.sha256(name.encode()).hexdigest(), _preset(name), limits, {"published": True})


def refuse_published(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for what needs weights, when the checkpoint is a published name."""
    if checkpoint.facts.get("published"):
        raise CheckpointError(
            f"--model {checkpoint.name} is a published name: sizes without weights, for plan and validate; to render, "
            "give the folder, s3:// URL or Hugging Face owner/name that holds the weights"
        )


def _preset(name: str) -> str:
    fitting = [preset for preset in preset_names() if _architecture(preset) == name]
    return fitting[0] if fitting else "pocket"


def _architecture(preset: str) -> str | None:
    return load_preset(preset, "pocket").architecture

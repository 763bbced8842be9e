"""What a package under `models` says about the pipelines that it offers; imports no torch.

Its `spec.py` holds `PIPELINES`, a mapping from the `_class_name` of a checkpoint's model_index.json to a
`PipelineEntry`. `models.registry` finds these by itself; nothing else lists them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """The JSON files of a checkpoint that say what it is: model_index.json and its parts' config.json."""

    index: Mapping[str, Any]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a checkpoint can serve, from its config files alone.

    architecture: its published name, else "custom". preset: the one that fits it. conditionings: of "text", "image",
    "first_last". sizes: the official ones, (width, height) in px. Figures that nobody published are None.
    """

    architecture: str
    preset: str
    size_multiple: int
    max_tokens: int
    conditionings: tuple[str, ...]
    trained_frames: int | None = None
    fps: int | None = None
    flow_shift: float | None = None
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineEntry:
    """One kind of checkpoint that can be rendered.

    path: "module:class" of the pipeline; loaded only in a rank. limits: reads the config files, or raises
    ModelError("checkpoint" or "unsupported"). presets: names that fit. cards: pages about the models.
    """

    path: str
    limits: Callable[[ConfigFiles], Limits]
    presets: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()

"""One clip to make, every default filled in, and what follows from it: bucket, cost, digest, row check."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from batch_gen import rule_checks, rules

if TYPE_CHECKING:
    from collections.abc import Mapping

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Conditioning: TypeAlias = Literal["text", "image", "first_last"]

DIGEST_FORMAT: Final = 1
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
_PIXEL_FIELDS: Final = (
    "prompt",
    "negative_prompt",
    "seed",
    "width",
    "height",
    "num_frames",
    "fps",
    "steps",
    "guidance_high",
    "guidance_low",
    "flow_shift",
    "image",
    "last_image",
)


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape for which graphs are compiled: pixels, pixels, frames, conditioning kind."""

    width: int
    height: int
    num_frames: int
    conditioning: Conditioning

    def __str__(self) -> str:
        """`832x480x81-text`."""
        return f"{self.width}x{self.height}x{self.num_frames}-{self.conditioning}"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The preset's value for every sampling column that a row leaves out.

    guidance_high and guidance_low go by noise level; fps is frames per second; width and height are pixels.
    """

    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: Fraction
    steps: int
    guidance_high: float
    guidance_low: float
    flow_shift: float


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a checkpoint can serve; comes from the model's spec.

    Attributes:
        name: The checkpoint, for messages.
        size_multiple: Width and height must be multiples of it (pixels).
        max_tokens: Tokens of text that the model sees.
        trained_frames: Longest clip that the model was trained on; None when unknown.
        conditionings: Kinds of input that the checkpoint serves.
        fps: Frame rate of the training clips; None when unknown.
        flow_shift: The official shift; None when unknown.
        sizes: Official (width, height) pairs; empty when any is as good as another.
    """

    name: str = "the checkpoint"
    size_multiple: int = 16
    max_tokens: int = 512
    trained_frames: int | None = None
    conditionings: tuple[Conditioning, ...] = ("text",)
    fps: Fraction | None = None
    flow_shift: float | None = None
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """One clip to make: a row of the manifest, one of its samples, every default filled in.

    Sizes in pixels, fps in frames per second as an exact fraction, guidance by noise level. `image` and `last_image`
    are a path, an s3:// URI or `bytes:<sha256>` of a binary cell. `extra` holds the row's other columns, unread.
    """

    clip_id: str
    row_id: str
    sample: int
    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    num_frames: int
    fps: Fraction
    steps: int
    guidance_high: float
    guidance_low: float
    flow_shift: float
    image: str | None = None
    last_image: str | None = None
    priority: int = 0
    preset: str = ""
    extra: Mapping[str, Json] = field(default_factory=dict)

    @property
    def conditioning(self) -> Conditioning:
        """`text`, `image` (a first image) or `first_last` (first and last image)."""
        if self.image is None:
            return "text"
        return "image" if self.last_image is None else "first_last"

    @property
    def bucket(self) -> Bucket:
        """The shape for which graphs are compiled."""
        return Bucket(self.width, self.height, self.num_frames, self.conditioning)

    @property
    def cost(self) -> int:
        """Work in frames x pixels x steps; only ratios mean something."""
        return self.num_frames * self.width * self.height * self.steps

    @property
    def duration_s(self) -> float:
        """Length of the clip in seconds."""
        return float(self.num_frames / self.fps)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what decides the pixels and the file's timing; not ids, extra, priority or preset name."""
        values = self.to_json()
        body = {"format": DIGEST_FORMAT, **{name: values[name] for name in _PIXEL_FIELDS}}
        return hashlib.sha256(_CANONICAL.encode(body).encode()).hexdigest()

    def to_json(self) -> dict[str, Json]:
        """The request as a JSON object; fps as text such as `16` or `30000/1001`."""
        return {
            "clip_id": self.clip_id,
            "row_id": self.row_id,
            "sample": self.sample,
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "seed": self.seed,
            "width": self.width,
            "height": self.height,
            "num_frames": self.num_frames,
            "fps": str(self.fps),
            "steps": self.steps,
            "guidance_high": float(self.guidance_high),
            "guidance_low": float(self.guidance_low),
            "flow_shift": float(self.flow_shift),
            "image": self.image,
            "last_image": self.last_image,
            "priority": self.priority,
            "preset": self.preset,
            "extra": dict(self.extra),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> RenderRequest:
        """The request that `to_json` wrote.

        Raises:
            TypeError: A field is missing or unknown.
            ValueError: fps is no fraction.
        """
        values = dict(body)
        values["fps"] = Fraction(str(values["fps"]))
        return cls(**values)


def check_values(values: Mapping[str, object], limits: ModelLimits) -> list[tuple[str, str]]:
    """Every broken rule among the given cells, as (column, message); None means that the cell is empty.

    Columns that the rules do not know are not looked at, and a missing column is an empty one.
    """
    broken: list[tuple[str, str]] = []
    for rule in rules.RULES:
        value = values.get(rule.column)
        if value is None:
            if rule.required:
                broken.append((rule.column, rules.MISSING))
            continue
        message = rule_checks.first_broken(rule, value, limits.size_multiple)
        if message is not None:
            broken.append((rule.column, message))
    if not broken:
        broken += rule_checks.cross_faults(values, limits.conditionings, limits.name)
    return broken


def check_request(request: RenderRequest, limits: ModelLimits) -> list[tuple[str, str]]:
    """Every rule that a finished request breaks, as (column, message); empty when it can be rendered."""
    values: dict[str, object] = {name: getattr(request, name) for name in _PIXEL_FIELDS}
    values |= {"row_id": request.row_id, "priority": request.priority}
    return check_values(values, limits)


def clip_id_of(row_id: str, sample: int, samples: int) -> str:
    """`row_id` when the row has one sample, else `<row_id>-s<k>` with k from 0."""
    return row_id if samples == 1 else f"{row_id}-s{sample}"


def default_seed(run_seed: int, clip_id: str) -> int:
    """Low 32 bits of SHA-256 over `<run seed>:<clip_id>`; the same on every machine and in every order."""
    digest = hashlib.sha256(f"{run_seed}:{clip_id}".encode()).digest()
    return int.from_bytes(digest[-4:], "big")


def clean_prompt(text: str) -> str:
    """The prompt as the text encoder sees it: ftfy, HTML-unescaped twice, whitespace collapsed, stripped.

    Source: Wan's `whitespace_clean(basic_clean(text))`, the same in diffusers.
    """
    return rule_checks.clean(text)

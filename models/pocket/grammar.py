"""The prompts that `pocket` was trained on, and the combinations that it never saw."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "cyan")
SHAPES = ("circle", "square", "triangle")
MOTIONS = (
    "moving right",
    "moving left",
    "moving up",
    "moving down",
    "growing",
    "shrinking",
    "standing still",
)
BACKGROUNDS = ("black", "gray", "navy")

HELD_OUT_COUNT = 60
HELD_OUT_SEED = 2202


@dataclass(frozen=True, slots=True, order=True)
class Caption:
    """What one clip shows: one word (or two) per slot of the grammar."""

    color: str
    shape: str
    motion: str
    background: str

    @property
    def prompt(self) -> str:
        """The caption as the one sentence of the grammar."""
        return f"a {self.color} {self.shape} {self.motion} on a {self.background} background"


def captions() -> list[Caption]:
    """All 504 combinations, in a fixed order."""
    return [Caption(*words) for words in itertools.product(COLORS, SHAPES, MOTIONS, BACKGROUNDS)]


def held_out() -> list[Caption]:
    """The 60 combinations that training never sees, drawn once with a fixed seed."""
    return sorted(random.Random(HELD_OUT_SEED).sample(captions(), HELD_OUT_COUNT))


def training() -> list[Caption]:
    """The 444 combinations that training may draw."""
    hidden = set(held_out())
    return [caption for caption in captions() if caption not in hidden]


def parse(prompt: str) -> Caption:
    """The caption behind a prompt of the grammar; ValueError for any other text."""
    for caption in captions():
        if caption.prompt == prompt:
            return caption
    raise ValueError(f"not a prompt of the pocket grammar: {prompt!r}")

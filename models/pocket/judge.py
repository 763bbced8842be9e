"""Detectors that read colour, shape and motion off a clip's pixels (NumPy only).

The thresholds were fixed on drawn clips, before any training; a test holds the detectors
to at least 99 % on drawn clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.pocket.draw import BACKGROUND_RGB, RGB
from models.pocket.grammar import Caption

NONE = "none"

# A pixel belongs to the shape when it is farther than this from the background colour.
INK_DISTANCE = 48.0
# A frame shows a shape when between these shares of its pixels are ink.
MIN_AREA, MAX_AREA = 0.008, 0.6
# At least this share of the frames must show a shape, or the verdict is none.
MIN_FRAMES = 0.8
# Share of its bounding box that a shape fills: triangle 0.50, circle 0.79, square 1.00.
TRIANGLE_BELOW, SQUARE_ABOVE = 0.65, 0.895
# Ratio of the areas of the last and first frames from which a shape grows or shrinks.
GROWTH = 1.8
# Centre displacement from which a shape moves, as a share of the frame side.
TRAVEL = 0.12
# The larger displacement must be at least this many times the smaller.
STRAIGHT = 1.7


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the pixels show, in the words of the grammar, or `none` per slot."""

    color: str
    shape: str
    motion: str
    background: str

    def agrees(self, caption: Caption) -> dict[str, bool]:
        """Slot by slot: does the clip show what its caption says?"""
        slots = ("color", "shape", "motion", "background")
        return {slot: getattr(self, slot) == getattr(caption, slot) for slot in slots}


def judge(clip: NDArray[np.uint8]) -> Verdict:
    """The verdict on one clip, [frames, height, width, 3] uint8."""
    video = clip.astype(np.float32)
    paper = _background_color(video)
    background = _nearest(paper, BACKGROUND_RGB)
    ink = np.sqrt(((video - paper) ** 2).sum(-1)) > INK_DISTANCE
    areas = ink.mean(axis=(1, 2))
    seen = (areas >= MIN_AREA) & (areas <= MAX_AREA)
    if seen.mean() < MIN_FRAMES:
        return Verdict(NONE, NONE, NONE, background)
    return Verdict(
        color=_nearest(_ink_color(video[seen], ink[seen]), RGB),
        shape=_shape(ink[seen]),
        motion=_motion(ink[seen]),
        background=background,
    )


def _background_color(video: NDArray[np.float32]) -> NDArray[np.float32]:
    """Median colour of the outermost two pixels of every frame, [3]."""
    edge = np.concatenate(
        [
            video[:, :2].reshape(-1, 3),
            video[:, -2:].reshape(-1, 3),
            video[:, :, :2].reshape(-1, 3),
            video[:, :, -2:].reshape(-1, 3),
        ]
    )
    return np.asarray(np.median(edge, axis=0), np.float32)


def _ink_color(video: NDArray[np.float32], ink: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Median colour of the shape's pixels over all frames, [3]."""
    return np.asarray(np.median(video[ink], axis=0), np.float32)


def _nearest(color: NDArray[np.float32], names: dict[str, tuple[int, int, int]]) -> str:
    """The name whose reference colour is nearest."""
    return min(names, key=lambda name: float(((color - np.array(names[name])) ** 2).sum()))


def _shape(ink: NDArray[np.bool_]) -> str:
    """By the share of its bounding box that the shape fills; the middle of all frames decides."""
    fills = []
    for frame in ink:
        rows, columns = _extent(frame.sum(axis=1)), _extent(frame.sum(axis=0))
        box = frame[rows[0] : rows[1], columns[0] : columns[1]]
        fills.append(box.mean() if box.size else 0.0)
    fill = float(np.median(fills))
    if fill < TRIANGLE_BELOW:
        return "triangle"
    return "square" if fill > SQUARE_ABOVE else "circle"


def _extent(profile: NDArray[np.int64]) -> tuple[int, int]:
    """First and one past the last line that holds ink, stray pixels left out."""
    lines = np.flatnonzero(profile > 1)
    return (int(lines[0]), int(lines[-1]) + 1) if lines.size else (0, 0)


def _motion(ink: NDArray[np.bool_]) -> str:
    """Growth by the areas of the clip's ends, else direction by the shape's centre."""
    ends = max(1, len(ink) // 8)
    first, last = ink[:ends], ink[-ends:]
    growth = last.mean() / first.mean()
    if growth > GROWTH:
        return "growing"
    if growth < 1 / GROWTH:
        return "shrinking"
    dx, dy = _center(last) - _center(first)
    if max(abs(dx), abs(dy)) < TRAVEL:
        return "standing still"
    if max(abs(dx), abs(dy)) < STRAIGHT * min(abs(dx), abs(dy)):
        return NONE
    if abs(dx) > abs(dy):
        return "moving right" if dx > 0 else "moving left"
    return "moving down" if dy > 0 else "moving up"


def _center(ink: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean position (x, y) of the ink, as shares of width and height."""
    _, rows, columns = np.nonzero(ink)
    return np.array([columns.mean() / ink.shape[2], rows.mean() / ink.shape[1]])

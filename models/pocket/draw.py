"""Drawn clips: the data behind `pocket`, made by arithmetic on pixel grids (NumPy only).

Lengths are fractions of the canvas side, so the same scene can be drawn at any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.pocket.grammar import Caption

Frames = NDArray[np.float32]
Reals = NDArray[np.floating[Any]]

RGB = {
    "red": (222, 36, 44),
    "green": (44, 184, 66),
    "blue": (44, 92, 240),
    "yellow": (242, 220, 50),
    "purple": (156, 52, 208),
    "orange": (246, 136, 30),
    "white": (244, 244, 244),
    "cyan": (46, 212, 228),
}
BACKGROUND_RGB = {"black": (10, 10, 10), "gray": (104, 104, 104), "navy": (16, 24, 84)}

CLIP_FRAMES = 17
SOFT_EDGE = 2.0 / 128  # an edge ramps over two pixels of a 128 pixel canvas
# Half extents that give the three shapes about the same area as a circle of radius 1.
SQUARE_HALF = 0.9
TRIANGLE_CIRCUMRADIUS = 1.35

_DIRECTION = {
    "moving right": (1.0, 0.0),
    "moving left": (-1.0, 0.0),
    "moving up": (0.0, -1.0),
    "moving down": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """One clip to draw: the caption, and centre and radius in the first and last frame."""

    caption: Caption
    start: tuple[float, float]
    end: tuple[float, float]
    radius_start: float
    radius_end: float


@dataclass(frozen=True, slots=True)
class View:
    """Which pixels of which frames to draw: a window of a square canvas, in pixels."""

    canvas: int = 128
    left: int = 0
    top: int = 0
    width: int = 128
    height: int = 128
    frames: tuple[int, ...] = tuple(range(CLIP_FRAMES))


def sample_scene(caption: Caption, rng: np.random.Generator) -> Scene:
    """A random scene of this caption whose shape stays inside the frame throughout."""
    if caption.motion in _DIRECTION:
        return _moving(caption, rng)
    radius = radius_end = float(rng.uniform(0.16, 0.26))
    if caption.motion in ("growing", "shrinking"):
        radius, radius_end = float(rng.uniform(0.10, 0.13)), float(rng.uniform(0.24, 0.29))
    room = 0.5 - TRIANGLE_CIRCUMRADIUS * max(radius, radius_end)
    center = tuple(0.5 + rng.uniform(-1, 1, 2) * min(room, 0.1))
    if caption.motion == "shrinking":
        radius, radius_end = radius_end, radius
    return Scene(caption, center, center, radius, radius_end)


def _moving(caption: Caption, rng: np.random.Generator) -> Scene:
    """A scene whose shape travels along one axis, its path about the middle of the frame."""
    radius = float(rng.uniform(0.15, 0.20))
    travel = float(rng.uniform(0.28, 0.36))
    room = 0.5 - TRIANGLE_CIRCUMRADIUS * radius
    along, across = room - travel / 2, min(room, 0.1)
    direction = np.array(_DIRECTION[caption.motion])
    middle = 0.5 + direction * rng.uniform(-along, along)
    middle = middle + direction[::-1] * rng.uniform(-across, across)
    start, end = middle - direction * travel / 2, middle + direction * travel / 2
    return Scene(caption, tuple(start), tuple(end), radius, radius)


def draw(scene: Scene, view: View | None = None) -> Frames:
    """The clip as [frames, height, width, 3] float32 in 0..1."""
    view = view or View()
    time = np.asarray(view.frames, np.float32) / (CLIP_FRAMES - 1)
    x0, x1 = scene.start[0], scene.end[0]
    y0, y1 = scene.start[1], scene.end[1]
    columns = (np.arange(view.width, dtype=np.float32) + view.left + 0.5) / view.canvas
    rows = (np.arange(view.height, dtype=np.float32) + view.top + 0.5) / view.canvas
    dx = columns[None, None, :] - (x0 + (x1 - x0) * time)[:, None, None]
    dy = rows[None, :, None] - (y0 + (y1 - y0) * time)[:, None, None]
    radius = scene.radius_start + (scene.radius_end - scene.radius_start) * time
    distance = _distance(scene.caption.shape, dx, dy, radius[:, None, None])
    soft = max(SOFT_EDGE, 1.0 / view.canvas)
    cover = np.clip(0.5 - distance / soft, 0, 1)[..., None]
    ink = np.asarray(RGB[scene.caption.color], np.float32) / 255
    paper = np.asarray(BACKGROUND_RGB[scene.caption.background], np.float32) / 255
    frames: Frames = (paper + (ink - paper) * cover).astype(np.float32)
    return frames


def _distance(shape: str, dx: Reals, dy: Reals, radius: Reals) -> Reals:
    """Signed distance to the outline (negative inside), as [frames, height, width]."""
    if shape == "circle":
        circle: Reals = np.sqrt(dx * dx + dy * dy) - radius
        return circle
    if shape == "square":
        square: Reals = np.maximum(np.abs(dx), np.abs(dy)) - SQUARE_HALF * radius
        return square
    slope = np.float32(np.sqrt(3) / 2)
    edges = np.maximum(slope * np.abs(dx) - 0.5 * dy, dy)
    triangle: Reals = edges - 0.5 * TRIANGLE_CIRCUMRADIUS * radius
    return triangle

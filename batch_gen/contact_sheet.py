"""One picture of many clips: a strip of frames and a caption each."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from batch_gen.container import read_container
from batch_gen.stills import pick_frames, spread

MAX_CLIPS: Final = 60
"""More make a picture that nobody can read; the note at the top says how many are missing."""
FRAMES_PER_CLIP: Final = 3
THUMB_HEIGHT_PX: Final = 120
CAPTION_LINES: Final = 2
_GAP_PX: Final = 12
_LINE_PX: Final = 15
_CHAR_PX: Final = 6.2
_DPI: Final = 100

Frame = npt.NDArray[np.uint8]


def contact_sheet(clips: Sequence[tuple[str, Path]], out: Path, *, num_columns: int = 2) -> None:
    """Write a PNG with a strip of frames of every clip.

    Args:
        clips: Caption (any text) and file of each clip.
        out: The PNG.
        num_columns: Strips side by side.

    Raises:
        ClipFailed: kind "verify" when a file does not decode.
        ValueError: no clips.
    """
    if not clips:
        raise ValueError("a contact sheet needs at least one clip")
    shown = clips[:MAX_CLIPS]
    strips = [_strip(path) for _, path in shown]
    captions = [title for title, _ in shown]
    if len(clips) > len(shown):
        captions[-1] += f" (and {len(clips) - len(shown)} more clips)"
    _draw(strips, captions, out, num_columns)


def _strip(path: Path) -> Frame:
    """Some frames of a clip side by side, uint8 `[H, W, 3]`."""
    num_frames = len(read_container(path).timestamps)
    frames = pick_frames(path, spread(num_frames, FRAMES_PER_CLIP), height=THUMB_HEIGHT_PX)
    gap = np.full((THUMB_HEIGHT_PX, 2, 3), 255, np.uint8)
    parts = [part for frame in frames for part in (frame, gap)]
    return np.concatenate(parts[:-1], axis=1)


def _draw(strips: Sequence[Frame], captions: Sequence[str], out: Path, num_columns: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(num_columns, len(strips))
    rows = -(-len(strips) // columns)
    cell_width = max(strip.shape[1] for strip in strips) + _GAP_PX
    cell_height = THUMB_HEIGHT_PX + CAPTION_LINES * _LINE_PX + _GAP_PX
    width, height = columns * cell_width + _GAP_PX, rows * cell_height + _GAP_PX
    canvas = np.full((height, width, 3), 255, np.uint8)
    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    for index, (strip, caption) in enumerate(zip(strips, captions, strict=True)):
        top = index // columns * cell_height + _GAP_PX
        left = index % columns * cell_width + _GAP_PX
        canvas[top : top + strip.shape[0], left : left + strip.shape[1]] = strip
        text = _wrapped(caption, cell_width - _GAP_PX)
        below = 1 - (top + THUMB_HEIGHT_PX + 3) / height
        figure.text(left / width, below, text, fontsize=8, va="top", ha="left", parse_math=False)
    figure.figimage(canvas, zorder=-1)
    with warnings.catch_warnings():  # a script that the font lacks shows as boxes, which is no reason to complain
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})


def _wrapped(caption: str, width_px: int) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in caption)
    lines = textwrap.wrap(plain, int(width_px / _CHAR_PX), max_lines=CAPTION_LINES, placeholder=" ...")
    return "\n".join(lines)

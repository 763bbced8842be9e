"""Pictures of a case for the regress page: reference, new and amplified difference, frame by frame."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]

AMPLIFY: Final = 16
MAX_SIDE_PX: Final = 640
MAX_FRAMES: Final = 121
EQUAL_FRAMES: Final = 12
JPEG_QUALITY: Final = 92


def shown_frames(num_frames: int, limit: int, always: Iterable[int | None] = ()) -> list[int]:
    """Evenly spaced frames, at most `limit` of them, and in any case those of `always` that exist."""
    count = min(num_frames, limit)
    even = {round(place * (num_frames - 1) / max(1, count - 1)) for place in range(count)}
    return sorted(even | {frame for frame in always if frame is not None and 0 <= frame < num_frames})


def amplified(reference: Frames, new: Frames) -> Frames:
    """`AMPLIFY` times the absolute difference, black where equal; uint8 [..., H, W, 3]."""
    apart = np.abs(reference.astype(np.int16) - new)
    found: Frames = np.minimum(apart * AMPLIFY, 255).astype(np.uint8)
    return found


def case_pictures(
    number: int, new: Frames, reference: Frames | None, shown: list[int]
) -> Iterator[tuple[str, int, str, bytes]]:
    """(kind, frame, file name, JPEG) for every picture of a case; kinds are `new`, `reference` and `difference`.

    Args:
        number: Of the case, for names.
        new: What was rendered, uint8 [F, H, W, 3].
        reference: The baseline; None when there is none or when it is equal. It may have fewer frames or another size:
            then only what can be shown is.
        shown: Frames.
    """
    for frame in shown:
        yield _picture(number, "new", frame, new[frame])
        if reference is None or frame >= len(reference):
            continue
        yield _picture(number, "reference", frame, reference[frame])
        if reference.shape[1:] == new.shape[1:]:
            yield _picture(number, "difference", frame, amplified(reference[frame], new[frame]))


def jpeg(frame: Frames) -> bytes:
    """A frame uint8 [H, W, 3] as JPEG, at most `MAX_SIDE_PX` on its longer side; a wrong pixel stays visible."""
    from PIL import Image

    factor = -(-max(frame.shape[:2]) // MAX_SIDE_PX)
    if factor > 1:  # the largest value of each block, not the mean: a difference of one pixel must not fade
        height, width = (side // factor * factor for side in frame.shape[:2])
        blocks = frame[:height, :width].reshape(height // factor, factor, width // factor, factor, 3)
        frame = blocks.max(axis=(1, 3)) if _is_sparse(frame) else blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    body = io.BytesIO()
    Image.fromarray(frame).save(body, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return body.getvalue()


def _picture(number: int, kind: str, frame: int, pixels: Frames) -> tuple[str, int, str, bytes]:
    return kind, frame, f"frames/c{number}-{kind}-{frame:04d}.jpg", jpeg(pixels)


def _is_sparse(frame: Frames) -> bool:
    """Mostly black, as differences are."""
    return bool((frame == 0).mean() > 0.9)

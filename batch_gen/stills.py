"""Single frames out of a finished file: for posters, contact sheets and reports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from batch_gen import ffmpeg
from batch_gen.container import read_container, reap, refused

JPEG_QUALITY: Final = 2
"""ffmpeg's scale for JPEG, 2 best .. 31."""
_JFIF: Final = (
    f"scale=out_range=pc:out_color_matrix=bt601:flags={ffmpeg.EXACT},"
    "format=yuv444p,setparams=range=pc:colorspace=smpte170m"
)

Frame = npt.NDArray[np.uint8]


def poster_index(num_frames: int) -> int:
    """The frame that stands for a clip: the middle one, where things have begun and not yet ended."""
    return num_frames // 2


def spread(num_frames: int, count: int) -> list[int]:
    """Up to `count` different frame numbers, evenly from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, num_frames - 1, count)})


def pick_frames(path: Path, indices: Sequence[int], *, height: int | None = None) -> list[Frame]:
    """Decode some frames of a file.

    Args:
        path: Any video file.
        indices: Ascending frame numbers from 0.
        height: Scale the frames to this many pixels, keeping the aspect; None leaves them as they are.

    Returns:
        One uint8 `[H, W, 3]` RGB array per index.

    Raises:
        ClipFailed: kind "verify" when the file does not decode or has fewer frames.
    """
    chosen = "+".join(f"eq(n\\,{index})" for index in indices)
    size = f",scale=-2:{height}:flags={ffmpeg.EXACT}" if height else ""
    args = ["-i", f"file:{path}", "-map", "0:v:0", "-vf", f"select={chosen},{ffmpeg.TO_RGB}{size}"]
    args += ["-fps_mode", "passthrough", "-frames:v", str(len(indices)), "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]
    child = ffmpeg.Child(args, writes=True)
    frames = _parse_ppm(child.read_all())
    reap(path, child, "its frames")
    if len(frames) != len(indices):
        raise refused(path, f"only {len(frames)} of the frames {list(indices)} decode")
    return frames


def read_poster(path: Path, *, height: int | None = None) -> Frame:
    """The middle frame of a file, uint8 `[H, W, 3]` RGB.

    Raises ClipFailed("verify") when it does not decode.
    """
    num_frames = len(read_container(path).timestamps)
    return pick_frames(path, [poster_index(num_frames)], height=height)[0]


def write_jpeg(path: Path, frame: Frame) -> None:
    """Write a frame, uint8 `[H, W, 3]` RGB, as JPEG with the matrix that viewers expect of it (full-range BT.601).

    Raises ClipFailed("encode") when it cannot be written, DiskFull when there is no room.
    """
    height, width = frame.shape[:2]
    source = ["-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", f"{width}x{height}", "-i", "pipe:0"]
    target = ["-c:v", "mjpeg", "-q:v", str(JPEG_QUALITY), "-fflags", "+bitexact", "-flags:v", "+bitexact"]
    child = ffmpeg.Child(
        [*source, "-vf", _JFIF, *target, "-f", "image2", "-update", "1", "-y", f"file:{path}"], reads=True
    )
    ffmpeg.feed_all(child, [frame], f"writing {path.name}", path.parent)


def _parse_ppm(stream: bytes) -> list[Frame]:
    frames = []
    start = 0
    while start < len(stream):
        _, size, _, _ = stream[start : start + 32].split(b"\n", 3)
        width, height = map(int, size.split())
        start += len(b"P6\n255\n") + len(size) + 1
        pixels = np.frombuffer(stream, np.uint8, count=height * width * 3, offset=start)
        frames.append(pixels.reshape(height, width, 3))
        start += pixels.size
    return frames

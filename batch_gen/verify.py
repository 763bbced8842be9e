"""Decode a finished file back, whole, before anybody may call it a clip.

An exit status proves nothing: a truncated faststart or fragmented MP4 decodes with status 0. So the container must
hold exactly the frames asked for at exactly the rate asked for, every one must decode at the right size, and ffmpeg
must have had nothing to say. While the frames pass by they are hashed and looked at.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from batch_gen import ffmpeg
from batch_gen.container import check_container, read_container, reap, refused
from batch_gen.encode import FramesHash, VideoSpec
from batch_gen.errors import ClipFailed

FLAT_RANGE: Final = 2
"""A frame whose values differ by no more than this in each channel is of one colour; lossy codecs move them by 1."""
BLACK_LEVEL: Final = 25
BLACK_SHARE: Final = 0.98
"""A frame is black when 98 % of its values are at most 10 % of white, as ffmpeg's blackdetect has it."""
FROZEN_DIFFERENCE: Final = 0.25
"""Mean absolute difference to the frame before, of 255, below which nothing moved: -60 dB, as ffmpeg's freezedetect."""
MIN_STRETCH_FRAMES: Final = 3
MIN_STRETCH_S: Final = 0.25
LUMA: Final = np.array([0.2126, 0.7152, 0.0722])
"""BT.709 weights of red, green and blue."""

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What decoding showed.

    Attributes:
        frames_hash: Digest of the decoded RGB frames; equals the encoder's for a lossless codec only.
        flags: Black and frozen stretches, first and last frame included, as "black 0-11"; odd, but not wrong.
        luma_mean: Mean BT.709 luma of all frames, 0..255.
        luma_jump: Largest change of the mean luma between neighbours, 0..255: a flash or an exposure jump.
        motion_mean: Mean absolute difference between neighbours, 0..255.
    """

    frames_hash: str
    flags: tuple[str, ...]
    luma_mean: float
    luma_jump: float
    motion_mean: float


def verify_file(
    path: Path,
    expected: VideoSpec,
    *,
    frames_hash: str | None = None,
    on_frame: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Decode all of `path` and compare it with what was asked for.

    Args:
        path: The finished file.
        expected: Size, exact rate, number of frames.
        frames_hash: For a lossless codec, the digest of the frames that went in; the decoded ones must have it too.
        on_frame: Called with the number of frames that are through, a sign of life.

    Raises:
        ClipFailed: kind "verify" when anything differs or ffmpeg complains, kind "flat" when every frame is one colour.
    """
    check_container(path, read_container(path), expected)
    seen = _Observer(expected)
    for number, frame in enumerate(decode(path, expected), 1):
        seen.add(frame)
        if on_frame is not None:
            on_frame(number)
    if frames_hash is not None and seen.frames_hash != frames_hash:
        raise refused(path, f"decoded frames have the hash {seen.frames_hash}, the rendered ones {frames_hash}")
    if seen.all_flat:
        raise ClipFailed("flat", f"{path.name}: every one of the {expected.num_frames} frames is a single colour")
    return seen.report()


def decode(path: Path, expected: VideoSpec) -> Iterator[Frame]:
    """Yield every frame as read-only uint8 `[H, W, 3]`, RGB.

    Each frame travels as a PPM image, whose header says its own size: nothing is rescaled on the way.

    Raises ClipFailed("verify") at the first frame of another size, when one is missing or one too many, and when
    ffmpeg complains.
    """
    args = ["-i", f"file:{path}", "-map", "0:v:0", "-vf", ffmpeg.TO_RGB, "-fps_mode", "passthrough"]
    child = ffmpeg.Child([*args, "-c:v", "ppm", "-f", "image2pipe", "pipe:1"], writes=True)
    header = f"P6\n{expected.width} {expected.height}\n255\n".encode("ascii")
    try:
        for index in range(expected.num_frames):
            yield _read_frame(path, child, header, expected, index)
        if child.read_into(memoryview(bytearray(1))):
            raise refused(path, f"more than {expected.num_frames} frames decode")
        reap(path, child, "its frames")
    finally:
        child.kill()


def _read_frame(path: Path, child: ffmpeg.Child, header: bytes, expected: VideoSpec, index: int) -> Frame:
    buffer = bytearray(len(header) + expected.frame_bytes)
    got_bytes = child.read_into(memoryview(buffer))
    if got_bytes < len(header):
        reap(path, child, f"frame {index}")
        raise refused(path, f"only {index} of {expected.num_frames} frames decode")
    if not buffer.startswith(header):
        size = bytes(buffer[3:16]).split(b"\n")[0].decode("ascii", "replace")
        raise refused(path, f"frame {index} is of size {size}, not {expected.width} {expected.height}")
    if got_bytes < len(buffer):
        raise refused(path, f"frame {index} ends early")
    frame = np.frombuffer(buffer, np.uint8, offset=len(header)).reshape(expected.height, expected.width, 3)
    frame.flags.writeable = False
    return frame


def psnr(path: Path, expected: VideoSpec, source: Iterable[npt.NDArray[np.uint8]]) -> list[float]:
    """PSNR in dB of each decoded frame against the same frame of `source`, slabs of uint8 `[f, H, W, 3]`.

    Frames are paired by index, never by time, so that a lost one shows. Equal frames give infinity.
    """
    frames = (frame for slab in source for frame in slab)
    return [frame_psnr(found, wanted) for found, wanted in zip(decode(path, expected), frames, strict=True)]


def frame_psnr(a: Frame, b: Frame) -> float:
    """PSNR in dB of two frames uint8 `[H, W, 3]` over all channels; infinite when they are equal."""
    error = float(np.mean((a.astype(np.float32) - b) ** 2, dtype=np.float64))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


@dataclass(slots=True)
class _Observer:
    """Looks at frames as they pass by; keeps one frame and a few numbers for each."""

    spec: VideoSpec
    _hash: FramesHash = field(init=False)
    _flat: list[bool] = field(default_factory=list)
    _black: list[bool] = field(default_factory=list)
    _luma: list[float] = field(default_factory=list)
    _motion: list[float] = field(default_factory=list)
    _previous: Frame | None = None

    def __post_init__(self) -> None:
        self._hash = FramesHash(self.spec.num_frames, self.spec.height, self.spec.width)

    def add(self, frame: Frame) -> None:
        """Take one uint8 frame `[H, W, 3]`."""
        self._hash.update(frame)
        self._flat.append(_is_flat(frame[::16, ::16]) and _is_flat(frame))  # the sample rules most frames out
        self._black.append(int(np.count_nonzero(frame <= BLACK_LEVEL)) >= BLACK_SHARE * frame.size)
        self._luma.append(_mean_luma(frame))
        if self._previous is not None:
            difference = np.maximum(frame, self._previous) - np.minimum(frame, self._previous)
            self._motion.append(float(_total(difference).sum()) / frame.size)
        self._previous = frame

    @property
    def frames_hash(self) -> str:
        return self._hash.hexdigest()

    @property
    def all_flat(self) -> bool:
        return all(self._flat)

    def report(self) -> VerifyReport:
        """Sum up."""
        frozen = [False, *(difference <= FROZEN_DIFFERENCE for difference in self._motion)]
        shortest = max(MIN_STRETCH_FRAMES, round(MIN_STRETCH_S * self.spec.fps))
        flags = [*_stretches("black", self._black, shortest), *_stretches("frozen", frozen, shortest)]
        return VerifyReport(
            frames_hash=self.frames_hash,
            flags=tuple(flags),
            luma_mean=float(np.mean(self._luma)),
            luma_jump=float(np.max(np.abs(np.diff(self._luma)), initial=0)),
            motion_mean=float(np.mean(self._motion)) if self._motion else 0.0,
        )


def _is_flat(frame: Frame) -> bool:
    return bool(np.all(np.ptp(frame.reshape(-1, 3), axis=0) <= FLAT_RANGE))


def _total(frame: Frame) -> npt.NDArray[np.int64]:
    """Sum of each channel; rows first, because that order is ten times as fast."""
    columns: npt.NDArray[np.uint32] = frame.sum(axis=0, dtype=np.uint32)
    return np.asarray(columns.sum(axis=0, dtype=np.int64))


def _mean_luma(frame: Frame) -> float:
    channels = 3 * _total(frame) / frame.size
    return float(channels @ LUMA)


def _stretches(kind: str, marks: list[bool], shortest: int) -> Iterator[str]:
    first: int | None = None
    for index, mark in enumerate([*marks, False]):
        if mark and first is None:
            first = index
        if not mark and first is not None:
            if index - first >= shortest:
                yield f"{kind} {first}-{index - 1}"
            first = None

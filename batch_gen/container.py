"""What a video file says about itself: its length, its index. No frame is decoded here."""

import os
import struct
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Final

from batch_gen import ffmpeg
from batch_gen.encode import VideoSpec
from batch_gen.errors import ClipFailed

_EBML: Final = b"\x1a\x45\xdf\xa3"


@dataclass(frozen=True, slots=True)
class Container:
    """The index of a file: size in pixels, time base in seconds, the frames' timestamps in it, in display order.

    `declared_bytes` is the length that the file claims for itself; `is_exact` says whether its times are unrounded.
    """

    width: int
    height: int
    time_base: Fraction
    timestamps: tuple[int, ...]
    declared_bytes: int
    is_exact: bool


def read_container(path: Path) -> Container:
    """Read the index of a video file without decoding it.

    Raises ClipFailed("verify") when ffmpeg cannot read it or complains.
    """
    child = ffmpeg.Child(["-i", f"file:{path}", "-map", "0:v:0", "-c", "copy", "-f", "framecrc", "pipe:1"], writes=True)
    text = child.read_all().decode("ascii", "replace")
    reap(path, child, "its index")
    facts = dict(line[1:].split(" 0: ", 1) for line in text.splitlines() if line.startswith("#") and " 0: " in line)
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    width, height = facts.get("dimensions", "0x0").split("x")
    with path.open("rb") as file:
        is_matroska = file.read(4) == _EBML
        declared_bytes = _matroska_bytes(file) if is_matroska else _mp4_bytes(file)
    return Container(
        width=int(width),
        height=int(height),
        time_base=Fraction(facts.get("tb", "1/1")),
        timestamps=tuple(sorted(int(row[2]) for row in rows)),
        declared_bytes=declared_bytes,
        is_exact=not is_matroska,
    )


def check_container(path: Path, found: Container, expected: VideoSpec) -> None:
    """Raise ClipFailed("verify") unless the file is whole and its index has the expected size, count and exact rate.

    MP4 stores the rate exactly. Matroska rounds each timestamp to its time base, so each may be off by half a unit.
    """
    if found.declared_bytes != path.stat().st_size:
        raise refused(path, f"it is {path.stat().st_size:,} bytes long and says that it has {found.declared_bytes:,}")
    if (found.width, found.height) != (expected.width, expected.height):
        raise refused(path, f"it is {found.width}x{found.height}, not {expected.width}x{expected.height} pixels")
    if len(found.timestamps) != expected.num_frames:
        raise refused(path, f"it holds {len(found.timestamps)} of {expected.num_frames} frames")
    tolerance = 0 if found.is_exact else Fraction(1, 2)
    for index, timestamp in enumerate(found.timestamps):
        since_start = timestamp - found.timestamps[0]
        if abs(since_start - index / expected.fps / found.time_base) > tolerance:
            at_s = float(since_start * found.time_base)
            raise refused(
                path, f"frame {index} is shown at {at_s:.6f} s, which is not {expected.fps} frames per second"
            )


def reap(path: Path, child: ffmpeg.Child, what: str) -> None:
    """Wait for a reader of `path`; raise ClipFailed("verify") when it failed or said a word."""
    status = child.wait()
    if status != 0 or child.stderr:
        said = " / ".join(child.stderr.splitlines()[:4]) or f"status {status}"
        raise refused(path, f"ffmpeg complained about {what}: {said}")


def refused(path: Path, what: str) -> ClipFailed:
    """The error for a file that must not be committed."""
    return ClipFailed("verify", f"{path.name} was refused: {what}")


def _mp4_bytes(file: BinaryIO) -> int:
    """End of the last top-level box by the sizes in the boxes' headers (ISO/IEC 14496-12, 4.2)."""
    end = 0
    length = file.seek(0, os.SEEK_END)
    while end < length:
        file.seek(end)
        header = file.read(16)
        if len(header) < 8:
            return end + 8
        size = struct.unpack(">I", header[:4])[0]
        if size == 1:  # a 64-bit size follows the box's name
            size = struct.unpack(">Q", header[8:16].ljust(8, b"\0"))[0]
        end += max(size, 8)
    return end


def _matroska_bytes(file: BinaryIO) -> int:
    """End of the segment, the second and last top-level element, by its header (RFC 8794, section 6)."""
    file.seek(4)
    file.seek(_ebml_size(file), os.SEEK_CUR)
    file.seek(4, os.SEEK_CUR)
    return _ebml_size(file) + file.tell()


def _ebml_size(file: BinaryIO) -> int:
    """A variable-length integer: the leading zero bits of its first byte count the bytes that follow."""
    first = (file.read(1) or b"\1")[0]
    num_more = 8 - first.bit_length()
    return int.from_bytes(bytes([first & (0x7F >> num_more)]) + file.read(num_more), "big")

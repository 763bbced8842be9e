"""Frames -> video file: one ffmpeg per clip, fed from the first slab on, never rescaled, the same bytes every time.

RGB becomes limited-range BT.709 in one explicit step and is tagged as such; without the explicit matrix ffmpeg would
take BT.601 for it and every player would shift the colours. The lossless codecs keep RGB itself, bit for bit.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from batch_gen import ffmpeg
from batch_gen.errors import ClipFailed, ConfigError

MAX_CRF: Final = 51
DEFAULT_THREADS: Final = 4
"""Pinned, never the machine's count: x264 and x265 make other bits with another number of threads."""
DIGITAL_SOURCE_TYPE: Final = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
TOLD: Final = (
    "clip_id", "prompt", "negative_prompt", "seed", "width", "height", "num_frames", "fps", "steps", "guidance_high",
    "guidance_low", "flow_shift", "image", "last_image",
)  # fmt: skip
"""Fields of a request that a file's metadata tells."""
_KEEP_RGB: Final = "format={pix_fmt},setparams=range=pc:colorspace=gbr:color_primaries=bt709:color_trc=bt709"


@dataclass(frozen=True, slots=True)
class VideoSpec:
    """What a file must hold: `num_frames` frames of `width` x `height` pixels at exactly `fps`."""

    width: int
    height: int
    fps: Fraction
    num_frames: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one RGB24 frame."""
        return self.width * self.height * 3


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to write a clip; the first of its pixel formats is the default."""

    suffix: str
    muxer: str
    content_type: str
    lossless: bool
    pix_fmts: tuple[str, ...]
    args: tuple[str, ...]


CODECS: Final[Mapping[str, Codec]] = {
    "h264": Codec(
        ".mp4", "mp4", "video/mp4", False, ("yuv420p", "yuv422p", "yuv444p"),
        ("-c:v", "libx264", "-crf", "{crf:g}", "-threads", "{threads}"),
    ),
    "h265_10bit": Codec(
        ".mp4", "mp4", "video/mp4", False, ("yuv420p10le", "yuv422p10le", "yuv444p10le"),
        (
            "-c:v", "libx265", "-crf", "{crf:g}", "-tag:v", "hvc1",
            "-x265-params", "pools={threads}:frame-threads=1:info=0:log-level=error",
        ),
    ),
    "ffv1": Codec(
        ".mkv", "matroska", "video/x-matroska", True, ("bgr0",),
        ("-c:v", "ffv1", "-level", "3", "-slices", "4", "-slicecrc", "1", "-g", "1", "-threads", "{threads}"),
    ),
    "x264_lossless": Codec(
        ".mp4", "mp4", "video/mp4", True, ("rgb24",),
        ("-c:v", "libx264rgb", "-qp", "0", "-threads", "{threads}"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """How clips are written. `crf` counts for the lossy codecs alone; `pix_fmt` None is the codec's default.

    Raises ConfigError for a value that the codec does not have.
    """

    codec: str = "h264"
    crf: float = 16
    pix_fmt: str | None = None
    threads: int = DEFAULT_THREADS
    metadata: bool = True

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f"codec {self.codec!r} is unknown; choose one of {', '.join(CODECS)}")
        if not 0 <= self.crf <= MAX_CRF:
            raise ConfigError(
                f"crf {self.crf} is outside 0..{MAX_CRF}; 16 is the default, smaller is better and larger"
            )
        if self.pix_fmt is not None and self.pix_fmt not in self.spec.pix_fmts:
            legal = ", ".join(self.spec.pix_fmts)
            raise ConfigError(f"codec {self.codec} has no pixel format {self.pix_fmt!r}; it has {legal}")
        if self.threads < 1:
            raise ConfigError(f"encoder threads {self.threads} must be at least 1")

    @property
    def spec(self) -> Codec:
        """The codec's row in `CODECS`."""
        return CODECS[self.codec]

    @property
    def suffix(self) -> str:
        """File name suffix, `.mp4` or `.mkv`."""
        return self.spec.suffix

    @property
    def content_type(self) -> str:
        """MIME type for the store."""
        return self.spec.content_type


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A finished file: its size, its digest, the digest of the frames that went in, what ffmpeg said."""

    path: Path
    bytes: int
    sha256: str
    frames_hash: str
    num_frames: int
    stderr: str


class FramesHash:
    """SHA-256 of a header (frames, height, width, RGB24) and the raw frames, as they pass by."""

    def __init__(self, num_frames: int, height: int, width: int) -> None:
        """Start with the header, which therefore needs the number of frames in advance."""
        self._sha256 = hashlib.sha256(f"frames {num_frames} height {height} width {width} RGB24\n".encode("ascii"))

    def update(self, frames: npt.NDArray[np.uint8]) -> None:
        """Add uint8 frames `[f, H, W, 3]`."""
        self._sha256.update(np.ascontiguousarray(frames).data)

    def hexdigest(self) -> str:
        """The digest of all frames so far."""
        return self._sha256.hexdigest()


def frames_hash(frames: npt.NDArray[np.uint8]) -> str:
    """Frames hash of a whole clip, uint8 `[F, H, W, 3]`."""
    digest = FramesHash(*frames.shape[:3])
    digest.update(frames)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def escape_metadata(text: str) -> str:
    """`text` as a value of an ffmetadata file; carriage returns become newlines, which the format cannot tell apart."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"([=;#\\\n])", r"\\\1", plain)


def provenance(model: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Tags that say what made the clip: a sentence for people, the prompt, and all settings as JSON for programs.

    Args:
        model: Name and digest of the checkpoint.
        settings: The request as JSON. Only what made the pixels is told: the row's own columns stay private, and images
            go by their file names, because folders differ between machines.
    """
    told = {name: settings[name] for name in TOLD if settings.get(name) is not None}
    told |= {name: str(told[name]).rsplit("/", 1)[-1] for name in ("image", "last_image") if name in told}
    told |= {"machine_made": True, "digital_source_type": DIGITAL_SOURCE_TYPE, "model": model}
    return {
        "comment": f"Machine-made by {model}, seed {settings.get('seed')}",
        "description": str(settings.get("prompt", "")),
        "synopsis": json.dumps(told, ensure_ascii=False, sort_keys=True),
    }


def encode_args(spec: VideoSpec, settings: EncodeSettings, target: str, metadata_file: str | None) -> list[str]:
    """Arguments of ffmpeg that turn raw RGB24 on stdin into `target`."""
    codec = settings.spec
    pix_fmt = settings.pix_fmt or codec.pix_fmts[0]
    filters = (_KEEP_RGB if codec.lossless else ffmpeg.TO_BT709).format(pix_fmt=pix_fmt)
    source = ["-f", "rawvideo", "-pixel_format", "rgb24", "-video_size", f"{spec.width}x{spec.height}"]
    source += ["-framerate", str(spec.fps), "-i", "pipe:0"]
    tags = ["-map_metadata", "-1"]
    if metadata_file is not None:
        source += ["-f", "ffmetadata", "-i", metadata_file]
        tags = ["-map_metadata", "1"]
    encoder = [arg.format(crf=settings.crf, threads=settings.threads) for arg in codec.args]
    container = ["-movflags", "+faststart"] if codec.muxer == "mp4" else []
    return [
        *source, "-map", "0:v:0", *tags, "-map_chapters", "-1", "-vf", filters, "-r", str(spec.fps), *encoder,
        "-fflags", "+bitexact", "-flags:v", "+bitexact", *container, "-f", codec.muxer, "-y", target,
    ]  # fmt: skip


@dataclass(slots=True)
class Encoder:
    """Writes one clip. Use it as a context manager: what is not finished is aborted, and nothing half-written stays.

    The file has a `.part` name until `finish`, so that no reader ever takes an unfinished one for a clip.

    Args:
        path: Where the finished file shall lie.
        spec: Size, rate and number of frames.
        settings: Codec and quality.
        metadata: Tags for the file; nothing in it may differ between two attempts at the same clip.
        stall_s: ffmpeg is given up after taking no data for so long.
    """

    path: Path
    spec: VideoSpec
    settings: EncodeSettings = field(default_factory=EncodeSettings)
    metadata: Mapping[str, str] = field(default_factory=dict)
    stall_s: float = ffmpeg.STALL_S
    num_frames: int = field(default=0, init=False)
    _hash: FramesHash = field(init=False)
    _child: ffmpeg.Child | None = field(default=None, init=False)
    _finished: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._hash = FramesHash(self.spec.num_frames, self.spec.height, self.spec.width)

    @property
    def part(self) -> Path:
        """The name of the file while it is unfinished."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def pid(self) -> int:
        """Process id of ffmpeg, which runs from the first slab on."""
        return self._running().pid

    @property
    def _tags(self) -> Path:
        return self.path.with_name(self.path.name + ".tags.part")

    def write(self, slab: npt.NDArray[np.uint8]) -> None:
        """Append frames, uint8 `[f, H, W, 3]`; returns when ffmpeg has taken them.

        Raises ClipFailed("encode") when ffmpeg died or hangs or a frame is one too many, DiskFull when it had no room.
        """
        if slab.dtype != np.uint8 or slab.shape[1:] != (self.spec.height, self.spec.width, 3):
            expected = f"uint8 [f, {self.spec.height}, {self.spec.width}, 3]"
            raise ValueError(f"a slab must be {expected}, got {slab.dtype} {list(slab.shape)}")
        if self.num_frames + len(slab) > self.spec.num_frames:
            self.abort()
            raise ClipFailed("encode", f"{self.path.name}: more than the {self.spec.num_frames} frames asked for")
        frames = np.ascontiguousarray(slab)
        self._hash.update(frames)
        self._feed(frames.reshape(-1).data)
        self.num_frames += len(slab)

    def finish(self) -> EncodedFile:
        """Close the file, give it its name and return its digests.

        Raises ClipFailed("encode") when frames are missing or ffmpeg failed, DiskFull when it had no room.
        """
        if self.num_frames != self.spec.num_frames:
            self.abort()
            raise ClipFailed("encode", f"{self.path.name}: {self.num_frames} of {self.spec.num_frames} frames arrived")
        child = self._running()
        try:
            status = child.wait()
        except TimeoutError as error:
            raise self._failed(error) from None
        if status != 0:
            raise self._failed(None)
        self._tags.unlink(missing_ok=True)
        self.part.replace(self.path)
        self._finished = True
        return EncodedFile(
            path=self.path,
            bytes=self.path.stat().st_size,
            sha256=file_sha256(self.path),
            frames_hash=self._hash.hexdigest(),
            num_frames=self.num_frames,
            stderr=child.stderr,
        )

    def abort(self) -> None:
        """Kill and reap ffmpeg and delete what it wrote; harmless at any time."""
        if self._child is not None:
            self._child.kill()
        for leftover in (self.part, self._tags):
            leftover.unlink(missing_ok=True)

    def _running(self) -> ffmpeg.Child:
        if self._child is None:
            tags = self._write_tags()
            args = encode_args(self.spec, self.settings, f"file:{self.part}", tags)
            self._child = ffmpeg.Child(args, reads=True, stall_s=self.stall_s)
        return self._child

    def _write_tags(self) -> str | None:
        if not self.settings.metadata or not self.metadata:
            return None
        lines = [f"{key}={escape_metadata(value)}\n" for key, value in self.metadata.items()]
        try:
            self._tags.write_text(";FFMETADATA1\n" + "".join(lines), encoding="utf-8", newline="")
        except OSError as error:
            if ffmpeg.means_disk_full(error):
                raise ffmpeg.disk_full(self._tags.parent, f"preparing {self.path.name}") from error
            raise
        return f"file:{self._tags}"

    def _feed(self, data: memoryview) -> None:
        child = self._running()
        try:
            child.feed(data)
        except (BrokenPipeError, TimeoutError) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception | None) -> Exception:
        assert self._child is not None
        if isinstance(error, BrokenPipeError):  # it is dying: let it say why
            with contextlib.suppress(TimeoutError):
                self._child.wait()
        self._child.kill()
        doing = f"encoding {self.path.name} after {self.num_frames} of {self.spec.num_frames} frames"
        if isinstance(error, TimeoutError):
            doing += f" ({error})"
        failure = ffmpeg.failure("encode", doing, self._child, self.path.parent)
        self.abort()
        return failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.abort()

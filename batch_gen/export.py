"""Committed clips for other tools: copies, hard links, ProRes, image sequences, posters.

Every source is checked against its record first; every result is written under a `.part` name and renamed when it is
whole. Image sequences hold exactly the frames that the clip decodes to.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from batch_gen import ffmpeg
from batch_gen.container import check_container, read_container, refused
from batch_gen.encode import VideoSpec, file_sha256
from batch_gen.errors import CheckFailed, UsageError
from batch_gen.export_names import DEFAULT_TEMPLATE, Named, name_all, refuse_existing
from batch_gen.records import Record
from batch_gen.stills import read_poster, write_jpeg
from batch_gen.storage.base import Store
from batch_gen.storage.folder import FolderStore
from batch_gen.verify import decode

Kind = Literal["copy", "link", "prores422", "prores4444", "png", "exr", "poster"]

SUFFIXES: Final[dict[Kind, str | None]] = {
    "copy": None,
    "link": None,
    "prores422": ".mov",
    "prores4444": ".mov",
    "png": "",
    "exr": "",
    "poster": ".jpg",
}
"""File name suffix of each kind; None keeps the clip's own, "" is a folder of numbered images."""
_PRORES: Final[dict[Kind, tuple[str, str]]] = {
    "prores422": ("hq", "yuv422p10le"),
    "prores4444": ("4444", "yuv444p10le"),
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is exported and under which names.

    Attributes:
        kind: `link` shares the file with the output root (same disk only); `copy` does not. Image sequences and
            ProRes are made from the committed file.
        template: File name without suffix, over the record's fields.
        skip_existing: Leave what stands there instead of refusing.
    """

    kind: Kind = "copy"
    template: str = DEFAULT_TEMPLATE
    skip_existing: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """One clip's export."""

    clip_id: str
    path: Path


def export(store: Store, records: Iterable[Record], folder: Path, options: ExportOptions) -> Iterator[Exported]:
    """Export clips one by one, after all names have been checked.

    Raises:
        UsageError: names clash or exist, or links are impossible.
        CheckFailed: a file in the store is not the one that its record names.
        ClipFailed: a file does not decode, or ffmpeg cannot write the result.
        DiskFull: no room in `folder`.
    """
    named = name_all(records, options.template, SUFFIXES[options.kind])
    if options.kind == "link" and not isinstance(store, FolderStore):
        raise UsageError(f"{store.url} is no folder, so its files cannot be linked; use the kind copy")
    if options.skip_existing:
        named = [item for item in named if not (folder / item.target).exists()]
    refuse_existing(named, folder)
    return _export_all(store, named, folder, options.kind)


def _export_all(store: Store, named: Sequence[Named], folder: Path, kind: Kind) -> Iterator[Exported]:
    for item in named:
        target = folder / item.target
        with disk_errors(folder, target.name), _source(store, item.record) as source:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _unfinished(target) as part:
                _write(kind, source, item.record, part)
        yield Exported(item.record.clip_id, target)


def spec_of(record: Record) -> VideoSpec:
    """What the record's file must hold."""
    request = record.request
    return VideoSpec(request["width"], request["height"], Fraction(request["fps"]), request["num_frames"])


def _write(kind: Kind, source: Path, record: Record, part: Path) -> None:
    if kind == "link":
        _link(source, part)
    elif kind == "copy":
        shutil.copyfile(source, part)
    elif kind == "poster":
        write_jpeg(part, read_poster(source))
    elif kind in _PRORES:
        _write_prores(source, spec_of(record), part, *_PRORES[kind])
    else:
        _write_sequence(source, spec_of(record), part, kind)


def _link(source: Path, part: Path) -> None:
    try:
        part.hardlink_to(source)
    except OSError as error:
        if ffmpeg.means_disk_full(error):
            raise
        raise UsageError(
            f"{part.parent} cannot share files with {source.parent}: {error}; use the kind copy"
        ) from error


def _write_prores(source: Path, spec: VideoSpec, part: Path, profile: str, pix_fmt: str) -> None:
    child = ffmpeg.Child(
        [
            "-i", f"file:{source}", "-map", "0:v:0", "-map_metadata", "0",
            "-vf", ffmpeg.TO_BT709.format(pix_fmt=pix_fmt), "-r", str(spec.fps),
            "-c:v", "prores_ks", "-profile:v", profile, "-vendor", "apl0",
            "-fflags", "+bitexact", "-flags:v", "+bitexact", "-f", "mov", "-y", f"file:{part}",
        ]
    )  # fmt: skip
    ffmpeg.feed_all(child, [], f"exporting {part.stem}", part.parent)
    check_container(part, read_container(part), spec)


def _write_sequence(source: Path, spec: VideoSpec, part: Path, kind: Kind) -> None:
    """A folder of images, numbered from 000001: exactly the frames that `decode` yields.

    PNG holds them as 8-bit RGB. EXR holds value / 255 in half floats, as displayed (no linearisation), which keeps all
    256 values apart; ffmpeg's own conversion to float is off by up to 1.4 of 255, so it is done here.
    """
    part.mkdir()
    pixel_format, encoder = ("rgb24", ["-c:v", "png"])
    frames: Iterable[npt.NDArray[np.uint8 | np.float32]] = decode(source, spec)
    if kind == "exr":
        pixel_format, encoder = "gbrpf32le", ["-c:v", "exr", "-format", "half", "-compression", "zip16"]
        frames = (_planes(frame) for frame in decode(source, spec))
    child = ffmpeg.Child(
        [
            "-f", "rawvideo", "-pixel_format", pixel_format, "-video_size", f"{spec.width}x{spec.height}",
            "-framerate", str(spec.fps), "-i", "pipe:0", *encoder, "-fps_mode", "passthrough", "-start_number", "1",
            "-f", "image2", f"file:{_literal(part)}/%06d.{kind}",
        ],
        reads=True,
    )  # fmt: skip
    ffmpeg.feed_all(child, frames, f"exporting {part.stem}", part.parent)
    if (count := len(list(part.iterdir()))) != spec.num_frames:
        raise refused(source, f"{count} of {spec.num_frames} images were written")


def _literal(path: Path) -> str:
    """A path inside an image2 pattern."""
    return str(path).replace("%", "%%")


def _planes(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 `[H, W, 3]` RGB as float32 planes `[3, H, W]` in the order green, blue, red."""
    return (frame[:, :, [1, 2, 0]].transpose(2, 0, 1) / np.float32(255)).astype(np.float32)


@contextmanager
def _source(store: Store, record: Record) -> Iterator[Path]:
    """The clip's file on this machine, checked against its record."""
    with contextlib.ExitStack() as stack:
        if isinstance(store, FolderStore):
            path = store.path(record.file.key)
        else:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batch-gen-export-"))) / "clip"
            store.download(record.file.key, path)
        if not path.exists():
            raise CheckFailed(
                f"{store.url}/{record.file.key} is missing, though its record stands; run batch-gen verify"
            )
        if file_sha256(path) != record.file.sha256:
            raise CheckFailed(f"{store.url}/{record.file.key} is not the file that was committed; run batch-gen verify")
        yield path


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """A `.part` name beside the target, renamed when the block ends well and removed when it does not."""
    part = target.with_name(target.name + ".part")
    _remove(part)
    try:
        yield part
        os.rename(part, target)  # noqa: PTH104 - Path.rename hides that it must not cross disks
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(folder: Path, name: str) -> Iterator[None]:
    """Turn an OSError that means a full disk into DiskFull."""
    try:
        yield
    except OSError as error:
        if ffmpeg.means_disk_full(error):
            raise ffmpeg.disk_full(folder, f"exporting {name}") from error
        raise

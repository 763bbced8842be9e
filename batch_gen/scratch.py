"""A worker's folder for files in the making: room checked before the start, leftovers of killed workers removed.

Each worker holds a lock inside its folder. The kernel lets go of it when the process dies, by whatever signal, so a
folder whose lock can be taken belongs to nobody.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Final

from batch_gen import ffmpeg
from batch_gen.encode import EncodeSettings, VideoSpec
from batch_gen.errors import DiskFull, EnvironmentFault
from batch_gen.request import Bucket

PREFIX: Final = "batch-gen-"
LOCK_NAME: Final = "owner.lock"
RESERVE_BYTES: Final = 64 * 1024 * 1024
"""Logs, rendezvous files, and what other programs write meanwhile."""


def file_bound_bytes(spec: VideoSpec, settings: EncodeSettings) -> int:
    """More bytes than the file of one clip takes, pure noise included.

    FFV1 makes noise an eighth larger than it was; lossy codecs stay below half of raw RGB, which is raw 4:2:0.
    """
    raw_bytes = spec.frame_bytes * spec.num_frames
    return (raw_bytes * 9 // 8 if settings.spec.lossless else raw_bytes // 2) + 1024 * 1024


def largest_spec(buckets: Iterable[Bucket]) -> VideoSpec:
    """The largest clip of some shapes; its rate does not matter here."""
    largest = max(buckets, key=lambda b: b.num_frames * b.width * b.height)
    return VideoSpec(largest.width, largest.height, Fraction(1), largest.num_frames)


def needed_bytes(largest: VideoSpec, settings: EncodeSettings, num_in_flight: int) -> int:
    """Scratch bytes that a worker needs at most, with `num_in_flight` files of the largest kind at one time."""
    return num_in_flight * file_bound_bytes(largest, settings) + RESERVE_BYTES


def check_room(folder: Path, num_bytes: int) -> None:
    """Look, before anything is started, whether `num_bytes` are free where `folder` lies.

    Raises:
        DiskFull: not now.
        EnvironmentFault: never, the disk is smaller; no start again would help.
    """
    total_bytes = ffmpeg.total_bytes(folder)
    if total_bytes < num_bytes:
        have, need = f"{total_bytes / 2**20:,.0f} MiB", f"{num_bytes / 2**20:,.0f} MiB"
        raise EnvironmentFault(
            f"scratch folder {folder} lies on a disk of {have} and the run may need {need}; name a larger disk with"
            " --scratch, or render smaller clips or fewer replicas"
        )
    free_bytes = ffmpeg.free_bytes(folder)
    if free_bytes < num_bytes:
        have, need = f"{free_bytes / 2**20:,.0f} MiB", f"{num_bytes / 2**20:,.0f} MiB"
        raise DiskFull(
            f"scratch folder {folder} has {have} free and the run may need {need}; free some or use --scratch"
        )


@contextmanager
def open_scratch(base: Path | str | None = None, num_bytes: int = 0) -> Iterator[Path]:
    """A folder of this process's own, removed at the end, below `base` (None: the system's), which is made if missing.

    Folders that killed workers left there are removed first.

    Raises:
        DiskFull: fewer than `num_bytes` are free after that.
        EnvironmentFault: the folder cannot be made or written, or its disk is smaller than that.
    """
    parent = Path(base or tempfile.gettempdir())
    lock: int | None = None
    try:
        with _base_lock(parent):
            clean_dead(parent)
            check_room(parent, num_bytes)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = _try_lock(folder)
    except OSError as error:
        if ffmpeg.means_disk_full(error):
            raise ffmpeg.disk_full(parent, "making the scratch folder") from error
        message = f"scratch folder {parent} cannot be used: {error}; choose another with --scratch"
        raise EnvironmentFault(message) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def clean_dead(parent: Path) -> list[Path]:
    """Remove the folders below `parent` whose owners are dead; returns them. Other users' folders are left alone."""
    removed = []
    for folder in sorted(parent.glob(f"{PREFIX}*/")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK_NAME).exists():
                continue
            lock = _try_lock(folder)
            if lock is None:
                continue
            shutil.rmtree(folder)
            os.close(lock)
            removed.append(folder)
    return removed


def _try_lock(folder: Path) -> int | None:
    """Take the folder's lock without waiting; the open file holds it. None when its owner lives."""
    file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


@contextmanager
def _base_lock(parent: Path) -> Iterator[None]:
    """One worker at a time makes or cleans folders: a new one must not be cleaned before it is locked."""
    parent.mkdir(parents=True, exist_ok=True)
    path = parent / f"{PREFIX}{os.getuid()}.lock"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)

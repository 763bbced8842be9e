"""Poster frames of clips: one small JPEG each, made once, at most so many a build.

A poster is named by its clip and the clip's SHA-256, so that what an earlier build made is never made again, and a
clip that was rendered anew gets a new one. Clips without a poster show their first frame in the browser.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batch_gen import ffmpeg
from batch_gen.errors import ClipFailed
from batch_gen.report.source import at_once
from batch_gen.report.target import Target
from batch_gen.stills import poster_index
from batch_gen.storage.folder import FolderStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batch_gen.report.clips import Clip
    from batch_gen.storage.base import Store

PREFIX: Final = "posters/"
HEIGHT_PX: Final = 256
DEFAULT_LIMIT: Final = 600
MAX_THREADS: Final = 8
_QUALITY: Final = "5"
"""ffmpeg's scale for JPEG, 2 best .. 31."""


def poster_name(clip: Clip) -> str:
    """The poster's place in the report; says nothing of the clip's id, which may hold anything."""
    text = f"{clip.clip_id}\0{clip.row.get('sha256', '')}"
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:20]}.jpg"


def make_posters(store: Store, target: Target, clips: Sequence[Clip], limit: int) -> Mapping[str, str]:
    """Make the posters that are missing, at most `limit` of them; clip_id -> place of every poster there is.

    A clip that does not decode has none; `batch-gen verify` is the command that speaks of damage.
    """
    wanted = {clip.clip_id: poster_name(clip) for clip in clips if clip.is_committed and clip.row.get("key")}
    there = target.names(PREFIX)
    missing = [clip for clip in clips if clip.clip_id in wanted and wanted[clip.clip_id] not in there][:limit]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    made = at_once(lambda clip: _make(store, target, clip, wanted[clip.clip_id]), missing, threads)
    there |= {wanted[clip.clip_id] for clip, is_made in zip(missing, made, strict=True) if is_made}
    return {clip_id: name for clip_id, name in wanted.items() if name in there}


def _make(store: Store, target: Target, clip: Clip, name: str) -> bool:
    with contextlib.suppress(ClipFailed), local_file(store, clip.row["key"]) as path:
        body = b"" if path is None else poster_jpeg(path, _middle_s(clip)) or poster_jpeg(path, 0.0)
        if body:
            target.put(name, body)
            return True
    return False


def _middle_s(clip: Clip) -> float:
    """Seconds from the start to the frame that stands for the clip."""
    return float(poster_index(int(clip.row["num_frames"])) / Fraction(str(clip.row["fps"])))


@contextmanager
def local_file(store: Store, key: str) -> Iterator[Path | None]:
    """A clip's file on this machine, None when it is gone."""
    if isinstance(store, FolderStore):
        path = store.path(key)
        yield path if path.exists() else None
        return
    with tempfile.TemporaryDirectory(prefix="batch-gen-poster-") as folder:
        path = Path(folder) / "clip"
        yield path if store.download(key, path) is not None else None


def poster_jpeg(path: Path, at_s: float) -> bytes:
    """One frame as a small JPEG, empty when the file ends before that moment.

    Raises:
        ClipFailed: kind "verify" when the file does not decode.
    """
    args = ["-ss", f"{at_s:.6f}", "-i", f"file:{path}", "-map", "0:v:0", "-frames:v", "1"]
    args += ["-vf", f"scale=-2:{HEIGHT_PX}:out_range=pc,format=yuvj420p", "-c:v", "mjpeg", "-q:v", _QUALITY]
    child = ffmpeg.Child([*args, "-threads", "1", "-f", "image2pipe", "pipe:1"], writes=True)
    try:
        body = child.read_all()
        if child.wait() != 0:
            raise ClipFailed("verify", f"{path.name} does not decode: {child.stderr[-300:]}")
    except TimeoutError as error:
        raise ClipFailed("verify", f"{path.name} does not decode: {error}") from error
    finally:
        child.kill()
    return body

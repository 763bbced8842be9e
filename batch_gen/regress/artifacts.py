"""Frames and arrays of a case in the store, by content: frames as FFV1 (RGB, bit for bit), arrays as safetensors.

An object that is there is looked at before it is trusted: a damaged one is replaced by whoever has the right content,
so the next night that renders the same clip mends it.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batch_gen.encode import Encoder, EncodeSettings, FramesHash, VideoSpec, frames_hash
from batch_gen.errors import CheckFailed, ClipFailed
from batch_gen.regress.results import Artifact, Artifacts, arrays_key, frames_key, log_key
from batch_gen.storage.base import AlreadyExists, Body, Store
from batch_gen.verify import decode

Frames = npt.NDArray[np.uint8]
Arrays = Mapping[str, npt.NDArray[Any]]
log = logging.getLogger(__name__)
MENDS: Final = "the next night that renders the same clip puts it back"
_LOSSLESS = EncodeSettings(codec="ffv1", threads=1, metadata=False)


def store_frames(store: Store, suite: str, frames: Frames, fps: Fraction) -> Artifact:
    """Keep uint8 frames [F, H, W, 3] before any lossy encoding.

    Frames that the store has are decoded and compared, and not encoded again unless they are damaged.
    """
    digest = frames_hash(frames)
    key = frames_key(suite, digest)
    head = store.head(key)
    if head is not None:
        there = Artifact(key=key, digest=digest, bytes=head.size_bytes, shape=frames.shape)
        if _is_whole(store, there):
            return there
    count, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / "frames.mkv"
        with Encoder(path, VideoSpec(width, height, fps, count), _LOSSLESS) as encoder:
            encoder.write(frames)
            size = encoder.finish().bytes
        _write(store, key, path, _LOSSLESS.content_type, replaces=head is not None)
    return Artifact(key=key, digest=digest, bytes=size, shape=frames.shape)


def load_frames(store: Store, artifact: Artifact) -> Frames:
    """The frames, uint8 [F, H, W, 3].

    Raises:
        CheckFailed: they are gone, or are not those that were stored.
    """
    with _decoded(store, artifact) as decoding:
        frames = np.stack(list(decoding))
    if frames_hash(frames) != artifact.digest:
        raise _damaged(store, artifact, "its frames have another hash")
    return frames


def check_frames(store: Store, artifact: Artifact) -> None:
    """As `load_frames`, without holding the clip in memory.

    Raises:
        CheckFailed: they are gone, or are not those that were stored.
    """
    digest = FramesHash(*artifact.shape[:3])
    with _decoded(store, artifact) as decoding:
        for frame in decoding:
            digest.update(frame)
    if digest.hexdigest() != artifact.digest:
        raise _damaged(store, artifact, "its frames have another hash")


def store_arrays(store: Store, suite: str, arrays: Arrays) -> Artifact:
    """Keep named arrays, such as `latents` float32 [C, T, h, w]; a damaged file of them is replaced."""
    from safetensors.numpy import save

    body = save({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)})
    digest = hashlib.sha256(body).hexdigest()
    artifact = Artifact(key=arrays_key(suite, digest), digest=digest, bytes=len(body))
    head = store.head(artifact.key)
    if head is None or not (head.sha256 == digest or _is_whole(store, artifact)):
        _write(store, artifact.key, body, "application/octet-stream", replaces=head is not None)
    return artifact


def load_arrays(store: Store, artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    """The arrays by name.

    Raises:
        CheckFailed: they are gone, or are not those that were stored.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    blob = store.get(artifact.key)
    if blob is None:
        raise CheckFailed(f"{store.url}/{artifact.key} is gone; {MENDS}")
    if hashlib.sha256(blob.body).hexdigest() != artifact.digest:
        raise _damaged(store, artifact, "it has another SHA-256")
    try:
        return dict(load(blob.body))
    except SafetensorError as error:
        raise _damaged(store, artifact, str(error)) from error


def check_artifacts(store: Store, artifacts: Artifacts) -> None:
    """Raises CheckFailed when an object of a case is gone or damaged."""
    if artifacts.frames is not None:
        check_frames(store, artifacts.frames)
    if artifacts.arrays is not None:
        load_arrays(store, artifacts.arrays)


def store_log(store: Store, suite: str, text: str) -> str:
    """Keep the log of a rank that died, whose own file goes with the scratch folder; returns its key."""
    body = text.encode("utf-8", "replace")
    key = log_key(suite, hashlib.sha256(body).hexdigest())
    _write(store, key, body, "text/plain", replaces=False)
    return key


@contextmanager
def _decoded(store: Store, artifact: Artifact) -> Iterator[Iterator[Frames]]:
    """The frames one by one, [H, W, 3]; what the decoder says becomes `CheckFailed`."""
    count, height, width, _ = artifact.shape
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / "frames.mkv"
        if store.download(artifact.key, path) is None:
            raise CheckFailed(f"{store.url}/{artifact.key} is gone; {MENDS}")
        try:
            yield iter(decode(path, VideoSpec(width, height, Fraction(1), count)))
        except ClipFailed as error:
            raise _damaged(store, artifact, error.message) from error


def _is_whole(store: Store, artifact: Artifact) -> bool:
    try:
        check_artifacts(store, Artifacts(**{"frames" if artifact.shape else "arrays": artifact}))
    except CheckFailed as error:
        fields = {"file": f"{store.url}/{artifact.key}", "why": error.message}
        log.warning("damaged object is written again", extra={"fields": fields})
        return False
    return True


def _damaged(store: Store, artifact: Artifact, why: str) -> CheckFailed:
    return CheckFailed(f"{store.url}/{artifact.key} is damaged: {why}; {MENDS}")


def _write(store: Store, key: str, body: Body, content_type: str, *, replaces: bool) -> None:
    """Create an object; one whose content is not what its key says gives way."""
    if replaces:
        store.put(key, body, content_type=content_type)
        return
    try:
        store.create(key, body, content_type=content_type)
    except AlreadyExists:
        return  # another night was first, with the same content

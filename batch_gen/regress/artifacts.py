"""Frames and arrays of a case in the store, by content: frames as FFV1 (RGB, bit for bit), arrays as safetensors."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen.encode import Encoder, EncodeSettings, VideoSpec, frames_hash
from batch_gen.errors import CheckFailed, ClipFailed
from batch_gen.regress.results import Artifact, arrays_key, frames_key
from batch_gen.storage.base import AlreadyExists, Body, Store
from batch_gen.verify import decode

Frames = npt.NDArray[np.uint8]
Arrays = Mapping[str, npt.NDArray[Any]]
_LOSSLESS = EncodeSettings(codec="ffv1", threads=1, metadata=False)


def store_frames(store: Store, suite: str, frames: Frames, fps: Fraction) -> Artifact:
    """Keep uint8 frames [F, H, W, 3] before any lossy encoding; frames that the store has are not encoded again."""
    digest = frames_hash(frames)
    key = frames_key(suite, digest)
    head = store.head(key)
    if head is not None:
        return Artifact(key=key, digest=digest, bytes=head.size_bytes, shape=frames.shape)
    count, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / "frames.mkv"
        with Encoder(path, VideoSpec(width, height, fps, count), _LOSSLESS) as encoder:
            encoder.write(frames)
            size = encoder.finish().bytes
        _create(store, key, path, _LOSSLESS.content_type)
    return Artifact(key=key, digest=digest, bytes=size, shape=frames.shape)


def load_frames(store: Store, artifact: Artifact) -> Frames:
    """The frames, uint8 [F, H, W, 3].

    Raises:
        CheckFailed: they are gone, or are not those that were stored.
    """
    count, height, width, _ = artifact.shape
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / "frames.mkv"
        if store.download(artifact.key, path) is None:
            raise CheckFailed(f"{store.url}/{artifact.key} is gone; approve the case again from a new night")
        try:
            frames = np.stack(list(decode(path, VideoSpec(width, height, Fraction(1), count))))
        except ClipFailed as error:
            raise CheckFailed(f"{store.url}/{artifact.key} is damaged: {error.message}") from error
    if frames_hash(frames) != artifact.digest:
        raise CheckFailed(f"{store.url}/{artifact.key} is damaged: its frames have another hash")
    return frames


def store_arrays(store: Store, suite: str, arrays: Arrays) -> Artifact:
    """Keep named arrays, such as `latents` float32 [C, T, h, w]."""
    from safetensors.numpy import save

    body = save({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)})
    digest = hashlib.sha256(body).hexdigest()
    key = arrays_key(suite, digest)
    if store.head(key) is None:
        _create(store, key, body, "application/octet-stream")
    return Artifact(key=key, digest=digest, bytes=len(body))


def load_arrays(store: Store, artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    """The arrays by name.

    Raises:
        CheckFailed: they are gone, or are not those that were stored.
    """
    from safetensors.numpy import load

    blob = store.get(artifact.key)
    if blob is None:
        raise CheckFailed(f"{store.url}/{artifact.key} is gone; approve the case again from a new night")
    if hashlib.sha256(blob.body).hexdigest() != artifact.digest:
        raise CheckFailed(f"{store.url}/{artifact.key} is damaged: it has another SHA-256")
    return dict(load(blob.body))


def _create(store: Store, key: str, body: Body, content_type: str) -> None:
    try:
        store.create(key, body, content_type=content_type)
    except AlreadyExists:
        return  # another night was first, with the same content

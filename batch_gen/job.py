"""The life of a clip: pending -> render -> encode -> verify -> commit -> record.

`make_clip` drives the engine; the clip's host work (encode, verify, commit, record) runs beside it in a pool, so that
the engine starts the next clip while the last one is still being written. Nothing here knows leases or budgets: the
caller says what to make, and gets a `Finished` or the failure.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen.claims import Assignment
from batch_gen.commit import Receipt, adopt_orphan, commit_clip
from batch_gen.encode import EncodedFile, Encoder, EncodeSettings, VideoSpec, provenance
from batch_gen.engine import CHECK, DenoiseOptions, Done, Engine, Event, Slab, Step, finish
from batch_gen.errors import ClipFailed, StoreError
from batch_gen.images import ImageReader, ResizeRule, images_of
from batch_gen.layout import latents_key
from batch_gen.outcome import Attempt, Clock, RunFacts, make_record, metrics_row
from batch_gen.records import FileEntry, Record
from batch_gen.request import RenderRequest
from batch_gen.slabs import ByteBudget, SlabQueue
from batch_gen.storage.base import Store, StoreOptions
from batch_gen.verify import verify_file


@dataclass(frozen=True, slots=True)
class Finished:
    """A committed clip and its row of metrics."""

    attempt: Attempt
    receipt: Receipt
    row: dict[str, Any]


@dataclass(slots=True)
class Workshop:
    """What all clips of a worker share.

    Args:
        store, facts, encode: where clips go, what their records repeat, how they are written.
        scratch: folder for files in the making.
        pool: runs the host work of clips.
        budget: bytes of frames that may wait.
        progress: called with each sign of progress: attempt, stage, done, total.
        keep_latents: whether final latents are stored until the clip is committed.
        images, resize: where images are read from, and how they get a clip's size.
    """

    store: Store
    facts: RunFacts
    encode: EncodeSettings
    scratch: Path
    pool: ThreadPoolExecutor
    budget: ByteBudget
    progress: Callable[[Attempt, str, int, int], None]
    keep_latents: bool = False
    images: ImageReader = field(default_factory=lambda: ImageReader(None, StoreOptions()))
    resize: ResizeRule = "crop"


def make_clip(
    engine: Engine, attempt: Attempt, shop: Workshop, together: tuple[RenderRequest, ...] = ()
) -> Future[Finished]:
    """Render one clip; returns when the engine is free again, with the rest of the clip's life as a future.

    `together`: clips that come next, which the engine may denoise with this one.

    Raises:
        ClipFailed: this clip failed in the engine; the engine goes on.
        EngineLost: the engine is gone.
    """
    clock = Clock()
    info: dict[str, Any] = {}
    latents = denoise(engine, attempt, shop, (clock, info), together)
    frames = SlabQueue(shop.budget)
    future = shop.pool.submit(finish_clip, attempt, frames, shop, clock, info)
    try:
        shop.progress(attempt, "decode", 0, 0)  # before the first slab, which may be long in coming
        for event in engine.decode(attempt.request, latents):
            if isinstance(event, Slab) and not frames.put(event.frames):
                break
            if isinstance(event, Done):
                info |= event.info
            shop.progress(attempt, "decode", 0, 0)
    except BaseException as error:
        frames.abort(error)
        raise
    clock.mark("decode")
    frames.close()
    return future


def denoise(
    engine: Engine,
    attempt: Attempt,
    shop: Workshop,
    notes: tuple[Clock, dict[str, Any]],
    together: tuple[RenderRequest, ...] = (),
) -> npt.NDArray[np.float32]:
    """Text and latents of one clip; kept latents of an earlier attempt are taken up where they are.

    Raises:
        ClipFailed: the latents hold NaN or Inf.
    """
    request, (clock, info) = attempt.request, notes
    kept = load_latents(shop, request) if shop.keep_latents else None
    if kept is not None:
        clock.mark("denoise")
        return kept
    images, info["images"] = images_of(request, shop.images, shop.resize)
    text = finish(engine.text([request]))
    info |= text.info
    clock.mark("text")
    shop.progress(attempt, "text", 0, request.steps)
    options = DenoiseOptions(images=tuple(images), together=together)
    done = finish(_watch_steps(engine.denoise(request, text.value[0], options), attempt, shop, clock))
    info |= done.info
    clock.mark("denoise")
    latents: npt.NDArray[np.float32] = done.value
    if not np.isfinite(latents).all():
        raise ClipFailed("nonfinite", f"clip {request.clip_id}: the final latents hold NaN or Inf")
    if shop.keep_latents:
        save_latents(shop, request, latents)
    return latents


def _watch_steps(events: Iterator[Event], attempt: Attempt, shop: Workshop, clock: Clock) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Step) and event.stage == CHECK:
            shop.progress(attempt, CHECK, event.index, event.total)
        elif isinstance(event, Step):
            clock.step()
            shop.progress(attempt, "denoise", event.index, event.total)
        yield event


def finish_clip(attempt: Attempt, frames: SlabQueue, shop: Workshop, clock: Clock, info: dict[str, Any]) -> Finished:
    """Encode, verify, commit and record one clip; runs in the pool.

    Raises:
        ClipFailed: the file is not what was rendered.
        DiskFull, StoreError: this machine or the store cannot take it.
        Aborted: the engine gave the clip up.
    """
    request = attempt.request
    spec = VideoSpec(request.width, request.height, request.fps, request.num_frames)
    path = shop.scratch / f"{attempt.chunk}-e{attempt.epoch}-{attempt.number}-{request.clip_id}{shop.encode.suffix}"
    host = Clock(stages=clock.stages)
    try:
        encoded = encode_clip(path, spec, frames, attempt, shop)
        host.mark("encode")
        is_lossless = shop.encode.spec.lossless
        report = verify_file(
            path,
            spec,
            frames_hash=encoded.frames_hash if is_lossless else None,
            on_frame=lambda done: shop.progress(attempt, "verify", done, spec.num_frames),
        )
        host.mark("verify")
        record = make_record(attempt, encoded, report, shop.facts, clock, info)
        receipt = commit_clip(shop.store, record, path, lambda: shop.progress(attempt, "upload", 0, 0))
        host.mark("upload")
        shop.progress(attempt, "commit", 0, 0)
    except BaseException:
        frames.refuse()
        raise
    finally:
        path.unlink(missing_ok=True)
    if shop.keep_latents:
        with contextlib.suppress(StoreError):  # the clip is committed; `clean` removes what is left
            shop.store.delete(latents_key(request.clip_id))
    row = metrics_row(receipt.record, shop.store.url)
    return Finished(attempt, receipt, row | {"upload_s": host.stages["upload"], "status": receipt.outcome})


def adopt(work: Assignment, shop: Workshop) -> Record | None:
    """The record of a file that an earlier attempt stored before it died, None when there is none to take over."""
    request, facts = work.request, shop.facts
    draft = Record(
        clip_id=request.clip_id,
        row_id=request.row_id,
        sample=request.sample,
        request=request.to_json(),
        request_digest=request.digest,
        fingerprint=facts.fingerprint,
        numerics_key=facts.numerics_key,
        frames_hash="",
        file=FileEntry(key="", bytes=0, sha256=""),
        attempt=work.attempt,
        epoch=work.epoch,
        worker=facts.worker,
        versions=facts.versions,
        extra=dict(request.extra),
    )
    return adopt_orphan(shop.store, request, shop.encode.suffix, draft)


def encode_clip(path: Path, spec: VideoSpec, frames: SlabQueue, attempt: Attempt, shop: Workshop) -> EncodedFile:
    """Feed the frames to ffmpeg as they come."""
    tags = provenance(shop.facts.model, attempt.request.to_json())
    with Encoder(path, spec, shop.encode, tags) as encoder:
        for slab in frames:
            encoder.write(slab)
            shop.progress(attempt, "encode", encoder.num_frames, spec.num_frames)
        return encoder.finish()


def save_latents(shop: Workshop, request: RenderRequest, latents: npt.NDArray[np.float32]) -> None:
    """Keep the final latents until the clip is committed, so that a failed decode or encode need not denoise again."""
    buffer = io.BytesIO()
    np.save(buffer, latents, allow_pickle=False)
    shop.store.put(latents_key(request.clip_id), buffer.getvalue())


def load_latents(shop: Workshop, request: RenderRequest) -> npt.NDArray[np.float32] | None:
    """Latents that an earlier attempt kept, None when there are none that can be read."""
    blob = shop.store.get(latents_key(request.clip_id))
    if blob is None:
        return None
    try:
        latents: npt.NDArray[np.float32] = np.load(io.BytesIO(blob.body), allow_pickle=False)
    except (ValueError, EOFError):  # they only save time, so damaged ones are as good as none
        return None
    return latents

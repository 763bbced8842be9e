"""Building artefacts: a short dress rehearsal of each shape on an empty compiler cache, one worker per key.

Who builds a key holds its lease; the others wait for the artefact, or for the lease to go stale. A rehearsal runs the
text encoder, the first and a later step of each expert, and the decoder: every graph that a clip of that shape uses.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batch_gen.engine import DenoiseOptions, Done, Engine, Events
from batch_gen.errors import BatchGenError, StoreError
from batch_gen.graphs.artefact import (
    ArtefactRefused,
    GraphSet,
    Pointer,
    check_whole,
    find_artefact,
    key_of,
    pack,
    put_document,
)
from batch_gen.graphs.keys import Variant
from batch_gen.images import ImageReader, Pixels, images_of
from batch_gen.layout import lease_key
from batch_gen.lease import Lease, LeaseBody, LostLease, Owner, Seen, Watch, claim, take_over
from batch_gen.request import RenderRequest
from batch_gen.storage.base import AlreadyExists, Conflict, Store

log = logging.getLogger(__name__)
# With so many steps both experts have some at every flow shift in use; only four of them are run.
REHEARSED_STEPS: Final = 40
POLL_S: Final = 2.0
StartEngine = Callable[[Path], Engine]  # with its compiler cache in this folder


@dataclass(frozen=True, slots=True)
class Wanted:
    """One key: what it is made of, and the requests whose rehearsal uses all its graphs."""

    variant: Variant
    facts: Mapping[str, Any]
    requests: tuple[RenderRequest, ...]

    @property
    def key(self) -> str:
        """The key in hex."""
        return key_of(self.facts)


@dataclass(frozen=True, slots=True)
class Built:
    """How a key ended: `built` here or `found` in the store."""

    variant: str
    key: str
    status: str
    artefact: str
    num_files: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Yard:
    """What all builds share.

    Args:
        store: where artefacts go.
        owner: this worker, for leases.
        start: starts an engine on a cache folder.
        reader, resize: how images of requests are read.
        scratch: folder for caches in the making.
        versions: for people who look into an artefact.
        poll_s: seconds between two looks at a key that somebody else builds.
    """

    store: Store
    owner: Owner
    start: StartEngine
    reader: ImageReader
    resize: Any
    scratch: Path | None
    versions: Mapping[str, str]
    poll_s: float = POLL_S


def build_all(yard: Yard, wanted: Sequence[Wanted], tell: Callable[[Built], None]) -> str:
    """Build or find every key; returns the SHA-256 of the set, which is what a run is told to trust."""
    artefacts = {}
    for one in wanted:
        built = build(yard, one)
        artefacts[one.key] = built.artefact
        tell(built)
    return put_document(yard.store, "sets", GraphSet(artefacts=artefacts))


def build(yard: Yard, wanted: Wanted) -> Built:
    """Build a key, or wait for whoever builds it."""
    watch, pause = Watch(yard.owner.clock), threading.Event()
    began = time.monotonic()
    while True:
        found = find(yard.store, wanted)
        if found is not None:
            return dataclasses.replace(found, seconds=time.monotonic() - began)
        lease = _try_lease(yard, wanted.key, watch)
        if lease is not None:
            return _build_as_owner(yard, wanted, lease)
        pause.wait(yard.poll_s)


def find(store: Store, wanted: Wanted, told: Callable[[str], None] = lambda _: None) -> Built | None:
    """The artefact that the store names for a key, whole and of this key.

    None when nobody built it, and when what stands there is torn or foreign: it is built again then, and replaced;
    `told` hears why.
    """
    blob = store.get(f"keys/{wanted.key}.json")
    if blob is None:
        return None
    try:
        digest = Pointer.model_validate_json(blob.body).artefact
        artefact = find_artefact(store, digest, wanted.facts)
        check_whole(store, artefact)
    except ValueError:
        told(f"{store.url}/keys/{wanted.key}.json: damaged")
        return None
    except ArtefactRefused as error:
        told(error.message)
        return None
    num_bytes = sum(file.size_bytes for file in artefact.files)
    return Built(str(wanted.variant), wanted.key, "found", digest, len(artefact.files), num_bytes, 0.0)


def rehearse(engine: Engine, request: RenderRequest, images: tuple[Pixels, ...]) -> None:
    """Use every graph of a clip once: text, first and later steps of both experts, decode."""
    longer = dataclasses.replace(request, steps=max(request.steps, REHEARSED_STEPS))
    (text,) = _value(engine.text([longer]))
    latents = _value(engine.denoise(longer, text, DenoiseOptions(stop=2, images=images)))
    late = DenoiseOptions(start=(longer.steps - 2, latents), images=images)
    _value(engine.decode(longer, _value(engine.denoise(longer, text, late))))


def _value(events: Events) -> Any:
    value = None
    for event in events:
        if isinstance(event, Done):
            value = event.value
    return value


def _try_lease(yard: Yard, key: str, watch: Watch) -> Lease | None:
    try:
        seen = claim(yard.store, yard.owner, key)
    except StoreError as error:
        if error.kind != "check_failed":
            raise
        _clear_lease(yard, key)
        return None
    if isinstance(seen, Seen):
        if seen.body.chunk != key:
            _clear_lease(yard, key)
            return None
        watch.see(seen)
        return take_over(yard.store, yard.owner, seen) if seen.body.owner is None or watch.is_stale(seen) else None
    return seen


def _clear_lease(yard: Yard, key: str) -> None:
    """Put a free lease where something else stands: at worst a shape is built twice, with one outcome."""
    blob = yard.store.get(lease_key(key))
    if blob is None:
        return
    log.warning("not a lease; replaced", extra={"fields": {"key": f"{yard.store.url}/{lease_key(key)}"}})
    owner = yard.owner
    free = LeaseBody(chunk=key, owner=None, epoch=1, sequence=0, ttl_s=owner.ttl_s, grace_s=owner.grace_s)
    with suppress(Conflict):  # somebody was faster
        yard.store.replace(lease_key(key), free.to_bytes(), blob.etag)


def _build_as_owner(yard: Yard, wanted: Wanted, lease: Lease) -> Built:
    began = time.monotonic()
    try:
        with _kept_alive(lease, yard.owner.ttl_s / 3):
            damage: list[str] = []
            found = find(yard.store, wanted, damage.append)  # the last owner may have finished after we looked
            for why in damage:
                log.warning("compiled graphs are damaged and are built again", extra={"fields": {"why": why}})
            return found or _compile(yard, wanted, began, replace=bool(damage))
    finally:
        _release(lease)


def _compile(yard: Yard, wanted: Wanted, began: float, *, replace: bool) -> Built:
    """Build a key; `replace`: what stands under it is damaged and gives way."""
    folder = Path(tempfile.mkdtemp(prefix="batch-gen-graphs-", dir=yard.scratch))
    try:
        cache = folder / "cache"
        cache.mkdir()
        engine = yard.start(cache)
        try:
            for request in wanted.requests:
                rehearse(engine, request, tuple(images_of(request, yard.reader, yard.resize)[0]))
        finally:
            engine.close()
        seconds = time.monotonic() - began
        facts = {"seconds": round(seconds, 1), "worker": yard.owner.worker, "versions": dict(yard.versions)}
        written = pack(yard.store, cache, wanted.facts, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    key, pointer = f"keys/{wanted.key}.json", Pointer(key=wanted.key, artefact=written.digest).to_bytes()
    try:
        if replace:
            yard.store.put(key, pointer, content_type="application/json")
        else:
            yard.store.create(key, pointer, content_type="application/json")
    except AlreadyExists:  # we lost the lease while we built, and the next owner was faster: its artefact holds
        found = find(yard.store, wanted)
        if found is not None:
            return found
        yard.store.put(key, pointer, content_type="application/json")
    name = str(wanted.variant)
    return Built(name, wanted.key, "built", written.digest, written.num_files, written.num_bytes, seconds)


@contextmanager
def _kept_alive(lease: Lease, every_s: float) -> Iterator[None]:
    """Renew the lease while the engine compiles, which may take an hour."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(every_s):
            try:
                lease.write(lambda body: body)
            except LostLease:
                return
            except BatchGenError:
                continue  # no answer; the next turn tries again

    thread = threading.Thread(target=renew, name="graph-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _release(lease: Lease) -> None:
    try:
        lease.write(lambda body: body.model_copy(update={"owner": None}))
    except BatchGenError:
        lease.drop()  # it goes stale by itself

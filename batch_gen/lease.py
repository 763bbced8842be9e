"""Leases: who works on a chunk, kept in the store by conditional writes alone.

- claim   = create `lease/<chunk>.json`;
- renew   = replace against the etag of our last write; the same write carries attempts and clips in flight;
- steal   = replace against the etag that stood unchanged for ttl + grace on the observer's own monotonic clock; times
            inside the body are for people, so clocks that differ between machines mean nothing;
- release = replace with no owner.

Each takeover raises the epoch. An owner that could not confirm its lease for ttl treats it as lost before anybody may
take it (self-fencing, counted from before the confirming request was sent). Every body has another sequence number, so
that no two versions are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import Field, ValidationError

from batch_gen.clock import Clock, monotonic_s, utc_now
from batch_gen.errors import BatchGenError, StoreError
from batch_gen.layout import lease_key
from batch_gen.records import Strict, Verdict
from batch_gen.storage.base import AlreadyExists, Conflict

if TYPE_CHECKING:
    from batch_gen.storage.base import Store

LEASE_FORMAT: Final = 1


class LostLease(BatchGenError):
    """Another worker owns the chunk now; whatever we still hold of it is dropped."""

    kind = "lost_lease"


class Attempts(Strict):
    """What happened to one clip so far, kept across deaths.

    Attributes:
        started: Starts, each recorded before it happened.
        failed: Verdicts against the clip itself.
        transient: Failures of the store or the network around it.
        died: Deaths without verdict while it was the only clip in flight.
        alone: Some process died while it was in flight: it runs alone next time.
        kind: Of the last failure; `message` is its text.
    """

    started: int = Field(0, ge=0)
    failed: int = Field(0, ge=0)
    transient: int = Field(0, ge=0)
    died: int = Field(0, ge=0)
    alone: bool = False
    kind: str = ""
    message: str = ""


class LeaseBody(Strict):
    """`lease/<chunk>.json`.

    Attributes:
        owner: Unique per process start, None when released; `worker` is its name for people.
        epoch: Rises with every takeover, never falls.
        sequence: Rises with every write.
        ttl_s: Without a new version for ttl_s + grace_s anybody may take the chunk over.
        in_flight: All clips that the owner has in flight, in whichever chunk.
        attempts: Of the clips of this chunk that were started.
        quarantined: Verdicts so far; the committed clips have records.
        finished: Every clip has its verdict.
        renewed: UTC; for people.
    """

    format: int = LEASE_FORMAT
    chunk: str
    owner: str | None
    worker: str = ""
    epoch: int = Field(ge=1)
    sequence: int = Field(ge=0)
    ttl_s: float = Field(gt=0)
    grace_s: float = Field(ge=0)
    in_flight: tuple[str, ...] = ()
    attempts: dict[str, Attempts] = Field(default_factory=dict)
    quarantined: dict[str, Verdict] = Field(default_factory=dict)
    num_committed: int = Field(0, ge=0)
    finished: bool = False
    renewed: str = ""


@dataclass(frozen=True, slots=True)
class Owner:
    """One process start, and how long it may be silent."""

    id: str
    worker: str
    ttl_s: float = 180.0
    grace_s: float = 30.0
    clock: Clock = monotonic_s
    utc: Callable[[], str] = utc_now


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease as an observer read it."""

    body: LeaseBody
    etag: str


Change = Callable[[LeaseBody], LeaseBody]


class Lease:
    """A chunk that we own, until `is_held` says otherwise. Safe to use from several threads."""

    def __init__(self, store: Store, owner: Owner, seen: Seen, confirmed_at: float) -> None:
        self._store = store
        self._owner = owner
        self._seen = seen
        self._confirmed_at = confirmed_at
        self._lost = False
        self._lock = threading.Lock()

    @property
    def body(self) -> LeaseBody:
        """The last version that the store confirmed."""
        return self._seen.body

    @property
    def age_s(self) -> float:
        """Seconds since the last confirmation."""
        return self._owner.clock() - self._confirmed_at

    @property
    def is_held(self) -> bool:
        """Whether we may still act as the owner."""
        return not self._lost and self.age_s < self._owner.ttl_s

    def write(self, change: Change) -> LeaseBody:
        """Write a new version made from the last one; renews as well.

        Raises:
            LostLease: Somebody else took the chunk, or we could not confirm it for ttl.
            StoreError: No answer; the lease may still be ours, the same call may be made again.
        """
        with self._lock:
            self._check()
            try:
                self._replace(change)
            except Conflict:
                self._catch_up()
                self._replace_or_lose(change)
            return self.body

    def drop(self) -> None:
        """Treat the lease as lost from now on."""
        self._lost = True

    def _check(self) -> None:
        if not self.is_held:
            self._lost = True
            raise LostLease(f"chunk {self.body.chunk}: the lease was not confirmed for {self._owner.ttl_s:g} s")

    def _replace(self, change: Change) -> None:
        sent_at = self._owner.clock()
        body = change(self.body).model_copy(update={"sequence": self.body.sequence + 1, "renewed": self._owner.utc()})
        etag = self._store.replace(lease_key(body.chunk), body.to_bytes(), self._seen.etag)
        self._seen, self._confirmed_at = Seen(body, etag), sent_at

    def _catch_up(self) -> None:
        """After a conflict: a write of ours whose answer never came is ours all the same; anything else is a loss."""
        seen = read_lease(self._store, self.body.chunk)
        if seen is None or seen.body.owner != self._owner.id or seen.body.epoch != self.body.epoch:
            self._lost = True
            by = "nobody" if seen is None else seen.body.worker or "nobody"
            raise LostLease(f"chunk {self.body.chunk}: taken over by {by}")
        self._seen = Seen(self.body.model_copy(update={"sequence": seen.body.sequence}), seen.etag)

    def _replace_or_lose(self, change: Change) -> None:
        try:
            self._replace(change)
        except Conflict:
            self._lost = True
            raise LostLease(f"chunk {self.body.chunk}: taken over by another worker") from None


def read_lease(store: Store, chunk: str) -> Seen | None:
    """The lease of a chunk, None when it was never claimed.

    Raises:
        StoreError: What stands there is no lease of this version.
    """
    blob = store.get(lease_key(chunk))
    if blob is None:
        return None
    try:
        return Seen(LeaseBody.model_validate_json(blob.body), blob.etag)
    except ValidationError as error:
        place = f"{store.url}/{lease_key(chunk)}"
        message = f"{place} is no lease of this version; see batch-gen verify --fix"
        raise StoreError(message, kind="check_failed") from error


def claim(store: Store, owner: Owner, chunk: str) -> Lease | Seen | None:
    """Try to be the first owner of a chunk: our lease, or the one that stands there (None: it vanished again)."""
    sent_at = owner.clock()
    body = LeaseBody(
        chunk=chunk,
        owner=owner.id,
        worker=owner.worker,
        epoch=1,
        sequence=0,
        ttl_s=owner.ttl_s,
        grace_s=owner.grace_s,
        renewed=owner.utc(),
    )
    try:
        etag = store.create(lease_key(chunk), body.to_bytes(), content_type="application/json")
    except AlreadyExists:
        return read_lease(store, chunk)
    return Lease(store, owner, Seen(body, etag), sent_at)


def take_over(store: Store, owner: Owner, seen: Seen) -> Lease | None:
    """Become the next owner of a free or stale lease; None when somebody was faster or the owner is alive.

    What the last owner had in flight when it died is judged here; see `judge_death`.
    """
    sent_at = owner.clock()
    body = judge_death(seen.body).model_copy(
        update={
            "owner": owner.id,
            "worker": owner.worker,
            "epoch": seen.body.epoch + 1,
            "sequence": seen.body.sequence + 1,
            "ttl_s": owner.ttl_s,
            "grace_s": owner.grace_s,
            "in_flight": (),
            "finished": False,
            "renewed": owner.utc(),
        }
    )
    try:
        etag = store.replace(lease_key(body.chunk), body.to_bytes(), seen.etag)
    except Conflict:
        return None
    return Lease(store, owner, Seen(body, etag), sent_at)


def judge_death(body: LeaseBody) -> LeaseBody:
    """What the end of an owner without release means for the clips that it had in flight.

    One clip alone: the death counts against it. Several: nobody knows which, nothing counts, and each runs alone next.
    """
    if body.owner is None or not body.in_flight:
        return body
    by_itself = len(body.in_flight) == 1
    attempts = dict(body.attempts)
    for clip_id in body.in_flight:
        if (old := attempts.get(clip_id)) is not None:
            changes = {
                "alone": True,
                "kind": "engine_died",
                "message": f"its worker {body.worker} ended without a word",
            }
            attempts[clip_id] = old.model_copy(update={**changes, "died": old.died + by_itself})
    return body.model_copy(update={"attempts": attempts})


class Watch:
    """An observer's memory: since when, on its own clock, each lease stood unchanged."""

    def __init__(self, clock: Clock = monotonic_s) -> None:
        self._clock = clock
        self._since: dict[str, tuple[str, float]] = {}
        self._moved: set[str] = set()

    def begin(self) -> None:
        """Forget which leases were seen to change; `is_alive` speaks of the time from now on."""
        self._moved.clear()

    def see(self, seen: Seen) -> None:
        """Note the version of a lease."""
        chunk = seen.body.chunk
        etag, _ = self._since.get(chunk, ("", 0.0))
        if etag == seen.etag:
            return
        if etag:
            self._moved.add(chunk)
        self._since[chunk] = (seen.etag, self._clock())

    def is_stale(self, seen: Seen) -> bool:
        """Whether exactly this version stood for ttl + grace under our eyes."""
        etag, since = self._since.get(seen.body.chunk, ("", 0.0))
        return etag == seen.etag and self._clock() - since >= seen.body.ttl_s + seen.body.grace_s

    def stale_in_s(self, seen: Seen) -> float:
        """Seconds until this version would be stale."""
        _, since = self._since.get(seen.body.chunk, ("", self._clock()))
        return max(0.0, since + seen.body.ttl_s + seen.body.grace_s - self._clock())

    def is_alive(self, chunk: str) -> bool:
        """Whether we saw the lease change: its owner does renew it."""
        return chunk in self._moved

"""Which chunk a worker claims next: the order, the looks at other workers' leases, the patience before a steal."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Final

from batch_gen.donelog import Folder
from batch_gen.lease import Lease, Seen, Watch, claim, read_lease, take_over

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from batch_gen.donelog import DoneLog
    from batch_gen.lease import Owner
    from batch_gen.plan import Chunk, Plan
    from batch_gen.storage.base import Store

MIN_LOOK_S: Final = 0.02
POLL_S: Final = 5.0


class Seeker:
    """Finds chunks for one worker; used under its claim lock.

    Chunks go by priority, then largest cost first; equal ones in an order of the worker's own, so that workers that
    start together do not run after each other.

    Args:
        shard: (index, count) for `--assign static`: only chunks c with c mod count = index, taken over at once, since
            nobody else may own them. None: every chunk, by lease.
    """

    def __init__(self, store: Store, plan: Plan, done: DoneLog, owner: Owner, shard: tuple[int, int] | None) -> None:
        self._store = store
        self._plan = plan
        self._done = done
        self._owner = owner
        self._shard = shard
        self._random = random.Random(owner.id)
        self._watch = Watch(owner.clock)
        self._folder = Folder(store, dice=self._random)
        self._next_look: dict[str, float] = {}
        self._known: set[str] = set()
        self._order: list[Chunk] = []
        self._ids: frozenset[str] = frozenset()
        self._refreshed_at = float("-inf")
        self._idle_since: float | None = None

    @property
    def look_s(self) -> float:
        """Seconds between two looks at a lease, with jitter."""
        return self._owner.ttl_s / 3 * self._random.uniform(0.7, 1.3)

    def refresh(self) -> None:
        """Read the done log and new rounds again."""
        self._plan.refresh(self._store)
        self._done.refresh()
        self._folder.look(self._done)
        mine = self._mine()
        self._ids = frozenset(chunk.id for chunk in mine)
        self._order = sorted((chunk for chunk in mine if chunk.id not in self._done), key=self._rank)
        self._refreshed_at = self._owner.clock()

    def open_chunks(self, held: Collection[str]) -> list[Chunk]:
        """Chunks that are neither finished nor ours, in the order of claims."""
        return list(self._open(held))

    def _open(self, held: Collection[str]) -> Iterator[Chunk]:
        return (chunk for chunk in self._order if chunk.id not in held and chunk.id not in self._done)

    def find(self, held: Collection[str], bucket: str | None) -> tuple[Chunk, Lease] | None:
        """Claim or take over the first chunk that can be had; with a bucket, only among its chunks."""
        if self._owner.clock() - self._refreshed_at > self._owner.ttl_s:
            self.refresh()
        for chunk in self._open(held):
            if (bucket is None or chunk.bucket == bucket) and self._next_look.get(chunk.id, 0.0) <= self._owner.clock():
                lease = self._try(chunk)
                if lease is not None:
                    self._idle_since = None
                    return chunk, lease
        return None

    def is_mine(self, chunk: str) -> bool:
        """Whether a chunk may be claimed by this worker at all."""
        return chunk in self._ids

    def forget(self, chunk: str) -> None:
        """Look at this chunk again without waiting, as if it had never been seen."""
        self._next_look.pop(chunk, None)

    def idle_s(self, held: Collection[str], linger_s: float) -> float | None:
        """Nothing can be had now: seconds until the next look, None when this worker is not needed any more.

        It is not needed when every chunk is finished, or when each remaining one was seen to be renewed by its owner
        since this worker fell idle, and it has waited for `linger_s`.
        """
        now = self._owner.clock()
        if now - self._refreshed_at > min(self._owner.ttl_s / 3, POLL_S) or not self.open_chunks(held):
            self.refresh()
        remaining = self.open_chunks(held)
        if not remaining:
            return None
        if self._idle_since is None:
            self._idle_since = now
            self._watch.begin()
        if now - self._idle_since >= linger_s and all(self._watch.is_alive(chunk.id) for chunk in remaining):
            return None
        soonest = min(self._next_look.get(chunk.id, now) for chunk in remaining)
        return max(MIN_LOOK_S, min(soonest - now, POLL_S))

    def _mine(self) -> list[Chunk]:
        if self._shard is None:
            return self._plan.chunks
        index, count = self._shard
        return [chunk for number, chunk in enumerate(self._plan.chunks) if number % count == index]

    def _rank(self, chunk: Chunk) -> tuple[int, float, str]:
        own_order = hashlib.sha256(f"{self._owner.id} {chunk.id}".encode()).hexdigest()
        return -chunk.priority, -chunk.cost, own_order

    def _try(self, chunk: Chunk) -> Lease | None:
        if chunk.id in self._known:
            found: Lease | Seen | None = read_lease(self._store, chunk.id)
        else:
            found = claim(self._store, self._owner, chunk.id)
            self._known.add(chunk.id)
        if isinstance(found, Lease):
            return found
        if found is None:  # vanished: as good as never claimed
            self._known.discard(chunk.id)
            return None
        return self._judge(chunk, found)

    def _judge(self, chunk: Chunk, seen: Seen) -> Lease | None:
        """Take a lease over when its owner is gone, else look again later."""
        self._watch.see(seen)
        if seen.body.finished:
            self.refresh()
            if chunk.id in self._done:
                return None
        if seen.body.owner == self._owner.id:  # ours, dropped or claimed by a write whose answer got lost
            seen = Seen(seen.body.model_copy(update={"in_flight": ()}), seen.etag)
        elif not (seen.body.owner is None or self._shard is not None or self._watch.is_stale(seen)):
            wait_s = min(self._watch.stale_in_s(seen), self.look_s)
            self._next_look[chunk.id] = self._owner.clock() + max(MIN_LOOK_S, wait_s)
            return None
        lease = take_over(self._store, self._owner, seen)
        if lease is None:
            self._next_look[chunk.id] = self._owner.clock() + self.look_s
        return lease

"""What a worker has in hand: its chunks, the clips in flight, and which clip goes next. Memory only, one lock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from batch_gen.lease import LostLease
from batch_gen.work import Assignment, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from batch_gen.clock import Clock
    from batch_gen.held import Held

POLL_S: Final = 5.0
MIN_PAUSE_S: Final = 0.02


class Roster:
    """Chunks and clips of one worker; several threads may use it.

    Attributes:
        changed: Lock of everything here; notified at every change that may let `hand_out` say something else.
        held: Chunk -> what we know of it, in order of claims.
        flying: Clips that were handed out and not reported on.
        running: Those of them whose start is written down.
    """

    def __init__(self, clock: Clock) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.held: dict[str, Held] = {}
        self.flying: dict[str, Assignment] = {}
        self.running: set[str] = set()
        self._clock = clock

    def hand_out(self, bucket: str | None) -> Assignment | Wait | None:
        """A clip of a chunk that we own; None when there is none of this bucket.

        A clip that must run alone goes when nothing else waits in our chunks and nothing is in flight.
        """
        with self.changed:
            if any(work.alone for work in self.flying.values()):
                return Wait(POLL_S)
            normal = self._ready(alone=False)
            for held, clip_id in normal:
                if bucket in {None, held.chunk.bucket}:
                    return self._assign(held, clip_id, alone=False)
            if normal:
                return None
            for held, clip_id in self._ready(alone=True):
                return Wait(POLL_S) if self.flying else self._assign(held, clip_id, alone=True)
        return None

    def pause(self) -> Wait | None:
        """How long to wait for what we own; None when we own nothing and nothing is in flight."""
        now = self._clock()
        with self.changed:
            if not self.held and not self.flying:
                return None
            pauses = (held.ready_in_s(now) for held in self.held.values())
            return Wait(min([POLL_S, *(max(MIN_PAUSE_S, pause) for pause in pauses if pause is not None)]))

    def add(self, held: Held) -> None:
        """A chunk is ours."""
        with self.changed:
            self.held[held.chunk.id] = held
            self.changed.notify_all()

    def drop(self, held: Held) -> None:
        """A chunk is ours no longer; clips of it that still fly are reported on as before."""
        held.lease.drop()
        with self.changed:
            if self.held.get(held.chunk.id) is held:
                del self.held[held.chunk.id]
            self.changed.notify_all()

    def held_of(self, clip_id: str) -> Held:
        """The chunk of a clip that was handed out.

        Raises:
            LostLease: It is no longer ours; the clip counts as landed.
        """
        held = self.find(clip_id)
        if held is None:
            self.land(clip_id)
            raise LostLease(f"clip {clip_id}: its chunk was taken over by another worker")
        return held

    def find(self, clip_id: str) -> Held | None:
        """The chunk of a clip in flight, None when that is not ours (any more)."""
        with self.changed:
            work = self.flying.get(clip_id)
            held = None if work is None else self.held.get(work.chunk)
            return held if held is not None and held.lease.is_held else None

    def land(self, clip_id: str) -> Held | None:
        """The clip is no longer in flight; its chunk, if that is still ours."""
        with self.changed:
            held = self.find(clip_id)
            self.flying.pop(clip_id, None)
            self.running.discard(clip_id)
            self.changed.notify_all()
            return held

    def take(self, wanted: Callable[[Held], bool]) -> list[Held]:
        """The chunks that some rule wants and nobody is closing; they are marked as closing."""
        with self.changed:
            found = [held for held in self.held.values() if not held.closing and wanted(held)]
            for held in found:
                held.closing = True
            return found

    def _ready(self, *, alone: bool) -> list[tuple[Held, str]]:
        now = self._clock()
        found = ((held, held.ready(now, self.flying, alone=alone)) for held in self.held.values())
        return [(held, clip_id) for held, clip_id in found if clip_id is not None]

    def _assign(self, held: Held, clip_id: str, *, alone: bool) -> Assignment:
        held.waiting.remove(clip_id)
        attempts = held.attempts_of(clip_id)
        work = Assignment(
            request=held.requests[clip_id],
            chunk=held.chunk.id,
            epoch=held.lease.body.epoch,
            attempt=attempts.started + 1,
            alone=alone,
            begun_before=attempts.alone or attempts.transient > 0,
        )
        self.flying[clip_id] = work
        return work

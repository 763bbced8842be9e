"""A queue of frames between the engine and an encoder, bounded in bytes.

The engine goes on with the next clip while the last one is still encoded; the bound keeps a slow encoder from filling
the memory, and one budget serves all queues of a machine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class Aborted(Exception):
    """The producer gave the clip up."""


class ByteBudget:
    """Bytes that all queues of a machine may hold together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held = 0
        self._freed = threading.Condition()

    def take(self, num_bytes: int, gone: threading.Event) -> bool:
        """Wait until `num_bytes` fit (one slab always does); False when `gone` is set meanwhile."""
        with self._freed:
            while self._held and self._held + num_bytes > self.limit_bytes:
                if gone.is_set():
                    return False
                self._freed.wait(0.2)
            self._held += num_bytes
            return True

    def give(self, num_bytes: int) -> None:
        """Return bytes."""
        with self._freed:
            self._held -= num_bytes
            self._freed.notify_all()


class SlabQueue:
    """Slabs of one clip on their way to its encoder; one producer, one consumer."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._slabs: deque[npt.NDArray[np.uint8]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._aborted: BaseException | None = None
        self._gone = threading.Event()

    def put(self, frames: npt.NDArray[np.uint8]) -> bool:
        """Hand over frames; False when the consumer failed and nobody wants them any more."""
        if self._gone.is_set() or not self._budget.take(frames.nbytes, self._gone):
            return False
        with self._changed:
            if not self._gone.is_set():
                self._slabs.append(frames)
                self._changed.notify()
                return True
        self._budget.give(frames.nbytes)  # the consumer failed while we waited: nobody else would return it
        return False

    def close(self) -> None:
        """No more frames will come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abort(self, cause: BaseException) -> None:
        """The clip is given up; the consumer gets `Aborted`."""
        with self._changed:
            self._aborted = cause
            self._changed.notify()

    def refuse(self) -> None:
        """The consumer failed: unblock the producer and drop what is queued."""
        with self._changed:
            self._gone.set()
            dropped = list(self._slabs)
            self._slabs.clear()
        for frames in dropped:
            self._budget.give(frames.nbytes)

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Slabs in order, until the producer closes.

        Raises:
            Aborted: the producer gave up.
        """
        while True:
            with self._changed:
                while not self._slabs and not self._closed and self._aborted is None:
                    self._changed.wait(1.0)
                if self._aborted is not None:
                    raise Aborted from self._aborted
                if not self._slabs:
                    return
                frames = self._slabs.popleft()
            try:
                yield frames
            finally:  # a consumer that fails on this slab must not keep its bytes
                self._budget.give(frames.nbytes)

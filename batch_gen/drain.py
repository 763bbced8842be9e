"""When a worker must stop: signals, a deadline, or a message; one flag that everything looks at.

`run`: SIGTERM and the first SIGINT ask for a drain: claim nothing new, finish what fits, release, exit 75. A second
SIGINT ends at once. A hard guard ends the process when the drain hangs: interpreters may hang at exit in native code.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from batch_gen.errors import EXIT_AGAIN, Drained

GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class DrainReason:
    """Why, and until when (monotonic seconds)."""

    text: str
    deadline_s: float


class Drain:
    """The flag. Thread-safe; the first reason stands, a nearer deadline replaces a later one."""

    def __init__(self, budget_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget_s = budget_s
        self._now = now
        self._reason: DrainReason | None = None
        self._asked = threading.Event()
        self._lock = threading.Lock()

    @property
    def reason(self) -> DrainReason | None:
        """The reason, None while nobody asked."""
        return self._reason

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._asked.is_set()

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline; infinite while nobody asked."""
        return float("inf") if self._reason is None else self._reason.deadline_s - self._now()

    def request(self, text: str, budget_s: float | None = None) -> None:
        """Ask to stop within `budget_s` seconds (default: the drain budget)."""
        deadline = self._now() + (self.budget_s if budget_s is None else budget_s)
        with self._lock:
            if self._reason is None:
                self._reason = DrainReason(text, deadline)
            elif deadline < self._reason.deadline_s:
                self._reason = DrainReason(self._reason.text, deadline)
        self._asked.set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but wake at once when somebody asks; True when somebody did."""
        return self._asked.wait(seconds)


def install_signals(drain: Drain) -> None:
    """Turn SIGTERM and SIGINT into a drain, a second SIGINT into an immediate end, and arm the hard guard."""
    seen_interrupt = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and seen_interrupt.is_set():
            os._exit(130)
        if number == signal.SIGINT:
            seen_interrupt.set()
        # A signal handler must not take locks that the interrupted code may hold.
        threading.Thread(target=_begin, args=(drain, signal.Signals(number).name), daemon=True).start()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def again_on_sigterm() -> None:
    """SIGTERM ends at once, with 75, until `install_signals`: weights travel, rows are checked, no clip is begun."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(EXIT_AGAIN))


class _Terminated(BaseException):
    """SIGTERM arrived; no handler of errors in between may hold it up."""


@contextmanager
def unwound_by_sigterm(budget_s: float, words: str) -> Iterator[None]:
    """SIGTERM unwinds what runs inside, which gives back what it holds, and ends the command with 75.

    Args:
        budget_s: seconds for that, after which the process ends anyway.
        words: what has been given back, for people.

    Raises:
        Drained: SIGTERM came.
    """
    guards: list[threading.Timer] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the giving back
        guards.append(guard_exit(budget_s + GRACE_S))
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except _Terminated:
        raise Drained(f"SIGTERM: {words}") from None
    finally:
        for guard in guards:
            guard.cancel()
        signal.signal(signal.SIGTERM, before)


def _begin(drain: Drain, name: str) -> None:
    drain.request(name)
    guard_exit(drain.budget_s + GRACE_S)


def guard_exit(after_s: float) -> threading.Timer:
    """End the process with 75 if it is still there after `after_s` seconds, unless the timer is cancelled."""
    timer = threading.Timer(after_s, os._exit, args=(EXIT_AGAIN,))
    timer.daemon = True
    timer.start()
    return timer

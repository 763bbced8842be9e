"""What a run shows while it works: bars on a terminal, one plain line every 30 s anywhere else, nothing when quiet.

A log file or CloudWatch never sees a carriage return. The plain lines come from a clock of their own, so that a long
load or compile does not look like a hang.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from batch_gen.metrics import duration

LINE_EVERY_S: Final = 30.0
_CLIP_ID_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class Current:
    """What one replica is doing: `done` of `total` steps of a stage of a clip; 0 of 0 where a stage has no steps."""

    clip_id: str
    stage: str
    done: int = 0
    total: int = 0
    cost: float = 1.0

    @property
    def fraction(self) -> float:
        """How much of the clip is rendered, by its denoising steps."""
        if self.stage != "denoise":
            return 0.0 if self.stage == "text" else 1.0
        return self.done / self.total if self.total else 0.0

    def __str__(self) -> str:
        """`fox denoise 13/40`."""
        name = self.clip_id if len(self.clip_id) <= _CLIP_ID_CHARS else self.clip_id[: _CLIP_ID_CHARS - 3] + "..."
        return f"{name} {self.stage}" + (f" {self.done}/{self.total}" if self.total else "")


@dataclass(slots=True)
class State:
    """Counts of a run; costs weigh clips of different size and steps against each other."""

    num_clips: int
    cost: float
    num_committed: int = 0
    num_failed: int = 0
    num_before: int = 0
    cost_done: float = 0.0
    cost_before: float = 0.0
    current: dict[int, Current] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Clips with a verdict, whoever made them and when."""
        return self.num_committed + self.num_failed + self.num_before

    def left_s(self, elapsed_s: float) -> float | None:
        """Estimated seconds to the end at the pace so far; None while nothing is known."""
        moving = sum(replica.cost * replica.fraction for replica in self.current.values())
        made = self.cost_done + moving
        if made <= 0 or elapsed_s <= 0:
            return None
        return max(0.0, self.cost - self.cost_before - made) / made * elapsed_s

    def line(self, elapsed_s: float) -> str:
        """`12/64 clips, 1 failed; fox denoise 13/40; 0:03:10 so far, about 0:14:00 left`."""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        doing = "".join(f"; {self.current[replica]}" for replica in sorted(self.current))
        left_s = self.left_s(elapsed_s)
        left = "" if left_s is None or self.num_done == self.num_clips else f", about {duration(left_s)} left"
        return f"{self.num_done}/{self.num_clips} clips{failed}{doing}; {duration(elapsed_s)} so far{left}"


class Display(Protocol):
    """One way to show a state."""

    def start(self, read: Callable[[], tuple[State, float]]) -> None:
        """Begin; `read` gives the state and the seconds since the start at any time, from any thread."""
        ...

    def changed(self, state: State, elapsed_s: float) -> None:
        """Something happened."""
        ...

    def close(self, state: State, elapsed_s: float) -> None:
        """End, leaving the final state visible."""
        ...


class Quiet:
    """Shows nothing."""

    def start(self, read: Callable[[], tuple[State, float]]) -> None:
        """Nothing."""

    def changed(self, state: State, elapsed_s: float) -> None:
        """Nothing."""

    def close(self, state: State, elapsed_s: float) -> None:
        """Nothing."""


class PlainLines:
    """One line at the start, every `every_s` seconds, and at the end."""

    def __init__(self, stream: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, read: Callable[[], tuple[State, float]]) -> None:
        """Print the first line and start the clock."""
        self._print(*read())
        self._thread = threading.Thread(target=self._tick, args=(read,), name="progress-lines", daemon=True)
        self._thread.start()

    def _tick(self, read: Callable[[], tuple[State, float]]) -> None:
        while not self._ended.wait(self._every_s):
            self._print(*read())

    def _print(self, state: State, elapsed_s: float) -> None:
        print(state.line(elapsed_s), file=self._stream, flush=True)

    def changed(self, state: State, elapsed_s: float) -> None:
        """Nothing: the clock prints."""

    def close(self, state: State, elapsed_s: float) -> None:
        """Stop the clock and print the last line."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._print(state, elapsed_s)


class TerminalBars:
    """A bar of clips, and below it one of steps for each replica."""

    def __init__(self, stream: TextIO) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Bars(*columns, console=Console(file=stream))
        self._clips: TaskID | None = None
        self._replicas: dict[int, TaskID] = {}

    def start(self, read: Callable[[], tuple[State, float]]) -> None:
        """Draw the bar of clips."""
        state, elapsed_s = read()
        self._clips = self._bars.add_task("clips", total=state.num_clips, note="")
        self._bars.start()
        self.changed(state, elapsed_s)

    def changed(self, state: State, elapsed_s: float) -> None:
        """Move the bars."""
        assert self._clips is not None
        left_s = state.left_s(elapsed_s)
        left = "" if left_s is None else f"about {duration(left_s)} left"
        failed = f"{state.num_failed} failed  " if state.num_failed else ""
        self._bars.update(self._clips, completed=state.num_done, note=failed + left)
        for replica, current in list(state.current.items()):
            if replica not in self._replicas:
                self._replicas[replica] = self._bars.add_task("", total=None, note="")
            note = current.stage if len(state.current) == 1 else f"{current.stage}, replica {replica}"
            name = current.clip_id[:_CLIP_ID_CHARS]
            bar = self._replicas[replica]
            self._bars.update(bar, description=name, completed=current.done, total=current.total or None, note=note)

    def close(self, state: State, elapsed_s: float) -> None:
        """Take the replicas' bars away and leave that of the clips."""
        for bar in self._replicas.values():
            self._bars.remove_task(bar)
        self._replicas.clear()
        state.current.clear()
        self.changed(state, elapsed_s)
        self._bars.stop()


class Progress:
    """What the supervisor tells of its work; safe from several threads. A context manager.

    Args:
        num_clips: Clips of the run or shard.
        cost: Their summed cost (`RenderRequest.cost`); 0 counts every clip alike.
        display: Where it is shown.
        now: Monotonic seconds.
    """

    def __init__(
        self, num_clips: int, cost: float, display: Display, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = State(num_clips, cost or num_clips)
        self._is_weighted = cost > 0
        self._display = display
        self._now = now
        self._started = now()
        self._lock = threading.RLock()

    def _read(self) -> tuple[State, float]:
        with self._lock:
            return self._state, self._now() - self._started

    def _weight(self, cost: float) -> float:
        return cost if self._is_weighted else 1.0

    def found(self, num_clips: int, cost: float = 0.0) -> None:
        """So many clips have a verdict already, from before or from another worker."""
        with self._lock:
            self._state.num_before += num_clips
            self._state.cost_before += cost if self._is_weighted else num_clips
            self._display.changed(*self._read())

    def step(self, replica: int, current: Current) -> None:
        """A replica is at this point of a clip."""
        with self._lock:
            self._state.current[replica] = current
            self._display.changed(*self._read())

    def idle(self, replica: int) -> None:
        """A replica has nothing to do."""
        with self._lock:
            self._state.current.pop(replica, None)
            self._display.changed(*self._read())

    def finished(self, clip_id: str, *, cost: float = 1.0, failed: bool = False) -> None:
        """A clip of this worker has its verdict."""
        with self._lock:
            self._state.num_failed += failed
            self._state.num_committed += not failed
            self._state.cost_done += self._weight(cost)
            for replica, current in list(self._state.current.items()):
                if current.clip_id == clip_id:
                    del self._state.current[replica]
            self._display.changed(*self._read())

    def __enter__(self) -> Self:
        self._display.start(self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._state.current.clear()
        self._display.close(*self._read())


def choose_display(*, quiet: bool, stream: TextIO | None = None) -> Display:
    """Bars where a person watches a terminal, lines where a log is written, nothing when `quiet`."""
    target = stream or sys.stderr
    if quiet:
        return Quiet()
    return TerminalBars(target) if target.isatty() else PlainLines(target)

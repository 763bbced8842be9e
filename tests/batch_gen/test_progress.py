import io
import os
import pty
import threading
from collections.abc import Callable

import pytest

from batch_gen.progress import Current, PlainLines, Progress, Quiet, State, TerminalBars, choose_display


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Recorder(Quiet):
    """A display that keeps every line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def changed(self, state: State, elapsed_s: float) -> None:
        self.lines.append(state.line(elapsed_s))

    def close(self, state: State, elapsed_s: float) -> None:
        self.lines.append(state.line(elapsed_s))


def test_lines_tell_clips_steps_and_time_left() -> None:
    """Each line has clips done, the step of each replica's clip, time so far and an estimate of the rest."""
    clock, shown = Clock(), Recorder()
    with Progress(4, 400, shown, clock) as progress:
        progress.step(0, Current("fox", "denoise", 0, 40, cost=100))
        clock.now_s = 10
        progress.step(0, Current("fox", "denoise", 20, 40, cost=100))
        progress.step(1, Current("owl", "text", cost=100))
        progress.step(0, Current("fox", "decode", cost=100))
        clock.now_s = 20
        progress.finished("fox", cost=100)
        progress.finished("owl", cost=100, failed=True)
    assert shown.lines == [
        "0/4 clips; fox denoise 0/40; 0:00:00 so far",
        "0/4 clips; fox denoise 20/40; 0:00:10 so far, about 0:01:10 left",
        "0/4 clips; fox denoise 20/40; owl text; 0:00:10 so far, about 0:01:10 left",
        "0/4 clips; fox decode; owl text; 0:00:10 so far, about 0:00:30 left",
        "1/4 clips; owl text; 0:00:20 so far, about 0:01:00 left",
        "2/4 clips, 1 failed; 0:00:20 so far, about 0:00:20 left",
        "2/4 clips, 1 failed; 0:00:20 so far, about 0:00:20 left",
    ]


def test_estimate_weighs_clips_by_cost() -> None:
    """A large clip that is left counts more than a small one that is done."""
    clock, shown = Clock(), Recorder()
    progress = Progress(2, 1000, shown, clock)
    clock.now_s = 10
    progress.finished("small", cost=100)
    assert shown.lines[-1].endswith("about 0:01:30 left")


def test_estimate_leaves_out_what_was_there_before() -> None:
    """Clips of an earlier run count as done but say nothing about the pace."""
    clock, shown = Clock(), Recorder()
    progress = Progress(10, 0, shown, clock)
    progress.found(8)
    assert shown.lines[-1] == "8/10 clips; 0:00:00 so far"
    clock.now_s = 60
    progress.finished("fox")
    assert shown.lines[-1] == "9/10 clips; 0:01:00 so far, about 0:01:00 left"


def test_finished_run_has_no_time_left() -> None:
    """When every clip has its verdict nothing is left to estimate."""
    clock, shown = Clock(), Recorder()
    with Progress(1, 0, shown, clock) as progress:
        clock.now_s = 5
        progress.finished("fox")
    assert shown.lines[-1] == "1/1 clips; 0:00:05 so far"


def test_idle_replica_shows_no_clip() -> None:
    """A replica that waits is not shown with its last clip."""
    shown = Recorder()
    progress = Progress(2, 0, shown, Clock())
    progress.step(0, Current("fox", "denoise", 1, 2))
    progress.idle(0)
    assert "fox" not in shown.lines[-1]


class SignalStream(io.StringIO):
    """A stream that tells when it has got some lines."""

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_lines = num_lines
        self.full = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= self.num_lines:
            self.full.set()
        return written


def test_plain_lines_come_without_any_event() -> None:
    """While nothing happens lines still come, whole, each with its end, and never a carriage return."""
    stream = SignalStream(num_lines=4)
    with Progress(2, 0, PlainLines(stream, every_s=0.01)):
        assert stream.full.wait(30)
    text = stream.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    assert all(line.startswith("0/2 clips") for line in text.splitlines())
    assert text.endswith("\n")


def test_plain_lines_do_not_follow_events() -> None:
    """A thousand steps print no line: only the start and the end do."""
    stream = io.StringIO()
    with Progress(2, 0, PlainLines(stream, every_s=3600)) as progress:
        for step in range(1000):
            progress.step(0, Current("fox", "denoise", step, 1000))
    assert len(stream.getvalue().splitlines()) == 2


def test_long_clip_id_is_cut() -> None:
    """A clip id of 120 characters does not push the figures off the line."""
    assert str(Current("x" * 120, "text")) == "x" * 37 + "... text"


def on_terminal(talk: Callable[[io.TextIOBase], None]) -> str:
    """What `talk` writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        reader_text: list[bytes] = []
        reader = threading.Thread(target=lambda: read_all(ours, reader_text))
        reader.start()
        talk(stream)
    reader.join(30)
    os.close(ours)
    return b"".join(reader_text).decode()


def read_all(file: int, into: list[bytes]) -> None:
    """Read a terminal until its other side is closed."""
    while True:
        try:
            block = os.read(file, 4096)
        except OSError:  # Linux ends a closed terminal with EIO
            return
        if not block:
            return
        into.append(block)


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the clips' bar and the step inside the clip are drawn, and the final count stays."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")

    def talk(stream: io.TextIOBase) -> None:
        display = choose_display(quiet=False, stream=stream)
        assert isinstance(display, TerminalBars)
        with Progress(2, 0, display) as progress:
            progress.step(0, Current("fox", "denoise", 13, 40))
            display._bars.refresh()
            progress.finished("fox")
            progress.finished("owl", failed=True)

    text = on_terminal(talk)
    assert "fox" in text
    assert "13/40" in text
    assert text.rstrip().count("2/2") >= 1
    assert "1 failed" in text


def test_no_terminal_means_plain_lines() -> None:
    """Into a file or pipe go lines, and quiet shows nothing anywhere."""
    assert isinstance(choose_display(quiet=False, stream=io.StringIO()), PlainLines)
    stream = io.StringIO()
    with Progress(1, 0, choose_display(quiet=True, stream=stream)) as progress:
        progress.finished("fox")
    assert stream.getvalue() == ""

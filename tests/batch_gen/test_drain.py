"""Stopping in good order: one flag, the first reason, the nearest deadline."""

import subprocess
import sys

from batch_gen.drain import Drain
from batch_gen.environment import child_environment


def test_nothing_asked_means_no_deadline():
    """Without a request there is no reason and endless time."""
    drain = Drain(25.0)
    assert not drain.requested
    assert drain.reason is None
    assert drain.remaining_s == float("inf")


def test_the_first_reason_stands_and_the_nearest_deadline_wins():
    """A later request can only shorten the time; the text stays that of the first."""
    now = [100.0]
    drain = Drain(25.0, now=lambda: now[0])
    drain.request("SIGTERM")
    drain.request("spot", budget_s=120.0)
    assert drain.remaining_s == 25.0
    drain.request("disk", budget_s=0.0)
    assert (drain.remaining_s, drain.reason.text) == (0.0, "SIGTERM")
    now[0] += 5
    assert drain.remaining_s == -5.0


def test_wait_wakes_when_somebody_asks():
    """A sleeping worker is woken by the request."""
    drain = Drain(1.0)
    drain.request("now")
    assert drain.wait(60.0)


def test_sigterm_before_the_first_clip_means_start_again():
    """While weights travel or rows are checked nothing can be drained; the exit code still says "start me again"."""
    code = "import os, signal, time; from batch_gen.drain import again_on_sigterm; again_on_sigterm();"
    code += "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), timeout=60, check=False)
    assert done.returncode == 75

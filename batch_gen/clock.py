"""Clocks as arguments: intervals are measured on a monotonic clock that also counts while the machine sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]


def monotonic_s() -> float:
    """Seconds since some fixed moment; never set back, and not stopped by suspend where the system can tell."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def utc_now(offset_s: float = 0.0) -> str:
    """Now as ISO 8601 in UTC, to the millisecond; for people, never for decisions between machines."""
    now = datetime.now(UTC) + timedelta(seconds=offset_s)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""Memory of processes: what they hold, what they held at most, and whether it creeps up from clip to clip."""

import contextlib
import resource
import statistics
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

CGROUP: Final = Path("/sys/fs/cgroup")
TREND_CLIPS: Final = 200
"""Clips that a slope looks back on."""
TREND_MIN_CLIPS: Final = 8
"""The first clips fill caches; a slope needs some more to mean anything."""


def rss_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process now (None: this one); 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def peak_rss_bytes(pid: int | None = None) -> int:
    """Most resident bytes that a process (None: this one) ever had; 0 when it is gone.

    Only Linux tells this of other processes; elsewhere it is what they hold now.
    """
    status = Path("/proc") / ("self" if pid is None else str(pid)) / "status"
    with contextlib.suppress(OSError):
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return 0  # a zombie has no memory
    if pid is not None:
        return rss_bytes(pid)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def tree_pids(pid: int) -> list[int]:
    """A process and all its descendants; none when it is gone."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def tree_rss_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants now; pages that they share count in each."""
    return sum(rss_bytes(member) for member in tree_pids(pid))


def tree_peak_rss_bytes(pid: int) -> int:
    """Sum of the peaks of a process and its living descendants: never less than what they held at one moment."""
    return sum(peak_rss_bytes(member) for member in tree_pids(pid))


def limit_bytes(cgroup: Path = CGROUP) -> int:
    """What this process and its children may hold: the machine's memory, or the container's share of it."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        total = min(total, int((cgroup / "memory.max").read_text("ascii")))
    return total


def slope_bytes_per_clip(samples: Iterable[float]) -> float:
    """Bytes that memory grows with each clip: the median of all pairwise slopes (Theil-Sen).

    A single jump, such as a larger bucket's buffers, does not move it; a leak does. Fewer than two samples give 0.
    """
    values = list(samples)
    pairs = [
        (later - earlier) / (j - i)
        for i, earlier in enumerate(values)
        for j, later in enumerate(values[i + 1 :], start=i + 1)
    ]
    return statistics.median(pairs) if pairs else 0.0


@dataclass(slots=True)
class MemoryTrend:
    """Memory after each clip, for a process that renders thousands of them."""

    samples: deque[int] = field(default_factory=lambda: deque(maxlen=TREND_CLIPS))

    def add(self, num_bytes: int) -> None:
        """One more clip is done and this much is held."""
        self.samples.append(num_bytes)

    @property
    def slope_bytes(self) -> float:
        """Growth per clip; 0 until there are enough clips to tell."""
        return slope_bytes_per_clip(self.samples) if len(self.samples) >= TREND_MIN_CLIPS else 0.0

    def clips_until(self, limit_bytes: int) -> int | None:
        """Clips until `limit_bytes` are reached at this pace; None when memory does not grow."""
        slope = self.slope_bytes
        if slope <= 0:
            return None
        return max(0, int((limit_bytes - self.samples[-1]) / slope))

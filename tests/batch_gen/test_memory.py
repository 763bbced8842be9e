import os
import subprocess
import sys

import pytest

from batch_gen import memory

MIB = 1024 * 1024


def test_peak_remembers_what_was_freed() -> None:
    """The peak of a process stays when memory is given back, and is never below what it holds."""
    before = memory.peak_rss_bytes()
    block = bytearray(before + 64 * MIB)
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    del block
    assert memory.peak_rss_bytes() >= before + 64 * MIB
    assert memory.peak_rss_bytes() >= memory.rss_bytes() - MIB


def test_tree_counts_children() -> None:
    """A process tree's memory includes that of its children, and of grandchildren."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"1\n"
    pids = memory.tree_pids(os.getpid())
    assert child.pid in pids
    assert len(memory.tree_pids(child.pid)) == 2
    assert memory.tree_rss_bytes(child.pid) > memory.rss_bytes(child.pid) > 0
    assert memory.tree_peak_rss_bytes(child.pid) > memory.peak_rss_bytes(child.pid) > 0
    child.communicate(b"\n")


def test_dead_process_has_no_memory() -> None:
    """A process that has ended counts as nothing instead of raising."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert memory.rss_bytes(child.pid) == 0
    assert memory.peak_rss_bytes(child.pid) == 0
    assert memory.tree_pids(child.pid) == []
    assert memory.tree_rss_bytes(child.pid) == 0


def test_slope_finds_a_leak_and_ignores_a_jump() -> None:
    """A steady growth is its slope; one jump to a higher level is none."""
    assert memory.slope_bytes_per_clip([100 + 30 * clip for clip in range(20)]) == 30
    assert memory.slope_bytes_per_clip([100] * 10 + [500] * 3) == 0
    assert memory.slope_bytes_per_clip([100]) == 0


@pytest.mark.parametrize(("growth", "clips"), [(0, None), (-5, None), (10, 33)])
def test_trend_says_when_the_limit_is_reached(growth: int, clips: int | None) -> None:
    """A trend tells after how many clips a limit is reached, or that it is not."""
    trend = memory.MemoryTrend()
    for clip in range(8):
        trend.add(1000 + growth * clip)
    assert trend.clips_until(1400) == clips


def test_trend_waits_for_enough_clips() -> None:
    """The first clips fill caches; they are no leak yet."""
    trend = memory.MemoryTrend()
    for clip in range(7):
        trend.add(1000 * clip)
    assert trend.slope_bytes == 0


def test_a_container_has_the_memory_of_its_cgroup(tmp_path):
    """The limit of the container counts where it is lower than the machine's memory."""
    machine = memory.limit_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.limit_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory.limit_bytes(tmp_path) == 1048576

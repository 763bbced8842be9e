"""Frames between engine and encoder: bounded, in order, and never stuck."""

import threading

import numpy as np
import pytest

from batch_gen.slabs import Aborted, ByteBudget, SlabQueue


def slab(value, num_bytes=12):
    """One frame of so many bytes."""
    return np.full((1, 1, num_bytes // 3, 3), value, np.uint8)


def test_slabs_arrive_in_order_and_the_budget_is_returned():
    """What is put comes out in order, and the bytes are free again afterwards."""
    budget = ByteBudget(1000)
    queue = SlabQueue(budget)
    for value in range(5):
        assert queue.put(slab(value))
    queue.close()
    assert [int(frames[0, 0, 0, 0]) for frames in queue] == [0, 1, 2, 3, 4]
    assert budget.take(1000, threading.Event())


def test_a_full_budget_blocks_the_producer_until_frames_are_consumed():
    """The engine waits while the encoder is behind, and goes on when it catches up."""
    queue = SlabQueue(ByteBudget(24))
    put = []

    def produce():
        for value in range(6):
            put.append(queue.put(slab(value)))
        queue.close()

    thread = threading.Thread(target=produce)
    thread.start()
    assert [int(frames[0, 0, 0, 0]) for frames in queue] == list(range(6))
    thread.join()
    assert put == [True] * 6


def test_a_slab_larger_than_the_budget_still_passes():
    """One slab always fits, or a large clip could never be rendered."""
    queue = SlabQueue(ByteBudget(1))
    assert queue.put(slab(1, 300))


def test_a_failed_consumer_releases_a_blocked_producer():
    """When the encoder fails, the engine is told at once that nobody wants the frames."""
    queue = SlabQueue(ByteBudget(12))
    queue.put(slab(0))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(queue.put(slab(1))))
    thread.start()
    queue.refuse()
    thread.join(5)
    assert not thread.is_alive()
    assert queue.put(slab(2)) is False


def test_an_aborted_clip_reaches_the_consumer():
    """When the engine gives a clip up, the encoder stops with Aborted and knows why."""
    queue = SlabQueue(ByteBudget(100))
    cause = RuntimeError("lost")
    queue.abort(cause)
    with pytest.raises(Aborted) as aborted:
        next(iter(queue))
    assert aborted.value.__cause__ is cause


def test_a_consumer_that_fails_on_a_slab_returns_its_bytes():
    """A file that cannot be encoded takes nothing from the budget of the clips after it."""
    budget = ByteBudget(24)
    queue = SlabQueue(budget)
    queue.put(slab(0))
    queue.put(slab(1))
    frames = iter(queue)
    next(frames)
    frames.close()  # as when the encoder raises inside the loop
    queue.refuse()
    gone = threading.Event()
    gone.set()
    assert budget.take(24, gone)


def test_a_slab_that_waited_for_a_failed_consumer_returns_its_bytes():
    """A slab that got its room just when the consumer failed is not kept."""
    queue = SlabQueue(budget := ByteBudget(24))
    plain = budget.take

    def take(num_bytes, gone):
        taken = plain(num_bytes, gone)
        queue.refuse()
        return taken

    budget.take = take
    assert queue.put(slab(0)) is False
    gone = threading.Event()
    gone.set()
    assert plain(24, gone)

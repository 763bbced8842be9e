"""Strips dealt over ranks: the frames of one rank, whatever the number of ranks and strips."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.parallel.layout import Degrees
from models.vae.strips import FRONT_SCALE
from tests.parallel.decodes import digests, patient, spoiled

pytestmark = pytest.mark.mesh


def ranks(number):
    """A mesh of so many ranks."""
    return Degrees(1, number, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["wan21", "wan22"])
def test_frames_are_those_of_one_rank(pool, family, dtype):
    """Five strips on 2, 3, 5 and 8 ranks, fewer and more than strips: rank 0 yields the serial bits, others nothing."""
    size = (4, 7, 12)
    [serial] = pool.run(digests, ranks(1), family, size, 5, dtype)
    assert len(serial) == 2
    for number in (2, 3, 5, 8):
        first, *others = pool.run(digests, ranks(number), family, size, 5, dtype)
        assert first == serial
        assert not any(others)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["wan21", "wan22"]), frames=st.integers(1, 6), height=st.integers(1, 9),
    width=st.integers(1, 14), count=st.integers(2, 9), number=st.integers(2, 8),
)  # fmt: skip
def test_any_deal_gives_the_same_bits(pool, family, frames, height, width, count, number):
    """Any size, number of strips and number of ranks: equal hashes, slab by slab."""
    count = min(count, FRONT_SCALE * max(height, width))
    size = (frames, height, width)
    [serial] = pool.run(digests, ranks(1), family, size, count)
    assert pool.run(digests, ranks(number), family, size, count)[0] == serial


def test_tiny_frames_take_as_many_threads_as_one_rank(pool):
    """Convolutions too small for torch's own threads: the bits of one rank, whose number of threads they depend on."""
    size = (2, 3, 3)
    [serial] = pool.run(digests, ranks(1), "wan21", size, 2)
    assert pool.run(digests, ranks(2), "wan21", size, 2)[0] == serial


def test_a_slow_consumer_keeps_no_rank_waiting(pool):
    """Rank 0 may leave the rest of its slabs where they are: the other ranks are through all the same."""
    first, *others = pool.run(patient, ranks(4), "wan21", (9, 6, 8), 4)
    assert first == [1]
    assert not any(others)


def test_all_ranks_see_the_same_failure(pool):
    """NaN in one rank's strip fails the clip on every rank at the same slab, and the ranks go on together."""
    seen = pool.run(spoiled, ranks(3), "wan21", (3, 4, 20), 3)
    assert {kind for kind, _ in seen} == {"nonfinite"}
    assert len({message for _, message in seen}) == 1

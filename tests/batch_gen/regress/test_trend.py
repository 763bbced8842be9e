"""What errors do over the steps of a clip."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_gen.regress.trend import Kind, classify

CASES = {
    "even": ([1.0, 1.1, 0.9, 1.0, 1.05], Kind.STABLE, 1),
    "none at all": ([0.0, 0.0, 0.0], Kind.STABLE, 0),
    "one step only": ([5.0], Kind.STABLE, 0),
    "two steps": ([1.0, 9.0], Kind.STABLE, 1),
    "a jump in the middle": ([1.0, 1.0, 9.0, 1.0, 1.0], Kind.SPIKE, 2),
    "a jump at the end, as of a late-step fault": ([1.0, 1.1, 1.2, 1.3, 9.0], Kind.SPIKE, 4),
    "one step that is off, the others exact": ([0.0, 0.0, 1e-7, 0.0, 0.0], Kind.SPIKE, 2),
    "slow growth": ([1.0, 1.3, 1.7, 2.2, 2.8], Kind.ACCUMULATING, 4),
    "doubling": ([1.0, 2.0, 4.0, 8.0, 16.0], Kind.ACCUMULATING, 4),
    "growth with a dent": ([1.0, 1.4, 1.3, 1.9, 2.4, 2.9], Kind.ACCUMULATING, 5),
    "growth below twice": ([1.0, 1.2, 1.4, 1.6, 1.8], Kind.STABLE, 4),
    "falling": ([9.0, 7.0, 5.0, 4.0, 3.5], Kind.STABLE, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_and_the_worst_step(name):
    """Series are stable, a spike or accumulating, and the step with the largest error is named."""
    errors, kind, step = CASES[name]
    found = classify(errors)
    assert (found.kind, found.step) == (kind, step)


def test_steps_that_were_kept_keep_their_numbers():
    """Errors by step number are judged in the order of the steps, and the step that is named is theirs."""
    found = classify({39: 1.0, 0: 1.0, 20: 8.0, 10: 1.0})
    assert (found.kind, found.step, found.steps) == (Kind.SPIKE, 20, 4)


def test_values_that_are_no_numbers_are_a_spike():
    """An infinite or undefined error is a spike at its first step, and its JSON holds null."""
    found = classify([1.0, math.inf, 1.0, math.nan])
    assert (found.kind, found.step) == (Kind.SPIKE, 1)
    assert found.to_json()["largest"] is None


def test_nothing_and_negative_errors_are_refused():
    """No error at all and a negative one are mistakes of the caller."""
    with pytest.raises(ValueError, match="one step"):
        classify([])
    with pytest.raises(ValueError, match="negative"):
        classify([1.0, -1.0])


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=12), st.sampled_from([2.0**-8, 4.0, 2.0**10]))
def test_the_verdict_does_not_depend_on_the_unit(errors, unit):
    """The same errors in another unit have the same kind and the same worst step."""
    assert classify(errors).kind == classify([error * unit for error in errors]).kind
    assert classify(errors).step == classify([error * unit for error in errors]).step

"""Budgets: what is tried again, what is set aside, when a run stops."""

from __future__ import annotations

import pytest

from batch_gen.budget import Budgets, ErrorBudget, after_failure, verdict_on
from batch_gen.lease import Attempts


def failures(*kinds, alone=True):
    """Verdicts after each of these failures in a row; each start was counted before."""
    attempts, verdicts = Attempts(), []
    for kind in kinds:
        attempts = attempts.model_copy(update={"started": attempts.started + 1})
        attempts = after_failure(attempts, kind, "why", alone)
        verdicts.append(verdict_on(attempts, Budgets()))
    return verdicts


@pytest.mark.parametrize(
    ("kind", "tries"), [("input", 1), ("nonfinite", 2), ("verify", 2), ("upload", 4), ("engine_died", 3), ("hang", 3)]
)
def test_each_class_has_its_budget(kind, tries):
    """Bad input is set aside at once, a clip's own fault after two, deaths alone after three, the store's after four."""
    verdicts = failures(*[kind] * tries)
    assert verdicts[:-1] == [None] * (tries - 1)
    assert (verdicts[-1].status, verdicts[-1].kind, verdicts[-1].attempts) == ("quarantined", kind, tries)
    assert verdicts[-1].message == "why"


def test_death_in_company_never_counts():
    """However often a process dies with several clips in flight, none of them is set aside for it."""
    assert failures(*["engine_died"] * 10, alone=False) == [None] * 10


def test_store_trouble_does_not_use_up_the_clips_own_budget():
    """Failures around a clip and failures of a clip are counted apart."""
    assert failures("store", "nonfinite", "upload", "engine_died") == [None] * 4


def test_first_clips_that_all_fail_stop_the_run():
    """Five failures at the very start stop the run; one success among them does not."""
    budget = ErrorBudget()
    assert [budget.note(failed=True) for _ in range(4)] == [None] * 4
    assert "first 5 clips" in budget.note(failed=True)
    budget = ErrorBudget()
    budget.note(failed=False)
    assert all(budget.note(failed=True) is None for _ in range(10))


def test_share_of_the_last_hundred_stops_the_run():
    """Too large a share of recent clips stops the run, however well it began."""
    budget = ErrorBudget(0.25)
    for _ in range(500):
        assert budget.note(failed=False) is None
    reasons = [budget.note(failed=True) for _ in range(26)]
    assert reasons[:25] == [None] * 25
    assert "26 of the last 100" in reasons[25]


def test_count_stops_the_run():
    """A whole number is a count of failed clips."""
    budget = ErrorBudget(3)
    for _ in range(50):
        budget.note(failed=False)
    assert [budget.note(failed=True) is None for _ in range(3)] == [True, True, False]

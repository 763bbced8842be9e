"""What Batch does after each exit code, by our rules in their order."""

import pytest

from batch_gen.submit.retries import Ended, ended_from_returncode, is_retried, strategy


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6])
def test_final_codes(code):
    """0 is success and 1 to 6 mean that starting again would not help."""
    assert not is_retried(strategy(10), Ended(code, "Essential container in task exited"), 1)


@pytest.mark.parametrize(
    "ended",
    [
        Ended(75, "Essential container in task exited"),
        Ended(137, "OutOfMemoryError: Container killed due to memory usage"),
        Ended(None, "", "Host EC2 (instance i-0123) terminated."),
        Ended(None, "CannotPullContainerError: timeout"),
    ],
)
def test_codes_that_start_again(ended):
    """A drain, a kill, a lost host and a failed pull are tried again, up to the last attempt."""
    assert is_retried(strategy(3), ended, 1)
    assert is_retried(strategy(3), ended, 2)
    assert not is_retried(strategy(3), ended, 3)


def test_a_timeout_is_final():
    """Batch never retries what ran into its timeout."""
    assert not is_retried(strategy(10), Ended(137, timed_out=True), 1)


def test_without_rules_everything_is_retried():
    """The documented default, which is why our last rule is EXIT."""
    assert is_retried({"attempts": 2, "evaluateOnExit": []}, Ended(2), 1)


def test_all_conditions_of_a_rule_must_match_and_the_first_rule_wins():
    """AND inside a rule, order between rules, `*` at the end only."""
    rules = [{"onExitCode": "1*", "onReason": "Essential*", "action": "EXIT"}, {"onReason": "*", "action": "RETRY"}]
    assert not is_retried({"attempts": 2, "evaluateOnExit": rules}, Ended(12, "Essential container"), 1)
    assert is_retried({"attempts": 2, "evaluateOnExit": rules}, Ended(12, "Other"), 1)


def test_signals_of_local_processes():
    """kill -9 is what a container runtime calls 137."""
    assert ended_from_returncode(-9).exit_code == 137
    assert ended_from_returncode(-15).exit_code == 143
    assert ended_from_returncode(75).exit_code == 75

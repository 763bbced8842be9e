"""What AWS Batch does after an attempt: a small evaluator of its retry strategy, for `--local` and for tests.

Source: AWS Batch User Guide, "Automated job retries": rules are tried in order; within a rule all given patterns must
match; the first match decides; without a match the job is retried; timed-out, cancelled and terminated jobs are not.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# Order matters: the first match decides, and the last rule ends everything else.
EXIT_RULES: Final = (
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # Spot reclaim, host failure
    {"onReason": "CannotPull*", "action": "RETRY"},  # image pull
    {"onExitCode": "75", "action": "RETRY"},  # drained or transient
    {"onExitCode": "137", "action": "RETRY"},  # killed: out of memory, or SIGKILL after a drain that took too long
    {"onReason": "*", "action": "EXIT"},  # everything else, 0 to 6 among it
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, as Batch sees it."""

    exit_code: int | None
    reason: str = ""
    status_reason: str = ""
    timed_out: bool = False


def strategy(attempts: int) -> dict[str, Any]:
    """The retry strategy of our job definition."""
    return {"attempts": attempts, "evaluateOnExit": [dict(rule) for rule in EXIT_RULES]}


def is_retried(retry_strategy: Mapping[str, Any], ended: Ended, attempt: int) -> bool:
    """Whether Batch starts another attempt.

    Args:
        retry_strategy: `attempts` and `evaluateOnExit`.
        ended: how attempt `attempt` (from 1) ended.
        attempt: its number.
    """
    if ended.exit_code == 0 or ended.timed_out or attempt >= retry_strategy["attempts"]:
        return False
    for rule in retry_strategy.get("evaluateOnExit", []):
        if _matches(rule, ended):
            return bool(rule["action"].upper() == "RETRY")
    return True


def ended_from_returncode(code: int) -> Ended:
    """A local process's end: death by signal n is exit code 128 + n, as a container runtime reports it."""
    if code >= 0:
        return Ended(code, reason="Essential container in task exited")
    reason = "OutOfMemoryError: Container killed due to memory usage" if -code == signal.SIGKILL else ""
    return Ended(128 - code, reason=reason)


def _matches(rule: Mapping[str, str], ended: Ended) -> bool:
    code = "" if ended.exit_code is None else str(ended.exit_code)
    values = {"onReason": ended.reason, "onStatusReason": ended.status_reason, "onExitCode": code}
    return all(_glob(rule[key], value) for key, value in values.items() if key in rule)


def _glob(pattern: str, value: str) -> bool:
    if pattern.endswith("*"):
        return value.startswith(pattern[:-1])
    return value == pattern

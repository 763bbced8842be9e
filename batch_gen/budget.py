"""What a failure leads to: try again, run alone, set aside, or stop the whole run. Pure functions of what happened."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from batch_gen.errors import KINDS, RetryClass
from batch_gen.records import Verdict

if TYPE_CHECKING:
    from batch_gen.lease import Attempts

FIRST_CLIPS: Final = 5
SHARE_WINDOW: Final = 100
SHARE_AFTER: Final = 20
MESSAGE_MAX_CHARS: Final = 2000


@dataclass(frozen=True, slots=True)
class Budgets:
    """How often a clip may be tried.

    Attributes:
        max_deaths: Deaths without verdict of the clip alone.
        max_failures: Verdicts against the clip.
        max_transient: Failures of store or network around the clip, with growing pauses in between.
        transient_pause_s: The first pause; it doubles.
    """

    max_deaths: int = 3
    max_failures: int = 2
    max_transient: int = 4
    transient_pause_s: float = 2.0


def after_failure(attempts: Attempts, kind: str, message: str, was_alone: bool) -> Attempts:
    """The attempts of a clip after one more failure; a death counts only when nothing else was in flight."""
    retry = KINDS[kind].retry
    changes: dict[str, object] = {"kind": kind, "message": message[:MESSAGE_MAX_CHARS]}
    if retry in {RetryClass.INPUT, RetryClass.CLIP}:
        changes["failed"] = attempts.failed + 1
    elif retry is RetryClass.TRANSIENT:
        changes["transient"] = attempts.transient + 1
    elif retry is RetryClass.DEVICE:
        changes |= {"alone": True, "died": attempts.died + was_alone}
    return attempts.model_copy(update=changes)


def verdict_on(attempts: Attempts, budgets: Budgets) -> Verdict | None:
    """Quarantine when a budget is spent, None while the clip may be tried again."""
    spent = (
        attempts.died >= budgets.max_deaths
        or attempts.failed >= budgets.max_failures
        or attempts.transient >= budgets.max_transient
        or (attempts.failed > 0 and KINDS[attempts.kind].retry is RetryClass.INPUT)
    )
    if not spent:
        return None
    return Verdict(
        status="quarantined",
        kind=attempts.kind,
        retry_class=KINDS[attempts.kind].retry.value,
        message=attempts.message,
        attempts=attempts.started,
    )


class ErrorBudget:
    """Stops a run that only fails: its first clips all did, or too many of the last ones.

    Args:
        limit: A count of quarantined clips (1 or more), or a share of the last 100 clips (below 1).
    """

    def __init__(self, limit: float = 0.5) -> None:
        self._limit = limit
        self._last: deque[bool] = deque(maxlen=SHARE_WINDOW)
        self._num_clips = 0
        self._num_failed = 0

    def note(self, *, failed: bool) -> str | None:
        """Count one verdict; the reason to stop the run, or None."""
        self._last.append(failed)
        self._num_clips += 1
        self._num_failed += failed
        if self._num_failed == self._num_clips >= FIRST_CLIPS:
            return f"the first {self._num_clips} clips of this worker all failed"
        if self._limit >= 1:
            return f"{self._num_failed} clips failed (--max-failures)" if self._num_failed >= self._limit else None
        share = sum(self._last) / len(self._last)
        if self._num_clips >= SHARE_AFTER and share > self._limit:
            return f"{sum(self._last)} of the last {len(self._last)} clips failed (--max-failures {self._limit:g})"
        return None

"""Give quarantined clips another chance: a new round with fresh budgets, and the stop that they caused retired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batch_gen.donelog import DoneLog
from batch_gen.errors import KINDS, ConfigError, RetryClass, UsageError
from batch_gen.plan import PlanOptions, load_plan, plan_retry
from batch_gen.stop import retire_stop

if TYPE_CHECKING:
    from batch_gen.plan import Plan, RoundHead
    from batch_gen.records import Verdict
    from batch_gen.storage.base import Store


@dataclass(frozen=True, slots=True)
class Choice:
    """Which quarantined clips: all of them when nothing is given, else those that match both.

    Attributes:
        errors: Retry classes or kinds, such as "transient" or "hang".
        clip_ids: Clips by name.
    """

    errors: frozenset[str] = frozenset()
    clip_ids: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Refuse words that name nothing."""
        known = {*KINDS, *(retry.value for retry in RetryClass)}
        if unknown := sorted(self.errors - known):
            raise UsageError(f"no retry class or kind {', '.join(unknown)}; known are {', '.join(sorted(known))}")

    def wants(self, clip_id: str, verdict: Verdict) -> bool:
        """Whether this clip is meant."""
        by_error = not self.errors or bool(self.errors & {verdict.kind, verdict.retry_class})
        return by_error and (self.clip_ids is None or clip_id in self.clip_ids)


def retry(store: Store, choice: Choice, options: PlanOptions | None = None) -> RoundHead:
    """Plan the chosen clips once more; the next `run` makes them.

    Raises:
        ConfigError: No quarantined clip matches, or a named one is not quarantined.
    """
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    quarantined = log.tally().quarantined
    planned_again = clips_under_way(plan, log)
    chosen = {c for c, verdict in quarantined.items() if choice.wants(c, verdict) and c not in planned_again}
    _check_names(store, choice, quarantined, planned_again)
    if not chosen:
        raise ConfigError(f"{store.url}: no quarantined clip matches ({len(quarantined)} are quarantined)")
    head = plan_retry(store, plan, chosen, options or PlanOptions())
    retire_stop(store)
    return head


def clips_under_way(plan: Plan, log: DoneLog) -> set[str]:
    """Clips that an earlier retry planned and that are not through yet."""
    chunks = [chunk for chunk in plan.chunks if chunk.round > 0 and chunk.id not in log]
    return {request.clip_id for chunk in chunks for request in plan.requests(chunk)}


def _check_names(store: Store, choice: Choice, quarantined: dict[str, Verdict], under_way: set[str]) -> None:
    for clip_id in sorted(choice.clip_ids or ()):
        if clip_id in under_way:
            raise ConfigError(f"{store.url}: clip {clip_id} is planned again already; run makes it")
        if clip_id not in quarantined:
            raise ConfigError(
                f"{store.url}: clip {clip_id} is not quarantined in a finished chunk; see batch-gen status"
            )

"""Who takes the blame: cases of a night become baselines, or an approved variant is retired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batch_gen.errors import UsageError
from batch_gen.regress.baseline import approve_case, history, retire
from batch_gen.regress.results import Approval, CaseResult, Night, list_nights, load_night
from batch_gen.storage.base import Store

DIFFERING = ("fail", "new", "quarantined")


@dataclass(frozen=True, slots=True)
class Decision:
    """Who decides, and why."""

    who: str
    why: str

    def __post_init__(self) -> None:
        if not self.who.strip() or not self.why.strip():
            raise UsageError("an approval needs --who (a person) and --why (a reason); both are kept for ever")


def the_night(store: Store, suite: str, name: str | None) -> Night:
    """The night of that name, the last one when none is named.

    Raises:
        UsageError: there is none; the message names those that are there.
    """
    names = list_nights(store, suite)
    wanted = name or (names[-1] if names else None)
    night = None if wanted is None else load_night(store, suite, wanted)
    if night is None:
        there = f"it has {', '.join(names[-5:])}" if names else "it has none; batch-gen regress run makes one"
        raise UsageError(f"suite {suite} in {store.url}: no night {wanted or 'at all'}; {there}")
    return night


def approve(store: Store, night: Night, cases: Sequence[str], decision: Decision) -> list[Approval]:
    """Approve the named cases of a night, or all that were red by their pixels or new.

    A case that passed is compared with what is approved already and is left alone, unless it is named.

    Raises:
        UsageError: no such case, or one without a clip; nothing is approved then.
    """
    chosen = [_named(night, name) for name in cases]
    if not cases:
        chosen = [case for case in night.cases if case.verdict in DIFFERING and case.frames_hash is not None]
    for case in chosen:
        if case.frames_hash is None:
            raise UsageError(f"case {case.case} of night {night.night} has no clip to approve")
    made = (approve_case(store, night, case, decision.who, decision.why) for case in chosen)
    return [approval for approval in made if approval is not None]


def retire_variant(store: Store, night: Night, case: str, variant: str, decision: Decision) -> Approval:
    """Take an approval of the night's platform back.

    Raises:
        UsageError: no such variant, or it was retired before.
    """
    every = [approval for approval, _ in history(store, night.suite, case, night.platform.key)]
    found = [approval for approval in every if approval.variant == variant]
    if not found:
        known = ", ".join(approval.variant for approval in every) or "none"
        raise UsageError(f"case {case} has no variant {variant} on {night.platform.key}; approved: {known}")
    retire(store, found[0], decision.who, decision.why)
    return found[0]


def _named(night: Night, name: str) -> CaseResult:
    case = night.case(name)
    if case is None:
        known = ", ".join(case.case for case in night.cases)
        raise UsageError(f"--case {name}: night {night.night} has {known}")
    return case

"""Who takes the blame: cases of a night become baselines, or an approved variant is retired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batch_gen.errors import UsageError
from batch_gen.regress.artifacts import check_artifacts
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
    night = load_night(store, suite, wanted) if wanted in names else None
    if night is None:
        there = f"it has {', '.join(names[-5:])}" if names else "it has none; batch-gen regress run makes one"
        raise UsageError(f"suite {suite} in {store.url}: no night {wanted or 'at all'}; {there}")
    return night


def approve(store: Store, night: Night, cases: Sequence[str], decision: Decision) -> list[Approval]:
    """Approve the named cases of a night, or all that were red by their pixels or new.

    A case that passed is compared with what is approved already and is left alone, unless it is named.

    Returns:
        What was approved now; a case that stands already is not among it.

    Raises:
        UsageError: no such case, or one without a clip; nothing is approved then.
        CheckFailed: a clip is gone or damaged, or a document of its case is; nothing is approved then.
    """
    chosen = [_named(night, name) for name in cases]
    if not cases:
        chosen = [case for case in night.cases if case.verdict in DIFFERING and case.frames_hash is not None]
    for case in chosen:
        if case.frames_hash is None:
            raise UsageError(f"case {case.case} of night {night.night} has no clip to approve")
    for case in chosen:  # what nobody could be held against must not become a baseline
        history(store, night.suite, case.case, night.platform.key)
        check_artifacts(store, case.artifacts)
    made = (approve_case(store, night, case, decision.who, decision.why) for case in chosen)
    return [approval for approval in made if approval is not None]


def unapproved(night: Night, cases: Sequence[str], made: Sequence[Approval]) -> list[str]:
    """Lines about what was asked for and was not approved, and why."""
    done = {approval.case for approval in made}
    if cases:
        return [
            f"stands     {name}: its clip of night {night.night} is approved already; regress log tells by whom"
            for name in dict.fromkeys(cases)
            if name not in done
        ]
    if made:
        return []
    differing = [case.case for case in night.cases if case.verdict in DIFFERING and case.frames_hash is not None]
    why = f"{', '.join(differing)} stand approved already" if differing else "no case with a clip is new or red"
    lines = [f"nothing to approve in night {night.night}: {why}"]
    lost = [case.case for case in night.cases if case.verdict == "infra"]
    return [*lines, f"not judged {', '.join(lost)}; the night's results say why"] if lost else lines


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

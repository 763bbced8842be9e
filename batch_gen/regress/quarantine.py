"""Quarantine: a case that is known to be flaky has an owner and a last day; it still runs, and says what it would."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from batch_gen.regress.results import GateResult
from batch_gen.regress.suite import Quarantine


def apply_quarantine(gates: Sequence[GateResult], entry: Quarantine | None, today: date) -> list[GateResult]:
    """Gates that fail become `quarantined` up to the entry's last day; after it they fail again, and say so.

    Only red turns: what is new or was not rendered stays what it is.
    """
    if entry is None:
        return list(gates)
    return [_turned(gate, entry, today) if gate.verdict == "fail" else gate for gate in gates]


def _turned(gate: GateResult, entry: Quarantine, today: date) -> GateResult:
    if today > entry.until:
        note = f"quarantine of {entry.owner} ended on {entry.until}: {entry.why}"
        return gate.model_copy(update={"note": _joined(gate.note, note)})
    note = f"quarantined until {entry.until}, owner {entry.owner}: {entry.why}"
    return gate.model_copy(update={"verdict": "quarantined", "note": _joined(gate.note, note)})


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second

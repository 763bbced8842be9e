"""The story of a case: what was approved by whom, and how its nights went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batch_gen.errors import UsageError
from batch_gen.regress.baseline import history
from batch_gen.regress.documents import checked_part
from batch_gen.regress.results import last_nights
from batch_gen.storage.base import Store


def story(store: Store, suite: str, case: str, num_nights: int = 30) -> dict[str, Any]:
    """Approvals, oldest first, and the last nights of a case, as JSON values.

    Raises:
        UsageError: neither an approval nor a night knows the case.
    """
    checked_part("case", case)
    approvals = [
        {
            "variant": approval.variant,
            "platform": approval.platform.key,
            "night": approval.night,
            "who": approval.who,
            "why": approval.why,
            "when": approval.when,
            "frames_hash": approval.frames_hash,
            "retired": None if retired is None else retired.model_dump(exclude={"format"}),
        }
        for approval, retired in history(store, suite, case)
    ]
    nights = []
    for night in last_nights(store, suite, num_nights):
        found = night.case(case)
        if found is not None:
            red = [gate.gate for gate in found.gates if gate.verdict in ("fail", "infra", "quarantined")]
            place = {"night": night.night, "platform": night.platform.key}
            nights.append({**place, "verdict": found.verdict, "gates": red, "frames_hash": found.frames_hash})
    if not approvals and not nights:
        raise UsageError(f"suite {suite} in {store.url} knows no case {case}; regress run lists its cases")
    return {"suite": suite, "case": case, "approvals": approvals, "nights": nights}


def lines(told: dict[str, Any]) -> Iterator[str]:
    """The story for a terminal."""
    yield f"{told['suite']}, case {told['case']}"
    for entry in told["approvals"]:
        yield f"approved   {entry['when']} {entry['variant']} on {entry['platform']} from night {entry['night']}"
        yield f"           by {entry['who']}: {entry['why']}"
        if note := entry["retired"]:
            yield f"           retired {note['when']} by {note['who']}: {note['why']}"
    for entry in told["nights"]:
        red = f": {', '.join(entry['gates'])}" if entry["gates"] else ""
        yield f"night      {entry['night']} {entry['verdict']}{red}"

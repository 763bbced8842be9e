"""A night in words: one line per case for the terminal, and a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from batch_gen.regress.results import CaseResult, GateResult, Night

SHOWN_GATES: Final = 3
RED: Final = ("fail", "infra", "new", "quarantined")


def figure(gate: GateResult) -> str:
    """`psnr_min 28.4, limit 35, frame 7: note`."""
    text = gate.gate if gate.value is None else f"{gate.gate} {gate.value:.6g}"
    text += "" if gate.limit is None else f", limit {gate.limit:.6g}"
    text += "" if gate.frame is None or gate.verdict == "pass" else f", frame {gate.frame}"
    return f"{text}: {gate.note}" if gate.note else text


def sentence(case: CaseResult) -> str:
    """The case's verdict and what it rests on."""
    shown = [gate for gate in case.gates if gate.verdict == case.verdict and case.verdict in RED]
    if not shown:
        apart = [gate for gate in case.gates if gate.gate == "frames_hash" and gate.verdict == "not_comparable"]
        return f"pass (exact: {apart[0].note})" if apart and case.verdict == "pass" else case.verdict
    more = "" if len(shown) <= SHOWN_GATES else f"; and {len(shown) - SHOWN_GATES} more"
    return f"{case.verdict}: " + "; ".join(figure(gate) for gate in shown[:SHOWN_GATES]) + more


def closing(night: Night, url: str) -> str:
    """The lines that end a night on a terminal."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally(night).items())
    lines = [f"{night.suite}, night {night.night}: {night.verdict} ({counts})"]
    lines += [f"  {figure(gate)}" for gate in night.gates if gate.verdict in RED]
    lines += [f"changed    {line}" for line in night.changed]
    lines.append(f"results    {url}/regress/{night.suite}/{night.night}/results.json")
    if night.verdict == "new" or any(case.verdict == "new" for case in night.cases):
        lines.append(
            f"next       look at the clips, then: batch-gen regress approve {night.suite} --out {url}"
            f" --night {night.night} --who YOU --why REASON"
        )
    return "\n".join(lines)


def metric_line(night: Night) -> str:
    """One line in CloudWatch's embedded metric format; `regression_finished` is what the stack's alarm waits for.

    A night that was not rendered has not finished: the alarm shall see that nothing came.
    """
    counts = tally(night)
    values = {"regression_finished": int(night.verdict != "infra")}
    values |= {f"regression_{verdict}": counts.get(verdict, 0) for verdict in ("pass", "fail", "new", "infra")}
    metrics = [{"Name": name, "Unit": "Count"} for name in values]
    moment = int(datetime.fromisoformat(night.finished).timestamp() * 1000)
    definition = {"Namespace": "batch-gen", "Dimensions": [[]], "Metrics": metrics}
    head = {"_aws": {"Timestamp": moment, "CloudWatchMetrics": [definition]}}
    return json.dumps({**head, **values, "suite": night.suite, "night": night.night})


def tally(night: Night) -> dict[str, int]:
    """Number of cases by verdict."""
    found: dict[str, int] = {}
    for case in night.cases:
        found[case.verdict] = found.get(case.verdict, 0) + 1
    return found


def markdown(night: Night) -> str:
    """The night as a page."""
    lines = [f"# {night.suite}, night {night.night}: {night.verdict}", ""]
    lines.append(f"Platform {night.platform.key}, numerics {night.fingerprint.numerics_key}, exit {night.exit_code}.")
    lines += ["", "| case | verdict | what it rests on | first bad frame | worst frame |", "|---|---|---|---|---|"]
    lines += [_row(case) for case in night.cases]
    if night.gates:
        lines += ["", "| gate of the night | verdict | figure |", "|---|---|---|"]
        lines += [f"| {gate.gate} | {gate.verdict} | {_cell(figure(gate))} |" for gate in night.gates]
    lines += _listed("Changed since the night before", night.changed)
    lines += _listed(f"Fingerprint since the last green night, {night.last_green}", night.since_green)
    return "\n".join(lines) + "\n"


def _row(case: CaseResult) -> str:
    frames = ["" if frame is None else str(frame) for frame in (case.first_bad_frame, case.worst_frame)]
    return f"| {case.case} | {case.verdict} | {_cell(sentence(case))} | {frames[0]} | {frames[1]} |"


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *(f"- {line}" for line in lines)] if lines else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

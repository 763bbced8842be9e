"""JUnit XML of a night, for CI: one test per case and gate; a failed gate is a failure, a missing clip an error."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from batch_gen.regress.results import GateResult, Night
from batch_gen.regress.summary import figure

_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml(night: Night) -> str:
    """The night as one `testsuites` document."""
    root = ET.Element("testsuites", name=f"{night.suite} {night.night}")
    for case in night.cases:
        _suite(root, f"{night.suite}.{case.case}", case.gates, sum(case.timings.values()))
    if night.gates:
        _suite(root, f"{night.suite}.night", night.gates, 0.0)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, gates: Sequence[GateResult], seconds: float) -> None:
    counts = {"failures": ("fail", "new"), "errors": ("infra",), "skipped": ("quarantined", "not_comparable")}
    suite = ET.SubElement(root, "testsuite", name=name, tests=str(len(gates)), time=f"{seconds:.3f}")
    for attribute, verdicts in counts.items():
        suite.set(attribute, str(sum(gate.verdict in verdicts for gate in gates)))
    for gate in gates:
        test = ET.SubElement(suite, "testcase", classname=name, name=gate.gate)
        element = {"fail": "failure", "new": "failure", "infra": "error", "pass": None}.get(gate.verdict, "skipped")
        if element is not None:
            outcome = ET.SubElement(test, element, message=_NO_XML.sub("?", f"{gate.verdict}: {figure(gate)}"))
            if element != "skipped":
                outcome.set("type", gate.verdict)

"""A night as its page shows it: plain values for the template and for the scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batch_gen.regress.results import EARNEST, Approval, CaseResult, GateResult, Night

WORDS: Final = {"not_comparable": "not comparable", "infra": "not rendered"}
TONES: Final = {"pass": "good", "fail": "bad", "new": "warn", "infra": "warn", "quarantined": "warn"}


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case of the night.

    Attributes:
        number: Its place, for names of files and elements.
        result: What the night says.
        baseline: The approval that it is compared with.
        location: Which stage moved first, as `locate.Location.to_json`; None where there is nothing to compare.
        replayed: Whether it comes of replays, not only of what both nights kept.
        frames: `{"frame": 3, "new": path, "reference": path, "difference": path}` for every frame that is shown.
        equal: The frames are those of the baseline.
        problem: Why pictures are missing.
    """

    number: int
    result: CaseResult
    baseline: Approval | None = None
    location: Mapping[str, Any] | None = None
    replayed: bool = False
    frames: Sequence[Mapping[str, Any]] = ()
    equal: bool = False
    problem: str = ""

    @property
    def settings(self) -> str:
        """`64 x 48 x 5 at 16 frames/s, 4 steps, seed 7`."""
        request = self.result.request
        size = f"{request['width']} x {request['height']} x {request['num_frames']} at {request['fps']} frames/s"
        return f"{size}, {request['steps']} steps, seed {request['seed']}"

    @property
    def failing(self) -> list[GateResult]:
        """Gates that did not pass, the most earnest first."""
        return sorted((gate for gate in self.result.gates if gate.verdict != "pass"), key=_earnest)

    def data(self) -> dict[str, Any]:
        """What the scripts need."""
        curves = self.result.curves
        return {
            "number": self.number,
            "numFrames": self.result.num_frames,
            "firstBad": self.result.first_bad_frame,
            "worst": self.result.worst_frame,
            "equal": self.equal,
            "frames": [dict(frame) for frame in self.frames],
            "curves": {
                name: [round(value, 4) for value in getattr(curves, name)] for name in type(curves).model_fields
            },
            "steps": _step_errors(self.location),
        }


@dataclass(frozen=True, slots=True)
class NightView:
    """The whole page.

    Attributes:
        night: The night.
        cases: The most earnest first.
        past: The last nights on this platform, oldest first, this one last.
    """

    night: Night
    cases: Sequence[CaseView]
    past: Sequence[Night] = field(default_factory=tuple)

    @property
    def counts(self) -> list[tuple[str, int]]:
        """Cases by verdict, the most earnest first."""
        counted = Counter(case.verdict for case in self.night.cases)
        return [(verdict, counted[verdict]) for verdict in EARNEST if counted[verdict]]

    @property
    def since_green(self) -> list[tuple[str, str, str]]:
        """(what, then, now) for every difference of fingerprint and numerics."""
        return [split_difference(line) for line in self.night.since_green]

    @property
    def trend(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(case, (night, verdict) for each past night), cases in the order of the page; "" where a night lacks it."""
        rows = []
        for view in self.cases:
            name = view.result.case
            found = [(night.night, night.case(name)) for night in self.past]
            cells: list[tuple[str, str]] = [(label, "" if case is None else case.verdict) for label, case in found]
            rows.append((name, cells))
        return rows

    def data(self) -> dict[str, Any]:
        """What the scripts need."""
        return {
            "cases": [view.data() for view in self.cases],
            "nights": [night.night for night in self.past],
            "seconds": [_total_seconds(night) for night in self.past],
            "psnr": [_worst_psnr(night) for night in self.past],
            "failed": [sum(case.verdict not in ("pass", "quarantined") for case in night.cases) for night in self.past],
        }


def word(verdict: str) -> str:
    """A verdict for people."""
    return WORDS.get(verdict, verdict)


def tone(verdict: str) -> str:
    """`good`, `bad`, `warn` or `idle`: the colour of a verdict."""
    return TONES.get(verdict, "idle")


def in_order(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """The most earnest first, else as in the suite."""
    return sorted(cases, key=_earnest)


def split_difference(line: str) -> tuple[str, str, str]:
    """`numerics.mesh: a -> b` as (`numerics.mesh`, `a`, `b`); a line of another form stands alone."""
    what, found, values = line.partition(": ")
    then, arrow, now = values.partition(" -> ")
    return (what, then, now) if found and arrow else (line, "", "")


def _earnest(result: CaseResult | GateResult) -> int:
    return EARNEST.index(result.verdict)


def _total_seconds(night: Night) -> float | None:
    total = sum(sum(case.timings.values()) for case in night.cases)
    return round(total, 3) if total > 0 else None


def _worst_psnr(night: Night) -> float | None:
    values = [value for case in night.cases for value in case.curves.psnr]
    return round(min(values), 2) if values else None


def _step_errors(location: Mapping[str, Any] | None) -> list[tuple[int, float | None]]:
    """(step, relative error) of every step that was compared, in order."""
    stages = [] if location is None else location["stages"]
    return sorted((stage["step"], stage["distance"]) for stage in stages if stage.get("step") is not None)

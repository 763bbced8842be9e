"""What errors do over the steps of a clip: stay, jump at one step, or grow.

Errors must come from fixed inputs (teacher-forced steps): two free trajectories part by themselves, and their distance
says nothing about a step. Source of the rule: the step comparison of the Neuron equivalence guide (spike above 3 times
the median; accumulating when the last is above twice the first and 70 % of the pairs rise). One thing differs: errors
that rise evenly to more than 3 times their median are accumulating here, not a spike.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

SPIKE_FACTOR: Final = 3.0
GROWTH_FACTOR: Final = 2.0
RISING_SHARE: Final = 0.7
MIN_POINTS: Final = 3


class Kind(StrEnum):
    """What errors do over steps."""

    STABLE = "stable"
    SPIKE = "spike"
    ACCUMULATING = "accumulating"


@dataclass(frozen=True, slots=True)
class Trend:
    """A verdict over steps.

    Attributes:
        kind: What the errors do.
        step: Where the error is largest.
        largest, median: Of the errors.
        steps: How many errors were looked at; below three the verdict is stable unless one is not a number.
    """

    kind: Kind
    step: int
    largest: float
    median: float
    steps: int

    def to_json(self) -> dict[str, Any]:
        """JSON values; an error that is no number is null."""
        body = asdict(self)
        return {key: _plain(value) if isinstance(value, float) else value for key, value in body.items()}


def classify(errors: Mapping[int, float] | Sequence[float]) -> Trend:
    """Judge errors by step; a sequence counts steps from 0.

    Raises:
        ValueError: There is no error at all, or a negative one.
    """
    by_step = dict(errors) if isinstance(errors, Mapping) else dict(enumerate(errors))
    if not by_step:
        raise ValueError("a trend needs the error of one step at least")
    values = [by_step[step] for step in sorted(by_step)]
    if any(value < 0 for value in values):
        raise ValueError(f"errors are distances and cannot be negative: {min(values)}")
    bad = [step for step in sorted(by_step) if not math.isfinite(by_step[step])]
    if bad:
        finite = [value for value in values if math.isfinite(value)]
        return Trend(Kind.SPIKE, bad[0], math.inf, statistics.median(finite or [0.0]), len(values))
    worst = max(by_step, key=lambda step: by_step[step])
    return Trend(_kind(values), worst, by_step[worst], statistics.median(values), len(values))


def _kind(values: Sequence[float]) -> Kind:
    if len(values) < MIN_POINTS:
        return Kind.STABLE
    pairs = list(itertools.pairwise(values))
    rising = sum(later > earlier for earlier, later in pairs) >= RISING_SHARE * len(pairs)
    grows = rising and values[-1] > GROWTH_FACTOR * values[0]
    jumps = any(later > SPIKE_FACTOR * earlier for earlier, later in pairs)
    if max(values) > SPIKE_FACTOR * statistics.median(values) and (jumps or not grows):
        return Kind.SPIKE
    return Kind.ACCUMULATING if grows else Kind.STABLE


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None

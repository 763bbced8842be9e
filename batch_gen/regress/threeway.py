"""Three ways: ours in the working dtype, the reference in the working dtype, both against the float32 reference.

A distance between two programs of low precision says nothing about which one is right. So the error of ours is held
against the error that the same dtype costs the reference: rounding of the same computation falls differently, and no
more. Where the reference makes (almost) no error, as in float32, an absolute bound stands in; so it does where the
reference holds values that are no numbers, which measure nothing. Sources: docs/parity.md
(1.25 and the bounds), the Neuron equivalence guide (3 means a likely bug, cosine 0.95, factor 5 on the largest error,
overlap of the two error histograms).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from batch_gen.engine import Array
from batch_gen.regress.results import Judgement
from batch_gen.regress.vectors import cosine, relative_l2

PASS_RATIO: Final = 1.25
FAIL_RATIO: Final = 3.0
LARGEST_RATIO: Final = 5.0
MIN_COSINE: Final = 0.95
BINS: Final = 100


@dataclass(frozen=True, slots=True)
class Error:
    """How far a value is from the float32 reference.

    Attributes:
        l2: Relative L2.
        linf: Largest difference over the reference's largest value.
        cosine: Of the two as vectors.
    """

    l2: float
    linf: float
    cosine: float


NONE: Final = Error(0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One value, three ways.

    Attributes:
        name: Such as `guided velocity, last high-noise step`.
        step: Where it is of one step.
        ours, reference: Errors against the float32 reference.
        ratio, largest_ratio: Ours over the reference's, by L2 and by the largest difference; None when the reference
            makes no error, or one that is not finite.
        overlap: Bhattacharyya coefficient of the two error histograms; None where there is no ratio.
        bound: Relative L2 that passes whatever the reference does.
        verdict, why: `pass`, `warn` (more than rounding explains), `fail`.
    """

    name: str
    step: int | None
    ours: Error
    reference: Error
    ratio: float | None
    largest_ratio: float | None
    overlap: float | None
    bound: float
    verdict: Judgement
    why: str

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not finite is null."""
        body: dict[str, Any] = _finite(asdict(self))
        return body


def judge(name: str, values: tuple[Array, Array | None, Array], bound: float, step: int | None = None) -> Row:
    """Compare one value three ways.

    Args:
        name: Of the value.
        values: (ours, the reference in the working dtype or None where that is float32, the float32 reference).
        bound: Relative L2 that passes in any case.
        step: Of the clip.
    """
    ours, working, exact = values
    own = error_of(ours, exact)
    their = NONE if working is None else error_of(working, exact)
    ratio = _ratio(own.l2, their.l2)
    largest = _ratio(own.linf, their.linf)
    shared = overlap(ours, working, exact) if working is not None and ratio is not None else None
    verdict, why = _verdict(own, their, largest, bound)
    if not np.isfinite(exact).all():
        verdict, why = "fail", "the float32 reference holds values that are no numbers: nothing can be compared with it"
    return Row(name, step, own, their, ratio, largest, shared, bound, verdict, why)


def error_of(value: Array, exact: Array) -> Error:
    """The error of a value; infinite for other shapes and where either holds values that are not finite."""
    if value.shape != exact.shape or not (np.isfinite(value).all() and np.isfinite(exact).all()):
        return Error(math.inf, math.inf, 0.0)
    largest = float(np.abs(exact.astype(np.float64)).max())
    apart = float(np.abs(value.astype(np.float64) - exact).max())
    return Error(relative_l2(value, exact), apart / largest if largest > 0 else apart, cosine(value, exact))


def overlap(ours: Array, working: Array, exact: Array) -> float:
    """Bhattacharyya coefficient of the histograms of both errors: 1 when they are spread alike, 0 when apart."""
    if not (ours.shape == working.shape == exact.shape and np.isfinite(ours).all() and np.isfinite(working).all()):
        return 0.0
    errors = [np.abs(value.astype(np.float64) - exact).ravel() for value in (ours, working)]
    top = max(float(error.max()) for error in errors)
    if top == 0.0:
        return 1.0
    one, other = (np.histogram(error, bins=BINS, range=(0.0, top))[0] / error.size for error in errors)
    return float(np.sqrt(one * other).sum())


def _ratio(own: float, their: float) -> float | None:
    """Ours over the reference's; None where that is no yardstick."""
    return own / their if 0 < their < math.inf else None


def _verdict(own: Error, their: Error, largest: float | None, bound: float) -> tuple[Judgement, str]:
    if not math.isfinite(own.l2):
        return "fail", "another shape, or values that are no numbers"
    if own.l2 <= bound:
        return "pass", f"within {bound:.0e} of the float32 reference"
    if own.cosine < MIN_COSINE:
        return "fail", f"cosine {own.cosine:.3f} is below {MIN_COSINE}: another direction, not another rounding"
    ratio = _ratio(own.l2, their.l2)
    if ratio is None:
        verdict: Judgement = "warn" if own.l2 <= FAIL_RATIO * bound else "fail"
        why = f"{own.l2:.1e} from the float32 reference, {bound:.0e} is allowed"
        no_numbers = "the reference in this dtype holds values that are no numbers, or has another shape: no yardstick"
        return verdict, why if their.l2 == 0.0 else f"{no_numbers}; {why}"
    if ratio > FAIL_RATIO:
        return "fail", f"{ratio:.2f} times the reference's own error in this dtype: rounding does not explain it"
    if largest is not None and largest > LARGEST_RATIO:
        return "fail", f"the largest error is {largest:.1f} times the reference's: a few values are wrong"
    if ratio > PASS_RATIO:
        return "warn", f"{ratio:.2f} times the reference's own error in this dtype, {PASS_RATIO} is usual"
    return "pass", f"{ratio:.2f} times the reference's own error in this dtype"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

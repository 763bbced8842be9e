"""Arrays against arrays, as vectors in float64."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
WORST: Final = 1e30
"""Stands for an infinite error where figures go into JSON, which knows no infinity."""


def relative_l2(value: Array, reference: Array) -> float:
    """`|value - reference| / |reference|`; infinite when only the reference is zero."""
    distance = float(np.linalg.norm((value.astype(np.float64) - reference).ravel()))
    size = float(np.linalg.norm(reference.astype(np.float64).ravel()))
    return 0.0 if distance == 0.0 else distance / size if size > 0 else np.inf


def cosine(a: Array, b: Array) -> float:
    """Cosine of two arrays of one shape; 1 when both are zero, 0 when one is."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / size if size > 0 else float(not x.any() and not y.any())

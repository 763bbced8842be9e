"""The rule of three ways, on numbers that are easy to see through."""

import json

import numpy as np
import pytest

from batch_gen.regress.results import worst
from batch_gen.regress.threeway import judge

RNG = np.random.default_rng(3)
EXACT = RNG.standard_normal((16, 24, 40)).astype(np.float32)


def noisy(size, seed=1):
    """The exact value with noise of a relative size."""
    noise = np.random.default_rng(seed).standard_normal(EXACT.shape)
    return (EXACT + size * noise * np.linalg.norm(EXACT) / np.linalg.norm(noise)).astype(np.float32)


def spoiled(value, place, amount):
    """One value changed."""
    changed = value.copy()
    changed.flat[place] += amount
    return changed


CASES = {
    "float32, within its bound": (noisy(5e-6), None, "pass"),
    "float32, twice its bound": (noisy(2e-5), None, "warn"),
    "float32, far off": (noisy(1e-3), None, "fail"),
    "as far as the reference": (noisy(2e-2), noisy(2e-2, 2), "pass"),
    "better than the reference": (noisy(5e-3), noisy(2e-2, 2), "pass"),
    "a little more than the reference": (noisy(3e-2), noisy(2e-2, 2), "warn"),
    "four times the reference": (noisy(8e-2), noisy(2e-2, 2), "fail"),
    "one wrong value": (spoiled(noisy(2e-2), 7, 1.5), noisy(2e-2, 2), "fail"),
    "another sign": (-EXACT, noisy(2e-2, 2), "fail"),
    "another sign beside a very bad reference": (-EXACT, noisy(3.0, 2), "fail"),
    "not a number": (spoiled(EXACT, 0, np.nan), noisy(2e-2, 2), "fail"),
    "another shape": (EXACT[:2], noisy(2e-2, 2), "fail"),
    "beside a reference of no numbers": (noisy(2e-2), spoiled(EXACT, 0, np.nan), "fail"),
    "beside an infinite reference": (noisy(2e-2), spoiled(EXACT, 0, np.inf), "fail"),
    "beside a reference of another shape": (noisy(2e-2), EXACT[:2], "fail"),
    "a little outside the bound, beside a reference of no numbers": (noisy(2e-5), spoiled(EXACT, 0, np.nan), "warn"),
    "within the bound, beside a reference of no numbers": (noisy(5e-6), spoiled(EXACT, 0, np.nan), "pass"),
    "not a number, beside another": (spoiled(EXACT, 0, np.nan), spoiled(EXACT, 0, np.nan), "fail"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name):
    """Ours may err as the reference in the same dtype does, with a margin for chance; more is a warning, then a failure."""
    ours, working, verdict = CASES[name]
    row = judge("value", (ours, working, EXACT), 1e-5)
    assert (row.verdict, bool(row.why)) == (verdict, True)
    json.dumps(row.to_json(), allow_nan=False)


def test_the_figures():
    """Errors are relative to the float32 reference, ratios are ours over theirs, and like errors overlap."""
    row = judge("value", (noisy(4e-2), noisy(2e-2, 2), EXACT), 1e-5, step=3)
    assert (row.ours.l2, row.reference.l2) == (pytest.approx(4e-2, rel=1e-3), pytest.approx(2e-2, rel=1e-3))
    assert row.ratio == pytest.approx(2.0, rel=1e-2)
    assert row.step == 3
    like = judge("value", (noisy(2e-2, 5), noisy(2e-2, 2), EXACT), 1e-5)
    assert 0.9 < like.overlap <= 1.0
    assert row.overlap < like.overlap


def test_bytes_do_not_wrap():
    """uint8 frames are subtracted as numbers."""
    row = judge("frames", (np.full((2, 2), 255, np.uint8), None, np.zeros((2, 2), np.uint8)), 2e-3)
    assert row.ours.linf == 255.0
    assert row.verdict == "fail"


def test_the_worst_row_counts():
    """One failing row fails a tier, without rows nothing failed."""
    rows = [judge("value", (ours, working, EXACT), 1e-5) for ours, working, _ in CASES.values()]
    assert worst([row.verdict for row in rows]) == "fail"
    assert worst([row.verdict for row in rows if row.verdict != "fail"]) == "warn"
    assert worst([]) == "pass"


def test_a_reference_of_no_numbers_is_named():
    """There is no ratio to what is no number, and the reason says whose values they are."""
    row = judge("value", (noisy(2e-2), spoiled(EXACT, 0, np.nan), EXACT), 1e-5)
    assert (row.ratio, row.largest_ratio, row.overlap) == (None, None, None)
    assert "the reference in this dtype holds values that are no numbers" in row.why
    broken = judge("value", (EXACT, EXACT, spoiled(EXACT, 0, np.inf)), 1e-5)
    assert (broken.verdict, "the float32 reference holds" in broken.why) == ("fail", True)

from __future__ import annotations

import inspect

import pytest

from batch_gen import errors
from batch_gen.errors import KINDS, BatchGenError, ClipFailed, Fault, ManifestError, RetryClass

CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, BatchGenError) and found is not BatchGenError
]


def test_tree_is_drawn() -> None:
    """The module's docstring draws every exception of the tree."""
    drawn = inspect.getdoc(errors) or ""
    assert [found.__name__ for found in CLASSES if f"- {found.__name__} " not in drawn] == []


def test_exit_codes_are_the_designs() -> None:
    """Kinds lead to the exit codes of the design's table and to no other."""
    assert {kind.exit_code for kind in KINDS.values()} == {1, 2, 3, 4, 5, 6, 75}
    assert {name: KINDS[name].exit_code for name in ("bug", "manifest", "nonfinite", "stopped", "drained")} == {
        "bug": 1,
        "manifest": 2,
        "nonfinite": 3,
        "stopped": 4,
        "drained": 75,
    }


def test_only_retryable_kinds_ask_to_be_started_again() -> None:
    """Exit 75 belongs to kinds where another start can help, and only to them."""
    again = {RetryClass.TRANSIENT, RetryClass.DEVICE, RetryClass.HOST}
    assert all((kind.retry in again) == (kind.exit_code == errors.EXIT_AGAIN) for kind in KINDS.values())


def test_every_kind_has_advice() -> None:
    """Each kind comes with a sentence on what to do."""
    assert all(kind.hint for kind in KINDS.values())


def test_error_knows_its_code() -> None:
    """An exception takes retry class, exit code and hint from the table."""
    error = ClipFailed("flat", "fox: every frame is one colour")
    assert (error.kind, error.retry, error.exit_code) == ("flat", RetryClass.CLIP, 3)
    assert str(error) == "fox: every frame is one colour"
    assert error.hint == KINDS["flat"].hint


def test_unknown_kind_is_refused() -> None:
    """A kind that the table lacks is a programmer's mistake."""
    with pytest.raises(ValueError, match="unknown error kind 'explosion'"):
        BatchGenError("boom", kind="explosion")


def test_fault_reads_as_a_sentence() -> None:
    """A fault says file, row, column, value and what is nearest."""
    fault = Fault("a.parquet", 17, "width", "830", "is not a multiple of 16; nearest are 816 and 832")
    assert str(fault) == "a.parquet, row 17, width = 830: is not a multiple of 16; nearest are 816 and 832"
    assert str(Fault("a.parquet", None, None, None, "is empty")) == "a.parquet: is empty"
    assert fault.to_json()["row"] == 17


def test_many_faults_are_cut_and_counted() -> None:
    """A message shows 40 faults and says how many there are in all."""
    faults = [Fault("a.parquet", row, "width", "1", "is odd") for row in range(60)]
    lines = str(ManifestError(faults, num_faults=1_000_000)).splitlines()
    assert lines[0].startswith("1,000,000 faults in the manifest")
    assert len(lines) == errors.MAX_FAULTS_SHOWN + 2
    assert lines[-1] == "  ... and 999,960 more; --json lists them"

"""Speed and memory against the last seven nights, with clocks that move when told."""

from __future__ import annotations

import pytest

from batch_gen.fake_engine import FakeOptions
from batch_gen.regress.approve import Decision, approve
from batch_gen.regress.results import last_nights
from batch_gen.regress.speed import WINDOW, case_speed, comparable, night_memory, night_speed
from batch_gen.regress.suite import Limits
from tests.regression import make_setup, render_night

USUAL = FakeOptions(text_s=0.5, step_s=2.0, slab_s=1.0)


@pytest.fixture(scope="module")
def week(tmp_path_factory):
    """Seven recorded nights with approved baselines."""
    setup = make_setup(tmp_path_factory.mktemp("week"))
    approve(setup.store, render_night(setup, "n0", USUAL), [], Decision("Kim", "first"))
    for number in range(1, 7):
        render_night(setup, f"n{number}", USUAL)
    return setup


def red(night):
    """Names of the red gates of the night and of its cases."""
    own = {gate.gate for gate in night.gates if gate.verdict == "fail"}
    return own, {gate.gate for case in night.cases for gate in case.gates if gate.verdict == "fail"}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("text", FakeOptions(text_s=1.5, step_s=2.0, slab_s=1.0)),
        ("denoise", FakeOptions(text_s=0.5, step_s=3.5, slab_s=1.0)),
        ("decode", FakeOptions(text_s=0.5, step_s=2.0, slab_s=2.0)),
    ],
)
def test_a_slow_stage_is_named(week, stage, options):
    """After seven recorded nights, a planted slow-down in one stage is red for that stage and for no other."""
    night = render_night(week, f"n7-{stage}", options)
    own, cases = red(night)
    assert night.exit_code == 5
    assert own - {"speed.total"} == {f"speed.{stage}"}
    assert cases - {"speed.total"} == {f"speed.{stage}"}
    gate = next(gate for gate in night.gates if gate.gate == f"speed.{stage}")
    assert gate.note.startswith(f"stage {stage}: ")
    assert "median of 7 nights" in gate.note


def test_a_usual_night_is_green(week):
    """The same seconds as ever pass, and every stage was judged."""
    night = render_night(week, "n7-usual", USUAL)
    assert night.exit_code == 0
    assert {gate.gate for gate in night.gates} == {"speed.text", "speed.denoise", "speed.decode", "speed.total"}
    assert {gate.verdict for gate in night.gates} == {"pass"}


def test_small_losses_are_noise(week):
    """Less than the floor in seconds is never slow, whatever its share."""
    night = render_night(week, "n7-floor", FakeOptions(text_s=0.6, step_s=2.0, slab_s=1.0))
    assert night.exit_code == 0


def test_too_few_nights_are_no_verdict(week):
    """Speed without history is neither green nor red."""
    nights = last_nights(week.store, "small", before="n2")
    (first, *_) = case_speed(nights[0].cases[0], nights, Limits())
    assert (first.verdict, first.note) == ("not_comparable", "2 of 3 nights to compare with")


def test_only_the_last_seven_nights_count(week):
    """Older nights fall out of the median."""
    nights = last_nights(week.store, "small", before="n7")
    slow = [
        night.model_copy(update={"night": f"a{k}", "cases": tuple(_slower(c) for c in night.cases)})
        for k, night in enumerate(nights)
    ]
    assert len(nights) == WINDOW
    gates = {gate.gate: gate for gate in night_speed(nights[-1].cases, [*slow, *nights], Limits())}
    assert gates["speed.decode"].note == "stage decode: 6 s, median of 7 nights 6 s"


def test_other_machines_are_not_compared(week):
    """Another mesh, thread count or chip has seconds of its own; another torch is what shall be seen."""
    nights = last_nights(week.store, "small", before="n7")
    numerics = nights[0].fingerprint.numerics
    key = nights[0].platform.key
    assert len(comparable(nights, numerics, key)) == len(nights)
    assert comparable(nights, {**numerics, "mesh": "tp=2"}, key) == []
    assert comparable(nights, numerics, "cuda_h200_torch2.13") == []
    assert len(comparable(nights, {**numerics, "torch": "9"}, key.replace("_torch2.13", "_torch9.0"))) == len(nights)


def test_a_case_that_was_not_rendered_is_left_out_of_the_sums(week):
    """Sums are taken over the cases that all nights have."""
    nights = last_nights(week.store, "small", before="n7")
    dead = nights[-1].cases[1].model_copy(update={"timings": {}})
    gates = {gate.gate: gate for gate in night_speed([nights[-1].cases[0], dead], nights, Limits())}
    assert (gates["speed.decode"].value, gates["speed.decode"].verdict) == (3.0, "pass")


def test_memory_is_held_against_the_median(week):
    """Rank 0 that needs more than a tenth more than usual is red; an engine that does not say is not asked."""
    nights = [_heavy(night, 1000) for night in last_nights(week.store, "small", before="n7")]
    fat, usual = _heavy(nights[0], 1200).cases, nights[0].cases
    assert [gate.verdict for gate in night_memory(fat, nights, Limits())] == ["fail"]
    assert [gate.verdict for gate in night_memory(usual, nights, Limits())] == ["pass"]
    assert night_memory(_heavy(nights[0], 0).cases, nights, Limits()) == []


def test_memory_of_other_cases_is_not_compared(week):
    """A case that was not rendered, or whose request was another one, makes a night's peak another figure."""
    nights = [_heavy(night, 1000) for night in last_nights(week.store, "small", before="n7")]
    fat = _heavy(nights[0], 1200).cases
    for change in ({"request_digest": "0" * 64}, {"timings": {}}):
        others = [_changed(night, **change) for night in nights]
        assert [gate.verdict for gate in night_memory(fat, others, Limits())] == ["not_comparable"]
        mixed = [*others[:4], *nights[4:]]
        assert [gate.verdict for gate in night_memory(fat, mixed, Limits())] == ["fail"]
    bigger = [_changed(night, request_digest="0" * 64, peak_rss_bytes=9000) for night in nights[:4]]
    assert [gate.verdict for gate in night_memory(fat, [*bigger, *nights[4:]], Limits())] == ["fail"]


def _changed(night, **changes):
    first, *rest = night.cases
    return night.model_copy(update={"cases": (first.model_copy(update=changes), *rest)})


def _slower(case):
    return case.model_copy(update={"timings": {stage: 10 * seconds for stage, seconds in case.timings.items()}})


def _heavy(night, peak_bytes):
    cases = tuple(case.model_copy(update={"peak_rss_bytes": peak_bytes}) for case in night.cases)
    return night.model_copy(update={"cases": cases})

"""A night: what is new, red, not rendered or quarantined, its exit code, and what is written and said."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import date

import pytest

from batch_gen.config import Mesh
from batch_gen.engine import Engine
from batch_gen.errors import ClipFailed, DiskFull, EngineLost, StoreError, UsageError
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.notify import Notifier
from batch_gen.regress.approve import Decision, approve
from batch_gen.regress.artifacts import load_arrays, load_frames
from batch_gen.regress.night import broken_case, check_name, run_night, tell
from batch_gen.regress.quarantine import apply_quarantine
from batch_gen.regress.render import Bench
from batch_gen.regress.results import GateResult, list_nights, load_night, night_key
from batch_gen.regress.suite import Quarantine
from batch_gen.regress.summary import closing, metric_line
from tests.regression import fake_bench, make_setup, render_night, store_of

KIM = Decision("Kim", "looked at every clip")


@pytest.fixture
def setup(tmp_path):
    """A suite of two cases with approved baselines from night n0."""
    setup = make_setup(tmp_path)
    approve(setup.store, render_night(setup, "n0"), [], KIM)
    return setup


def gate_of(case, name):
    """One gate of a case."""
    return next(gate for gate in case.gates if gate.gate == name)


def test_a_case_without_a_baseline_is_new(tmp_path):
    """Nothing to compare with is exit 6 and never a pass; the closing lines say how to approve."""
    setup = make_setup(tmp_path)
    night = render_night(setup, "n0")
    assert (night.verdict, night.exit_code) == ("new", 6)
    assert {case.verdict for case in night.cases} == {"new"}
    assert "batch-gen regress approve small" in closing(night, setup.store.url)


def test_an_unchanged_render_passes_the_exact_gate(setup):
    """The same code on the same machine is green, gate by gate, and stores no second copy of anything."""
    before = {listed.key for listed in store_of(setup).list("regress/small/objects/")}
    night = render_night(setup, "n1")
    assert (night.verdict, night.exit_code) == ("pass", 0)
    assert all(gate_of(case, "frames_hash").verdict == "pass" for case in night.cases)
    assert {listed.key for listed in store_of(setup).list("regress/small/objects/")} == before


def test_what_is_kept_is_what_was_rendered(setup):
    """Frames and latents come back bit for bit, as they were before any lossy encoding."""
    night = render_night(setup, "n1")
    rendered, _ = fake_bench().render(setup.requests[0])
    artifacts = night.cases[0].artifacts
    assert (load_frames(setup.store, artifacts.frames) == rendered.frames).all()
    assert (load_arrays(setup.store, artifacts.arrays)["latents"] == rendered.latents).all()
    assert load_night(setup.store, "small", "n1") == night


def test_a_regression_is_exit_5_and_says_where(setup):
    """Other pixels are red with the frame, and one changed case does not colour the other."""
    noisy = FakeOptions(noise=40)
    bench = Bench(start=lambda: _OneCase(FakeEngine(), FakeEngine(noisy), "still"))
    night = run_night(setup, bench, "n1")
    base, still = night.cases
    assert (night.exit_code, base.verdict, still.verdict) == (5, "pass", "fail")
    assert still.first_bad_frame == 0
    assert gate_of(still, "psnr_min").frame == still.worst_frame
    assert len(still.curves.psnr) == still.num_frames == 9


def test_a_mesh_change_is_neither_green_nor_red_for_the_exact_gate(setup):
    """Rounding of another mesh passes the numeric gates; the exact gate answers that it cannot be asked."""
    meshed = replace(setup, settings=setup.settings.model_copy(update={"mesh": Mesh(tp=2, cp=1, cfg=1)}))
    night = render_night(meshed, "n1", FakeOptions(noise=0.01))
    assert (night.verdict, night.exit_code) == ("pass", 0)
    for case in night.cases:
        exact = gate_of(case, "frames_hash")
        assert (exact.verdict, exact.note) == ("not_comparable", "not comparable: mesh")
        assert gate_of(case, "latents_cosine").verdict == gate_of(case, "psnr_min").verdict == "pass"
    assert night.since_green == ()
    assert "numerics.mesh: tp=2,cp=1,cfg=1 -> tp=1,cp=1,cfg=1" in render_night(setup, "n2").since_green


def test_a_crashed_case_does_not_stop_the_rest(setup):
    """An engine that dies on one case is started again; the case is infra, exit 75, and no visual gate speaks."""
    starts = []

    def start() -> Engine:
        starts.append(1)
        return FakeEngine(FakeOptions(faults={"base": "device"}))

    night = run_night(setup, Bench(start=start), "n1")
    base, still = night.cases
    assert (base.verdict, still.verdict, night.exit_code) == ("infra", "pass", 75)
    assert [gate.gate for gate in base.gates] == ["render"]
    assert base.error is not None
    assert base.error.kind == "device"
    assert len(starts) == 3  # two attempts at the case, and one engine for the rest


def test_an_engine_that_never_starts_is_infra(setup):
    """No case is rendered, none is called a regression."""

    def start() -> Engine:
        raise EngineLost("device", "no such core")

    night = run_night(setup, Bench(start=start), "n1")
    assert (night.verdict, night.exit_code) == ("infra", 75)
    assert {case.verdict for case in night.cases} == {"infra"}


def test_latents_without_numbers_are_a_regression(setup):
    """A pipeline that yields NaN is red, not infra: no restart of the machine would mend it."""
    night = render_night(setup, "n1", FakeOptions(faults={"base": "nan"}))
    assert (night.cases[0].verdict, night.cases[1].verdict, night.exit_code) == ("fail", "pass", 5)
    assert gate_of(night.cases[0], "render").note.startswith("nonfinite")


def test_a_keeper_that_fails_is_infra(setup):
    """When ffmpeg or the disk cannot take the frames, the machine is to blame, not the clip."""
    facts = {"case": "base", "request": setup.requests[0].to_json(), "request_digest": setup.requests[0].digest}
    errors = [ClipFailed("encode", "ffmpeg died"), DiskFull("no space"), StoreError("away"), ClipFailed("verify", "x")]
    assert [broken_case(setup, facts, error).verdict for error in errors] == ["infra", "infra", "infra", "fail"]


def test_a_regression_beside_an_infra_failure_is_a_regression(setup):
    """A red clip stays red, whatever else the machine did."""
    night = render_night(setup, "n1", FakeOptions(faults={"base": "nan", "still": "device"}))
    assert (night.cases[1].verdict, night.exit_code) == ("infra", 5)


def test_a_lost_frame_is_found_before_anything_else(setup):
    """With frames missing nothing is paired: the frame count is red and the pixel gates are not asked."""
    night = render_night(setup, "n1", FakeOptions(faults={"base": "short"}))
    base = night.cases[0]
    assert gate_of(base, "frame_count").verdict == "fail"
    assert gate_of(base, "psnr_min").note == "not comparable: frame count"


def test_a_changed_case_is_new_with_the_difference(setup, tmp_path):
    """A row that asks for something else has no baseline, and the message says what changed."""
    steps = make_setup(tmp_path, override=("steps=6",))
    night = render_night(steps, "n1")
    assert night.exit_code == 6
    assert gate_of(night.cases[0], "baseline").note.endswith("steps: 4 -> 6")


def test_damaged_baselines_are_infra(setup):
    """A baseline that is not what was approved is no visual regression."""
    kept = load_night(setup.store, "small", "n0").cases[0].artifacts.frames
    store_of(setup).delete(kept.key)
    store_of(setup).put(kept.key, b"rust")
    bench = Bench(start=lambda: FakeEngine(FakeOptions(noise=40)))
    night = run_night(setup, bench, "n1")
    assert night.cases[0].verdict == "infra"
    assert "damaged" in gate_of(night.cases[0], "render").note


def test_a_state_is_told_when_it_changes_and_not_again(setup, tmp_path):
    """Red, still red, green: two lines for three nights."""
    red = FakeOptions(noise=40)
    nights = [render_night(setup, name, options) for name, options in (("n1", None), ("n2", red), ("n3", red))]
    nights.append(render_night(setup, "n4"))
    assert [len(night.changed) for night in nights] == [2, 2, 0, 2]
    assert nights[1].changed[0] == "base: pass -> fail"
    said = io.StringIO()
    told = [tell(night, Notifier("-", said)) for night in nights]
    assert told == [True, True, False, True]
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert [line["verdict"] for line in lines] == ["pass", "fail", "pass"]


def test_quarantine_has_an_owner_and_an_end(tmp_path):
    """A quarantined case still runs and says what it would; its failures count again after the last day."""
    entry = {"case": "base", "owner": "Kim", "why": "flaky driver", "until": "2999-01-01"}
    setup = make_setup(tmp_path, {"quarantine": [entry]})
    approve(setup.store, render_night(setup, "n0"), [], KIM)
    night = render_night(setup, "n1", FakeOptions(faults={"base": "short"}))
    base = night.cases[0]
    assert (base.verdict, night.verdict, night.exit_code) == ("quarantined", "quarantined", 0)
    assert "owner Kim" in gate_of(base, "frame_count").note
    red = GateResult(gate="psnr_min", level="near", verdict="fail")
    expired = Quarantine.model_validate({**entry, "until": "2026-01-31"})
    (turned,) = apply_quarantine([red], expired, date(2026, 2, 1))
    assert turned.verdict == "fail"
    assert "ended on 2026-01-31" in turned.note
    assert apply_quarantine([red], expired, date(2026, 1, 31))[0].verdict == "quarantined"


def test_junit_tells_regressions_from_infra(setup):
    """A red gate is a failure, a clip that was not rendered an error, and what cannot be asked is skipped."""
    render_night(setup, "n1", FakeOptions(faults={"base": "nan", "still": "device"}))
    blob = setup.store.get(night_key("small", "n1", "junit.xml"))
    root = ET.fromstring(blob.body)
    outcomes = {suite.get("name"): (suite.get("failures"), suite.get("errors")) for suite in root.iter("testsuite")}
    assert outcomes["small.base"] == ("1", "0")
    assert outcomes["small.still"] == ("0", "1")


def test_markdown_names_case_gate_and_frame(setup):
    """The page of a red night can be read without any tool."""
    render_night(setup, "n1", FakeOptions(noise=40))
    page = setup.store.get(night_key("small", "n1", "summary.md")).body.decode()
    assert "| base | fail | fail: frames_hash 0, limit 1" in page
    assert "## Changed since the night before" in page


def test_nights_are_written_once(setup):
    """A name that is taken, or that is none, is refused before anything is rendered."""
    assert list_nights(setup.store, "small") == ["n0"]
    with pytest.raises(UsageError, match="written once"):
        check_name(setup, "n0")
    with pytest.raises(UsageError, match="expected letters"):
        check_name(setup, "a/b")


def test_the_alarm_hears_of_every_finished_night(setup):
    """The metric counts a night that was rendered, red or green, and not one that was not."""
    green = json.loads(metric_line(render_night(setup, "n1")))
    dead = json.loads(metric_line(render_night(setup, "n2", FakeOptions(faults={"*": "device"}))))
    assert (green["regression_finished"], green["regression_pass"]) == (1, 2)
    assert (dead["regression_finished"], dead["regression_infra"]) == (0, 2)


class _OneCase:
    """An engine that gives one case to another engine."""

    def __init__(self, engine: FakeEngine, other: FakeEngine, case: str) -> None:
        self._engines = {False: engine, True: other}
        self._case = case

    def text(self, requests):
        """See `Engine.text`."""
        return self._engines[requests[0].clip_id == self._case].text(requests)

    def denoise(self, request, text, options):
        """See `Engine.denoise`."""
        return self._engines[request.clip_id == self._case].denoise(request, text, options)

    def decode(self, request, latents):
        """See `Engine.decode`."""
        return self._engines[request.clip_id == self._case].decode(request, latents)

    def describe(self):
        """See `Engine.describe`."""
        return self._engines[False].describe()

    def close(self):
        """Nothing to free."""

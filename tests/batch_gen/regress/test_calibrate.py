"""Noise is learnt from repeats, and a limit inside it is refused."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest

from batch_gen.errors import UsageError
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.regress.calibrate import calibrate, conclude, with_margin, with_proposals
from batch_gen.regress.gates import Clip, judge_clip
from batch_gen.regress.render import Bench
from batch_gen.regress.suite import SuiteFile
from tests.making import FakeClock
from tests.regression import make_setup


def noisy_benches(noise, first_seed=1):
    """Opens benches whose engines have noise, each with another seed."""
    seeds = count(first_seed)

    @contextmanager
    def open_bench(setup):
        clock, options = FakeClock(), FakeOptions(noise=noise, noise_seed=next(seeds), step_s=1.0)
        yield Bench(start=lambda: FakeEngine(options, clock.pass_s), now=clock)

    return open_bench


def test_a_machine_that_repeats_itself_keeps_its_limits(tmp_path):
    """Equal bits three times: nothing is proposed, nothing refused, and limits are never made narrower."""
    found = calibrate(make_setup(tmp_path), 3, noisy_benches(0))
    assert found.identical
    assert (found.proposals, found.refused) == ({}, ())
    assert found.noise["psnr_min"] == 100.0
    assert found.speed == {"night": 0.0, "case": 0.0}


def test_limits_inside_the_noise_are_refused_with_a_proposal(tmp_path):
    """Seeded noise of some levels: what the repeats do to each other, the proposed limits must allow, twice over."""
    setup = make_setup(tmp_path)
    found = calibrate(setup, 3, noisy_benches(12))
    assert not found.identical
    assert found.proposals["exact"] is False
    assert found.noise["psnr_min"] < 35
    assert found.proposals["psnr_min"] == pytest.approx(found.noise["psnr_min"] - 6, abs=0.01)
    assert any(line.startswith("psnr_min 35.0: noise") for line in found.refused)


def test_proposed_limits_pass_renders_that_were_not_measured(tmp_path):
    """Two more repeats with other seeds are green under the proposals, and were red without them."""
    setup = make_setup(tmp_path)
    proposed = with_proposals(setup.file, calibrate(setup, 4, noisy_benches(12)))
    file = SuiteFile.model_validate(proposed)
    rendered = []
    for seed in (50, 60):
        with noisy_benches(12, seed)(setup) as bench:
            rendered.append(bench.render(setup.requests[0])[0])
    first, second = (Clip(one.request.prompt, one.frames, one.latents, setup.fingerprint) for one in rendered)
    assert {gate.verdict for gate in judge_clip(second, first, setup.file.limits_of("base")).gates} >= {"fail"}
    after = judge_clip(second, first, file.limits_of("base")).gates
    assert {gate.gate for gate in after if gate.verdict == "fail"} == set()


def test_the_same_seeds_give_the_same_proposals(tmp_path):
    """Calibration has no chance of its own."""
    setup = make_setup(tmp_path)
    one, two = (calibrate(setup, 2, noisy_benches(12)) for _ in range(2))
    assert one == two


def test_uneven_seconds_widen_the_speed_limits(tmp_path):
    """Rounds of 10, 12 and 14 seconds ask for more than ten percent."""
    setup = make_setup(tmp_path)
    with noisy_benches(0)(setup) as bench:
        once = [bench.render(request)[0] for request in setup.requests]
    rounds = [[replace(one, timings={"denoise": seconds}) for one in once] for seconds in (10.0, 12.0, 14.0)]
    found = conclude(setup, rounds, {})
    assert found.speed["night"] == pytest.approx(2 / 12, abs=1e-3)
    assert found.proposals == {"speed_ratio": pytest.approx(1.5)}
    assert found.refused == ()


def test_the_bf16_yardstick_is_measured_per_case(tmp_path):
    """A render in bfloat16 gives each case its own error, which goes into the file as a limit of the case."""
    setup = make_setup(tmp_path)
    asked = []

    @contextmanager
    def open_bench(which):
        asked.append(which.settings.dtype)
        noise = 5.0 if which.settings.dtype == "bfloat16" else 0.0
        with noisy_benches(noise)(which) as bench:
            yield bench

    found = calibrate(setup, 2, open_bench, bf16=True)
    assert asked == ["float32", "float32", "bfloat16"]
    assert set(found.bf16_error) == {"base", "still"}
    file = SuiteFile.model_validate(with_proposals(setup.file, found))
    assert file.limits_of("base").bf16_error == found.bf16_error["base"] > 0


def test_one_render_has_no_noise(tmp_path):
    """A single repeat is refused, and so is a yardstick without a better reference."""
    setup = make_setup(tmp_path)
    with pytest.raises(UsageError, match="at least 2"):
        calibrate(setup, 1, noisy_benches(0))
    lower = make_setup(tmp_path, dtype="bfloat16")
    with pytest.raises(UsageError, match="--dtype float32"):
        calibrate(lower, 2, noisy_benches(0), bf16=True)


def test_limits_of_a_single_case_are_held_against_its_own_noise(tmp_path):
    """A case that asks for 90 dB where its repeats agree to less is refused by name, and its own limit is proposed."""
    setup = make_setup(tmp_path, {"limits": {"exact": False}, "cases": {"still": {"psnr_min": 90}}})
    found = calibrate(setup, 2, noisy_benches(1))
    assert "psnr_min" not in found.proposals
    assert found.case_proposals["still"]["psnr_min"] < found.noise["psnr_min"] + 20 < 90
    assert [line for line in found.refused if line.startswith("cases.still.psnr_min 90.0: noise")]
    file = SuiteFile.model_validate(with_proposals(setup.file, found))
    assert file.limits_of("still").psnr_min == found.case_proposals["still"]["psnr_min"]
    assert file.limits_of("base").psnr_min == 35


def test_the_noise_of_a_case_with_limits_of_its_own_widens_nobody_elses(tmp_path):
    """A noisy case that has a wide limit of its own leaves the suite's limit alone."""
    own = {"psnr_min": 1, "ssim_min": -1, "good_psnr": 1, "good_ssim": -1}
    setup = make_setup(tmp_path, {"limits": {"exact": False}, "cases": dict.fromkeys(("base", "still"), own)})
    found = calibrate(setup, 2, noisy_benches(12))
    assert found.noise["psnr_min"] < 35
    assert not {*found.proposals} & {*own}
    assert not [line for line in found.refused if "psnr" in line or "ssim" in line]


@pytest.mark.parametrize(
    ("name", "noise", "limit"),
    [
        ("ssim_min", -0.015, -1.0),
        ("prompt_following", 3, 4),
        ("psnr_min", 4.0, 0.0),
        ("good_psnr", 4.0, 3.0),
        ("good_ssim", -0.5, -1.0),
        ("latents_cosine", -0.2, -1.0),
        ("vmaf", 10.0, 0.0),
        ("latents_error", 0.1, 0.2),
    ],
)
def test_a_proposal_is_a_value_that_the_limit_may_have(name, noise, limit):
    """However strong the noise, what is proposed lies inside the bounds of its limit."""
    assert with_margin(name, noise) == limit
    SuiteFile.model_validate({"limits": {name: limit}})


def test_proposals_of_strong_noise_are_read_back(tmp_path):
    """The file that calibration writes for a machine of pure noise is a file that a suite takes."""
    setup = make_setup(tmp_path)
    found = calibrate(setup, 2, noisy_benches(250))
    assert SuiteFile.model_validate(with_proposals(setup.file, found)).limits_of("base").ssim_min < 0.95

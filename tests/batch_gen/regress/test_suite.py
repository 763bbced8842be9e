"""A suite: its limits, what they may say, and the class of machine that baselines hold for."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch_gen.errors import ConfigError, UsageError
from batch_gen.regress.suite import SuiteFile, platform_of, prepare_suite, read_suite_file, slug, suite_name
from tests.regression import make_setup, write_suite

QUARANTINE = {"case": "base", "owner": "Kim", "why": "flaky", "until": "2027-01-01"}


def test_limits_come_from_the_file_beside_the_manifest(tmp_path):
    """The suite's limits hold for all cases, a case's own for that case, the rest are the defaults."""
    limits = {"suite": "nightly", "limits": {"psnr_min": 30}, "cases": {"still": {"psnr_min": 45}}}
    setup = make_setup(tmp_path, limits)
    assert setup.name == "nightly"
    found = [setup.file.limits_of(case).psnr_min for case in ("base", "still")]
    assert found == [30, 45]
    assert setup.file.limits_of("base").ssim_min == 0.95


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"limits": {"psnr": 30}}, "limits.psnr: Extra inputs"),
        ({"cases": {"base": {"ssim_min": 7}}}, "cases.base.ssim_min: Input should be less"),
        (
            {"quarantine": [{"case": "base", "why": "flaky", "until": "2027-01-01"}]},
            "quarantine.0.owner: Field required",
        ),
        ({"cases": {"bse": {"psnr_min": 40}}}, "limits name bse, but the suite has base, still"),
        ({"suit": "x"}, "suit: Extra inputs"),
        ({"limits": {"drift_luma": float("inf")}}, "limits.drift_luma: Input should be a finite number"),
        ({"limits": {"flicker": float("inf")}}, "limits.flicker: Input should be a finite number"),
        ({"cases": {"base": {"speed_ratio": float("inf")}}}, "cases.base.speed_ratio: Input should be a finite number"),
        ({"limits": {"psnr_min": float("nan")}}, "limits.psnr_min: Input should be a finite number"),
        ({"limits": {"exact": "no"}}, "limits.exact: Input should be a valid boolean"),
        ({"limits": {"exact": 0}}, "limits.exact: Input should be a valid boolean"),
        ({"limits": {"psnr_min": "35"}}, "limits.psnr_min: Input should be a valid number"),
        ({"limits": {"black": True}}, "limits.black: Input should be a valid integer"),
        ({"limits": {"psnr": 1, "vmaf": -1}}, "limits.vmaf: .*; limits.psnr: Extra inputs"),
        ({"quarantine": [QUARANTINE, {**QUARANTINE, "until": "2029-01-01"}]}, "quarantine: base stands there twice"),
        ({"quarantine": [{**QUARANTINE, "until": 20290101}]}, "quarantine.0.until: 20290101 is no day"),
    ],
)
def test_wrong_limits_are_refused_before_anything_is_rendered(tmp_path, limits, words):
    """A typing error must not let a limit slip."""
    with pytest.raises(ConfigError, match=words) as error:
        make_setup(tmp_path, limits)
    assert ": :" not in error.value.message
    assert "Value error" not in error.value.message


def test_the_suite_that_ships_is_whole(tmp_path):
    """Its limits are read, name its cases, and keep the inner values of every step."""
    manifest = Path(__file__).parents[3] / "manifests" / "regression.parquet"
    setup = prepare_suite([str(manifest)], {"model": "fake", "out": f"memory://{tmp_path}"})
    assert (setup.name, len(setup.requests), setup.file.taps) == ("regression", 10, "all")


def test_a_suite_needs_a_name_that_is_a_key(tmp_path):
    """Names become folders of a store."""
    with pytest.raises(UsageError, match="suite 'a/b'"):
        make_setup(tmp_path, {"suite": "a/b"})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *((source, "has no name; expected the suite's manifest") for source in ("", ".", "..", "/")),
        ("regression", "no such file or folder; expected the suite's manifest, .* not the suite's name"),
    ],
)
def test_a_manifest_is_wanted_where_one_is(source, words):
    """What cannot be a manifest is refused with what is wanted, and so is the suite's name."""
    with pytest.raises(UsageError, match=words):
        prepare_suite([source], {"model": "fake"})


def test_a_suite_goes_by_its_name_or_its_manifest(tmp_path):
    """The limits beside the manifest may name it; a folder of files is a manifest too."""
    path = write_suite(tmp_path, {"suite": "nightly"})
    folder = tmp_path / "parts"
    assert suite_name("small") == "small"
    assert suite_name(str(path)) == "nightly"
    assert suite_name(f"{folder}/") == "parts"
    for text in ("", ".", "..", "/", "a b"):
        with pytest.raises(UsageError):
            suite_name(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limits: {psnr_min: 40, psnr_min: 10}", "'psnr_min' stands there twice"),
        ("cases: {}\ncases: {}", "'cases' stands there twice"),
        ("? [a]\n: 1", "unhashable key"),
        ("- a", "valid dictionary"),
    ],
)
def test_limits_that_are_no_strict_yaml_are_refused(tmp_path, text, words):
    """A later key never wins in silence; what is no mapping is refused with the file's name."""
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_suite_file(str(path))
    assert str(path) in error.value.message


def test_a_missing_limits_file_is_refused(tmp_path):
    """A file that is named must be there; no file at all means the defaults."""
    path = write_suite(tmp_path)
    flags = {"model": "fake", "out": f"memory://{tmp_path}", "limits": str(tmp_path / "none.yaml")}
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        prepare_suite([str(path)], flags)
    with pytest.raises(ConfigError, match="no such object"):
        prepare_suite([str(path)], {**flags, "limits": f"file://{tmp_path}/none.yaml"})
    far = prepare_suite([str(path)], {**flags, "limits": f"file://{tmp_path}/small.yaml"})
    assert far.file == SuiteFile()
    path.with_suffix(".yaml").unlink()
    assert prepare_suite([str(path)], {**flags, "limits": None}).file == SuiteFile()


def test_the_platform_has_device_class_and_torch_minor(tmp_path):
    """Patches of torch share baselines, minors do not; processors go by their class."""
    platform = platform_of(make_setup(tmp_path).settings)
    assert platform.device == "cpu"
    assert platform.torch.count(".") == 1
    assert platform.key == f"cpu_{platform.chip}_torch{platform.torch}"
    assert slug("Intel(R) Xeon(R) Platinum 8488C @ 2.40GHz") == "intel-r-xeon-r-platinum-8488c-2.40ghz"


def test_taps_may_be_few_for_large_models(tmp_path):
    """All steps, the ends and the middle, or nothing is kept."""
    names = {}
    for taps in ("all", "ends", "none"):
        setup = make_setup(tmp_path, {"taps": taps})
        names[taps] = setup.taps_of(setup.requests[0])
    assert names["none"] == ()
    assert names["ends"] == ("text", *(f"{kind}.{k}" for k in (0, 2, 3) for kind in ("latents", "velocity")))
    assert len(names["all"]) == 1 + 2 * 4

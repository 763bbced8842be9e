"""Settings: layers in order, strict names, presets and profiles that are what they say."""

from fractions import Fraction

import pytest

from batch_gen.config import (
    Mesh,
    Settings,
    load_preset,
    load_profile,
    preset_names,
    profile_names,
    resolve,
)
from batch_gen.errors import ConfigError
from batch_gen.flags import FLAGS, SEMANTIC
from batch_gen.job_file import read_job_file
from batch_gen.prepare import check_combinations

GIVEN = {"model": "fake", "out": "o"}


def settings(profile="cpu", **given):
    """Settings of the pocket preset."""
    return resolve(GIVEN | given, load_preset("pocket", "pocket"), profile)


def test_every_flag_is_a_setting():
    """flags.py and Settings name the same things; `layout` comes from profiles alone."""
    fields = {field.alias or name for name, field in Settings.model_fields.items()}
    assert fields - {"layout"} == {flag.key for flag in FLAGS}


def test_order_of_layers():
    """Profile and preset are weaker than what is given, defaults weakest."""
    assert settings().mesh == Mesh()
    assert settings(profile="trn2-480p").mesh == Mesh(tp=4, cp=8, cfg=2)
    assert settings(profile="trn2-480p", mesh="tp=2").mesh == Mesh(tp=2)
    assert settings().crf == 16
    assert settings(crf=20).crf == 20
    assert settings().dtype == "float32"


@pytest.mark.parametrize(("profile", "dtype"), [("cpu", "float32"), ("cuda", "float32"), ("trn2-720p", "bfloat16")])
def test_the_autoencoders_dtype_follows_the_device(profile, dtype):
    """Unless it is given, the autoencoder computes in float32, and in bfloat16 on Neuron; the fingerprint holds which."""
    preset = load_preset("t2v-a14b-720p", "t2v-a14b-720p")
    given = {"model": "m", "out": "o"}
    assert resolve(given, preset, profile).semantic()["vae_dtype"] == dtype
    other = "bfloat16" if dtype == "float32" else "float32"
    assert resolve({**given, "vae_dtype": other}, preset, profile).vae_dtype == other
    assert resolve({**given, "device": "neuron"}, preset, "cpu").vae_dtype == "bfloat16"


def test_official_values():
    """The presets hold the values that the model's authors publish."""
    t2v = load_preset("t2v-a14b-480p", "pocket")
    assert t2v.dtype == "bfloat16"
    sampling = t2v.sampling
    assert (sampling.steps, sampling.flow_shift, sampling.guidance_high, sampling.guidance_low) == (40, 12.0, 4.0, 3.0)
    assert (sampling.width, sampling.height, sampling.num_frames, sampling.fps) == (832, 480, 81, Fraction(16))
    assert load_preset("ti2v-5b", "pocket").sampling.num_frames == 121


def test_draft_follows_the_checkpoint():
    """`draft` is the checkpoint's preset with fewer steps; `final` is the preset itself."""
    assert load_preset("draft", "t2v-a14b-720p").sampling.steps == 16
    assert load_preset("draft", "t2v-a14b-720p").sampling.width == 1280
    assert load_preset("final", "t2v-a14b-720p").sampling == load_preset("t2v-a14b-720p", "pocket").sampling


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name):
    """Every preset that ships is complete."""
    assert load_preset(name, "pocket").sampling.steps >= 1


@pytest.mark.parametrize("name", profile_names())
def test_profiles_load(name):
    """Every profile that ships resolves."""
    assert settings(profile=name).profile == name
    assert load_profile(name)["device"] in ("cpu", "cuda", "neuron")


def test_job_file(tmp_path):
    """A YAML file sets what flags set, with dashes or underscores."""
    path = tmp_path / "job.yaml"
    path.write_text("crf: 12\nrun-seed: 5\nmesh: tp=2,cp=2\n")
    assert read_job_file(str(path)) == {"crf": 12, "run_seed": 5, "mesh": "tp=2,cp=2"}
    path.write_text("")
    assert read_job_file(str(path)) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("crff: 1", "did you mean 'crf'"),
        ("- a", "expected a mapping"),
        ("config: x.yaml", "is no setting"),
        ("a: [", "while parsing"),
        ("? [a]\n: 1", "unhashable key"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_wrong_job_files(tmp_path, text, words):
    """An unknown key, another shape, broken or unsafe YAML is a clear error that names the file."""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_job_file(str(path))
    assert str(path) in error.value.message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"crf": 99}, "crf"),
        ({"replicas": 0}, "replicas"),
        ({"mesh": "tp=0"}, "mesh"),
        ({"mesh": "tp=2,pp=2"}, "expected degrees"),
        ({"max_failures": "-1"}, "max-failures"),
        ({"max_failures": "nan"}, "max-failures"),
        ({"max_failures": "1.5"}, "whole count"),
        ({"max_failures": "1_0"}, "whole count"),
        ({"mesh": "tp=1_6"}, "expected degrees"),
        ({"mesh": "tp=2,tp=4"}, "expected degrees"),
        ({"lease_ttl": 0.1}, "lease-ttl"),
        ({"chunk_requests": 65}, "chunk-requests"),
        ({"decode": "fast"}, "decode"),
    ],
)
def test_values_out_of_range(given, words):
    """A value outside its rule is refused with the setting's name."""
    with pytest.raises(ConfigError, match=words):
        settings(**given)


def test_semantic_settings_form_the_fingerprint():
    """Exactly the semantic flags, without the checkpoint's name (its digest counts), are in the fingerprint."""
    assert set(settings().semantic()) == {flag.key for flag in SEMANTIC} - {"model"}
    assert settings(replicas=2).semantic() == settings().semantic()
    assert settings(crf=20).semantic() != settings().semantic()


def test_a_job_file_may_write_numbers_and_moments_plainly(tmp_path):
    """`max-failures: 0.2` and an unquoted moment are what the same words are on the command line."""
    path = tmp_path / "job.yaml"
    path.write_text("max-failures: 0.2\ndrain-at: 2026-12-01T11:00:00Z\n")
    found = settings(**read_job_file(str(path)))
    assert found.max_failures == "0.2"
    assert found.drain_at == "2026-12-01T11:00:00+00:00"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compile": "off", "graphs": "graphs"}, "needs --compile block or model"),
        ({"compile": "block", "compile_backend": "inductor", "device": "neuron"}, "has its own compiler; use auto"),
    ],
)
def test_settings_that_compile_nothing_are_refused(given, message):
    """Graphs that nothing would use and a compiler that the device has not are refused; the rest is taken."""
    with pytest.raises(ConfigError, match=message):
        check_combinations(settings(**given))
    check_combinations(settings(compile="off"))
    check_combinations(settings(compile="block"))
    check_combinations(settings(profile="trn2-480p", model="tiny"))

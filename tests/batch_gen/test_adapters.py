"""`--lora` on the command line and in the fingerprint."""

from dataclasses import replace

import pytest

from batch_gen.adapters import find_adapters
from batch_gen.errors import CheckpointError, ConfigError, UsageError
from batch_gen.prepare import prepare
from batch_gen.storage.base import StoreOptions
from tests.manifests import save

OPTIONS = StoreOptions()


@pytest.mark.parametrize(
    ("text", "strength", "stage"),
    [("", 1.0, ""), ("@0.7", 0.7, ""), ("@-1e-1:low", -0.1, "low"), (":high", 1.0, "high"), ("@2", 2.0, "")],
)
def test_forms(tmp_path, text, strength, stage):
    """Strength and expert are read from the end; a path may hold @ and colons."""
    path = tmp_path / "a@b:c.safetensors"
    path.write_bytes(b"weights")
    [found] = find_adapters((f"{path}{text}",), OPTIONS)
    assert (found.path, found.strength, found.stage) == (path, strength, stage)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("a.safetensors@101", UsageError, "strength 101 is not within"),
        ("a.pt", CheckpointError, "only .safetensors files are read"),
        ("a.safetensors:middle", CheckpointError, "only .safetensors files are read"),
        ("gone.safetensors", CheckpointError, "no such file"),
    ],
)
def test_what_is_refused(tmp_path, name, error, message):
    """Other files, absurd strengths and missing files leave with exit 2 before the start."""
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    with pytest.raises(error, match=message) as caught:
        find_adapters((f"{tmp_path}/{name}",), OPTIONS)
    assert caught.value.exit_code == 2


def test_adapters_are_part_of_the_fingerprint(tmp_path):
    """The fingerprint knows an adapter by its bytes, strength and expert, and not by its path; order counts."""
    for name, body in (("a", b"one"), ("same", b"one"), ("b", b"two")):
        (tmp_path / f"{name}.safetensors").write_bytes(body)
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"]})

    def lora(*names):
        given = {"model": "fake", "lora": tuple(f"{tmp_path}/{name}" for name in names), "out": str(tmp_path / "out")}
        return prepare([str(manifest)], given).fingerprint_settings()["lora"]

    assert lora("a.safetensors") == lora("same.safetensors")
    assert lora("a.safetensors") != lora("a.safetensors@0.5") != lora("a.safetensors@0.5:low")
    assert lora("a.safetensors", "b.safetensors") == lora("b.safetensors", "a.safetensors")[::-1]
    assert lora() == []


def test_a_worker_gets_the_path(tmp_path):
    """The rank process is told where the file is, how much of it and for which expert."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"one")
    [found] = find_adapters((f"{path}@0.5:low",), OPTIONS)
    assert found.to_json() == {"path": str(path), "strength": 0.5, "stage": "low"}
    assert replace(found, strength=1.0).identity.endswith("@1:low")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"override": ("steps=4",)}, "row 0 has 4 steps, all of them within --step-cache-warm-up 4"),
        ({"compile": "model", "device": "neuron"}, "cannot work with --compile model"),
        ({"step_cache": 0.0}, "--step-cache: "),
    ],
)
def test_a_step_cache_that_cannot_work_is_refused(tmp_path, given, message):
    """Step caching that could do nothing is exit 2 before the start, with the row or the setting."""
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"]})
    with pytest.raises(ConfigError, match=message) as caught:
        prepare([str(manifest)], {"model": "fake", "out": str(tmp_path / "out"), "step_cache": 0.2, **given})
    assert caught.value.exit_code == 2

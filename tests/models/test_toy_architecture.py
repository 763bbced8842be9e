"""A second architecture is one folder: nothing else changes, and everything finds it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.registry import discover

ROOT = Path(__file__).parents[2]
SPEC = '''
"""A model of one colour, for a test."""

from models.entry import ConfigFiles, Limits, PipelineEntry


def limits(files: ConfigFiles) -> Limits:
    """Whatever the config says."""
    return Limits("toy", "pocket", int(files.transformer["multiple"]), 77, ("text", "image"), trained_frames=33)


PIPELINES = {"ToyPipeline": PipelineEntry("models.toy.pipeline:Toy", limits, ("pocket",), ("docs/models/toy.md",))}
'''


@pytest.fixture
def extended(tmp_path):
    """A copy of the source tree with one more package, and a folder that is a checkpoint of it."""
    skip = shutil.ignore_patterns("weights", "__pycache__", "*.pyc")
    for package in ("models", "kernels", "batch_gen"):
        shutil.copytree(ROOT / package, tmp_path / "src" / package, ignore=skip)
    toy = tmp_path / "src/models/toy"
    toy.mkdir()
    (toy / "__init__.py").touch()
    (toy / "spec.py").write_text(SPEC)
    (toy / "pipeline.py").write_text("class Toy:\n    pass\n")
    folder = tmp_path / "checkpoint"
    for part in ("text_encoder", "tokenizer", "scheduler", "transformer", "vae"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "ToyPipeline"}))
    (folder / "transformer/config.json").write_text(json.dumps({"multiple": 24}))
    (folder / "vae/config.json").write_text("{}")
    return tmp_path


def run(folder, *command):
    """Standard output of Python in the copy of the source tree."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "BATCH_GEN_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment, check=True
    )
    return done.stdout


def test_models_lists_it(extended):
    """`batch-gen models` shows the new pipeline with presets and card beside ours."""
    listed = json.loads(run(extended, "-m", "batch_gen", "models", "--json"))["pipelines"]
    assert [row["name"] for row in listed] == ["ToyPipeline", "WanImageToVideoPipeline", "WanPipeline"]
    assert listed[0] == {
        "name": "ToyPipeline",
        "class": "models.toy.pipeline:Toy",
        "presets": ["pocket"],
        "cards": ["docs/models/toy.md"],
    }


def test_its_checkpoints_open(extended):
    """Its limits rule the manifest, without torch, and the rank finds its class."""
    code = """
import sys
from pathlib import Path
from batch_gen.checkpoint import open_checkpoint
limits = open_checkpoint("checkpoint").limits
print(limits.size_multiple, limits.max_tokens, limits.trained_frames, *limits.conditionings, "torch" in sys.modules)
from models.registry import load_pipeline_class
print(load_pipeline_class(Path("checkpoint")).__name__)
"""
    assert run(extended, "-c", code).split("\n")[:2] == ["24 77 33 text image False", "Toy"]


def test_two_packages_cannot_claim_one_name(tmp_path, monkeypatch):
    """Two specs with one class name are an error, not a matter of order."""
    for name in ("first", "second"):
        package = tmp_path / "twins" / name
        package.mkdir(parents=True)
        (package / "spec.py").write_text("TABLE = {'Same': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="another package has Same too"):
        discover(tmp_path / "twins", "twins", "TABLE")


def test_every_card_is_there():
    """Each card and each preset that a pipeline names exists."""
    from batch_gen.config import preset_names
    from models.registry import pipelines

    for entry in pipelines().values():
        assert set(entry.presets) <= set(preset_names())
        assert [card for card in entry.cards if not (ROOT / card).is_file()] == []

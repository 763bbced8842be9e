"""Pipelines and published sizes are found through the spec files, without torch."""

import json
import subprocess
import sys

import pytest

from models.errors import ModelError
from models.registry import architectures, load_pipeline_class
from models.wan.spec import OFFICIAL_NEGATIVE_PROMPT, TransformerSpec, transformer_spec


def test_registry_imports_no_torch():
    """Specs, registry and error kinds load without torch, so that `plan` and `models` stay quick."""
    code = "import sys, models.registry as r; r.pipelines(); r.architectures(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_published_sizes():
    """The A14B has 14.3 billion parameters per expert, and 32760 tokens at 832x480 with 81 frames."""
    spec = architectures()["wan2.2-t2v-a14b"]
    assert spec.transformer.num_parameters == 14_288_491_584
    assert spec.text_encoder.num_parameters == 5_680_910_336
    assert spec.num_tokens(832, 480, 81) == 32_760
    assert spec.num_tokens(1280, 720, 81) == 75_600
    assert spec.size_multiple == 16


def test_parameters_of_a_checkpoint_are_counted(tiny_checkpoint):
    """The formula for an expert's parameters counts what is in the file."""
    from models.checkpoint import open_checkpoint
    from models.checkpoint_files import read_json

    folder = tiny_checkpoint / "transformer"
    checkpoint = open_checkpoint(folder)
    count = sum(checkpoint.read(key).numel() for key in checkpoint.keys())  # noqa: SIM118
    assert transformer_spec(read_json(folder / "config.json")).num_parameters == count


def test_pipeline_of_a_folder(tiny_checkpoint):
    """model_index.json names the class; the registry imports ours."""
    assert load_pipeline_class(tiny_checkpoint).__module__ == "models.wan.pipeline"


def test_unknown_pipeline_is_unsupported(tmp_path):
    """Another pipeline's checkpoint is refused with the list of known ones."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(
        ModelError, match="'FluxPipeline' is not supported; supported: WanImageToVideoPipeline, WanPipeline"
    ) as caught:
        load_pipeline_class(tmp_path)
    assert caught.value.kind == "unsupported"


REQUIRED = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 8,
    "ffn_dim": 64,
    "num_layers": 1,
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"ffn_dim": None}, "checkpoint"),
        ({"image_dim": 1280}, "unsupported"),
        ({"qk_norm": None}, "unsupported"),
        ({"cross_attn_norm": False}, "unsupported"),
    ],
)
def test_configs_that_cannot_be_rendered(change, kind):
    """A config without sizes is broken, one with parts that are not built here is unsupported."""
    with pytest.raises(ModelError) as caught:
        transformer_spec(REQUIRED | change)
    assert caught.value.kind == kind


def test_sizes_come_from_the_config():
    """No size is taken for granted: the spec is the config."""
    spec = transformer_spec(REQUIRED | {"patch_size": [1, 2, 2], "eps": 1e-5})
    assert spec == TransformerSpec(heads_of := (1, 2, 2), 2, 16, 16, 16, 8, 256, 64, 1, 1e-5)
    assert heads_of == spec.patch_size


def test_official_negative_prompt_is_whole():
    """The published negative prompt: 28 phrases and nothing between them but wide commas."""
    assert len(OFFICIAL_NEGATIVE_PROMPT.split("\uff0c")) == 28

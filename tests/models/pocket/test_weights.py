import hashlib
import json

import pytest
from safetensors import safe_open

from models.pocket import spec

FOLDER = spec.WEIGHTS.parent
FILES = sorted(path for path in spec.WEIGHTS.rglob("*") if path.is_file())


def test_files_are_what_the_list_says():
    """Every committed file is in SHA256SUMS with its digest, and nothing else is there."""
    lines = (FOLDER / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {path.relative_to(FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES}
    assert listed == found


def test_files_are_what_the_card_says():
    """The card's total size and licence are those of the files, and the total is under 25 MB."""
    total = sum(path.stat().st_size for path in FILES)
    card = (FOLDER / "MODEL_CARD.md").read_text()
    assert total < 25_000_000
    assert f"{total / 1e6:.1f} MB" in card
    assert "license: apache-2.0" in card


@pytest.mark.parametrize("part", ["transformer", "transformer_2", "vae", "text_encoder"])
def test_weights_are_half_precision(part):
    """Every tensor on disk is float16."""
    (file,) = (spec.WEIGHTS / part).glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


def test_heads_can_be_sharded():
    """Two and four ranks divide the heads of the DiT and of the text encoder."""
    for part in ("transformer", "transformer_2"):
        assert json.loads((spec.WEIGHTS / part / "config.json").read_text())["num_attention_heads"] % 4 == 0
    assert json.loads((spec.WEIGHTS / "text_encoder" / "config.json").read_text())["num_heads"] % 4 == 0


def test_the_shape_is_that_of_wan():
    """Two experts, their boundary, three up-samplings in space and two in time, UniPC with flow prediction."""
    index = json.loads((spec.WEIGHTS / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["transformer"] == index["transformer_2"] == ["diffusers", "WanTransformer3DModel"]
    assert index["boundary_ratio"] == spec.BOUNDARY
    vae = json.loads((spec.WEIGHTS / "vae" / "config.json").read_text())
    assert vae["z_dim"] == 16
    assert len(vae["dim_mult"]) == 4
    assert vae["temperal_downsample"] == [False, True, True]
    scheduler = json.loads((spec.WEIGHTS / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["_class_name"] == "UniPCMultistepScheduler"
    assert scheduler["prediction_type"] == "flow_prediction"
    assert scheduler["flow_shift"] == spec.FLOW_SHIFT

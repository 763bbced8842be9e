"""The text encoder in itself; its agreement with transformers is in tests/parity."""

import json
import shutil

import pytest
import torch

from models.checkpoint import open_checkpoint
from models.errors import ModelError
from models.umt5.model import position_buckets
from models.umt5.spec import umt5_spec
from models.umt5.weights import load_umt5


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint):
    """The encoder of `tiny`."""
    return load_umt5(tiny_checkpoint / "text_encoder", torch.float32)


def test_padding_does_not_reach_the_prompt(encoder):
    """A prompt padded to a longer length with a mask has the embeddings that it has alone."""
    ids = torch.tensor([[300, 301, 302, 303, 1]])
    padded = torch.nn.functional.pad(ids, (0, 11))
    mask = torch.arange(16)[None] < 5
    with torch.inference_mode():
        torch.testing.assert_close(encoder(padded, mask)[:, :5], encoder(ids), rtol=1e-5, atol=1e-5)


def test_buckets_tell_direction_and_distance():
    """Before and after differ; near distances are exact, far ones share, the farthest share one."""
    buckets = position_buckets(200, 32, 128)
    assert buckets[0, 1] != buckets[1, 0]
    assert len({int(bucket) for bucket in buckets[0, :8]}) == 8
    assert buckets[0, 130] == buckets[0, 199]


def test_both_layouts_of_the_embedding_load(encoder, tiny_checkpoint, tmp_path):
    """The embedding may lie under either of its two names, or under both."""
    from safetensors.torch import save_file

    source = open_checkpoint(tiny_checkpoint / "text_encoder")
    shared = source.read("shared.weight")
    others = {key: source.read(key) for key in source.keys() if "shared" not in key and "embed_tokens" not in key}  # noqa: SIM118
    alias = "encoder.embed_tokens.weight"
    for number, names in enumerate((["shared.weight"], [alias], ["shared.weight", alias])):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(others | {name: shared.clone() for name in names}, folder / "model.safetensors")
        shutil.copy(tiny_checkpoint / "text_encoder" / "config.json", folder)
        assert torch.equal(load_umt5(folder, torch.float32).embed.weight, encoder.embed.weight)


def test_other_activations_are_unsupported(tiny_checkpoint):
    """T5 variants without gated GELU are refused by name."""
    config = json.loads((tiny_checkpoint / "text_encoder" / "config.json").read_text())
    with pytest.raises(ModelError, match="feed_forward_proj 'relu'"):
        umt5_spec(config | {"feed_forward_proj": "relu"})

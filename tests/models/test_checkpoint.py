"""Checkpoints are read exactly: every key once, nothing missing, nothing left over, slices alone."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.checkpoint import Shard, Source, load_parameters, open_checkpoint
from models.checkpoint_files import folder_digest, read_json
from models.errors import ModelError

TENSORS = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "b.weight": torch.arange(24.0).view(4, 6) + 100,
    "a.bias": torch.ones(4),
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two files with an index."""
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "part-1.safetensors")
    save_file({key: TENSORS[key] for key in ("b.weight", "a.bias")}, tmp_path / "part-2.safetensors")
    weight_map = {"a.weight": "part-1.safetensors", "b.weight": "part-2.safetensors", "a.bias": "part-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def layer():
    """A module of one fused matrix [8, 6] and a bias [4], without memory."""
    with torch.device("meta"):
        module = nn.Module()
        module.fused = nn.Linear(6, 8, bias=False)
        module.bias = nn.Parameter(torch.empty(4))
    return module


SOURCES = {"fused.weight": Source(("a.weight", "b.weight"), (None, torch.neg)), "bias": Source(("a.bias",))}


def keep(_name):
    """Every parameter in float32."""
    return torch.float32


def load(folder, sources=SOURCES, **options):
    """The test's module with the weights of a folder."""
    module = layer()
    load_parameters(module, open_checkpoint(folder), sources, keep, **options)
    return module


def test_sources_are_transformed_and_joined(folder):
    """A fused parameter is its sources in order, each through its own transform."""
    module = load(folder)
    assert torch.equal(module.fused.weight, torch.cat([TENSORS["a.weight"], -TENSORS["b.weight"]]))
    assert not module.fused.weight.requires_grad


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_reads_its_slice_of_each_source(folder, dim, index):
    """A shard of a fused parameter holds this rank's part of every source, joined."""
    shard = Shard(dim, index, 2)
    module = load(folder, shard_of=lambda name: shard if name == "fused.weight" else None)
    parts = [TENSORS["a.weight"].chunk(2, dim)[index], -TENSORS["b.weight"].chunk(2, dim)[index]]
    assert torch.equal(module.fused.weight, torch.cat(parts))


def test_a_slice_that_does_not_divide_is_refused(folder):
    """4 rows over 3 ranks is an unsupported layout, not a silent remainder."""
    with pytest.raises(ModelError, match="do not divide into 3 parts") as caught:
        open_checkpoint(folder).read("a.weight", Shard(0, 0, 3))
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({**SOURCES, "bias": Source(("c.bias",))}, ["1 missing: c.bias", "1 unexpected: a.bias"]),
        ({**SOURCES, "bias": Source(("a.weight",))}, ["1 mapped twice: a.weight"]),
    ],
)
def test_wrong_key_sets_are_named(folder, sources, words):
    """Missing, unexpected and doubly mapped keys are one error that names them."""
    with pytest.raises(ModelError) as caught:
        load(folder, sources)
    assert caught.value.kind == "checkpoint"
    assert all(word in caught.value.message for word in words)


def test_wrong_shapes_are_named(folder):
    """A tensor that does not have the config's shape is named with both shapes."""
    save_file({"a.weight": torch.zeros(4, 5)}, folder / "part-1.safetensors")
    save_file({"b.weight": torch.zeros(4, 5), "a.bias": torch.ones(4)}, folder / "part-2.safetensors")
    with pytest.raises(ModelError, match=r"fused.weight has shape \[8, 5\], the config asks for \[8, 6\]"):
        load(folder)


def test_a_missing_file_is_named(folder):
    """A file that the index lists and the folder lacks is an error before anything is read."""
    (folder / "part-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of its files are missing: part-2\.safetensors"):
        open_checkpoint(folder)


def test_a_key_in_two_files_is_named(folder):
    """One key in two files is ambiguous and refused."""
    save_file({"a.weight": TENSORS["a.weight"], "a.bias": TENSORS["a.bias"]}, folder / "part-1.safetensors")
    with pytest.raises(ModelError, match=r"'a\.bias' is in part-1\.safetensors and part-2\.safetensors"):
        open_checkpoint(folder)


def test_a_damaged_file_is_named(folder):
    """A truncated file is a checkpoint error with its path."""
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ModelError, match=r"part-1\.safetensors: not a readable safetensors file"):
        open_checkpoint(folder)


def test_other_formats_are_not_read(tmp_path):
    """A folder with pickled weights only is refused: unpickling runs code."""
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no \\*\\.safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_bad_json_is_a_checkpoint_error(tmp_path, text):
    """A config that is absent, broken or no object names its path."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_json(tmp_path / "config.json")
    assert caught.value.kind == "checkpoint"


def test_digest_follows_the_weights(folder):
    """The digest of a folder is stable, and changes with one byte of one tensor."""
    before = folder_digest(folder)
    assert folder_digest(folder) == before
    save_file({"a.weight": TENSORS["a.weight"] + 1}, folder / "part-1.safetensors")
    assert folder_digest(folder) != before

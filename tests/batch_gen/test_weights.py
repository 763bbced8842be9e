"""Weights from S3: whole, resumable, checked, once."""

import json

import pytest

from batch_gen import weights
from batch_gen.checkpoint import open_checkpoint
from batch_gen.errors import CheckpointError
from batch_gen.storage.base import StoreOptions
from batch_gen.storage.memory import MemoryStore


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own, and small blocks."""
    monkeypatch.setenv("BATCH_GEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "BLOCK_BYTES", 1000)


def fill(store, num_bytes=4500):
    """A checkpoint-like prefix."""
    store.put("model_index.json", b"{}")
    store.put("transformer/weights.safetensors", bytes(range(256)) * (num_bytes // 256))
    store.put("notes.bin", b"not fetched")
    store.put("../evil.json", b"{}")


def test_everything_that_counts_arrives():
    """Configs and safetensors arrive under their names, other kinds and climbing names do not."""
    store = MemoryStore.named("weights-a")
    fill(store)
    folder = weights.fetch_from_store("memory://weights-a", StoreOptions())
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == [".fetched", "model_index.json", "transformer/weights.safetensors"]
    assert (folder / "transformer/weights.safetensors").read_bytes() == bytes(range(256)) * 17


def test_planning_fetches_no_weights():
    """Whoever submits or plans gets configuration alone, in a folder that no run takes for a checkpoint."""
    store = MemoryStore.named("weights-config")
    fill(store)
    folder = weights.fetch_from_store("memory://weights-config", StoreOptions(), weights=False)
    assert [path.name for path in folder.rglob("*") if path.is_file() and path.name[0] != "."] == ["model_index.json"]
    assert folder != weights.fetch_from_store("memory://weights-config", StoreOptions())


def test_only_what_changed_is_fetched_again(monkeypatch):
    """A second call reads nothing, and a changed object is read anew."""
    store = MemoryStore.named("weights-b")
    fill(store)
    weights.fetch_from_store("memory://weights-b", StoreOptions())
    read = []
    plain = MemoryStore.read_range
    monkeypatch.setattr(
        MemoryStore, "read_range", lambda self, key, *rest: (read.append(key), plain(self, key, *rest))[1]
    )
    folder = weights.fetch_from_store("memory://weights-b", StoreOptions())
    assert read == []
    store.put("model_index.json", b'{"a": 1}')
    weights.fetch_from_store("memory://weights-b", StoreOptions())
    assert read == ["model_index.json"]
    assert json.loads((folder / "model_index.json").read_text()) == {"a": 1}


def test_a_broken_transfer_goes_on_where_it_was(monkeypatch):
    """After a failure in the middle only the missing blocks are read."""
    store = MemoryStore.named("weights-c")
    fill(store)
    plain = MemoryStore.read_range
    calls = []

    def failing(self, key, start, num_bytes):
        calls.append((key, start))
        if key.endswith(".safetensors") and start == 3000:
            return None
        return plain(self, key, start, num_bytes)

    monkeypatch.setattr(MemoryStore, "read_range", failing)
    monkeypatch.setattr(weights, "NUM_READERS", 1)
    with pytest.raises(Exception, match="came back short"):
        weights.fetch_from_store("memory://weights-c", StoreOptions())
    monkeypatch.setattr(
        MemoryStore,
        "read_range",
        lambda self, key, start, n: (calls.append((key, start)), plain(self, key, start, n))[1],
    )
    calls.clear()
    folder = weights.fetch_from_store("memory://weights-c", StoreOptions())
    assert ("transformer/weights.safetensors", 0) not in calls
    assert ("transformer/weights.safetensors", 3000) in calls
    assert (folder / "transformer/weights.safetensors").read_bytes() == bytes(range(256)) * 17


def test_files_that_are_whole_are_not_read_again(monkeypatch):
    """A download that fails at one file keeps those before it, and a file that somebody removed comes back."""
    store = MemoryStore.named("weights-e")
    fill(store)
    plain = MemoryStore.read_range
    read = []

    def failing(self, key, *rest):
        read.append(key)
        return None if key.endswith(".safetensors") else plain(self, key, *rest)

    monkeypatch.setattr(MemoryStore, "read_range", failing)
    with pytest.raises(Exception, match="came back short"):
        weights.fetch_from_store("memory://weights-e", StoreOptions())
    assert "model_index.json" in read
    monkeypatch.setattr(
        MemoryStore, "read_range", lambda self, key, *rest: (read.append(key), plain(self, key, *rest))[1]
    )
    read.clear()
    folder = weights.fetch_from_store("memory://weights-e", StoreOptions())
    assert "model_index.json" not in read
    read.clear()
    (folder / "model_index.json").unlink()
    weights.fetch_from_store("memory://weights-e", StoreOptions())
    assert read == ["model_index.json"]


def test_two_hub_names_never_share_a_folder(monkeypatch):
    """a-b/c and a/b-c are two repositories; their files must not mix."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
    assert weights.fetch_from_hub("a-b/c") != weights.fetch_from_hub("a/b-c")


def test_a_prefix_without_a_checkpoint_is_refused():
    """A prefix without model_index.json is no checkpoint."""
    MemoryStore.named("weights-d").put("readme.txt", b"x")
    with pytest.raises(CheckpointError, match=r"no model_index\.json"):
        weights.fetch_from_store("memory://weights-d", StoreOptions())


def test_from_a_real_server(s3_server, tiny_checkpoint, tmp_path):
    """A checkpoint on S3 opens by its URL with the digest of the folder that was uploaded."""
    from batch_gen.storage.base import open_store

    url = f"s3://runs/weights-{tmp_path.name}"
    store = open_store(url, StoreOptions(endpoint_url=s3_server.endpoint))
    for path in sorted(tiny_checkpoint.rglob("*")):
        if path.is_file():
            store.create(path.relative_to(tiny_checkpoint).as_posix(), path)
    found = open_checkpoint(url, StoreOptions(endpoint_url=s3_server.endpoint))
    assert found.digest == open_checkpoint(str(tiny_checkpoint)).digest


def test_a_hub_name_without_a_network_is_a_clear_error(monkeypatch):
    """owner/name without a way to the hub says what else can be given."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="give a folder or an s3:// prefix"):
        open_checkpoint("nobody/no-such-model")


@pytest.mark.parametrize("name", ["pockt", "/no/such/folder", "a/b/c", "http://x/y"])
def test_unknown_names(name):
    """A name that is nothing we know says what could be meant."""
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(name)

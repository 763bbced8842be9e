"""Packed graphs: what comes back is what was packed, and nothing that is torn or foreign reaches a compiler's cache."""

import ast
from pathlib import Path

import pytest

from batch_gen.errors import EnvironmentFault
from batch_gen.graphs.artefact import (
    Artefact,
    ArtefactRefused,
    GraphSet,
    Packed,
    blob_key,
    find_artefact,
    get_document,
    key_of,
    pack,
    put_document,
    unpack,
)
from batch_gen.storage.memory import MemoryStore

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"model": "abc", "bucket": "64x64x9-text", "guided": True, "versions": {"torch": "2.13.0"}}
FILES = {"ab/kernel.so": b"\x7fELF code", "fxgraph/xy/entry": b"pickled graph", "copy.so": b"\x7fELF code"}


def cache(folder, files=FILES):
    """A compiler's cache with these files, and with what no other machine can use."""
    for name, body in {**files, "locks/a.lock": b"", "x.tmp": b"half"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    (folder / "link").symlink_to("/etc/hostname")
    return folder


def tree(folder):
    """Relative path -> content of all files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def packed(tmp_path):
    """A store with one artefact in it, and the artefact's digest."""
    store = MemoryStore()
    return store, pack(store, cache(tmp_path / "built"), FACTS, {"seconds": 1.0}).digest


def test_a_cache_comes_back_on_another_machine(packed, tmp_path):
    """All files that can be used elsewhere come back, byte for byte; locks, halves and links stay behind."""
    store, digest = packed
    fetched = unpack(store, find_artefact(store, digest, FACTS), tmp_path / "other" / "cache")
    assert tree(tmp_path / "other" / "cache") == FILES
    assert fetched == sum(map(len, FILES.values()))


def test_equal_files_are_kept_once(packed, tmp_path):
    """Files are named by content: a second pack of the same cache writes no byte, and gives the same digest."""
    store, digest = packed
    again = pack(store, tmp_path / "built", FACTS, {"seconds": 1.0})
    assert (again.digest, again.new_bytes, again.num_files) == (digest, 0, 3)
    assert len(list(store.list("blobs/"))) == 2


def test_what_is_there_is_not_fetched_again(packed, tmp_path):
    """A second start fetches nothing; a torn local file is fetched anew."""
    store, digest = packed
    artefact, folder = find_artefact(store, digest, FACTS), tmp_path / "cache"
    unpack(store, artefact, folder)
    assert unpack(store, artefact, folder) == 0
    (folder / "ab/kernel.so").write_bytes(b"\x7fELF c")
    assert unpack(store, artefact, folder) == len(FILES["ab/kernel.so"])
    assert tree(folder) == FILES


@pytest.mark.parametrize("body", [b"pickled grapH", b"pickled", b"pickled graph and more", None])
def test_a_torn_file_never_reaches_the_cache(packed, tmp_path, body):
    """A blob that is changed, cut, longer or gone stops the fetch with its name, and is not put in place."""
    store, digest = packed
    artefact = find_artefact(store, digest, FACTS)
    key = blob_key(next(file.sha256 for file in artefact.files if file.path == "fxgraph/xy/entry"))
    store.delete(key)
    if body is not None:
        store.put(key, body)
    with pytest.raises(ArtefactRefused, match="fxgraph/xy/entry") as caught:
        unpack(store, artefact, tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "cache" / "fxgraph").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".fetch-")] == []


@pytest.mark.parametrize("prefix", ["artefacts", "sets"])
def test_documents_must_have_the_digest_that_was_named(packed, prefix):
    """A set or artefact whose bytes were changed is refused although it reads well; so is one that is gone."""
    store, digest = packed
    kind = Artefact if prefix == "artefacts" else GraphSet
    digest = digest if prefix == "artefacts" else put_document(store, "sets", GraphSet(artefacts={"k": digest}))
    key = f"{prefix}/{digest}.json"
    body = store.get(key).body
    store.put(key, body.replace(b'"format": 1', b'"format":  1'))
    with pytest.raises(ArtefactRefused, match="torn or changed"):
        get_document(store, prefix, digest, kind)
    store.delete(key)
    with pytest.raises(ArtefactRefused, match="missing"):
        get_document(store, prefix, digest, kind)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "other"), ("bucket", "32x32x5-text"), ("guided", False), ("versions", {"torch": "2.14.0"})],
)
def test_a_foreign_artefact_is_refused(packed, name, value):
    """An artefact of another model, bucket, guidance or compiler is refused, and the message says which it is."""
    store, digest = packed
    with pytest.raises(ArtefactRefused, match=f"foreign: built for another {name}; not used"):
        find_artefact(store, digest, {**FACTS, name: value})


@pytest.mark.parametrize("path", ["../up.so", "/etc/ld.so.preload", "a/../../b", "a\\..\\b", ""])
def test_paths_that_lead_out_of_the_folder_are_refused(packed, path):
    """Whatever an artefact calls its files, they stay in the cache folder."""
    store, _ = packed
    bad = Artefact(key=key_of(FACTS), facts=FACTS, files=(Packed(path=path, size_bytes=1, sha256="0" * 64),))
    digest = put_document(store, "artefacts", bad)
    with pytest.raises(ArtefactRefused, match="leads out of its folder"):
        find_artefact(store, digest, FACTS)


def test_an_empty_cache_is_no_artefact(tmp_path):
    """A compiler that left nothing behind is an error here, not a surprise on another machine."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnvironmentFault, match="left no file"):
        pack(MemoryStore(), tmp_path / "empty", FACTS, {})


def test_nothing_here_can_unpickle():
    """The package that handles fetched files imports no pickle, no marshal and no torch."""
    loaded = set()
    for path in sorted((ROOT / "batch_gen" / "graphs").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                loaded |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                loaded.add((node.module or "").split(".")[0])
    assert not loaded & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch", "joblib"}


@pytest.mark.s3
def test_the_same_on_s3(s3_store, tmp_path):
    """On an S3 server a cache comes back whole, and a changed object is refused."""
    digest = pack(s3_store, cache(tmp_path / "built"), FACTS, {}).digest
    artefact = find_artefact(s3_store, digest, FACTS)
    unpack(s3_store, artefact, tmp_path / "one")
    assert tree(tmp_path / "one") == FILES
    key = blob_key(artefact.files[0].sha256)
    s3_store.delete(key)
    s3_store.put(key, b"\x7fELF code"[::-1])
    with pytest.raises(ArtefactRefused, match="torn or changed"):
        unpack(s3_store, artefact, tmp_path / "two")

"""Damaged stores of graphs: compile mends what a run refuses, so that its advice is no circle."""

import dataclasses
import os
import signal

import pytest

from batch_gen.drain import unwound_by_sigterm
from batch_gen.errors import Drained
from batch_gen.graphs.artefact import (
    Artefact,
    ArtefactRefused,
    GraphSet,
    Packed,
    Pointer,
    blob_key,
    check_whole,
    find_artefact,
    get_document,
    path_fault,
    put_document,
    unpack,
)
from batch_gen.graphs.build import build, build_all
from batch_gen.lease import Owner, claim, read_lease
from batch_gen.storage.base import sha256_of
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from tests.batch_gen.graphs.test_build import WANTED, never, yard

BLOB = blob_key(sha256_of(b"code"))
POINTER = f"keys/{WANTED.key}.json"


class NoSums(MemoryStore):
    """A store that keeps no checksums, as many servers that speak S3."""

    def head(self, key):
        """Without the checksum."""
        head = super().head(key)
        return None if head is None else dataclasses.replace(head, sha256=None)


def point_to(store, artefact):
    """Make another artefact the one of our key."""
    digest = put_document(store, "artefacts", artefact)
    store.put(POINTER, Pointer(key=WANTED.key, artefact=digest).to_bytes())


def artefact_of(paths, facts=WANTED.facts):
    """A document that names the blob by these paths."""
    files = tuple(Packed(path=path, size_bytes=4, sha256=sha256_of(b"code")) for path in paths)
    return Artefact(key=WANTED.key, facts=dict(facts), files=files)


DAMAGE = {
    "blob gone": lambda store, _: store.delete(BLOB),
    "blob cut": lambda store, _: store.put(BLOB, b"co"),
    "blob changed": lambda store, _: store.put(BLOB, b"edoc"),
    "document gone": lambda store, built: store.delete(f"artefacts/{built.artefact}.json"),
    "document torn": lambda store, built: store.put(f"artefacts/{built.artefact}.json", b'{"format":1'),
    "document changed": lambda store, built: store.put(f"artefacts/{built.artefact}.json", b"{}"),
    "pointer torn": lambda store, _: store.put(POINTER, b'{"key'),
    "foreign": lambda store, _: point_to(store, artefact_of(["a"], {"bucket": "other"})),
    "paths": lambda store, _: point_to(store, artefact_of(["a", "a/b"])),
}


@pytest.mark.parametrize("kind", [MemoryStore, NoSums])
@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_built_again(tmp_path, what, kind):
    """Torn, changed, gone or foreign: compile builds the shape anew, and a run then gets every byte."""
    store, told = kind(), []
    first = build(yard(store, tmp_path), WANTED)
    DAMAGE[what](store, first)
    digest = build_all(yard(store, tmp_path, "b"), [WANTED], told.append)
    assert [built.status for built in told] == ["built"]
    named = get_document(store, "sets", digest, GraphSet).artefacts[WANTED.key]
    unpack(store, find_artefact(store, named, WANTED.facts), tmp_path / "machine")
    assert (tmp_path / "machine" / "kernel.so").read_bytes() == b"code"
    assert build(yard(store, tmp_path, "c", never), WANTED).status == "found"


@pytest.mark.s3
@pytest.mark.parametrize("body", [b"edoc", b"c", None])
def test_damage_on_s3_is_mended(s3_store, tmp_path, body):
    """On an S3 server a changed, torn or lost file is found out and put right."""
    build(yard(s3_store, tmp_path), WANTED)
    s3_store.delete(BLOB) if body is None else s3_store.put(BLOB, body)
    assert build(yard(s3_store, tmp_path, "b"), WANTED).status == "built"
    assert s3_store.get(BLOB).body == b"code"
    assert build(yard(s3_store, tmp_path, "c", never), WANTED).status == "found"


def test_a_torn_set_is_written_again(tmp_path):
    """The list that the printed digest names is replaced when its bytes are not that digest's."""
    store = MemoryStore()
    digest = build_all(yard(store, tmp_path), [WANTED], lambda _: None)
    store.put(f"sets/{digest}.json", b"{}")
    assert build_all(yard(store, tmp_path), [WANTED], lambda _: None) == digest
    assert set(get_document(store, "sets", digest, GraphSet).artefacts) == {WANTED.key}


@pytest.mark.parametrize("body", [b"garbage", b"{}", None])
def test_a_lease_that_is_none_holds_nobody_up(tmp_path, body):
    """Garbage, or another key's lease, where the lease belongs: it is replaced, the shape is built, the lease freed."""
    store = MemoryStore()
    if body is None:
        claim(store, Owner("other", "other"), "another-key")
        body = store.get("lease/another-key.json").body
    store.put(f"lease/{WANTED.key}.json", body)
    assert build(yard(store, tmp_path), WANTED).status == "built"
    assert read_lease(store, WANTED.key).body.owner is None


def test_sigterm_frees_the_lease(tmp_path):
    """SIGTERM while a shape is compiled: exit 75 with words, and the next worker builds at once."""
    store = MemoryStore()

    def terminated(_cache):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal comes first")

    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(Drained, match="SIGTERM: its lease is free") as caught,
        unwound_by_sigterm(60.0, "its lease is free"),
    ):
        build(yard(store, tmp_path, "a", terminated), WANTED)
    assert caught.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    assert list(tmp_path.iterdir()) == []
    assert read_lease(store, WANTED.key).body.owner is None


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a", "a/b"], "is a file and a folder"),
        (["x/y/z", "x"], "is a file and a folder"),
        (["a", "a"], "stands there twice"),
        (["a/"], "plain relative path"),
        (["./a"], "plain relative path"),
        (["a//b"], "plain relative path"),
        (["a\0b"], "plain relative path"),
        (["a\nb"], "plain relative path"),
        (["x" * 256], "longer than a file system takes"),
        (["/".join(["x" * 200] * 6)], "longer than a file system takes"),
        (["../a"], "leads out of its folder"),
        (["."], "leads out of its folder"),
        (["a", "b/a", "b/c"], None),
    ],
)
def test_paths_must_fit_together(paths, words):
    """Files that no folder can hold at one time are refused by rule, before anything is fetched."""
    found = path_fault(paths)
    assert (found is None) if words is None else (words in found)


def test_what_has_no_place_is_refused(tmp_path):
    """A folder of this machine where the file belongs is an error that names it, with exit 2."""
    store = FolderStore(tmp_path / "store")
    store.create(BLOB, b"code")
    artefact = artefact_of(["a/b"])
    (tmp_path / "cache" / "a" / "b" / "c").mkdir(parents=True)
    with pytest.raises(ArtefactRefused, match=r"a/b: .*foreign or damaged") as caught:
        unpack(store, artefact, tmp_path / "cache")
    assert caught.value.exit_code == 2
    with pytest.raises(ArtefactRefused, match=r"/a: .*foreign or damaged"):
        unpack(store, artefact_of(["a", "a/b/c/d"]), tmp_path / "cache")
    check_whole(store, artefact)


def test_a_set_names_digests_alone():
    """What is no SHA-256 is no artefact, and never becomes a key."""
    with pytest.raises(ValueError, match="string_pattern_mismatch"):
        GraphSet(artefacts={"k": "../../elsewhere"})

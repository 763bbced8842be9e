"""What commands share: settings that `reproduce` restores, scratch folders that are made, images in a manifest's cells."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen.cli import invoke
from batch_gen.commands.compile_ import reader_of, wanted_of
from batch_gen.commands.regress_tiers import subject_of
from batch_gen.commands.reproduce import RESTORED, Original, settings_of
from batch_gen.errors import EnvironmentFault
from batch_gen.images import images_of
from batch_gen.placement import rank_threads
from batch_gen.prepare import prepare
from batch_gen.runfile import new_run
from batch_gen.scratch import open_scratch
from batch_gen.worker import numerics, numerics_key
from tests.regression import write_suite
from tests.zoo_images import colour

FACTS = {"replicas"}
"""What numerics reads beside settings that are restored: a rank's share of the cores becomes its threads."""
OTHER = {
    "device": "cuda", "mesh": "tp=2,cp=2", "attention": "ring", "tp_sequence_parallel": True, "kernels": "nki",
    "compile": "block", "compile_backend": "eager", "threads": 3,
}  # fmt: skip


class Spy:
    """Settings that remember what was read of them."""

    def __init__(self, settings):
        self.settings, self.read = settings, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.settings, name)


@pytest.fixture
def ready(tmp_path):
    """A function that prepares a small manifest for the fake engine."""
    path = write_suite(tmp_path)
    return lambda **given: prepare([str(path)], {"model": "fake", "out": str(tmp_path / "o"), **given})


def run_of(prepared):
    """The head of this run, as its first worker writes it."""
    profile = prepared.settings.model_dump(mode="json", by_alias=True)
    return new_run(prepared.fingerprint_settings(), profile=profile)


def test_reproduce_restores_all_that_numerics_reads(ready):
    """Every operational setting that can change bits is on one list: what numerics reads, reproduce restores."""
    settings = ready().settings
    read = set()
    for changes in ({}, {"threads": None}, {"compile": "block", "compile_backend": "eager"}):
        spy = Spy(settings.model_copy(update={"mesh": settings.mesh.model_copy(update={"tp": 2}), **changes}))
        numerics(spy)
        read |= spy.read
    assert read - FACTS == set(RESTORED) == set(OTHER)


@pytest.mark.parametrize("name", RESTORED)
def test_a_restored_setting_is_the_runs(ready, name):
    """A run with another value of any of them is reproduced with that value, not with the default."""
    prepared = ready()
    resolved = type(prepared.settings).model_validate(
        {**prepared.settings.model_dump(by_alias=True), name: OTHER[name]}
    )
    run = run_of(replace(prepared, settings=resolved))
    again = settings_of(Original(SimpleNamespace(), run), prepared.checkpoint, {})
    assert getattr(again, name) == getattr(resolved, name) != getattr(prepared.settings, name)
    assert numerics_key(again) == numerics_key(resolved)


def test_threads_of_a_run_with_replicas_are_kept(ready):
    """A replica had half of the cores; its clip is rendered again by as many threads, although it is alone now."""
    prepared = ready(replicas=2)
    again = settings_of(Original(SimpleNamespace(), run_of(prepared)), prepared.checkpoint, {})
    assert (again.replicas, rank_threads(again)) == (1, rank_threads(prepared.settings))
    assert numerics_key(again) == numerics_key(prepared.settings)


def test_a_scratch_folder_is_made(tmp_path):
    """--scratch may name a folder that is not there yet; one that cannot be made is one sentence, exit 2."""
    with open_scratch(str(tmp_path / "a" / "b")) as folder:
        assert folder.parent == tmp_path / "a" / "b"
        assert folder.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="choose another with --scratch"), open_scratch(tmp_path / "file"):
        pass


def test_regress_makes_its_scratch_folder(tmp_path, capsys):
    """mutate, which needs a folder of its own beside the engine's, works below one that nobody made."""
    path = write_suite(tmp_path)
    flags = ["--model", "fake", "--threads", "1", "--out", str(tmp_path / "o"), "--quiet", "--limit", "1"]
    assert invoke(["regress", "mutate", str(path), *flags, "--scratch", str(tmp_path / "new" / "scratch")]) == 2
    assert "needs two cases" in capsys.readouterr().err
    assert (tmp_path / "new" / "scratch").is_dir()


@pytest.fixture
def embedded(tmp_path, tiny_variant):
    """(manifest with one image as bytes in its cell, flags of its checkpoint)."""
    row = {"row_id": "one", "prompt": "a red fox", "seed": 3, "width": 64, "height": 48, "num_frames": 5, "steps": 2}
    columns = {name: pa.array([value]) for name, value in row.items()} | {
        "image": pa.array([colour("PNG")], pa.binary())
    }
    path = tmp_path / "bytes.parquet"
    pq.write_table(pa.table(columns), path)
    return path, {"model": str(tiny_variant("i2v")), "out": str(tmp_path / "fresh")}


def test_images_in_cells_are_read_before_a_root_holds_them(embedded):
    """compile has no output root, and regress may have a fresh one: both get the pixels of the manifest's own bytes."""
    path, flags = embedded
    prepared = prepare([str(path)], flags)
    wanted = wanted_of(prepared)
    (request,) = wanted[0].requests
    assert request.image == f"bytes:{hashlib.sha256(colour('PNG')).hexdigest()}"
    assert reader_of(prepared, wanted).read(request.image) == colour("PNG")
    (pixels,), _ = images_of(request, reader_of(prepared, wanted), "crop")
    subject = subject_of((str(path),), flags, None, "plain")
    assert pixels.shape == (48, 64, 3)
    assert np.array_equal(subject.images, [pixels])

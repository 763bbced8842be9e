"""Clips from images as whole runs: paths, bytes and both images, on the tiny image-to-video checkpoints."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
from helpers import hashes, keys, records, run

from batch_gen.cli import invoke
from tests.zoo_images import HEIGHT, WIDTH, colour, turned

BASE = {"num_frames": 5, "width": 64, "height": 48, "steps": 2, "seed": 3, "prompt": "a red fox"}


def manifest_of(path, rows, media=None):
    """A manifest whose image columns hold text or bytes."""
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    arrays = {name: pa.array(values, media if name == "image" else None) for name, values in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


def test_image_to_video_runs(tmp_path, tiny_variant):
    """Paths and bytes of one image give one clip's frames, alone or with others; the root keeps the bytes, the record
    says what was read."""
    (tmp_path / "fox.png").write_bytes(colour("PNG"))
    (tmp_path / "last.png").write_bytes(turned(6))
    rows = [BASE | {"row_id": "one", "image": "fox.png", "last_image": None}]
    rows += [BASE | {"row_id": "two", "image": "fox.png", "last_image": "last.png"}]
    model = ("--model", str(tiny_variant("i2v")))
    paths = manifest_of(tmp_path / "paths.parquet", rows)
    assert run(paths, tmp_path / "paths", *model)[0] == 0
    cell = [BASE | {"row_id": "one", "image": colour("PNG")}]
    embedded = manifest_of(tmp_path / "bytes.parquet", cell, pa.binary())
    assert run(embedded, tmp_path / "bytes", *model)[0] == 0
    found = hashes(tmp_path / "paths")
    assert found["one"] == hashes(tmp_path / "bytes")["one"] != found["two"]
    assert [key for key in keys(tmp_path / "bytes") if key.startswith("images/")]
    told = records(tmp_path / "paths")["two"].metrics["images"]
    assert [image["column"] for image in told] == ["image", "last_image"]
    assert {(*image["size_px"], image["resize"]) for image in told} == {(WIDTH, HEIGHT, "crop")}


@pytest.mark.slow
def test_an_image_clip_is_reproduced(tmp_path, tiny_variant):
    """A clip whose image came as bytes is reproduced from its record and its root alone."""
    cell = [BASE | {"row_id": "one", "image": colour("PNG")}]
    manifest = manifest_of(tmp_path / "bytes.parquet", cell, pa.binary())
    assert run(manifest, tmp_path / "out", "--model", str(tiny_variant("i2v")))[0] == 0
    [path] = (tmp_path / "out").glob("clips/*/one.json")
    assert invoke(["reproduce", str(path)]) == 0


@pytest.mark.slow
def test_5b_serves_both_kinds(tmp_path, tiny_variant):
    """One manifest with and without images runs on the 5B's kind of checkpoint."""
    (tmp_path / "fox.png").write_bytes(colour("PNG"))
    row = BASE | {"width": 64, "height": 64}
    rows = [row | {"row_id": "text", "image": None}, row | {"row_id": "image", "image": "fox.png"}]
    manifest = manifest_of(tmp_path / "m.parquet", rows, pa.string())
    assert run(manifest, tmp_path / "out", "--model", str(tiny_variant("ti2v")))[0] == 0
    assert len(set(hashes(tmp_path / "out").values())) == 2


@pytest.mark.slow
def test_fit_is_recorded(tmp_path, tiny_variant):
    """Under `--resize fit` the record's request has the size that was rendered."""
    (tmp_path / "fox.png").write_bytes(colour("PNG"))
    rows = [BASE | {"row_id": "one", "width": 64, "height": 64, "image": "fox.png"}]
    manifest = manifest_of(tmp_path / "m.parquet", rows)
    assert run(manifest, tmp_path / "out", "--model", str(tiny_variant("i2v")), "--resize", "fit")[0] == 0
    request = records(tmp_path / "out")["one"].request
    assert (request["width"], request["height"]) == (64, 48)

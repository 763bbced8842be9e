"""Images of a manifest: a zoo of files, sizes, sources, and faults by row before anything is rendered."""

from __future__ import annotations

import hashlib
import json
import re
import sys

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from batch_gen.cli import invoke
from batch_gen.errors import ClipFailed, ManifestError
from batch_gen.image_checks import check_images, keep_images
from batch_gen.images import ImageFault, ImageReader, decode, fitted_size, images_of, resize
from batch_gen.layout import image_key
from batch_gen.manifest import read_manifest
from batch_gen.storage.base import StoreOptions
from batch_gen.storage.memory import MemoryStore
from tests.making import make_request
from tests.manifests import ANY_INPUT, DEFAULTS, save
from tests.zoo_images import BAD, GOOD, HEIGHT, WIDTH, colour, picture

NOWHERE = ImageReader(None, StoreOptions())


def test_the_zoo_is_large():
    """At least 20 kinds of image files are tried, good and bad."""
    assert len(GOOD) >= 20
    assert len(BAD) >= 12


@pytest.mark.parametrize("name", GOOD)
def test_good_images(name):
    """What can be read becomes upright 8-bit RGB with the colours that a viewer shows."""
    make, shows = GOOD[name]
    pixels = decode(make())
    assert (pixels.dtype, pixels.shape) == (np.uint8, (HEIGHT, WIDTH, 3))
    assert shows(pixels)


@pytest.mark.parametrize("name", BAD)
def test_bad_images(name):
    """What is broken, animated or of no use is refused with the reason."""
    make, reason = BAD[name]
    with pytest.raises(ImageFault, match=reason):
        decode(make())


def test_the_zoo_in_a_manifest(tmp_path):
    """Validation reports every bad image at once, by row, and no good one."""
    zoo = {**GOOD, **BAD}
    for number, (make, _) in enumerate(zoo.values()):
        (tmp_path / f"{number}.jpg").write_bytes(make())
    columns = {"prompt": ["a fox"] * len(zoo), "image": [f"{number}.jpg" for number in range(len(zoo))]}
    manifest = read_manifest([save(tmp_path / "m.parquet", columns)], DEFAULTS, ANY_INPUT)
    with pytest.raises(ManifestError) as caught:
        check_images(manifest, NOWHERE, "crop")
    assert [fault.row for fault in caught.value.faults] == list(range(len(GOOD), len(zoo)))
    assert {fault.column for fault in caught.value.faults} == {"image"}
    for fault, (_, reason) in zip(caught.value.faults, BAD.values(), strict=True):
        assert re.search(reason, fault.message)


def configs_only(folder, index, channels, vae):
    """A checkpoint folder without weights: all that validation reads."""
    sizes = {"num_attention_heads": 8, "attention_head_dim": 16, "text_dim": 64, "ffn_dim": 256, "num_layers": 2}
    sizes |= dict(zip(("in_channels", "out_channels"), channels, strict=True))
    for part in ("text_encoder", "tokenizer", "scheduler", "transformer", "vae"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer/config.json").write_text(json.dumps(sizes))
    (folder / "vae/config.json").write_text(json.dumps(vae))
    return str(folder)


def text_model(folder):
    """The kind of T2V-A14B."""
    return configs_only(folder, {"_class_name": "WanPipeline"}, (16, 16), {})


def image_model(folder):
    """The kind of I2V-A14B."""
    return configs_only(folder, {"_class_name": "WanImageToVideoPipeline"}, (36, 16), {})


def both_model(folder):
    """The kind of TI2V-5B."""
    vae = {"z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, "is_residual": True, "patch_size": 2}
    vae |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    return configs_only(folder, {"_class_name": "WanPipeline", "expand_timesteps": True}, (48, 48), vae)


def test_who_serves_a_row(tmp_path, capsys):
    """A manifest with and without images is fine for the 5B's kind; others leave with 2 and name who serves the row."""
    (tmp_path / "fox.png").write_bytes(colour("PNG"))
    columns = {"prompt": ["a", "b"], "image": [None, "fox.png"], "width": [64, 64], "height": [64, 64]}
    path = str(save(tmp_path / "m.parquet", columns))
    assert invoke(["validate", path, "--model", both_model(tmp_path / "5b")]) == 0
    assert invoke(["validate", path, "--model", text_model(tmp_path / "t2v")]) == 2
    found = capsys.readouterr().err
    assert re.search("row 1, image.*use wan2.2-i2v-a14b or wan2.2-ti2v-5b", found, re.DOTALL)
    assert invoke(["validate", path, "--model", image_model(tmp_path / "i2v")]) == 2
    assert re.search("row 0, prompt.*use wan2.2-t2v-a14b or wan2.2-ti2v-5b", capsys.readouterr().err, re.DOTALL)


def test_5b_sizes(tmp_path, capsys):
    """The 5B's sizes are multiples of 32, and the message names the nearest."""
    path = str(save(tmp_path / "m.parquet", {"prompt": ["a"], "width": [1280], "height": [720]}))
    assert invoke(["validate", path, "--model", both_model(tmp_path / "5b")]) == 2
    assert "height = 720: is not a multiple of 32; nearest are 704 and 736" in capsys.readouterr().err


def test_the_command_names_the_row(tmp_path, capsys):
    """`validate` leaves with 2 and says which row's image is broken."""
    (tmp_path / "good.png").write_bytes(colour("PNG"))
    (tmp_path / "bad.png").write_bytes(colour("PNG")[:90])
    path = save(tmp_path / "m.parquet", {"prompt": ["a", "b"], "image": ["good.png", "bad.png"]})
    assert invoke(["validate", str(path), "--model", image_model(tmp_path / "i2v")]) == 2
    found = capsys.readouterr().err
    assert re.search(r"row 1, image = .*bad\.png.*: is broken or cut off", found, re.DOTALL)
    assert "row 0" not in found


def test_exact_needs_the_size(tmp_path):
    """Under `exact` an image of another size than its clip is a fault with both sizes."""
    (tmp_path / "a.png").write_bytes(colour("PNG"))
    columns = {"prompt": ["a", "b"], "image": ["a.png"] * 2, "width": [64, 48], "height": [48, 48]}
    manifest = read_manifest([save(tmp_path / "m.parquet", columns)], DEFAULTS, ANY_INPUT)
    with pytest.raises(ManifestError) as caught:
        check_images(manifest, NOWHERE, "exact")
    assert [fault.message for fault in caught.value.faults] == [
        f"has 60x40 pixels, the clip {size}; --resize crop or fit scales it" for size in ("64x48", "48x48")
    ]


def test_fit_gives_the_clip_the_images_shape(tmp_path):
    """Under `fit` a clip gets the image's aspect at about its own area; other rules leave its size."""
    (tmp_path / "a.png").write_bytes(colour("PNG"))
    columns = {"prompt": ["a"], "image": ["a.png"], "width": [96], "height": [96]}
    manifest = read_manifest([save(tmp_path / "m.parquet", columns)], DEFAULTS, ANY_INPUT)
    [request] = manifest.iter_requests()
    sizes = {}
    for rule in ("fit", "crop"):
        placed = check_images(manifest, NOWHERE, rule).placed(request)
        sizes[rule] = placed.width, placed.height
    assert sizes == {"fit": (112, 64), "crop": (96, 96)}


@pytest.mark.parametrize(
    ("image", "clip", "multiple", "expected"),
    [
        ((1920, 1080), (832, 480), 16, (832, 464)),
        ((1080, 1920), (832, 480), 16, (464, 832)),
        ((1000, 1000), (1280, 704), 32, (928, 928)),
        ((4000, 10), (64, 64), 16, (1280, 16)),
    ],
)
def test_fitted_sizes(image, clip, multiple, expected):
    """The size follows the published formula, never below one multiple."""
    assert fitted_size(image, clip, multiple) == expected


def test_crop_keeps_the_middle():
    """A frame of another shape shows the image's middle, without bars and without distortion."""
    stripes = np.zeros((40, 120, 3), np.uint8)
    stripes[:, 40:80] = 255
    assert (resize(stripes, 40, 40, "crop") == 255).all()
    doubled = resize(stripes, 240, 80, "crop")
    assert (doubled[:, 90:150] == 255).all()
    assert (doubled[:, :70] == 0).all()


def test_an_image_of_the_right_size_is_not_touched():
    """At its own size an image keeps its very pixels under every rule, so that parity with diffusers is exact."""
    for rule in ("crop", "fit", "exact"):
        assert np.array_equal(resize(picture(), WIDTH, HEIGHT, rule), picture())


def test_scaling_is_diffusers_own():
    """Where only the scale differs, `crop` is the Lanczos scaling of diffusers' image processor."""
    theirs = Image.fromarray(picture()).resize((WIDTH * 2, HEIGHT * 2), Image.Resampling.LANCZOS)
    assert np.array_equal(resize(picture(), WIDTH * 2, HEIGHT * 2, "crop"), np.asarray(theirs))


def test_bytes_live_in_the_output_root(tmp_path):
    """A binary cell is kept under its SHA-256 once, and is read from there alone; damage is noticed."""
    body = colour("PNG")
    columns = {"prompt": ["a", "b"], "image": pa.array([body, body], pa.binary())}
    manifest = read_manifest([save(tmp_path / "m.parquet", columns)], DEFAULTS, ANY_INPUT)
    store = MemoryStore()
    keep_images(store, manifest)
    keep_images(store, manifest)
    digest = hashlib.sha256(body).hexdigest()
    assert [listed.key for listed in store.list("images/")] == [image_key(digest)]
    request = next(manifest.iter_requests())
    [pixels], [told] = images_of(request, ImageReader(store, StoreOptions()), "crop")
    assert pixels.shape == (request.height, request.width, 3)
    assert told == {"column": "image", "sha256": digest, "size_px": [WIDTH, HEIGHT], "resize": "crop"}
    store.delete(image_key(digest))
    store.create(image_key(digest), b"something else")
    with pytest.raises(ClipFailed, match="is damaged in the output root") as caught:
        images_of(request, ImageReader(store, StoreOptions()), "crop")
    assert caught.value.kind == "input"


def test_an_image_that_vanished_fails_its_clip(tmp_path):
    """An image that is gone since validation fails its clip for good, with the path."""
    request = make_request(image=str(tmp_path / "gone.png"))
    with pytest.raises(ClipFailed, match=r"clip fox: image .*gone\.png does not exist") as caught:
        images_of(request, NOWHERE, "crop")
    assert caught.value.kind == "input"


@pytest.mark.s3
def test_images_on_s3(tmp_path, s3_server, s3_store):
    """An s3:// URI is read from its bucket, and one that is not there is a fault of its row."""
    s3_store.create("stills/fox.png", colour("PNG"))
    columns = {"prompt": ["a", "b"], "image": [f"{s3_store.url}/stills/{name}.png" for name in ("fox", "cat")]}
    manifest = read_manifest([save(tmp_path / "m.parquet", columns)], DEFAULTS, ANY_INPUT)
    reader = ImageReader(None, StoreOptions(endpoint_url=s3_server.endpoint))
    with pytest.raises(ManifestError) as caught:
        check_images(manifest, reader, "crop")
    assert [(fault.row, fault.message) for fault in caught.value.faults] == [(1, "does not exist")]
    assert decode(reader.read(columns["image"][0])).shape == (HEIGHT, WIDTH, 3)


def test_image_code_needs_no_torch():
    """The supervisor reads and scales images without torch."""
    assert "torch" not in getattr(sys.modules["batch_gen.images"], "__dict__", {})

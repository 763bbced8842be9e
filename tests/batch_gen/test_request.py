from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest

from batch_gen.request import (
    Bucket,
    ModelLimits,
    RenderRequest,
    check_request,
    clean_prompt,
    clip_id_of,
    default_seed,
)

FOX = RenderRequest(
    clip_id="fox",
    row_id="fox",
    sample=0,
    prompt="a fox",
    negative_prompt="",
    seed=7,
    width=832,
    height=480,
    num_frames=81,
    fps=Fraction(30000, 1001),
    steps=40,
    guidance_high=4.0,
    guidance_low=3.0,
    flow_shift=12.0,
    extra={"tag": "hero", "shot": 3},
)


def test_json_round_trip() -> None:
    """A request comes back equal from its JSON text, fps exact."""
    body = json.loads(json.dumps(FOX.to_json()))
    assert body["fps"] == "30000/1001"
    assert RenderRequest.from_json(body) == FOX


def test_json_refuses_unknown_fields() -> None:
    """A field that a request does not have is an error."""
    with pytest.raises(TypeError, match="colour"):
        RenderRequest.from_json(FOX.to_json() | {"colour": "red"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_id", "owl"),
        ("row_id", "owl"),
        ("sample", 1),
        ("priority", 3),
        ("preset", "draft"),
        ("extra", {}),
        ("guidance_high", 4),
    ],
)
def test_digest_ignores(name: str, value: object) -> None:
    """The digest does not change with what leaves the pixels alone, nor with 4 instead of 4.0."""
    assert dataclasses.replace(FOX, **{name: value}).digest == FOX.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "a fox "),
        ("negative_prompt", "blurry"),
        ("seed", 8),
        ("width", 848),
        ("height", 496),
        ("num_frames", 85),
        ("fps", Fraction(30)),
        ("steps", 41),
        ("guidance_high", 4.5),
        ("guidance_low", 3.5),
        ("flow_shift", 5.0),
        ("image", "a.png"),
    ],
)
def test_digest_sees(name: str, value: object) -> None:
    """The digest changes with every cell that decides what the clip looks like."""
    assert dataclasses.replace(FOX, **{name: value}).digest != FOX.digest


def test_digest_is_frozen() -> None:
    """The digest of one request is this constant: resumes compare digests that older versions wrote."""
    assert FOX.digest == "d36c64bb0f2eb1f6fba6b88288ed43bb0a76648a19502cde8325c4ff5b29d909"


def test_bucket_and_cost() -> None:
    """The bucket is the shape and the kind of input; the cost is frames x pixels x steps."""
    assert FOX.bucket == Bucket(832, 480, 81, "text")
    assert str(FOX.bucket) == "832x480x81-text"
    assert dataclasses.replace(FOX, image="a.png").bucket.conditioning == "image"
    assert dataclasses.replace(FOX, image="a.png", last_image="b.png").bucket.conditioning == "first_last"
    assert FOX.cost == 81 * 832 * 480 * 40
    assert FOX.duration_s == pytest.approx(81 * 1001 / 30000)


def test_clip_ids() -> None:
    """A row of one sample names its clip; more samples count from 0."""
    assert clip_id_of("fox", 0, 1) == "fox"
    assert [clip_id_of("fox", k, 3) for k in range(3)] == ["fox-s0", "fox-s1", "fox-s2"]


def test_default_seed_is_frozen() -> None:
    """A seed from run seed and clip_id is this constant on every machine, and differs by either."""
    import hashlib

    assert default_seed(0, "fox") == int(hashlib.sha256(b"0:fox").hexdigest(), 16) % 2**32
    assert default_seed(0, "fox") == 2897300142
    assert len({default_seed(0, "fox"), default_seed(1, "fox"), default_seed(0, "owl")}) == 3


def test_check_request() -> None:
    """A finished request is checked by the same rules, every fault at once."""
    assert check_request(FOX, ModelLimits()) == []
    broken = check_request(dataclasses.replace(FOX, width=830, num_frames=80), ModelLimits())
    assert broken == [
        ("width", "is not a multiple of 16; nearest are 816 and 832"),
        ("num_frames", "is not 4k+1; nearest are 77 and 81"),
    ]


def test_clean_prompt() -> None:
    """Cleaning mends mojibake, unescapes HTML twice and collapses whitespace."""
    assert clean_prompt("  a&amp;amp;b \n\t caf\u00c3\u00a9 ") == "a&b caf\u00e9"

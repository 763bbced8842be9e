from __future__ import annotations

from fractions import Fraction

import pytest

from batch_gen.errors import ManifestError
from batch_gen.manifest import ManifestOptions, read_manifest
from batch_gen.request import ModelLimits
from tests.manifests import DEFAULTS, save

OFFICIAL = ModelLimits(
    name="wan2.2-t2v-a14b",
    trained_frames=81,
    fps=Fraction(8),
    flow_shift=5.0,
    sizes=((128, 96),),
)


def warned(path, limits=OFFICIAL, **options) -> dict[str, int]:
    manifest = read_manifest([path], DEFAULTS, limits, ManifestOptions(**options))
    return {found.code: found.num_rows for found in manifest.survey.warnings}


def words(prompts: list[str]) -> list[int]:
    return [len(prompt.split()) + 1 for prompt in prompts]


def test_nothing_odd_nothing_said(tmp_path) -> None:
    """A manifest of the model's own settings gives no warning."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"], "width": [96], "height": [128], "tag": ["t"]})
    assert warned(path, count_tokens=words) == {}


@pytest.mark.parametrize(
    ("code", "columns"),
    [
        ("guidance", {"guidance_high": [1.0, 4.0], "guidance_low": [1.0, 1.0], "negative_prompt": ["bad", "bad"]}),
        ("frames", {"num_frames": [85, 81]}),
        ("fps", {"fps": ["16", None]}),
        ("size", {"width": [112, None]}),
        ("flow_shift", {"flow_shift": [3.0, 5.0]}),
    ],
)
def test_unlike_the_model(tmp_path, code: str, columns: dict[str, list[object]]) -> None:
    """Guidance that unmakes the negative prompt, and what the model was not trained for, is said once with its rows."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], **columns})
    assert warned(path) == {code: 1}


def test_preset_negative_is_no_reason(tmp_path) -> None:
    """Guidance 1 with the preset's negative prompt is a choice, not a mistake."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"], "guidance_high": [1.0], "guidance_low": [1.0]})
    assert warned(path) == {}


def test_low_guidance_alone_still_guides(tmp_path) -> None:
    """With guidance only at low noise the negative prompt has an effect there."""
    path = save(
        tmp_path / "a.parquet",
        {"prompt": ["x"], "guidance_high": [1.0], "guidance_low": [3.0], "negative_prompt": ["bad"]},
    )
    assert warned(path) == {}


def test_long_prompts(tmp_path) -> None:
    """Prompts above 320 tokens are warned about, above the model's limit told as cut, with the first row."""
    path = save(tmp_path / "a.parquet", {"prompt": ["short", "w " * 330, "w " * 600, "w " * 600]})
    manifest = read_manifest([path], DEFAULTS, OFFICIAL, ManifestOptions(count_tokens=words))
    found = manifest.survey.warned
    assert (found["tokens"].num_rows, found["truncated"].num_rows) == (1, 2)
    assert str(found["truncated"]).endswith(
        "row 2): prompts above 512 tokens are cut there (--long-prompt fail refuses them)"
    )


def test_long_prompts_can_be_refused(tmp_path) -> None:
    """With --long-prompt fail a prompt above the limit is a fault with its count."""
    path = save(tmp_path / "a.parquet", {"prompt": ["short", "w " * 600]})
    options = ManifestOptions(count_tokens=words, long_prompt="fail")
    with pytest.raises(ManifestError, match=r"row 1, prompt = .* has 601 tokens; wan2.2-t2v-a14b sees 512"):
        read_manifest([path], DEFAULTS, OFFICIAL, options)


def test_only_prompts_that_can_be_long_are_counted(tmp_path) -> None:
    """Tokens are counted once per distinct prompt, and only where its bytes can exceed the limit."""
    asked: list[str] = []

    def count(prompts: list[str]) -> list[int]:
        asked.extend(prompts)
        return words(prompts)

    wide = "\u72d0" * 30  # may grow while it is normalised
    path = save(tmp_path / "a.parquet", {"prompt": ["x" * 300, "y" * 400, "y" * 400, wide]})
    warned(path, count_tokens=count)
    assert asked == ["y" * 400, wide]


def test_only_wanted_rows_are_counted(tmp_path) -> None:
    """Warnings speak of the selected rows."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], "num_frames": [85, 81], "tag": ["a", "b"]})
    assert warned(path, where="tag = 'b'") == {}


def test_same_clip_twice(tmp_path) -> None:
    """Rows of different ids with the same content and seed are told; without a seed they differ."""
    columns = {"row_id": ["a", "b", "c", "d"], "prompt": ["x"] * 4, "seed": [7, 7, None, None]}
    assert warned(save(tmp_path / "a.parquet", columns)) == {"same_clip": 1}


def test_columns_that_look_like_others(tmp_path) -> None:
    """A column whose name is nearly or elsewhere one of ours is not carried through in silence."""
    path = save(
        tmp_path / "a.parquet", {"prompt": ["x"], "Width": [64], "guidance_scale": [7.0], "negativ_prompt": [""]}
    )
    manifest = read_manifest([path], DEFAULTS, OFFICIAL)
    assert [found.code for found in manifest.survey.warnings] == [
        "column:Width",
        "column:guidance_scale",
        "column:negativ_prompt",
    ]
    assert str(manifest.survey.warnings[1]).endswith(
        "a.parquet: column 'guidance_scale' is carried through unread; is guidance_high meant? "
        "(batch-gen import maps names)"
    )


def test_equal_presets_are_quiet_per_batch(tmp_path) -> None:
    """A warning that holds in many batches is one warning with all its rows."""
    count = 40_000
    path = save(
        tmp_path / "a.parquet", {"prompt": ["x"] * count, "seed": list(range(count)), "num_frames": [85] * count}
    )
    assert warned(path) == {"frames": count}

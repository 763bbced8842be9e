from __future__ import annotations

import datetime as dt
import decimal
import hashlib
from fractions import Fraction

import pyarrow as pa
import pytest

from batch_gen.errors import ConfigError, ManifestError, UsageError
from batch_gen.manifest import Location, ManifestOptions, ManifestSource, parse_overrides, read_ids, read_manifest
from batch_gen.request import Bucket, ModelLimits, default_seed
from tests.manifests import ANY_INPUT, DEFAULTS, LIMITS, save


def read(path, limits=LIMITS, **options):
    return read_manifest([path], DEFAULTS, limits, ManifestOptions(**options))


def ids(manifest) -> list[str]:
    return [request.clip_id for request in manifest.iter_requests()]


def test_defaults_fill_empty_cells(tmp_path) -> None:
    """Empty cells and missing columns take the preset's values; an empty negative prompt stays empty."""
    path = save(
        tmp_path / "a.parquet",
        {"row_id": ["fox", "owl"], "prompt": ["a fox", "an owl"], "negative_prompt": ["", None], "steps": [None, 3]},
    )
    fox, owl = read(path).iter_requests()
    assert (fox.negative_prompt, owl.negative_prompt) == ("", "blurry")
    assert (fox.steps, owl.steps) == (12, 3)
    assert (fox.width, fox.height, fox.num_frames, fox.fps) == (128, 96, 17, Fraction(8))
    assert (fox.guidance_high, fox.guidance_low, fox.flow_shift) == (4.0, 3.0, 5.0)


def test_types_that_lose_nothing_are_accepted(tmp_path) -> None:
    """large_string, views, dictionaries, null columns, other integers, whole floats and decimals read alike."""
    plain = save(
        tmp_path / "plain.parquet",
        {"row_id": ["a", "b"], "prompt": ["x", "y"], "width": [64, 80], "steps": [4, 5], "flow_shift": [3.0, 3.0]},
    )
    drifted = save(
        tmp_path / "drifted.parquet",
        {
            "row_id": pa.array(["a", "b"]).dictionary_encode(),
            "prompt": pa.array(["x", "y"], pa.large_string()),
            "negative_prompt": pa.nulls(2),
            "width": pa.array([64, 80], pa.uint8()),
            "height": pa.array([96.0, None]),
            "steps": pa.array([4, 5], pa.int16()).dictionary_encode(),
            "flow_shift": pa.array([decimal.Decimal("3.0")] * 2, pa.decimal128(5, 2)),
        },
    )
    binary = save(
        tmp_path / "binary.parquet",
        {"row_id": ["a", "b"], "prompt": [b"x", b"y"], "width": [64, 80], "steps": [4, 5], "flow_shift": [3, 3]},
    )
    expected = [request.digest for request in read(plain).iter_requests()]
    assert [request.digest for request in read(drifted).iter_requests()] == expected
    assert [request.digest for request in read(binary).iter_requests()] == expected


def test_folder_of_drifting_files(tmp_path) -> None:
    """Files of one folder may differ in types and columns; they are read in order of name, hidden ones left out."""
    save(tmp_path / "in/b.parquet", {"row_id": ["b"], "prompt": pa.array(["x"]).dictionary_encode(), "steps": [3]})
    save(
        tmp_path / "in/a.parquet", {"row_id": pa.array(["a"], pa.large_string()), "prompt": ["x"], "steps": pa.nulls(1)}
    )
    save(tmp_path / "in/deep/c.parquet", {"row_id": ["c"], "prompt": ["x"]})
    save(tmp_path / "in/_tmp/d.parquet", {"row_id": ["d"], "prompt": ["x"]})
    save(tmp_path / "in/.e.parquet", {"row_id": ["e"], "prompt": ["x"]})
    manifest = read(tmp_path / "in")
    assert ids(manifest) == ["a", "b", "c"]
    assert manifest.num_rows == 3


def test_every_fault_at_once(tmp_path) -> None:
    """One error names every fault of every file, with file, row from 0, column, value and nearest legal value."""
    first = save(tmp_path / "a.parquet", {"row_id": ["a", "b"], "prompt": ["x", None], "width": [830, 64]})
    second = save(tmp_path / "b.parquet", {"row_id": ["c", "a"], "prompt": ["x", "y"], "num_frames": [80, 81]})
    with pytest.raises(ManifestError) as caught:
        read_manifest([first, second, tmp_path / "none.parquet"], DEFAULTS, LIMITS)
    assert [str(fault).replace(str(tmp_path), "") for fault in caught.value.faults] == [
        "/none.parquet: does not exist",
        "/a.parquet, row 0, width = 830: is not a multiple of 16; nearest are 816 and 832",
        "/a.parquet, row 1, prompt: is required and the cell is empty",
        "/b.parquet, row 0, num_frames = 80: is not 4k+1; nearest are 77 and 81",
        f"/b.parquet, row 1, row_id = 'a': is already the id of {first} row 0".replace(str(tmp_path), ""),
    ]


def test_a_million_faults_are_counted_not_kept(tmp_path) -> None:
    """All faults are counted while a bounded number is kept, and no column hides another."""
    count = 50_000
    path = save(
        tmp_path / "a.parquet", {"prompt": ["x"] * count, "width": [3] * count, "steps": [0] + [1] * (count - 1)}
    )
    with pytest.raises(ManifestError) as caught:
        read(path)
    assert caught.value.num_faults == count + 1
    assert len(caught.value.faults) < 2_000
    assert "steps = 0" in str(caught.value)


def test_row_groups_and_rows_are_located(tmp_path) -> None:
    """Each request comes with its file, row group and row in the file; a chunk's rows can be read alone."""
    first = save(tmp_path / "a.parquet", {"row_id": [f"a{k}" for k in range(5)], "prompt": ["x"] * 5}, row_group_size=2)
    second = save(tmp_path / "b.parquet", {"row_id": ["b0", "b1"], "prompt": ["y"] * 2, "samples": [1, 2]})
    manifest = read_manifest([first, second], DEFAULTS, LIMITS)
    located = {request.clip_id: location for location, request in manifest.iter_located_requests()}
    assert located["a0"] == Location(0, 0, 0)
    assert located["a4"] == Location(0, 2, 4)
    assert located["b1-s1"] == Location(1, 0, 1)
    assert [request.clip_id for request in manifest.requests_in(0, 1, [3])] == ["a3"]
    assert [request.clip_id for request in manifest.requests_in(1, 0, [1])] == ["b1-s0", "b1-s1"]


def test_hashed_ids_depend_on_content_alone(tmp_path) -> None:
    """A row without an id is named by its cells: not by its place, its types, its extra columns or its null columns."""
    one = save(tmp_path / "one.parquet", {"prompt": ["x", "y"], "steps": [4, None], "tag": ["t", "u"]})
    two = save(
        tmp_path / "two.parquet",
        {"steps": pa.array([None, 4.0]), "prompt": pa.array(["y", "x"]).dictionary_encode(), "seed": pa.nulls(2)},
    )
    assert ids(read(one)) == list(reversed(ids(read(two))))


def test_hashed_ids_are_frozen(tmp_path) -> None:
    """The name of a row without an id is this constant: outputs of older versions stay valid."""
    path = save(tmp_path / "a.parquet", {"prompt": ["a fox"], "fps": ["24/1"], "guidance_high": [4], "seed": [7]})
    body = b"prompt\x1f5\x1fa fox\x1eseed\x1f1\x1f7\x1efps\x1f2\x1f24\x1eguidance_high\x1f3\x1f4.0\x1e"
    assert ids(read(path)) == [hashlib.sha256(body).hexdigest()[:20]]


def test_hashed_ids_ignore_overrides_and_presets(tmp_path) -> None:
    """Draft and final name the same clips and seeds, whatever is overridden."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], "steps": [4, 5]})
    draft = read(path, overrides={"steps": 2})
    assert ids(draft) == ids(read(path))
    assert [request.steps for request in draft.iter_requests()] == [2, 2]
    assert [request.seed for request in draft.iter_requests()] == [
        request.seed for request in read(path).iter_requests()
    ]


def test_equal_rows_get_suffixes(tmp_path) -> None:
    """Equal rows without ids are -2 and -3 in manifest order, over files, and warned about."""
    first = save(tmp_path / "a.parquet", {"prompt": ["x", "x", "y"]})
    second = save(tmp_path / "b.parquet", {"prompt": ["x"]})
    manifest = read_manifest([first, second], DEFAULTS, LIMITS)
    base = ids(manifest)[0]
    assert ids(manifest)[1::2] == [f"{base}-2", f"{base}-3"]
    assert manifest.survey.warned["equal_rows"].num_rows == 2
    assert len({request.seed for request in manifest.iter_requests()}) == 4


def test_seeds(tmp_path) -> None:
    """A seed cell counts up with the sample; without one each clip_id and run seed gives its own."""
    path = save(
        tmp_path / "a.parquet", {"row_id": ["a", "b"], "prompt": ["x", "y"], "seed": [7, None], "samples": [3, 2]}
    )
    requests = list(read(path, run_seed=5).iter_requests())
    assert [request.seed for request in requests[:3]] == [7, 8, 9]
    assert [request.seed for request in requests[3:]] == [default_seed(5, "b-s0"), default_seed(5, "b-s1")]
    assert [request.sample for request in requests] == [0, 1, 2, 0, 1]
    assert [request.row_id for request in requests] == ["a"] * 3 + ["b"] * 2


def test_clip_ids_may_not_clash(tmp_path) -> None:
    """A sample's clip_id that another row already has is a fault."""
    path = save(tmp_path / "a.parquet", {"row_id": ["fox-s1", "fox"], "prompt": ["x", "y"], "samples": [1, 2]})
    with pytest.raises(ManifestError, match=r"row 1, row_id = 'fox': is already the id of .* row 0 .'fox-s1'."):
        read(path)


def test_case_counts_only_off_folders(tmp_path) -> None:
    """Ids that differ by case alone are a fault for folder outputs and fine elsewhere."""
    path = save(tmp_path / "a.parquet", {"row_id": ["fox", "FOX"], "prompt": ["x", "y"]})
    assert ids(read(path)) == ["fox", "FOX"]
    with pytest.raises(
        ManifestError, match=r"row_id = 'FOX': is already the id of .* row 0 .'fox'.; with case ignored"
    ):
        read(path, fold_case=True)


def test_hashed_and_own_ids_may_not_clash(tmp_path) -> None:
    """An id that equals the hash of another row is found."""
    plain = save(tmp_path / "a.parquet", {"prompt": ["x"]})
    taken = ids(read(plain))[0]
    both = save(tmp_path / "b.parquet", {"row_id": [None, taken], "prompt": ["x", "y"]})
    with pytest.raises(ManifestError, match="is already the id of"):
        read(both)


def test_fps_forms(tmp_path) -> None:
    """Frame rates as text, integers and floats become exact fractions."""
    text = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], "fps": ["30000/1001", "23.976"]})
    number = save(tmp_path / "b.parquet", {"prompt": ["x", "y"], "fps": pa.array([23.976, 24], pa.float32())})
    rates = [request.fps for path in (text, number) for request in read(path).iter_requests()]
    assert rates == [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(24000, 1001), Fraction(24)]


def test_extra_columns_are_carried(tmp_path) -> None:
    """Other columns reach the request as JSON, unread: text, numbers, structures, instants, bytes, NaN."""
    path = save(
        tmp_path / "a.parquet",
        {
            "prompt": ["x"],
            "tag": ["hero"],
            "shot": [3],
            "crew": [["ann", "bob"]],
            "meta": [{"take": 2}],
            "day": [dt.date(2026, 5, 1)],
            "price": [decimal.Decimal("1.50")],
            "blob": [b"\0\1"],
            "score": [float("nan")],
            "gone": pa.nulls(1),
        },
    )
    assert next(read(path).iter_requests()).extra == {
        "tag": "hero",
        "shot": 3,
        "crew": ["ann", "bob"],
        "meta": {"take": 2},
        "day": "2026-05-01",
        "price": "1.50",
        "blob": "AAE=",
        "score": "nan",
        "gone": None,
    }


def test_images(tmp_path) -> None:
    """Images are absolute paths, s3 URIs or digests of bytes; the bucket tells the kind of input."""
    (tmp_path / "img").mkdir()
    (tmp_path / "img/a.png").write_bytes(b"png")
    path = save(
        tmp_path / "a.parquet",
        {
            "prompt": ["x", "y", "z"],
            "image": ["img/a.png", "s3://b/k.png", None],
            "last_image": [None, "s3://b/l.png", None],
        },
    )
    requests = list(read(path, ANY_INPUT).iter_requests())
    assert requests[0].image == str(tmp_path / "img/a.png")
    assert requests[1].image == "s3://b/k.png"
    assert [request.bucket.conditioning for request in requests] == ["image", "first_last", "text"]


def test_a_last_image_needs_more_than_one_frame(tmp_path) -> None:
    """A first and a last image of a clip of one frame are refused with their row, also where an override says so."""
    place = {"image": ["s3://b/f.png"] * 3, "last_image": ["s3://b/l.png", "s3://b/l.png", None]}
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y", "z"], "num_frames": [1, 5, 1], **place})
    with pytest.raises(ManifestError) as caught:
        read(path, ANY_INPUT)
    assert [(fault.row, fault.column) for fault in caught.value.faults] == [(0, "num_frames")]
    assert "need at least 5 frames" in caught.value.faults[0].message
    overrides = parse_overrides(["num_frames=1"], ANY_INPUT)
    with pytest.raises(ManifestError) as caught:
        read(path, ANY_INPUT, overrides=overrides)
    assert [fault.row for fault in caught.value.faults] == [0, 1]


def test_image_bytes_are_read_on_demand(tmp_path) -> None:
    """A binary image is named by its digest and read again by its place."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], "image": [b"one", None]})
    manifest = read(path, ANY_INPUT)
    (location, request), (other, _) = manifest.iter_located_requests()
    assert request.image == f"bytes:{hashlib.sha256(b'one').hexdigest()}"
    assert manifest.image_bytes(location, "image") == b"one"
    assert manifest.image_bytes(other, "image") is None


def test_images_beside_a_manifest_on_s3(tmp_path) -> None:
    """A relative image of a manifest that came from S3 lies beside it on S3."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"], "image": ["../img/a.png"]})
    source = ManifestSource(path, "s3://bucket/jobs/a.parquet", "s3://bucket/jobs")
    manifest = read_manifest([source], DEFAULTS, ANY_INPUT)
    assert next(manifest.iter_requests()).image == "s3://bucket/img/a.png"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("tag = 'hero'", ["a", "c"]),
        ("tag == 'hero' AND width >= 80", ["c"]),
        ("not tag = 'hero'", ["b"]),
        ("tag in ('hero', 'it''s')", ["a", "b", "c"]),
        ("tag not in ('hero')", ["b"]),
        ("tag is null", ["d"]),
        ("tag is not null and not (width < 80)", ["c"]),
        ("tag like 'he%'", ["a", "c"]),
        ("width = 64 or \"shot name\" = 'z'", ["a", "b", "d"]),
        ("score > -1.5e0", ["a"]),
        ("flag = true", ["a"]),
        ("row_id != 'a'", ["b", "c", "d"]),
        ("height = 96", []),
    ],
)
def test_where(tmp_path, where: str, expected: list[str]) -> None:
    """Expressions select rows by their cells before defaults; a comparison with an empty cell takes no row."""
    path = save(
        tmp_path / "a.parquet",
        {
            "row_id": list("abcd"),
            "prompt": ["x"] * 4,
            "tag": ["hero", "it's", "hero", None],
            "width": [64, 64, 80, None],
            "shot name": ["w", "x", "y", "z"],
            "score": [0.5, -2.0, None, None],
            "flag": [True, False, None, None],
        },
    )
    if expected:
        assert ids(read(path, where=where)) == expected
    else:
        with pytest.raises(UsageError, match="leave no clip"):
            read(path, where=where)


def test_where_over_files_without_the_column(tmp_path) -> None:
    """A column that some files lack is empty there."""
    first = save(tmp_path / "a.parquet", {"row_id": ["a"], "prompt": ["x"], "tag": ["hero"]})
    second = save(tmp_path / "b.parquet", {"row_id": ["b"], "prompt": ["x"]})
    manifest = read_manifest([first, second], DEFAULTS, LIMITS, ManifestOptions(where="tag is null"))
    assert ids(manifest) == ["b"]


def test_limit_and_ids(tmp_path) -> None:
    """--limit takes the first clips, --ids rows by row_id and single clips by clip_id."""
    path = save(tmp_path / "a.parquet", {"row_id": list("abc"), "prompt": ["x", "y", "z"], "samples": [1, 3, 1]})
    assert ids(read(path, limit=3)) == ["a", "b-s0", "b-s1"]
    assert ids(read(path, ids=frozenset(["c", "b-s2"]))) == ["b-s2", "c"]
    assert ids(read(path, ids=frozenset(["b"]), limit=2)) == ["b-s0", "b-s1"]
    assert read(path, limit=2).survey.num_clips == 2
    with pytest.raises(UsageError, match="1 of 2 ids are not in the manifest: nobody"):
        read(path, ids=frozenset(["a", "nobody"]))


def test_selection_does_not_change_names(tmp_path) -> None:
    """Names and seeds of a part are those of the whole, equal rows included."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y", "x"], "tag": ["s", "t", "u"]})
    assert ids(read(path, where="tag = 'u'")) == [ids(read(path))[2]]


def test_the_whole_manifest_is_checked(tmp_path) -> None:
    """A fault behind the limit is found all the same."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x", "y"], "steps": [1, 0]})
    with pytest.raises(ManifestError, match="row 1, steps = 0"):
        read(path, limit=1)


@pytest.mark.parametrize("opening", ["(", "not "])
def test_where_of_great_depth_is_refused(tmp_path, opening) -> None:
    """Thousands of nots or parentheses are an error of the user's, told shortly; a few are fine."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"], "steps": [1]})
    closing = ")" if opening == "(" else ""
    assert read(path, where=opening * 20 + "steps = 1" + closing * 20)
    with pytest.raises(UsageError, match="at most 50 nots and parentheses") as caught:
        read(path, where=opening * 3000 + "steps = 1" + closing * 3000)
    assert len(caught.value.message) < 500


def test_ids_file(tmp_path) -> None:
    """An id file has one id per line; blank lines and comments do not count."""
    (tmp_path / "ids.txt").write_text("\ufeff# picked\nfox \n\nowl-s1\n", "utf-8")
    assert read_ids(tmp_path / "ids.txt") == {"fox", "owl-s1"}
    (tmp_path / "none.txt").write_text("# nothing\n")
    with pytest.raises(UsageError, match="the file holds no id"):
        read_ids(tmp_path / "none.txt")


def test_overrides_are_parsed_by_the_rules() -> None:
    """An override has the type and the bounds of its column."""
    assert parse_overrides(["steps=10", "guidance_low = 2.5", "fps=30000/1001", "negative_prompt="], LIMITS) == {
        "steps": 10,
        "guidance_low": 2.5,
        "fps": "30000/1001",
        "negative_prompt": "",
    }


def test_override_beats_an_illegal_cell(tmp_path) -> None:
    """An overridden column's cells are not looked at."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"], "width": [830]})
    manifest = read(path, overrides={"width": 832, "samples": 2})
    assert [request.width for request in manifest.iter_requests()] == [832, 832]


def test_row_presets(tmp_path) -> None:
    """A cell may name a preset; its values stand where the row has none."""
    import dataclasses

    draft = dataclasses.replace(DEFAULTS, steps=3, width=64)
    path = save(
        tmp_path / "a.parquet",
        {"prompt": ["x", "y", "z"], "preset": ["draft", None, "pocket"], "width": [None, None, 96]},
    )
    manifest = read(path, preset="pocket", presets={"draft": draft})
    found = [(request.preset, request.steps, request.width) for request in manifest.iter_requests()]
    assert found == [("draft", 3, 64), ("pocket", 12, 128), ("pocket", 12, 96)]
    assert manifest.survey.buckets == {
        Bucket(64, 96, 17, "text"): 1,
        Bucket(128, 96, 17, "text"): 1,
        Bucket(96, 96, 17, "text"): 1,
    }


def test_preset_must_fit_the_checkpoint(tmp_path) -> None:
    """A preset whose size the model cannot make is a fault of the settings, found before the rows."""
    path = save(tmp_path / "a.parquet", {"prompt": ["x"]})
    limits = ModelLimits(name="wan2.2-ti2v-5b", size_multiple=160)
    with pytest.raises(ConfigError, match=r"does not fit wan2.2-ti2v-5b: width = 128 is not a multiple of 160"):
        read(path, limits)


def test_survey_adds_up(tmp_path) -> None:
    """The survey counts clips, buckets, work and seconds of video as the requests do."""
    path = save(
        tmp_path / "a.parquet",
        {
            "prompt": ["x"] * 3,
            "width": [64, None, 64],
            "samples": [2, 1, 1],
            "steps": [4, 5, 6],
            "fps": ["24", None, "30000/1001"],
        },
    )
    manifest = read(path)
    requests = list(manifest.iter_requests())
    assert manifest.survey.num_clips == len(requests) == 4
    assert manifest.survey.num_rows == 3
    assert manifest.survey.cost == sum(request.cost for request in requests)
    assert float(manifest.survey.duration_s) == pytest.approx(sum(request.duration_s for request in requests))
    assert manifest.survey.buckets == {Bucket(64, 96, 17, "text"): 3, Bucket(128, 96, 17, "text"): 1}


def test_large_row_groups_are_read_in_batches(tmp_path) -> None:
    """A row group larger than a batch keeps its row numbers."""
    count = 70_000
    path = save(
        tmp_path / "a.parquet",
        {"row_id": [f"r{k}" for k in range(count)], "prompt": ["x"] * count},
        row_group_size=count,
    )
    manifest = read(path)
    assert manifest.survey.num_clips == count
    assert [r.clip_id for r in manifest.requests_in(0, 0, [0, 40_000, 69_999])] == ["r0", "r40000", "r69999"]


def test_only_named_presets_must_fit(tmp_path) -> None:
    """A preset that no row names may be unfit for the model; one that a row names may not."""
    import dataclasses

    unfit = dataclasses.replace(DEFAULTS, width=100)
    plain = save(tmp_path / "a.parquet", {"prompt": ["x"]})
    named = save(tmp_path / "b.parquet", {"prompt": ["x"], "preset": ["odd"]})
    assert read(plain, preset="pocket", presets={"odd": unfit}).num_rows == 1
    with pytest.raises(ConfigError, match="preset 'odd' does not fit pocket: width = 100 is not a multiple of 16"):
        read(named, preset="pocket", presets={"odd": unfit})

"""Bad manifests, each with the message that it must get before any weight is read."""

from __future__ import annotations

import decimal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen.errors import BatchGenError, ManifestError
from batch_gen.manifest import ManifestOptions, parse_overrides, read_manifest
from batch_gen.request import ModelLimits
from tests.manifests import DEFAULTS, LIMITS, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = ["a fox"]
T2V = ModelLimits(name="wan2.2-t2v-a14b")
I2V = ModelLimits(name="wan2.2-i2v-a14b", conditionings=("image", "first_last"))
TI2V = ModelLimits(name="wan2.2-ti2v-5b", size_multiple=32, conditionings=("text", "image"))


@dataclass(frozen=True)
class Cell:
    """A manifest with one bad cell or column, and its message."""

    name: str
    columns: dict[str, Any]
    message: str
    limits: ModelLimits = LIMITS
    options: dict[str, Any] = field(default_factory=dict)


CELLS = [
    Cell("no_prompt_column", {"row_id": ["a"]}, "prompt: this column is required and missing; the file has row_id"),
    Cell("prompt_called_caption", {"caption": P}, "required and missing; rename 'caption', or use batch-gen import"),
    Cell("prompt_in_capitals", {"Prompt": P}, "required and missing; rename 'Prompt'"),
    Cell("prompt_null", {"prompt": pa.array([None], pa.string())}, "row 0, prompt: is required and the cell is empty"),
    Cell("prompt_null_type", {"prompt": pa.nulls(1)}, "row 0, prompt: is required and the cell is empty"),
    Cell("prompt_empty", {"prompt": [""]}, "row 0, prompt = '': has 0 characters; must have 1 to 10,000"),
    Cell("prompt_spaces", {"prompt": [" \t \n"]}, "prompt = ' \\t \\n': is blank once cleaned of spaces"),
    Cell("prompt_entity_spaces", {"prompt": ["&nbsp;&#8195;"]}, "is blank once cleaned of spaces, entities"),
    Cell("prompt_zero_width", {"prompt": ["\ufeff\ufeff"]}, "is blank once cleaned of spaces, entities and control"),
    Cell(
        "prompt_escape_codes", {"prompt": ["\x1b[36m\x1b[0m"]}, "is blank once cleaned of spaces, entities and control"
    ),
    Cell("prompt_nul", {"prompt": ["a\0fox"]}, "prompt = 'a\\x00fox': holds a NUL character; remove it"),
    Cell("prompt_too_long", {"prompt": ["x" * 10_001]}, "has 10,001 characters; must have 1 to 10,000"),
    Cell("prompt_numbers", {"prompt": [7]}, "prompt: has type int64; must hold text (batch-gen import converts"),
    Cell("prompt_list", {"prompt": [["a", "fox"]]}, "prompt: has type list<element: string>; must hold text"),
    Cell("prompt_latin1", {"prompt": pa.array([b"caf\xe9"])}, "row 0, prompt = 4 bytes: is not UTF-8 text"),
    Cell("negative_too_long", {"prompt": P, "negative_prompt": ["x" * 10_001]}, "negative_prompt = 'xxx"),
    Cell("negative_nul", {"prompt": P, "negative_prompt": ["\0"]}, "negative_prompt = '\\x00': holds a NUL character"),
    Cell("id_empty", {"prompt": P, "row_id": [""]}, "row_id = '': has 0 characters; must have 1 to 120"),
    Cell("id_long", {"prompt": P, "row_id": ["x" * 121]}, "has 121 characters; must have 1 to 120"),
    Cell("id_slash", {"prompt": P, "row_id": ["shots/fox"]}, "may hold only letters, digits, dot, dash and underscore"),
    Cell("id_parent", {"prompt": P, "row_id": [".."]}, "row_id = '..': is a path, not a name"),
    Cell("id_climbs", {"prompt": P, "row_id": ["../../etc/passwd"]}, "try 'etc-passwd'"),
    Cell("id_backslash", {"prompt": P, "row_id": ["a\\b"]}, "it names the file); try 'a-b'"),
    Cell("id_space", {"prompt": P, "row_id": ["red fox"]}, "try 'red-fox'"),
    Cell("id_emoji", {"prompt": P, "row_id": ["fox-\U0001f98a"]}, "row_id = 'fox-\\U0001f98a': may hold only"),
    Cell("id_newline", {"prompt": P, "row_id": ["fox\n"]}, "row_id = 'fox\\n': may hold only letters"),
    Cell("id_numbers", {"prompt": P, "row_id": [1]}, "row_id: has type int64; must hold text"),
    Cell("id_twice", {"prompt": P * 2, "row_id": ["a", "a"]}, "row 1, row_id = 'a': is already the id of"),
    Cell(
        "id_case",
        {"prompt": P * 2, "row_id": ["a", "A"]},
        "row_id = 'A': is already the id of",
        options={"fold_case": True},
    ),
    Cell("id_of_a_sample", {"prompt": P * 2, "row_id": ["a", "a-s1"], "samples": [2, 1]}, "is already the id of"),
    Cell("seed_negative", {"prompt": P, "seed": [-1]}, "seed = -1: must be 0 to 4294967295; nearest is 0"),
    Cell("seed_huge", {"prompt": P, "seed": [2**32]}, "must be 0 to 4294967295; nearest is 4294967295"),
    Cell("seed_uint64", {"prompt": P, "seed": pa.array([2**64 - 1], pa.uint64())}, "seed = 18446744073709551615: must"),
    Cell("seed_fraction", {"prompt": P, "seed": [1.5]}, "seed = 1.5: must be a whole number"),
    Cell("seed_nan", {"prompt": P, "seed": [float("nan")]}, "seed = nan: must be a whole number"),
    Cell("seed_text", {"prompt": P, "seed": ["7"]}, "seed: has type string; must hold whole numbers"),
    Cell("seed_bool", {"prompt": P, "seed": [True]}, "seed: has type bool; must hold whole numbers"),
    Cell("seed_overflows", {"prompt": P, "seed": [2**32 - 2], "samples": [3]}, "with 3 samples goes past 4294967295"),
    Cell("width_odd", {"prompt": P, "width": [831]}, "width = 831: is not a multiple of 16; nearest are 816 and 832"),
    Cell("width_zero", {"prompt": P, "width": [0]}, "width = 0: must be at least 1"),
    Cell("height_negative", {"prompt": P, "height": [-480]}, "height = -480: must be at least 1"),
    Cell("height_huge", {"prompt": P, "height": [2**40]}, "height = 1099511627776: must be 1 to 16384"),
    Cell("height_tiny", {"prompt": P, "height": [9]}, "height = 9: is not a multiple of 16; nearest is 16"),
    Cell("height_720_on_5b", {"prompt": P, "height": [720]}, "is not a multiple of 32; nearest are 704 and 736", TI2V),
    Cell("frames_4k", {"prompt": P, "num_frames": [80]}, "num_frames = 80: is not 4k+1; nearest are 77 and 81"),
    Cell("frames_zero", {"prompt": P, "num_frames": [0]}, "num_frames = 0: must be at least 1"),
    Cell("frames_two", {"prompt": P, "num_frames": [2]}, "is not 4k+1; nearest are 1 and 5"),
    Cell("frames_inf", {"prompt": P, "num_frames": [float("inf")]}, "num_frames = inf: must be a whole number"),
    Cell("fps_zero", {"prompt": P, "fps": [0]}, "fps = 0: must be above 0; write 24, 23.976 or 30000/1001"),
    Cell("fps_negative", {"prompt": P, "fps": ["-24"]}, "fps = '-24': must be above 0"),
    Cell("fps_word", {"prompt": P, "fps": ["cinema"]}, "fps = 'cinema': is no frame rate; write 24"),
    Cell("fps_over_zero", {"prompt": P, "fps": ["24/0"]}, "fps = '24/0': is no frame rate"),
    Cell("fps_nan", {"prompt": P, "fps": [float("nan")]}, "fps = nan: is no frame rate"),
    Cell(
        "fps_struct", {"prompt": P, "fps": [{"num": 24}]}, "fps: has type struct<num: int64>; must hold numbers or text"
    ),
    Cell("steps_zero", {"prompt": P, "steps": [0]}, "steps = 0: must be 1 to 1000; nearest is 1"),
    Cell("steps_many", {"prompt": P, "steps": [1001]}, "steps = 1001: must be 1 to 1000; nearest is 1000"),
    Cell(
        "guidance_nan", {"prompt": P, "guidance_high": [float("nan")]}, "guidance_high = nan: must be a finite number"
    ),
    Cell("guidance_inf", {"prompt": P, "guidance_low": [float("inf")]}, "guidance_low = inf: must be a finite number"),
    Cell(
        "guidance_negative",
        {"prompt": P, "guidance_low": [-1.0]},
        "guidance_low = -1.0: must be 0 to 100; nearest is 0",
    ),
    Cell("guidance_high", {"prompt": P, "guidance_high": [100.5]}, "must be 0 to 100; nearest is 100"),
    Cell("guidance_text", {"prompt": P, "guidance_high": ["4"]}, "guidance_high: has type string; must hold numbers"),
    Cell("shift_zero", {"prompt": P, "flow_shift": [0.0]}, "flow_shift = 0.0: must be above 0"),
    Cell("shift_nan", {"prompt": P, "flow_shift": [float("nan")]}, "flow_shift = nan: must be a finite number"),
    Cell("samples_zero", {"prompt": P, "samples": [0]}, "samples = 0: must be 1 to 1000; nearest is 1"),
    Cell("samples_many", {"prompt": P, "samples": [10**9]}, "samples = 1000000000: must be 1 to 1000"),
    Cell(
        "samples_decimal", {"prompt": P, "samples": [decimal.Decimal("1.5")]}, "samples = 1.5: must be a whole number"
    ),
    Cell("priority_huge", {"prompt": P, "priority": [2**40]}, "priority = 1099511627776: must be"),
    Cell("priority_date", {"prompt": P, "priority": pa.array([1], pa.date32())}, "priority: has type date32[day]"),
    Cell(
        "preset_unknown",
        {"prompt": P, "preset": ["cinema"]},
        "preset = 'cinema': is no preset for this run's checkpoint; a row may name draft, pocket",
        options={"preset": "pocket", "presets": {"draft": DEFAULTS}},
    ),
    Cell("preset_blank", {"prompt": P, "preset": [""]}, "preset = '': has 0 characters"),
    Cell(
        "image_http",
        {"prompt": P, "image": ["http://example.org/a.png"]},
        "is a http: address; only a local path",
        TI2V,
    ),
    Cell("image_https", {"prompt": P, "image": ["https://example.org/a.png"]}, "download it first", TI2V),
    Cell("image_data", {"prompt": P, "image": ["data:image/png;base64,AAAA"]}, "is a data: address", TI2V),
    Cell("image_file_uri", {"prompt": P, "image": ["file:///a.png"]}, "is a file: address; only a local path", TI2V),
    Cell("image_lost", {"prompt": P, "image": ["no-such.png"]}, "image = 'no-such.png': does not exist beside", TI2V),
    Cell(
        "image_bucket", {"prompt": P, "image": ["s3://bucket"]}, "image = 's3://bucket': must be s3://bucket/key", TI2V
    ),
    Cell("image_no_bytes", {"prompt": P, "image": [b""]}, "image = 0 bytes: holds no bytes", TI2V),
    Cell("image_blank", {"prompt": P, "image": [" "]}, "is blank; leave the cell empty for no image", TI2V),
    Cell(
        "image_struct",
        {"prompt": P, "image": [{"bytes": b"x"}]},
        "image: has type struct<bytes: binary>; must hold",
        TI2V,
    ),
    Cell(
        "image_on_t2v",
        {"prompt": P, "image": ["s3://b/k"]},
        "is an image, which wan2.2-t2v-a14b cannot take; use wan2.2-i2v-a14b or wan2.2-ti2v-5b",
        T2V,
    ),
    Cell("text_on_i2v", {"prompt": P}, "has no image, which wan2.2-i2v-a14b needs; use wan2.2-t2v-a14b", I2V),
    Cell(
        "last_on_5b",
        {"prompt": P, "image": ["s3://b/k"], "last_image": ["s3://b/l"]},
        "gives a first and a last image, which wan2.2-ti2v-5b cannot take; use wan2.2-i2v-a14b",
        TI2V,
    ),
    Cell(
        "last_alone", {"prompt": P, "last_image": ["s3://b/l"]}, "last_image = 's3://b/l': needs a first image too", I2V
    ),
    Cell("zero_rows", {"prompt": pa.array([], pa.string())}, "has zero rows; there is nothing to render"),
    Cell(
        "long_prompt",
        {"prompt": ["w " * 600]},
        "has 600 tokens; pocket sees 512 (--long-prompt truncate cuts it there)",
        options={"count_tokens": lambda texts: [len(text.split()) for text in texts], "long_prompt": "fail"},
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_bad_cell(tmp_path: Path, cell: Cell) -> None:
    """A bad cell or column is refused with file, row, column, value and what is right."""
    path = save(tmp_path / "zoo.parquet", cell.columns)
    with pytest.raises(ManifestError) as caught:
        read_manifest([path], DEFAULTS, cell.limits, ManifestOptions(**cell.options))
    assert cell.message in str(caught.value)
    assert "zoo.parquet" in str(caught.value)
    assert caught.value.exit_code == 2


def _good(path: Path) -> bytes:
    return save(path, {"prompt": P * 2000, "tag": [f"tag {k}" for k in range(2000)]}).read_bytes()


def _truncated(path: Path) -> None:
    path.write_bytes(_good(path)[:-100])


def _torn_body(path: Path) -> None:
    body = bytearray(_good(path))
    for place in range(4, 200):
        body[place] ^= 0xA5
    path.write_bytes(bytes(body))


def _torn_footer(path: Path) -> None:
    body = bytearray(_good(path))
    for place in range(len(body) - 300, len(body) - 12):
        body[place] ^= 0xA5
    path.write_bytes(bytes(body))


def _doubled_column(path: Path) -> None:
    pq.write_table(pa.table([P, P], names=["prompt", "prompt"]), path)


def _broken_utf8(path: Path) -> None:
    body = pa.array([b"caf\xe9", b"a fox"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, body.buffers())
    pq.write_table(pa.table({"prompt": text}), path)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "zoo.parquet: does not exist"),
    "empty": (lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "text": (
        lambda path: path.write_text("a fox\nan owl\n"),
        "is not a Parquet file; batch-gen import makes one of text",
    ),
    "csv": (lambda path: path.write_text("prompt,seed\na fox,1\n"), "is not a Parquet file"),
    "json": (lambda path: path.write_text('{"prompt": "a fox"}'), "is not a Parquet file"),
    "four_bytes": (lambda path: path.write_bytes(b"PAR1"), "is a Parquet file that was cut short (4 bytes)"),
    "truncated": (_truncated, "is a Parquet file that was cut short"),
    "torn_footer": (_torn_footer, "cannot be read as Parquet; it is torn"),
    "torn_body": (_torn_body, "row group 0 cannot be read; the file is torn"),
    "encrypted": (lambda path: path.write_bytes(b"PARE" + b"\0" * 40 + b"PARE"), "is an encrypted Parquet file"),
    "lfs_pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is not a Parquet file",
    ),
    "empty_folder": (lambda path: path.mkdir(), "is a folder without a .parquet file"),
    "doubled_column": (_doubled_column, "prompt: stands twice in the file"),
    "broken_utf8": (_broken_utf8, "row 0, prompt = 4 bytes: is not UTF-8 text"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_file(tmp_path: Path, name: str) -> None:
    """A file that is no sound Parquet file is refused with what it is instead."""
    make, message = FILES[name]
    path = tmp_path / "zoo.parquet"
    make(path)
    with pytest.raises(ManifestError) as caught:
        read_manifest([path], DEFAULTS, LIMITS)
    assert message in str(caught.value)
    assert "zoo.parquet" in str(caught.value)


def test_same_file_twice(tmp_path: Path) -> None:
    """The same file by two names is refused: each row would render twice."""
    path = save(tmp_path / "zoo.parquet", {"prompt": P})
    with pytest.raises(ManifestError, match="is given twice"):
        read_manifest([path, tmp_path / "." / "zoo.parquet"], DEFAULTS, LIMITS)


WHERES = {
    "tag =": "expected 'text' in single quotes or a number at character 6, found the end",
    "= 'hero'": "expected a column at character 1, found =",
    'tag = "hero"': "expected 'text' in single quotes or a number at character 7",
    "tag = 'hero": 'cannot read "\'hero" at character 7',
    "tag = 'a' tag = 'b'": "expected and, or, or the end at character 11, found tag",
    "(tag = 'a'": "expected ) at character 11, found the end",
    "tag in 'a'": "expected ( at character 8",
    "tag like 3": "like needs 'text' with % and _ as its wildcards",
    "shade = 'a'": "no column 'shade' in the manifest; it has",
    "tag > 3": "column 'tag' holds string; compare it with a constant of that type",
    "__import__('os').system('true')": 'cannot read ".system(\'tru" at character 17',
    "tag; drop": "cannot read '; drop' at character 4",
    "": "expected a column at character 1",
    "tag = 'none'": "leave no clip of the manifest",
}


@pytest.mark.parametrize("where", WHERES)
def test_bad_where(tmp_path: Path, where: str) -> None:
    """An expression that cannot be read, or selects nothing, is refused at its place."""
    path = save(tmp_path / "zoo.parquet", {"prompt": P, "tag": ["hero"]})
    with pytest.raises(BatchGenError) as caught:
        read_manifest([path], DEFAULTS, LIMITS, ManifestOptions(where=where))
    assert WHERES[where] in str(caught.value)
    assert caught.value.exit_code == 2


OVERRIDES = {
    "steps": "expected COLUMN=VALUE, such as steps=10",
    "=4": "expected COLUMN=VALUE",
    "row_id=a": "'row_id' is not one of",
    "colour=red": "'colour' is not one of negative_prompt, width",
    "steps=ten": "'ten' is no number; steps must be 1 to 1000",
    "steps=0": "steps must be 1 to 1000; nearest is 1",
    "width=831": "width is not a multiple of 16; nearest are 816 and 832",
    "num_frames=80": "num_frames is not 4k+1; nearest are 77 and 81",
    "seed=1.5": "seed must be a whole number",
    "seed=inf": "seed must be a whole number",
    "guidance_high=nan": "guidance_high must be a finite number",
    "fps=fast": "fps is no frame rate",
}


@pytest.mark.parametrize("item", OVERRIDES)
def test_bad_override(item: str) -> None:
    """An override that is no legal value of an overridable column is refused."""
    with pytest.raises(BatchGenError) as caught:
        parse_overrides([item], LIMITS)
    assert OVERRIDES[item] in str(caught.value)
    assert f"--override {item!r}" in str(caught.value)

"""Files as other tools write them, each with the manifest that it must become."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from batch_gen import tables
from batch_gen.commands.import_ import import_
from batch_gen.errors import BatchGenError, ManifestError, UsageError
from batch_gen.importing import grid as sweeps
from batch_gen.importing.write import ImportOptions, Report, import_files
from batch_gen.manifest import read_manifest
from tests.manifests import DEFAULTS, LIMITS, save

if TYPE_CHECKING:
    from pathlib import Path


def run(source: Path, destination: Path | None = None, **options: Any) -> tuple[Report, list[dict[str, Any]]]:
    destination = destination or source.parent / "out.parquet"
    report = import_files(ImportOptions((source,), destination, **options))
    return report, [drop(row) for row in tables.read_rows(destination)]


def drop(row: dict[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in row.items() if cell is not None}


def lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


@dataclass(frozen=True)
class Kind:
    """One kind of file from real life: its body, and the rows that it must become."""

    file: str
    body: bytes
    rows: list[dict[str, Any]]
    engine: str | None = None
    extra: tuple[str, ...] = ()


KINDS = {
    "prompts_txt": Kind(
        "prompts.txt",
        b"\xef\xbb\xbfa red fox\r\n\r\n  an owl at night  \r\n",
        [{"prompt": "a red fox"}, {"prompt": "an owl at night"}],
    ),
    "prompts_txt_unicode": Kind(
        "prompts.txt",
        "\u4e00\u53ea\u72d0\u72f8\n\u05e9\u05d5\u05e2\u05dc\nfox \U0001f98a".encode(),
        [{"prompt": "\u4e00\u53ea\u72d0\u72f8"}, {"prompt": "\u05e9\u05d5\u05e2\u05dc"}, {"prompt": "fox \U0001f98a"}],
    ),
    "xdit_csv": Kind(
        "prompts.csv",
        b'prompt\n"a fox, red"\n"an owl says ""hoo"""\n',
        [{"prompt": "a fox, red"}, {"prompt": 'an owl says "hoo"'}],
    ),
    "spreadsheet_csv": Kind(
        "shots.csv",
        b"\xef\xbb\xbfID;Prompt;Negative Prompt;Width;Height;Shot\r\n01 fox;a fox;;832;480;A1\r\n02;an owl;blurry;;;B2\r\n",
        [
            {"row_id": "01-fox", "prompt": "a fox", "width": 832, "height": 480, "Shot": "A1", "source_id": "01 fox"},
            {"row_id": "02", "prompt": "an owl", "negative_prompt": "blurry", "Shot": "B2"},
        ],
        extra=("Shot",),
    ),
    "spreadsheet_unicode_text": Kind(
        "shots.tsv",
        "prompt\tsteps\na fox\t12\nan owl\t\n".encode("utf-16"),
        [{"prompt": "a fox", "steps": 12}, {"prompt": "an owl"}],
    ),
    "diffusers_csv": Kind(
        "calls.csv",
        b"prompt,num_inference_steps,guidance_scale,num_frames,seed\na fox,40,4.0,81,7\nan owl,30.0,5,49,\n",
        [
            {"prompt": "a fox", "steps": 40, "guidance_high": 4.0, "guidance_low": 4.0, "num_frames": 81, "seed": 7},
            {"prompt": "an owl", "steps": 30, "guidance_high": 5.0, "guidance_low": 5.0, "num_frames": 49},
        ],
    ),
    "diffusers_jsonl": Kind(
        "calls.jsonl",
        lines(
            {"prompt": "a fox", "guidance_scale": 4.0, "guidance_scale_2": 3.0, "num_videos_per_prompt": 2},
            {"prompt": "an owl", "guidance_scale": 4.0, "output_type": "np"},
        ),
        [
            {"prompt": "a fox", "guidance_high": 4.0, "guidance_low": 3.0, "samples": 2},
            {"prompt": "an owl", "guidance_high": 4.0, "guidance_low": 4.0, "output_type": "np"},
        ],
        engine="diffusers",
        extra=("output_type",),
    ),
    "wan_jsonl": Kind(
        "wan.jsonl",
        lines(
            {
                "task": "t2v-A14B",
                "size": "1280*720",
                "frame_num": 81,
                "sample_steps": 40,
                "sample_shift": 12.0,
                "sample_guide_scale": [3.0, 4.0],
                "base_seed": -1,
                "prompt": "a fox",
            },
            {"task": "t2v-A14B", "size": "832*480", "sample_guide_scale": 5.0, "base_seed": 42, "prompt": "an owl"},
        ),
        [
            {
                "prompt": "a fox",
                "width": 1280,
                "height": 720,
                "num_frames": 81,
                "steps": 40,
                "guidance_high": 4.0,
                "guidance_low": 3.0,
                "flow_shift": 12.0,
                "task": "t2v-A14B",
            },
            {
                "prompt": "an owl",
                "seed": 42,
                "width": 832,
                "height": 480,
                "guidance_high": 5.0,
                "guidance_low": 5.0,
                "task": "t2v-A14B",
            },
        ],
        extra=("task",),
    ),
    "openai_video_batch": Kind(
        "batch.jsonl",
        lines(
            {
                "custom_id": "request-1",
                "method": "POST",
                "url": "/v1/videos",
                "body": {"model": "wan", "prompt": "a fox", "size": "1280x720", "seconds": "5"},
            },
            {
                "custom_id": "request 2",
                "method": "POST",
                "url": "/v1/videos",
                "body": {"model": "wan", "prompt": "an owl"},
            },
        ),
        [
            {"row_id": "request-1", "prompt": "a fox", "width": 1280, "height": 720, "model": "wan", "seconds": "5"},
            {"row_id": "request-2", "prompt": "an owl", "model": "wan", "source_id": "request 2"},
        ],
        extra=("model", "seconds"),
    ),
    "openai_chat_batch": Kind(
        "chat.jsonl",
        lines(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "messages": [
                        {"role": "system", "content": "You make videos."},
                        {"role": "user", "content": [{"type": "text", "text": "a fox"}]},
                    ],
                    "extra_body": {"height": 480, "width": 832, "num_inference_steps": 8, "seed": 3},
                },
            },
            {
                "custom_id": "b",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "an owl"}]},
            },
        ),
        [
            {"row_id": "a", "prompt": "a fox", "seed": 3, "width": 832, "height": 480, "steps": 8},
            {"row_id": "b", "prompt": "an owl"},
        ],
    ),
    "vllm_omni_by_code": Kind(
        "omni.jsonl",
        lines(
            {
                "prompt": "a fox",
                "size": "832x480",
                "num_frames": 33,
                "fps": 16,
                "num_inference_steps": 40,
                "guidance_scale": 4.0,
                "guidance_scale_2": 3.0,
                "boundary_ratio": 0.875,
                "flow_shift": 5.0,
                "seed": 42,
            }
        ),
        [
            {
                "prompt": "a fox",
                "seed": 42,
                "width": 832,
                "height": 480,
                "num_frames": 33,
                "fps": "16",
                "steps": 40,
                "guidance_high": 4.0,
                "guidance_low": 3.0,
                "flow_shift": 5.0,
                "boundary_ratio": 0.875,
            }
        ],
        engine="vllm-omni",
        extra=("boundary_ratio",),
    ),
    "vllm_omni_by_pages": Kind(
        "omni.jsonl",
        lines(
            {"prompt": "a fox", "guidance_scale": 3.0, "guidance_scale_2": 4.0},
            {"prompt": "an owl", "guidance_scale": 3.0},
        ),
        [
            {"prompt": "a fox", "guidance_high": 4.0, "guidance_low": 3.0},
            {"prompt": "an owl", "guidance_high": 3.0, "guidance_low": 3.0},
        ],
        engine="vllm-omni-docs",
    ),
    "wan2gp_settings": Kind(
        "settings.json",
        json.dumps(
            {
                "type": "WanGP v9",
                "model_type": "t2v_2_2",
                "prompt": "a fox",
                "negative_prompt": "",
                "resolution": "832x480",
                "video_length": 81,
                "num_inference_steps": 30,
                "guidance_phases": 2,
                "guidance_scale": 4,
                "guidance2_scale": 3,
                "flow_shift": 12,
                "seed": -1,
                "force_fps": "",
                "repeat_generation": 2,
                "activated_loras": [],
            }
        ).encode(),
        [
            {
                "prompt": "a fox",
                "negative_prompt": "",
                "width": 832,
                "height": 480,
                "num_frames": 81,
                "steps": 30,
                "guidance_high": 4.0,
                "guidance_low": 3.0,
                "flow_shift": 12.0,
                "samples": 2,
                "type": "WanGP v9",
                "model_type": "t2v_2_2",
                "guidance_phases": 2,
                "activated_loras": "[]",
            }
        ],
        extra=("type", "model_type", "guidance_phases", "activated_loras"),
    ),
    "wan2gp_queue": Kind(
        "queue.json",
        json.dumps(
            [
                {
                    "id": 1,
                    "params": {"prompt": "a fox", "guidance_phases": 1, "guidance_scale": 5, "guidance2_scale": 1},
                },
                {
                    "id": 2,
                    "params": {"prompt": "an owl", "guidance_phases": 2, "guidance_scale": 4, "guidance2_scale": 3},
                },
            ]
        ).encode(),
        [
            {"row_id": "1", "prompt": "a fox", "guidance_high": 5.0, "guidance_low": 5.0, "guidance_phases": 1},
            {"row_id": "2", "prompt": "an owl", "guidance_high": 4.0, "guidance_low": 3.0, "guidance_phases": 2},
        ],
        extra=("guidance_phases",),
    ),
    "comfyui_csv": Kind(
        "comfy.csv",
        b"positive,negative,cfg,steps,length,frame_rate,noise_seed,shift,sampler_name\na fox,bad,3.5,20,81,16,5,8,euler\n",
        [
            {
                "prompt": "a fox",
                "negative_prompt": "bad",
                "seed": 5,
                "num_frames": 81,
                "fps": "16",
                "steps": 20,
                "guidance_high": 3.5,
                "guidance_low": 3.5,
                "flow_shift": 8.0,
                "sampler_name": "euler",
            }
        ],
        engine="comfyui",
        extra=("sampler_name",),
    ),
    "hosted_service_jsonl": Kind(
        "predictions.jsonl",
        lines(
            {
                "version": "abc",
                "input": {
                    "prompt": "a fox",
                    "frames_per_second": 16,
                    "duration": 5,
                    "image_size": {"width": 832, "height": 480},
                },
            }
        ),
        [{"prompt": "a fox", "width": 832, "height": 480, "num_frames": 81, "fps": "16", "version": "abc"}],
        extra=("version",),
    ),
    "vbench_json": Kind(
        "full_info.json",
        json.dumps(
            [{"prompt_en": "a fox", "dimension": ["color", "scene"], "auxiliary_info": {"color": "red"}}]
        ).encode(),
        [{"prompt": "a fox", "dimension": '["color", "scene"]', "auxiliary_info": '{"color": "red"}'}],
        extra=("dimension", "auxiliary_info"),
    ),
    "list_of_texts_json": Kind("p.json", b'["a fox", "an owl"]', [{"prompt": "a fox"}, {"prompt": "an owl"}]),
    "camel_case_jsonl": Kind(
        "web.jsonl",
        lines({"prompt": "a fox", "negativePrompt": "bad", "numInferenceSteps": 9, "guidanceScale": 2}),
        [{"prompt": "a fox", "negative_prompt": "bad", "steps": 9, "guidance_high": 2.0, "guidance_low": 2.0}],
    ),
    "mixed_extra_jsonl": Kind(
        "m.jsonl",
        lines({"prompt": "a", "x": 1, "y": 1, "z": True}, {"prompt": "b", "x": "one", "y": 0.5, "z": False}),
        [{"prompt": "a", "x": "1", "y": 1.0, "z": True}, {"prompt": "b", "x": "one", "y": 0.5, "z": False}],
        extra=("x", "y", "z"),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_real_life_file(tmp_path: Path, name: str) -> None:
    """Each kind of file becomes exactly these rows, and the manifest passes the check."""
    kind = KINDS[name]
    source = tmp_path / kind.file
    source.write_bytes(kind.body)
    report, rows = run(source, engine=kind.engine)
    assert rows == kind.rows
    assert report.extra[str(source)] == list(kind.extra)
    assert report.num_rows == len(rows)
    assert read_manifest([tmp_path / "out.parquet"], DEFAULTS, LIMITS).num_rows == len(rows)


@pytest.mark.parametrize("name", KINDS)
def test_twice_the_same_bytes(tmp_path: Path, name: str) -> None:
    """The same import writes the same bytes."""
    kind = KINDS[name]
    source = tmp_path / kind.file
    source.write_bytes(kind.body)
    first, second = tmp_path / "first.parquet", tmp_path / "second.parquet"
    run(source, first, engine=kind.engine)
    run(source, second, engine=kind.engine)
    assert first.read_bytes() == second.read_bytes()


def test_foreign_parquet(tmp_path: Path) -> None:
    """A data set's Parquet keeps the types of its other columns; whole-number ids become names."""
    source = save(
        tmp_path / "data.parquet",
        {
            "id": [10, 11],
            "caption": pa.array(["a fox", "an owl"]).dictionary_encode(),
            "tags": [["red"], []],
            "score": pa.array([0.5, None], pa.float32()),
        },
    )
    _, rows = run(source)
    assert rows == [
        {"row_id": "10", "prompt": "a fox", "tags": ["red"], "score": 0.5},
        {"row_id": "11", "prompt": "an owl", "tags": []},
    ]
    assert tables.column_types(tmp_path / "out.parquet")["score"] == pa.float32()


def test_data_set_images(tmp_path: Path) -> None:
    """A data set's {bytes, path} images become bytes; an OpenAI reference becomes its address."""
    source = save(tmp_path / "data.parquet", {"text": ["a fox"], "image": [{"bytes": b"png", "path": "a.png"}]})
    assert run(source)[1] == [{"prompt": "a fox", "image": b"png"}]
    reference = tmp_path / "r.jsonl"
    reference.write_bytes(lines({"prompt": "a", "input_reference": {"image_url": "s3://b/a.png"}}))
    assert run(reference)[1] == [{"prompt": "a", "image": "s3://b/a.png"}]


def test_relative_images_follow_the_manifest(tmp_path: Path) -> None:
    """An image path relative to the source is written relative to the manifest."""
    (tmp_path / "in").mkdir()
    (tmp_path / "jobs").mkdir()
    source = tmp_path / "in/a.csv"
    source.write_text("prompt,image_path\na fox,img/fox.png\n")
    _, rows = run(source, tmp_path / "jobs/m.parquet")
    assert rows[0]["image"] == "../in/img/fox.png"


def test_several_sources(tmp_path: Path) -> None:
    """Sources of different kinds become one manifest, in order, each with its own names."""
    (tmp_path / "a.txt").write_text("a fox\n")
    (tmp_path / "b.csv").write_text("caption,sample_steps,tag\nan owl,3,x\n")
    report = import_files(ImportOptions((tmp_path / "a.txt", tmp_path / "b.csv"), tmp_path / "m.parquet"))
    assert [drop(row) for row in tables.read_rows(tmp_path / "m.parquet")] == [
        {"prompt": "a fox"},
        {"prompt": "an owl", "steps": 3, "tag": "x"},
    ]
    assert report.mapped[str(tmp_path / "b.csv")] == {"caption": "prompt", "sample_steps": "steps"}


@pytest.mark.parametrize("body", [b"a fox\na fox\nan owl\na fox\n"])
def test_equal_rows(tmp_path: Path, body: bytes) -> None:
    """Equal rows are reported and kept, or dropped on demand."""
    source = tmp_path / "a.txt"
    source.write_bytes(body)
    report, rows = run(source)
    assert (report.num_equal, len(rows)) == (2, 4)
    report, rows = run(source, dedupe=True)
    assert (report.num_equal, [row["prompt"] for row in rows]) == (2, ["a fox", "an owl"])


def test_equal_rows_with_ids_get_suffixes(tmp_path: Path) -> None:
    """Rows that are equal with their ids are told apart by a suffix."""
    source = tmp_path / "a.csv"
    source.write_text("id,prompt\nfox,a fox\nfox,a fox\n")
    assert [row["row_id"] for row in run(source)[1]] == ["fox", "fox-2"]


def test_grid(tmp_path: Path) -> None:
    """A sweep makes one row per combination, with ids that say which."""
    source = tmp_path / "a.csv"
    source.write_text("id,prompt,seed\nfox,a fox,9\n")
    report, rows = run(source, grid=sweeps.parse(["seed=1..2 guidance_high=3,4.5", "fps=24,30000/1001"]))
    assert [row["row_id"] for row in rows] == [
        f"fox-seed{seed}-guidance_high{scale}-fps{rate}"
        for seed in (1, 2)
        for scale in ("3", "4.5")
        for rate in ("24", "30000-1001")
    ]
    assert {row["seed"] for row in rows} == {1, 2}
    assert report.num_rows == 8
    assert read_manifest([tmp_path / "out.parquet"], DEFAULTS, LIMITS).survey.num_clips == 8


def test_grid_names_rows_without_ids(tmp_path: Path) -> None:
    """A swept row without an id is named by its first words and its content; equal rows stay apart."""
    source = tmp_path / "a.txt"
    source.write_text("A red fox!\nA red fox!\n\u72d0\u72f8\n" + "very " * 60 + "long\n")
    rows = run(source, grid=sweeps.parse(["seed=1,2"]))[1]
    names = [row["row_id"] for row in rows]
    assert names[0].startswith("a-red-fox-")
    assert names[0].endswith("-seed1")
    assert names[2] == f"{names[0]}-2"
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= sweeps.MAX_ID_CHARS


def test_ragged_rows(tmp_path: Path) -> None:
    """Rows of one file may each lack columns that others have."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines({"prompt": "a", "x": 1}, {"prompt": "b"}, {"prompt": "c", "y": None}))
    report, rows = run(source)
    assert rows == [{"prompt": "a", "x": 1}, {"prompt": "b"}, {"prompt": "c"}]
    assert report.extra[str(source)] == ["x"]


def test_command_prints_what_it_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says which names it mapped, which it left, and how many rows it wrote."""
    source = tmp_path / "a.csv"
    source.write_text("caption,sample_steps,mood\na fox,3,calm\na fox,3,calm\n")
    assert import_([str(source)], str(tmp_path / "m.parquet")) == 0
    printed = capsys.readouterr().out.replace(str(tmp_path), "")
    assert printed == (
        "/a.csv: caption, sample_steps read\n"
        "  caption -> prompt\n"
        "  sample_steps -> steps\n"
        "  carried through unread: mood\n"
        "1 row equal to an earlier one: kept with a suffix -2, -3 (--dedupe drops them)\n"
        "wrote /m.parquet: 2 rows from 2 records\n"
    )
    assert import_([str(source)], str(tmp_path / "m.parquet"), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["equal_rows"] == 1


def test_a_failed_import_leaves_the_old_manifest(tmp_path: Path) -> None:
    """A manifest is replaced only by a whole new one."""
    source = tmp_path / "a.csv"
    source.write_text("prompt,width\na fox,64\n")
    run(source)
    before = (tmp_path / "out.parquet").read_bytes()
    source.write_text("prompt,width\na fox,63\n")
    with pytest.raises(ManifestError):
        run(source)
    assert (tmp_path / "out.parquet").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out.parquet"]


@dataclass(frozen=True)
class Bad:
    """A bad source and its message."""

    file: str
    body: bytes
    message: str
    engine: str | None = None


ZOO = {
    "unknown_suffix": Bad("a.docx", b"x", "do not know how to read .docx; known: .csv, .json"),
    "no_suffix": Bad("prompts", b"x", "do not know how to read a file without a suffix"),
    "empty_txt": Bad("a.txt", b"\n \n", "holds no rows"),
    "latin1_txt": Bad("a.txt", b"a fox\ncaf\xe9\n", "a.txt line 2: is not UTF-8 text; save the file as UTF-8"),
    "nul_txt": Bad("a.txt", b"a\0b\n", "line 1, prompt = 'a\\x00b': holds a NUL character"),
    "csv_without_prompt": Bad("a.csv", b"title,year\nfox,1\n", "no column holds prompts; it has title, year"),
    "csv_head_only": Bad("a.csv", b"prompt\n", "holds no rows"),
    "csv_ragged": Bad(
        "a.csv", b"prompt,steps\na fox, red,3\n", "a.csv line 2: has 3 cells, the head line 2; quote cells with"
    ),
    "csv_doubled_head": Bad("a.csv", b"prompt,prompt\na,b\n", "the head line has 'prompt' twice"),
    "csv_open_quote": Bad("a.csv", b'prompt\n"a fox\n', "is no sound CSV"),
    "csv_decimal_comma": Bad("a.csv", b"prompt;cfg\na fox;3,5\n", "cfg = '3,5': is no number; write a decimal point"),
    "csv_word_steps": Bad("a.csv", b"prompt,steps\na fox,many\n", "a.csv line 2, steps = 'many': is no number"),
    "csv_half_step": Bad("a.csv", b"prompt,steps\na fox,2.5\n", "steps = 2.5: must be a whole number"),
    "csv_size": Bad("a.csv", b"prompt,size\na fox,720p\n", "size = '720p': names no width and height; write 1280x720"),
    "csv_size_odd": Bad(
        "a.csv", b"prompt,size\na fox,854*480\n", "width = 854: is not a multiple of 16; nearest are 848"
    ),
    "csv_frames": Bad("a.csv", b"prompt,frame_num\na fox,80\n", "num_frames = 80: is not 4k+1; nearest are 77 and 81"),
    "csv_http_image": Bad("a.csv", b"prompt,image\na,https://x/y.png\n", "is a https: address; only a local path"),
    "csv_seed": Bad("a.csv", b"prompt,seed\na,-2\n", "seed = -2: must be 0 to 4294967295"),
    "csv_disagrees": Bad(
        "a.csv", b"prompt,steps,sample_steps\na,3,4\n", "sample_steps = 4: disagrees with steps = 3; both mean"
    ),
    "csv_same_id": Bad("a.csv", b"id,prompt\nx,a\nx,b\n", "line 3, row_id = 'x': is already the id of"),
    "csv_ids_that_meet": Bad("a.csv", b"id,prompt\na b,x\na-b,y\n", "row_id = 'a-b': is already the id of"),
    "jsonl_array": Bad("a.jsonl", b"[1, 2]\n", "line 1: expected an object or a prompt, found list"),
    "jsonl_torn": Bad("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "a.jsonl line 2: is no JSON"),
    "json_lines_as_json": Bad("a.json", b'{"prompt": "a"}\n{"prompt": "b"}\n', "one object a line is .jsonl"),
    "json_number": Bad("a.json", b"3", "expected a list of objects or prompts, found int"),
    "json_prompt_list": Bad("a.jsonl", b'{"prompt": ["a", "b"]}\n', "prompt = ['a', 'b']: is a list; must be text"),
    "json_two_images": Bad("a.jsonl", b'{"prompt": "a", "image": ["x", "y"]}\n', "holds 2 images; must be one"),
    "json_bool_steps": Bad(
        "a.jsonl", b'{"prompt": "a", "steps": true}\n', "steps = True: is true/false; must be a number"
    ),
    "chat_without_user": Bad(
        "a.jsonl", b'{"messages": [{"role": "system", "content": "x"}]}\n', "holds no user message"
    ),
    "torn_parquet": Bad("a.parquet", b"PAR1xxxxPAR1", "cannot be read as Parquet"),
    "two_scales": Bad(
        "a.jsonl",
        b'{"prompt": "a", "guidance_scale": 4, "guidance_scale_2": 3}\n',
        "'guidance_scale_2' is the scale at low noise in diffusers and in vLLM-Omni's code, at high noise in its pages; "
        "say which: --from diffusers, vllm-omni, vllm-omni-docs, or rename the column",
    ),
    "length": Bad("a.csv", b"prompt,length\na,81\n", "'length' is a number of frames in ComfyUI and seconds elsewhere"),
    "length_elsewhere": Bad("a.csv", b"prompt,length\na,81\n", "--from diffusers does not say", engine="diffusers"),
    "unknown_engine": Bad(
        "a.txt", b"a\n", "--from 'midjourney': unknown engine; known: diffusers, wan", engine="midjourney"
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_bad_source(tmp_path: Path, name: str) -> None:
    """A bad source is refused with its place and what would be right, and nothing is written."""
    bad = ZOO[name]
    source = tmp_path / bad.file
    source.write_bytes(bad.body)
    with pytest.raises(BatchGenError) as caught:
        run(source, engine=bad.engine)
    assert bad.message in str(caught.value)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [bad.file]


def test_bad_paths(tmp_path: Path) -> None:
    """Missing sources, folders, wrong destinations and a source that is the destination are refused."""
    (tmp_path / "a.txt").write_text("a\n")
    cases = [
        ((tmp_path / "no.txt",), tmp_path / "m.parquet", "does not exist"),
        ((tmp_path,), tmp_path / "m.parquet", "do not know how to read"),
        ((tmp_path / "a.txt",), tmp_path / "m.csv", "the destination, the last argument, must end with .parquet"),
        ((tmp_path / "a.txt",), tmp_path / "none/m.parquet", "does not exist"),
        ((tmp_path / "m.parquet",), tmp_path / "m.parquet", "is source and destination at once"),
    ]
    for sources, destination, message in cases:
        with pytest.raises(UsageError, match=message):
            import_files(ImportOptions(sources, destination))


def test_every_fault_of_a_source_at_once(tmp_path: Path) -> None:
    """All bad cells of a source are told in one error."""
    source = tmp_path / "a.csv"
    source.write_text("prompt,width,steps\na,63,0\nb,64,many\n")
    with pytest.raises(ManifestError) as caught:
        run(source)
    assert str(caught.value).replace(str(tmp_path), "") == (
        "3 faults in the sources; nothing was written\n"
        "  /a.csv line 2, width = 63: is not a multiple of 16; nearest are 48 and 64\n"
        "  /a.csv line 2, steps = 0: must be 1 to 1000; nearest is 1\n"
        "  /a.csv line 3, steps = 'many': is no number"
    )


GRIDS = {
    "seed": "expected COLUMN=VALUES, such as seed=1..4",
    "seed=": "expected COLUMN=VALUES",
    "samples=1,2": "'samples' is not one of",
    "colour=red": "'colour' is not one of negative_prompt, width",
    "seed=4..1": "the range must go up and have at most 10,000 values",
    "seed=1,x": "'x' is no legal seed; 0 to 4294967295",
    "seed=1,1": "a value stands twice",
    "seed=1 seed=2": "seed stands twice",
    "steps=0,4": "steps = 0 must be 1 to 1000; nearest is 1",
    "width=63": "width = 63 is not a multiple of 16; nearest are 48 and 64",
    "seed=1..200 steps=1..200": "40,000 combinations for every row; at most 10,000",
}


@pytest.mark.parametrize("text", GRIDS)
def test_bad_grid(text: str) -> None:
    """A sweep over illegal values, unknown columns or too many combinations is refused."""
    with pytest.raises(UsageError) as caught:
        sweeps.parse([text])
    assert GRIDS[text] in str(caught.value)


def test_docs_are_in_step() -> None:
    """docs/import.md holds the tables of names and engines that the importer follows."""
    from pathlib import Path

    from batch_gen.importing import names

    page = (Path(__file__).parents[2] / "docs/import.md").read_text("utf-8")
    assert names.docs_table() in page
    assert names.engines_table() in page


def test_every_engine_is_used() -> None:
    """Names that depend on the engine name engines that --from knows, and explain why they are unclear."""
    from batch_gen.importing import names

    by_engine = [entry for entry in names.NAMES if entry.engine]
    assert {entry.engine for entry in by_engine} <= set(names.ENGINES)
    assert {entry.name for entry in by_engine} == set(names.AMBIGUOUS)

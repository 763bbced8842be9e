"""`batch-gen validate` and `batch-gen import` as a user types them, with the fake model: nothing reads weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batch_gen.cli import invoke
from tests.manifests import save

DEMO = Path(__file__).parents[2] / "manifests/demo.parquet"


def test_demo_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest that ships with the repository has no fault; the summary counts rows, clips and seconds."""
    assert invoke(["validate", str(DEMO), "--model", "fake"]) == 0
    printed = capsys.readouterr().out
    assert "8 rows in 1 file: 9 clips" in printed
    assert printed.endswith("no faults\n")


def test_selection_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary speaks of the selected rows, as JSON too."""
    assert invoke(["validate", str(DEMO), "--model", "fake", "--where", "tag = 'hero'", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["rows"], body["selected_rows"], body["clips"]) == (8, 2, 2)
    assert body["ok"] is True


def test_faults_leave_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad manifest is exit 2, every fault on stderr, nothing on stdout."""
    path = save(tmp_path / "a.parquet", {"prompt": ["a fox", " "], "width": [830, 64]})
    assert invoke(["validate", str(path), "--model", "fake"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 faults in the manifest" in captured.err
    assert "row 0, width = 830: is not a multiple of 16; nearest are 816 and 832" in captured.err
    assert "row 1, prompt = ' ': is blank" in captured.err


def test_faults_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the faults are one object on stdout, file, row, column, value and message apart."""
    path = save(tmp_path / "a.parquet", {"prompt": ["a fox"], "steps": [0]})
    assert invoke(["validate", str(path), "--model", "fake", "--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["num_faults"] == 1
    assert body["faults"] == [
        {
            "file": str(path),
            "row": 0,
            "column": "steps",
            "value": "0",
            "message": "must be 1 to 1000; nearest is 1",
        }
    ]


def test_warnings_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings come with their rows and do not change the exit code."""
    path = save(tmp_path / "a.parquet", {"prompt": ["a fox"] * 2})
    assert invoke(["validate", str(path), "--model", "fake"]) == 0
    assert "warning: 1 row (first: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--where", "shade = 'x'"], "no column 'shade' in the manifest"),
        (["--override", "steps=0"], "steps must be 1 to 1000"),
        (["--override", "width=100"], "width is not a multiple of 16; nearest are 96 and 112"),
        (["--ids", "no-such-file"], "expected a text file with one row_id or clip_id per line"),
        (["--preset", "cinema"], "preset 'cinema' does not exist"),
        (["--limit", "0"], "limit"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that cannot be met is exit 2 with what would be right."""
    assert invoke(["validate", str(DEMO), "--model", "fake", *flags]) == 2
    assert message in capsys.readouterr().err


def test_draft_and_final_name_the_same_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids picked from a draft select the same rows for the final."""
    from batch_gen.manifest import read_manifest
    from tests.manifests import DEFAULTS, LIMITS

    picked = [request.clip_id for request in read_manifest([DEMO], DEFAULTS, LIMITS).iter_requests()][:2]
    (tmp_path / "ids.txt").write_text("\n".join(picked))
    flags = ["--model", "fake", "--ids", str(tmp_path / "ids.txt"), "--json"]
    for preset in ("draft", "final"):
        assert invoke(["validate", str(DEMO), "--preset", preset, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["clips"] == 2


def test_import_then_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What import writes passes validate; a sweep makes one clip per combination."""
    source, manifest = tmp_path / "prompts.txt", tmp_path / "m.parquet"
    source.write_text("a red fox\nan owl\n")
    assert invoke(["import", str(source), str(manifest), "--grid", "seed=1..3"]) == 0
    assert invoke(["validate", str(manifest), "--model", "fake"]) == 0
    assert "6 rows in 1 file: 6 clips" in capsys.readouterr().out


def test_import_faults_leave_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad source is exit 2 with the line."""
    source = tmp_path / "a.csv"
    source.write_text("prompt,steps\na fox,0\n")
    assert invoke(["import", str(source), str(tmp_path / "m.parquet")]) == 2
    assert "a.csv line 2, steps = 0: must be 1 to 1000; nearest is 1" in capsys.readouterr().err

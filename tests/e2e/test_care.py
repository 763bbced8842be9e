"""Looking after an output root: status, verify, retry, clean, export, reproduce, cancel, on a real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import ROOT, run, small_manifest


def call(*arguments):
    """One command as a process; returns (exit code, stdout, stderr)."""
    command = [sys.executable, "-m", "batch_gen", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three clips, one of them quarantined."""
    folder = tmp_path_factory.mktemp("care")
    (folder / "o.json").write_text(json.dumps({"faults": {"clip-1": "nan"}}))
    code, _, errors = run(
        small_manifest(folder / "m.parquet", 3, tag="hero"),
        folder / "out",
        "--model",
        f"fake:{folder / 'o.json'}",
        "--max-failures",
        "9",
    )
    assert code == 3, errors
    return folder / "out"


def test_status(finished):
    """status counts clips and names the quarantined one with its kind; one clip's story has its record."""
    _, text, _ = call("status", finished)
    assert "2 of 3 clips committed, 1 quarantined" in text
    assert "clip-1: nonfinite" in text
    body = json.loads(call("status", finished, "--json")[1])
    assert (body["num_committed"], body["finished"]) == (2, True)
    assert "clip-0" in call("status", finished, "clip-0")[1]


def test_verify_finds_damage_and_mends_it(finished):
    """A changed byte in a file is exit 5; --fix sets the file aside and the next run makes the clip again."""
    assert call("verify", finished, "--deep")[0] == 0
    path = next(finished.glob("clips/*/clip-2.mp4"))
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    code, text, _ = call("verify", finished)
    assert code == 5
    assert "damaged_file" in text
    assert call("verify", finished, "--fix")[0] == 0
    manifest, options = finished.parent / "m.parquet", finished.parent / "o.json"
    run(manifest, finished, "--model", f"fake:{options}", "--max-failures", "9")
    assert call("verify", finished, "--deep")[0] == 0


def test_export(finished, tmp_path):
    """Committed clips are exported under a template, and names that exist are refused."""
    assert call("export", finished, tmp_path / "e", "--template", "{tag}_{row_id}")[0] == 0
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == ["hero_clip-0.mp4", "hero_clip-2.mp4"]
    code, _, errors = call("export", finished, tmp_path / "e", "--template", "{tag}_{row_id}")
    assert code == 2
    assert "already" in errors


def test_reproduce(finished):
    """A clip rendered again from its record is equal; a record that was changed is exit 5."""
    path = next(finished.glob("clips/*/clip-0.json"))
    code, text, errors = call("reproduce", path)
    assert code == 0, errors
    assert "equal, frame for frame" in text
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"seed": 0', b'"seed": 5'))
    code, _, errors = call("reproduce", path)
    path.write_bytes(before)
    assert code == 5
    assert "the record was changed" in errors


def test_retry_and_cancel(finished):
    """retry plans the quarantined clip again; cancel stops the run until --continue; clean removes old leases."""
    code, text, _ = call("retry", finished, "--errors", "nonfinite")
    assert code == 0
    assert "1 clips planned again" in text
    assert call("cancel", finished, "--message", "enough")[0] == 0
    (finished.parent / "o.json").write_text("{}")
    flags = ("--model", f"fake:{finished.parent / 'o.json'}")
    assert run(finished.parent / "m.parquet", finished, *flags)[0] == 4
    code, body, _ = run(finished.parent / "m.parquet", finished, *flags, "--continue")
    assert (code, body["num_committed"], body["num_quarantined"]) == (0, 3, 0)
    code, text, _ = call("clean", finished, "--yes")
    assert code == 0
    assert not list((finished / "lease").glob("*.json"))


@pytest.mark.parametrize("arguments", [["status"], ["verify"], ["cancel"], ["retry"]])
def test_a_folder_without_a_run_is_exit_2(arguments, tmp_path):
    """Every command on an output root says when no run began there."""
    code, _, errors = call(*arguments, tmp_path)
    assert code == 2
    assert "no run" in errors


@pytest.mark.parametrize("folder", ["done", "lease"])
def test_fix_mends_unreadable_done_entries_and_leases(tmp_path, folder):
    """Garbage in the done log or in a lease: verify --fix sets it aside and enters the chunk anew from its records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from batch_gen.cli import invoke

    pq.write_table(pa.table({"prompt": ["a fox", "an owl"]}), tmp_path / "a.parquet")
    out = str(tmp_path / "out")
    sizes = ["--override", "width=32", "--override", "height=48", "--override", "num_frames=5"]
    assert invoke(["run", str(tmp_path / "a.parquet"), "--model", "fake", "--out", out, "--quiet", *sizes]) == 0
    for part in ("done", folder):
        for path in sorted((tmp_path / "out" / part).iterdir()):
            path.write_text("garbage")
    assert invoke(["verify", out]) != 0
    assert invoke(["verify", out, "--fix"]) == 0
    assert invoke(["verify", out]) == 0
    assert list((tmp_path / "out" / "aside" / folder).iterdir())

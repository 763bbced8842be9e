"""Whole runs as real processes: to a folder and to S3, resumed, killed, with failing clips."""

import json
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import helpers
from helpers import hashes, keys, kill, rank_pids, records, run, small_manifest, start, wait_for

from batch_gen import tables


def options(path, **values):
    """A fake engine with these options, as a model name."""
    path.write_text(json.dumps(values))
    return f"fake:{path}"


def test_the_same_manifest_to_a_folder_and_to_s3(tmp_path, s3_server):
    """Folder and S3 hold the same keys and the same frames, and a second run renders nothing."""
    manifest = small_manifest(tmp_path / "m.parquet", samples=2)
    bucket = f"s3://runs/{tmp_path.name}"
    flags = ("--model", "fake", "--s3-endpoint", s3_server.endpoint)
    assert run(manifest, tmp_path / "out", *flags)[0] == 0
    assert run(manifest, bucket, *flags)[0] == 0
    assert len(hashes(tmp_path / "out")) == 12
    assert hashes(tmp_path / "out") == hashes(bucket, s3_server.endpoint)
    assert keys(tmp_path / "out") == keys(bucket, s3_server.endpoint)
    for out in (tmp_path / "out", bucket):
        code, body, _ = run(manifest, out, *flags)
        assert (code, body["summary"]["num_committed"], body["num_committed"]) == (0, 0, 12)


def test_a_deleted_record_is_rendered_again(tmp_path):
    """A clip without its record does not exist: one deleted record is one clip rendered, with the same frames."""
    manifest = small_manifest(tmp_path / "m.parquet")
    run(manifest, tmp_path / "out", "--model", "fake")
    before = hashes(tmp_path / "out")
    next((tmp_path / "out").glob("clips/*/clip-3.json")).unlink()
    code, body, _ = run(manifest, tmp_path / "out", "--model", "fake")
    assert (code, body["summary"]["num_committed"]) == (0, 1)
    assert hashes(tmp_path / "out") == before


def test_kill_9_of_the_supervisor(tmp_path):
    """A supervisor killed in the middle leaves no process, and the next run completes with each clip once."""
    manifest = small_manifest(tmp_path / "m.parquet")
    flags = ("--model", options(tmp_path / "o.json", step_s=0.2), "--lease-ttl", "2")
    first = start(manifest, tmp_path / "out", *flags)
    wait_for(lambda: list((tmp_path / "out").glob("clips/*/*.json")), "the first record")
    ranks = rank_pids(first.pid)
    kill(first.pid)
    first.communicate()
    assert ranks
    wait_for(lambda: not any(alive(pid) for pid in ranks), "the end of the ranks")
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    assert (code, body["num_committed"]) == (0, 6)
    assert len(records(tmp_path / "out")) == len(list((tmp_path / "out").glob("clips/*/*.mp4"))) == 6


def test_kill_9_of_the_engine(tmp_path):
    """An engine killed in the middle is started again inside the same run, and no clip is lost or quarantined."""
    manifest = small_manifest(tmp_path / "m.parquet")
    process = start(manifest, tmp_path / "out", "--model", options(tmp_path / "o.json", step_s=0.2))
    wait_for(lambda: list((tmp_path / "out").glob("clips/*/*.json")), "the first record")
    kill(wait_for(lambda: rank_pids(process.pid), "a rank")[0])
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["num_committed"] == 6


def test_failing_clips_do_not_stop_the_others(tmp_path):
    """Clips that fail for good are quarantined with their kind, the rest is committed, exit 3, and a table says why."""
    manifest = small_manifest(tmp_path / "m.parquet")
    faults = {"clip-1": "nan", "clip-2": "flat", "clip-3": "exit", "clip-4": "short"}
    flags = ("--model", options(tmp_path / "o.json", faults=faults), "--max-failures", "10")
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    assert (code, body["num_committed"], body["num_quarantined"]) == (3, 2, 4)
    rows = {row["clip_id"]: row for row in tables.read_rows(tmp_path / "out" / "clips.parquet")}
    assert {clip_id: rows[clip_id]["kind"] for clip_id in faults} == {
        "clip-1": "nonfinite", "clip-2": "flat", "clip-3": "engine_died", "clip-4": "encode",
    }  # fmt: skip
    assert rows["clip-0"]["status"] == "committed"
    assert run(manifest, tmp_path / "out", *flags, "--ok-with-quarantine")[0] == 0


def test_rows_that_are_added_continue_the_run(tmp_path):
    """More rows make a new round; what was committed stays; a known clip with another request is exit 2 with its row."""
    run(small_manifest(tmp_path / "m.parquet", 3), tmp_path / "out", "--model", "fake")
    code, body, _ = run(small_manifest(tmp_path / "m.parquet", 5), tmp_path / "out", "--model", "fake")
    assert (code, body["summary"]["num_committed"], body["num_clips"]) == (0, 2, 5)
    code, _, errors = run(small_manifest(tmp_path / "m.parquet", 5, steps=4), tmp_path / "out", "--model", "fake")
    assert code == 2
    assert "clip-0" in errors
    assert "steps 3 -> 4" in errors


def test_another_fingerprint_is_refused(tmp_path):
    """A resume with other semantic settings exits 2 and names the difference."""
    manifest = small_manifest(tmp_path / "m.parquet", 1)
    run(manifest, tmp_path / "out", "--model", "fake")
    code, _, errors = run(manifest, tmp_path / "out", "--model", "fake", "--crf", "20")
    assert code == 2
    assert "crf: 16 -> 20" in errors


def test_sigterm_drains(tmp_path):
    """SIGTERM ends the run with 75 within the budget, frees the lease, and the next run completes without waiting."""
    manifest = small_manifest(tmp_path / "m.parquet", steps=20)
    flags = ("--model", options(tmp_path / "o.json", step_s=0.1), "--lease-ttl", "600", "--drain-budget", "5")
    process = start(manifest, tmp_path / "out", *flags)
    wait_for(lambda: list((tmp_path / "out").glob("clips/*/*.json")), "the first record")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75
    assert json.loads(out)["reason"] == "drained: SIGTERM"
    owners = [json.loads(path.read_text())["owner"] for path in (tmp_path / "out" / "lease").glob("*.json")]
    assert owners
    assert not any(owners)
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    assert (code, body["num_committed"]) == (0, 6)


def test_limit_ids_and_where_select(tmp_path):
    """A try-out renders only what is selected, and the whole manifest later adds the rest."""
    manifest = small_manifest(tmp_path / "m.parquet", 5)
    assert run(manifest, tmp_path / "out", "--model", "fake", "--limit", "1")[1]["num_clips"] == 1
    (tmp_path / "ids.txt").write_text("clip-4\n")
    assert run(manifest, tmp_path / "out", "--model", "fake", "--ids", str(tmp_path / "ids.txt"))[1]["num_clips"] == 2
    assert run(manifest, tmp_path / "out", "--model", "fake", "--where", "row_id = 'clip-2'")[1]["num_clips"] == 3
    assert set(hashes(tmp_path / "out")) == {"clip-0", "clip-2", "clip-4"}
    assert run(manifest, tmp_path / "out", "--model", "fake")[1]["num_committed"] == 5


@pytest.mark.parametrize("codec", ["ffv1", "x264_lossless", "h265_10bit"])
def test_other_codecs(tmp_path, codec):
    """Each codec gives files that verify, with its own suffix."""
    code, _, errors = run(
        small_manifest(tmp_path / "m.parquet", 1), tmp_path / "out", "--model", "fake", "--codec", codec
    )
    assert code == 0, errors
    suffix = ".mkv" if codec == "ffv1" else ".mp4"
    assert len(list((tmp_path / "out").glob(f"clips/*/clip-0{suffix}"))) == 1


def test_two_replicas_share_the_work(tmp_path):
    """Two replicas render each clip once, with the frames of one."""
    manifest = small_manifest(tmp_path / "m.parquet", 6)
    model = options(tmp_path / "o.json", step_s=0.05)
    run(manifest, tmp_path / "one", "--model", model)
    code, body, _ = run(manifest, tmp_path / "two", "--model", model, "--replicas", "2")
    assert (code, body["num_committed"]) == (0, 6)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert {record.metrics["replica"] for record in records(tmp_path / "two").values()} == {0, 1}


def test_a_killed_replica_comes_back_while_the_other_goes_on(tmp_path):
    """Of two replicas one is killed: the other goes on, the killed one starts again, and nothing is lost."""
    manifest = small_manifest(tmp_path / "m.parquet", 12)
    model = options(tmp_path / "o.json", step_s=0.1)
    process = start(manifest, tmp_path / "out", "--model", model, "--replicas", "2")
    wait_for(lambda: list((tmp_path / "out").glob("clips/*/*.json")), "the first record")
    first = set(wait_for(lambda: len(rank_pids(process.pid)) == 2 and rank_pids(process.pid), "two replicas"))
    victim = min(first)
    kill(victim)
    wait_for(lambda: len(set(rank_pids(process.pid)) - {victim}) == 2, "the replica that came back")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out)["num_committed"] == 12


def test_the_tiny_pipeline_end_to_end(tmp_path, tiny_checkpoint):
    """The real pipeline renders a manifest to files, twice with the same frames, and records say how."""
    manifest = small_manifest(tmp_path / "m.parquet", 2)
    for out in ("a", "b"):
        code, body, errors = run(manifest, tmp_path / out, "--model", str(tiny_checkpoint))
        assert code == 0, errors
        assert body["num_committed"] == 2
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    record = records(tmp_path / "a")["clip-0"]
    assert record.metrics["tokens"] > 1
    assert record.metrics["decode"]["mode"] == "exact"
    assert record.timings["denoise_s"] > 0


def alive(pid):
    """Whether a process exists (a zombie that waits for its parent does not count)."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_spot_notice_drains(tmp_path, monkeypatch):
    """A Spot notice ends the run with 75, frees the lease and leaves the metrics part; the next worker continues."""
    from tests.imds import StubImds

    imds = StubImds()
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", imds.endpoint)
    manifest = small_manifest(tmp_path / "m.parquet", steps=20)
    flags = ("--model", options(tmp_path / "o.json", step_s=0.1), "--lease-ttl", "600", "--chunk-requests", "6")
    process = start(manifest, tmp_path / "out", *flags)
    wait_for(lambda: list((tmp_path / "out").glob("clips/*/*.json")), "the first record")
    imds.interrupt()
    out, _ = process.communicate(timeout=60)
    imds.notice = None
    assert process.returncode == 75
    assert json.loads(out)["reason"] == "drained: spot interruption"
    assert list((tmp_path / "out" / "metrics").glob("*.parquet"))
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    imds.close()
    assert (code, body["num_committed"]) == (0, 6)


def test_caps_stop_the_run(tmp_path):
    """--max-hours stops with exit 4 and says so in stop.json; --continue goes on."""
    manifest = small_manifest(tmp_path / "m.parquet", steps=20)
    flags = ("--model", options(tmp_path / "o.json", step_s=0.05), "--lease-ttl", "3")
    code, _, errors = run(manifest, tmp_path / "out", *flags, "--max-hours", "0.0005")
    assert code == 4
    assert "--max-hours" in errors
    assert json.loads((tmp_path / "out" / "stop.json").read_text())["reason"] == "time"
    assert run(manifest, tmp_path / "out", *flags)[0] == 4
    code, body, _ = run(manifest, tmp_path / "out", *flags, "--continue")
    assert (code, body["num_committed"]) == (0, 6)


def test_clips_are_told(tmp_path):
    """--on-clip - prints a line of JSON for each committed clip before the run ends."""
    import subprocess

    manifest = small_manifest(tmp_path / "m.parquet", 3)
    command = helpers.command(manifest, tmp_path / "out", "--model", "fake", "--on-clip", "-")
    done = subprocess.run(
        [part for part in command if part != "--json"], cwd=helpers.ROOT, capture_output=True, text=True, check=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["clip_id"] for row in told} == {"clip-0", "clip-1", "clip-2"}
    assert all(row["status"] == "committed" for row in told)


def test_blocked_prompts_are_set_aside(tmp_path):
    """Rows that the block list names are quarantined unrendered, with its line; the rest is committed."""
    manifest = small_manifest(tmp_path / "m.parquet", 3)
    (tmp_path / "blocked.txt").write_text("circle 1\n")
    flags = ("--model", "fake", "--block-list", str(tmp_path / "blocked.txt"))
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    assert (code, body["num_committed"], body["num_quarantined"]) == (3, 2, 1)
    rows = {row["clip_id"]: row for row in tables.read_rows(tmp_path / "out" / "clips.parquet")}
    assert rows["clip-1"]["message"] == "blocked by blocked.txt, line 1"

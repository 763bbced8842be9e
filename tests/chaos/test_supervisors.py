"""Whole workers, `batch-gen run` as processes: killed and stopped at random, with clips that poison, on a real S3."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from batch_gen import tables
from batch_gen.job import load_latents, save_latents
from batch_gen.layout import latents_key
from batch_gen.storage.base import StoreOptions, open_store
from tests.chaos.proxy import FaultProxy
from tests.chaos.storm import Storm, Weather, judge
from tests.e2e.helpers import hashes, rank_pids, records, run, small_manifest, start, wait_for
from tests.making import make_request

SMALL = {"num_frames": 5, "width": 32, "height": 32, "steps": 2}


def fake(path: Path, **options) -> str:
    """A fake engine with these options, as a model name."""
    path.write_text(json.dumps(options))
    return f"fake:{path}"


@pytest.mark.s3
def test_kills_and_pauses_of_supervisors_and_engines(s3_server, tmp_path):
    """Three workers and their engines, killed and stopped beyond the ttl: every clip once, nobody innocent set aside."""
    weather = Weather(seed=4, clips=30, workers=3, kills=4, pauses=4, ttl_s=4.0)
    storm = Storm(weather, f"s3://runs/{tmp_path.name}", tmp_path, s3_server.endpoint)
    storm.run()
    outcome = judge(storm, s3_server.endpoint)
    assert outcome.faults == []
    assert outcome.blows == {"kill supervisor": 2, "kill engine": 2, "pause supervisor": 2, "pause engine": 2}


@pytest.mark.s3
def test_poison_clips_are_set_aside_by_class_and_the_rest_is_made(s3_server, tmp_path):
    """A clip that ends its engine, one that hangs, one with NaN, one that cannot be stored: exit 3, neighbours made."""
    manifest = small_manifest(tmp_path / "m.parquet", 10, **SMALL)
    faults = {"clip-1": "exit", "clip-4": "hang", "clip-6": "nan"}
    model = fake(tmp_path / "o.json", faults=faults, step_s=0.02)
    out = f"s3://runs/{tmp_path.name}"
    flags = [
        "--model",
        model,
        "--replicas",
        "2",
        "--max-failures",
        "9",
        "--stall-timeout",
        "4",
        "--chunk-requests",
        "5",
    ]
    with FaultProxy(s3_server.endpoint, {}, refused=("/clip-8.mp4",)) as proxy:
        code, body, errors = run(manifest, out, *flags, "--s3-endpoint", proxy.endpoint)
    assert (code, body["num_committed"], body["num_quarantined"]) == (3, 6, 4), errors
    store_folder = tmp_path / "clips.parquet"
    fetch(out, s3_server.endpoint, "clips.parquet", store_folder)
    rows = {row["clip_id"]: row for row in tables.read_rows(store_folder)}
    found = {clip_id: (row["class"], row["kind"]) for clip_id, row in rows.items() if row["status"] == "quarantined"}
    assert found == {
        "clip-1": ("device", "engine_died"),
        "clip-4": ("device", "hang"),
        "clip-6": ("clip", "nonfinite"),
        "clip-8": ("transient", "store"),
    }
    assert proxy.counts["refused"] == 4


def test_the_number_and_order_of_workers_change_no_frame(tmp_path):
    """One, three and eight workers, rows in two orders: the same set of (clip_id, frames hash)."""
    model = fake(tmp_path / "o.json", step_s=0.02)
    found = []
    for count, backwards in ((1, False), (3, True), (8, False)):
        folder = tmp_path / str(count)
        folder.mkdir()
        manifest = small_manifest(folder / "m.parquet", 16, backwards=backwards, **SMALL)
        workers = [start(manifest, folder / "out", "--model", model) for _ in range(count)]
        ends = [(worker.communicate(timeout=240)[1], worker.returncode) for worker in workers]
        assert [code for _, code in ends] == [0] * count, ends
        found.append(hashes(folder / "out"))
    assert len(found[0]) == 16
    assert found[0] == found[1] == found[2]


def test_clocks_that_differ_by_ten_minutes_steal_nothing(tmp_path, monkeypatch):
    """Three workers, clocks ten minutes apart: each clip begun once; only a dead worker's clips are taken over."""
    trace = tmp_path / "trace"
    model = fake(tmp_path / "o.json", step_s=0.3, trace=str(trace))
    manifest = small_manifest(tmp_path / "m.parquet", 9, **SMALL)
    flags = ("--model", model, "--lease-ttl", "6", "--chunk-requests", "3")
    workers = []
    for offset_s in ("-600", "0", "600"):
        monkeypatch.setenv("BATCH_GEN_TEST_LEASE_CLOCK_OFFSET_S", offset_s)
        workers.append(start(manifest, tmp_path / "out", *flags))
    out = tmp_path / "out"
    leases = lambda: [json.loads(path.read_text()) for path in out.glob("lease/*.json")]  # noqa: E731
    wait_for(lambda: len({lease["worker"] for lease in leases()}) == 3, "three owners")
    days = sorted(lease["renewed"] for lease in leases())
    ends = [(worker.communicate(timeout=240)[1], worker.returncode) for worker in workers]
    assert [code for _, code in ends] == [0] * 3, ends
    assert days[-1][:16] > days[0][:16]
    assert [record.epoch for record in records(out).values()] == [1] * 9
    begun = [line for line in trace.read_text().splitlines() if line.startswith("denoise ")]
    assert len(begun) == len(set(begun)) == 9


def test_sigterm_does_not_wait_for_the_engine_to_load(tmp_path):
    """A drain while weights load ends the worker with 75 long before the load would be over, and leaves no rank."""
    manifest = small_manifest(tmp_path / "m.parquet", 2, **SMALL)
    worker = start(manifest, tmp_path / "out", "--model", fake(tmp_path / "o.json", load_s=600.0))
    ranks = wait_for(lambda: rank_pids(worker.pid), "a rank")
    worker.send_signal(signal.SIGTERM)
    out, errors = worker.communicate(timeout=30)
    assert worker.returncode == 75, errors
    assert json.loads(out)["reason"] == "drained: SIGTERM"
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the end of the ranks")


@pytest.mark.parametrize("fault", ["short-once", "flat-once"])
def test_kept_latents_spare_the_second_denoising(tmp_path, fault):
    """After a failed encode or verification a clip resumes from its kept latents: denoised once, decoded twice."""
    trace = tmp_path / "trace"
    model = fake(tmp_path / "o.json", faults={"clip-1": fault}, once_folder=str(tmp_path), trace=str(trace))
    manifest = small_manifest(tmp_path / "m.parquet", 3, **SMALL)
    code, body, errors = run(manifest, tmp_path / "out", "--model", model, "--keep-latents")
    assert (code, body["num_committed"]) == (0, 3), errors
    events = trace.read_text().splitlines()
    assert events.count("denoise clip-1") == 1
    assert events.count("decode clip-1") == 2
    assert records(tmp_path / "out")["clip-1"].attempt == 2
    assert list((tmp_path / "out").glob("latents/*/*")) == []
    plain = run(manifest, tmp_path / "plain", "--model", "fake")
    assert plain[0] == 0
    assert hashes(tmp_path / "out") == hashes(tmp_path / "plain")


def test_kept_latents_survive_the_worker(tmp_path):
    """A worker killed while it decodes leaves latents, and the next one decodes from them without denoising."""
    trace = tmp_path / "trace"
    model = fake(tmp_path / "o.json", slab_s=30.0, trace=str(trace))
    manifest = small_manifest(tmp_path / "m.parquet", 1, **SMALL)
    flags = ("--model", model, "--lease-ttl", "2", "--keep-latents")
    worker = start(manifest, tmp_path / "out", *flags)
    wait_for(lambda: trace.exists() and "decode clip-0" in trace.read_text().splitlines(), "the decode")
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    fake(tmp_path / "o.json", trace=str(trace))
    code, _, errors = run(manifest, tmp_path / "out", *flags)
    assert code == 0, errors
    assert trace.read_text().splitlines().count("denoise clip-0") == 1


@pytest.mark.parametrize("body", [b"", b"no latents at all", b"\x93NUMPY\x01\x00v\x00{'descr'"])
def test_kept_latents_that_cannot_be_read_are_none(tmp_path, body):
    """Damaged kept latents cost a denoising, never a clip."""
    latents = tmp_path / "out" / latents_key("clip-0")
    latents.parent.mkdir(parents=True)
    latents.write_bytes(body)
    shop = SimpleNamespace(store=open_store(str(tmp_path / "out")))
    assert load_latents(shop, make_request("clip-0")) is None
    save_latents(shop, make_request("clip-0"), np.ones((4, 2, 2, 2), np.float32))
    assert load_latents(shop, make_request("clip-0")).shape == (4, 2, 2, 2)


def fetch(out: str, endpoint: str, key: str, path: Path) -> None:
    """Copy an object of an output root to a file."""
    assert open_store(out, StoreOptions(endpoint_url=endpoint)).download(key, path) is not None

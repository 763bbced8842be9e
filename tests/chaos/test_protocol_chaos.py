"""Real processes, real signals, a real S3 server, and a proxy that makes trouble: the protocol alone, with fake work."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batch_gen.plan import PlanOptions, plan_run
from batch_gen.storage.base import StoreOptions, open_store
from tests.chaos.checks import check_finished, events, num_double_renders
from tests.chaos.proxy import FaultProxy
from tests.chaos.worker import Job, work_off
from tests.making import make_rows

ROOT = Path(__file__).parents[2]


def start(job: Job) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.chaos.worker", json.dumps(asdict(job))], cwd=ROOT)


class Fleet:
    """Workers as processes, each replaced when it is killed, until one after the other ends by itself."""

    def __init__(self, jobs: list[Job], seed: int) -> None:
        self.random = random.Random(seed)
        self.jobs = jobs
        self.processes = [start(job) for job in jobs]
        self.num_kills = self.num_pauses = 0

    def tick(self, disturb: float) -> bool:
        """Replace the dead, perhaps disturb somebody; False when all have ended well."""
        for index, process in enumerate(self.processes):
            code = process.poll()
            assert code in {None, 0, 9, -signal.SIGKILL}, f"worker {index} ended with {code}"
            if code not in {None, 0}:
                self.processes[index] = start(replace(self.jobs[index], name=f"{self.jobs[index].name}+"))
        alive = [process for process in self.processes if process.poll() is None]
        if alive and self.random.random() < disturb:
            self.disturb(self.random.choice(alive))
        return bool(alive)

    def disturb(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker, or stop it for longer than its lease."""
        if self.random.random() < 0.5:
            self.num_kills += 1
            process.kill()
            process.wait()
            return
        self.num_pauses += 1
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(4.0, lambda: resume(process))
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """End what is left."""
        for process in self.processes:
            process.kill()
            process.wait()


def resume(process: subprocess.Popen[bytes]) -> None:
    """Wake a stopped process that may be gone by now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


def run_fleet(jobs: list[Job], seed: int, num_disturbances: int, patience_s: float = 120.0) -> Fleet:
    """Run workers to the end with so many kills and pauses at random moments."""
    fleet = Fleet(jobs, seed)
    deadline = time.monotonic() + patience_s
    try:
        while fleet.tick(0.12 if fleet.num_kills + fleet.num_pauses < num_disturbances else 0.0):
            assert time.monotonic() < deadline, "the run never ends"
            time.sleep(0.1)  # the pace of the disturbances, not a synchronisation
    finally:
        fleet.stop()
    return fleet


@pytest.mark.s3
def test_kills_pauses_and_wrong_clocks_on_s3(s3_server, s3_store, tmp_path):
    """Four workers whose clocks differ by ten minutes, killed and stopped at random: everything once, nothing lost."""
    rows = make_rows(48)
    plan_run(s3_store, lambda: rows, PlanOptions(max_requests=4))
    log = tmp_path / "log"
    base = Job(s3_store.url, "w", str(log), clip_s=0.15, threads=2, endpoint=s3_server.endpoint)
    offsets = [-600.0, 0.0, 600.0, 0.0]
    jobs = [replace(base, name=f"w{n}", clock_offset_s=offset) for n, offset in enumerate(offsets)]
    fleet = run_fleet(jobs, seed=1, num_disturbances=8)
    check_finished(s3_store, [row.request.clip_id for row in rows])
    assert num_double_renders(log) <= (fleet.num_kills + fleet.num_pauses) * base.threads
    assert events(log)["nondeterministic_duplicate", ""] == 0


def test_kills_and_pauses_on_a_folder(tmp_path):
    """The same on a folder, whose locks a killed or stopped process may hold."""
    rows = make_rows(32)
    store = open_store(str(tmp_path / "out"))
    plan_run(store, lambda: rows, PlanOptions(max_requests=4))
    log = tmp_path / "log"
    jobs = [Job(store.url, f"w{n}", str(log), clip_s=0.1, threads=2) for n in range(3)]
    fleet = run_fleet(jobs, seed=2, num_disturbances=6)
    check_finished(store, [row.request.clip_id for row in rows])
    assert num_double_renders(log) <= (fleet.num_kills + fleet.num_pauses) * 2


def test_poison_clip_kills_processes_until_it_is_set_aside(tmp_path):
    """A clip that ends its process is quarantined after three deaths alone; its neighbours are made, by others."""
    rows = make_rows(12)
    store = open_store(str(tmp_path / "out"))
    plan_run(store, lambda: rows, PlanOptions(max_requests=4))
    log = tmp_path / "log"
    job = Job(store.url, "w", str(log), clip_s=0.05, threads=2, ttl_s=1.0, grace_s=0.2, poison="clip-00005")
    run_fleet([replace(job, name="a"), replace(job, name="b")], seed=3, num_disturbances=0)
    check_finished(store, [row.request.clip_id for row in rows], quarantined=["clip-00005"])
    assert events(log)["start", "clip-00005"] <= 4


@pytest.mark.s3
@pytest.mark.parametrize(
    "rates",
    [
        pytest.param({"lost": 0.06, "error": 0.04}, id="answers-lost", marks=pytest.mark.slow),
        pytest.param({"busy": 0.08, "conflict": 0.1}, id="storms", marks=pytest.mark.slow),
        pytest.param({"cut": 0.06, "slow": 0.1}, id="cut-and-slow", marks=pytest.mark.slow),
        pytest.param(
            {"lost": 0.03, "error": 0.02, "busy": 0.03, "conflict": 0.05, "cut": 0.03, "slow": 0.03}, id="everything"
        ),
    ],
)
def test_faults_between_client_and_store(s3_server, s3_store, tmp_path, rates):
    """Answers lost after success, 409, 503, cut bodies, slow answers: the same result as without."""
    rows = make_rows(8)
    plan_run(s3_store, lambda: rows, PlanOptions(max_requests=3))
    log = tmp_path / "log"
    with FaultProxy(s3_server.endpoint, rates, seed=5) as proxy:
        job = Job(s3_store.url, "w", str(log), clip_s=0.0, ttl_s=60.0, grace_s=5.0, endpoint=proxy.endpoint)
        threads = [threading.Thread(target=work_off, args=(replace(job, name=f"w{n}"),)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(proxy.counts[fate] for fate in rates) >= len(rates)
    check_finished(s3_store, [row.request.clip_id for row in rows])


@pytest.mark.s3
def test_every_lost_answer_is_recognised(s3_server, s3_store, tmp_path):
    """A create and a replace whose answers are always lost once are still known to be ours."""
    with FaultProxy(s3_server.endpoint, {"lost": 0.5}, seed=11) as proxy:
        store = open_store(s3_store.url, StoreOptions(endpoint_url=proxy.endpoint, small_read_timeout_s=5.0))
        for number in range(6):
            etag = store.create(f"lease/0-{number:05d}.json", b"version 1 of %d" % number)
            store.replace(f"lease/0-{number:05d}.json", b"version 2 of %d" % number, etag)
    assert proxy.counts["lost"] > 3
    assert s3_store.get("lease/0-00003.json").body == b"version 2 of 3"

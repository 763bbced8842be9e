"""submit, array, resubmit, status and cancel against moto's Batch and a real S3 server; and how jobs are put in words."""

import json
import uuid

import boto3
import pytest

from batch_gen.cli import invoke
from batch_gen.ledger import Start
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.submit.definition import Fleet, job_definition, submission
from batch_gen.submit.jobs import submissions
from batch_gen.submit.view import Child, JobView, child_view, job_view, plain
from tests.batch_gen.submit.jobs import job_id_of, put_job

IMAGE = "repository@sha256:" + "a" * 64


def test_definitions_are_registered_once(batch):
    """The same content reuses the definition, another image registers a new one."""
    first, is_new = batch.ensure_definition(job_definition(Fleet("batch-gen", IMAGE)))
    assert is_new
    assert batch.ensure_definition(job_definition(Fleet("batch-gen", IMAGE))) == (first, False)
    other = job_definition(Fleet("batch-gen", "repository@sha256:" + "b" * 64))
    assert batch.ensure_definition(other)[1]


def test_a_plain_job_and_an_unknown_one(batch):
    """One node is looked at as one child; what Batch does not know is None."""
    fleet = Fleet("batch-gen", IMAGE)
    arn, _ = batch.ensure_definition(job_definition(fleet))
    job_id = batch.submit(submission(fleet, "run", arn, ["batch-gen", "run", "s3://b/m"]))
    put_job(job_id, "RUNNABLE")
    view = batch.look(job_id)
    assert view.counts == {"RUNNABLE": 1}
    assert "waiting for capacity (a trn2.48xlarge); waits since 2" in next(view.lines(view.children[0].since + 2700))
    assert "(45 min)" in next(view.lines(view.children[0].since + 2700))
    assert batch.look(str(uuid.uuid4())) is None


@pytest.fixture
def fleet(batch, s3_server, manifest):
    """A way to call batch-gen with this bucket, and its store."""
    root = f"s3://runs/{uuid.uuid4().hex}"
    reach = ["--s3-endpoint", s3_server.endpoint]
    options = [str(manifest), "--out", root, "--model", "fake", "--image", IMAGE, "--region", "us-east-2", *reach]

    def call(command, *flags):
        places = {"submit": options, "status": [root, *reach], "cancel": [root, *reach]}
        return invoke([command, *places[command], *flags])

    return call, open_store(root, StoreOptions(endpoint_url=s3_server.endpoint))


def test_from_submission_to_the_finished_run(fleet, capsys):
    """Submitted, waiting, run by the submitted command, finished, submitted again: status says each of it."""
    call, store = fleet
    assert call("submit", "--nodes", "3", "--price-per-hour", "36") == 0
    job_id = job_id_of(capsys.readouterr().out)
    for index in range(3):
        put_job(f"{job_id}:{index}", "RUNNABLE")
    assert call("status") == 0
    told = capsys.readouterr().out
    assert "submitted; no worker has begun yet" in told
    assert "3 waiting for capacity (a trn2.48xlarge), of 3; waits since" in told
    command = boto3.client("batch", "us-east-2").describe_jobs(jobs=[f"{job_id}:0"])["jobs"][0]["container"]["command"]
    assert len(json.dumps(command)) < 1000
    assert invoke([*command[1:], "--quiet", "--no-emf", "--scratch", "/tmp"]) == 0
    capsys.readouterr()
    put_job(f"{job_id}:1", "FAILED", *[(75, "Essential container in task exited")] * 10)
    assert call("status") == 0
    told = capsys.readouterr().out
    assert "3 of 3 clips committed" in told
    assert "child 1 failed" in told
    assert "USD" in told
    assert call("submit", "--nodes", "2", "--price-per-hour", "36") == 0
    told = capsys.readouterr().out
    assert "definition reused" in told
    assert [each.nodes for each in submissions(store)] == [2, 3]
    keys = [listed.key for listed in store.list("submit/") if "/jobs/" not in listed.key]
    assert len(keys) == 3, "manifest, settings and plan lie there once, by their content"
    assert call("status", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    assert [job["submission"]["job_id"] for job in body["batch"]][1] == job_id
    assert body["costs"]["usd"] > 0
    assert body["num_committed"] == 3


def test_cancel_ends_what_waits_and_drains_what_runs(fleet, capsys):
    """Children without a machine are ended, running ones are left to stop.json; a stopped run is not submitted again."""
    call, store = fleet
    assert call("submit", "--nodes", "3") == 0
    job_id = job_id_of(capsys.readouterr().out)
    for index, state in enumerate(("RUNNING", "RUNNABLE", "RUNNABLE")):
        put_job(f"{job_id}:{index}", state)
    assert call("cancel", "--message", "wrong seed") == 0
    assert "2 without a machine ended" in capsys.readouterr().out
    client = boto3.client("batch", "us-east-2")
    found = client.describe_jobs(jobs=[f"{job_id}:{index}" for index in range(3)])["jobs"]
    assert {job["jobId"]: job.get("statusReason") for job in found}[f"{job_id}:1"] == "batch-gen cancel: wrong seed"
    assert {job["jobId"]: job.get("statusReason") for job in found}[f"{job_id}:0"] is None
    assert store.head("stop.json") is not None
    assert call("submit") == 4
    assert call("submit", "--continue") == 0
    assert store.head("stop.json") is None
    assert call("cancel", "--now") == 0
    assert "ended; running children get SIGTERM" in capsys.readouterr().out


def test_what_a_child_said_before_it_ended_is_shown(fleet, capsys):
    """A child that ended with exit 2 left its reason in the root, and status repeats it."""
    call, store = fleet
    assert call("submit", "--nodes", "2") == 0
    job_id = job_id_of(capsys.readouterr().out)
    put_job(f"{job_id}:0", "SUCCEEDED", (0, "Essential container in task exited"))
    put_job(f"{job_id}:1", "FAILED", (2, "Essential container in task exited"))
    start = Start(worker="w", job=f"{job_id}:1", ended="environment: no Neuron devices in this container", exit_code=2)
    store.put(start.key, start.to_bytes())
    assert call("status") == 0
    told = capsys.readouterr().out
    assert "1 succeeded, 1 failed, of 2" in told
    assert "child 1 failed: exit 2 (usage, config, manifest or environment is wrong" in told
    assert "no Neuron devices in this container" in told


def test_status_lives_without_batch(fleet, capsys, monkeypatch):
    """When Batch does not know the job any more, the run is still told."""
    call, _store = fleet
    assert call("submit") == 0
    from moto.batch.models import batch_backends

    batch_backends["123456789012"]["us-east-2"]._jobs.clear()
    capsys.readouterr()
    assert call("status") == 0
    assert "no longer known to Batch" in capsys.readouterr().out


def view(*children, max_starts=10):
    """A job with these children."""
    counts = {}
    for child in children:
        counts[child.state] = counts.get(child.state, 0) + 1
    return JobView("id", "run", "PENDING", "", counts, children, max_starts)


@pytest.mark.parametrize(
    ("child", "words"),
    [
        (Child("i:3", 3, "RUNNABLE", 2, 75, "", 0.0), "child 3 was started 2 of 10 times; last end: exit 75 (drained"),
        (Child("i:3", 3, "RUNNING", 2, 137, "OutOfMemoryError: Container killed due to memory usage", None),
         "exit 137 (killed: out of memory, or too slow to drain), memory ran out; the next start holds less at once"),
        (Child("i:3", 3, "RUNNING", 2, None, "Host EC2 (instance i-1) terminated.", None), "the machine was taken away"),
        (Child("i:3", 3, "FAILED", 10, 75, "", None), "failed for good after 10 starts: exit 75"),
        (Child("i:3", 3, "FAILED", 10, 75, "", None), "submit again with the same --out"),
        (Child("i:3", 3, "FAILED", 1, 1, "", None), "exit 1 (a bug: its log has the traceback)"),
        (Child("i:3", 3, "FAILED", 1, 4, "", None), "exit 4 (stopped"),
        (Child("i:3", 3, "FAILED", 0, None, "CannotStartContainerError: no such device /dev/neuron0", None),
         "the machine has no Neuron devices"),
        (Child("i:3", 3, "FAILED", 1, None, "CannotPullContainerError: manifest unknown", None), "cannot be pulled"),
    ],
)  # fmt: skip
def test_ends_are_put_in_words(child, words):
    """Retries, kills, lost machines, final failures and machines without devices are told as what they are."""
    other = Child("i:0", 0, "RUNNING", 1, None, "", None)
    assert words in "\n".join(view(other, child).lines(0.0))


def test_an_array_is_told_by_its_children():
    """A parent is PENDING while its children wait or run: their states count, and the longest wait."""
    children = [Child(f"i:{n}", n, "RUNNABLE", 0, None, "", 1_700_000_000.0 + 600 * n) for n in range(2)]
    line = next(view(*children, Child("i:2", 2, "RUNNING", 1, None, "", None)).lines(1_700_000_000.0 + 3600 * 3))
    assert (
        "1 running, 2 waiting for capacity (a trn2.48xlarge), of 3; waits since 2023-11-14T22:13Z (3 h 00 min)" in line
    )


def test_a_wait_begins_anew_after_a_lost_machine():
    """A child that was started before waits since its last end, not since its submission."""
    job = {
        "jobId": "i:4", "status": "RUNNABLE", "createdAt": 1_000,
        "attempts": [{"stoppedAt": 9_000, "statusReason": "Host EC2 (instance i-1) terminated.", "container": {}}],
    }  # fmt: skip
    assert child_view(job).since == 9.0
    assert child_view({**job, "attempts": []}).since == 1.0
    assert child_view({**job, "status": "RUNNING"}).since is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - too much", "asks for more than any machine"),
        ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", "raise MaxvCpus"),
        ("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", "no such machine free"),
        ("something new", "something new"),
    ],
)
def test_reasons_of_batch_in_plain_words(reason, words):
    """What Batch says of a queue that cannot serve a job; unknown words are passed on."""
    assert words in plain(reason)
    parent = {"jobId": "i", "jobName": "run", "status": "PENDING", "statusReason": reason}
    parent["arrayProperties"] = {"size": 2, "statusSummary": {"RUNNABLE": 2}}
    assert words in next(job_view(parent, []).lines(0.0))

"""The page docs/aws-json.md: every JSON that goes to AWS or comes from batch-gen there, rendered by the code itself."""

import json
import re
from dataclasses import replace
from pathlib import Path

from batch_gen.ledger import Start, add_up
from batch_gen.metrics import RunSummary
from batch_gen.submit.definition import Fleet, job_definition, submission, worker_command
from batch_gen.submit.jobs import Submission
from batch_gen.submit.view import child_view, job_view
from batch_gen.telemetry import emf_line, textfile

ROOT = Path(__file__).resolve().parent.parent
OUT = "s3://my-renders/runs/r1"
ACCOUNT = "arn:aws:batch:us-east-2:123456789012"
JOB = "1f0c7a52-0000-4000-8000-000000000001"
FLEET = Fleet(
    queue="batch-gen",
    image="123456789012.dkr.ecr.us-east-2.amazonaws.com/batch-gen@sha256:" + "ab" * 32,
    job_role="arn:aws:iam::123456789012:role/batch-gen-JobRole",
    execution_role="arn:aws:iam::123456789012:role/batch-gen-ExecutionRole",
    num_nodes=8,
    deadline_s=24 * 3600.0,
    tags={"batch-gen-run": "batch-gen-my-renders-runs-r1", "project": "film"},
    secrets={"BATCH_GEN_HOOK": "arn:aws:secretsmanager:us-east-2:123456789012:secret:hook"},
)
CONFIG = {
    "emf": True,
    "max_hours": 24,
    "model": "s3://my-weights/wan2.2-t2v-a14b",
    "on_clip": "env:BATCH_GEN_HOOK",
    "preset": "t2v-a14b-720p",
    "price_per_hour": 35.76,
    "profile": "trn2-720p",
    "scratch": "/scratch",
}
START = Start(
    worker="ip-10-0-1-7-1-9c0e11aa",
    job=f"{JOB}:3",
    attempt=2,
    host="i-0123456789abcdef0",
    queue="batch-gen",
    instance="trn2.48xlarge",
    price_per_hour=35.76,
    lead_s=190.0,
    wall_s=3600.0,
    render_s=3156.0,
    cold_start_s=300.0,
    num_committed=20,
    video_s=100.0,
    memory_bytes=412_316_860_416,
    memory_limit_bytes=2_097_152_000_000,
    started="2026-12-01T10:00:00.000Z",
    updated="2026-12-01T11:00:00.000Z",
)
TOTAL = RunSummary(20, 0, 100.0, 3600.0, 3156.0, 300.0, 0.0, 0.0, 1_796_119_200.0, 1_796_122_800.0)
LABELS = {"Run": "my-renders/runs/r1", "Queue": "batch-gen", "InstanceType": "trn2.48xlarge"}
HEAD = """# AWS: every JSON

Written by `scripts/build_docs.py` from the code that sends it, with made-up names and figures; nothing here was run on
AWS. The way through is [aws.md](aws.md); `batch-gen submit ... --dry-run` prints the first three for your own manifest.
"""


def aws_page() -> str:
    """docs/aws-json.md."""
    definition = job_definition(FLEET)
    command = worker_command([f"{OUT}/submit/9f2c0a1b2c3d4e5f-shots.parquet"], {"out": OUT, "config": _config_url()})
    body = submission(FLEET, FLEET.tags["batch-gen-run"], f"{ACCOUNT}:job-definition/{_named(definition)}:1", command)
    parts = [
        HEAD,
        _part("Job definition", "`RegisterJobDefinition`; its name holds a digest of the rest.", definition),
        _part("Submission", "`SubmitJob`; a single node has no `arrayProperties`.", body),
        _part("Settings of the workers", f"`{_config_url().removeprefix(OUT + '/')}` below the output root.", CONFIG),
        _part("What was submitted", f"`submit/jobs/{JOB}.json`; `status` and `cancel` read it.", _note(body)),
        _part("A start of a worker", f"`{START.key}`, every minute and at the end.", START.model_dump()),
        _part("Costs", "`costs` in `status --json`, from all starts.", add_up([_ended(), START]).to_json()),
        _part("Jobs", "`batch` in `status --json`: one entry for each submission.", _jobs(body)),
        _part("CloudWatch line", "One a minute on stderr with `--emf`: what came since the last.", _emf()),
        _text("Prometheus", "`--prometheus FILE`, replaced each minute.", textfile(LABELS, TOTAL, START)),
        _part("Nightly schedule", "Input of EventBridge Scheduler's target `aws-sdk:batch:submitJob`.", _schedule()),
        _text("Message at the end of a job", "From the rule `RunEnded` to the topic.", _message()),
    ]
    return "\n".join(parts)


def _part(title: str, text: str, body: object) -> str:
    return f"## {title}\n\n{text}\n\n```json\n{json.dumps(body, indent=1)}\n```\n"


def _text(title: str, text: str, body: str) -> str:
    return f"## {title}\n\n{text}\n\n```\n{body.rstrip()}\n```\n"


def _named(definition: dict) -> str:
    return definition["jobDefinitionName"]


def _config_url() -> str:
    return f"{OUT}/submit/5d41402abc4b2a76-job.yaml"


def _note(body: dict) -> dict:
    return Submission(
        job_id=JOB,
        job_name=body["jobName"],
        queue=body["jobQueue"],
        definition=body["jobDefinition"],
        nodes=8,
        region="us-east-2",
        submitted="2026-12-01T09:30:00.000Z",
    ).model_dump()


def _ended() -> Start:
    return START.model_copy(
        update={"attempt": 1, "wall_s": 900.0, "render_s": 500.0, "num_committed": 3, "video_s": 15.0}
    )


def _jobs(body: dict) -> list:
    lost = {"statusReason": "Host EC2 (instance i-0aa) terminated.", "container": {}, "stoppedAt": 1_796_119_100_000}
    children = [
        {"jobId": f"{JOB}:3", "status": "RUNNING", "attempts": [lost]},
        {"jobId": f"{JOB}:7", "status": "RUNNABLE", "createdAt": 1_796_115_000_000, "attempts": []},
    ]
    parent = {"jobId": JOB, "jobName": body["jobName"], "status": "PENDING", "retryStrategy": {"attempts": 10}}
    parent["arrayProperties"] = {"size": 8, "statusSummary": {"RUNNING": 7, "RUNNABLE": 1}}
    view = job_view(parent, [child_view(child) for child in children])
    return [{"submission": _note(body), "job": view.to_json()}]


def _emf() -> dict:
    told = replace(TOTAL, num_committed=19, video_s=95.0, render_s=3100.0, engine_s=3540.0)
    return json.loads(emf_line(LABELS, TOTAL, told, START))


def _schedule() -> dict:
    stack = (ROOT / "scripts/aws/stack.yaml").read_text("utf-8")
    found = re.search(r"Input: !Sub \|\n(.*?)\n\n", stack, re.DOTALL)
    names = {
        "Queue": f"{ACCOUNT}:job-queue/batch-gen",
        "RegressionDefinition": "batch-gen-0f1e2d3c4b5a",
        "RegressionSuite": "s3://my-weights/regression.parquet",
        "RegressionOut": "s3://my-renders/runs/nightly",
        "RegressionModel": "s3://my-weights/wan2.2-t2v-a14b",
        "RegressionProfile": "trn2-480p",
    }
    return json.loads(re.sub(r"\$\{(\w+)\}", lambda match: names[match[1]], found[1]))


def _message() -> str:
    stack = (ROOT / "scripts/aws/stack.yaml").read_text("utf-8")
    template = re.search(r"InputTemplate: '\"(.*)\"'", stack)[1]
    values = {"job": FLEET.tags["batch-gen-run"], "id": JOB, "status": "SUCCEEDED", "at": "2026-12-01T18:04:11Z"}
    return re.sub(r"<(\w+)>", lambda match: values[match[1]], template)

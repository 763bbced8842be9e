"""submit: dry runs, refusals, moto's Batch, and local arrays that are killed."""

import json
import signal
import threading
from pathlib import Path

import boto3
import pytest
import yaml

from batch_gen.cli import invoke
from batch_gen.submit.batch import ACTIONS, Batch
from batch_gen.submit.definition import Fleet, job_definition, submission
from batch_gen.submit.local import run_local
from batch_gen.submit.retries import strategy
from batch_gen.tables import write_manifest

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "repository@sha256:" + "a" * 64


@pytest.fixture
def manifest(tmp_path):
    """Three small rows."""
    path = tmp_path / "m.parquet"
    rows = [
        {"row_id": f"r{i}", "prompt": "a fox", "seed": i, "num_frames": 9, "width": 64, "height": 48, "steps": 2}
        for i in range(3)
    ]
    write_manifest(path, rows)
    return path


def test_dry_run_prints_the_exact_json(manifest, capsys):
    """--dry-run prints definition and submission, and calls nothing."""
    arguments = [
        "submit",
        str(manifest),
        "--out",
        "s3://bucket/run",
        "--model",
        "fake",
        "--nodes",
        "4",
        "--image",
        IMAGE,
        "--dry-run",
    ]
    assert invoke(arguments) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["submitJob"]["arrayProperties"] == {"size": 4}
    command = body["submitJob"]["containerOverrides"]["command"]
    assert command[:2] == ["batch-gen", "run"]
    assert command[command.index("--out") + 1] == "s3://bucket/run"
    assert command[2].startswith("s3://bucket/run/submit/")
    assert command[2].endswith("-m.parquet")
    assert len(body["jobDefinition"]["containerProperties"]["linuxParameters"]["devices"]) == 16
    assert "timeout" not in body["jobDefinition"]


def test_workers_get_the_job_file_as_flags(manifest, tmp_path, capsys):
    """Workers cannot read a file of the submitter's machine: its settings travel as flags, and flags win."""
    (tmp_path / "job.yaml").write_text("crf: 20\nkeep-latents: true\noverride: [steps=4]\nlimit: 2\nmax-hours: 2\n")
    arguments = ["submit", str(manifest), "--out", "s3://bucket/run", "--model", "fake", "--image", IMAGE, "--dry-run"]
    assert invoke([*arguments, "--config", str(tmp_path / "job.yaml"), "--limit", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    command = " ".join(body["submitJob"]["containerOverrides"]["command"])
    for words in ("--crf 20", "--keep-latents", "--override steps=4", "--limit 1"):
        assert words in command
    assert "--config" not in command
    assert body["jobDefinition"]["timeout"] == {"attemptDurationSeconds": 3 * 3600}


def test_lists_on_this_machine_are_refused(manifest, tmp_path, capsys):
    """A list of ids that workers cannot read is refused; without it they would render everything."""
    (tmp_path / "ids.txt").write_text("r1\n")
    flags = ["--out", "s3://b/r", "--model", "fake", "--image", IMAGE, "--dry-run"]
    assert invoke(["submit", str(manifest), *flags, "--ids", str(tmp_path / "ids.txt")]) == 2
    assert "a fleet cannot read files of this machine" in capsys.readouterr().err


def test_an_image_must_be_named(manifest, capsys):
    """Only a dry run does without an image: Batch would try to pull a name that nobody has."""
    assert invoke(["submit", str(manifest), "--out", "s3://b/r", "--model", "fake"]) == 2
    assert "--image must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "folder"], "needs an s3:// output"),
        (["--out", "s3://b/r", "--nodes", "10001", "--image", IMAGE], "--nodes 10001"),
        (["--out", "s3://b/r", "--image", "repository:latest"], "name the image by digest"),
        (["--out", "s3://b/r", "--image", IMAGE, "--attempts", "11"], "retry attempts 11"),
        (["--out", "s3://b/r", "--image", IMAGE, "--tag", "film"], "expected KEY=VALUE"),
    ],
)
def test_refusals(manifest, capsys, flags, words):
    """What a fleet cannot do is exit 2 before anything is uploaded."""
    assert invoke(["submit", str(manifest), "--model", "fake", "--dry-run", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def batch(monkeypatch):
    """moto's Batch with a queue for trn2.48xlarge."""
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-2")
    with mock_aws(config={"batch": {"use_docker": False}}):
        ec2, iam = boto3.client("ec2"), boto3.client("iam")
        subnet = ec2.describe_subnets()["Subnets"][0]
        group = ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]
        document = json.dumps({"Version": "2012-10-17", "Statement": []})
        role = iam.create_role(RoleName="r", AssumeRolePolicyDocument=document)["Role"]["Arn"]
        profile = iam.create_instance_profile(InstanceProfileName="p")["InstanceProfile"]["Arn"]
        client = boto3.client("batch")
        resources = {
            "type": "EC2", "minvCpus": 0, "maxvCpus": 1536, "instanceTypes": ["trn2.48xlarge"],
            "subnets": [subnet["SubnetId"]], "securityGroupIds": [group], "instanceRole": profile,
        }  # fmt: skip
        environment = client.create_compute_environment(
            computeEnvironmentName="trn2", type="MANAGED", state="ENABLED", computeResources=resources, serviceRole=role
        )
        order = [{"order": 1, "computeEnvironment": environment["computeEnvironmentArn"]}]
        client.create_job_queue(jobQueueName="batch-gen", state="ENABLED", priority=1, computeEnvironmentOrder=order)
        yield Batch("us-east-2")


def test_definitions_are_registered_once(batch):
    """The same content reuses the definition, another image registers a new one."""
    first, is_new = batch.ensure_definition(job_definition(Fleet("batch-gen", IMAGE)))
    assert is_new
    assert batch.ensure_definition(job_definition(Fleet("batch-gen", IMAGE))) == (first, False)
    other = job_definition(Fleet("batch-gen", "repository@sha256:" + "b" * 64))
    assert batch.ensure_definition(other)[1]


def test_submit_describe_and_terminate(batch):
    """An array is submitted, described in words, and ended."""
    fleet = Fleet("batch-gen", IMAGE, num_nodes=3)
    arn, _ = batch.ensure_definition(job_definition(fleet))
    job_id = batch.submit(submission(fleet, "run", arn, ["batch-gen", "run", "s3://b/m"]))
    view = next(batch.describe([job_id], now_s=0.0))
    assert view.name == "run"
    assert job_id in view.explain()
    batch.terminate(job_id, "enough")
    assert list(batch.describe([], now_s=0.0)) == []


def test_waiting_is_said_in_plain_words():
    """Capacity, wrong sizes and missing devices are told as what they are."""
    from batch_gen.submit.batch import JobView

    waiting = JobView("id", "run", "RUNNABLE", "", {"RUNNABLE": 3, "RUNNING": 1}, 1200.0, 0)
    assert "waiting for capacity (a trn2.48xlarge) since 20 min" in waiting.explain()
    for reason, words in (
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", "asks for more than any machine"),
        ("no such device /dev/neuron0", "no Neuron devices"),
        ("Host EC2 (instance i-1) terminated.", "taken away"),
    ):
        assert words in JobView("id", "run", "FAILED", reason, {}, None, 1).explain()


def test_a_local_array_survives_kills(manifest, tmp_path, capsys):
    """Two local children, one killed at its first start: it is started again by the rules, and the run completes."""
    killed = threading.Event()

    def kill_once(index, process):
        if index == 0 and not killed.is_set():
            killed.set()
            process.send_signal(signal.SIGKILL)

    command = [
        "batch-gen",
        "run",
        str(manifest),
        "--model",
        "fake",
        "--out",
        str(tmp_path / "out"),
        "--quiet",
        "--lease-ttl",
        "2",
    ]
    children = run_local(command, 2, strategy(3), kill_once)
    assert children[0].exit_codes == (-9 + 146, 0)
    assert all(child.succeeded for child in children)
    assert len(list((tmp_path / "out").glob("clips/*/*.json"))) == 3


def test_the_template_is_clean():
    """cfn-lint finds nothing in the CloudFormation template."""
    from cfnlint import decode
    from cfnlint.api import lint_file

    assert decode is not None
    assert lint_file(ROOT / "scripts/aws/stack.yaml") == []


class Loader(yaml.SafeLoader):
    """Reads CloudFormation's short tags as plain values."""


Loader.add_multi_constructor(
    "!", lambda loader, suffix, node: loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None
)


def test_the_job_role_allows_what_workers_call_and_nothing_else():
    """Workers read, write, list and delete below the output prefix and read weights; no other action is allowed."""
    template = yaml.load((ROOT / "scripts/aws/stack.yaml").read_text(), Loader)
    policy = template["Resources"]["JobRole"]["Properties"]["Policies"][0]["PolicyDocument"]
    actions = set()
    for statement in policy["Statement"]:
        actions |= {statement["Action"]} if isinstance(statement["Action"], str) else set(statement["Action"])
    assert actions == {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    used = (ROOT / "batch_gen/storage/s3.py").read_text()
    calls = {
        name for name in ("get_object", "head_object", "put_object", "delete_object", "list_objects_v2") if name in used
    }
    assert calls == {"get_object", "head_object", "put_object", "delete_object", "list_objects_v2"}


def test_the_submitter_calls_only_the_listed_actions():
    """The client makes exactly the Batch calls that docs/aws.md lists for people who submit."""
    import re

    source = (ROOT / "batch_gen/submit/batch.py").read_text()
    called = set(re.findall(r'_call\("(\w+)"', source))
    listed = {re.sub(r"(?<!^)(?=[A-Z])", "_", action.split(":")[1]).lower() for action in ACTIONS}
    assert called <= listed
    page = (ROOT / "docs/aws.md").read_text()
    assert all(action in page for action in ACTIONS)

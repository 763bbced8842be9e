"""The CloudFormation template: clean, least privilege held against real calls, a schedule that names its night."""

import json
import re
import uuid
from fnmatch import fnmatchcase
from pathlib import Path

import boto3
import click
import pytest
import yaml

from batch_gen.checkpoint import open_checkpoint
from batch_gen.cli import app, invoke
from batch_gen.errors import CheckpointError
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.submit.batch import ACTIONS

ROOT = Path(__file__).resolve().parents[3]
VALUES = {
    "AWS::Partition": "aws", "AWS::Region": "us-east-2", "AWS::AccountId": "123456789012", "OutputBucket": "runs",
    "OutputPrefix": "runs", "WeightsBucket": "weights", "RegressionDefinition": "batch-gen-0011",
    "RegressionSuite": "s3://weights/regression.parquet", "RegressionOut": "s3://runs/runs/nightly",
    "RegressionModel": "s3://weights/wan", "RegressionProfile": "trn2-480p", "KmsKeyArn": "arn:aws:kms:us-east-2:1:key/k",
    "Queue": "arn:aws:batch:us-east-2:123456789012:job-queue/batch-gen", "SecretArn": "arn:aws:secretsmanager:us-east-2:1:secret:x",
}  # fmt: skip
ON = {"HasKey": False, "HasTags": False, "HasSecret": True, "HasBlock": False, "HasRegression": True}
S3_ACTIONS = {
    "GetObject": "s3:GetObject", "HeadObject": "s3:GetObject", "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject", "ListObjectsV2": "s3:ListBucket",
}  # fmt: skip


class Loader(yaml.SafeLoader):
    """Reads CloudFormation's short tags as one-key mappings."""


def tagged(loader, suffix, node):
    """`!Sub x` as {"Sub": x}."""
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    if isinstance(node, yaml.SequenceNode):
        return {suffix: loader.construct_sequence(node, deep=True)}
    return {suffix: loader.construct_mapping(node, deep=True)}


Loader.add_multi_constructor("!", tagged)


def rendered(node, conditions=ON):
    """A part of the template with values for its references; a branch that is not taken is left out."""
    if isinstance(node, list):
        return [each for each in (rendered(item, conditions) for item in node) if each is not None]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        (name, value), *_ = node.items()
        if name == "Sub":
            return re.sub(r"\$\{([\w:]+)\}", lambda match: VALUES[match[1]], value)
        if name == "Ref":
            return None if value == "AWS::NoValue" else VALUES.get(value, value)
        if name == "GetAtt":
            return f"arn:aws:sns:us-east-2:123456789012:{value if isinstance(value, str) else '-'.join(value)}"
        if name == "If":
            return rendered(value[1] if conditions[value[0]] else value[2], conditions)
    return {key: rendered(value, conditions) for key, value in node.items()}


@pytest.fixture(scope="module")
def resources():
    """The template's resources as written."""
    return yaml.load((ROOT / "scripts/aws/stack.yaml").read_text(), Loader)["Resources"]


def statements(resource, conditions=ON):
    """The statements of a role's own policies, or of a policy."""
    properties = resource["Properties"]
    documents = [properties["PolicyDocument"]] if "PolicyDocument" in properties else []
    documents += [policy["PolicyDocument"] for policy in rendered(properties.get("Policies", []), conditions)]
    return [statement for document in documents for statement in rendered(document, conditions)["Statement"]]


def as_list(value):
    """One or many as a list."""
    return value if isinstance(value, list) else [value]


def is_allowed(found, action, resource, prefix=None):
    """IAM's rule for policies without Deny: one statement has action, resource and every condition."""
    for statement in found:
        wanted = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
        if (
            any(fnmatchcase(action, each) for each in as_list(statement["Action"]))
            and any(fnmatchcase(resource, each) for each in as_list(statement["Resource"]))
            and any(fnmatchcase(prefix or "", each) for each in wanted)
        ):
            return True
    return False


def actions_of(found):
    """All actions of some statements."""
    return {action for statement in found for action in as_list(statement["Action"])}


@pytest.fixture
def recorded(monkeypatch):
    """Every call to AWS that this process makes: (service, operation, parameters)."""
    import botocore.client

    calls = []
    send = botocore.client.BaseClient._make_api_call

    def record(self, operation, parameters):
        calls.append((self.meta.service_model.service_name, operation, dict(parameters)))
        return send(self, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", record)
    return calls


def needed(calls):
    """The IAM questions of recorded S3 calls: (action, resource, prefix of a listing)."""
    for service, operation, parameters in calls:
        assert service == "s3"
        bucket = f"arn:aws:s3:::{parameters['Bucket']}"
        action = S3_ACTIONS[operation]
        if action == "s3:ListBucket":
            yield action, bucket, parameters.get("Prefix", "")
        else:
            yield action, f"{bucket}/{parameters['Key']}", None


def test_the_template_is_clean():
    """cfn-lint finds nothing in the CloudFormation template."""
    from cfnlint.api import lint_file

    assert lint_file(ROOT / "scripts/aws/stack.yaml") == []


def test_every_call_of_a_worker_is_allowed_and_nothing_else(resources, recorded, s3_server, manifest, capsys):
    """A real run, a resume and a look for weights: each call is allowed by the job role, and the role allows no more."""
    job_role = statements(resources["JobRole"])
    out, reach = f"s3://runs/runs/{uuid.uuid4().hex}", ["--s3-endpoint", s3_server.endpoint]
    store = open_store(out, StoreOptions(endpoint_url=s3_server.endpoint))
    store.create("submit/0-m.parquet", manifest)
    command = ["run", f"{out}/submit/0-m.parquet", "--out", out, "--model", "fake", "--quiet", "--keep-latents", *reach]
    assert invoke(command) == 0
    assert invoke(command) == 0
    server = s3_server.client()
    if "weights" not in {bucket["Name"] for bucket in server.list_buckets()["Buckets"]}:
        s3_server.make_bucket("weights")
    open_store("s3://weights/wan", StoreOptions(endpoint_url=s3_server.endpoint)).put("model_index.json", b"{}")
    recorded[:] = [
        call for call in recorded if call[1] not in ("CreateBucket", "ListBuckets") and call[2]["Bucket"] != "weights"
    ]
    with pytest.raises(CheckpointError):
        open_checkpoint("s3://weights/wan", StoreOptions(endpoint_url=s3_server.endpoint))
    asked = list(needed(recorded))
    refused = [question for question in asked if not is_allowed(job_role, *question)]
    assert refused == []
    used = {action for action, _, _ in asked}
    assert actions_of(job_role) == used, "the role allows what no worker calls"
    for question in (
        ("s3:GetObject", "arn:aws:s3:::runs/other/run.json", None),
        ("s3:PutObject", "arn:aws:s3:::weights/wan/model_index.json", None),
        ("s3:DeleteObject", "arn:aws:s3:::weights/wan/model_index.json", None),
        ("s3:ListBucket", "arn:aws:s3:::runs", ""),
        ("batch:SubmitJob", "*", None),
    ):
        assert not is_allowed(job_role, *question)


def test_iam_takes_the_policies(resources, batch):
    """IAM (moto) finds every policy of the template well formed, with all options on."""
    iam = boto3.client("iam")
    for name in ("JobRole", "ExecutionRole", "SchedulerRole", "Submitter"):
        document = {
            "Version": "2012-10-17",
            "Statement": statements(resources[name], {**ON, "HasKey": True, "HasTags": True}),
        }
        assert document["Statement"]
        iam.put_role_policy(RoleName="r", PolicyName=name, PolicyDocument=json.dumps(document))
        assert iam.get_role_policy(RoleName="r", PolicyName=name)["PolicyDocument"] == document


def test_keys_and_tags_are_allowed_only_where_they_are_used(resources):
    """--s3-kms-key and --s3-tags need three more actions, which a stack without them does not give."""
    more = statements(resources["JobRole"], {**ON, "HasKey": True, "HasTags": True})
    added = actions_of(more) - actions_of(statements(resources["JobRole"]))
    assert added == {"kms:GenerateDataKey", "kms:Decrypt", "s3:PutObjectTagging"}


def test_the_submitter_may_do_what_the_client_calls(resources):
    """The policy for people, the client's list and the page name the same calls to Batch."""
    source = (ROOT / "batch_gen/submit/batch.py").read_text()
    called = set(re.findall(r'_call\("(\w+)"', source)) | {"tag_resource"}  # tags go with the submission
    listed = {re.sub(r"(?<!^)(?=[A-Z])", "_", action.split(":")[1]).lower() for action in ACTIONS}
    assert called == listed
    allowed = {action for action in actions_of(statements(resources["Submitter"])) if action.startswith("batch:")}
    assert allowed == set(ACTIONS)
    page = (ROOT / "docs/aws.md").read_text()
    assert all(action in page for action in ACTIONS)


def test_writes_that_the_design_makes_conditional_are_refused_without(resources):
    """The bucket policy names every create-only place, and leases with either condition; other keys stay free."""
    policy = rendered(resources["OutputPolicy"]["Properties"]["PolicyDocument"])["Statement"]

    def is_denied(key, *conditions):
        for statement in policy:
            absent = statement["Condition"]["Null"]
            hit = any(fnmatchcase(f"arn:aws:s3:::runs/runs/{key}", each) for each in as_list(statement["Resource"]))
            if hit and all(name.removeprefix("s3:") not in conditions for name in absent):
                return True
        return False

    for key in ("r/clips/0a/a.mp4", "r/clips/0a/a.json", "r/done/0-00001.json", "r/plan-0.json", "r/run.json"):
        assert is_denied(key)
        assert is_denied(key, "if-match")
        assert not is_denied(key, "if-none-match")
    assert is_denied("r/lease/0-00001.json")
    assert not is_denied("r/lease/0-00001.json", "if-match")
    assert not is_denied("r/lease/0-00001.json", "if-none-match")
    for key in ("r/metrics.parquet", "r/workers/a.json", "r/.probe/x"):
        assert not is_denied(key)


def test_the_schedule_is_taken_and_its_command_exists(resources, batch):
    """EventBridge Scheduler (moto) takes target and input; the command in it is one that batch-gen has."""
    properties = resources["NightlyRegression"]["Properties"]
    target = rendered(properties["Target"])
    body = json.loads(target["Input"])
    assert set(body) <= {"JobName", "JobQueue", "JobDefinition", "ContainerOverrides", "Timeout", "Tags"}
    client = boto3.client("scheduler", "us-east-2")
    role = "arn:aws:iam::123456789012:role/scheduler"
    made = {
        "Arn": target["Arn"], "RoleArn": role, "Input": target["Input"], "RetryPolicy": target["RetryPolicy"],
        "DeadLetterConfig": {"Arn": "arn:aws:sqs:us-east-2:123456789012:dead"},
    }  # fmt: skip
    client.create_schedule(
        Name="nightly", ScheduleExpression="cron(0 2 * * ? *)", ScheduleExpressionTimezone="Etc/UTC",
        FlexibleTimeWindow={"Mode": "OFF"}, Target=made,
    )  # fmt: skip
    assert json.loads(client.get_schedule(Name="nightly")["Target"]["Input"]) == body
    command = body["ContainerOverrides"]["Command"]
    assert command[:3] == ["batch-gen", "regress", "run"]
    assert "<aws.scheduler.scheduled-time>" in command
    group = app.commands["regress"]
    night = group.get_command(click.Context(group), "run")
    known = {option for each in night.params for option in each.opts}
    assert {word for word in command if word.startswith("--")} <= known
    scheduler = statements(resources["SchedulerRole"])
    assert is_allowed(scheduler, "batch:SubmitJob", VALUES["Queue"])
    assert is_allowed(
        scheduler, "batch:SubmitJob", "arn:aws:batch:us-east-2:123456789012:job-definition/batch-gen-0011:3"
    )
    assert not is_allowed(scheduler, "batch:SubmitJob", "arn:aws:batch:us-east-2:123456789012:job-definition/other:1")


def test_the_alarm_waits_for_the_metric_that_the_night_prints(resources):
    """Name and namespace are those of regress's line; missing data breaches; the alarm may write to the topic."""
    alarm = resources["NoResultAlarm"]["Properties"]
    source = (ROOT / "batch_gen/regress/summary.py").read_text()
    assert f'"{alarm["MetricName"]}"' in source
    assert f'"Namespace": "{alarm["Namespace"]}"' in source
    assert alarm["TreatMissingData"] == "breaching"
    assert "--emf" in rendered(resources["NightlyRegression"]["Properties"]["Target"])["Input"]
    writers = [each["Principal"]["Service"] for each in statements(resources["TopicPolicy"])]
    assert writers == ["events.amazonaws.com", "cloudwatch.amazonaws.com"]


def test_the_page_of_jsons_is_the_codes(monkeypatch):
    """docs/aws-json.md is what the code sends today."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from build_aws_page import aws_page

    assert (ROOT / "docs/aws-json.md").read_text("utf-8") == aws_page(), "run scripts/build_docs.py"


def test_one_message_for_each_job(resources):
    """The end of an array's parent or of a plain job is told, the end of a child is not."""
    detail = resources["RunEnded"]["Properties"]["EventPattern"]["detail"]
    assert detail["arrayProperties"] == {"index": [{"exists": False}]}
    assert detail["status"] == ["SUCCEEDED", "FAILED"]
    assert resources["RunEnded"]["Properties"]["Targets"][0]["Arn"] == {"Ref": "Topic"}


@pytest.mark.parametrize("name", ["LaunchTemplate", "BlockTemplate"])
def test_every_machine_is_set_up_alike(resources, name):
    """Metadata only with a token and two hops, Spot draining, the NVMe disks under /scratch: capacity blocks too."""
    data = resources[name]["Properties"]["LaunchTemplateData"]
    assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
    script = data["UserData"]["Fn::Base64"]
    for words in ("ECS_ENABLE_SPOT_INSTANCE_DRAINING=true", "ECS_CONTAINER_STOP_TIMEOUT=100s", "/scratch", "mdadm"):
        assert words in script


def test_the_image_is_pinned_and_holds_no_secret():
    """The base is named by digest or nothing is built; packages come under the constraints file; doctor is the check."""
    lines = (ROOT / "scripts/aws/Dockerfile").read_text()
    assert re.search(r"^ARG BASE$", lines, re.MULTILINE)
    assert "*@sha256:*" in lines
    installs = [line for line in lines.split("RUN ") if "pip install" in line]
    assert installs
    assert all("-c scripts/constraints-neuron.txt" in line for line in installs)
    assert "HEALTHCHECK" in lines
    assert '"batch-gen", "doctor"' in lines
    assert not re.search(r"(?i)password|secret|token|AKIA", lines)

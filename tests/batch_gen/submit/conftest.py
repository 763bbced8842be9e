"""What the tests of submissions share: a small manifest and moto's Batch with a queue."""

import json

import boto3
import pytest

from batch_gen.submit.batch import Batch
from batch_gen.tables import write_manifest

REGION = "us-east-2"


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


@pytest.fixture
def batch(monkeypatch):
    """moto's Batch with a queue for trn2.48xlarge."""
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
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
        yield Batch(REGION)

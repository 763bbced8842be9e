"""The job definition for trn2.48xlarge and the submission that uses it, as the exact JSON that Batch gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batch_gen.submit.limits import TRN2_DEVICES, TRN2_USABLE_MIB, TRN2_VCPUS
from batch_gen.submit.retries import strategy

SHARED_MEMORY_MIB: Final = 65_536
STOP_MARGIN_S: Final = 3600
OPEN_FILES: Final = 1_048_576
SCRATCH: Final = "/scratch"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Where and on what a run is submitted.

    Args:
        queue: job queue, name or ARN.
        image: container image by digest.
        job_role, execution_role: ARNs; None leaves them to the definition's defaults.
        num_nodes: machines.
        attempts: starts of one child at most.
        deadline_s: the worker's own deadline; Batch's timeout lies beyond it. None: neither has one.
        log_group: CloudWatch log group.
        tags: cost allocation.
        secrets: variable -> ARN of the secret that fills it; read by the execution role, never seen in a job.
        vcpus, memory_mib: of one node; a whole trn2.48xlarge by default.
        devices: Neuron devices of one node.
    """

    queue: str
    image: str
    job_role: str | None = None
    execution_role: str | None = None
    num_nodes: int = 1
    attempts: int = 10
    deadline_s: float | None = None
    log_group: str = "/aws/batch/batch-gen"
    tags: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    vcpus: int = TRN2_VCPUS
    memory_mib: int = TRN2_USABLE_MIB
    devices: int = TRN2_DEVICES


def job_definition(fleet: Fleet) -> dict[str, Any]:
    """The job definition; its name carries a digest, so that a new one is registered only when something differs."""
    container = _container(fleet)
    body: dict[str, Any] = {
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": strategy(fleet.attempts),
        "propagateTags": True,
        "tags": dict(sorted(fleet.tags.items())),
    }
    if fleet.deadline_s is not None:
        body["timeout"] = {"attemptDurationSeconds": int(fleet.deadline_s) + STOP_MARGIN_S}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    return {"jobDefinitionName": f"batch-gen-{digest}", **body}


def submission(fleet: Fleet, name: str, definition: str, command: Sequence[str]) -> dict[str, Any]:
    """The SubmitJob request: a plain job for one node, an array for more."""
    body: dict[str, Any] = {
        "jobName": name,
        "jobQueue": fleet.queue,
        "jobDefinition": definition,
        "containerOverrides": {"command": list(command)},
        "propagateTags": True,
        "tags": dict(sorted(fleet.tags.items())),
    }
    if fleet.num_nodes > 1:
        body["arrayProperties"] = {"size": fleet.num_nodes}
    return body


def worker_command(sources: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """`batch-gen run ...` with the flags that were given, for the container."""
    command = ["batch-gen", "run", *sources]
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is False:
            command.append(f"--no-{flag[2:]}")
        elif isinstance(value, Mapping):  # a mesh in a job file
            command += [flag, ",".join(f"{axis}={degree}" for axis, degree in value.items())]
        elif isinstance(value, tuple | list):
            command += [part for item in value for part in (flag, str(item))]
        else:
            command += [flag, str(value)]
    return command


def _container(fleet: Fleet) -> dict[str, Any]:
    container: dict[str, Any] = {
        "image": fleet.image,
        "command": ["batch-gen", "doctor"],
        "resourceRequirements": [
            {"type": "VCPU", "value": str(fleet.vcpus)},
            {"type": "MEMORY", "value": str(fleet.memory_mib)},
        ],
        "linuxParameters": {
            "devices": [{"hostPath": f"/dev/neuron{index}"} for index in range(fleet.devices)],
            "initProcessEnabled": True,
            "sharedMemorySize": SHARED_MEMORY_MIB,
        },
        "ulimits": [
            {"name": "memlock", "softLimit": -1, "hardLimit": -1},
            {"name": "nofile", "softLimit": OPEN_FILES, "hardLimit": OPEN_FILES},
        ],
        "volumes": [{"name": "scratch", "host": {"sourcePath": SCRATCH}}],
        "mountPoints": [{"sourceVolume": "scratch", "containerPath": SCRATCH, "readOnly": False}],
        "environment": [{"name": "BATCH_GEN_CACHE", "value": f"{SCRATCH}/cache"}],
        "logConfiguration": {"logDriver": "awslogs", "options": {"awslogs-group": fleet.log_group}},
    }
    if fleet.secrets:
        container["secrets"] = [{"name": name, "valueFrom": arn} for name, arn in sorted(fleet.secrets.items())]
    if fleet.job_role:
        container["jobRoleArn"] = fleet.job_role
    if fleet.execution_role:
        container["executionRoleArn"] = fleet.execution_role
    return container

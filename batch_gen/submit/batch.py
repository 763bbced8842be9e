"""The calls to AWS Batch: register what is new, submit, look, stop. Nothing else of AWS is called from here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batch_gen.errors import StoreError, UsageError

MAX_DESCRIBED: Final = 100
ACTIONS: Final = (
    "batch:DescribeJobDefinitions",
    "batch:RegisterJobDefinition",
    "batch:TagResource",
    "batch:SubmitJob",
    "batch:DescribeJobs",
    "batch:ListJobs",
    "batch:TerminateJob",
)
_CONFIG: Final = Config(retries={"mode": "standard", "max_attempts": 8}, connect_timeout=5, read_timeout=30)
_WAITING: Final = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")


@dataclass(frozen=True, slots=True)
class JobView:
    """How a job stands, in words for people.

    Args:
        job_id, name, state: as Batch says.
        reason: Batch's own text.
        children: state -> number, for an array.
        waiting_s: seconds in the queue so far, None when it runs or ran.
        attempts: starts so far.
    """

    job_id: str
    name: str
    state: str
    reason: str
    children: dict[str, int]
    waiting_s: float | None
    attempts: int

    def explain(self) -> str:
        """One line: what it waits for, or how it ended."""
        children = ", ".join(f"{count} {state.lower()}" for state, count in sorted(self.children.items()) if count)
        text = f"{self.name} ({self.job_id}): {self.state}" + (f" [{children}]" if children else "")
        if self.waiting_s is not None:
            text += f", waiting for {_waits_for(self.state)} since {self.waiting_s / 60:.0f} min"
        if self.reason:
            text += f"; {_plain(self.reason)}"
        return text


class Batch:
    """A thin client; every failure becomes one of our errors."""

    def __init__(self, region: str | None = None, endpoint_url: str | None = None) -> None:
        try:
            self._client: Any = boto3.client("batch", region_name=region, endpoint_url=endpoint_url, config=_CONFIG)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"AWS Batch: {error}; set AWS_REGION or --region") from error

    def ensure_definition(self, definition: Mapping[str, Any]) -> tuple[str, bool]:
        """The ARN of the job definition and whether it is new; its name carries the digest of its content."""
        name = definition["jobDefinitionName"]
        found = self._call("describe_job_definitions", jobDefinitionName=name, status="ACTIVE")["jobDefinitions"]
        if found:
            newest = max(found, key=lambda item: int(item["revision"]))
            return str(newest["jobDefinitionArn"]), False
        return str(self._call("register_job_definition", **definition)["jobDefinitionArn"]), True

    def submit(self, body: Mapping[str, Any]) -> str:
        """Submit; returns the job id."""
        return str(self._call("submit_job", **body)["jobId"])

    def describe(self, job_ids: Sequence[str], now_s: float) -> Iterator[JobView]:
        """How jobs stand, a hundred a call."""
        for start in range(0, len(job_ids), MAX_DESCRIBED):
            answer = self._call("describe_jobs", jobs=list(job_ids[start : start + MAX_DESCRIBED]))
            yield from (_view(job, now_s) for job in answer["jobs"])

    def children(self, job_id: str, state: str) -> Iterator[str]:
        """Ids of an array's children in one state."""
        token: dict[str, str] = {}
        while True:
            answer = self._call("list_jobs", arrayJobId=job_id, jobStatus=state, **token)
            yield from (item["jobId"] for item in answer["jobSummaryList"])
            if not answer.get("nextToken"):
                return
            token = {"nextToken": answer["nextToken"]}

    def terminate(self, job_id: str, reason: str) -> None:
        """End a job and all children; they get SIGTERM first."""
        self._call("terminate_job", jobId=job_id, reason=reason)

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, name)(**arguments)
        except ClientError as error:
            detail = error.response.get("Error", {})
            text = f"AWS Batch {name}: {detail.get('Code')}: {detail.get('Message')}"
            permanent = detail.get("Code") in ("ClientException", "AccessDeniedException", "ValidationException")
            raise UsageError(text) if permanent else StoreError(text) from error
        except BotoCoreError as error:
            raise StoreError(f"AWS Batch {name}: {error}") from error
        return answer


def _view(job: Mapping[str, Any], now_s: float) -> JobView:
    state = str(job["status"])
    created_s = float(job.get("createdAt", 0)) / 1000
    waiting = now_s - created_s if state in _WAITING and created_s else None
    summary = {name: int(count) for name, count in job.get("arrayProperties", {}).get("statusSummary", {}).items()}
    return JobView(
        str(job["jobId"]),
        str(job["jobName"]),
        state,
        str(job.get("statusReason", "")),
        summary,
        waiting,
        len(job.get("attempts", [])),
    )


def _waits_for(state: str) -> str:
    return {"RUNNABLE": "capacity (a trn2.48xlarge)", "STARTING": "the machine and its image"}.get(state, "the queue")


def _plain(reason: str) -> str:
    known = {
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": "the job asks for more than any machine of the queue has",
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": "the compute environment's maximum is too small",
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": "AWS has no such machine free at the moment",
        "Host EC2": "the machine was taken away (Spot or failure); Batch starts the child again",
        "CannotPull": "the image cannot be pulled: check its name, digest and the execution role",
        "/dev/neuron": "the machine has no Neuron devices: check the instance type and the AMI's driver",
    }
    for mark, text in known.items():
        if mark in reason:
            return f"{text} ({reason})"
    return reason

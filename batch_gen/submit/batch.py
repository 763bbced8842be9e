"""The calls to AWS Batch: register what is new, submit, look, stop. Nothing else of AWS is called from here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batch_gen.errors import StoreError, UsageError
from batch_gen.submit.view import CHILD_STATES, WAITING, JobView, child_view, job_view

MAX_DESCRIBED: Final = 100
MAX_CHILDREN_SHOWN: Final = 200
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
_PERMANENT: Final = ("ClientException", "AccessDeniedException", "ValidationException", "UnrecognizedClientException")


class Batch:
    """A thin client; every failure becomes one of our errors."""

    def __init__(self, region: str | None = None, endpoint_url: str | None = None) -> None:
        try:
            self._client: Any = boto3.client("batch", region_name=region, endpoint_url=endpoint_url, config=_CONFIG)
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"AWS Batch: {error}; set AWS_REGION or --region") from error

    @property
    def region(self) -> str:
        """Where the jobs are."""
        return str(self._client.meta.region_name)

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

    def look(self, job_id: str) -> JobView | None:
        """How a job and its children stand; None when Batch does not know it (any more)."""
        found = next(self._describe([job_id]), None)
        if found is None:
            return None
        if not found.get("arrayProperties", {}).get("size"):
            return job_view(found, [child_view(found)])
        told = (self.children(job_id, state) for state in CHILD_STATES)
        ids = [child for each in told for child in itertools.islice(each, MAX_CHILDREN_SHOWN)]
        return job_view(found, [child_view(child) for child in self._describe(ids)])

    def children(self, job_id: str, state: str) -> Iterator[str]:
        """Ids of an array's children in one state."""
        token: dict[str, str] = {}
        while True:
            answer = self._call("list_jobs", arrayJobId=job_id, jobStatus=state, **token)
            yield from (item["jobId"] for item in answer["jobSummaryList"])
            if not answer.get("nextToken"):
                return
            token = {"nextToken": answer["nextToken"]}

    def end_waiting(self, job_id: str, reason: str) -> int:
        """End what has no machine yet; returns how many children that were (a plain job is one)."""
        found = next(self._describe([job_id]), None)
        if found is None:
            return 0
        if not found.get("arrayProperties", {}).get("size"):
            waiting = [job_id] if found["status"] in WAITING else []
        else:
            waiting = [child for state in WAITING for child in self.children(job_id, state)]
        for each in waiting:
            self.terminate(each, reason)
        return len(waiting)

    def terminate(self, job_id: str, reason: str) -> None:
        """End a job and all children; those that run get SIGTERM first. Batch does not start them again."""
        self._call("terminate_job", jobId=job_id, reason=reason)

    def _describe(self, job_ids: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What Batch says of jobs, a hundred a call."""
        for start in range(0, len(job_ids), MAX_DESCRIBED):
            yield from self._call("describe_jobs", jobs=list(job_ids[start : start + MAX_DESCRIBED]))["jobs"]

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = getattr(self._client, name)(**arguments)
        except ClientError as error:
            detail = error.response.get("Error", {})
            text = f"AWS Batch {name}: {detail.get('Code')}: {detail.get('Message')}"
            raise UsageError(text) if detail.get("Code") in _PERMANENT else StoreError(text) from error
        except BotoCoreError as error:
            raise StoreError(f"AWS Batch {name}: {error}") from error
        return answer

"""AWS Batch's own rules, checked here first: some are answered by AWS late, some never (a job just waits forever).

Source: AWS Batch User Guide and API reference (array jobs, automated retries, service quotas, memory management).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MIN_ARRAY_SIZE: Final = 2
MAX_ARRAY_SIZE: Final = 10_000
MAX_ATTEMPTS: Final = 10
MAX_EXIT_RULES: Final = 5
MAX_OVERRIDES_CHARS: Final = 8_192
MAX_SUBMIT_BYTES: Final = 30 << 10
MAX_DEFINITION_BYTES: Final = 24 << 10
MIN_TIMEOUT_S: Final = 60
MAX_TAGS: Final = 50
TRN2_VCPUS: Final = 192
TRN2_DEVICES: Final = 16
TRN2_MEMORY_MIB: Final = 2_097_152
TRN2_USABLE_MIB: Final = 2_000_000  # ECS registers less than the machine has; asking for all waits forever
MAX_TAG_KEY: Final = 128
MAX_TAG_VALUE: Final = 256
_ARN: Final = r"arn:aws[a-z-]*"
_QUEUE_ARN: Final = re.compile(_ARN + r":batch:[a-z0-9-]+:\d{12}:job-queue/[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_ROLE_ARN: Final = re.compile(_ARN + r":iam::\d{12}:role/[\w+=,.@/-]{1,576}", re.ASCII)
_SECRET_ARN: Final = re.compile(
    _ARN + r":(?:secretsmanager:[a-z0-9-]+:\d{12}:secret:[\w/+=.@-]+(?::[\w.-]*){0,3}"
    r"|ssm:[a-z0-9-]+:\d{12}:parameter/[\w./-]+)",
    re.ASCII,
)
_IMAGE: Final = re.compile(r"[a-z0-9][A-Za-z0-9._/:-]{0,254}@sha256:[0-9a-f]{64}")
_TAG: Final = re.compile(r"[\w .:/=+@-]*")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_IP_ADDRESS: Final = re.compile(r"\d+\.\d+\.\d+\.\d+")
_GLOB: Final = re.compile(r"[A-Za-z0-9.:\s]+\*?|\*")
_EXIT_CODE_GLOB: Final = re.compile(r"\d+\*?|\*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def name_faults(name: str, what: str) -> Iterator[str]:
    """Job, queue and definition names."""
    if not _NAME.fullmatch(name):
        yield f"{what} {name!r}: 1 to 128 letters, digits, - and _, beginning with a letter or digit"


def queue_faults(queue: str) -> Iterator[str]:
    """A job queue by name or ARN."""
    if not _NAME.fullmatch(queue) and not _QUEUE_ARN.fullmatch(queue):
        yield f"--queue {queue!r}: expected a queue's name (letters, digits, - and _, at most 128) or its ARN"


def image_faults(image: str) -> Iterator[str]:
    """An image by digest: tags move, and a start may come days after the submission."""
    if "@sha256:" not in image:
        yield f"--image {image}: name the image by digest (repository@sha256:...), tags move"
    elif not _IMAGE.fullmatch(image):
        yield f"--image {image}: expected repository@sha256: and 64 hex digits"


def role_faults(flag: str, arn: str) -> Iterator[str]:
    """A role of IAM by its ARN."""
    if not _ROLE_ARN.fullmatch(arn):
        yield f"{flag} {arn}: expected the ARN of a role, arn:aws:iam::ACCOUNT:role/NAME with the account's 12 digits"


def is_secret_arn(text: str) -> bool:
    """Whether a text is the ARN of a Secrets Manager secret or of an SSM parameter."""
    return _SECRET_ARN.fullmatch(text) is not None


def tag_faults(tags: Mapping[str, str]) -> Iterator[str]:
    """Keys and values of tags."""
    for key, value in tags.items():
        if key.lower().startswith("aws:"):
            yield f"--tag {key}: keys that begin with aws: belong to AWS"
        if not 1 <= len(key) <= MAX_TAG_KEY or not _TAG.fullmatch(key):
            yield f"--tag {key!r}: a key has 1 to {MAX_TAG_KEY} letters, digits, blanks and . : / = + - _ @"
        if len(value) > MAX_TAG_VALUE or not _TAG.fullmatch(value):
            yield f"--tag {key}: a value has at most {MAX_TAG_VALUE} letters, digits, blanks and . : / = + - _ @"


def bucket_faults(bucket: str) -> Iterator[str]:
    """Names that a bucket of S3 can have."""
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _IP_ADDRESS.fullmatch(bucket):
        yield "no bucket has that name; one has 3 to 63 lower case letters, digits, dots and dashes"


def array_faults(num_nodes: int) -> Iterator[str]:
    """One node is a plain job, more are an array of 2..10,000."""
    if not 1 <= num_nodes <= MAX_ARRAY_SIZE:
        yield f"--nodes {num_nodes}: must be 1 (a plain job) or {MIN_ARRAY_SIZE} to {MAX_ARRAY_SIZE:,} (an array)"


def retry_faults(strategy: Mapping[str, Any]) -> Iterator[str]:
    """Attempts, number of rules, and the alphabet of their patterns; without a last EXIT everything is retried."""
    if not 1 <= strategy["attempts"] <= MAX_ATTEMPTS:
        yield f"retry attempts {strategy['attempts']}: must be 1 to {MAX_ATTEMPTS}"
    rules: Sequence[Mapping[str, str]] = strategy.get("evaluateOnExit", [])
    if len(rules) > MAX_EXIT_RULES:
        yield f"{len(rules)} exit rules: Batch takes at most {MAX_EXIT_RULES}"
    for rule in rules:
        for key in ("onReason", "onStatusReason"):
            if key in rule and not (_GLOB.fullmatch(rule[key]) and len(rule[key]) <= 512):
                yield f"exit rule {key} {rule[key]!r}: letters, digits, '.', ':', blanks and one * at the end only"
        if "onExitCode" in rule and not _EXIT_CODE_GLOB.fullmatch(rule["onExitCode"]):
            yield f"exit rule onExitCode {rule['onExitCode']!r}: digits and one * at the end only"
    if not rules or rules[-1] != {"onReason": "*", "action": "EXIT"}:
        yield "the last exit rule must be onReason * -> EXIT: Batch retries whatever no rule matches"


def container_faults(container: Mapping[str, Any]) -> Iterator[str]:
    """What fits on a trn2.48xlarge."""
    resources = {item["type"]: int(item["value"]) for item in container["resourceRequirements"]}
    if resources.get("VCPU", 0) > TRN2_VCPUS:
        yield f"{resources['VCPU']} vCPUs: a trn2.48xlarge has {TRN2_VCPUS}"
    if resources.get("MEMORY", 0) > TRN2_USABLE_MIB:
        more = f"{resources['MEMORY']:,} MiB: more than ECS registers of {TRN2_MEMORY_MIB:,} MiB"
        yield f"memory {more}, the job would wait forever; use at most {TRN2_USABLE_MIB:,}"
    devices = [device["hostPath"] for device in container["linuxParameters"].get("devices", [])]
    wanted = [f"/dev/neuron{index}" for index in range(TRN2_DEVICES)]
    if devices and sorted(devices) != sorted(wanted):
        yield f"{len(devices)} devices: a mesh of 64 cores needs all of /dev/neuron0 to /dev/neuron{TRN2_DEVICES - 1}"


def timeout_faults(timeout_s: int, own_deadline_s: float) -> Iterator[str]:
    """Batch's timeout is final (not retried), so it must lie beyond our own deadline."""
    if timeout_s < MIN_TIMEOUT_S:
        yield f"timeout {timeout_s} s: at least {MIN_TIMEOUT_S}"
    if timeout_s <= own_deadline_s:
        yield f"timeout {timeout_s} s: must be beyond the worker's own deadline of {own_deadline_s:.0f} s, it is final"


def size_faults(submission: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of what is sent."""
    overrides = json.dumps(submission.get("containerOverrides", {}))
    if len(overrides) > MAX_OVERRIDES_CHARS:
        size = f"container overrides of {len(overrides):,} characters: at most {MAX_OVERRIDES_CHARS:,}"
        yield f"{size}; name one folder instead of many manifest files"
    total = len(json.dumps(submission).encode())
    if total > MAX_SUBMIT_BYTES:
        yield f"submission of {total:,} bytes: at most {MAX_SUBMIT_BYTES:,}"


def definition_faults(definition: Mapping[str, Any]) -> Iterator[str]:
    """Everything about a job definition."""
    yield from name_faults(definition["jobDefinitionName"], "job definition")
    yield from retry_faults(definition["retryStrategy"])
    yield from container_faults(definition["containerProperties"])
    size = len(json.dumps(definition).encode())
    if size > MAX_DEFINITION_BYTES:
        yield f"job definition of {size:,} bytes: at most {MAX_DEFINITION_BYTES:,}"
    if len(definition.get("tags", {})) > MAX_TAGS:
        yield f"{len(definition['tags'])} tags: at most {MAX_TAGS}"

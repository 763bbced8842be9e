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
_GLOB: Final = re.compile(r"[A-Za-z0-9.:\s]+\*?|\*")
_EXIT_CODE_GLOB: Final = re.compile(r"\d+\*?|\*")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def name_faults(name: str, what: str) -> Iterator[str]:
    """Job, queue and definition names."""
    if not _NAME.fullmatch(name):
        yield f"{what} {name!r}: 1 to 128 letters, digits, - and _, beginning with a letter or digit"


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

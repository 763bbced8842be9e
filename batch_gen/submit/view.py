"""How jobs stand, in words for people: what is waited for, what was started again, what failed and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

WAITING: Final = ("SUBMITTED", "PENDING", "RUNNABLE")
CHILD_STATES: Final = ("RUNNABLE", "STARTING", "RUNNING", "FAILED")
MAX_LINES: Final = 12
_ORDER: Final = ("RUNNING", "STARTING", "RUNNABLE", "PENDING", "SUBMITTED", "SUCCEEDED", "FAILED")
_WORDS: Final = {
    "RUNNING": "running",
    "STARTING": "starting (machine, image)",
    "RUNNABLE": "waiting for capacity (a trn2.48xlarge)",
    "PENDING": "waiting in the queue",
    "SUBMITTED": "just submitted",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
EXITS: Final = {
    0: "finished",
    1: "a bug: its log has the traceback",
    2: "usage, config, manifest or environment is wrong: its log says what",
    3: "finished, some clips are quarantined: see above, then batch-gen retry",
    4: "stopped: see above, then submit --continue",
    5: "a check failed",
    6: "no baseline to compare with",
    75: "drained or transient",
    137: "killed: out of memory, or too slow to drain",
    143: "ended by SIGTERM before it began",
}
_KNOWN: Final = {
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": "the job asks for more than any machine of the queue has",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": "the environment's maximum is too small: raise MaxvCpus",
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS": "Batch's service role lacks permissions",
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY": "AWS has no such machine free at the moment",
    "Host EC2": "the machine was taken away (Spot or failure)",
    "CannotPull": "the image cannot be pulled: check its name, digest and the execution role",
    "/dev/neuron": "the machine has no Neuron devices: check the instance type and the AMI's driver",
    "OutOfMemory": "memory ran out; the next start holds less at once",
    "ResourceInitializationError": "secrets or logs cannot be reached: check the execution role",
    "Array Child Job failed": "",
}


@dataclass(frozen=True, slots=True)
class Child:
    """One child of an array, or a plain job.

    Attributes:
        index: in the array; 0 for a plain job.
        starts: so far.
        exit_code, reason: of its last attempt that ended.
        since: Unix seconds since which it waits, None when it does not.
        last_words: what its worker wrote down as its end, if it could.
    """

    job_id: str
    index: int
    state: str
    starts: int
    exit_code: int | None
    reason: str
    since: float | None
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """A submitted job.

    Attributes:
        counts: state -> number of children.
        children: those that wait, run or failed; of large arrays not all.
        max_starts: of one child, None where nobody said.
    """

    job_id: str
    name: str
    state: str
    reason: str
    counts: dict[str, int]
    children: tuple[Child, ...]
    max_starts: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For `status --json`."""
        return asdict(self)

    def with_last_words(self, words: Mapping[str, str]) -> JobView:
        """The same with what workers wrote down, by job id."""
        told = tuple(replace(child, last_words=words.get(child.job_id, "")) for child in self.children)
        return replace(self, children=told)

    def lines(self, now_s: float) -> Iterator[str]:
        """The state for people: one line for the job, then what asks for attention."""
        total = sum(self.counts.values())
        shown = [f"{self.counts[state]} {_WORDS[state]}" for state in _ORDER if self.counts.get(state)]
        head = f"job {self.name} ({self.job_id}): {', '.join(shown)}" + (f", of {total}" if total > 1 else "")
        since = min((child.since for child in self.children if child.since is not None), default=None)
        if since is not None:
            head += f"; waits since {_moment(since)} ({_minutes(now_s - since)})"
        yield head + (f"; {plain(self.reason)}" if plain(self.reason) else "")
        told = [line for child in self.children for line in self._child_lines(child)]
        yield from told[:MAX_LINES]
        if len(told) > MAX_LINES:
            yield f"  ... and {len(told) - MAX_LINES} more; --json lists them"

    def _child_lines(self, child: Child) -> Iterator[str]:
        name = f"  child {child.index}" if sum(self.counts.values()) > 1 else "  it"
        ended = _ended(child)
        of = f" of {self.max_starts}" if self.max_starts else ""
        if child.state != "FAILED":
            if child.starts > 1 or (child.starts == 1 and child.state in WAITING):
                yield f"{name} was started {child.starts}{of} times; last end: {ended or 'unknown'}"
            elif child.reason and child.state in WAITING:
                yield f"{name}: {ended}"
            return
        if self.max_starts and child.starts >= self.max_starts:
            advice = "the run itself is not over: submit again with the same --out to give it new workers"
            yield f"{name} failed for good after {child.starts} starts: {ended}; {advice}"
        else:
            yield f"{name} failed: {ended or 'no reason given'}"


def job_view(job: Mapping[str, Any], children: Iterable[Child]) -> JobView:
    """What DescribeJobs says of a job."""
    state = str(job["status"])
    summary = {name: int(count) for name, count in job.get("arrayProperties", {}).get("statusSummary", {}).items()}
    told = tuple(sorted(children, key=lambda child: child.index))
    counts = {name: count for name, count in summary.items() if count} or dict(Counter({state: 1}))
    attempts = job.get("retryStrategy", {}).get("attempts")
    reason = str(job.get("statusReason", "")) if summary else ""
    return JobView(str(job["jobId"]), str(job["jobName"]), state, reason, counts, told, attempts)


def child_view(job: Mapping[str, Any]) -> Child:
    """What DescribeJobs says of a child or a plain job."""
    attempts = job.get("attempts", [])
    state = str(job["status"])
    last = attempts[-1] if attempts else {}
    container = last.get("container", {}) or job.get("container", {})
    stopped_ms = last.get("stoppedAt") or job.get("createdAt") or 0
    reasons = [container.get("reason"), last.get("statusReason"), job.get("statusReason")]
    return Child(
        job_id=str(job["jobId"]),
        index=int(str(job["jobId"]).partition(":")[2] or 0),
        state=state,
        starts=len(attempts) + (state in ("STARTING", "RUNNING")),
        exit_code=container.get("exitCode"),
        reason="; ".join(dict.fromkeys(str(reason) for reason in reasons if reason)),
        since=float(stopped_ms) / 1000 if state in WAITING and stopped_ms else None,
    )


def plain(reason: str) -> str:
    """What AWS's words mean; the words themselves where we know nothing better."""
    for mark, text in _KNOWN.items():
        if mark in reason:
            return f"{text} ({reason})" if text else ""
    return reason


def _ended(child: Child) -> str:
    parts = []
    if child.exit_code is not None:
        parts.append(f"exit {child.exit_code}" + (f" ({EXITS[child.exit_code]})" if child.exit_code in EXITS else ""))
    if child.last_words:
        parts.append(child.last_words)
    elif child.reason and "Essential container in task exited" not in child.reason:
        parts.append(plain(child.reason))
    return ", ".join(parts)


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _minutes(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"

"""`--local K`: the same run as K processes of this machine, with Batch's variables set and its retry rules obeyed."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from batch_gen.environment import child_environment
from batch_gen.errors import EXIT_AGAIN, EXIT_BUG
from batch_gen.submit.retries import ended_from_returncode, is_retried


@dataclass(frozen=True, slots=True)
class Child:
    """How a child of the array ended: exit codes of its attempts in order."""

    index: int
    exit_codes: tuple[int, ...]

    @property
    def succeeded(self) -> bool:
        """Whether Batch would call it SUCCEEDED."""
        return self.exit_codes[-1] == 0


def run_local(
    command: Sequence[str],
    num_nodes: int,
    retry_strategy: Mapping[str, Any],
    on_start: Callable[[int, subprocess.Popen[bytes]], None] = lambda _index, _process: None,
    program: Sequence[str] = (sys.executable, "-m", "batch_gen"),
) -> list[Child]:
    """Run all children at once; each is started again as the retry strategy says.

    Args:
        command: `batch-gen ...` as the container would run it.
        num_nodes: children.
        retry_strategy: `attempts` and `evaluateOnExit`.
        on_start: hears of every process, e.g. to kill it in a test.
        program: what stands for `batch-gen` here.
    """
    job_id = str(uuid.uuid4())

    def child(index: int) -> Child:
        codes: list[int] = []
        while True:
            variables = batch_variables(job_id, index, num_nodes, len(codes) + 1)
            process = subprocess.Popen(
                [*program, *command[1:]], env=child_environment(**variables), stdin=subprocess.DEVNULL
            )
            on_start(index, process)
            code = process.wait()
            ended = ended_from_returncode(code)
            codes.append(ended.exit_code or 0)
            if not is_retried(retry_strategy, ended, len(codes)):
                return Child(index, tuple(codes))

    with ThreadPoolExecutor(num_nodes, "child") as pool:
        return list(pool.map(child, range(num_nodes)))


def exit_code_of(children: Sequence[Child]) -> int:
    """One exit code for all: a bug before anything else, then the highest; what may be started again is 75."""
    codes = {child.exit_codes[-1] for child in children}
    if EXIT_BUG in codes:
        return EXIT_BUG
    return min(max(codes), EXIT_AGAIN)


def batch_variables(job_id: str, index: int, num_nodes: int, attempt: int) -> dict[str, str]:
    """What Batch sets in a child's environment."""
    variables = {"AWS_BATCH_JOB_ATTEMPT": str(attempt), "AWS_BATCH_CE_NAME": "local", "AWS_BATCH_JQ_NAME": "local"}
    if num_nodes == 1:
        return variables | {"AWS_BATCH_JOB_ID": job_id}
    variables |= {"AWS_BATCH_JOB_ID": f"{job_id}:{index}", "AWS_BATCH_JOB_ARRAY_SIZE": str(num_nodes)}
    return variables | {"AWS_BATCH_JOB_ARRAY_INDEX": str(index)}

"""Every way in which batch-gen fails: one table of kinds, one tree of exceptions.

BatchGenError
|- UsageError         the command line is wrong
|- ConfigError        a YAML file, preset or profile is wrong
|- ManifestError      the manifest is wrong; carries every fault
|- EnvironmentFault   this machine or installation cannot do it
|- CheckpointError    the weights are missing, torn or foreign
|- MemoryTooSmall     the work does not fit, known before the start
|- ClipFailed         one clip failed; the run goes on
|- EngineLost         a rank group died or hangs; the supervisor restarts it
|- StoreError         the store refused or cannot be reached
|- DiskFull           no space left on scratch or output disk
|- RunStopped         error budget, cost or time cap, or `cancel`
|- CheckFailed        verify, regress or doctor found something wrong
|- BaselineMissing    regress has nothing to compare with
'- Drained            stopped in good order; start again

A kind decides the retry class and the exit code. `models.errors.ModelError(kind, message)` maps through the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FAULTS_SHOWN: Final = 40
MANIFEST_TITLE: Final = "in the manifest (row numbers count from 0); nothing was started"


class RetryClass(StrEnum):
    """What a failure says about trying again."""

    INPUT = "input"  # this row can never work
    CLIP = "clip"  # the clip itself fails; a second attempt, then quarantine
    TRANSIENT = "transient"  # the same call may work in a moment
    DEVICE = "device"  # the rank group is restarted
    HOST = "host"  # this machine is going or full; another one continues
    SYSTEMIC = "systemic"  # every row would fail; stop


EXIT_OK: Final = 0
EXIT_BUG: Final = 1
EXIT_USAGE: Final = 2
EXIT_QUARANTINE: Final = 3
EXIT_STOPPED: Final = 4
EXIT_CHECK_FAILED: Final = 5
EXIT_BASELINE: Final = 6
EXIT_AGAIN: Final = 75


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table: what a failure of this kind leads to, and the sentence that helps."""

    retry: RetryClass
    exit_code: int
    hint: str


KINDS: Final[dict[str, Kind]] = {
    "bug": Kind(RetryClass.SYSTEMIC, EXIT_BUG, "this is a defect of batch-gen; please report it with the traceback"),
    "usage": Kind(RetryClass.SYSTEMIC, EXIT_USAGE, "--help after the command's name tells what it takes"),
    "config": Kind(RetryClass.SYSTEMIC, EXIT_USAGE, "correct the named file or flag"),
    "manifest": Kind(RetryClass.INPUT, EXIT_USAGE, "correct the manifest; batch-gen validate checks without rendering"),
    "environment": Kind(RetryClass.SYSTEMIC, EXIT_USAGE, "batch-gen doctor [--out URL] tells what is missing"),
    "checkpoint": Kind(RetryClass.SYSTEMIC, EXIT_USAGE, "fetch the checkpoint again, or name another --model"),
    "unsupported": Kind(RetryClass.SYSTEMIC, EXIT_USAGE, "choose one of the alternatives named in the message"),
    "memory": Kind(
        RetryClass.SYSTEMIC, EXIT_USAGE, "use a larger mesh, a smaller size, another --profile, or --ignore-memory"
    ),
    "input": Kind(RetryClass.INPUT, EXIT_QUARANTINE, "correct the row's input; it is not tried again"),
    "nonfinite": Kind(RetryClass.CLIP, EXIT_QUARANTINE, "the latents hold NaN or Inf; try another seed or dtype"),
    "flat": Kind(RetryClass.CLIP, EXIT_QUARANTINE, "every frame is one colour; try another seed"),
    "encode": Kind(RetryClass.CLIP, EXIT_QUARANTINE, "the encoder's own words are in the message"),
    "verify": Kind(RetryClass.CLIP, EXIT_QUARANTINE, "the file is not what was rendered; it was not committed"),
    "oom": Kind(RetryClass.DEVICE, EXIT_AGAIN, "memory ran out while rendering; use a larger mesh or a smaller size"),
    "device": Kind(RetryClass.DEVICE, EXIT_AGAIN, "the device failed; the message says what its rank said last"),
    "hardware": Kind(RetryClass.HOST, EXIT_AGAIN, "this machine's accelerator is broken; replace the machine"),
    "engine_died": Kind(RetryClass.DEVICE, EXIT_AGAIN, "a rank process died; the message has the end of its log"),
    "hang": Kind(RetryClass.DEVICE, EXIT_AGAIN, "no step for too long; the rank group was ended"),
    "upload": Kind(RetryClass.TRANSIENT, EXIT_AGAIN, "the store did not take the file; it is tried again"),
    "store": Kind(RetryClass.TRANSIENT, EXIT_AGAIN, "check the network, credentials and batch-gen doctor --out URL"),
    "disk_full": Kind(RetryClass.HOST, EXIT_AGAIN, "free space, or point the scratch folder at a larger disk"),
    "lost_lease": Kind(RetryClass.HOST, EXIT_AGAIN, "another worker took the chunk over; nothing is lost"),
    "stopped": Kind(RetryClass.SYSTEMIC, EXIT_STOPPED, "stop.json says why; go on with run --continue or retry"),
    "check_failed": Kind(RetryClass.SYSTEMIC, EXIT_CHECK_FAILED, "the report names what differs"),
    "baseline": Kind(RetryClass.SYSTEMIC, EXIT_BASELINE, "look at the clips, then accept them as the baseline"),
    "drained": Kind(RetryClass.HOST, EXIT_AGAIN, "start the same command again to go on"),
}


class BatchGenError(Exception):
    """A failure with a kind from the table; the message says what, where and what to do.

    Args:
        message: One or more plain lines for people.
        kind: A key of `KINDS`; subclasses have their own default.
    """

    kind: str = "bug"

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = type(self).kind if kind is None else kind
        if self.kind not in KINDS:
            raise ValueError(f"unknown error kind {self.kind!r}; the table in batch_gen/errors.py has {sorted(KINDS)}")

    @property
    def retry(self) -> RetryClass:
        """The retry class of this failure."""
        return KINDS[self.kind].retry

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with this failure."""
        return KINDS[self.kind].exit_code

    @property
    def hint(self) -> str:
        """The table's advice for this kind."""
        return KINDS[self.kind].hint


class UsageError(BatchGenError):
    """The command line is wrong."""

    kind = "usage"


class ConfigError(BatchGenError):
    """A YAML file, preset or profile is wrong."""

    kind = "config"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a manifest.

    Attributes:
        file: The file as the user named it.
        row: Row number in that file, from 0; None when the fault is of the whole file or column.
        column: Column name, or None.
        value: The offending value as text, cut short, or None.
        message: What is wrong and what would be right.
    """

    file: str
    row: int | None
    column: str | None
    value: str | None
    message: str

    def __str__(self) -> str:
        """`file, row 17, width = 830: not a multiple of 16; nearest are 816 and 832`."""
        parts = [self.file]
        if self.row is not None:
            parts.append(f"row {self.row}")
        if self.column is not None:
            parts.append(self.column if self.value is None else f"{self.column} = {self.value}")
        return f"{', '.join(parts)}: {self.message}"

    def to_json(self) -> dict[str, str | int | None]:
        """The fault as a JSON object with the fields' names."""
        return {"file": self.file, "row": self.row, "column": self.column, "value": self.value, "message": self.message}


class ManifestError(BatchGenError):
    """The manifest is wrong; `faults` holds what was found, `num_faults` how many there are in all."""

    kind = "manifest"

    def __init__(self, faults: Sequence[Fault], *, num_faults: int | None = None, title: str = MANIFEST_TITLE) -> None:
        self.faults = tuple(faults)
        self.num_faults = len(self.faults) if num_faults is None else num_faults
        super().__init__(_manifest_message(self.faults, self.num_faults, title))


def _manifest_message(faults: tuple[Fault, ...], num_faults: int, title: str) -> str:
    noun = "fault" if num_faults == 1 else "faults"
    lines = [f"{num_faults:,} {noun} {title}"]
    lines += [f"  {fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
    hidden = num_faults - min(len(faults), MAX_FAULTS_SHOWN)
    if hidden > 0:
        lines.append(f"  ... and {hidden:,} more; --json lists them")
    return "\n".join(lines)


class EnvironmentFault(BatchGenError):
    """This machine or installation cannot do what is asked."""

    kind = "environment"


class CheckpointError(BatchGenError):
    """The weights are missing, torn or of another kind."""

    kind = "checkpoint"


class MemoryTooSmall(BatchGenError):
    """The work does not fit in memory, known before the start."""

    kind = "memory"


class ClipFailed(BatchGenError):
    """One clip failed; it is tried again or set aside, and the run goes on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message, kind=kind)


class EngineLost(BatchGenError):
    """A rank group died, hangs or lost its device; the supervisor restarts it.

    Args:
        kind: A key of `KINDS`.
        message: For people.
        log: The end of the dead rank's log, whose file goes with the scratch folder; empty when there is none.
    """

    def __init__(self, kind: str, message: str, log: str = "") -> None:
        super().__init__(message, kind=kind)
        self.log = log


class StoreError(BatchGenError):
    """The store refused or cannot be reached."""

    kind = "store"


class DiskFull(BatchGenError):
    """No space is left on the scratch or output disk."""

    kind = "disk_full"


class RunStopped(BatchGenError):
    """The error budget, a cap or `cancel` ended the run."""

    kind = "stopped"


class CheckFailed(BatchGenError):
    """A check found something wrong."""

    kind = "check_failed"


class BaselineMissing(BatchGenError):
    """regress has no baseline to compare with."""

    kind = "baseline"


class Drained(BatchGenError):
    """The worker stopped in good order before the end; start it again."""

    kind = "drained"

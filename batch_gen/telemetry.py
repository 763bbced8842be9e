"""What a worker tells the outside while it works, every minute and at its end.

- its file below `workers/` (see `ledger`);
- `--emf`: a line of JSON on stderr in CloudWatch's embedded metric format, which the log group turns into metrics. Its
  dimensions have few values (run, queue, instance type), never a clip or a worker: each combination is a paid metric;
- `--prometheus FILE`: a textfile for a node exporter, replaced as a whole.

EMF values are what came since the last line, so that sums over workers, attempts and minutes are right; the textfile
holds counters of this start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TextIO

from batch_gen import clock
from batch_gen.errors import BatchGenError, ConfigError
from batch_gen.memory import tree_rss_bytes
from batch_gen.metrics import USES, Meter, RunSummary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batch_gen.drain import Drain
    from batch_gen.ledger import Start
    from batch_gen.storage.base import Store

log = logging.getLogger(__name__)
EVERY_S: Final = 60.0
LOOK_EVERY_S: Final = 1.0
NAMESPACE: Final = "batch-gen"
DIMENSIONS: Final = ("Run", "Queue", "InstanceType")
MAX_DIMENSION_CHARS: Final = 250
_COUNTED: Final = ("num_committed", "num_failed", "video_s", "engine_s", *(f"{use}_s" for use in USES))
_EMF_NAMES: Final = {
    "num_committed": "ClipsCommitted",
    "num_failed": "AttemptsFailed",
    "video_s": "VideoSeconds",
    "engine_s": "EngineSeconds",
    "render_s": "RenderSeconds",
    "cold_start_s": "ColdStartSeconds",
    "failed_s": "FailedSeconds",
    "duplicate_s": "DuplicateSeconds",
}
_HELP: Final = {
    "num_committed": ("clips_committed_total", "clips that this start committed"),
    "num_failed": ("attempts_failed_total", "attempts that ended in an error"),
    "video_s": ("video_seconds_total", "seconds of committed video"),
    "engine_s": ("engine_seconds_total", "seconds that engines existed"),
    **{f"{use}_s": (f"{use}_seconds_total", f"seconds of engines: {use.replace('_', ' ')}") for use in USES},
}


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where figures go beside the output root.

    Args:
        emf: the stream for EMF lines, None for none.
        prometheus: the textfile, None for none.
    """

    emf: TextIO | None = None
    prometheus: Path | None = None


def outlets(*, emf: bool, prometheus: str | None) -> Outlets:
    """The outlets of `--emf` and `--prometheus`.

    Raises:
        ConfigError: the textfile's folder does not exist or is not writable.
    """
    path = None if prometheus is None else Path(prometheus)
    if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--prometheus {path}: {path.parent} is no folder that this user can write")
    return Outlets(sys.stderr if emf else None, path)


class Telemetry:
    """A context manager that tells every minute and at the end.

    Args:
        store: the output root.
        start: what is known of this start from the beginning.
        meter: what is counted.
        where: outlets beside the root.
        run: a name of the run for dimensions and labels.
    """

    def __init__(self, store: Store, start: Start, meter: Meter, where: Outlets, run: str) -> None:
        self._store, self._start, self._meter, self._where = store, start, meter, where
        self._labels = dict(zip(DIMENSIONS, (run, start.queue, start.instance), strict=True))
        self._told = RunSummary()
        self._drain: Drain | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_telling, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self.tell()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()
        if isinstance(error, BatchGenError):
            self.ended(f"{error.kind}: {error.message.splitlines()[0][:200]}", error.exit_code)
        elif error is not None:
            self.ended(f"{type(error).__name__}", 1)
        self.tell()

    def watch(self, drain: Drain) -> None:
        """A drain is written down at once: a worker that is killed while it drains was not killed by its memory."""
        self._drain = drain

    def ended(self, text: str, exit_code: int) -> None:
        """How this start ends; told with the last words."""
        self._start = self._start.model_copy(update={"ended": text, "exit_code": exit_code})

    def tell(self) -> None:
        """Write everything once; what cannot be written is only logged."""
        with self._lock:
            total = self._meter.summary()
            now = self.standing(total)
            try:
                self._store.put(now.key, now.to_bytes(), content_type="application/json")
            except BatchGenError as error:
                log.warning("figures were not stored: %s", error.message)
            if self._where.emf is not None:
                print(emf_line(self._labels, total, self._told, now), file=self._where.emf, flush=True)
            if self._where.prometheus is not None:
                with contextlib.suppress(OSError):
                    write_textfile(self._where.prometheus, textfile(self._labels, total, now))
            self._told = total

    def standing(self, total: RunSummary) -> Start:
        """The start as it stands."""
        names = ("num_committed", "num_failed", "video_s", *(f"{use}_s" for use in USES), "wall_s")
        figures = {name: round(getattr(total, name), 3) for name in names}
        memory = {"memory_bytes": tree_rss_bytes(os.getpid()), "updated": clock.utc_now()}
        return self._start.model_copy(update={**figures, **memory})

    def _keep_telling(self) -> None:
        waited_s = 0.0
        while not self._closed.wait(LOOK_EVERY_S):
            waited_s += LOOK_EVERY_S
            drains = self._drain is not None and self._drain.requested and self._start.exit_code is None
            if drains:
                self.ended("draining", 75)
            if drains or waited_s >= EVERY_S:
                waited_s = 0.0
                self.tell()


def emf_line(labels: Mapping[str, str], total: RunSummary, told: RunSummary, now: Start) -> str:
    """One line in CloudWatch's embedded metric format: what came since the last one."""
    values: dict[str, Any] = {
        _EMF_NAMES[name]: round(getattr(total, name) - getattr(told, name), 3) for name in _COUNTED
    }
    values["HostMemoryBytes"] = now.memory_bytes
    units = {"Seconds": "Seconds", "Bytes": "Bytes"}
    metrics = [
        {"Name": name, "Unit": next((unit for end, unit in units.items() if name.endswith(end)), "Count")}
        for name in values
    ]
    cut = {name: (value[:MAX_DIMENSION_CHARS] or "none") for name, value in labels.items()}
    header = {
        "Timestamp": round(total.finished_at * 1000),
        "CloudWatchMetrics": [{"Namespace": NAMESPACE, "Dimensions": [list(DIMENSIONS)], "Metrics": metrics}],
    }
    facts = {"worker": now.worker, "job": now.job, "attempt": now.attempt}  # properties to search by, no dimensions
    return json.dumps({"_aws": header, **cut, **values, **facts}, ensure_ascii=True)


def textfile(labels: Mapping[str, str], total: RunSummary, now: Start) -> str:
    """Counters of this start in Prometheus's text format."""
    named = {"run": labels["Run"], "queue": labels["Queue"], "instance_type": labels["InstanceType"]}
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in named.items())
    lines = []
    for field_name, (name, text) in _HELP.items():
        lines += [f"# HELP batch_gen_{name} {text}", f"# TYPE batch_gen_{name} counter"]
        lines.append(f"batch_gen_{name}{{{shown}}} {getattr(total, field_name):.12g}")
    lines += ["# HELP batch_gen_host_memory_bytes held by all processes of the worker"]
    lines += ["# TYPE batch_gen_host_memory_bytes gauge", f"batch_gen_host_memory_bytes{{{shown}}} {now.memory_bytes}"]
    return "\n".join([*lines, ""])


def write_textfile(path: Path, text: str) -> None:
    """Replace the file as a whole: a collector never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

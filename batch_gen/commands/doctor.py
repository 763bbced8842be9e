"""`batch-gen doctor`: one line for each thing that a run needs, with the fix beside what is wrong."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from batch_gen import ffmpeg
from batch_gen.checkpoint import open_checkpoint
from batch_gen.config import num_cpus
from batch_gen.environment import cache_folder, guard_names
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, BatchGenError
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.storage.probe import probe
from batch_gen.versions import cpu_class, versions

Mark = Literal["ok", "warn", "red"]
MIN_SCRATCH_BYTES = 2 << 30
MIN_OPEN_FILES = 1024
MIN_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    name: str
    mark: Mark
    text: str
    fix: str = ""


def doctor(out: str | None, given: Mapping[str, Any], as_json: bool) -> int:
    """Check this machine; exit code 5 when a line is red."""
    lines = list(diagnose(out, given))
    if as_json:
        click.echo(json.dumps([asdict(line) for line in lines], indent=1))
    else:
        for line in lines:
            click.echo(f"{line.mark:<5}{line.name:<16}{line.text}{'  ->  ' + line.fix if line.fix else ''}")
    return EXIT_CHECK_FAILED if any(line.mark == "red" for line in lines) else EXIT_OK


def diagnose(out: str | None, given: Mapping[str, Any]) -> Iterator[Line]:
    """All lines, in order of what stops a run first."""
    scratch = Path(given.get("scratch") or tempfile.gettempdir())
    checks: list[Callable[[], Line]] = [_python, _names, _torch, _devices, _ffmpeg, _cpu, _shared_memory, _open_files]
    for check in checks:
        yield check()
    yield folder_line("scratch", scratch, MIN_SCRATCH_BYTES, "free space or use --scratch")
    yield folder_line("cache", cache_folder(), 0, "set BATCH_GEN_CACHE to a folder that can be written")
    if given.get("model"):
        yield model_line(str(given["model"]))
    if out:
        yield from store_lines(out, given)


def _python() -> Line:
    found = f"Python {sys.version.split()[0]}, batch-gen {versions()['batch-gen']}"
    return Line("python", "ok" if (3, 11) <= sys.version_info[:2] <= (3, 13) else "red", found)


def _names() -> Line:
    try:
        guard_names()
    except BatchGenError as error:
        return Line("names", "red", str(error))
    return Line("names", "ok", "kernels and models resolve to this installation")


def _torch() -> Line:
    version = versions().get("torch")
    if version is None:
        return Line("torch", "red", "not installed", "pip install 'torch>=2.13,<2.15'")
    return Line("torch", "ok", f"torch {version}, diffusers {versions().get('diffusers', 'missing')}")


def _devices() -> Line:
    neuron = sorted(Path("/dev").glob("neuron*"))
    if neuron:
        missing = [name for name in ("torch-neuronx", "neuronx-cc", "nki") if name not in versions()]
        fix = "install the extra 'neuron' from AWS's package index (docs/trainium.md)" if missing else ""
        text = f"{len(neuron)} Neuron devices" + (f", but no {', '.join(missing)}" if missing else "")
        return Line("devices", "red" if missing else "ok", text, fix)
    if Path("/dev/nvidiactl").exists():
        return Line("devices", "ok", "CUDA driver present; profile cuda")
    return Line("devices", "ok", "no accelerator; profile cpu")


def _ffmpeg() -> Line:
    try:
        done = subprocess.run([ffmpeg.executable(), "-version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Line("ffmpeg", "red", str(error), "pip install imageio-ffmpeg")
    return Line("ffmpeg", "ok", done.stdout.splitlines()[0].split(" Copyright")[0])


def _cpu() -> Line:
    return Line("cpu", "ok", f"{num_cpus()} cores, {cpu_class()}")


def _shared_memory() -> Line:
    path = Path("/dev/shm")  # noqa: S108 - looked at, not written
    if not path.exists():
        return Line("shared memory", "warn", "no /dev/shm", "mount one, or start the container with --shm-size=2g")
    total = shutil.disk_usage(path).total
    small = total < MIN_SHARED_MEMORY_BYTES
    fix = "start the container with --shm-size=2g" if small else ""
    return Line("shared memory", "warn" if small else "ok", f"{total / 2**30:.1f} GiB", fix)


def _open_files() -> Line:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = 0 <= soft < MIN_OPEN_FILES
    return Line("open files", "warn" if small else "ok", f"limit {soft}", "ulimit -n 65535" if small else "")


def folder_line(name: str, path: Path, min_free_bytes: int, fix: str) -> Line:
    """Whether a folder can be written and has room."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Line(name, "red", f"{path}: {error.strerror}", fix)
    mark: Mark = "ok" if free >= min_free_bytes else "red"
    return Line(name, mark, f"{path}, {free / 2**30:.1f} GiB free", "" if mark == "ok" else fix)


def model_line(name: str) -> Line:
    """Whether the checkpoint is there and complete."""
    try:
        found = open_checkpoint(name)
    except BatchGenError as error:
        return Line("model", "red", error.message, error.hint)
    return Line("model", "ok", f"{name}: preset {found.preset}, sizes in multiples of {found.limits.size_multiple}")


def store_lines(out: str, given: Mapping[str, Any]) -> Iterator[Line]:
    """What the store of an output root promises, tried."""
    options = StoreOptions(endpoint_url=given.get("s3_endpoint"), checksum=given.get("s3_checksum") or "when_supported")
    try:
        report = probe(open_store(out, options))
    except BatchGenError as error:
        yield Line("store", "red", error.message, error.hint)
        return
    mark: Mark = {"leases": "ok", "static": "warn", "refuse": "red"}[report.verdict]  # type: ignore[assignment]
    fix = {"ok": "", "warn": "run with --assign static, one worker a shard", "red": "use another store"}[mark]
    yield Line("store", mark, f"{out}: {report.verdict}", fix)
    for text in report.lines():
        yield Line("store", "ok", text)

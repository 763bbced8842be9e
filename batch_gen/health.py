"""What a run needs of a machine, looked at: one line each, with the fix beside what is wrong.

`View` holds everything that is looked at, so that another machine can be described (tests do).
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from batch_gen import ffmpeg
from batch_gen.config import num_cpus
from batch_gen.environment import guard_names, logical_core_setting, metadata_endpoint
from batch_gen.errors import BatchGenError
from batch_gen.versions import cpu_class, versions

Mark = Literal["ok", "warn", "red"]
MIN_OPEN_FILES: Final = 1024
MIN_SHARED_MEMORY_BYTES: Final = 1 << 30
TORCH_FROM: Final = (2, 13)
TORCH_BELOW: Final = (2, 15)
DEFAULT_LNC: Final = 2
IMDS_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    name: str
    mark: Mark
    text: str
    fix: str = ""


def _limit(which: int) -> int:
    return resource.getrlimit(which)[0]


@dataclass(frozen=True, slots=True)
class View:
    """A machine as it is seen from this process.

    Args:
        root: where /dev, /proc, /sys and /opt are.
        python: version of the interpreter.
        packages: versions of what is installed.
        executable: finds ffmpeg.
        limit: soft limit of a resource, -1 for none.
        metadata: base URL of the EC2 metadata service, None where there is none.
        logical_cores: NEURON_LOGICAL_NC_CONFIG, None when it is not set.
        neuron_ls: path of the tool, None when it is not installed.
    """

    root: Path = Path("/")
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    packages: Mapping[str, str] = field(default_factory=versions)
    executable: Callable[[], str] = ffmpeg.executable
    limit: Callable[[int], int] = _limit
    metadata: str | None = field(default_factory=metadata_endpoint)
    logical_cores: str | None = field(default_factory=logical_core_setting)
    neuron_ls: str | None = field(
        default_factory=lambda: shutil.which("neuron-ls", path="/opt/aws/neuron/bin:/usr/bin")
    )

    @property
    def num_neuron_devices(self) -> int:
        """Neuron devices that the driver shows."""
        return sum(1 for path in (self.root / "dev").glob("neuron*") if path.name[6:].isdigit())


def machine_lines(view: View, needs: Mapping[str, Any]) -> Iterator[Line]:
    """All lines about the machine; `needs` is the profile that will be used: device, cores."""
    yield python_line(view)
    yield names_line()
    yield torch_line(view)
    yield device_line(view, needs)
    if view.num_neuron_devices:
        yield driver_line(view)
        yield runtime_line(view)
        yield packages_line(view)
        yield logical_cores_line(view)
        yield free_cores_line(view, needs)
    yield ffmpeg_line(view)
    yield Line("cpu", "ok", f"{num_cpus()} cores, {cpu_class()}")
    yield shared_memory_line(view)
    yield open_files_line(view)
    yield locked_memory_line(view)
    yield metadata_line(view)


def python_line(view: View) -> Line:
    """Python 3.11 to 3.13."""
    found = f"Python {view.python[0]}.{view.python[1]}, batch-gen {view.packages.get('batch-gen', '?')}"
    good = (3, 11) <= view.python <= (3, 13)
    return Line("python", "ok" if good else "red", found, "" if good else "use Python 3.11, 3.12 or 3.13")


def names_line() -> Line:
    """`kernels` and `models` are ours."""
    try:
        guard_names()
    except BatchGenError as error:
        return Line("names", "red", error.message, "pip uninstall the other package")
    return Line("names", "ok", "kernels and models resolve to this installation")


def torch_line(view: View) -> Line:
    """Torch of a version that is supported, and what stands beside it."""
    version = view.packages.get("torch")
    fix = "pip install 'torch>=2.13,<2.15'"
    if version is None:
        return Line("torch", "red", "not installed", fix)
    major, minor = (int(part) for part in version.split(".")[:2])
    beside = ", ".join(f"{name} {view.packages.get(name, 'missing')}" for name in ("diffusers", "transformers"))
    good = TORCH_FROM <= (major, minor) < TORCH_BELOW and "missing" not in beside
    return Line("torch", "ok" if good else "red", f"torch {version}, {beside}", "" if good else f"{fix} and its peers")


def device_line(view: View, needs: Mapping[str, Any]) -> Line:
    """What is there, and whether the profile's device is among it."""
    found = {"cpu": "no accelerator; profile cpu"}
    if (view.root / "dev" / "nvidiactl").exists():
        found = {"cuda": "CUDA driver present; profile cuda"}
    if view.num_neuron_devices:
        found = {"neuron": f"{view.num_neuron_devices} Neuron devices; profiles trn2-* and trn3"}
    (kind, text), wanted = next(iter(found.items())), needs.get("device", "cpu")
    if wanted in ("cpu", kind):
        return Line("devices", "ok", text)
    return Line("devices", "red", f"{text}; the profile wants {wanted}", "choose another --profile, or another machine")


def driver_line(view: View) -> Line:
    """The kernel module of the Neuron driver."""
    path = view.root / "sys" / "module" / "neuron" / "version"
    if path.exists():
        return Line("neuron driver", "ok", path.read_text("utf-8").strip())
    return Line("neuron driver", "red", "the module is not loaded", "install aws-neuronx-dkms, then modprobe neuron")


def runtime_line(view: View) -> Line:
    """The Neuron runtime library."""
    found = sorted((view.root / "opt" / "aws" / "neuron" / "lib").glob("libnrt.so*"))
    if found:
        return Line("neuron runtime", "ok", found[-1].name)
    return Line("neuron runtime", "red", "no libnrt below /opt/aws/neuron/lib", "install aws-neuronx-runtime-lib")


def packages_line(view: View) -> Line:
    """The Python side of the Neuron stack."""
    names = ("torch-neuronx", "neuronx-cc", "nki")
    missing = [name for name in names if name not in view.packages]
    text = ", ".join(f"{name} {view.packages[name]}" for name in names if name in view.packages)
    if not missing:
        return Line("neuron packages", "ok", text)
    fix = "install the extra 'neuron' from AWS's package index, with Python 3.12 or 3.13"
    return Line("neuron packages", "red", f"no {', '.join(missing)}", fix)


def logical_cores_line(view: View) -> Line:
    """Physical cores in one logical core; profiles count logical cores of two."""
    value = view.logical_cores
    if value in (None, str(DEFAULT_LNC)):
        return Line("logical cores", "ok", f"LNC {DEFAULT_LNC}" + ("" if value else ", the default"))
    fix = f"unset NEURON_LOGICAL_NC_CONFIG, or set it to {DEFAULT_LNC}"
    return Line("logical cores", "red", f"NEURON_LOGICAL_NC_CONFIG is {value}; the profiles mean {DEFAULT_LNC}", fix)


def free_cores_line(view: View, needs: Mapping[str, Any]) -> Line:
    """Logical cores that no process holds, beside those that the profile takes."""
    if view.neuron_ls is None:
        return Line("free cores", "warn", "neuron-ls is not installed", "install aws-neuronx-tools")
    try:
        command = [view.neuron_ls, "--json-output"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        devices = json.loads(done.stdout)
        total = sum(int(device["nc_count"]) for device in devices) // DEFAULT_LNC
        holders = sorted({int(p["pid"]) for device in devices for p in device.get("neuron_processes") or ()})
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return Line("free cores", "red", f"neuron-ls: {error}", "check the driver; run neuron-ls by hand")
    if holders:
        pids = ", ".join(map(str, holders))
        return Line("free cores", "red", f"cores are held by process {pids}", f"end it, if it is yours: kill {pids}")
    wanted = int(needs.get("cores", 0))
    if needs.get("device") == "neuron" and wanted > total:
        text = f"{total} logical cores, the profile takes {wanted}"
        return Line("free cores", "red", text, "use a smaller --mesh or fewer --replicas")
    return Line("free cores", "ok", f"{total} logical cores, none in use")


def ffmpeg_line(view: View) -> Line:
    """An ffmpeg that starts."""
    try:
        done = subprocess.run([view.executable(), "-version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Line("ffmpeg", "red", str(error), "pip install imageio-ffmpeg")
    return Line("ffmpeg", "ok", done.stdout.splitlines()[0].split(" Copyright")[0])


def shared_memory_line(view: View) -> Line:
    """Room in /dev/shm, which ranks of one machine talk through."""
    path = view.root / "dev" / "shm"
    if not path.exists():
        return Line("shared memory", "warn", "no /dev/shm", "mount one, or start the container with --shm-size=2g")
    total = shutil.disk_usage(path).total
    small = total < MIN_SHARED_MEMORY_BYTES
    fix = "start the container with --shm-size=2g" if small else ""
    return Line("shared memory", "warn" if small else "ok", f"{total / 2**30:.1f} GiB", fix)


def open_files_line(view: View) -> Line:
    """Open files of a process."""
    soft = view.limit(resource.RLIMIT_NOFILE)
    small = 0 <= soft < MIN_OPEN_FILES
    return Line("open files", "warn" if small else "ok", f"limit {_shown(soft)}", "ulimit -n 65535" if small else "")


def locked_memory_line(view: View) -> Line:
    """Memory that may be locked; Neuron and EFA pin what they transfer."""
    soft = view.limit(resource.RLIMIT_MEMLOCK)
    if soft < 0 or not view.num_neuron_devices:
        return Line("locked memory", "ok", f"limit {_shown(soft)}")
    fix = "ulimit -l unlimited; in a container --ulimit memlock=-1"
    return Line("locked memory", "red", f"limit {soft} bytes, Neuron pins what it transfers", fix)


def metadata_line(view: View) -> Line:
    """The EC2 metadata service, which tells of Spot interruptions."""
    if view.metadata is None:
        return Line("metadata", "ok", "no EC2 machine; Spot notices are not looked for")
    url = view.metadata.rstrip("/") + "/latest/api/token"
    headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        request = urllib.request.Request(url, method="PUT", headers=headers)  # noqa: S310 - http only
        with urllib.request.urlopen(request, timeout=IMDS_TIMEOUT_S):  # noqa: S310
            return Line("metadata", "ok", f"{view.metadata} answers; Spot notices are seen")
    except (OSError, ValueError) as error:
        fix = (
            "aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2 (containers need the second hop)"
        )
        return Line("metadata", "red", f"{view.metadata} does not answer: {error}; Spot notices are missed", fix)


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


def _shown(limit: int) -> str:
    return "none" if limit < 0 or limit == resource.RLIM_INFINITY else f"{limit:,}"

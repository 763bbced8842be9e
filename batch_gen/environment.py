"""The one place, beside cli.py and models/device.py, that looks at the process environment.

Which worker of an array this is (AWS Batch, Kubernetes, Slurm), where caches lie, what a child process inherits, and
the guard against packages that share our names.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from batch_gen.errors import EnvironmentFault, UsageError

PACKAGE_ROOT = Path(__file__).resolve().parent.parent

# index, size, attempt, number of the first attempt, job; the first index that is set wins
_ARRAYS = (
    ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE", "AWS_BATCH_JOB_ATTEMPT", 1, "AWS_BATCH_JOB_ID"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_INDEX_FAILURE_COUNT", 0, "JOB_NAME"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT", 0, "SLURM_ARRAY_JOB_ID"),
)
_QUEUES = ("AWS_BATCH_JQ_NAME", "SLURM_JOB_PARTITION")


@dataclass(frozen=True, slots=True)
class WorkerHint:
    """Which of several workers this one is: an offset to start scanning at, never an owner of anything.

    Args:
        index: from 0.
        count: number of workers; None when the environment does not say.
        attempt: start of this child, from 1.
        source: where the numbers come from, for people.
        job: the job and index that its attempts have in common; empty where nothing names it.
    """

    index: int = 0
    count: int | None = 1
    attempt: int = 1
    source: str = "alone"
    job: str = ""


def worker_hint(shard: str | None = None) -> WorkerHint:
    """Read `--shard i/n`, else the array variables of AWS Batch, Kubernetes or Slurm.

    Raises:
        UsageError: `--shard` is not i/n with 0 <= i < n.
    """
    if shard is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        if not match or not int(match[1]) < int(match[2]):
            raise UsageError(f"--shard {shard}: expected i/n with 0 <= i < n, for example 0/4")
        return WorkerHint(int(match[1]), int(match[2]), 1, "--shard")
    for index_name, count_name, attempt_name, first, job_name in _ARRAYS:
        index = _number(index_name)
        if index is not None:
            attempt = max(1, (_number(attempt_name) or 0) + 1 - first)
            job = _job(os.environ.get(job_name, ""), index)
            return WorkerHint(index, _number(count_name), attempt, index_name, job)
    job = os.environ.get("AWS_BATCH_JOB_ID", "")
    attempt = _number("AWS_BATCH_JOB_ATTEMPT") or 1
    return WorkerHint(attempt=attempt, source="AWS_BATCH_JOB_ID" if job else "alone", job=_job(job, None))


def is_batch_child() -> bool:
    """Whether AWS Batch started this process: it may start it again at any time."""
    return bool(os.environ.get("AWS_BATCH_JOB_ID"))


def queue_name() -> str:
    """The queue or partition that this worker was started from; `none` elsewhere."""
    return next((os.environ[name] for name in _QUEUES if os.environ.get(name)), "none")


def secret(name: str) -> str | None:
    """A variable that the user named in a setting, such as `--on-clip env:NAME`; None when it is not set."""
    return os.environ.get(name) or None


def worker_name() -> str:
    """A name that no other start of a worker has: host, process, random part."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def metadata_endpoint() -> str | None:
    """Base URL of the EC2 metadata service, None where this is no EC2 machine."""
    named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if named:
        return named
    vendor = Path("/sys/class/dmi/id/sys_vendor")
    try:
        return "http://169.254.169.254" if vendor.read_text("utf-8").startswith("Amazon EC2") else None
    except OSError:
        return None


def lease_clock_offset_s() -> float:
    """Seconds by which a test shifts the clocks that leases see, monotonic and of day; 0 everywhere else."""
    return float(os.environ.get("BATCH_GEN_TEST_LEASE_CLOCK_OFFSET_S") or 0.0)


def logical_core_setting() -> str | None:
    """Physical cores in one logical Neuron core as the environment has it; None when nobody set it."""
    return os.environ.get("NEURON_LOGICAL_NC_CONFIG")


def cache_folder() -> Path:
    """Where built and fetched checkpoints and digests lie: BATCH_GEN_CACHE, else the user's cache folder."""
    own = os.environ.get("BATCH_GEN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batch-gen"


def host_compiler() -> str | None:
    """Path of the C++ compiler that torch's inductor uses on a CPU, by its rule: CXX, else g++; None without one."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def child_environment(**changes: str) -> dict[str, str]:
    """This environment with changes, for a child that imports this repository's packages."""
    path = os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **changes, "PYTHONPATH": path}


def rank_environment(rank: int, num_ranks: int, threads: int, gpu: str | None = None) -> dict[str, str]:
    """What a rank process finds in its environment; `gpu`: the CUDA device that it may use, None for no restriction."""
    wanted = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    wanted |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    # Spinning threads starve encoders and other replicas on shared cores; measured 15x slower beside a busy process.
    wanted |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # The ranks of a replica share a machine: their connections are no business of its network.
        "GLOO_SOCKET_IFNAME": next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"),
    }
    if gpu is not None:  # the rank sees one device, as number 0, and torch chooses by LOCAL_RANK
        wanted |= {"CUDA_VISIBLE_DEVICES": gpu, "LOCAL_RANK": "0"}
    return wanted


def cuda_devices(nodes: Path = Path("/dev")) -> tuple[str, ...] | None:
    """This process's CUDA devices as CUDA_VISIBLE_DEVICES names them; None where neither it nor the driver tells."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip())
    count = sum(1 for node in nodes.glob("nvidia[0-9]*"))
    return tuple(str(number) for number in range(count)) or None


def guard_names() -> None:
    """Refuse to run where `kernels` or `models` would be somebody else's package.

    Raises:
        EnvironmentFault: a distribution named `kernels` is installed, or a name resolves elsewhere.
    """
    if any(True for _ in importlib.metadata.Distribution.discover(name="kernels")):
        raise EnvironmentFault(
            "a distribution named 'kernels' is installed beside batch-gen, and transformers would load the wrong one."
            " Run: pip uninstall kernels"
        )
    for name in ("models", "kernels"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        expected = PACKAGE_ROOT / name / "__init__.py"
        if origin != expected:
            raise EnvironmentFault(
                f"import name {name!r} resolves to {origin}, expected {expected}; remove the other one"
            )


def _job(job: str, index: int | None) -> str:
    """`<job>:<index>`; AWS Batch puts the index into the id itself."""
    return job if not job or index is None or ":" in job else f"{job}:{index}"


def _number(name: str) -> int | None:
    text = os.environ.get(name, "") if name else ""
    return int(text) if text.isascii() and text.isdigit() else None

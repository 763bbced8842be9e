"""Devices behind one interface, and the only place that speaks with Neuron's packages and variables.

Three steps, in this order: `prepare` sets the process environment and imports nothing; `open_device` imports what the
device needs, after looking at what is installed; the adapter then compiles, waits, counts bytes. The texts of failures
are in `models.device_faults`, names and values in `models.neuron_facts`. The Neuron adapter was not run on a device:
see docs/trainium.md.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernels import backend
from models import neuron_facts as neuron
from models.errors import ModelError
from models.neuron_facts import Role

if TYPE_CHECKING:
    import torch

DTYPES: Final = ("float32", "bfloat16")
DEVICES: Final = ("cpu", "cuda", "neuron")
MODES: Final = ("off", "block", "model")
BACKENDS: Final = ("auto", "inductor", "eager")

# Every bucket, prompt length and step kind of a run may be one more shape of the same function.
MAX_GRAPHS: Final = 4096


@dataclass(frozen=True, slots=True)
class Compiling:
    """What is compiled (`off`, `block`: one graph for all layers, `model`) and by what (`auto`: the device's own)."""

    mode: str = "off"
    backend: str = "auto"


OFF: Final = Compiling()


@dataclass(frozen=True, slots=True)
class Start:
    """How this process will use its device. core: the logical core of this rank, for neuron. cache: where compiled
    graphs are kept; None leaves it to the packages.
    """

    device: str = "cpu"
    core: int | None = None
    threads: int = 1
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes on the device: in use, the highest so far, and what there is; None where the device does not say."""

    used_bytes: int | None
    peak_bytes: int | None
    total_bytes: int | None


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a setting's name; raises ModelError("unsupported")."""
    import torch

    if name not in DTYPES:
        raise ModelError("unsupported", f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


# --- before any import of torch -------------------------------------------------------------------------------------


def prepare(start: Start, environment: dict[str, str] | None = None) -> dict[str, str]:
    """Set the process environment for a device; on neuron before torch is imported, which loads the backend by itself.

    Args:
        start: what this process will be.
        environment: to change instead of `os.environ` (tests).

    Returns:
        What was set.

    Raises:
        ModelError: "environment", the caller's environment says something that cannot work.
    """
    target: Any = os.environ if environment is None else environment
    wanted = {name: str(start.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    if start.cache is not None and start.device != "neuron":
        wanted |= {"TORCHINDUCTOR_CACHE_DIR": str(start.cache), "TRITON_CACHE_DIR": str(start.cache / "triton")}
    if start.device != "neuron":
        wanted["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a host process must not take cores by importing torch
    else:
        if environment is None and {"torch", neuron.PACKAGE} & sys.modules.keys():
            raise ModelError("environment", "device 'neuron': torch was imported before the environment was set")
        wanted |= neuron.environment(start.core, start.cache, target)
        for name in neuron.DROPPED:
            target.pop(name, None)
    target.update(wanted)
    return wanted


def installed() -> dict[str, str]:
    """Version of every distribution that decides which Neuron stack this is."""
    found = {}
    for name in (*neuron.REAL, *neuron.FOREIGN, "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# --- one interface --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Device:
    """The device that a pipeline runs on: the CPU; subclasses change what is different elsewhere."""

    name: str
    torch_device: torch.device
    compiling: Compiling = OFF
    graphs: list[str] = field(default_factory=list)  # `role/name` of each compiled function, in order

    @property
    def static_shapes(self) -> bool:
        """Whether each new tensor shape costs a compilation, so that text is kept at its full length.

        Not with `eager`, which compiles nothing: its frames are those of `--compile off`.
        """
        return self.compiling.mode != "off" and self.compiling.backend != "eager"

    @property
    def torch_backend(self) -> str:
        """What `torch.compile` is asked for."""
        return "inductor" if self.compiling.backend == "auto" else self.compiling.backend

    def compile(self, function: Callable[..., Any], name: str, role: Role) -> Callable[..., Any]:
        """The function as one graph per set of shapes; without `--compile` the function itself.

        Args:
            function: a module or function of tensors; what varies must be a tensor input.
            name: of the graph, in logs and caches.
            role: decides the compiler's arguments.

        Raises (at the first call): whatever stands in the way of one graph; nothing falls back.
        """
        if self.compiling.mode == "off":
            return function
        return self._compile(function, name, role)

    def _compile(self, function: Callable[..., Any], name: str, role: Role) -> Callable[..., Any]:
        import torch

        torch._dynamo.config.recompile_limit = MAX_GRAPHS  # noqa: SLF001 - it has no public name
        torch._dynamo.config.accumulated_recompile_limit = MAX_GRAPHS  # noqa: SLF001
        self.graphs.append(f"{role}/{name}")
        options = self._options(name)
        compiled: Callable[..., Any] = torch.compile(
            function, backend=self.torch_backend, fullgraph=True, dynamic=False, options=options
        )
        return compiled

    def _options(self, name: str) -> dict[str, Any] | None:
        del name
        return None

    def synchronize(self) -> None:
        """Wait until queued work is done (the host's own work already is)."""

    def memory(self) -> MemoryFigures:
        """The process's own memory on the CPU."""
        page, pages = os.sysconf("SC_PAGE_SIZE"), Path("/proc/self/statm")
        used = int(pages.read_text("ascii").split()[1]) * page if pages.exists() else None
        return MemoryFigures(used, _peak_bytes(), page * os.sysconf("SC_PHYS_PAGES"))


class CudaDevice(Device):
    """One CUDA device."""

    def synchronize(self) -> None:
        """Wait for the device's queue."""
        import torch

        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> MemoryFigures:
        """What torch's allocator holds."""
        import torch

        total = torch.cuda.mem_get_info(self.torch_device)[1]
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        return MemoryFigures(torch.cuda.memory_allocated(self.torch_device), peak, total)


class NeuronDevice(Device):
    """One logical NeuronCore, by native torch-neuronx. Not run on a device."""

    @property
    def static_shapes(self) -> bool:
        """Always: even an eager operator is compiled for its shapes."""
        return True

    @property
    def torch_backend(self) -> str:
        """`neuron`; `eager` stays possible, to look for a fault."""
        return "neuron" if self.compiling.backend in ("auto", "inductor") else self.compiling.backend

    def _options(self, name: str) -> dict[str, Any] | None:
        return {"model_name": name} if self.torch_backend == "neuron" else None

    def _compile(self, function: Callable[..., Any], name: str, role: Role) -> Callable[..., Any]:
        """The backend documents no option for compiler arguments: they are in the environment when a graph compiles,
        which is at its first call.
        """
        compiled = super()._compile(function, name, role)
        flags = neuron.compiler_flags(role, os.environ)

        def call(*args: Any, **kwargs: Any) -> Any:
            os.environ[neuron.CC_FLAGS] = flags
            return compiled(*args, **kwargs)

        return call

    def synchronize(self) -> None:
        """Wait for the core's queue."""
        importlib.import_module(neuron.PACKAGE).synchronize()

    def memory(self) -> MemoryFigures:
        """From the driver's files, as torch reports nothing: two physical cores make one of ours."""
        total = neuron.CORE_BYTES.get(os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2"))
        core = os.environ.get(neuron.CORES, "")
        if not core.isdigit():
            return MemoryFigures(None, None, total)
        return MemoryFigures(neuron.core_bytes(int(core), "present"), neuron.core_bytes(int(core), "peak"), total)


def _peak_bytes() -> int | None:
    """Most bytes that this process held; None where the system does not say.

    Not `ru_maxrss`: that outlives fork and exec, and would be the peak of whoever started this process.
    """
    status = Path("/proc/self/status")
    lines = status.read_text("ascii", "replace").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def open_device(name: str = "cpu", index: int = 0, compiling: Compiling = OFF) -> Device:
    """The device `cpu`, `cuda` or `neuron`.

    Raises ModelError: "device" when torch sees none (it may have failed), "unsupported" when it can never be had here,
    "environment" when the installation is the wrong one.
    """
    _check_choice("device", name, DEVICES)
    _check_choice("compile", compiling.mode, MODES)
    _check_choice("compile-backend", compiling.backend, BACKENDS)
    if name == "neuron":
        neuron.check_stack(installed(), (sys.version_info[0], sys.version_info[1]))
        return _open_neuron(compiling)
    import torch

    if name == "cpu":
        return Device("cpu", torch.device("cpu"), compiling)
    if not torch.cuda.is_available():
        raise ModelError("device", "device 'cuda': torch sees no CUDA device; use --device cpu or check the driver")
    return CudaDevice("cuda", torch.device("cuda", index), compiling)


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ModelError("unsupported", f"{what} {value!r} is unknown; choose one of {', '.join(choices)}")


def _open_neuron(compiling: Compiling) -> Device:
    """Import the backend, which must find its environment set."""
    if os.environ.get(neuron.LNC_NAMES[0]) != str(neuron.LNC):
        raise ModelError("environment", "device 'neuron': models.device.prepare must run before this process opens it")
    import torch

    try:
        importlib.import_module(neuron.PACKAGE)
    except ImportError as error:
        raise ModelError("environment", f"{neuron.PACKAGE} cannot be imported: {error}; {neuron.EXTRA}") from error
    if not hasattr(torch, "neuron"):
        raise ModelError(
            "environment", f"{neuron.PACKAGE} registers no device 'neuron': not the native stack; {neuron.EXTRA}"
        )
    return NeuronDevice("neuron", torch.device("neuron", 0), compiling)


def use_kernels(name: str, device: str) -> None:
    """Choose what runs behind the operators of this process: `reference` or `nki`.

    Raises ModelError("unsupported") where the kernels cannot run; nothing falls back by itself.
    """
    if name == "nki" and device != "neuron":
        raise ModelError(
            "unsupported", f"kernels 'nki' run on device 'neuron', not on {device!r}; use --kernels reference"
        )
    if device == "neuron" and name != "nki":
        raise ModelError("unsupported", "kernels 'reference' are host operators; device 'neuron' needs --kernels nki")
    if name != "nki":
        backend.use("reference")
        return
    neuron.check_stack(installed(), (sys.version_info[0], sys.version_info[1]))
    wrap = importlib.import_module(neuron.PACKAGE).wrap_nki
    try:
        backend.use("nki", lambda kernel: _launcher(wrap(kernel)))
    except ImportError as error:
        raise ModelError("environment", f"the package nki is not the real one: {error}; {neuron.EXTRA}") from error


def _launcher(wrapped: Any) -> Callable[..., Any]:
    """A wrapped kernel as a function of tensors, on both halves of the logical core; inputs made contiguous first."""

    def launch(*args: Any) -> Any:
        return wrapped[neuron.LNC](*[arg.contiguous() if hasattr(arg, "contiguous") else arg for arg in args])

    return launch

"""Everything that can be refused before an engine starts: one list for `run`, `compile` and what `regress` renders."""

from __future__ import annotations

from pathlib import Path

from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Settings
from batch_gen.environment import cuda_devices
from batch_gen.errors import EnvironmentFault
from batch_gen.estimate.choose import Work
from batch_gen.estimate.published import refuse_published
from batch_gen.graphs.supply import Supply, supply_graphs
from batch_gen.placement import check_gpus
from batch_gen.prepare import Prepared, check_work_memory

DEVICES = Path("/dev")


def preflight(prepared: Prepared, devices: Path = DEVICES) -> Supply | None:
    """Refuse what cannot run here, then fetch the graphs that the settings name; None where nothing is compiled.

    Args:
        prepared: A checked manifest with its settings.
        devices: Where the drivers show theirs.

    Raises:
        BatchGenError: exit code 2; nothing was started.
    """
    check_start(prepared.settings, prepared.checkpoint, prepared.manifest.survey.work, devices)
    return supply_graphs(prepared)


def check_start(settings: Settings, checkpoint: Checkpoint, work: Work, devices: Path = DEVICES) -> None:
    """The checks alone, for whoever makes the graphs himself.

    Raises:
        BatchGenError: exit code 2: no weights, no such device, or no room.
    """
    refuse_published(checkpoint)
    check_device(settings.device)
    check_gpus(settings, settings.replicas, cuda_devices())
    check_work_memory(settings, checkpoint, work)
    check_neuron(settings.device, devices)


def check_device(name: str) -> None:
    """Raise EnvironmentFault for a device that this machine lacks: no restart of an engine would find it."""
    if name == "cuda" and not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        raise EnvironmentFault("--device cuda: this machine has no CUDA device; use --device cpu or check the driver")


def check_neuron(name: str, devices: Path = DEVICES) -> None:
    """Raise EnvironmentFault for neuron where the driver shows no device; after the estimate, which needs none."""
    if name == "neuron" and not any(devices.glob("neuron[0-9]*")):
        raise EnvironmentFault("--device neuron: the driver shows no Neuron device here; see batch-gen doctor")

"""Where the ranks of a replica run, and what they are told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from batch_gen.adapters import find_adapters
from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Settings, num_cpus
from batch_gen.environment import cache_folder, cuda_devices
from batch_gen.errors import EnvironmentFault
from batch_gen.fake_engine import FakeOptions
from batch_gen.launch import COMPILE_S, DEFAULT_STALL_S, EngineSpec
from batch_gen.prepare import store_options
from models.parallel.layout import Degrees, plan_replicas

_RANK_SETTINGS: Final = (
    *("device", "dtype", "vae_dtype", "solver", "decode", "attention", "kernels", "compile", "compile_backend"),
    *("long_prompt", "layout"),
    *("quantization", "modules_to_not_convert", "experts", "tp_sequence_parallel"),
)


def step_cache_of(settings: Settings) -> dict[str, float] | None:
    """The step cache's settings for the ranks, None when it is off."""
    if settings.step_cache is None:
        return None
    run, warm_up = settings.step_cache_max_run, settings.step_cache_warm_up
    return {"threshold": settings.step_cache, "warm_up": warm_up, "max_run": run}


def device_cores(settings: Settings, index: int) -> tuple[int, ...]:
    """Cores of replica `index` by rank on a Neuron machine, empty elsewhere."""
    if settings.device != "neuron":
        return ()
    degrees = Degrees(settings.mesh.tp, settings.mesh.cp, settings.mesh.cfg)
    return plan_replicas(settings.layout, degrees, settings.replicas)[index].cores


def device_gpus(settings: Settings, index: int, visible: Sequence[str] | None) -> tuple[str, ...]:
    """CUDA devices of replica `index` by rank, one for each; empty on other devices.

    Args:
        settings: device, mesh and replicas.
        index: the replica.
        visible: what `cuda_devices` says; None: unknown, and devices are taken to be numbered from 0.
    """
    if settings.device != "cuda":
        return ()
    ranks = settings.mesh.num_ranks
    wanted = range(index * ranks, (index + 1) * ranks)
    return tuple(str(number) if visible is None else visible[number] for number in wanted)


def check_gpus(settings: Settings, replicas: int, visible: Sequence[str] | None) -> None:
    """Raise EnvironmentFault where so many replicas have more ranks than there are CUDA devices: none is shared."""
    wanted = settings.mesh.num_ranks * replicas
    if settings.device != "cuda" or visible is None or len(visible) >= wanted:
        return
    raise EnvironmentFault(
        f"--device cuda: {replicas} replicas of mesh {settings.mesh} need {wanted} devices, one for each rank,"
        f" and this machine shows {len(visible)} ({', '.join(visible) or 'none'}); use a smaller --mesh or fewer"
        " --replicas, or widen CUDA_VISIBLE_DEVICES"
    )


def replica_cpus(settings: Settings, index: int) -> tuple[int, ...]:
    """Host cores of replica `index`: disjoint shares where there are several replicas, empty for no restriction."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(available) // settings.replicas
    if settings.replicas == 1 or settings.device != "cpu" or share == 0:
        return ()
    return tuple(available[index * share : (index + 1) * share])


def rank_threads(settings: Settings) -> int:
    """CPU threads of one rank: as told, else the cores, shared fairly."""
    if settings.threads is not None:
        return settings.threads
    return max(1, num_cpus() // (settings.replicas * settings.mesh.num_ranks))


def compile_name(settings: Settings) -> str:
    """What is compiled and by what, as one word for numerics keys."""
    if settings.compile == "off" or settings.compile_backend == "auto":
        return settings.compile
    return f"{settings.compile} by {settings.compile_backend}"


def local_graphs() -> Path:
    """Where graphs are kept that this machine compiles for itself."""
    return cache_folder() / "graphs" / "local"


def spec_of(
    settings: Settings, checkpoint: Checkpoint, folder: Path, index: int, graphs: Path | None = None
) -> EngineSpec:
    """What the ranks of replica `index` are; they log and meet in `folder`, and find compiled graphs in `graphs`."""
    stall_s = settings.stall_timeout or DEFAULT_STALL_S
    visible = cuda_devices()
    check_gpus(settings, index + 1, visible)
    first_s = COMPILE_S if settings.device == "neuron" or settings.compile != "off" else 0.0
    if checkpoint.folder is None:
        _, _, path = checkpoint.name.partition(":")
        fake = asdict(FakeOptions.from_file(Path(path)) if path else FakeOptions())
        return EngineSpec("fake", fake, str(folder), stall_s=stall_s, first_s=first_s)
    options = {name: getattr(settings, name) for name in _RANK_SETTINGS}
    options["step_cache"] = step_cache_of(settings)
    options["adapters"] = [found.to_json() for found in find_adapters(settings.lora, store_options(settings))]
    options |= {"model": str(checkpoint.folder), "mesh": settings.mesh.model_dump()}
    cache = "" if settings.compile == "off" else str(graphs or local_graphs())
    return EngineSpec(
        "pipeline",
        options,
        str(folder),
        settings.mesh.num_ranks,
        threads=rank_threads(settings),
        cores=device_cores(settings, index),
        cpus=replica_cpus(settings, index),
        stall_s=stall_s,
        cache=cache,
        gpus=device_gpus(settings, index, visible),
        first_s=first_s,
    )


def for_rehearsal(spec: EngineSpec) -> EngineSpec:
    """The same ranks, with a compiler's patience for each answer: a rehearsal is there to compile."""
    return replace(spec, stall_s=max(spec.stall_s, COMPILE_S), min_stall_s=COMPILE_S, first_s=COMPILE_S)

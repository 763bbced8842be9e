"""Where the ranks of a replica run, and what they are told beside plain settings."""

from __future__ import annotations

import os

from batch_gen.config import Settings
from models.parallel.layout import Degrees, plan_replicas


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


def replica_cpus(settings: Settings, index: int) -> tuple[int, ...]:
    """Host cores of replica `index`: disjoint shares where there are several replicas, empty for no restriction."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(available) // settings.replicas
    if settings.replicas == 1 or settings.device != "cpu" or share == 0:
        return ()
    return tuple(available[index * share : (index + 1) * share])

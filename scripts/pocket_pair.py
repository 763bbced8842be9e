"""Two single-threaded processes that train one network together.

One process with two threads waits for the slower thread at every operator; two processes
that average their weights every few steps hardly wait at all, which is much faster on a
machine that does other work too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

PROCESSES = 2
MEET_EVERY = 8  # steps that a process takes on its own before the weights are averaged
Stage = Callable[[Path, Callable[[str], None]], None]


def rank() -> int:
    """Which of the processes this is; 0 when there is only one."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Does this process write files and logs?"""
    return rank() == 0


def wait() -> None:
    """Wait for the other processes."""
    if size() > 1:
        dist.barrier()


def run(stage: Stage, work: Path, name: str) -> None:
    """Run a stage in all processes and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_member, (stage, work, name, f"file://{folder}/meet"), nprocs=PROCESSES)


def _member(number: int, stage: Stage, work: Path, name: str, meeting: str) -> None:
    """One process: join the group, run the stage."""
    os.setsid()  # a session of its own: Linux shares cores between sessions first
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=PROCESSES)
    stage(work, lambda line: print(f"{name}: {line}", flush=True) if number == 0 else None)
    dist.barrier()
    dist.destroy_process_group()


def average_weights(module: nn.Module, step: int) -> None:
    """Every few steps, replace the weights by their mean over the processes."""
    if size() == 1 or step % MEET_EVERY:
        return
    with torch.no_grad():
        weights = [p for p in module.parameters() if p.requires_grad]
        flat = torch.cat([w.flatten() for w in weights])
        dist.all_reduce(flat)
        flat /= size()
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.copy_(part.view_as(weight))

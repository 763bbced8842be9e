"""Machines as the estimate sees them: cores, arithmetic, memory, links, price. Every figure names its source.

A Neuron rank has a core and its memory to itself, a CUDA rank a device. On a CPU all ranks of all replicas share both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from batch_gen.config import Settings, num_cpus
from batch_gen.environment import cuda_devices
from batch_gen.memory import limit_bytes

Kind = Literal["neuron", "cuda", "cpu"]
_CPU_CORE_FLOPS: Final = 30e9
_USABLE_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine.

    Args:
        name: for people.
        kind: which adders of memory apply.
        num_cores: cores, on CUDA devices; each takes one rank but on a CPU, whose ranks share them.
        bfloat16_flops: dense peak of one core per second.
        float32_flops: the same in float32.
        memory_bytes: what one rank may hold, on a CPU all ranks together.
        link_bytes_per_s: what a rank sends to its neighbours.
        hop_s: latency of one hop of a collective.
        price_per_hour: USD, None where nobody can know.
        notes: sources, and what is assumed.
        rank_threads: cores that one rank uses at most; None: its fair share.
    """

    name: str
    kind: Kind
    num_cores: int
    bfloat16_flops: float
    float32_flops: float
    memory_bytes: float
    link_bytes_per_s: float
    hop_s: float
    price_per_hour: float | None
    price_note: str
    notes: tuple[str, ...]
    rank_threads: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether ranks share cores and memory."""
        return self.kind == "cpu"

    def flops(self, dtype: str) -> float:
        """Dense peak of one core in this dtype."""
        return self.bfloat16_flops if dtype == "bfloat16" else self.float32_flops

    def cores_of_rank(self, num_ranks: int) -> float:
        """What one of so many ranks has: threads (batch_gen/placement.py), less where ranks outnumber cores."""
        if not self.is_shared:
            return 1.0
        threads = self.rank_threads or max(1, self.num_cores // num_ranks)
        return min(threads, self.num_cores / num_ranks)

    def rank_flops(self, dtype: str, num_ranks: int) -> float:
        """Dense peak of one of so many ranks on the machine."""
        return self.flops(dtype) * self.cores_of_rank(num_ranks)

    def rank_bytes(self, num_ranks: int) -> float:
        """What one of so many ranks may hold."""
        return self.memory_bytes / num_ranks if self.is_shared else self.memory_bytes


TRN2: Final = Machine(
    name="trn2.48xlarge",
    kind="neuron",
    num_cores=64,
    bfloat16_flops=667e12 / 4,
    float32_flops=181e12 / 4,
    memory_bytes=24.0e9,
    link_bytes_per_s=1024e9 / 4,
    hop_s=2e-6,
    price_per_hour=35.7608,
    price_note="capacity block, two third-party lists of 2026 quoting AWS; unverified",
    notes=(
        "64 logical cores (LNC 2) of 16 chips: 667 TFLOP/s bfloat16, 181 float32 a chip (Neuron SDK, trainium2)",
        "24.0e9 usable bytes a core: 24.4e9 failed on a device (720p, tp=4,cp=8,cfg=2, gathered keys and values)",
        "NeuronLink 1024 GB/s a chip, shared by its four ranks; 1 to 2 us a hop (Neuron SDK, collectives)",
    ),
)

TRN3: Final = Machine(
    name="trn3 (16 chips)",
    kind="neuron",
    num_cores=64,
    bfloat16_flops=671e12 / 4,
    float32_flops=183e12 / 4,
    memory_bytes=36.0e9,
    link_bytes_per_s=2560e9 / 4,
    hop_s=2e-6,
    price_per_hour=None,
    price_note="",
    notes=(
        "64 logical cores of 16 chips: 671 TFLOP/s bfloat16, 144 GiB, 2.56 TB/s a chip (AWS, Trn3)",
        "assumed: the efficiency and the adders of trn2; nothing is measured",
    ),
)

CUDA: Final = Machine(
    name="one H200",
    kind="cuda",
    num_cores=1,
    bfloat16_flops=989e12,
    float32_flops=67e12,
    memory_bytes=141e9 * _USABLE_SHARE,
    link_bytes_per_s=450e9,
    hop_s=5e-6,
    price_per_hour=None,
    price_note="",
    notes=("assumed: an H200 (989 TFLOP/s bfloat16 dense, 141e9 bytes, nine tenths of them usable)",),
)


def cuda_machine(num_devices: int) -> Machine:
    """So many H200; each rank has one of its own."""
    return CUDA if num_devices == 1 else replace(CUDA, name=f"{num_devices} H200", num_cores=num_devices)


def cpu_machine(num_cores: int, memory_bytes: float, rank_threads: int | None = None) -> Machine:
    """A CPU machine; its ranks share cores and memory."""
    return Machine(
        name=f"{num_cores} CPU core{'' if num_cores == 1 else 's'}",
        kind="cpu",
        num_cores=num_cores,
        bfloat16_flops=_CPU_CORE_FLOPS,
        float32_flops=_CPU_CORE_FLOPS,
        memory_bytes=memory_bytes,
        link_bytes_per_s=5e9,
        hop_s=50e-6,
        price_per_hour=None,
        price_note="",
        notes=("assumed: 30 GFLOP/s a core; a run's own metrics are the better figure",),
        rank_threads=rank_threads,
    )


def machine_of(settings: Settings) -> Machine:
    """The machine that a profile means; a CPU machine is this one, or this container.

    CUDA devices are as many as this process may use, or as the settings ask for where that is more: a plan may be made
    elsewhere, and a start that lacks devices is refused by batch_gen/placement.py.
    """
    if settings.device == "neuron":
        return TRN3 if settings.profile.startswith("trn3") else TRN2
    if settings.device == "cuda":
        return cuda_machine(max(settings.mesh.num_ranks * settings.replicas, len(cuda_devices() or ())))
    return cpu_machine(num_cpus(), limit_bytes() * _USABLE_SHARE, settings.threads)

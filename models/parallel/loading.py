"""What loading cost, rank by rank."""

import time

import torch

from models.checkpoint import READ
from models.parallel.collectives import gather_blocks
from models.parallel.mesh import Mesh


class LoadMeter:
    """Seconds and checkpoint bytes since it was made."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._start_bytes = READ.num_bytes

    def report(self, mesh: Mesh) -> dict[str, list[float]]:
        """`seconds` and `bytes` of each rank, in rank order; every rank of the mesh calls it."""
        own = torch.tensor(
            [time.perf_counter() - self._start_s, READ.num_bytes - self._start_bytes], dtype=torch.float64
        )
        blocks = gather_blocks(own, mesh.world)
        seconds, num_bytes = zip(
            *(block.tolist() for _, block in sorted(zip(mesh.world.ranks, blocks, strict=True))), strict=True
        )
        return {"seconds": [round(value, 3) for value in seconds], "bytes": [int(value) for value in num_bytes]}

"""How commands reach every rank of a replica."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.parallel.collectives import broadcast, broadcast_json
from models.parallel.mesh import Mesh

Array = npt.NDArray[Any]


class MeshControl:
    """Rank 0 gives each command, the others receive it, and all walk through the same calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def share(self, command: dict[str, Any] | None, arrays: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        """The command (a JSON object) and the arrays of rank 0, on every rank; what the others pass is ignored."""
        formats = [(array.dtype.str, list(array.shape)) for array in arrays]
        head = broadcast_json({"command": command, "arrays": formats}, self._mesh)
        shared = [self._share(index, arrays, *form) for index, form in enumerate(head["arrays"])]
        return head["command"], shared

    def _share(self, index: int, arrays: list[Array], dtype: str, shape: list[int]) -> Array:
        is_first = self._mesh.is_first
        array = np.ascontiguousarray(arrays[index]) if is_first else np.empty(shape, np.dtype(dtype))
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        source = self._mesh.world.ranks.index(0)
        received: Array = broadcast(flat, self._mesh.world, source).numpy().view(np.dtype(dtype)).reshape(shape)
        return received

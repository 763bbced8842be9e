"""The mesh as a rank sees it: one `Axis` per direction, all of them groups of ONE DeviceMesh.

A compiled collective on Neuron needs the partition of the whole world and not only its own group; groups of a
DeviceMesh register theirs, groups of `new_group` do not. The DeviceMesh is made from the layout's explicit rank table.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is public, not re-exported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from models.parallel.layout import AXES, Degrees, Layout, make_layout

# Ranks wait in a collective for their next command while rank 0 waits for the supervisor, which may be hours. A dead
# peer is noticed at once (its connections close), a hanging one by the supervisor's watchdog.
COLLECTIVE_TIMEOUT_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the mesh (or several, flattened), seen from this rank.

    `ranks` are the members in coordinate order, `index` is this rank's place among them. torch sorts the members of a
    group; `order[coordinate]` is the place in that sorted group, which is where a gathered block arrives. reordered:
    whether that order is another one in any group of the axis; then it must be data where ranks share a graph.
    """

    name: str
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group_name: str = ""
    reordered: bool = False
    process_group: ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Members of the axis."""
        return len(self.ranks)

    @property
    def is_trivial(self) -> bool:
        """Whether a collective over this axis is the identity."""
        return len(self.ranks) == 1

    @property
    def order(self) -> tuple[int, ...]:
        """Coordinate -> place in torch's sorted process group."""
        sorted_ranks = sorted(self.ranks)
        return tuple(sorted_ranks.index(rank) for rank in self.ranks)

    @property
    def is_sorted(self) -> bool:
        """Whether coordinate order and torch's order agree."""
        return self.order == tuple(range(self.size))


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in one replica. Every rank that collectively calls the same methods gets the same groups."""

    layout: Layout
    rank: int
    _axes: dict[tuple[str, ...], Axis] = field(default_factory=dict, compare=False)

    @property
    def degrees(self) -> Degrees:
        """Ranks along each axis."""
        return self.layout.degrees

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which leads and alone yields frames."""
        return self.rank == 0

    @property
    def tp(self) -> Axis:
        """Heads and channels."""
        return self.axis("tp")

    @property
    def cp(self) -> Axis:
        """Tokens."""
        return self.axis("cp")

    @property
    def cfg(self) -> Axis:
        """The two guidance branches."""
        return self.axis("cfg")

    @property
    def world(self) -> Axis:
        """All ranks of the replica."""
        return self.axis(*AXES)

    def axis(self, *names: str) -> Axis:
        """One direction, or several flattened in the order cfg, cp, tp; made when the mesh was, so never collective."""
        return self._axes[tuple(name for name in AXES if name in names)]

    def ring_pairs(self, name: str) -> tuple[int, ...]:
        """(source, target) ranks of every ring along one axis of the whole mesh, flattened; the same on all ranks."""
        rings = [self.layout.ring(group) for group in self.layout.groups(name)]
        hops = [(ring[place - 1], rank) for ring in rings if len(ring) > 1 for place, rank in enumerate(ring)]
        return tuple(rank for hop in hops for rank in hop)


def single() -> Mesh:
    """The mesh of one rank: every axis is trivial and no process group exists."""
    layout = make_layout("arithmetic", Degrees())
    return Mesh(layout, 0, {names: Axis("_".join(names)) for names in _combinations()})


def build_mesh(layout: Layout, device_type: str = "cpu") -> Mesh:
    """Make all groups of this layout; every rank of the default process group calls it together.

    Raises `LayoutError` when the process group is not as large as the mesh.
    """
    if layout.degrees.size == 1:
        return single()
    layout.degrees.check_world(dist.get_world_size())
    rank = dist.get_rank()
    devices = DeviceMesh(device_type, torch.tensor(layout.table), mesh_dim_names=AXES)
    axes = {names: _make_axis(layout, rank, devices, names) for names in _combinations()}
    return Mesh(layout, rank, axes)


def open_mesh(
    degrees: Mapping[str, int],
    *,
    layout: str = "arithmetic",
    rank: int,
    rendezvous: Path,
    device: str = "cpu",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Mesh:
    """Join the process group of one replica as `rank` and make its mesh; all ranks of the replica call it together.

    `rendezvous` is a file that does not exist yet: no port is reserved, so none can be taken. Tensors of the CPU always
    travel over gloo, so requests and checksums need no device. Raises `LayoutError`.
    """
    placed = make_layout(layout, Degrees(**degrees))
    if placed.degrees.size == 1:
        return single()
    dist.init_process_group(
        group_backend(device),
        store=FileStore(str(rendezvous), placed.degrees.size),
        rank=rank,
        world_size=placed.degrees.size,
        timeout=dt.timedelta(seconds=timeout_s),
    )
    return build_mesh(placed, device)


def close_mesh() -> None:
    """Leave the process group. Nothing waits here: a rank whose peer is gone must be able to leave."""
    if dist.is_initialized():
        dist.destroy_process_group()


def group_backend(device: str) -> str:
    """Torch's name for the process group of a device; each device but these has a backend of its own name."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{_BACKENDS.get(device, device)}"


_BACKENDS = {"cuda": "nccl"}


def _combinations() -> list[tuple[str, ...]]:
    return [tuple(axis for bit, axis in enumerate(AXES) if mask >> bit & 1) for mask in range(1, 1 << len(AXES))]


def _make_axis(layout: Layout, rank: int, devices: DeviceMesh, names: tuple[str, ...]) -> Axis:
    ranks = layout.group(rank, *names)
    if len(ranks) == 1:
        return Axis("_".join(names), ranks=ranks)
    group = _group(devices, names)
    return Axis(
        name="_".join(names),
        index=ranks.index(rank),
        ranks=ranks,
        group_name=group.group_name,
        reordered=any(tuple(sorted(members)) != members for members in layout.groups(*names)),
        process_group=group,
    )


def _group(devices: DeviceMesh, names: tuple[str, ...]) -> ProcessGroup:
    part = devices[names] if len(names) > 1 else devices[names[0]]
    if part.ndim > 1:
        part = part._flatten("_".join(names))  # noqa: SLF001 - the documented way to one group over several axes
    return part.get_group()

"""Collectives over an axis of the mesh; over an axis of size 1 each is the identity.

Tensor collectives are the functional ones (`_c10d_functional`), so a graph that holds them still compiles in one piece.
Blocks come back in coordinate order whatever order torch keeps inside the group. Where groups of one axis differ in
that order, graphs take it as a tensor (`order_of`), so that all ranks trace the same one.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.device_faults import classify
from models.errors import ModelError
from models.parallel.mesh import Axis, Mesh

_ops = torch.ops._c10d_functional  # noqa: SLF001 - what torch.distributed's functional collectives call


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The reduction of `x` [...] (any shape) over the axis, the same bits on all ranks; `op` is sum, max or min."""
    if axis.is_trivial:
        return x
    out: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, axis.group_name))
    return out


def order_of(axis: Axis, device: torch.device | None = None) -> Tensor | None:
    """Where each coordinate's block arrives, [size] int32, for axes on which groups differ in it; None on the others.

    A module that gathers inside a graph keeps it as a buffer.
    """
    return torch.tensor(axis.order, dtype=torch.int32, device=device) if axis.reordered else None


def all_gather(x: Tensor, axis: Axis, dim: int, order: Tensor | None = None) -> Tensor:
    """[..., n, ...] of equal shape on each rank -> [..., size * n, ...] along `dim`, in coordinate order."""
    if axis.is_trivial:
        return x
    return torch.cat(gather_blocks(x, axis, order), dim=dim)


def gather_blocks(x: Tensor, axis: Axis, order: Tensor | None = None) -> list[Tensor]:
    """Each rank's `x` [...] (equal shapes), by coordinate; order: what `order_of` gives, where a graph holds this."""
    if axis.is_trivial:
        return [x]
    flat = x.contiguous().view(1, *x.shape)
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(flat, axis.size, axis.group_name))
    if order is not None:
        return list(gathered.index_select(0, order).unbind(0))
    blocks = gathered.unbind(0)
    return [blocks[place] for place in axis.order]


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The sum of `x` [..., size * n, ...] over the axis, of which this rank keeps its n along `dim`."""
    if axis.is_trivial:
        return x
    chunks = x.chunk(axis.size, dim=dim)
    at_place = {place: chunks[coordinate] for coordinate, place in enumerate(axis.order)}
    stacked = torch.stack([at_place[place] for place in range(axis.size)])
    out: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", axis.size, axis.group_name))
    return out.squeeze(0)


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """The `x` [...] of coordinate `source`; the others pass a tensor of the same shape and dtype."""
    if axis.is_trivial:
        return x
    out: Tensor = _ops.wait_tensor(_ops.broadcast(x.contiguous(), axis.order[source], axis.group_name))
    return out


def gather_to_first(x: Tensor, axis: Axis) -> list[Tensor] | None:
    """Each rank's `x` [...] (equal shapes) by coordinate on the rank of coordinate 0, None elsewhere.

    Not functional: it runs between graphs, where only the receiver should pay for the memory.
    """
    if axis.is_trivial:
        return [x]
    blocks = [torch.empty_like(x) for _ in axis.ranks] if axis.index == 0 else None
    dist.gather(x.contiguous(), blocks, dst=axis.ranks[0], group=axis.process_group)
    return None if blocks is None else [blocks[place] for place in axis.order]


def broadcast_json(value: Any, mesh: Mesh) -> Any:
    """Rank 0's `value` on every rank, as UTF-8 JSON in a tensor (what the others pass is ignored).

    JSON and not pickle: what crosses is text that a log can show, and nothing that is received is run.
    """
    if mesh.world.is_trivial:
        return value
    body = json.dumps(value, ensure_ascii=False).encode() if mesh.is_first else b""
    axis, source = mesh.world, mesh.world.ranks.index(0)
    size = int(broadcast(torch.tensor([len(body)], dtype=torch.int64), axis, source).item())
    buffer = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.zeros(size, dtype=torch.uint8)
    return json.loads(broadcast(buffer, axis, source).numpy().tobytes().decode())


def made_by_first(make: Callable[[], Tensor], like: Tensor, mesh: Mesh) -> Tensor:
    """What `make()` gives on rank 0, on every rank: a tensor of the shape and dtype of `like` [...].

    A failure of rank 0 is told before any rank waits for the tensor, so that all raise the same ModelError: rank 0's
    own, or for other exceptions the kind of the device's fault, "oom" or "device". Alone, `make()` and no more.
    """
    if mesh.world.is_trivial:
        return make()
    made, fault, cause = like, None, None
    if mesh.is_first:
        try:
            made = make()
        except Exception as error:  # the other ranks wait, whatever it is
            fault, cause = _told(error), error
        if made.shape != like.shape or made.dtype != like.dtype:
            found = f"{tuple(made.shape)} {made.dtype}, not {tuple(like.shape)} {like.dtype}"
            fault = ("unsupported", f"rank 0 made a tensor {found}")
    fault = broadcast_json(fault, mesh)
    if fault is not None:
        raise ModelError(*fault) from cause
    return broadcast(made, mesh.world, mesh.world.ranks.index(0))


def _told(error: Exception) -> tuple[str, str]:
    """Kind and message of a failure as all ranks report it."""
    if isinstance(error, ModelError):
        return error.kind, error.message
    text = f"{type(error).__name__}: {error}"
    is_memory = isinstance(error, MemoryError) or "out of memory" in text.lower()
    return classify(text) or ("oom" if is_memory else "device", f"rank 0 failed: {text}")


def barrier(mesh: Mesh) -> None:
    """Wait until every rank of the replica is here."""
    all_reduce(torch.zeros(1), mesh.world)


def checksum(x: Tensor) -> Tensor:
    """A cheap fingerprint of the bits of `x` [...] float32: [2] int64, their sum and a sum weighted by position."""
    bits = x.detach().to("cpu", torch.float32).contiguous().view(torch.int32).flatten().to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, dtype=torch.int64)
    return torch.stack([bits.sum(), (bits * weights).sum()])


def check_agreement(x: Tensor, mesh: Mesh, what: str) -> None:
    """Raise ModelError("device") on every rank unless all ranks hold the same bits of `x` [...] float32.

    Ranks of one mesh compute the same latents from the same inputs; a difference is a broken device or a bug, and the
    clip would be wrong without a sign of it.
    """
    if mesh.world.is_trivial:
        return
    sums = [tuple(block.tolist()) for block in gather_blocks(checksum(x), mesh.world)]
    camps: dict[tuple[int, ...], list[int]] = {}
    for rank, value in sorted(zip(mesh.world.ranks, sums, strict=True)):
        camps.setdefault(value, []).append(rank)
    if len(camps) > 1:
        listed = " and ".join(map(str, camps.values()))
        raise ModelError(
            "device",
            f"{what}: the ranks disagree, {listed} hold different values (mesh {mesh.degrees}); the clip is not "
            "written; if it happens again on these cores, replace the machine",
        )

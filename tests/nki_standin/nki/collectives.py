"""The part of `nki.collectives` that our kernels use: permutes between simulated ranks."""

from typing import Any

from nki._device import core, require
from nki._tensor import NkiTensor, read, write


def collective_permute(srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None, name: Any = None) -> None:
    """Both cores of a rank issue it; it moves the rank's shared tensors once."""
    here = core()
    require(priority is None, "collective_permute: priority exists on trn3 only")
    require(
        len(srcs) == 1 and len(dsts) == 1,
        "collective_permute: exactly one tensor per list; coalescing is not supported",
    )
    src, dst = srcs[0], dsts[0]
    require("hbm" in src.buffer and "hbm" in dst.buffer, "collective_permute: tensors must be in HBM")
    require(src.size == dst.size and src.dtype == dst.dtype, "collective_permute: source and destination differ")
    require(src.storage is not dst.storage, "collective_permute: source and destination are one tensor")
    if here.program == 0:
        here.work["permute_bytes"] += src.size * src.array().itemsize
    machine = here.machine
    pairs = tuple((int(s), int(t)) for s, t in source_target_pairs)
    machine.meet(here, "permute", len(machine.cores), (here.rank, src, dst, pairs), _move)


def _move(parts: list[Any]) -> None:
    pairs = parts[0][3]
    require(all(part[3] == pairs for part in parts), "collective_permute: the ranks disagree on the pairs")
    sources: dict[int, NkiTensor] = {rank: src for rank, src, _, _ in parts}
    targets: dict[int, NkiTensor] = {rank: dst for rank, _, dst, _ in parts}
    values = {rank: read(sources[rank], "collective_permute").copy() for rank, _ in pairs}
    for source, target in pairs:
        write(targets[target], values[source])


def rank_id(name: Any = None) -> int:
    return core().rank

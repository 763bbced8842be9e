"""Who decodes which strips: one rank all of them, or each rank of a group its share with rank 0 collecting them."""

import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from models.parallel.collectives import all_reduce, gather_to_first
from models.parallel.mesh import Axis


class StripGroup(Protocol):
    """Ranks that decode one clip together; all make the same calls in the same order."""

    rank: int
    size: int

    def gather(
        self, parts: Mapping[int, Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """All strips in order on rank 0, None elsewhere.

        parts: strip index -> its tensor [f, H, W, 3] on the CPU, this rank's share. shapes: of every strip.
        """

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all ranks get the same answer."""


class Serial:
    """One rank that decodes every strip, one after another."""

    rank = 0
    size = 1

    def gather(
        self, parts: Mapping[int, Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """What this rank made, in order."""
        del dtype
        return [parts[index] for index in range(len(shapes))]

    def any(self, flag: bool) -> bool:
        """The flag."""
        return flag


class AxisGroup:
    """The ranks of a mesh axis; strips travel as CPU tensors, one message per rank and slab."""

    def __init__(self, axis: Axis, shares: Sequence[Sequence[int]]) -> None:
        self.rank, self.size = axis.index, axis.size
        self._axis, self._shares = axis, shares

    def any(self, flag: bool) -> bool:
        """The largest flag."""
        return bool(all_reduce(torch.tensor([float(flag)]), self._axis, "max").item())

    def gather(
        self, parts: Mapping[int, Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Tensor] | None:
        """Every rank sends one flat tensor as long as the longest: a gather takes equal sizes only."""
        sizes = [math.prod(shape) for shape in shapes]
        length = max(sum(sizes[index] for index in share) for share in self._shares)
        mine = [parts[index].reshape(-1) for index in self._shares[self.rank]]
        flat = torch.cat([*mine, torch.empty(length - sum(part.numel() for part in mine), dtype=dtype)])
        blocks = gather_to_first(flat, self._axis)
        if blocks is None:
            return None
        found: dict[int, Tensor] = {}
        for block, share in zip(blocks, self._shares, strict=True):
            ends = list(accumulate(sizes[index] for index in share))
            for index, end in zip(share, ends, strict=True):
                found[index] = block[end - sizes[index] : end].view(*shapes[index])
        return [found[index] for index in range(len(shapes))]


def buffered(slabs: Iterator[Tensor]) -> Iterator[Tensor]:
    """Run `slabs` to its end in a thread of its own, whatever the consumer does.

    A consumer that is slow, or leaves early, must not keep the other ranks waiting inside a collective. What is not
    consumed yet is kept: at most one clip, as the next one begins after this iterator has ended.
    """
    box: queue.SimpleQueue[Tensor | BaseException | None] = queue.SimpleQueue()
    num_threads = torch.get_num_threads()

    def run() -> None:
        # OpenMP keeps this number per thread, and oneDNN's bits depend on it: a new thread would start with all cores.
        torch.set_num_threads(num_threads)
        try:
            for slab in slabs:
                box.put(slab)
            box.put(None)
        except BaseException as error:
            box.put(error)

    thread = threading.Thread(target=run, name="vae-decode", daemon=True)
    thread.start()
    try:
        while (item := box.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        thread.join()

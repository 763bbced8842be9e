"""Several clips of one bucket in one denoise call (`--clips-per-step`), held to the bits of each clip alone.

The supervisor claims and starts the clips, then renders them one after the other; with the first it names the others.
The engine denoises them in one call and keeps the others' latents until they are asked for. Before it does so for a
shape and a number of clips for the first time, it makes the same clips alone as well and compares the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from batch_gen.engine import CHECK, Step
from batch_gen.errors import BatchGenError
from models.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from batch_gen.request import RenderRequest

    Latents = npt.NDArray[np.float32]
    Alone = Callable[[RenderRequest], Iterator[Step | Latents]]
    Several = Callable[[Sequence[RenderRequest]], Iterator[Step | Latents]]


def shape_of(request: RenderRequest) -> tuple[Hashable, ...]:
    """What clips must share to be denoised together, as far as a request tells."""
    return (*batch_of(request), request.negative_prompt)


def batch_of(request: RenderRequest) -> tuple[Hashable, ...]:
    """What decides the batches of a clip's steps, apart from the lengths of its texts."""
    return (request.bucket, request.steps, request.guidance_high, request.guidance_low, request.flow_shift)


class Ahead:
    """Latents that were made together with another clip's.

    Args:
        alone: Denoises one clip: steps, then its latents.
        several: Denoises clips together: steps, then each clip's latents in order.
        alike: What clips must share beyond `shape_of`; None for a clip that cannot go with others.
    """

    def __init__(self, alone: Alone, several: Several, alike: Callable[[RenderRequest], Hashable | None]) -> None:
        self._alone, self._several, self._alike = alone, several, alike
        self._kept: dict[str, Latents] = {}
        self._proved: set[Hashable] = set()

    def made(self, request: RenderRequest, others: Sequence[RenderRequest]) -> Iterator[Step | Latents] | None:
        """The clip's latents where they were made with another's, or as they are made with those of some others.

        None: the clip goes alone.
        """
        kept = self._kept.pop(request.digest, None)
        if kept is not None:
            return iter([kept])
        group = self._group(request, others)
        return self._denoise(group) if len(group) > 1 else None

    def _group(self, request: RenderRequest, others: Sequence[RenderRequest]) -> list[RenderRequest]:
        mine = self._alike(request) if others else None
        if mine is None:
            return [request]
        fits = [other for other in others if shape_of(other) == shape_of(request) and self._alike(other) == mine]
        return [request, *fits]

    def _denoise(self, group: Sequence[RenderRequest]) -> Iterator[Step | Latents]:
        """Steps, then the first clip's latents; those of the others are kept, those of earlier calls dropped.

        Raises:
            BatchGenError: ("unsupported") The bits are not those of the clips alone.
        """
        self._kept.clear()
        found: list[Latents] = []
        try:
            for event in self._several(group):
                if isinstance(event, np.ndarray):
                    found.append(event)
                else:
                    yield event
        except ModelError as error:
            if error.kind != "nonfinite":
                raise
            yield from self._alone(group[0])  # one of them is bad: each finds out for itself
            return
        yield from self._prove(group, found)
        self._kept = {each.digest: latents for each, latents in zip(group[1:], found[1:], strict=True)}
        yield found[0]

    def _prove(self, group: Sequence[RenderRequest], found: Sequence[Latents]) -> Iterator[Step]:
        """The self-check, once for each kind of batch: its steps, counted over the group, are its signs of life."""
        key = (batch_of(group[0]), self._alike(group[0]), len(group))
        if key in self._proved:
            return
        num_steps = 0
        for request, latents in zip(group, found, strict=True):
            for event in self._alone(request):
                if isinstance(event, np.ndarray):
                    _compare(group, request, event, latents)
                else:
                    num_steps += 1
                    yield Step(num_steps, event.total * len(group), CHECK)
        self._proved.add(key)


def _compare(group: Sequence[RenderRequest], request: RenderRequest, alone: Latents, together: Latents) -> None:
    if np.array_equal(alone.view(np.uint32), together.view(np.uint32)):
        return
    worst = float(np.abs(alone - together).max())
    raise BatchGenError(
        f"--clips-per-step: {len(group)} clips of {request.bucket} together have other bits than clip "
        f"{request.clip_id} alone (latents differ by up to {worst:.1e}) on this machine; "
        "use --clips-per-step 1",
        kind="unsupported",
    )

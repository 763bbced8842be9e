"""The engine contract: what renders a clip, seen from the supervisor.

```
text(requests)                  -> Done(tuple of text ids)
denoise(request, text, ...)     -> Step, Tap ..., Done(latents float32 [C, T, h, w])
decode(request, latents)        -> Slab ..., Done(None)
render(request)                 =  the three
```

Every call is a generator of events, so that progress is visible and frames leave while later ones are decoded.
`FakeEngine` (batch_gen/fake_engine.py), `PipelineEngine` (batch_gen/ranks.py) and `RemoteEngine` (batch_gen/launch.py)
pass one shared contract test (tests/batch_gen/test_engine_contract.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from batch_gen.request import RenderRequest

Array: TypeAlias = npt.NDArray[Any]


CHECK: Final = "self-check"
"""The stage of steps that prove a clip and are not its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """Step `index` of `total` of a stage is done; `index` counts from 1."""

    index: int
    total: int
    stage: str = "denoise"


@dataclass(frozen=True, slots=True)
class Tap:
    """A named value inside the pipeline: `text`, `velocity.<k>`, `latents.<k>`."""

    name: str
    array: Array


@dataclass(frozen=True, slots=True)
class Slab:
    """A few finished frames: read-only uint8 `[F, H, W, 3]`, RGB."""

    frames: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Done:
    """The call is over; `value` is its result, `info` what the engine measured or noticed on the way."""

    value: Any
    info: dict[str, Any]


Event: TypeAlias = Step | Tap | Slab | Done
Events: TypeAlias = Generator[Event, None, None]


@dataclass(frozen=True, slots=True)
class DenoiseOptions:
    """Where denoising starts and stops, and what it shows on the way.

    Args:
        start: `(step, latents float32 [C, T, h, w])` to resume before step `step` (from 0), or None for fresh noise.
        stop: number of steps to have done when the call returns, or None for all.
        taps: names of the values to yield as `Tap`.
        images: the request's first and last image as it has them, at the clip's size: uint8 RGB [H, W, 3].
        together: requests that are denoised next; the engine may denoise them in this call, with the same bits.
    """

    start: tuple[int, npt.NDArray[np.float32]] | None = None
    stop: int | None = None
    taps: tuple[str, ...] = ()
    images: tuple[npt.NDArray[np.uint8], ...] = ()
    together: tuple[RenderRequest, ...] = ()


ALL_STEPS = DenoiseOptions()


class Engine(Protocol):
    """One pipeline on one rank group. Not thread-safe: one call at a time.

    Raises:
        ClipFailed: this clip cannot be rendered; the engine stays usable.
        EngineLost: the engine is gone (death, hang, device error); it must be started again.
    """

    def text(self, requests: Sequence[RenderRequest]) -> Events:
        """Encode the prompts of `requests`; `Done.value` is one opaque id per request."""

    def denoise(self, request: RenderRequest, text: str, options: DenoiseOptions = ALL_STEPS) -> Events:
        """Denoise one clip; `Done.value` is float32 latents `[C, T, h, w]`."""

    def decode(self, request: RenderRequest, latents: npt.NDArray[np.float32]) -> Events:
        """Decode float32 latents `[C, T, h, w]` to uint8 slabs; `Done.value` is None."""

    def describe(self) -> dict[str, Any]:
        """What this engine is: model digest, dtype, solver, decode plan, kernels, versions, limits."""

    def close(self) -> None:
        """Free everything; idempotent and bounded in time."""


T = TypeVar("T")


def render(engine: Engine, request: RenderRequest, options: DenoiseOptions = ALL_STEPS) -> Iterator[Event]:
    """Text, denoise and decode one clip; the last event is `Done(None)` of the decode."""
    text_ids = finish(engine.text([request])).value
    latents: npt.NDArray[np.float32] | None = None
    for event in engine.denoise(request, text_ids[0], options):
        if isinstance(event, Done):
            latents = event.value
        else:
            yield event
    assert latents is not None
    yield from engine.decode(request, latents)


def finish(events: Iterator[Event]) -> Done:
    """Run a call to its end and return its `Done`."""
    for event in events:
        if isinstance(event, Done):
            return event
    raise AssertionError("an engine call ended without Done")


def frames_of(events: Iterator[Event]) -> npt.NDArray[np.uint8]:
    """All frames of a call as one uint8 array `[F, H, W, 3]`; for tests and single clips."""
    return np.concatenate([event.frames for event in events if isinstance(event, Slab)])

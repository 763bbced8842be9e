"""One case through an engine: frames, latents, inner values and seconds by stage, or why there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen import clock
from batch_gen.engine import DenoiseOptions, Done, Engine, Event, Step
from batch_gen.errors import ClipFailed, EngineLost
from batch_gen.image_checks import keep_images
from batch_gen.images import ImageReader, images_of
from batch_gen.launch import RemoteEngine
from batch_gen.placement import spec_of
from batch_gen.prepare import store_options
from batch_gen.regress.collect import collect, decoded
from batch_gen.regress.images import Frames
from batch_gen.regress.suite import Setup
from batch_gen.request import RenderRequest
from batch_gen.scratch import open_scratch

log = logging.getLogger(__name__)
ATTEMPTS = 2
"""Starts of a case whose engine died: an accident of the machine gets a second chance, a third says nothing new."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What an engine made of a request.

    Args:
        frames: uint8 [F, H, W, 3].
        latents: Final, float32 [C, T, h, w].
        taps: Inner values by name.
        timings: Seconds by stage: `text`, `denoise.high`, `denoise.low` (or `denoise`), `decode`.
        peak_rss_bytes: Of rank 0 so far; 0 when unknown.
    """

    request: RenderRequest
    frames: Frames
    latents: npt.NDArray[np.float32]
    taps: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The final latents and the taps, by name."""
        return {"latents": self.latents, **self.taps}


@dataclass(slots=True)
class Bench:
    """The engine of a night; one that died is started anew for the next case.

    Args:
        start: Starts an engine.
        now: Monotonic seconds.
        images: The first and last image of a request, at its size.
    """

    start: Callable[[], Engine]
    now: Callable[[], float] = clock.monotonic_s
    images: Callable[[RenderRequest], Sequence[npt.NDArray[np.uint8]]] = lambda _: ()
    _engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, started when there is none."""
        if self._engine is None:
            self._engine = self.start()
        return self._engine

    def render(self, request: RenderRequest, taps: Sequence[str] = ()) -> tuple[Rendered, int]:
        """Render a case; returns it with the number of starts that it took.

        Raises:
            ClipFailed: the pipeline itself refuses or breaks the clip.
            EngineLost: the engine died or hung, twice.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                images = tuple(self.images(request))
                return render_case(
                    self.engine, request, DenoiseOptions(taps=tuple(taps), images=images), self.now
                ), attempt
            except EngineLost as error:
                log.warning("engine lost", extra={"fields": {"case": request.clip_id, "kind": error.kind}})
                self.close()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("a case has at least one attempt")

    def close(self) -> None:
        """End the engine; idempotent."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None


@contextmanager
def open_bench(setup: Setup) -> Iterator[Bench]:
    """A bench with engines as `run` would start them."""
    reader = image_reader(setup)
    with open_scratch(setup.settings.scratch) as folder:
        bench = Bench(
            start=lambda: RemoteEngine(spec_of(setup.settings, setup.checkpoint, folder / "ranks", 0, setup.graphs)),
            images=lambda request: images_of(request, reader, setup.settings.resize)[0],
        )
        try:
            yield bench
        finally:
            bench.close()


def image_reader(setup: Setup) -> ImageReader:
    """Reads the images of a suite's requests; the bytes of binary cells are put into its store first."""
    keep_images(setup.store, setup.manifest)
    return ImageReader(setup.store, store_options(setup.settings))


def render_case(
    engine: Engine, request: RenderRequest, options: DenoiseOptions, now: Callable[[], float] = clock.monotonic_s
) -> Rendered:
    """Text, denoise and decode one request, and keep everything.

    Raises:
        ClipFailed: kind "nonfinite" for latents with NaN or Inf, "verify" for frames of another size, and the engine's.
        EngineLost: the engine is gone.
    """
    watch = _Watch(now)
    found = collect(engine, request, options, watch.saw)
    latents = found.latents
    if latents is None or not np.isfinite(latents).all():
        raise ClipFailed("nonfinite", f"clip {request.clip_id}: the final latents hold NaN or Inf")
    watch.mark(None)
    frames = decoded(engine, request, latents, watch.saw)
    watch.mark("decode")
    return Rendered(request, frames, latents, found.taps, watch.stages, watch.peak_rss_bytes)


@dataclass(slots=True)
class _Watch:
    """Seconds since the last mark belong to the stage that is marked; `None` throws them away."""

    now: Callable[[], float]
    stages: dict[str, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.now()

    def mark(self, stage: str | None) -> None:
        current = self.now()
        if stage is not None:
            self.stages[stage] = self.stages.get(stage, 0.0) + current - self._last
        self._last = current

    def saw(self, event: Event) -> None:
        if isinstance(event, Step):
            self.mark(event.stage if event.stage.startswith("denoise") else f"denoise.{event.stage}")
        elif isinstance(event, Done):
            self.peak_rss_bytes = max(self.peak_rss_bytes, int(event.info.get("peak_rss_bytes", 0)))
            if "text" not in self.stages:  # the first call that ends
                self.mark("text")

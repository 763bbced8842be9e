"""Replays: every stage of one clip again, each on frozen inputs, so that a stage answers for itself alone.

```
frozen            text, latents.<k> and velocity.<k> of some steps, final latents, frames, the encoded file
text              the prompt is encoded again
noise             the first latents are drawn again
first step        step 0, entered with the frozen noise          \\
mid step          steps between, each entered with its frozen     > the guided velocity is compared
last step         latents (teacher-forced)                       /
final latents     the whole denoising, free
decode            the frozen final latents
encode            the frozen frames, as a file that is decoded back
```

Steps are compared by their guided velocity: latents after one step move by the solver's small share of it only. The
text cannot be handed in, so a text that moved moves the steps too: the order of the stages says what came first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batch_gen.encode import Encoder, EncodeSettings, VideoSpec
from batch_gen.engine import Array, DenoiseOptions, Engine
from batch_gen.errors import CheckFailed, ClipFailed, UsageError
from batch_gen.regress.collect import collect, decoded
from batch_gen.regress.vectors import cosine, relative_l2
from batch_gen.request import RenderRequest
from batch_gen.verify import decode as decode_file
from models.errors import ModelError

TEXT: Final = "text"
NOISE: Final = "noise"
FIRST: Final = "first step"
MID: Final = "mid step"
LAST: Final = "last step"
FINAL: Final = "final latents"
DECODE: Final = "decode"
ENCODE: Final = "encode"
STAGES: Final = (TEXT, NOISE, FIRST, MID, LAST, FINAL, DECODE, ENCODE)
"""In the order of the pipeline."""
MAX_STEPS: Final = 9
FRAMES: Final = "frames"
FILE: Final = "file"

Images = tuple[npt.NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True)
class Frozen:
    """What one rendering of a clip left at every stage.

    Attributes:
        request: The clip.
        arrays: float32 `text` [512, E], `latents.<k>` and `velocity.<k>` [C, T, h, w] for the kept steps, `latents.<n>`
            the final latents; uint8 `frames` [F, H, W, 3] and `file`, the encoded file's bytes [n]. Engines without a
            text or velocity of their own leave those out.
        codec: The settings that wrote the file.
    """

    request: RenderRequest
    arrays: Mapping[str, Array]
    codec: EncodeSettings = field(default_factory=EncodeSettings)

    @property
    def steps(self) -> list[int]:
        """The steps that can be entered, ascending."""
        names = (name.partition(".") for name in self.arrays)
        return sorted(
            int(number) for kind, _, number in names if kind == "velocity" and f"latents.{number}" in self.arrays
        )

    @property
    def final(self) -> npt.NDArray[np.float32]:
        """The final latents [C, T, h, w].

        Raises:
            CheckFailed: They were not kept.
        """
        return self.array(f"latents.{self.request.steps}")

    def array(self, name: str) -> Array:
        """One array.

        Raises:
            CheckFailed: It was not kept.
        """
        if name not in self.arrays:
            kept = ", ".join(sorted(self.arrays)) or "nothing"
            raise CheckFailed(
                f"clip {self.request.clip_id}: the kept stages hold no {name!r} (they hold {kept}); record them again"
            )
        return self.arrays[name]


@dataclass(frozen=True, slots=True)
class Difference:
    """One array beside the frozen one.

    Attributes:
        stage: One of `STAGES`.
        name: Which array, such as `velocity.3`.
        step: The step, for stages that have one.
        equal: Bit for bit.
        distance: Relative L2, computed in float64; infinite for other shapes and for values that are not finite.
        largest: Largest absolute difference, in the array's own unit.
        cosine: Of the two as vectors.
        place: Index along the first axis of the first difference (a frame, for frames); None when equal.
        note: What the engine said instead of giving a value.
    """

    stage: str
    name: str
    step: int | None
    equal: bool
    distance: float
    largest: float
    cosine: float
    place: int | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not finite is null."""
        body = {key: getattr(self, key) for key in self.__slots__}
        return {
            key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in body.items()
        }


def frozen_of(
    request: RenderRequest, arrays: Mapping[str, Array], frames: Array | None, codec: EncodeSettings | None = None
) -> Frozen:
    """A frozen clip from what a night keeps: `latents` are the final ones, and frames lie in a file of their own."""
    kept = {name: array for name, array in arrays.items() if name != "latents"}
    if "latents" in arrays:
        kept[f"latents.{request.steps}"] = arrays["latents"]
    if frames is not None:
        kept[FRAMES] = frames
    return Frozen(request, kept, codec or EncodeSettings())


def kept_steps(total: int, most: int = MAX_STEPS) -> list[int]:
    """The steps that are kept of `total`: the first, the last and evenly spaced ones between, at most `most`."""
    if total < 1:
        raise UsageError(f"a clip has one step at least, not {total}")
    count = min(total, most)
    return sorted({round(place * (total - 1) / max(1, count - 1)) for place in range(count)})


def stage_of_step(step: int, total: int) -> str:
    """`first step`, `mid step` or `last step`."""
    return FIRST if step == 0 else LAST if step == total - 1 else MID


def freeze(
    engine: Engine,
    request: RenderRequest,
    codec: EncodeSettings | None = None,
    images: Images = (),
    steps: list[int] | None = None,
) -> Frozen:
    """Render a clip once and keep every stage.

    Args:
        engine: Renders it.
        request: The clip.
        codec: How the file is written.
        images: First and last image of the request.
        steps: The steps to keep; None for `kept_steps`.
    """
    codec = codec or EncodeSettings()
    chosen = kept_steps(request.steps) if steps is None else steps
    taps = (TEXT, *(f"{kind}.{step}" for step in chosen for kind in ("latents", "velocity")))
    arrays: dict[str, Array] = collect(engine, request, DenoiseOptions(taps=taps, images=images)).arrays
    arrays[FRAMES] = decoded(engine, request, arrays[f"latents.{request.steps}"])
    arrays[FILE] = encoded(arrays[FRAMES], request, codec)
    return Frozen(request, arrays, codec)


def replay(
    engine: Engine, frozen: Frozen, images: Images = (), codec: EncodeSettings | None = None
) -> Iterator[Difference]:
    """Every stage again, in order; stages whose arrays were not kept are left out.

    Lazy: a caller that only wants the first stage that moved stops there.

    Args:
        engine: What is judged.
        frozen: The inputs and what came of them.
        images: First and last image of the request.
        codec: How files are written now; None for the frozen settings, so that only another encoder shows.
    """
    request = frozen.request
    again = collect(engine, request, DenoiseOptions(stop=0, taps=(TEXT,), images=images)).arrays
    for stage, name, key in ((TEXT, TEXT, TEXT), (NOISE, "latents.0", "latents.0")):
        if name in frozen.arrays and key in again:
            yield compare(stage, name, frozen.array(name), again[key])
    for step in frozen.steps:
        yield step_again(engine, frozen, step, images)
    last = f"latents.{request.steps}"
    free = DenoiseOptions(images=images)
    yield attempt(FINAL, last, frozen.final, lambda: collect(engine, request, free).arrays[last])
    if FRAMES in frozen.arrays:
        yield attempt(DECODE, FRAMES, frozen.array(FRAMES), lambda: decoded(engine, request, frozen.final))
        if FILE in frozen.arrays:
            yield encode_again(frozen, codec)


def step_again(engine: Engine, frozen: Frozen, step: int, images: Images = ()) -> Difference:
    """One step, entered with its frozen latents; the guided velocity is compared."""
    name, total = f"velocity.{step}", frozen.request.steps
    start = (step, frozen.array(f"latents.{step}"))
    options = DenoiseOptions(start=start, stop=step + 1, taps=(name,), images=images)

    def again() -> Array:
        found = collect(engine, frozen.request, options).arrays
        if name not in found:
            raise CheckFailed(f"this engine shows no {name!r}; a step cannot be judged without it")
        return found[name]

    return attempt(stage_of_step(step, total), name, frozen.array(name), again, step)


def encode_again(frozen: Frozen, codec: EncodeSettings | None = None) -> Difference:
    """The frozen frames encoded; equal files are equal, others are decoded and compared by their pixels."""
    old, frames = frozen.array(FILE), frozen.array(FRAMES)
    new = encoded(frames, frozen.request, codec or frozen.codec)
    if np.array_equal(old, new):
        return Difference(ENCODE, FILE, None, equal=True, distance=0.0, largest=0.0, cosine=1.0, place=None)
    before, after = (pixels(file, frozen.request, len(frames)) for file in (old, new))
    return compare(ENCODE, FILE, before, after)


def encoded(frames: Array, request: RenderRequest, codec: EncodeSettings) -> npt.NDArray[np.uint8]:
    """The bytes [n] of the file that these frames make."""
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / f"clip{codec.suffix}"
        with Encoder(path, video_spec(request, len(frames)), codec) as encoder:
            encoder.write(frames)
            encoder.finish()
        return np.frombuffer(path.read_bytes(), np.uint8)


def pixels(file: Array, request: RenderRequest, num_frames: int) -> npt.NDArray[np.uint8]:
    """The frames uint8 [F, H, W, 3] that a file's bytes decode to."""
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        path = Path(folder) / "clip"  # ffmpeg knows the container by its first bytes
        path.write_bytes(file.tobytes())
        return np.stack(list(decode_file(path, video_spec(request, num_frames))))


def video_spec(request: RenderRequest, num_frames: int) -> VideoSpec:
    """What a file of so many frames of a clip holds."""
    return VideoSpec(request.width, request.height, request.fps, num_frames)


def attempt(stage: str, name: str, old: Array, again: Callable[[], Array], step: int | None = None) -> Difference:
    """A stage beside the frozen one; one that breaks the clip (values that are no numbers) is infinitely far away."""
    try:
        return compare(stage, name, old, again(), step)
    except (ClipFailed, ModelError) as failure:  # the second from an engine in this process
        return Difference(stage, name, step, False, np.inf, np.inf, 0.0, 0, note=f"{failure.kind}: {failure.message}")


def compare(stage: str, name: str, old: Array, new: Array, step: int | None = None) -> Difference:
    """Two arrays of any shape and dtype."""
    if old.shape == new.shape and np.array_equal(old, new):
        return Difference(stage, name, step, equal=True, distance=0.0, largest=0.0, cosine=1.0, place=None)
    if old.shape != new.shape:
        place = min(len(old), len(new)) if old.shape[1:] == new.shape[1:] else 0
        return Difference(stage, name, step, equal=False, distance=np.inf, largest=np.inf, cosine=0.0, place=place)
    a, b = old.astype(np.float64), new.astype(np.float64)
    moved = (a != b).reshape(len(a), -1).any(axis=1)
    place = int(np.argmax(moved))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Difference(stage, name, step, equal=False, distance=np.inf, largest=np.inf, cosine=0.0, place=place)
    return Difference(stage, name, step, False, relative_l2(b, a), float(np.abs(a - b).max()), cosine(a, b), place)

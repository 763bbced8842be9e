"""A deterministic engine without a model: for tests, dry runs of a fleet, and chaos.

`--model fake` or `--model fake:options.json` selects it. Frames follow from the request alone, stages take the time
they are told to, and faults happen on demand, so that tests of everything around the engine need no weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen.engine import ALL_STEPS, DenoiseOptions, Done, Event, Events, Slab, Step, Tap
from batch_gen.errors import ClipFailed, ConfigError
from batch_gen.request import RenderRequest

DENOISE_FAULTS = ("exit", "hang", "nan", "error", "device")
DECODE_FAULTS = ("flat", "short", "nondeterministic")
FAULTS = DENOISE_FAULTS + DECODE_FAULTS


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """What the fake engine does.

    Args:
        text_s, step_s, slab_s: seconds that one call, step or slab takes.
        load_s: seconds to start.
        frames_per_slab: frames in one slab.
        faults: clip_id (or `*`) -> one of `FAULTS`; a fault name with the suffix `-once` happens one time only,
            remembered in `once_folder` across processes.
        once_folder: where `-once` faults leave their mark.
        noise: largest change of a pixel (0..255) and of a latent (in thousandths of it) that each call adds by
            chance, as a machine without fixed summation order would.
        noise_seed: of that chance; the same seed gives the same sequence.
        trace: file that gets a line for each stage that begins or ends, `denoise fox`, `denoised fox`, `decode fox`,
            `decoded fox`, from all processes; empty for none.
    """

    text_s: float = 0.0
    step_s: float = 0.0
    slab_s: float = 0.0
    load_s: float = 0.0
    frames_per_slab: int = 4
    faults: dict[str, str] = field(default_factory=dict)
    once_folder: str = ""
    trace: str = ""
    noise: float = 0.0
    noise_seed: int = 0

    @classmethod
    def from_file(cls, path: Path) -> FakeOptions:
        """Read options from a JSON object.

        Raises:
            ConfigError: the file is no JSON object of these options.
        """
        try:
            raw = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"fake engine options {path}: {error}") from error
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Any) -> FakeOptions:
        """Check and build options; unknown keys and faults are errors."""
        names = {item.name for item in fields(cls)}
        if not isinstance(raw, dict) or set(raw) - names:
            raise ConfigError(f"fake engine options must be an object with keys among {sorted(names)}")
        options = cls(**raw)
        for clip_id, fault in options.faults.items():
            if fault.removesuffix("-once") not in FAULTS:
                raise ConfigError(f"fake engine fault {fault!r} of {clip_id!r} is not one of {', '.join(FAULTS)}")
        return options


class FakeEngine:
    """An `Engine` whose frames are a pure function of the request.

    Args:
        options: what it does.
        sleep: how its delays pass; a test gives the clock that it holds.
    """

    def __init__(self, options: FakeOptions | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.options = options or FakeOptions()
        self._sleep = sleep
        self._chance = np.random.default_rng(self.options.noise_seed)
        self._sleep(self.options.load_s)

    def text(self, requests: Sequence[RenderRequest]) -> Events:
        """One id per request: the hash of its prompts."""
        self._sleep(self.options.text_s)
        ids = tuple(_hash(request.prompt, request.negative_prompt).hex()[:16] for request in requests)
        yield Done(ids, {"tokens": [len(request.prompt.split()) for request in requests]})

    def denoise(self, request: RenderRequest, text: str, options: DenoiseOptions = ALL_STEPS) -> Events:
        """Walk through the steps; latents are a function of the request."""
        del text
        self._note("denoise", request)
        fault = self._fault(request.clip_id, DENOISE_FAULTS)
        first = options.start[0] if options.start else 0
        last = request.steps if options.stop is None else min(options.stop, request.steps)
        latents = self._noisy(_latents(request), self.options.noise / 1000)
        for index in range(first, last):
            self._sleep(self.options.step_s)
            if index == first:
                _strike(fault)
            if f"latents.{index}" in options.taps:
                yield Tap(f"latents.{index}", latents)
            yield Step(index + 1, request.steps)
        if fault == "nan":
            raise ClipFailed("nonfinite", f"clip {request.clip_id}: latents hold NaN (planted)")
        self._note("denoised", request)
        yield Done(latents, {})

    def decode(self, request: RenderRequest, latents: npt.NDArray[np.float32]) -> Events:
        """Frames from the latents: a gradient that moves, so that no two frames are equal."""
        self._note("decode", request)
        fault = self._fault(request.clip_id, DECODE_FAULTS)
        for slab in _slabs(request, latents, self.options.frames_per_slab, fault):
            self._sleep(self.options.slab_s)
            frames = self._noisy(slab, self.options.noise)
            frames.flags.writeable = False
            yield Slab(frames)
        self._note("decoded", request)
        yield Done(None, {})

    def render(self, request: RenderRequest) -> Iterator[Event]:
        """The three in a row."""
        from batch_gen.engine import render

        return render(self, request)

    def describe(self) -> dict[str, Any]:
        """Constant facts: this engine depends on nothing of the machine."""
        return {"engine": "fake", "dtype": "uint8", "solver": "none", "decode": {"mode": "exact"}, "numerics": {}}

    def close(self) -> None:
        """Nothing to free."""

    def _noisy(self, values: npt.NDArray[Any], amplitude: float) -> npt.NDArray[Any]:
        """The values with chance added, in their own type; a wrapped pixel would be no small change."""
        if not amplitude:
            return values
        changed = values + self._chance.uniform(-amplitude, amplitude, values.shape)
        if values.dtype == np.uint8:
            changed = np.clip(np.rint(changed), 0, 255)
        return changed.astype(values.dtype)

    def _note(self, event: str, request: RenderRequest) -> None:
        if self.options.trace:
            with Path(self.options.trace).open("ab", buffering=0) as trace:  # one write, so lines never mix
                trace.write(f"{event} {request.clip_id}\n".encode())

    def _fault(self, clip_id: str, of_stage: tuple[str, ...]) -> str:
        fault = self.options.faults.get(clip_id, self.options.faults.get("*", ""))
        if fault.removesuffix("-once") not in of_stage:
            return ""
        if not fault.endswith("-once"):
            return fault
        mark = Path(self.options.once_folder or ".") / f"{_hash(clip_id).hex()[:16]}.mark"
        if mark.exists():
            return ""
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        return fault.removesuffix("-once")


def _strike(fault: str) -> None:
    if fault == "exit":
        os._exit(9)
    if fault == "hang":
        time.sleep(3600)
    if fault == "error":
        raise RuntimeError("planted error")
    if fault == "device":
        from batch_gen.errors import EngineLost

        raise EngineLost("device", "planted device error")


def _hash(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()


def _latents(request: RenderRequest) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(np.frombuffer(bytes.fromhex(request.digest), dtype=np.uint32))
    shape = (4, (request.num_frames - 1) // 4 + 1, 2, 2)
    return rng.standard_normal(shape).astype(np.float32)


def _slabs(
    request: RenderRequest, latents: npt.NDArray[np.float32], frames_per_slab: int, fault: str
) -> Iterator[npt.NDArray[np.uint8]]:
    height, width = request.height, request.width
    base = np.abs(latents).sum(axis=(1, 2, 3))[:3] * 37.0
    ramp = np.add.outer(np.arange(height), np.arange(width)).astype(np.float32)
    last = request.num_frames - (4 if fault == "short" else 0)
    shift = float(time.time_ns() % 97) if fault == "nondeterministic" else 0.0
    for first in range(0, last, frames_per_slab):
        index = np.arange(first, min(first + frames_per_slab, last), dtype=np.float32)
        values = ramp[None, :, :, None] + 5.0 * index[:, None, None, None] + base + shift
        if fault == "flat":
            values = np.full_like(values, 7.0)
        yield (values % 256).astype(np.uint8)

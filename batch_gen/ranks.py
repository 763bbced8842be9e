"""The rank process: the only place of batch_gen that imports models.

Started by `launch.RemoteEngine` as `python -m batch_gen.ranks JSON`. Rank 0 answers the supervisor over the inherited
socket; with several ranks it passes each command on (UTF-8 JSON in a broadcast tensor) and all walk through the same
calls. A failure that every rank sees alike is answered and the ranks go on; any other ends the process with its last
words in `rank-<r>.last.json`, which the supervisor reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from batch_gen import wire
from batch_gen.engine import ALL_STEPS, Array, DenoiseOptions, Done, Engine, Event, Events, Slab, Step, Tap
from batch_gen.errors import KINDS, BatchGenError, RetryClass
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.memory import peak_rss_bytes
from batch_gen.request import RenderRequest
from batch_gen.together import Ahead
from models.device import Start, prepare
from models.device_faults import classify
from models.errors import ModelError

if TYPE_CHECKING:
    import numpy.typing as npt

    from models.wan.pipeline import Sampling, WanPipeline
    from models.wan.reference import ReferencePipeline

# Fields that PipelineSpec and PipelineOptions share.
_OPTIONS = (
    "dtype",
    "vae_dtype",
    "solver",
    "decode",
    "attention",
    "long_prompt",
    "text_cache_bytes",
    "device",
    "experts",
    "tp_sequence_parallel",
    "quantization",
    "modules_to_not_convert",
    "compile",
    "compile_backend",
)
_AGREED = (RetryClass.CLIP, RetryClass.INPUT)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """What a pipeline engine loads and how; all plain values.

    Args:
        model: checkpoint folder in diffusers layout.
        device: cpu, cuda or neuron.
        dtype, vae_dtype, solver, decode, attention, kernels, compile, compile_backend, long_prompt, quantization,
            modules_to_not_convert: see `flags.py`.
        mesh: degrees `{"tp", "cp", "cfg"}` of this replica.
        layout: name of the rank layout.
        text_cache_bytes: size of the text cache.
        implementation: `own`, or `diffusers` for a reference leg of `regress` (CPU, one rank).
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    vae_dtype: str = "float32"
    solver: str = "unipc"
    decode: str = "exact"
    attention: str = "auto"
    kernels: str = "reference"
    compile: str = "off"
    compile_backend: str = "auto"
    long_prompt: str = "truncate"
    mesh: dict[str, int] = field(default_factory=lambda: {"tp": 1, "cp": 1, "cfg": 1})
    layout: str = "arithmetic"
    text_cache_bytes: int = 256 << 20
    experts: str = "resident"
    tp_sequence_parallel: bool = False
    quantization: str = "none"
    modules_to_not_convert: tuple[str, ...] = ()
    adapters: tuple[dict[str, Any], ...] = ()
    step_cache: dict[str, Any] | None = None
    implementation: str = "own"


class Control(Protocol):
    """How commands reach all ranks of a replica."""

    def share(self, command: dict[str, Any] | None, arrays: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        """Rank 0 gives a command, every rank gets it."""


class Alone:
    """Control of a single rank: nothing to share."""

    def share(self, command: dict[str, Any] | None, arrays: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        """The command itself."""
        assert command is not None
        return command, arrays


class PipelineEngine:
    """An `Engine` around `models.wan.pipeline.WanPipeline`, in this process."""

    def __init__(self, pipeline: WanPipeline | ReferencePipeline) -> None:
        self._pipeline = pipeline
        self._ahead = Ahead(self._alone, self._several, self._alike)

    def text(self, requests: Sequence[RenderRequest]) -> Events:
        """Encode prompts and negatives; equal texts are computed once (LRU)."""
        handles = self._pipeline.text([request.prompt for request in requests])
        self._pipeline.text([request.negative_prompt for request in requests])
        tokens = [handle.num_tokens for handle in handles]
        truncated = [handle.truncated for handle in handles]
        yield Done(tuple(handle.id for handle in handles), {"tokens": tokens, "truncated": truncated})

    def denoise(self, request: RenderRequest, text: str, options: DenoiseOptions = ALL_STEPS) -> Events:
        """Denoise one clip."""
        from models.events import DoneEvent, StepEvent, TapEvent

        del text  # the pipeline's own cache is keyed by the prompt
        together = self._ahead.made(request, options.together)
        if together is not None:
            for made in together:
                yield Done(made, {}) if isinstance(made, np.ndarray) else made
            return
        taps = frozenset(options.taps)
        start = (options.start[0], _tensor(options.start[1])) if options.start else None
        sampling = _sampling(request, options.images)
        for event in self._pipeline.denoise(sampling, start=start, stop=options.stop, taps=taps):
            if isinstance(event, StepEvent):
                yield Step(event.index + 1, event.total, event.stage)
            elif isinstance(event, TapEvent):
                yield Tap(event.name, event.value.numpy())
            elif isinstance(event, DoneEvent):
                yield Done(event.latents.numpy(), {} if event.skipped is None else {"skipped_steps": event.skipped})

    def _alone(self, request: RenderRequest) -> Iterator[Step | npt.NDArray[np.float32]]:
        for event in self.denoise(request, ""):
            if not isinstance(event, Tap | Slab):
                yield event.value if isinstance(event, Done) else event

    def _several(self, requests: Sequence[RenderRequest]) -> Iterator[Step | npt.NDArray[np.float32]]:
        from models.events import DoneEvent, StepEvent

        pipeline: Any = self._pipeline  # `_alike` lets no other kind through
        for event in pipeline.denoise_several([_sampling(request, ()) for request in requests]):
            if isinstance(event, StepEvent):
                yield Step(event.index + 1, event.total, event.stage)
            elif isinstance(event, DoneEvent):
                yield event.latents.numpy()

    def _alike(self, request: RenderRequest) -> Hashable | None:
        alike = getattr(self._pipeline, "alike", None)  # the reference pipeline makes each clip alone
        return None if alike is None or request.image is not None else alike(_sampling(request, ()))

    def decode(self, request: RenderRequest, latents: npt.NDArray[np.float32]) -> Events:
        """Decode latents to slabs; ranks other than 0 yield none."""
        for frames in self._pipeline.decode(_tensor(latents), request.num_frames):
            yield Slab(frames)
        yield Done(None, {"decode": self._pipeline.decode_plan(latents), **self._device_info()})

    def _device_info(self) -> dict[str, Any]:
        """What the device says after a clip: its peak of memory."""
        device = getattr(self._pipeline, "device", None)  # the reference pipeline has none of ours
        return {} if device is None or device.name == "cpu" else {"device_peak_bytes": device.memory().peak_bytes}

    def render(self, request: RenderRequest) -> Iterator[Event]:
        """The three in a row."""
        from batch_gen.engine import render

        return render(self, request)

    def describe(self) -> dict[str, Any]:
        """What was loaded."""
        facts = self._pipeline.describe()
        mode = facts["decode"]
        return {"engine": "pipeline", **facts, "decode": mode if isinstance(mode, dict) else {"mode": mode}}

    def close(self) -> None:
        """The process ends with its memory."""


def main(argument: str) -> int:
    """Run one rank until its supervisor says close or goes away."""
    spec = json.loads(argument)
    _die_with(spec["parent"])
    faulthandler.register(signal.SIGUSR1)  # a supervisor that gives us up asks where we hang
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if spec["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec["cpus"])
    rank, folder = int(spec["rank"]), Path(spec["folder"])
    connection = socket.socket(fileno=spec["fd"]) if rank == 0 else None
    try:
        engine, control = _build(spec)
        if connection is not None:
            wire.send(connection, {"type": "ready", "description": engine.describe()})
        _serve(engine, control, connection)
    except wire.WireClosed:
        return 0
    except Exception as error:  # the last thing this process does is to say why it ends
        kind, message = kind_of(error)
        traceback.print_exc()
        _say_last_words(folder, rank, kind, message)
        if connection is not None:
            with contextlib.suppress(Exception):
                wire.send(connection, {"type": "error", "kind": kind, "message": message, "ended": True})
        return 1
    return 0


def build_pipeline_engine(
    spec: PipelineSpec, control_ranks: int = 1, rank: int = 0, folder: str = ""
) -> tuple[Engine, Control]:
    """Load the pipeline on this rank.

    Args:
        spec: what to load.
        control_ranks: ranks of the replica.
        rank: this rank.
        folder: where the ranks meet (a file), when there are several.
    """
    from models.device import use_kernels
    from models.lora import Adapter
    from models.registry import load_pipeline_class
    from models.wan.pipeline import PipelineOptions
    from models.wan.step_cache import CacheSettings

    use_kernels(spec.kernels, spec.device)
    adapters = tuple(Adapter(**adapter) for adapter in spec.adapters)
    cache = None if spec.step_cache is None else CacheSettings(**spec.step_cache)
    options = PipelineOptions(adapters=adapters, step_cache=cache, **{name: getattr(spec, name) for name in _OPTIONS})
    if spec.implementation == "diffusers":
        from models.wan.reference import ReferencePipeline

        return PipelineEngine(ReferencePipeline.load(Path(spec.model), options)), Alone()
    pipeline = load_pipeline_class(Path(spec.model))
    if control_ranks == 1:
        return PipelineEngine(pipeline.load(Path(spec.model), options)), Alone()
    from models.parallel.control import MeshControl
    from models.parallel.mesh import open_mesh

    mesh = open_mesh(
        spec.mesh, layout=spec.layout, rank=rank, rendezvous=Path(folder) / "rendezvous", device=spec.device
    )
    return PipelineEngine(pipeline.load(Path(spec.model), options, mesh)), MeshControl(mesh)


def _build(spec: dict[str, Any]) -> tuple[Engine, Control]:
    if spec["kind"] == "fake":
        return FakeEngine(FakeOptions.from_dict(spec["options"])), Alone()
    options = PipelineSpec(**spec["options"])
    cores, cache = spec["cores"], spec["cache"]
    core = cores[spec["rank"]] if cores else None
    prepare(Start(options.device, core, int(spec["threads"]), Path(cache) if cache else None))
    import torch  # not earlier: it loads device backends, which read the environment then

    torch.set_num_threads(int(spec["threads"]))
    return build_pipeline_engine(options, spec["num_ranks"], spec["rank"], spec["folder"])


def _serve(engine: Engine, control: Control, connection: socket.socket | None) -> None:
    while True:
        command, arrays = wire.receive(connection) if connection else (None, [])
        command, arrays = control.share(command, arrays)
        if command["type"] == "close":
            return
        try:
            for event in _run(engine, command, arrays):
                if connection is not None:
                    _send_event(connection, event)
        except wire.WireClosed:
            raise
        except Exception as error:
            kind, message = kind_of(error)
            # What a device reports, one rank may have seen alone: only our own verdicts are the same on all of them.
            if KINDS[kind].retry not in _AGREED or not isinstance(error, BatchGenError | ModelError):
                raise
            if connection is not None:
                wire.send(connection, {"type": "error", "kind": kind, "message": message})


def _run(engine: Engine, command: dict[str, Any], arrays: list[Array]) -> Events:
    if command["type"] == "text":
        return engine.text([RenderRequest.from_json(body) for body in command["requests"]])
    request = RenderRequest.from_json(command["request"])
    if command["type"] == "decode":
        return engine.decode(request, arrays[0])
    start = None if command["start"] is None else (int(command["start"]), arrays[0])
    images = tuple(arrays if start is None else arrays[1:])
    together = tuple(RenderRequest.from_json(body) for body in command.get("together", ()))
    options = DenoiseOptions(start, command["stop"], tuple(command["taps"]), images, together)
    return engine.denoise(request, command["text"], options)


def _send_event(connection: socket.socket, event: Event) -> None:
    if isinstance(event, Step):
        wire.send(connection, {"type": "step", "index": event.index, "total": event.total, "stage": event.stage})
    elif isinstance(event, Tap):
        wire.send(connection, {"type": "tap", "name": event.name}, [event.array])
    elif isinstance(event, Slab):
        wire.send(connection, {"type": "slab"}, [event.frames])
    else:
        info = {**event.info, "peak_rss_bytes": peak_rss_bytes()}
        value, arrays = (None, [event.value]) if isinstance(event.value, np.ndarray) else (event.value, [])
        wire.send(connection, {"type": "done", "value": value, "info": info}, arrays)


def _sampling(request: RenderRequest, images: Sequence[npt.NDArray[np.uint8]]) -> Sampling:
    from models.wan.condition import Still
    from models.wan.pipeline import Sampling

    image, last_image = (*(Still(pixels) for pixels in images), None, None)[:2]
    return Sampling(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        seed=request.seed,
        width=request.width,
        height=request.height,
        num_frames=request.num_frames,
        steps=request.steps,
        guidance_high=request.guidance_high,
        guidance_low=request.guidance_low,
        flow_shift=request.flow_shift,
        image=image,
        last_image=last_image,
    )


def _tensor(array: npt.NDArray[np.float32]) -> Any:
    import torch

    return torch.from_numpy(np.array(array, dtype=np.float32))


def kind_of(error: Exception) -> tuple[str, str]:
    """Kind and message of any failure of a rank, through the one table."""
    if isinstance(error, BatchGenError | ModelError):
        return (error.kind if error.kind in KINDS else "engine_died"), str(error)
    documented = classify(f"{type(error).__name__}: {error}")
    if documented is not None:
        return documented
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "oom", str(error)
    return "engine_died", f"{type(error).__name__}: {error}"


def _say_last_words(folder: Path, rank: int, kind: str, message: str) -> None:
    path = folder / f"rank-{rank}.last.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"kind": kind, "message": message[:4000]}), "utf-8")
    partial.replace(path)


def _die_with(parent: int) -> None:
    """End this process when the supervisor ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _watch(lambda: os.getppid() == parent)


def _watch(alive: Callable[[], bool]) -> None:
    """A second guard beside the kernel's: the death signal follows the parent's thread, not only its process."""

    def watch() -> None:
        pause = threading.Event()
        while alive():
            pause.wait(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

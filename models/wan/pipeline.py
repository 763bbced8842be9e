"""Wan2.2: text and images -> latents -> frames, on one device or as one rank of a mesh.

Source: diffusers' `WanPipeline` and `WanImageToVideoPipeline`; see docs/parity.md for how closely the numbers agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import backend
from models.checkpoint_files import folder_digest, read_json
from models.device import Compiling, Device, dtype_named, open_device
from models.errors import ModelError
from models.events import DoneEvent, Event, StepEvent, TapEvent
from models.lora import Adapter
from models.neuron_facts import Role
from models.parallel import layout
from models.parallel.collectives import check_agreement, made_by_first
from models.parallel.loading import LoadMeter
from models.parallel.mesh import Mesh, single
from models.quantize import quantization
from models.vae.decode import compile_parts, decode_stream, load_vae
from models.wan.condition import NOTHING, Condition, Still, check_conditioning, encode_channels, encode_first
from models.wan.experts import LOW, Experts, check_adapters, load_experts
from models.wan.graphs import ExpertGraphs, Guidance, Unit
from models.wan.model import Rope
from models.wan.parallelize import Changes, load_expert
from models.wan.rope import rope_tables
from models.wan.several import Group, Member
from models.wan.solver import Solver, initial_noise, make_solver, num_train_timesteps
from models.wan.spec import WanSpec, conditionings
from models.wan.step_cache import CacheSettings, StepCache, check_cache, check_steps
from models.wan.text import TextEncoder, TextHandle, text_rows

# Steps between two checks that the latents are finite, where a check makes the host wait for the device.
CHECK_EVERY = 8
# Up to this many tokens a CPU runs both texts as one batch: weights are read once, small matrices fill the cores.
BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Sampling:
    """What decides the latents of one clip. Sizes in px; guidance by noise level of the step."""

    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    num_frames: int
    steps: int
    guidance_high: float
    guidance_low: float
    flow_shift: float
    image: Still | None = None
    last_image: Still | None = None


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a pipeline computes; the same for all clips of a run."""

    dtype: str = "float32"
    vae_dtype: str = "float32"
    device: str = "cpu"
    decode: Literal["exact", "tiled", "reference"] = "exact"
    solver: str = "unipc"
    long_prompt: Literal["truncate", "fail"] = "truncate"
    text_cache_bytes: int = 256 << 20
    experts: Literal["resident", "swap"] = "resident"
    attention: str = "auto"
    tp_sequence_parallel: bool = False
    quantization: str = "none"
    modules_to_not_convert: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    step_cache: CacheSettings | None = None
    compile: str = "off"
    compile_backend: str = "auto"


class WanPipeline:
    """A loaded checkpoint; make it with `load`."""

    def __init__(self, folder: Path, options: PipelineOptions, device: Device, mesh: Mesh) -> None:
        meter = LoadMeter()
        index = read_json(folder / "model_index.json")
        dtype = dtype_named(options.dtype)
        self.folder, self.options, self.device, self.mesh = folder, options, device, mesh
        self.scheduler_config = read_json(folder / "scheduler" / "scheduler_config.json")
        train = num_train_timesteps(self.scheduler_config)
        make_solver(self.scheduler_config, options.solver, 1.0, 2)  # what is unusable fails here, not at a clip
        read = partial(
            load_expert,
            dtype=dtype,
            device=device.torch_device,
            mesh=mesh,
            attention=options.attention,
            sequence_parallel=options.tp_sequence_parallel,
            changes=Changes(
                options.adapters, quantization(options.quantization, options.modules_to_not_convert, device.name)
            ),
        )
        check_adapters(options.adapters, index)
        layers = int(read_json(folder / "transformer" / "config.json").get("num_layers", 0))
        check_cache(options.step_cache, layers, str(folder))
        compile_graph = partial(_compiled, device, "transformer")
        unit: Unit = "block" if device.compiling.mode == "block" else "model"
        as_graphs = partial(ExpertGraphs, compile_graph=compile_graph, unit=unit)
        swap = options.experts == "swap"
        self.experts = load_experts(folder, index, train, read, device, swap=swap, as_graphs=as_graphs)
        self.text_encoder = TextEncoder.load(folder, dtype, device, options.text_cache_bytes, mesh)
        self.guidance = Guidance(mesh.cfg, device.torch_device, partial(_compiled, device, "combine"))
        self.vae = load_vae(folder / "vae", dtype_named(options.vae_dtype), device.torch_device)
        compile_parts(self.vae, partial(_compiled, device, "vae"))
        self.spec = self._spec(index)
        self._rope: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.load_report = meter.report(mesh)

    @classmethod
    def load(cls, folder: Path, options: PipelineOptions | None = None, mesh: Mesh | None = None) -> "WanPipeline":
        """Read a diffusers-layout folder, or this rank's part of it; all ranks of the mesh call it together.

        Raises ModelError: "checkpoint" (incomplete, damaged, or keys that do not fit), "unsupported", "device".
        """
        options = options or PipelineOptions()
        compiling = Compiling(options.compile, options.compile_backend)
        return cls(folder, options, open_device(options.device, compiling=compiling), mesh or single())

    def _spec(self, index: dict[str, Any]) -> WanSpec:
        vae = self.vae.spec
        return WanSpec(
            name=str(index.get("_name_or_path") or self.folder.name),
            transformer=self.experts.spec,
            text_encoder=self.text_encoder.model.spec,
            num_experts=len(self.experts.folders),
            boundary_ratio=index.get("boundary_ratio"),
            vae_stride=(vae.scale_temporal, vae.scale_spatial, vae.scale_spatial),
            conditionings=conditionings(index, self.experts.spec, vae),
        )

    def text(self, prompts: Sequence[str]) -> list[TextHandle]:
        """The prompts' embeddings, cleaned, tokenized and encoded once per run; raises ModelError("input")."""
        return [self.text_encoder.encode(prompt, self.options.long_prompt) for prompt in prompts]

    def denoise(
        self,
        sampling: Sampling,
        start: tuple[int, Tensor] | None = None,
        stop: int | None = None,
        taps: frozenset[str] = frozenset(),
    ) -> Iterator[Event]:
        """Denoise one clip: a StepEvent after each step, the TapEvents asked for, then one DoneEvent.

        start: (step, latents [C, T, h, w] float32): enter at this step with these latents instead of noise at step 0.
        The solver then has no history (see `Solver`). stop: end before this step; DoneEvent holds the latents that
        would enter it. taps: "text" ([512, E], the prompt's), "latents.<k>" ([C, T, h, w], as they enter step k; k =
        steps: the result), "velocity.<k>" ([C, T, h, w], guided, of step k).

        Guidance at a step is `guidance_high` at or above the boundary, else `guidance_low`. As in diffusers,
        `guidance_high` > 1 runs the negative prompt at every step, whatever `guidance_low` is. Unlike in diffusers,
        which would not guide at all, `guidance_high` <= 1 with `guidance_low` > 1 guides the low-noise steps. A
        checkpoint with one expert uses `guidance_high` throughout.

        Raises ModelError: "input" for a size that the model cannot do, "nonfinite".
        """
        first, latents = self._enter(sampling, start)
        last = sampling.steps if stop is None else min(stop, sampling.steps)
        solver = self._solver(sampling, first)
        check_steps(self.options.step_cache, sampling.steps)
        texts = self.text((sampling.prompt, sampling.negative_prompt))
        clip = _Clip(sampling, texts, self._tables(sampling), solver, self._condition(sampling), self._cache())
        if "text" in taps:
            yield TapEvent("text", clip.texts[0].padded().float().cpu())
        for step in range(first, last):
            if f"latents.{step}" in taps:
                yield TapEvent(f"latents.{step}", latents[0].cpu().clone())
            stage = self.experts.stage(solver.timesteps[step])
            velocity, latents = self._step(clip, step, stage, latents)
            self._check_finite(latents, step, stage, last)
            if f"velocity.{step}" in taps:
                yield TapEvent(f"velocity.{step}", velocity[0].cpu().clone())
            self.device.synchronize()  # a step that is announced is done, and the device's queue stays short
            yield StepEvent(step, sampling.steps, stage)
        if last == sampling.steps:
            latents = clip.condition.placed(latents)
        if f"latents.{last}" in taps:
            yield TapEvent(f"latents.{last}", latents[0].cpu().clone())
        check_agreement(latents, self.mesh, f"latents before step {last} of {sampling.steps}")
        yield DoneEvent(latents[0].cpu(), None if clip.cache is None else clip.cache.counts())

    def alike(self, sampling: Sampling) -> tuple[int, ...] | None:
        """Clips with equal answers may go through `denoise_several` together; None: this one goes alone."""
        plain = self.options.step_cache is None and self.device.compiling.mode == "off" and sampling.image is None
        if not plain or self.mesh.layout.degrees.size > 1:
            return None
        texts = self.text((sampling.prompt, sampling.negative_prompt))
        batches = [texts] if self._batches_texts(self._tables(sampling)) else [[text] for text in texts]
        batches += [texts[:1]] if sampling.guidance_high <= 1 else []
        return tuple(text_rows(batch, full=self.device.static_shapes) for batch in batches)

    def denoise_several(self, samplings: Sequence[Sampling]) -> Iterator[Event]:
        """Denoise clips that are `alike` and differ in prompt and seed alone: StepEvents, then a DoneEvent for each."""
        first, latents = samplings[0], [self._enter(sampling, None)[1] for sampling in samplings]
        members = [Member(self.text((each.prompt, each.negative_prompt)), self._solver(each)) for each in samplings]
        rope = self._tables(first)
        group = Group(self.experts, self.guidance, rope, self._batches_texts(rope))
        for step, timestep in enumerate(members[0].solver.timesteps):
            stage = self.experts.stage(timestep)
            latents = group.step(members, latents, step, stage, guidance_of(first, stage))
            for each in latents:
                self._check_finite(each, step, stage, first.steps)
            self.device.synchronize()
            yield StepEvent(step, first.steps, stage)
        for each in latents:
            yield DoneEvent(each[0].cpu())

    def decode(self, latents: Tensor | NDArray[np.float32], num_frames: int) -> Iterator[NDArray[np.uint8]]:
        """Latents [C, T, h, w] float32 -> slabs of frames, uint8 [f, H, W, 3], on rank 0; the others yield none.

        Raises ModelError("nonfinite").
        """
        tensor = torch.as_tensor(latents)
        if tensor.shape[1] != (num_frames - 1) // self.spec.vae_stride[0] + 1:
            raise ModelError("input", f"{tensor.shape[1]} latent frames do not make {num_frames} frames")
        yield from decode_stream(self.vae, tensor, self.options.decode, self.mesh)

    def decode_plan(self, latents: Tensor | NDArray[np.float32]) -> dict[str, Any]:
        """How latents [C, T, h, w] are decoded: mode, strips or tiles, halo, frames per call; JSON values."""
        return self.vae.plan(self.options.decode, latents.shape[2], latents.shape[3]).describe()

    def describe(self) -> dict[str, Any]:
        """What identifies this pipeline and its numbers, as JSON values."""
        spec = self.spec
        return {
            "pipeline": type(self).__name__,
            "model_digest": folder_digest(self.folder),
            "parameters": {
                "transformer": spec.transformer.num_parameters,
                "experts": spec.num_experts,
                "text_encoder": spec.text_encoder.num_parameters,
            },
            "dtype": self.options.dtype,
            "vae_dtype": self.options.vae_dtype,
            "device": self.device.name,
            "quantization": self.options.quantization,
            "step_cache": None if self.options.step_cache is None else asdict(self.options.step_cache),
            "adapters": [asdict(adapter) for adapter in self.options.adapters],
            "modules_to_not_convert": list(self.options.modules_to_not_convert),
            "solver": self.options.solver,
            "boundary_ratio": spec.boundary_ratio,
            "decode": self.options.decode,
            "kernels": backend.current(),
            "compile": asdict(self.device.compiling),
            "attention": self.options.attention,
            "mesh": layout.describe(self.mesh.layout),
            "load": self.load_report,
            "limits": {
                "size_multiple": spec.size_multiple,
                "max_tokens": spec.max_tokens,
                "trained_frames": spec.trained_frames,
                "conditionings": list(spec.conditionings),
            },
        }

    def _enter(self, sampling: Sampling, start: tuple[int, Tensor] | None) -> tuple[int, Tensor]:
        """The first step and the latents [1, C, T, h, w] that enter it, on the device."""
        multiple, stride = self.spec.size_multiple, self.spec.vae_stride[0]
        if sampling.width % multiple or sampling.height % multiple:
            size = f"{sampling.width}x{sampling.height}"
            raise ModelError("input", f"size {size} px: width and height must be multiples of {multiple}")
        if (sampling.num_frames - 1) % stride:
            raise ModelError("input", f"num_frames {sampling.num_frames}: must be a multiple of {stride} plus 1")
        shape = self.spec.latent_shape(sampling.width, sampling.height, sampling.num_frames)
        if max(shape[1:]) > self.spec.transformer.rope_max_seq_len:
            raise ModelError(
                "input", f"latents {shape}: above rope_max_seq_len {self.spec.transformer.rope_max_seq_len}"
            )
        if start is None:
            return 0, initial_noise(sampling.seed, shape).to(self.device.torch_device)
        step, latents = start
        if tuple(latents.shape) != shape or not 0 <= step < sampling.steps:
            raise ModelError("input", f"start: step {step}, latents {tuple(latents.shape)} do not fit the clip {shape}")
        return step, torch.as_tensor(latents, dtype=torch.float32).unsqueeze(0).to(self.device.torch_device)

    def _solver(self, sampling: Sampling, first: int = 0) -> Solver:
        return make_solver(self.scheduler_config, self.options.solver, sampling.flow_shift, sampling.steps, first)

    def _tables(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Rotary tables of a bucket, made once."""
        _, *size = self.spec.latent_shape(sampling.width, sampling.height, sampling.num_frames)
        patch = self.spec.transformer.patch_size
        grid = (size[0] // patch[0], size[1] // patch[1], size[2] // patch[2])
        if grid not in self._rope:
            cos, sin = rope_tables(grid, self.spec.transformer.attention_head_dim)
            self._rope[grid] = (cos.to(self.device.torch_device), sin.to(self.device.torch_device))
        return self._rope[grid]

    @torch.inference_mode()
    def _condition(self, sampling: Sampling) -> Condition:
        """What the clip's images give, on the device; rank 0 encodes them, so that all ranks have the same bits."""
        image, last_image = sampling.image, sampling.last_image
        check_conditioning(image, last_image, self.spec.conditionings, sampling.num_frames)
        if image is None:
            return NOTHING
        _, frames, rows, columns = shape = self.spec.latent_shape(sampling.width, sampling.height, sampling.num_frames)
        for still in (image, last_image):
            if still is not None and still.pixels.shape != (sampling.height, sampling.width, 3):
                raise ModelError("input", f"image of shape {still.pixels.shape} in a clip of {sampling.height} rows")
        by_channels = "text" not in self.spec.conditionings
        channels = self.spec.transformer.in_channels - shape[0] if by_channels else shape[0]
        empty = torch.zeros(1, channels, frames if by_channels else 1, rows, columns)
        make = partial(encode_channels, self.vae, image, last_image, sampling.num_frames)
        make = make if by_channels else partial(encode_first, self.vae, image)
        encoded = made_by_first(make, empty, self.mesh).to(self.device.torch_device)
        return Condition(channels=encoded) if by_channels else Condition(first=encoded)

    @torch.inference_mode()
    def _step(self, clip: "_Clip", step: int, stage: str, latents: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the guided velocity and the latents after it, both [1, C, T, h, w] float32."""
        velocity = self.velocity(clip, clip.solver.timesteps[step], stage, latents)
        return velocity, clip.solver.step(step, velocity, latents)

    def velocity(self, clip: "_Clip", timestep: float, stage: str, latents: Tensor) -> Tensor:
        """The guided velocity [1, C, T, h, w] float32 of latents of the same shape."""
        times = clip.condition.timesteps(timestep)
        time = torch.tensor(times, dtype=torch.float32, device=self.device.torch_device)
        inputs = (clip.condition.model_input(latents), time, clip.rope)
        guidance = guidance_of(clip.sampling, stage)
        if guidance is not None and not self.mesh.cfg.is_trivial:
            own = self.mesh.cfg.index
            return self.guidance.gather(self._evaluate(clip, stage, own, clip.texts[own : own + 1], inputs), guidance)
        texts = clip.texts[:1] if guidance is None else clip.texts
        batched = clip.cache is None and self._batches_texts(clip.rope)
        batches = [texts] if batched else [[handle] for handle in texts]
        parts = [self._evaluate(clip, stage, slot, batch, inputs) for slot, batch in enumerate(batches)]
        if guidance is None:
            return parts[0]
        positive, negative = parts[0].chunk(2) if batched else parts
        return self.guidance.guide(positive, negative, guidance)

    def _batches_texts(self, rope: Rope) -> bool:
        """Whether a clip of this shape runs under both its texts as one batch."""
        return self.device.name == "cpu" and rope[0].shape[0] <= BATCHED_TOKENS

    def _evaluate(
        self, clip: "_Clip", stage: str, slot: int, texts: list[TextHandle], inputs: tuple[Tensor, Tensor, Rope]
    ) -> Tensor:
        """An expert's velocity under a batch of texts, by way of the step cache where there is one."""
        if clip.cache is None:
            return self.experts.velocity(stage, slot, texts, inputs)
        latents, time, rope = inputs
        keys = self.experts.text_keys(stage, slot, texts)
        return clip.cache.velocity((stage, slot), self.experts.graphs(stage), (latents, time, keys, rope))

    def _cache(self) -> StepCache | None:
        """A fresh cache, so that no clip sees another's."""
        settings = self.options.step_cache
        return None if settings is None else StepCache(settings, self.mesh.axis("cp", "tp"))

    def _check_finite(self, latents: Tensor, step: int, stage: str, last: int) -> None:
        if self.device.name != "cpu" and (step + 1) % CHECK_EVERY and step + 1 != last:
            return
        if not torch.isfinite(latents.sum()):
            raise ModelError("nonfinite", f"latents are not finite after step {step} ({stage}-noise expert)")


def _compiled(device: Device, role: Role, module: Callable[..., Any], name: str) -> Callable[..., Any]:
    return device.compile(module, name, role)


@dataclass(frozen=True, slots=True)
class _Clip:
    """What stays the same over a clip's steps."""

    sampling: Sampling
    texts: list[TextHandle]  # the prompt, the negative prompt
    rope: tuple[Tensor, Tensor]
    solver: Solver
    condition: Condition
    cache: StepCache | None = None


def guidance_of(sampling: Sampling, stage: str) -> float | None:
    """The factor of a step of a stage, or None when only the prompt runs."""
    high, low = sampling.guidance_high, sampling.guidance_low
    if stage == LOW:
        return low if high > 1 or low > 1 else None
    return high if high > 1 else None


__all__ = ["Experts", "PipelineOptions", "Sampling", "WanPipeline"]

"""Every component of a Wan pipeline as the ranks of a mesh trace it, by its sizes alone."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from models.parallel.context import TokenSplit
from models.parallel.mesh import Mesh, single
from models.parallel.tensor import sharding
from models.umt5 import parallelize as umt5
from models.umt5.model import Umt5Encoder
from models.umt5.spec import MAX_TOKENS, Umt5Spec
from models.vae.model import Cut, Decoder, Encoder, Memory
from models.vae.spec import VaeSpec
from models.vae.strips import Plan, make_plan
from models.wan import parallelize as wan
from models.wan.graphs import ExpertGraphs, GatherAndGuide, Guide
from models.wan.model import Rope, WanTransformer
from models.wan.spec import TransformerSpec, WanSpec
from models.wan.weights import parameter_dtype
from tests.full_size.trace import DEVICE, Graph, Recorder, empty_weights, fake_buffers, fake_tensors

HALF = torch.bfloat16
empty = partial(torch.empty, device=DEVICE)


@dataclass(frozen=True, slots=True)
class Way:
    """How the DiT computes. attention: ring, gather, or bound (a ring by the constant bound, what NKI kernels run)."""

    attention: str = "bound"
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """One bucket: px and frames."""

    width: int
    height: int
    num_frames: int = 81


SIZES = {"480p": Size(832, 480), "720p": Size(1280, 720)}


def fake_expert(spec: TransformerSpec, mesh: Mesh, way: Way = Way()) -> WanTransformer:
    """One rank's part of an expert, with fake weights in bfloat16 (parts of it float32, as in `load_transformer`)."""
    with torch.device("meta"):
        model = WanTransformer(spec)
    empty_weights(model, partial(parameter_dtype, dtype=HALF), sharding(wan.PLAN, mesh.tp))
    attention = "ring" if way.attention == "bound" else way.attention
    wan.parallelize(model, mesh, attention=attention, sequence_parallel=way.sequence_parallel)
    if way.attention == "bound" and not mesh.cp.is_trivial:
        tokens = model.tokens
        assert isinstance(tokens, TokenSplit)
        wan.bound_attention(model, tokens, mesh)
        model.settle = lambda evaluate: evaluate()  # the host reads counts there; fake tensors have none
    fake_buffers(model)
    return model


def inputs(spec: WanSpec, size: Size, num_times: int = 1) -> tuple[torch.Tensor, torch.Tensor, Rope]:
    """Latents, timestep and rotary tables of a bucket."""
    _, *latent = spec.latent_shape(size.width, size.height, size.num_frames)
    tokens = spec.num_tokens(size.width, size.height, size.num_frames)
    table = (tokens, spec.transformer.attention_head_dim // 2)
    latents = empty(1, spec.transformer.in_channels, *latent)
    return latents, empty(num_times), (empty(table), empty(table))


def text_rows(spec: WanSpec) -> torch.Tensor:
    """A text at full length."""
    return empty(1, MAX_TOKENS, spec.transformer.text_dim, dtype=HALF)


def trace_model(
    spec: WanSpec,
    size: Size,
    mesh: Mesh,
    way: Way = Way(),
    names: tuple[str, ...] = ("first", "steady"),
    lower: bool = True,
) -> list[Graph]:
    """Whole-model graphs of an expert: the first step, which returns the text's keys, and the steady one."""
    recorder = Recorder(mesh, lower)
    with fake_tensors():
        graphs = ExpertGraphs(fake_expert(spec.transformer, mesh, way), recorder.compile, "model")
        latents, time, rope = inputs(spec, size)
        if "first" in names:
            _, keys = graphs.first(latents, time, text_rows(spec), 0, rope)
        else:
            keys = graphs.model.text_keys(text_rows(spec))
        if "steady" in names:
            graphs.steady(latents, time, keys, rope)
    return recorder.graphs


def trace_blocks(spec: WanSpec, size: Size, mesh: Mesh, way: Way = Way(), num_times: int = 1) -> list[Graph]:
    """The graphs of `--compile block`, in order: keys, begin, the first block, all other blocks, end."""
    recorder = Recorder(mesh)
    with fake_tensors():
        graphs = ExpertGraphs(fake_expert(spec.transformer, mesh, way), recorder.compile, "block")
        latents, time, rope = inputs(spec, size, num_times)
        graphs.first(latents, time, text_rows(spec), 0, rope)
    return recorder.graphs


def trace_guidance(spec: WanSpec, size: Size, mesh: Mesh) -> list[Graph]:
    """Guidance on its own: of both branches of one rank, and over the guidance axis."""
    recorder = Recorder(mesh)
    with fake_tensors():
        shape = (1, *spec.latent_shape(size.width, size.height, size.num_frames))
        own, factor = empty(shape), empty(1)
        if mesh.cfg.is_trivial:
            recorder.compile(Guide(), "guide")(own, empty(shape), factor)
        else:
            guide = GatherAndGuide(mesh.cfg)
            fake_buffers(guide)
            recorder.compile(guide, "gather_guide")(own, factor)
    return recorder.graphs


def trace_text(spec: Umt5Spec, mesh: Mesh) -> list[Graph]:
    """The text encoder over the largest axis that divides it, at full length with a mask."""
    axis = umt5.largest_axis(spec, mesh)
    recorder = Recorder(mesh)
    with fake_tensors():
        with torch.device("meta"):
            model = Umt5Encoder(spec)
        empty_weights(model, lambda _name: HALF, sharding(umt5.PLAN, axis))
        umt5.parallelize(model, axis)
        buckets = empty(MAX_TOKENS, MAX_TOKENS, dtype=torch.int32)
        ids, mask = empty(1, MAX_TOKENS, dtype=torch.int32), empty(1, MAX_TOKENS, dtype=torch.bool)
        recorder.compile(model, "encoder")(ids, mask, buckets)
    return recorder.graphs


def strip_kinds(plan: Plan) -> dict[tuple[object, ...], list[int]]:
    """Strips that share a graph, by what they are: sides inside the frame and lines."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, strip in enumerate(plan.strips):
        kinds.setdefault((strip.low, strip.high, strip.stop - strip.start), []).append(index)
    return kinds


def trace_decoder(spec: VaeSpec, size: Size, dtype: torch.dtype = HALF, kinds: slice = slice(None)) -> list[Graph]:
    """The decoder's graphs: front, then the rear of each kind of strip; each for a clip's first call and later ones.

    kinds: which of `strip_kinds`.
    """
    recorder = Recorder(single())
    plan = make_plan(spec, size.height // spec.scale_spatial, size.width // spec.scale_spatial)
    with fake_tensors():
        with torch.device("meta"):
            decoder = Decoder(spec)
        empty_weights(decoder, lambda _name: dtype, lambda _name: None)
        front = recorder.compile(decoder.front, "front")
        rear = recorder.compile(decoder.rear, "rear")
        features: list[torch.Tensor] = []
        caches = None
        for frames in (1, plan.frames_per_call):
            memory = Memory(caches)
            features.append(front(empty(1, spec.z_dim, frames, plan.height, plan.width, dtype=dtype), memory))
            caches = memory.new
        for indices in list(strip_kinds(plan).values())[kinds]:
            strip = plan.strips[indices[0]]
            cut, caches = Cut(plan.dim, strip.low, strip.high, plan.reach.excess), None
            for given in features:
                memory = Memory(caches)
                rear(given.narrow(plan.dim, strip.start, strip.stop - strip.start), memory, cut)
                caches = memory.new
    return recorder.graphs


def trace_encoder(spec: VaeSpec, size: Size, dtype: torch.dtype = HALF) -> list[Graph]:
    """The image encoder's graphs: a clip's first frame, and the next four."""
    recorder = Recorder(single())
    with fake_tensors():
        with torch.device("meta"):
            encoder = Encoder(spec)
        empty_weights(encoder, lambda _name: dtype, lambda _name: None)
        graph = recorder.compile(encoder, "encoder")
        caches = None
        for frames in (1, spec.scale_temporal):
            memory = Memory(caches)
            graph(empty(1, 3, frames, size.height, size.width, dtype=dtype), memory)
            caches = memory.new
    return recorder.graphs


def shallow(spec: WanSpec, num_layers: int = 2) -> WanSpec:
    """The same model with fewer layers; text encoder too."""
    text = replace(spec.text_encoder, num_layers=num_layers)
    return replace(spec, transformer=replace(spec.transformer, num_layers=num_layers), text_encoder=text)

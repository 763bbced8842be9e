"""Bytes that one rank holds, by part. What no size tells (compiler scratch, code, DMA rings) stands in `ADDERS`.

A rank's peak is what it always holds plus the larger of its two stages: denoising, or decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

from batch_gen.errors import MemoryTooSmall
from batch_gen.estimate.decoding import COPIES, REMEMBERED, strip_bytes, strip_plan
from batch_gen.estimate.machines import Kind, Machine
from batch_gen.estimate.subject import Clips, Subject
from batch_gen.estimate.work import decoder_parameters, encoder_parameters, num_tokens
from models.parallel.layout import GATHER_LIMIT_BYTES, Degrees
from models.vae.spec import VaeSpec

Stage = Literal["always", "denoise", "decode"]
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
SOLVER_STATES: Final = 5  # latents, noise, two earlier model outputs, the guided velocity
GATHERED_COPIES: Final = 2  # the blocks as they arrive, and their concatenation
RING_BLOCKS: Final = 3  # own, held, arriving


@dataclass(frozen=True, slots=True)
class Adder:
    """Memory that no tensor's size explains.

    Args:
        name: what it is.
        num_bytes: for each rank, or for each DiT graph that is resident (`per`).
        per: `rank` or `graph`.
        stage: when it is held.
        kind: the machines that have it.
        source: where the figure comes from.
    """

    name: str
    num_bytes: float
    per: Literal["rank", "graph"]
    stage: Stage
    kind: Kind
    source: str


ADDERS: Final = (
    Adder(
        "DMA rings", 3.7e9, "graph", "always", "neuron",
        "measured by others at 720p, tp=4,cp=8,cfg=2 (fork of vllm-omni-neuron): 3.7 GB a resident DiT graph",
    ),
    Adder("code and runtime", 0.55e9, "rank", "always", "neuron", "measured by them: 0.55 GB"),
    Adder(
        "compiler scratch", 0.37e9, "rank", "denoise", "neuron",
        "1.5 GB of scratch measured by them, less the activations, gathered keys and latents counted here",
    ),
    Adder("context and libraries", 0.6e9, "rank", "always", "cuda", "usual size of a CUDA context with its libraries"),
    Adder("Python and torch", 0.4e9, "rank", "always", "cpu", "measured: a rank process before it loads weights"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """How a replica's work is spread.

    Args:
        degrees: its mesh.
        attention: as in the setting: `ring`, `gather` or `auto`.
        dtype: of the transformer and the text encoder.
        vae_dtype: of the autoencoder.
        fp8: whether the linear layers of the blocks hold one byte a weight.
        replicas: on the machine; they share a CPU's cores and memory.
        swap: whether only the expert in use is in memory.
    """

    degrees: Degrees
    attention: str = "auto"
    dtype: str = "bfloat16"
    vae_dtype: str = "bfloat16"
    fp8: bool = False
    replicas: int = 1
    swap: bool = False

    def resident(self, subject: Subject) -> int:
        """Experts that a rank holds at once."""
        return 1 if self.swap else subject.wan.num_experts

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.degrees.size * self.replicas

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    def attention_of(self, gathered_bytes: float) -> str:
        """`auto` decided as the ranks decide it."""
        if self.attention != "auto":
            return self.attention
        return "gather" if gathered_bytes <= GATHER_LIMIT_BYTES else "ring"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a rank's memory."""

    name: str
    num_bytes: float
    stage: Stage
    source: str = "from sizes"


@dataclass(frozen=True, slots=True)
class Footprint:
    """All parts of one rank, for one shape."""

    parts: tuple[Part, ...]
    limit_bytes: float

    def stage_bytes(self, stage: Stage) -> float:
        """Sum of one stage's parts."""
        return sum(part.num_bytes for part in self.parts if part.stage == stage)

    @property
    def peak_bytes(self) -> float:
        """What is always held plus the larger stage."""
        return self.stage_bytes("always") + max(self.stage_bytes("denoise"), self.stage_bytes("decode"))

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the limit."""
        return self.peak_bytes <= self.limit_bytes


def footprint(
    subject: Subject, clips: Clips, placement: Placement, machine: Machine, adders: Sequence[Adder] = ADDERS
) -> Footprint:
    """Memory of the fullest rank (rank 0, which also decodes) for clips of one shape."""
    parts = [*weights(subject, clips, placement), *_denoise(subject, clips, placement)]
    parts += _decode(subject.vae, clips, placement)
    for adder in adders:
        if adder.kind == machine.kind:
            # nobody has measured that a swap gives the rings of the other expert's graph back
            times = subject.wan.num_experts if adder.per == "graph" else 1
            parts.append(Part(adder.name, adder.num_bytes * times, adder.stage, adder.source))
    return Footprint(tuple(parts), machine.rank_bytes(placement.num_ranks))


def check_fits(name: str, found: Footprint, placement: Placement, *, ignore: bool, way_out: str | None = None) -> None:
    """Raise MemoryTooSmall, with the largest parts and what to try, unless it fits or nobody wants to know."""
    if found.fits or ignore:
        return
    largest = sorted(found.parts, key=lambda part: -part.num_bytes)[:3]
    shown = ", ".join(f"{part.name} {part.num_bytes / 1e9:.2f}" for part in largest)
    raise MemoryTooSmall(
        f"{name} on mesh {placement.degrees}: a rank needs {found.peak_bytes / 1e9:.2f}e9 bytes and has "
        f"{found.limit_bytes / 1e9:.2f}e9 (largest: {shown}); "
        f"{way_out or _other_mesh(placement)}"
    )


def _other_mesh(placement: Placement) -> str:
    other = "--attention ring, " if placement.attention == "gather" and placement.degrees.cp > 1 else ""
    return f"try {other}--mesh auto, or a larger tp"


def weights(subject: Subject, clips: Clips, placement: Placement) -> list[Part]:
    """Weights of one rank: experts over tp, the text encoder over what divides it, the autoencoder whole."""
    wan, size = subject.wan, placement.dtype_bytes
    vae_size = DTYPE_BYTES[placement.vae_dtype]
    split, whole, how = _transformer_bytes(subject, placement)
    text_ranks = text_degree(subject, placement.degrees)
    vae = vae_parameters(subject.vae, encoder=clips.bucket.conditioning != "text")
    return [
        Part(
            "weights: DiT",
            placement.resident(subject) * (split / placement.degrees.tp + whole),
            "always",
            f"{placement.resident(subject)} x {wan.transformer.num_parameters:,} parameters x {how} / tp; of each "
            f"expert {whole / 1e6:.1f} MB on every rank",
        ),
        Part(
            "weights: text",
            wan.text_encoder.num_parameters * size / text_ranks,
            "always",
            f"{wan.text_encoder.num_parameters:,} parameters x {size} B / {text_ranks} ranks",
        ),
        Part("weights: VAE", vae * vae_size, "always", f"{vae:,.0f} parameters x {vae_size} B, whole"),
    ]


def _transformer_bytes(subject: Subject, placement: Placement) -> tuple[float, float, str]:
    """Bytes of one expert that tensor parallelism splits, bytes that it does not, and how they are counted."""
    spec, size = subject.wan.transformer, placement.dtype_bytes
    whole32, split32 = spec.num_whole_float32_parameters, spec.num_split_float32_parameters
    whole = (spec.num_whole_parameters - whole32) * size + whole32 * 4
    num_split = spec.num_parameters - spec.num_whole_parameters - split32
    if not placement.fp8:
        return num_split * size + split32 * 4, whole, f"{size} B"
    converted = spec.num_layers * (8 * spec.width * spec.width + 2 * spec.width * spec.ffn_dim)
    scales = spec.num_layers * (9 * spec.width + spec.ffn_dim) * 4
    split = converted + scales + (num_split - converted) * size + split32 * 4
    return split, whole, f"1 B in blocks, {size} B elsewhere"


def text_degree(subject: Subject, degrees: Degrees) -> int:
    """Ranks that share the text encoder, as models/umt5/parallelize.py chooses them."""
    spec = subject.wan.text_encoder
    sizes = {1}
    for count in (1, 2, 3):
        for chosen in combinations(degrees.shape, count):
            product = 1
            for degree in chosen:
                product *= degree
            sizes.add(product)
    return max(size for size in sizes if not any(n % size for n in (spec.num_heads, spec.d_ff, spec.d_model)))


def gathered_bytes(subject: Subject, tokens: int, placement: Placement) -> float:
    """Keys and values of one layer for all tokens, heads of one rank."""
    local = -(-tokens // placement.degrees.cp)
    width = subject.wan.transformer.width / placement.degrees.tp
    return 2 * local * placement.degrees.cp * width * placement.dtype_bytes


def _denoise(subject: Subject, clips: Clips, placement: Placement) -> list[Part]:
    wan, degrees, size = subject.wan, placement.degrees, placement.dtype_bytes
    tokens = num_tokens(subject, clips.bucket)
    local = -(-tokens // degrees.cp)
    contexts = clips.num_passes if degrees.cfg == 1 else 1
    layers, width = wan.transformer.num_layers, wan.transformer.width
    held = placement.resident(subject) * contexts
    text = 2 * wan.max_tokens * (width / degrees.tp) * layers * held * size
    latents = SOLVER_STATES * 4
    for extent in wan.latent_shape(clips.bucket.width, clips.bucket.height, clips.bucket.num_frames):
        latents *= extent
    return [
        Part("K/V of the text", text, "always", "512 tokens, every layer and expert, once a prompt; split over tp"),
        Part(
            "activations",
            local * size * (2 * width + max(4 * width, 2 * wan.transformer.ffn_dim) / degrees.tp),
            "denoise",
            f"{local:,} tokens: stream and norm whole, the widest sublayer over tp",
        ),
        _key_values(gathered_bytes(subject, tokens, placement), placement),
        Part("latents", float(latents), "denoise", f"float32, {SOLVER_STATES} copies: solver history, noise, velocity"),
    ]


def _key_values(gathered: float, placement: Placement) -> Part:
    cp = placement.degrees.cp
    if cp == 1:
        return Part("K/V gathered or in flight", 0.0, "denoise", "cp=1: none")
    kind = placement.attention_of(gathered)
    if kind == "gather":
        text = f"gather: {GATHERED_COPIES} copies of one layer's keys and values of all tokens"
        return Part("K/V gathered or in flight", GATHERED_COPIES * gathered, "denoise", text)
    text = f"ring: {RING_BLOCKS} blocks of one layer's keys and values"
    return Part("K/V gathered or in flight", RING_BLOCKS * gathered / cp, "denoise", text)


def vae_parameters(spec: VaeSpec, *, encoder: bool) -> float:
    """Parameters of the decoder's convolutions, and of the encoder's where images condition; norms left out."""
    return decoder_parameters(spec) + (encoder_parameters(spec) if encoder else 0)


def _decode(spec: VaeSpec, clips: Clips, placement: Placement) -> list[Part]:
    dtype = placement.vae_dtype
    found = strip_bytes(spec, clips.bucket, placement.degrees.size, DTYPE_BYTES[dtype])
    strips = len(strip_plan(spec, clips.bucket).strips)
    return [
        Part("VAE strip", found["widest"], "decode", f"{dtype}: the widest convolution of one call, {COPIES} copies"),
        Part(
            "VAE memory, strips", found["strips"], "decode",
            f"{REMEMBERED} frames of each convolution's input, {found['held']:.0f} of {strips} strips a rank",
        ),
        Part("VAE memory, front", found["front"], "decode", "the same of the part that sees the whole frame"),
    ]  # fmt: skip

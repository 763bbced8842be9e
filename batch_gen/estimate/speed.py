"""Seconds of a clip from a roofline: arithmetic at a share of its peak, plus communication that nothing hides.

The share (`efficiency`) is solved once from the only public measurement of the model on the machine, then used for
every other mesh, shape and model: `seconds = work / (efficiency * peak) + exposed communication`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from batch_gen.estimate.decoding import speed_up
from batch_gen.estimate.machines import CUDA, TRN2, Machine
from batch_gen.estimate.memory import Placement, gathered_bytes, text_degree
from batch_gen.estimate.subject import Clips, Subject, published
from batch_gen.estimate.work import (
    decode_work,
    denoise_work,
    encode_work,
    forward_work,
    num_tokens,
    text_work,
)
from batch_gen.request import Bucket
from models.parallel.layout import Degrees

SUMS_PER_LAYER: Final = 3
"""Row-parallel outputs of a block: self-attention, cross-attention, feed-forward."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A public measurement that an efficiency is solved from."""

    name: str
    seconds: float
    model: str
    clips: Clips
    degrees: Degrees
    attention: str
    machine: Machine
    vae_dtype: str
    source: str


T2V_720P: Final = Clips(Bucket(1280, 720, 81, "text"), 40)
MEASURED: Final = {
    "neuron": Measurement(
        "T2V-A14B 1280x720x81, 40 steps, tp=8,cp=4,cfg=2, gathered keys and values", 157.8, "wan2.2-t2v-a14b",
        T2V_720P, Degrees(8, 4, 2), "gather", TRN2, "bfloat16",
        "model card of a public fork of vllm-omni-neuron, warm, bfloat16",
    ),
    "cuda": Measurement(
        "T2V-A14B 832x480x81, 50 steps, one H200", 264.13, "wan2.2-t2v-a14b",
        Clips(Bucket(832, 480, 81, "text"), 50), Degrees(), "auto", CUDA, "float32",
        "sglang pull request 25483, bfloat16",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine really gives.

    Args:
        efficiency: share of its arithmetic peak.
        link: share of its link speed.
    """

    efficiency: float
    link: float = 1.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the seconds of one clip go; `exposed` is communication that nothing hides."""

    text: float
    encode: float
    denoise: float
    exposed: float
    decode: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.text + self.encode + self.denoise + self.exposed + self.decode


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends or receives in one evaluation of the DiT, with the hops that it waits for."""

    sums_bytes: float
    sums_hops: float
    keys_bytes: float
    keys_hops: float
    is_ring: bool


def traffic(subject: Subject, clips: Clips, placement: Placement) -> Traffic:
    """Bytes by the volumes of ring algorithms: 2 (n - 1) / n for a sum, (n - 1) / n for a gather."""
    spec, degrees = subject.wan.transformer, placement.degrees
    tokens = num_tokens(subject, clips.bucket)
    local = -(-tokens // degrees.cp)
    one_sum = local * spec.width * placement.dtype_bytes
    sums = SUMS_PER_LAYER * spec.num_layers
    gathered = gathered_bytes(subject, tokens, placement)
    return Traffic(
        sums_bytes=sums * one_sum * 2 * (degrees.tp - 1) / degrees.tp,
        sums_hops=sums * 2 * (degrees.tp - 1),
        keys_bytes=spec.num_layers * gathered * (degrees.cp - 1) / degrees.cp,
        keys_hops=spec.num_layers * (degrees.cp - 1),
        is_ring=degrees.cp > 1 and placement.attention_of(gathered) == "ring",
    )


def ideal_denoise_s(subject: Subject, clips: Clips, placement: Placement, machine: Machine) -> float:
    """Denoising at the arithmetic peak, without communication. With cfg=2 and no guidance half the ranks idle."""
    degrees = placement.degrees
    branches = min(degrees.cfg, clips.num_passes)
    ranks = degrees.tp * degrees.cp * branches
    return denoise_work(subject, clips) / (ranks * machine.rank_flops(placement.dtype, placement.num_ranks))


def clip_seconds(subject: Subject, clips: Clips, placement: Placement, machine: Machine, rates: Rates) -> Seconds:
    """Seconds of one clip on one replica."""
    peak = machine.rank_flops(placement.dtype, placement.num_ranks) * rates.efficiency
    vae_peak = machine.rank_flops(placement.vae_dtype, placement.num_ranks) * rates.efficiency
    faster = speed_up(subject.vae, clips.bucket, placement.degrees.size)
    image = clips.bucket.conditioning != "text"
    return Seconds(
        text=clips.num_passes * text_work(subject) / (peak * text_degree(subject, placement.degrees)),
        encode=_encode_work(subject, clips) / vae_peak if image else 0.0,
        denoise=ideal_denoise_s(subject, clips, placement, machine) / rates.efficiency,
        exposed=exposed_s(subject, clips, placement, machine, rates),
        decode=decode_work(subject.vae, clips.bucket) / (vae_peak * faster),
    )


def exposed_s(subject: Subject, clips: Clips, placement: Placement, machine: Machine, rates: Rates) -> float:
    """Communication of all steps that no arithmetic hides: sums, gathered keys, what a ring cannot hide, guidance."""
    degrees = placement.degrees
    link = machine.link_bytes_per_s * rates.link
    moved = traffic(subject, clips, placement)
    sums = moved.sums_bytes / link + moved.sums_hops * machine.hop_s
    keys = moved.keys_bytes / link + moved.keys_hops * machine.hop_s
    if moved.is_ring:
        work = forward_work(subject, num_tokens(subject, clips.bucket)).attention / (degrees.tp * degrees.cp)
        keys = max(0.0, keys - work / (machine.rank_flops(placement.dtype, placement.num_ranks) * rates.efficiency))
    passes = clips.num_passes if degrees.cfg == 1 else 1
    latents = 4.0
    for extent in subject.wan.latent_shape(clips.bucket.width, clips.bucket.height, clips.bucket.num_frames):
        latents *= extent
    ends = (degrees.cfg - 1 + (degrees.cp - 1) / degrees.cp) * latents / link
    return clips.steps * (passes * (sums + keys) + ends)


@cache
def efficiency(kind: str) -> float:
    """The share of the peak that meets the measurement of this kind of machine; 1 where there is none (CPU)."""
    found = MEASURED.get(kind)
    if found is None:
        return 1.0
    subject = published(found.model)
    placement = Placement(found.degrees, found.attention, vae_dtype=found.vae_dtype)
    ideal = clip_seconds(subject, found.clips, placement, found.machine, Rates(1.0))
    # a gather is exposed whatever the efficiency, so the equation is linear in 1 / efficiency
    return (ideal.total - ideal.exposed) / (found.seconds - ideal.exposed)


def _encode_work(subject: Subject, clips: Clips) -> float:
    """A whole clip where the condition is channels beside the noise (I2V-A14B), one frame where it is latents (5B)."""
    frames = 1 if subject.has_own_first_time(clips.bucket) else clips.bucket.num_frames
    return encode_work(subject.vae, replace(clips.bucket, num_frames=frames))

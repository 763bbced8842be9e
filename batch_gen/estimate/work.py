"""Floating-point operations of each stage of a clip, from sizes alone; a multiply and an add are two.

The DiT's counts agree with torch's FlopCounterMode (tests/batch_gen/test_estimate_work.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from batch_gen.estimate.subject import Clips, Subject
from batch_gen.request import Bucket
from models.vae.spec import VaeSpec

_ANY = Bucket(64, 64, 5, "text")  # parameters do not depend on the shape


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """One evaluation of one expert for one prompt."""

    attention: float
    linear: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.attention + self.linear


def num_tokens(subject: Subject, bucket: Bucket) -> int:
    """Tokens of a clip inside the DiT."""
    return subject.wan.num_tokens(bucket.width, bucket.height, bucket.num_frames)


def forward_work(subject: Subject, tokens: int, num_times: int = 1) -> ForwardWork:
    """One evaluation; the keys and values of the text are made once a clip (`text_keys_work`) and not counted here."""
    spec = subject.wan.transformer
    width, text, patch = spec.width, subject.wan.max_tokens, prod(spec.patch_size)
    self_attention = 4 * tokens * tokens * width
    cross_attention = 4 * tokens * text * width
    layer = 2 * tokens * (4 * width * width + 2 * width * width + 2 * width * spec.ffn_dim)
    ends = 2 * tokens * width * patch * (spec.in_channels + spec.out_channels)
    once = 2 * (num_times * (spec.freq_dim * width + 7 * width * width) + text * width * (spec.text_dim + width))
    return ForwardWork(spec.num_layers * (self_attention + cross_attention), spec.num_layers * layer + ends + once)


def text_keys_work(subject: Subject, num_prompts: int) -> float:
    """Keys and values of the text in every layer of every expert, once a clip."""
    spec = subject.wan.transformer
    layer = 4 * subject.wan.max_tokens * spec.width * spec.width
    return float(num_prompts * subject.wan.num_experts * spec.num_layers * layer)


def denoise_work(subject: Subject, clips: Clips) -> float:
    """All steps of one clip, both branches."""
    num_times = 2 if subject.has_own_first_time(clips.bucket) else 1
    once = forward_work(subject, num_tokens(subject, clips.bucket), num_times).total
    return clips.steps * clips.num_passes * once + text_keys_work(subject, clips.num_passes)


def text_work(subject: Subject) -> float:
    """The text encoder for one prompt at full length."""
    spec, tokens = subject.wan.text_encoder, subject.wan.max_tokens
    inner = spec.num_heads * spec.d_kv
    layer = 2 * tokens * (4 * spec.d_model * inner + 3 * spec.d_model * spec.d_ff) + 4 * tokens * tokens * inner
    return float(spec.num_layers * layer)


@dataclass(frozen=True, slots=True)
class _Conv:
    """A convolution: kernel taps, channels and the places where it is evaluated."""

    taps: int
    channels: int
    out_channels: int
    places: float

    @property
    def parameters(self) -> int:
        return self.taps * self.channels * self.out_channels + self.out_channels

    @property
    def work(self) -> float:
        return 2.0 * self.taps * self.channels * self.out_channels * self.places


@cache
def decode_work(vae: VaeSpec, bucket: Bucket) -> float:
    """The decoder on a whole clip, without the halos of strips."""
    return sum(conv.work for conv in _decoder(vae, bucket)) + _middle_attention(vae, bucket, "decoder")


@cache
def encode_work(vae: VaeSpec, bucket: Bucket) -> float:
    """The encoder on a clip of the bucket's shape, which image conditioning fills up with zeros."""
    return sum(conv.work for conv in _encoder(vae, bucket)) + _middle_attention(vae, bucket, "encoder")


@cache
def decoder_parameters(spec: VaeSpec) -> int:
    """Parameters of the decoder's convolutions; its norms are too few to count."""
    return sum(conv.parameters for conv in _decoder(spec, _ANY))


@cache
def encoder_parameters(spec: VaeSpec) -> int:
    """Parameters of the encoder's convolutions."""
    return sum(conv.parameters for conv in _encoder(spec, _ANY))


def _decoder(spec: VaeSpec, bucket: Bucket) -> Iterator[_Conv]:
    frames, area = _latent(spec, bucket)
    dims = [spec.decoder_base_dim * m for m in (spec.dim_mult[-1], *spec.dim_mult[::-1])]
    yield _Conv(27, spec.z_dim, dims[0], frames * area)
    yield from _middle(dims[0], frames * area)
    for index, out in enumerate(dims[1:]):
        width = dims[index] // 2 if index > 0 and not spec.is_residual else dims[index]
        yield from _resnets(width, out, spec.num_res_blocks + 1, frames * area)
        if index == len(dims) - 2:
            break
        if spec.temporal_downsample[::-1][index]:
            yield _Conv(3, out, 2 * out, frames * area)
            frames = 2 * frames - 1
        area *= 4
        yield _Conv(9, out, out if spec.is_residual else out // 2, frames * area)
    yield _Conv(27, dims[-1], spec.out_channels, frames * area)


def _encoder(spec: VaeSpec, bucket: Bucket) -> Iterator[_Conv]:
    frames, area = bucket.num_frames, bucket.width * bucket.height / spec.patch_size**2
    dims = [spec.base_dim * m for m in (1, *spec.dim_mult)]
    yield _Conv(27, spec.in_channels, dims[0], frames * area)
    for index, out in enumerate(dims[1:]):
        yield from _resnets(dims[index], out, spec.num_res_blocks, frames * area)
        if index == len(dims) - 2:
            break
        area /= 4
        yield _Conv(9, out, out, frames * area)
        if spec.temporal_downsample[index]:
            frames = (frames - 1) // 2 + 1
            yield _Conv(3, out, out, frames * area)
    yield from _middle(dims[-1], frames * area)
    yield _Conv(27, dims[-1], 2 * spec.z_dim, frames * area)


def _resnets(width: int, out: int, count: int, places: float) -> Iterator[_Conv]:
    for _ in range(count):
        yield _Conv(27, width, out, places)
        yield _Conv(27, out, out, places)
        if width != out:
            yield _Conv(1, width, out, places)
        width = out


def _middle(width: int, places: float) -> Iterator[_Conv]:
    for _ in range(4):
        yield _Conv(27, width, width, places)
    yield _Conv(1, width, 4 * width, places)


def _middle_attention(spec: VaeSpec, bucket: Bucket, part: str) -> float:
    """Attention inside each latent frame."""
    base = spec.decoder_base_dim if part == "decoder" else spec.base_dim
    frames, area = _latent(spec, bucket)
    return 4.0 * frames * area * area * base * spec.dim_mult[-1]


def _latent(spec: VaeSpec, bucket: Bucket) -> tuple[int, float]:
    frames = (bucket.num_frames - 1) // spec.scale_temporal + 1
    return frames, bucket.width * bucket.height / spec.scale_spatial**2

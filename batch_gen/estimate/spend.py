"""What a whole manifest takes: hours, money, compilations, bytes and requests of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from batch_gen.estimate.machines import Machine
from batch_gen.estimate.ranking import Choice, Question
from batch_gen.estimate.subject import Subject
from batch_gen.request import Bucket

LOAD_S: Final = 300.0
LOAD_NOTE: Final = "from process start to the first step with compiled graphs: 5 min (vLLM-Neuron servers take 5 to 10)"
COMPILE_S: Final = 45 * 60.0
COMPILE_NOTE: Final = "45 min a bucket without a cache (the plugin's own comment says 40 to 50 at 480p and 720p)"
BITS_PER_PIXEL: Final = {"h264": 0.12, "h265_10bit": 0.09, "x264_lossless": 6.0, "ffv1": 9.0}
FILE_BYTES: Final = 2_300  # boxes and the encoder's own words, measured on 17 frames
RECORD_BYTES: Final = 6_000
GET_BLOCK_BYTES: Final = 16 << 20
RENEWALS_PER_TTL: Final = 3
PUT_USD: Final = 0.005 / 1000
GET_USD: Final = 0.0004 / 1000
REQUEST_NOTE: Final = "us-east-1 list prices of S3 Standard: 0.005 USD for 1,000 PUT, 0.0004 for 1,000 GET"
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Price:
    """USD for an hour of the machine, and where that comes from."""

    per_hour: float
    note: str


def price_of(machine: Machine, given: float | None) -> Price | None:
    """The price that was given, else the machine's own with its date; None where neither is known."""
    if given is not None:
        return Price(given, "from --price-per-hour")
    return None if machine.price_per_hour is None else Price(machine.price_per_hour, machine.price_note)


def checkpoint_bytes(subject: Subject, dtype_bytes: int) -> int:
    """Bytes of weights that every machine fetches once."""
    wan = subject.wan
    count = wan.num_experts * wan.transformer.num_parameters + wan.text_encoder.num_parameters
    return count * dtype_bytes


def variants_of(question: Question) -> set[tuple[Bucket, bool]]:
    """Shapes with and without guidance: what batch_gen/graphs/keys.py compiles graphs for."""
    return {(clips.bucket, clips.guided) for clips in question.all_clips}


def spend(
    question: Question, choice: Choice, price: Price | None, *, num_chunks: int, codec: str, lease_ttl_s: float
) -> dict[str, Any]:
    """Totals for the manifest on one machine, as JSON values; more machines divide the time, not the money."""
    count, neuron = question.num_clips, question.machine.kind == "neuron"
    # a clip is never shared by replicas: one clip takes four of them as long as one
    render_s = -(-count // choice.replicas) * choice.seconds_per_clip
    variants = variants_of(question)
    hours = (render_s + LOAD_S) / 3600 if neuron else render_s / 3600
    return {
        "machine_hours": hours,
        "clips_per_day": choice.replicas * DAY_S / choice.seconds_per_clip,
        "cost_usd": None if price is None else hours * price.per_hour,
        "cost_per_clip_usd": None if price is None else hours * price.per_hour / count,
        "price_per_hour": None if price is None else price.per_hour,
        "price_note": None if price is None else price.note,
        "buckets": sorted({str(bucket) for bucket, _ in variants}),
        "graph_sets": len(variants),
        "compile_s": len(variants) * COMPILE_S if neuron else 0.0,
        "store": _store(question, render_s, num_chunks, codec, lease_ttl_s),
    }


def _store(question: Question, render_s: float, num_chunks: int, codec: str, ttl_s: float) -> dict[str, Any]:
    """Files, records, leases and parts of the run; the checkpoint if it lies on S3, once for each machine."""
    pixels = sum(c.count * c.bucket.width * c.bucket.height * c.bucket.num_frames for c in question.all_clips)
    count = question.num_clips
    weights = checkpoint_bytes(question.subject, 2 if question.dtype == "bfloat16" else 4)
    # a clip: its file, its record, its attempt in the lease; a chunk: claim, release, done, metrics; renewals by time
    puts = 3 * count + 4 * num_chunks + int(render_s * RENEWALS_PER_TTL / ttl_s)
    gets = 2 * num_chunks + weights // GET_BLOCK_BYTES + 1
    return {
        "file_bytes": int(pixels * BITS_PER_PIXEL[codec] / 8) + count * FILE_BYTES,
        "record_bytes": count * RECORD_BYTES,
        "weights_bytes": weights,
        "put_requests": puts,
        "get_requests": gets,
        "requests_usd": puts * PUT_USD + gets * GET_USD,
    }

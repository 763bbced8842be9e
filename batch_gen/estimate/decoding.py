"""The decoder's memory and how far many ranks speed it up, from its own plan of strips (models/vae/strips.py)."""

from __future__ import annotations

from typing import Final

from batch_gen.request import Bucket
from models.vae.spec import VaeSpec
from models.vae.strips import FRONT_SCALE, Plan, make_plan

COPIES: Final = 3  # input, padded input, output of the widest convolution
REMEMBERED: Final = 2  # frames of its input that each convolution keeps
SPOILT: Final = (7, 10)  # lines beside a strip's own that are still needed at full and at half size


def strip_plan(spec: VaeSpec, bucket: Bucket) -> Plan:
    """The strips of this shape."""
    return make_plan(spec, bucket.height // spec.scale_spatial, bucket.width // spec.scale_spatial)


def speed_up(spec: VaeSpec, bucket: Bucket, num_ranks: int) -> float:
    """How many times faster than one untiled decode; halos and the part that every rank repeats are in it."""
    return strip_plan(spec, bucket).speed_up(num_ranks)


def strip_bytes(spec: VaeSpec, bucket: Bucket, num_ranks: int, dtype_bytes: int) -> dict[str, float]:
    """Bytes of the fullest rank: one call's widest tensors, what its strips remember, what the front remembers."""
    plan = strip_plan(spec, bucket)
    held = max(len(share) for share in plan.shares(num_ranks))
    across = FRONT_SCALE * min(plan.height, plan.width)
    own = max(strip.keep for strip in plan.strips) / spec.patch_size
    features = max(strip.stop - strip.start for strip in plan.strips)
    base = spec.decoder_base_dim * dtype_bytes
    # one frame of a strip at full, half and quarter size, where it has one, two and four times the channels
    full = base * min(own + 2 * SPOILT[0], 4 * features) * 4 * across
    half = 2 * base * min(own / 2 + 2 * SPOILT[1], 2 * features) * 2 * across
    quarter = 4 * base * features * across
    block = 2 * (spec.num_res_blocks + 1)
    strip = REMEMBERED * ((block + 1) * full + block * half + (block + 1) * quarter)
    front = REMEMBERED * (block + 5) * 4 * base * plan.height * plan.width
    frames = spec.scale_temporal * plan.frames_per_call
    return {"widest": COPIES * frames * full, "strips": held * strip, "front": front, "held": float(held)}

"""Every communication inside the DiT's graphs, by axis, from sizes alone.

The list is that of the traced graphs, entry for entry: tests/full_size and scripts/prove_full_size.py compare them.
What one rank sends follows the volumes of ring algorithms: 2 (n - 1) / n of a sum, n - 1 blocks of a gather or a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from batch_gen.estimate.memory import Placement
from batch_gen.estimate.subject import Clips, Subject
from batch_gen.estimate.work import num_tokens

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "ring"]
Way = Literal["bound", "ring", "gather"]
ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Flow:
    """One communication, as often as it occurs in one evaluation of the DiT (axis cfg: in one step).

    Args:
        kind: what it does; `ring` passes keys and values on, its shape is that of the keys.
        axis: of the mesh.
        size: ranks that take part.
        shape: what one rank puts in.
        dtype: of that.
        times: how often.
    """

    kind: Kind
    axis: str
    size: int
    shape: tuple[int, ...]
    dtype: str
    times: int

    @property
    def sent_bytes(self) -> float:
        """What one rank sends, all times together."""
        put_in = prod(self.shape) * ITEM_BYTES[self.dtype] * (2 if self.kind == "ring" else 1)
        rounds = {"all_reduce": 2 / self.size, "reduce_scatter": 1 / self.size}.get(self.kind, 1.0)
        return self.times * put_in * rounds * (self.size - 1)

    @property
    def hops(self) -> int:
        """Hops that one rank waits for, all times together."""
        return self.times * (self.size - 1) * (2 if self.kind == "all_reduce" else 1)


def local_tokens(tokens: int, placement: Placement, *, sequence_parallel: bool = False) -> int:
    """Rows of one context rank, padding included, as models/parallel/context.py deals them out."""
    parts = placement.degrees.tp if sequence_parallel else 1
    return -(-tokens // (placement.degrees.cp * parts)) * parts


def way_of(placement: Placement, gathered_bytes: float) -> Way:
    """What the ranks do on Trainium: a ring goes by the constant bound there."""
    return "bound" if placement.attention_of(gathered_bytes) == "ring" else "gather"


def flows(
    subject: Subject, clips: Clips, placement: Placement, way: Way = "bound", *, sequence_parallel: bool = False
) -> tuple[Flow, ...]:
    """The communications of one steady evaluation, and of guidance in one step."""
    found = [
        *_tensor(subject, clips, placement, sequence_parallel=sequence_parallel),
        *_context(subject, clips, placement, way, sequence_parallel=sequence_parallel),
        *_guidance(subject, clips, placement),
    ]
    return tuple(flow for flow in found if flow.size > 1)


def first_step_flows(subject: Subject, placement: Placement) -> tuple[Flow, ...]:
    """What the first step of a text has beside those: its embedding, and the norms of its keys."""
    spec, tp, rows = subject.wan.transformer, placement.degrees.tp, subject.wan.max_tokens
    found = (
        Flow("all_gather", "tp", tp, (1, 1, rows, spec.width // tp), placement.dtype, 2),
        Flow("all_reduce", "tp", tp, (1, rows), "float32", spec.num_layers),
    )
    return found if tp > 1 else ()


def _tensor(subject: Subject, clips: Clips, placement: Placement, *, sequence_parallel: bool) -> Iterator[Flow]:
    """The embedded times; norms of queries and keys over all heads; the three sums of a block (or their two halves)."""
    spec, tp = subject.wan.transformer, placement.degrees.tp
    rows = local_tokens(num_tokens(subject, clips.bucket), placement, sequence_parallel=sequence_parallel)
    layers, width, dtype = spec.num_layers, spec.width, placement.dtype
    times = 2 if subject.has_own_first_time(clips.bucket) else 1
    yield Flow("all_gather", "tp", tp, (1, times, width // tp), "float32", 1)
    yield Flow("all_gather", "tp", tp, (1, times, 6 * width // tp), dtype, 1)
    yield Flow("all_reduce", "tp", tp, (2, 1, rows), "float32", layers)
    yield Flow("all_reduce", "tp", tp, (1, rows), "float32", layers)
    if not sequence_parallel:
        yield Flow("all_reduce", "tp", tp, (1, rows, width), dtype, 3 * layers)
        return
    yield Flow("all_gather", "tp", tp, (1, 1, rows // tp, width), dtype, 3 * layers)
    yield Flow("reduce_scatter", "tp", tp, (tp, 1, rows // tp, width), dtype, 3 * layers)
    yield Flow("all_gather", "tp", tp, (1, 1, rows // tp, _patch_values(subject)), dtype, 1)


def _context(
    subject: Subject, clips: Clips, placement: Placement, way: Way, *, sequence_parallel: bool
) -> Iterator[Flow]:
    """Keys and values in each layer, the velocity once."""
    spec, degrees, dtype = subject.wan.transformer, placement.degrees, placement.dtype
    rows = local_tokens(num_tokens(subject, clips.bucket), placement, sequence_parallel=sequence_parallel)
    heads, layers = spec.num_attention_heads // degrees.tp, spec.num_layers
    keys = (1, rows, heads, spec.attention_head_dim)
    if way == "gather":
        yield Flow("all_gather", "cp", degrees.cp, (1, 2, *keys), dtype, layers)
    else:
        yield Flow("ring", "cp", degrees.cp, keys, dtype, layers)
    if way == "bound":
        yield Flow("all_reduce", "cp", degrees.cp, (1, heads), "float32", layers)
    yield Flow("all_gather", "cp", degrees.cp, (1, 1, rows, _patch_values(subject)), dtype, 1)


def _guidance(subject: Subject, clips: Clips, placement: Placement) -> Iterator[Flow]:
    """Both velocities, once a step."""
    bucket = clips.bucket
    shape = subject.wan.latent_shape(bucket.width, bucket.height, bucket.num_frames)
    yield Flow("all_gather", "cfg", placement.degrees.cfg, (1, 1, *shape), "float32", 1)


def _patch_values(subject: Subject) -> int:
    spec = subject.wan.transformer
    return prod(spec.patch_size) * spec.out_channels

"""How a frame is cut into strips that are decoded on their own, exactly. Imports no torch.

Behind the first up-block nothing in the decoder looks further than its convolutions do, so a strip of the features with
a halo of neighbouring lines gives the same pixels as the whole frame. The halo follows from the list of layers; it gets
thinner at every 3x3 convolution, so most of the work has little of it.

A line is a row of the frame or, where the frame is wider than high, a column: fewer halos per strip then. Strips are
counted in lines of the features behind the first up-block (two per latent line).

The plan is a function of (autoencoder, height, width) and nothing else, so that one rank and many do the same work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from models.vae.spec import VaeSpec

MAX_WORK = 1.35  # of the untiled decode, that a plan may cost
MIN_STRIP_MACS = 5.0e11  # multiply-adds per latent frame below which a strip is not worth its halo
MAX_CALL_VALUES = 8 << 20  # values of the largest tensor of a call, if more than one latent frame goes in
MAX_CALL_FRAMES = 4
MAX_STRIPS = 16
FRONT_SCALE = 2  # feature lines per latent line

Axis = Literal["rows", "columns"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of the rear, in order.

    macs: multiply-adds per place of its result. frames: frames of its result per latent frame. doubles: it stands
    behind a doubling of the sides. spoils: lines next to each inner side of a strip that it gets wrong.
    """

    macs: int
    frames: int
    doubles: bool = False
    spoils: int = 0


@dataclass(frozen=True, slots=True)
class Strip:
    """Feature lines [start, stop) go in; of the pixels that come out, `skip` lines are dropped and `keep` kept."""

    start: int
    stop: int
    low: bool
    high: bool
    skip: int
    keep: int
    macs: int  # per latent frame


@dataclass(frozen=True, slots=True)
class Plan:
    """What one decode of frames of one size does, whoever does it.

    height, width: of the latents. work: multiply-adds relative to the untiled decode. front: the share of them (of the
    untiled) that is not split.
    """

    spec: VaeSpec
    height: int
    width: int
    axis: Axis
    strips: tuple[Strip, ...]
    reach: "Reach"
    frames_per_call: int
    work: float
    front: float
    mode: Literal["exact", "reference"] = "exact"

    @property
    def dim(self) -> int:
        """The dim of [B, C, T, H, W] along which strips are cut."""
        return 3 if self.axis == "rows" else 4

    def shapes(self, start: int, end: int) -> list[tuple[int, int, int, int]]:
        """[frames, rows, columns, 3] of each strip's pixels for latent frames [start, end)."""
        frames = self.spec.num_frames(end) - (self.spec.num_frames(start) if start else 0)
        rows, columns = self.height * self.spec.scale_spatial, self.width * self.spec.scale_spatial
        kept = [strip.keep for strip in self.strips]
        return [(frames, keep, columns, 3) if self.axis == "rows" else (frames, rows, keep, 3) for keep in kept]

    def shares(self, num_ranks: int) -> list[list[int]]:
        """Strips of each rank: the largest first, each to the rank with the least to do."""
        loads, dealt = [0] * num_ranks, [[] for _ in range(num_ranks)]  # type: tuple[list[int], list[list[int]]]
        for index in sorted(range(len(self.strips)), key=lambda i: (-self.strips[i].macs, i)):
            rank = loads.index(min(loads))
            loads[rank] += self.strips[index].macs
            dealt[rank].append(index)
        return [sorted(indices) for indices in dealt]

    def speed_up(self, num_ranks: int) -> float:
        """Untiled work over that of the busiest rank; the front is done by every rank."""
        whole = sum(strip.macs for strip in self.strips) / (self.work - self.front)
        busiest = max(sum(self.strips[i].macs for i in share) for share in self.shares(num_ranks))
        return 1 / (self.front + busiest / whole)

    def describe(self) -> dict[str, Any]:
        """The plan for a clip's record, as JSON values; lines are feature lines."""
        return {
            "mode": self.mode,
            "axis": self.axis,
            "strips": [[strip.start, strip.stop] for strip in self.strips],
            "halo": self.reach.halo,
            "frames_per_call": self.frames_per_call,
            "work": round(self.work, 4),
        }


def rear_layers(spec: VaeSpec) -> list[Layer]:
    """The convolutions behind the first up-block, in the order in which they run."""
    dims = [spec.decoder_base_dim * m for m in (spec.dim_mult[-1], *spec.dim_mult[::-1])]
    temporal = spec.temporal_downsample[::-1]
    frames, layers = 1 + temporal[0], list[Layer]()
    for index in range(1, len(dims) - 1):
        width = dims[index] if spec.is_residual else dims[index] // 2
        out = dims[index + 1]
        layers += _resnets(width, out, spec.num_res_blocks + 1, frames)
        if index == len(temporal):
            break
        if temporal[index]:
            layers.append(Layer(3 * out * 2 * out, frames))
            frames *= 2
        narrower = out if spec.is_residual else out // 2
        layers.append(Layer(4 * out * narrower, frames, doubles=True, spoils=1))
    return [*layers, Layer(27 * dims[-1] * spec.out_channels, frames, spoils=1)]


def _resnets(width: int, out: int, count: int, frames: int) -> Iterator[Layer]:
    for _ in range(count):
        if width != out:
            yield Layer(width * out, frames)
        yield Layer(27 * width * out, frames, spoils=1)
        yield Layer(27 * out * out, frames, spoils=1)
        width = out


def front_macs(spec: VaeSpec, height: int, width: int) -> int:
    """Multiply-adds per latent frame of what needs the whole frame: from the latents through the first up-block."""
    base, places = spec.decoder_base_dim * spec.dim_mult[-1], height * width
    frames = 1 + spec.temporal_downsample[-1]
    narrower = base if spec.is_residual else base // 2
    middle = 4 * 27 * base**2 + 4 * base**2 + 2 * places * base
    block = sum(layer.macs for layer in _resnets(base, base, spec.num_res_blocks + 1, 1))
    block += (6 * base**2 if frames == 2 else 0) + 4 * frames * 4 * base * narrower
    return places * (27 * spec.z_dim * base + spec.z_dim**2 + middle + block)


@dataclass(frozen=True, slots=True)
class Reach:
    """What a strip's own pixels need beside them: `halo` feature lines, of which `excess` lines can be dropped at once
    behind each doubling (halves of a line are rounded up there).
    """

    halo: int
    excess: tuple[int, ...]


def reach(layers: Sequence[Layer]) -> Reach:
    """Follow the layers from the pixels back to the features."""
    lines, excess = 0, list[int]()
    for layer in reversed(layers):
        needed = lines + layer.spoils
        lines = -(-needed // 2) if layer.doubles else needed
        if layer.doubles:
            excess.append(2 * lines - needed)
    return Reach(lines, tuple(reversed(excess)))


def _walk(spec: VaeSpec, window: tuple[int, int], inner: tuple[bool, bool], across: int) -> tuple[int, int]:
    """(multiply-adds per latent frame, line of the result at which it starts) of feature lines [start, stop)."""
    layers = rear_layers(spec)
    excess = iter(reach(layers).excess)
    start, stop = window
    macs = 0
    for layer in layers:
        if layer.doubles:
            start, stop, across = 2 * start, 2 * stop, 2 * across
        macs += layer.macs * layer.frames * (stop - start) * across
        drops = layer.spoils + (next(excess) if layer.doubles else 0)
        start, stop = start + drops * inner[0], stop - drops * inner[1]
    return macs, start


def cut(spec: VaeSpec, bounds: Sequence[int], across: int) -> list[Strip]:
    """The strips that own the feature lines between neighbouring `bounds`; `across`: feature lines the other way."""
    halo, scale = reach(rear_layers(spec)).halo, spec.scale_spatial // FRONT_SCALE
    strips = []
    for first, last in pairwise(bounds):
        start, stop = max(0, first - halo), min(bounds[-1], last + halo)
        inner = (start > 0, stop < bounds[-1])
        macs, line = _walk(spec, (start, stop), inner, across)
        skip = first * scale - line * spec.patch_size
        strips.append(Strip(start, stop, *inner, skip, (last - first) * scale, macs))
    return strips


def _bounds(lines: int, count: int, inner: int) -> list[int]:
    """Bounds of `count` strips, of `inner` lines each but the two outermost, which share the rest."""
    if count == 1:
        return [0, lines]
    first = (lines - (count - 2) * inner + 1) // 2
    return [0, *(first + i * inner for i in range(count - 1)), lines]


@cache
def plan_strips(spec: VaeSpec, height: int, width: int, count: int) -> Plan:
    """`count` strips of a frame of height x width latents. Inner strips are equal; those at the border have one halo
    less and own more, so that all take about the same time.
    """
    axis: Axis = "rows" if height >= width else "columns"
    lines, across = FRONT_SCALE * max(height, width), FRONT_SCALE * min(height, width)
    widths = range(lines // count, 0, -1) if count > 2 else [0]
    options = [cut(spec, _bounds(lines, count, inner), across) for inner in widths]
    strips = min(options, key=lambda option: max(strip.macs for strip in option))
    front = front_macs(spec, height, width)
    whole = front + _walk(spec, (0, lines), (False, False), across)[0]
    work = (front + sum(strip.macs for strip in strips)) / whole
    per_call = _frames_per_call(spec, max(s.stop - s.start for s in strips) * across)
    return Plan(spec, height, width, axis, tuple(strips), reach(rear_layers(spec)), per_call, work, front / whole)


def _frames_per_call(spec: VaeSpec, places: int) -> int:
    """Latent frames after the first that go through together: more than one where that makes small tensors only."""
    pixels = places * (spec.scale_spatial // spec.patch_size // FRONT_SCALE) ** 2
    values = pixels * spec.decoder_base_dim * spec.dim_mult[0] * spec.scale_temporal
    return max(1, min(MAX_CALL_FRAMES, MAX_CALL_VALUES // values))


@cache
def make_plan(spec: VaeSpec, height: int, width: int) -> Plan:
    """The plan for frames of height x width latents: as many strips as are worth it and keep the work below MAX_WORK.

    Their number is a power of two, as that of a machine's cores is: they deal out evenly.
    """
    plan = plan_strips(spec, height, width, 1)
    worthwhile = plan.strips[0].macs / MIN_STRIP_MACS
    count = 2
    while count <= min(worthwhile, MAX_STRIPS, max(height, width)):
        finer = plan_strips(spec, height, width, count)
        if finer.work > MAX_WORK:
            break
        plan, count = finer, 2 * count
    return plan

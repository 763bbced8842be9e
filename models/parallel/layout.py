"""Where every rank of a mesh sits. Torch-free: the command line, `plan` and the launcher use it too.

A mesh has three axes, outermost first: `cfg` (the two guidance branches), `cp` (tokens), `tp` (heads and channels).
A `Layout` is an explicit rank table, `table[cfg][cp][tp] -> rank`, plus the core of each rank.

`arithmetic` numbers ranks in axis order and fits every machine whose cores are all alike (CPU, CUDA, trn3).
A trn2.48xlarge is a 4x4 torus of chips with four logical cores each, whose collectives run only inside routable groups
(`is_routable`); there the table must be physical. `trn2` builds such a table for any power-of-two mesh; `trn2-a` and
`trn2-b` are the two shapes of it that are validated on devices by others (docs/parallelism.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Self

AXES = ("cfg", "cp", "tp")
LAYOUTS = ("arithmetic", "trn2", "trn2-a", "trn2-b")
TORUS_SIDE = 4
CORES_PER_CHIP = 4
TRN2_CORES = TORUS_SIDE * TORUS_SIDE * CORES_PER_CHIP
# `--attention auto` gathers keys and values while one layer's gathered copy stays below this, and uses the ring above.
GATHER_LIMIT_BYTES = 128 << 20

Table = tuple[tuple[tuple[int, ...], ...], ...]


class LayoutError(ValueError):
    """A mesh that cannot be laid out as asked; the message holds every factor and what to use instead."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Number of ranks along each axis. Raises `LayoutError` for degrees that no mesh has."""

    tp: int = 1
    cp: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.cp, self.cfg) < 1:
            raise LayoutError(f"{self.formula}: every degree must be at least 1")
        if self.cfg > 2:
            raise LayoutError(f"{self.formula}: cfg must be 1 or 2, there are two guidance branches")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`"tp=2,cp=2,cfg=2"` -> degrees; an axis that is not named has degree 1."""
        values: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            axis, _, degree = (word.strip() for word in part.partition("="))
            if axis not in AXES or not degree.isdecimal() or axis in values:
                raise LayoutError(f"mesh {text!r}: {part!r} is not understood; write it as tp=2,cp=2,cfg=2")
            values[axis] = int(degree)
        return cls(**values)

    @property
    def size(self) -> int:
        """Ranks of one mesh."""
        return self.tp * self.cp * self.cfg

    @property
    def formula(self) -> str:
        """Every factor and the product, for messages."""
        return f"tp({self.tp}) * cp({self.cp}) * cfg({self.cfg}) = {self.size}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Degrees in the order of `AXES`."""
        return (self.cfg, self.cp, self.tp)

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp},cfg={self.cfg}"

    def check_world(self, num_ranks: int) -> None:
        """Raise unless a group of `num_ranks` processes is exactly this mesh."""
        if self.size != num_ranks:
            raise LayoutError(f"mesh {self.formula}, but there are {num_ranks} ranks")

    def check_model(self, *, num_heads: int, ffn_width: int) -> None:
        """Raise unless tensor parallelism divides the heads and the feed-forward width; cp and cfg fit any model."""
        legal = [tp for tp in range(1, num_heads + 1) if num_heads % tp == 0 and ffn_width % tp == 0]
        if self.tp in legal:
            return
        raise LayoutError(
            f"mesh {self.formula}: tp({self.tp}) must divide {num_heads} heads and a feed-forward width of "
            f"{ffn_width}; legal: {', '.join(map(str, legal))}. cp takes any degree"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh with explicit places: `table[cfg][cp][tp]` is a rank, `cores[rank]` its core (ascending)."""

    name: str
    degrees: Degrees
    table: Table
    cores: tuple[int, ...]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of a rank along each axis."""
        for place in product(*(range(degree) for degree in self.degrees.shape)):
            if self._rank(place) == rank:
                return dict(zip(AXES, place, strict=True))
        raise LayoutError(f"rank {rank} is not in mesh {self.degrees.formula}")

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The partition of all ranks into groups along `axes`, members in coordinate order (not sorted)."""
        spans = {axis: range(degree) for axis, degree in zip(AXES, self.degrees.shape, strict=True)}
        outer = product(*((0,) if axis in axes else spans[axis] for axis in AXES))
        return tuple(
            tuple(
                self._rank(
                    [inner if axis in axes else base for axis, inner, base in zip(AXES, place, start, strict=True)]
                )
                for place in product(*(spans[axis] if axis in axes else (0,) for axis in AXES))
            )
            for start in outer
        )

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The members of `rank`'s group along `axes`, in coordinate order."""
        return next(group for group in self.groups(*axes) if rank in group)

    def ring(self, group: Sequence[int]) -> tuple[int, ...]:
        """The order in which a ring visits a group; on trn2 each hop joins cores of one chip or of adjacent chips."""
        if self.name == "arithmetic":
            return tuple(group)
        rank_of = {core: rank for rank, core in enumerate(self.cores)}
        return tuple(rank_of[core] for core in ring_order([self.cores[rank] for rank in group]))

    def unroutable(self) -> list[tuple[int, ...]]:
        """Core groups, along one axis, that the trn2 torus cannot route."""
        groups = [group for axis in AXES for group in self.groups(axis)]
        cores = [tuple(self.cores[rank] for rank in group) for group in groups]
        return [group for group in cores if not is_routable(group)]

    def _rank(self, place: Sequence[int]) -> int:
        cfg, cp, tp = place
        return self.table[cfg][cp][tp]


def make_layout(name: str, degrees: Degrees, *, replica: int = 0, num_cores: int | None = None) -> Layout:
    """Lay out one replica.

    `num_cores` bounds the machine (default: just enough, or the 64 cores of a trn2.48xlarge). Raises `LayoutError` for
    an unknown name, a replica beyond the machine, or a mesh that the named layout cannot place.
    """
    if name not in LAYOUTS:
        raise LayoutError(f"layout {name!r} is unknown; there are {', '.join(LAYOUTS)}")
    if name == "arithmetic":
        first = replica * degrees.size
        places = {place: first + index for index, place in enumerate(_places(degrees))}
    else:
        _check_named(name, degrees)
        places = _torus_places(degrees, replica)
    cores = tuple(sorted(places.values()))
    limit = num_cores if num_cores is not None else (cores[-1] + 1 if name == "arithmetic" else TRN2_CORES)
    if cores[-1] >= limit:
        raise LayoutError(
            f"replica {replica} of mesh {degrees.formula} needs cores up to {cores[-1]}, the machine has {limit}"
        )
    return Layout(name=name, degrees=degrees, table=_table(degrees, places, cores), cores=cores)


def plan_replicas(name: str, degrees: Degrees, replicas: int, num_cores: int | None = None) -> tuple[Layout, ...]:
    """Layouts of `replicas` independent meshes on one machine: disjoint core sets, each routable on its own.

    Raises `LayoutError` with every factor when they do not fit.
    """
    if replicas < 1:
        raise LayoutError(f"{replicas} replicas: there must be at least one")
    limit = num_cores if num_cores is not None else (None if name == "arithmetic" else TRN2_CORES)
    if limit is not None and replicas * degrees.size > limit:
        most = limit // degrees.size
        raise LayoutError(
            f"replicas({replicas}) * {degrees.formula} takes {replicas * degrees.size} cores, the machine has {limit}; "
            + (f"at most {most} such replicas fit" if most else "not one such replica fits")
        )
    return tuple(make_layout(name, degrees, replica=index, num_cores=limit) for index in range(replicas))


def check_routable(layout: Layout) -> None:
    """Raise if a group of this layout cannot be routed on a trn2 torus, and name the layout to use instead."""
    bad = layout.unroutable()
    if bad:
        raise LayoutError(
            f"layout {layout.name!r} of mesh {layout.degrees.formula}: {len(bad)} groups cannot be routed on a trn2 "
            f"torus, first cores {list(bad[0])}; use layout 'trn2' with power-of-two degrees"
        )


def is_routable(cores: Sequence[int]) -> bool:
    """Whether trn2 can run a collective over these logical cores.

    The rule as vLLM-Neuron states it (and its runtime enforces): the chips are one chip, a torus-adjacent pair, a full
    row or column, or a rectangle of those, and each chip contributes the same core offsets. Core c sits on chip c // 4.
    """
    if not cores or len(set(cores)) != len(cores) or not all(0 <= core < TRN2_CORES for core in cores):
        return False
    offsets = _offsets(cores)
    rows = {chip // TORUS_SIDE for chip in offsets}
    columns = {chip % TORUS_SIDE for chip in offsets}
    is_rectangle = len(offsets) == len(rows) * len(columns)
    return is_rectangle and _is_span(rows) and _is_span(columns) and len(set(offsets.values())) == 1


def ring_order(cores: Sequence[int]) -> tuple[int, ...]:
    """A closed ring over a routable group: every hop stays on a chip or crosses one torus link.

    Raises `LayoutError` for a group that is not routable.
    """
    if not is_routable(cores):
        raise LayoutError(f"cores {list(cores)} form no routable group, so no ring visits them")
    offsets = _offsets(cores)
    rows = _around(sorted({chip // TORUS_SIDE for chip in offsets}))
    columns = _around(sorted({chip % TORUS_SIDE for chip in offsets}))
    # A boustrophedon walk: the last row ends in the first column, and a full or two-row span closes over one link.
    chips = [
        row * TORUS_SIDE + column
        for index, row in enumerate(rows)
        for column in (columns if index % 2 == 0 or len(rows) == 1 else columns[::-1])
    ]
    return tuple(chip * CORES_PER_CHIP + offset for chip in chips for offset in sorted(offsets[chip]))


def _offsets(cores: Sequence[int]) -> dict[int, frozenset[int]]:
    chips = {core // CORES_PER_CHIP for core in cores}
    return {
        chip: frozenset(core % CORES_PER_CHIP for core in cores if core // CORES_PER_CHIP == chip) for chip in chips
    }


def _is_span(lines: set[int]) -> bool:
    """One row (or column), two adjacent ones on the wrapped ring of four, or all four."""
    if len(lines) == 2:
        return (max(lines) - min(lines)) % TORUS_SIDE in (1, TORUS_SIDE - 1)
    return len(lines) in (1, TORUS_SIDE)


def _around(lines: list[int]) -> list[int]:
    return lines[::-1] if lines == [0, TORUS_SIDE - 1] else lines


def _places(degrees: Degrees) -> Iterator[tuple[int, ...]]:
    return product(*(range(degree) for degree in degrees.shape))


def _table(degrees: Degrees, places: dict[tuple[int, ...], int], cores: tuple[int, ...]) -> Table:
    rank_of = {core: rank for rank, core in enumerate(cores)}
    return tuple(
        tuple(tuple(rank_of[places[cfg, cp, tp]] for tp in range(degrees.tp)) for cp in range(degrees.cp))
        for cfg in range(degrees.cfg)
    )


def _check_named(name: str, degrees: Degrees) -> None:
    if any(degree & (degree - 1) for degree in degrees.shape):
        raise LayoutError(
            f"layout {name!r} needs power-of-two degrees (groups are rectangles of chips), mesh {degrees.formula}"
        )
    if name == "trn2-a" and not (degrees.cp == 8 and degrees.tp * degrees.cfg == 8):
        raise LayoutError(f"layout 'trn2-a' needs cp = 8 and tp * cfg = 8, the mesh is {degrees.formula}; use 'trn2'")
    if name == "trn2-b" and not (degrees.tp == 8 and degrees.cp > 1):
        raise LayoutError(f"layout 'trn2-b' needs tp = 8 and cp > 1, the mesh is {degrees.formula}; use 'trn2'")


def _torus_places(degrees: Degrees, replica: int) -> dict[tuple[int, ...], int]:
    """Deal the address bits of a block of the torus to the axes: core offsets first, then columns, then rows.

    tp takes the nearest bits, then cfg, then cp. An axis that owns both bits of a ring of four walks it in order; where
    two axes share one, the ring is labelled as a square (0, 3 / 1, 2), so that both axes join adjacent chips.
    """
    if degrees.size > TRN2_CORES:
        raise LayoutError(f"mesh {degrees.formula} does not fit the {TRN2_CORES} cores of a trn2 machine")
    num_bits = degrees.size.bit_length() - 1
    widths = {axis: degree.bit_length() - 1 for axis, degree in zip(AXES, degrees.shape, strict=True)}
    owners = [axis for axis in ("tp", "cfg", "cp") for _ in range(widths[axis])]
    base = replica << num_bits
    return {place: base + _local_core(dict(zip(AXES, place, strict=True)), owners) for place in _places(degrees)}


def _local_core(place: dict[str, int], owners: list[str]) -> int:
    """Core of a mesh coordinate inside its block, two address bits (one ring of four) at a time."""
    left = dict(place)
    core = 0
    for low in range(0, len(owners), 2):
        pair = owners[low : low + 2]
        bits = []
        for axis in pair:
            bits.append(left[axis] & 1)
            left[axis] >>= 1
        core |= _ring_label(bits, is_shared=low > 0 and len(set(pair)) == 2) << low
    return core


def _ring_label(bits: list[int], *, is_shared: bool) -> int:
    if not is_shared:
        return sum(bit << index for index, bit in enumerate(bits))
    inner, outer = bits
    return (0, 3)[inner] if outer == 0 else (1, 2)[inner]


def num_chips(layout: Layout) -> int:
    """Trn2 chips that a layout touches."""
    return len({core // CORES_PER_CHIP for core in layout.cores})


def describe(layout: Layout) -> dict[str, object]:
    """The layout as plain values for records and messages."""
    return {
        "layout": layout.name,
        "mesh": str(layout.degrees),
        "ranks": prod(layout.degrees.shape),
        "cores": list(layout.cores),
        "table": layout.table,
    }

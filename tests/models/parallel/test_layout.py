"""Degrees, rank tables, torus routability, replicas: all without torch."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.parallel.layout import (
    AXES,
    CORES_PER_CHIP,
    TORUS_SIDE,
    TRN2_CORES,
    Degrees,
    LayoutError,
    check_routable,
    describe,
    is_routable,
    make_layout,
    plan_replicas,
    ring_order,
)

# The physical 8 x 8 grid of a trn2.48xlarge, as vLLM-Neuron writes it: chip pairs (0, 3) (1, 2) (4, 7) (5, 6) ...
GRID = [
    [0, 1, 2, 3, 12, 13, 14, 15],
    [4, 5, 6, 7, 8, 9, 10, 11],
    [16, 17, 18, 19, 28, 29, 30, 31],
    [20, 21, 22, 23, 24, 25, 26, 27],
    [32, 33, 34, 35, 44, 45, 46, 47],
    [36, 37, 38, 39, 40, 41, 42, 43],
    [48, 49, 50, 51, 60, 61, 62, 63],
    [52, 53, 54, 55, 56, 57, 58, 59],
]
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
TORUS_MESHES = st.builds(Degrees, POWERS, POWERS, st.sampled_from([1, 2])).filter(lambda d: d.size <= TRN2_CORES)
ANY_MESHES = st.builds(Degrees, st.integers(1, 8), st.integers(1, 8), st.integers(1, 2))


def links_apart(one: int, other: int) -> int:
    """Torus links between the chips of two cores."""
    gaps = [
        abs(a - b)
        for a, b in zip(
            divmod(one // CORES_PER_CHIP, TORUS_SIDE), divmod(other // CORES_PER_CHIP, TORUS_SIDE), strict=True
        )
    ]
    return sum(min(gap, TORUS_SIDE - gap) for gap in gaps)


def test_parse_round_trip():
    """A mesh flag names axes in any order, and what is not named is 1."""
    assert Degrees.parse("cfg=2, tp=4") == Degrees(tp=4, cp=1, cfg=2)
    assert Degrees.parse("") == Degrees()
    assert str(Degrees.parse("tp=2,cp=3")) == "tp=2,cp=3,cfg=1"


@pytest.mark.parametrize("text", ["tp", "tp=two", "tp=-1", "dp=2", "tp=2,tp=2", "tp==2"])
def test_parse_refuses(text):
    """A mesh flag that is not understood is refused with the right form in the message."""
    with pytest.raises(LayoutError, match="write it as tp=2,cp=2,cfg=2"):
        Degrees.parse(text)


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"cfg": 3}, {"cp": -1}])
def test_degrees_refuse(degrees):
    """A degree below 1, or a third guidance branch, is refused with every factor."""
    with pytest.raises(LayoutError, match=r"tp\(-?\d+\) \* cp\(-?\d+\) \* cfg\(-?\d+\) = "):
        Degrees(**degrees)


def test_messages_hold_every_factor():
    """World, heads and machine are checked against the mesh in messages that show each factor and the legal values."""
    degrees = Degrees(tp=4, cp=2, cfg=2)
    with pytest.raises(LayoutError, match=r"tp\(4\) \* cp\(2\) \* cfg\(2\) = 16, but there are 8 ranks"):
        degrees.check_world(8)
    with pytest.raises(LayoutError, match=r"tp\(4\) must divide 6 heads .* 16; legal: 1, 2\."):
        degrees.check_model(num_heads=6, ffn_width=16)
    with pytest.raises(
        LayoutError, match=r"replicas\(5\) \* tp\(4\) \* cp\(2\) \* cfg\(2\) = 16 takes 80 cores.* 64; at most 4"
    ):
        plan_replicas("trn2", degrees, 5)
    with pytest.raises(LayoutError, match="not one such replica fits"):
        plan_replicas("arithmetic", degrees, 1, num_cores=8)
    degrees.check_world(16)
    degrees.check_model(num_heads=8, ffn_width=16)


@given(ANY_MESHES)
def test_arithmetic_table(degrees):
    """The arithmetic layout is rank = (cfg * cp_degree + cp) * tp_degree + tp."""
    layout = make_layout("arithmetic", degrees)
    for rank in range(degrees.size):
        at = layout.coordinate(rank)
        assert (at["cfg"] * degrees.cp + at["cp"]) * degrees.tp + at["tp"] == rank
    assert layout.cores == tuple(range(degrees.size))


@given(ANY_MESHES, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition(degrees, axes):
    """Groups along any axes partition the ranks, and each rank finds its own group."""
    layout = make_layout("arithmetic", degrees)
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.size))
    assert all(rank in layout.group(rank, *axes) for rank in range(degrees.size))
    assert len({len(group) for group in groups}) == 1


def test_layout_a_is_the_published_one():
    """trn2-a at tp=4, cp=8, cfg=2: cp groups are columns of the physical grid, tp blocks and cfg partners lie in rows."""
    layout = make_layout("trn2-a", Degrees(tp=4, cp=8, cfg=2))
    assert set(layout.groups("cp")) == {tuple(row[column] for row in GRID) for column in range(8)}
    assert set(layout.groups("tp")) == {tuple(row[start : start + 4]) for row in GRID for start in (0, 4)}
    assert set(layout.groups("cfg")) == {(row[column], row[column + 4]) for row in GRID for column in range(4)}


def test_layout_b_is_the_published_one():
    """trn2-b at tp=8, cp=4, cfg=2: tp groups are rows of the physical grid, columns are cfg pairs and cp strides."""
    layout = make_layout("trn2-b", Degrees(tp=8, cp=4, cfg=2))
    assert set(layout.groups("tp")) == {tuple(row) for row in GRID}
    assert set(layout.groups("cfg")) == {
        (GRID[row][column], GRID[row + 1][column]) for row in (0, 2, 4, 6) for column in range(8)
    }
    assert set(layout.groups("cp")) == {
        tuple(GRID[row][column] for row in range(first, 8, 2)) for first in (0, 1) for column in range(8)
    }


def test_torus_groups_need_not_be_ascending():
    """Layout A has groups whose coordinate order is not rank order, so nobody may rely on torch's sorted groups."""
    layout = make_layout("trn2-a", Degrees(tp=4, cp=8, cfg=2))
    assert (12, 8, 28, 24, 44, 40, 60, 56) in layout.groups("cp")


@given(TORUS_MESHES)
def test_every_torus_layout_is_routable(degrees):
    """Each group, over one axis or several, of each replica of each power-of-two mesh is routable; the replicas fill the machine disjointly."""
    layouts = plan_replicas("trn2", degrees, TRN2_CORES // degrees.size)
    assert sorted(core for layout in layouts for core in layout.cores) == list(range(TRN2_CORES))
    for layout in layouts:
        assert is_routable(layout.cores)
        assert layout.unroutable() == []
        flattened = [
            group for names in [("cp", "tp"), ("cfg", "tp"), ("cfg", "cp"), AXES] for group in layout.groups(*names)
        ]
        assert all(is_routable([layout.cores[rank] for rank in group]) for group in flattened)
        check_routable(layout)


@given(TORUS_MESHES)
def test_rings_cross_one_link_at_most(degrees):
    """Each hop of each ring, the closing one too, stays on a chip or crosses one torus link."""
    layout = make_layout("trn2", degrees)
    for axis in AXES:
        for group in layout.groups(axis):
            ring = layout.ring(group)
            assert sorted(ring) == sorted(group)
            cores = [layout.cores[rank] for rank in (*ring, ring[0])]
            assert all(links_apart(one, other) <= 1 for one, other in pairwise(cores))


@pytest.mark.parametrize(
    "cores", [range(4), [1], [0, 12], [0, 4, 8, 12], [0, 16, 32, 48], [0, 4, 16, 20], range(64), [0, 1, 4, 5], [2, 14]]
)
def test_routable(cores):
    """One chip, adjacent chips (also over the edge), full lines and rectangles of them are routable."""
    assert is_routable(list(cores))


@pytest.mark.parametrize(
    "cores", [[], [0, 32], [0, 8], [0, 8, 16, 24], [0, 4, 8], [0, 4, 20], [0, 5], [0, 1, 4], [64], [0, 0], [0, 20]]
)
def test_not_routable(cores):
    """Two links apart, three in a row, an L, a diagonal, unequal offsets and cores that do not exist are not routable."""
    assert not is_routable(cores)
    with pytest.raises(LayoutError, match="no routable group"):
        ring_order(cores)


@pytest.mark.parametrize("degrees", [Degrees(4, 8, 2), Degrees(8, 4, 2)])
def test_arithmetic_layout_fails_on_a_torus(degrees):
    """The arithmetic table of the two full-machine meshes is refused for trn2, with the layout to use instead."""
    with pytest.raises(LayoutError, match=r"cannot be routed on a trn2 torus, first cores .*use layout 'trn2'"):
        check_routable(make_layout("arithmetic", degrees))


@pytest.mark.parametrize(
    ("name", "degrees", "message"),
    [
        ("ring", Degrees(), "layout 'ring' is unknown; there are arithmetic, trn2"),
        ("trn2", Degrees(cp=3), "power-of-two degrees"),
        ("trn2", Degrees(tp=64, cp=2), "does not fit the 64 cores"),
        ("trn2-a", Degrees(tp=4, cp=4, cfg=2), "needs cp = 8 and tp"),
        ("trn2-b", Degrees(tp=4, cp=8, cfg=2), "needs tp = 8 and cp > 1"),
    ],
)
def test_layouts_refuse(name, degrees, message):
    """A mesh that a named layout cannot place is refused, never placed some other way."""
    with pytest.raises(LayoutError, match=message):
        make_layout(name, degrees)


def test_replicas_of_an_arithmetic_layout_are_consecutive():
    """Off the torus, replica r owns the r-th block of cores, and ranks count from 0 in each."""
    layouts = plan_replicas("arithmetic", Degrees(tp=2), 3, num_cores=8)
    assert [layout.cores for layout in layouts] == [(0, 1), (2, 3), (4, 5)]
    assert {layout.table for layout in layouts} == {(((0, 1),),)}
    with pytest.raises(LayoutError, match="at least one"):
        plan_replicas("arithmetic", Degrees(), 0)


def test_unknown_rank_is_refused():
    """A rank beyond the mesh has no coordinate."""
    with pytest.raises(LayoutError, match="rank 9 is not in mesh"):
        make_layout("arithmetic", Degrees(tp=2)).coordinate(9)


def test_describe_is_plain():
    """A layout's description is what a record can hold."""
    assert describe(make_layout("trn2", Degrees(tp=2, cfg=2))) == {
        "layout": "trn2",
        "mesh": "tp=2,cp=1,cfg=2",
        "ranks": 4,
        "cores": [0, 1, 2, 3],
        "table": (((0, 1),), ((2, 3),)),
    }


def test_layout_needs_no_torch():
    """The command line may import layouts: they pull in no torch."""
    code = "import sys, models.parallel.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

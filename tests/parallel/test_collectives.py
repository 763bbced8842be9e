"""Meshes and collectives on real processes."""

import subprocess
import sys

import pytest
import torch

from models.errors import ModelError
from models.parallel.layout import AXES, Degrees, Layout, LayoutError, make_layout
from models.parallel.mesh import build_mesh, single
from tests.parallel import cases

pytestmark = pytest.mark.mesh

# Rank tables on which coordinate order is not rank order, as on a trn2 torus.
SCRAMBLED = Layout("arithmetic", Degrees(2, 2, 2), (((5, 0), (3, 6)), ((1, 7), (4, 2))), tuple(range(8)))


@pytest.mark.parametrize(
    "layout", [make_layout("arithmetic", Degrees(2, 2, 2)), make_layout("trn2", Degrees(2, 2, 2)), SCRAMBLED]
)
def test_axes_are_the_groups_of_the_table(pool, layout):
    """Every axis has the members that the rank table says, and gathers bring their blocks in coordinate order."""
    for rank, seen in pool.run(cases.membership, layout):
        for names, (index, ranks, gathered) in seen.items():
            assert ranks == layout.group(rank, *names)
            assert ranks[index] == rank
            assert gathered == ranks


@pytest.mark.parametrize("layout", [Degrees(tp=2, cp=3), SCRAMBLED], ids=["2x3", "scrambled"])
def test_collectives(pool, layout):
    """Each collective does what it says along each axis, also where torch sorts the group another way."""
    for result in pool.run(cases.each_collective, layout):
        for name in AXES:
            got = result[name]
            size, index = got["size"], got["index"]
            assert torch.equal(got["sum"], torch.full((2, 3), size * (size + 1) / 2))
            assert torch.equal(got["max"], torch.full((2, 3), size - 1.0))
            assert torch.equal(got["gather0"], torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))
            assert torch.equal(got["gather1"], torch.arange(float(size)).repeat_interleave(3).expand(2, -1).bfloat16())
            assert torch.equal(got["scatter"], size * torch.tensor([2.0 * index, 2.0 * index + 1]).expand(2, -1))
            assert torch.equal(got["broadcast"], torch.full((2, 3), size - 1.0))
            first = [torch.full((2, 3), float(sender)) for sender in range(size)]
            assert (got["first"] is None) == (index > 0)
            assert all(map(torch.equal, got["first"] or first, first))


@pytest.mark.parametrize("layout", [SCRAMBLED, make_layout("trn2", Degrees(2, 2, 2))], ids=["scrambled", "trn2"])
def test_order_may_be_data(pool, layout):
    """Where groups of an axis differ in torch's order, that order is a tensor and blocks still come by coordinate."""
    for rank, found in enumerate(pool.run(cases.gathered_by_data, layout)):
        for names, (is_data, ranks) in found.items():
            assert ranks == layout.group(rank, *names)
            assert is_data == any(tuple(sorted(group)) != group for group in layout.groups(*names))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ModelError("input", "num_frames 1"), "input", "num_frames 1"),
        (MemoryError(), "oom", "rank 0 failed: MemoryError"),
        (RuntimeError("conv3d: bad stride"), "device", "rank 0 failed: RuntimeError: conv3d: bad stride"),
        (None, "unsupported", "rank 0 made a tensor (3, 2) torch.float32, not (2, 3) torch.float32"),
    ],
    ids=["input", "memory", "any other", "wrong shape"],
)
def test_a_failure_of_rank_0_alone_is_everybodys(pool, error, kind, words):
    """Whatever fails where rank 0 alone works is the same error on all ranks, and the next call is in step."""
    for found, made in pool.run(cases.first_fails, Degrees(tp=3), error):
        assert found[0] == kind
        assert words in found[1]
        assert torch.equal(made, torch.full((2, 3), 7.0))


def test_collectives_over_one_rank_are_the_identity(pool):
    """Over an axis of size 1 a collective hands back the very tensor, with or without other axes."""
    assert all(cases.identity_objects(single()))
    assert all(all(result) for result in pool.run(cases.identity_objects, Degrees(tp=2)))


@pytest.mark.parametrize(
    "value", [None, {"prompt": "\u4e00\u53ea\u72d0\u72f8 \U0001f98a", "seed": 2**32 - 1, "taps": []}, "x" * 70000]
)
def test_requests_travel_as_json(pool, value):
    """What rank 0 broadcasts arrives everywhere, also Chinese, emoji and long text."""
    assert pool.run(cases.json_of_first, SCRAMBLED, value) == [value] * 8
    assert cases.json_of_first(single(), value) == value


@pytest.mark.parametrize("odd_rank", [None, 0, 3])
def test_divergence_fails_on_every_rank(pool, odd_rank):
    """One bit that differs on one rank fails the clip on all ranks alike and names that rank; equal bits pass."""
    outcomes = pool.outcomes(cases.agreement, Degrees(tp=2, cp=2, cfg=2), odd_rank)
    if odd_rank is None:
        assert [outcome.error for outcome in outcomes] == [None] * 8
        return
    for outcome in outcomes:
        assert isinstance(outcome.error, ModelError)
        assert outcome.error.kind == "device"
        assert "latents after step 3: the ranks disagree" in outcome.error.message
        assert f"[{odd_rank}]" in outcome.error.message


def test_collectives_compile_in_one_graph(pool):
    """Collectives stay inside a fullgraph compilation, and all ranks trace the same operations."""
    results = pool.run(cases.compiled_graph, Degrees(tp=2, cp=2))
    assert all(count == 1 and equal for count, _, equal in results)
    assert len({tuple(ops) for _, ops, _ in results}) == 1
    assert sum("all_reduce" in op for op in results[0][1]) == 1


FAKE_WORLD = """
import sys, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from models.parallel.layout import AXES, Degrees, make_layout
from models.parallel.mesh import build_mesh
layout = make_layout("trn2-a", Degrees(tp=4, cp=8, cfg=2))
for rank in (0, 12, 63):
    dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
    mesh = build_mesh(layout)
    for names in (("tp",), ("cp",), ("cfg",), ("cp", "tp"), AXES):
        axis = mesh.axis(*names)
        assert axis.ranks == layout.group(rank, *names)
        assert dist.get_process_group_ranks(axis.process_group) == sorted(axis.ranks)
    pairs = mesh.ring_pairs("cp")
    assert sorted(pairs[::2]) == sorted(pairs[1::2]) == list(range(64))
    dist.destroy_process_group()
"""


def test_full_machine_mesh():
    """The 64-rank mesh of layout A has the groups of its table on any rank, and its rings cover the world."""
    result = subprocess.run([sys.executable, "-c", FAKE_WORLD], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_world_of_another_size_is_refused(pool):
    """A mesh that is not as large as its process group says so with every factor."""
    [error] = {str(outcome.error) for outcome in pool.outcomes(too_large_a_mesh, Degrees(cp=3))}
    assert error == "mesh tp(2) * cp(2) * cfg(1) = 4, but there are 3 ranks"


def too_large_a_mesh(_mesh):
    """Build a mesh of four inside a group of three."""
    with pytest.raises(LayoutError) as caught:
        build_mesh(make_layout("arithmetic", Degrees(tp=2, cp=2)))
    raise caught.value

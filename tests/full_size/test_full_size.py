"""Full-size T2V-A14B with two layers, traced without devices or weights; the whole of it: scripts/prove_full_size.py."""

from dataclasses import replace

import pytest
import torch

from batch_gen.estimate.flows import first_step_flows, flows
from batch_gen.estimate.memory import Placement
from batch_gen.estimate.subject import Clips, published
from batch_gen.request import Bucket
from models.parallel.layout import Degrees, make_layout
from models.parallel.mesh import single
from models.wan.condition import NOTHING, Condition
from models.wan.graphs import ExpertGraphs
from models.wan.spec import T2V_A14B, TI2V_5B
from tests.full_size import checks
from tests.full_size.components import (
    SIZES,
    Way,
    fake_expert,
    inputs,
    shallow,
    trace_blocks,
    trace_decoder,
    trace_guidance,
    trace_model,
    trace_text,
)
from tests.full_size.trace import DEVICE, Collective, Graph, Recorder, fake_rank, fake_tensors

A, B = make_layout("trn2-a", Degrees(tp=4, cp=8, cfg=2)), make_layout("trn2-b", Degrees(tp=8, cp=4, cfg=2))
TWO = shallow(T2V_A14B)
EMPTY = Graph("graph", "a", 0, {}, (), 0, 0, 0, ())


def estimated(spec, bucket, layout, way=Way()):
    """What the estimate lists for this model and mesh: communications of first step, steady step, guidance."""
    subject = replace(published("wan2.2-t2v-a14b"), wan=spec)
    placement = Placement(layout.degrees, "ring")
    listed = flows(subject, Clips(bucket, 40), placement, way.attention, sequence_parallel=way.sequence_parallel)
    inside = [flow for flow in listed if flow.axis != "cfg"]
    return [*inside, *first_step_flows(subject, placement)], inside, [flow for flow in listed if flow.axis == "cfg"]


def check_sound(graphs, layout):
    """Assert that operators, dtypes, shapes, groups and rings are what a trn2 machine takes."""
    assert checks.bad_operators(graphs) == []
    assert checks.bad_routes(layout, graphs) == []


def test_every_rank_has_the_graphs_of_the_estimate():
    """Layout A, 480p: ranks share one structure of allowed operators and routable groups, and send what the estimate lists."""
    by_rank = []
    for rank in (0, 21, 63):
        with fake_rank(A, rank) as mesh:
            by_rank.append(trace_model(TWO, SIZES["480p"], mesh, lower=False))
    assert checks.bad_structures(by_rank) == []
    with fake_rank(A, 63) as mesh:
        graphs = [*trace_model(TWO, SIZES["480p"], mesh), *trace_guidance(TWO, SIZES["480p"], mesh)]
    assert [graph.name for graph in graphs] == ["first", "steady", "gather_guide"]
    check_sound(graphs, A)
    for graph, listed in zip(graphs, estimated(TWO, Bucket(832, 480, 81, "text"), A), strict=True):
        assert checks.bad_flows(graph, listed) == []


def test_layers_share_a_graph():
    """Layout B, 720p, by blocks: keys, begin, one graph for the first block, one for all others, end."""
    with fake_rank(B, 37) as mesh:
        graphs = trace_blocks(shallow(T2V_A14B, 4), SIZES["720p"], mesh)
    assert [graph.name for graph in graphs] == ["keys", "begin", "block", "block", "end"]
    check_sound(graphs, B)


def test_tokens_with_times_of_their_own_use_no_index():
    """Where the first latent frame has its own timestep, as images need in the 5B, the graphs are allowed too."""
    with fake_rank(A, 0) as mesh:
        check_sound(trace_blocks(TWO, SIZES["480p"], mesh, num_times=2), A)


@pytest.mark.parametrize("conditioning", ["text", "image"])
def test_embedded_times_are_counted(conditioning):
    """TI2V-5B gathers the embeddings of two times with an image, of one without, in the graph and on paper."""
    layout, spec = make_layout("trn2", Degrees(tp=4, cp=2)), shallow(TI2V_5B, 1)
    times = (Condition(first=torch.zeros(1)) if conditioning == "image" else NOTHING).timesteps(500.0)
    with fake_rank(layout, 3) as mesh, fake_tensors():
        recorder = Recorder(mesh)
        graphs = ExpertGraphs(fake_expert(spec.transformer, mesh, Way()), recorder.compile, "block")
        graphs.begin(*inputs(spec, SIZES["480p"], len(times)))
    clips = Clips(Bucket(832, 480, 81, conditioning), 50)
    listed = flows(published("wan2.2-ti2v-5b"), clips, Placement(layout.degrees, "ring"))
    assert checks.bad_flows(recorder.graphs[0], [f for f in listed if (f.kind, f.axis) == ("all_gather", "tp")]) == []
    assert {collective.shape[1] for collective in recorder.graphs[0].collectives} == {len(times)}


@pytest.mark.parametrize("way", [Way("ring"), Way("gather"), Way("bound", sequence_parallel=True)], ids=str)
def test_other_ways_to_compute(way):
    """The true maximum, gathered keys and sequence parallelism: allowed, routable, and counted as in the graph."""
    spec, layout = shallow(T2V_A14B, 1), make_layout("trn2", Degrees(tp=2, cp=2))
    with fake_rank(layout, 3) as mesh:
        graphs = trace_model(spec, SIZES["480p"], mesh, way, ("steady",))
    check_sound(graphs, layout)
    assert checks.bad_flows(graphs[0], estimated(spec, Bucket(832, 480, 81, "text"), layout, way)[1]) == []


def test_operations_are_the_known_count():
    """A forward of one device, 40 layers from the counts of 1 and 2, has 1,678.4 TFLOP at 480p, within 1 %."""
    counts = []
    for layers in (1, 2):
        with fake_rank(None) as mesh:
            [graph] = trace_model(shallow(T2V_A14B, layers), SIZES["480p"], mesh, names=("first",))
        counts.append(graph.flops)
    assert (counts[0] + 39 * (counts[1] - counts[0])) / 1e12 == pytest.approx(1678.4, rel=0.01)


def test_text_encoder_over_all_ranks():
    """UMT5 over 64 ranks is one allowed graph per rank, the same on both ends."""
    by_rank = []
    for rank in (0, 63):
        with fake_rank(A, rank) as mesh:
            by_rank.append(trace_text(TWO.text_encoder, mesh))
    assert checks.bad_structures(by_rank) == []
    check_sound(by_rank[0], A)


def test_decoder_slabs():
    """The decoder's front and an inner strip of its rear, first call and later ones: allowed, no collective inside."""
    graphs = trace_decoder(published("wan2.2-t2v-a14b").vae, SIZES["480p"], kinds=slice(1, 2))
    assert [graph.name for graph in graphs] == ["front", "front", "rear", "rear"]
    assert checks.bad_operators(graphs) == []
    assert not any(graph.collectives for graph in graphs)


FORBIDDEN = {
    "index_put": lambda x: x.index_put((torch.zeros(1, dtype=torch.int32, device=DEVICE),), x[:1]),
    "float64": lambda x: x.double() * 2,
    "int64": lambda x: torch.arange(4, device=DEVICE) * 2,
    "complex": lambda x: torch.view_as_complex(x) * 2,
    "sort": lambda x: x.sort(0).values,
    "strided assignment": lambda x: torch.empty_like(x).index_copy(0, torch.arange(4, device=DEVICE), x),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_list_refuses(name):
    """What accelerators refuse is found in a traced graph by its name or its dtype."""
    recorder = Recorder(single())
    torch.compiler.reset()
    with fake_tensors():
        recorder.compile(FORBIDDEN[name], "planted")(torch.empty(4, 2, device=DEVICE))
    assert checks.bad_operators(recorder.graphs) != []


def test_a_branch_on_data_is_no_graph():
    """A step that looks at its values cannot be captured in one piece."""
    torch.compiler.reset()
    compiled = Recorder(single()).compile(lambda x: x * 2 if x.sum() > 0 else x, "planted")
    with fake_tensors(), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.empty(4, device=DEVICE))


def test_groups_that_do_not_route_are_found():
    """On arithmetic places the guidance pairs of 64 ranks are two links apart, and a ring in wrong order takes a leap."""
    arithmetic = make_layout("arithmetic", Degrees(tp=4, cp=8, cfg=2))
    graph = replace(EMPTY, collectives=(Collective("all_gather", "cfg", (0, 32), (1,), "float32", 4.0),))
    assert any("not routable" in fault for fault in checks.bad_routes(arithmetic, [graph]))
    pairs = tuple(rank for source in range(64) for rank in (source, (source + 8) % 64))
    ring = Collective("ring", "cp", A.group(0, "cp"), (1,), "float32", 4.0, pairs)
    assert any("no neighbours" in fault for fault in checks.bad_routes(A, [replace(EMPTY, collectives=(ring,))]))
    strange = replace(ring, kind="all_gather", group=(0, 1, 2))
    assert any(
        "not one of the axis" in fault for fault in checks.bad_routes(A, [replace(EMPTY, collectives=(strange,))])
    )


def test_ranks_that_differ_are_found():
    """One rank with another structure, or with a graph less, is reported."""
    other = replace(EMPTY, structure="b")
    assert checks.bad_structures([[EMPTY], [EMPTY]]) == []
    assert len(checks.bad_structures([[EMPTY], [other]])) == 1
    assert len(checks.bad_structures([[EMPTY, EMPTY], [EMPTY]])) == 1


def test_communications_that_are_not_counted_are_found():
    """A graph that sends more, or something else, than the estimate lists is reported with both counts."""
    _, listed, _ = estimated(TWO, Bucket(832, 480, 81, "text"), A)
    one = Collective("all_reduce", "tp", (0, 1, 2, 3), (1, 4095), "float32", 24570.0)
    assert any("counted" in fault for fault in checks.bad_flows(replace(EMPTY, collectives=(one,)), listed))
    assert any("is not in the graph" in fault for fault in checks.bad_flows(EMPTY, listed))

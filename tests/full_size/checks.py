"""What the proof asks of traced graphs; each check returns what is wrong, in words, and nothing where all is well."""

from collections import Counter
from collections.abc import Iterable, Sequence

from batch_gen.estimate.flows import Flow
from models.parallel.layout import CORES_PER_CHIP, TORUS_SIDE, Layout, is_routable
from tests.full_size.allowed import refused
from tests.full_size.trace import Collective, Graph


def bad_operators(graphs: Iterable[Graph]) -> list[str]:
    """Operators, dtypes and shapes that no accelerator should see."""
    found = [f"{graph.name}: {what}" for graph in graphs for what in refused(graph.operators)]
    return found + [f"{graph.name}: size of {what} depends on data" for graph in graphs for what in graph.dynamic]


def bad_structures(by_rank: Sequence[Sequence[Graph]]) -> list[str]:
    """Graphs in which ranks differ."""
    found = []
    for place in range(max(map(len, by_rank))):
        kinds = Counter(graphs[place].structure if place < len(graphs) else "absent" for graphs in by_rank)
        if len(kinds) > 1:
            found.append(f"graph {place}: {len(kinds)} structures on {len(by_rank)} ranks, {dict(kinds)}")
    return found


def bad_routes(layout: Layout, graphs: Iterable[Graph]) -> list[str]:
    """Groups and rings of the graphs that a trn2 torus cannot route, or that are no partition of the world."""
    found = []
    for collective in {collective for graph in graphs for collective in graph.collectives}:
        where = f"{collective.kind} over {collective.axis}"
        partition = layout.groups(*collective.axis.split("_"))
        if sorted(rank for group in partition for rank in group) != list(range(layout.degrees.size)):
            found.append(f"{where}: its groups are no partition of the world")
        if collective.group not in {tuple(sorted(group)) for group in partition}:
            found.append(f"{where}: group {collective.group} is not one of the axis")
        for group in partition:
            cores = [layout.cores[rank] for rank in group]
            if not is_routable(cores):
                found.append(f"{where}: cores {cores} are not routable")
        found += [f"{where}: {what}" for what in _bad_hops(layout, collective)]
    return sorted(found)


def _bad_hops(layout: Layout, collective: Collective) -> list[str]:
    if collective.kind != "ring":
        return []
    sources, targets = collective.pairs[::2], collective.pairs[1::2]
    world = list(range(layout.degrees.size))
    found = [] if sorted(sources) == sorted(targets) == world else ["pairs do not cover the world once"]
    for source, target in zip(sources, targets, strict=True):
        here, there = (layout.cores[rank] // CORES_PER_CHIP for rank in (source, target))
        if here != there and not _are_adjacent(here, there):
            found.append(f"chips {here} and {there} are no neighbours")
    return found


def _are_adjacent(chip: int, other: int) -> bool:
    down, across = (abs(a - b) for a, b in zip(divmod(chip, TORUS_SIDE), divmod(other, TORUS_SIDE), strict=True))
    return (down, across) in ((0, 1), (1, 0), (0, TORUS_SIDE - 1), (TORUS_SIDE - 1, 0))


def counted(graph: Graph) -> Counter[tuple[object, ...]]:
    """A graph's communications as the estimate writes them."""
    return Counter((c.kind, c.axis, len(c.group), c.shape, c.dtype) for c in graph.collectives)


def expected(flows: Iterable[Flow]) -> Counter[tuple[object, ...]]:
    """The estimate's list in the same form."""
    found: Counter[tuple[object, ...]] = Counter()
    for flow in flows:
        found[flow.kind, flow.axis, flow.size, flow.shape, flow.dtype] += flow.times
    return found


def bad_flows(graph: Graph, flows: Sequence[Flow]) -> list[str]:
    """Where the graph and the estimate count different communications or bytes."""
    seen, wanted = counted(graph), expected(flows)
    found = [
        f"{graph.name}: {n} x {key} in the graph, {wanted[key]} counted" for key, n in seen.items() if wanted[key] != n
    ]
    found += [f"{graph.name}: {key} is not in the graph" for key in wanted if key not in seen]
    traced, computed = sum(c.sent_bytes for c in graph.collectives), sum(flow.sent_bytes for flow in flows)
    return found if abs(traced - computed) < 1 else [*found, f"{graph.name}: {traced} bytes sent, {computed} counted"]

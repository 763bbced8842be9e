"""Full-size T2V-A14B as 64 Trainium cores would be handed it, traced without a device or weights; tables and one line
of JSON.

Run: python scripts/prove_full_size.py            about a quarter of an hour of a free core
     python scripts/prove_full_size.py --quick    two layers, few ranks; --part, --layout, --size pick from it

Fake tensors and a fake process group of 64 ranks: every component at 480p and 720p, in the physical layouts A
(tp=4,cp=8,cfg=2) and B (tp=8,cp=4,cfg=2), is captured in one piece (`fullgraph=True`), lowered, and read: operators and
dtypes against the allow-list (tests/full_size/allowed.py), graphs of different ranks against each other, groups and
rings against the torus, communications against the estimate's list, operations against the known counts. Not run on a
device: that a graph is captured and allowed does not say that a compiler takes it.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from batch_gen.estimate.flows import first_step_flows, flows
from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import Placement, footprint
from batch_gen.estimate.paper import fitting
from batch_gen.estimate.subject import Clips, published
from batch_gen.request import Bucket
from models.parallel.layout import Degrees, Layout, make_layout
from models.vae.strips import make_plan
from models.wan.spec import T2V_A14B, WanSpec
from tests.full_size import checks
from tests.full_size import components as parts
from tests.full_size.trace import Graph, fake_rank

LAYOUTS = {
    "A": make_layout("trn2-a", Degrees(tp=4, cp=8, cfg=2)),
    "B": make_layout("trn2-b", Degrees(tp=8, cp=4, cfg=2)),
}
KNOWN_TFLOP = {"480p": 1678.4, "720p": 6523.4}
CORNERS = 8
BOUND = 0.01


class Verdict:
    """What is wrong so far, and the figures of the last line."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.ratios: dict[str, float] = {}
        self.started = time.monotonic()

    def take(self, where: str, faults: Sequence[str]) -> None:
        """Print and keep faults."""
        for fault in faults:
            print(f"WRONG  {where}: {fault}", flush=True)
        self.faults += faults

    def say(self, text: str) -> None:
        """A line with the time."""
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)


PARTS = ("operations", "decoder", "text", "ranks", "deep", "meshes")


def main() -> int:
    """Trace and print; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, few ranks, 480p")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="only this layout")
    parser.add_argument("--size", choices=parts.SIZES, action="append", help="only this size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    verdict, quick = Verdict(), options.quick
    spec = parts.shallow(T2V_A14B) if quick else T2V_A14B
    chosen = options.part or PARTS[:-1] if quick else options.part or PARTS
    sizes = options.size or (["480p"] if quick else list(parts.SIZES))
    layouts = {name: LAYOUTS[name] for name in options.layout or LAYOUTS}
    work = {
        "operations": [lambda size=size: operations(verdict, size, quick) for size in sizes],
        "decoder": [lambda size=size: decoder(verdict, size) for size in sizes],
        "text": [lambda name=name: text(verdict, name, LAYOUTS[name], spec, quick) for name in layouts],
        "ranks": [lambda name=name: all_ranks(verdict, name, LAYOUTS[name], quick) for name in layouts],
        "deep": [lambda n=n, size=size: deep(verdict, n, LAYOUTS[n], spec, size) for n in layouts for size in sizes],
        "meshes": [lambda: other_meshes(verdict)],
    }
    for part in chosen:
        for step in work[part]:
            step()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    verdict.say(f"{len(verdict.faults)} faults, {peak_gb:.2f} GB of memory")
    ratios = {name: round(value, 5) for name, value in verdict.ratios.items()}
    print(json.dumps({"name": "full_size", "ok": not verdict.faults, "ratios": ratios}))
    return 1 if verdict.faults else 0


def operations(verdict: Verdict, size: str, quick: bool) -> None:
    """Operations of one forward on one device beside the known count; the count of 40 layers from 1 and 2 if quick."""
    counts = {}
    for layers in (1, 2) if quick else (T2V_A14B.transformer.num_layers,):
        with fake_rank(None) as mesh:
            [graph] = parts.trace_model(parts.shallow(T2V_A14B, layers), parts.SIZES[size], mesh, names=("first",))
        verdict.take(f"one device, {size}", checks.bad_operators([graph]))
        counts[layers] = graph.flops
    whole = counts[1] + 39 * (counts[2] - counts[1]) if quick else counts[40]
    ratio = whole / 1e12 / KNOWN_TFLOP[size]
    verdict.ratios[f"tflop_{size}"] = ratio
    verdict.say(f"{size}: {whole / 1e12:,.1f} TFLOP a forward on one device, known {KNOWN_TFLOP[size]:,.1f}")
    verdict.take(f"{size}", [] if abs(ratio - 1) < BOUND else [f"operations are {ratio:.3f} of the known count"])


def decoder(verdict: Verdict, size: str) -> None:
    """The autoencoder: no collective inside, one graph for each kind of strip and call."""
    spec, shape = published("wan2.2-t2v-a14b").vae, parts.SIZES[size]
    plan = make_plan(spec, shape.height // spec.scale_spatial, shape.width // spec.scale_spatial)
    kinds = {str(list(key)): indices for key, indices in parts.strip_kinds(plan).items()}
    graphs = [*parts.trace_decoder(spec, shape), *parts.trace_encoder(spec, shape)]
    table(f"autoencoder, {size}; kinds of strips (inside low, inside high, lines): {kinds}", graphs)
    verdict.take(f"autoencoder {size}", checks.bad_operators(graphs))
    inside = [f"{graph.name} holds a collective" for graph in graphs if graph.collectives]
    verdict.take(f"autoencoder {size}", inside)


def text(verdict: Verdict, name: str, layout: Layout, spec: WanSpec, quick: bool) -> None:
    """The text encoder over all ranks of the mesh."""
    by_rank = []
    for rank in (0, layout.degrees.size - 1) if quick else corners(layout):
        with fake_rank(layout, rank) as mesh:
            by_rank.append(parts.trace_text(parts.shallow(spec).text_encoder if rank else spec.text_encoder, mesh))
    same = by_rank if quick else by_rank[1:]  # rank 0 has all layers
    judge(verdict, f"layout {name}, text encoder", layout, by_rank[0])
    verdict.take(f"layout {name}, text encoder", checks.bad_structures(same))


def all_ranks(verdict: Verdict, name: str, layout: Layout, quick: bool) -> None:
    """Two layers on every rank, first and steady step and guidance: one structure; a layer is like another."""
    size, by_rank = parts.SIZES["480p" if name == "A" else "720p"], []
    spec = parts.shallow(T2V_A14B)
    for rank in corners(layout)[:2] if quick else range(layout.degrees.size):
        with fake_rank(layout, rank) as mesh:
            graphs = parts.trace_model(spec, size, mesh, lower=False)
            by_rank.append([*graphs, *parts.trace_guidance(spec, size, mesh)])
    faults = checks.bad_structures(by_rank)
    verdict.take(f"layout {name}", faults)
    verdict.say(f"layout {name}, two layers: {len(by_rank)} ranks, {'different' if faults else 'one structure each'}")
    for way in (parts.Way("ring"), parts.Way("gather"), parts.Way("bound", sequence_parallel=True)):
        ranks = []
        for rank in corners(layout)[:: CORNERS - 1]:
            with fake_rank(layout, rank) as mesh:
                ranks.append(parts.trace_model(spec, size, mesh, way, ("steady",)))
        verdict.take(f"layout {name}, {way}", checks.bad_structures(ranks) + checks.bad_operators(ranks[0]))
        verdict.take(f"layout {name}, {way}", checks.bad_routes(layout, ranks[0]))
        verdict.take(f"layout {name}, {way}", beside_estimate(spec, size, layout, ranks[0], way))


def deep(verdict: Verdict, name: str, layout: Layout, spec: WanSpec, size: str) -> None:
    """All layers on the first and the last rank: whole model, by blocks, guidance."""
    by_rank = []
    for rank in (0, layout.degrees.size - 1):
        with fake_rank(layout, rank) as mesh:
            graphs = parts.trace_model(spec, parts.SIZES[size], mesh)
            graphs += parts.trace_blocks(spec, parts.SIZES[size], mesh)
            by_rank.append([*graphs, *parts.trace_guidance(spec, parts.SIZES[size], mesh)])
        verdict.say(f"layout {name}, {size}: rank {rank}, {sum(graph.num_nodes for graph in graphs):,} nodes")
    where = f"layout {name}, {size}"
    judge(verdict, where, layout, by_rank[0])
    verdict.take(where, checks.bad_structures(by_rank))
    shared = [graph.name for graph in by_rank[0]].count("block")
    verdict.take(
        where, [] if shared == 2 else [f"{shared} graphs of blocks, not one for the first and one for the rest"]
    )
    verdict.take(where, beside_estimate(spec, parts.SIZES[size], layout, by_rank[0], parts.Way()))
    memory(verdict, where, spec, parts.SIZES[size], layout, by_rank[0])


def judge(verdict: Verdict, where: str, layout: Layout, graphs: Sequence[Graph]) -> None:
    """Print graphs and communications; operators and routes."""
    table(where, graphs)
    communications(graphs)
    verdict.take(where, checks.bad_operators(graphs))
    verdict.take(where, checks.bad_routes(layout, graphs))
    verdict.say(where)


def beside_estimate(
    spec: WanSpec, size: parts.Size, layout: Layout, graphs: Sequence[Graph], way: parts.Way
) -> list[str]:
    """The communications of first, steady and guidance beside the estimate's."""
    subject = published("wan2.2-t2v-a14b")
    subject = type(subject)(spec, subject.vae)
    clips, placement = clips_of(size), Placement(layout.degrees, "ring")
    listed = flows(subject, clips, placement, way.attention, sequence_parallel=way.sequence_parallel)
    inside = [flow for flow in listed if flow.axis != "cfg"]
    wanted = {
        "first": [*inside, *first_step_flows(subject, placement)],
        "steady": inside,
        "gather_guide": [flow for flow in listed if flow.axis == "cfg"],
    }
    return [fault for graph in graphs if graph.name in wanted for fault in checks.bad_flows(graph, wanted[graph.name])]


def memory(
    verdict: Verdict, where: str, spec: WanSpec, size: parts.Size, layout: Layout, graphs: Sequence[Graph]
) -> None:
    """What the steady graph is given and makes beside the estimate of a rank's memory."""
    found = footprint(published("wan2.2-t2v-a14b"), clips_of(size), Placement(layout.degrees, "ring"), TRN2)
    estimated = {part.name: part.num_bytes / 1e9 for part in found.parts}
    first, steady = (next(graph for graph in graphs if graph.name == name) for name in ("first", "steady"))
    working = estimated["activations"] + estimated["K/V gathered or in flight"] + estimated["latents"]
    print(f"memory, {where}: the first graph is given {first.inputs_bytes / 1e9:.2f} GB, ", end="")
    print(
        f"the steady one (without what makes the text's keys) {steady.inputs_bytes / 1e9:.2f} GB; it makes at most ",
        end="",
    )
    print(f"{steady.peak_bytes / 1e9:.2f} GB alive at once (what a ring has in flight is its kernel's own)")
    print(f"estimate of a rank: {found.peak_bytes / 1e9:.2f} of {found.limit_bytes / 1e9:.1f} GB: ", end="")
    print(", ".join(f"{part} {gb:.2f}" for part, gb in estimated.items()) + f"; working set {working:.2f}")
    if spec.transformer.num_layers == T2V_A14B.transformer.num_layers:
        ratio = first.inputs_bytes / 1e9 / (estimated["weights: DiT"] / 2)  # one of two experts
        verdict.ratios[f"inputs_{where.replace('layout ', '').replace(', ', '_')}"] = ratio
        verdict.take(where, [] if 1 <= ratio < 1.05 else [f"graph inputs are {ratio:.3f} of the estimate's weights"])


def other_meshes(verdict: Verdict) -> None:
    """Every mesh of the page "Meshes on paper": one layer on one rank, its communications beside the estimate's."""
    spec, size, num_meshes = parts.shallow(T2V_A14B, 1), parts.SIZES["480p"], 0
    for mesh_on_paper in fitting(Bucket(832, 480, 81, "text")):
        layout, num_meshes = make_layout("trn2", mesh_on_paper.degrees), num_meshes + 1
        with fake_rank(layout) as mesh:
            graphs = [*parts.trace_model(spec, size, mesh), *parts.trace_guidance(spec, size, mesh)]
        verdict.take(f"{layout.degrees}", beside_estimate(spec, size, layout, graphs, parts.Way()))
        verdict.take(f"{layout.degrees}", checks.bad_routes(layout, graphs) + checks.bad_operators(graphs))
    verdict.say(f"{num_meshes} other meshes traced")


def corners(layout: Layout) -> list[int]:
    """The ranks at the ends of every axis: eight places that differ in each coordinate."""
    cfg, cp, tp = layout.degrees.shape
    return sorted({layout.table[a][b][c] for a in (0, cfg - 1) for b in (0, cp - 1) for c in (0, tp - 1)})


def clips_of(size: parts.Size) -> Clips:
    """Guided clips of this size."""
    return Clips(Bucket(size.width, size.height, size.num_frames, "text"), 40)


def table(title: str, graphs: Sequence[Graph]) -> None:
    """One line a graph."""
    print(f"\n{title}\n| graph | structure | nodes | operators | TFLOP a rank | alive, GB | given, GB |")
    print("|---|---|---|---|---|---|---|")
    for graph in graphs:
        print(
            f"| {graph.name} | {graph.structure} | {graph.num_nodes} | {len(graph.operators)} "
            f"| {graph.flops / 1e12:.2f} | {graph.peak_bytes / 1e9:.2f} | {graph.inputs_bytes / 1e9:.2f} |"
        )


def communications(graphs: Sequence[Graph]) -> None:
    """One line a kind of communication of a graph."""
    print("| graph | communication | axis | group of rank 0 | shape | dtype | times | sent, MB each |")
    print("|---|---|---|---|---|---|---|---|")
    for graph in graphs:
        for one in dict.fromkeys(graph.collectives):
            times = graph.collectives.count(one)
            group = f"{len(one.group)}: {' '.join(map(str, one.group[:8]))}{' ...' if len(one.group) > 8 else ''}"
            shape = "x".join(map(str, one.shape))
            line = f"| {graph.name} | {one.kind} | {one.axis} | {group} | {shape} | {one.dtype} | {times} "
            print(f"{line}| {one.sent_bytes / 1e6:.3f} |")


if __name__ == "__main__":
    sys.exit(main())

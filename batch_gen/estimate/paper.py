"""Meshes on paper: what every mesh that fits a machine sends in a step, and the step time that follows.

Arithmetic runs at the one measured share of the peak (`speed.efficiency`). Sums, gathers and guidance stop it, at the
link's full speed and the longest documented latency of a hop; a ring runs beside self-attention and stops it only where
it takes longer. Nothing here was measured on a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from batch_gen.estimate.flows import Flow, flows, way_of
from batch_gen.estimate.machines import TRN2, Machine
from batch_gen.estimate.memory import Footprint, Placement, footprint, gathered_bytes
from batch_gen.estimate.ranking import HOUR_S, Question, meshes
from batch_gen.estimate.speed import Rates, clip_seconds, efficiency
from batch_gen.estimate.subject import Clips, published
from batch_gen.estimate.work import forward_work, num_tokens
from batch_gen.request import Bucket
from models.parallel.layout import AXES, Degrees, check_routable, plan_replicas

STEPS: Final = 40
SHAPES: Final = {"480p": Bucket(832, 480, 81, "text"), "720p": Bucket(1280, 720, 81, "text")}
MODEL: Final = "wan2.2-t2v-a14b"
LAYOUT: Final = "trn2"
TITLE: Final = "## Meshes on paper\n"
BEGIN: Final = "<!-- made by scripts/build_scale_meshes.py: begin -->\n"
END: Final = "<!-- made by scripts/build_scale_meshes.py: end -->\n"


@dataclass(frozen=True, slots=True)
class Link:
    """One axis in one step. exposed_s: the part of `seconds` that stops the arithmetic."""

    sent_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class PaperMesh:
    """One mesh with one number of replicas on one machine, for clips of one shape.

    ideal_s: a step at the arithmetic peak. compute_s: at the measured share. links: by axis.
    rest_s: text and decoding of a clip.
    """

    degrees: Degrees
    replicas: int
    way: str
    steps: int
    memory: Footprint
    ideal_s: float
    compute_s: float
    links: dict[str, Link]
    rest_s: float

    @property
    def step_s(self) -> float:
        """Arithmetic and what stops it."""
        return self.compute_s + sum(link.exposed_s for link in self.links.values())

    @property
    def of_peak(self) -> float:
        """Share of the arithmetic peak of the replica's cores in a step."""
        return self.ideal_s / self.step_s

    @property
    def kept(self) -> float:
        """Share of a step in which no rank waits for a link."""
        return self.compute_s / self.step_s

    @property
    def clip_s(self) -> float:
        """One clip on one replica."""
        return self.steps * self.step_s + self.rest_s

    @property
    def clips_per_hour(self) -> float:
        """Of the machine, all replicas together."""
        return self.replicas * HOUR_S / self.clip_s


def on_paper(clips: Clips, placement: Placement, replicas: int, machine: Machine = TRN2) -> PaperMesh:
    """One mesh, whether or not it fits."""
    subject, rates = published(MODEL), Rates(efficiency(machine.kind))
    degrees, tokens = placement.degrees, num_tokens(subject, clips.bucket)
    way = way_of(placement, gathered_bytes(subject, tokens, placement))
    passes = clips.num_passes if degrees.cfg == 1 else 1
    cores = degrees.tp * degrees.cp
    work, peak = forward_work(subject, tokens), machine.rank_flops(placement.dtype, placement.num_ranks)
    attention_s = work.attention / (cores * peak * rates.efficiency)
    moved = flows(subject, clips, placement, way)
    links = {axis: _link([flow for flow in moved if flow.axis == axis], machine, attention_s) for axis in AXES}
    links = {axis: link if axis == "cfg" else _times(link, passes) for axis, link in links.items()}
    ideal_s = passes * work.total / (cores * peak)
    whole = clip_seconds(subject, clips, placement, machine, rates)
    rest_s = whole.text + whole.encode + whole.decode
    memory = footprint(subject, clips, placement, machine)
    compute_s = ideal_s / rates.efficiency
    return PaperMesh(degrees, replicas, way, clips.steps, memory, ideal_s, compute_s, links, rest_s)


def _link(moved: Sequence[Flow], machine: Machine, hidden_s: float) -> Link:
    seconds = {flow: flow.sent_bytes / machine.link_bytes_per_s + flow.hops * machine.hop_s for flow in moved}
    exposed = {flow: max(0.0, took - hidden_s) if flow.kind == "ring" else took for flow, took in seconds.items()}
    return Link(sum(flow.sent_bytes for flow in moved), sum(seconds.values()), sum(exposed.values()))


def _times(link: Link, passes: int) -> Link:
    return Link(passes * link.sent_bytes, passes * link.seconds, passes * link.exposed_s)


def fitting(bucket: Bucket, attention: str = "ring", machine: Machine = TRN2) -> list[PaperMesh]:
    """Every mesh and number of replicas that the machine's memory and torus take, most clips an hour first.

    Replicas are those that fill the machine; with fewer of them clips per hour fall in proportion.
    """
    clips = Clips(bucket, STEPS)
    question = Question(published(MODEL), (clips,), machine, attention, "bfloat16")
    found = []
    for degrees in meshes(question):
        replicas = machine.num_cores // degrees.size
        for layout in plan_replicas(LAYOUT, degrees, replicas):
            check_routable(layout)
        mesh = on_paper(clips, question.placed(degrees), replicas, machine)
        if mesh.memory.fits:
            found.append(mesh)
    return sorted(found, key=lambda mesh: -mesh.clips_per_hour)


def section() -> str:
    """The page's part about meshes, in Markdown."""
    share = efficiency(TRN2.kind)
    head = f"""T2V-A14B, 81 frames, {STEPS} steps, guided, bfloat16, on one {TRN2.name}; **not run on a device**. Bytes are those of the traced graphs
(`scripts/prove_full_size.py` compares them entry by entry): what one rank sends in one step, all layers, by axis. The link
gives a rank {TRN2.link_bytes_per_s / 1e9:.0f} GB/s (1024 GB/s a chip, four ranks) and a hop takes {TRN2.hop_s * 1e6:.0f} us. Arithmetic runs at {share:.3f} of the peak, the share
that the one public measurement gives. Sums over `tp`, the gathers and guidance stop it; a ring over `cp` is hidden behind
self-attention as long as that takes longer. `of peak`: a step at the peak over the predicted one; `no wait`: the share of
a step without a stop. Replicas fill the machine; with fewer of them clips per hour fall in proportion.
Meshes that are not listed do not fit into 24.0e9 bytes a core (with `--attention ring`); all that are listed are routable.
"""  # noqa: E501 - lines of the page
    return head + "".join(f"\n{name}:\n\n" + "".join(_rows(bucket)) for name, bucket in SHAPES.items()) + _reading()


def _rows(bucket: Bucket) -> Iterator[str]:
    yield (
        "| mesh | replicas | GB a core | sent by tp, GB | by cp | by cfg | links, ms | waits, ms | step, s | of peak "
        "| no wait | clip, s | clips an hour |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for mesh in fitting(bucket):
        sent = " | ".join(f"{mesh.links[axis].sent_bytes / 1e9:.3g}" for axis in ("tp", "cp", "cfg"))
        links_ms = 1e3 * sum(link.seconds for link in mesh.links.values())
        waits_ms = 1e3 * (mesh.step_s - mesh.compute_s)
        yield (
            f"| {mesh.degrees} | {mesh.replicas} | {mesh.memory.peak_bytes / 1e9:.1f} | {sent} | {links_ms:.0f} "
            f"| {waits_ms:.0f} | {mesh.step_s:.2f} | {mesh.of_peak:.1%} | {mesh.kept:.1%} | {mesh.clip_s:.1f} "
            f"| {mesh.clips_per_hour:.1f} |\n"
        )


def _reading() -> str:
    hd = fitting(SHAPES["720p"])
    fastest = min(hd, key=lambda mesh: mesh.clip_s)
    spread = hd[0].clips_per_hour / hd[-1].clips_per_hour - 1
    return f"""
At 720p the fastest clip comes from {fastest.degrees} ({fastest.clip_s:.0f} s), the most clips an hour from {hd[0].degrees} on {hd[0].replicas}
replicas; the best and the last mesh are {spread:.0%} apart. That is less than what such arithmetic can tell, as small pieces of work
run at a lower share of the peak than large ones (docs/plan.md shows the misses): what decides is memory, the time of one
clip, and how much a lost replica costs.
"""  # noqa: E501 - lines of the page


def with_section(page: str) -> str:
    """A page with the section as it is now, in its place or at the end; the rest of it is written by hand."""
    made = f"{BEGIN}{section()}{END}"
    if BEGIN in page:
        before, _, rest = page.partition(BEGIN)
        return before + made + rest.partition(END)[2]
    return f"{page.rstrip()}\n\n{TITLE}\n{made}"

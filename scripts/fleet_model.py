"""A fleet that renders one run, event by event: claims, cold starts, Spot losses, the tail. No clock, no store.

The rules are those of `batch_gen`: chunks are cut by `batch_gen.chunks.cut`, claimed largest cost first, shared by the
replicas of one worker, freed at once by a drain and after ttl + grace by a death, and a worker leaves when everything
left is in the hands of others and it has lingered for ttl + grace.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from batch_gen.chunks import ChunkRules, cut
from batch_gen.work import ClaimOptions

STALE_S = ClaimOptions().ttl_s + ClaimOptions().grace_s
POLL_S = 5.0
ANY_LIFE = -1


class Request(NamedTuple):
    """What `cut` looks at: a class of clips."""

    bucket: str
    cost: float
    priority: int = 0


class Row(NamedTuple):
    """A row of the manifest, as far as `cut` cares."""

    request: Request
    source: str
    row_group: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated; seconds throughout.

    Attributes:
        classes: (seconds of a clip on one node, share of the rows).
        order: Of the manifest's rows: "shuffled" or "sorted" by cost.
        lease: Clips of a chunk at most.
        assign: "lease", "static" (chunk c belongs to worker c mod nodes) or "blocks" (contiguous shares).
        replicas: Of a node; each takes `replicas` times as long for a clip, less `replica_gain` of it.
        slow: (share of the nodes, times as slow).
        cold_s: From the start of a node to its first clip, paid.
        between_losses_s: Mean of one node's time to a Spot loss, 0 for none; `away_s` until its successor starts.
        notice_s: Warning before a loss: the worker drains; 0: it just dies.
        claim_s: Of one chunk: lease, heads of its records.
    """

    nodes: int = 16
    rows: int = 10_000
    classes: tuple[tuple[float, float], ...] = ((25.0, 0.5), (60.0, 0.3), (180.0, 0.2))
    order: str = "shuffled"
    row_group: int = 10_000
    lease: int = 64
    assign: str = "lease"
    replicas: int = 1
    replica_gain: float = 0.0
    slow: tuple[float, float] = (0.125, 1.3)
    cold_s: float = 600.0
    between_losses_s: float = 0.0
    away_s: float = 1500.0
    notice_s: float = 120.0
    claim_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went: wall hours beside the ideal, paid node hours, and what of them made no clip that stands."""

    hours: float
    ideal_hours: float
    node_hours: float
    made_hours: float
    cold_hours: float
    lost_hours: float
    num_losses: int

    @property
    def idle_hours(self) -> float:
        """Paid hours in which a node waited: for a claim, for the tail, for its end."""
        return self.node_hours - self.made_hours - self.cold_hours - self.lost_hours

    @property
    def waste(self) -> float:
        """Share of the paid time that made no clip."""
        return 1.0 - self.made_hours / self.node_hours


class Flight(NamedTuple):
    """A clip in the making: when it began and ends, its seconds on a whole node of full speed, its chunk."""

    began: float
    ends: float
    clip_s: float
    chunk: int


class Entry(NamedTuple):
    """A chunk, or what is left of one, in order of claims."""

    rank: float
    tie: float
    chunk: int
    clips: list[float]


@dataclass(slots=True)
class Node:
    """One machine; `born` is the start of its present life, None while it is away or has left."""

    index: int
    pace: float
    born: float | None = None
    life: int = 0
    ready_at: float = 0.0
    chunk: int = -1
    waiting: deque[float] = field(default_factory=deque)
    flying: dict[int, Flight] = field(default_factory=dict)
    idle_since: dict[int, float] = field(default_factory=dict)


def cut_chunks(fleet: Fleet, dice: random.Random) -> list[list[float]]:
    """The chunks of the manifest as the seconds of their clips, in order of the plan."""
    requests = [Request(f"{seconds:07.1f}", seconds) for seconds, _ in fleet.classes]
    shares = list(itertools.accumulate(share for _, share in fleet.classes))
    kinds = [sum(row / fleet.rows >= share - 1e-12 for share in shares) for row in range(fleet.rows)]
    if fleet.order == "shuffled":
        dice.shuffle(kinds)
    rows = (Row(requests[kind], "m", number // fleet.row_group) for number, kind in enumerate(kinds))
    rules = ChunkRules(fleet.rows, fleet.lease)
    return [[row.request.cost for row in chunk] for chunk in cut(rows, rules)]  # type: ignore[type-var]


class Simulation:
    """One life of a fleet."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.dice = fleet, random.Random(seed)
        chunks = cut_chunks(fleet, self.dice)
        self.total_s = sum(map(sum, chunks))
        num_slow = round(fleet.slow[0] * fleet.nodes)
        self.nodes = [Node(i, fleet.slow[1] if i < num_slow else 1.0) for i in range(fleet.nodes)]
        self.pools = self._pools(chunks)
        self.num_open = len(chunks)
        self.left = {number: len(chunk) for number, chunk in enumerate(chunks)}
        self.events: list[tuple[float, int, str, int, int, int]] = []
        self.parked: dict[int, Entry] = {}
        self.count = itertools.count()
        self.paid_s = self.cold_s = self.lost_s = self.made_s = self.end = 0.0
        self.num_losses = 0

    def run(self) -> Outcome:
        """Until every clip is made."""
        for node in self.nodes:
            self._boot(0.0, node)
        while self.num_open:
            now, _, what, index, life, extra = heapq.heappop(self.events)
            if life in {self.nodes[index].life, ANY_LIFE}:
                getattr(self, f"_{what}")(now, self.nodes[index], extra)
        for node in self.nodes:
            if node.born is not None:
                self._leave(max(self.end, node.born), node)
        fleet_speed = sum(1 / node.pace for node in self.nodes)
        return Outcome(
            hours=self.end / 3600,
            ideal_hours=self.total_s / fleet_speed / 3600,
            node_hours=self.paid_s / 3600,
            made_hours=self.made_s / 3600,
            cold_hours=self.cold_s / 3600,
            lost_hours=self.lost_s / 3600,
            num_losses=self.num_losses,
        )

    def _pools(self, chunks: list[list[float]]) -> list[list[Entry]]:
        """Heaps of what may be claimed, the largest cost first; one for all workers or one for each."""
        num_pools = 1 if self.fleet.assign == "lease" else self.fleet.nodes
        pools: list[list[Entry]] = [[] for _ in range(num_pools)]
        for number, chunk in enumerate(chunks):
            home = number * num_pools // len(chunks) if self.fleet.assign == "blocks" else number % num_pools
            pools[home].append(Entry(-sum(chunk), self.dice.random(), number, chunk))
        for pool in pools:
            heapq.heapify(pool)
        return pools

    def _pool(self, node: Node) -> list[Entry]:
        return self.pools[node.index % len(self.pools)]

    def _after(self, moment: float, what: str, node: Node, extra: int = 0, *, always: bool = False) -> None:
        life = ANY_LIFE if always else node.life
        heapq.heappush(self.events, (moment, next(self.count), what, node.index, life, extra))

    def _boot(self, now: float, node: Node, _: int = 0) -> None:
        node.born, node.ready_at = now, now + self.fleet.cold_s
        for replica in range(self.fleet.replicas):
            self._after(node.ready_at, "take", node, replica)
        if self.fleet.between_losses_s:
            self._after(now + self.dice.expovariate(1 / self.fleet.between_losses_s), "loss", node)

    def _take(self, now: float, node: Node, replica: int) -> None:
        """A replica asks for its next clip."""
        pool = self._pool(node)
        if not node.waiting and pool:
            entry = heapq.heappop(pool)
            node.chunk, node.waiting = entry.chunk, deque(entry.clips)
            now += self.fleet.claim_s
        if not node.waiting:
            self._idle(now, node, replica)
            return
        node.idle_since.pop(replica, None)
        clip_s = node.waiting.popleft()
        ends = now + clip_s * self._stretch(node)
        node.flying[replica] = Flight(now, ends, clip_s, node.chunk)
        self._after(ends, "made", node, replica)

    def _idle(self, now: float, node: Node, replica: int) -> None:
        """Nothing can be had: look again soon, or leave for good when all replicas have waited long enough."""
        since = node.idle_since.setdefault(replica, now)
        patience_s = STALE_S if self.fleet.assign == "lease" else 0.0
        if len(node.idle_since) == self.fleet.replicas and now - since >= patience_s:
            self._leave(now, node)
        else:
            self._after(now + POLL_S, "take", node, replica)

    def _stretch(self, node: Node) -> float:
        """Seconds that one replica takes for a second's work of a whole node."""
        fleet = self.fleet
        return node.pace * fleet.replicas * (1.0 - fleet.replica_gain if fleet.replicas > 1 else 1.0)

    def _made(self, now: float, node: Node, replica: int) -> None:
        flight = node.flying.pop(replica)
        self.made_s += (now - flight.began) / self.fleet.replicas
        self._settle(now, flight.chunk)
        self._take(now, node, replica)

    def _settle(self, now: float, chunk: int) -> None:
        self.left[chunk] -= 1
        if self.left[chunk] == 0:
            self.num_open -= 1
            self.end = max(self.end, now)

    def _leave(self, now: float, node: Node) -> None:
        assert node.born is not None
        self.paid_s += now - node.born
        self.cold_s += min(now, node.ready_at) - node.born
        node.born = None
        node.life += 1

    def _loss(self, now: float, node: Node, _: int) -> None:
        """The node is taken: what fits into the notice is finished, the rest of its chunks is made by others."""
        self.num_losses += 1
        back: dict[int, list[float]] = {}
        for flight in node.flying.values():
            if flight.ends <= now + self.fleet.notice_s:
                self.made_s += (flight.ends - flight.began) / self.fleet.replicas
                self._settle(flight.ends, flight.chunk)
            else:
                self.lost_s += (now - flight.began) / self.fleet.replicas
                back.setdefault(flight.chunk, []).append(flight.clip_s)
        if node.waiting:
            back.setdefault(node.chunk, []).extend(node.waiting)
        node.flying, node.waiting, node.idle_since = {}, deque(), {}
        self._leave(now + self.fleet.notice_s, node)
        self._after(now + self.fleet.notice_s + self.fleet.away_s, "boot", node)
        for chunk, clips in back.items():
            self._give_back(now, node, Entry(-sum(clips), self.dice.random(), chunk, clips))

    def _give_back(self, now: float, node: Node, entry: Entry) -> None:
        """At once after a drain; a dead worker's lease must grow stale first."""
        if self.fleet.notice_s or self.fleet.assign != "lease":
            heapq.heappush(self._pool(node), entry)
            return
        self.parked[entry.chunk] = entry
        self._after(now + STALE_S, "free", node, entry.chunk, always=True)

    def _free(self, _: float, node: Node, chunk: int) -> None:
        heapq.heappush(self._pool(node), self.parked.pop(chunk))

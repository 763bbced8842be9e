"""A run on 1 to 1,000 nodes, simulated: hours, dollars and waste for lease sizes, replicas and static shards.

Run: python scripts/bench_fleet.py [--tiny] [--rows N] [--seeds N] [--price DOLLARS]
Clips of three costs, an eighth of the nodes 1.3 times slower, cold starts of ten minutes, Spot losses every four hours
per node with 25 minutes to come back (`scripts/fleet_model.py` has the rules, docs/scale.md the tables). The ideal is
the same work without cold starts, losses and tail. The last line is one JSON object; `ok` says that every clip was made
and that no run beat the ideal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fleet_model import Fleet, Outcome, Simulation

PRICE = 14.56  # dollars an hour of a trn2.48xlarge, unverified; a setting everywhere
SPOT_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Line:
    """Means over seeds."""

    hours: float
    ideal: float
    dollars: float
    ideal_dollars: float
    waste: float
    cold: float
    lost: float
    idle: float

    @property
    def times(self) -> float:
        """Hours over the ideal."""
        return self.hours / self.ideal


def simulate(fleet: Fleet, seeds: int, price: float) -> Line:
    """Several lives of a fleet, averaged."""
    lives = [Simulation(fleet, seed).run() for seed in range(seeds)]

    def mean(of) -> float:
        return statistics.fmean(of(life) for life in lives)

    def share(of) -> float:
        return mean(lambda life: of(life) / life.node_hours)

    return Line(
        hours=mean(lambda life: life.hours),
        ideal=mean(lambda life: life.ideal_hours),
        dollars=mean(lambda life: life.node_hours * price),
        ideal_dollars=mean(lambda life: life.ideal_hours * fleet.nodes * price),
        waste=mean(lambda life: life.waste),
        cold=share(lambda life: life.cold_hours),
        lost=share(lambda life: life.lost_hours),
        idle=share(_idle),
    )


def _idle(life: Outcome) -> float:
    return life.idle_hours


HEADER = (
    f"{'':42} {'hours':>8} {'ideal':>8} {'times':>6} {'dollars':>10} {'ideal $':>10}"
    f" {'waste':>6} {'cold':>6} {'lost':>6} {'idle':>6}"
)


def table(title: str, fleets: dict[str, Fleet], seeds: int, price: float) -> dict[str, Line]:
    """Simulate and print one table."""
    print(f"\n{title}\n{HEADER}")
    found = {}
    for name, fleet in fleets.items():
        line = found[name] = simulate(fleet, seeds, price)
        print(
            f"{name:42} {line.hours:8.2f} {line.ideal:8.2f} {line.times:6.2f} {line.dollars:10,.0f}"
            f" {line.ideal_dollars:10,.0f} {line.waste:6.1%} {line.cold:6.1%} {line.lost:6.1%} {line.idle:6.1%}",
            flush=True,
        )
    return found


def policies(base: Fleet, sizes: list[int]) -> dict[str, Fleet]:
    """Static shards beside leases of several sizes, without and with Spot losses, both orders of rows."""
    ways = {"blocks of rows per node": replace(base, assign="blocks"), "static, chunk mod nodes": _static(base)}
    ways |= {f"lease of {size}": replace(base, lease=size) for size in sizes}
    fleets = {}
    for order in ("shuffled", "sorted"):
        for spot, between in (("", 0.0), (", Spot", SPOT_S)):
            for name, fleet in ways.items():
                fleets[f"{name}, {order}{spot}"] = replace(fleet, order=order, between_losses_s=between)
    return fleets


def _static(base: Fleet) -> Fleet:
    return replace(base, assign="static")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few hundred rows: shows that the script works")
    parser.add_argument("--rows", type=int, default=100_000, help="of the tables over nodes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--price", type=float, default=PRICE, help="dollars an hour of one node")
    options = parser.parse_args()
    small, large = (400, 800) if options.tiny else (10_000, options.rows)
    counts = [1, 4] if options.tiny else [1, 4, 16, 64, 256, 1000]
    seeds = 1 if options.tiny else options.seeds
    group = max(100, small // 4)
    base = Fleet(rows=small, row_group=group, nodes=4 if options.tiny else 16)
    spot = replace(base, between_losses_s=SPOT_S, rows=large)

    def show(title: str, fleets: dict[str, Fleet]) -> dict[str, Line]:
        return table(title, fleets, seeds, options.price)

    by_policy = show(f"{small:,} rows on {base.nodes} nodes", policies(base, [64, 16, 4]))
    by_nodes = show(
        f"{large:,} rows, Spot",
        {
            f"{nodes} nodes, lease of {size}": replace(spot, nodes=nodes, lease=size)
            for nodes in counts
            for size in (64, 16, 4)
        },
    )
    replicas = show(
        f"{large:,} rows, Spot, replicas of a node (each as fast as its share)",
        {
            f"{nodes} nodes, {r} replicas": replace(spot, nodes=nodes, replicas=r)
            for nodes in counts[1:4]
            for r in (1, 4, 16)
        },
    )
    losses = show(
        f"{small:,} rows on {base.nodes} nodes, lease of 16",
        {
            f"loss every {hours} h, {'2 min notice' if notice else 'no notice'}": replace(
                base, lease=16, between_losses_s=hours * 3600.0, notice_s=notice
            )
            for hours in (8, 2, 1)
            for notice in (120.0, 0.0)
        },
    )
    lines = [*by_policy.values(), *by_nodes.values(), *replicas.values(), *losses.values()]
    ok = all(line.times >= 0.9999 for line in lines)
    print(json.dumps({"name": "fleet", "ok": ok, "ratios": ratios(by_policy, by_nodes, counts[-1])}))
    return 0 if ok else 1


def ratios(by_policy: dict[str, Line], by_nodes: dict[str, Line], most: int) -> dict[str, float]:
    """Hours over hours."""
    lease, static = "lease of 16, shuffled, Spot", "static, chunk mod nodes, shuffled, Spot"
    return {
        "static_vs_lease_16_spot": _ratio(by_policy, static, lease),
        "blocks_vs_lease_16_spot": _ratio(by_policy, "blocks of rows per node, shuffled, Spot", lease),
        "lease_64_vs_16_spot": _ratio(by_policy, "lease of 64, shuffled, Spot", lease),
        "lease_16_vs_ideal_spot": round(by_policy[lease].times, 3),
        "largest_fleet_64_vs_ideal": round(by_nodes[f"{most} nodes, lease of 64"].times, 3),
        "largest_fleet_16_vs_ideal": round(by_nodes[f"{most} nodes, lease of 16"].times, 3),
    }


def _ratio(lines: dict[str, Line], slow: str, fast: str) -> float:
    return round(lines[slow].hours / lines[fast].hours, 3)


if __name__ == "__main__":
    sys.exit(main())

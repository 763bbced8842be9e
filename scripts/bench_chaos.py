"""Many workers, any of them killed or stopped at any moment: what is left is held against what is promised.

    python scripts/bench_chaos.py [--seeds 3 --clips 500 --workers 8 --kills 20 --pauses 20] [--proxy] [--tiny]

Each seed starts a fresh output root on a real S3 server (SeaweedFS, on this machine), real `batch-gen run` processes
with the fake engine, and kills (SIGKILL) and stops (SIGSTOP, longer than the leases' ttl) supervisors and engines at
random moments. Whoever was killed or asks for it (exit 75) is started again. Afterwards `batch-gen verify --deep`, the
engines' own trace and the done log must agree that every clip was made exactly once. `--proxy` puts a server in
between that loses answers, refuses, delays and cuts. The last line is JSON; `ok` speaks of correctness alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.proxy import FaultProxy
from tests.chaos.storm import Outcome, Storm, Weather, judge
from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

PROXY_RATES = {"lost": 0.01, "error": 0.01, "busy": 0.01, "conflict": 0.03, "cut": 0.01, "slow": 0.02}
COLUMNS = (
    "seed", "clips", "kills", "stops", "starts", "seconds", "begun", "twice", "bound", "late", "quarantined", "verdict",
)  # fmt: skip


def main() -> int:
    """Run the seeds; 0 when all of them kept every promise."""
    options = parse()
    outcomes = []
    began = time.monotonic()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    with server() as endpoint:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            if options.budget_s and time.monotonic() - began > options.budget_s:
                print(f"the budget of {options.budget_s:g} s is used up after {len(outcomes)} seeds", file=sys.stderr)
                break
            outcomes.append(one_seed(options, seed, endpoint))
            print(row(outcomes[-1]), flush=True)
    for outcome in outcomes:
        for fault in outcome.faults:
            print(f"seed {outcome.weather.seed}: {fault}", file=sys.stderr)
    print(json.dumps(verdict(outcomes)))
    return 0 if outcomes and all(outcome.ok for outcome in outcomes) else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pauses", type=int, default=20)
    parser.add_argument("--ttl-s", type=float, default=4.0)
    parser.add_argument("--patience-s", type=float, default=900.0, help="a seed that takes longer has failed")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no further seed after so long")
    parser.add_argument("--proxy", action="store_true", help="faults between the workers and the server")
    parser.add_argument("--tiny", action="store_true", help="one seed, 10 clips, 2 workers, one kill and one stop")
    options = parser.parse_args()
    if options.tiny:
        options.seeds, options.clips, options.workers, options.kills, options.pauses = 1, 10, 2, 1, 1
    return options


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A fresh SeaweedFS; credentials are in the environment of everything that is started."""
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}
    folder = Path(tempfile.mkdtemp(prefix="chaos-weed-"))
    seaweed = SeaweedServer(folder)
    try:
        seaweed.start().make_bucket("chaos")
        yield seaweed.endpoint
    finally:
        seaweed.stop()
        shutil.rmtree(folder, ignore_errors=True)


def one_seed(options: argparse.Namespace, seed: int, endpoint: str) -> Outcome:
    """One storm and its judgement."""
    weather = Weather(
        seed,
        clips=options.clips,
        workers=options.workers,
        kills=options.kills,
        pauses=options.pauses,
        ttl_s=options.ttl_s,
        patience_s=options.patience_s,
    )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        through = endpoint
        if options.proxy:
            through = stack.enter_context(FaultProxy(endpoint, PROXY_RATES, seed)).endpoint
        storm = Storm(weather, f"s3://chaos/seed-{seed}", folder, through)
        storm.run()
        return judge(storm, endpoint)


def row(outcome: Outcome) -> str:
    """One line of the table."""
    blows = outcome.blows
    kills, stops = (f"{blows[f'{kind} supervisor']}+{blows[f'{kind} engine']}" for kind in ("kill", "pause"))
    cells = [outcome.weather.seed, f"{outcome.committed}/{outcome.weather.clips}", kills, stops, outcome.starts]
    cells += [f"{outcome.seconds:.0f}", outcome.renders_begun, outcome.double_renders, outcome.bound]
    cells += [outcome.late_writers, outcome.quarantined, "as promised" if outcome.ok else "WRONG"]
    return "| " + " | ".join(map(str, cells)) + " |"


def verdict(outcomes: list[Outcome]) -> dict[str, object]:
    """The last line: the worst over all seeds."""
    ratios = {
        "committed": min((o.committed / o.weather.clips for o in outcomes), default=0.0),
        "quarantined": max((o.quarantined / o.weather.clips for o in outcomes), default=1.0),
        "double_renders_of_bound": max((o.double_renders / max(1, o.bound) for o in outcomes), default=1.0),
        "renders_begun_per_clip": max((o.renders_begun / o.weather.clips for o in outcomes), default=0.0),
    }
    ok = bool(outcomes) and all(outcome.ok for outcome in outcomes)
    return {"name": "chaos", "ok": ok, "ratios": {name: round(value, 4) for name, value in ratios.items()}}


if __name__ == "__main__":
    sys.exit(main())

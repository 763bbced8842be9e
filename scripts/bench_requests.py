"""S3 requests of a run, counted on a small one and held against the formula; then the budget up to 100,000,000 rows.

Run: python scripts/bench_requests.py [--tiny] [--clip-s SECONDS] [--price DOLLARS]
A real `batch-gen run` with the fake engine works on a real S3 server (SeaweedFS, on this machine) through a proxy that
counts (tests/chaos/proxy.py). The formula (scripts/request_budget.py) follows from what the code writes and reads. The
last line is one JSON object; `ok` says that the counted run agrees with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from request_budget import KINDS, READS_PER_S, WRITES_PER_S, Counts, Shape, dollars, over_time, total, undisturbed

CHUNK = 64
# Calls of `next` that only wait, and leases written once more because a clip of another chunk was in flight.
SLACK = {"PUT": 1, "GET": 2}


def count(num_clips: int, num_chunks: int) -> tuple[Counts, float]:
    """Requests of a small run, as the proxy saw them, and the hours that it took."""
    from tests.chaos.proxy import FaultProxy
    from tests.e2e.helpers import command, small_manifest
    from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = SeaweedServer(folder / "weed").start()
        try:
            server.make_bucket("runs")
            with FaultProxy(server.endpoint, {}) as proxy:
                manifest = small_manifest(folder / "m.parquet", num_clips)
                flags = ("--model", "fake", "--s3-endpoint", proxy.endpoint)
                flags += ("--chunk-requests", str(-(-num_clips // num_chunks)))
                run = command(manifest, "s3://runs/bench", *flags)
                began = time.monotonic()
                subprocess.run(run, cwd=ROOT, env=os.environ | keys, check=True, capture_output=True)
                return {kind: float(proxy.requests[kind]) for kind in KINDS}, (time.monotonic() - began) / 3600
        finally:
            server.stop()


def agrees(counted: Counts, shape: Shape) -> bool:
    """Whether a counted run is what the formula says, within `SLACK` for each chunk and a request or two."""
    expected, more = undisturbed(shape), over_time(shape)
    room = {kind: SLACK.get(kind, 0) * (shape.chunks + 2) + 2 + more[kind] for kind in expected}
    return all(-2 <= counted[kind] - expected[kind] <= room[kind] for kind in expected)


def budget(clip_s: float, price: float) -> None:
    """The table: what a run of so many rows asks of S3, on as many nodes as make it last about four days."""
    print(
        f"\n{'rows':>12} {'nodes':>6} {'hours':>6} {'PUT':>14} {'GET':>14} {'HEAD':>14} {'LIST':>11} {'S3 $':>9}"
        f" {'node $':>13} {'writes/s':>9} {'reads/s':>8}"
    )
    for rows, nodes in ((10_000, 2), (100_000, 16), (1_000_000, 160), (10_000_000, 1600), (100_000_000, 16_000)):
        hours = rows * clip_s / 3600 / nodes
        counts = total(Shape(rows, -(-rows // CHUNK), nodes, hours))
        writes = (counts["PUT"] + counts["LIST"] + counts["DELETE"]) / hours / 3600
        reads = (counts["GET"] + counts["HEAD"]) / hours / 3600
        flag = " above one prefix" if writes > WRITES_PER_S or reads > READS_PER_S else ""
        print(
            f"{rows:12,} {nodes:6,} {hours:6.0f} {counts['PUT']:14,.0f} {counts['GET']:14,.0f} {counts['HEAD']:14,.0f}"
            f" {counts['LIST']:11,.0f} {dollars(counts):9,.2f} {hours * nodes * price:13,.0f} {writes:9.1f}"
            f" {reads:8.1f}{flag}"
        )


def main() -> int:
    """Count, compare, print the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="6 clips: shows that the script works")
    parser.add_argument("--clip-s", type=float, default=60.0, help="seconds of a clip on one node, for the budget")
    parser.add_argument("--price", type=float, default=14.56, help="dollars an hour of one node")
    options = parser.parse_args()
    clips, chunks = (6, 3) if options.tiny else (48, 6)
    counted, hours = count(clips, chunks)
    shape = Shape(clips, chunks, hours=hours)
    expected = undisturbed(shape)
    for kind in expected:
        print(f"{kind:<7} counted {counted[kind]:5.0f}  formula {expected[kind]:5.0f}")
    budget(options.clip_s, options.price)
    ok = agrees(counted, shape)
    ratios = {f"{kind.lower()}_vs_formula": round(counted[kind] / expected[kind], 3) for kind in ("PUT", "GET", "HEAD")}
    print(json.dumps({"name": "requests", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

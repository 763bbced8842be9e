"""64 workers claim on one store: requests a second, how long a claim takes, how many were in vain.

Run: python scripts/bench_claims.py [--tiny] [--workers N] [--clips N] [--processes N] [--clip-ms MS] [--memory]

Real `ClaimSource`s, one thread each in a few processes, on a real S3 server (SeaweedFS, on this machine) or in memory.
A clip is a pause and its record, so that nothing but the protocol works. Client and server share this machine's cores:
the rates are what this machine does, the requests per clip and chunk are those of any. The last line is one JSON
object; `ok` says that every clip was made exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from bench_resume import BASE, CountingStore
from request_budget import PER_CHUNK, PER_CLIP

from batch_gen.chunks import PlanRow
from batch_gen.claims import Assignment, ClaimOptions, ClaimSource, Wait
from batch_gen.layout import LEASE_PREFIX, record_key
from batch_gen.plan import PlanOptions, load_plan, plan_run
from batch_gen.storage.base import AlreadyExists, Store, StoreOptions, open_store
from batch_gen.storage.memory import MemoryStore

CHUNK = 16


class Watched(CountingStore):
    """Counts claims, and those of them that came too late."""

    def create(self, key: str, *args: Any, **kwargs: Any) -> str:
        """As the store's; a refused claim is noted."""
        self.requests["put"] += 1
        try:
            return self.store.create(key, *args, **kwargs)
        except AlreadyExists:
            self.requests["in_vain"] += key.startswith(LEASE_PREFIX)
            raise


class Worker:
    """One worker's thread, and what it saw."""

    def __init__(self, store: Store, number: int, clip_s: float) -> None:
        self.store, self.clip_s = Watched(store), clip_s
        self.source = ClaimSource(self.store, load_plan(self.store), f"w{number}", ClaimOptions(linger_s=0.0))
        self.made: list[str] = []
        self.chunks: set[str] = set()
        self.claims_s: list[float] = []

    def run(self) -> None:
        """Claim and make clips until nothing is left."""
        with self.source:
            while not isinstance(work := self._next(), Wait | None):
                self.source.started(work.clip_id)
                time.sleep(self.clip_s)
                self.store.create(record_key(work.clip_id), b"{}")
                self.source.committed(work.clip_id)
                self.made.append(work.clip_id)
            self.source.release()

    def _next(self) -> Assignment | Wait | None:
        began = time.perf_counter()
        work = self.source.next()
        if isinstance(work, Assignment) and work.chunk not in self.chunks:
            self.chunks.add(work.chunk)
            self.claims_s.append(time.perf_counter() - began)
        return work


def crowd(store: Store, first: int, count: int, clip_s: float) -> dict[str, Any]:
    """Some workers as threads of this process; what they saw together."""
    workers = [Worker(store, first + n, clip_s) for n in range(count)]
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Worker.run, workers))
    requests: Counter[str] = Counter()
    for worker in workers:
        requests.update(worker.store.requests)
    return {
        "seconds": time.perf_counter() - began,
        "requests": dict(requests),
        "claims_s": [s for worker in workers for s in worker.claims_s],
        "made": [clip for worker in workers for clip in worker.made],
    }


def plan_clips(store: Store, num_clips: int) -> None:
    """A plan of equal clips in chunks of 16."""
    rows = [PlanRow(replace(BASE, clip_id=f"c{n}", row_id=f"c{n}"), "m", 0, n) for n in range(num_clips)]
    plan_run(store, lambda: rows, PlanOptions(max_requests=CHUNK, num_clips=num_clips))


def on_server(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Processes of workers against a server of their own."""
    from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}
    with tempfile.TemporaryDirectory() as folder:
        server = SeaweedServer(Path(folder)).start()
        try:
            server.make_bucket("runs")
            plan_clips(open_store("s3://runs/bench", StoreOptions(endpoint_url=server.endpoint)), options.clips)
            share = options.workers // options.processes
            command = [sys.executable, __file__, "--endpoint", server.endpoint, "--workers", str(share)]
            command += ["--clip-ms", str(options.clip_ms), "--first"]
            children = [
                subprocess.Popen([*command, str(n * share)], stdout=subprocess.PIPE, text=True)
                for n in range(options.processes)
            ]
            return [json.loads(child.communicate()[0]) for child in children]
        finally:
            server.stop()


def summary(found: list[dict[str, Any]], num_clips: int) -> tuple[bool, dict[str, float]]:
    """Print the figures; whether every clip was made once, and the ratios."""
    requests: Counter[str] = Counter()
    for part in found:
        requests.update(part["requests"])
    claims_s = sorted(s for part in found for s in part["claims_s"])
    seconds = max(part["seconds"] for part in found)
    in_vain, num_chunks = requests.pop("in_vain", 0), len(claims_s)
    made = Counter(clip for part in found for clip in part["made"])
    ok = set(made.values()) == {1} and len(made) == num_clips
    deciles = statistics.quantiles(claims_s, n=20)
    total = sum(requests.values())
    print(f"{num_clips:,} clips in {num_chunks:,} chunks, {seconds:.1f} s, {total / seconds:,.0f} requests/s")
    print(f"requests {dict(sorted(requests.items()))}; claims in vain {in_vain}")
    print(f"claim: median {deciles[9] * 1e3:.0f} ms, 95 of 100 below {deciles[18] * 1e3:.0f} ms, {claims_s[-1]:.2f} s")
    # Without engine there are no files and no metrics: one write less a clip, one less a chunk.
    expected = (PER_CLIP["PUT"] - 1) * num_clips + (PER_CHUNK["PUT"] - 1) * num_chunks
    ratios = {
        "writes_vs_formula": round(requests["put"] / expected, 3),
        "claims_per_chunk": round(1 + in_vain / num_chunks, 3),
        "requests_per_clip": round(total / num_clips, 2),
    }
    return ok, ratios


def main() -> int:
    """Start the workers and print what they saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few clips in memory: shows that the script works")
    parser.add_argument("--memory", action="store_true", help="a store in memory instead of a server")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--clips", type=int, default=8192)
    parser.add_argument("--clip-ms", type=float, default=0.0, help="how long a clip takes")
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    clip_s = options.clip_ms / 1000
    if options.endpoint:
        store = open_store("s3://runs/bench", StoreOptions(endpoint_url=options.endpoint))
        print(json.dumps(crowd(store, options.first, options.workers, clip_s)))
        return 0
    if options.tiny:
        options.memory, options.workers, options.clips = True, 4, 256
    if options.memory:
        store = MemoryStore()
        plan_clips(store, options.clips)
        found = [crowd(store, 0, options.workers, clip_s)]
    else:
        found = on_server(options)
    ok, ratios = summary(found, options.clips)
    print(json.dumps({"name": "claims", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

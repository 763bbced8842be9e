"""Status and resume of a run with a million finished clips: requests, seconds and memory, before and after folding.

    python scripts/bench_resume.py [--clips 1000000] [--unfinished 16] [--s3] [--tiny]

Without `--s3` a store in memory counts the requests that S3 would see (a listing costs one per 1,000 keys); with it the
log lies on a real S3 server (SeaweedFS, on this machine). `--tiny` shows that the script works. The last line is JSON;
`ok` says that the status counted right, and that the resume made exactly what was missing and looked at no finished
clip.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from batch_gen.chunks import PlanRow
from batch_gen.claims import Assignment, ClaimOptions, ClaimSource
from batch_gen.donelog import DoneChunk, DoneLog
from batch_gen.held import COMMITTED
from batch_gen.plan import PlanOptions, load_plan, plan_run
from batch_gen.request import RenderRequest
from batch_gen.runfile import new_run, open_run
from batch_gen.status import run_status
from batch_gen.storage.base import Store, StoreOptions, open_store
from batch_gen.storage.memory import MemoryStore

ROW_GROUP = 10_000
KEYS_PER_PAGE = 1000
FIRST_DAY = datetime(2026, 1, 1, tzinfo=UTC)
REQUESTS = {"get": "get", "download": "get", "head": "head", "create": "put", "replace": "put"}
BASE = RenderRequest(
    clip_id="",
    row_id="",
    sample=0,
    prompt="a fox in the snow, morning light, slow pan to the left",
    negative_prompt="",
    seed=7,
    width=832,
    height=480,
    num_frames=81,
    fps=Fraction(16),
    steps=40,
    guidance_high=4.0,
    guidance_low=3.0,
    flow_shift=12.0,
)


class CountingStore:
    """A store, and a count of what S3 would charge."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name):
        """Count each call under the name of its request."""
        if name in REQUESTS:
            self.requests[REQUESTS[name]] += 1
        return getattr(self.store, name)

    def list(self, prefix):
        """Count one request per page."""
        entries = list(self.store.list(prefix))
        self.requests["list"] += max(1, -(-len(entries) // KEYS_PER_PAGE))
        return iter(entries)


@contextlib.contextmanager
def opened(on_s3: bool) -> Iterator[Store]:
    """A fresh store: in memory, or on a server of its own."""
    if not on_s3:
        yield MemoryStore()
        return
    from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_DEFAULT_REGION": REGION}
    with tempfile.TemporaryDirectory() as folder:
        server = SeaweedServer(Path(folder)).start()
        try:
            server.make_bucket("runs")
            yield open_store("s3://runs/bench", StoreOptions(endpoint_url=server.endpoint))
        finally:
            server.stop()


def rows(num_clips: int):
    """The manifest, in row groups of 10,000."""
    for n in range(num_clips):
        clip_id = f"shot-{n:07d}"
        yield PlanRow(replace(BASE, clip_id=clip_id, row_id=clip_id), "m.parquet", n // ROW_GROUP, n)


def finish_all_but(store: Store, num_unfinished: int) -> set[str]:
    """Write the done log of a run that is nearly through; returns the clips that are left."""
    plan, log = load_plan(store), DoneLog(store)
    open_chunks = plan.chunks[:: max(1, len(plan.chunks) // num_unfinished)][:num_unfinished]
    left = {request.clip_id for chunk in open_chunks for request in plan.requests(chunk)}
    open_ids = {chunk.id for chunk in open_chunks}

    def finished() -> Iterator[DoneChunk]:
        for number, chunk in enumerate(chunk for chunk in plan.chunks if chunk.id not in open_ids):
            clips = {f"shot-{chunk.start + n:07d}": COMMITTED for n in range(chunk.num_clips)}  # as `rows` names them
            counts = {"started": float(chunk.num_clips), "own_clips": float(chunk.num_clips), "seconds": 900.0}
            moment = (FIRST_DAY + timedelta(seconds=number)).isoformat()
            yield DoneChunk(chunk=chunk.id, worker=f"w{number % 64}", clips=clips, counts=counts, finished=moment)

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(log.add, finished()):
            pass
    return left


def look(store: CountingStore, num_left: int, num_clips: int) -> tuple[dict[str, float], bool]:
    """`status` on the run; figures, and whether it counted right."""
    store.requests.clear()
    began, cpu = time.perf_counter(), time.process_time()
    found = run_status(store)
    seconds = {"status_s": round(time.perf_counter() - began, 2), "status_cpu_s": round(time.process_time() - cpu, 2)}
    return seconds | dict(sorted(store.requests.items())), found.num_committed == num_clips - num_left


def resume(store: CountingStore, left: set[str], num_clips: int) -> tuple[dict[str, float], bool]:
    """Start a worker anew and claim everything that is left; figures, and whether it was exactly that."""
    store.requests.clear()
    began = time.perf_counter()
    plan = load_plan(store)
    loaded_s = time.perf_counter() - began
    source = ClaimSource(store, plan, "bench", ClaimOptions())
    first = source.next()
    first_s = time.perf_counter() - began
    made = set()
    work = first
    while isinstance(work, Assignment):
        made.add(work.clip_id)
        work = source.next()
    figures = {"plan_s": round(loaded_s, 2), "first_clip_s": round(first_s, 2), **dict(sorted(store.requests.items()))}
    source.release()
    return figures, made == left and plan.num_clips == num_clips


def main() -> None:
    """Print the figures for both logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=1_000_000)
    parser.add_argument("--unfinished", type=int, default=16)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.clips, options.unfinished = 2_000, 2
    with opened(options.s3) as bare:
        sys.exit(measure(CountingStore(bare), options.clips, options.unfinished))


def measure(store: CountingStore, num_clips: int, num_unfinished: int) -> int:
    """Make the run, look at it and resume it with single entries, fold them, and do it again."""
    began = time.perf_counter()
    open_run(store, new_run({"bench": "resume"}, profile={}, versions={}, created=FIRST_DAY.isoformat()))
    plan_run(store, lambda: rows(num_clips), PlanOptions(num_clips=num_clips))
    table_bytes = sum(entry.size_bytes for entry in store.list("plan-"))
    print(f"planned {num_clips:,} clips in {time.perf_counter() - began:.1f} s, {table_bytes / 1e6:.1f} MB", flush=True)
    began = time.perf_counter()
    left = finish_all_but(store, num_unfinished)
    print(f"wrote the done log in {time.perf_counter() - began:.1f} s", flush=True)
    looks, resumes = {}, {}
    looks["single entries"] = look(store, len(left), num_clips)
    resumes["single entries"] = resume(store, left, num_clips)
    log = DoneLog(store, compact_above=min(10_000, num_clips // 100))
    log.refresh()
    began = time.perf_counter()
    folded = log.compact()
    print(f"folded {folded} in {time.perf_counter() - began:.1f} s", flush=True)
    looks["folded"] = look(store, len(left), num_clips)
    resumes["folded"] = resume(store, left, num_clips)
    for kind, found in (("status", looks), ("resume", resumes)):
        for name, (figures, _) in found.items():
            print(f"{kind:8} {name:15} {figures}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB, bench and store included")
    heads_ok = all(figures["head"] == len(left) for figures, _ in resumes.values())
    ok = heads_ok and all(fine for _, fine in [*looks.values(), *resumes.values()])
    names = {"single": "single entries", "folded": "folded"}
    ratios = {
        f"requests_per_unfinished_clip_{short}": round(_total(resumes[name][0]) / len(left), 2)
        for short, name in names.items()
    }
    print(json.dumps({"name": "bench_resume", "ok": ok, "ratios": ratios, "clips": num_clips}))
    return 0 if ok else 1


def _total(figures: dict[str, float]) -> float:
    return sum(figures[name] for name in ("get", "head", "put", "list"))


if __name__ == "__main__":
    main()

"""Requests and seconds that a resume costs, with a done log of a million clips, before and after it is folded.

    python scripts/bench_resume.py [--clips 1000000] [--unfinished 16]

Needs no server: a store in memory counts the requests that S3 would see (a listing costs one per 1,000 keys).
The last line is JSON; `ok` says that the resume made exactly what was missing and looked at no finished clip.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from batch_gen.chunks import PlanRow
from batch_gen.claims import Assignment, ClaimOptions, ClaimSource
from batch_gen.donelog import DoneChunk, DoneLog
from batch_gen.held import COMMITTED
from batch_gen.plan import PlanOptions, load_plan, plan_run
from batch_gen.request import RenderRequest
from batch_gen.storage.memory import MemoryStore

ROW_GROUP = 10_000
KEYS_PER_PAGE = 1000
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


class CountingStore(MemoryStore):
    """Counts what S3 would charge."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name):
        """Count each call under the name of its request."""
        if name in REQUESTS:
            object.__getattribute__(self, "requests")[REQUESTS[name]] += 1
        return object.__getattribute__(self, name)

    def list(self, prefix):
        """Count one request per page."""
        entries = list(super().list(prefix))
        self.requests["list"] += max(1, -(-len(entries) // KEYS_PER_PAGE))
        return iter(entries)


def rows(num_clips: int):
    """The manifest, in row groups of 10,000."""
    for n in range(num_clips):
        clip_id = f"shot-{n:07d}"
        yield PlanRow(replace(BASE, clip_id=clip_id, row_id=clip_id), "m.parquet", n // ROW_GROUP, n)


def finish_all_but(store: MemoryStore, num_unfinished: int) -> set[str]:
    """Write the done log of a run that is nearly through; returns the clips that are left."""
    plan, log = load_plan(store), DoneLog(store)
    open_chunks = plan.chunks[:: max(1, len(plan.chunks) // num_unfinished)][:num_unfinished]
    left = {request.clip_id for chunk in open_chunks for request in plan.requests(chunk)}
    open_ids = {chunk.id for chunk in open_chunks}
    for chunk in plan.chunks:
        if chunk.id not in open_ids:
            clips = {request.clip_id: COMMITTED for request in plan.requests(chunk)}
            log.add(DoneChunk(chunk=chunk.id, clips=clips))
    return left


def resume(store: CountingStore, left: set[str]) -> tuple[dict[str, float], bool]:
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
    return figures, made == left


def main() -> None:
    """Print the figures for both logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=1_000_000)
    parser.add_argument("--unfinished", type=int, default=16)
    options = parser.parse_args()
    store = CountingStore()
    began = time.perf_counter()
    plan_run(store, lambda: rows(options.clips), PlanOptions())
    table_bytes = sum(entry.size_bytes for entry in store.list("plan-"))
    print(
        f"planned {options.clips:,} clips in {time.perf_counter() - began:.1f} s, {table_bytes / 1e6:.1f} MB",
        flush=True,
    )
    left = finish_all_but(store, options.unfinished)
    plain, plain_ok = resume(store, left)
    log = DoneLog(store, compact_above=min(10_000, options.clips // 100))
    log.refresh()
    began = time.perf_counter()
    folded = log.compact()
    print(f"folded {folded} in {time.perf_counter() - began:.1f} s")
    compact, compact_ok = resume(store, left)
    for name, figures in (("single entries", plain), ("folded", compact)):
        print(f"{name:15} {figures}")
    heads_ok = plain["head"] == compact["head"] == len(left)
    ratios = {
        f"requests_per_unfinished_clip_{name}": round(_total(f) / len(left), 2)
        for name, f in (("single", plain), ("folded", compact))
    }
    ok = plain_ok and compact_ok and heads_ok
    print(json.dumps({"name": "bench_resume", "ok": ok, "ratios": ratios, "clips": options.clips}))
    sys.exit(0 if ok else 1)


def _total(figures: dict[str, float]) -> float:
    return sum(figures[name] for name in ("get", "head", "put", "list"))


if __name__ == "__main__":
    main()

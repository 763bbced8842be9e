"""Validation and planning of ten million rows: seconds and peak memory, and what a second worker pays to join.

Run: python scripts/bench_planning.py [--tiny] [--rows N]
Each step runs in a process of its own, so that its peak memory is its own: `check` reads and checks the manifest,
`plan` checks it and writes the plan into a folder, `join` is a worker that comes later and reads the plan. The last
line is one JSON object; `ok` says that plan and join hold every row, `ratios` holds peak bytes a row.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

STEPS = ("check", "plan", "join")


def step(name: str, manifest: Path, root: Path) -> int:
    """One step in this process; how many clips it saw."""
    from batch_gen.chunks import PlanRow
    from batch_gen.manifest import read_manifest
    from batch_gen.plan import PlanOptions, load_plan, plan_run
    from batch_gen.request import ModelLimits, SamplingDefaults
    from batch_gen.storage.base import open_store

    store = open_store(str(root))
    if name == "join":
        plan = load_plan(store)
        return sum(chunk.num_clips for chunk in plan.chunks)
    defaults = SamplingDefaults("", 832, 480, 81, Fraction(16), 40, 4.0, 3.0, 12.0)
    found = read_manifest([manifest], defaults, ModelLimits(name="wan2.2-t2v-a14b", trained_frames=81))
    if name == "check":
        return found.survey.num_clips

    def rows() -> Iterator[PlanRow]:
        for location, request in found.iter_located_requests():
            yield PlanRow(request, "m.parquet", location.row_group, location.row)

    options = PlanOptions(facts={"inputs": "bench"}, num_clips=found.survey.num_clips)
    return plan_run(store, rows, options).num_clips


def timed(name: str, manifest: Path, root: Path) -> dict[str, float]:
    """A step with its seconds and its peak."""
    wall, cpu = time.perf_counter(), time.process_time()
    clips = step(name, manifest, root)
    return {
        "clips": clips,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    """Write a manifest and take the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="10,000 rows: shows that the script works")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        name, manifest, root = options.step
        print(json.dumps(timed(name, Path(manifest), Path(root))))
        return 0
    num_rows = 10_000 if options.tiny else options.rows
    with tempfile.TemporaryDirectory() as folder:
        found = measure(num_rows, Path(folder))
    ok = all(figures["clips"] == num_rows for figures in found.values())
    ratios = {f"{name}_bytes_per_row": round(figures["peak_bytes"] / num_rows, 1) for name, figures in found.items()}
    print(json.dumps({"name": "planning", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


def measure(num_rows: int, folder: Path) -> dict[str, dict[str, float]]:
    """Every step in a fresh process."""
    import bench_manifest

    manifest, root = folder / "m.parquet", folder / "out"
    writer = [sys.executable, bench_manifest.__file__, "--write", str(manifest), "--kind", "ids", "--rows"]
    subprocess.run([*writer, str(num_rows)], check=True)
    print(f"{num_rows:,} rows, {manifest.stat().st_size / 1e6:.1f} MB", flush=True)
    found = {}
    for name in STEPS:
        command = [sys.executable, __file__, "--step", name, str(manifest), str(root)]
        figures = found[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rate = num_rows / figures["cpu_s"]
        print(
            f"{name:<6} {figures['cpu_s']:8.1f} CPU s {figures['wall_s']:8.1f} s {rate:10,.0f} rows a CPU second "
            f"{figures['peak_bytes'] / 1e6:8.0f} MB peak",
            flush=True,
        )
    size = sum(path.stat().st_size for path in root.glob("plan-*"))
    print(f"plan: {size / 1e6:.1f} MB")
    return found


if __name__ == "__main__":
    sys.exit(main())

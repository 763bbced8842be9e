"""How long a manifest's check takes and how much memory: a million rows with ids of their own, and a million without.

Run: python scripts/bench_manifest.py [--tiny] [--rows N]
Each kind is checked in a process of its own, so that its peak memory is its own. The last line is one JSON object;
`ok` says that the counts are right, `ratios` holds the figures over the targets (15 CPU seconds and 400 MB a million).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TARGET_CPU_S = 15.0
TARGET_BYTES = 400e6
TARGET_ROWS = 1_000_000
WORDS = ["amber", "fox", "river", "stone", "cloud", "lantern", "harbor", "meadow", "copper", "engine", "winter"]


def write(path: Path, num_rows: int, kind: str) -> None:
    """A manifest of the given kind: `ids` (own ids, several columns), `hashed` (prompts alone), `faulty` (all bad)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for start in range(0, num_rows, 10_000):
        rows = range(start, min(start + 10_000, num_rows))
        columns: dict[str, list[object]] = {"prompt": [prompt(row) for row in rows]}
        if kind != "hashed":
            columns["row_id"] = [f"shot-{row:08d}" for row in rows]
            columns["width"] = [(832, 480)[row % 2] + (kind == "faulty") for row in rows]
            columns["num_frames"] = [(81, 49)[row % 2] for row in rows]
            columns["guidance_high"] = [3.0 + row % 5 / 2 for row in rows]
            columns["seed"] = [None if row % 3 else row for row in rows]
            columns["fps"] = [("16", "30000/1001")[row % 2] for row in rows]
            columns["tag"] = [WORDS[row % len(WORDS)] for row in rows]
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()


def prompt(row: int) -> str:
    """About 130 characters, different for every row."""
    picked = [WORDS[(row >> shift) % len(WORDS)] for shift in range(0, 40, 2)]
    return f"take {row}: {' '.join(picked)}"


def check(path: Path) -> dict[str, object]:
    """Check one manifest in this process; CPU seconds, peak bytes and counts."""
    from batch_gen.errors import ManifestError
    from batch_gen.manifest import read_manifest
    from batch_gen.request import ModelLimits, SamplingDefaults

    defaults = SamplingDefaults("", 832, 480, 81, Fraction(16), 40, 4.0, 3.0, 12.0)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        found = read_manifest([path], defaults, ModelLimits(name="wan2.2-t2v-a14b", trained_frames=81))
        clips, faults = found.survey.num_clips, 0
    except ManifestError as error:
        clips, faults = 0, error.num_faults
    return {
        "clips": clips,
        "faults": faults,
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "torch": "torch" in sys.modules,
    }


def measure(kind: str, num_rows: int, folder: Path) -> dict[str, object]:
    """Write and check one kind, the check in a fresh process."""
    path = folder / f"{kind}.parquet"
    subprocess.run(
        [sys.executable, __file__, "--write", str(path), "--kind", kind, "--rows", str(num_rows)], check=True
    )
    command = [sys.executable, __file__, "--check", str(path)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"{kind:<8} {num_rows:>10,} rows {path.stat().st_size / 1e6:8.1f} MB file "
        f"{result['cpu_s']:7.2f} CPU s {result['wall_s']:7.2f} s {result['peak_bytes'] / 1e6:7.0f} MB peak"
    )
    return result


def main() -> int:
    """Measure every kind and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="20,000 rows: shows that the script works")
    parser.add_argument("--rows", type=int, default=TARGET_ROWS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_rows = 20_000 if options.tiny else options.rows
    if options.write:
        write(options.write, options.rows, options.kind)
        return 0
    if options.check:
        print(json.dumps(check(options.check)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: measure(kind, num_rows, Path(folder)) for kind in ("ids", "hashed", "faulty")}
    ok = (
        found["ids"]["clips"] == found["hashed"]["clips"] == num_rows
        and found["faulty"]["faults"] == num_rows
        and not any(result["torch"] for result in found.values())
    )
    ratios = {}
    for kind, result in found.items():
        ratios[f"{kind}_cpu"] = round(result["cpu_s"] / TARGET_CPU_S * TARGET_ROWS / num_rows, 3)
        ratios[f"{kind}_memory"] = round(result["peak_bytes"] / TARGET_BYTES, 3)
    print(json.dumps({"name": "manifest", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

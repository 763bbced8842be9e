"""How long the report of 5,000 clips takes to build and to rebuild, what it weighs, and when its first page is painted.

Run: python scripts/bench_report.py [--tiny] [--clips N]
Needs Chromium (scripts/browser installs it). Times of the build are CPU seconds of this process and of its ffmpeg
children; paint times are the browser's own. The last line is one JSON object; `ok` says that the page shows every clip
without a console message, `ratios` holds the figures over their targets.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from batch_gen.report.build import ReportOptions, build_report
from batch_gen.storage.base import Store
from tests.browsing import browser, complaints
from tests.synthetic import synthetic_run

TARGETS = {"build_cpu": 10.0, "rebuild_cpu": 8.0, "gallery_bytes": 3e6, "first_paint_s": 1.0, "ready_s": 2.0}
NUM_POSTERS = 48
READY = "return document.body.classList.contains('ready')"
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"


def cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def build(store: Store) -> tuple[float, float]:
    """Build once; CPU and wall seconds."""
    cpu, wall = cpu_s(), time.perf_counter()
    build_report(store, ReportOptions(max_new_posters=NUM_POSTERS))
    return cpu_s() - cpu, time.perf_counter() - wall


def gallery_files(report: Path) -> list[Path]:
    """What the gallery loads before it shows a clip."""
    return [report / "index.html", *report.glob("assets/*"), *report.glob("data/clips-*")]


def paint(report: Path, num_clips: int) -> tuple[float, float, bool]:
    """Seconds to the first paint and to the cards, and whether the page is sound."""
    with browser() as driver:
        driver.get(f"file://{report}/index.html")
        driver.get(f"file://{report}/index.html#again")
        driver.refresh()
        while not driver.execute_script(READY):
            time.sleep(0.01)
        ready_s = driver.execute_script("return performance.getEntriesByName('batch-gen-ready')[0].startTime / 1000")
        text = driver.find_element("id", "count").text
        return (
            float(driver.execute_script(PAINT)),
            float(ready_s),
            f"{num_clips:,} clips" in text and not complaints(driver),
        )


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="200 clips: shows that the script works")
    parser.add_argument("--clips", type=int, default=5000)
    options = parser.parse_args()
    num_clips = 200 if options.tiny else options.clips
    with tempfile.TemporaryDirectory() as folder:
        store = synthetic_run(Path(folder) / "run-out", num_clips)
        report = Path(folder) / "run-out" / "report"
        (build_cpu, build_s), (rebuild_cpu, rebuild_s) = build(store), build(store)
        files = gallery_files(report)
        gallery_bytes = sum(path.stat().st_size for path in files)
        packed_bytes = sum(len(gzip.compress(path.read_bytes())) for path in files)
        whole_bytes = sum(path.stat().st_size for path in report.rglob("*") if path.is_file())
        first_paint_s, ready_s, ok = paint(report, num_clips)
    print(f"{num_clips:,} clips, {NUM_POSTERS} new posters a build")
    print(f"build        {build_cpu:6.2f} CPU s {build_s:7.2f} s")
    print(f"rebuild      {rebuild_cpu:6.2f} CPU s {rebuild_s:7.2f} s   (with the next {NUM_POSTERS} posters)")
    print(
        f"gallery      {gallery_bytes / 1e6:6.2f} MB, {packed_bytes / 1e6:.2f} MB as gzip; "
        f"the whole report {whole_bytes / 1e6:.1f} MB"
    )
    print(f"first paint  {first_paint_s:6.2f} s; cards drawn after {ready_s:.2f} s")
    values = {
        "build_cpu": build_cpu,
        "rebuild_cpu": rebuild_cpu,
        "gallery_bytes": gallery_bytes,
        "first_paint_s": first_paint_s,
        "ready_s": ready_s,
    }
    ratios = {name: round(values[name] / target, 3) for name, target in TARGETS.items()}
    print(json.dumps({"name": "report", "ok": bool(ok), "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

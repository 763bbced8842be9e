"""`batch-gen run` beside a plain loop around diffusers: same weights, rows, threads and dtypes, taking turns.

Run: python scripts/bench_peer.py [--tiny] [--model pocket] [--clips N] [--rounds N] [--threads N] [--variants NAMES]
The peer is scripts/peer_loop.py: diffusers' `WanPipeline` and `export_to_video`, x264 at the same crf. Clips an hour
are counted from the end of the first clip to the end of the last, so that no start is in them; `whole_run_*` has the
starts. Memory is the peak of the process tree (proportional set size, sampled). What the peer does not do, and
`batch-gen run` does meanwhile: decode every file back, hash, write a record, keep its lease. The last line is one JSON
object; its ratios are ours over the peer's, `ok` says that both made the same clips.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SAMPLE_S = 1.0  # walking the pages of a large process costs milliseconds
SAMPLING = (
    *("negative_prompt", "width", "height", "num_frames", "steps"),
    *("guidance_high", "guidance_low", "flow_shift"),
)
STAGES = ("text", "denoise", "decode", "encode", "verify", "upload")
MIN_PSNR = {"float32": 25.0, "bfloat16": 15.0}  # of the two compressed files of a clip; another clip has about 10
PROMPTS = ("a red circle moves left on blue", "a green square moves up on black", "a blue triangle moves down on white")
VARIANTS = {
    "fp32": ("float32", ()),
    "bf16": ("bfloat16", ("--dtype", "bfloat16")),
    "compile": ("float32", ("--compile", "block")),
    "pairs": ("float32", ("--clips-per-step", "2")),
}


@dataclass(slots=True)
class Run:
    """One run of one side."""

    wall_s: float
    first_s: float
    clips_per_hour: float
    peak_bytes: int
    stages: dict[str, float]
    cpu_s: float = 0.0
    clip_cpu_s: float = 0.0
    idle: float | None = None


@dataclass(slots=True)
class Watch:
    """Samples memory and CPU seconds of a process and all that it started."""

    pid: int
    peak_bytes: int = 0
    spent: list[tuple[float, float]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            tree = tree_of(self.pid)
            self.peak_bytes = max(self.peak_bytes, sum(_pss(process.pid) for process in tree))
            self.spent.append((time.time(), sum(map(_cpu_s, tree))))

    def cpu_between(self, first: float, last: float) -> float:
        """CPU seconds of the tree between two Unix times, as near as the samples are."""
        before = [cpu_s for at, cpu_s in self.spent if at <= first] or [0.0]
        upto = [cpu_s for at, cpu_s in self.spent if at <= last] or [0.0]
        return max(upto) - max(before)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants, those in other sessions too."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of those of its children that it has waited for."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides render."""

    model: str
    folder: Path
    threads: int
    num_clips: int
    sampling: dict[str, Any]

    @property
    def prompts(self) -> list[str]:
        """One for each clip; some come again, as in real manifests."""
        return [PROMPTS[n % len(PROMPTS)] for n in range(self.num_clips)]


def environment(job: Job) -> dict[str, str]:
    """The same threads for both; the machine is no network's business."""
    return os.environ | {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "HF_HUB_OFFLINE": "1",
    }


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran: Unix time of its start, seconds, CPU seconds, samples of its tree, what it printed."""

    at: float
    wall_s: float
    cpu_s: float
    watch: Watch
    printed: str

    def per_clip_cpu_s(self, ends: list[float]) -> float:
        """CPU seconds a clip between the first end and the last."""
        return self.watch.cpu_between(ends[0], ends[-1]) / (len(ends) - 1) if len(ends) > 1 else 0.0


def started(command: list[str], job: Job, log: Path) -> Ended:
    """Run a command to its end.

    Raises:
        SystemExit: It failed; its last words are printed.
    """
    at, began, spent = time.time(), time.perf_counter(), children_cpu_s()
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(job), stdout=subprocess.PIPE, stderr=errors)
    with Watch(process.pid) as watch:
        out, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{command[1]} failed with {process.returncode}:\n{log.read_text()[-3000:]}")
    return Ended(at, time.perf_counter() - began, children_cpu_s() - spent, watch, out.decode())


def children_cpu_s() -> float:
    """CPU seconds of every process below this one that has ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_peer(job: Job, dtype: str) -> Run:
    """The plain loop."""
    out = job.folder / "peer" / dtype
    out.mkdir(parents=True, exist_ok=True)
    spec = {"model": job.model, "dtype": dtype, "threads": job.threads, "sampling": job.sampling}
    spec |= {"prompts": job.prompts, "out": str(out)}
    command = [sys.executable, str(ROOT / "scripts/peer_loop.py"), json.dumps(spec)]
    end = started(command, job, job.folder / "peer.log")
    clips = [json.loads(line) for line in end.printed.splitlines()]
    stages = {name: statistics.fmean(clip["stages"].get(name, 0.0) for clip in clips[1:]) for name in STAGES}
    ends = [clip["at"] for clip in clips]
    clip_cpu_s = end.per_clip_cpu_s(ends)
    return Run(end.wall_s, ends[0] - end.at, rate(ends), end.watch.peak_bytes, stages, end.cpu_s, clip_cpu_s)


def run_ours(job: Job, flags: tuple[str, ...], number: int) -> Run:
    """`batch-gen run` on a manifest of the same rows."""
    out = job.folder / f"ours-{number}"
    command = [sys.executable, "-m", "batch_gen", "run", str(job.folder / "m.parquet"), "--out", str(out)]
    command += ["--model", job.model, "--quiet", "--json", "--threads", str(job.threads), *flags]
    end = started(command, job, job.folder / "ours.log")
    return measured(metrics_of(out), end)


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, in the order in which the engine made them."""
    from batch_gen.tables import read_rows

    return sorted(read_rows((out / "metrics.parquet").read_bytes()), key=lambda row: row["started_at"])


def measured(rows: list[dict[str, Any]], end: Ended) -> Run:
    """Figures of a run from its metrics."""
    ends = sorted(row["finished_at"].timestamp() + (row.get("upload_s") or 0.0) for row in rows)
    stages = {
        name: statistics.fmean(row.get(f"{name}_s") or 0.0 for row in rows[1:]) if len(rows) > 1 else 0.0
        for name in STAGES
    }
    first_s, costs = ends[0] - end.at, (end.cpu_s, end.per_clip_cpu_s(ends))
    return Run(end.wall_s, first_s, rate(ends), end.watch.peak_bytes, stages, *costs, idle_share(rows))


def rate(ends: list[float]) -> float:
    """Clips an hour between the first end and the last; 0 where there is no time between them."""
    return 3600.0 * (len(ends) - 1) / (ends[-1] - ends[0]) if ends[-1] > ends[0] else 0.0


def idle_share(rows: list[dict[str, Any]]) -> float:
    """Share of the time from the engine's first clip to the end of its last in which it had nothing to do."""
    spans = []
    for row in rows:
        began = row["started_at"].timestamp()
        spans.append((began, began + sum(row.get(f"{name}_s") or 0.0 for name in ("text", "denoise", "decode"))))
    busy, until = 0.0, spans[0][0]
    for began, end in spans:
        busy += max(0.0, end - max(began, until))
        until = max(until, end)
    return 1.0 - busy / (until - spans[0][0])


def psnr_of(job: Job, dtype: str, number: int) -> float:
    """Worst agreement of the two sides' files over the clips, in dB."""
    import numpy as np

    from batch_gen.ffmpeg import TO_RGB, executable

    worst = float("inf")
    for clip in range(job.num_clips):
        theirs = job.folder / "peer" / dtype / f"clip-{clip}.mp4"
        ours = next((job.folder / f"ours-{number}" / "clips").rglob(f"clip-{clip}.mp4"))
        raw = []
        for path in (theirs, ours):
            command = [executable(), "-v", "error", "-i", str(path), "-vf", TO_RGB, "-f", "rawvideo", "-"]
            raw.append(np.frombuffer(subprocess.run(command, check=True, capture_output=True).stdout, np.uint8))
        error = np.mean((raw[0].astype(np.float64) - raw[1]) ** 2)
        worst = min(worst, 99.0 if error == 0 else float(10 * np.log10(255**2 / error)))
    return worst


def compare(job: Job, names: list[str], rounds: int) -> tuple[dict[str, list[Run]], dict[str, float]]:
    """All runs by side and name, taking turns; and how far our files agree with the peer's."""
    runs: dict[str, list[Run]] = {}
    agreement: dict[str, float] = {}
    number = 0
    for _ in range(rounds):
        for dtype in dict.fromkeys(VARIANTS[name][0] for name in names):
            runs.setdefault(f"peer {dtype}", []).append(run_peer(job, dtype))
            for name in [name for name in names if VARIANTS[name][0] == dtype]:
                number += 1
                runs.setdefault(name, []).append(run_ours(job, VARIANTS[name][1], number))
                agreement[name] = psnr_of(job, dtype, number)
    return runs, agreement


def show(runs: dict[str, list[Run]]) -> None:
    """The table: medians, and the spread of the rate."""
    names = ("clips/h", "from", "to", "run s", "CPU s", "a clip", "first s", "MB", "idle")
    print(f"\n{'':14}" + "".join(f"{name:>9}" for name in (*names, *STAGES)))
    for name, found in runs.items():
        rates = [run.clips_per_hour for run in found]
        cells = [f"{value:9.0f}" for value in (statistics.median(rates), min(rates), max(rates))]
        cells += [f"{middle(found, each):9.1f}" for each in ("wall_s", "cpu_s", "clip_cpu_s", "first_s")]
        cells.append(f"{middle(found, 'peak_bytes') / 1e6:9.0f}")
        idles = [run.idle for run in found if run.idle is not None]
        cells.append(f"{statistics.median(idles):9.2%}" if idles else f"{'':9}")
        cells += [f"{statistics.median(run.stages[stage] for run in found):9.3f}" for stage in STAGES]
        print(f"{name:14}" + "".join(cells))
    print("a clip: CPU seconds between the first clip's end and the last's; stages: seconds a clip, without the first")


def middle(runs: list[Run], name: str) -> float:
    """Median of a field."""
    return statistics.median(getattr(run, name) for run in runs)


def _over(ours: float, peer: float) -> float:
    """The ratio; 0 where the peer's clips were too short to be measured."""
    return ours / peer if peer else 0.0


def ratios(runs: dict[str, list[Run]], names: list[str]) -> dict[str, float]:
    """Ours over the peer of the same dtype; medians of the ratios of each round, so that load meets both sides."""
    found: dict[str, float] = {}
    for name in names:
        pairs = list(zip(runs[name], runs[f"peer {VARIANTS[name][0]}"], strict=True))
        rates = [(ours.clips_per_hour, peer.clips_per_hour) for ours, peer in pairs]
        found[f"clips_per_hour_{name}"] = _middle(_over(*rate) for rate in rates)
        found[f"whole_run_{name}"] = _middle(peer.wall_s / ours.wall_s for ours, peer in pairs)
        found[f"cpu_a_clip_{name}"] = _middle(_over(ours.clip_cpu_s, peer.clip_cpu_s) for ours, peer in pairs)
    first = names[0]
    pairs = list(zip(runs[first], runs[f"peer {VARIANTS[first][0]}"], strict=True))
    found["peak_memory"] = _middle(ours.peak_bytes / peer.peak_bytes for ours, peer in pairs)
    found["time_to_first_clip"] = _middle(ours.first_s / peer.first_s for ours, peer in pairs)
    found["engine_idle"] = round(statistics.median(run.idle or 0.0 for run in runs[first]), 4)
    return found


def _middle(values: Any) -> float:
    return round(statistics.median(values), 3)


def prepare(options: argparse.Namespace, folder: Path) -> Job:
    """The checkpoint, the settings of its preset, and the manifest."""
    from batch_gen.checkpoint import open_checkpoint
    from batch_gen.config import load_preset
    from batch_gen.tables import write_manifest

    checkpoint = open_checkpoint(options.model)
    sampling = load_preset(checkpoint.preset, checkpoint.preset).sampling
    values = {name: getattr(sampling, name) for name in SAMPLING}
    if options.tiny:
        values |= {"width": 64, "height": 64, "num_frames": 5, "steps": 2}
    job = Job(str(checkpoint.folder), folder, options.threads, options.clips, values)
    columns = {name: values[name] for name in values if name != "negative_prompt"}
    rows = [
        {"row_id": f"clip-{n}", "prompt": prompt, "seed": n, "fps": "8", **columns}
        for n, prompt in enumerate(job.prompts)
    ]
    write_manifest(folder / "m.parquet", rows, {})
    return job


def versions() -> str:
    """Machine and libraries, for the table's head."""
    import platform
    from importlib.metadata import version

    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "imageio-ffmpeg")
    )
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


def main() -> int:
    """Render with both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="three small clips, one round: shows that the script works")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--clips", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--variants", default="fp32,bf16", help=f"some of {', '.join(VARIANTS)}")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.clips, options.rounds, options.variants, options.threads = "tiny", 3, 1, "fp32", 1
    names = options.variants.split(",")
    with tempfile.TemporaryDirectory() as name:
        job = prepare(options, Path(name))
        print(versions())
        print(f"{options.model}, {job.num_clips} clips, {options.rounds} rounds, {job.threads} threads: {job.sampling}")
        runs, agreement = compare(job, names, options.rounds)
    show(runs)
    for name, decibels in agreement.items():
        print(f"{name}: files agree with the peer's to {decibels:.1f} dB at worst")
    ok = all(decibels >= MIN_PSNR[VARIANTS[name][0]] for name, decibels in agreement.items())
    print(json.dumps({"name": "peer", "ok": ok, "ratios": ratios(runs, names)}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

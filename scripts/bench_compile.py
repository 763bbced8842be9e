"""Graphs compiled ahead of time: time to the first clip on a machine that has them, beside one that has not.

Run: python scripts/bench_compile.py [--compile block|model] [--size 32] [--model tiny]

Four processes, two "machines" (cache folders of their own): machine A compiles a manifest of one shape and packs it;
machine B renders it with nothing but the store and the digest; machine C renders it cold. Then a file in the store is
changed: the run must be refused with exit 2. The frames of B and C must have the same hash. Seconds are wall time from
the start of the process to the first finished clip; on a CPU the compiler is torch's inductor.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pyarrow as pa
import pyarrow.parquet as pq

from batch_gen.environment import child_environment


def batch_gen(machine: Path, *arguments: object) -> tuple[int, list[str], str, float]:
    """One command on a machine: exit code, lines of stdout, stderr, seconds to the first line that is a clip."""
    command = [sys.executable, "-m", "batch_gen", *map(str, arguments)]
    environment = child_environment(BATCH_GEN_CACHE=str(machine), TORCHINDUCTOR_COMPILE_THREADS="1")
    began, first = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if not first and '"clip_id"' in line:
                first = time.monotonic() - began
        code = child.wait()
        errors.seek(0)
        return code, lines, errors.read(), first


def run(folder: Path, name: str, flags: list[str]) -> dict[str, Any]:
    """Render on a fresh machine; what the run says of its graphs, and its frames."""
    code, lines, errors, first_s = batch_gen(
        folder / name, "run", folder / "m.parquet", *flags, "--quiet", f"--out={folder / f'{name}-out'}", "--on-clip=-"
    )
    clips = [json.loads(line) for line in lines if line.startswith("{") and '"clip_id"' in line]
    said = next((line for line in lines if line.startswith("graphs ")), "")
    numbers = [int(word) for word in said.split() if word.isdigit()]
    return {
        "exit": code,
        "first_clip_s": round(first_s, 1),
        "hits": numbers[0] if numbers else None,
        "misses": numbers[1] if numbers else None,
        "frames": [clip.get("frames_hash") for clip in clips],
        "errors": errors[-1500:] if code else "",
    }


def model_folder(name: str, folder: Path) -> str:
    """The checkpoint, built once where it is a built-in one: that is no part of the comparison."""
    if name != "tiny":
        return name
    batch_gen(folder / "built", "validate", folder / "m.parquet", "--model=tiny", "--profile=cpu")
    return str(next((folder / "built" / "checkpoints").glob("tiny-default-*")))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compile, then both runs, then the refusal."""
    size = {"width": options.size, "height": options.size, "num_frames": 5, "steps": 4}
    pq.write_table(pa.table({"row_id": ["one"], "prompt": ["a red circle moving right"]}), folder / "m.parquet")
    flags = [
        f"--model={model_folder(options.model, folder)}",
        "--profile=cpu",
        f"--compile={options.compile}",
        f"--threads={options.threads}",
    ]
    flags += [f"--override={key}={value}" for key, value in size.items()]
    store = folder / "graphs"
    began = time.monotonic()
    code, lines, errors, _ = batch_gen(
        folder / "A", "compile", folder / "m.parquet", *flags, f"--graphs={store}", "--json"
    )
    if code:
        raise SystemExit(f"compile failed: {errors[-2000:]}")
    packed = json.loads("\n".join(lines))
    found: dict[str, Any] = {"compile_s": round(time.monotonic() - began, 1), **packed["artefacts"][0]}
    trusted = [*flags, f"--graphs={store}", f"--graphs-digest={packed['graphs_digest']}"]
    found |= {"warm": run(folder, "B", trusted), "cold": run(folder, "C", flags)}
    blob = max((path for path in (store / "blobs").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    found["torn"] = run(folder, "D", trusted)
    return found


def main() -> int:
    """Measure and print; exit code 1 when anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", choices=["block", "model"], default="block")
    parser.add_argument("--model", default="tiny", help="a folder, or tiny")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    with tempfile.TemporaryDirectory(prefix="batch-gen-bench-compile-") as name:
        found = measure(options, Path(name))
    warm, cold, torn = found["warm"], found["cold"], found["torn"]
    print(json.dumps(found, indent=1))
    print(
        f"compile and pack   {found['compile_s']:8.1f} s, {found['num_files']} files, {found['num_bytes'] / 1e6:.1f} MB"
    )
    print(f"first clip, cold   {cold['first_clip_s']:8.1f} s, {cold['misses']} graphs compiled")
    print(f"first clip, packed {warm['first_clip_s']:8.1f} s, {warm['hits']} graphs found, {warm['misses']} compiled")
    checks = {
        "both runs ended well": warm["exit"] == cold["exit"] == 0,
        "all graphs were found": warm["misses"] == 0 and (warm["hits"] or 0) > 0,
        "the cold run compiled": (cold["misses"] or 0) > 0,
        "frames are equal": bool(warm["frames"]) and warm["frames"] == cold["frames"],
        "a torn file was refused": torn["exit"] == 2 and "torn or changed" in torn["errors"],
    }
    for what, good in checks.items():
        print(f"{'ok  ' if good else 'FAIL'} {what}")
    ratio = round(cold["first_clip_s"] / warm["first_clip_s"], 2) if warm["first_clip_s"] else 0.0
    ok = all(checks.values())
    print(json.dumps({"name": "compile", "ok": ok, "ratios": {"cold_vs_packed_first_clip": ratio}}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

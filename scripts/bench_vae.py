"""The exact decode beside diffusers' AutoencoderKLWan: same weights, same threads, one run; speed, memory, equality.

Run: python scripts/bench_vae.py [--tiny] [--threads N] [--rounds N] [--clock wall|cpu] [--compile]
Each variant lives in a process of its own, so that its peak memory is its own; the variants take turns. Ratios are
diffusers' best time over ours. On a machine that does other work, `--clock cpu --threads 1` is the steadier figure.
The last line is one JSON object; `ok` says that the frames are the same and that memory does not grow with the clip.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CONFIG = {"base_dim": 32, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
MAX_DIFFERENCE = 1e-4  # of a pixel in -1..1, between two float32 decodes
MAX_BF16_LEVELS = 12  # of 255
FLAT_WITHIN = 1.05
FLAT_PROCESSES = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One variant: who decodes what, how."""

    side: str  # theirs, ours
    height: int
    width: int
    num_frames: int
    mode: str = "exact"  # ours: exact, reference; theirs: untiled, tiled
    dtype: str = "float32"
    strips: int = 0  # 0: the plan of the size
    keep: bool = True  # write the frames, for comparison
    compile: bool = False


def cases(tiny: bool, compiled: bool) -> dict[str, Case]:
    """The variants by name; `small` is 192x320, `large` 480x832 (both much smaller with `tiny`)."""
    small, large = ((32, 48, 9), (64, 96, 5)) if tiny else ((192, 320, 17), (480, 832, 17))
    found = {
        "small theirs": Case("theirs", *small, "untiled"),
        "small ours": Case("ours", *small),
        "small ours bf16": Case("ours", *small, dtype="bfloat16"),
        "large theirs": Case("theirs", *large, "untiled"),
        "large theirs tiled": Case("theirs", *large, "tiled"),
        "large ours": Case("ours", *large),
        "large ours, 4 strips": Case("ours", *large, strips=4),
    }
    if compiled:
        found["small ours compiled"] = Case("ours", *small, compile=True)
    return found


class Child:
    """One variant in its own process, which waits until it is told to decode."""

    def __init__(self, case: Case, folder: Path, threads: int, **variables: str) -> None:
        argument = json.dumps(dataclasses.asdict(case))
        command = [sys.executable, __file__, "--child", argument, "--folder", str(folder), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, out: str = "") -> dict[str, Any]:
        """Decode once (and write the frames to `out`); seconds and peak bytes so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(out + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(case: Case, folder: Path) -> None:
    """The child: decode once per line on standard input."""
    import numpy as np
    import torch

    from models.vae.spec import read_spec

    torch.set_grad_enabled(False)
    spec = read_spec(folder)
    size = (
        spec.num_latent_frames(case.num_frames),
        *(side // spec.scale_spatial for side in (case.height, case.width)),
    )
    latents = torch.randn(spec.z_dim, *size, generator=torch.Generator().manual_seed(0))
    decode = their_decode(case, folder) if case.side == "theirs" else our_decode(case, folder)
    for line in sys.stdin:
        out = line.strip()
        wall, cpu = time.perf_counter(), time.process_time()
        frames = decode(latents, bool(out))
        result = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        if out:
            np.save(out, frames)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({**result, "peak_bytes": peak_bytes}), flush=True)


def their_decode(case: Case, folder: Path) -> Any:
    """diffusers, untiled or tiled; frames [F, H, W, 3] float32 in -1..1."""
    import torch
    from diffusers import AutoencoderKLWan

    from models.vae.decode import load_vae

    raw_latents = load_vae(folder, torch.float32).raw_latents
    model = AutoencoderKLWan.from_pretrained(folder).eval()
    if case.mode == "tiled":
        small = case.height < 192
        model.enable_tiling(*([32, 32, 24, 24] if small else []))

    def decode(latents: Any, keep: bool) -> Any:
        frames = model.decode(raw_latents(latents)).sample
        return frames[0].permute(1, 2, 3, 0).numpy() if keep else None

    return decode


def our_decode(case: Case, folder: Path) -> Any:
    """Ours: frames [F, H, W, 3] float32 if they are kept, else uint8 slabs that are thrown away, as in a run."""
    import torch

    from models.vae.decode import decode_frames, decode_stream, load_vae
    from models.vae.strips import plan_strips

    vae = load_vae(folder, getattr(torch, case.dtype))
    plan = None
    if case.strips:
        scale = vae.spec.scale_spatial
        plan = plan_strips(vae.spec, case.height // scale, case.width // scale, case.strips)
    if case.compile:
        vae.decoder.front = torch.compile(vae.decoder.front, fullgraph=True, dynamic=False)
        vae.decoder.rear = torch.compile(vae.decoder.rear, fullgraph=True, dynamic=False)

    def decode(latents: Any, keep: bool) -> Any:
        if keep:
            frames = torch.cat(list(decode_frames(vae, latents, case.mode, plan)), dim=2)
            return frames.float().clamp(-1, 1)[0].permute(1, 2, 3, 0).numpy()
        for _slab in decode_stream(vae, latents, case.mode, plan=plan):
            pass
        return None

    return decode


def measure(found: dict[str, Case], folder: Path, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Best wall and CPU seconds and the peak of each variant; the variants take turns, so that load meets all."""
    children = {name: Child(case, folder, threads) for name, case in found.items()}
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, child in children.items():
            result = child.run()
            before = best.get(name, result)
            best[name] = {key: min(result[key], before[key]) for key in ("wall", "cpu")}
            best[name]["peak_bytes"] = result["peak_bytes"]
    for name, child in children.items():
        child.run(str(folder / f"{name}.npy"))
        child.close()
    for name, result in best.items():
        print(
            f"{name:<24} {result['wall']:8.2f} s {result['cpu']:8.2f} CPU s {result['peak_bytes'] / 1e6:8.0f} MB peak"
        )
    return best


def same_frames(folder: Path) -> bool:
    """Ours against diffusers' untiled frames: float32 within rounding, bfloat16 within a few grey levels."""
    import numpy as np

    ok = True
    pairs = [("small", "small ours", MAX_DIFFERENCE), ("small", "small ours bf16", MAX_BF16_LEVELS * 2 / 255)]
    pairs += [("large", name, MAX_DIFFERENCE) for name in ("large ours", "large ours, 4 strips")]
    for size, name, bound in [*pairs, ("large", "large theirs tiled", float("inf"))]:
        difference = np.abs(np.load(folder / f"{name}.npy") - np.load(folder / f"{size} theirs.npy")).max()
        print(f"{name:<24} differs from diffusers' untiled frames by at most {difference:.1e} (bound {bound:.0e})")
        ok = ok and bool(difference <= bound)
    return ok


def peak_flops(threads: int) -> dict[str, float]:
    """Multiply-adds a second of a large matrix product, on this machine in this run."""
    code = (
        "import torch, time, json; torch.set_num_threads({threads}); out = {{}}\n"
        "for name in ('float32', 'bfloat16'):\n"
        "    a = torch.randn(1536, 1536).to(getattr(torch, name)); a @ a; best = [9e9, 9e9]\n"
        "    for _ in range(5):\n"
        "        w, c = time.perf_counter(), time.process_time(); a @ a\n"
        "        best = [min(best[0], time.perf_counter() - w), min(best[1], time.process_time() - c)]\n"
        "    out[name] = {{'wall': 1536**3 / best[0], 'cpu': 1536**3 / best[1]}}\n"
        "print(json.dumps(out))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(threads=threads)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def flat_memory(folder: Path, tiny: bool, threads: int) -> float:
    """Peak of a fresh process that decodes 161 frames and throws them away, over that of 17 frames.

    Of each a few, and their medians. glibc's heap keeps holes between large blocks, as many as a tenth of the peak and
    others in each process; with a fixed threshold every large block is a mapping of its own, and the peak is the
    program's.
    """
    size = (64, 96) if tiny else (192, 320)
    medians = []
    for num_frames in (17, 161):
        peaks = []
        for _ in range(1 if tiny else FLAT_PROCESSES):
            child = Child(
                Case("ours", *size, num_frames, keep=False), folder, threads, MALLOC_MMAP_THRESHOLD_=str(1 << 20)
            )
            peaks.append(child.run()["peak_bytes"])
            child.close()
        medians.append(statistics.median(peaks))
        print(f"peaks of {num_frames} frames: {', '.join(f'{peak / 1e6:.0f}' for peak in sorted(peaks))} MB")
    return medians[1] / medians[0]


def print_plans() -> None:
    """Work and speed-up of the published autoencoders on 1 to 16 ranks."""
    from models.vae.spec import WAN21_VAE, WAN22_VAE
    from models.vae.strips import make_plan

    counts = (1, 2, 4, 6, 8, 12, 16)
    print("plan                 strips   axis  work  speed-up on", *(f"{count:>5}" for count in counts), "ranks")
    for name, spec, height, width in (
        ("2.1 VAE, 480x832", WAN21_VAE, 60, 104),
        ("2.1 VAE, 720x1280", WAN21_VAE, 90, 160),
        ("2.2 VAE, 704x1280", WAN22_VAE, 44, 80),
    ):
        plan = make_plan(spec, height, width)
        speeds = (f"{plan.speed_up(count):5.2f}" for count in counts)
        print(f"{name:<20} {len(plan.strips):>6} {plan.axis:>7} {plan.work:5.2f}            ", *speeds)


def ratios(best: dict[str, dict[str, float]], peak: dict[str, Any], macs: float, clock: str) -> dict[str, float]:
    """The figures of the last line."""

    def over(slow: str, fast: str, key: str = clock) -> float:
        return round(best[slow][key] / best[fast][key], 3)

    return {
        "fp32_exact_vs_untiled": over("small theirs", "small ours"),
        "bf16_exact_vs_untiled": over("small theirs", "small ours bf16"),
        "fp32_exact_vs_untiled_480p": over("large theirs", "large ours"),
        "fp32_exact_vs_tiled": over("large theirs tiled", "large ours"),
        "fp32_4_strips_vs_untiled_480p": over("large theirs", "large ours, 4 strips"),
        "fp32_share_of_peak": round(macs / best["small ours"][clock] / peak["float32"][clock], 3),
        "bf16_share_of_peak": round(macs / best["small ours bf16"][clock] / peak["bfloat16"][clock], 3),
        "memory_untiled_vs_exact_480p": over("large theirs", "large ours", "peak_bytes"),
        "memory_tiled_vs_exact_480p": over("large theirs tiled", "large ours", "peak_bytes"),
    }


def build(folder: Path, tiny: bool) -> float:
    """Random weights in diffusers layout; multiply-adds of the small clip's decode."""
    import torch
    from diffusers import AutoencoderKLWan

    from models.vae.spec import read_spec
    from models.vae.strips import front_macs, plan_strips

    torch.manual_seed(0)
    AutoencoderKLWan(**{**CONFIG, **({"base_dim": 8} if tiny else {})}).save_pretrained(folder)
    spec, case = read_spec(folder), cases(tiny, compiled=False)["small ours"]
    size = (case.height // spec.scale_spatial, case.width // spec.scale_spatial)
    per_latent = front_macs(spec, *size) + plan_strips(spec, *size, 1).strips[0].macs
    return per_latent * (spec.num_latent_frames(case.num_frames) - 1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes of a few seconds: shows that the script works")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what the ratios are made of")
    parser.add_argument("--compile", action="store_true", help="also a compiled decoder, with the seconds it costs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        import torch

        torch.set_num_threads(options.threads)
        serve(Case(**json.loads(options.child)), options.folder)
        return 0
    print_plans()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        macs = build(folder, options.tiny)
        peak = peak_flops(options.threads)
        found = cases(options.tiny, options.compile)
        best = measure(found, folder, options.rounds, options.threads)
        same = same_frames(folder)
        growth = flat_memory(folder, options.tiny, options.threads)
    for dtype, rates in peak.items():
        print(f"peak of a matrix product in {dtype}: {2 * rates['wall'] / 1e9:.0f} GFLOP/s")
    figures = ratios(best, peak, macs, options.clock) | {"memory_161_vs_17_frames": round(growth, 3)}
    ok = same and growth <= FLAT_WITHIN
    print(json.dumps({"name": "vae", "ok": ok, "ratios": figures}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

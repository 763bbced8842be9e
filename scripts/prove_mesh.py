"""The numbers of every mesh against one process, on real gloo ranks: prints a table and one line of JSON.

Run: python scripts/prove_mesh.py

All meshes of tp 1, 2, 4, cp 1 to 4 and cfg 1, 2 with up to 8 ranks, by ring and by gathered keys, with and without
sequence parallelism, on clips whose token counts divide by nothing, in float32; a subset in bfloat16, three ways.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from models.parallel.layout import Degrees
from models.wan.pipeline import PipelineOptions, WanPipeline
from models.wan.tiny import ensure_tiny
from tests.parallel import clips
from tests.parallel.pool import RankPool

HALF_MESHES = [Degrees(cfg=2), Degrees(cp=3), Degrees(tp=4), Degrees(2, 2, 2), Degrees(2, 4)]
HALF_BOUND = 1.2


def main() -> int:
    """Measure and print; 0 when every figure is inside its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder in diffusers layout; default: the random `tiny`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = RankPool()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or ensure_tiny(Path(scratch))
        worst = full_precision(pool, folder)
        worst["swap_equal"] = swapped_experts(pool, folder)
        worst["bfloat16"] = half_precision(pool, folder)
    pool.close()
    ok = (
        worst["velocity"] <= 1
        and worst["trajectory"] <= 1
        and worst["bfloat16"] <= 1
        and worst["equal_ranks"] * worst["swap_equal"] == 1
    )
    print(json.dumps({"name": "mesh", "ok": ok, "ratios": {name: round(value, 4) for name, value in worst.items()}}))
    return 0 if ok else 1


def full_precision(pool: RankPool, folder: Path) -> dict[str, float]:
    """Every mesh on every clip; the largest distances as shares of their bounds."""
    pipeline = WanPipeline.load(folder)
    worst = {"velocity": 0.0, "trajectory": 0.0, "equal_ranks": 1.0}
    print("| mesh | self-attention | sequence parallel | clip | velocity | trajectory |\n|---|---|---|---|---|---|")
    for name, sampling in clips.CLIPS.items():
        expected = clips.reference(pipeline, sampling)
        for degrees, attention, sequence in clips.matrix():
            options = PipelineOptions(attention=attention, tp_sequence_parallel=sequence)
            ranks = pool.run(clips.render, degrees, folder, options, expected)
            velocity, trajectory = clips.worst(ranks[0], expected)
            shown = "yes" if sequence else "no"
            print(f"| {degrees} | {attention} | {shown} | {name} | {velocity:.1e} | {trajectory:.1e} |", flush=True)
            worst["velocity"] = max(worst["velocity"], velocity / clips.VELOCITY_BOUND)
            worst["trajectory"] = max(worst["trajectory"], trajectory / clips.TRAJECTORY_BOUND)
            worst["equal_ranks"] *= all(torch.equal(rank.result, ranks[0].result) for rank in ranks)
    return worst


def swapped_experts(pool: RankPool, folder: Path) -> float:
    """1 when a mesh that keeps one expert in memory gives the bits of one that keeps both."""
    expected = clips.reference(WanPipeline.load(folder), clips.ODD)
    both, one = (
        pool.run(clips.render, Degrees(2, 2, 2), folder, PipelineOptions(experts=kind), expected)[0].result
        for kind in ("resident", "swap")
    )
    return float(torch.equal(both, one))


def half_precision(pool: RankPool, folder: Path) -> float:
    """Distance from float32 of a mesh in bfloat16 over that of one process in bfloat16, largest, as share of 1.2."""
    expected = clips.reference(WanPipeline.load(folder), clips.ODD)
    options = PipelineOptions(dtype="bfloat16")
    alone = WanPipeline.load(folder, options)
    worst = 0.0
    print("\n| mesh in bfloat16 | step | its distance from float32 | that of one process |\n|---|---|---|---|")
    for degrees in HALF_MESHES:
        [rendered, *_] = pool.run(clips.render, degrees, folder, options, expected)
        for step, exact in expected.velocities.items():
            own = clips.distance(rendered.velocities[step], exact)
            floor = clips.distance(clips.velocity(alone, clips.ODD, step, expected.latents[step]), exact)
            print(f"| {degrees} | {step} | {own:.2e} | {floor:.2e} |", flush=True)
            worst = max(worst, own / floor)
    return worst / HALF_BOUND


if __name__ == "__main__":
    sys.exit(main())

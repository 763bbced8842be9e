"""How closely the pipeline agrees with diffusers on the same weights: the tables of docs/parity.md.

Run: python scripts/prove_parity.py

Runs without arguments on the random checkpoint `tiny`; ends with one line of JSON. Each figure in "ratios" is the worst
one divided by its bound, so what is above 1 is broken.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from models.wan.pipeline import PipelineOptions, WanPipeline
from models.wan.tiny import ensure_tiny
from tests.parity.bfloat16 import FACTOR, three_way
from tests.parity.cases import CASES
from tests.parity.compare import OWN_ERROR_FACTOR, TRAJECTORY_BOUND, VELOCITY_BOUND, judge
from tests.parity.components import component_rows
from tests.parity.reference import run_reference, sampling

COMPONENT_VARIANTS = ("default", "head128")


def clips(cache: Path) -> dict[str, float]:
    """Every case: velocity at the named steps, trajectory, error against float64."""
    worst = {"velocity": 0.0, "trajectory": 0.0, "float64": 0.0}
    print("| clip | velocity, worst of the named steps | trajectory | against float64: ours | diffusers' |")
    print("|---|---|---|---|---|")
    for name, (variant, changes, solver) in CASES.items():
        folder, clip = ensure_tiny(cache, variant), sampling(**changes)
        traces = [run_reference(folder, clip, solver, dtype)[1] for dtype in (torch.float32, torch.float64)]
        verdict = judge(WanPipeline.load(folder, PipelineOptions(solver=solver)), clip, *traces)
        velocity = max(verdict.velocity.values())
        own, theirs = verdict.own_error, verdict.their_error
        print(f"| {name} | {velocity:.1e} | {verdict.trajectory:.1e} | {own:.1e} | {theirs:.1e} |", flush=True)
        worst["velocity"] = max(worst["velocity"], velocity / VELOCITY_BOUND)
        worst["trajectory"] = max(worst["trajectory"], verdict.trajectory / TRAJECTORY_BOUND)
        worst["float64"] = max(worst["float64"], own / theirs / OWN_ERROR_FACTOR)
    return worst


def components(cache: Path) -> float:
    """Every component; the largest distance as share of its bound."""
    worst = 0.0
    print("\n| checkpoint | component | distance | bound | against float64: ours | the reference's |")
    print("|---|---|---|---|---|---|")
    for variant in COMPONENT_VARIANTS:
        folder = ensure_tiny(cache, variant)
        for row in component_rows(folder, WanPipeline.load(folder)):
            figures = f"{row.distance:.1e} | {row.bound:.0e} | {row.own_error:.1e} | {row.their_error:.1e}"
            print(f"| {variant} | {row.component} | {figures} |", flush=True)
            worst = max(worst, row.distance / row.bound)
    return worst


def half_precision(cache: Path) -> float:
    """bfloat16 three ways; our error over diffusers' own, largest, as share of its bound."""
    worst = 0.0
    print("\n| step in bfloat16 | our distance from float32 | diffusers' |\n|---|---|---|")
    clip, folder = sampling(), ensure_tiny(cache, "head128")
    pipeline = WanPipeline.load(folder, PipelineOptions(dtype="bfloat16"))
    for name, (own, theirs) in three_way(folder, pipeline, clip, run_reference(folder, clip)[1]).items():
        print(f"| {name} | {own:.2e} | {theirs:.2e} |", flush=True)
        worst = max(worst, own / theirs / FACTOR)
    return worst


def main() -> int:
    """Print the tables and the verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch)
        ratios = clips(cache) | {"components": components(cache), "bfloat16": half_precision(cache)}
    ok = all(ratio <= 1 for ratio in ratios.values())
    print(
        json.dumps(
            {"name": "prove_parity", "ok": ok, "ratios": {key: round(value, 4) for key, value in ratios.items()}}
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

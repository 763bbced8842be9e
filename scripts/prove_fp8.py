"""What FP8 does to a model: the error of every module, and of the guided velocity, against bfloat16 and float32.

Run: python scripts/prove_fp8.py [FOLDER]
Without a folder: the random checkpoint `tiny`. The last line is one JSON object; `ok` says that no module errs by more
than 6 % on its own inputs and that the velocity stays within 15 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kernels.fp8_matmul import FP8_MAX_OCP, FP8_MAX_TRN2
from models.events import TapEvent
from models.quantize import Quantization, module_errors, quantize
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline
from models.wan.tiny import ensure_tiny

MAX_MODULE_ERROR = 0.06
MAX_VELOCITY_ERROR = 0.15
SAMPLING = Sampling("a red fox in the snow", "", 1, 96, 64, 9, 4, 3.0, 3.0, 3.0)


def velocity(pipeline: WanPipeline) -> torch.Tensor:
    """The guided velocity of the first step."""
    events = pipeline.denoise(SAMPLING, stop=1, taps=frozenset({"velocity.0"}))
    return next(event.value for event in events if isinstance(event, TapEvent))


def judge(folder: Path, fp8_max: float) -> dict[str, float]:
    """Print the table of one largest value; returns the worst module and the velocity, and bfloat16's velocity."""
    how = Quantization(fp8_max)
    plain = WanPipeline.load(folder, PipelineOptions(dtype="bfloat16"))
    model = plain.experts.model("high")
    found = module_errors(model, how, lambda: velocity(plain))
    exact = velocity(WanPipeline.load(folder))
    half = velocity(plain)
    weights = quantize(model, how)
    eight = velocity(plain)
    print(f"\ne4m3 up to {fp8_max:g}\n\n| module | error of its weight | error of its result |\n|---|---|---|")
    for name, error in weights.items():
        print(f"| {name} | {error:.2%} | {found[name]:.2%} |")
    errors = {
        "worst_module": max(found.values()),
        "velocity": float((eight - exact).norm() / exact.norm()),
        "velocity_bfloat16": float((half - exact).norm() / exact.norm()),
    }
    print(
        f"\nguided velocity against float32: FP8 {errors['velocity']:.2%}, bfloat16 {errors['velocity_bfloat16']:.2%}"
    )
    return errors


def main() -> int:
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ensure_tiny(Path(cache))
        results = {
            f"{name}_{top:g}": value
            for top in (FP8_MAX_TRN2, FP8_MAX_OCP)
            for name, value in judge(folder, top).items()
        }
    ok = all(results[f"worst_module_{top:g}"] <= MAX_MODULE_ERROR for top in (FP8_MAX_TRN2, FP8_MAX_OCP))
    ok = ok and all(results[f"velocity_{top:g}"] <= MAX_VELOCITY_ERROR for top in (FP8_MAX_TRN2, FP8_MAX_OCP))
    print(
        json.dumps({"name": "prove_fp8", "ok": ok, "ratios": {key: round(value, 5) for key, value in results.items()}})
    )
    return 0 if ok else 5


if __name__ == "__main__":
    sys.exit(main())

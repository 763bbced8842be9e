"""How well `plan` knows: ideals beside the known ones, the memory verdict, every hold-out with its miss.

Run: python scripts/prove_plan.py

Runs without arguments, without weights and without torch; ends with one line of JSON. "ok" speaks of the ideals and the
verdict; the ratios are predicted over measured denoising seconds of the hold-outs, as they are.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from batch_gen.estimate import holdouts
from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import Placement, footprint
from batch_gen.estimate.speed import T2V_720P, efficiency, ideal_denoise_s
from batch_gen.estimate.subject import Clips, published
from batch_gen.request import Bucket
from models.parallel.layout import Degrees

KNOWN_IDEALS_S = {
    "832x480x81": (Bucket(832, 480, 81, "text"), 12.6),
    "1280x720x81": (Bucket(1280, 720, 81, "text"), 48.9),
}
VERDICTS = (((4, 8, 2), "gather", False), ((4, 8, 2), "ring", True), ((8, 4, 2), "gather", True))


def main() -> int:
    """Print all of it."""
    subject, ok = published("wan2.2-t2v-a14b"), True
    for name, (bucket, known_s) in KNOWN_IDEALS_S.items():
        ideal_s = ideal_denoise_s(subject, Clips(bucket, 40), Placement(Degrees(8, 4, 2)), TRN2)
        ok &= abs(ideal_s / known_s - 1) < 0.01
        print(f"ideal {name}, 40 steps, 64 cores: {ideal_s:.2f} s, known {known_s} s")
    for degrees, kind, fits in VERDICTS:
        found = footprint(subject, T2V_720P, Placement(Degrees(*degrees), kind), TRN2)
        ok &= found.fits is fits
        verdict = "fits" if found.fits else "does not fit"
        print(f"720p on {Degrees(*degrees)}, {kind}: {found.peak_bytes / 1e9:.2f}e9 bytes, {verdict}")
    print(f"efficiency {efficiency('neuron'):.3f} of the peak; hold-outs (measured, predicted, miss):")
    print(holdouts.as_text())
    ratios = {
        f"{miss.holdout.clips.bucket}-{miss.holdout.clips.steps}-{miss.holdout.degrees}": round(
            miss.denoise_share + 1, 3
        )
        for miss in holdouts.misses()
    }
    print(json.dumps({"name": "prove_plan", "ok": ok, "ratios": ratios}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

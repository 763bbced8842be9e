"""Make the `pocket` checkpoint from nothing on two CPU cores, in resumable stages.

Each stage leaves its result in the work folder and is skipped when that is there; so does each
of the three runs of `joint`, none of which takes longer than 50 minutes. Seeds are fixed. The
minutes are those of the committed weights, on two cores that did other work too.

    tokenizer    1 second
    vae-frames   9.5 minutes   single frames, 40.8 dB
    vae-clips   11.5 minutes   clips, 34.9 dB
    latents      4.2 minutes
    joint       68 minutes     text encoder and one network over all noise levels:
                               25 + 26 + 17 for its three runs
    experts     12 minutes     two networks, each on its side of the boundary
    export       2 seconds     half precision, diffusers layout: WORK/weights and WORK/SHA256SUMS

`scripts/prove_pocket.py --weights WORK/weights` measures the result before it is committed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pocket_export
import pocket_pair
import pocket_text
import pocket_train_clips
import pocket_train_dit
import pocket_train_vae

STAGES = {
    "tokenizer": (pocket_text.make_tokenizer, "tokenizer"),
    "vae-frames": (pocket_train_vae.train_frames, "vae-frames.pt"),
    "vae-clips": (pocket_train_clips.train_clips, "vae-clips.pt"),
    "latents": (pocket_train_dit.make_latents, "latents.pt"),
    "joint": (pocket_train_dit.train_joint, "joint.pt"),
    "experts": (pocket_train_dit.train_experts, "expert-low.pt"),
    "export": (pocket_export.export, "weights/model_index.json"),
}


def main() -> None:
    """Run every stage whose result is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/batch-gen/train-pocket")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name, (stage, result) in STAGES.items():
        if (options.work / result).exists():
            print(f"{name}: done before", flush=True)
            continue
        begin = time.time()
        pocket_pair.run(stage, options.work, name)
        print(f"{name}: finished in {(time.time() - begin) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()

"""Make the `pocket` checkpoint from nothing on two CPU cores, in resumable stages."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pocket_pair
import pocket_export  # noqa: E402
import pocket_text  # noqa: E402
import pocket_train_dit  # noqa: E402
import pocket_train_vae  # noqa: E402

STAGES = {
    "tokenizer": (pocket_text.make_tokenizer, "tokenizer"),
    "vae-frames": (pocket_train_vae.train_frames, "vae-frames.pt"),
    "vae-clips": (pocket_train_vae.train_clips, "vae-clips.pt"),
    "latents": (pocket_train_dit.make_latents, "latents.pt"),
    "joint": (pocket_train_dit.train_joint, "joint.pt"),
    "experts": (pocket_train_dit.train_experts, "expert-low.pt"),
    "export": (pocket_export.export, "weights/model_index.json"),
}


def main() -> None:
    """Run every stage whose result is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
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

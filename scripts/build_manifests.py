"""Writes manifests/demo.parquet and manifests/regression.parquet, in the grammar that `pocket` was trained on.

Run without arguments from anywhere: python scripts/build_manifests.py
The same version of pyarrow writes the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pyarrow as pa

from batch_gen.tables import write_manifest

DEMO = [
    {
        "row_id": "red-circle-right",
        "prompt": "a red circle moving right on a black background",
        "seed": 7,
        "tag": "hero",
    },
    {"row_id": "blue-square-up", "prompt": "a blue square moving up on a gray background", "seed": 11, "tag": "hero"},
    {"row_id": "yellow-triangle-grows", "prompt": "a yellow triangle growing on a navy background", "tag": "growth"},
    {"row_id": "green-circle-shrinks", "prompt": "a green circle shrinking on a black background", "tag": "growth"},
    {"row_id": "white-square-still", "prompt": "a white square standing still on a navy background", "tag": "still"},
    {"row_id": "purple-triangle-left", "prompt": "a purple triangle moving left on a gray background", "tag": "motion"},
    {"row_id": "orange-circle-down", "prompt": "a orange circle moving down on a navy background", "tag": "motion"},
    {
        "row_id": "cyan-square-takes",
        "prompt": "a cyan square moving right on a black background",
        "seed": 42,
        "samples": 2,
        "tag": "takes",
    },
]

# One row per thing that can go wrong by itself: shapes, motion, strips and frames of other numbers, both guidance
# paths, another shift. Seeds are fixed, so a clip changes only when the product does.
REGRESSION = [
    {"row_id": "base", "prompt": "a red circle moving right on a black background", "seed": 1, "tag": "base"},
    {"row_id": "still", "prompt": "a white square standing still on a navy background", "seed": 2, "tag": "motion"},
    {"row_id": "grows", "prompt": "a yellow triangle growing on a gray background", "seed": 3, "tag": "motion"},
    {
        "row_id": "one-frame",
        "prompt": "a cyan circle moving up on a black background",
        "seed": 4,
        "num_frames": 1,
        "tag": "frames",
    },
    {
        "row_id": "nine-frames",
        "prompt": "a blue square moving left on a gray background",
        "seed": 5,
        "num_frames": 9,
        "tag": "frames",
    },
    {
        "row_id": "wide",
        "prompt": "a green triangle moving down on a navy background",
        "seed": 6,
        "width": 160,
        "height": 96,
        "tag": "size",
    },
    {
        "row_id": "tall",
        "prompt": "a purple circle shrinking on a black background",
        "seed": 7,
        "width": 96,
        "height": 160,
        "tag": "size",
    },
    {
        "row_id": "no-guidance",
        "prompt": "a orange square moving right on a gray background",
        "seed": 8,
        "guidance_high": 1.0,
        "guidance_low": 1.0,
        "tag": "guidance",
    },
    {
        "row_id": "split-guidance",
        "prompt": "a red triangle moving left on a navy background",
        "seed": 9,
        "guidance_high": 4.0,
        "guidance_low": 2.0,
        "tag": "guidance",
    },
    {
        "row_id": "low-shift",
        "prompt": "a blue circle growing on a black background",
        "seed": 10,
        "flow_shift": 2.0,
        "tag": "shift",
    },
]


def main() -> None:
    """Write the manifests that ship with the repository."""
    folder = ROOT / "manifests"
    folder.mkdir(exist_ok=True)
    for name, rows in (("demo", DEMO), ("regression", REGRESSION)):
        path = folder / f"{name}.parquet"
        write_manifest(path, rows, {"tag": pa.string()})
        print(f"{path.relative_to(ROOT)}: {len(rows)} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

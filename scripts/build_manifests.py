"""Writes manifests/demo.parquet: eight rows, nine clips, in the grammar that `pocket` was trained on.

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


def main() -> None:
    """Write the manifests that ship with the repository."""
    path = ROOT / "manifests" / "demo.parquet"
    path.parent.mkdir(exist_ok=True)
    write_manifest(path, DEMO, {"tag": pa.string()})
    print(f"{path.relative_to(ROOT)}: {len(DEMO)} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

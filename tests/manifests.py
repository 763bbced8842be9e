"""Small manifests and settings for the manifest's tests."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batch_gen.request import ModelLimits, SamplingDefaults

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS = SamplingDefaults(
    negative_prompt="blurry",
    width=128,
    height=96,
    num_frames=17,
    fps=Fraction(8),
    steps=12,
    guidance_high=4.0,
    guidance_low=3.0,
    flow_shift=5.0,
)
LIMITS = ModelLimits(name="pocket")
ANY_INPUT = ModelLimits(name="any", conditionings=("text", "image", "first_last"))


def save(path: Path, columns: dict[str, object], **options: object) -> Path:
    """A Parquet file of the columns, lists or Arrow arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path

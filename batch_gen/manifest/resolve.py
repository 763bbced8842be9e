"""What a cell leaves open, filled in: presets, media paths, extra columns as JSON."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import math
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from batch_gen.request import Json, SamplingDefaults

MAX_EXTRA_BYTES = 4_096


def column_or(cells: pa.Array | None, default: object, num_rows: int) -> list[object]:
    """Cells as Python values with a default for empty ones: `[num_rows]`."""
    if cells is None:
        return [default] * num_rows
    values: list[object] = cells.to_pylist()
    if default is None or cells.null_count == 0:
        return values
    return [default if value is None else value for value in values]


def preset_values(
    presets: Mapping[str, SamplingDefaults], run_preset: str, defaults: SamplingDefaults
) -> dict[str, SamplingDefaults]:
    """Sampling values by preset name; the run's own name means the run's defaults."""
    return {**presets, run_preset: defaults}


def media_location(base: str, value: str | bytes) -> str:
    """An image cell as an absolute path, an s3:// URI or `bytes:<sha256>`."""
    if isinstance(value, bytes):
        return f"bytes:{hashlib.sha256(value).hexdigest()}"
    if value.lower().startswith("s3://"):
        return value
    if base.startswith("s3://"):
        bucket, _, prefix = base.removeprefix("s3://").partition("/")
        return f"s3://{bucket}/{posixpath.normpath(posixpath.join(prefix, value)).lstrip('/')}"
    return str((Path(base) / value).absolute())


def to_json_value(value: object) -> Json:
    """A carried-through cell as JSON: instants in ISO form, bytes as base64 (long ones as their digest)."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, bytes):
        short = len(value) <= MAX_EXTRA_BYTES
        return base64.b64encode(value).decode() if short else f"sha256:{hashlib.sha256(value).hexdigest()}"
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)

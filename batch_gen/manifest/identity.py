"""Names of rows and clips: ids from content, suffixes for equal rows, uniqueness by 16-byte digests.

Memory is 16 bytes per row for the content, 16 per clip for the ids, and 16 more while they are sorted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batch_gen import rules
from batch_gen.manifest.canon import by_unique, numbers
from batch_gen.rule_checks import fps_fault, parse_fps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batch_gen.manifest.sources import Batch

DIGEST_BYTES: Final = 16
ID_HEX: Final = 20
CONTENT_COLUMNS: Final = tuple(name for name in rules.COLUMNS if name != "row_id")

Digests = npt.NDArray[np.void]  # [n] of 16 bytes


@dataclass(frozen=True, slots=True)
class Twin:
    """Two rows, by number in the whole manifest, of the same digest; `first` comes earlier."""

    first: int
    second: int
    repeat: int  # 2 for the second of its kind, 3 for the third


def content_digests(batch: Batch) -> Digests:
    """SHA-256 of each row's schema columns before defaults, cut to 16 bytes: `[rows]`.

    A cell counts as `name, length in bytes, value`; an empty cell does not count, so that a column of nulls and a
    missing column are the same. Whole-number floats equal integers; fps is a fraction.
    """
    parts = [_content_part(name, batch.cells[name]) for name in CONTENT_COLUMNS if name in batch.cells]
    if not parts:
        return np.full(batch.num_rows, np.void(_digest(b"")), f"V{DIGEST_BYTES}")
    empty = pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(*parts, empty, null_handling="replace", null_replacement="")
    return _digest_array(joined.to_pylist())


def _content_part(name: str, cells: pa.Array) -> pa.Array:
    """`name US length US value RS` per filled cell as `[rows]` large_binary, null elsewhere."""
    rule = rules.BY_COLUMN[name]
    if rule.type == "string":
        body = cells
    elif pa.types.is_integer(cells.type) and rule.type in {"int32", "int64"}:
        body = pc.cast(cells, pa.large_string())
    else:
        body = pa.array(by_unique(cells, lambda value: _content_text(rule, value), None), pa.large_string())
    length = pc.cast(pc.binary_length(body), pa.large_string())
    pieces = [pa.scalar(f"{name}\x1f", pa.large_string()), length, pa.scalar("\x1f", pa.large_string()), body]
    end, separator = pa.scalar("\x1e", pa.large_string()), pa.scalar("", pa.large_string())
    return pc.cast(pc.binary_join_element_wise(*pieces, end, separator), pa.large_binary())


def _content_text(rule: rules.Rule, value: object) -> str:
    if isinstance(value, bytes):
        return f"bytes:{hashlib.sha256(value).hexdigest()}"
    if rule.type == "fps" and fps_fault(value) is None:
        return str(parse_fps(value))
    if isinstance(value, float) and rule.type != "float64" and value.is_integer():
        return str(int(value))
    return repr(float(value)) if rule.type == "float64" else str(value)  # type: ignore[arg-type]


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:DIGEST_BYTES]


def _digest_array(bodies: Sequence[bytes]) -> Digests:
    sha256 = hashlib.sha256
    joined = b"".join([sha256(body).digest()[:DIGEST_BYTES] for body in bodies])
    return np.frombuffer(joined, f"V{DIGEST_BYTES}")


def hashed_id(content: np.void, repeat: int) -> str:
    """The row_id of a row without one: 20 hex digits of its content, `-2`, `-3` for equal rows."""
    base = content.tobytes().hex()[:ID_HEX]
    return base if repeat == 1 else f"{base}-{repeat}"


def name_digests(names: Sequence[str], *, fold_case: bool) -> Digests:
    """Digest of each clip_id: `[clips]`; with `fold_case` ids that differ by case alone are equal."""
    if fold_case:
        return _digest_array([name.lower().encode() for name in names])
    return _digest_array([name.encode() for name in names])


def sample_counts(batch: Batch) -> npt.NDArray[np.int64]:
    """Samples of each row, 1 where empty: `[rows]`."""
    cells = batch.cells.get("samples")
    if cells is None:
        return np.ones(batch.num_rows, np.int64)
    return np.nan_to_num(numbers(cells), nan=1.0).astype(np.int64)


def twins(digests: Digests) -> Iterator[Twin]:
    """Every row whose digest an earlier one has, in order of first appearance within each kind."""
    if len(digests) < 2:
        return
    halves = np.ascontiguousarray(digests).view(np.uint64).reshape(-1, 2)
    order = np.argsort(halves[:, 0], kind="stable")
    front = halves[order, 0]
    starts = np.flatnonzero(front[1:] == front[:-1])
    del front
    if len(starts) == 0:
        return
    yield from _twins_of_runs(digests, order, starts)


def _twins_of_runs(digests: Digests, order: npt.NDArray[np.intp], starts: npt.NDArray[np.intp]) -> Iterator[Twin]:
    """Resolve runs whose first 8 bytes agree; `starts` are places in `order` whose successor has the same front."""
    breaks = np.flatnonzero(np.diff(starts) > 1) + 1
    for run in np.split(starts, breaks):
        first_of: dict[bytes, tuple[int, int]] = {}
        for index in order[run[0] : run[-1] + 2].tolist():
            key = digests[index].tobytes()
            first, repeat = first_of.get(key, (index, 0))
            first_of[key] = (first, repeat + 1)
            if repeat:
                yield Twin(first, index, repeat + 1)

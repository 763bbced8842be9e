"""Columns as people write them -> canonical cells: what may differ in type without loss, and what may not.

Accepted: large_string and string views, dictionaries, columns of nulls only, narrower or wider integers, floats that
hold whole numbers, decimals for numbers, bytes that are UTF-8 for text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

if TYPE_CHECKING:
    from collections.abc import Callable

    from batch_gen.rules import Rule

Mask = npt.NDArray[np.bool_]

_WANTED: Final = {
    "string": "text",
    "int32": "whole numbers",
    "int64": "whole numbers",
    "float64": "numbers",
    "fps": "numbers or text such as 30000/1001",
    "media": "text (a path or s3:// URI) or bytes",
}


def type_problem(rule: Rule, kind: pa.DataType) -> str | None:
    """Why a column of this Arrow type cannot be the rule's column, or None."""
    if pt.is_dictionary(kind):
        kind = kind.value_type
    text, number = _is_text(kind), _is_number(kind)
    accepted = {
        "string": text or _is_bytes(kind),
        "fps": text or number,
        "media": text or _is_bytes(kind),
    }.get(rule.type, number)
    if accepted or pt.is_null(kind):
        return None
    return f"has type {kind}; must hold {_WANTED[rule.type]} (batch-gen import converts other tables)"


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind) or pt.is_binary_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind))


def flat(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One contiguous array, dictionaries decoded."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # more bytes than one array of 32-bit offsets can hold
        array = pa.concat_arrays([chunk.cast(_wide(chunk.type)) for chunk in array.chunks])
    if pt.is_dictionary(array.type):
        array = array.dictionary.take(array.indices)
    return array


def _wide(kind: pa.DataType) -> pa.DataType:
    return pa.large_string() if _is_text(kind) else pa.large_binary()


def canonical(rule: Rule, array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Cells of an accepted type as string, binary or float64 arrays, or integers as they are; nulls stay nulls.

    Text is not validated here: see `invalid_utf8`.
    """
    array = flat(array)
    kind = array.type
    if pt.is_null(kind):
        return pa.nulls(len(array), pa.large_string() if rule.type in {"string", "fps", "media"} else pa.float64())
    if pt.is_decimal(kind) or pt.is_floating(kind):
        return pc.cast(array, pa.float64(), safe=False)
    if pt.is_integer(kind):
        return array
    if _is_bytes(kind) and rule.type == "media":
        return pc.cast(array, pa.large_binary())
    options = pc.CastOptions(target_type=pa.large_string(), allow_invalid_utf8=True)
    return pc.cast(pc.cast(array, pa.large_binary()) if pt.is_fixed_size_binary(kind) else array, options=options)


def invalid_utf8(array: pa.Array) -> Mask:
    """Which cells of a text array are not UTF-8: `[len]` bool."""
    bad = np.zeros(len(array), bool)
    if not _is_text(array.type):
        return bad
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        for index, cell in enumerate(pc.cast(array, pa.large_binary()).to_pylist()):
            bad[index] = cell is not None and not _decodes(cell)
    return bad


def _decodes(cell: bytes) -> bool:
    try:
        cell.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def filled(array: pa.Array) -> Mask:
    """Which cells are not null: `[len]` bool."""
    if array.null_count == 0:
        return np.ones(len(array), bool)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)


def numbers(array: pa.Array) -> npt.NDArray[np.float64]:
    """Number cells as `[len]` float64, NaN where null; whole numbers are exact up to 2^53."""
    cast = pc.cast(array, pa.float64(), safe=False)
    return np.asarray(cast.to_numpy(zero_copy_only=False), np.float64)


def by_unique(array: pa.Array, rate: Callable[[object], object], when_null: object) -> list[object]:
    """`rate` of every cell, called once per distinct value: `[len]`."""
    encoded = array.dictionary_encode()
    verdicts = [rate(value) for value in encoded.dictionary.to_pylist()]
    verdicts.append(when_null)
    indices = encoded.indices.fill_null(len(verdicts) - 1).to_numpy(zero_copy_only=False)
    return [verdicts[index] for index in indices.tolist()]


def mask_by_unique(array: pa.Array, accept: Callable[[object], bool]) -> Mask:
    """Which cells are accepted, `accept` called once per distinct value, nulls accepted: `[len]` bool."""
    encoded = array.dictionary_encode()
    verdicts = np.array([*(accept(value) for value in encoded.dictionary.to_pylist()), True], bool)
    indices = encoded.indices.fill_null(len(verdicts) - 1).to_numpy(zero_copy_only=False)
    return np.asarray(verdicts[indices], bool)

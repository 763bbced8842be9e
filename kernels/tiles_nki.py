"""What every NKI kernel needs: how rows are split over the cores of LNC2 and over tiles, how limits are checked.

Rules of the language that shape this code: Python loops are unrolled by the compiler and `nl.fori_loop` is not, no
keyword-only arguments, no `is`, no operators on tensors, tuples for lists.
"""

from collections.abc import Callable
from typing import Any

import nki.isa as nisa
import nki.language as nl

PARTITIONS = 128  # nl.tile_size.pmax is no Python integer for the compiler, and shapes need one
MATMUL_COLUMNS = 512  # moving columns of one matmul, and float32 elements of one PSUM bank
FLOAT_DTYPES = (nl.float32, nl.bfloat16, nl.float16)


def check_limit(holds: bool, limit: str, found: Any) -> None:
    """Refuse a shape or dtype at trace time.

    Args:
        holds: whether the limit is kept.
        limit: the name of the limit with its value.
        found: what was given.

    Raises:
        AssertionError: it is not kept; nothing falls back by itself.
    """
    assert holds, f"{limit}; got {found}: use the backend 'reference' for this shape"


def my_rows(num_rows: int) -> tuple[int, int]:
    """First row and number of rows of this core: halves under LNC2.

    An odd number of rows gives halves that overlap by one row, so that both cores run the same program; the shared row
    is computed twice to the same bits.
    """
    if nl.num_programs() == 1:
        return 0, num_rows
    half = (num_rows + 1) // 2
    return nl.program_id(0) * (num_rows - half), half


def tiles(count: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of the tiles of `size` that cover `count`; the last may be shorter."""
    found = []
    for start in range(0, count, size):
        found.append((start, min(size, count - start)))
    return found


def for_groups(start: int, count: int, size: int, body: Callable[[int, Any, int], None]) -> None:
    """`body(first, register, rows)` over groups of rows: a loop on the device for the full ones, then the rest.

    A row index is `first + register`; the register counts in rows and is None for the rest.
    """
    full = count // size * size
    if full > 0:

        def step(register: Any) -> None:
            body(start, register, size)

        nl.fori_loop(0, full, step, step=size)
    if count > full:
        body(start + full, None, count - full)


def wait_for_both_cores(shared: Any) -> None:
    """Let neither core read `shared` before both have written their part of it."""
    if nl.num_programs() > 1:
        nisa.core_barrier(data=shared, cores=(0, 1))


def filled(shape: tuple[int, ...], value: float, dtype: Any) -> Any:
    """A new SBUF tile that holds `value` everywhere."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def load(shape: tuple[int, ...], source: Any, dtype: Any) -> Any:
    """A new SBUF tile of `shape` with the elements of an HBM view, cast to `dtype`."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def load_row(source: Any, offset: int, width: int, partitions: int, dtype: Any) -> Any:
    """[partitions, width] SBUF: a row of HBM, `width` elements from `offset` on, repeated on every partition."""
    return load((partitions, width), source.ap(pattern=((0, partitions), (1, width)), offset=offset), dtype)


def rows_of(x: Any, first: int, register: Any, rows: int, width: int) -> Any:
    """[rows, width] of a contiguous HBM tensor seen as rows of `width`, from row `first + register` on.

    The register counts in rows.
    """
    flat = x.reshape((x.size // width, width))
    return flat.ap(pattern=((width, rows), (1, width)), offset=first * width, scalar_offset=register, indirect_dim=0)


def quantized(tile: Any, fp8_max: float, amax_floor: float) -> tuple[Any, Any]:
    """FP8 rows of a [P, K] SBUF tile: float8_e4m3 [P, K] and float32 scales [P, 1], as `fp8_matmul.quantize_rows`."""
    rows, width = tile.shape
    size = nl.ndarray((rows, width), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.activation(dst=size, op=nl.abs, data=tile)
    amax = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=amax, op=nl.maximum, data=size, axis=1)
    scale = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=scale, data=amax, op0=nl.maximum, operand0=amax_floor, op1=nl.multiply, operand1=1.0 / fp8_max
    )
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=scale)
    values = nl.ndarray((rows, width), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=values, data=tile, op0=nl.multiply, operand0=inverse)
    return values, scale

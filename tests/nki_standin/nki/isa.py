"""The part of `nki.isa` that our kernels use, with the documented parameter names; TensorE and DMA are in this file."""

from enum import Enum, auto
from typing import Any

import numpy as np

from nki._compute import (  # noqa: F401 - the instructions of the compute engines belong to this namespace
    activation,
    bn_aggr,
    bn_stats,
    charge,
    engine,
    free_size,
    iota,
    memset,
    no_psum_for_gpsimd,
    on_chip,
    reciprocal,
    reduce_cmd,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from nki._device import (
    MOVING_COLUMNS,
    NUM_PARTITIONS,
    STATIONARY_COLUMNS,
    NkiValidationError,
    core,
    refuse_trn3,
    require,
)
from nki._tensor import NkiTensor, read, write

__all__ = ["NkiValidationError"]
_FP8 = ("float8_e4m3", "float8_e5m2")
_MATMUL_DTYPES = (*_FP8, "bfloat16", "float16", "float32")


class dge_mode(Enum):
    unknown = auto()
    swdge = auto()
    hwdge = auto()
    none = auto()


class oob_mode(Enum):
    error = auto()
    skip = auto()


class matmul_perf_mode(Enum):
    none = auto()
    double_row = auto()


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: Any = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
    name: Any = None,
) -> None:
    require(priority is None, "dma_copy: priority exists on trn3 only")
    require("psum" not in (dst.buffer, src.buffer), "dma_copy: DMA cannot reach PSUM; use tensor_copy to SBUF first")
    require(dst.size == src.size, f"dma_copy: {src.size} elements into {dst.size}")
    values = read(src, "dma_copy")
    write(dst, values if src.dtype == dst.dtype else values.astype(np.float32))
    work = core().work
    work["dma_bytes"] += max(dst.size * dst.array().itemsize, src.size * src.array().itemsize)
    work["dma_instructions"] += 1


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: Any = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: Any = None,
) -> None:
    require(
        not is_transpose and tile_position == () and tile_size == (),
        "nc_matmul: the stand-in has no transpose or tiling mode",
    )
    on_chip("nc_matmul", dst, stationary, moving)
    double = perf_mode == matmul_perf_mode.double_row
    _check_matmul(dst, stationary, moving, double)
    a, b = read(stationary, "nc_matmul"), read(moving, "nc_matmul")
    a, b = (
        a.reshape(-1, a.shape[-1]) if double else a.reshape(a.shape[0], -1),
        b.reshape(2 * b.shape[0], -1) if double else b.reshape(b.shape[0], -1),
    )
    _accumulate(dst, _product(a, b, stationary.dtype in _FP8 and moving.dtype in _FP8), accumulate)
    passes = 4 if stationary.dtype == "float32" else 1
    core().work["tensor_columns"] += passes * (free_size(moving) // (2 if double else 1))
    core().work["tensor_instructions"] += 1


def _product(a: Any, b: Any, fp8: bool) -> Any:
    """`a^T b`; products of FP8 numbers are summed exactly within the instruction (float64 holds 256 of them), then rounded."""
    kind = np.float64 if fp8 else np.float32
    return (a.astype(kind).T @ b.astype(kind)).astype(np.float32)


def _check_matmul(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, double: bool) -> None:
    require(stationary.buffer == "sbuf" and moving.buffer == "sbuf", "nc_matmul: stationary and moving must be in SBUF")
    require(
        dst.buffer == "psum" and dst.dtype == "float32",
        f"nc_matmul: the result must be float32 in PSUM on trn2, not {dst.dtype} in {dst.buffer}",
    )
    for which in (stationary, moving):
        require(which.dtype in _MATMUL_DTYPES, f"nc_matmul: operand of {which.dtype}")
    require((stationary.dtype == "float32") == (moving.dtype == "float32"), "nc_matmul: float32 goes with float32 only")
    halves = 2 if double else 1
    if double:
        require(
            stationary.dtype in _FP8 and moving.dtype in _FP8,
            "nc_matmul: double_row takes float8_e4m3 or float8_e5m2 only",
        )
        require(
            stationary.ndim == 3 and moving.ndim == 3 and stationary.shape[1] == 2 and moving.shape[1] == 2,
            "nc_matmul: double_row wants [P, 2, columns]",
        )
    rows, columns = free_size(stationary) // halves, free_size(moving) // halves
    require(
        stationary.shape[0] == moving.shape[0] <= NUM_PARTITIONS,
        f"nc_matmul: contraction of {stationary.shape[0]} and {moving.shape[0]} partitions, at most {NUM_PARTITIONS}",
    )
    require(rows <= STATIONARY_COLUMNS, f"nc_matmul: {rows} stationary columns exceed {STATIONARY_COLUMNS}")
    require(columns <= MOVING_COLUMNS, f"nc_matmul: {columns} moving columns exceed {MOVING_COLUMNS}")
    require((dst.shape[0], free_size(dst)) == (rows, columns), f"nc_matmul: result {rows} x {columns} into {dst.shape}")


def _accumulate(dst: NkiTensor, product: Any, accumulate: Any) -> None:
    """Overwrite or add, by the rules of PSUM accumulation on trn2."""
    storage = dst.storage
    started, unread = dst.mask(storage.started), dst.mask(storage.unread)
    add = bool(started.all() and unread.all()) if accumulate is None else bool(accumulate)
    if add:
        require(
            bool(started.all()),
            "nc_matmul: accumulate=True into PSUM that no matmul has started; memset does not count on trn2",
        )
        total = dst.array() + product.reshape(dst.shape)
    else:
        require(not unread.any(), "nc_matmul: overwrites a result that nothing has read; accumulate is missing")
        total = product
    write(dst, total)
    dst.mask(storage.started)[...] = True
    dst.mask(storage.unread)[...] = True


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: Any = None) -> None:
    on_chip("nc_transpose", dst, data)
    require(engine in (_ENGINE.tensor, _ENGINE.unknown), "nc_transpose: the stand-in transposes on TensorE")
    require(data.buffer == "sbuf" and dst.buffer == "psum", "nc_transpose: TensorE reads SBUF and writes PSUM")
    require(
        data.dtype == dst.dtype and data.dtype not in _FP8,
        f"nc_transpose: {data.dtype} into {dst.dtype}; 16 or 32 bits, the same type",
    )
    rows, columns = data.shape[0], free_size(data)
    require(columns <= NUM_PARTITIONS, f"nc_transpose: {columns} free elements exceed {NUM_PARTITIONS}")
    require((dst.shape[0], free_size(dst)) == (columns, rows), f"nc_transpose: {rows} x {columns} into {dst.shape}")
    write(dst, read(data, "nc_transpose").reshape(rows, columns).T)
    core().work["tensor_columns"] += (2 if data.dtype == "float32" else 1) * rows
    core().work["tensor_instructions"] += 1


def core_barrier(data: NkiTensor, cores: Any, engine: engine = engine.gpsimd, name: Any = None) -> None:
    here = core()
    require(data.buffer == "shared_hbm", "core_barrier: data must be in shared HBM")
    require(tuple(cores) == (0, 1) and here.num_programs == 2, "core_barrier: cores must be (0, 1) under LNC2")
    here.machine.meet(here, ("barrier", here.rank), 2, None, lambda _: None)


def nc_matmul_mx(
    dst: Any,
    stationary: Any,
    moving: Any,
    stationary_scale: Any,
    moving_scale: Any,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: Any = None,
    name: Any = None,
) -> None:
    refuse_trn3("nc_matmul_mx")


def quantize_mx(dst: Any, src: Any, dst_scale: Any, name: Any = None) -> None:
    refuse_trn3("quantize_mx")


def exponential(
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_init: Any = 0.0,
    name: Any = None,
) -> None:
    refuse_trn3("exponential")


_ENGINE = engine

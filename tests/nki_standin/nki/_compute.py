"""VectorE, ScalarE and GpSimdE: element-wise work, reductions, statistics."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np

from nki._device import BN_STATS_ELEMENTS, NUM_PARTITIONS, core, require
from nki._tensor import ON_CHIP, NkiTensor, read, wide, write

_MIN_CYCLES = 64  # initiation interval of an instruction
_HALVES = ("bfloat16", "float16")


class engine(Enum):
    tensor = auto()
    vector = auto()
    scalar = auto()
    gpsimd = auto()
    dma = auto()
    sync = auto()
    unknown = auto()


class reduce_cmd(Enum):
    idle = auto()
    reset = auto()
    reduce = auto()
    reset_reduce = auto()
    load_reduce = auto()


def on_chip(what: str, *tensors: Any) -> None:
    """Operands of compute engines lie in SBUF or PSUM and start at a partition that the engines can address."""
    for tensor in tensors:
        if not isinstance(tensor, NkiTensor):
            continue
        require(tensor.buffer in ON_CHIP, f"{what}: operand in {tensor.buffer}; the engines read SBUF and PSUM only")
        first, count = tensor.start_partition, tensor.shape[0]
        room = {0: NUM_PARTITIONS, 32: 32, 64: 64, 96: 32}.get(first, 0)
        require(
            count <= room,
            f"{what}: {count} partitions from partition {first}; a start of 0, 32, 64, 96 has 128, 32, 64, 32",
        )


def free_size(tensor: NkiTensor) -> int:
    return tensor.size // tensor.shape[0]


def same_size(what: str, *tensors: NkiTensor) -> None:
    sizes = {(t.shape[0], free_size(t)) for t in tensors}
    require(len(sizes) == 1, f"{what}: operands of different partition or free size {sorted(sizes)}")


def not_both_psum(what: str, a: NkiTensor, b: NkiTensor) -> None:
    require(not (a.buffer == "psum" and b.buffer == "psum"), f"{what}: both inputs in PSUM; one must be in SBUF")


def _vector_rate(unary: bool, dst: NkiTensor, *sources: NkiTensor) -> int:
    """Elements per cycle and lane: 2 or 4 for 16-bit operands by the rules of the architecture guide."""
    tensors = (dst, *sources)
    if any(t.dtype not in _HALVES for t in tensors):
        return 1
    in_sbuf = all(t.buffer == "sbuf" for t in tensors)
    if not unary:
        return 2 if in_sbuf else 1
    return 4 if in_sbuf and all(t.strides[-1] == 1 for t in tensors) else 2


def charge(which: engine, elements: int, rate: int = 1) -> None:
    name = {engine.unknown: "vector"}.get(which, which.name)
    work = core().work
    work[f"{name}_cycles"] += max(_MIN_CYCLES, elements // rate)
    work[f"{name}_elements"] += elements
    work[f"{name}_instructions"] += 1


def no_psum_for_gpsimd(what: str, which: engine, *tensors: NkiTensor) -> None:
    if which == engine.gpsimd:
        require(all(t.buffer != "psum" for t in tensors), f"{what}: GpSimdE cannot access PSUM")


def operand(what: str, value: Any, data: NkiTensor, ndim: int) -> Any:
    """A number, or a [P, 1] vector broadcast along the free dimensions."""
    if not isinstance(value, NkiTensor):
        return np.float32(value)
    on_chip(what, value)
    require(
        value.shape[0] == data.shape[0] and free_size(value) == 1,
        f"{what}: vector operand of shape {value.shape} for data {data.shape}",
    )
    require(value.dtype == "float32", f"{what}: vector operand is {value.dtype}; it must be float32")
    return wide(value, what).reshape((data.shape[0],) + (1,) * (ndim - 1))


def binary(op: Any, a: Any, b: Any, reverse: bool) -> Any:
    return op.apply(b, a) if reverse else op.apply(a, b)


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: engine = engine.unknown, name: Any = None) -> None:
    on_chip("tensor_copy", dst, src)
    same_size("tensor_copy", dst, src)
    no_psum_for_gpsimd("tensor_copy", engine, dst, src)
    values = read(src, "tensor_copy")
    write(dst, values if src.dtype == dst.dtype else values.astype(np.float32))
    charge(engine, free_size(dst), 1 if engine == _ENGINE.scalar else _vector_rate(True, dst, src))


def memset(dst: NkiTensor, value: Any, engine: engine = engine.unknown, name: Any = None) -> None:
    on_chip("memset", dst)
    whole = np.issubdtype(dst.array().dtype, np.integer)
    require(isinstance(value, int if whole else float), f"memset: value {value!r} is not of the kind of {dst.dtype}")
    write(dst, np.full(dst.shape, value, dtype=np.float32))
    charge(engine, free_size(dst))


def tensor_tensor(
    dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, engine: engine = engine.unknown, name: Any = None
) -> None:
    on_chip("tensor_tensor", dst, data1, data2)
    same_size("tensor_tensor", dst, data1, data2)
    not_both_psum("tensor_tensor", data1, data2)
    no_psum_for_gpsimd("tensor_tensor", engine, dst, data1, data2)
    a, b = wide(data1, "tensor_tensor"), wide(data2, "tensor_tensor")
    write(dst, op.apply(a, b.reshape(a.shape)))
    charge(engine, free_size(dst), _vector_rate(False, dst, data1, data2))


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: engine = engine.unknown,
    name: Any = None,
) -> None:
    on_chip("tensor_scalar", dst, data)
    same_size("tensor_scalar", dst, data)
    values = wide(data, "tensor_scalar")
    out = binary(op0, values, operand("tensor_scalar", operand0, data, values.ndim), reverse0)
    if op1 is not None:
        out = binary(op1, out, operand("tensor_scalar", operand1, data, values.ndim), reverse1)
    write(dst, out)
    charge(engine, free_size(dst), _vector_rate(True, dst, data))


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: Any = None,
) -> None:
    on_chip("scalar_tensor_tensor", dst, data, operand1)
    same_size("scalar_tensor_tensor", dst, data, operand1)
    not_both_psum("scalar_tensor_tensor", data, operand1)
    values = wide(data, "scalar_tensor_tensor")
    first = binary(op0, values, operand("scalar_tensor_tensor", operand0, data, values.ndim), reverse0)
    write(dst, binary(op1, first, wide(operand1, "scalar_tensor_tensor").reshape(values.shape), reverse1))
    charge(_ENGINE.vector, free_size(dst), _vector_rate(False, dst, data, operand1))


_REDUCE: dict[str, Callable[..., Any]] = {"add": np.sum, "maximum": np.max, "minimum": np.min, "multiply": np.prod}


def tensor_reduce(
    dst: NkiTensor, op: Any, data: NkiTensor, axis: Any, negate: bool = False, keepdims: bool = False, name: Any = None
) -> None:
    on_chip("tensor_reduce", dst, data)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    last = tuple(range(data.ndim - len(axes), data.ndim))
    require(
        axes == last and 0 not in axes,
        f"tensor_reduce: axes {axes} of {data.ndim} dimensions must be the last free ones",
    )
    out = _REDUCE[op.name](wide(data, "tensor_reduce"), axis=axes, keepdims=keepdims)
    require(out.size == dst.size, f"tensor_reduce: {out.shape} into {dst.shape}")
    write(dst, -out if negate else out)
    charge(_ENGINE.vector, free_size(data))


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    name: Any = None,
) -> None:
    on_chip("activation", dst, data, reduce_res)
    same_size("activation", dst, data)
    values = wide(data, "activation") * operand("activation", scale, data, data.ndim)
    if bias is not None:
        values = values + operand("activation", bias, data, data.ndim)
    if op.valid is not None:
        low, high = op.valid
        require(
            bool(((values >= low) & (values <= high)).all()),
            f"activation: {op.name} outside of its valid input range {op.valid}",
        )
    out = op.apply(values)
    write(dst, out)
    if reduce_cmd != _CMD.idle:
        require(
            reduce_cmd == _CMD.reset_reduce and reduce_op is not None and reduce_op.name == "add",
            "activation: the stand-in reduces with reset_reduce and add",
        )
        write(reduce_res, out.reshape(out.shape[0], -1).sum(axis=1, keepdims=True))
    charge(_ENGINE.scalar, free_size(dst))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: Any = None) -> None:
    on_chip("reciprocal", dst, data)
    same_size("reciprocal", dst, data)
    write(dst, np.float32(1.0) / wide(data, "reciprocal"))
    charge(_ENGINE.vector, 8 * free_size(dst))


def bn_stats(dst: NkiTensor, data: NkiTensor, name: Any = None) -> None:
    on_chip("bn_stats", dst, data)
    require(
        free_size(data) <= BN_STATS_ELEMENTS,
        f"bn_stats: {free_size(data)} elements per partition exceed {BN_STATS_ELEMENTS}",
    )
    require(free_size(dst) == 6, "bn_stats: the result has 6 elements per partition")
    rows = wide(data, "bn_stats").reshape(data.shape[0], -1)
    columns = []
    for half in (rows[:, 0::2], rows[:, 1::2]):
        count = half.shape[1]
        mean = half.mean(axis=1) if count else np.zeros(rows.shape[0], np.float32)
        spread = np.square(half - mean[:, None]).sum(axis=1)
        columns += [np.full(rows.shape[0], count, np.float32), mean, spread]
    write(dst, np.stack(columns, axis=1).astype(np.float32))
    charge(_ENGINE.vector, free_size(data))


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: Any = None) -> None:
    on_chip("bn_aggr", dst, data)
    require(free_size(data) % 3 == 0 and free_size(dst) == 2, "bn_aggr: triples in, mean and variance out")
    parts = wide(data, "bn_aggr").reshape(data.shape[0], -1, 3)
    count, mean, spread = parts[..., 0], parts[..., 1], parts[..., 2]
    total = count.sum(axis=1)
    middle = (count * mean).sum(axis=1) / total
    variance = (spread.sum(axis=1) + (count * np.square(mean - middle[:, None])).sum(axis=1)) / total
    write(dst, np.stack([middle, variance], axis=1))
    charge(_ENGINE.vector, free_size(data))


def iota(dst: NkiTensor, pattern: Any, offset: int = 0, channel_multiplier: int = 0, name: Any = None) -> None:
    on_chip("iota", dst)
    require(dst.buffer == "sbuf", "iota: the result must be in SBUF")
    values = np.zeros(1, dtype=np.int64)
    for step, count in pattern:
        values = (values[:, None] + step * np.arange(count)[None, :]).reshape(-1)
    require(values.size == free_size(dst), f"iota: pattern of {values.size} for {free_size(dst)} elements")
    rows = channel_multiplier * np.arange(dst.shape[0])[:, None]
    write(dst, (offset + rows + values[None, :]).astype(np.float32))
    charge(_ENGINE.gpsimd, free_size(dst))


# instructions have parameters that hide these classes
_ENGINE, _CMD = engine, reduce_cmd

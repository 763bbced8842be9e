"""The part of `nki.language` that our kernels use."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki import _device
from nki._tensor import NkiTensor, VirtualRegister, allocate, write

float32, float16, bfloat16 = "float32", "float16", "bfloat16"
float8_e4m3, float8_e5m2 = "float8_e4m3", "float8_e5m2"
float8_e4m3fn = "float8_e4m3fn"  # OCP, trn3: a name that no allocation accepts
int32, uint32, int16, uint16, int8, uint8 = "int32", "uint32", "int16", "uint16", "int8", "uint8"
sbuf, psum, hbm, private_hbm, shared_hbm = "sbuf", "psum", "hbm", "private_hbm", "shared_hbm"


class tile_size:
    pmax = _device.NUM_PARTITIONS
    psum_fmax = _device.PSUM_BANK_BYTES // 4
    gemm_stationary_fmax = _device.STATIONARY_COLUMNS
    gemm_moving_fmax = _device.MOVING_COLUMNS
    bn_stats_fmax = _device.BN_STATS_ELEMENTS


class Op:
    """An operator by name, for the `op` fields of instructions; it cannot be called on tensors."""

    def __init__(
        self, name: str, function: Callable[..., Any], valid: tuple[float, float] | None = None, trn3: bool = False
    ) -> None:
        self.name, self.function, self.valid, self.trn3 = name, function, valid, trn3

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _device.NkiValidationError(f"nl.{self.name} on tensors is experimental in the real package; use nki.isa")

    def apply(self, *values: Any) -> Any:
        if self.trn3:
            _device.refuse_trn3(f"nl.{self.name}")
        return self.function(*values)


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b).astype(np.float32)


def _flushed_exp(x: Any) -> Any:
    """The engines have no denormal numbers."""
    out = np.exp(x)
    out[out < np.finfo(np.float32).tiny] = 0.0
    return out


def _sigmoid(x: Any) -> Any:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small).astype(x.dtype) / (1 + small)


add = Op("add", np.add)
subtract = Op("subtract", np.subtract)
multiply = Op("multiply", np.multiply)
divide = Op("divide", np.divide)
maximum = Op("maximum", np.maximum)
minimum = Op("minimum", np.minimum)
power = Op("power", np.power)
abs_max = Op("abs_max", lambda a, b: np.maximum(np.abs(a), np.abs(b)), trn3=True)
abs_min = Op("abs_min", lambda a, b: np.minimum(np.abs(a), np.abs(b)), trn3=True)
equal = Op("equal", _truth(np.equal))
not_equal = Op("not_equal", _truth(np.not_equal))
less = Op("less", _truth(np.less))
less_equal = Op("less_equal", _truth(np.less_equal))
greater = Op("greater", _truth(np.greater))
greater_equal = Op("greater_equal", _truth(np.greater_equal))
exp = Op("exp", _flushed_exp)
log = Op("log", np.log, (2.0**-64, 2.0**64))
sqrt = Op("sqrt", np.sqrt, (2.0**-116, 2.0**118))
rsqrt = Op("rsqrt", lambda x: 1.0 / np.sqrt(x), (2.0**-87, 2.0**97))
copy = Op("copy", lambda x: x)
square = Op("square", np.square)
abs = Op("abs", np.abs)  # noqa: A001 - the documented name
sigmoid = Op("sigmoid", _sigmoid)
silu = Op("silu", lambda x: x * _sigmoid(x))


def ndarray(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None) -> NkiTensor:
    _device.require(address is None, "the stand-in places tensors itself; leave out address")
    _device.require(
        isinstance(buffer, str) and buffer in {sbuf, psum, hbm, private_hbm, shared_hbm}, f"buffer {buffer!r}"
    )
    return allocate(shape, dtype, buffer, name)


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    tensor = allocate(shape, dtype, buffer, name)
    write(tensor, np.zeros(tensor.shape, dtype=tensor.array().dtype))
    return tensor


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    tensor = allocate((n, n), dtype, sbuf) if dst is None else dst
    write(tensor, np.eye(n).astype(tensor.array().dtype))
    return tensor


def program_id(axis: int = 0) -> int:
    _device.require(axis == 0, "the launch grid of LNC has one axis")
    return _device.core().program


def num_programs(axes: int = 0) -> int:
    _device.require(axes == 0, "the launch grid of LNC has one axis")
    return _device.core().num_programs


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """A loop on the device: its body gets a register, not a Python number, and must not return a value."""
    _device.require(isinstance(step, int) and step > 0, "the step of fori_loop is a positive compile-time integer")
    for value in range(lower, upper, step):
        _device.require(body_fun(VirtualRegister(value)) is None, "the body of fori_loop must not return a value")

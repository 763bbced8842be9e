"""Tensors of the stand-in: strided views on a buffer, with no operators, and with a record of what was written."""

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from nki._device import NUM_PARTITIONS, PSUM_BANK_BYTES, core, require

NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int32": np.int32,
    "uint32": np.uint32,
    "int16": np.int16,
    "uint16": np.uint16,
    "int8": np.int8,
    "uint8": np.uint8,
}
NAMES = {np.dtype(value): name for name, value in NUMPY_DTYPES.items()}
UNDEFINED_INTEGER = 4  # what the official simulator fills integers with; floats are NaN
ON_CHIP = ("sbuf", "psum")


class VirtualRegister:
    """A run-time value on the device: no Python arithmetic, only `scalar_offset`."""

    def __init__(self, value: int) -> None:
        self._value = value


class Storage:
    """A buffer, which of its elements were written, and for PSUM which of them a matmul started and nobody read."""

    def __init__(self, shape: tuple[int, ...], dtype: str, buffer: str, data: Any = None) -> None:
        self.buffer = buffer
        self.dtype = dtype
        size = math.prod(shape)
        kind = NUMPY_DTYPES[dtype]
        if data is not None:
            self.data, self.written = np.ascontiguousarray(data).reshape(-1), None
        else:
            undefined = UNDEFINED_INTEGER if np.issubdtype(kind, np.integer) else np.nan
            self.data, self.written = np.full(size, undefined, dtype=kind), np.zeros(size, dtype=bool)
        self.row = size // shape[0] if buffer in ON_CHIP else 0
        if buffer == "psum":
            self.started = np.zeros(size, dtype=bool)
            self.unread = np.zeros(size, dtype=bool)


class NkiTensor:
    """A view `shape, strides, offset` (in elements) of a storage."""

    def __init__(
        self,
        shape: Any,
        dtype: Any,
        storage: Any,
        buffer: Any = "sbuf",
        name: str = "",
        strides: Any = None,
        offset: int = 0,
    ) -> None:
        self.shape = tuple(int(n) for n in shape)
        self.dtype, self.storage, self.buffer, self.name = dtype, storage, buffer, name
        self.strides = contiguous_strides(self.shape) if strides is None else tuple(strides)
        self.offset = offset
        self._cached: Any = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def array(self) -> Any:
        """The NumPy view."""
        if self._cached is None:
            self._cached = self._strided(self.storage.data)
        return self._cached

    def mask(self, flags: Any) -> Any:
        return self._strided(flags)

    def _strided(self, flat: Any) -> Any:
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n)
        require(
            self.offset >= 0 and last < flat.size,
            f"access pattern of shape {self.shape} reaches element {last} of a {self.buffer} tensor of {flat.size} elements",
        )
        size = flat.itemsize
        return as_strided(flat[self.offset :], self.shape, tuple(s * size for s in self.strides))

    def _with(self, shape: Any, strides: Any, offset: int) -> "NkiTensor":
        return NkiTensor(shape, self.dtype, self.storage, self.buffer, self.name, strides, offset)

    @property
    def start_partition(self) -> int:
        return self.offset // self.storage.row

    def is_contiguous(self) -> bool:
        want = contiguous_strides(self.shape)
        first = 1 if self.buffer in ON_CHIP else 0
        dims = range(first, self.ndim)
        return all(self.shape[d] == 1 or self.strides[d] == want[d] for d in dims)

    def get_pattern(self) -> list[list[int]]:
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        return False

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        require(len(keys) <= self.ndim, f"{len(keys)} indices for a tensor of shape {self.shape}")
        keys += [slice(None)] * (self.ndim - len(keys))
        shape, strides, offset = [], [], self.offset
        for dim, part in enumerate(keys):
            start, count, step, keep = self._range(dim, part)
            offset += start * self.strides[dim]
            if keep:
                shape.append(count)
                strides.append(self.strides[dim] * step)
        if self.buffer in ON_CHIP and len(shape) == 1:
            shape.append(1)
            strides.append(1)
        return self._with(shape, strides, offset)

    def _range(self, dim: int, part: Any) -> tuple[int, int, int, bool]:
        size = self.shape[dim]
        if isinstance(part, slice):
            start = 0 if part.start is None else int(part.start)
            stop = size if part.stop is None else int(part.stop)
            step = 1 if part.step is None else int(part.step)
            require(
                0 <= start < stop <= size and step >= 1,
                f"slice {start}:{stop}:{step} of dimension {dim} of shape {self.shape}; it must lie inside and not be empty",
            )
            return start, (stop - start + step - 1) // step, step, True
        require(not isinstance(part, VirtualRegister), "a register is no Python index; use .ap(scalar_offset=...)")
        index = int(part)
        require(0 <= index < size, f"index {index} of dimension {dim} of shape {self.shape}")
        return index, 1, 1, self.buffer in ON_CHIP and dim == 0

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        keys: list[Any] = [slice(None)] * self.ndim
        keys[dim] = slice(start, end, step)
        return self[tuple(keys)]

    def select(self, dim: int, index: int) -> "NkiTensor":
        keys: list[Any] = [slice(None)] * self.ndim
        keys[dim] = index
        return self[tuple(keys)]

    def permute(self, dims: Any) -> "NkiTensor":
        require(sorted(dims) == list(range(self.ndim)), f"permute {dims} of {self.ndim} dimensions")
        require(self.buffer not in ON_CHIP or dims[0] == 0, "the partition dimension stays first")
        return self._with([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset)

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        require(self.shape[dim] == 1, f"broadcast of dimension {dim} of shape {self.shape}: its size must be 1")
        require(self.buffer not in ON_CHIP or dim != 0, "an on-chip tensor cannot be broadcast over partitions")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._with(shape, strides, self.offset)

    def expand_dim(self, dim: int) -> "NkiTensor":
        require(self.buffer not in ON_CHIP or dim != 0, "the partition dimension stays first")
        shape, strides = list(self.shape), list(self.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 1)
        return self._with(shape, strides, self.offset)

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        require(self.shape[dim] == 1 and (self.buffer not in ON_CHIP or dim != 0), f"squeeze of dimension {dim}")
        shape, strides = list(self.shape), list(self.strides)
        del shape[dim], strides[dim]
        return self._with(shape, strides, self.offset)

    def reshape_dim(self, dim: int, shape: Any) -> "NkiTensor":
        require(self.buffer not in ON_CHIP or dim != 0, "the partition dimension cannot be split")
        sizes = [int(n) for n in shape]
        require((math.prod(sizes)) == self.shape[dim], f"{shape} does not split {self.shape[dim]}")
        inner = [s * self.strides[dim] for s in contiguous_strides(sizes)]
        new_shape = list(self.shape[:dim]) + sizes + list(self.shape[dim + 1 :])
        return self._with(new_shape, list(self.strides[:dim]) + inner + list(self.strides[dim + 1 :]), self.offset)

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        require(self.buffer not in ON_CHIP or start_dim > 0, "the partition dimension cannot be merged")
        for d in range(start_dim, end_dim):
            require(
                self.strides[d] == self.strides[d + 1] * self.shape[d + 1],
                f"dimensions {d}, {d + 1} are not contiguous",
            )
        merged = math.prod(self.shape[start_dim : end_dim + 1])
        shape = (*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :])
        strides = (*self.strides[:start_dim], self.strides[end_dim], *self.strides[end_dim + 1 :])
        return self._with(shape, strides, self.offset)

    def reshape(self, shape: Any) -> "NkiTensor":
        sizes = tuple(int(n) for n in shape)
        require((math.prod(sizes)) == self.size, f"reshape of {self.shape} to {sizes}")
        require(self.buffer not in ON_CHIP or sizes[0] == self.shape[0], "reshape keeps the partition dimension")
        require(
            self.is_contiguous(), f"reshape of a view that is not contiguous: strides {self.strides} of {self.shape}"
        )
        strides = contiguous_strides(sizes)
        if self.buffer in ON_CHIP:
            strides = (self.strides[0], *strides[1:])
        return self._with(sizes, strides, self.offset)

    def ap(
        self,
        pattern: Any,
        offset: Any = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> "NkiTensor":
        require(vector_offset is None and dtype is None, "the stand-in has no vector_offset and no dtype in ap()")
        shape, strides = [n for _, n in pattern], [s for s, _ in pattern]
        if self.buffer in ON_CHIP:
            require(strides[0] == self.storage.row, f"partition stride {strides[0]} must be {self.storage.row}")
        start = self.offset if offset is None else self.offset + int(offset)
        if scalar_offset is not None:
            require(isinstance(scalar_offset, VirtualRegister), "scalar_offset must be a register here")
            start += scalar_offset._value * self.strides[indirect_dim]
        return self._with(shape, strides, start)


def contiguous_strides(shape: Any) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(list(shape)):
        strides.append(step)
        step *= int(n)
    return tuple(reversed(strides))


def allocate(shape: Any, dtype: Any, buffer: str, name: str = "") -> NkiTensor:
    """A new tensor, charged against the limits of the current core."""
    here = core()
    require(dtype in NUMPY_DTYPES, f"dtype {dtype!r} is not one that trn2 and the stand-in know")
    sizes = tuple(int(n) for n in shape)
    if buffer not in ON_CHIP:
        return NkiTensor(sizes, dtype, _hbm(here, sizes, dtype, buffer), buffer, name)
    require(len(sizes) >= 2, f"on-chip tensors have at least two dimensions, not {sizes}")
    require(sizes[0] <= NUM_PARTITIONS, f"partition dimension {sizes[0]} exceeds {NUM_PARTITIONS}")
    num_bytes = (math.prod(sizes[1:])) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
    if buffer == "psum":
        require(
            num_bytes <= PSUM_BANK_BYTES,
            f"PSUM tile of {num_bytes} bytes per partition exceeds a bank of {PSUM_BANK_BYTES}",
        )
    storage = Storage(sizes, dtype, buffer)
    here.allocate(storage, buffer, num_bytes)
    return NkiTensor(sizes, dtype, storage, buffer, name)


def _hbm(here: Any, shape: tuple[int, ...], dtype: str, buffer: str) -> Storage:
    """Cores of a rank that allocate the same shared tensor get the same memory."""
    if buffer != "shared_hbm" or here.num_programs == 1:
        return Storage(shape, dtype, buffer)
    key = (here.rank, here.num_shared)
    here.num_shared += 1
    storage = here.machine.shared.setdefault(key, Storage(shape, dtype, buffer))
    same = storage.data.size == (math.prod(shape)) and storage.dtype == dtype
    require(same, "the cores of a rank allocate different shared tensors; their programs must be the same")
    return storage


def read(tensor: NkiTensor, what: str) -> Any:
    """The values, after a check that all of them were written."""
    storage = tensor.storage
    if storage.written is not None and not tensor.mask(storage.written).all():
        require(False, f"{what} reads data that was never written ({tensor.buffer} view of shape {tensor.shape})")
    if storage.buffer == "psum":
        tensor.mask(storage.unread)[...] = False
    return tensor.array()


def wide(tensor: NkiTensor, what: str) -> Any:
    """The values in float32, as the engines compute."""
    values = read(tensor, what)
    return values if values.dtype == np.float32 else values.astype(np.float32)


def write(tensor: NkiTensor, values: Any) -> None:
    """Store values, rounded to the dtype of the tensor."""
    storage = tensor.storage
    require(0 not in tensor.strides or tensor.size == 1, "a broadcast view cannot be written")
    tensor.array()[...] = values if values.shape == tensor.shape else values.reshape(tensor.shape)
    if storage.buffer == "psum":
        tensor.mask(storage.started)[...] = False
        tensor.mask(storage.unread)[...] = False
    if storage.written is None:
        return
    if tensor.size == storage.data.size:
        storage.written = None
    else:
        tensor.mask(storage.written)[...] = True

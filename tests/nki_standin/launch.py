"""How tests launch kernels: torch tensors in, torch tensors out, on the stand-in or on the real `nki`."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.nki_standin.target import TARGET  # isort: skip - it says what `import nki` finds
import nki  # isort: skip

_FROM_TORCH = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3),  # up to 240 both variants have the same bits
}
_TO_TORCH = {
    np.dtype(kind): (np.dtype(f"int{8 * np.dtype(kind).itemsize}"), dtype) for dtype, (_, kind) in _FROM_TORCH.items()
}


def to_numpy(value: Any) -> Any:
    """A kernel argument: tensors as arrays, everything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().contiguous()
    bits, kind = _FROM_TORCH.get(value.dtype, (value.dtype, None))
    array = value.view(bits).numpy()
    return array if kind is None else array.view(kind)


def to_torch(value: Any) -> Any:
    """A kernel result."""
    if isinstance(value, tuple):
        return tuple(to_torch(part) for part in value)
    bits, dtype = _TO_TORCH.get(value.dtype, (value.dtype, None))
    tensor = torch.from_numpy(np.ascontiguousarray(value).view(bits))
    return tensor if dtype is None else tensor.view(dtype)


def launch(kernel: Any, *args: Any, cores: int = 2) -> Any:
    """One launch on `cores` cores."""
    if TARGET == "device":
        return kernel[cores](*args)
    return to_torch(nki.simulate(kernel[cores])(*[to_numpy(a) for a in args]))


def launch_ranks(
    kernel: Any, arguments: Sequence[Sequence[Any]], cores: int = 2, *, reverse: bool = False
) -> list[Any]:
    """One launch per simulated rank; `reverse` lets the cores take turns the other way round. Stand-in only."""
    arrays = [[to_numpy(a) for a in args] for args in arguments]
    return [to_torch(result) for result in nki.simulate_ranks(kernel[cores], arrays, reverse)]


def wrapper(kernel: Any) -> Callable[..., Any]:
    """What `kernels.backend.use("nki", wrapper)` wants: a kernel as a function of torch tensors."""
    return lambda *args: launch(kernel, *args)

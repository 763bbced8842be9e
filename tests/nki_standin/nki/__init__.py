"""A NumPy stand-in for the `nki` package: the instructions our kernels use, with Trainium2's documented limits enforced.

It runs a kernel as plain Python, as the official simulator does. Beyond that one it tracks live SBUF and PSUM, runs
collectives among simulated ranks, and counts the work of each engine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import numpy as np

from nki import collectives, isa, language
from nki._device import Machine, NkiValidationError, one_blas_thread, require
from nki._tensor import NAMES, NkiTensor, Storage

__all__ = ["NkiValidationError", "collectives", "isa", "jit", "language", "simulate"]


class Kernel:
    """What `@nki.jit` returns: launchable through `simulate`, with a number of cores in brackets."""

    def __init__(self, function: Callable[..., Any], num_programs: int = 1) -> None:
        self.func = function
        self.num_programs = num_programs
        update_wrapper(self, function)

    def __getitem__(self, num_programs: int) -> "Kernel":
        require(num_programs in (1, 2), f"LNC of {num_programs}; trn2 has 1 and 2")
        return Kernel(self.func, num_programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inlined when another kernel calls it."""
        return self.func(*args, **kwargs)


def jit(fn: Any = None, **kwargs: Any) -> Any:
    require(not kwargs, f"nki.jit takes no {sorted(kwargs)} since 0.3")
    return Kernel(fn)


@dataclass(frozen=True)
class Report:
    """What a launch did, over all cores: work per engine, and the peaks of on-chip memory on any core."""

    work: Counter[str]
    sbuf_peak_bytes: int
    psum_peak_banks: int


one_blas_thread()
last_report: Report | None = None


def simulate(kernel: Any) -> Callable[..., Any]:
    """`simulate(kernel[2])(arrays...)`: one rank; results as NumPy arrays."""

    def launch(*args: Any) -> Any:
        return simulate_ranks(kernel, [args])[0]

    return launch


def simulate_ranks(kernel: Any, arguments: Sequence[Sequence[Any]], reverse: bool = False) -> list[Any]:
    """One launch per rank, in step where they exchange data. Only the stand-in has this."""
    global last_report  # noqa: PLW0603 - what the tests ask about the launch they just made
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    machine = Machine(len(arguments), kernel.num_programs, reverse)
    inputs = [[_tensor(a) for a in args] for args in arguments]
    results = machine.run(lambda core: kernel.func(*inputs[core.rank]))
    last_report = Report(
        sum((core.work for core in machine.cores), Counter()),
        max(core.sbuf_peak_bytes for core in machine.cores),
        max(core.psum_peak_banks for core in machine.cores),
    )
    return [_arrays(result) for result in results[:: kernel.num_programs]]


def _tensor(value: Any) -> Any:
    require(not isinstance(value, list), "kernels take tuples, not lists")
    if not isinstance(value, np.ndarray):
        return value
    require(value.dtype in NAMES, f"kernel argument of dtype {value.dtype}")
    dtype = NAMES[value.dtype]
    return NkiTensor(value.shape, dtype, Storage(value.shape, dtype, "shared_hbm", value), "shared_hbm")


def _arrays(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_arrays(part) for part in result)
    require(result.buffer == "shared_hbm", "kernel results must be in shared HBM")
    written = result.storage.written
    require(
        written is None or bool(result.mask(written).all()),
        f"result of shape {result.shape}: some elements were never written",
    )
    return np.array(result.array())

"""The simulated NeuronCore: documented limits of Trainium2, live memory, work counters, and the cores' turns.

Sources: the Trainium2 architecture guide and the `nki.isa` reference of the AWS Neuron documentation (SDK 2.32).
"""

import ctypes
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NUM_PARTITIONS = 128
STATIONARY_COLUMNS = 128
MOVING_COLUMNS = 512
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
SBUF_BYTES = 208 * 1024  # per partition: 224 KiB less what the compiler keeps
BN_STATS_ELEMENTS = 512
TARGET = "trn2"


class NkiValidationError(AssertionError):
    """What the real compiler or the hardware would refuse, with the limit that is broken."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise NkiValidationError(message)


def refuse_trn3(name: str) -> None:
    raise NkiValidationError(f"{name} exists on trn3 only; the target is {TARGET}")


@dataclass(eq=False)
class Core:
    """One physical core of one rank: live bytes, banks, and the work done per engine."""

    rank: int = 0
    program: int = 0
    num_programs: int = 1
    sbuf_bytes: int = 0
    sbuf_peak_bytes: int = 0
    psum_banks: int = 0
    psum_peak_banks: int = 0
    work: Counter[str] = field(default_factory=Counter)
    num_shared: int = 0
    machine: "Machine | None" = None

    def allocate(self, owner: object, buffer: str, num_bytes: int) -> None:
        """Charge `num_bytes` per partition until `owner` dies."""
        if buffer == "sbuf":
            self.sbuf_bytes += num_bytes
            self.sbuf_peak_bytes = max(self.sbuf_peak_bytes, self.sbuf_bytes)
            live = self.sbuf_bytes
            weakref.finalize(owner, self._free_sbuf, num_bytes)
            require(live <= SBUF_BYTES, f"{live} bytes per partition live in SBUF; the limit is {SBUF_BYTES}")
        else:
            self.psum_banks += 1
            self.psum_peak_banks = max(self.psum_peak_banks, self.psum_banks)
            live = self.psum_banks
            weakref.finalize(owner, self._free_bank)
            require(
                live <= PSUM_BANKS, f"{live} PSUM tiles live, each in a bank of its own; PSUM has {PSUM_BANKS} banks"
            )

    def _free_sbuf(self, num_bytes: int) -> None:
        self.sbuf_bytes -= num_bytes

    def _free_bank(self) -> None:
        self.psum_banks -= 1


class Machine:
    """Ranks of one or two cores that take turns: one runs until it waits for the others, so that runs repeat exactly.

    A core that reads what another core writes without a barrier in between meets unwritten data in one of the two orders.
    """

    def __init__(self, num_ranks: int, num_programs: int, reverse: bool = False) -> None:
        self.cores = [
            Core(rank=r, program=p, num_programs=num_programs, machine=self)
            for r in range(num_ranks)
            for p in range(num_programs)
        ]
        self.num_programs = num_programs
        self.shared: dict[tuple[int, int], Any] = {}
        self._order = list(range(len(self.cores)))[:: -1 if reverse else 1]
        self._turn = threading.Condition()
        self._runnable = set(self._order)
        self._current = self._order[0]
        self._waiting: dict[Hashable, list[tuple[int, Any]]] = {}
        self._failure: BaseException | None = None

    def run(self, body: Callable[[Core], Any]) -> list[Any]:
        """`body(core)` for every core; returns the results in order of rank and program."""
        results: list[Any] = [None] * len(self.cores)
        if len(self.cores) == 1:
            with on_core(self.cores[0]):
                return [body(self.cores[0])]
        threads = [threading.Thread(target=self._run_one, args=(i, body, results)) for i in range(len(self.cores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        require(not self._waiting, f"cores wait for each other at {sorted(map(str, self._waiting))} and nobody comes")
        return results

    def _run_one(self, index: int, body: Callable[[Core], Any], results: list[Any]) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._current == index or self._failure is not None)
            if self._failure is not None:
                return
            try:
                with on_core(self.cores[index]):
                    results[index] = body(self.cores[index])
            except BaseException as error:
                self._failure = self._failure or error
            self._runnable.discard(index)
            self._pass_on(index)

    def _pass_on(self, index: int) -> None:
        start = self._order.index(index)
        following = self._order[start + 1 :] + self._order[: start + 1]
        runnable = [i for i in following if i in self._runnable]
        if not runnable and self._waiting and self._failure is None:
            self._failure = NkiValidationError(f"cores wait at {sorted(map(str, self._waiting))} and nobody else comes")
        self._current = runnable[0] if runnable else -1
        self._turn.notify_all()

    def meet(
        self, core: Core, place: Hashable, num_expected: int, payload: Any, act: Callable[[list[Any]], None]
    ) -> None:
        """Wait at `place` until `num_expected` cores are there; the last one runs `act` on all payloads."""
        if num_expected == 1:
            act([payload])
            return
        index = self.cores.index(core)
        arrived = self._waiting.setdefault(place, [])
        arrived.append((index, payload))
        if len(arrived) == num_expected:
            del self._waiting[place]
            act([part for _, part in sorted(arrived, key=lambda pair: pair[0])])
            self._runnable.update(i for i, _ in arrived)
            return
        self._runnable.discard(index)
        self._pass_on(index)
        self._turn.wait_for(lambda: self._current == index or self._failure is not None)
        if self._failure is not None:
            raise self._failure


_local = threading.local()


@contextmanager
def on_core(core: Core) -> Any:
    previous = getattr(_local, "core", None)
    _local.core = core
    try:
        yield
    finally:
        _local.core = previous


def core() -> Core:
    """The core that runs this thread; outside a launch every NKI call is an error, as with the real package."""
    found = getattr(_local, "core", None)
    if found is None:
        raise NkiValidationError("an NKI call outside of a kernel launch; use nki.simulate(kernel)")
    return found


def one_blas_thread() -> None:
    """Products of tiles are too small to share: threads of NumPy's BLAS would only wait for each other."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for library in folder.glob("libscipy_openblas64_*.so"):
        ctypes.CDLL(str(library)).scipy_openblas_set_num_threads64_(1)

"""How long an engine's next answer may take before its ranks count as hung.

Three rules. A call that may have to compile waits for the compiler, at every answer: a shape has several graphs, and
the second step, the other expert or the second slab may be the first to need one. That ends with the first whole call
of its kind, since equal calls use equal graphs. Then the stall time holds, until a call that did work has shown its
pace; from then on many times the longest silence so far is a hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

STALL_FACTOR = 20.0


@dataclass(slots=True)
class Patience:
    """What one engine's calls have taught so far, and the call under way.

    Args:
        stall_s: no wait is longer, but for a compiler's.
        min_stall_s: no wait is shorter, however quick the calls were so far.
        first_s: seconds that an answer may take while a call may have to compile; 0 where nothing compiles.
        compiled: kinds of calls whose graphs are all in the cache; engines on one cache share it.
        now: the clock, in seconds.
    """

    stall_s: float
    min_stall_s: float
    first_s: float = 0.0
    compiled: set[Hashable] = field(default_factory=set)
    now: Callable[[], float] = time.monotonic
    _longest: dict[Hashable, float] = field(default_factory=dict)
    _kind: Hashable = None
    _is_whole: bool = False
    _worked: bool = False
    _silence_s: float = 0.0
    _heard_at: float = 0.0

    def begin(self, kind: Hashable, *, is_whole: bool = True, works: bool = False) -> None:
        """A call begins.

        Args:
            kind: all that decides its graphs and its pace.
            is_whole: whether it uses every graph of its kind.
            works: whether it is known to compute something even if it says so with no step or slab.
        """
        self._kind, self._is_whole, self._worked = kind, is_whole, works
        self._silence_s, self._heard_at = 0.0, self.now()

    @property
    def may_compile(self) -> bool:
        """Whether the call under way may have to wait for a compiler."""
        return self.first_s > 0 and self._kind not in self.compiled

    @property
    def seconds(self) -> float:
        """How long the next answer of the call under way may take."""
        if self.may_compile:
            return max(self.stall_s, self.first_s)
        longest = self._longest.get(self._kind)
        return self.stall_s if longest is None else min(self.stall_s, max(self.min_stall_s, STALL_FACTOR * longest))

    def heard(self, *, works: bool) -> None:
        """An answer came; `works`: it is a step or a slab.

        Silence is counted from answer to answer: one that waited here for its reader says nothing of the engine's pace.
        """
        self._worked |= works
        self._silence_s = max(self._silence_s, self.now() - self._heard_at)
        self._heard_at = self.now()

    def ended(self) -> None:
        """The call came to its end; one that did no work, or a compiler's, shows no pace."""
        if not self._worked:
            return
        if not self.may_compile:
            self._longest[self._kind] = max(self._longest.get(self._kind, 0.0), self._silence_s)
        elif self._is_whole:
            self.compiled.add(self._kind)

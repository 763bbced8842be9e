"""What passes between a worker's loop and its `ClaimSource`: clips to make, pauses, ends of chunks, options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batch_gen.budget import Budgets
from batch_gen.clock import Clock, monotonic_s, utc_now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batch_gen.records import Verdict
    from batch_gen.request import RenderRequest


@dataclass(frozen=True, slots=True)
class Assignment:
    """One clip to make now.

    Attributes:
        attempt: Number of this start, from 1; `epoch` is that of the chunk's lease.
        alone: Nothing else of this worker runs beside it.
        begun_before: An earlier start died or lost the store: a file without record may lie there.
    """

    request: RenderRequest
    chunk: str
    epoch: int
    attempt: int
    alone: bool = False
    begun_before: bool = False

    @property
    def clip_id(self) -> str:
        """The clip's id."""
        return self.request.clip_id


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to hand out for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """What an owner leaves of a chunk, finished or released.

    Attributes:
        verdicts: Clips that are settled.
        inherited: Of these, the clips that earlier owners committed; their records tell what was measured.
        requests: Every clip of the chunk.
    """

    chunk: str
    epoch: int
    finished: bool
    verdicts: Mapping[str, Verdict]
    inherited: frozenset[str]
    requests: Mapping[str, RenderRequest]


def _ignore(_: ChunkEnd) -> None:
    """The default of `on_chunk_end`."""


@dataclass(frozen=True, slots=True)
class ClaimOptions:
    """Times in seconds; see the module for their meaning.

    Attributes:
        ttl_s: A lease that stood unchanged for ttl_s + grace_s is taken over; recorded in the lease.
        renew_s: Age at which we renew; None means a third of ttl_s.
        silence_s: Without a heartbeat for so long nothing is renewed; None means ttl_s.
        linger_s: An idle worker stays so long while others are alive and working; None means ttl_s + grace_s.
        shard: (index, count) for `--assign static`, None for leases.
        max_failures: See `ErrorBudget`.
        clock, utc: For intervals, and for the times in leases that people read.
        audit_clips: When everything is finished from the start, a run of up to so many clips has its records counted.
    """

    ttl_s: float = 180.0
    grace_s: float = 30.0
    renew_s: float | None = None
    silence_s: float | None = None
    linger_s: float | None = None
    shard: tuple[int, int] | None = None
    budgets: Budgets = field(default_factory=Budgets)
    max_failures: float = 0.5
    audit_clips: int = 4096
    store_patience_s: float = 300.0
    clock: Clock = monotonic_s
    utc: Callable[[], str] = utc_now
    on_chunk_end: Callable[[ChunkEnd], None] = _ignore

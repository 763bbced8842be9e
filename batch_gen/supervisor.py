"""One worker: replicas that render, a pool that finishes clips, and the rules of failing, restarting and stopping.

Each replica is a thread with an engine of its own; all take their next clip from one `ClaimSource`. The engine is
started before the first claim, so that loading and compiling never count against a lease, and not at all when there is
nothing to do. While a clip is decoded the next one is claimed and its attempt written down, so that the engine does not
wait for the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from batch_gen.claims import Assignment, ChunkEnd, ClaimSource, Wait
from batch_gen.commit import load_record
from batch_gen.drain import Drain
from batch_gen.engine import CHECK, Engine
from batch_gen.errors import BatchGenError, ClipFailed, DiskFull, Drained, EngineLost, RetryClass, StoreError
from batch_gen.job import Finished, Workshop, adopt, make_clip
from batch_gen.lease import LostLease
from batch_gen.ledger import UNFINISHED_PER_REPLICA
from batch_gen.memory import MemoryTrend, rss_bytes
from batch_gen.metrics import Meter, write_parts
from batch_gen.outcome import Attempt, error_row, metrics_row
from batch_gen.progress import Current, Progress
from batch_gen.request import RenderRequest
from batch_gen.slabs import Aborted

log = logging.getLogger(__name__)
MAX_RESTARTS = 3
RECYCLE_AHEAD_CLIPS = 3
ENGINE_STAGES: Final = ("text", "denoise", CHECK, "decode")


@dataclass(slots=True)
class Replica:
    """What the supervisor knows of one replica."""

    index: int
    engine: Engine | None = None
    losses: set[str] = field(default_factory=set)
    bucket: str | None = None
    attempt: Attempt | None = None
    stage: str = ""
    step: int = 0
    total: int = 0
    began_s: float = 0.0
    stage_began_s: float = 0.0
    heard_s: float = 0.0
    trend: MemoryTrend = field(default_factory=MemoryTrend)
    looks_ahead: bool = False
    ahead: Future[Assignment | None] | None = None


@dataclass(slots=True)
class Supervisor:
    """Runs replicas until nothing is left to claim, something stops the run, or a drain is asked for.

    Args:
        source: what to do next, and where verdicts go.
        start_engine: starts the engine of replica `i`.
        shop: what all clips share.
        drain: the flag to stop.
        meter, progress: figures and display.
        num_replicas: pipelines on this machine.
        blocked: why a prompt must not be rendered, None for all others.
        tell: hears of every clip that is committed or set aside.
        memory_limit_bytes: an engine whose memory grows towards this is started anew in time.
        clips_per_step: clips that the engine may denoise in one call.
        unfinished_per_replica: clips that may be rendering, waiting for the encoder or being written at once.
    """

    source: ClaimSource
    start_engine: Callable[[int], Engine]
    shop: Workshop
    drain: Drain
    meter: Meter
    progress: Progress
    num_replicas: int = 1
    blocked: Callable[[str], str | None] = lambda _: None
    tell: Callable[[dict[str, Any]], None] = lambda _: None
    memory_limit_bytes: int | None = None
    clips_per_step: int = 1
    unfinished_per_replica: int = UNFINISHED_PER_REPLICA
    replicas: list[Replica] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    _fatal: list[BaseException] = field(default_factory=list)
    _slots: threading.BoundedSemaphore = field(init=False)
    _scouts: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.replicas = [Replica(index) for index in range(self.num_replicas)]
        self._slots = threading.BoundedSemaphore(self.num_replicas * self.unfinished_per_replica)
        self._scouts = ThreadPoolExecutor(self.num_replicas, "ahead")

    def run(self) -> None:
        """Work until the end.

        Raises:
            BatchGenError: what ended the worker early: an engine that dies again and again, a full disk, a stopped run.
        """
        threads = [
            threading.Thread(target=self._work, args=(replica,), name=f"replica-{replica.index}")
            for replica in self.replicas
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self.drain.requested:
                self._abandon_what_does_not_fit()
            time.sleep(0.05)
        self._scouts.shutdown()
        for _ in range(self.num_replicas * self.unfinished_per_replica):
            self._slots.acquire(timeout=max(1.0, min(self.drain.remaining_s, 3600.0)))
        if self._fatal:
            raise self._fatal[0]

    def heard(self, attempt: Attempt, stage: str, done: int, total: int) -> None:
        """A sign of progress from the engine or the host work of a clip."""
        self.source.heartbeat()
        replica = self.replicas[attempt.replica]
        if stage in ENGINE_STAGES and attempt is replica.attempt:
            if stage != replica.stage:  # it began when the one before last spoke
                replica.stage, replica.stage_began_s = stage, replica.heard_s
            replica.step, replica.total, replica.heard_s = done, total, time.monotonic()
        if stage == "decode" and replica.looks_ahead and replica.ahead is None:
            replica.ahead = self._scouts.submit(self._look_ahead, str(attempt.request.bucket))
        if stage in ENGINE_STAGES:
            current = Current(attempt.request.clip_id, stage, done, total, float(attempt.request.cost))
            self.progress.step(attempt.replica, current)

    def write_parts(self, end: ChunkEnd) -> None:
        """Write the metrics and error parts of a chunk, at its end or when it is released."""
        store, worker = self.shop.store, self.shop.facts.worker
        metrics, errors = [], []
        for clip_id, verdict in end.verdicts.items():
            if verdict.status != "committed":
                errors.append(error_row(end.requests[clip_id], verdict, end.chunk, end.epoch, worker))
                continue
            row = self.rows.get(clip_id)
            if row is None and (record := load_record(store, clip_id)) is not None:
                row = metrics_row(record, store.url)
            if row is not None:
                metrics.append(row)
        write_parts(store, end.chunk, end.epoch, metrics, errors)
        if end.finished:
            for clip_id in end.verdicts:
                self.rows.pop(clip_id, None)

    def _work(self, replica: Replica) -> None:
        try:
            self._claim_and_render(replica)
        except BaseException as error:  # the run ends with it, in the main thread
            self._fatal.append(error)
            self.drain.request(f"replica {replica.index}: {error}", 0.0 if isinstance(error, DiskFull) else None)
        finally:
            self.progress.idle(replica.index)
            if replica.engine is not None:
                replica.engine.close()

    def _claim_and_render(self, replica: Replica) -> None:
        while not self.drain.requested:
            if replica.engine is None and self._is_needed():
                self._start(replica)
                continue
            if replica.ahead is not None:
                found, replica.ahead = replica.ahead.result(), None
                if found is not None and replica.engine is not None:
                    self._render_group(replica, [found, *self._companions(found)])
                elif found is not None:
                    self.source.abandoned(found.clip_id)
                continue
            work = self.source.next(replica.bucket)
            if work is None:
                return
            if isinstance(work, Wait):
                self.source.wait_for_change(work.seconds)
            elif self._is_blocked(work):
                continue
            elif replica.engine is None and not self._start(replica):
                self.source.abandoned(work.clip_id)
            elif self._begin(work) and not self._adopt(work):
                self._render_group(replica, [work, *self._companions(work)])

    def _look_ahead(self, bucket: str) -> Assignment | None:
        """The next clip, started, while the engine still decodes; None when there is none to be had now."""
        work = self.source.next(bucket)
        return work if isinstance(work, Assignment) and self._takes(work) else None

    def _companions(self, work: Assignment) -> list[Assignment]:
        """More clips, started, that the engine may denoise together with this one."""
        found: list[Assignment] = []
        for _ in range(0 if work.alone else self.clips_per_step - 1):
            more = self.source.next(str(work.request.bucket))
            if not isinstance(more, Assignment):
                break
            if self._takes(more):
                found.append(more)
        return found

    def _render_group(self, replica: Replica, works: list[Assignment]) -> None:
        """One clip after the other; the engine may make latents of the later ones with the first one's."""
        for number, work in enumerate(works):
            if replica.engine is None:
                self.source.abandoned(work.clip_id)
                continue
            replica.looks_ahead = number + 1 == len(works)
            self._render(replica, work, tuple(w.request for w in works[1:]) if number == 0 else ())

    def _takes(self, work: Assignment) -> bool:
        """Start a clip's attempt; False when it is blocked, another's, or made already."""
        return not self._is_blocked(work) and self._begin(work) and not self._adopt(work)

    def _is_blocked(self, work: Assignment) -> bool:
        """Set a blocked prompt aside before anything is spent on it."""
        reason = self.blocked(work.request.prompt)
        if reason is None:
            return False
        attempt = Attempt(work.request, work.chunk, work.epoch, work.attempt)
        self._failed(attempt, ClipFailed("input", reason))
        return True

    def _is_needed(self) -> bool:
        """Whether something is left to do; a store that is away is `next`'s affair, which has patience with it."""
        try:
            return self.source.num_unfinished() > 0
        except StoreError:
            return False

    def _begin(self, work: Assignment) -> bool:
        """Write the attempt down; False when the clip is another's or the store is away."""
        try:
            self.source.started(work.clip_id)
        except LostLease:
            return False
        except StoreError:
            self.source.abandoned(work.clip_id)
            return False
        return True

    def _adopt(self, work: Assignment) -> bool:
        """Take over a file that an earlier attempt stored before it died ahead of its record."""
        if not work.begun_before:
            return False
        try:
            record = adopt(work, self.shop)
        except StoreError as error:
            self.source.failed(work.clip_id, error.kind, error.message)
            return True
        if record is None:
            return False
        row = self.rows[work.clip_id] = metrics_row(record, self.shop.store.url)
        self.source.committed(work.clip_id)
        self.progress.finished(work.clip_id, cost=float(work.request.cost))
        self.tell(row)
        return True

    def _start(self, replica: Replica) -> bool:
        began_s = time.monotonic()
        with self.meter.spending("cold_start"):
            try:
                replica.engine = self.start_engine(replica.index)
            except EngineLost as error:
                self._count_loss(replica, error, f"start {time.monotonic()}")
            except Drained:
                log.info("drained while the engine was loading")
        self._count_waste("cold_start", began_s)
        return replica.engine is not None

    def _count_waste(self, use: str, began_s: float) -> None:
        """Tell the done log, from which reports take it, before a verdict may close the chunk."""
        self.source.count(f"{use}_ms", round(1000 * (time.monotonic() - began_s)))

    def _render(self, replica: Replica, work: Assignment, together: tuple[RenderRequest, ...] = ()) -> None:
        assert replica.engine is not None
        attempt = Attempt(work.request, work.chunk, work.epoch, work.attempt, replica.index)
        self._slots.acquire()  # a wait for encoders: the engine stands idle, and the clip's time has not begun
        replica.began_s = replica.heard_s = time.monotonic()
        replica.stage, replica.step, replica.attempt = "", 0, attempt
        handed_over = False
        use = "failed"
        try:
            future = make_clip(replica.engine, attempt, self.shop, together)
            use = "render"
            engine_s = time.monotonic() - replica.began_s
            future.add_done_callback(lambda done: self._finished(attempt, done, engine_s))
            handed_over = True
            replica.losses.clear()
            replica.bucket = str(work.request.bucket)
            self._recycle(replica)
        except ClipFailed as error:
            self._count_waste("failed", replica.began_s)
            self._failed(attempt, error)
        except EngineLost as error:
            self._count_waste("failed", replica.began_s)
            self._lost(replica, attempt, error)
        finally:
            self.meter.spent(use, time.monotonic() - replica.began_s)
            replica.attempt = None
            self.progress.idle(replica.index)
            if not handed_over:
                self._slots.release()

    def _recycle(self, replica: Replica) -> None:
        """Start the engine anew before a leak fills the memory."""
        pids = getattr(replica.engine, "pids", None)
        if self.memory_limit_bytes is None or not pids:
            return
        replica.trend.add(sum(rss_bytes(pid) for pid in pids))
        left = replica.trend.clips_until(self.memory_limit_bytes)
        if left is None or left > RECYCLE_AHEAD_CLIPS:
            return
        fields = {"replica": replica.index, "bytes_per_clip": int(replica.trend.slope_bytes)}
        log.warning("engine recycled: its memory grows", extra={"fields": fields})
        assert replica.engine is not None
        replica.engine.close()
        replica.engine, replica.trend = None, MemoryTrend()

    def _lost(self, replica: Replica, attempt: Attempt, error: EngineLost) -> None:
        replica.engine = None
        if self.drain.requested:
            self.source.abandoned(attempt.request.clip_id)
            return
        log.warning("engine lost", extra={"fields": {"kind": error.kind, "clip_id": attempt.request.clip_id}})
        self.meter.failed()
        self.source.failed(attempt.request.clip_id, error.kind, error.message)
        if error.retry is RetryClass.HOST:  # broken hardware: no restart on this machine helps
            raise error
        self._count_loss(replica, error, attempt.request.clip_id)

    def _count_loss(self, replica: Replica, error: EngineLost, cause: str) -> None:
        """One clip that kills its engine again and again is quarantined by its budget; different ones are no accident.

        Raises:
            EngineLost: too many different causes since the last clip that was rendered.
        """
        replica.losses.add(cause)
        if len(replica.losses) > MAX_RESTARTS:
            count = len(replica.losses)
            raise EngineLost(error.kind, f"the engine was lost on {count} clips in a row; last: {error.message}")

    def _finished(self, attempt: Attempt, future: Future[Finished], engine_s: float) -> None:
        clip_id = attempt.request.clip_id
        try:
            done = future.result()
            self.rows[clip_id] = done.row
            self.source.committed(clip_id, done.receipt.outcome)
            if done.receipt.outcome == "committed":
                self.meter.committed(attempt.request.duration_s)
            else:  # another worker was first
                self.meter.moved("duplicate", engine_s)
            self.progress.finished(clip_id, cost=float(attempt.request.cost))
            self.tell(done.row)
        except Aborted:
            pass  # whoever aborted reports the clip
        except (ClipFailed, StoreError) as error:
            self.meter.moved("failed", engine_s)
            self.source.count("failed_ms", round(1000 * engine_s))
            self._failed(attempt, error)
        except BaseException as error:  # ends the run in the main thread
            self._fatal.append(error)
            self.drain.request(str(error), 0.0)
        finally:
            self._slots.release()

    def _failed(self, attempt: Attempt, error: BatchGenError) -> None:
        clip_id = attempt.request.clip_id
        log.warning("clip failed", extra={"fields": {"clip_id": clip_id, "kind": error.kind, "text": error.message}})
        self.meter.failed()
        if self.source.failed(clip_id, error.kind, error.message) is not None:
            self.progress.finished(clip_id, cost=float(attempt.request.cost), failed=True)
            self.tell({"clip_id": clip_id, "status": "quarantined", "kind": error.kind, "message": error.message})

    def _abandon_what_does_not_fit(self) -> None:
        for replica in self.replicas:
            engine, attempt = replica.engine, replica.attempt
            if engine is None or attempt is None or self._rest_s(replica) <= self.drain.remaining_s:
                continue
            kill = getattr(engine, "kill", None)
            if kill is not None:
                kill()

    def _rest_s(self, replica: Replica) -> float:
        """Seconds that the clip in hand still needs, from its pace so far; 0 when it is almost over: it is decoded."""
        if replica.stage == "decode":
            return 0.0
        if not replica.step:
            return float("inf")
        pace = (time.monotonic() - replica.stage_began_s) / replica.step
        return pace * (replica.total - replica.step)

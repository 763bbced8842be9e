"""One worker of a run, from settings to exit code: opens the root, plans or joins, renders, closes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batch_gen import clock, metrics
from batch_gen.blocklist import read_block_list
from batch_gen.caps import cap_timer, watch_for_interruptions
from batch_gen.claims import ChunkEnd, ClaimOptions, ClaimSource
from batch_gen.config import RATE_KEY, Settings, load_profile
from batch_gen.donelog import Tally
from batch_gen.drain import Drain, install_signals
from batch_gen.encode import EncodeSettings
from batch_gen.engine import Engine
from batch_gen.environment import (
    WorkerHint,
    is_batch_child,
    lease_clock_offset_s,
    worker_hint,
    worker_name,
)
from batch_gen.errors import EXIT_AGAIN, EXIT_OK, EXIT_QUARANTINE, Drained, EnvironmentFault, UsageError
from batch_gen.graphs.supply import Supply, count_graphs, graphs_in
from batch_gen.image_checks import keep_images
from batch_gen.images import ImageReader
from batch_gen.job import Workshop
from batch_gen.launch import RemoteEngine
from batch_gen.ledger import Costs, HostLoad, add_up
from batch_gen.memory import limit_bytes
from batch_gen.metrics import Meter, RunSummary
from batch_gen.notify import Notifier
from batch_gen.outcome import RunFacts
from batch_gen.placement import compile_name, rank_threads, spec_of
from batch_gen.plan import Plan, PlanOptions, plan_run
from batch_gen.prepare import Prepared, store_options
from batch_gen.presence import begin, one_at_a_time, run_name
from batch_gen.progress import Progress, choose_display
from batch_gen.runfile import RunFile, new_run, open_run
from batch_gen.scratch import largest_spec, needed_bytes, open_scratch
from batch_gen.slabs import ByteBudget
from batch_gen.stop import check_stop, retire_stop
from batch_gen.storage.base import Store, open_store
from batch_gen.storage.probe import needs_probe, probe
from batch_gen.supervisor import Supervisor
from batch_gen.telemetry import Telemetry, outlets
from batch_gen.versions import cpu_class, versions

log = logging.getLogger(__name__)
ENCODER_THREADS = 2
TABLES_UP_TO_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """How a worker's start ended."""

    exit_code: int
    out: str
    num_clips: int
    num_committed: int
    num_quarantined: int
    summary: RunSummary
    reason: str = ""
    graphs: dict[str, int] | None = None
    costs: Costs = field(default_factory=Costs)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self) | {"summary": self.summary.to_json(), "costs": self.costs.to_json()}


def work(prepared: Prepared, graphs: Supply | None = None) -> Result:
    """Render what is left of the run as one worker of possibly many.

    Raises:
        BatchGenError: with the exit code that the command ends with.
    """
    settings = prepared.settings
    store, settings = open_output(settings)
    prepared = dataclasses.replace(prepared, settings=settings)
    name = worker_name()
    if settings.continue_ and not is_batch_child():  # a child that Batch starts again must not undo a cancel
        retire_stop(store)
    check_stop(store)
    run = join_run(store, prepared)
    keep_images(store, prepared.manifest)
    plan = plan_run(store, prepared.rows, plan_options(prepared, name))
    drain = Drain(settings.drain_budget)
    install_signals(drain)
    watch_for_interruptions(settings, drain)
    facts = run_facts(prepared, run, name)
    start, load = begin(store, settings, name)
    meter = Meter(settings.replicas)
    where = outlets(emf=settings.emf, prometheus=settings.prometheus)
    with (
        Telemetry(store, start, meter, where, run_name(settings.out)) as told,
        scratch_folder(prepared, load) as scratch,
        shared_pool(settings, load) as pool,
    ):
        told.watch(drain)
        shop = workshop(store, facts, settings, scratch, pool, load)
        result = render(prepared, plan, shop, drain, meter, load, graphs)
        told.ended(result.reason or "finished", result.exit_code)
        return dataclasses.replace(result, costs=add_up([told.standing(result.summary)]))


def memory_limit_bytes(settings: Settings) -> int:
    """What the ranks of one replica may hold: a fair share of nine tenths of the machine or container."""
    return int(limit_bytes() * 0.9) // settings.replicas


def open_output(settings: Settings) -> tuple[Store, Settings]:
    """Open the output root in the way that its store's promises allow.

    Returns:
        The store, and the settings: `assign` becomes static where leases cannot be had, with the reason said.

    Raises:
        EnvironmentFault: what is written does not come back as it was.
    """
    options = store_options(settings)
    store = open_store(settings.out, options)
    if not needs_probe(store):
        return store, settings
    report = probe(store)
    if report.verdict == "refuse":
        raise EnvironmentFault(f"{settings.out} cannot be an output root:\n" + "\n".join(report.lines()))
    if report.verdict == "static" and settings.assign == "lease":
        log.warning("%s", "\n".join(report.lines()))
        settings = settings.model_copy(update={"assign": "static"})
    return open_store(settings.out, report.options(options)), settings


def render(
    prepared: Prepared,
    plan: Plan,
    shop: Workshop,
    drain: Drain,
    meter: Meter,
    load: HostLoad,
    graphs: Supply | None = None,
) -> Result:
    """Claim and render until nothing is left, then close the run."""
    settings = prepared.settings
    ends: list[Callable[[ChunkEnd], None]] = []  # the supervisor writes parts, and needs the source first
    options = claim_options(settings, worker_hint(settings.shard), lambda end: ends[0](end))  # noqa: PLW0108
    with (
        ClaimSource(shop.store, plan, shop.facts.worker, options) as source,
        progress_of(settings, plan, source) as progress,
    ):
        before = frozenset() if graphs is None else graphs_in(graphs.folder)
        waits = (lambda: wait_on(source, drain), source.heartbeat)
        start = engine_starter(prepared, shop.scratch, waits, graphs)
        start = one_at_a_time(start) if load.one_by_one else start
        supervisor = Supervisor(
            *(source, start, shop, drain, meter, progress, settings.replicas),
            unfinished_per_replica=load.unfinished_per_replica,
        )
        supervisor.memory_limit_bytes = memory_limit_bytes(settings)
        supervisor.clips_per_step = settings.clips_per_step
        block_list = read_block_list(settings.block_list)
        if block_list is not None:
            supervisor.blocked = block_list.match
        notifier = Notifier(settings.on_clip) if settings.on_clip else None
        if notifier is not None:
            supervisor.tell = notifier.clip
        cap = cap_timer(settings, shop)
        shop.progress = supervisor.heard
        ends.append(supervisor.write_parts)
        try:
            supervisor.run()
        finally:
            source.release()
            if cap is not None:
                cap.cancel()
            if notifier is not None:
                notifier.close()
        result = close(shop.store, plan, source.summary(), drain, meter, settings)
        return result if graphs is None else dataclasses.replace(result, graphs=count_graphs(graphs.folder, before))


def wait_on(source: ClaimSource, drain: Drain) -> None:
    """Called while an engine loads: the leases live on, and a drain does not wait for the end of the load.

    Raises:
        Drained: somebody asked to stop.
    """
    source.heartbeat()
    if drain.reason is not None:
        raise Drained(f"drained while the engine was loading: {drain.reason.text}")


def join_run(store: Store, prepared: Prepared) -> RunFile:
    """Begin the run or join it; another fingerprint is refused with the difference."""
    unsaid = {"config", "ids", "on_clip"}  # files of this machine, and a webhook's address, which may be a secret
    profile = prepared.settings.model_dump(mode="json", by_alias=True, exclude=unsaid)
    key = numerics_key(prepared.settings)
    profile["numerics_key"] = key
    mine = new_run(prepared.fingerprint_settings(), profile=profile, versions=versions(), created=clock.utc_now())
    run = open_run(store, mine)
    if run.profile.get("numerics_key") != key:
        text = "the run began on a machine or with settings whose bits may differ (device, mesh, threads, torch, ...)"
        if prepared.settings.require_same_numerics:
            raise UsageError(f"--require-same-numerics: {text}")
        log.warning(text)
    return run


def plan_options(prepared: Prepared, worker: str) -> PlanOptions:
    """How this worker would plan."""
    facts = {"inputs": prepared.inputs, "worker": worker, "created": clock.utc_now()}
    rate = load_profile(prepared.settings.profile).get(RATE_KEY)
    num_clips = prepared.manifest.survey.num_clips
    return PlanOptions(prepared.settings.chunk_requests, None if rate is None else float(rate), facts, num_clips)


def claim_options(settings: Settings, hint: WorkerHint, on_chunk_end: Callable[[ChunkEnd], None]) -> ClaimOptions:
    """How chunks are claimed.

    Raises:
        UsageError: static assignment needs to know which of how many workers this one is.
    """
    shard = None
    if settings.assign == "static":
        if hint.count is None:
            raise UsageError(
                f"--assign static: {hint.source} is set but not how many workers there are; use --shard i/n"
            )
        if hint.index >= hint.count:
            raise UsageError(
                f"--assign static: {hint.source} is {hint.index} of {hint.count} workers, which count from 0;"
                f" number the array 0 to {hint.count - 1}, or use --shard i/n"
            )
        shard = (hint.index, hint.count)
    grace_s = min(30.0, settings.lease_ttl / 4)
    offset_s = lease_clock_offset_s()
    return ClaimOptions(
        ttl_s=settings.lease_ttl,
        grace_s=grace_s,
        shard=shard,
        max_failures=float(settings.max_failures),
        clock=lambda: clock.monotonic_s() + offset_s,
        utc=lambda: clock.utc_now(offset_s),
        on_chunk_end=on_chunk_end,
    )


def run_facts(prepared: Prepared, run: RunFile, worker: str) -> RunFacts:
    """What all records repeat."""
    settings = prepared.settings
    called = prepared.checkpoint.name
    if Path(called).is_dir():  # files and records must not differ between machines that keep it in other places
        called = Path(called).resolve().name
    model = f"{called} ({prepared.checkpoint.digest[:12]})"
    return RunFacts(run.fingerprint, numerics_key(settings), model, worker, versions(), {"mode": settings.decode})


def numerics_key(settings: Settings) -> str:
    """Digest of every operational setting that can change bits."""
    return hashlib.sha256(json.dumps(numerics(settings), sort_keys=True).encode()).hexdigest()[:16]


def numerics(settings: Settings) -> dict[str, Any]:
    """Every operational setting and fact that can change bits."""
    return {
        "device": settings.device,
        "cpu": cpu_class() if settings.device == "cpu" else "",
        "mesh": str(settings.mesh),
        "attention": settings.attention if settings.mesh.num_ranks > 1 else "",
        "tp_sequence_parallel": settings.tp_sequence_parallel,
        "kernels": settings.kernels,
        "compile": compile_name(settings),
        "threads": rank_threads(settings),
        "torch": versions().get("torch", ""),
    }


def encode_settings(settings: Settings) -> EncodeSettings:
    """How files are written."""
    return EncodeSettings(
        codec=settings.codec, crf=settings.crf, threads=ENCODER_THREADS, metadata=settings.file_metadata
    )


def workshop(
    store: Store, facts: RunFacts, settings: Settings, scratch: Path, pool: ThreadPoolExecutor, load: HostLoad
) -> Workshop:
    """What all clips share."""
    return Workshop(
        store=store,
        facts=facts,
        encode=encode_settings(settings),
        scratch=scratch,
        pool=pool,
        budget=ByteBudget(load.frames_budget_bytes),
        progress=lambda *_: None,
        keep_latents=settings.keep_latents,
        images=ImageReader(store, store_options(settings)),
        resize=settings.resize,
    )


@contextmanager
def scratch_folder(prepared: Prepared, load: HostLoad) -> Iterator[Path]:
    """Scratch space with room for the largest clips in flight."""
    settings = prepared.settings
    asked = prepared.manifest.survey.buckets
    by_images = any(bucket.conditioning != "text" for bucket in asked)  # images may change sizes
    spec = largest_spec({row.request.bucket for row in prepared.rows()} if by_images else asked)
    in_flight = settings.replicas * load.unfinished_per_replica
    base = Path(settings.scratch) if settings.scratch else None
    with open_scratch(base, needed_bytes(spec, encode_settings(settings), in_flight)) as folder:
        yield folder


def engine_starter(
    prepared: Prepared,
    scratch: Path,
    waits: tuple[Callable[[], None], Callable[[], None]],
    graphs: Supply | None,
) -> Callable[[int], Engine]:
    """A function that starts the engine of replica `i`.

    `waits`: what is called while the engine loads, and while a clip waits for its compiler.
    """
    cache = None if graphs is None else graphs.folder
    compiled: set[Hashable] = set()  # all engines share the cache: what one has compiled none waits for again

    def start(index: int) -> Engine:
        folder = scratch / f"replica-{index}"
        spec = spec_of(prepared.settings, prepared.checkpoint, folder, index, cache)
        return RemoteEngine(spec, *waits, compiled)

    return start


@contextmanager
def shared_pool(settings: Settings, load: HostLoad) -> Iterator[ThreadPoolExecutor]:
    """Threads for the host work of clips: as many as clips may be unfinished."""
    with ThreadPoolExecutor(settings.replicas * load.unfinished_per_replica, "clip") as pool:
        yield pool


@contextmanager
def progress_of(settings: Settings, plan: Plan, source: ClaimSource) -> Iterator[Progress]:
    """The display of this worker; what earlier starts finished counts as done."""
    tally = source.summary()
    num_done = tally.num_committed + len(tally.quarantined)
    cost = sum(chunk.cost for chunk in plan.chunks)
    done_cost = cost * num_done / max(1, plan.num_clips)
    with Progress(plan.num_clips, cost, choose_display(quiet=settings.quiet)) as progress:
        progress.found(num_done, done_cost)
        yield progress


def close(store: Store, plan: Plan, tally: Tally, drain: Drain, meter: Meter, settings: Settings) -> Result:
    """Rebuild the tables and say how it ended; of a large run, only whoever finds it finished reads all its parts."""
    num_quarantined = len(tally.quarantined)
    is_over = tally.num_committed + num_quarantined >= plan.num_clips
    if is_over or len(plan.chunks) <= TABLES_UP_TO_CHUNKS:
        metrics.rebuild_tables(store)
    code, reason = EXIT_OK, ""
    if drain.reason is not None and not is_over:
        code, reason = EXIT_AGAIN, f"drained: {drain.reason.text}"
    elif num_quarantined:
        code = EXIT_OK if settings.ok_with_quarantine else EXIT_QUARANTINE
    return Result(code, settings.out, plan.num_clips, tally.num_committed, num_quarantined, meter.summary(), reason)

"""Who and where this start of a worker is, and how much it may hold at once after earlier starts were killed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from batch_gen import clock
from batch_gen.config import Settings
from batch_gen.environment import is_batch_child, metadata_endpoint, queue_name, worker_hint, worker_name
from batch_gen.errors import BatchGenError
from batch_gen.interruption import Metadata
from batch_gen.layout import SUBMIT_PREFIX
from batch_gen.ledger import HostLoad, Start, host_load, kills_before, read_start
from batch_gen.memory import limit_bytes
from batch_gen.reach import reach
from batch_gen.storage.base import Store, open_store

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_WORDS: Final = 300


def begin(store: Store, settings: Settings, worker: str) -> tuple[Start, HostLoad]:
    """This start for the ledger, and its load on the host: less than usual when the last one was killed."""
    hint = worker_hint()
    host, instance = machine()
    load = host_load(kills_before(store, hint, host))
    if load.kills:
        text = "earlier starts of this child that were killed in a row, probably for memory: %d; now less at once"
        log.warning(text, load.kills)
    start = Start(
        worker=worker,
        job=hint.job,
        attempt=hint.attempt,
        host=host,
        queue=queue_name(),
        instance=instance,
        num_replicas=settings.replicas,
        price_per_hour=settings.price_per_hour,
        lead_s=round(max(0.0, time.time() - psutil.Process().create_time()), 3),
        memory_limit_bytes=limit_bytes(),
        started=clock.utc_now(),
    )
    return start, load


def last_words(layers: Mapping[str, Any], error: BatchGenError) -> None:
    """A child of AWS Batch that ends before it joins the run writes down why, so that `status` can say it."""
    hint, out = worker_hint(), str(layers.get("out") or "")
    if not is_batch_child() or not hint.job or "://" not in out:
        return
    text = f"{error.kind}: {error.message.splitlines()[0][:MAX_WORDS]}"
    now = clock.utc_now()
    start = Start(
        worker=worker_name(), job=hint.job, attempt=hint.attempt, queue=queue_name(), ended=text,
        exit_code=error.exit_code, started=now, updated=now,
    )  # fmt: skip
    with contextlib.suppress(BatchGenError):  # the store may be what is wrong
        store = open_store(out, reach(layers))
        is_ours = next(iter(store.list(SUBMIT_PREFIX)), None) is not None  # never a word into foreign places
        if is_ours and read_start(store, start.key) is None:
            store.put(start.key, start.to_bytes(), content_type="application/json")


def machine() -> tuple[str, str]:
    """Name and type of this machine: EC2's, else the host's name and `none`."""
    endpoint = metadata_endpoint()
    if endpoint is not None:
        metadata = Metadata(endpoint)
        try:
            found = metadata.read("instance-id"), metadata.read("instance-type")
        except (OSError, HTTPException):
            found = None, None
        if found[0]:
            return found[0], found[1] or "none"
    return socket.gethostname(), "none"


def run_name(out: str) -> str:
    """What metrics call a run: bucket and prefix, or the folder's name."""
    return out.removeprefix("s3://").strip("/") if "://" in out else Path(out).resolve().name


def one_at_a_time(start: Callable[[int], T]) -> Callable[[int], T]:
    """Engines that are loaded one after the other never hold the host's copies of their weights together."""
    lock = threading.Lock()

    def waiting(index: int) -> T:
        with lock:
            return start(index)

    return waiting

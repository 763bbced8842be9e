"""Does a store keep its promises? Small writes below `.probe/` tell, before a run trusts it.

    leases   everything holds: any number of workers may share the run
    static   conditions are ignored, racy or half there: each worker keeps to its own chunks (`--assign static`)
    refuse   what is written does not come back as it was: no run

Servers that accept a body with a wrong SHA-256 may be used, but uploads are then read back and compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from batch_gen.errors import BatchGenError, StoreError
from batch_gen.storage.base import AlreadyExists, ChecksumMismatch, Conflict, Store, StoreOptions
from batch_gen.storage.folder import FolderStore

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE_PREFIX: Final = ".probe/"
NUM_RACERS: Final = 8
BODY_BYTES: Final = 100_003
CLOCK_WARN_S: Final = 5.0
CLOCK_LIMIT_S: Final = 300.0
_NETWORK_FILE_SYSTEMS: Final = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "gluster",
    "afs",
)

Verdict = Literal["leases", "static", "refuse"]
Weight = Literal["needed", "for_leases", "for_checksums", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise that was tried; `weight` says what depends on it."""

    name: str
    ok: bool
    weight: Weight
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found, and what follows."""

    url: str
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether workers may share the run, must keep apart, or should not start."""
        broken = {finding.weight for finding in self.findings if not finding.ok}
        if "needed" in broken:
            return "refuse"
        return "static" if "for_leases" in broken else "leases"

    @property
    def checks_sha256(self) -> bool:
        """Whether the store itself refuses a body that is not what was announced."""
        return all(finding.ok for finding in self.findings if finding.weight == "for_checksums")

    def options(self, options: StoreOptions) -> StoreOptions:
        """The options with which this store should be opened for a run."""
        return replace(options, conditional=self.verdict == "leases", read_back=not self.checks_sha256)

    def lines(self) -> list[str]:
        """The report for people, one line per promise and one for what follows."""
        lines = [f"{'ok  ' if f.ok else 'FAIL'} {f.name}{f': {f.detail}' if f.detail else ''}" for f in self.findings]
        meaning = {
            "leases": "workers share the run by leases",
            "static": "use --assign static with --shard i/n: each keeps to its own chunks; those of a lost worker "
            "wait for its restart, and two workers with one shard may render clips twice",
            "refuse": "not usable as an output root",
        }
        lines.append(f"{self.url}: {meaning[self.verdict]}")
        if not self.checks_sha256:
            lines.append(f"{self.url}: the server does not check SHA-256, so every upload is read back")
        return lines


def probe(store: Store) -> ProbeReport:
    """Try every promise of `Store`; leaves nothing behind.

    Raises:
        StoreError, EnvironmentFault: The store cannot be reached or written at all.
    """
    prefix = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    steps: list[tuple[str, Weight, Callable[[Store, str], str]]] = [
        ("a key is created once", "for_leases", _create_twice),
        ("one of eight racing creates wins", "for_leases", _racing_creates),
        ("only the last version is replaced", "for_leases", _replace_stale),
        ("a missing key is not replaced", "for_leases", _replace_missing),
        ("one of eight racing replaces wins", "for_leases", _racing_replaces),
        ("a body with a wrong SHA-256 is refused", "for_checksums", _wrong_checksum),
        ("a listing shows what was just written", "needed", _list),
    ]
    findings = [_finding("what is written is read back", "needed", _read_back(store, f"{prefix}/body"))]
    try:
        for number, (name, weight, step) in enumerate(steps):
            findings.append(_finding(name, weight, _tried(step, store, f"{prefix}/{number}")))
    finally:
        with contextlib.suppress(BatchGenError):
            for entry in list(store.list(f"{prefix}/")):
                store.delete(entry.key)
    return ProbeReport(store.url, (*findings, *_clock(store), *_file_system(store)))


def _finding(name: str, weight: Weight, problem: str) -> Finding:
    return Finding(name, not problem, weight, problem)


def _tried(step: Callable[[Store, str], str], store: Store, key: str) -> str:
    """What is wrong, empty when nothing is; a server that does not know the request at all says so by an error."""
    try:
        return step(store, key)
    except StoreError as error:
        return error.message


def _read_back(store: Store, key: str) -> str:
    body = hashlib.sha256(b"batch-gen").digest() * (BODY_BYTES // 32) + os.urandom(BODY_BYTES % 32)
    store.create(key, body)
    blob, head = store.get(key), store.head(key)
    same = blob is not None and blob.body == body and head is not None and head.size_bytes == len(body)
    return "" if same else "the body came back different"


def _create_twice(store: Store, key: str) -> str:
    store.create(key, b"first")
    with contextlib.suppress(AlreadyExists):
        store.create(key, b"second")
        return "the second create was accepted"
    blob = store.get(key)
    return "" if blob is not None and blob.body == b"first" else "the refused create changed the body"


def _racing_creates(store: Store, key: str) -> str:
    num_won = _race(lambda number: store.create(key, b"racer %d" % number))
    return "" if num_won == 1 else f"{num_won} were accepted"


def _replace_stale(store: Store, key: str) -> str:
    old = store.create(key, b"one")
    try:
        store.replace(key, b"two", old)
    except Conflict:
        return "the right version was refused"
    with contextlib.suppress(Conflict):
        store.replace(key, b"three", old)
        return "a write against an old etag was accepted"
    return ""


def _replace_missing(store: Store, key: str) -> str:
    etag = store.create(f"{key}-other", b"other")
    with contextlib.suppress(Conflict):
        store.replace(key, b"body", etag)
        return "If-Match on a missing key wrote it"
    return ""


def _racing_replaces(store: Store, key: str) -> str:
    etag = store.create(key, b"seen by all")
    num_won = _race(lambda number: store.replace(key, b"racer %d" % number, etag))
    return "" if num_won == 1 else f"{num_won} were accepted"


def _wrong_checksum(store: Store, key: str) -> str:
    with contextlib.suppress(ChecksumMismatch):
        store.create(key, b"body", sha256=hashlib.sha256(b"another").hexdigest())
        return "it was accepted"
    return "" if store.head(key) is None else "it was refused and stored all the same"


def _list(store: Store, key: str) -> str:
    store.create(f"{key}/1", b"x")
    store.create(f"{key}/2", b"x")
    return "" if [entry.key for entry in store.list(f"{key}/")] == [f"{key}/1", f"{key}/2"] else "keys are missing"


def _clock(store: Store) -> list[Finding]:
    offset_s = store.clock_offset_s()
    if offset_s is None:
        return []
    weight: Weight = "needed" if abs(offset_s) > CLOCK_LIMIT_S else "advice"
    detail = f"{offset_s:+.0f} s; signatures fail beyond 15 minutes"
    ok = abs(offset_s) <= CLOCK_WARN_S
    return [Finding("the clocks of store and machine agree", ok, weight, "" if ok else detail)]


def _file_system(store: Store) -> list[Finding]:
    """A network folder passes on one machine; only its mount decides whether locks reach the others."""
    kind = file_system_of(store.root) if isinstance(store, FolderStore) else None
    if kind is None or not kind.startswith(_NETWORK_FILE_SYSTEMS):
        return []
    detail = f"{kind}: locks must reach every machine (no nolock, no local_lock), else use S3 or --assign static"
    return [Finding("the folder is on a local file system", ok=False, weight="advice", detail=detail)]


def needs_probe(store: Store) -> bool:
    """Whether a store's promises are somebody else's: everything but a folder on a local file system."""
    if not isinstance(store, FolderStore):
        return True
    return (file_system_of(store.root) or "").startswith(_NETWORK_FILE_SYSTEMS)


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Type of the file system that holds a path, by the longest mount point above it; None where nothing tells."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return None
    points = {Path(fields[1].replace("\\040", " ")): fields[2] for fields in lines if len(fields) > 2}
    above = [point for point in (path, *path.parents) if point in points]
    return points[above[0]] if above else None


def _race(call: Callable[[int], str]) -> int:
    """Run eight calls at once; how many were accepted."""

    def attempt(number: int) -> bool:
        with contextlib.suppress(AlreadyExists, Conflict):
            call(number)
            return True
        return False

    with ThreadPoolExecutor(NUM_RACERS) as pool:
        return sum(pool.map(attempt, range(NUM_RACERS)))

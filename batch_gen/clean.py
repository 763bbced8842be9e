"""Remove what a run no longer needs: kept latents of committed clips, leases of finished chunks, what probes left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batch_gen.donelog import DoneLog
from batch_gen.held import find_committed
from batch_gen.layout import ASIDE_PREFIX, LATENTS_PREFIX, LEASE_PREFIX
from batch_gen.lease import read_lease
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.probe import PROBE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batch_gen.storage.base import ListedKey, Store

MANY_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed, or would be."""

    keys: tuple[str, ...]
    num_bytes: int
    num_temporary: int = 0


def clean(store: Store, *, aside: bool = False, dry_run: bool = False) -> Cleaned:
    """Remove what is not needed any more; results, plan, done log and metrics stay.

    Args:
        store: The output root.
        aside: Also what `verify --fix` moved aside.
        dry_run: Only say what would go.
    """
    entries = [*_latents(store), *_leases(store), *store.list(PROBE_PREFIX)]
    if aside:
        entries += list(store.list(ASIDE_PREFIX))
    num_temporary = 0
    if not dry_run:
        for entry in entries:
            store.delete(entry.key)
        if isinstance(store, FolderStore):
            num_temporary = store.sweep()
    return Cleaned(tuple(entry.key for entry in entries), sum(entry.size_bytes for entry in entries), num_temporary)


def _latents(store: Store) -> Iterator[ListedKey]:
    """Kept latents of clips that are committed by now."""
    entries = list(store.list(LATENTS_PREFIX))
    for start in range(0, len(entries), MANY_AT_ONCE):
        some = {Path(entry.key).stem: entry for entry in entries[start : start + MANY_AT_ONCE]}
        yield from (some[clip_id] for clip_id in sorted(find_committed(store, some)))


def _leases(store: Store) -> Iterator[ListedKey]:
    """Leases of chunks that the done log has and nobody holds."""
    log = DoneLog(store)
    log.refresh()
    for entry in store.list(LEASE_PREFIX):
        chunk = entry.key.removeprefix(LEASE_PREFIX).removesuffix(".json")
        seen = read_lease(store, chunk) if chunk in log else None
        if seen is not None and seen.body.owner is None:
            yield entry

"""Names of everything below an output root; no other file spells a key."""

from __future__ import annotations

import hashlib
from typing import Final

RUN_KEY: Final = "run.json"
STOP_KEY: Final = "stop.json"
METRICS_TABLE_KEY: Final = "metrics.parquet"
CLIPS_TABLE_KEY: Final = "clips.parquet"
DONE_PREFIX: Final = "done/"
LEASE_PREFIX: Final = "lease/"
CLIPS_PREFIX: Final = "clips/"
LATENTS_PREFIX: Final = "latents/"
IMAGES_PREFIX: Final = "images/"
ASIDE_PREFIX: Final = "aside/"
METRICS_PREFIX: Final = "metrics/"
ERRORS_PREFIX: Final = "errors/"
COMPACT_PREFIX: Final = "done/compact-"
WORKERS_PREFIX: Final = "workers/"
SUBMIT_PREFIX: Final = "submit/"
_OURS: Final = (
    *(RUN_KEY, STOP_KEY, METRICS_TABLE_KEY, CLIPS_TABLE_KEY, "plan-", DONE_PREFIX, LEASE_PREFIX, CLIPS_PREFIX),
    *(LATENTS_PREFIX, IMAGES_PREFIX, ASIDE_PREFIX, METRICS_PREFIX, ERRORS_PREFIX, WORKERS_PREFIX, SUBMIT_PREFIX),
    *("report/", "."),  # .probe/ and what file managers leave
)


def is_ours(key: str) -> bool:
    """Whether a key has its place in an output root."""
    return key.startswith(_OURS)


def clip_key(clip_id: str, suffix: str) -> str:
    """`clips/<2 hex>/<clip_id><suffix>`: 256 folders, so that a store can split the load."""
    return f"clips/{_spread(clip_id)}/{clip_id}{suffix}"


def record_key(clip_id: str) -> str:
    """The record of a clip."""
    return clip_key(clip_id, ".json")


def latents_key(clip_id: str) -> str:
    """The kept latents of a clip (`--keep-latents`)."""
    return f"latents/{_spread(clip_id)}/{clip_id}.npy"


def image_key(sha256: str) -> str:
    """The bytes of a binary image cell, by their SHA-256 in hex."""
    return f"{IMAGES_PREFIX}{sha256[:2]}/{sha256}"


def chunk_id(round_number: int, number: int) -> str:
    """`<round>-<number>`, padded so that names sort as numbers do."""
    return f"{round_number}-{number:05d}"


def lease_key(chunk: str) -> str:
    """The lease of a chunk."""
    return f"{LEASE_PREFIX}{chunk}.json"


def done_key(chunk: str) -> str:
    """The verdicts of a finished chunk."""
    return f"{DONE_PREFIX}{chunk}.json"


def compact_key(number: int) -> str:
    """The n-th summary of the done log."""
    return f"{COMPACT_PREFIX}{number:05d}.json"


def metrics_key(chunk: str, epoch: int) -> str:
    """One owner's metrics part of a chunk."""
    return f"{METRICS_PREFIX}{chunk}-e{epoch}.parquet"


def errors_key(chunk: str, epoch: int) -> str:
    """One owner's error rows of a chunk."""
    return f"{ERRORS_PREFIX}{chunk}-e{epoch}.parquet"


def plan_key(round_number: int) -> str:
    """The head of a round, written after its table."""
    return f"plan-{round_number}.json"


def plan_table_key(round_number: int, sha256: str) -> str:
    """The table of a round, named by its content."""
    return f"plan-{round_number}-{sha256[:8]}.parquet"


def _spread(clip_id: str) -> str:
    return hashlib.sha256(clip_id.encode()).hexdigest()[:2]

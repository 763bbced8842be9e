"""Requests, records and plans for tests, with every field filled in."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from batch_gen.chunks import PlanRow
from batch_gen.layout import clip_key
from batch_gen.records import FileEntry, Record
from batch_gen.request import RenderRequest
from batch_gen.storage.base import sha256_of

BASE = RenderRequest(
    clip_id="fox",
    row_id="fox",
    sample=0,
    prompt="a fox in the snow",
    negative_prompt="",
    seed=7,
    width=64,
    height=48,
    num_frames=5,
    fps=Fraction(16),
    steps=4,
    guidance_high=4.0,
    guidance_low=3.0,
    flow_shift=12.0,
)


def make_request(clip_id: str = "fox", **changes: Any) -> RenderRequest:
    """A small legal request."""
    return replace(BASE, clip_id=clip_id, row_id=clip_id, **changes)


def make_rows(count: int, group_size: int = 1000, **changes: Any) -> list[PlanRow]:
    """`count` rows of one file, in row groups of `group_size`."""
    return [PlanRow(make_request(f"clip-{n:05d}", **changes), "m.parquet", n // group_size, n) for n in range(count)]


def make_record(request: RenderRequest, body: bytes, **changes: Any) -> Record:
    """The record of a request whose file has this body and whose frames hash is made of it."""
    fields: dict[str, Any] = {
        "clip_id": request.clip_id,
        "row_id": request.row_id,
        "sample": request.sample,
        "request": request.to_json(),
        "request_digest": request.digest,
        "fingerprint": "fp",
        "numerics_key": "cpu",
        "frames_hash": f"frames-{sha256_of(body)[:8]}",
        "file": FileEntry(key=clip_key(request.clip_id, ".mp4"), bytes=len(body), sha256=sha256_of(body)),
        "worker": "w1",
    }
    return Record(**{**fields, **changes})


class FakeClock:
    """A clock that moves when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The moment."""
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

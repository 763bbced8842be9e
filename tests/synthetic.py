"""Runs that never rendered: whole output roots written through the product's own tables, for reports and benches."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from batch_gen import metrics
from batch_gen.chunks import PlanRow
from batch_gen.donelog import DoneChunk, DoneLog
from batch_gen.encode import VideoSpec
from batch_gen.layout import clip_key
from batch_gen.plan import PlanOptions, plan_run
from batch_gen.records import Verdict
from batch_gen.request import RenderRequest
from batch_gen.runfile import new_run, open_run
from batch_gen.storage.base import Store, StoreOptions, open_store
from batch_gen.storage.folder import FolderStore
from models.pocket.draw import View, draw, sample_scene
from models.pocket.grammar import captions, parse
from tests.clips import write_clip
from tests.making import BASE

START = datetime(2026, 3, 14, 20, 0, tzinfo=UTC)
CAPTIONS = [captions()[number * 101 % 504] for number in range(36)]
SIZES = ((128, 128), (176, 112))
FAULTS = (
    ("oom", "clip", "the decoder needs 2.1 GiB and 1.3 GiB were free; use a smaller size or --decode tiled"),
    ("nonfinite", "clip", "the final latents hold NaN or Inf"),
    ("flat", "clip", "every frame has one colour (7, 7, 7)"),
    ("hang", "device", "no sign of life for 900 s at step 17"),
)
STAGES = {"text": 0.02, "denoise": 1.0, "decode": 0.16, "encode": 0.18, "verify": 0.03, "upload": 0.02}


ODD_ID = """it's-"quoted"-<i>&-100%"""
"""An id that no manifest may have, but that a page must survive."""


def caption_of(prompt_number: int):
    """The caption that prompt number so-and-so is made of."""
    return CAPTIONS[prompt_number % len(CAPTIONS)]


def make_requests(num_clips: int, seed: int = 0) -> list[RenderRequest]:
    """Requests of a campaign: 4 clips a prompt, a sweep over guidance, tags as a studio would use them."""
    rng = random.Random(seed)
    requests = []
    for number in range(num_clips):
        prompt_number, take = divmod(number, 4)
        again = prompt_number // len(CAPTIONS)
        width, height = SIZES[prompt_number % 3 == 0]
        name = f"shot-{prompt_number:04d}-{'abcd'[take]}"
        extra = {
            "tag": ("hero", "background", "insert")[prompt_number % 3],
            "scene": f"sc{prompt_number % 12:02d}",
            "client": ("north", "harbor")[prompt_number % 2],
        }
        fields = {
            "clip_id": name, "row_id": name, "prompt": caption_of(prompt_number).prompt + (f", take {again + 1}" if again else ""),
            "seed": rng.randrange(2**32), "width": width, "height": height, "num_frames": 17, "fps": Fraction(8), "steps": (16, 24)[prompt_number % 2],
            "guidance_high": (2.0, 3.0, 4.0, 6.0)[take], "flow_shift": 5.0, "preset": "pocket", "extra": extra,
        }  # fmt: skip
        requests.append(replace(BASE, **fields))
    return requests


def draw_media(folder: Path, requests: list[RenderRequest]) -> dict[tuple[str, int, int], Path]:
    """One small video for every caption and size that the requests need, by prompt, width and height."""
    wanted = {(request.prompt.split(",")[0], request.width, request.height) for request in requests}
    media = {}
    for place, (prompt, width, height) in enumerate(sorted(wanted)):
        scene = sample_scene(parse(prompt), np.random.default_rng(place))
        view = View(canvas=height, left=(height - width) // 2, width=width, height=height)
        frames = (draw(scene, view) * 255).round().astype(np.uint8)
        path = folder / f"{place}.mp4"
        write_clip(path, frames, VideoSpec(width, height, Fraction(8), 17))
        media[(prompt, width, height)] = path
    return media


class SyntheticRun:
    """An output root with a plan, parts and a done log, as some workers would have left it.

    Args:
        store: Where.
        requests: All clips.
        failures: clip_id -> (kind, class, message) of those that were set aside.
        num_pending: Chunks at the end that nobody has begun.
        worker_name: What all workers' names begin with.
        media: (prompt, width, height) -> a video file; without one, clips have rows and no files.
    """

    def __init__(
        self,
        store: Store,
        requests: list[RenderRequest],
        *,
        failures: dict[str, tuple[str, str, str]] | None = None,
        num_workers: int = 4,
        num_pending: int = 0,
        media: dict[tuple[str, int, int], Path] | None = None,
        worker_name: str = "render",
    ) -> None:
        self.store, self.num_workers, self.media = store, num_workers, media or {}
        self.failures = failures or {}
        self.worker_name = worker_name
        self.rng = random.Random(7)
        settings = {
            "checkpoint": "9f86d081884c7d65",
            "preset": "pocket",
            "dtype": "float32",
            "solver": "unipc",
            "decode": "exact",
            "codec": "h264",
            "crf": 16,
            "run_seed": 0,
        }
        profile = {"profile": "cpu", "device": "cpu", "mesh": {"tp": 1, "cp": 1, "cfg": 1}, "replicas": 1}
        self.run = open_run(
            store,
            new_run(
                settings,
                profile=profile,
                versions={"batch-gen": "0.1.0", "torch": "2.13.0"},
                created=START.isoformat().replace("+00:00", "Z"),
            ),
        )
        rows = [PlanRow(request, "campaign.parquet", 0, number) for number, request in enumerate(requests)]
        self.plan = plan_run(store, lambda: iter(rows), PlanOptions(facts={"worker": "render-0"}))
        chunks = self.plan.chunks
        self.chunks = chunks[: len(chunks) - num_pending] if num_pending else chunks

    def write(self) -> None:
        """Write every chunk's parts and its entry in the done log."""
        clocks = [START + timedelta(seconds=40 + 25 * worker) for worker in range(self.num_workers)]
        log = DoneLog(self.store)
        for chunk in self.chunks:
            worker = clocks.index(min(clocks))
            begun = clocks[worker]
            name = f"{self.worker_name}-{worker}-{worker * 7919 % 4096 + 4096:04x}"
            good, bad, verdicts, wasted_s = [], [], {}, 0.0
            for request in self.plan.requests(chunk):
                row, seconds = self._row(request, name, chunk.id, clocks[worker])
                clocks[worker] += timedelta(seconds=seconds)
                failure = self.failures.get(request.clip_id)
                (bad if failure else good).append(row)
                wasted_s += seconds if failure else 0.0
                status = (
                    {"status": "quarantined", "kind": failure[0], "retry_class": failure[1], "message": failure[2]}
                    if failure
                    else {"status": "committed"}
                )
                verdicts[request.clip_id] = Verdict(**status, attempts=3 if failure else 1)
            clocks[worker] += timedelta(seconds=self.rng.uniform(1, 12))
            metrics.write_parts(self.store, chunk.id, 1, good, bad)
            counts = {
                "started": float(len(good) + 3 * len(bad)),
                "failed": 3.0 * len(bad),
                "own_clips": float(len(verdicts)),
                "seconds": (clocks[worker] - begun).total_seconds(),
                "failed_ms": round(wasted_s * 900),
                "cold_start_ms": 38000 if begun < START + timedelta(seconds=200) else 0,
            }
            log.add(
                DoneChunk(
                    chunk=chunk.id,
                    worker=name,
                    clips=verdicts,
                    counts=counts,
                    finished=clocks[worker].isoformat().replace("+00:00", "Z"),
                )
            )

    def _row(self, request: RenderRequest, worker: str, chunk: str, now: datetime) -> tuple[dict[str, Any], float]:
        scale = request.cost / 1e9 * self.rng.uniform(0.95, 1.08) * (1.6 if self.rng.random() < 0.01 else 1.0) * 1200
        body = request.to_json()
        names = (
            "clip_id",
            "row_id",
            "sample",
            "prompt",
            "seed",
            "width",
            "height",
            "num_frames",
            "fps",
            "steps",
            "guidance_high",
            "guidance_low",
            "flow_shift",
            "preset",
        )
        row = {name: body[name] for name in names} | {
            "extra": dict(request.extra),
            "request_digest": request.digest,
            "worker": worker,
            "chunk": chunk,
            "epoch": 1,
        }
        stages = {f"{name}_s": round(share * scale * self.rng.uniform(0.9, 1.1), 4) for name, share in STAGES.items()}
        seconds = stages["text_s"] + stages["denoise_s"] + stages["decode_s"]
        if failure := self.failures.get(request.clip_id):
            return row | {
                "status": "quarantined",
                "kind": failure[0],
                "class": failure[1],
                "message": f"clip {request.clip_id}: {failure[2]}",
                "attempt": 3,
                "failed_at": now + timedelta(seconds=seconds),
            }, seconds
        key = clip_key(request.clip_id, ".mp4")
        row |= stages | {
            "status": "committed",
            "key": key,
            "url": f"{self.store.url}/{key}",
            "bytes": int(9e4 * self.rng.uniform(0.5, 1.8)),
            "sha256": request.digest,
            "frames_hash": request.digest,
            "duration_s": float(request.duration_s),
        }
        row |= {
            "total_s": round(seconds + stages["encode_s"] * 0.3, 4),
            "step_p50_s": round(stages["denoise_s"] / request.steps, 4),
            "step_p95_s": round(stages["denoise_s"] / request.steps * 1.1, 4),
            "attempt": 1,
            "replica": 0,
            "tokens": len(request.prompt.split()) + 4,
        }
        row |= {
            "engine_peak_bytes": int(1.4e9),
            "flags": ["frozen"] if self.rng.random() < 0.02 else [],
            "fingerprint": self.run.fingerprint,
            "numerics_key": "5e1c0de5",
            "started_at": now,
            "finished_at": now + timedelta(seconds=seconds * 1.05),
        }
        source = self.media.get((request.prompt.split(",")[0], request.width, request.height))
        if source is not None:
            self._link(source, key)
            row["bytes"] = source.stat().st_size
        return row, seconds

    def _link(self, source: Path, key: str) -> None:
        """Commit a file by a hard link: thousands of clips in a second."""
        if not isinstance(self.store, FolderStore):
            self.store.put(key, source)
            return
        path = self.store.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(source)


def failures_of(requests: list[RenderRequest], every: int = 47) -> dict[str, tuple[str, str, str]]:
    """Some clips that failed, most of them for the first reason."""
    failed = requests[3::every]
    return {request.clip_id: FAULTS[(0, 0, 1, 0, 2, 0, 3)[place % 7]] for place, request in enumerate(failed)}


def synthetic_run(
    folder: Path, num_clips: int, *, store: Store | None = None, odd: bool = False, **options: Any
) -> Store:
    """A run of so many clips below a folder, or in a store; its videos are links to a few files beside it."""
    store = store or open_store(str(folder), StoreOptions(durable=False))
    requests = make_requests(num_clips)
    if odd:
        requests[5] = replace(requests[5], clip_id=ODD_ID, row_id=ODD_ID)
    media = folder.parent / f"{folder.name}-media"
    media.mkdir(parents=True, exist_ok=True)
    files = draw_media(media, requests)
    SyntheticRun(store, requests, failures=failures_of(requests), media=files, **options).write()
    return store

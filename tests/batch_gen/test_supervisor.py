"""The supervisor's and the job's small promises that no end-to-end run reaches by itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

from batch_gen import job
from batch_gen.drain import Drain
from batch_gen.encode import EncodeSettings
from batch_gen.errors import StoreError
from batch_gen.layout import RUN_KEY
from batch_gen.outcome import Attempt, Clock
from batch_gen.prepare import prepare
from batch_gen.slabs import ByteBudget, SlabQueue
from batch_gen.storage.memory import MemoryStore
from batch_gen.supervisor import Supervisor
from batch_gen.tables import write_manifest
from batch_gen.worker import join_run
from tests.making import make_record, make_request


def test_a_clip_that_was_taken_over_is_told_too(monkeypatch):
    """--on-clip hears of every committed clip: also of one whose file an earlier attempt stored before it died."""
    request = make_request("fox")
    record = make_record(request, b"body", metrics={"flags": []})
    monkeypatch.setattr("batch_gen.supervisor.adopt", lambda _work, _shop: record)
    told = []
    shop = MagicMock(store=MemoryStore())
    supervisor = Supervisor(MagicMock(), MagicMock(), shop, Drain(1.0), MagicMock(), MagicMock(), tell=told.append)
    assert supervisor._adopt(SimpleNamespace(begun_before=True, clip_id="fox", request=request))
    assert [row["clip_id"] for row in told] == ["fox"]


def test_latents_that_cannot_be_removed_do_not_fail_a_committed_clip(monkeypatch, tmp_path):
    """After the commit the clip stands, whatever becomes of its kept latents."""

    class Stubborn(MemoryStore):
        """Deletes nothing."""

        def delete(self, key):
            raise StoreError(f"{key}: not now")

    request = make_request("fox")
    monkeypatch.setattr(job, "encode_clip", MagicMock())
    monkeypatch.setattr(job, "verify_file", MagicMock())
    monkeypatch.setattr(job, "make_record", MagicMock())
    monkeypatch.setattr(job, "commit_clip", lambda *_: SimpleNamespace(outcome="committed", record=None))
    monkeypatch.setattr(job, "metrics_row", lambda *_: {"clip_id": "fox"})
    with ThreadPoolExecutor(1) as pool:
        shop = job.Workshop(
            Stubborn(), MagicMock(), EncodeSettings(), tmp_path, pool, ByteBudget(1), MagicMock(), keep_latents=True
        )
        done = job.finish_clip(Attempt(request, "0-00000", 1, 1), SlabQueue(shop.budget), shop, Clock(), {})
    assert done.row["status"] == "committed"


def test_run_json_keeps_no_webhook(tmp_path):
    """A webhook's address may hold a token; everybody who reads the output root could read it."""
    row = {"prompt": "a fox", "num_frames": 9, "width": 64, "height": 48, "steps": 2}
    write_manifest(tmp_path / "m.parquet", [row])
    store, hook = MemoryStore(), "https://hooks.example/s3cret"
    prepared = prepare([str(tmp_path / "m.parquet")], {"model": "fake", "out": str(tmp_path / "out"), "on_clip": hook})
    join_run(store, prepared)
    text = store.get(RUN_KEY).body.decode()
    assert json.loads(text)["profile"]["out"]
    assert "s3cret" not in text

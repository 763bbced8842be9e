"""The supervisor's and the job's small promises that no end-to-end run reaches by itself."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

from batch_gen import job
from batch_gen.drain import Drain
from batch_gen.encode import EncodeSettings
from batch_gen.engine import CHECK
from batch_gen.errors import StoreError
from batch_gen.fake_engine import FakeEngine
from batch_gen.layout import RUN_KEY
from batch_gen.metrics import Meter
from batch_gen.outcome import Attempt, Clock
from batch_gen.prepare import prepare
from batch_gen.slabs import ByteBudget, SlabQueue
from batch_gen.storage.memory import MemoryStore
from batch_gen.supervisor import Supervisor
from batch_gen.tables import write_manifest
from batch_gen.work import Assignment
from batch_gen.worker import engine_starter, join_run
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


def supervisor_of(drain=None, meter=None):
    """A supervisor whose surroundings take everything."""
    shop = MagicMock(keep_latents=False)
    return Supervisor(MagicMock(), MagicMock(), shop, drain or Drain(1.0), meter or MagicMock(), MagicMock())


def test_a_wait_for_the_encoder_is_no_rendering():
    """While all slots are taken the engine stands idle: neither the clip's pace nor the share `render` begin."""
    meter = Meter(1)
    supervisor = supervisor_of(meter=meter)
    replica = supervisor.replicas[0]
    replica.engine = MagicMock(spec=FakeEngine)
    supervisor.shop.pool.submit.return_value = Future()
    supervisor.shop.images.read.return_value = None
    replica.engine.text.side_effect = RuntimeError("the engine was asked")
    for _ in range(supervisor.unfinished_per_replica):
        supervisor._slots.acquire()
    seen = []

    def free():
        seen.append((replica.attempt, meter.summary().render_s))
        supervisor._slots.release()

    waited_s = 0.5
    threading.Timer(waited_s, free).start()
    began = time.monotonic()
    work = Assignment(make_request("fox"), "0-00000", 1, 1)
    failure = None
    try:
        supervisor._render(replica, work)
    except RuntimeError as error:
        failure = error
    total_s = time.monotonic() - began
    assert str(failure) == "the engine was asked"
    assert seen == [(None, 0.0)]
    assert replica.began_s >= began + waited_s * 0.9
    assert meter.summary().failed_s <= total_s - waited_s * 0.9


def drained_at(stage, step, total, supervisor=None):
    """Seconds that the clip in hand still needs when its stage has done `step` of `total` in 10 s."""
    supervisor = supervisor or supervisor_of()
    replica = supervisor.replicas[0]
    attempt = Attempt(make_request("fox"), "0-00000", 1, 1)
    now = time.monotonic()
    replica.attempt, replica.began_s, replica.heard_s = attempt, now - 1000.0, now - 10.0
    supervisor.heard(attempt, stage, step, total)
    return supervisor._rest_s(replica)


def test_a_drain_knows_the_stage_of_a_clip():
    """A decode is almost over, also of latents that were kept or made with another clip's; steps tell the rest else."""
    assert drained_at("decode", 0, 0) == 0.0
    assert drained_at("text", 0, 40) == float("inf")
    assert 90.0 <= drained_at("denoise", 1, 10) <= 91.0  # the stage's own pace: nothing before it counts
    assert 30.0 <= drained_at(CHECK, 20, 80) <= 31.0
    assert 30.0 <= drained_at("denoise", 10, 40) <= 31.0


def test_a_clip_is_in_decode_before_its_first_slab(tmp_path):
    """The stage is told before the decode answers: a drain would otherwise end it for having done no step."""
    heard, at_decode = [], []

    class Watched(FakeEngine):
        """Notes what was told before it decodes."""

        def decode(self, request, latents):
            at_decode.extend(heard)
            return super().decode(request, latents)

    request = make_request("fox")
    with ThreadPoolExecutor(1) as pool:
        note = (lambda _attempt, stage, *_: heard.append(stage),)
        shop = job.Workshop(MemoryStore(), MagicMock(), EncodeSettings(), tmp_path, pool, ByteBudget(1 << 30), *note)
        job.make_clip(Watched(), Attempt(request, "0-00000", 1, 1), shop).exception()
    assert at_decode == ["text", *["denoise"] * request.steps, "decode"]


def test_the_lease_lives_while_a_clip_compiles(tmp_path):
    """Engines of a run that may compile beat the heart of their clips' leases at each wait within the compiler's time."""
    write_manifest(
        tmp_path / "m.parquet", [{"prompt": "a fox", "num_frames": 9, "width": 64, "height": 48, "steps": 2}]
    )
    (tmp_path / "fake.json").write_text('{"step_s": 1.0}')
    given = {"model": f"fake:{tmp_path / 'fake.json'}", "out": str(tmp_path / "out"), "compile": "block"}
    prepared = prepare([str(tmp_path / "m.parquet")], given)
    beats = []
    start = engine_starter(prepared, tmp_path, (lambda: None, lambda: beats.append("alive")), None)
    for count in (1, 0):  # what the first engine has compiled the second does not wait for
        engine = start(0)
        beats.clear()
        list(engine.denoise(make_request("fox", steps=2), ""))
        engine.close()
        assert (len(beats) > 0) == bool(count)

"""While a clip is decoded the next one is claimed and its attempt written down."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

from batch_gen.drain import Drain
from batch_gen.encode import EncodeSettings
from batch_gen.engine import Done
from batch_gen.fake_engine import FakeEngine
from batch_gen.job import Workshop
from batch_gen.outcome import RunFacts
from batch_gen.slabs import ByteBudget
from batch_gen.storage.memory import MemoryStore
from batch_gen.supervisor import Supervisor
from batch_gen.work import Assignment
from tests.making import make_request


class Source:
    """Hands out clips in order and says which were started."""

    def __init__(self, clips):
        self.waiting, self.started_now = list(clips), {clip: threading.Event() for clip in clips}
        self.log = []

    def next(self, bucket=None):
        del bucket
        if not self.waiting:
            return None
        clip = self.waiting.pop(0)
        request = make_request(clip, num_frames=5, width=64, height=48, steps=1)
        return Assignment(request, "0-00000", 1, 1)

    def started(self, clip):
        self.log.append(f"started {clip}")
        self.started_now[clip].set()

    def committed(self, clip, outcome="committed"):
        self.log.append(f"{outcome} {clip}")

    def abandoned(self, clip):
        self.log.append(f"abandoned {clip}")

    def num_unfinished(self):
        return 1

    def heartbeat(self):
        pass

    def count(self, name, amount):
        pass


class Patient(FakeEngine):
    """Its decode of a clip ends when the next clip was started."""

    def __init__(self, source, after):
        super().__init__()
        self.source, self.after = source, after

    def decode(self, request, latents):
        for event in super().decode(request, latents):
            if isinstance(event, Done) and request.clip_id in self.after:
                assert self.source.started_now[self.after[request.clip_id]].wait(30)
            yield event


def test_the_next_clip_is_started_during_the_decode(tmp_path):
    """An engine that will not end a decode before the next clip is started gets through: all three are committed."""
    source = Source(["a", "b", "c"])
    engine = Patient(source, {"a": "b", "b": "c"})
    facts = RunFacts("f" * 64, "n" * 16, "fake", "w", {}, {"mode": "exact"})
    with ThreadPoolExecutor(2) as pool:
        shop = Workshop(MemoryStore(), facts, EncodeSettings(), tmp_path, pool, ByteBudget(1 << 30), lambda *_: None)
        supervisor = Supervisor(source, lambda _: engine, shop, Drain(1.0), MagicMock(), MagicMock())
        shop.progress = supervisor.heard
        supervisor.run()
    assert [line for line in source.log if line.startswith("started")] == ["started a", "started b", "started c"]
    assert sorted(line for line in source.log if line.startswith("committed")) == [
        "committed a",
        "committed b",
        "committed c",
    ]


def test_what_was_claimed_ahead_is_given_back_when_the_engine_is_gone(tmp_path):
    """A clip that was claimed during a decode is abandoned when there is no engine for it any more."""
    source = Source(["a", "b"])
    supervisor = Supervisor(source, MagicMock(), MagicMock(), Drain(1.0), MagicMock(), MagicMock())
    replica = supervisor.replicas[0]
    replica.ahead = supervisor._scouts.submit(supervisor._look_ahead, "any")
    replica.engine, source.waiting = None, []
    supervisor.start_engine = lambda _: SimpleNamespace(close=lambda: None)
    source.num_unfinished = lambda: 0
    supervisor._claim_and_render(replica)
    assert source.log == ["started a", "abandoned a"]

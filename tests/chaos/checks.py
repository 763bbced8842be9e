"""What must be true of a finished run, whatever happened on the way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from batch_gen.commit import load_record
from batch_gen.donelog import DoneLog
from batch_gen.plan import load_plan
from batch_gen.storage.base import sha256_of
from tests.chaos.worker import body_of


def check_finished(store, clip_ids, quarantined=()) -> None:
    """Every clip has one right file and one record; every chunk is finished; nobody innocent is set aside."""
    plan, log = load_plan(store), DoneLog(store)
    log.refresh()
    assert [chunk.id for chunk in plan.chunks if chunk.id not in log] == []
    tally = log.tally()
    assert set(tally.quarantined) == set(quarantined)
    good = sorted(set(clip_ids) - set(quarantined))
    assert tally.num_committed == len(good)
    keys = sorted(entry.key for entry in store.list("clips/"))
    names = Counter(Path(key).stem for key in keys)
    assert names == Counter({clip_id: 2 for clip_id in good})
    for clip_id in good:
        record = load_record(store, clip_id)
        body = store.get(record.file.key).body
        assert body == body_of(clip_id)
        assert record.file.sha256 == sha256_of(body)
        assert record.request["clip_id"] == clip_id


def events(log: Path) -> Counter[tuple[str, str]]:
    """(event, clip_id) -> how often."""
    return Counter(tuple(line.split()[:2]) for line in log.read_text().splitlines())


def num_double_renders(log: Path) -> int:
    """Renders beyond the first of each clip."""
    return sum(count - 1 for (event, _), count in events(log).items() if event == "start")

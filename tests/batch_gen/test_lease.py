"""Leases: one owner, stolen only from the dead, never by a clock that differs."""

from __future__ import annotations

import pytest

from batch_gen.errors import StoreError
from batch_gen.layout import lease_key
from batch_gen.lease import (
    Attempts,
    Lease,
    LeaseBody,
    LostLease,
    Owner,
    Seen,
    Watch,
    claim,
    judge_death,
    read_lease,
    take_over,
)
from batch_gen.storage.memory import MemoryStore
from tests.making import FakeClock


def owner(name: str, clock: FakeClock | None = None, **times) -> Owner:
    return Owner(f"id-{name}", name, clock=clock or FakeClock(), **times)


def same(body: LeaseBody) -> LeaseBody:
    return body


def body_with(in_flight, attempts, **changes) -> LeaseBody:
    fields = {"chunk": "0-00000", "owner": "x", "epoch": 1, "sequence": 3, "ttl_s": 180.0, "grace_s": 30.0}
    return LeaseBody(**{**fields, "in_flight": in_flight, "attempts": attempts, **changes})


class LosesAnswers(MemoryStore):
    """Does what it is told, and fails to say so, as often as `lost` says."""

    lost = 0

    def replace(self, key, body, etag):
        new = super().replace(key, body, etag)
        if self.lost > 0:
            self.lost -= 1
            raise StoreError("no answer")
        return new


def test_first_claim_wins_and_others_see_it():
    """One worker owns a chunk; the next one gets to see whose it is."""
    store = MemoryStore()
    mine = claim(store, owner("a"), "0-00000")
    seen = claim(store, owner("b"), "0-00000")
    assert isinstance(mine, Lease)
    assert mine.is_held
    assert isinstance(seen, Seen)
    assert (seen.body.worker, seen.body.epoch) == ("a", 1)


def test_every_version_is_different():
    """No two bodies are equal, so an etag made of content never comes back."""
    store = MemoryStore()
    lease = claim(store, owner("a"), "0-00000")
    bodies = {store.get(lease_key("0-00000")).body}
    for _ in range(5):
        lease.write(same)
        bodies.add(store.get(lease_key("0-00000")).body)
    assert len(bodies) == 6
    assert lease.body.sequence == 5


def test_steal_needs_ttl_and_grace_on_the_observers_clock():
    """A lease is stale only when the same version stood for ttl + grace before our own eyes."""
    store, clock = MemoryStore(), FakeClock()
    claim(store, owner("a"), "0-00000")
    watch = Watch(clock)
    seen = read_lease(store, "0-00000")
    clock.pass_s(10_000)
    assert not watch.is_stale(seen)
    watch.see(seen)
    clock.pass_s(209.9)
    assert not watch.is_stale(seen)
    assert watch.stale_in_s(seen) == pytest.approx(0.1)
    clock.pass_s(0.2)
    assert watch.is_stale(seen)


@pytest.mark.parametrize("offset_s", [-600.0, 0.0, 600.0, 1e9])
def test_clocks_that_differ_mean_nothing(offset_s):
    """An observer whose clock is ten minutes off neither steals early nor later than one whose is right."""
    store, owners_clock, clock = MemoryStore(), FakeClock(5e5), FakeClock(5e5 + offset_s)
    lease = claim(store, owner("a", owners_clock), "0-00000")
    watch = Watch(clock)
    for _ in range(20):
        seen = read_lease(store, "0-00000")
        watch.see(seen)
        assert not watch.is_stale(seen)
        clock.pass_s(60)
        owners_clock.pass_s(60)
        lease.write(same)
    assert watch.is_alive("0-00000")


def test_a_thief_raises_the_epoch_and_the_owner_notices():
    """After a steal the late owner loses at its next write and nothing of it gets through."""
    store = MemoryStore()
    late = claim(store, owner("a"), "0-00000")
    thief = take_over(store, owner("b"), read_lease(store, "0-00000"))
    assert thief.body.epoch == 2
    with pytest.raises(LostLease, match="taken over by b"):
        late.write(same)
    assert not late.is_held
    assert read_lease(store, "0-00000").body.owner == "id-b"


def test_only_one_thief_wins():
    """Two observers that saw the same stale version: the second finds it changed."""
    store = MemoryStore()
    claim(store, owner("a"), "0-00000")
    seen = read_lease(store, "0-00000")
    assert take_over(store, owner("b"), seen) is not None
    assert take_over(store, owner("c"), seen) is None


def test_an_owner_that_cannot_renew_stops_by_itself():
    """Without confirmation for ttl the owner treats its lease as lost, before anybody may steal it."""
    store, clock = MemoryStore(), FakeClock()
    lease = claim(store, owner("a", clock), "0-00000")
    clock.pass_s(179)
    assert lease.is_held
    clock.pass_s(1)
    assert not lease.is_held
    with pytest.raises(LostLease, match="not confirmed for 180 s"):
        lease.write(same)


def test_confirmation_counts_from_before_the_request():
    """A slow answer does not lengthen a lease: the thief's clock started when the write arrived at the latest."""
    clock = FakeClock()

    class Slow(MemoryStore):
        def replace(self, key, body, etag):
            clock.pass_s(100)
            return super().replace(key, body, etag)

    lease = claim(Slow(), owner("a", clock), "0-00000")
    lease.write(same)
    assert lease.age_s == 100


def test_own_write_with_a_lost_answer_is_no_loss():
    """A renewal that arrived although its answer did not is found again, and the next one works."""
    store = LosesAnswers()
    lease = claim(store, owner("a"), "0-00000")
    store.lost = 1
    with pytest.raises(StoreError):
        lease.write(lambda body: body.model_copy(update={"num_committed": 1}))
    lease.write(lambda body: body.model_copy(update={"num_committed": 2}))
    assert lease.is_held
    stands = read_lease(store, "0-00000").body
    assert (stands.num_committed, stands.sequence) == (2, 2)


def test_released_lease_is_free_at_once():
    """A released lease has no owner; the next worker takes it with a higher epoch and the attempts so far."""
    store = MemoryStore()
    lease = claim(store, owner("a"), "0-00000")
    lease.write(lambda body: body.model_copy(update={"owner": None, "attempts": {"fox": Attempts(started=2)}}))
    seen = read_lease(store, "0-00000")
    assert seen.body.owner is None
    assert take_over(store, owner("b"), seen).body.attempts["fox"].started == 2


def test_death_alone_counts():
    """A death with one clip in flight counts against that clip."""
    judged = judge_death(body_with(("fox",), {"fox": Attempts(started=1), "hare": Attempts(started=1)}))
    assert (judged.attempts["fox"].died, judged.attempts["fox"].alone) == (1, True)
    assert judged.attempts["hare"] == Attempts(started=1)


def test_death_in_company_counts_against_nobody():
    """With several clips in flight nothing counts, and each runs alone next time."""
    judged = judge_death(body_with(("fox", "hare"), {"fox": Attempts(started=1), "hare": Attempts(started=2)}))
    assert {c: (a.died, a.alone) for c, a in judged.attempts.items()} == {"fox": (0, True), "hare": (0, True)}


def test_clips_of_other_chunks_are_company():
    """All clips of the worker stand in each lease, so a death with one in another chunk is not one alone."""
    judged = judge_death(body_with(("elsewhere", "fox"), {"fox": Attempts(started=1)}))
    assert (judged.attempts["fox"].died, judged.attempts["fox"].alone) == (0, True)
    assert "elsewhere" not in judged.attempts


def test_release_is_no_death():
    """A worker that released its lease gave its clips up in order: nothing is suspected."""
    body = body_with((), {"fox": Attempts(started=1)}, owner=None)
    assert judge_death(body) == body


def test_foreign_object_under_a_lease_name_is_an_error():
    """Something that is no lease of this version is never overwritten."""
    store = MemoryStore()
    store.create(lease_key("0-00000"), b"{}")
    with pytest.raises(StoreError, match="no lease"):
        claim(store, owner("a"), "0-00000")

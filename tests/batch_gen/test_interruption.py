"""Spot notices, planned ends."""

from http.client import BadStatusLine

import pytest

from batch_gen.drain import Drain
from batch_gen.errors import UsageError
from batch_gen.interruption import SAFETY_S, SpotWatch, drain_at
from tests.imds import StubImds

TWO_MINUTES_BEFORE = 1767225600.0  # 2026-01-01T00:00:00Z


@pytest.fixture
def imds():
    """A metadata service without a notice."""
    stub = StubImds()
    yield stub
    stub.close()


def test_no_notice_is_no_drain(imds):
    """As long as the service answers 404 nothing happens, and one token serves many questions."""
    watch = SpotWatch(imds.endpoint, Drain(25.0))
    assert watch.ask() is None
    assert watch.ask() is None
    assert imds.tokens == 1


def test_a_notice_becomes_a_drain_that_ends_before_the_machine_does(imds):
    """The budget is what the notice leaves, less a margin."""
    imds.interrupt("2026-01-01T00:02:00Z")
    drain = Drain(25.0, now=lambda: 0.0)
    SpotWatch(imds.endpoint, drain, poll_s=0.01, wall=lambda: TWO_MINUTES_BEFORE).start()
    assert drain.wait(30.0)
    assert drain.reason.text == "spot interruption"
    assert drain.reason.deadline_s == pytest.approx(120.0 - SAFETY_S)


@pytest.mark.parametrize("notice", [{"action": "stop"}, {"time": "soon"}, {"time": None}, []])
def test_a_notice_without_a_moment_still_counts(imds, notice):
    """Whatever the notice says, it is a notice: two minutes are assumed."""
    imds.notice = notice
    assert SpotWatch(imds.endpoint, Drain(25.0)).ask() == 120.0


def test_no_service_is_no_error():
    """Where nothing answers the watch goes on in silence."""
    with pytest.raises(OSError, match="refused"):
        SpotWatch("http://127.0.0.1:9", Drain(25.0)).ask()


def test_a_garbled_answer_does_not_end_the_watch(imds, monkeypatch):
    """Something else behind the address may answer anything once; the next notice is still heard."""
    imds.interrupt("2026-01-01T00:02:00Z")
    drain = Drain(25.0)
    watch = SpotWatch(imds.endpoint, drain, poll_s=0.01)
    plain, answers = watch.ask, iter([BadStatusLine("?")])

    def ask():
        for error in answers:
            raise error
        return plain()

    monkeypatch.setattr(watch, "ask", ask)
    watch.start()
    assert drain.wait(30.0)


def test_drain_at():
    """A moment in the past drains at once; the reason names it."""
    drain = Drain(25.0)
    drain_at("2026-01-01T01:00:00+01:00", drain, wall=lambda: TWO_MINUTES_BEFORE)
    assert drain.wait(30.0)
    assert drain.reason.text == "--drain-at 2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(("text", "words"), [("tomorrow", "ISO 8601"), ("2026-01-01T00:00:00", "has no zone")])
def test_wrong_moments(text, words):
    """What is no moment with a zone is refused."""
    with pytest.raises(UsageError, match=words):
        drain_at(text, Drain(25.0))

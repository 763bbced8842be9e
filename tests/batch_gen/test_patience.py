"""What the watchdog learns from calls, and from which it learns nothing."""

from batch_gen.patience import Patience


class Times:
    """A clock that a test moves, and calls of given silences."""

    def __init__(self, first_s=0.0, compiled=None):
        self.now = 0.0
        self.patience = Patience(600.0, 60.0, first_s, set() if compiled is None else compiled, now=lambda: self.now)

    def call(self, kind, *silences, works=True, **how):
        """A whole call; returns how long each answer, and the last message, might have taken."""
        self.patience.begin(kind, **how)
        allowed = []
        for silence in silences:
            allowed.append(self.patience.seconds)
            self.now += silence
            self.patience.heard(works=works)
        self.patience.ended()
        return allowed


def test_a_pace_is_learned_from_work():
    """Until a call has worked the stall time holds; then 20 times its longest silence, from 60 s up to the stall time."""
    times = Times()
    assert times.call("a", 5.0, 7.0) == [600.0, 600.0]
    assert times.call("a", 1.0) == [140.0]
    assert times.call("a", 50.0) == [140.0]
    assert times.call("a", 1.0) == [600.0]
    times.call("b", 0.5)
    assert times.call("b", 0.5) == [60.0]


def test_calls_without_work_teach_nothing():
    """Taps alone, latents made before, cached texts: the next real call still has the stall time, not 60 s."""
    times = Times()
    times.call("denoise", 0.0, works=False)
    assert times.call("denoise", 90.0) == [600.0]
    times = Times(first_s=3600.0)
    times.call("text", 0.1, works=False)
    assert times.call("text", 0.1) == [3600.0]


def test_a_text_that_is_computed_counts_without_a_step():
    """A text call has one answer: where it is known to encode something, its silence is a pace."""
    times = Times()
    times.patience.begin("text", works=True)
    times.now += 4.0
    times.patience.heard(works=False)
    times.patience.ended()
    assert times.call("text", 1.0) == [80.0]


def test_every_answer_of_the_first_whole_call_may_wait_for_a_compiler():
    """Step 0, step 1, the other expert: each may compile. The next call has the stall time, those after it their pace."""
    times = Times(first_s=3600.0)
    assert times.call("a", 2700.0, 2700.0, 2.0, 2700.0) == [3600.0] * 4
    assert times.call("a", 4.0, 2.0) == [600.0, 600.0]
    assert times.call("a", 4.0) == [80.0]
    assert times.call("b", 1.0) == [3600.0]


def test_a_part_of_a_call_does_not_end_a_compilers_patience():
    """After two steps of forty the other expert was not compiled: the whole call still has a compiler's patience."""
    times = Times(first_s=3600.0)
    times.call("a", 2700.0, 2700.0, is_whole=False)
    assert times.call("a", 2.0, 2.0) == [3600.0, 3600.0]
    assert times.call("a", 2.0) == [600.0]


def test_engines_on_one_cache_share_what_is_compiled():
    """An engine that is started anew waits no second hour for graphs that its predecessor has compiled."""
    compiled = set()
    Times(3600.0, compiled).call("a", 2700.0)
    assert Times(3600.0, compiled).call("a", 1.0) == [600.0]


def test_silence_is_counted_from_answer_to_answer():
    """An answer that lay ready while its reader was busy elsewhere is no proof of a quick engine."""
    times = Times()
    times.patience.begin("a")
    for _ in range(3):
        times.now += 10.0  # the engine worked; the reader came late and found the answer there
        times.patience.heard(works=True)
    times.patience.ended()
    assert times.call("a", 1.0) == [200.0]

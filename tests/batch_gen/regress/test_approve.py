"""Approvals: who, why and from which night; created once, several side by side, retired but never changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batch_gen.config import Mesh
from batch_gen.errors import UsageError
from batch_gen.fake_engine import FakeOptions
from batch_gen.regress.approve import Decision, approve, retire_variant, the_night
from batch_gen.regress.baseline import find_baselines, history
from batch_gen.regress.log import lines, story
from batch_gen.regress.results import Approval
from tests.regression import make_setup, render_night, store_of

KIM = Decision("Kim", "first look")
NOISY = FakeOptions(noise=40)


@pytest.fixture
def setup(tmp_path):
    """A suite whose night n0 is approved and whose night n1 has other pixels."""
    setup = make_setup(tmp_path)
    approve(setup.store, render_night(setup, "n0"), [], KIM)
    render_night(setup, "n1", NOISY)
    return setup


def test_an_approval_says_who_why_and_from_where(setup):
    """What later nights are held against carries its author and its night."""
    (approval,) = find_baselines(setup.store, "small", "base", setup.platform.key)
    assert (approval.who, approval.why, approval.night) == ("Kim", "first look", "n0")
    assert approval.when.endswith("Z")
    assert approval.request["prompt"] == setup.requests[0].prompt


def test_several_variants_hold_side_by_side(setup):
    """A night passes when it equals any approved variant, and says which."""
    made = approve(setup.store, the_night(setup.store, "small", "n1"), ["base"], Decision("Ann", "new kernel"))
    assert [one.case for one in made] == ["base"]
    old, new = find_baselines(setup.store, "small", "base", setup.platform.key)
    again, noisy = render_night(setup, "n2"), render_night(setup, "n3", NOISY)
    assert (again.case("base").verdict, again.case("base").baseline) == ("pass", old.variant)
    assert (noisy.case("base").verdict, noisy.case("base").baseline) == ("pass", new.variant)
    assert noisy.case("still").verdict == "fail"


def test_a_variant_of_another_mesh_excuses_nothing(setup):
    """Bits that changed under equal numerics are red, although they are those of an approved variant of another mesh."""
    meshed = replace(setup, settings=setup.settings.model_copy(update={"mesh": Mesh(tp=2, cp=1, cfg=1)}))
    approve(setup.store, render_night(meshed, "n2", NOISY), ["base"], KIM)
    night = render_night(setup, "n3", NOISY)
    gates = {gate.gate: gate.verdict for gate in night.case("base").gates}
    assert gates["frames_hash"] == "fail"
    assert len(find_baselines(setup.store, "small", "base", setup.platform.key)) == 2


def test_approvals_are_written_once(setup):
    """Approving the same variant again changes nothing, whoever does it."""
    night = the_night(setup.store, "small", "n0")
    keys = [listed.key for listed in store_of(setup).list("regress/small/baselines/base/")]
    before = setup.store.get(keys[0]).body
    assert approve(setup.store, night, ["base"], Decision("Eve", "mine")) == []
    assert setup.store.get(keys[0]).body == before


def test_only_what_differs_is_approved(setup):
    """Without --case, a green night has nothing to approve."""
    assert approve(setup.store, render_night(setup, "n2"), [], KIM) == []


def test_a_retired_variant_counts_no_more_and_stays_readable(setup):
    """A mistake is taken back by a second document; the first stays, and cannot be approved again."""
    night = the_night(setup.store, "small", "n0")
    (approval,) = find_baselines(setup.store, "small", "base", setup.platform.key)
    retire_variant(setup.store, night, "base", approval.variant, Decision("Ann", "wrong colours"))
    assert find_baselines(setup.store, "small", "base", setup.platform.key) == ()
    ((kept, note),) = history(setup.store, "small", "base")
    assert kept == approval
    assert (note.who, note.why) == ("Ann", "wrong colours")
    assert render_night(setup, "n2").case("base").verdict == "new"
    with pytest.raises(UsageError, match="was retired"):
        approve(setup.store, night, ["base"], KIM)
    with pytest.raises(UsageError, match="retired before"):
        retire_variant(setup.store, night, "base", approval.variant, KIM)


def test_the_log_tells_the_story_of_a_case(setup):
    """Approvals and nights in order, for people and as JSON."""
    told = story(setup.store, "small", "base")
    assert [entry["verdict"] for entry in told["nights"]] == ["new", "fail"]
    assert "psnr_min" in told["nights"][1]["gates"]
    text = "\n".join(lines(told))
    assert "by Kim: first look" in text
    assert "night      n1 fail: frames_hash" in text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: the_night(store, "small", "n9"), "no night n9; it has n0, n1, n2"),
        (lambda store: the_night(store, "large", None), "no night at all; it has none"),
        (lambda store: approve(store, the_night(store, "small", "n0"), ["fox"], KIM), "night n0 has base, still"),
        (lambda store: approve(store, the_night(store, "small", "n2"), ["base"], KIM), "no clip to approve"),
        (lambda store: story(store, "small", "fox"), "knows no case fox"),
        (
            lambda store: retire_variant(store, the_night(store, "small", "n0"), "base", "x", KIM),
            "has no variant x on",
        ),
        (lambda _: Decision(" ", "why"), "--who"),
    ],
)
def test_mistakes_are_refused_with_what_is_there(setup, call, words):
    """A wrong name, a clip that was never made, or nobody to blame: one clear sentence."""
    render_night(setup, "n2", FakeOptions(faults={"*": "device"}))
    with pytest.raises(UsageError, match=words):
        call(setup.store)


class Timeless:
    """The engine that it wraps, which sees one rate of frames whatever was asked: pixels do not depend on it."""

    def __init__(self, engine, fps):
        self.engine, self.fps = engine, fps

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def denoise(self, request, text, options):
        """As at that rate."""
        return self.engine.denoise(replace(request, fps=self.fps), text, options)

    def decode(self, request, latents):
        """As at that rate."""
        return self.engine.decode(replace(request, fps=self.fps), latents)


def retold(night, **changes):
    """The night with the same pixels, and something else in its fingerprint."""
    return night.model_copy(update={"fingerprint": night.fingerprint.model_copy(update=changes)})


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "e" * 64},
        {"settings": {"dtype": "bfloat16"}},
        {"numerics_key": "0" * 16},
    ],
)
def test_equal_pixels_of_something_else_are_a_variant_of_their_own(setup, change):
    """A checkpoint that was saved again, other settings, other numerics: approved once more, beside the old one."""
    night = retold(the_night(setup.store, "small", "n0"), **change)
    (made,) = approve(setup.store, night, ["base"], KIM)
    old, new = find_baselines(setup.store, "small", "base", setup.platform.key)
    assert (new.variant, new.frames_hash) == (made.variant, old.frames_hash)
    assert new.variant != old.variant
    assert approve(setup.store, night, ["base"], KIM) == []


def test_a_request_that_changed_without_its_pixels_is_approved_and_then_green(setup):
    """Half as many frames a second again show the same frames: new once, approved, exit 0 in the next night."""
    usual = setup.requests[0].fps
    faster = replace(setup, requests=tuple(replace(one, fps=one.fps * 3 / 2) for one in setup.requests))
    night = render_night(faster, "n2", wrap=lambda engine: Timeless(engine, usual))
    assert night.exit_code == 6
    assert night.case("base").frames_hash == the_night(setup.store, "small", "n0").case("base").frames_hash
    assert [one.case for one in approve(setup.store, night, [], KIM)] == ["base", "still"]
    assert render_night(faster, "n3", wrap=lambda engine: Timeless(engine, usual)).exit_code == 0
    assert render_night(setup, "n4").exit_code == 0


def test_a_checkpoint_that_was_saved_again_gets_its_exact_gate_back(setup):
    """Other bytes of the same weights are not comparable by bits until they are approved by name."""
    again = replace(setup, checkpoint=replace(setup.checkpoint, digest="e" * 64))
    night = render_night(again, "n2")
    assert gate_of(night).note == "not comparable: checkpoint"
    approve(setup.store, night, ["base"], KIM)
    assert gate_of(render_night(again, "n3")).verdict == "pass"


def gate_of(night):
    """What the exact gate says of `base`."""
    return next(gate for gate in night.case("base").gates if gate.gate == "frames_hash")


@pytest.fixture
def aged(setup):
    """The setup with its approvals under the names of older versions; returns the name of `base`'s."""
    for listed in list(setup.store.list("regress/small/baselines/")):
        old = Approval.model_validate_json(setup.store.get(listed.key).body)
        name = f"{old.frames_hash[:16]}-{old.fingerprint.numerics_key[:8]}"
        setup.store.delete(listed.key)
        key = f"{listed.key.rpartition('/')[0]}/{name}.json"
        setup.store.create(key, old.model_copy(update={"variant": name}).to_bytes())
    (approval,) = find_baselines(setup.store, "small", "base", setup.platform.key)
    return approval.variant


def test_older_names_of_variants_hold_as_before(setup, aged):
    """A baseline from before names told the request: compared with, not approved twice, retired under its own name."""
    night = render_night(setup, "n2")
    assert (night.case("base").verdict, night.case("base").baseline) == ("pass", aged)
    assert approve(setup.store, night, ["base"], KIM) == []
    retire_variant(setup.store, night, "base", aged, KIM)
    with pytest.raises(UsageError, match=f"{aged} of base was retired"):
        approve(setup.store, night, ["base"], KIM)

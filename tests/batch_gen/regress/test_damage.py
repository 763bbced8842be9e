"""What somebody damaged, copied or left below a regress root: one clear error of one case, and a way that mends it."""

from __future__ import annotations

import json
import logging

import pytest

from batch_gen.errors import CheckFailed, EngineLost, UsageError
from batch_gen.fake_engine import FakeOptions
from batch_gen.regress.approve import Decision, approve, retire_variant, the_night, unapproved
from batch_gen.regress.artifacts import load_arrays, load_frames
from batch_gen.regress.baseline import find_baselines
from batch_gen.regress.log import story
from batch_gen.regress.night import broken_case, check_name
from batch_gen.regress.results import load_night, night_key
from tests.regression import make_setup, render_night, store_of

KIM = Decision("Kim", "looked at every clip")
NOISY = FakeOptions(noise=40)


@pytest.fixture
def setup(tmp_path):
    """A suite of two cases with approved baselines from night n0."""
    setup = make_setup(tmp_path)
    approve(setup.store, render_night(setup, "n0"), [], KIM)
    return setup


@pytest.fixture
def warned():
    """Fields of what regress logs, whatever else listens."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(getattr(record, "fields", {}))
    logger = logging.getLogger("batch_gen.regress")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def baseline_key(setup, case="base"):
    """The one approval of a case."""
    (approval,) = find_baselines(setup.store, "small", case, setup.platform.key)
    return approval.key


def note_of(night, case="base"):
    """What the gate of a clip that could not be judged says."""
    return next(gate.note for gate in night.case(case).gates if gate.gate == "render")


def edited(**changes):
    """Changes a JSON document at dotted keys."""

    def edit(body):
        document = json.loads(body)
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = document
            for name in parents:
                inner = inner[name]
            inner[last] = value
        return json.dumps(document).encode()

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda body: body[:200], "it is no JSON"),
        (lambda _: b"", "it is no JSON"),
        (lambda _: b"\xff\xfe\x00", "it is no JSON"),
        (lambda _: b"[" * 100_000, "it is no JSON"),
        (lambda _: b"[1]", "should be an object"),
        (edited(request={}), "request: no request"),
        (edited(request__prompt=None), "request: no request"),
        (edited(request__width="64"), "request: no request"),
        (edited(request__fps="1/0"), "request: no request"),
        (edited(artifacts__frames=None), "artifacts.frames"),
        (edited(artifacts__frames__shape=[]), "artifacts.frames.shape"),
        (edited(artifacts__frames__shape=[0, 0, 0, 3]), "artifacts.frames.shape"),
        (edited(artifacts__frames__shape=[9, 64, 32, 3]), "artifacts.frames.shape"),
        (edited(artifacts__frames__key="../../../x"), "artifacts.frames.key"),
        (edited(artifacts__arrays__digest="../" * 8), "artifacts.arrays.digest"),
        (edited(frames_hash="0" * 64), "artifacts.frames"),
        (edited(num_frames=True), "num_frames"),
        (edited(when="yesterday"), "when"),
        (edited(case="still"), "belongs to regress/small/baselines/still/"),
        (edited(variant="../../q"), "belongs to"),
        (edited(format=2), "use its batch-gen"),
    ],
)
def test_a_damaged_approval_costs_its_own_case_alone(setup, damage, words):
    """Exit 75: the case names the file and what is wrong, the other case passes, and the night is written."""
    key = baseline_key(setup)
    store_of(setup).put(key, damage(setup.store.get(key).body))
    night = render_night(setup, "n1")
    assert (night.case("base").verdict, night.case("still").verdict, night.exit_code) == ("infra", "pass", 75)
    assert f"{setup.store.url}/{key}" in note_of(night)
    assert words in note_of(night)
    assert load_night(setup.store, "small", "n1") == night


@pytest.mark.parametrize(
    "body", [b"garbage", b"[1]", b"{}", b'{"who": "Kim", "why": 1, "when": "2026-11-30T00:00:00Z"}']
)
def test_a_damaged_retirement_is_told_and_can_be_removed(setup, body):
    """`run`, `log` and `--retire` name the file; without it the approval holds as before."""
    key = baseline_key(setup).replace(".json", ".retired.json")
    store_of(setup).put(key, body)
    night = render_night(setup, "n1")
    assert (night.case("base").verdict, night.case("still").verdict) == ("infra", "pass")
    assert key in note_of(night)
    with pytest.raises(CheckFailed, match="remove it: the approval counts again"):
        story(setup.store, "small", "base")
    with pytest.raises(CheckFailed, match=r"retired\.json is damaged"):
        retire_variant(setup.store, night, "base", "x", KIM)
    setup.store.delete(key)
    assert render_night(setup, "n2").exit_code == 0


def test_the_way_that_the_message_names_works(setup):
    """Remove the damaged approval and approve the case again: the next night is green."""
    key = baseline_key(setup)
    store_of(setup).put(key, b"rust")
    assert "remove it and approve the case again" in note_of(render_night(setup, "n1"))
    setup.store.delete(key)
    assert [one.key for one in approve(setup.store, render_night(setup, "n2"), [], KIM)] == [key]
    assert render_night(setup, "n3").exit_code == 0


def test_a_retirement_outlives_its_approval(setup):
    """Somebody removed the approval alone: the same variant is not approved again in silence."""
    key = baseline_key(setup)
    retire_variant(setup.store, the_night(setup.store, "small", "n0"), "base", key.split("/")[-1][:-5], KIM)
    setup.store.delete(key)
    with pytest.raises(UsageError, match="was retired"):
        approve(setup.store, the_night(setup.store, "small", "n0"), ["base"], KIM)


@pytest.mark.parametrize("kind", ["frames", "arrays"])
@pytest.mark.parametrize("body", [b"rust", b"", None])
def test_a_night_that_renders_the_same_mends_its_objects(setup, kind, body):
    """An object is found by its content: what is truncated or gone is written again when the right bytes are at hand."""
    artifact = getattr(the_night(setup.store, "small", "n0").case("base").artifacts, kind)
    before = setup.store.get(artifact.key).body
    setup.store.delete(artifact.key)
    if body is not None:
        store_of(setup).put(artifact.key, body)
    assert render_night(setup, "n1").exit_code == 0
    (load_frames if kind == "frames" else load_arrays)(setup.store, artifact)
    assert kind == "frames" or setup.store.get(artifact.key).body == before


def test_another_clip_of_the_right_size_is_no_baseline(setup):
    """Frames that decode but are those of another case are replaced too."""
    base, still = (case.artifacts.frames for case in the_night(setup.store, "small", "n0").cases)
    store_of(setup).put(base.key, setup.store.get(still.key).body)
    assert render_night(setup, "n1").exit_code == 0
    load_frames(setup.store, base)


def test_a_damaged_baseline_of_other_pixels_says_how_to_go_on(setup):
    """A night that cannot mend it names the approval to remove; then its own clip can be approved."""
    key = baseline_key(setup)
    store_of(setup).put(the_night(setup.store, "small", "n0").case("base").artifacts.frames.key, b"rust")
    night = render_night(setup, "n1", NOISY)
    assert night.case("base").verdict == "infra"
    assert f"remove {setup.store.url}/{key} and approve the case again" in note_of(night)
    setup.store.delete(key)
    approve(setup.store, night, ["base"], KIM)
    assert render_night(setup, "n2", NOISY).case("base").verdict == "pass"


def test_what_nobody_can_read_is_not_approved(tmp_path):
    """A clip that is damaged by now refuses the whole approval; a new night brings it back."""
    setup = make_setup(tmp_path)
    night = render_night(setup, "n0")
    store_of(setup).put(night.case("still").artifacts.frames.key, b"rust")
    with pytest.raises(CheckFailed, match="the next night that renders the same clip puts it back"):
        approve(setup.store, night, [], KIM)
    assert find_baselines(setup.store, "small", "base", setup.platform.key) == ()
    render_night(setup, "n1")
    assert len(approve(setup.store, night, [], KIM)) == 2


def test_the_loser_of_two_nights_of_one_name_writes_nothing(setup):
    """Who creates the results writes the summaries; the other is told, and the winner's files stay."""
    winner = render_night(setup, "n1")
    names = ("results.json", "summary.md", "junit.xml")
    before = [setup.store.get(night_key("small", "n1", name)).body for name in names]
    with pytest.raises(UsageError, match="another process ran a night of that name"):
        render_night(setup, "n1", NOISY)
    assert [setup.store.get(night_key("small", "n1", name)).body for name in names] == before
    assert load_night(setup.store, "small", "n1") == winner


@pytest.mark.parametrize("body", [b'{"format":1', b"[]", b"{}", b'{"format": 9}'])
def test_a_damaged_night_is_left_out_of_the_history(setup, warned, body):
    """Later nights go on and the log names the file; who asks for that night itself is told."""
    render_night(setup, "n1")
    store_of(setup).put(night_key("small", "n1"), body)
    night = render_night(setup, "n2")
    assert (night.exit_code, night.last_green, night.changed) == (0, None, ("base: new -> pass", "still: new -> pass"))
    assert [fields["night"] for fields in warned] == ["n1"]
    assert f"{setup.store.url}/{night_key('small', 'n1')}" in warned[0]["why"]
    with pytest.raises(CheckFailed, match=r"n1/results\.json"):
        the_night(setup.store, "small", "n1")
    with pytest.raises(UsageError, match="has that night already"):
        check_name(setup, "n1")


def test_a_night_in_the_place_of_another_is_left_out(setup, warned):
    """A copy under another name is not counted twice."""
    store_of(setup).put(night_key("small", "n01"), setup.store.get(night_key("small", "n0")).body)
    assert render_night(setup, "n1").exit_code == 0
    assert "belongs to regress/small/n0/results.json" in warned[0]["why"]


def test_foreign_files_among_the_baselines_are_left_alone(setup, warned):
    """Notes, copies and the litter of file managers cost nothing, and the log names them."""
    folder = baseline_key(setup).rpartition("/")[0]
    for name in ("notes.txt", ".DS_Store", "copy of it.json", "deeper/x-1.json"):
        store_of(setup).put(f"{folder}/{name}", b"hi")
    assert render_night(setup, "n1").exit_code == 0
    assert {fields["file"].removeprefix(f"{setup.store.url}/{folder}/") for fields in warned} == {
        "notes.txt", ".DS_Store", "copy of it.json", "deeper/x-1.json",
    }  # fmt: skip


def test_what_stands_is_said_to_stand(setup):
    """A case that was named and is approved already, a green night, and one that nobody rendered."""
    night = the_night(setup.store, "small", "n0")
    assert unapproved(night, ["base"], approve(setup.store, night, ["base"], KIM)) == [
        "stands     base: its clip of night n0 is approved already; regress log tells by whom"
    ]
    assert unapproved(night, [], []) == ["nothing to approve in night n0: base, still stand approved already"]
    dead = render_night(setup, "n1", FakeOptions(faults={"*": "device"}))
    assert unapproved(dead, [], approve(setup.store, dead, [], KIM)) == [
        "nothing to approve in night n1: no case with a clip is new or red",
        "not judged base, still; the night's results say why",
    ]


def test_the_log_of_a_dead_rank_is_kept_and_named(setup):
    """Its own file goes with the scratch folder, so the case names a copy beside the night's objects."""
    facts = {"case": "base", "request": setup.requests[0].to_json(), "request_digest": setup.requests[0].digest}
    case = broken_case(setup, facts, EngineLost("engine_died", "rank 0 of 1 exited", "Traceback: no such core"))
    assert case.error is not None
    key = case.error.message.partition(f"its log: {setup.store.url}/")[2]
    assert setup.store.get(key).body == b"Traceback: no such core"


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", ""])
def test_names_from_the_command_line_stay_in_their_place(setup, name):
    """A night or a case that would leave the suite's folder is refused like any that is not there."""
    with pytest.raises(UsageError, match="is no name"):
        story(setup.store, "small", name)
    if name:
        with pytest.raises(UsageError, match="no night"):
            the_night(setup.store, "small", name)

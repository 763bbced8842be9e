"""One contract for every engine: FakeEngine in this process and RemoteEngine in another (fake and real pipeline)."""

import os
import signal
import threading
from fractions import Fraction

import numpy as np
import psutil
import pytest

from batch_gen.engine import DenoiseOptions, Done, Slab, Step, Tap, finish, frames_of
from batch_gen.errors import ClipFailed, EngineLost
from batch_gen.fake_engine import FakeEngine, FakeOptions
from batch_gen.launch import EngineSpec, RemoteEngine
from batch_gen.request import RenderRequest


def make_request(clip_id="fox", **changes):
    """A small request; 9 frames of 32x48, 3 steps."""
    values = {
        "clip_id": clip_id, "row_id": clip_id, "sample": 0, "prompt": "a red circle", "negative_prompt": "", "seed": 7,
        "width": 48, "height": 32, "num_frames": 9, "fps": Fraction(8), "steps": 3,
        "guidance_high": 3.0, "guidance_low": 2.0, "flow_shift": 5.0,
    }  # fmt: skip
    return RenderRequest(**(values | changes))


def remote(tmp_path, **options):
    """A fake engine in a process of its own."""
    how = {"on_compile": options.pop("on_compile")} if "on_compile" in options else {}
    times = {name: options.pop(name) for name in ("stall_s", "first_s", "min_stall_s") if name in options}
    return RemoteEngine(EngineSpec("fake", options, str(tmp_path / "ranks"), **({"stall_s": 60.0} | times)), **how)


def pipeline(tmp_path, folder):
    """The real pipeline in a process of its own."""
    return RemoteEngine(EngineSpec("pipeline", {"model": str(folder)}, str(tmp_path / "ranks")))


@pytest.fixture(scope="module", params=["fake", "remote", "pipeline"])
def engine(request, tmp_path_factory):
    """Each engine in turn; one for all tests, as one engine renders many clips."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "fake":
        made = FakeEngine()
    elif request.param == "remote":
        made = remote(folder)
    else:
        made = pipeline(folder, request.getfixturevalue("tiny_checkpoint"))
    yield made
    made.close()


def test_render_yields_steps_then_slabs(engine):
    """A render shows each step from 1, then uint8 frames of the asked size, exactly as many as asked, then Done."""
    events = list(engine.render(make_request()))
    assert [e.index for e in events if isinstance(e, Step)] == [1, 2, 3]
    frames = np.concatenate([e.frames for e in events if isinstance(e, Slab)])
    assert frames.shape == (9, 32, 48, 3)
    assert frames.dtype == np.uint8
    assert isinstance(events[-1], Done)


def test_frames_are_read_only(engine):
    """Slabs cannot be written to."""
    slab = next(e for e in engine.render(make_request()) if isinstance(e, Slab))
    assert not slab.frames.flags.writeable


def test_stages_equal_render(engine):
    """text, denoise and decode one by one give the frames of render."""
    request = make_request()
    text = finish(engine.text([request])).value
    latents = finish(engine.denoise(request, text[0])).value
    assert latents.dtype == np.float32
    assert latents.ndim == 4
    assert np.array_equal(frames_of(engine.decode(request, latents)), frames_of(engine.render(request)))


def test_a_clip_does_not_depend_on_its_neighbours(engine):
    """The same request renders the same frames before and after another one, and another seed renders others."""
    first = frames_of(engine.render(make_request()))
    other = frames_of(engine.render(make_request("bear", seed=8)))
    assert np.array_equal(first, frames_of(engine.render(make_request())))
    assert not np.array_equal(first, other)


def test_a_call_given_up_half_way_leaves_nothing_behind(engine):
    """After a decode whose frames nobody wants any more, the next clip gets its own frames and no others."""
    first = frames_of(engine.render(make_request()))
    given_up = engine.render(make_request("bear", seed=8))
    next(event for event in given_up if isinstance(event, Slab))
    assert np.array_equal(frames_of(engine.render(make_request())), first)


def test_taps_and_stop(engine):
    """Asked-for latents are shown, and `stop` ends after that many steps."""
    request = make_request()
    text = finish(engine.text([request])).value
    events = list(engine.denoise(request, text[0], DenoiseOptions(stop=2, taps=("latents.1",))))
    assert [e.index for e in events if isinstance(e, Step)] == [1, 2]
    assert [e.name for e in events if isinstance(e, Tap)] == ["latents.1"]


def test_text_ids_follow_the_prompt(engine):
    """Equal prompts have equal ids, and the token counts come with them."""
    same, other = make_request(), make_request("b", prompt="a blue square")
    done = finish(engine.text([same, same, other]))
    assert done.value[0] == done.value[1] != done.value[2]
    assert len(done.info["tokens"]) == 3


def test_describe_names_the_engine(engine):
    """An engine says what it is and how it decodes."""
    facts = engine.describe()
    assert facts["engine"] in ("fake", "pipeline")
    assert facts["decode"]["mode"] == "exact"


@pytest.mark.parametrize("made", ["fake", "remote"])
def test_a_failed_clip_leaves_the_engine_usable(made, tmp_path):
    """NaN latents are ClipFailed(nonfinite), and the next clip renders."""
    options = {"faults": {"bad": "nan"}}
    engine = FakeEngine(FakeOptions(**options)) if made == "fake" else remote(tmp_path, **options)
    with pytest.raises(ClipFailed) as failure:
        list(engine.render(make_request("bad")))
    assert failure.value.kind == "nonfinite"
    assert len(frames_of(engine.render(make_request()))) == 9
    engine.close()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("exit", "engine_died", "exited with code 9"),
        ("device", "device", "planted device error"),
        ("error", "engine_died", "RuntimeError: planted error"),
    ],
)
def test_a_dead_rank_is_engine_lost_with_its_cause(tmp_path, fault, kind, words):
    """A rank that exits, raises or reports its device is EngineLost with stage and cause, and no process stays."""
    engine = remote(tmp_path, faults={"*": fault})
    with pytest.raises(EngineLost) as lost:
        list(engine.render(make_request()))
    assert lost.value.kind == kind
    assert words in lost.value.message
    assert fault != "error" or "RuntimeError: planted error" in lost.value.log
    assert_gone(engine.pids)


def test_a_killed_rank_is_named(tmp_path):
    """kill -9 of the rank is EngineLost that names the signal."""
    engine = remote(tmp_path, step_s=0.2)
    events = engine.render(make_request(steps=50))
    next(events)
    os.kill(engine.pids[0], signal.SIGKILL)
    with pytest.raises(EngineLost, match="SIGKILL"):
        list(events)
    assert_gone(engine.pids)


def test_a_silent_rank_is_a_hang(tmp_path):
    """A rank that gives no sign of life for the stall time, from the first step on, is killed; the kind is hang."""
    engine = remote(tmp_path, faults={"*": "hang"}, stall_s=1.0)
    with pytest.raises(EngineLost, match=r"rank 0: .*fake_engine\.py.* in _strike") as lost:
        list(engine.render(make_request()))
    assert lost.value.kind == "hang"
    assert_gone(engine.pids)


def test_a_rank_that_is_silent_for_much_longer_than_before_is_a_hang(tmp_path):
    """Once the pace of a stage is known, many times its longest silence is a hang, long before the stall time."""
    engine = remote(tmp_path, step_s=0.05, stall_s=3000.0, min_stall_s=2.0)
    list(engine.render(make_request()))
    os.kill(engine.pids[0], signal.SIGSTOP)
    with pytest.raises(EngineLost) as lost:
        list(engine.render(make_request()))
    assert lost.value.kind == "hang"
    assert_gone(engine.pids)


def test_a_compiler_may_take_its_time_at_every_answer_of_a_shape(tmp_path):
    """Each step of the first clip of a shape may wait for a compiler, with signs of life; the next has the stall time."""
    beats = []
    slow = remote(tmp_path, step_s=1.0, stall_s=0.5, first_s=60.0, on_compile=lambda: beats.append("alive"))
    steps = [event.index for event in slow.denoise(make_request(), "") if isinstance(event, Step)]
    assert steps == [1, 2, 3]
    assert len(beats) >= 3  # one for each step at least
    beats.clear()
    with pytest.raises(EngineLost, match="no sign of life from the ranks for 0 s"):
        list(slow.denoise(make_request(), ""))
    assert beats == []


def test_a_call_without_a_step_teaches_no_pace(tmp_path):
    """After a call that shows latents and denoises nothing, a step may take as long as before the call."""
    engine = remote(tmp_path, step_s=1.0, stall_s=30.0, min_stall_s=0.2)
    list(engine.denoise(make_request(), "", DenoiseOptions(stop=0, taps=("latents.0",))))
    assert [event.index for event in engine.denoise(make_request(), "") if isinstance(event, Step)] == [1, 2, 3]
    engine.close()


def test_a_text_that_the_ranks_know_teaches_no_pace(tmp_path):
    """Equal texts come from a cache: only a call with a new one shows how long encoding takes."""
    engine = remote(tmp_path, text_s=0.3, stall_s=30.0, min_stall_s=0.1)
    request = make_request()
    finish(engine.text([request]))
    learned = dict(engine._patience._longest)
    assert learned["text"] >= 0.3
    finish(engine.text([request]))
    assert engine._patience._longest == learned
    engine.close()


def test_ranks_that_were_started_end_when_another_cannot_be(tmp_path):
    """Rank 1 cannot be started (its device is not named): the error comes through and rank 0 is no orphan."""
    spec = EngineSpec("fake", {}, str(tmp_path / "ranks"), num_ranks=2, gpus=("0",))
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(IndexError):
        RemoteEngine(spec)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_each_rank_sees_the_device_that_is_its_own(tmp_path):
    """The rank process is started with its one CUDA device visible, which is number 0 to it."""
    engine = RemoteEngine(EngineSpec("fake", {}, str(tmp_path / "ranks"), gpus=("GPU-5",)))
    found = psutil.Process(engine.pids[0]).environ()
    assert (found["CUDA_VISIBLE_DEVICES"], found["LOCAL_RANK"]) == ("GPU-5", "0")
    engine.close()


def test_a_ranks_peak_is_its_own(tmp_path):
    """A supervisor that once held 300 MB starts ranks that report what they hold themselves."""
    held = np.ones(300_000_000, np.uint8)
    engine = remote(tmp_path)
    assert held.all()
    peak = finish(engine.text([make_request()])).info["peak_rss_bytes"]
    assert 10_000_000 < peak < 250_000_000
    engine.close()


def test_a_rank_that_stopped_reading_is_a_hang(tmp_path):
    """Latents that a stopped rank does not take are a hang after the stall time, not a death."""
    engine = remote(tmp_path, stall_s=1.0)
    os.kill(engine.pids[0], signal.SIGSTOP)
    with pytest.raises(EngineLost) as lost:
        list(engine.decode(make_request(), np.zeros((16, 64, 64, 64), np.float32)))
    assert lost.value.kind == "hang"
    assert_gone(engine.pids)


def test_an_engine_killed_from_another_thread_is_lost(tmp_path):
    """A drain kills the engine while its replica waits for a step: the replica gets EngineLost and nothing else."""
    for delay_s in (0.0, 0.1, 0.3):
        engine = remote(tmp_path / str(delay_s), step_s=30.0)
        threading.Timer(delay_s, engine.kill).start()
        with pytest.raises(EngineLost):
            list(engine.render(make_request()))
        assert_gone(engine.pids)


@pytest.mark.parametrize("fault", ["nan-once", "short-once", "flat-once"])
def test_a_fault_that_happens_once(tmp_path, fault):
    """A fake fault with the suffix -once strikes the first time, in the stage that it is of, and the trace tells."""
    options = FakeOptions(faults={"fox": fault}, once_folder=str(tmp_path), trace=str(tmp_path / "trace"))
    good = frames_of(FakeEngine().render(make_request()))
    engine = FakeEngine(options)
    if fault == "nan-once":
        with pytest.raises(ClipFailed):
            list(engine.render(make_request()))
    else:
        assert not np.array_equal(frames_of(engine.render(make_request())), good)
    assert np.array_equal(frames_of(engine.render(make_request())), good)
    begun = [line for line in (tmp_path / "trace").read_text().splitlines() if line.startswith("denoise ")]
    assert begun == ["denoise fox"] * 2


def test_a_checkpoint_that_is_not_there_is_an_error_at_the_start(tmp_path):
    """A pipeline that cannot load says why, at once."""
    with pytest.raises(Exception, match=r"model_index\.json|not exist|missing"):
        pipeline(tmp_path, tmp_path / "nothing")


def assert_gone(pids):
    """No process of the group is left."""
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

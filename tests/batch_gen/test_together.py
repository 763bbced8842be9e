"""Clips that go through one denoise call: who goes with whom, the self-check, and what happens when it fails."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from batch_gen.engine import CHECK, Step
from batch_gen.errors import BatchGenError, ConfigError
from batch_gen.prepare import check_clips_per_step
from batch_gen.together import Ahead
from models.errors import ModelError
from tests.e2e.helpers import run, small_manifest
from tests.making import make_request


def latents_of(request):
    """A function of the request."""
    return np.full((1, 2), request.seed, np.float32)


class Machine:
    """An engine that counts what it is asked; `off` is added to what clips get together."""

    steps = 2

    def __init__(self, off=0.0, fails=None, alike=lambda request: len(request.prompt)):
        self.alone_calls, self.groups, self.off, self.fails = [], [], off, fails
        self.ahead = Ahead(self.alone, self.several, alike)

    def alone(self, request):
        self.alone_calls.append(request.clip_id)
        for index in range(self.steps):
            yield Step(index + 1, self.steps)
        yield latents_of(request)

    def several(self, requests):
        self.groups.append([request.clip_id for request in requests])
        yield Step(1, 1)
        if self.fails:
            raise ModelError(self.fails, "planted")
        for request in requests:
            yield latents_of(request) + np.float32(self.off)

    def made(self, request, *others):
        found = self.ahead.made(request, others)
        return None if found is None else list(found)


def clips(count, **changes):
    return [make_request(f"c{n}", seed=n, **changes) for n in range(count)]


def test_others_are_kept_until_they_come():
    """Two clips go together once; the second one's latents are there without another call, and only once."""
    machine, (one, two) = Machine(), clips(2)
    step, *_, found = machine.made(one, two)
    assert (step, found.tolist()) == (Step(1, 1), [[0.0, 0.0]])
    assert [latents.tolist() for latents in machine.made(two)] == [[[1.0, 1.0]]]
    assert machine.made(two) is None
    assert machine.groups == [["c0", "c1"]]


def test_each_shape_and_number_is_checked_once():
    """The first group of a shape is made alone as well; later ones of the same size are not."""
    machine, made = Machine(), clips(7)
    machine.made(made[0], made[1])
    assert machine.alone_calls == ["c0", "c1"]
    machine.made(made[2], made[3])
    assert machine.alone_calls == ["c0", "c1"]
    machine.made(made[4], made[5], made[6])
    assert machine.alone_calls == ["c0", "c1", "c4", "c5", "c6"]


def test_the_self_check_gives_signs_of_life():
    """Each step of the clips that are made alone is passed on, counted over the group, as no step of the clip itself."""
    machine, (one, two, three) = Machine(), clips(3)
    made = machine.made(one, two, three)
    assert made[1:-1] == [Step(index, 6, CHECK) for index in range(1, 7)]


@pytest.mark.parametrize("change", [{"guidance_high": 9.0}, {"prompt": "a much longer prompt"}, {"steps": 7}])
def test_each_kind_of_batch_is_checked(change):
    """A group of other guidance, text length or steps has other batches: what was proved for one proves nothing for it."""
    machine = Machine()
    machine.made(*clips(2))
    machine.made(*clips(2))
    assert len(machine.alone_calls) == 2
    machine.made(*clips(2, **change))
    assert len(machine.alone_calls) == 4
    machine.made(*clips(2, **change, negative_prompt="blurry"))
    assert len(machine.alone_calls) == 4  # the words themselves shape no batch


def test_other_bits_are_refused_with_the_reason():
    """A clip whose bits change in company ends the run: the message names clip, shape, difference and the way out."""
    machine, (one, two) = Machine(off=1e-6), clips(2)
    with pytest.raises(
        BatchGenError, match=r"2 clips of .* clip c0 alone \(latents differ.*--clips-per-step 1"
    ) as caught:
        machine.made(one, two)
    assert caught.value.exit_code == 2


def test_clips_that_differ_in_more_than_prompt_and_seed_stay_alone():
    """Other sizes, steps or guidance, other text lengths, and clips that must be alone are left out of the group."""
    (one,) = clips(1)
    others = [
        make_request("a", steps=one.steps + 1),
        make_request("b", guidance_high=9.0),
        make_request("c", num_frames=one.num_frames + 4),
        make_request("d", prompt=one.prompt + " and more"),
    ]
    machine = Machine()
    assert machine.made(one, *others) is None
    machine = Machine(alike=lambda _: None)
    assert machine.made(one, *clips(2)[1:]) is None
    assert machine.groups == []


def test_one_bad_clip_does_not_fail_the_other():
    """Latents that are not finite in a group: the first clip is made alone, and so will be the others."""
    machine, (one, two) = Machine(fails="nonfinite"), clips(2)
    assert machine.made(one, two)[-1].tolist() == [[0.0, 0.0]]
    assert machine.alone_calls == ["c0"]
    assert machine.made(two) is None
    with pytest.raises(ModelError, match="planted"):
        Machine(fails="device").made(one, two)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh": SimpleNamespace(num_ranks=2)}, "--mesh"),
        ({"compile": "block"}, "--compile"),
        ({"step_cache": 0.2}, "--step-cache"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(changes, reason):
    """A mesh, compiled graphs and the step cache are refused before anything is started, with the way out."""
    plain = {"clips_per_step": 2, "mesh": SimpleNamespace(num_ranks=1), "compile": "off", "step_cache": None}
    check_clips_per_step(SimpleNamespace(**plain))
    with pytest.raises(ConfigError, match=f"clips-per-step 2 does not go with {reason}.*use --clips-per-step 1"):
        check_clips_per_step(SimpleNamespace(**(plain | changes)))


def test_the_engine_keeps_what_it_made_together(tiny_checkpoint):
    """The rank's engine denoises two clips in one call; both have the bits that a fresh engine gives them alone."""
    from batch_gen.engine import DenoiseOptions, finish
    from batch_gen.ranks import PipelineEngine
    from models.wan.pipeline import WanPipeline

    pipeline = WanPipeline.load(tiny_checkpoint)
    size = {"width": 64, "height": 48, "num_frames": 5, "steps": 2}
    one, two = (make_request(f"c{n}", prompt=f"a fox {n}", seed=n, **size) for n in range(2))
    engine, fresh = PipelineEngine(pipeline), PipelineEngine(pipeline)
    events = list(engine.denoise(one, "", DenoiseOptions(together=(two,))))
    assert [type(event).__name__ for event in events] == ["Step"] * 6 + ["Done"]
    assert [event.stage == CHECK for event in events[:-1]] == [False] * 2 + [True] * 4
    second = list(engine.denoise(two, ""))
    assert len(second) == 1
    for request, made in ((one, events[-1]), (two, second[-1])):
        assert np.array_equal(finish(fresh.denoise(request, "")).value, made.value)


@pytest.mark.parametrize("per_step", ["1", "3"])
def test_a_run_commits_every_clip_once(tmp_path, per_step):
    """Seven clips, one of them bad, in groups of three: six committed, one quarantined, each started as often as alone."""
    manifest = small_manifest(tmp_path / "m.parquet", 7)
    options = tmp_path / "o.json"
    options.write_text('{"faults": {"clip-3": "nan"}}')
    flags = ("--model", f"fake:{options}", "--clips-per-step", per_step, "--max-failures", "9")
    code, body, _ = run(manifest, tmp_path / "out", *flags)
    assert code == 3
    assert (body["num_committed"], body["num_quarantined"]) == (6, 1)

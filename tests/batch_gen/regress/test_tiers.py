"""The three tiers on random weights: diffusers in float32, diffusers in bfloat16, ours."""

import json

import pytest

from batch_gen.errors import ClipFailed, EngineLost, UsageError
from batch_gen.fake_engine import FakeEngine
from batch_gen.ranks import PipelineSpec, build_pipeline_engine
from batch_gen.regress import tiers
from tests.batch_gen.regress.planted import Planting

CLIP = {"width": 48, "height": 32, "num_frames": 5, "steps": 4, "flow_shift": 5.0, "guidance_high": 3.0}
STEPS = ["first step", "last high-noise step", "first low-noise step", "last step"]


class Opener:
    """Engines in this process; `ours` may be another one, and who was opened is remembered."""

    def __init__(self, ours=None):
        self.ours = ours
        self.opened = []

    def __call__(self, leg, spec):
        """Start a leg."""
        self.opened.append(leg)
        if leg == "ours" and self.ours is not None:
            return self.ours
        return build_pipeline_engine(PipelineSpec(**spec.options))[0]


class Refusing(FakeEngine):
    """An engine whose denoising fails."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def denoise(self, request, text, options=None):
        """Fail."""
        raise self.failure
        yield


@pytest.fixture(scope="module")
def bfloat16(tiny_checkpoint, tmp_path_factory):
    """(the step tier in bfloat16, who was opened, the folder of kept references)."""
    keep, opener = tmp_path_factory.mktemp("kept"), Opener()
    answer = tiers.step(str(tiny_checkpoint), CLIP, dtype="bfloat16", keep=str(keep), opener=opener)
    return answer, opener.opened, keep


def test_components_in_float32(tiny_checkpoint):
    """Text encoder, both experts and the decoder agree with diffusers' own on the same inputs, each within its bound."""
    answer = tiers.components(str(tiny_checkpoint), CLIP, opener=Opener())
    assert [row["name"] for row in answer["rows"]] == [
        "text encoder",
        "high-noise expert",
        "low-noise expert",
        "decoder",
    ]
    assert (answer["ok"], answer["verdict"], answer["tier"]) == (True, "pass", "components")
    assert all(row["ours"]["l2"] <= row["bound"] for row in answer["rows"])
    assert set(answer["legs"]) == {"ours", "float32"}
    assert answer["legs"]["float32"]["pipeline"] == "diffusers"


def test_steps_in_bfloat16_err_as_much_as_diffusers(bfloat16):
    """Guided velocities of the four named steps are as far from float32 as diffusers in bfloat16 is."""
    answer, opened, _ = bfloat16
    assert opened == ["float32", "working", "ours"]
    assert [row["name"] for row in answer["rows"]] == [f"guided velocity, {step}" for step in STEPS]
    assert answer["verdict"] == "pass"
    assert all(row["reference"]["l2"] > 1e-3 for row in answer["rows"])
    assert answer["trend"]["kind"] == "stable"
    assert answer["legs"]["ours"]["dtype"] == answer["legs"]["working"]["dtype"] == "bfloat16"


def test_the_answer_is_one_json(bfloat16):
    """The whole answer is plain JSON and holds what was measured, on what, and the clip."""
    answer = json.loads(json.dumps(bfloat16[0], allow_nan=False))
    assert set(answer) == {
        "format", "tier", "ok", "verdict", "error", "model", "model_digest", "reference", "clip", "legs", "rows", "trend",
    }  # fmt: skip
    assert answer["clip"]["steps"] == 4


def test_kept_references_are_not_computed_again_and_a_fault_is_seen(tiny_checkpoint, bfloat16):
    """With the references kept, ours alone is opened; 20 % too much velocity at the last step fails there, as a spike."""
    _, _, keep = bfloat16
    planting = Planting(tiny_checkpoint, dtype="bfloat16")
    planting.pipeline.factor = 1.2
    opener = Opener(planting("3"))
    answer = tiers.step(str(tiny_checkpoint), CLIP, dtype="bfloat16", keep=str(keep), opener=opener)
    assert opener.opened == ["ours"]
    assert (answer["ok"], [row["verdict"] for row in answer["rows"]]) == (False, ["pass", "pass", "pass", "fail"])
    assert (answer["trend"]["kind"], answer["trend"]["step"]) == ("spike", 3)
    assert "rounding does not explain it" in answer["rows"][-1]["why"]


def test_the_whole_clip_in_processes(tiny_checkpoint):
    """The run tier, each leg in a process of its own as on a device, with our own plain pipeline as the reference."""
    answer = tiers.run(str(tiny_checkpoint), CLIP, reference="plain", threads=1)
    assert [row["name"] for row in answer["rows"]] == ["final latents", "frames"]
    assert answer["verdict"] == "pass"
    assert answer["legs"]["float32"]["decode"]["mode"] == "reference"
    assert answer["legs"]["ours"]["decode"]["mode"] == "exact"


def test_latents_that_are_not_finite_fail_the_tier(tiny_checkpoint, bfloat16):
    """A clip that breaks is a failed tier with its error; an engine that is lost is raised: not a matter of accuracy."""
    _, _, keep = bfloat16
    given = {"dtype": "bfloat16", "keep": str(keep)}
    broken = Opener(Refusing(ClipFailed("nonfinite", "latents hold NaN")))
    answer = tiers.step(str(tiny_checkpoint), CLIP, opener=broken, **given)
    assert (answer["ok"], answer["rows"], answer["error"]["kind"]) == (False, [], "nonfinite")
    with pytest.raises(EngineLost):
        tiers.step(str(tiny_checkpoint), CLIP, opener=Opener(Refusing(EngineLost("device", "gone"))), **given)


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(tiny_checkpoint, tiny_variant, tmp_path):
    """A fake model, an unknown tier, reference or field, images without the plain reference, a kept file of another kind."""
    never = Opener()
    for words, call in {
        "no numbers": lambda: tiers.step("fake", opener=never),
        "choose one of": lambda: tiers.tier("whole", str(tiny_checkpoint), opener=never),
        "diffusers or plain": lambda: tiers.step(str(tiny_checkpoint), reference="mine", opener=never),
        "is no field": lambda: tiers.step(str(tiny_checkpoint), {"stepz": 3}, opener=never),
        "use --reference plain": lambda: tiers.step(str(tiny_variant("i2v")), opener=never),
    }.items():
        with pytest.raises(UsageError, match=words):
            call()
    assert never.opened == []


def test_the_default_clip_is_small(tiny_checkpoint):
    """Without a clip: the preset's steps, guidance and shift, at most 256 px and 9 frames, sizes the model can do."""
    _, preset, checkpoint = tiers.resolve_run({"out": "", "model": str(tiny_checkpoint), "preset": "t2v-a14b-720p"})
    request = tiers.clip_of(preset, checkpoint, {"seed": 3})
    assert (request.steps, request.guidance_high, request.flow_shift) == (40, 4.0, 12.0)
    assert (request.width, request.height, request.num_frames, request.seed) == (256, 256, 9, 3)

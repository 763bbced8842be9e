"""I2V-A14B, TI2V-5B and LoRA over a mesh against one process."""

from dataclasses import replace

import pytest
import torch

from models.lora import Adapter
from models.parallel.layout import Degrees
from models.wan.pipeline import PipelineOptions, WanPipeline
from models.wan.step_cache import CacheSettings
from models.wan.tiny import ensure_tiny
from tests.parallel import clips, faults
from tests.parity import lora
from tests.parity.reference import still

pytestmark = pytest.mark.mesh
FULL = Degrees(2, 2, 2)
FIRST = replace(clips.ODD, steps=4, num_frames=9, image=still(1, 112, 80))
CASES = {
    "i2v, first": ("i2v", FIRST),
    "i2v, first and last": ("i2v", replace(FIRST, last_image=still(2, 112, 80))),
    "i2v, one frame": ("i2v", replace(FIRST, num_frames=1)),
    "5b, text": ("ti2v", replace(clips.ODD, width=160, height=96, steps=3)),
    "5b, image": ("ti2v", replace(clips.ODD, width=160, height=96, steps=3, image=still(3, 160, 96))),
    "5b, image, three latent frames": (
        "ti2v",
        replace(clips.ODD, width=96, height=96, num_frames=9, steps=3, image=still(4, 96, 96)),
    ),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A function from variant to folder."""
    cache = tmp_path_factory.mktemp("family")
    return lambda variant: ensure_tiny(cache, variant)


@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "sequence parallel"]
)
@pytest.mark.parametrize("name", CASES)
def test_mesh_equals_one_process(pool, folders, name, sequence):
    """On tp=2, cp=2, cfg=2 velocity and trajectory agree with one process, and all ranks hold the same latents."""
    variant, sampling = CASES[name]
    expected = clips.reference(WanPipeline.load(folders(variant)), sampling)
    options = PipelineOptions(tp_sequence_parallel=sequence)
    ranks = pool.run(clips.render, FULL, folders(variant), options, expected)
    velocity, trajectory = clips.worst(ranks[0], expected)
    assert velocity <= clips.VELOCITY_BOUND
    assert trajectory <= clips.TRAJECTORY_BOUND
    assert all(torch.equal(rank.result, ranks[0].result) for rank in ranks)


def test_a_clip_that_cannot_be_encoded_fails_alike_and_the_next_renders(pool, folders):
    """A last image of a clip of one frame, and an encoder that fails on rank 0 alone: one error on all ranks, no hang."""
    short = replace(CASES["i2v, first and last"][1], num_frames=1)
    good = CASES["i2v, one frame"][1]
    refusals, others = pool.run(clips.refused, Degrees(cfg=2), folders("i2v"), short, good)
    assert refusals == others
    assert refusals[0] == ("input", "num_frames 1: a first and a last image need at least 5 frames")
    assert refusals[1] == ("oom", "rank 0 failed: MemoryError: planted")
    assert refusals[2] == "rendered"


def test_image_tokens_on_the_wrong_rank_are_seen(pool, folders):
    """The rule has teeth: ranks that each take their own first tokens for those of the image break it tenfold."""
    variant, sampling = CASES["5b, image"]
    expected = clips.reference(WanPipeline.load(folders(variant)), sampling)
    [rendered, *_] = pool.run(
        clips.render, Degrees(cp=2), folders(variant), PipelineOptions(), expected, faults.local_image_tokens
    )
    assert clips.worst(rendered, expected)[0] > 10 * clips.VELOCITY_BOUND


def test_lora_on_a_mesh(pool, tiny, tmp_path):
    """Adapters merged into each rank's slices give the clip of adapters merged into whole weights."""
    path = lora.write(tmp_path / "a.safetensors", "original", alpha=8)
    options = PipelineOptions(adapters=(Adapter(str(path), 0.7), Adapter(str(path), -0.2, "low")))
    sampling = replace(clips.ODD, num_frames=9, steps=4)
    expected = clips.reference(WanPipeline.load(tiny, options), sampling)
    ranks = pool.run(clips.render, FULL, tiny, options, expected)
    assert clips.worst(ranks[0], expected)[0] <= clips.VELOCITY_BOUND
    plain = clips.reference(WanPipeline.load(tiny), sampling)
    assert clips.worst(ranks[0], plain)[0] > 0.01


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence parallel"])
def test_step_cache_on_a_mesh(pool, tiny, sequence):
    """With the step cache at work all ranks take the same way, and the clip is that of one process."""
    options = PipelineOptions(step_cache=CacheSettings(0.8, 1, 2), tp_sequence_parallel=sequence)
    sampling = replace(clips.ODD, num_frames=5, steps=8)
    expected = clips.reference(WanPipeline.load(tiny, options), sampling)
    ranks = pool.run(clips.render, FULL, tiny, options, expected)
    assert clips.worst(ranks[0], expected)[1] <= clips.TRAJECTORY_BOUND
    assert all(torch.equal(rank.result, ranks[0].result) for rank in ranks)
    plain = clips.reference(WanPipeline.load(tiny), sampling)
    assert clips.distance(ranks[0].result, plain.latents[sampling.steps]) > 10 * clips.TRAJECTORY_BOUND

"""Step caching: off by default, exact when nothing is skipped, bounded, forgotten after each clip, refused when useless."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from models.errors import ModelError
from models.events import DoneEvent, StepEvent
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline
from models.wan.step_cache import CacheSettings

CLIP = Sampling("a red fox", "blurry", 5, 64, 48, 5, 12, 4.0, 3.0, 5.0)
OTHER = replace(CLIP, prompt="a blue ball", seed=6)


def loaded(folder, *settings):
    """A pipeline with a step cache of these settings, or without one."""
    return WanPipeline.load(folder, PipelineOptions(step_cache=CacheSettings(*settings) if settings else None))


def done(pipeline, clip=CLIP):
    """The last event of a clip."""
    return next(event for event in pipeline.denoise(clip) if isinstance(event, DoneEvent))


def test_it_is_off_by_default(tiny_checkpoint):
    """Without the setting there are no counts, and the options say so."""
    pipeline = loaded(tiny_checkpoint)
    assert done(pipeline).skipped is None
    assert pipeline.describe()["step_cache"] is None


def test_nothing_skipped_is_exact(tiny_checkpoint):
    """A threshold that no step passes gives the clip of no cache, to rounding."""
    plain, cached = done(loaded(tiny_checkpoint)), done(loaded(tiny_checkpoint, 1e-9))
    assert set(cached.skipped.values()) == {0}
    assert (plain.latents - cached.latents).norm() <= 1e-5 * plain.latents.norm()


def test_skips_are_bounded_and_counted(tiny_checkpoint):
    """With a threshold that every step passes, each expert and text computes its warm-up, then one step after each run."""
    pipeline = loaded(tiny_checkpoint, 1e9, 2, 3)
    stages = [event.stage for event in pipeline.denoise(CLIP) if isinstance(event, StepEvent)]
    expected = {}
    for stage in ("high", "low"):
        rest = max(0, stages.count(stage) - 2)
        expected |= {f"{stage}.{slot}": rest - rest // 4 for slot in (0, 1)}
    assert done(pipeline).skipped == expected
    assert sum(expected.values()) > 0
    plain = done(loaded(tiny_checkpoint)).latents
    assert (plain - done(pipeline).latents).norm() > 1e-4 * plain.norm()


def test_a_clip_alone_is_the_clip_after_others(tiny_checkpoint):
    """With the cache at work a clip has the same bits alone, after another clip, and twice in a row."""
    alone = done(loaded(tiny_checkpoint, 0.8, 1, 2))
    assert all(alone.skipped.values())
    pipeline = loaded(tiny_checkpoint, 0.8, 1, 2)
    done(pipeline, OTHER)
    for again in (done(pipeline), done(pipeline)):
        assert torch.equal(again.latents, alone.latents)
        assert again.skipped == alone.skipped


def test_a_clip_that_is_too_short_is_refused(tiny_checkpoint):
    """Fewer steps than the warm-up are an error, not a cache that silently does nothing."""
    with pytest.raises(ModelError, match="steps 4: step caching computes the first 4 in any case") as caught:
        done(loaded(tiny_checkpoint, 0.2), replace(CLIP, steps=4))
    assert caught.value.kind == "input"


def test_a_model_of_one_block_is_refused(tiny_checkpoint, tmp_path):
    """A model without a second block cannot use it and says so at load."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "changed")
    path = folder / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 1}))
    with pytest.raises(ModelError, match="needs two blocks or more") as caught:
        loaded(folder, 0.2)
    assert caught.value.kind == "unsupported"

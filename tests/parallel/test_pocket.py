"""The trained small model on a mesh of eight ranks: what one sees is what one process renders."""

import numpy as np
import pytest

from models.events import DoneEvent
from models.parallel.layout import Degrees
from models.parallel.mesh import Mesh, single
from models.pocket import grammar, judge, spec
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline

pytestmark = [pytest.mark.mesh, pytest.mark.slow]
NUM_PROMPTS = 12


def watch(mesh: Mesh, samplings):
    """The frames of each clip, on rank 0."""
    pipeline = WanPipeline.load(spec.WEIGHTS, PipelineOptions(), mesh)
    clips = []
    for sampling in samplings:
        *_, done = pipeline.denoise(sampling)
        assert isinstance(done, DoneEvent)
        slabs = list(pipeline.decode(done.latents, sampling.num_frames))
        clips.append(np.concatenate(slabs) if slabs else None)
    return clips


def test_pocket_prompts_are_judged_as_in_one_process(pool):
    """Twelve held-out prompts on 2 x 2 x 2 get the verdicts of one process, and frames within one grey level of it."""
    size = (
        spec.WIDTH,
        spec.HEIGHT,
        spec.NUM_FRAMES,
        spec.STEPS,
        spec.GUIDANCE_HIGH,
        spec.GUIDANCE_LOW,
        spec.FLOW_SHIFT,
    )
    captions = grammar.held_out()[:NUM_PROMPTS]
    samplings = [Sampling(caption.prompt, spec.NEGATIVE_PROMPT, seed, *size) for seed, caption in enumerate(captions)]
    alone = watch(single(), samplings)
    together, *others = pool.run(watch, Degrees(2, 2, 2), samplings)
    assert all(clip is None for clips in others for clip in clips)
    for mine, theirs in zip(together, alone, strict=True):
        assert judge.judge(mine) == judge.judge(theirs)
        assert np.abs(mine.astype(int) - theirs.astype(int)).max() <= 1

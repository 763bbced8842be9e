"""The pipeline over every mesh against the pipeline in one process, on real ranks."""

import pytest
import torch

from models.wan.pipeline import PipelineOptions, WanPipeline
from models.wan.tiny import ensure_tiny
from tests.parallel import clips

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with the random checkpoint: 8 heads, two experts."""
    return ensure_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def references(tiny):
    """Each clip in one process, float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pipeline = WanPipeline.load(tiny)
    made = {name: clips.reference(pipeline, sampling) for name, sampling in clips.CLIPS.items()}
    torch.set_num_threads(threads)
    return made


@pytest.mark.parametrize(("degrees", "attention", "sequence"), clips.matrix(), ids=str)
def test_mesh_equals_one_process(pool, tiny, references, degrees, attention, sequence):
    """On each mesh, with ring and gathered keys, with and without sequence parallelism, velocities and trajectory agree."""
    options = PipelineOptions(attention=attention, tp_sequence_parallel=sequence)
    ranks = pool.run(clips.render, degrees, tiny, options, references["odd"])
    velocity, trajectory = clips.worst(ranks[0], references["odd"])
    print(degrees, attention, sequence, velocity, trajectory)
    assert velocity <= clips.VELOCITY_BOUND
    assert trajectory <= clips.TRAJECTORY_BOUND
    assert all(torch.equal(rank.result, ranks[0].result) for rank in ranks)

"""The pipeline over every mesh against the pipeline in one process, on real ranks."""

from dataclasses import replace

import pytest
import torch

from models.errors import ModelError
from models.parallel.layout import Degrees, Layout, make_layout
from models.wan.pipeline import PipelineOptions, WanPipeline
from tests.parallel import clips, faults

pytestmark = pytest.mark.mesh
FULL = Degrees(2, 2, 2)
# A rank table whose groups are not in rank order, as on a trn2 torus.
SCRAMBLED = Layout("arithmetic", FULL, (((5, 0), (3, 6)), ((1, 7), (4, 2))), tuple(range(8)))


@pytest.fixture(scope="session")
def references(tiny):
    """Each clip in one process, float32."""
    pipeline = WanPipeline.load(tiny)
    return {name: clips.reference(pipeline, sampling) for name, sampling in clips.CLIPS.items()}


def check_parity(ranks, expected):
    """The design's rule, and that all ranks hold the same latents."""
    velocity, trajectory = clips.worst(ranks[0], expected)
    assert velocity <= clips.VELOCITY_BOUND
    assert trajectory <= clips.TRAJECTORY_BOUND
    assert all(torch.equal(rank.result, ranks[0].result) for rank in ranks)


def test_matrix_is_complete():
    """The matrix holds every mesh of up to 8 ranks of tp 1, 2, 4, cp 1 to 4 and cfg 1, 2."""
    assert len(clips.MESHES) == 16
    assert len(clips.matrix()) == 41


@pytest.mark.parametrize(("degrees", "attention", "sequence"), clips.matrix(), ids=str)
def test_mesh_equals_one_process(pool, tiny, references, degrees, attention, sequence):
    """On each mesh, by ring and by gathered keys, with and without sequence parallelism, velocity and trajectory agree."""
    options = PipelineOptions(attention=attention, tp_sequence_parallel=sequence)
    check_parity(pool.run(clips.render, degrees, tiny, options, references["odd"]), references["odd"])


@pytest.mark.parametrize("clip", ["frame", "speck"])
@pytest.mark.parametrize("attention", ["ring", "gather"])
@pytest.mark.parametrize("degrees", [Degrees(cp=4), Degrees(tp=2, cp=3), FULL], ids=str)
def test_short_clips(pool, tiny, references, degrees, attention, clip):
    """One frame agrees, and so does a clip with fewer tokens than ranks."""
    options = PipelineOptions(attention=attention, tp_sequence_parallel=degrees == FULL)
    check_parity(pool.run(clips.render, degrees, tiny, options, references[clip]), references[clip])


@pytest.mark.parametrize("layout", [SCRAMBLED, make_layout("trn2", Degrees(4, 1, 2))], ids=["scrambled", "trn2"])
@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_any_rank_table(pool, tiny, references, layout, attention):
    """Where the ranks sit changes nothing, also where coordinate order is not rank order."""
    options = PipelineOptions(attention=attention, tp_sequence_parallel=True)
    check_parity(pool.run(clips.render, layout, tiny, options, references["odd"]), references["odd"])


def test_experts_swap(pool, tiny, references):
    """With one expert in memory at a time the result has the very bits of both resident on the same mesh."""
    resident, swap = (
        pool.run(clips.render, FULL, tiny, PipelineOptions(experts=experts), references["odd"])
        for experts in ("resident", "swap")
    )
    check_parity(swap, references["odd"])
    assert torch.equal(swap[0].result, resident[0].result)
    assert max(swap[0].description["load"]["bytes"]) < max(resident[0].description["load"]["bytes"])


def test_a_clip_twice_has_the_same_bits(pool, tiny, references):
    """On one mesh a clip's latents are the same bits again, whatever ran on the pool in between."""
    first, second = (pool.run(clips.render, FULL, tiny, PipelineOptions(), references["odd"])[0] for _ in range(2))
    assert torch.equal(first.result, second.result)


@pytest.mark.parametrize(
    ("high", "low"), [(1.0, 1.0), (1.0, 3.0), (4.0, 1.0)], ids=["no guidance", "low steps only", "low scale 1"]
)
def test_guidance_rules_on_halves(pool, tiny, high, low):
    """Branches on two halves follow the same guidance rule per step as passes in sequence."""
    sampling = replace(clips.ODD, guidance_high=high, guidance_low=low)
    expected = clips.reference(WanPipeline.load(tiny), sampling)
    check_parity(pool.run(clips.render, Degrees(cfg=2), tiny, PipelineOptions(), expected), expected)


@pytest.mark.parametrize("degrees", [FULL, Degrees(cp=4, tp=2), Degrees(tp=4)], ids=str)
def test_lower_precision(pool, tiny, references, degrees):
    """In bfloat16 a mesh is at most 1.2 times as far from float32 as one process in bfloat16 is, at every judged step."""
    expected = references["odd"]
    half = PipelineOptions(dtype="bfloat16")
    alone = WanPipeline.load(tiny, half)
    [rendered, *_] = pool.run(clips.render, degrees, tiny, half, expected)
    for step, exact in expected.velocities.items():
        floor = clips.distance(clips.velocity(alone, expected.sampling, step, expected.latents[step]), exact)
        assert clips.distance(rendered.velocities[step], exact) <= 1.2 * floor


@pytest.mark.parametrize(
    ("fault", "degrees", "sequence"),
    [
        (faults.bias_on_every_rank, Degrees(tp=2), False),
        (faults.norm_of_local_heads, Degrees(tp=2), False),
        (faults.padding_seen, Degrees(cp=4), False),
        (faults.local_positions, Degrees(cp=2), False),
        (faults.own_keys_only, Degrees(cp=2), False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults_are_seen(pool, tiny, references, fault, degrees, sequence):
    """The rule has teeth: each fault that a mesh could have in silence breaks it at least tenfold."""
    options = PipelineOptions(tp_sequence_parallel=sequence)
    [rendered, *_] = pool.run(clips.render, degrees, tiny, options, references["odd"], fault)
    assert clips.worst(rendered, references["odd"])[0] > 10 * clips.VELOCITY_BOUND


def test_a_rank_that_diverges_fails_the_clip(pool, tiny, references):
    """A weight that is wrong on one rank alone fails the clip on every rank, with the kind for broken devices.

    What it gathers with others spreads, so the message shows its camp: the ranks that share its place in a tp group.
    """
    outcomes = pool.outcomes(clips.render, FULL, tiny, PipelineOptions(), references["odd"], faults.one_weight_off)
    for outcome in outcomes:
        assert isinstance(outcome.error, ModelError)
        assert outcome.error.kind == "device"
        assert "the ranks disagree, [0, 2, 4, 6] and [1, 3, 5, 7] hold different values" in outcome.error.message


@pytest.mark.parametrize(
    ("options", "degrees", "message"),
    [
        (PipelineOptions(), Degrees(tp=3), r"tp\(3\) \* cp\(1\) \* cfg\(1\) = 3: tp\(3\) must divide 8 heads"),
        (PipelineOptions(attention="ulysses"), Degrees(cp=2), "attention 'ulysses' is unknown; choose one of ring"),
    ],
)
def test_unsupported_meshes_are_refused(pool, tiny, references, options, degrees, message):
    """A mesh or attention that cannot be done stops at load with the factors and the choices; nothing falls back."""
    for outcome in pool.outcomes(clips.render, degrees, tiny, options, references["odd"]):
        assert isinstance(outcome.error, ModelError)
        assert outcome.error.kind == "unsupported"
        with pytest.raises(ModelError, match=message):
            raise outcome.error

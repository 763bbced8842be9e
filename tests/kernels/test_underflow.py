"""Where the constant bound loses rows, a whole step of the tiny DiT still comes out right: the forward is repeated."""

import pytest
import torch

from kernels import backend
from models.events import DoneEvent
from models.parallel.bounded import BoundedAttention, Repetition
from models.parallel.mesh import Axis
from models.wan.pipeline import Sampling, WanPipeline
from tests.kernels.judge import assert_close
from tests.nki_standin.launch import wrapper

SAMPLING = Sampling("a red fox", "", 3, 48, 32, 5, 1, 3.0, 3.0, 3.0)


def loaded(folder, gain):
    """A pipeline whose query and key norms have `gain`: large ones make the bound loose."""
    pipeline = WanPipeline.load(folder)
    for stage in ("high", "low"):
        for block in pipeline.experts.model(stage).blocks:
            block.attn1.norm_q.weight.data.mul_(gain)
            block.attn1.norm_k.weight.data.mul_(gain)
    return pipeline


def bounded(pipeline):
    """Put the constant bound into every layer (a ring of one rank); returns each expert's repetition."""
    found = []
    for stage in ("high", "low"):
        model = pipeline.experts.model(stage)
        for block in model.blocks:
            block.attn1.attend = BoundedAttention(Axis("cp"), (), lambda _tokens: None)
        found.append(Repetition([block.attn1.attend for block in model.blocks], Axis("world")))
        model.settle = found[-1].run
    return found


def one_step(pipeline):
    """The latents after a whole step, both texts, guided."""
    return next(event.latents for event in pipeline.denoise(SAMPLING) if isinstance(event, DoneEvent))


@pytest.fixture(params=["reference", "nki"])
def kernels(request):
    """Both backends, one after the other."""
    if request.param == "nki":
        backend.use("nki", wrapper)
    yield request.param
    backend.use("reference")


def test_a_step_without_underflow_is_not_repeated(tiny_checkpoint, kernels):
    """Where the bound holds, the step runs once and gives the latents of plain attention."""
    expected = one_step(loaded(tiny_checkpoint, 1.0))
    pipeline = loaded(tiny_checkpoint, 1.0)
    repetitions = bounded(pipeline)
    assert_close(one_step(pipeline), expected.double(), 1e-5)
    assert [r.num_repeated for r in repetitions] == [0, 0]
    assert not any(repetitions[0].underflowed)


def test_a_step_that_underflows_is_repeated_with_the_true_maximum(tiny_checkpoint, kernels):
    """With large queries and keys each layer counts its lost rows, the step is repeated, and the latents are right."""
    expected = one_step(loaded(tiny_checkpoint, 12.0))
    pipeline = loaded(tiny_checkpoint, 12.0)
    high, low = bounded(pipeline)
    ours = one_step(pipeline)
    assert high.num_repeated == 1
    assert low.num_repeated == 0
    assert len(high.underflowed) == len(pipeline.experts.model("high").blocks)
    assert all(count > 0 for count in high.underflowed)
    assert_close(ours, expected.double(), 1e-4)
    assert not any(layer.exact for layer in high.layers)


def test_without_the_repetition_the_step_would_be_wrong(tiny_checkpoint):
    """The same step with the repetition taken out is far off: the test above has teeth."""
    expected = one_step(loaded(tiny_checkpoint, 12.0))
    pipeline = loaded(tiny_checkpoint, 12.0)
    for stage in ("high", "low"):
        for block in pipeline.experts.model(stage).blocks:
            block.attn1.attend = BoundedAttention(Axis("cp"), (), lambda _tokens: None)
    error = (one_step(pipeline) - expected).norm() / expected.norm()
    assert error > 0.01


def test_the_lost_rows_of_all_layers_are_counted(tiny_checkpoint):
    """Every layer reports its own number, and a forward that loses nothing resets it."""
    pipeline = loaded(tiny_checkpoint, 12.0)
    high, _ = bounded(pipeline)
    one_step(pipeline)
    assert torch.cat([layer.num_underflowed for layer in high.layers]).tolist() == high.underflowed
    for block in pipeline.experts.model("high").blocks:
        block.attn1.norm_q.weight.data.div_(12.0)
        block.attn1.norm_k.weight.data.div_(12.0)
    one_step(pipeline)
    assert high.underflowed == [0] * len(high.layers)
    assert high.num_repeated == 1

"""The constant bound over real ranks: one rank that loses rows makes all of them repeat the forward."""

import pytest
import torch

from models.parallel.context import TokenSplit
from models.parallel.layout import Degrees
from models.parallel.mesh import Mesh, single
from models.wan.parallelize import bound_attention, load_expert
from models.wan.rope import rope_tables

pytestmark = pytest.mark.mesh
GRID = (3, 3, 5)  # 45 tokens: padding on every mesh here


def forward(mesh: Mesh, folder, gain: float, *, bounded: bool):
    """One forward of an expert whose query and key norms have `gain`: velocity, repetitions, lost rows per layer."""
    model = load_expert(folder, torch.float32, torch.device("cpu"), mesh, attention="ring")
    for block in model.blocks:
        block.attn1.norm_q.weight.data.mul_(gain)
        block.attn1.norm_k.weight.data.mul_(gain)
    repetition = bound_attention(model, TokenSplit(mesh.cp), mesh) if bounded else None
    make = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 3, 6, 10, generator=make), torch.randn(1, 7, 64, generator=make)
    with torch.inference_mode():
        arguments = (torch.tensor([500.0]), model.text_keys(text), rope_tables(GRID, model.spec.attention_head_dim))
        out = model.settle(lambda: model(latents, *arguments))
    return out, (repetition.num_repeated, repetition.underflowed) if repetition else None


@pytest.mark.parametrize("degrees", [Degrees(cp=2), Degrees(tp=2, cp=4), Degrees(cp=2, cfg=2)], ids=str)
@pytest.mark.parametrize("gain", [1.0, 12.0])
def test_all_ranks_repeat_what_the_bound_loses(pool, tiny, degrees, gain):
    """With harmless weights no rank repeats; with large ones all do, with equal counts; the velocity is right in both."""
    folder = tiny / "transformer"
    [expected, _] = forward(single(), folder, gain, bounded=False)
    results = pool.run(forward_bounded, degrees, folder, gain)
    reports = [report for _, report in results]
    assert all(report == reports[0] for report in reports)
    assert reports[0][0] == (1 if gain > 1 else 0)
    assert any(reports[0][1]) == (gain > 1)
    for velocity, _ in results:
        assert (velocity - expected).norm() <= 1e-4 * expected.norm()


def forward_bounded(mesh: Mesh, folder, gain: float):
    """`forward` with the bound, as ranks call it."""
    return forward(mesh, folder, gain, bounded=True)

"""The DiT in itself: layouts, dtypes, and what its graph may contain."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.wan.model import WanTransformer, patchify, unpatchify
from models.wan.rope import rope_tables, to_half_layout
from models.wan.spec import TransformerSpec
from models.wan.weights import load_transformer, wan_sources

SPEC = TransformerSpec((1, 2, 2), 2, 16, 16, 16, 24, 32, 64, 2)
GRID = (2, 3, 4)


@pytest.fixture(scope="module")
def model():
    """A small DiT with random weights."""
    torch.manual_seed(0)
    return WanTransformer(SPEC).eval()


def call(model, texts=1, rows=5, repeats=0):
    """The velocity of a small clip under some texts."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn((1, 16, 2, 6, 8), generator=generator)
    text = torch.randn((texts, rows, 24), generator=generator)
    with torch.inference_mode():
        return model(latents, torch.tensor([500.0]), model.text_keys(text, repeats), rope_tables(GRID, 16))


def test_patches_round_trip():
    """unpatchify undoes patchify, for one-channel patches whose order is the same on both sides."""
    x = torch.arange(2 * 1 * 2 * 4 * 6, dtype=torch.float32).view(2, 1, 2, 4, 6)
    spec = TransformerSpec(in_channels=1, out_channels=1)
    assert torch.equal(unpatchify(patchify(x, (1, 2, 2)), (2, 4, 6), spec), x)


def test_half_layout_keeps_scores():
    """Rotating halves of permuted channels gives the scores of rotating neighbours, which is what checkpoints hold."""
    width, length = 16, 24
    cos, sin = rope_tables((2, 3, 4), width)
    q, k = torch.randn(2, length, width, generator=torch.Generator().manual_seed(0))

    def rotate_neighbours(x):
        a, b = x[:, 0::2], x[:, 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1)

    def rotate_halves(x):
        a, b = to_half_layout(x.T, width).T.chunk(2, 1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], 1)

    torch.testing.assert_close(rotate_halves(q) @ rotate_halves(k).T, rotate_neighbours(q) @ rotate_neighbours(k).T)


def test_texts_of_a_batch_do_not_meet(model):
    """Each text of a batch gives the velocity that it gives alone."""
    both = call(model, texts=2)
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn((1, 16, 2, 6, 8), generator=generator), torch.randn((2, 5, 24), generator=generator)
    with torch.inference_mode():
        second = model(latents, torch.tensor([500.0]), model.text_keys(text[1:]), rope_tables(GRID, 16))
    torch.testing.assert_close(both[1:], second, rtol=1e-5, atol=1e-6)


def test_every_parameter_has_a_source(model):
    """The weights table names each parameter once, and nothing else."""
    assert set(wan_sources(SPEC)) == {name for name, _ in model.named_parameters()}


def test_bfloat16_keeps_the_delicate_parts_wide(tiny_checkpoint):
    """In bfloat16 the time embedding, the modulation tables and the affine norm stay float32, as in diffusers."""
    model = load_transformer(tiny_checkpoint / "transformer", torch.bfloat16)
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {
        name
        for name in wan_sources(model.spec)
        if any(part in name for part in ("time_embedder", "scale_shift_table", "norm2"))
    }
    assert model.dtype == torch.bfloat16


class Operators(TorchDispatchMode):
    """Collects the operators that run and the dtypes that they make."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.dtypes |= {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out


@pytest.mark.parametrize("repeats", [0, 480])
def test_the_graph_has_nothing_that_accelerators_refuse(model, repeats):
    """One forward is float32 throughout: no complex, float64 or integer arithmetic, no einsum, convolution or scatter."""
    latents, text = torch.zeros(1, 16, 2, 6, 8), torch.zeros(1, 5, 24)
    rope = rope_tables(GRID, 16)
    with torch.no_grad(), Operators() as seen:
        model(latents, torch.tensor([500.0]), model.text_keys(text, repeats), rope)
    assert seen.dtypes == {torch.float32}
    assert not seen.names & {
        "einsum",
        "convolution",
        "index_put",
        "index_put_",
        "scatter",
        "copy_",
        "roll",
        "grid_sampler",
    }

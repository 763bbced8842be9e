"""Sharding tables: each parameter named exactly once, and the slices that follow from them."""

import pytest
import torch
from torch import nn

from batch_gen.estimate.memory import Placement, weights
from batch_gen.estimate.subject import Clips, published
from batch_gen.request import Bucket
from models.checkpoint import Shard
from models.parallel.layout import AXES, Degrees, make_layout
from models.parallel.mesh import Axis, Mesh, single
from models.parallel.tensor import GatheredLinear, RowwiseLinear, Style, apply_plan, check_plan, sharding, style_of
from models.umt5 import parallelize as umt5
from models.umt5.model import Umt5Encoder
from models.umt5.spec import UMT5_XXL, Umt5Spec
from models.wan import parallelize as wan
from models.wan.model import WanTransformer
from models.wan.spec import TransformerSpec
from models.wan.weights import FLOAT32_PARTS

SMALL_WAN = TransformerSpec(num_attention_heads=4, attention_head_dim=12, text_dim=32, ffn_dim=64, num_layers=2)
SMALL_UMT5 = Umt5Spec(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
HALF = Axis("tp", index=1, ranks=(0, 1), group_name="t")


def mesh_of(degrees: Degrees, rank: int = 0) -> Mesh:
    """A mesh without process groups: places and sizes only."""
    layout = make_layout("arithmetic", degrees)
    subsets = [tuple(axis for bit, axis in enumerate(AXES) if mask >> bit & 1) for mask in range(1, 8)]
    axes = {
        names: Axis("_".join(names), layout.group(rank, *names).index(rank), layout.group(rank, *names))
        for names in subsets
    }
    return Mesh(layout, rank, axes)


@pytest.mark.parametrize(
    ("plan", "build"),
    [(wan.PLAN, lambda: WanTransformer(TransformerSpec())), (umt5.PLAN, lambda: Umt5Encoder(UMT5_XXL))],
    ids=["wan", "umt5"],
)
def test_every_parameter_is_named_exactly_once(plan, build):
    """The table of a published model names each of its parameters exactly once and nothing else."""
    with torch.device("meta"):
        names = [name for name, _ in build().named_parameters()]
    check_plan(plan, names)


def test_plans_with_gaps_or_doubles_are_refused():
    """A parameter that no entry or two entries name, and an entry that names nothing, are programming errors with names."""
    with pytest.raises(AssertionError, match=r"parameter proj.weight is named by 0 entries"):
        check_plan({"other": Style.COLWISE}, ["proj.weight"])
    with pytest.raises(AssertionError, match=r"proj.weight is named by 2 entries of the plan: \['proj', 'p\*'\]"):
        check_plan({"proj": Style.COLWISE, "p*": Style.ROWWISE}, ["proj.weight"])
    with pytest.raises(AssertionError, match=r"name no parameter: \['gone'\]"):
        check_plan({"proj": Style.COLWISE, "gone": Style.ROWWISE}, ["proj.weight"])


def test_slices_follow_the_styles():
    """Output channels are dim 0 with their bias, input channels dim 1 without it, lookups dim 1; nothing on one rank."""
    plan = {"up": Style.COLWISE, "down": Style.ROWWISE, "table": Style.LOOKUP, "norm": Style.REPLICATE}
    shard_of = sharding(plan | {"embed": Style.GATHERED}, HALF)
    assert shard_of("up.weight") == shard_of("up.bias") == Shard(0, 1, 2)
    assert shard_of("embed.weight") == shard_of("embed.bias") == Shard(0, 1, 2)
    assert shard_of("down.weight") == shard_of("table.weight") == Shard(1, 1, 2)
    assert shard_of("down.bias") is None
    assert shard_of("norm.weight") is None
    assert sharding(plan, single().tp)("up.weight") is None


@pytest.mark.parametrize(
    ("module", "plan"), [(WanTransformer(SMALL_WAN), wan.PLAN), (Umt5Encoder(SMALL_UMT5), umt5.PLAN)]
)
def test_split_matrices_carry_most_of_the_weights(module, plan):
    """What a rank of two holds of the blocks' matrices is half; only norms, tables and biases are whole."""
    for name, parameter in module.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            assert style_of(plan, name) is not Style.REPLICATE


def test_bias_is_added_once():
    """A row-parallel layer adds its whole bias after the sum, and works without one."""
    layer = RowwiseLinear(nn.Linear(3, 2), lambda x: 10 * x)
    x = torch.randn(4, 3)
    assert torch.allclose(layer(x), 10 * (x @ layer.weight.T) + layer.bias)
    assert (layer.in_features, layer.out_features) == (3, 2)
    bare = RowwiseLinear(nn.Linear(3, 2, bias=False), lambda x: x)
    assert torch.equal(bare(x), x @ bare.weight.T)


def test_only_rowwise_and_gathered_layers_are_replaced():
    """Applying a plan changes the rowwise and the gathered layers and keeps every parameter's name and storage."""
    model = WanTransformer(SMALL_WAN)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    apply_plan(model, wan.PLAN, HALF, lambda x: x)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    summed = {name for name, module in model.named_modules() if isinstance(module, RowwiseLinear)}
    assert summed == {f"blocks.{i}.{part}" for i in (0, 1) for part in ("attn1.to_out", "attn2.to_out", "ffn.down")}
    joined = {name for name, module in model.named_modules() if isinstance(module, GatheredLinear)}
    assert joined == {"time_proj", "time_embedder.linear_2", "text_embedder.linear_1", "text_embedder.linear_2"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_counts_the_bytes_that_a_rank_holds(ranks, dtype):
    """The estimate's line of the DiT's weights is, to the byte, what the table leaves to one rank of the published model."""
    subject, sizes = published("wan2.2-t2v-a14b"), {"float32": 4, "bfloat16": 2}
    shard_of = sharding(wan.PLAN, Axis("tp", index=0, ranks=tuple(range(ranks)), group_name="t"))
    with torch.device("meta"):
        parameters = dict(WanTransformer(subject.wan.transformer).named_parameters())
    held = 0
    for name, parameter in parameters.items():
        size = 4 if any(part in name for part in FLOAT32_PARTS) else sizes[dtype]
        held += parameter.numel() * size // (1 if shard_of(name) is None else ranks)
    bucket = Bucket(832, 480, 81, "text")
    placement = Placement(Degrees(tp=ranks, cp=1, cfg=1), dtype=dtype)
    [counted] = [part for part in weights(subject, Clips(bucket, 40), placement) if part.name == "weights: DiT"]
    assert counted.num_bytes == subject.wan.num_experts * held


@pytest.mark.parametrize(
    ("degrees", "heads", "size", "name"),
    [
        (Degrees(4, 8, 2), 64, 64, "cfg_cp_tp"),
        (Degrees(2, 2, 2), 4, 4, "cp_tp"),
        (Degrees(2, 3, 2), 4, 4, "cfg_tp"),
        (Degrees(1, 3, 1), 4, 1, "tp"),
        (Degrees(1, 1, 1), 4, 1, "tp"),
        (Degrees(8, 1, 2), 4, 2, "cfg"),
    ],
)
def test_text_encoder_takes_the_largest_submesh(degrees, heads, size, name):
    """The encoder runs over the most ranks that divide its heads, and is replicated beyond them."""
    spec = Umt5Spec(vocab_size=64, d_model=64, d_kv=4, d_ff=128, num_layers=1, num_heads=heads)
    axis = umt5.largest_axis(spec, mesh_of(degrees))
    assert (axis.size, axis.name) == (size, name)


def test_a_mesh_of_one_changes_nothing():
    """Over a mesh of one rank the modules stay the plain ones."""
    model = wan.parallelize(WanTransformer(SMALL_WAN), single(), sequence_parallel=True)
    assert not any(isinstance(module, RowwiseLinear) for module in model.modules())
    encoder = umt5.parallelize(Umt5Encoder(SMALL_UMT5), single().world)
    assert not any(isinstance(module, RowwiseLinear) for module in encoder.modules())

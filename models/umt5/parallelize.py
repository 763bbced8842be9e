"""The text encoder over a mesh: all axes work on it together, as far as its heads divide."""

from itertools import combinations

from torch import Tensor, nn

from models.parallel.collectives import all_gather, all_reduce
from models.parallel.layout import AXES
from models.parallel.mesh import Axis, Mesh
from models.parallel.tensor import Plan, Style, apply_plan
from models.umt5.model import Umt5Encoder
from models.umt5.spec import Umt5Spec

# Each parameter is named exactly once.
PLAN: Plan = {
    "embed": Style.LOOKUP,
    "blocks.*.norm[12]": Style.REPLICATE,
    "blocks.*.attn.to_qkv": Style.COLWISE,
    "blocks.*.attn.position_bias": Style.LOOKUP,
    "blocks.*.attn.to_out": Style.ROWWISE,
    "blocks.*.ffn.gate": Style.COLWISE,
    "blocks.*.ffn.up": Style.COLWISE,
    "blocks.*.ffn.down": Style.ROWWISE,
    "final_norm": Style.REPLICATE,
}


def largest_axis(spec: Umt5Spec, mesh: Mesh) -> Axis:
    """The largest sub-mesh whose size divides the encoder's heads and widths; ranks beyond it hold the same as these.

    Among equals the one with the fewest axes, and tp before cp before cfg, since near ranks talk fastest.
    """
    names = [subset for count in range(1, len(AXES) + 1) for subset in combinations(reversed(AXES), count)]
    sizes = (spec.num_heads, spec.d_ff, spec.d_model)
    fitting = [
        axis for axis in (mesh.axis(*subset) for subset in names) if all(size % axis.size == 0 for size in sizes)
    ]
    return max(fitting, key=lambda axis: axis.size, default=Axis("none"))


def parallelize(model: Umt5Encoder, axis: Axis) -> Umt5Encoder:
    """Make an encoder that holds this rank's slices (see `PLAN`) compute with the rest of the axis; the same module."""
    if axis.is_trivial:
        return model
    apply_plan(model, PLAN, axis, lambda x_BLW: all_reduce(x_BLW, axis))

    def gather(_module: nn.Module, _inputs: tuple[Tensor, ...], columns_BLW: Tensor) -> Tensor:
        return all_gather(columns_BLW, axis, dim=-1)

    model.embed.register_forward_hook(gather)
    return model

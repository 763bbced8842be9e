"""Tensor parallelism: a plan as a table, the slices that follow from it, and the few modules and sums that it needs.

B batch, L tokens, H heads of this rank, D head width, W width.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.functional import linear

from kernels.qk_norm_rope import sum_square, sum_squares
from models.checkpoint import Shard
from models.parallel.collectives import all_gather, all_reduce, order_of
from models.parallel.mesh import Axis

Finish = Callable[[Tensor], Tensor]


class Style(StrEnum):
    """What a rank of the tensor axis holds of a module's parameters.

    COLWISE: its share of the output channels (dim 0 of weights, biases and norm gains); fused parts are each split.
    GATHERED: the same share, and all ranks' outputs are joined: for layers whose result every rank needs whole.
    ROWWISE: its share of the input channels (dim 1 of the weight) and the whole bias; results are summed over ranks.
    LOOKUP: its share of an embedding's columns (dim 1).
    REPLICATE: everything.
    """

    COLWISE = "colwise"
    GATHERED = "gathered"
    ROWWISE = "rowwise"
    LOOKUP = "lookup"
    REPLICATE = "replicate"


Plan = Mapping[str, Style]  # pattern of a module's or parameter's name (`*` stands for any part of it) -> style


def style_of(plan: Plan, parameter: str) -> Style:
    """The style of the one entry that names this parameter; raises AssertionError when none or several do."""
    owner = parameter.rpartition(".")[0]
    entries = [pattern for pattern in plan if fnmatchcase(parameter, pattern) or fnmatchcase(owner, pattern)]
    if len(entries) != 1:
        raise AssertionError(f"parameter {parameter} is named by {len(entries)} entries of the plan: {entries}")
    return plan[entries[0]]


def check_plan(plan: Plan, parameters: Iterable[str]) -> None:
    """Raise AssertionError unless every parameter is named exactly once and every entry names one."""
    names = list(parameters)
    for name in names:
        style_of(plan, name)
    owners = {name.rpartition(".")[0] for name in names}
    idle = [pattern for pattern in plan if not any(fnmatchcase(name, pattern) for name in owners.union(names))]
    if idle:
        raise AssertionError(f"plan entries that name no parameter: {idle}")


def sharding(plan: Plan, axis: Axis) -> Callable[[str], Shard | None]:
    """Parameter name -> the part of it that this rank reads from the checkpoint; None: all of it."""

    def shard_of(parameter: str) -> Shard | None:
        style = style_of(plan, parameter)
        if axis.is_trivial or style is Style.REPLICATE:
            return None
        if style in (Style.COLWISE, Style.GATHERED):
            return Shard(0, axis.index, axis.size)
        is_bias = parameter.endswith(".bias")
        return None if style is Style.ROWWISE and is_bias else Shard(1, axis.index, axis.size)

    return shard_of


class RowwiseLinear(nn.Linear):
    """A linear layer whose input channels are spread over ranks: partial results are summed, the bias added once."""

    def __init__(self, layer: nn.Linear, finish: Finish) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.weight.shape
        self.weight, self.bias = layer.weight, layer.bias
        self._finish = finish

    def forward(self, x: Tensor) -> Tensor:
        """[..., local inputs] -> [..., outputs], whatever `finish` (all-reduce or reduce-scatter) makes of the sum."""
        total = self._finish(linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class GatheredLinear(nn.Linear):
    """A linear layer whose output channels are spread over ranks, and joined: the same sums as on one rank."""

    order: Tensor | None

    def __init__(self, layer: nn.Linear, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.weight.shape
        self.weight, self.bias = layer.weight, layer.bias
        self.axis = axis
        self.register_buffer("order", order_of(axis, layer.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs of all ranks]."""
        return all_gather(linear(x, self.weight, self.bias), self.axis, dim=-1, order=self.order)


def apply_plan(module: nn.Module, plan: Plan, axis: Axis, finish: Finish) -> None:
    """Replace each linear layer that the plan calls rowwise or gathered; it holds this rank's slices already."""
    check_plan(plan, (name for name, _ in module.named_parameters()))
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        style, (owner, _, attribute) = style_of(plan, f"{name}.weight"), name.rpartition(".")
        if style is Style.ROWWISE:
            setattr(module.get_submodule(owner), attribute, RowwiseLinear(layer, finish))
        elif style is Style.GATHERED:
            setattr(module.get_submodule(owner), attribute, GatheredLinear(layer, axis))


def shared_mean_squares(axis: Axis) -> Callable[[Tensor, Tensor], Tensor]:
    """Of q, k [B, L, H, D]: [2, B, L] float32 mean squares over the heads of all ranks, one reduction for both."""

    def mean_squares(q_BLHD: Tensor, k_BLHD: Tensor) -> Tensor:
        width = q_BLHD.shape[2] * q_BLHD.shape[3] * axis.size
        return all_reduce(sum_squares(q_BLHD, k_BLHD), axis) / width

    return mean_squares


def shared_mean_square(axis: Axis) -> Callable[[Tensor], Tensor]:
    """Of [B, L, H, D]: [B, L] float32 mean squares over the heads of all ranks."""

    def mean_square(x_BLHD: Tensor) -> Tensor:
        return all_reduce(sum_square(x_BLHD), axis) / (x_BLHD.shape[2] * x_BLHD.shape[3] * axis.size)

    return mean_square

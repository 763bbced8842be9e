"""Faults that a parallel pipeline could have and that no crash would show; each spoils a rank's loaded pipeline."""

import torch
from torch import nn

from kernels.attention import attention
from models.parallel.collectives import all_reduce
from models.parallel.tensor import RowwiseLinear


def experts(pipeline):
    """The pipeline's loaded experts."""
    return [pipeline.experts.model(stage) for stage in pipeline.experts.folders]


def bias_on_every_rank(mesh, pipeline):
    """A row-parallel layer whose bias is added before the sum, once per rank."""
    for model in experts(pipeline):
        for layer in (module for module in model.modules() if isinstance(module, RowwiseLinear)):
            layer.forward = lambda x, layer=layer: all_reduce(
                nn.functional.linear(x, layer.weight, layer.bias), mesh.tp
            )


def norm_of_local_heads(_mesh, pipeline):
    """An RMSNorm over this rank's heads instead of all heads."""
    for model in experts(pipeline):
        for block in model.blocks:
            block.attn1.mean_squares = None


def padding_seen(mesh, pipeline):
    """Padding keys that take part in the softmax."""
    for model in experts(pipeline):
        for block in model.blocks:
            inner = block.attn1.attend

            def attend(q, k, v, scale=None, k_valid=None, inner=inner):
                del k_valid
                return inner(q, k, v, scale, k.shape[1] * mesh.cp.size)

            block.attn1.attend = attend


def local_positions(_mesh, pipeline):
    """Rotary positions that start at 0 on every rank."""
    for model in experts(pipeline):
        split = model.tokens
        split.scatter_rope = lambda rope, split=split: tuple(table[: split.local_tokens(len(table))] for table in rope)


def own_keys_only(_mesh, pipeline):
    """Self-attention that sees this rank's tokens only."""
    for model in experts(pipeline):
        for block in model.blocks:
            block.attn1.attend = lambda q, k, v, scale=None, k_valid=None: attention(q, k, v, scale)


def one_weight_off(mesh, pipeline):
    """A weight that differs on the last rank alone: its device is broken."""
    if mesh.rank == mesh.degrees.size - 1:
        with torch.no_grad():
            experts(pipeline)[-1].proj_out.weight[0, 0] += 1.0


def local_image_tokens(_mesh, pipeline):
    """Tokens of the image that every rank takes to be its own first ones."""
    for model in experts(pipeline):
        whole = model._later

        def later(patches, num_frames, whole=whole):
            own = whole(patches, num_frames)
            return (torch.arange(own.shape[1]) >= patches.shape[1] // num_frames).view(1, -1, 1)

        model._later = later

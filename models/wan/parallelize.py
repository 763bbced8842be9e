"""The DiT over a mesh: the sharding table and the few places where a rank's work meets the others'."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels import backend
from models.checkpoint_files import read_json
from models.errors import ModelError
from models.lora import Adapter
from models.parallel.bounded import BoundedAttention, Repetition
from models.parallel.collectives import all_gather, all_reduce, reduce_scatter
from models.parallel.context import SpreadAttention, TokenSplit, attention_kind
from models.parallel.layout import LayoutError
from models.parallel.mesh import Axis, Mesh
from models.parallel.tensor import Plan, Style, apply_plan, sharding, shared_mean_square, shared_mean_squares
from models.quantize import Quantization, quantize
from models.wan.model import Block, WanTransformer
from models.wan.spec import TransformerSpec, transformer_spec
from models.wan.weights import load_transformer

# Heads and hidden channels are split. Of what has model width the large embedders are split and joined (`time_proj`
# alone has 157 M parameters), the rest is whole. Each parameter is named exactly once.
PLAN: Plan = {
    "patch_embedding": Style.REPLICATE,
    "time_embedder.linear_1": Style.REPLICATE,
    "time_embedder.linear_2": Style.GATHERED,
    "time_proj": Style.GATHERED,
    "text_embedder.*": Style.GATHERED,
    "blocks.*.attn1.to_qkv": Style.COLWISE,
    "blocks.*.attn1.norm_[qk]": Style.COLWISE,
    "blocks.*.attn1.to_out": Style.ROWWISE,
    "blocks.*.norm2": Style.REPLICATE,
    "blocks.*.attn2.to_q": Style.COLWISE,
    "blocks.*.attn2.to_kv": Style.COLWISE,
    "blocks.*.attn2.norm_[qk]": Style.COLWISE,
    "blocks.*.attn2.to_out": Style.ROWWISE,
    "blocks.*.ffn.up": Style.COLWISE,
    "blocks.*.ffn.down": Style.ROWWISE,
    "*scale_shift_table": Style.REPLICATE,
    "proj_out": Style.REPLICATE,
}


@dataclass(frozen=True, slots=True)
class Changes:
    """What is done to a checkpoint's weights: adapters merged, then linear layers quantised."""

    adapters: tuple[Adapter, ...] = ()
    fp8: Quantization | None = None


UNCHANGED = Changes()


def check_mesh(spec: TransformerSpec, mesh: Mesh) -> None:
    """Raise ModelError("unsupported") unless the mesh divides this model."""
    try:
        mesh.degrees.check_model(num_heads=spec.num_attention_heads, ffn_width=spec.ffn_dim)
    except LayoutError as error:
        raise ModelError("unsupported", str(error)) from error


def load_expert(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
    *,
    attention: str = "auto",
    sequence_parallel: bool = False,
    changes: Changes = UNCHANGED,
) -> WanTransformer:
    """This rank's part of the expert in a `transformer` folder, on the device, ready to compute with the other ranks.

    The settings are those of `parallelize`; adapters are merged before it, FP8 comes after it. Raises
    ModelError("checkpoint" or "unsupported").
    """
    check_mesh(transformer_spec(read_json(folder / "config.json")), mesh)
    model = load_transformer(folder, dtype, sharding(PLAN, mesh.tp), changes.adapters).to(device)
    parallelize(model, mesh, attention=attention, sequence_parallel=sequence_parallel)
    if changes.fp8 is not None:
        quantize(model, changes.fp8)
    return model


def parallelize(
    model: WanTransformer, mesh: Mesh, *, attention: str = "auto", sequence_parallel: bool = False
) -> WanTransformer:
    """Make a module that holds this rank's slices (see `PLAN`) compute with the other ranks; returns the same module.

    attention: ring, gather or auto, for self-attention over the context axis. sequence_parallel: between sublayers each
    rank of the tensor axis keeps a part of the tokens (a sum becomes a reduce-scatter, a column projection gathers
    first): the same bytes travel, activations shrink. Raises ModelError("unsupported").
    """
    kind = attention_kind(attention)
    sequence = mesh.tp if sequence_parallel and not mesh.tp.is_trivial else None
    if not mesh.cp.is_trivial or sequence is not None:
        tokens = TokenSplit(mesh.cp, sequence, model.scale_shift_table.device)
        model.tokens = tokens
        for block in _blocks(model):
            block.attn1.attend = SpreadAttention(tokens, mesh.ring_pairs("cp"), kind)
        if kind == "ring" and backend.current() == "nki" and not mesh.cp.is_trivial:
            bound_attention(model, tokens, mesh)
    if not mesh.tp.is_trivial:
        apply_plan(model, PLAN, mesh.tp, _finish(mesh.tp, sequence))
        for block in _blocks(model):
            _join_heads(block, mesh.tp)
            _gather_inputs(block, sequence)
    return model


def bound_attention(model: WanTransformer, tokens: TokenSplit, mesh: Mesh) -> Repetition:
    """Let every layer's ring use the constant bound, and repeat what lost rows (`parallel.bounded`)."""
    layers = []
    for block in _blocks(model):
        layers.append(BoundedAttention(mesh.cp, mesh.ring_pairs("cp"), tokens.valid_tokens, tokens.place.device))
        block.attn1.attend = layers[-1]
    repetition = Repetition(layers, mesh.world)
    model.settle = repetition.run
    return repetition


def _blocks(model: WanTransformer) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def _finish(axis: Axis, sequence: Axis | None) -> Callable[[Tensor], Tensor]:
    """What ends a row-parallel layer: the sum for all, or for each rank the sum of its part of the tokens (dim 1)."""
    if sequence is None:
        return lambda x_BLW: all_reduce(x_BLW, axis)
    return lambda x_BLW: reduce_scatter(x_BLW, axis, dim=1)


def _join_heads(block: Block, axis: Axis) -> None:
    block.attn1.mean_squares = shared_mean_squares(axis)
    block.attn2.mean_square = shared_mean_square(axis)


def _gather_inputs(block: Block, sequence: Axis | None) -> None:
    """With sequence parallelism, column projections of the clip's tokens start from the tokens of the whole axis."""
    if sequence is None:
        return

    def gather(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (all_gather(inputs[0], sequence, dim=1),)

    for layer in (block.attn1.to_qkv, block.attn2.to_q, block.ffn.up):
        layer.register_forward_pre_hook(gather)

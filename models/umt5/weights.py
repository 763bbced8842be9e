"""Which keys of a transformers-layout text encoder make which parameter of ours."""

from collections.abc import Callable
from pathlib import Path

import torch

from models.checkpoint import Shard, Source, load_parameters, open_checkpoint
from models.checkpoint_files import read_json
from models.umt5.model import Umt5Encoder
from models.umt5.spec import Umt5Spec, umt5_spec


def umt5_sources(spec: Umt5Spec) -> dict[str, Source]:
    """Parameter name of `Umt5Encoder` -> its checkpoint keys."""
    sources = {
        "embed.weight": Source(("shared.weight",), aliases=("encoder.embed_tokens.weight",)),
        "final_norm.weight": Source(("encoder.final_layer_norm.weight",)),
    }
    for index in range(spec.num_layers):
        sources |= _block_sources(f"blocks.{index}", f"encoder.block.{index}.layer")
    return sources


def _block_sources(ours: str, theirs: str) -> dict[str, Source]:
    attention, dense = f"{theirs}.0.SelfAttention", f"{theirs}.1.DenseReluDense"
    return {
        f"{ours}.norm1.weight": Source((f"{theirs}.0.layer_norm.weight",)),
        f"{ours}.attn.to_qkv.weight": Source(tuple(f"{attention}.{name}.weight" for name in "qkv")),
        f"{ours}.attn.to_out.weight": Source((f"{attention}.o.weight",)),
        f"{ours}.attn.position_bias.weight": Source((f"{attention}.relative_attention_bias.weight",)),
        f"{ours}.norm2.weight": Source((f"{theirs}.1.layer_norm.weight",)),
        f"{ours}.ffn.gate.weight": Source((f"{dense}.wi_0.weight",)),
        f"{ours}.ffn.up.weight": Source((f"{dense}.wi_1.weight",)),
        f"{ours}.ffn.down.weight": Source((f"{dense}.wo.weight",)),
    }


def load_umt5(
    folder: Path, dtype: torch.dtype, shard_of: Callable[[str], Shard | None] = lambda _name: None
) -> Umt5Encoder:
    """The encoder of a `text_encoder` folder on the CPU; raises ModelError("checkpoint" or "unsupported")."""
    spec = umt5_spec(read_json(folder / "config.json"))
    checkpoint = open_checkpoint(folder)
    sources = umt5_sources(spec)
    if "shared.weight" not in checkpoint.files and "encoder.embed_tokens.weight" in checkpoint.files:
        sources["embed.weight"] = Source(("encoder.embed_tokens.weight",))
    with torch.device("meta"):
        model = Umt5Encoder(spec)
    load_parameters(model, checkpoint, sources, lambda _name: dtype, shard_of)
    return model.eval()

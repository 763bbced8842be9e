"""Which keys of a diffusers-layout transformer make which parameter of ours."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import Shard, Source, Transform, load_parameters, open_checkpoint
from models.checkpoint_files import read_json
from models.lora import Adapter, merged
from models.wan.model import WanTransformer
from models.wan.rope import to_half_layout
from models.wan.spec import TransformerSpec, transformer_spec

# Kept in float32 whatever the model's dtype is, as diffusers does.
FLOAT32_PARTS = ("time_embedder", "scale_shift_table", "norm2")


def wan_sources(spec: TransformerSpec) -> dict[str, Source]:
    """Parameter name of `WanTransformer` -> its checkpoint keys and what is done to them."""
    embedder = "condition_embedder"
    sources = {
        "patch_embedding.weight": Source(("patch_embedding.weight",), (_flatten_kernel,)),
        "patch_embedding.bias": Source(("patch_embedding.bias",)),
        "scale_shift_table": Source(("scale_shift_table",)),
        **_linear("proj_out", "proj_out"),
        **_linear("time_proj", f"{embedder}.time_proj"),
    }
    for layer in ("linear_1", "linear_2"):
        sources |= _linear(f"time_embedder.{layer}", f"{embedder}.time_embedder.{layer}")
        sources |= _linear(f"text_embedder.{layer}", f"{embedder}.text_embedder.{layer}")
    for index in range(spec.num_layers):
        sources |= _block_sources(f"blocks.{index}", spec.attention_head_dim)
    return sources


def _flatten_kernel(weight: Tensor) -> Tensor:
    """A convolution whose stride is its size is a linear layer on patches."""
    return weight.flatten(1)


def _linear(ours: str, *theirs: str, transforms: tuple[Transform | None, ...] = ()) -> dict[str, Source]:
    return {
        f"{ours}.{part}": Source(tuple(f"{name}.{part}" for name in theirs), transforms) for part in ("weight", "bias")
    }


def _block_sources(block: str, head_width: int) -> dict[str, Source]:
    half = partial(to_half_layout, head_width=head_width)
    one, two = f"{block}.attn1", f"{block}.attn2"
    rotated = tuple(f"{one}.{name}" for name in ("to_q", "to_k", "to_v"))
    return {
        **_linear(f"{one}.to_qkv", *rotated, transforms=(half, half, None)),
        f"{one}.norm_q.weight": Source((f"{one}.norm_q.weight",), (half,)),
        f"{one}.norm_k.weight": Source((f"{one}.norm_k.weight",), (half,)),
        **_linear(f"{one}.to_out", f"{one}.to_out.0"),
        **_linear(f"{two}.to_q", f"{two}.to_q"),
        **_linear(f"{two}.to_kv", f"{two}.to_k", f"{two}.to_v"),
        f"{two}.norm_q.weight": Source((f"{two}.norm_q.weight",)),
        f"{two}.norm_k.weight": Source((f"{two}.norm_k.weight",)),
        **_linear(f"{two}.to_out", f"{two}.to_out.0"),
        **_linear(f"{block}.norm2", f"{block}.norm2"),
        **_linear(f"{block}.ffn.up", f"{block}.ffn.net.0.proj"),
        **_linear(f"{block}.ffn.down", f"{block}.ffn.net.2"),
        f"{block}.scale_shift_table": Source((f"{block}.scale_shift_table",)),
    }


def stage_of(folder: Path) -> str:
    """Which expert a folder of diffusers' layout holds."""
    return "low" if folder.name == "transformer_2" else "high"


def original_names(layer: str) -> Iterator[str]:
    """The name that a layer of diffusers' layout has in the original repository, where it is another one."""
    name = layer
    for ours, theirs in _ORIGINAL:
        name = re.sub(ours, theirs, name)
    if name != layer:
        yield name


_ORIGINAL = (
    (r"attn1\.", "self_attn."),
    (r"attn2\.", "cross_attn."),
    (r"_attn\.to_out\.0$", "_attn.o"),
    (r"_attn\.to_([qkv])$", r"_attn.\1"),
    (r"ffn\.net\.0\.proj$", "ffn.0"),
    (r"ffn\.net\.2$", "ffn.2"),
    (r"norm2$", "norm3"),
    (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
    (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
    (r"^condition_embedder\.time_proj$", "time_projection.1"),
    (r"^proj_out$", "head.head"),
)


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter is kept when the model's is `dtype`."""
    return torch.float32 if any(part in name for part in FLOAT32_PARTS) else dtype


def load_transformer(
    folder: Path,
    dtype: torch.dtype,
    shard_of: Callable[[str], Shard | None] = lambda _name: None,
    adapters: Sequence[Adapter] = (),
) -> WanTransformer:
    """The expert of a `transformer` or `transformer_2` folder on the CPU, or this rank's part of it.

    Adapters are merged in float32 before weights are rounded to the model's dtype.
    Raises ModelError("checkpoint" or "unsupported").
    """
    spec = transformer_spec(read_json(folder / "config.json"))
    with torch.device("meta"):
        model = WanTransformer(spec)
    checkpoint = merged(open_checkpoint(folder), adapters, stage_of(folder), original_names)
    load_parameters(model, checkpoint, wan_sources(spec), partial(parameter_dtype, dtype=dtype), shard_of)
    return model.eval()

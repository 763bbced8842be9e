"""LoRA files of every common key form, random and of rank 4, for the tiny checkpoints."""

import json
import re

import torch
from safetensors.torch import save_file

RANK = 4
ORIGINAL = [
    ("attn1.", "self_attn."),
    ("attn2.", "cross_attn."),
    ("_attn.to_out.0", "_attn.o"),
    ("_attn.to_", "_attn."),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
]
LAYERS = [f"{name}.to_{part}" for name in ("attn1", "attn2") for part in ("q", "k", "v", "out.0")]
LAYERS += ["ffn.net.0.proj", "ffn.net.2"]


def pairs(num_layers, width=128, inner=256, seed=0):
    """Layer name -> (down [4, in], up [out, 4]), the same numbers each time."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for block in range(num_layers):
        for layer in LAYERS:
            rows = inner if layer == "ffn.net.0.proj" else width
            columns = inner if layer == "ffn.net.2" else width
            down = torch.randn(RANK, columns, generator=generator) / columns**0.5
            up = torch.randn(rows, RANK, generator=generator) * 0.2
            found[f"blocks.{block}.{layer}"] = down, up
    return found


def original(layer):
    """The layer's name in the original repository."""
    for ours, theirs in ORIGINAL:
        layer = layer.replace(ours, theirs)
    return layer


def write(path, form, num_layers=3, seed=0, alpha=None):
    """A LoRA file in one of the key forms."""
    tensors, metadata = {}, None
    for layer, (down, up) in pairs(num_layers, seed=seed).items():
        tensors |= named(form, layer, down, up, alpha)
    if form == "metadata":
        metadata = {
            "format": "pt",
            "lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": 4}),
        }
    save_file(tensors, path, metadata)
    return path


def named(form, layer, down, up, alpha):
    """One layer's tensors under the names of a form."""
    ends = {
        "diffusers": (f"transformer.{layer}", "lora_A", "lora_B"),
        "metadata": (f"transformer.{layer}", "lora_A", "lora_B"),
        "second": (f"transformer_2.{layer}", "lora_A", "lora_B"),
        "peft": (f"base_model.model.{layer}", "lora_A", "lora_B"),
        "original": (f"diffusion_model.{original(layer)}", "lora_down", "lora_up"),
        "original A": (f"diffusion_model.{original(layer)}", "lora_A", "lora_B"),
        "joined": ("lora_unet_" + re.sub(r"\.", "_", original(layer)), "lora_down", "lora_up"),
    }
    base, first, second = ends[form]
    found = {f"{base}.{first}.weight": down.clone(), f"{base}.{second}.weight": up.clone()}
    if alpha is not None:
        found[f"{base}.alpha"] = torch.tensor(float(alpha))
    return found

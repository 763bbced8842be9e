"""The last stage of `train_pocket.py`: a diffusers folder in half precision, and its digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pocket_pair
import pocket_train_dit
import pocket_train_vae
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
from torch import nn
from transformers import PreTrainedTokenizerFast

from models.pocket import spec

TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # the name that old and new transformers know


def export(work: Path, log: Callable[[str], None]) -> None:
    """Stage `export`: write the checkpoint to the work folder."""
    if not pocket_pair.is_first():
        return
    folder = work / "weights"
    shutil.rmtree(folder, ignore_errors=True)
    pipeline(work).save_pretrained(folder, safe_serialization=True)
    _tidy(folder)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # they are written for their owner alone
    (work / "SHA256SUMS").write_text(digests(folder))
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    log(f"{total / 1e6:.2f} MB in {folder}")


def pipeline(work: Path) -> WanPipeline:
    """The trained parts as diffusers' pipeline, in half precision."""
    vae = autoencoder(work)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = pocket_train_dit.Denoiser(len(tokenizer))
    model.load_state_dict(torch.load(work / "joint.pt"))
    experts = []
    for side in ("high", "low"):
        forked = pocket_train_dit.Denoiser(len(tokenizer))
        forked.load_state_dict(torch.load(work / f"expert-{side}.pt"))
        experts.append(half(forked.dit))
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=spec.FLOW_SHIFT
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=half(model.text),
        vae=half(vae),
        scheduler=scheduler,
        transformer=experts[0],
        transformer_2=experts[1],
        boundary_ratio=spec.BOUNDARY,
    )


def autoencoder(work: Path) -> AutoencoderKLWan:
    """The trained autoencoder, its decoder deaf to the clock's channels."""
    stored = torch.load(work / "latents.pt")
    mean, deviation = stored["mean"].clone(), stored["deviation"].clone()
    clock = pocket_train_dit.CLOCK
    mean[clock], deviation[clock] = 0.0, 1.0
    vae = pocket_train_vae.load(work)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    entry = vae.post_quant_conv
    with torch.no_grad():  # as if they always had their mean
        entry.bias += entry.weight[:, clock].flatten(1) @ stored["mean"][clock]
        entry.weight[:, clock] = 0
    return vae


def half(module: nn.Module) -> nn.Module:
    """Every weight in float16, without diffusers' exceptions for single modules."""
    for parameter in module.parameters():
        parameter.data = parameter.data.half()
    return module


def _tidy(folder: Path) -> None:
    """Name the tokenizer's class as every version of transformers knows it."""
    for path, keys in (
        (folder / "model_index.json", ("tokenizer", 1)),
        (folder / "tokenizer" / "tokenizer_config.json", ("tokenizer_class",)),
    ):
        content = json.loads(path.read_text())
        holder = content
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = TOKENIZER_CLASS
        path.write_text(json.dumps(content, indent=2) + "\n")


def digests(folder: Path) -> str:
    """Lines as `sha256sum` writes them, paths relative to the folder's parent."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder.parent)}\n" for path in files
    )

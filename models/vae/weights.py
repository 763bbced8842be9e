"""Which keys of a diffusers-layout autoencoder make which parameter of ours."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint import Source, load_parameters, open_checkpoint
from models.vae.model import Decoder, Encoder
from models.vae.spec import VaeSpec, read_spec

_NORMS = {"conv1": "norm1", "conv2": "norm2", "conv_out": "norm_out"}


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.flatten(1)


def _frameless(tensor: Tensor) -> Tensor:
    """A 2D kernel as a 3D one over a single frame."""
    return tensor.unsqueeze(2)


def decoder_sources(spec: VaeSpec, names: Iterable[str]) -> dict[str, Source]:
    """Parameter name of `Decoder` -> its checkpoint key."""
    upsampler = "upsampler" if spec.is_residual else "upsamplers.0"
    return {name: _source(name, "decoder", name.replace("upsampler.", f"{upsampler}.")) for name in names}


def encoder_sources(spec: VaeSpec, names: Iterable[str]) -> dict[str, Source]:
    """Parameter name of `Encoder` -> its checkpoint key."""
    return {name: _source(name, "encoder", name if spec.is_residual else _unnested(name, spec)) for name in names}


def _unnested(name: str, spec: VaeSpec) -> str:
    """Wan2.1 keeps residual blocks and down-samplers in one flat list."""
    found = re.match(r"down_blocks\.(\d+)\.(?:resnets\.(\d+)|downsampler)\.(.*)", name)
    if found is None:
        return name
    block, resnet, rest = found.groups()
    place = int(block) * (spec.num_res_blocks + 1) + (spec.num_res_blocks if resnet is None else int(resnet))
    return f"down_blocks.{place}.{rest}"


def _source(ours: str, part: str, theirs: str) -> Source:
    """One parameter: renamed modules, a norm's gain that lives with our convolution, 2D kernels made 3D."""
    theirs = theirs.replace("mid_block.attention.", "mid_block.attentions.0.").replace("shortcut.", "conv_shortcut.")
    if re.search(r"(up|down)sampler\.conv\.", ours):
        theirs = re.sub(r"\.conv\.(weight|bias)$", r".resample.1.\1", theirs)
        return Source((f"{part}.{theirs}",), (_frameless,) if ours.endswith("weight") else ())
    if ours.startswith(("post_quant.", "quant.")):
        return Source((ours.replace("quant.", "quant_conv."),))
    if ours.endswith("attention.gain"):
        return Source((f"{part}.{theirs[: -len('gain')]}norm.gamma",), (_flat,))
    if ours.endswith(".gain"):
        owner, conv = theirs[: -len(".gain")].rpartition(".")[::2]
        prefix = f"{owner}." if owner else ""
        return Source((f"{part}.{prefix}{_NORMS[conv]}.gamma",), (_flat,))
    if re.search(r"attention\.(to_qkv|proj)\.weight", ours):
        return Source((f"{part}.{theirs}",), (_matrix,))
    return Source((f"{part}.{theirs}",))


def load_parts(
    folder: Path, dtype: torch.dtype, *, with_encoder: bool = True
) -> tuple[VaeSpec, Decoder, Encoder | None]:
    """Spec, decoder and (if wanted) encoder of a `vae` folder, on the CPU.

    All keys of both parts must be there. Raises ModelError("checkpoint" or "unsupported").
    """
    spec = read_spec(folder)
    checkpoint = open_checkpoint(folder)
    with torch.device("meta"):
        decoder, encoder = Decoder(spec), Encoder(spec)
    found, theirs = _sources(spec, decoder), _sources(spec, encoder)
    if with_encoder:
        load_parameters(encoder, checkpoint, theirs, lambda _name: dtype, beside=found)
    load_parameters(decoder, checkpoint, found, lambda _name: dtype, beside=theirs)
    return spec, decoder.eval(), encoder.eval() if with_encoder else None


def _sources(spec: VaeSpec, part: Decoder | Encoder) -> dict[str, Source]:
    names = [name for name, _ in part.named_parameters()]
    return decoder_sources(spec, names) if isinstance(part, Decoder) else encoder_sources(spec, names)

"""`tiny`: a random checkpoint of a few MB in diffusers layout, for trials and tests. It makes patterns, not scenes.

Two experts, a UMT5 encoder with a real small tokenizer (any text, by byte fallback), a VAE with all its up-samplings.
torch, diffusers and transformers are imported when it is built.
"""

import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMAT = 1  # in the name of the cached folder; raise it when the checkpoint changes
SEED = 20220
TEXT_WIDTH = 64
BOUNDARY_RATIO = 0.875
I2V_CHANNELS = 36  # 16 of noise, 4 of mask, 16 of the encoded video
_WORDS = """
a the of in on and with at to is from over under by red blue green yellow white black golden silver orange
purple circle square triangle ball cube fox cat dog bird horse fish child woman man robot dragon city forest
river ocean sea mountain desert snow rain storm cloud sky sun moon star light shadow night day morning evening
sunset sunrise street house castle bridge tower garden field road car train boat ship plane rocket camera shot
close up wide slow motion moving left right down still growing shrinking rotating walking running jumping
flying swimming dancing cooking looking smiling background foreground cinematic film style realistic animation
painting detailed high quality low blurry text watermark static overexposed through into across around between
water fire wind glass wood metal stone s ing ed er ly tion ness ment able ight ound ain ear oo ee th sh ch st
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between the variants."""

    heads: int = 8
    head_width: int = 16
    ffn: int = 256
    layers: int = 3
    experts: int = 2
    in_channels: int = 16
    is_5b: bool = False  # its residual autoencoder, 48 latent channels, a timestep of their own for image tokens


VARIANTS = {
    "default": Sizes(),
    "head128": Sizes(heads=2, head_width=128, ffn=384, layers=2),
    "single": Sizes(layers=2, experts=1),
    "i2v": Sizes(in_channels=36, layers=2),
    "ti2v": Sizes(in_channels=48, layers=2, experts=1, is_5b=True),
}


def ensure_tiny(cache_dir: Path, variant: str = "default") -> Path:
    """The checkpoint's folder inside `cache_dir`, built first if need be; several processes may call this at once."""
    folder = cache_dir / f"tiny-{variant}-{FORMAT}"
    if (folder / "model_index.json").is_file():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache_dir))
    try:
        build_tiny(scratch / "built", variant)
        (scratch / "built").rename(folder)
    except OSError:
        if not (folder / "model_index.json").is_file():  # else another process was first, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def build_tiny(folder: Path, variant: str = "default") -> Path:
    """Write one of `VARIANTS` to `folder`, with the same weights each time; returns it."""
    from diffusers import UniPCMultistepScheduler

    sizes = VARIANTS[variant]
    tokenizer = _tokenizer(folder)
    pipeline = _pipeline_class(sizes)(
        tokenizer=tokenizer,
        text_encoder=_text_encoder(),
        vae=_vae_5b() if sizes.is_5b else _vae(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=_transformer(sizes, SEED + 1),
        transformer_2=_transformer(sizes, SEED + 2) if sizes.experts == 2 else None,
        boundary_ratio=BOUNDARY_RATIO if sizes.experts == 2 else None,
        expand_timesteps=sizes.is_5b,
    )
    pipeline.save_pretrained(folder)
    return folder


def _pipeline_class(sizes: Sizes) -> Any:
    import diffusers

    name = "WanImageToVideoPipeline" if sizes.in_channels == I2V_CHANNELS else "WanPipeline"
    return getattr(diffusers, name)


def _transformer(sizes: Sizes, seed: int) -> Any:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        in_channels=sizes.in_channels,
        out_channels=48 if sizes.is_5b else 16,
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_width,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=sizes.ffn,
        num_layers=sizes.layers,
    )
    _fill(model, seed)
    return model


def _text_encoder() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=_padded(len(_vocabulary())), d_model=TEXT_WIDTH, d_kv=8, d_ff=128, num_layers=2, num_heads=8
    )
    model = UMT5EncoderModel(config)
    _fill(model, SEED + 3)
    return model


def _vae() -> Any:
    from diffusers import AutoencoderKLWan

    model = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    _fill(model, SEED + 4)
    return model


def _vae_5b() -> Any:
    import torch
    from diffusers import AutoencoderKLWan

    generator = torch.Generator("cpu").manual_seed(SEED + 6)
    mean, std = torch.randn(48, generator=generator) * 0.2, 0.5 + torch.rand(48, generator=generator)
    model = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        latents_mean=mean.tolist(),
        latents_std=std.tolist(),
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    _fill(model, SEED + 5)
    return model


def _fill(module: "nn.Module", seed: int) -> None:
    """Random weights that keep activations near 1: matrices by their fan-in, gains near 1, biases near 0."""
    import torch

    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    module.eval()


def _scaled(name: str, noise: "torch.Tensor") -> "torch.Tensor":
    if name.endswith(("gamma", "norm.weight", "norm2.weight", "norm_q.weight", "norm_k.weight")) or noise.ndim < 2:
        gain = "bias" not in name
        return 1 + 0.1 * noise if gain else 0.05 * noise
    if "scale_shift_table" in name:
        return 0.3 * noise
    if "shared" in name or "embed_tokens" in name or "relative_attention_bias" in name:
        return noise
    return noise / math.sqrt(math.prod(noise.shape[1:]))


def _vocabulary() -> list[tuple[str, float]]:
    """Pieces and scores of a Unigram model: specials, all 256 bytes, printable ASCII, words and endings."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [("\u2581", -4.0)]
    pieces += [(chr(code), -10.0) for code in range(0x21, 0x7F)]
    words = _WORDS.split()
    known = dict.fromkeys([f"\u2581{word}" for word in words] + [word for word in words if len(word) > 1])
    return pieces + [(word, -5.0 - 0.01 * rank) for rank, word in enumerate(known)]


def _padded(count: int) -> int:
    """Vocabulary rows, so that they divide among 64 ranks."""
    return -(-count // 64) * 64


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(Unigram(_vocabulary(), unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="\u2581")])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    target = folder / "tokenizer"
    target.mkdir(parents=True)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return PreTrainedTokenizerFast.from_pretrained(str(target))

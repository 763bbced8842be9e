"""Whole-clip forward passes of diffusers' `AutoencoderKLWan`, for training.

diffusers feeds the autoencoder frame by frame through a cache of features. The functions
here run the same modules over a whole clip at once, which gives the same numbers (a test
holds that) about twice as fast and with plain gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
    WanUpBlock,
)
from torch import Tensor, nn

STEM_BLOCKS = 3  # blocks of the encoder before the first that halves time


def causal_conv(conv: WanCausalConv3d, x: Tensor) -> Tensor:
    """[B, C, T, H, W] -> [B, C', T, H, W]: zeros before the first frame, none after the last."""
    kernel = conv.kernel_size
    if kernel == (1, 1, 1):
        return F.conv3d(x, conv.weight, conv.bias)
    side = (0, kernel[1] // 2, kernel[2] // 2)
    if x.shape[2] == 1:  # a single frame meets only the last tap in time
        y = F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=side[1:])
        return y.unsqueeze(2)
    x = F.pad(x, (0, 0, 0, 0, kernel[0] - 1, 0))
    return F.conv3d(x, conv.weight, conv.bias, padding=side)


def _norm(x: Tensor, gamma: Tensor) -> Tensor:
    """RMS over the channels, in float32, times gamma: [B, C, ...] -> the same."""
    wide = x.float()
    scale = x.shape[1] ** 0.5 / wide.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return (wide * scale * gamma.float()).to(x.dtype)


def _norm_silu(x: Tensor, gamma: Tensor) -> Tensor:
    """`_norm`, then SiLU."""
    return F.silu(_norm(x, gamma))


norm_silu = _norm_silu


def use_compiled_norm() -> None:
    """Fuse norm and SiLU into one loop; worth it only for long training."""
    global norm_silu  # noqa: PLW0603  one switch for the whole process
    torch._dynamo.config.recompile_limit = 200  # noqa: SLF001  it has no public name
    norm_silu = torch.compile(_norm_silu, dynamic=False)


def residual(block: WanResidualBlock, x: Tensor) -> Tensor:
    """One residual block on a whole clip."""
    short = x if isinstance(block.conv_shortcut, nn.Identity) else causal_conv(block.conv_shortcut, x)
    x = causal_conv(block.conv1, norm_silu(x, block.norm1.gamma))
    return short + causal_conv(block.conv2, norm_silu(x, block.norm2.gamma))


def attention(block: WanAttentionBlock, x: Tensor) -> Tensor:
    """Single-head attention within each frame."""
    b, c, t, h, w = x.shape
    frames = x.transpose(1, 2).reshape(b * t, c, h, w)
    qkv = block.to_qkv(_norm(frames, block.norm.gamma)).flatten(2).transpose(1, 2).unsqueeze(1)
    q, k, v = qkv.chunk(3, dim=-1)
    out = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous())
    out = block.proj(out.squeeze(1).transpose(1, 2).reshape(b * t, c, h, w))
    return x + out.view(b, t, c, h, w).transpose(1, 2)


def per_frame(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a 2D module to every frame."""
    b, c, t, h, w = x.shape
    frames = x.transpose(1, 2).reshape(b * t, c, h, w)
    frames = module(frames.contiguous(memory_format=torch.channels_last))
    return frames.view(b, t, *frames.shape[1:]).transpose(1, 2)


def upsample(block: WanResample, x: Tensor) -> Tensor:
    """Double the sides; double every frame but the first where the block says so."""
    if block.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        b, c, t, h, w = rest.shape
        pairs = causal_conv(block.time_conv, rest).reshape(b, 2, c, t, h, w)
        x = torch.cat([first, torch.stack((pairs[:, 0], pairs[:, 1]), 3).reshape(b, c, 2 * t, h, w)], 2)
    return per_frame(nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), block.resample[1]), x)


def downsample(block: WanResample, x: Tensor) -> Tensor:
    """Halve the sides; halve the frames after the first where the block says so."""
    x = per_frame(block.resample, x)
    return halve_time(block, x) if block.mode == "downsample3d" else x


def halve_time(block: WanResample, x: Tensor) -> Tensor:
    """Keep the first frame, make one of every two that follow."""
    if x.shape[2] == 1:
        return x
    conv = block.time_conv
    return torch.cat([x[:, :, :1], F.conv3d(x, conv.weight, conv.bias, stride=(2, 1, 1))], 2)


def middle(block: WanMidBlock, x: Tensor) -> Tensor:
    """Residual, attention, residual."""
    x = residual(block.resnets[0], x)
    return residual(block.resnets[1], attention(block.attentions[0], x))


def encode(vae: AutoencoderKLWan, video: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 3, 4k+1, H, W] in -1..1 -> mean and log-variance [B, 16, k+1, H/8, W/8]."""
    return encoder_trunk(vae, encoder_stem(vae, video))


def encoder_stem(vae: AutoencoderKLWan, video: Tensor) -> Tensor:
    """The part of the encoder before time is first halved: [B, 3, T, H, W] -> [B, 32, T, H/4, W/4]."""
    x = causal_conv(vae.encoder.conv_in, video)
    for block in vae.encoder.down_blocks[:STEM_BLOCKS]:
        x = residual(block, x) if isinstance(block, WanResidualBlock) else downsample(block, x)
    return per_frame(vae.encoder.down_blocks[STEM_BLOCKS].resample, x)


def encoder_trunk(vae: AutoencoderKLWan, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of the encoder, from the stem's features."""
    encoder = vae.encoder
    x = halve_time(encoder.down_blocks[STEM_BLOCKS], x)
    for block in encoder.down_blocks[STEM_BLOCKS + 1 :]:
        x = residual(block, x) if isinstance(block, WanResidualBlock) else downsample(block, x)
    x = head(encoder, middle(encoder.mid_block, x))
    mean, log_variance = causal_conv(vae.quant_conv, x).chunk(2, dim=1)
    return mean, log_variance


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """[B, 16, k+1, h, w] -> [B, 3, 4k+1, 8h, 8w], not clamped (a clamp kills gradients)."""
    return decoder_crown(vae, decoder_trunk(vae, latents))


def decoder_trunk(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """The decoder until time has its full length: [B, 16, k+1, h, w] -> [B, 32, 4k+1, 4h, 4w]."""
    x = causal_conv(vae.decoder.conv_in, causal_conv(vae.post_quant_conv, latents))
    x = middle(vae.decoder.mid_block, x)
    for block in vae.decoder.up_blocks[:2]:
        x = up_block(block, x)
    return x


def decoder_crown(vae: AutoencoderKLWan, x: Tensor) -> Tensor:
    """The rest of the decoder, from the trunk's features."""
    for block in vae.decoder.up_blocks[2:]:
        x = up_block(block, x)
    return head(vae.decoder, x)


def up_block(block: WanUpBlock, x: Tensor) -> Tensor:
    """Residual blocks, then the up-sampling if there is one."""
    for resnet in block.resnets:
        x = residual(resnet, x)
    return x if block.upsamplers is None else upsample(block.upsamplers[0], x)


def head(part: nn.Module, x: Tensor) -> Tensor:
    """The norm, SiLU and convolution that end the encoder and the decoder."""
    norm: WanRMS_norm = part.norm_out
    return causal_conv(part.conv_out, norm_silu(x, norm.gamma))


def inflate(vae: AutoencoderKLWan) -> None:
    """Start in time from repetition, so that a clip begins as good as its frames were.

    Taps in the past start at zero; a latent frame starts as the last of its four frames,
    and comes back as four equal ones.
    """
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3):
                module.weight[:, :, :-1] = 0
            if isinstance(module, WanResample) and hasattr(module, "time_conv"):
                conv = module.time_conv
                conv.weight.zero_()
                conv.bias.zero_()
                eye = torch.eye(conv.in_channels)
                conv.weight[:, :, -1, 0, 0] = eye.repeat(conv.out_channels // conv.in_channels, 1)

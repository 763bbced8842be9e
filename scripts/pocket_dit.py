"""A forward pass of diffusers' `WanTransformer3DModel` for training, with folded padding.

Wan pads the text to 512 rows with zeros and lets every padded row take part in the
cross-attention. All padded rows have the same key and value, so one of them with the
logarithm of their number added to its logit gives the same attention at a fraction of
the cost (a test holds that).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from torch import Tensor

TEXT_ROWS = 512

# B batch, L tokens, C width, H heads, D head width, R text rows


def forward(model: WanTransformer3DModel, latents: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    """Velocity [B, 16, T, H, W] from latents of that shape, timestep [B] and text [B, R, E] with mask [B, R]."""
    rope = [part.squeeze(0).transpose(0, 1) for part in model.rope(latents)]
    cos, sin = rope[0][..., 0::2], rope[1][..., 1::2]
    x = model.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
    folded, bias = fold(text, mask)
    temb, modulation, context, _ = model.condition_embedder(timestep, folded, None)
    modulation = modulation.unflatten(1, (6, -1))
    for block in model.blocks:
        x = run_block(block, x, context, bias, modulation, (cos, sin))
    shift, scale = (model.scale_shift_table + temb.unsqueeze(1)).chunk(2, dim=1)
    x = model.proj_out(norm(x) * (1 + scale) + shift)
    return unpatch(x, latents.shape)


def fold(text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Text rows plus one padded row, and the logits' bias [B, 1, 1, R + 1]."""
    real = mask.bool()
    rows = torch.cat([text * real.unsqueeze(-1), text.new_zeros(len(text), 1, text.shape[2])], 1)
    bias = torch.zeros(real.shape, dtype=torch.float32).masked_fill(~real, float("-inf"))
    padded = (TEXT_ROWS - real.sum(1, keepdim=True)).float().log()
    return rows, torch.cat([bias, padded], 1)[:, None, None]


def norm(x: Tensor) -> Tensor:
    """LayerNorm without weights, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=1e-6)


def unpatch(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, L, 4 * 16] -> [B, 16, T, H, W] for patches of 1 x 2 x 2."""
    b, c, t, h, w = shape
    x = x.reshape(b, t, h // 2, w // 2, 1, 2, 2, c).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def run_block(
    block: WanTransformerBlock,
    x: Tensor,
    context: Tensor,
    bias: Tensor,
    modulation: Tensor,
    rope: tuple[Tensor, Tensor],
) -> Tensor:
    """One block: self-attention, cross-attention, feed-forward; x [B, L, C] float32."""
    shift, scale, gate, shift_2, scale_2, gate_2 = (block.scale_shift_table + modulation.float()).chunk(6, dim=1)
    y = norm(x) * (1 + scale) + shift
    x = x + attend(block.attn1, y, y, None, rope) * gate
    y = F.layer_norm(x, x.shape[-1:], block.norm2.weight, block.norm2.bias, 1e-6)
    x = x + attend(block.attn2, y, context, bias, None)
    up, down = block.ffn.net[0].proj, block.ffn.net[2]
    y = norm(x) * (1 + scale_2) + shift_2
    return x + down(F.gelu(up(y), approximate="tanh")).float() * gate_2


def attend(
    attn: WanAttention, x: Tensor, source: Tensor, bias: Tensor | None, rope: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Multi-head attention of x [B, L, C] to source [B, R, C], queries and keys normalised across heads."""
    q = rms(attn.to_q(x), attn.norm_q.weight, attn.norm_q.eps)
    k = rms(attn.to_k(source), attn.norm_k.weight, attn.norm_k.eps)
    q, k, v = (y.unflatten(2, (attn.heads, -1)).transpose(1, 2) for y in (q, k, attn.to_v(source)))
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    if bias is not None:
        bias = bias.to(v.dtype)
    out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=bias)
    return attn.to_out[0](out.transpose(1, 2).flatten(2)).float()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, H, L, D] with tables [1, L, D/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

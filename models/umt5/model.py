"""UMT5's encoder: relative position bias in each layer, unscaled attention, gated GELU.

Source: transformers' `UMT5EncoderModel`; the numbers agree with it.
B batch, L tokens, H heads, D head width, W model width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.umt5.spec import Umt5Spec


class RmsNorm(nn.Module):
    """T5's norm: x / rms(x) * weight, the mean square in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] in any float dtype -> the same shape in the weight's dtype."""
        mean_square = x_BLW.float().square().mean(-1, keepdim=True)
        return self.weight * (x_BLW * torch.rsqrt(mean_square + self.eps)).to(self.weight.dtype)


def position_buckets(length: int, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each (query, key) distance: [L, L] int32, made on the host, so that graphs hold no such arithmetic.

    Half of the buckets for each direction; distances below a quarter of `num_buckets` have their own, the others share
    logarithmically (T5).
    """
    positions = torch.arange(length)
    distance = positions[None, :] - positions[:, None]
    half = num_buckets // 2
    exact = half // 2
    far = distance.abs().float().clamp_min(1) / exact
    shared = exact + (torch.log(far) / math.log(max_distance / exact) * (half - exact)).long()
    near = distance.abs() < exact
    buckets = torch.where(near, distance.abs(), shared.clamp_max(half - 1)) + (distance > 0).long() * half
    return buckets.to(torch.int32)


class SelfAttention(nn.Module):
    """Attention over the tokens with a learned bias per head and distance bucket."""

    def __init__(self, spec: Umt5Spec) -> None:
        super().__init__()
        inner = spec.num_heads * spec.d_kv
        self.head_width = spec.d_kv
        self.to_qkv = nn.Linear(spec.d_model, 3 * inner, bias=False)
        self.to_out = nn.Linear(inner, spec.d_model, bias=False)
        self.position_bias = nn.Embedding(spec.relative_attention_num_buckets, spec.num_heads)

    def forward(self, x_BLW: Tensor, buckets_LL: Tensor, mask_BL: Tensor | None) -> Tensor:
        """[B, L, W] -> [B, L, W]; heads are inferred from the local width."""
        batch, length, _ = x_BLW.shape
        qkv = self.to_qkv(x_BLW).view(batch, length, 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.position_bias(buckets_LL).permute(2, 0, 1).unsqueeze(0)
        if mask_BL is not None:
            bias = bias + torch.zeros_like(bias[:, :1]).masked_fill(~mask_BL[:, None, None, :], float("-inf"))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        out_BLW: Tensor = self.to_out(out.transpose(1, 2).reshape(batch, length, -1))
        return out_BLW


class FeedForward(nn.Module):
    """Gated GELU (tanh form): down(gelu(gate(x)) * up(x))."""

    def __init__(self, spec: Umt5Spec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.up = nn.Linear(spec.d_model, spec.d_ff, bias=False)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=False)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> [B, L, W]."""
        out: Tensor = self.down(functional.gelu(self.gate(x_BLW), approximate="tanh") * self.up(x_BLW))
        return out


class Block(nn.Module):
    """One encoder layer."""

    def __init__(self, spec: Umt5Spec) -> None:
        super().__init__()
        self.norm1 = RmsNorm(spec.d_model, spec.layer_norm_epsilon)
        self.attn = SelfAttention(spec)
        self.norm2 = RmsNorm(spec.d_model, spec.layer_norm_epsilon)
        self.ffn = FeedForward(spec)

    def forward(self, x_BLW: Tensor, buckets_LL: Tensor, mask_BL: Tensor | None) -> Tensor:
        """[B, L, W] -> [B, L, W]."""
        x_BLW = x_BLW + self.attn(self.norm1(x_BLW), buckets_LL, mask_BL)
        out: Tensor = x_BLW + self.ffn(self.norm2(x_BLW))
        return out


class Umt5Encoder(nn.Module):
    """Token ids to text embeddings."""

    def __init__(self, spec: Umt5Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.d_model)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.final_norm = RmsNorm(spec.d_model, spec.layer_norm_epsilon)

    def buckets(self, length: int) -> Tensor:
        """The position buckets [L, L] int32 of this encoder, on the host."""
        spec = self.spec
        return position_buckets(length, spec.relative_attention_num_buckets, spec.relative_attention_max_distance)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor | None = None, buckets_LL: Tensor | None = None) -> Tensor:
        """Ids [B, L] int32, mask [B, L] bool (True: a token; None: all are) -> [B, L, W] in the weights' dtype.

        buckets [L, L] int32: what `buckets` gives, on the ids' device; None: made here.
        """
        if buckets_LL is None:
            buckets_LL = self.buckets(ids_BL.shape[1]).to(ids_BL.device)
        x_BLW = self.embed(ids_BL)
        for block in self.blocks:
            x_BLW = block(x_BLW, buckets_LL, mask_BL)
        out: Tensor = self.final_norm(x_BLW)
        return out

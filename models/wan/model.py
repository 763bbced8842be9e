"""The Wan2.2 video DiT.

Source: diffusers' `WanTransformer3DModel`; on float32 weights the numbers agree with it to rounding.
B batch, L tokens, S text rows, H heads (of this rank), D head width, W model width.

Residual sums are carried into the next norm (`kernels.adaln`), so a block takes and returns the stream before its last
sum. The attributes `attend`, `mean_squares`, `mean_square`, `tokens` and `settle` are where a mesh steps in; a module
may then see a part of the tokens and of the heads, so widths and lengths are read from the tensors at hand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.adaln import adaln
from kernels.attention import attention
from kernels.qk_norm_rope import head_norm, qk_norm_rope
from models.wan.spec import TransformerSpec

Attend = Callable[[Tensor, Tensor, Tensor, float | None, int | None], tuple[Tensor, Tensor]]
Rope = tuple[Tensor, Tensor]


class Tokens(Protocol):
    """Which of a clip's tokens are computed here."""

    def scatter(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] of the clip -> the rows held here."""

    def scatter_rope(self, rope: Rope) -> Rope:
        """Tables [L, D / 2] of the clip -> those of the rows that attention sees here."""

    def gather(self, x_BLW: Tensor, num_tokens: int) -> Tensor:
        """The rows held here -> [B, num_tokens, W] of the clip."""


class AllTokens:
    """All of them."""

    def scatter(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] as it is."""
        return x_BLW

    def scatter_rope(self, rope: Rope) -> Rope:
        """The tables [L, D / 2] as they are."""
        return rope

    def gather(self, x_BLW: Tensor, num_tokens: int) -> Tensor:
        """[B, L, W] as it is."""
        del num_tokens
        return x_BLW


@dataclass(frozen=True, slots=True)
class TextKeys:
    """Text as one layer's cross-attention sees it.

    k, v: [B, S, H, D]. With `repeats` = 0 all S rows count once. Else the last row stands for the zero padding: it
    counts `repeats` times (padding rows are equal, so their keys and values are).
    """

    k: Tensor
    v: Tensor
    repeats: int


@dataclass(frozen=True, slots=True)
class Modulation:
    """What the timestep does to the blocks.

    values: [K, 6, W] float32, one set per timestep of the clip, K is 1 or 2. later: [1, N, 1] bool, whether a token
    held here takes the second of two sets; None: there is one for all.
    """

    values: Tensor
    later: Tensor | None = None

    def split(self, table_1MW: Tensor) -> tuple[Tensor, ...]:
        """The values plus a table [1, M, W], as M tensors [1, 1 or N, W]."""
        return tuple(self.of_tokens(part) for part in (table_1MW + self.values).unbind(1))

    def of_tokens(self, part_KW: Tensor) -> Tensor:
        """[K, W] -> [1, 1 or N, W], each token's."""
        return part_KW.unsqueeze(1) if self.later is None else torch.where(self.later, part_KW[1], part_KW[0])


@dataclass(frozen=True, slots=True)
class Frame:
    """What the blocks of one evaluation share.

    embedded: the timestep's, for the last norm. rope: of the tokens that attention sees here. num_tokens: of the whole
    clip. size: (T, h, w) of the latents.
    """

    modulation: Modulation
    embedded: Modulation
    rope: Rope
    num_tokens: int
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream [B, L, W] before a sum: base + gate * branch; a gate of None is 1, a branch of None is 0."""

    base: Tensor
    branch: Tensor | None = None
    gate: Tensor | None = None

    def total(self) -> Tensor:
        """The sum [B, L, W], done in float32 and rounded to the stream's dtype as the next norm would do it."""
        if self.branch is None:
            return self.base
        branch = self.branch.float() if self.gate is None else self.gate * self.branch.float()
        return (self.base.float() + branch).to(self.branch.dtype)

    def norm(
        self, scale: Tensor | None, shift: Tensor | None, affine: "Affine | None", eps: float
    ) -> tuple[Tensor, Tensor]:
        """Do the sum and normalise it: (stream, normalised and modulated), both [B, L, W]."""
        weight, bias = (None, None) if affine is None else (affine.weight, affine.bias)
        if self.branch is None:
            return adaln(self.base, None, None, scale, shift, weight, bias, eps)
        return adaln(self.branch, self.base, self.gate, scale, shift, weight, bias, eps)


class Affine(nn.Module):
    """The weight and bias of a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))


class Gain(nn.Module):
    """The gain of an RMSNorm over all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class SelfAttention(nn.Module):
    """Attention among the clip's tokens with rotary positions; projections are fused and in half layout."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.head_width, self.eps = spec.attention_head_dim, spec.eps
        self.to_qkv = nn.Linear(spec.width, 3 * spec.width)
        self.norm_q = Gain(spec.width)
        self.norm_k = Gain(spec.width)
        self.to_out = nn.Linear(spec.width, spec.width)
        self.attend: Attend = attention
        self.mean_squares: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BLW: Tensor, rope: Rope, num_tokens: int) -> Tensor:
        """[B, L, W] -> [B, L, W]; rope: cos and sin, each [L, D / 2] float32; num_tokens: of the whole clip."""
        q, k, v = self.to_qkv(x_BLW).unflatten(-1, (3, -1, self.head_width)).unbind(2)
        mean_squares = None if self.mean_squares is None else self.mean_squares(q, k)
        q, k = qk_norm_rope(q, k, self.norm_q.weight, self.norm_k.weight, *rope, self.eps, mean_squares)
        out_BLHD, _ = self.attend(q, k, v, None, num_tokens)
        out_BLW: Tensor = self.to_out(out_BLHD.flatten(2))
        return out_BLW


def for_texts(x_NLW: Tensor, num_texts: int) -> Tensor:
    """[N, L, ...] of N clips -> [num_texts, L, ...]: a clip's row for each of its texts, which stand together."""
    if x_NLW.shape[0] == num_texts:
        return x_NLW
    if x_NLW.shape[0] == 1:
        return x_NLW.expand(num_texts, *x_NLW.shape[1:])
    return x_NLW.repeat_interleave(num_texts // x_NLW.shape[0], 0)


class CrossAttention(nn.Module):
    """Attention from the clip's tokens to the text; keys and values are made once per text."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.head_width, self.eps = spec.attention_head_dim, spec.eps
        self.to_q = nn.Linear(spec.width, spec.width)
        self.to_kv = nn.Linear(spec.width, 2 * spec.width)
        self.norm_q = Gain(spec.width)
        self.norm_k = Gain(spec.width)
        self.to_out = nn.Linear(spec.width, spec.width)
        self.attend: Attend = attention
        self.mean_square: Callable[[Tensor], Tensor] | None = None

    def keys(self, text_BSW: Tensor, repeats: int) -> TextKeys:
        """Keys and values of embedded text [B, S, W]."""
        batch, rows, _ = text_BSW.shape
        k, v = self.to_kv(text_BSW).view(batch, rows, 2, -1, self.head_width).unbind(2)
        return TextKeys(self._normal(k, self.norm_k), v.contiguous(), repeats)

    def forward(self, x_BLW: Tensor, text: TextKeys) -> Tensor:
        """[N, L, W] -> [B, L, W]; each of N clips meets its own share of the B texts, see `for_texts`."""
        q_BLHD = self._normal(self.to_q(x_BLW).unflatten(-1, (-1, self.head_width)), self.norm_q)
        q_BLHD = for_texts(q_BLHD, text.k.shape[0])
        if text.repeats:
            out_BLHD = self._attend_padded(q_BLHD, text)
        else:
            out_BLHD, _ = self.attend(q_BLHD, text.k, text.v, None, None)
        out_BLW: Tensor = self.to_out(out_BLHD.flatten(2))
        return out_BLW

    def _attend_padded(self, q_BLHD: Tensor, text: TextKeys) -> Tensor:
        """Attention over the text rows, merged by log-sum-exp with one padding row that counts `repeats` times."""
        out_BLHD, lse_BHL = self.attend(q_BLHD, text.k[:, :-1], text.v[:, :-1], None, None)
        pad_BHD1 = text.k[:, -1].unsqueeze(-1) * self.head_width**-0.5
        score_BHL = (q_BLHD.transpose(1, 2) @ pad_BHD1).squeeze(-1).float()
        weight_BHL = torch.sigmoid(score_BHL + math.log(text.repeats) - lse_BHL)
        return torch.lerp(out_BLHD, text.v[:, -1:], weight_BHL.transpose(1, 2).unsqueeze(-1).to(out_BLHD.dtype))

    def _normal(self, x_BLHD: Tensor, gain: Gain) -> Tensor:
        mean_square = None if self.mean_square is None else self.mean_square(x_BLHD)
        return head_norm(x_BLHD, gain.weight, self.eps, mean_square)


class FeedForward(nn.Module):
    """down(gelu(up(x))), GELU in its tanh form."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> [B, L, W]."""
        out: Tensor = self.down(functional.gelu(self.up(x_BLW), approximate="tanh"))
        return out


class Block(nn.Module):
    """Self-attention, cross-attention, feed-forward; the first and the last modulated by the timestep."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.eps = spec.eps
        self.attn1 = SelfAttention(spec)
        self.norm2 = Affine(spec.width)
        self.attn2 = CrossAttention(spec)
        self.ffn = FeedForward(spec.width, spec.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, spec.width))

    def forward(self, stream: Stream, modulation: Modulation, rope: Rope, num_tokens: int, text: TextKeys) -> Stream:
        """One block on the stream; num_tokens: of the whole clip."""
        shift1, scale1, gate1, shift3, scale3, gate3 = modulation.split(self.scale_shift_table)
        x, normal = stream.norm(scale1, shift1, None, self.eps)
        x, normal = Stream(x, self.attn1(normal, rope, num_tokens), gate1).norm(None, None, self.norm2, self.eps)
        branch = self.attn2(normal, text)
        x, normal = Stream(for_texts(x, branch.shape[0]), branch).norm(scale3, shift3, None, self.eps)
        return Stream(x, self.ffn(normal), gate3)


class TwoLayers(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, inner: int, width: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inner, width)
        self.linear_2 = nn.Linear(width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., inner] -> [..., width]."""
        out: Tensor = self.linear_2(self.activation(self.linear_1(x)))
        return out


def _once(evaluate: Callable[[], Any]) -> Any:
    """The result of one run."""
    return evaluate()


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


class WanTransformer(nn.Module):
    """One expert: noisy latents, timestep and text to a velocity."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.spec = spec
        patch = math.prod(spec.patch_size)
        self.patch_embedding = nn.Linear(spec.in_channels * patch, spec.width)
        self.time_embedder = TwoLayers(spec.freq_dim, spec.width, functional.silu)
        self.time_proj = nn.Linear(spec.width, 6 * spec.width)
        self.text_embedder = TwoLayers(spec.text_dim, spec.width, _gelu_tanh)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, spec.width))
        self.proj_out = nn.Linear(spec.width, spec.out_channels * patch)
        self.tokens: Tokens = AllTokens()
        self.settle: Callable[[Callable[[], Any]], Any] = _once  # runs an evaluation, again if the host finds it wrong

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large matrices and of the stream."""
        return self.patch_embedding.weight.dtype

    def text_keys(self, text_BSE: Tensor, repeats: int = 0) -> list[TextKeys]:
        """Each layer's keys and values of encoder output [B, S, text width]; `repeats` as in `TextKeys`."""
        text_BSW = self.text_embedder(text_BSE.to(self.dtype))
        return [block.attn2.keys(text_BSW, repeats) for block in self.blocks if isinstance(block, Block)]

    def forward(self, latents: Tensor, timestep: Tensor, text: list[TextKeys], rope: Rope) -> Tensor:
        """The velocity of one clip under each text.

        latents: [1, C, T, h, w] float32, C = in_channels; timestep: float32, [1], or [2] when the tokens of the first
        latent frame have one of their own: theirs, then that of all others; text: of a batch B; rope: the clip's
        tables, each [L, D / 2] float32. Returns [B, out_channels, T, h, w] float32.
        """
        frame, stream = self.begin(latents, timestep, rope)
        return self.end(frame, self.through(frame, stream, text, slice(None)))

    def begin(self, latents: Tensor, timestep: Tensor, rope: Rope) -> tuple[Frame, Stream]:
        """The stream [1, N, W] before the first block, and what all blocks need; arguments as in `forward`."""
        patches = patchify(latents.to(self.dtype), self.spec.patch_size)
        embedded, values = self._embed_time(timestep)
        later = self._later(patches, latents.shape[2]) if timestep.shape[0] > 1 else None
        ends = Modulation(embedded.unsqueeze(1), later)
        local = self.tokens.scatter_rope(rope)
        frame = Frame(Modulation(values, later), ends, local, patches.shape[1], tuple(latents.shape[2:]))
        return frame, Stream(self.patch_embedding(self.tokens.scatter(patches)))  # patches are 80 times narrower

    def through(self, frame: Frame, stream: Stream, text: list[TextKeys], which: slice) -> Stream:
        """The stream behind some of the blocks, each layer with its keys of the text."""
        for block, keys in list(zip(self.blocks, text, strict=True))[which]:
            stream = block(stream, frame.modulation, frame.rope, frame.num_tokens, keys)
        return stream

    def end(self, frame: Frame, stream: Stream) -> Tensor:
        """The velocity [B, out_channels, T, h, w] float32 from the stream behind the last block."""
        shift, scale = frame.embedded.split(self.scale_shift_table)
        _, normal = stream.norm(scale, shift, None, self.spec.eps)
        velocity = self.tokens.gather(self.proj_out(normal), frame.num_tokens)
        return unpatchify(velocity, frame.size, self.spec).float()

    def _later(self, patches_BLP: Tensor, num_frames: int) -> Tensor:
        """[1, N, 1] bool for the tokens held here: whether they lie behind the first latent frame."""
        num_tokens = patches_BLP.shape[1]
        first = num_tokens // (num_frames // self.spec.patch_size[0])
        is_later = torch.arange(num_tokens, dtype=torch.int32, device=patches_BLP.device) >= first
        return self.tokens.scatter(is_later.view(1, -1, 1))

    def _embed_time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """[K] -> embeddings [K, W] and their six modulations [K, 6, W], rounded where diffusers rounds, as float32."""
        embedded = self.time_embedder(sinusoids(timestep, self.spec.freq_dim)).to(self.dtype)
        modulation = self.time_proj(functional.silu(embedded))
        return embedded.float(), modulation.unflatten(1, (6, -1)).float()


def sinusoids(timestep: Tensor, width: int) -> Tensor:
    """[B] float32 -> [B, width] float32, cosines first (diffusers' `Timesteps` with its sines and cosines flipped)."""
    half = width // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) * -math.log(10000.0) / half
    angles = timestep.float()[:, None] * torch.exp(exponent)[None, :]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """[B, C, T, h, w] -> [B, L, C * prod(patch)], channels outermost as in a flattened convolution kernel."""
    batch, channels, frames, rows, columns = latents.shape
    time, tall, wide = patch
    split = latents.view(batch, channels, frames // time, time, rows // tall, tall, columns // wide, wide)
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, -1, channels * time * tall * wide)


def unpatchify(tokens_BLP: Tensor, size: tuple[int, ...], spec: TransformerSpec) -> Tensor:
    """[B, L, prod(patch) * C] -> [B, C, T, h, w]; `size` is (T, h, w)."""
    time, tall, wide = spec.patch_size
    frames, rows, columns = size
    grid = (frames // time, rows // tall, columns // wide)
    split = tokens_BLP.view(-1, *grid, time, tall, wide, spec.out_channels)
    return split.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, spec.out_channels, frames, rows, columns)

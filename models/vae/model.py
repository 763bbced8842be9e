"""The Wan autoencoder: blocks, encoder and decoder. Caches go in and come out as explicit tensors.

B batch, C channels, T frames, H rows, W columns.

A clip is fed a few frames at a time. The very first frame makes a call of its own: its causal history is zeros, so each
3x3x3 convolution needs only the last of its three taps in time. Later calls receive the caches of the call before.
A call may also see a strip of the frame only (`Cut`): every 3x3 convolution then spoils one line next to each inner
side of the strip, and that line is dropped at once.

Numbers follow diffusers' `AutoencoderKLWan`, https://github.com/huggingface/diffusers (Apache-2.0).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.conv3d import channel_norm, conv3d
from models.vae.spec import VaeSpec

CONTEXT_FRAMES = 2  # what a convolution over three frames remembers


@dataclass(frozen=True, slots=True)
class Cut:
    """Which sides of a strip lie inside the frame; `dim` is the tensor dim that is cut: 3 rows, 4 columns.

    excess: lines at each inner side that no kept pixel needs any more, behind each up-sampling of the rear.
    """

    dim: int = 3
    low: bool = False
    high: bool = False
    excess: tuple[int, ...] = ()

    def trim(self, x: Tensor, lines: int = 1) -> Tensor:
        """Drop `lines` lines at each inner side of [B, C, T, H, W]."""
        start = lines * self.low
        length = x.shape[self.dim] - start - lines * self.high
        return x.narrow(self.dim, start, length)


WHOLE = Cut()


class Memory:
    """The caches of one call: taken in the order in which the convolutions run, kept in the same order.

    Without old caches this is the call of a clip's first frame.
    """

    def __init__(self, old: Iterable[Tensor] | None = None) -> None:
        self.is_first = old is None
        self._old = [] if old is None else list(old)
        self.new: list[Tensor] = []

    def swap(self, x: Tensor, frames: int = CONTEXT_FRAMES) -> Tensor:
        """Give the remembered frames [B, C, frames, H, W]; remember the last ones of x [B, C, T, H, W] instead."""
        old = self._old[len(self.new)]
        tail = x[:, :, -frames:]
        missing = frames - tail.shape[2]
        self._keep(torch.cat([old[:, :, -missing:], tail], dim=2) if missing else tail)
        return old

    def start(self, x: Tensor) -> None:
        """Remember the first frame [B, C, 1, H, W] behind a frame of zeros."""
        self._keep(torch.cat([torch.zeros_like(x), x], dim=2))

    def start_bare(self, x: Tensor) -> None:
        """Remember the first frame [B, C, 1, H, W] alone."""
        self._keep(x)

    def start_empty(self, x: Tensor) -> None:
        """Remember two frames of zeros [B, C, 2, H, W] of the sizes of x [B, C, 1, H, W]."""
        self._keep(torch.cat([torch.zeros_like(x)] * 2, dim=2))

    def _keep(self, frames: Tensor) -> None:
        """A copy, as frames may be part of a large tensor; always in one layout, so that one graph takes all caches."""
        layout = torch.channels_last_3d if frames.is_cpu else torch.contiguous_format
        self.new.append(frames.clone(memory_format=layout))


class Conv(nn.Module):
    """Weights of one convolution and, where the checkpoint has a norm before it, that norm's gain."""

    def __init__(self, channels: int, out_channels: int, kernel: tuple[int, int, int], *, norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.gain = nn.Parameter(torch.empty(channels)) if norm else None
        self.padding = (kernel[1] // 2, kernel[2] // 2)

    def convolve(self, x: Tensor, context: Tensor | None = None, stride: tuple[int, int, int] = (1, 1, 1)) -> Tensor:
        """The convolution of [B, C, T, H, W] behind `context` [B, C, S, H, W], with its norm and SiLU."""
        return conv3d(x, self.weight, self.bias, self.padding, self.gain, self.gain is not None, stride, context)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T, H, W] with the history that `memory` holds."""
        if memory.is_first:
            memory.start(x)
            return conv3d(x, self.weight[:, :, -1:], self.bias, self.padding, self.gain, self.gain is not None)
        return self.convolve(x, memory.swap(x))


def conv_333(channels: int, out_channels: int, *, norm: bool = False) -> Conv:
    """A causal convolution over three frames, rows and columns."""
    return Conv(channels, out_channels, (3, 3, 3), norm=norm)


def added(x: Tensor, y: Tensor) -> Tensor:
    """The sum, [B, C, T, H, W] each; in the memory of x on a CPU (in a graph, a sum into a view is a scatter)."""
    return x.add_(y) if x.is_cpu else x + y


class ResidualBlock(nn.Module):
    """Twice norm, SiLU and convolution, beside a shortcut."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = conv_333(channels, out_channels, norm=True)
        self.conv2 = conv_333(out_channels, out_channels, norm=True)
        self.shortcut = Conv(channels, out_channels, (1, 1, 1)) if channels != out_channels else None

    def forward(self, x: Tensor, memory: Memory, cut: Cut = WHOLE) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T, H, W], two lines less at each inner side."""
        short = x if self.shortcut is None else self.shortcut.convolve(x)
        x = cut.trim(self.conv1(x, memory))
        x = cut.trim(self.conv2(x, memory))
        return added(x, cut.trim(short, 2))


class AttentionBlock(nn.Module):
    """One head of attention within each frame, over all its places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(channels))
        self.to_qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> the same shape."""
        B, C, T, H, W = x.shape
        frames = channel_norm(x, self.gain).permute(0, 2, 3, 4, 1).reshape(B * T, 1, H * W, C)
        q, k, v = self.to_qkv(frames).chunk(3, dim=-1)
        out: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v))
        return x + out.view(B, T, H, W, C).permute(0, 4, 1, 2, 3)


class MiddleBlock(nn.Module):
    """Residual, attention, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels) for _ in range(2)])
        self.attention = AttentionBlock(channels)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[B, C, T, H, W] -> the same shape."""
        x = self.resnets[0](x, memory)
        out: Tensor = self.resnets[1](self.attention(x), memory)
        return out


class Upsample(nn.Module):
    """Double the sides and, with `temporal`, every frame but the clip's first."""

    def __init__(self, channels: int, out_channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.time_conv = Conv(channels, 2 * channels, (3, 1, 1)) if temporal else None
        self.conv = Conv(channels, out_channels, (1, 3, 3))

    def forward(self, x: Tensor, memory: Memory, cut: Cut = WHOLE) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T or 2T, 2H, 2W], one line less at each inner side."""
        if self.time_conv is not None:
            x = self._double_frames(self.time_conv, x, memory)
        weight, bias = quarter_kernels(self.conv.weight), self.conv.bias.repeat(4)
        return cut.trim(interleave(conv3d(x, weight, bias, (1, 1))))

    @staticmethod
    def _double_frames(conv: Conv, x: Tensor, memory: Memory) -> Tensor:
        """The clip's first frame passes and is not even remembered: the next one sees zeros before it."""
        if memory.is_first:
            memory.start_empty(x)
            return x
        B, C, T, H, W = x.shape
        halves = conv.convolve(x, memory.swap(x)).chunk(2, dim=1)
        if not x.is_cpu:  # accelerators refuse strided assignment
            return torch.stack(halves, dim=3).flatten(2, 3)
        out = x.new_empty(B, 2 * T, H, W, C).permute(0, 4, 1, 2, 3)
        for place, frames in enumerate(halves):
            out[:, :, place::2] = frames
        return out


def quarter_kernels(weight: Tensor) -> Tensor:
    """[O, C, 1, 3, 3] -> [4 O, C, 1, 2, 2]: a 3x3 kernel on doubled rows and columns, as one 2x2 kernel for each of the
    four places of a doubled pixel (rows before columns). Taps that meet the same pixel are added up: 4 products, not 9.
    """
    one, two, three = weight.unbind(3)
    rows = (torch.stack([one, two + three], 3), torch.stack([one + two, three], 3))
    pairs = [row.unbind(4) for row in rows]
    kernels = [torch.stack(k, 4) for a, b, c in pairs for k in ((a, b + c), (a + b, c))]
    joined = torch.cat(kernels)
    return joined.contiguous(memory_format=torch.channels_last_3d) if joined.is_cpu else joined


def interleave(x: Tensor) -> Tensor:
    """[B, 4 C, T, H + 1, W + 1] of `quarter_kernels` with a padding of 1 -> [B, C, T, 2 H, 2 W].

    On a CPU channels are innermost; accelerators refuse strided assignment, so the places are stacked there.
    """
    B, C, T, H, W = x.shape[0], x.shape[1] // 4, x.shape[2], x.shape[3] - 1, x.shape[4] - 1
    places = [divmod(place, 2) for place in range(4)]
    parts = [
        part[..., row : row + H, column : column + W]
        for (row, column), part in zip(places, x.chunk(4, dim=1), strict=True)
    ]
    if not x.is_cpu:
        rows = [torch.stack(parts[2 * row : 2 * row + 2], dim=-1).flatten(-2) for row in range(2)]
        return torch.stack(rows, dim=-2).flatten(-3, -2)
    out = x.new_empty(B, T, 2 * H, 2 * W, C).permute(0, 4, 1, 2, 3)
    for (row, column), part in zip(places, parts, strict=True):
        out[..., row::2, column::2] = part
    return out


class Downsample(nn.Module):
    """Halve the sides and, with `temporal`, the frames after the clip's first."""

    def __init__(self, channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.conv = Conv(channels, channels, (1, 3, 3))
        self.time_conv = Conv(channels, channels, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[B, C, T, H, W] -> [B, C, T or T / 2, H / 2, W / 2]; zeros stand below and to the right."""
        padded = functional.pad(x, (0, 1, 0, 1))
        x = conv3d(padded, self.conv.weight, self.conv.bias, (0, 0), None, False, (1, 2, 2))
        if self.time_conv is None:
            return x
        if memory.is_first:
            memory.start_bare(x)
            return x
        return self.time_conv.convolve(x, memory.swap(x, frames=1), stride=(2, 1, 1))


def repeat_up(x: Tensor, out_channels: int, factor_t: int) -> Tensor:
    """Shortcut of a residual up-block: [B, C, T, H, W] -> [B, out_channels, factor_t * T, 2H, 2W] by repetition."""
    B, C, T, H, W = x.shape
    x = x.repeat_interleave(out_channels * factor_t * 4 // C, dim=1)
    x = x.view(B, out_channels, factor_t, 2, 2, T, H, W).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(B, out_channels, T * factor_t, 2 * H, 2 * W)


def mean_down(x: Tensor, out_channels: int, factor_t: int, factor_s: int) -> Tensor:
    """Shortcut of a residual down-block: [B, C, T, H, W] -> [B, out_channels, T / ft, H / fs, W / fs] by averages.

    A first frame that stands alone is averaged with zeros, as the checkpoint was trained.
    """
    x = functional.pad(x, (0, 0, 0, 0, -x.shape[2] % factor_t, 0))
    B, C, T, H, W = x.shape
    x = x.view(B, C, T // factor_t, factor_t, H // factor_s, factor_s, W // factor_s, factor_s)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(B, out_channels, -1, T // factor_t, H // factor_s, W // factor_s).mean(dim=2)


class UpBlock(nn.Module):
    """Residual blocks, then up-sampling; with `residual` (Wan2.2 5B) a shortcut around both."""

    def __init__(self, channels: int, out_channels: int, num_blocks: int, *, residual: bool) -> None:
        super().__init__()
        widths = [channels] + [out_channels] * num_blocks
        self.resnets = nn.ModuleList([ResidualBlock(a, b) for a, b in pairwise(widths)])
        self.upsampler: Upsample | None = None
        self.residual = residual

    def forward(self, x: Tensor, memory: Memory, cut: Cut = WHOLE) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T', H', W']."""
        inputs = x
        for block in self.resnets:
            x = block(x, memory, cut)
        if self.upsampler is None:
            return x
        x = self.upsampler(x, memory, cut)
        return added(x, self._shortcut(inputs, x, memory, cut)) if self.residual else x

    def _shortcut(self, inputs: Tensor, x: Tensor, memory: Memory, cut: Cut) -> Tensor:
        factor_t = 1 if self.upsampler is None or self.upsampler.time_conv is None else 2
        short = repeat_up(inputs, x.shape[1], factor_t)
        if memory.is_first:
            short = short[:, :, factor_t - 1 :]
        return cut.trim(short, 4 * len(self.resnets) + 1)


class DownBlock(nn.Module):
    """Residual blocks, then down-sampling; with `residual` (Wan2.2 5B) a shortcut around both."""

    def __init__(self, channels: int, out_channels: int, num_blocks: int, *, residual: bool) -> None:
        super().__init__()
        widths = [channels] + [out_channels] * num_blocks
        self.resnets = nn.ModuleList([ResidualBlock(a, b) for a, b in pairwise(widths)])
        self.downsampler: Downsample | None = None
        self.residual = residual

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[B, C, T, H, W] -> [B, C', T', H', W']."""
        inputs = x
        for block in self.resnets:
            x = block(x, memory)
        if self.downsampler is not None:
            x = self.downsampler(x, memory)
        if not self.residual:
            return x
        temporal = self.downsampler is not None and self.downsampler.time_conv is not None
        return x + mean_down(inputs, x.shape[1], 2 if temporal else 1, 1 if self.downsampler is None else 2)


class Decoder(nn.Module):
    """Latents to frames, in two parts: `front` needs the whole frame (attention), `rear` may run on strips."""

    def __init__(self, spec: VaeSpec) -> None:
        super().__init__()
        dims = [spec.decoder_base_dim * m for m in (spec.dim_mult[-1], *spec.dim_mult[::-1])]
        self.post_quant = Conv(spec.z_dim, spec.z_dim, (1, 1, 1))
        self.conv_in = conv_333(spec.z_dim, dims[0])
        self.mid_block = MiddleBlock(dims[0])
        self.up_blocks = nn.ModuleList()
        for index, temporal in enumerate((*spec.temporal_downsample[::-1], None)):
            halved = index > 0 and not spec.is_residual
            width, out = dims[index] // 2 if halved else dims[index], dims[index + 1]
            block = UpBlock(width, out, spec.num_res_blocks + 1, residual=spec.is_residual)
            if temporal is not None:
                block.upsampler = Upsample(out, out if spec.is_residual else out // 2, temporal=temporal)
            self.up_blocks.append(block)
        self.conv_out = conv_333(dims[-1], spec.out_channels, norm=True)
        self.patch_size = spec.patch_size

    def front(self, latents: Tensor, memory: Memory) -> Tensor:
        """[B, z, T, h, w] latents on the checkpoint's own scale -> features behind the first up-block."""
        x = self.conv_in(self.post_quant.convolve(latents), memory)
        out: Tensor = self.up_blocks[0](self.mid_block(x, memory), memory)
        return out

    def rear(self, x: Tensor, memory: Memory, cut: Cut = WHOLE) -> Tensor:
        """Features (a strip of them with `cut`) -> [B, 3, T', H', W'] frames in about -1..1, not clamped."""
        for index, block in enumerate(list(self.up_blocks)[1:]):
            x = block(x, memory, cut)
            if index < len(cut.excess):
                x = cut.trim(x, cut.excess[index])
        return unpatchify(cut.trim(self.conv_out(x, memory)), self.patch_size)


class Encoder(nn.Module):
    """Frames to the moments of the latents."""

    def __init__(self, spec: VaeSpec) -> None:
        super().__init__()
        dims = [spec.base_dim * m for m in (1, *spec.dim_mult)]
        self.conv_in = conv_333(spec.in_channels, dims[0])
        self.down_blocks = nn.ModuleList()
        for index, temporal in enumerate((*spec.temporal_downsample, None)):
            block = DownBlock(dims[index], dims[index + 1], spec.num_res_blocks, residual=spec.is_residual)
            if temporal is not None:
                block.downsampler = Downsample(dims[index + 1], temporal=temporal)
            self.down_blocks.append(block)
        self.mid_block = MiddleBlock(dims[-1])
        self.conv_out = conv_333(dims[-1], 2 * spec.z_dim, norm=True)
        self.quant = Conv(2 * spec.z_dim, 2 * spec.z_dim, (1, 1, 1))
        self.patch_size = spec.patch_size

    def forward(self, frames: Tensor, memory: Memory) -> Tensor:
        """[B, 3, T, H, W] in -1..1 -> [B, 2 z, T / 4, h, w]: means, then log-variances."""
        x = self.conv_in(patchify(frames, self.patch_size), memory)
        for block in self.down_blocks:
            x = block(x, memory)
        return self.quant.convolve(self.conv_out(self.mid_block(x, memory), memory))


def patchify(x: Tensor, size: int) -> Tensor:
    """[B, C, T, H, W] -> [B, C * size^2, T, H / size, W / size]; a patch's column varies slower than its row."""
    B, C, T, H, W = x.shape
    x = x.view(B, C, T, H // size, size, W // size, size).permute(0, 1, 6, 4, 2, 3, 5)
    return x.reshape(B, C * size * size, T, H // size, W // size)


def unpatchify(x: Tensor, size: int) -> Tensor:
    """[B, C * size^2, T, H, W] -> [B, C, T, H * size, W * size], the inverse of `patchify`."""
    B, C, T, H, W = x.shape
    x = x.view(B, C // (size * size), size, size, T, H, W).permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(B, C // (size * size), T, H * size, W * size)

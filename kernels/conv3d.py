"""Causal 3D convolution of the VAE, with the norm and activation that precede it.

B batch, C channels, T frames, H, W rows and columns; O output channels.
"""

import math
import threading

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend
from kernels.library import define

NORM_FLOOR = 1e-12  # the smallest channel norm that divides, as torch's F.normalize
MAX_CHAIN = 432  # products that a float32 convolution on a CPU adds up in one register before it rounds them into a sum
BLOCK_VALUES = 1 << 18  # values that are normed and activated at a time, so that they stay in the cache
_SCRATCH = threading.local()


def conv3d(
    x_BCTHW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int],
    norm_gamma: Tensor | None = None,
    silu: bool = False,
    stride: tuple[int, int, int] = (1, 1, 1),
    context: Tensor | None = None,
) -> Tensor:
    """Convolve frames behind their causal context; nothing is padded in time.

    With `norm_gamma`, the input is first divided by its root mean square over channels and multiplied by the gain:
    `x / max(||x||, 1e-12) * sqrt(C) * gamma`; with `silu`, SiLU follows. Zero frames stay zero through both, so that a
    caller may cache raw frames and start from zeros.

    Args:
        x_BCTHW: [B, C, T, H, W] float32 or bfloat16, T = new frames (and context frames, if they are joined already).
        weight: [O, C, kt, kh, kw] same dtype.
        bias: [O] or None.
        padding: zeros added on each side in (height, width).
        norm_gamma: [C] gain of the channel norm, or None for no norm.
        silu: apply SiLU before the convolution.
        stride: (frames, rows, columns).
        context: [B, C, S, H, W] frames that stand before x and go through norm and SiLU like it, or None.

    Returns:
        [B, O, (S + T - kt) // stride + 1, H', W'] in the dtype of x; on a CPU with channels innermost in memory.
    """
    run = backend.resolve("conv3d", _op)
    return run(x_BCTHW, weight, bias, padding, norm_gamma, silu, stride, context)  # type: ignore[no-any-return]


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: list[int],
    norm_gamma: Tensor | None,
    silu: bool,
    stride: list[int],
    context: Tensor | None,
) -> Tensor:
    pads = (0, padding[0], padding[1])
    if _onednn_takes(x):
        groups = _num_groups(weight) if x.dtype == torch.float32 else 1
        return _onednn(_prepare(x, norm_gamma, silu, context, groups), weight, bias, pads, stride)
    joined = x if context is None else torch.cat([context, x], dim=2)
    return functional.conv3d(_act(joined, norm_gamma, silu), weight, bias, stride, pads)


def _onednn_takes(x: Tensor) -> bool:
    if not (x.is_cpu and torch.backends.mkldnn.enabled and torch._C._has_mkldnn):  # noqa: SLF001 - is_available is untyped
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - torch has no public name for it
    return x.dtype == torch.float32


def _onednn(
    groups: list[Tensor], weight: Tensor, bias: Tensor | None, pads: tuple[int, int, int], stride: list[int]
) -> Tensor:
    """Call oneDNN directly: functional.conv3d sends middle-sized inputs to a path that is up to 10 times slower.

    In the layout with channels innermost oneDNN adds all products of one output value in a single chain, whose rounding
    error grows with the root of its length, to 2.8 times that of other layouts at 384 channels. Long chains are cut:
    by taps in time, then by groups of channels, and the partial results are added up in place, at no loss of speed.
    """
    if groups[0].dtype != torch.float32 or weight[0].numel() <= MAX_CHAIN:
        whole: Tensor = torch.ops.aten.mkldnn_convolution(groups[0], weight, bias, pads, stride, (1, 1, 1), 1)
        return whole
    steps = (pads, (1, *stride[1:]), (1, 1, 1), 1)
    span = (groups[0].shape[2] - weight.shape[2]) // stride[0] * stride[0] + 1
    out: Tensor | None = None
    for frames, kernel in zip(groups, weight.chunk(len(groups), dim=1), strict=True):
        for tap in range(weight.shape[2]):
            part = (frames[:, :, tap : tap + span : stride[0]], kernel[:, :, tap : tap + 1])
            if out is None:
                out = torch.ops.aten.mkldnn_convolution(*part, bias, *steps)
            else:
                torch.ops.mkldnn._convolution_pointwise_.binary(out, *part, None, *steps, "add", 1.0, None, [], None)
    assert out is not None
    return out


def _num_groups(weight: Tensor) -> int:
    """The fewest equal groups of input channels that keep the chain of one tap in time short enough."""
    channels, area = weight.shape[1], weight.shape[3] * weight.shape[4]
    fitting = (n for n in range(1, channels + 1) if channels % n == 0 and channels // n * area <= MAX_CHAIN)
    return next(fitting, channels)


def _prepare(x: Tensor, gamma: Tensor | None, silu: bool, context: Tensor | None, groups: int) -> list[Tensor]:
    """Context and frames in one tensor, after norm and SiLU, channels innermost; one tensor per group of channels.

    A block of rows at a time: what is normed is still in the processor's cache when it is multiplied and activated.
    """
    if context is None and gamma is None and not silu and groups == 1:
        return [x.contiguous(memory_format=torch.channels_last_3d)]
    B, C, _, H, W = x.shape
    frames = [frame for part in (context, x) if part is not None for frame in part.unbind(2)]
    outs = _scratch(x, groups, (B, len(frames), H, W, C // groups))
    rows = max(1, BLOCK_VALUES // (B * C * W))
    for place, frame in enumerate(frames):
        for start in range(0, H, rows):
            block = slice(start, start + rows)
            if groups == 1:
                _act(frame[:, :, block], gamma, silu, outs[0][:, :, place, block])
                continue
            acted = _act(frame[:, :, block], gamma, silu)
            for out, values in zip(outs, acted.chunk(groups, dim=1), strict=True):
                out[:, :, place, block] = values
    return outs


def _scratch(like: Tensor, count: int, shape: tuple[int, int, int, int, int]) -> list[Tensor]:
    """`count` tensors [B, C, T, H, W] of the shape (B, T, H, W, C) in memory that this thread's next call uses again.

    Fresh memory of this size costs as much as the norm and the activation together: the system clears each page.
    """
    size = math.prod(shape)
    flat: Tensor | None = getattr(_SCRATCH, str(like.dtype), None)
    if flat is None or flat.numel() < count * size:
        with torch.inference_mode(mode=False):  # a tensor born in inference mode could not be written to outside of it
            flat = torch.empty(count * size, dtype=like.dtype)
        setattr(_SCRATCH, str(like.dtype), flat)
    return [flat[i * size : (i + 1) * size].view(shape).permute(0, 4, 1, 2, 3) for i in range(count)]


def channel_norm(x_BCTHW: Tensor, gamma: Tensor, silu: bool = False) -> Tensor:
    """`x / max(||x||, 1e-12) * sqrt(C) * gamma` over channels in float32, then SiLU if asked.

    Args:
        x_BCTHW: [B, C, T, H, W] float32 or bfloat16.
        gamma: [C] gains.
        silu: apply SiLU.

    Returns:
        [B, C, T, H, W] in the dtype of x.
    """
    return _act(x_BCTHW, gamma, silu)


def _act(x: Tensor, gamma: Tensor | None, silu: bool, into: Tensor | None = None) -> Tensor:
    """Norm and SiLU, each if asked for, into `into` if given."""
    if gamma is None:
        out = functional.silu(x) if silu else x
        return out if into is None else into.copy_(out)
    wide = torch.promote_types(x.dtype, torch.float32)
    gain = gamma.to(wide).view(-1, *[1] * (x.dim() - 2)) * x.shape[1] ** 0.5
    work = x.to(wide)
    norm = torch.linalg.vector_norm(work, dim=1, keepdim=True).clamp_min_(NORM_FLOOR)
    if into is None:
        out = work / norm
    else:
        out = torch.div(work, norm, out=into if into.dtype == wide else work)
    out.mul_(gain)
    if silu:
        functional.silu(out, inplace=True)
    if into is None:
        return out.to(x.dtype)
    return into if out is into else into.copy_(out)


def _out_sizes(x: torch.Size, weight: torch.Size, padding: list[int], stride: list[int], before: int) -> list[int]:
    sizes = (x[2] + before, x[3] + 2 * padding[0], x[4] + 2 * padding[1])
    return [(size - kernel) // step + 1 for size, kernel, step in zip(sizes, weight[2:], stride, strict=True)]


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: list[int],
    norm_gamma: Tensor | None,
    silu: bool,
    stride: list[int],
    context: Tensor | None,
) -> Tensor:
    del bias, norm_gamma, silu
    before = 0 if context is None else context.shape[2]
    out = x.new_empty(x.shape[0], weight.shape[0], *_out_sizes(x.shape, weight.shape, padding, stride, before))
    return out.contiguous(memory_format=torch.channels_last_3d) if _onednn_takes(x) else out


def _flops(x_shape: torch.Size, w_shape: torch.Size, *_: object, out_shape: torch.Size, **__: object) -> int:
    """Every output value takes C * kt * kh * kw multiply-adds, at the borders too, as torch counts."""
    del x_shape
    return 2 * out_shape.numel() * w_shape[1:].numel()


_op = define(
    "conv3d(Tensor x, Tensor weight, Tensor? bias, int[] padding, Tensor? norm_gamma, bool silu, int[] stride, "
    "Tensor? context) -> Tensor",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

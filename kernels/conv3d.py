"""Causal 3D convolution of the VAE, with the norm and activation that precede it.

B batch, C channels, T frames, H, W rows and columns; O output channels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend
from kernels.library import define

NORM_FLOOR = 1e-12  # the smallest channel norm that divides, as torch's F.normalize


def conv3d(
    x_BCTHW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int],
    norm_gamma: Tensor | None = None,
    silu: bool = False,
    stride: tuple[int, int, int] = (1, 1, 1),
) -> Tensor:
    """Convolve frames that already carry their causal context; nothing is padded in time.

    With `norm_gamma`, the input is first divided by its root mean square over channels and multiplied by the gain:
    `x / max(||x||, 1e-12) * sqrt(C) * gamma`; with `silu`, SiLU follows. Zero frames stay zero through both, so that a
    caller may cache raw frames and start from zeros.

    Args:
        x_BCTHW: [B, C, T, H, W] float32 or bfloat16, T = context frames + new frames.
        weight: [O, C, kt, kh, kw] same dtype.
        bias: [O] or None.
        padding: zeros added on each side in (height, width).
        norm_gamma: [C] gain of the channel norm, or None for no norm.
        silu: apply SiLU before the convolution.
        stride: (frames, rows, columns).

    Returns:
        [B, O, (T - kt) // stride + 1, H', W'] in the dtype of x.
    """
    run = backend.resolve("conv3d", _op)
    return run(x_BCTHW, weight, bias, padding, norm_gamma, silu, stride)  # type: ignore[no-any-return]


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: list[int],
    norm_gamma: Tensor | None,
    silu: bool,
    stride: list[int],
) -> Tensor:
    if norm_gamma is not None:
        x = channel_norm(x, norm_gamma, silu)
    elif silu:
        x = functional.silu(x)
    return functional.conv3d(x, weight, bias, stride, (0, padding[0], padding[1]))


def channel_norm(x_BCTHW: Tensor, gamma: Tensor, silu: bool = False) -> Tensor:
    """`x / max(||x||, 1e-12) * sqrt(C) * gamma` over channels in float32, then SiLU if asked.

    Args:
        x_BCTHW: [B, C, T, H, W] float32 or bfloat16.
        gamma: [C] gains.
        silu: apply SiLU.

    Returns:
        [B, C, T, H, W] in the dtype of x.
    """
    wide = torch.promote_types(x_BCTHW.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x_BCTHW, dim=1, keepdim=True, dtype=wide).clamp_min_(NORM_FLOOR)
    gain = gamma.to(wide).view(1, -1, 1, 1, 1) * x_BCTHW.shape[1] ** 0.5
    out = torch.div(x_BCTHW, norm).mul_(gain)
    return (functional.silu(out, inplace=True) if silu else out).to(x_BCTHW.dtype)


def _out_sizes(x: torch.Size, weight: torch.Size, padding: list[int], stride: list[int]) -> list[int]:
    pads = (0, padding[0], padding[1])
    return [(x[i + 2] + 2 * pads[i] - weight[i + 2]) // stride[i] + 1 for i in range(3)]


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: list[int],
    norm_gamma: Tensor | None,
    silu: bool,
    stride: list[int],
) -> Tensor:
    del bias, norm_gamma, silu
    return x.new_empty(x.shape[0], weight.shape[0], *_out_sizes(x.shape, weight.shape, padding, stride))


def _flops(x_shape: torch.Size, w_shape: torch.Size, *_: object, out_shape: torch.Size, **__: object) -> int:
    """Every output value takes C * kt * kh * kw multiply-adds, at the borders too, as torch counts."""
    del x_shape
    return 2 * out_shape.numel() * w_shape[1:].numel()


_op = define(
    "conv3d(Tensor x, Tensor weight, Tensor? bias, int[] padding, Tensor? norm_gamma, bool silu, int[] stride) "
    "-> Tensor",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

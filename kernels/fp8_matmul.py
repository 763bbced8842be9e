"""Row-wise FP8 linear layer: dynamic scale per token, static scale per output channel.

M tokens, K input channels, N output channels.

The 8-bit format is e4m3. Trainium2's variant has infinities and ends at 240, the OCP variant ends at 448; up to 240
both use the same bits, so `torch.float8_e4m3fn` holds either, and `fp8_max` says where values saturate.
"""

import torch
from torch import Tensor

from kernels import backend
from kernels.library import define

FP8_MAX_TRN2 = 240.0
FP8_MAX_OCP = 448.0
AMAX_FLOOR = 1e-6  # an all-zero row gets this as its largest magnitude, so that the scale stays finite
CONTRACTION_TILE = 256  # double-row mode contracts 2 x 128 channels in one instruction


def fp8_matmul(
    x_MK: Tensor,
    weight_KN: Tensor,
    weight_scale_N: Tensor,
    bias_N: Tensor | None = None,
    fp8_max: float = FP8_MAX_TRN2,
    x_scale_M: Tensor | None = None,
) -> Tensor:
    """`x @ weight + bias` with x quantised per row and the product accumulated in float32.

    Args:
        x_MK: [M, K] bfloat16 or float32, quantised here; or float8_e4m3fn together with `x_scale_M`.
        weight_KN: [K, N] float8_e4m3fn, the contraction first, as the kernel reads it; see `quantize_weight`.
        weight_scale_N: [N] float32, `weight * weight_scale` is the real weight.
        bias_N: [N] any float dtype, or None.
        fp8_max: the largest magnitude of the format, 240 on Trainium2 and 448 elsewhere.
        x_scale_M: [M] float32 scales of an x that is already quantised (from `quantize_rows`).

    Returns:
        [M, N] in the dtype of x; bfloat16 if x is already quantised.
    """
    run = backend.resolve("fp8_matmul", _op)
    return run(x_MK, weight_KN, weight_scale_N, bias_N, fp8_max, x_scale_M)  # type: ignore[no-any-return]


def quantize_weight(weight_NK: Tensor, fp8_max: float = FP8_MAX_TRN2) -> tuple[Tensor, Tensor]:
    """A linear layer's weight as `fp8_matmul` takes it, one scale per output channel.

    Args:
        weight_NK: [N, K] any float dtype.
        fp8_max: values saturate here.

    Returns:
        [K, N] float8_e4m3fn, contiguous, and [N] float32.
    """
    values, scale = quantize_rows(weight_NK, fp8_max)
    return values.T.contiguous(), scale


def quantize_rows(x_MK: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
    """FP8 values and one scale per row.

    Args:
        x_MK: [M, K] any float dtype.
        fp8_max: values saturate here.

    Returns:
        [M, K] float8_e4m3fn and [M] float32 with `x ~ q * scale`: scale = max(amax, 1e-6) / fp8_max.
    """
    x = x_MK.float()
    scale = x.abs().amax(dim=1).clamp_min_(AMAX_FLOOR).mul_(1.0 / fp8_max)
    return (x * scale.reciprocal().unsqueeze(1)).to(torch.float8_e4m3fn), scale


def _reference(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, fp8_max: float, x_scale: Tensor | None
) -> Tensor:
    """Bit-equal to the kernel: exact products within a contraction tile, float32 sums over the tiles."""
    dtype = torch.bfloat16 if x_scale is not None else x.dtype
    if x_scale is None:
        x, x_scale = quantize_rows(x, fp8_max)
    total = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[1], CONTRACTION_TILE):
        tile = slice(start, start + CONTRACTION_TILE)
        total += (x[:, tile].double() @ weight[tile].double()).float()
    total = total * x_scale.unsqueeze(1) * weight_scale
    return (total if bias is None else total + bias.float()).to(dtype)


def _fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, fp8_max: float, x_scale: Tensor | None
) -> Tensor:
    del weight_scale, bias, fp8_max
    return x.new_empty(x.shape[0], weight.shape[1], dtype=x.dtype if x_scale is None else torch.bfloat16)


def _flops(x_shape: torch.Size, w_shape: torch.Size, *_: object, **__: object) -> int:
    return 2 * x_shape.numel() * w_shape[1]


_op = define(
    "fp8_matmul(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float fp8_max, Tensor? x_scale) -> Tensor",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

"""Adaptive layer norm: gated residual sum, LayerNorm and modulation in one pass.

B batch, L tokens, D model width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels import backend
from kernels.fp8_matmul import FP8_MAX_TRN2, quantize_rows
from kernels.library import define, no_flops


def adaln(
    x_BLD: Tensor,
    residual_BLD: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight_D: Tensor | None = None,
    bias_D: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """`r = residual + gate * x`, then `y = LayerNorm(r) * (1 + scale) + shift`, all in float32.

    The norm sees r as it is stored, that is after the rounding to the dtype of x: this is what diffusers computes.

    Args:
        x_BLD: [B, L, D] the branch's output (or, without a residual, the stream itself), float32 or bfloat16.
        residual_BLD: [B, L, D] the stream, same dtype; None: r is x itself and the gate is not used.
        gate: float32, [B, 1, D] or [B, L, D]; None means 1.
        scale, shift: float32, [B, 1, D], [B, L, D] or [D]; both None: no modulation.
        weight_D, bias_D: [D] affine part of the LayerNorm, any float dtype; both None means 1 and 0.
        eps: added to the variance.

    Returns:
        r: [B, L, D] in the dtype of x; the argument x itself if there is no residual.
        y: [B, L, D] in the dtype of x.
    """
    if residual_BLD is None:
        return x_BLD, backend.resolve("adaln_norm", _norm_op)(x_BLD, scale, shift, weight_D, bias_D, eps)
    run = backend.resolve("adaln", _op)
    return run(x_BLD, residual_BLD, gate, scale, shift, weight_D, bias_D, eps)  # type: ignore[no-any-return]


def adaln_fp8(
    x_BLD: Tensor,
    residual_BLD: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight_D: Tensor | None = None,
    bias_D: Tensor | None = None,
    eps: float = 1e-6,
    fp8_max: float = FP8_MAX_TRN2,
) -> tuple[Tensor, Tensor, Tensor]:
    """`adaln` whose result is quantised row by row, for an FP8 matmul that follows.

    Args:
        x_BLD, residual_BLD, gate, scale, shift, weight_D, bias_D, eps: as in `adaln`; [B, L, D].
        fp8_max: where FP8 values saturate.

    Returns:
        r: [B, L, D] in the dtype of x.
        q: [B, L, D] float8_e4m3fn.
        row_scale: [B, L] float32, y ~ q * row_scale.
    """
    run = backend.resolve("adaln_fp8", _adaln_then_quantize)
    return run(x_BLD, residual_BLD, gate, scale, shift, weight_D, bias_D, eps, fp8_max)  # type: ignore[no-any-return]


def _adaln_then_quantize(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    r, y = adaln(x, *args[:-1])
    q, row_scale = quantize_rows(y.flatten(0, 1), args[-1])
    return r, q.view(y.shape), row_scale.view(y.shape[:2])


def _reference(
    x: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    r = gated_sum(x, residual, gate)
    return r, _norm_reference(r, scale, shift, weight, bias, eps)


def gated_sum(x_BLD: Tensor, residual_BLD: Tensor, gate: Tensor | None) -> Tensor:
    """`residual + gate * x` in float32, rounded once to the dtype of x: [B, L, D]."""
    if gate is None:
        return residual_BLD + x_BLD
    if x_BLD.dtype == gate.dtype:
        return torch.addcmul(residual_BLD, gate, x_BLD)
    return torch.mul(x_BLD, gate).add_(residual_BLD).to(x_BLD.dtype)


def _norm_reference(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    D = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight is not None or bias is not None:
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    if scale is None or shift is None:
        return functional.layer_norm(_mixed(x, weight, bias), (D,), weight, bias, eps).to(x.dtype)
    factor = scale + 1
    if factor.numel() == D and shift.numel() == D:
        factor, shift = _folded(factor.view(D), shift.view(D), weight, bias)
        return functional.layer_norm(_mixed(x, factor, shift), (D,), factor, shift, eps).to(x.dtype)
    normal = functional.layer_norm(x.to(wide), (D,), weight, bias, eps)
    return torch.addcmul(shift, normal, factor).to(x.dtype)


def _folded(factor: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(n * weight + bias) * factor + shift` as one weight and one bias."""
    if bias is not None:
        shift = torch.addcmul(shift, bias, factor)
    return (factor if weight is None else weight * factor), shift


def _mixed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The CPU norm takes bfloat16 rows beside float32 parameters in one pass; other devices want one dtype."""
    if x.device.type == "cpu" and weight is not None and bias is not None:
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fake(x: Tensor, residual: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    del residual, args
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _norm_fake(x: Tensor, *args: object) -> Tensor:
    del args
    return x.new_empty(x.shape)


_op = define(
    "adaln(Tensor x, Tensor residual, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, "
    "float eps) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    flops=no_flops,
)
_norm_op = define(
    "adaln_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    reference=_norm_reference,
    fake=_norm_fake,
    flops=no_flops,
)

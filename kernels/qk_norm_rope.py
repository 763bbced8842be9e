"""RMSNorm over all heads of a token together, then rotary position embedding in half layout.

B batch, L tokens, H heads on this rank, D head width.

Half layout: within a head, the channels of a rotated pair stand D/2 apart (Wan's checkpoints keep them side by side).
The weights loader permutes the output rows of the query and key projections, their biases and the norm gains: per head,
first the even channels, then the odd ones. Scores do not change, since queries and keys are permuted alike.

Tensor parallelism: a rank holds some of the heads, and the mean square runs over all of them. The caller sums
`sum_squares` over the ranks, divides by the full width and hands the result in as `mean_squares`.
"""

import torch
from torch import Tensor

from kernels import backend
from kernels.library import define, no_flops


def qk_norm_rope(
    q_BLHD: Tensor,
    k_BLHD: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    mean_squares: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate queries and keys of self-attention, in float32.

    `x * rsqrt(mean over H, D of x^2 + eps) * weight`, then `(a, b) -> (a cos - b sin, a sin + b cos)` on both halves.

    Args:
        q_BLHD, k_BLHD: [B, L, H, D] in half layout, float32 or bfloat16; D even.
        weight_q, weight_k: [H * D] norm gains in half layout, any float dtype.
        cos, sin: [L, D / 2] float32, one angle for each pair of channels.
        eps: added to the mean square.
        mean_squares: [2, B, L] float32, the mean square of each token of q and of k over the heads of all ranks; None:
            computed from the heads given.

    Returns:
        q, k: [B, L, H, D] in the dtype of the inputs, contiguous.
    """
    run = backend.resolve("qk_norm_rope", _op)
    return run(q_BLHD, k_BLHD, weight_q, weight_k, cos, sin, eps, mean_squares)  # type: ignore[no-any-return]


def head_norm(x_BLHD: Tensor, weight: Tensor, eps: float = 1e-6, mean_square: Tensor | None = None) -> Tensor:
    """The norm alone, without rotation: queries and keys of cross-attention.

    Args:
        x_BLHD: [B, L, H, D] float32 or bfloat16.
        weight: [H * D] norm gains.
        eps: added to the mean square.
        mean_square: [B, L] float32 over the heads of all ranks; None: computed from the heads given.

    Returns:
        [B, L, H, D] in the dtype of x, contiguous.
    """
    return backend.resolve("head_norm", _norm_op)(x_BLHD, weight, eps, mean_square)  # type: ignore[no-any-return]


def sum_squares(q_BLHD: Tensor, k_BLHD: Tensor) -> Tensor:
    """This rank's share of the mean squares: [2, B, L] float32 sums of x^2 over H and D, to be summed over ranks."""
    return backend.resolve("sum_squares", _stacked)(q_BLHD, k_BLHD)  # type: ignore[no-any-return]


def _stacked(q_BLHD: Tensor, k_BLHD: Tensor) -> Tensor:
    return torch.stack((sum_square(q_BLHD), sum_square(k_BLHD)))


def sum_square(x_BLHD: Tensor) -> Tensor:
    """[B, L] float32 (float64 for float64): sums of x^2 over H and D."""
    wide = torch.promote_types(x_BLHD.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x_BLHD.flatten(2), dim=-1, dtype=wide)
    return norm.square()


def _reference(
    q: Tensor,
    k: Tensor,
    weight_q: Tensor,
    weight_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    mean_squares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    mean_q, mean_k = (None, None) if mean_squares is None else mean_squares.unbind()
    return (
        _rotated(_normal(q, weight_q, eps, mean_q), cos, sin, q.dtype),
        _rotated(_normal(k, weight_k, eps, mean_k), cos, sin, k.dtype),
    )


def _normal(x_BLHD: Tensor, weight: Tensor, eps: float, mean_square: Tensor | None) -> Tensor:
    """The normalised heads, [B, L, H, D] float32."""
    B, L, H, D = x_BLHD.shape
    mean = sum_square(x_BLHD).div_(H * D) if mean_square is None else mean_square
    factor = torch.add(mean, eps).rsqrt_().view(B, L, 1, 1)
    return torch.mul(x_BLHD, factor).mul_(weight.view(H, D))


def _rotated(x_BLHD: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    half = x_BLHD.shape[-1] // 2
    cos_L1D, sin_L1D = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x_BLHD[..., :half], x_BLHD[..., half:]
    out = torch.empty_like(x_BLHD)
    low, high = out[..., :half], out[..., half:]
    torch.mul(a, cos_L1D, out=low).addcmul_(b, sin_L1D, value=-1)
    torch.mul(b, cos_L1D, out=high).addcmul_(a, sin_L1D)
    return out.to(dtype)


def _fake(q: Tensor, k: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    del args
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _norm_reference(x: Tensor, weight: Tensor, eps: float, mean_square: Tensor | None) -> Tensor:
    return _normal(x, weight, eps, mean_square).to(x.dtype)


def _norm_fake(x: Tensor, *args: object) -> Tensor:
    del args
    return x.new_empty(x.shape)


_op = define(
    "qk_norm_rope(Tensor q, Tensor k, Tensor weight_q, Tensor weight_k, Tensor cos, Tensor sin, float eps, "
    "Tensor? mean_squares) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    flops=no_flops,
)
_norm_op = define(
    "head_norm(Tensor x, Tensor weight, float eps, Tensor? mean_square) -> Tensor",
    reference=_norm_reference,
    fake=_norm_fake,
    flops=no_flops,
)

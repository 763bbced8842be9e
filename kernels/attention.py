"""Softmax attention that also returns the log-sum-exp of its scores, so that parts of the keys can be merged.

B batch, L queries, S keys, H heads, D head width.
"""

import torch
from torch import Tensor

from kernels import backend
from kernels.library import define

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the one that gives lse
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def attention(
    q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, scale: float | None = None, k_valid: int | None = None
) -> tuple[Tensor, Tensor]:
    """Non-causal attention, `softmax(q k^T * scale) v`, and the logarithm of its denominator.

    Args:
        q_BLHD: [B, L, H, D] queries, float32, bfloat16 or float16 (float64 for references).
        k_BSHD: [B, S, H, D] keys of the same dtype.
        v_BSHD: [B, S, H, D] values.
        scale: factor on the scores; None means 1 / sqrt(D).
        k_valid: keys and values from this index on are padding and take no part; None means all count.

    Returns:
        out_BLHD: [B, L, H, D] in the dtype of q, contiguous.
        lse_BHL: [B, H, L] float32 (float64 for float64 inputs), natural logarithm; not contiguous.
    """
    return backend.resolve("attention", _op)(q_BLHD, k_BSHD, v_BSHD, scale, k_valid)  # type: ignore[no-any-return]


def _reference(
    q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, scale: float | None, k_valid: int | None
) -> tuple[Tensor, Tensor]:
    q, k, v = q_BLHD.transpose(1, 2), k_BSHD[:, :k_valid].transpose(1, 2), v_BSHD[:, :k_valid].transpose(1, 2)
    if q.device.type == "cpu" and q.dtype in _CPU_DTYPES and v.shape[-1] == q.shape[-1] and q.numel() > 0:
        out, lse = _FLASH_CPU(q, k, v, scale=scale)
        return out.transpose(1, 2), lse
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, scale=scale)[:2]  # noqa: SLF001
    elif q.device.type == "cuda" and q.dtype == torch.float32:
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention.default(  # noqa: SLF001
            q, k, v, None, True, scale=scale
        )[:2]
    else:
        out, lse = attention_in_full(q, k, v, scale)
    return _in_layout(out.transpose(1, 2), lse[..., : q.shape[2]])


def _in_layout(out_BLHD: Tensor, lse_BHL: Tensor) -> tuple[Tensor, Tensor]:
    """The strides that the fake promises: out contiguous, lse stored [B, L, H]; never a view of the other."""
    return out_BLHD.contiguous(), lse_BHL.transpose(1, 2).contiguous().transpose(1, 2)


def attention_in_full(q_BHLD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention by the formula, with the whole [B, H, L, S] score matrix in memory, in float32 (float64 stays).

    Returns out [B, H, L, D] in the dtype of q and lse [B, H, L] float32 (float64 for float64).
    """
    wide = torch.promote_types(q_BHLD.dtype, torch.float32)
    factor = q_BHLD.shape[-1] ** -0.5 if scale is None else scale
    scores = (q_BHLD.to(wide) @ k_BHSD.to(wide).mT) * factor
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v_BHSD.to(wide)
    return out.to(q_BHLD.dtype), lse


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float | None, k_valid: int | None) -> tuple[Tensor, Tensor]:
    del k, scale, k_valid
    B, L, H, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(B, L, H, v.shape[-1]), q.new_empty(B, L, H, dtype=lse_dtype).transpose(1, 2)


def _flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *args: object, **_: object) -> int:
    """Two products over all pairs of query and valid key."""
    B, L, H, D = q_shape
    k_valid = args[1] if len(args) > 1 else None
    S = k_valid if isinstance(k_valid, int) else k_shape[1]
    return 2 * B * H * L * S * (D + v_shape[-1])


_op = define(
    "attention(Tensor q, Tensor k, Tensor v, float? scale, int? k_valid) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

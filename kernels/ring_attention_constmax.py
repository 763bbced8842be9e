"""Ring attention whose softmax subtracts a fixed bound instead of a running maximum, and counts where that fails.

B batch, L queries and S keys on this rank, H heads, D head width.

By Cauchy and Schwarz no score of a query exceeds `scale * |q| * max |k|`. With that bound subtracted no exponential
overflows, blocks of keys merge by plain addition, and the kernel needs no rescaling. But where the true maximum lies
far below the bound, all exponentials underflow: such rows are counted, and the caller repeats the step with
`ring_attention` if the sum of the counts over the ranks is not zero. Their values here are wrong.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import backend
from kernels.library import define
from kernels.ring_attention import PREFETCH_DEPTH, blocks, ring_size

# Below this sum, terms e^-20 of a row's largest may be lost (float32 and bfloat16 end near e^-87): the row counts.
MIN_DENOMINATOR = 2.0**-96


def ring_attention_constmax(
    q_BLHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    key_norm_BH: Tensor,
    group: str,
    pairs: Sequence[int],
    scale: float | None = None,
    k_valid: Tensor | None = None,
    prefetch_depth: int = PREFETCH_DEPTH,
) -> tuple[Tensor, Tensor]:
    """Non-causal attention of this rank's queries to the keys of the whole ring, by a fixed bound per query.

    Args:
        q_BLHD: [B, L, H, D] this rank's queries, float32 or bfloat16.
        k_BSHD, v_BSHD: [B, S, H, D] this rank's keys and values; S is the same on all ranks of the ring.
        key_norm_BH: [B, H] float32, the largest norm of any valid key of the ring: `key_norm`, then max over ranks.
        group: name of the process group that the ring's ranks share.
        pairs: (source, target) global ranks, flattened; see `ring_attention`. Empty: a ring of one.
        scale: positive factor on the scores; None means 1 / sqrt(D).
        k_valid: [1] int32, this rank's keys from this index on are padding; None: all count.
        prefetch_depth: blocks under way while one is computed.

    Returns:
        out_BLHD: [B, L, H, D] in the dtype of q.
        num_underflowed: [1] int32, rows (query, head) of this rank whose denominator is below MIN_DENOMINATOR.
    """
    run = backend.resolve("ring_attention_constmax", _op)
    args = (q_BLHD, k_BSHD, v_BSHD, key_norm_BH, group, tuple(pairs), scale, k_valid, prefetch_depth)
    return run(*args)  # type: ignore[no-any-return]


def key_norm(k_BSHD: Tensor, k_valid: Tensor | None = None) -> Tensor:
    """The largest norm of this rank's keys: [B, S, H, D] -> [B, H] float32; the caller takes the maximum over ranks.

    Args:
        k_BSHD: keys, any float dtype.
        k_valid: [1] int32, keys from this index on are padding.
    """
    wide = torch.promote_types(k_BSHD.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(k_BSHD, dim=-1, dtype=wide)
    if k_valid is not None:
        valid = torch.arange(k_BSHD.shape[1], dtype=torch.int32, device=k_BSHD.device) < k_valid
        norms = norms * valid[:, None].to(wide)
    return norms.amax(dim=1)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_norm_BH: Tensor,
    group: str,
    pairs: list[int],
    scale: float | None,
    k_valid: Tensor | None,
    prefetch_depth: int,
) -> tuple[Tensor, Tensor]:
    del prefetch_depth
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q_BHLD = q.transpose(1, 2).to(wide) * factor
    bound = torch.linalg.vector_norm(q_BHLD, dim=-1, keepdim=True) * key_norm_BH[:, :, None, None]
    numerator, denominator = torch.zeros_like(q_BHLD), torch.zeros_like(bound)
    for block_k, block_v, valid in blocks(k, v, k_valid, group, pairs):
        keys, values = (part[:, :valid].transpose(1, 2).to(wide) for part in (block_k, block_v))
        weights = torch.exp((q_BHLD @ keys.mT).sub_(bound))
        numerator += weights @ values
        denominator += weights.sum(dim=-1, keepdim=True)
    num_underflowed = (denominator < MIN_DENOMINATOR).sum(dtype=torch.int32).view(1)
    out = numerator / denominator.clamp_min(torch.finfo(torch.float32).tiny)
    return out.transpose(1, 2).to(q.dtype).contiguous(), num_underflowed


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    del k, args
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(1, dtype=torch.int32)


def _flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *args: Any, **_: object) -> int:
    """As `ring_attention`."""
    B, L, H, D = q_shape
    return 2 * B * H * L * k_shape[1] * (D + v_shape[-1]) * ring_size(args[2])


_op = define(
    "ring_attention_constmax(Tensor q, Tensor k, Tensor v, Tensor key_norm, str group, int[] pairs, float? scale, "
    "Tensor? k_valid, int prefetch_depth) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

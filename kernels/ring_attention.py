"""Attention over keys that are spread over a ring of ranks: blocks travel, queries stay.

B batch, L queries and S keys on this rank, H heads, D head width.

Every rank calls this with the same `pairs`, so that the traced graph is the same everywhere: what a rank sends where
follows from its own rank alone. Step 0 attends to the rank's own block; at each further step the block of the previous
rank arrives.
Source of the algorithm: Liu et al., Ring Attention with Blockwise Transformers (2023); merged by log-sum-exp.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import backend
from kernels.attention import attention
from kernels.library import define

PREFETCH_DEPTH = 2  # blocks under way while one is computed; the reference keeps one, the kernel as many as asked


def ring_attention(
    q_BLHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    group: str,
    pairs: Sequence[int],
    scale: float | None = None,
    k_valid: Tensor | None = None,
    prefetch_depth: int = PREFETCH_DEPTH,
) -> tuple[Tensor, Tensor]:
    """Non-causal attention of this rank's queries to the keys of the whole ring.

    Args:
        q_BLHD: [B, L, H, D] this rank's queries, float32 or bfloat16.
        k_BSHD, v_BSHD: [B, S, H, D] this rank's keys and values; S is the same on all ranks of the ring.
        group: name of the process group that the ring's ranks share.
        pairs: (source, target) global ranks, flattened: s0, t0, s1, t1, ...; may hold the rings of the whole world.
            Empty: a ring of one.
        scale: factor on the scores; None means 1 / sqrt(D).
        k_valid: [1] int32, this rank's keys from this index on are padding; travels with the block. None: all count.
        prefetch_depth: blocks under way while one is computed, 1 to ring size - 1 (larger is clamped).

    Returns:
        out_BLHD: [B, L, H, D] in the dtype of q.
        lse_BHL: [B, H, L] float32 log-sum-exp over the keys of the whole ring; stored [B, L, H].

    Raises:
        ValueError: this rank is in no pair, or the pairs from it do not close to a ring.
    """
    run = backend.resolve("ring_attention", _op)
    return run(q_BLHD, k_BSHD, v_BSHD, group, tuple(pairs), scale, k_valid, prefetch_depth)  # type: ignore[no-any-return]


def merged(parts: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention results over disjoint blocks of keys as one, by log-sum-exp in float32.

    Args:
        parts: out [B, L, H, D] any dtype and lse [B, H, L] of each block, at least one.

    Returns:
        out [B, L, H, D] float32 and lse [B, H, L] float32 (stored [B, L, H]); float64 for float64.
    """
    out, lse = next(parts)
    out, lse = out.to(lse.dtype), lse.transpose(1, 2)
    for block_out, block_lse_BHL in parts:
        block_lse = block_lse_BHL.transpose(1, 2)
        total = torch.logaddexp(lse, block_lse)
        out = out * (lse - total).exp_().unsqueeze(-1)
        out.addcmul_(block_out.to(lse.dtype), (block_lse - total).exp_().unsqueeze(-1))
        lse = total
    return out, lse.transpose(1, 2)


def blocks(
    k: Tensor, v: Tensor, k_valid: Tensor | None, group: str, pairs: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """This rank's keys and values, then those of each other rank of the ring as they arrive.

    Yields [B, S, H, D] keys and values and the number of valid keys (None: all); blocks without a valid key are
    left out. The next block is under way while the caller works on the one yielded.
    """
    num_blocks = ring_size(pairs)
    held: list[Any] = [torch.stack((k, v)) if num_blocks > 1 else (k, v)]
    if k_valid is not None:
        held.append(k_valid)
    for step in range(num_blocks):
        arriving, works = _exchange(held, group, pairs) if step + 1 < num_blocks else ([], [])
        valid = None if k_valid is None else int(held[1])
        if valid != 0:
            yield held[0][0], held[0][1], valid
        for work in works:
            work.wait()
        held = arriving


def _exchange(held: list[Any], group: str, pairs: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Start sending what is held and receiving as much; returns the receiving tensors and the works to wait for."""
    send_to, receive_from = neighbours(pairs, dist.get_rank())
    # graphs hold a group's name, the functions of torch.distributed want the group
    process_group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]  # noqa: SLF001
    arriving = [torch.empty_like(part) for part in held]
    sends = [dist.P2POp(dist.isend, part, send_to, process_group) for part in held]
    receives = [dist.P2POp(dist.irecv, part, receive_from, process_group) for part in arriving]
    return arriving, dist.batch_isend_irecv(sends + receives)


def ring_size(pairs: Sequence[int]) -> int:
    """How many ranks one ring of the flattened (source, target) pairs has; all rings are of one size. No pairs: 1.

    Raises:
        ValueError: the ring of the first source does not close.
    """
    target = dict(zip(pairs[::2], pairs[1::2], strict=True))
    if not target:
        return 1
    ring = [pairs[0]]
    while (follower := target.get(ring[-1])) != ring[0]:
        if follower is None or follower in ring:
            raise ValueError(f"pairs {tuple(pairs)}: the ring from rank {ring[0]} does not close at rank {ring[-1]}")
        ring.append(follower)
    return len(ring)


def neighbours(pairs: Sequence[int], rank: int) -> tuple[int, int]:
    """Whom `rank` sends to and whom it receives from, by the flattened (source, target) pairs.

    Raises:
        ValueError: the rank is not both a source and a target.
    """
    target = dict(zip(pairs[::2], pairs[1::2], strict=True))
    source = dict(zip(pairs[1::2], pairs[::2], strict=True))
    if rank not in target or rank not in source:
        raise ValueError(f"rank {rank} is in no ring of pairs {tuple(pairs)}; pass (source, target) global ranks")
    return target[rank], source[rank]


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: str,
    pairs: list[int],
    scale: float | None,
    k_valid: Tensor | None,
    prefetch_depth: int,
) -> tuple[Tensor, Tensor]:
    del prefetch_depth
    arrivals = blocks(k, v, k_valid, group, pairs)
    out, lse = merged(attention(q, block_k, block_v, scale, valid) for block_k, block_v, valid in arrivals)
    return out.to(q.dtype), lse


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    del k, args
    B, L, H, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(B, L, H, v.shape[-1]), q.new_empty(B, L, H, dtype=lse_dtype).transpose(1, 2)


def _flops(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *args: Any, **_: object) -> int:
    """Two products over all pairs of own query and key of the ring; padding keys are computed too."""
    B, L, H, D = q_shape
    return 2 * B * H * L * k_shape[1] * (D + v_shape[-1]) * ring_size(args[1])


_op = define(
    "ring_attention(Tensor q, Tensor k, Tensor v, str group, int[] pairs, float? scale, Tensor? k_valid, "
    "int prefetch_depth) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    flops=_flops,
)

"""NKI twin of `ring_attention` for Trainium2 under LNC2: blocks of keys travel while others are used.

One step is flash attention with a running maximum whose state starts from the result of the blocks before it: this
merges by log-sum-exp. Keys are transposed once, before they leave; numerators wait in scratch memory in float32.
"""

from typing import Any

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from kernels.attention_nki import MASKED, attend, check_attention, score_scale, transpose_keys
from kernels.tiles_nki import PARTITIONS, check_limit, filled, load, tiles, wait_for_both_cores

RING_DTYPES = (nl.float32, nl.bfloat16)  # float16 cannot hold the mask
MASK_CHUNK = 4096  # keys whose mask is made at once, on one partition


@nki.jit
def ring_attention(
    q_BLHD: Any, k_BSHD: Any, v_BSHD: Any, group: str, pairs: Any,
    scale: float | None = None, k_valid: Any = None, prefetch_depth: int = 2,
) -> Any:  # fmt: skip
    """Attention of this rank's queries to the keys of the whole ring; see `kernels.ring_attention`.

    Dimensions:
        B: batch. L, S: queries and keys of this rank. H: heads. D: head width, 1 to MAX_HEAD_WIDTH = 128.

    Args:
        q_BLHD: [B, L, H, D] @ HBM, float32 or bfloat16.
        k_BSHD, v_BSHD: [B, S, H, D] @ HBM, same dtype; S is the same on all ranks; padding must be finite.
        group: not used here: the pairs say all.
        pairs: (source, target) ranks of all rings, flattened.
        scale: positive factor on the scores; None means 1 / sqrt(D).
        k_valid: [1] @ HBM int32, or None: this rank's keys from this index on are padding.
        prefetch_depth: permutes under way ahead of the block in use, 1 to ring size - 1.

    Returns:
        out: [B, L, H, D] @ HBM, dtype of q. lse: [B, H, L] @ HBM float32.

    Limits:
        MAX_HEAD_WIDTH = 128; scale > 0; one dtype of RING_DTYPES.

    Pseudocode:
        keys_T = transpose(k); block 0 = (keys_T, v, mask)
        for step in range(ring size):
            start permutes until `prefetch_depth` blocks are ahead
            out, lse = attend(q, block[step], starting from out, lse)
    """
    check_attention(q_BLHD, k_BSHD, v_BSHD, k_BSHD.shape[1])
    check_limit(q_BLHD.dtype in RING_DTYPES, f"dtype is one of RING_DTYPES = {RING_DTYPES}", q_BLHD.dtype)
    B, L, H, D = q_BLHD.shape
    S = k_BSHD.shape[1]
    factor = score_scale(scale, D)
    out = nl.ndarray((B, L, H, D), dtype=q_BLHD.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((B, H, L), dtype=nl.float32, buffer=nl.shared_hbm)
    # private: both cores compute the row that their halves share, and neither may merge a block twice
    numerators = nl.ndarray((B, L, H, D), dtype=nl.float32, buffer=nl.private_hbm)
    sums = nl.ndarray((B, H, L), dtype=nl.float32, buffer=nl.private_hbm)
    keys_T = nl.ndarray((B, H, D, S), dtype=k_BSHD.dtype, buffer=nl.shared_hbm)
    transpose_keys(keys_T, k_BSHD, S)
    wait_for_both_cores(keys_T)
    travelling = (keys_T, v_BSHD) if k_valid == None else (keys_T, v_BSHD, k_valid)
    num_steps = ring_length(pairs)
    ones = filled((1, PARTITIONS), 1.0, q_BLHD.dtype)

    def step(index: int, block: Any) -> None:
        mask = None if k_valid == None else (ones, key_mask(block[2], S, MASKED, q_BLHD.dtype))
        previous = None if index == 0 else (numerators, sums)
        into = (out, lse) if index == num_steps - 1 else (numerators, sums)
        attend(q_BLHD, (block[0], block[1], mask), S, factor, into, previous)

    around_the_ring(travelling, pairs, num_steps, prefetch_depth, step)
    return out, lse


def ring_length(pairs: Any) -> int:
    """Ranks in one ring of flattened (source, target) pairs; all rings are of one size."""
    if len(pairs) == 0:
        return 1
    length, rank = 0, pairs[0]
    for _ in range(len(pairs) // 2):
        for index in range(0, len(pairs), 2):
            if pairs[index] == rank:
                following = pairs[index + 1]
        length, rank = length + 1, following
        if rank == pairs[0]:
            return length
    check_limit(False, "the pairs close to rings", pairs)
    return length


def around_the_ring(own: Any, pairs: Any, num_steps: int, prefetch_depth: int, use: Any) -> None:
    """`use(step, block)` for every block of the ring; permutes run ahead through rotating buffers.

    Transfer t + depth overwrites the block of step t - 1, which both cores have left by then.
    """
    depth = max(1, min(prefetch_depth, num_steps - 1))
    couples = []
    for index in range(0, len(pairs), 2):
        couples.append((pairs[index], pairs[index + 1]))
    buffers = []
    for _ in range(min(depth + 1, num_steps - 1)):
        buffers.append(like(own))
    num_sent = 0
    for step in range(num_steps):
        while num_sent < min(step + depth, num_steps - 1):
            source = own if num_sent == 0 else buffers[(num_sent - 1) % len(buffers)]
            send(source, buffers[num_sent % len(buffers)], tuple(couples))
            num_sent += 1
        use(step, own if step == 0 else buffers[(step - 1) % len(buffers)])


def like(block: Any) -> Any:
    """New shared HBM tensors of the shapes and dtypes of a block's parts."""
    parts = []
    for part in block:
        parts.append(nl.ndarray(part.shape, dtype=part.dtype, buffer=nl.shared_hbm))
    return parts


def send(block: Any, into: Any, couples: Any) -> None:
    """Permute every part of a block once both cores are here; a permute takes one tensor."""
    wait_for_both_cores(into[0])
    for index in range(len(block)):
        ncc.collective_permute(srcs=(block[index],), dsts=(into[index],), source_target_pairs=couples)


def key_mask(count: Any, num_keys: int, masked: float, dtype: Any) -> Any:
    """[1, S] SBUF: 0 for the first `count` keys and `masked` for the others; count is [1] @ HBM int32."""
    valid = load((1, 1), count, nl.float32)
    mask = nl.ndarray((1, num_keys), dtype=dtype, buffer=nl.sbuf)
    for span in tiles(num_keys, MASK_CHUNK):
        start, size = span
        index = nl.ndarray((1, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=index, pattern=((1, size),), offset=start)
        nisa.tensor_scalar(
            dst=mask[:, start : start + size], data=index,
            op0=nl.greater_equal, operand0=valid, op1=nl.multiply, operand1=masked,
        )  # fmt: skip
    return mask

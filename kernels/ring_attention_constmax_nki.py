"""NKI twin of `ring_attention_constmax` for Trainium2 under LNC2: a fixed bound per query instead of a running maximum.

Keys lie on partitions, so that probabilities come out as the second matmul wants them and nothing is transposed. Values
carry a column of ones, whose product is the denominator. Blocks merge by plain addition.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.attention_nki import check_attention, load_rows, out_rows, score_scale, transpose_keys, transposed
from kernels.ring_attention_nki import RING_DTYPES, around_the_ring, key_mask, ring_length
from kernels.tiles_nki import MATMUL_COLUMNS as QUERY_GROUP
from kernels.tiles_nki import (
    PARTITIONS,
    check_limit,
    filled,
    for_groups,
    load,
    load_row,
    my_rows,
    tiles,
    wait_for_both_cores,
)

KEY_SECTION = 2048  # keys and values that are loaded at once
COUNT_CHUNK = 4096  # denominators per partition that are counted at once
MIN_DENOMINATOR = 2.0**-96
SMALLEST = 2.0**-126
SQUARE_FLOOR = 1e-30  # of a query's squared norm, within the valid input range of sqrt


@nki.jit
def ring_attention_constmax(
    q_BLHD: Any, k_BSHD: Any, v_BSHD: Any, key_norm_BH: Any, group: str, pairs: Any,
    scale: float | None = None, k_valid: Any = None, prefetch_depth: int = 2,
) -> Any:  # fmt: skip
    """Attention by a fixed bound, and the number of rows it fails; see `kernels.ring_attention_constmax`.

    Dimensions:
        B: batch. L, S: queries and keys of this rank. H: heads. D: head width, 1 to MAX_HEAD_WIDTH = 128.

    Args:
        q_BLHD: [B, L, H, D] @ HBM, float32 or bfloat16.
        k_BSHD, v_BSHD: [B, S, H, D] @ HBM, same dtype; S is the same on all ranks; padding must be finite.
        key_norm_BH: [B, H] @ HBM float32, the largest norm of a key of the ring.
        group: not used here: the pairs say all.
        pairs: (source, target) ranks of all rings, flattened.
        scale: positive factor on the scores; None means 1 / sqrt(D).
        k_valid: [1] @ HBM int32, or None: this rank's keys from this index on are padding.
        prefetch_depth: permutes under way ahead of the block in use, 1 to ring size - 1.

    Returns:
        out: [B, L, H, D] @ HBM, dtype of q. num_underflowed: [1] @ HBM int32.

    Limits:
        MAX_HEAD_WIDTH = 128; scale > 0; one dtype of RING_DTYPES.

    Pseudocode:
        keys_T = transpose(k * valid); values = [v | 1] * valid; block 0 = (keys_T, values)
        for step in range(ring size):
            for group of 512 queries:
                c = |q| * key_norm                                     # a row, on every partition
                for tile of 128 keys:
                    p = exp(scale * (keys_T^T @ q_T - c))
                    bank[128 queries] += p^T @ values                  # 4 banks
                acc += bank
        out = acc[:, :D] / acc[:, D]; count acc[:, D] < MIN_DENOMINATOR
    """
    check_attention(q_BLHD, k_BSHD, v_BSHD, k_BSHD.shape[1])
    check_limit(q_BLHD.dtype in RING_DTYPES, f"dtype is one of RING_DTYPES = {RING_DTYPES}", q_BLHD.dtype)
    B, L, H, D = q_BLHD.shape
    S = k_BSHD.shape[1]
    factor = score_scale(scale, D)
    out = nl.ndarray((B, L, H, D), dtype=q_BLHD.dtype, buffer=nl.shared_hbm)
    sums = nl.ndarray((B, L, H, D + 1), dtype=nl.float32, buffer=nl.private_hbm)
    denominators = nl.ndarray((B, L, H, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    own = (
        nl.ndarray((B, H, D, S), dtype=k_BSHD.dtype, buffer=nl.shared_hbm),
        nl.ndarray((B, S, H, D + 1), dtype=v_BSHD.dtype, buffer=nl.shared_hbm),
    )
    weights = None if k_valid == None else key_weights(k_valid, S)
    transpose_keys(own[0], masked_keys(k_BSHD, weights), S)
    extend_values(own[1], v_BSHD, weights)
    wait_for_both_cores(own[0])
    num_steps = ring_length(pairs)

    def step(index: int, block: Any) -> None:
        last = index == num_steps - 1
        attend(q_BLHD, block, key_norm_BH, factor, (sums, index == 0, (out, denominators) if last else None))

    around_the_ring(own, pairs, num_steps, prefetch_depth, step)
    wait_for_both_cores(denominators)
    return out, underflowed(denominators)


def key_weights(k_valid: Any, num_keys: int) -> Any:
    """[S, 1] float32 @ HBM: 1 for the keys that count, 0 for padding."""
    padding = key_mask(k_valid, num_keys, -1.0, nl.float32)
    nisa.tensor_scalar(dst=padding, data=padding, op0=nl.add, operand0=1.0)
    weights = nl.ndarray((num_keys, 1), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=weights, src=padding)
    return weights


def masked_keys(k_BSHD: Any, weights: Any) -> Any:
    """The keys with padding as zeros: its scores stay below every bound. The argument itself without padding."""
    if weights == None:
        return k_BSHD
    masked = nl.ndarray(k_BSHD.shape, dtype=k_BSHD.dtype, buffer=nl.private_hbm)
    copy_rows(masked, k_BSHD, weights, False)
    return masked


def extend_values(into: Any, v_BSHD: Any, weights: Any) -> None:
    """Values with a column of ones behind them, zero for padding: [B, S, H, D + 1] @ HBM."""
    copy_rows(into, v_BSHD, weights, True)


def copy_rows(into: Any, source: Any, weights: Any, with_ones: bool) -> None:
    """Copy this core's half of the rows of [B, S, H, D] @ HBM, times a weight per row, optionally with ones behind."""
    B, S, H, D = source.shape
    width = D + 1 if with_ones else D
    first, count = my_rows(S)
    for b in range(B):
        for h in range(H):

            def group(start: int, register: Any, rows: int) -> None:
                offset = (b * S + start) * H
                tile = nl.ndarray((rows, width), dtype=into.dtype, buffer=nl.sbuf)
                if with_ones:
                    nisa.memset(dst=tile[:, D:width], value=1.0)
                from_rows = source.ap(
                    pattern=((H * D, rows), (1, D)), offset=offset * D + h * D, scalar_offset=register, indirect_dim=1
                )
                nisa.dma_copy(dst=tile[:, 0:D], src=from_rows)
                if weights != None:
                    weight = weights.ap(pattern=((1, rows), (1, 1)), offset=start, scalar_offset=register)
                    column = load((rows, 1), weight, nl.float32)
                    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=column)
                to_rows = into.ap(
                    pattern=((H * width, rows), (1, width)), offset=offset * width + h * width,
                    scalar_offset=register, indirect_dim=1,
                )  # fmt: skip
                nisa.dma_copy(dst=to_rows, src=tile)

            for_groups(first, count, PARTITIONS, group)


def attend(q_BLHD: Any, block: Any, key_norm_BH: Any, scale: float, results: Any) -> None:
    """Add one block of keys to the sums of this core's half of the queries."""
    B, L, H, _ = q_BLHD.shape
    first, count = my_rows(L)
    for b in range(B):
        for h in range(H):
            norm = load_row(key_norm_BH, b * H + h, 1, PARTITIONS, nl.float32)

            def group(start: int, register: Any, rows: int) -> None:
                attend_group(q_BLHD, block, ((b, h), (start, register, rows)), (norm, scale), results)

            for_groups(first, count, QUERY_GROUP, group)


def attend_group(q_BLHD: Any, block: Any, target: Any, numbers: Any, results: Any) -> None:
    """Up to 512 queries of one head against a whole block: sums grow in one PSUM bank per 128 queries."""
    head, where = target
    norm, scale = numbers
    D, rows = q_BLHD.shape[3], where[2]
    queries_T = transposed(load_rows(q_BLHD, head, where, q_BLHD.dtype), rows, D)
    bound = bounds(queries_T, norm)
    banks = []
    query_tiles = tiles(rows, PARTITIONS)
    for tile in query_tiles:
        size = tile[1]
        banks.append(nl.ndarray((size, D + 1), dtype=nl.float32, buffer=nl.psum))
    num_keys = block[0].shape[3]
    for span in tiles(num_keys, KEY_SECTION):
        start, size = span
        keys = load((D, size), block[0][head[0], head[1], :, start : start + size], block[0].dtype)
        values = load_rows(block[1], head, (start, None, size), block[1].dtype)
        spans = tiles(size, PARTITIONS)
        for index in range(len(spans)):
            key, count = spans[index]
            weights = probabilities(queries_T, keys[:, key : key + count], bound, scale)
            for place in range(len(query_tiles)):
                first, width = query_tiles[place]
                nisa.nc_matmul(
                    dst=banks[place],
                    stationary=weights[:, first : first + width],
                    moving=values[0:count, index, :],
                    accumulate=start + key > 0,
                )
    for place in range(len(query_tiles)):
        keep(banks[place], head, where, query_tiles[place], results)


def bounds(queries_T: Any, norm: Any) -> Any:
    """[128, queries] float32 SBUF: |q| * max |k|, the same on every partition, by a matmul with ones."""
    D, rows = queries_T.shape
    squares = nl.ndarray((D, rows), dtype=queries_T.dtype, buffer=nl.sbuf)
    nisa.activation(dst=squares, op=nl.square, data=queries_T)
    bank = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.psum)
    ones = filled((D, PARTITIONS), 1.0, queries_T.dtype)
    nisa.nc_matmul(dst=bank, stationary=ones, moving=squares, accumulate=False)
    floored = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=floored, data=bank, op0=nl.maximum, operand0=SQUARE_FLOOR)
    length = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=length, op=nl.sqrt, data=floored)
    bound = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bound, data=length, op0=nl.multiply, operand0=norm)
    return bound


def probabilities(queries_T: Any, keys_T: Any, bound: Any, scale: float) -> Any:
    """[keys, queries] SBUF: exp(scale * (score - bound)) of up to 128 keys and 512 queries."""
    keys, rows = keys_T.shape[1], queries_T.shape[1]
    bank = nl.ndarray((keys, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bank, stationary=keys_T, moving=queries_T, accumulate=False)
    shifted = nl.ndarray((keys, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=shifted, data1=bank, data2=bound[0:keys], op=nl.subtract)
    weights = nl.ndarray((keys, rows), dtype=queries_T.dtype, buffer=nl.sbuf)
    nisa.activation(dst=weights, op=nl.exp, data=shifted, scale=scale)
    return weights


def keep(bank: Any, head: Any, where: Any, tile: Any, results: Any) -> None:
    """Add the block's sums to those of earlier blocks; after the last block divide and store."""
    sums, is_first, finals = results
    rows, width = bank.shape
    total = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    if is_first:
        nisa.tensor_copy(dst=total, src=bank)
    else:
        earlier = load((rows, width), out_rows(sums, head, where, tile), nl.float32)
        nisa.tensor_tensor(dst=total, data1=bank, data2=earlier, op=nl.add)
    if finals == None:
        nisa.dma_copy(dst=out_rows(sums, head, where, tile), src=total)
        return
    out, denominators = finals
    D = width - 1
    nisa.dma_copy(dst=out_rows(denominators, head, where, tile), src=total[:, D:width])
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=inverse, data=total[:, D:width], op0=nl.maximum, operand0=SMALLEST)
    nisa.reciprocal(dst=inverse, data=inverse)
    normal = nl.ndarray((rows, D), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=normal, data=total[:, 0:D], op0=nl.multiply, operand0=inverse)
    nisa.dma_copy(dst=out_rows(out, head, where, tile), src=normal)


def underflowed(denominators: Any) -> Any:
    """[1] int32 @ HBM: how many denominators are below MIN_DENOMINATOR; both cores count all of them."""
    number = denominators.size
    found = filled((PARTITIONS, 1), 0.0, nl.float32)
    columns = number // PARTITIONS
    for span in tiles(columns, COUNT_CHUNK):
        start, size = span
        pattern = ((columns, PARTITIONS), (1, size))
        add_small(found, load((PARTITIONS, size), denominators.ap(pattern=pattern, offset=start), nl.float32))
    rest = number - columns * PARTITIONS
    if rest > 0:
        pattern = ((1, rest), (1, 1))
        tail = denominators.ap(pattern=pattern, offset=columns * PARTITIONS)
        add_small(found[0:rest], load((rest, 1), tail, nl.float32))
    bank = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.psum)
    ones = filled((PARTITIONS, 1), 1.0, nl.float32)
    nisa.nc_matmul(dst=bank, stationary=ones, moving=found, accumulate=False)
    whole = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=whole, src=bank)
    count = nl.ndarray((1,), dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=count, src=whole)
    return count


def add_small(found: Any, values: Any) -> None:
    """Add to `found` the number of values below MIN_DENOMINATOR in each row."""
    rows, width = values.shape
    small = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=small, data=values, op0=nl.less, operand0=MIN_DENOMINATOR)
    number = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=number, op=nl.add, data=small, axis=1)
    nisa.tensor_tensor(dst=found, data1=found, data2=number, op=nl.add)

"""NKI twin of `attention`: flash attention with a true running maximum, for Trainium2 under LNC2.

Queries lie on partitions, so that the maximum and the sum of a row are reductions along the free dimension. Keys are
transposed once into scratch memory; probabilities are transposed on TensorE tile by tile.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.tiles_nki import FLOAT_DTYPES, PARTITIONS, check_limit, filled, for_groups, load, my_rows, tiles
from kernels.tiles_nki import MATMUL_COLUMNS as KEY_CHUNK
from kernels.tiles_nki import PARTITIONS as KEY_TILE
from kernels.tiles_nki import PARTITIONS as QUERY_TILE
from kernels.tiles_nki import wait_for_both_cores as wait

MAX_HEAD_WIDTH = 128  # the contraction of a score fits the 128 partitions
QUERY_GROUP = 512  # queries that share one load of a section of keys
KEY_SECTION = 2048  # keys whose scores fill four PSUM banks between two updates of the running maximum
MASKED = -1.0e30  # added to the score of a padding key; exp of it is 0 next to any real score


@nki.jit
def attention(q_BLHD: Any, k_BSHD: Any, v_BSHD: Any, scale: float | None = None, k_valid: int | None = None) -> Any:
    """Non-causal attention and the log-sum-exp of its scores; see `kernels.attention`.

    Dimensions:
        B: batch. L: queries. S: keys. H: heads. D: head width, 1 to MAX_HEAD_WIDTH = 128.

    Args:
        q_BLHD: [B, L, H, D] @ HBM, float32, bfloat16 or float16.
        k_BSHD: [B, S, H, D] @ HBM, same dtype.
        v_BSHD: [B, S, H, D] @ HBM, same dtype.
        scale: positive factor on the scores; None means 1 / sqrt(D).
        k_valid: keys from this index on are padding; a compile-time number.

    Returns:
        out: [B, L, H, D] @ HBM in the dtype of q. lse: [B, H, L] @ HBM float32.

    Limits:
        MAX_HEAD_WIDTH = 128; scale > 0; 1 <= k_valid <= S; one dtype of FLOAT_DTYPES.

    Pseudocode:
        keys_T = transpose(k)                                  # once, to scratch HBM, each core a half
        for group of 512 queries:                              # each core a half of the queries
            for section of 2048 keys:
                for tile of 128 queries:
                    s = q_tile @ keys_T                        # 4 PSUM banks
                    m' = max(m, scale * rowmax(s)); a = exp(m - m')
                    p = exp(scale * s - m')                    # sums on the way
                    l = l * a + rowsum(p); acc = acc * a + transpose(p)^T @ v
            out = acc / l; lse = m + log(l)
    """
    num_keys = k_BSHD.shape[1] if k_valid == None else k_valid
    check_attention(q_BLHD, k_BSHD, v_BSHD, num_keys)
    B, L, H, D = q_BLHD.shape
    out = nl.ndarray((B, L, H, D), dtype=q_BLHD.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((B, H, L), dtype=nl.float32, buffer=nl.shared_hbm)
    keys_T = nl.ndarray((B, H, D, k_BSHD.shape[1]), dtype=k_BSHD.dtype, buffer=nl.shared_hbm)
    transpose_keys(keys_T, k_BSHD, num_keys)
    wait(keys_T)
    attend(q_BLHD, (keys_T, v_BSHD, None), num_keys, score_scale(scale, D), (out, lse), None)
    return out, lse


def check_attention(q_BLHD: Any, k_BSHD: Any, v_BSHD: Any, num_keys: int) -> None:
    """The limits that all attention kernels share."""
    D = q_BLHD.shape[3]
    check_limit(D <= MAX_HEAD_WIDTH, f"head width is at most MAX_HEAD_WIDTH = {MAX_HEAD_WIDTH}", D)
    check_limit(k_BSHD.shape == v_BSHD.shape, "keys and values have one shape", (k_BSHD.shape, v_BSHD.shape))
    check_limit(
        k_BSHD.shape[2:] == q_BLHD.shape[2:], "queries and keys have the same heads", (q_BLHD.shape, k_BSHD.shape)
    )
    check_limit(1 <= num_keys <= k_BSHD.shape[1], f"k_valid is 1 to {k_BSHD.shape[1]}", num_keys)
    check_limit(q_BLHD.dtype in FLOAT_DTYPES, f"dtype is one of FLOAT_DTYPES = {FLOAT_DTYPES}", q_BLHD.dtype)
    same = q_BLHD.dtype == k_BSHD.dtype and q_BLHD.dtype == v_BSHD.dtype
    check_limit(same, "q, k and v have one dtype", (q_BLHD.dtype, k_BSHD.dtype, v_BSHD.dtype))


def score_scale(scale: float | None, head_width: int) -> float:
    """The factor on scores; it must be positive for the maximum to commute with it."""
    factor = head_width**-0.5 if scale == None else scale
    check_limit(factor > 0.0, "scale is positive", factor)
    return float(factor)


def transpose_keys(keys_T: Any, k_BSHD: Any, num_keys: int) -> None:
    """Write [B, H, D, S] @ HBM from [B, S, H, D] @ HBM; this core's half of the keys."""
    B, S, H, D = k_BSHD.shape
    first, count = my_rows(num_keys)
    for b in range(B):
        for h in range(H):

            def group(start: int, register: Any, rows: int) -> None:
                natural = load_rows(k_BSHD, (b, h), (start, register, rows), k_BSHD.dtype)
                turned = transposed(natural, rows, D)
                where = ((b * H + h) * D) * S + start
                nisa.dma_copy(
                    dst=keys_T.ap(pattern=((S, D), (1, rows)), offset=where, scalar_offset=register, indirect_dim=3),
                    src=turned,
                )

            for_groups(first, count, KEY_CHUNK, group)


def load_rows(x_BLHD: Any, head: tuple[int, int], where: tuple[int, Any, int], dtype: Any) -> Any:
    """[128, tiles, D] SBUF: rows `first + register` on of one head, row r on partition r % 128 of tile r // 128."""
    L, H, D = x_BLHD.shape[1:]
    (b, h), (first, register, rows) = head, where
    tile = nl.ndarray((min(rows, PARTITIONS), (rows + PARTITIONS - 1) // PARTITIONS, D), dtype=dtype, buffer=nl.sbuf)
    base = (b * L + first) * H * D + h * D
    full = rows // PARTITIONS
    if full > 0:
        by_tile = ((H * D, PARTITIONS), (PARTITIONS * H * D, full), (1, D))
        source = x_BLHD.ap(pattern=by_tile, offset=base, scalar_offset=register, indirect_dim=1)
        nisa.dma_copy(dst=tile[:, 0:full, :], src=source)
    rest = rows - full * PARTITIONS
    if rest > 0:
        pattern = ((H * D, rest), (1, D))
        source = x_BLHD.ap(
            pattern=pattern, offset=base + full * PARTITIONS * H * D, scalar_offset=register, indirect_dim=1
        )
        nisa.dma_copy(dst=tile[0:rest, full, :], src=source)
    return tile


def transposed(rows_tile: Any, num_rows: int, width: int) -> Any:
    """[width, num_rows] SBUF from [128, tiles, width] SBUF with up to 512 rows, through one PSUM bank."""
    bank = nl.ndarray((width, num_rows), dtype=rows_tile.dtype, buffer=nl.psum)
    spans = tiles(num_rows, PARTITIONS)
    for index in range(len(spans)):
        start, size = spans[index]
        nisa.nc_transpose(dst=bank[:, start : start + size], data=rows_tile[0:size, index, :])
    turned = nl.ndarray((width, num_rows), dtype=rows_tile.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=turned, src=bank)
    return turned


def attend(q_BLHD: Any, keys: tuple[Any, Any, Any], num_keys: int, scale: float, into: Any, previous: Any) -> None:
    """Attention of this core's half of the queries to one block of keys.

    Args:
        q_BLHD: [B, L, H, D] @ HBM.
        keys: keys [B, H, D, S] @ HBM, values [B, S, H, D] @ HBM, and None or, in SBUF, ones [1, 128] and a mask [1, S]
            that is added to the scores.
        num_keys: keys that count.
        scale: factor on the scores.
        into: out [B, L, H, D] @ HBM and lse [B, H, L] @ HBM to write.
        previous: out (float32) and lse of the blocks before this one, merged by log-sum-exp; or None.
    """
    B, L, H, _ = q_BLHD.shape
    first, count = my_rows(L)
    for b in range(B):
        for h in range(H):

            def group(start: int, register: Any, rows: int) -> None:
                where = (start, register, rows)
                attend_group(q_BLHD, keys, (b, h), where, (num_keys, scale), (into, previous))

            for_groups(first, count, QUERY_GROUP, group)


def attend_group(q_BLHD: Any, keys: Any, head: Any, where: Any, numbers: Any, results: Any) -> None:
    """Up to 512 queries of one head: load them, pass over all keys, finish and store."""
    D = q_BLHD.shape[3]
    rows = where[2]
    queries_T = transposed(load_rows(q_BLHD, head, where, q_BLHD.dtype), rows, D)
    into, previous = results
    query_tiles = tiles(rows, QUERY_TILE)
    states = []
    for tile in query_tiles:
        states.append(initial_state(tile, D, head, where, previous))
    for span in tiles(numbers[0], KEY_SECTION):
        start, size = span
        section = load_section(keys, head, (start, size))
        for index in range(len(query_tiles)):
            first, count = query_tiles[index]
            attend_section(queries_T[:, first : first + count], section, size, numbers[1], states[index])
    for index in range(len(query_tiles)):
        finish(query_tiles[index], states[index], head, where, into)


def initial_state(tile: Any, width: int, head: Any, where: Any, previous: Any) -> Any:
    """Running maximum, sum and numerator of a tile of queries: empty, or those of a finished part."""
    rows = tile[1]
    state = dict()
    state["fresh"] = previous == None
    if previous == None:
        state["max"] = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        state["sum"] = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        state["acc"] = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
        return state
    out, lse = previous
    state["max"] = load((rows, 1), lse_rows(lse, head, where, tile), nl.float32)
    state["sum"] = filled((rows, 1), 1.0, nl.float32)
    state["acc"] = load((rows, width), out_rows(out, head, where, tile), nl.float32)
    return state


def out_rows(out_BLHD: Any, head: Any, where: Any, tile: Any) -> Any:
    """The HBM view of one tile of queries of one head: [rows, D]."""
    L, H, D = out_BLHD.shape[1:]
    offset = (head[0] * L + where[0] + tile[0]) * H * D + head[1] * D
    return out_BLHD.ap(pattern=((H * D, tile[1]), (1, D)), offset=offset, scalar_offset=where[1], indirect_dim=1)


def lse_rows(lse_BHL: Any, head: Any, where: Any, tile: Any) -> Any:
    """The HBM view of one tile of queries of one head: [rows, 1]."""
    H, L = lse_BHL.shape[1:]
    offset = (head[0] * H + head[1]) * L + where[0] + tile[0]
    return lse_BHL.ap(pattern=((1, tile[1]), (1, 1)), offset=offset, scalar_offset=where[1], indirect_dim=2)


def load_section(keys: Any, head: Any, span: tuple[int, int]) -> Any:
    """Keys [D, n] and values [128, tiles, D] of one section in SBUF, and its part of the mask."""
    keys_T, v_BSHD, mask = keys
    start, size = span
    section = dict()
    D = keys_T.shape[2]
    section["keys"] = load((D, size), keys_T[head[0], head[1], :, start : start + size], keys_T.dtype)
    section["values"] = load_rows(v_BSHD, head, (start, None, size), v_BSHD.dtype)
    section["mask"] = None if mask == None else (mask[0], mask[1][:, start : start + size])
    return section


def attend_section(queries_T: Any, section: Any, num_keys: int, scale: float, state: Any) -> None:
    """One tile of queries against up to 2048 keys: scores, new maximum, probabilities, update of sum and numerator."""
    D, rows = queries_T.shape
    chunks = tiles(num_keys, KEY_CHUNK)
    tops = nl.ndarray((rows, len(chunks)), dtype=nl.float32, buffer=nl.sbuf)
    banks = []
    for index in range(len(chunks)):
        chunk = chunks[index]
        banks.append(scores(queries_T, section, chunk))
        nisa.tensor_reduce(dst=tops[:, index : index + 1], op=nl.maximum, data=banks[index], axis=1)
    minus_max, shrink = raise_maximum(tops, scale, state)
    sums = nl.ndarray((rows, len(chunks)), dtype=nl.float32, buffer=nl.sbuf)
    product = nl.ndarray((rows, D), dtype=nl.float32, buffer=nl.psum)
    for index in range(len(chunks)):
        start, size = chunks[index]
        weights = nl.ndarray((rows, size), dtype=queries_T.dtype, buffer=nl.sbuf)
        nisa.activation(
            dst=weights, op=nl.exp, data=banks[index], bias=minus_max, scale=scale,
            reduce_op=nl.add, reduce_res=sums[:, index : index + 1], reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        add_values(product, weights, section["values"], start)
    update(product, sums, shrink, state)


def scores(queries_T: Any, section: Any, chunk: tuple[int, int]) -> Any:
    """[rows, up to 512] float32 in one PSUM bank: queries times keys, plus the mask if there is one."""
    start, size = chunk
    rows = queries_T.shape[1]
    bank = nl.ndarray((rows, size), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=bank, stationary=queries_T, moving=section["keys"][:, start : start + size], accumulate=False)
    if section["mask"] != None:  # a row added by a contraction of one costs TensorE less than VectorE a pass
        ones, mask = section["mask"]
        nisa.nc_matmul(dst=bank, stationary=ones[:, 0:rows], moving=mask[:, start : start + size], accumulate=True)
    return bank


def raise_maximum(tops: Any, scale: float, state: Any) -> tuple[Any, Any]:
    """Take the new row maxima into the state; returns minus the maximum and the factor on all that came before."""
    rows = tops.shape[0]
    top = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=tops, axis=1)
    new_max = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if state["fresh"]:
        nisa.tensor_scalar(dst=new_max, data=top, op0=nl.multiply, operand0=scale)
    else:
        nisa.tensor_scalar(
            dst=new_max, data=top, op0=nl.multiply, operand0=scale, op1=nl.maximum, operand1=state["max"]
        )
    minus_max = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=minus_max, data=new_max, op0=nl.multiply, operand0=-1.0)
    shrink = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if not state["fresh"]:
        nisa.activation(dst=shrink, op=nl.exp, data=state["max"], bias=minus_max)
    state["max"] = new_max
    return minus_max, shrink


def add_values(product: Any, weights: Any, values: Any, first_key: int) -> None:
    """Add weights @ values to the product, over up to 512 keys; the weights are transposed through one PSUM bank."""
    rows, size = weights.shape
    parts = tiles(size, KEY_TILE)
    bank = nl.ndarray((PARTITIONS, len(parts) * rows), dtype=weights.dtype, buffer=nl.psum)
    turned = nl.ndarray((PARTITIONS, len(parts) * rows), dtype=weights.dtype, buffer=nl.sbuf)
    for index in range(len(parts)):
        start, keys = parts[index]
        nisa.nc_transpose(dst=bank[0:keys, index * rows : (index + 1) * rows], data=weights[:, start : start + keys])
    # VectorE is the busiest engine; every second chunk leaves PSUM through ScalarE
    engine = nisa.engine.scalar if first_key // KEY_CHUNK % 2 == 1 else nisa.engine.vector
    full = size // KEY_TILE * rows
    if full > 0:
        nisa.tensor_copy(dst=turned[:, 0:full], src=bank[:, 0:full], engine=engine)
    if size % KEY_TILE > 0:
        rest = size % KEY_TILE
        nisa.tensor_copy(dst=turned[0:rest, full : full + rows], src=bank[0:rest, full : full + rows], engine=engine)
    for index in range(len(parts)):
        start, keys = parts[index]
        nisa.nc_matmul(
            dst=product,
            stationary=turned[0:keys, index * rows : (index + 1) * rows],
            moving=values[0:keys, (first_key + start) // KEY_TILE, :],
            accumulate=first_key + start > 0,
        )


def update(product: Any, sums: Any, shrink: Any, state: Any) -> None:
    """Shrink sum and numerator, then add the new ones."""
    rows = sums.shape[0]
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
    if state["fresh"]:
        nisa.tensor_copy(dst=state["acc"], src=product)
        state["sum"] = total
        state["fresh"] = False
        return
    nisa.tensor_scalar(
        dst=state["sum"], data=state["sum"], op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=total
    )
    nisa.scalar_tensor_tensor(
        dst=state["acc"], data=state["acc"], op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=product
    )


def finish(tile: Any, state: Any, head: Any, where: Any, into: Any) -> None:
    """Divide by the sum, store the rows and their log-sum-exp."""
    out, lse = into
    rows, width = state["acc"].shape
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=state["sum"])
    normal = nl.ndarray((rows, width), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=normal, data=state["acc"], op0=nl.multiply, operand0=inverse)
    nisa.dma_copy(dst=out_rows(out, head, where, tile), src=normal)
    log_sum = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=log_sum, op=nl.log, data=state["sum"])
    nisa.tensor_tensor(dst=log_sum, data1=log_sum, data2=state["max"], op=nl.add)
    nisa.dma_copy(dst=lse_rows(lse, head, where, tile), src=log_sum)

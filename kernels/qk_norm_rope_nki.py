"""NKI twins of `qk_norm_rope`, `head_norm` and `sum_squares` for Trainium2 under LNC2: tokens on partitions."""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.tiles_nki import FLOAT_DTYPES, PARTITIONS, check_limit, for_groups, load, load_row, my_rows, rows_of, tiles

MAX_WIDTH = 5120  # heads times head width on one rank: the tiles of a token group fit SBUF
TOKEN_GROUP = 256  # tokens per turn of the device loop: two tiles, so that loads overlap with work


@nki.jit
def qk_norm_rope(
    q_BLHD: Any, k_BLHD: Any, weight_q: Any, weight_k: Any, cos: Any, sin: Any,
    eps: float = 1e-6, mean_squares: Any = None,
) -> Any:  # fmt: skip
    """RMSNorm over all heads of a token and rotary embedding in half layout; see `kernels.qk_norm_rope`.

    Dimensions:
        B: batch. L: tokens. H: heads on this rank. D: head width, even. H * D is at most MAX_WIDTH = 5120.

    Args:
        q_BLHD, k_BLHD: [B, L, H, D] @ HBM in half layout, float32, bfloat16 or float16.
        weight_q, weight_k: [H * D] @ HBM, any float dtype.
        cos, sin: [L, D / 2] @ HBM float32.
        eps: added to the mean square.
        mean_squares: [2, B, L] @ HBM float32 over the heads of all ranks, or None.

    Returns:
        q, k: [B, L, H, D] @ HBM, dtype of the inputs.

    Limits:
        MAX_WIDTH = 5120; D even; one dtype of FLOAT_DTYPES.

    Pseudocode:
        for tile of 128 tokens:                                    # each core a half of the tokens
            n = x * rsqrt(sum(x^2) / (H * D) + eps) * weight       # the sum on ScalarE, while it squares
            out[low] = n[low] * cos - n[high] * sin; out[high] = n[high] * cos + n[low] * sin
    """
    check_heads(q_BLHD)
    check_limit(q_BLHD.shape[3] % 2 == 0, "head width is even", q_BLHD.shape[3])
    check_limit(k_BLHD.shape == q_BLHD.shape and k_BLHD.dtype == q_BLHD.dtype, "q and k are alike", k_BLHD.shape)
    q_out = nl.ndarray(q_BLHD.shape, dtype=q_BLHD.dtype, buffer=nl.shared_hbm)
    k_out = nl.ndarray(k_BLHD.shape, dtype=k_BLHD.dtype, buffer=nl.shared_hbm)
    over_tokens(q_BLHD, weight_q, (cos, sin), (eps, mean_squares, 0), q_out)
    over_tokens(k_BLHD, weight_k, (cos, sin), (eps, mean_squares, 1), k_out)
    return q_out, k_out


@nki.jit
def head_norm(x_BLHD: Any, weight: Any, eps: float = 1e-6, mean_square: Any = None) -> Any:
    """The norm of `qk_norm_rope` alone; see `kernels.qk_norm_rope`.

    Dimensions:
        B: batch. L: tokens. H: heads on this rank. D: head width. H * D is at most MAX_WIDTH = 5120.

    Args:
        x_BLHD: [B, L, H, D] @ HBM, float32, bfloat16 or float16.
        weight: [H * D] @ HBM, any float dtype.
        eps: added to the mean square.
        mean_square: [B, L] @ HBM float32 over the heads of all ranks, or None.

    Returns:
        [B, L, H, D] @ HBM, dtype of x.

    Limits:
        MAX_WIDTH = 5120; dtype of FLOAT_DTYPES.

    Pseudocode:
        out = x * rsqrt(sum(x^2) / (H * D) + eps) * weight
    """
    check_heads(x_BLHD)
    out = nl.ndarray(x_BLHD.shape, dtype=x_BLHD.dtype, buffer=nl.shared_hbm)
    over_tokens(x_BLHD, weight, None, (eps, mean_square, 0), out)
    return out


@nki.jit
def sum_squares(q_BLHD: Any, k_BLHD: Any) -> Any:
    """This rank's sums of squares; see `kernels.qk_norm_rope`.

    Dimensions:
        B: batch. L: tokens. H: heads on this rank. D: head width. H * D is at most MAX_WIDTH = 5120.

    Args:
        q_BLHD, k_BLHD: [B, L, H, D] @ HBM, float32, bfloat16 or float16.

    Returns:
        [2, B, L] @ HBM float32.

    Limits:
        MAX_WIDTH = 5120; dtype of FLOAT_DTYPES.

    Pseudocode:
        out[0] = sum(q^2 over H, D); out[1] = sum(k^2 over H, D)
    """
    check_heads(q_BLHD)
    check_heads(k_BLHD)
    B, L, H, D = q_BLHD.shape
    out = nl.ndarray((2, B, L), dtype=nl.float32, buffer=nl.shared_hbm)
    first, count = my_rows(L)
    spans = (q_BLHD, k_BLHD)
    for index in range(len(spans)):
        x_BLHD = spans[index]
        for b in range(B):

            def group(start: int, register: Any, rows: int) -> None:
                for span in tiles(rows, PARTITIONS):
                    offset, size = span
                    row = b * L + start + offset
                    tile = load((size, H * D), rows_of(x_BLHD, row, register, size, H * D), x_BLHD.dtype)
                    target = rows_of(out, index * B * L + row, register, size, 1)
                    nisa.dma_copy(dst=target, src=squares_summed(tile))

            for_groups(first, count, TOKEN_GROUP, group)
    return out


def check_heads(x_BLHD: Any) -> None:
    """The limits of all three kernels."""
    width = x_BLHD.shape[2] * x_BLHD.shape[3]
    check_limit(width <= MAX_WIDTH, f"heads times head width is at most MAX_WIDTH = {MAX_WIDTH}", width)
    check_limit(x_BLHD.dtype in FLOAT_DTYPES, f"dtype is one of FLOAT_DTYPES = {FLOAT_DTYPES}", x_BLHD.dtype)


def over_tokens(x_BLHD: Any, weight: Any, angles: Any, norm: Any, out: Any) -> None:
    """All tiles of this core's half of the tokens; `norm` is eps, mean squares or None, and their index."""
    B, L, H, D = x_BLHD.shape
    gain = load_row(weight, 0, H * D, PARTITIONS, nl.float32)
    first, count = my_rows(L)
    for b in range(B):

        def group(start: int, register: Any, rows: int) -> None:
            for span in tiles(rows, PARTITIONS):
                offset, size = span
                token_tile(x_BLHD, gain, angles, norm, ((b, start + offset, register, size), out))

        for_groups(first, count, TOKEN_GROUP, group)


def token_tile(x_BLHD: Any, gain: Any, angles: Any, norm: Any, target: Any) -> None:
    """One tile of up to 128 tokens: load, normalise, rotate, store."""
    (b, first, register, rows), out = target
    B, L, H, D = x_BLHD.shape
    eps, mean_squares, index = norm
    row = b * L + first
    x = load((rows, H * D), rows_of(x_BLHD, row, register, rows, H * D), x_BLHD.dtype)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    if mean_squares == None:
        nisa.activation(dst=inverse, op=nl.rsqrt, data=squares_summed(x), scale=1.0 / (H * D), bias=eps)
    else:
        mean = load((rows, 1), rows_of(mean_squares, index * B * L + row, register, rows, 1), nl.float32)
        nisa.activation(dst=inverse, op=nl.rsqrt, data=mean, bias=eps)
    last = angles == None
    normal = nl.ndarray((rows, H, D), dtype=out.dtype if last else nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=normal, data=x, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=gain[0:rows]
    )
    if not last:
        tables = []
        for table in angles:
            tables.append(load((rows, D // 2), rows_of(table, first, register, rows, D // 2), nl.float32))
        normal = rotated(normal, tables, out.dtype)
    nisa.dma_copy(dst=rows_of(out, row, register, rows, H * D), src=normal.reshape((rows, H * D)))


def squares_summed(x: Any) -> Any:
    """[rows, 1] float32 SBUF: the sum of squares of each row of [rows, W] SBUF, in one pass of ScalarE."""
    rows, width = x.shape
    squares = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=squares, op=nl.square, data=x, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    return total


def rotated(normal: Any, tables: Any, dtype: Any) -> Any:
    """[rows, H, D] SBUF: every pair (d, d + D / 2) turned by its angle; two of the six passes on GpSimdE."""
    rows, H, D = normal.shape
    half = D // 2
    cos = tables[0].expand_dim(1).broadcast(1, H)
    sin = tables[1].expand_dim(1).broadcast(1, H)
    low, high = normal[:, :, 0:half], normal[:, :, half:D]
    out = nl.ndarray((rows, H, D), dtype=dtype, buffer=nl.sbuf)
    first = nl.ndarray((rows, H, half), dtype=nl.float32, buffer=nl.sbuf)
    second = nl.ndarray((rows, H, half), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=first, data1=low, data2=cos, op=nl.multiply)
    nisa.tensor_tensor(dst=second, data1=high, data2=sin, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=out[:, :, 0:half], data1=first, data2=second, op=nl.subtract)
    nisa.tensor_tensor(dst=first, data1=high, data2=cos, op=nl.multiply)
    nisa.tensor_tensor(dst=second, data1=low, data2=sin, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=out[:, :, half:D], data1=first, data2=second, op=nl.add)
    return out

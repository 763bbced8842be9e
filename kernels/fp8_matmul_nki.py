"""NKI twin of `fp8_matmul` for Trainium2 under LNC2: double-row mode, 256 channels contracted per instruction.

Activations are quantised row by row in natural layout, transposed as bfloat16 (which holds every e4m3 value), and
stored as FP8 again; weights lie in memory with the contraction first.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.tiles_nki import (
    MATMUL_COLUMNS,
    PARTITIONS,
    check_limit,
    for_groups,
    load,
    load_row,
    my_rows,
    quantized,
    rows_of,
    tiles,
)

FP8_MAX_TRN2 = 240.0  # the non-OCP e4m3 of Trainium2; the OCP variant (448) exists on trn3 only
AMAX_FLOOR = 1e-6
CONTRACTION_TILE = 256  # 2 x 128 channels per double-row matmul
MAX_CONTRACTION = 13824  # quantised rows of a group, natural tile and a weight tile fit SBUF
TOKEN_GROUP = 512  # tokens that share one load of a weight tile: four PSUM banks


@nki.jit
def fp8_matmul(
    x_MK: Any, weight_KN: Any, weight_scale_N: Any, bias_N: Any = None,
    fp8_max: float = FP8_MAX_TRN2, x_scale_M: Any = None,
) -> Any:  # fmt: skip
    """Row-wise FP8 linear layer; see `kernels.fp8_matmul`.

    Dimensions:
        M: tokens. K: input channels, 1 to MAX_CONTRACTION = 13824. N: output channels.

    Args:
        x_MK: [M, K] @ HBM, bfloat16 or float32; or float8_e4m3 with `x_scale_M`.
        weight_KN: [K, N] @ HBM float8_e4m3.
        weight_scale_N: [N] @ HBM float32.
        bias_N: [N] @ HBM any float dtype, or None.
        fp8_max: FP8_MAX_TRN2 = 240.
        x_scale_M: [M] @ HBM float32, or None.

    Returns:
        [M, N] @ HBM in the dtype of x (bfloat16 for an x of FP8).

    Limits:
        MAX_CONTRACTION = 13824; fp8_max = FP8_MAX_TRN2 = 240.

    Pseudocode:
        for group of 512 tokens:                                   # each core a half of the tokens
            q, s = quantise(x rows); qT = transpose(q)             # [128, K / 256, 2, tokens]
            for tile of 512 output channels:
                for tile of 128 tokens:                            # one PSUM bank each
                    for tile of 256 channels: bank += qT^T @ weight   (double row)
                    out = bank * s * weight_scale + bias
    """
    M, K = x_MK.shape
    N = weight_KN.shape[1]
    check_limit(K <= MAX_CONTRACTION, f"input channels are at most MAX_CONTRACTION = {MAX_CONTRACTION}", K)
    check_limit(weight_KN.shape[0] == K, "the weight has the input channels first", weight_KN.shape)
    check_limit(fp8_max == FP8_MAX_TRN2, f"fp8_max is FP8_MAX_TRN2 = {FP8_MAX_TRN2} on trn2", fp8_max)
    check_limit(weight_KN.dtype == nl.float8_e4m3, "the weight is float8_e4m3", weight_KN.dtype)
    out = nl.ndarray((M, N), dtype=x_MK.dtype if x_scale_M == None else nl.bfloat16, buffer=nl.shared_hbm)
    first, count = my_rows(M)

    def group(start: int, register: Any, rows: int) -> None:
        where = (start, register, rows)
        activations, scales = quantized_group(x_MK, x_scale_M, where, fp8_max)
        for span in tiles(N, MATMUL_COLUMNS):
            n, width = span
            weights = weight_tile(weight_KN, n, width)
            factors = load_row(weight_scale_N, n, width, PARTITIONS, nl.float32)
            bias = None if bias_N == None else load_row(bias_N, n, width, PARTITIONS, nl.float32)
            spans = tiles(rows, PARTITIONS)
            for index in range(len(spans)):
                tile = spans[index]
                bank = contracted(activations, weights, tile, width)
                result = scaled(bank, scales[index], factors, bias, out.dtype)
                target = out.ap(
                    pattern=((N, tile[1]), (1, width)), offset=(start + tile[0]) * N + n,
                    scalar_offset=register, indirect_dim=0,
                )  # fmt: skip
                nisa.dma_copy(dst=target, src=result)

    for_groups(first, count, TOKEN_GROUP, group)
    return out


def quantized_group(x_MK: Any, x_scale_M: Any, where: Any, fp8_max: float) -> Any:
    """FP8 activations [128, K tiles, 2, tokens] SBUF, the contraction on partitions, and scales [rows, 1] per tile."""
    start, register, rows = where
    K = x_MK.shape[1]
    num_tiles = (K + CONTRACTION_TILE - 1) // CONTRACTION_TILE
    turned = nl.ndarray((PARTITIONS, num_tiles, 2, rows), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    if K % CONTRACTION_TILE != 0:
        nisa.memset(dst=turned[:, num_tiles - 1, :, :], value=0.0)
    scales = []
    for span in tiles(rows, PARTITIONS):
        offset, size = span
        natural = load((size, K), rows_of(x_MK, start + offset, register, size, K), x_MK.dtype)
        if x_scale_M == None:
            values, scale = quantized(natural, fp8_max, AMAX_FLOOR)
        else:
            values = natural
            scale = load((size, 1), rows_of(x_scale_M, start + offset, register, size, 1), nl.float32)
        scales.append(scale)
        turn(turned[:, :, :, offset : offset + size], values)
    return turned, scales


def turn(turned: Any, values: Any) -> None:
    """Transpose [rows, K] FP8 into [128, K tiles, 2, rows] FP8, four blocks of 128 channels through one PSUM bank."""
    rows, K = values.shape
    exact = nl.ndarray((rows, K), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=exact, src=values, engine=nisa.engine.scalar)
    for span in tiles(K, PARTITIONS):
        start, size = span
        bank = nl.ndarray((size, rows), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=exact[:, start : start + size])
        half = start // PARTITIONS
        nisa.tensor_copy(dst=turned[0:size, half // 2, half % 2, :], src=bank)


def weight_tile(weight_KN: Any, n: int, width: int) -> Any:
    """[128, K tiles, 2, width] FP8 SBUF: channel 256 t + 128 j + p on partition p; zeros behind the last channel."""
    K, N = weight_KN.shape
    num_tiles = (K + CONTRACTION_TILE - 1) // CONTRACTION_TILE
    tile = nl.ndarray((PARTITIONS, num_tiles, 2, width), dtype=weight_KN.dtype, buffer=nl.sbuf)
    halves = K // PARTITIONS
    if K % CONTRACTION_TILE != 0:
        nisa.memset(dst=tile[:, num_tiles - 1, :, :], value=0.0)
    flat = tile.reshape((PARTITIONS, 2 * num_tiles, width))
    if halves > 0:
        pattern = ((N, PARTITIONS), (PARTITIONS * N, halves), (1, width))
        nisa.dma_copy(dst=flat[:, 0:halves, :], src=weight_KN.ap(pattern=pattern, offset=n))
    rest = K - halves * PARTITIONS
    if rest > 0:
        last = ((N, rest), (1, width))
        source = weight_KN.ap(pattern=last, offset=halves * PARTITIONS * N + n)
        nisa.dma_copy(dst=flat[0:rest, halves, :], src=source)
    return tile


def contracted(activations: Any, weights: Any, tile: Any, width: int) -> Any:
    """[rows, width] float32 in one PSUM bank: the sum over all tiles of 256 channels."""
    offset, rows = tile
    bank = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.psum)
    for t in range(activations.shape[1]):
        nisa.nc_matmul(
            dst=bank,
            stationary=activations[:, t, :, offset : offset + rows],
            moving=weights[:, t, :, :],
            accumulate=t > 0,
            perf_mode=nisa.matmul_perf_mode.double_row,
        )
    return bank


def scaled(bank: Any, scale: Any, factors: Any, bias: Any, dtype: Any) -> Any:
    """The bank times scale times factors plus bias, rounded once: [rows, width] SBUF."""
    rows, width = bank.shape
    result = nl.ndarray((rows, width), dtype=dtype if bias == None else nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=result, data=bank, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=factors[0:rows]
    )
    if bias == None:
        return result
    rounded = nl.ndarray((rows, width), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=rounded, data1=result, data2=bias[0:rows], op=nl.add)
    return rounded

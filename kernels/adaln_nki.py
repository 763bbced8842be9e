"""NKI twins of `adaln`, `adaln_norm`, `adaln_fp8` for Trainium2 under LNC2: tokens on partitions, memory read once."""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.tiles_nki import (
    FLOAT_DTYPES,
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

MAX_WIDTH = 6144  # the rows of one tile and the broadcast vectors of one clip fit SBUF together, in float32 too
STATISTICS_CHUNK = 512  # elements per partition of one bn_stats
TOKEN_GROUP = 256  # tokens per turn of the device loop: two tiles, so that loads overlap with work
AMAX_FLOOR = 1e-6


@nki.jit
def adaln(
    x_BLD: Any, residual_BLD: Any, gate: Any, scale: Any, shift: Any,
    weight_D: Any = None, bias_D: Any = None, eps: float = 1e-6,
) -> Any:  # fmt: skip
    """Gated residual sum, LayerNorm, modulation; see `kernels.adaln`.

    Dimensions:
        B: batch. L: tokens. D: model width, 1 to MAX_WIDTH = 6144.

    Args:
        x_BLD: [B, L, D] @ HBM, float32, bfloat16 or float16.
        residual_BLD: [B, L, D] @ HBM, same dtype.
        gate: [1 or B, 1 or L, D] @ HBM float32, or None for 1.
        scale, shift: [1 or B, 1 or L, D] or [D] @ HBM float32; both None for no modulation.
        weight_D, bias_D: [D] @ HBM, both or none.
        eps: added to the variance.

    Returns:
        r: [B, L, D] @ HBM, dtype of x. y: [B, L, D] @ HBM, dtype of x.

    Limits:
        MAX_WIDTH = 6144; one dtype of FLOAT_DTYPES.

    Pseudocode:
        factor = weight * (1 + scale); offset = bias * (1 + scale) + shift      # once per clip if they are per clip
        for tile of 128 tokens:                                                # each core a half of the tokens
            r = residual + gate * x
            mean, var = bn_aggr(bn_stats(r in chunks of 512))
            y = (r - mean) * factor * rsqrt(var + eps) + offset
    """
    check_adaln(x_BLD, residual_BLD, scale, shift)
    r = nl.ndarray(x_BLD.shape, dtype=x_BLD.dtype, buffer=nl.shared_hbm)
    y = nl.ndarray(x_BLD.shape, dtype=x_BLD.dtype, buffer=nl.shared_hbm)
    over_tokens((x_BLD, residual_BLD, gate), (scale, shift, weight_D, bias_D), eps, (r, y, None), 0.0)
    return r, y


@nki.jit
def adaln_norm(x_BLD: Any, scale: Any, shift: Any, weight_D: Any = None, bias_D: Any = None, eps: float = 1e-6) -> Any:
    """LayerNorm and modulation without a residual; see `kernels.adaln`.

    Dimensions:
        B: batch. L: tokens. D: model width, 1 to MAX_WIDTH = 6144.

    Args:
        x_BLD: [B, L, D] @ HBM, float32, bfloat16 or float16.
        scale, shift, weight_D, bias_D, eps: as in `adaln`.

    Returns:
        y: [B, L, D] @ HBM, dtype of x.

    Limits:
        MAX_WIDTH = 6144; dtype of FLOAT_DTYPES.

    Pseudocode:
        as `adaln` with r = x
    """
    check_adaln(x_BLD, x_BLD, scale, shift)
    y = nl.ndarray(x_BLD.shape, dtype=x_BLD.dtype, buffer=nl.shared_hbm)
    over_tokens((x_BLD, None, None), (scale, shift, weight_D, bias_D), eps, (None, y, None), 0.0)
    return y


@nki.jit
def adaln_fp8(
    x_BLD: Any, residual_BLD: Any, gate: Any, scale: Any, shift: Any,
    weight_D: Any = None, bias_D: Any = None, eps: float = 1e-6, fp8_max: float = 240.0,
) -> Any:  # fmt: skip
    """`adaln` whose result is quantised row by row for an FP8 matmul; see `kernels.adaln`.

    Dimensions:
        B: batch. L: tokens. D: model width, 1 to MAX_WIDTH = 6144.

    Args:
        x_BLD, residual_BLD, gate, scale, shift, weight_D, bias_D, eps: as in `adaln`.
        fp8_max: where FP8 values saturate, 240 on Trainium2.

    Returns:
        r: [B, L, D] @ HBM, dtype of x. q: [B, L, D] @ HBM float8_e4m3. row_scale: [B, L] @ HBM float32.

    Limits:
        MAX_WIDTH = 6144; one dtype of FLOAT_DTYPES.

    Pseudocode:
        r, y = adaln(...); row_scale = max(|y|) / fp8_max; q = y / row_scale
    """
    check_adaln(x_BLD, residual_BLD, scale, shift)
    r = nl.ndarray(x_BLD.shape, dtype=x_BLD.dtype, buffer=nl.shared_hbm)
    q = nl.ndarray(x_BLD.shape, dtype=nl.float8_e4m3, buffer=nl.shared_hbm)
    row_scale = nl.ndarray(x_BLD.shape[0:2], dtype=nl.float32, buffer=nl.shared_hbm)
    over_tokens((x_BLD, residual_BLD, gate), (scale, shift, weight_D, bias_D), eps, (r, q, row_scale), fp8_max)
    return r, q, row_scale


def check_adaln(x_BLD: Any, residual_BLD: Any, scale: Any, shift: Any) -> None:
    """The limits of all three kernels."""
    check_limit(x_BLD.shape[2] <= MAX_WIDTH, f"model width is at most MAX_WIDTH = {MAX_WIDTH}", x_BLD.shape[2])
    check_limit(x_BLD.dtype in FLOAT_DTYPES, f"dtype is one of FLOAT_DTYPES = {FLOAT_DTYPES}", x_BLD.dtype)
    same = residual_BLD.shape == x_BLD.shape and residual_BLD.dtype == x_BLD.dtype
    check_limit(same, "x and the residual have one shape and dtype", (x_BLD.shape, residual_BLD.shape))
    check_limit((scale == None) == (shift == None), "scale and shift come together", (scale, shift))


def over_tokens(inputs: Any, parameters: Any, eps: float, outputs: Any, fp8_max: float) -> None:
    """All tiles of this core's half of the tokens of every clip."""
    B, L, D = inputs[0].shape
    first, count = my_rows(L)
    for b in range(B):
        gate = per_clip(inputs[2], b, L, D)
        vectors = folded(parameters, b, L, D, None)

        def group(start: int, register: Any, rows: int) -> None:
            for span in tiles(rows, PARTITIONS):
                offset, size = span
                where = (b, start + offset, register, size)
                token_tile(inputs, (parameters, gate, vectors), eps, where, (outputs, fp8_max))

        for_groups(first, count, TOKEN_GROUP, group)


def is_per_token(vector: Any, num_tokens: int) -> bool:
    """Whether a modulation differs from token to token."""
    if vector == None:
        return False
    return len(vector.shape) == 3 and vector.shape[1] == num_tokens and num_tokens > 1


def per_clip(vector: Any, b: int, num_tokens: int, width: int) -> Any:
    """[128, D] float32 SBUF of a vector that all tokens of clip b share; None if there is none or it is per token."""
    if vector == None or is_per_token(vector, num_tokens):
        return None
    offset = b * width if len(vector.shape) == 3 and vector.shape[0] > 1 else 0
    return load_row(vector, offset, width, PARTITIONS, nl.float32)


def folded(parameters: Any, b: int, num_tokens: int, width: int, where: Any) -> Any:
    """Factor weight * (1 + scale) and offset bias * (1 + scale) + shift, or None where nothing applies.

    Without `where`: what all tokens share ([128, D], None if the modulation is per token). With it: of that tile.
    """
    scale, shift, weight, bias = parameters
    if is_per_token(scale, num_tokens) and where == None:
        return None
    rows = PARTITIONS if where == None else where[3]
    if scale == None and weight == None:
        return None, None
    gain = per_clip(weight, 0, 0, width)
    lift = per_clip(bias, 0, 0, width)
    if scale == None:
        return gain, lift
    factor = modulation(scale, b, num_tokens, width, where)
    offset = modulation(shift, b, num_tokens, width, where)
    nisa.tensor_scalar(dst=factor, data=factor, op0=nl.add, operand0=1.0)
    if lift != None:
        nisa.tensor_tensor(dst=lift[0:rows], data1=lift[0:rows], data2=factor, op=nl.multiply)
        nisa.tensor_tensor(dst=offset, data1=offset, data2=lift[0:rows], op=nl.add)
    if gain != None:
        nisa.tensor_tensor(dst=factor, data1=factor, data2=gain[0:rows], op=nl.multiply)
    return factor, offset


def modulation(vector: Any, b: int, num_tokens: int, width: int, where: Any) -> Any:
    """Scale or shift in SBUF float32: broadcast over the tokens of clip b, or the rows of one tile."""
    if where == None or not is_per_token(vector, num_tokens):
        return per_clip(vector, b, num_tokens, width)
    return token_rows(vector, where, nl.float32)


def token_rows(x: Any, where: Any, dtype: Any) -> Any:
    """[rows, D] SBUF: one tile of tokens of [1 or B, L, D] @ HBM."""
    b, first, register, rows = where
    clips, L, D = x.shape
    start = first + (b * L if clips > 1 else 0)
    return load((rows, D), rows_of(x, start, register, rows, D), dtype)


def token_tile(inputs: Any, modulations: Any, eps: float, where: Any, results: Any) -> None:
    """One tile of up to 128 tokens: sum, statistics, norm, store."""
    parameters, gate, vectors = modulations
    (r_out, y_out, scale_out), fp8_max = results
    b, first, register, rows = where
    L, D = inputs[0].shape[1:]
    r = gated_sum(inputs, gate, where)
    start = b * L + first
    if r_out != None:
        nisa.dma_copy(dst=rows_of(r_out, start, register, rows, D), src=r)
    if vectors == None:
        vectors = folded(parameters, b, L, D, where)
    y = normalized(r, vectors, eps)
    if scale_out == None:
        nisa.dma_copy(dst=rows_of(y_out, start, register, rows, D), src=y)
        return
    q, row_scale = quantized(y, fp8_max, AMAX_FLOOR)
    nisa.dma_copy(dst=rows_of(y_out, start, register, rows, D), src=q)
    nisa.dma_copy(dst=rows_of(scale_out, start, register, rows, 1), src=row_scale)


def gated_sum(inputs: Any, gate: Any, where: Any) -> Any:
    """[rows, D] SBUF in the dtype of x: residual + gate * x; the product on GpSimdE, which is idle otherwise."""
    x_BLD, residual_BLD, gate_vector = inputs
    x = token_rows(x_BLD, where, x_BLD.dtype)
    if residual_BLD == None:
        return x
    rows, D = x.shape
    branch = x
    if gate_vector != None:
        factor = token_rows(gate_vector, where, nl.float32) if gate == None else gate[0:rows]
        branch = nl.ndarray((rows, D), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=branch, data1=x, data2=factor, op=nl.multiply, engine=nisa.engine.gpsimd)
    r = nl.ndarray((rows, D), dtype=x.dtype, buffer=nl.sbuf)
    residual = token_rows(residual_BLD, where, x.dtype)
    nisa.tensor_tensor(dst=r, data1=branch, data2=residual, op=nl.add)
    return r


def normalized(r: Any, vectors: Any, eps: float) -> Any:
    """[rows, D] SBUF in the dtype of r: (r - mean) * factor * rsqrt(var + eps) + offset."""
    rows, D = r.shape
    factor, offset = vectors
    chunks = tiles(D, STATISTICS_CHUNK)
    statistics = nl.ndarray((rows, 6 * len(chunks)), dtype=nl.float32, buffer=nl.sbuf)
    for index in range(len(chunks)):
        start, size = chunks[index]
        nisa.bn_stats(dst=statistics[:, 6 * index : 6 * index + 6], data=r[:, start : start + size])
    moments = nl.ndarray((rows, 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.bn_aggr(dst=moments, data=statistics)
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=inverse, op=nl.rsqrt, data=moments[:, 1:2], bias=eps)
    y = nl.ndarray((rows, D), dtype=r.dtype, buffer=nl.sbuf)
    mean = moments[:, 0:1]
    if factor == None:
        nisa.tensor_scalar(dst=y, data=r, op0=nl.subtract, operand0=mean, op1=nl.multiply, operand1=inverse)
        return y
    centred = nl.ndarray((rows, D), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=centred, data=r, op0=nl.subtract, operand0=mean, op1=nl.multiply, operand1=factor[0:rows]
    )
    nisa.scalar_tensor_tensor(
        dst=y, data=centred, op0=nl.multiply, operand0=inverse, op1=nl.add, operand1=offset[0:rows]
    )
    return y

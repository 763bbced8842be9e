"""NKI twin of `conv3d` for Trainium2 under LNC2: channels on partitions, a matmul per tap, norm and SiLU on the way.

The sum of squares over channels is a sum over partitions; a matmul with a matrix of ones makes it and repeats it on
every partition at once. Normalised frames stay in SBUF while the window moves on in time.
"""

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kernels.tiles_nki import (
    FLOAT_DTYPES,
    MATMUL_COLUMNS,
    PARTITIONS,
    check_limit,
    filled,
    for_groups,
    load,
    my_rows,
    tiles,
)

MAX_TAPS = 27
MAX_CHANNEL_BYTES = 2048  # of one input pixel: 1024 channels of 16 bits; three frames of windows and weights fit SBUF
WEIGHT_BYTES = 96 * 1024  # of SBUF per partition for the weights of one group of output channels
COLUMN_TILE = 128  # output columns per tile, so that four rows share their halo
SQUARE_FLOOR = 1e-24  # the square of the smallest channel norm that divides


@nki.jit
def conv3d(
    x_BCTHW: Any, weight: Any, bias: Any, padding: Any, norm_gamma: Any = None, silu: bool = False,
    stride: Any = (1, 1, 1), context: Any = None,
) -> Any:  # fmt: skip
    """Causal convolution with an optional channel norm and SiLU on its input; see `kernels.conv3d`.

    Dimensions:
        B: batch. C: input channels, up to 1024 of 16 bits or 512 of float32. T, H, W: frames, rows, columns.
        O: output channels.

    Args:
        x_BCTHW: [B, C, T, H, W] @ HBM, float32, bfloat16 or float16.
        weight: [O, C, kt, kh, kw] @ HBM, same dtype; kt * kh * kw is at most MAX_TAPS = 27.
        bias: [O] @ HBM or None.
        padding: zeros on each side in (height, width).
        norm_gamma: [C] @ HBM or None.
        silu: apply SiLU to the (normalised) input.
        stride: (frames, rows, columns).
        context: [B, C, S, H, W] @ HBM frames that stand before x, or None.

    Returns:
        [B, O, T', H', W'] @ HBM, dtype of x.

    Limits:
        MAX_CHANNEL_BYTES = 2048 in one pixel; MAX_TAPS = 27; one dtype of FLOAT_DTYPES.

    Pseudocode:
        for block of rows, tile of columns:                    # each core a half of the output rows
            for new frame of the window:
                s = ones^T @ x^2; n = silu(x * rsqrt(max(s, 1e-24)) * sqrt(C) * gamma)
            for output frame, tile of 128 output channels:
                for tap, tile of 128 input channels: bank += weight_tap^T @ n[shifted by the tap]
                out = bank + bias
    """
    check_conv(x_BCTHW, weight)
    B, C = x_BCTHW.shape[0:2]
    frames = frame_list(x_BCTHW, context)
    sizes = output_sizes((len(frames), x_BCTHW.shape[3], x_BCTHW.shape[4]), weight.shape, padding, stride)
    out = nl.ndarray((B, weight.shape[0], sizes[0], sizes[1], sizes[2]), dtype=x_BCTHW.dtype, buffer=nl.shared_hbm)
    gains = norm_gains(norm_gamma, C)
    ones = None if norm_gamma == None else filled((PARTITIONS, PARTITIONS), 1.0, x_BCTHW.dtype)
    for span in tiles(weight.shape[0], group_channels(weight)):
        start, size = span
        kernel = dict()
        kernel["weights"] = weight_tiles(weight, start, size)
        kernel["biases"] = bias_tiles(bias, start, size)
        kernel["gains"], kernel["silu"], kernel["ones"] = gains, silu, ones
        kernel["padding"], kernel["stride"], kernel["first_out"] = padding, stride, start
        kernel["taps"] = weight.shape[2:]
        for b in range(B):
            over_rows(frames, kernel, b, out)
    return out


def check_conv(x_BCTHW: Any, weight: Any) -> None:
    """The limits of the kernel."""
    C = x_BCTHW.shape[1]
    taps = weight.shape[2] * weight.shape[3] * weight.shape[4]
    pixel_bytes = C * item_bytes(x_BCTHW.dtype)
    check_limit(
        pixel_bytes <= MAX_CHANNEL_BYTES,
        f"bytes of a pixel are at most MAX_CHANNEL_BYTES = {MAX_CHANNEL_BYTES}",
        pixel_bytes,
    )
    check_limit(weight.shape[1] == C, "weight and input have the same channels", (weight.shape, C))
    check_limit(taps <= MAX_TAPS, f"taps are at most MAX_TAPS = {MAX_TAPS}", taps)
    check_limit(x_BCTHW.dtype in FLOAT_DTYPES, f"dtype is one of FLOAT_DTYPES = {FLOAT_DTYPES}", x_BCTHW.dtype)
    check_limit(weight.dtype == x_BCTHW.dtype, "weight and input have one dtype", (weight.dtype, x_BCTHW.dtype))


def frame_list(x_BCTHW: Any, context: Any) -> Any:
    """(tensor, frame index) of every input frame in order."""
    frames = []
    for source in (context, x_BCTHW):
        if source != None:
            for index in range(source.shape[2]):
                frames.append((source, index))
    return frames


def output_sizes(size: Any, w_shape: Any, padding: Any, stride: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of the result; `size` has those of the input."""
    frames = (size[0] - w_shape[2]) // stride[0] + 1
    rows = (size[1] + 2 * padding[0] - w_shape[3]) // stride[1] + 1
    columns = (size[2] + 2 * padding[1] - w_shape[4]) // stride[2] + 1
    return frames, rows, columns


def item_bytes(dtype: Any) -> int:
    """Bytes of one element."""
    return 4 if dtype == nl.float32 else 2


def group_channels(weight: Any) -> Any:
    """Output channels whose weights fit WEIGHT_BYTES of SBUF: a multiple of 128."""
    outs, C, kt, kh, kw = weight.shape
    per_tile = (C + PARTITIONS - 1) // PARTITIONS * kt * kh * kw * PARTITIONS * item_bytes(weight.dtype)
    return max(1, min((outs + PARTITIONS - 1) // PARTITIONS, WEIGHT_BYTES // per_tile)) * PARTITIONS


def weight_tiles(weight: Any, start: int, count: int) -> Any:
    """Per tile of 128 input channels: [channels, taps, output channels] SBUF, transposed tap by tap on TensorE."""
    _, C, kt, kh, kw = weight.shape
    taps = kt * kh * kw
    found = []
    for span in tiles(C, PARTITIONS):
        c, channels = span
        turned = nl.ndarray((channels, taps, count), dtype=weight.dtype, buffer=nl.sbuf)
        for part in tiles(count, PARTITIONS):
            o, outs = part
            pattern = ((C * taps, outs), (taps, channels), (1, taps))
            source = weight.ap(pattern=pattern, offset=((start + o) * C + c) * taps)
            natural = load((outs, channels, taps), source, weight.dtype)
            for tap in range(taps):
                bank = nl.ndarray((channels, outs), dtype=weight.dtype, buffer=nl.psum)
                nisa.nc_transpose(dst=bank, data=natural[:, :, tap])
                nisa.tensor_copy(dst=turned[:, tap, o : o + outs], src=bank)
        found.append(turned)
    return found


def bias_tiles(bias: Any, start: int, count: int) -> Any:
    """Per tile of 128 output channels: [channels, 1] float32 SBUF, or None."""
    found: Any = []
    for span in tiles(count, PARTITIONS):
        o, outs = span
        if bias == None:
            found.append(None)
        else:
            found.append(load((outs, 1), bias.ap(pattern=((1, outs), (1, 1)), offset=start + o), nl.float32))
    return found


def norm_gains(norm_gamma: Any, channels: int) -> Any:
    """Per tile of 128 input channels: gamma * sqrt(C) as [channels, 1] float32 SBUF; None without a norm."""
    if norm_gamma == None:
        return None
    found = []
    for span in tiles(channels, PARTITIONS):
        c, size = span
        gain = load((size, 1), norm_gamma.ap(pattern=((1, size), (1, 1)), offset=c), nl.float32)
        nisa.tensor_scalar(dst=gain, data=gain, op0=nl.multiply, operand0=float(channels) ** 0.5)
        found.append(gain)
    return found


def over_rows(inputs: Any, kernel: Any, b: int, out: Any) -> None:
    """This core's half of the output rows: blocks at the border one by one, those within by a loop on the device."""
    _, _, _, H2, W2 = out.shape
    width = min(W2, COLUMN_TILE)
    height = MATMUL_COLUMNS // width
    first, count = my_rows(H2)
    start, end = first, first + count
    pad, stride, reach = kernel["padding"][0], kernel["stride"][1], kernel["taps"][1]
    if stride > 1:  # a register counts rows of one tensor, and input and output rows differ
        for span in tiles(count, height):
            offset, rows = span
            over_columns(inputs, kernel, b, (start + offset, None, rows), out)
        return
    if start < pad:
        rows = min(height, end - start)
        over_columns(inputs, kernel, b, (start, None, rows), out)
        start += rows
    last = 0
    if start < end and end - pad + reach - 1 > inputs[0][0].shape[3]:
        last = min(height, end - start)

    def group(row: int, register: Any, rows: int) -> None:
        over_columns(inputs, kernel, b, (row, register, rows), out)

    for_groups(start, end - last - start, height, group)
    if last > 0:
        over_columns(inputs, kernel, b, (end - last, None, last), out)


def over_columns(inputs: Any, kernel: Any, b: int, rows: Any, out: Any) -> None:
    """One block of output rows: every tile of columns, every frame; the window's frames are kept while it moves."""
    kt = kernel["taps"][0]
    for span in tiles(out.shape[4], COLUMN_TILE):
        column, width = span
        window: Any = []
        for t in range(out.shape[2]):
            window = window[kernel["stride"][0] :]
            for tap in range(len(window), kt):
                frame = inputs[t * kernel["stride"][0] + tap]
                window.append(normalized(frame, kernel, b, rows, (column, width)))
            convolve(window, kernel, (b, t), rows, (column, width), out)


def normalized(source: Any, kernel: Any, b: int, rows: Any, columns: Any) -> Any:
    """Per tile of 128 input channels: the window [channels, rows, columns] of a frame in SBUF, zeros outside of it."""
    shape = window_shape(kernel, rows[2], columns[1])
    raw = []
    for tile in tiles(source[0].shape[1], PARTITIONS):
        raw.append(load_window(source, kernel, b, tile, (rows, columns, shape)))
    if kernel["gains"] == None and not kernel["silu"]:
        return raw
    inverse = None if kernel["gains"] == None else inverse_norms(raw, kernel["ones"])
    found = []
    for index in range(len(raw)):
        tile = raw[index]
        result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        op = nl.silu if kernel["silu"] else nl.copy
        if inverse == None:
            nisa.activation(dst=result, op=op, data=tile)
        else:
            divided = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=divided, data1=tile, data2=inverse[0 : tile.shape[0]], op=nl.multiply)
            nisa.activation(dst=result, op=op, data=divided, scale=kernel["gains"][index])
        found.append(result)
    return found


def window_shape(kernel: Any, rows: int, columns: int) -> tuple[int, int]:
    """Input rows and columns under a block of output rows and columns."""
    _, kh, kw = kernel["taps"]
    return (rows - 1) * kernel["stride"][1] + kh, (columns - 1) * kernel["stride"][2] + kw


def load_window(source: Any, kernel: Any, b: int, tile: Any, where: Any) -> Any:
    """[channels, rows, columns] SBUF of one frame for one tile of channels; what lies outside is zero."""
    (row, register, _), (column, _), (height, width) = where
    x_BCTHW, frame = source
    _, C, T, H, W = x_BCTHW.shape
    top = row * kernel["stride"][1] - kernel["padding"][0]
    left = column * kernel["stride"][2] - kernel["padding"][1]
    window = nl.ndarray((tile[1], height, width), dtype=x_BCTHW.dtype, buffer=nl.sbuf)
    up = max(0, -top)
    down = height if register != None else min(height, H - top)
    near, far = max(0, -left), min(width, W - left)
    if up > 0:
        nisa.memset(dst=window[:, 0:up, :], value=0.0)
    if down < height:
        nisa.memset(dst=window[:, down:height, :], value=0.0)
    if near > 0:
        nisa.memset(dst=window[:, up:down, 0:near], value=0.0)
    if far < width:
        nisa.memset(dst=window[:, up:down, far:width], value=0.0)
    offset = (((b * C + tile[0]) * T + frame) * H + top + up) * W + left + near
    pattern = ((T * H * W, tile[1]), (W, down - up), (1, far - near))
    inside = x_BCTHW.ap(pattern=pattern, offset=offset, scalar_offset=register, indirect_dim=3)
    nisa.dma_copy(dst=window[:, up:down, near:far], src=inside)
    return window


def inverse_norms(raw: Any, ones: Any) -> Any:
    """[128 or C, rows, columns] float32 SBUF: one over the norm over channels, the same on every partition."""
    partitions, height, width = raw[0].shape
    squares = []
    for tile in raw:
        square = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.activation(dst=square, op=nl.square, data=tile)
        squares.append(square.reshape((tile.shape[0], height * width)))
    inverse = nl.ndarray((partitions, height * width), dtype=nl.float32, buffer=nl.sbuf)
    for span in tiles(height * width, MATMUL_COLUMNS):
        start, size = span
        bank = nl.ndarray((partitions, size), dtype=nl.float32, buffer=nl.psum)
        for index in range(len(squares)):
            square = squares[index]
            stationary = ones[0 : square.shape[0], 0:partitions]
            nisa.nc_matmul(
                dst=bank, stationary=stationary, moving=square[:, start : start + size], accumulate=index > 0
            )
        floored = nl.ndarray((partitions, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=floored, data=bank, op0=nl.maximum, operand0=SQUARE_FLOOR)
        nisa.activation(dst=inverse[:, start : start + size], op=nl.rsqrt, data=floored)
    return inverse.reshape((partitions, height, width))


def convolve(window: Any, kernel: Any, frame: Any, rows: Any, columns: Any, out: Any) -> None:
    """One output frame of one block: all taps and input channels into a PSUM bank, then the bias, then memory."""
    (b, t), (row, register, height), (column, width) = frame, rows, columns
    _, num_outs, T2, H2, W2 = out.shape
    count = kernel["weights"][0].shape[2]
    spans = tiles(count, PARTITIONS)
    for index in range(len(spans)):
        o, outs = spans[index]
        bank = nl.ndarray((outs, height, width), dtype=nl.float32, buffer=nl.psum)
        add_taps(bank, window, kernel, (o, outs))
        result = nl.ndarray((outs, height, width), dtype=out.dtype, buffer=nl.sbuf)
        bias = kernel["biases"][index]
        nisa.activation(dst=result, op=nl.copy, data=bank, bias=bias)
        offset = (((b * num_outs + kernel["first_out"] + o) * T2 + t) * H2 + row) * W2 + column
        pattern = ((T2 * H2 * W2, outs), (W2, height), (1, width))
        target = out.ap(pattern=pattern, offset=offset, scalar_offset=register, indirect_dim=3)
        nisa.dma_copy(dst=target, src=result)


def add_taps(bank: Any, window: Any, kernel: Any, outs: Any) -> None:
    """Add weight_tap^T @ shifted window to the bank, over all taps and tiles of input channels."""
    kt, kh, kw = kernel["taps"]
    _, height, width = bank.shape
    down, right = kernel["stride"][1:]
    started = False
    for tap in range(kt * kh * kw):
        dt, dy, dx = tap // (kh * kw), tap // kw % kh, tap % kw
        for index in range(len(kernel["weights"])):
            weights = kernel["weights"][index]
            shifted = window[dt][index][
                :, dy : dy + (height - 1) * down + 1 : down, dx : dx + (width - 1) * right + 1 : right
            ]
            stationary = weights[:, tap, outs[0] : outs[0] + outs[1]]
            nisa.nc_matmul(dst=bank, stationary=stationary, moving=shifted, accumulate=started)
            started = True

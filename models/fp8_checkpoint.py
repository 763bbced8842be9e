"""Checkpoints whose weights are FP8 already: which keys are scales, and the plain weight behind them.

The common forms: `<layer>.weight` in float8 beside `<layer>.weight_scale` (compressed-tensors, torchao exports),
`<layer>.scale_weight` (ComfyUI's scaled files) or `<layer>.weight_scale_inv` (blocks of 128 x 128); or float8 alone,
a plain cast. A scale is one number, one per output channel, or one per block. Scales of activations are not used: ours
are made per token.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from models.errors import ModelError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WEIGHT_SCALES = (".weight_scale", ".scale_weight", ".weight_scale_inv")
UNUSED = (".input_scale", ".scale_input")
MARKERS = ("scaled_fp8",)  # an empty tensor by which ComfyUI's files say what they are
BLOCK = 128


def scale_keys(keys: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Weight key -> the key of its scale, and all keys that are no weights of a model (scales, marks)."""
    known = set(keys)
    scales: dict[str, str] = {}
    others: set[str] = set()
    for key in known:
        ends = [end for end in WEIGHT_SCALES if key.endswith(end)]
        weight = f"{key.removesuffix(ends[0])}.weight" if ends else ""
        if weight in known:
            scales[weight] = key
        if weight in known or key in MARKERS or key.endswith(UNUSED):
            others.add(key)
    return scales, others


def plain(weight: Tensor, scale: Tensor | None, rows: slice, columns: slice, what: str) -> Tensor:
    """The weight in float32.

    Args:
        weight: [n, k] in float8, `rows` and `columns` of the whole one.
        scale: of the whole weight: one number, [N] or [N, 1], or [N / 128, K / 128]; None for a plain cast.
        rows, columns: which part of the whole weight this is.
        what: names the weight in errors.

    Raises:
        ModelError: "checkpoint", a scale of another shape.
    """
    value = weight.float()
    if scale is None:
        return value
    factor = scale.float()
    if factor.numel() == 1:
        return value * factor.reshape(())
    if factor.ndim == 1 or factor.shape[1] == 1:
        per_row = factor.reshape(-1)[rows]
        if per_row.numel() == value.shape[0]:
            return value * per_row.unsqueeze(1)
    if factor.ndim == 2:
        # the last blocks may reach over the edge
        tall = factor.repeat_interleave(BLOCK, 0)[rows][: value.shape[0]]
        spread = tall.repeat_interleave(BLOCK, 1)[:, columns][:, : value.shape[1]]
        if spread.shape == value.shape:
            return value * spread
    shapes = f"one number, one per output channel, or one per block of {BLOCK} x {BLOCK}"
    raise ModelError("checkpoint", f"{what}: a scale of shape {list(scale.shape)} does not fit; it must be {shapes}")

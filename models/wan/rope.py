"""Rotary position tables of a clip, in half layout, and the permutation of weights that goes with it.

Source: diffusers' `WanRotaryPosEmbed`; frequencies in float64, tables in float32.
"""

import torch
from torch import Tensor

THETA = 10000.0


def rope_tables(grid: tuple[int, int, int], head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the tokens of a (frames, rows, columns) grid: two tensors [L, head_width / 2] float32.

    A third of a head's pairs each turns with row and column, the rest with time.
    """
    side = 2 * (head_width // 6)
    widths = (head_width - 2 * side, side, side)
    angles = [_angles(length, width) for length, width in zip(grid, widths, strict=True)]
    frames, rows, columns = grid
    parts = (
        angles[0].view(frames, 1, 1, -1).expand(frames, rows, columns, -1),
        angles[1].view(1, rows, 1, -1).expand(frames, rows, columns, -1),
        angles[2].view(1, 1, columns, -1).expand(frames, rows, columns, -1),
    )
    table = torch.cat(parts, dim=-1).reshape(frames * rows * columns, head_width // 2)
    return table.cos().float(), table.sin().float()


def _angles(length: int, width: int) -> Tensor:
    frequencies = 1.0 / THETA ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies)


def to_half_layout(rows: Tensor, head_width: int) -> Tensor:
    """[H * D, ...] with rotated pairs side by side -> the same with a pair's members D/2 apart, head by head."""
    pairs = rows.view(-1, head_width // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

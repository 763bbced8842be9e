"""The tiled decode of other engines, for comparison with them: approximate, and recorded as such.

Each tile is decoded from its own latents alone (attention included), and overlaps are blended linearly, as diffusers'
`AutoencoderKLWan.tiled_decode` does (Apache-2.0). Unlike there, a few frames of all tiles are blended at a time, so
that memory does not grow with the clip, and a seam is one weighted sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.vae.exact import call_spans, nonfinite
from models.vae.model import Decoder, Memory
from models.vae.spec import VaeSpec

TILE_PX = 256
STRIDE_PX = 192
FRAMES_PER_CALL = 1


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of `tile` x `tile` latents (smaller at the lower and right border) that start every `stride` latents."""

    height: int
    width: int
    tile: int
    stride: int
    scale: int  # px per latent
    patch: int  # px of the decoder's own last grid

    @property
    def starts(self) -> tuple[range, range]:
        """First latent row and column of the tiles."""
        if max(self.height, self.width) <= self.tile:
            return range(1), range(1)
        return range(0, self.height, self.stride), range(0, self.width, self.stride)

    @property
    def work(self) -> float:
        """Decoded area over the frame's."""
        rows, columns = (
            sum(min(self.tile, size - start) for start in starts)
            for size, starts in zip((self.height, self.width), self.starts, strict=True)
        )
        return rows * columns / (self.height * self.width)

    def describe(self) -> dict[str, Any]:
        """The plan for a clip's record, as JSON values."""
        tile_px, stride_px = self.tile * self.scale, self.stride * self.scale
        count = len(self.starts[0]) * len(self.starts[1])
        return {
            "mode": "tiled", "tile_px": tile_px, "stride_px": stride_px, "tiles": count, "work": round(self.work, 4)
        }  # fmt: skip


def plan_tiles(spec: VaeSpec, height: int, width: int, tile_px: int = TILE_PX, stride_px: int = STRIDE_PX) -> TilePlan:
    """Tiles for frames of height x width latents; raises ModelError("unsupported") for sizes that do not work."""
    scale = spec.scale_spatial
    if tile_px % scale or stride_px % scale or not 0 < stride_px <= tile_px <= 2 * stride_px:
        raise ModelError(
            "unsupported",
            f"tile {tile_px} px, stride {stride_px} px: both must be multiples of {scale}, "
            "and the stride between half a tile and a whole one",
        )
    return TilePlan(height, width, tile_px // scale, stride_px // scale, scale, spec.patch_size)


class _TileDecoder:
    """The whole decoder on one tile of a clip."""

    def __init__(self, decoder: Decoder, place: tuple[int, int], size: int) -> None:
        self._decoder, self._place, self._size = decoder, place, size
        self._front: list[Tensor] | None = None
        self._rear: list[Tensor] | None = None

    def __call__(self, latents: Tensor) -> Tensor:
        row, column = self._place
        front, rear = Memory(self._front), Memory(self._rear)
        window = latents[..., row : row + self._size, column : column + self._size]
        frames = self._decoder.rear(self._decoder.front(window, front), rear)
        self._front, self._rear = front.new, rear.new
        return frames


@torch.no_grad()
def tiled_slabs(
    decoder: Decoder, latents: Tensor, plan: TilePlan, finish: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Latents [1, z, T, h, w] on the checkpoint's scale -> slabs [f, H, W, 3]; raises ModelError("nonfinite")."""
    rows, columns = plan.starts
    size = max(plan.height, plan.width, 1) if len(rows) == len(columns) == 1 else plan.tile
    tiles = [[_TileDecoder(decoder, (row, column), size) for column in columns] for row in rows]
    for start, end in call_spans(latents.shape[2], FRAMES_PER_CALL):
        part = latents[:, :, start:end]
        frames = blend([[tile(part) for tile in row] for row in tiles], plan)
        if not frames.isfinite().all():
            raise nonfinite(start)
        yield finish(frames)


def blend(tiles: list[list[Tensor]], plan: TilePlan) -> Tensor:
    """Rows of tiles [B, 3, f, H, W] -> the frame; a tile keeps its first `stride` lines, blended into those before it.

    Each tile is blended with the one above, then with the one to its left, both as they are after their own blending.
    """
    keep = plan.stride * plan.scale
    overlap = (plan.tile - plan.stride) * plan.scale
    done: list[Tensor] = []
    for index, row in enumerate(tiles):
        for place, tile in enumerate(row):
            if index:
                _seam(tiles[index - 1][place], tile, 3, overlap, plan.patch)
            if place:
                _seam(row[place - 1], tile, 4, overlap, plan.patch)
        kept = [tile[..., :keep] if place < len(row) - 1 else tile for place, tile in enumerate(row)]
        done.append(torch.cat(kept, dim=4)[..., : keep if index < len(tiles) - 1 else None, :])
    return torch.cat(done, dim=3)


def _seam(before: Tensor, after: Tensor, dim: int, overlap: int, patch: int) -> None:
    """Fade from the end of `before` to the start of `after`, in place; weights are equal within a patch."""
    length = min(before.shape[dim], after.shape[dim], overlap)
    shape = [1] * after.dim()
    shape[dim] = length
    weight = torch.arange(length, device=after.device).div(patch, rounding_mode="floor").mul(patch / length)
    weight = weight.to(after.dtype).view(shape)
    start = after.narrow(dim, 0, length)
    start.mul_(weight).add_(before.narrow(dim, before.shape[dim] - length, length) * (1 - weight))

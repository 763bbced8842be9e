"""Small videos for tests: frames that move, and files made of them."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batch_gen.encode import EncodedFile, Encoder, EncodeSettings, VideoSpec

FPS = Fraction(30000, 1001)
SPEC = VideoSpec(width=64, height=48, fps=FPS, num_frames=13)


def moving_frames(spec: VideoSpec = SPEC, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Smooth colours that drift, with a noisy square; uint8 [F, H, W, 3]."""
    rng = np.random.default_rng(seed)
    k, y, x = np.mgrid[0 : spec.num_frames, 0 : spec.height, 0 : spec.width].astype(np.float64)
    waves = [
        128 + 80 * np.sin(x / 17 + k / 3 + seed),
        128 + 80 * np.cos(y / 13 + k / 4),
        128 + 60 * np.sin((x + y) / 23),
    ]
    frames = np.stack(waves, axis=-1).round().astype(np.uint8)
    side = min(spec.height, spec.width) // 4
    frames[:, :side, :side] = rng.integers(0, 256, (spec.num_frames, side, side, 3), dtype=np.uint8)
    return frames


def write_clip(
    path: Path,
    frames: npt.NDArray[np.uint8],
    spec: VideoSpec = SPEC,
    settings: EncodeSettings | None = None,
    metadata: dict[str, str] | None = None,
) -> EncodedFile:
    """Encode frames in slabs of four."""
    with Encoder(path, spec, settings or EncodeSettings(), metadata or {}) as encoder:
        for first in range(0, len(frames), 4):
            encoder.write(frames[first : first + 4])
        return encoder.finish()

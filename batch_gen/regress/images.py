"""Pixels against pixels: per-frame figures of a clip, and of two clips whose frames are paired by index.

Frames are never paired by time: a filter that aligns timestamps hides a lost frame (reference: regression gates that
mean PSNR, SSIM and VMAF all miss).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from batch_gen import ffmpeg
from batch_gen.encode import Encoder, EncodeSettings, VideoSpec
from batch_gen.verify import BLACK_LEVEL, BLACK_SHARE, FROZEN_DIFFERENCE, LUMA, frame_psnr

Frames = npt.NDArray[np.uint8]
Curve = npt.NDArray[np.float64]
PSNR_EQUAL: Final = 100.0
"""dB of equal frames, and the most that any has: JSON knows no infinity."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two clips of the same shape, frame by frame.

    Args:
        psnr, ssim: [F]; dB over all channels, SSIM as the mean over channels.
        means: [F, 3] mean of each channel of the new clip minus the baseline's, 0..255.
    """

    psnr: Curve
    ssim: Curve
    means: Curve

    @property
    def luma(self) -> Curve:
        """[F] mean BT.709 luma minus the baseline's."""
        return np.asarray(self.means @ LUMA)

    def bad(self, good_psnr: float, good_ssim: float) -> npt.NDArray[np.bool_]:
        """[F]: frames below one of the two."""
        return np.asarray((self.psnr < good_psnr) | (self.ssim < good_ssim))

    @property
    def worst(self) -> int:
        """The frame with the least PSNR."""
        return int(np.argmin(self.psnr))


def compare(new: Frames, base: Frames) -> Comparison:
    """Compare uint8 clips [F, H, W, 3] of one shape."""
    assert new.shape == base.shape, f"{new.shape} and {base.shape} cannot be compared by index"
    psnr = np.array([min(PSNR_EQUAL, frame_psnr(a, b)) for a, b in zip(new, base, strict=True)])
    ssim = np.array([_ssim(a, b) for a, b in zip(new, base, strict=True)])
    return Comparison(psnr, ssim, channel_means(new) - channel_means(base))


def channel_means(frames: Frames) -> Curve:
    """[F, 3] mean of each channel, of frames [F, H, W, 3]."""
    return np.asarray(frames.mean(axis=(1, 2), dtype=np.float64))


def black_frames(frames: Frames) -> npt.NDArray[np.bool_]:
    """[F]: 98 % of the values are at most a tenth of white."""
    return np.asarray((frames <= BLACK_LEVEL).mean(axis=(1, 2, 3)) >= BLACK_SHARE)


def motion(frames: Frames) -> Curve:
    """[F] mean absolute difference to the frame before; 0 for the first."""
    steps = [float(np.mean(np.maximum(a, b) - np.minimum(a, b))) for a, b in zip(frames[1:], frames[:-1], strict=True)]
    return np.array([0.0, *steps])


def frozen_frames(frames: Frames) -> npt.NDArray[np.bool_]:
    """[F]: nothing moved since the frame before; the first never is."""
    still = motion(frames) <= FROZEN_DIFFERENCE
    still[0] = False
    return still


def flicker(frames: Frames) -> float:
    """Mean absolute second difference of the frames' mean luma, 0..255; 0 below three frames."""
    luma = channel_means(frames) @ LUMA
    return float(np.abs(np.diff(luma, 2)).mean()) if len(luma) > 2 else 0.0


def has_vmaf() -> bool:
    """Whether our ffmpeg was built with libvmaf."""
    child = ffmpeg.Child(["-h", "filter=libvmaf"], writes=True)
    try:
        return b"Filter libvmaf" in child.read_all()
    finally:
        child.kill()


def vmaf(new: Frames, base: Frames) -> float:
    """Mean VMAF of uint8 clips [F, H, W, 3] of one shape; needs `has_vmaf`.

    Both are written without timestamps of their own at one frame per second, so that index and time agree.
    """
    count, height, width, _ = new.shape
    spec = VideoSpec(width, height, Fraction(1), count)
    with tempfile.TemporaryDirectory(prefix="batch-gen-vmaf-") as name:
        folder = Path(name)
        for stem, frames in (("new", new), ("base", base)):
            with Encoder(folder / f"{stem}.mkv", spec, EncodeSettings(codec="ffv1", threads=1)) as encoder:
                encoder.write(frames)
                encoder.finish()
        graph = "".join(
            f"[{at}:v]{ffmpeg.TO_BT709.format(pix_fmt='yuv420p')}[{stem}];" for at, stem in enumerate(("n", "b"))
        )
        log = folder / "vmaf.json"
        graph += f"[n][b]libvmaf=log_fmt=json:log_path={log}"
        inputs = [arg for stem in ("new", "base") for arg in ("-i", f"file:{folder / stem}.mkv")]
        child = ffmpeg.Child([*inputs, "-lavfi", graph, "-f", "null", "-"])
        if child.wait() != 0:
            raise ffmpeg.failure("encode", "measuring VMAF", child, folder)
        return float(json.loads(log.read_text("utf-8"))["pooled_metrics"]["vmaf"]["mean"])


def _ssim(a: Frames, b: Frames) -> float:
    if np.array_equal(a, b):
        return 1.0
    from skimage.metrics import structural_similarity

    return float(structural_similarity(a, b, channel_axis=2, data_range=255))

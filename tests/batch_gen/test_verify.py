import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from batch_gen import ffmpeg
from batch_gen.container import read_container
from batch_gen.encode import CODECS, EncodeSettings, VideoSpec
from batch_gen.errors import ClipFailed
from batch_gen.verify import psnr, verify_file
from tests.clips import SPEC, moving_frames, write_clip


def run_ffmpeg(*args: object) -> None:
    """Run ffmpeg and insist on success."""
    subprocess.run([ffmpeg.executable(), "-v", "error", "-y", *map(str, args)], check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A correct faststart MP4 of SPEC."""
    return write_clip(tmp_path_factory.mktemp("good") / "clip.mp4", moving_frames()).path


def variant(good: Path, folder: Path, kind: str) -> Path:
    """The same video in another arrangement of the container."""
    flags = {"faststart": "+faststart", "plain": "0", "fragmented": "+frag_keyframe+empty_moov"}[kind]
    target = folder / f"{kind}.mp4"
    run_ffmpeg("-i", good, "-c", "copy", "-movflags", flags, target)
    return target


@pytest.mark.parametrize("codec", CODECS)
def test_good_file_passes_without_flags(tmp_path: Path, codec: str) -> None:
    """A correct file of every codec passes and has nothing odd about it."""
    settings = EncodeSettings(codec=codec)
    made = write_clip(tmp_path / f"clip{settings.suffix}", moving_frames(), settings=settings)
    report = verify_file(made.path, SPEC)
    assert report.flags == ()
    assert 90 < report.luma_mean < 160
    assert report.luma_jump < 10
    assert report.motion_mean > 1


@pytest.mark.parametrize("kind", ["faststart", "plain", "fragmented"])
@pytest.mark.parametrize("share", [0.25, 0.75, 0.99, 0.999])
def test_truncated_file_is_refused(good: Path, tmp_path: Path, kind: str, share: float) -> None:
    """An MP4 cut short at any point is refused, also where ffmpeg decodes it with exit status 0."""
    whole = variant(good, tmp_path, kind).read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ClipFailed, match=r"cut\.mp4 was refused") as caught:
        verify_file(cut, SPEC)
    assert caught.value.kind == "verify"


@pytest.mark.parametrize("share", [0.5, 0.99, 0.9999])
def test_truncated_matroska_is_refused(tmp_path: Path, share: float) -> None:
    """An MKV cut short is refused too."""
    whole = write_clip(tmp_path / "clip.mkv", moving_frames(), settings=EncodeSettings(codec="ffv1")).path
    whole.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    with pytest.raises(ClipFailed, match="was refused"):
        verify_file(whole, SPEC)


@pytest.mark.parametrize("content", [b"", b"\0", b"not a video at all\n" * 100])
def test_file_that_is_no_video_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty file, one byte, and text under a video's name are refused."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with pytest.raises(ClipFailed, match="ffmpeg complained"):
        verify_file(path, SPEC)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is refused like a broken one."""
    with pytest.raises(ClipFailed, match="No such file"):
        verify_file(tmp_path / "clip.mp4", SPEC)


def test_damage_in_the_middle_is_refused(good: Path, tmp_path: Path) -> None:
    """Overwritten bytes of the picture data are found, though index and length are right."""
    content = bytearray(good.read_bytes())
    middle = content.index(b"mdat") + (len(content) - content.index(b"mdat")) // 2
    content[middle : middle + 300] = bytes(300)
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with pytest.raises(ClipFailed, match="ffmpeg complained"):
        verify_file(path, SPEC)


@pytest.mark.parametrize("codec", ["h264", "ffv1"])
def test_bytes_after_the_end_are_found(tmp_path: Path, codec: str) -> None:
    """A file with something appended, as a store that keeps a checksum trailer would leave it, is refused."""
    settings = EncodeSettings(codec=codec)
    path = write_clip(tmp_path / f"clip{settings.suffix}", moving_frames(), settings=settings).path
    path.write_bytes(path.read_bytes() + b"x-amz-checksum")
    with pytest.raises(ClipFailed, match="and says that it has"):
        verify_file(path, SPEC)


def test_encoder_that_stopped_early_is_found(tmp_path: Path) -> None:
    """A file that is well-formed but one frame short is refused: the count is exact."""
    spec = VideoSpec(SPEC.width, SPEC.height, SPEC.fps, SPEC.num_frames - 1)
    made = write_clip(tmp_path / "clip.mp4", moving_frames(spec), spec)
    with pytest.raises(ClipFailed, match="it holds 12 of 13 frames"):
        verify_file(made.path, SPEC)


def test_extra_frame_is_found(tmp_path: Path) -> None:
    """A file with one frame more than asked for is refused."""
    spec = VideoSpec(SPEC.width, SPEC.height, SPEC.fps, SPEC.num_frames + 1)
    made = write_clip(tmp_path / "clip.mp4", moving_frames(spec), spec)
    with pytest.raises(ClipFailed, match="it holds 14 of 13 frames"):
        verify_file(made.path, SPEC)


@pytest.mark.parametrize("fps", ["30", "2997/100", "24000/1001", "15000/1001"])
def test_wrong_rate_is_found(good: Path, fps: str) -> None:
    """A rate that differs in the fourth digit is another rate."""
    with pytest.raises(ClipFailed, match=f"not {fps} frames per second"):
        verify_file(good, VideoSpec(SPEC.width, SPEC.height, Fraction(fps), SPEC.num_frames))


def test_dropped_frame_with_kept_times_is_found(tmp_path: Path) -> None:
    """A frame left out while the others keep their times fails even if the count happened to be asked for."""
    made = write_clip(tmp_path / "clip.mp4", moving_frames())
    path = tmp_path / "dropped.mp4"
    run_ffmpeg("-i", made.path, "-vf", "select=not(eq(n\\,5))", "-fps_mode", "passthrough", path)
    with pytest.raises(ClipFailed, match="frame 5 is shown at"):
        verify_file(path, VideoSpec(SPEC.width, SPEC.height, SPEC.fps, SPEC.num_frames - 1))


@pytest.mark.parametrize("size", [(64, 64), (48, 64), (80, 48)])
def test_wrong_size_is_found(good: Path, size: tuple[int, int]) -> None:
    """Another width or height is refused, also when the number of pixels is the same."""
    with pytest.raises(ClipFailed, match=f"it is 64x48, not {size[0]}x{size[1]} pixels"):
        verify_file(good, VideoSpec(*size, SPEC.fps, SPEC.num_frames))


def test_sound_without_picture_is_refused(tmp_path: Path) -> None:
    """A file without a video stream is refused."""
    path = tmp_path / "clip.mp4"
    run_ffmpeg("-f", "lavfi", "-i", "sine=duration=1", path)
    with pytest.raises(ClipFailed, match="ffmpeg complained"):
        verify_file(path, SPEC)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (0, 135, 0)])
def test_clip_of_one_colour_fails(tmp_path: Path, codec: str, colour: tuple[int, int, int]) -> None:
    """All black, all white and all green clips fail with kind "flat"."""
    settings = EncodeSettings(codec=codec)
    frames = np.broadcast_to(np.array(colour, np.uint8), (13, 48, 64, 3))
    made = write_clip(tmp_path / f"clip{settings.suffix}", frames, settings=settings)
    with pytest.raises(ClipFailed, match="every one of the 13 frames is a single colour") as caught:
        verify_file(made.path, SPEC)
    assert caught.value.kind == "flat"


def test_flat_frames_of_changing_colour_fail(tmp_path: Path) -> None:
    """A clip whose frames are flat but differ from each other is still no clip."""
    frames = np.broadcast_to(np.arange(0, 260, 20, dtype=np.uint8)[:, None, None, None], (13, 48, 64, 3))
    made = write_clip(tmp_path / "clip.mp4", frames)
    with pytest.raises(ClipFailed, match="single colour"):
        verify_file(made.path, SPEC)


def test_one_frame_with_a_picture_is_no_flat_clip(tmp_path: Path) -> None:
    """A fade from black is odd but not refused: only a clip without any picture fails."""
    frames = moving_frames()
    frames[:9] = 0
    made = write_clip(tmp_path / "clip.mp4", frames)
    assert verify_file(made.path, SPEC).flags == ("black 0-8", "frozen 1-8")


def test_frozen_stretch_is_flagged(tmp_path: Path) -> None:
    """A picture that stands still for a quarter of a second is flagged with its frames; the clip passes."""
    spec = VideoSpec(64, 48, Fraction(16), 25)
    frames = moving_frames(spec)
    frames[10:16] = frames[9]
    made = write_clip(tmp_path / "clip.mp4", frames, spec)
    assert verify_file(made.path, spec).flags == ("frozen 10-15",)


def test_short_standstill_is_not_flagged(tmp_path: Path) -> None:
    """Two equal frames in a row are nothing odd."""
    spec = VideoSpec(64, 48, Fraction(16), 25)
    frames = moving_frames(spec)
    frames[10] = frames[9]
    made = write_clip(tmp_path / "clip.mp4", frames, spec)
    assert verify_file(made.path, spec).flags == ()


def test_flash_shows_in_the_luma_jump(tmp_path: Path) -> None:
    """A single bright frame, which no mean sees, stands out as the largest jump of luma."""
    frames = moving_frames()
    frames[6] = np.minimum(frames[6].astype(int) + 90, 255)
    made = write_clip(tmp_path / "clip.mp4", frames)
    assert verify_file(made.path, SPEC).luma_jump > 50


def test_single_frame_passes(tmp_path: Path) -> None:
    """A clip of one frame has no motion and no flags."""
    spec = VideoSpec(64, 48, Fraction(16), 1)
    made = write_clip(tmp_path / "clip.mp4", moving_frames(spec), spec)
    report = verify_file(made.path, spec)
    assert (report.flags, report.motion_mean, report.luma_jump) == ((), 0.0, 0.0)


def test_other_frames_than_rendered_are_refused(tmp_path: Path) -> None:
    """A lossless file whose frames are not the rendered ones is refused by its hash."""
    made = write_clip(tmp_path / "clip.mkv", moving_frames(seed=1), settings=EncodeSettings(codec="ffv1"))
    other = write_clip(tmp_path / "other.mkv", moving_frames(seed=2), settings=EncodeSettings(codec="ffv1"))
    with pytest.raises(ClipFailed, match="decoded frames have the hash"):
        verify_file(made.path, SPEC, frames_hash=other.frames_hash)


def test_psnr_pairs_frames_by_index(tmp_path: Path) -> None:
    """PSNR is infinite for equal frames and shows exactly the one frame that differs."""
    frames = moving_frames()
    made = write_clip(tmp_path / "clip.mkv", frames, settings=EncodeSettings(codec="ffv1"))
    changed = frames.copy()
    changed[4] = frames[5]
    values = psnr(made.path, SPEC, [changed[:6], changed[6:]])
    assert [index for index, value in enumerate(values) if value != float("inf")] == [4]


def test_container_of_b_frames_is_read_in_display_order(good: Path) -> None:
    """The index gives timestamps in the order of display, whatever the order of storage."""
    found = read_container(good)
    assert list(found.timestamps) == [1001 * index for index in range(13)]
    assert found.time_base == Fraction(1, 30000)

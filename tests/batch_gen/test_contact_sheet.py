from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from batch_gen.contact_sheet import MAX_CLIPS, contact_sheet
from batch_gen.encode import EncodeSettings, VideoSpec
from batch_gen.errors import ClipFailed
from batch_gen.stills import pick_frames, poster_index, read_poster, spread, write_jpeg
from tests.clips import moving_frames, write_clip

LOSSLESS = EncodeSettings(codec="ffv1")


def test_picked_frames_are_those_frames(tmp_path: Path) -> None:
    """Frames are picked by number, exactly."""
    frames = moving_frames()
    made = write_clip(tmp_path / "clip.mkv", frames, settings=LOSSLESS)
    picked = pick_frames(made.path, [0, 5, 12])
    assert np.array_equal(np.stack(picked), frames[[0, 5, 12]])
    assert np.array_equal(read_poster(made.path), frames[6])


def test_frame_beyond_the_end_is_refused(tmp_path: Path) -> None:
    """A frame number that the file does not have is an error, not another frame."""
    made = write_clip(tmp_path / "clip.mp4", moving_frames())
    with pytest.raises(ClipFailed, match=r"only 1 of the frames \[3, 13\] decode"):
        pick_frames(made.path, [3, 13])


@pytest.mark.parametrize(("num_frames", "indices"), [(1, [0]), (2, [0, 1]), (5, [0, 2, 4]), (81, [0, 40, 80])])
def test_spread_covers_first_and_last(num_frames: int, indices: list[int]) -> None:
    """Frames are spread from the first to the last, none twice."""
    assert spread(num_frames, 3) == indices
    assert 0 <= poster_index(num_frames) < num_frames


def test_jpeg_has_the_right_colours(tmp_path: Path) -> None:
    """A poster's colours come back within what JPEG loses: the matrix is that of JPEG, not that of video."""
    patches = np.array([(200, 30, 90), (30, 200, 60), (40, 60, 220), (128, 128, 128)], np.uint8)
    frame = np.broadcast_to(patches.repeat(16, axis=0), (32, 64, 3))
    write_jpeg(tmp_path / "poster.jpg", frame)
    centres = imread(tmp_path / "poster.jpg")[16, 8::16].astype(int)
    assert np.abs(centres - patches).max() <= 4


def test_sheet_shows_every_clip(tmp_path: Path) -> None:
    """The sheet is a PNG with each clip's frames on it, whatever sizes, lengths and captions the clips have."""
    wide = VideoSpec(128, 32, Fraction(16), 1)
    clips = [
        ("a fox\nin the snow, $5 _and_ ^more " * 9, write_clip(tmp_path / "a.mp4", moving_frames()).path),
        (
            "\U0001f98a \u5c0f\u732b \u05e9\u05dc\u05d5\u05dd \t",
            write_clip(tmp_path / "b.mp4", moving_frames(wide), wide).path,
        ),
        ("", write_clip(tmp_path / "c.mkv", moving_frames(), settings=LOSSLESS).path),
    ]
    contact_sheet(clips, tmp_path / "sheet.png")
    sheet = imread(tmp_path / "sheet.png")[..., :3]
    assert sheet.shape == (2 * 162 + 12, 2 * (3 * 160 + 4 + 12) + 12, 3)
    coloured = np.ptp(sheet, axis=2) > 0.2
    halves = [coloured[:162, :496], coloured[:162, 496:], coloured[162:, :496]]
    assert all(half.sum() > 5000 for half in halves)
    assert not coloured[174:, 508:].any()


def test_sheet_says_how_many_are_missing(tmp_path: Path) -> None:
    """A sheet of very many clips shows the first ones and stays a picture that can be opened."""
    clip = write_clip(
        tmp_path / "a.mp4", moving_frames(VideoSpec(16, 16, Fraction(16), 1)), VideoSpec(16, 16, Fraction(16), 1)
    )
    contact_sheet([("fox", clip.path)] * (MAX_CLIPS + 1), tmp_path / "sheet.png", num_columns=10)
    assert imread(tmp_path / "sheet.png").shape[0] == MAX_CLIPS // 10 * 162 + 12


def test_sheet_of_nothing_is_a_defect(tmp_path: Path) -> None:
    """Nobody asks for a sheet without clips."""
    with pytest.raises(ValueError, match="at least one clip"):
        contact_sheet([], tmp_path / "sheet.png")


def test_sheet_with_a_broken_clip_says_which(tmp_path: Path) -> None:
    """A file that does not decode is named."""
    (tmp_path / "broken.mp4").write_bytes(b"x")
    with pytest.raises(ClipFailed, match=r"broken\.mp4 was refused"):
        contact_sheet([("fox", tmp_path / "broken.mp4")], tmp_path / "sheet.png")

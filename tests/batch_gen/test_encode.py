import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest

from batch_gen import ffmpeg
from batch_gen.container import read_container
from batch_gen.encode import CODECS, Encoder, EncodeSettings, VideoSpec, escape_metadata, frames_hash, provenance
from batch_gen.errors import ClipFailed, ConfigError, DiskFull
from batch_gen.verify import decode, psnr, verify_file
from tests.clips import FPS, SPEC, moving_frames, write_clip

NASTY_PROMPT = (
    "".join(map(chr, range(1, 128)))
    + "\n\n=;#\\ ;FFMETADATA1\n[CHAPTER]\nfox \U0001f98a \u05e9\u05dc\u05d5\u05dd \u732b"
    + "x" * 10_000
)


def shown_by_ffmpeg(path: Path) -> str:
    """What `ffmpeg -i` prints about a file."""
    command = [ffmpeg.executable(), "-hide_banner", "-i", path]  # without an output it shows the file and fails
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def read_tags(path: Path) -> str:
    """The file's metadata as an ffmetadata text."""
    return subprocess.run(
        [ffmpeg.executable(), "-v", "error", "-i", path, "-f", "ffmetadata", "-"], capture_output=True, check=True
    ).stdout.decode()


@pytest.mark.parametrize("codec", CODECS)
def test_same_input_gives_same_bytes(tmp_path: Path, codec: str) -> None:
    """Two attempts at a clip give the same file, byte for byte, in every codec."""
    settings = EncodeSettings(codec=codec)
    tags = provenance("tiny", {"prompt": "a fox", "seed": 7})
    first, second = (
        write_clip(tmp_path / f"{name}{settings.suffix}", moving_frames(), settings=settings, metadata=tags)
        for name in ("first", "second")
    )
    assert first.sha256 == second.sha256
    assert first.path.read_bytes() == second.path.read_bytes()


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.lossless])
def test_lossless_codecs_keep_every_bit(tmp_path: Path, codec: str) -> None:
    """FFV1 and lossless x264 decode to exactly the frames that went in."""
    settings = EncodeSettings(codec=codec)
    frames = moving_frames()
    made = write_clip(tmp_path / f"clip{settings.suffix}", frames, settings=settings)
    assert made.frames_hash == frames_hash(frames)
    verify_file(made.path, SPEC, frames_hash=made.frames_hash)
    assert np.array_equal(np.stack(list(decode(made.path, SPEC))), frames)


def test_frames_hash_is_that_of_the_design() -> None:
    """The frames hash is SHA-256 of the header line and the raw frames, however they were cut into slabs."""
    frames = moving_frames()
    header = b"frames 13 height 48 width 64 RGB24\n"
    assert frames_hash(frames) == hashlib.sha256(header + frames.tobytes()).hexdigest()
    assert frames_hash(frames[:, ::-1]) != frames_hash(frames)


def test_colours_survive_as_bt709(tmp_path: Path) -> None:
    """Patches of plain colour come back within 2 of 255, so matrix and range of the conversion match the file's tags."""
    spec = VideoSpec(width=128, height=32, fps=Fraction(16), num_frames=5)
    patches = np.array(
        [
            (255, 0, 0),
            (0, 255, 0),
            (0, 0, 255),
            (200, 30, 90),
            (16, 16, 16),
            (235, 235, 235),
            (0, 0, 0),
            (255, 255, 255),
        ]
    )
    row = patches.repeat(16, axis=0).astype(np.uint8)
    frames = np.broadcast_to(row, (5, 32, 128, 3))
    made = write_clip(tmp_path / "clip.mp4", frames, spec)
    centres = np.stack(list(decode(made.path, spec)))[:, 16, 8::16].astype(int)
    assert np.abs(centres - patches).max() <= 2
    assert "yuv420p(tv, bt709, progressive), 128x32" in shown_by_ffmpeg(made.path)


def test_default_quality_is_high(tmp_path: Path) -> None:
    """crf 16 keeps smooth moving content above 38 dB."""
    frames = moving_frames()
    frames[:, :12, :12] = frames[:, 12:24, 12:24]
    made = write_clip(tmp_path / "clip.mp4", frames)
    assert min(psnr(made.path, SPEC, [frames])) > 38


@pytest.mark.parametrize(
    ("codec", "fps"),
    [*(("h264", fps) for fps in ("16", "30000/1001", "24000/1001", "2997/125", "1/2", "120")), ("ffv1", "24000/1001")],
)
def test_rate_is_exact(tmp_path: Path, codec: str, fps: str) -> None:
    """A fractional rate is stored as that fraction, not as a rounded decimal."""
    settings = EncodeSettings(codec=codec)
    spec = VideoSpec(64, 48, Fraction(fps), 13)
    made = write_clip(tmp_path / f"clip{settings.suffix}", moving_frames(spec), spec, settings)
    assert verify_file(made.path, spec).frames_hash


def test_mp4_is_faststart(tmp_path: Path) -> None:
    """The index of an MP4 stands before its data, so that browsers play it while it loads."""
    content = write_clip(tmp_path / "clip.mp4", moving_frames()).path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [(16, 16), (16, 480), (848, 16)])
def test_smallest_sizes_and_one_frame(tmp_path: Path, codec: str, size: tuple[int, int]) -> None:
    """Every legal size, down to 16 pixels and a single frame, is written as it is, never rescaled."""
    settings = EncodeSettings(codec=codec)
    spec = VideoSpec(*size, Fraction(16), 1)
    made = write_clip(tmp_path / f"clip{settings.suffix}", moving_frames(spec), spec, settings)
    found = read_container(made.path)
    assert (found.width, found.height, len(found.timestamps)) == (*size, 1)
    verify_file(made.path, spec)


@pytest.mark.parametrize("codec", ["h264", "ffv1"])
def test_metadata_takes_any_prompt(tmp_path: Path, codec: str) -> None:
    """10,000 characters with newlines, control characters, emoji and the format's own marks come back unchanged."""
    settings = EncodeSettings(codec=codec)
    tags = provenance("tiny", {"prompt": NASTY_PROMPT, "seed": 7})
    made = write_clip(tmp_path / f"clip{settings.suffix}", moving_frames(), settings=settings, metadata=tags)
    text = read_tags(made.path)
    assert escape_metadata(NASTY_PROMPT) in text
    assert "Machine-made by tiny, seed 7" in text
    assert "trainedAlgorithmicMedia" in text
    assert "[CHAPTER]\n" not in text.replace("\\\n[CHAPTER]\\\n", "")


def test_metadata_tells_nothing_private() -> None:
    """The row's own columns and the folders of images are not in a file that is handed on."""
    settings = {
        "prompt": "a fox",
        "seed": 7,
        "image": "/home/ann/ref/fox.png",
        "last_image": None,
        "extra": {"client": "Acme"},
    }
    told = json.loads(provenance("tiny", settings)["synopsis"])
    assert told["image"] == "fox.png"
    assert told["machine_made"] is True
    assert "extra" not in told
    assert "last_image" not in told


def test_metadata_can_be_switched_off(tmp_path: Path) -> None:
    """Without metadata neither the prompt nor the model is in the file."""
    tags = provenance("tiny-model", {"prompt": "a secret fox", "seed": 7})
    made = write_clip(tmp_path / "clip.mp4", moving_frames(), settings=EncodeSettings(metadata=False), metadata=tags)
    content = made.path.read_bytes()
    assert b"secret fox" not in content
    assert b"tiny-model" not in content


def test_file_says_nothing_of_time_or_muxer_version(tmp_path: Path) -> None:
    """No creation time and no version of the muxer is in the file."""
    made = write_clip(tmp_path / "clip.mp4", moving_frames())
    assert "creation_time" not in shown_by_ffmpeg(made.path)
    assert b"Lavf" not in made.path.read_bytes()


def test_encoding_starts_with_the_first_slab(tmp_path: Path) -> None:
    """ffmpeg runs as soon as the first frames are there, long before the last."""
    with Encoder(tmp_path / "clip.mp4", SPEC) as encoder:
        encoder.write(moving_frames()[:1])
        assert encoder.part.exists() or psutil.pid_exists(encoder.pid)
        assert not encoder.path.exists()


def test_missing_frames_are_refused(tmp_path: Path) -> None:
    """A clip with fewer frames than asked for is never given its name, and leaves nothing behind."""
    with Encoder(tmp_path / "clip.mp4", SPEC) as encoder:
        encoder.write(moving_frames()[:5])
        with pytest.raises(ClipFailed, match="5 of 13 frames arrived") as caught:
            encoder.finish()
    assert caught.value.kind == "encode"
    assert list(tmp_path.iterdir()) == []


def test_one_frame_too_many_is_refused(tmp_path: Path) -> None:
    """A clip with more frames than asked for fails at the frame that is too many."""
    frames = moving_frames()
    with Encoder(tmp_path / "clip.mp4", SPEC) as encoder:
        encoder.write(frames)
        with pytest.raises(ClipFailed, match="more than the 13 frames"):
            encoder.write(frames[:1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [np.zeros((1, 48, 66, 3), np.uint8), np.zeros((1, 48, 64, 3), np.float32)])
def test_slab_of_another_shape_is_a_defect(tmp_path: Path, wrong: np.ndarray) -> None:
    """A slab of another size or type is a programmer's error, not something to rescale."""
    with Encoder(tmp_path / "clip.mp4", SPEC) as encoder, pytest.raises(ValueError, match="a slab must be uint8"):
        encoder.write(wrong)


def test_abort_kills_and_leaves_nothing(tmp_path: Path) -> None:
    """abort ends ffmpeg, reaps it, deletes the unfinished file, and may be called twice."""
    encoder = Encoder(tmp_path / "clip.mp4", SPEC)
    encoder.write(moving_frames()[:5])
    pid = encoder.pid
    encoder.abort()
    encoder.abort()
    assert not psutil.pid_exists(pid)
    assert list(tmp_path.iterdir()) == []


def write_and_stumble(encoder: Encoder) -> None:
    """An engine that dies between two slabs."""
    with encoder:
        encoder.write(moving_frames()[:5])
        raise KeyError


def write_all(encoder: Encoder, frames: np.ndarray, times: int = 1) -> None:
    """Write the same frames again and again, then finish."""
    for _ in range(times):
        encoder.write(frames)
    encoder.finish()


def test_exception_in_the_block_aborts(tmp_path: Path) -> None:
    """An error between the first frame and the last ends ffmpeg and removes what it wrote."""
    encoder = Encoder(tmp_path / "clip.mp4", SPEC)
    with pytest.raises(KeyError):
        write_and_stumble(encoder)
    assert list(tmp_path.iterdir()) == []
    assert not psutil.pid_exists(encoder.pid)


def test_death_of_ffmpeg_is_a_failed_clip(tmp_path: Path) -> None:
    """An ffmpeg that is killed in the middle fails the clip with kind "encode"; nothing hangs, nothing stays."""
    spec = VideoSpec(640, 480, FPS, 201)
    frames = moving_frames(VideoSpec(640, 480, FPS, 1))
    with Encoder(tmp_path / "clip.mp4", spec) as encoder:
        encoder.write(frames)
        os.kill(encoder.pid, signal.SIGKILL)
        with pytest.raises(ClipFailed, match="ffmpeg failed while encoding") as caught:
            write_all(encoder, frames, 200)
    assert caught.value.kind == "encode"
    assert list(tmp_path.iterdir()) == []


def test_hanging_ffmpeg_is_a_failed_clip(tmp_path: Path) -> None:
    """An ffmpeg that stops reading fails the clip after the stall limit instead of blocking the worker for ever."""
    spec = VideoSpec(64, 48, FPS, 201)  # one frame fits in any pipe, all of them in none
    frames = moving_frames(VideoSpec(64, 48, FPS, 1))
    with Encoder(tmp_path / "clip.mp4", spec, stall_s=0.2) as encoder:
        encoder.write(frames)
        os.kill(encoder.pid, signal.SIGSTOP)
        with pytest.raises(ClipFailed, match=r"moved no data for 0\.2 s"):
            write_all(encoder, frames, 200)
    assert not psutil.pid_exists(encoder.pid)


def test_unwritable_place_is_a_failed_clip_with_ffmpegs_words(tmp_path: Path) -> None:
    """What ffmpeg said about its failure is in the message."""
    encoder = Encoder(tmp_path / "missing" / "clip.mp4", SPEC)
    with pytest.raises(ClipFailed, match="No such file or directory"):
        write_all(encoder, moving_frames())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("codec", ["h264", "ffv1"])
def test_full_disk_is_its_own_error(tmp_path: Path, codec: str) -> None:
    """A disk without room is DiskFull, which another machine may do better, and not a failure of the clip."""
    settings = EncodeSettings(codec=codec)
    encoder = Encoder(tmp_path / f"clip{settings.suffix}", SPEC, settings)  # no tags: they go to a real file
    encoder.part.symlink_to("/dev/full")
    with pytest.raises(DiskFull, match="no space left"):
        write_all(encoder, moving_frames())
    assert list(tmp_path.iterdir()) == []


KILLED_PARENT = """
import sys
from fractions import Fraction
from pathlib import Path
import numpy as np
from batch_gen.encode import Encoder, VideoSpec
encoder = Encoder(Path(sys.argv[1]), VideoSpec(64, 48, Fraction(16), 81))
encoder.write(np.zeros((9, 48, 64, 3), np.uint8))
print(encoder.pid, flush=True)
sys.stdin.read()
"""


def test_kill_of_the_parent_leaves_no_ffmpeg(tmp_path: Path) -> None:
    """After SIGKILL of the process that encodes, its ffmpeg ends by itself and no file has a clip's name."""
    target = tmp_path / "clip.mp4"
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    child_ended(child)
    assert not target.exists()


def child_ended(child: psutil.Process) -> None:
    """Wait for a process that is not our child."""
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "ffmpeg outlived its parent"
        os.sched_yield()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"codec": "av1"}, "codec 'av1' is unknown; choose one of h264, h265_10bit, ffv1, x264_lossless"),
        ({"crf": 60}, r"crf 60 is outside 0\.\.51"),
        ({"crf": float("nan")}, "crf nan is outside"),
        ({"codec": "ffv1", "pix_fmt": "yuv420p"}, "codec ffv1 has no pixel format 'yuv420p'; it has bgr0"),
        ({"threads": 0}, "encoder threads 0 must be at least 1"),
    ],
)
def test_bad_settings_are_refused_before_the_run(wrong: dict, message: str) -> None:
    """A codec, quality or pixel format that cannot be is a configuration error that names the legal values."""
    with pytest.raises(ConfigError, match=message):
        EncodeSettings(**wrong)

import errno
import subprocess
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_gen import ffmpeg
from batch_gen.commit import commit_clip
from batch_gen.encode import EncodeSettings, provenance
from batch_gen.errors import CheckFailed, DiskFull, UsageError
from batch_gen.export import Exported, ExportOptions, disk_errors, export, spec_of
from batch_gen.export_names import MAX_NAME_BYTES, clean_value
from batch_gen.layout import clip_key
from batch_gen.records import FileEntry, Record
from batch_gen.request import RenderRequest
from batch_gen.storage.base import Store
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from batch_gen.verify import decode, psnr, verify_file
from tests.clips import FPS, SPEC, moving_frames, write_clip


def request(clip_id: str, **extra: object) -> RenderRequest:
    """A request of SPEC's size with carried-through columns."""
    return RenderRequest(
        clip_id=clip_id, row_id=clip_id, sample=0, prompt=f"a {clip_id}", negative_prompt="", seed=7,
        width=SPEC.width, height=SPEC.height, num_frames=SPEC.num_frames, fps=FPS, steps=4,
        guidance_high=4.0, guidance_low=3.0, flow_shift=12.0, extra=extra,
    )  # fmt: skip


def commit(store: Store, folder: Path, clip_id: str, codec: str = "h264", **extra: object) -> Record:
    """Encode and commit a clip; frames differ by clip_id."""
    made_of = request(clip_id, **extra)
    settings = EncodeSettings(codec=codec)
    frames = moving_frames(seed=sum(clip_id.encode()))
    tags = provenance("tiny", made_of.to_json())
    made = write_clip(folder / f"{clip_id}{settings.suffix}", frames, settings=settings, metadata=tags)
    entry = FileEntry(key=clip_key(clip_id, settings.suffix), bytes=made.bytes, sha256=made.sha256)
    record = Record(
        clip_id=clip_id, row_id=clip_id, sample=0, request=made_of.to_json(), request_digest=made_of.digest,
        fingerprint="f", numerics_key="n", frames_hash=made.frames_hash, file=entry, extra=dict(extra),
    )  # fmt: skip
    return commit_clip(store, record, made.path).record


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """An output root in a folder."""
    return FolderStore(tmp_path / "out")


def frames_of(pattern: Path, pixel_format: str) -> bytes:
    """Raw pixels of an image sequence, as ffmpeg reads it, without any conversion."""
    return subprocess.run(
        [ffmpeg.executable(), "-v", "error", "-start_number", "1", "-i", pattern, "-f", "rawvideo", "-pix_fmt", pixel_format, "-"],
        capture_output=True, check=True,
    ).stdout  # fmt: skip


def as_frames(pixels: bytes, dtype: type, *shape: int) -> npt.NDArray:
    """Raw pixels as an array of SPEC's number of frames."""
    return np.frombuffer(pixels, dtype).reshape(SPEC.num_frames, *shape)


def one(results: Iterator[Exported]) -> Path:
    """The only export's path."""
    (result,) = results
    return result.path


def test_copy_has_the_same_bytes_under_the_templates_name(store: FolderStore, tmp_path: Path) -> None:
    """A copy is byte for byte the committed file, in the folders and under the name that the template says."""
    record = commit(store, tmp_path, "fox", shot="s 01", take="3")
    path = one(export(store, [record], tmp_path / "to", ExportOptions(template="{shot}/{row_id}_{take:03}_{seed:04}")))
    assert path == tmp_path / "to" / "s 01" / "fox_003_0007.mp4"
    assert path.read_bytes() == store.path(record.file.key).read_bytes()
    assert not path.samefile(store.path(record.file.key))


def test_link_shares_the_file(store: FolderStore, tmp_path: Path) -> None:
    """A link takes no room: it is the committed file itself."""
    record = commit(store, tmp_path, "fox")
    path = one(export(store, [record], tmp_path / "to", ExportOptions(kind="link")))
    assert path.samefile(store.path(record.file.key))


def test_export_from_a_store_without_files(tmp_path: Path) -> None:
    """From a store that is no folder clips are fetched and checked; links are refused with what to do instead."""
    store = MemoryStore()
    record = commit(store, tmp_path, "fox")
    path = one(export(store, [record], tmp_path / "to", ExportOptions()))
    verify_file(path, SPEC)
    with pytest.raises(UsageError, match="cannot be linked; use the kind copy"):
        export(store, [record], tmp_path / "to2", ExportOptions(kind="link"))


@pytest.mark.parametrize("codec", ["h264", "ffv1"])
def test_png_sequence_holds_the_decoded_frames(store: FolderStore, tmp_path: Path, codec: str) -> None:
    """PNGs hold bit for bit what the clip decodes to, for a lossless clip the rendered frames."""
    record = commit(store, tmp_path, "fox", codec)
    folder = one(export(store, [record], tmp_path / "to", ExportOptions(kind="png")))
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:06}.png" for number in range(1, 14)]
    expected = np.stack(list(decode(store.path(record.file.key), SPEC)))
    assert np.array_equal(as_frames(frames_of(folder / "%06d.png", "rgb24"), np.uint8, 48, 64, 3), expected)


def test_exr_sequence_holds_the_decoded_frames(store: FolderStore, tmp_path: Path) -> None:
    """EXR values times 255 are bit for bit the decoded frames, under a name with marks of ffmpeg's patterns too."""
    record = commit(store, tmp_path, "fox", "ffv1", shot="50%d")
    folder = one(export(store, [record], tmp_path / "to", ExportOptions(kind="exr", template="{shot}")))
    assert folder.name == "50%d"
    pattern = str(folder).replace("%", "%%") + "/%06d.exr"
    planes = as_frames(frames_of(Path(pattern), "gbrpf32le"), np.float32, 3, 48, 64)
    frames = np.round(planes[:, [2, 0, 1]].transpose(0, 2, 3, 1) * 255).astype(np.uint8)
    assert np.array_equal(frames, np.stack(list(decode(store.path(record.file.key), SPEC))))


@pytest.mark.parametrize(("kind", "shown"), [("prores422", "(HQ) (apch"), ("prores4444", "(4444) (ap4h")])
def test_prores_is_close_and_tagged(store: FolderStore, tmp_path: Path, kind: str, shown: str) -> None:
    """ProRes has the clip's frames, exact rate, colours and metadata, above 38 dB."""
    record = commit(store, tmp_path, "fox", "h264")
    path = one(export(store, [record], tmp_path / "to", ExportOptions(kind=kind)))
    assert path.suffix == ".mov"
    assert verify_file(path, SPEC).flags == ()
    assert min(psnr(path, SPEC, [np.stack(list(decode(store.path(record.file.key), SPEC)))])) > 38
    command = [ffmpeg.executable(), "-hide_banner", "-i", path]  # without an output it shows the file and fails
    text = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert shown in text
    assert "(tv, bt709, progressive)" in text
    assert "Machine-made by tiny, seed 7" in text


def test_poster_is_a_jpeg_of_the_middle_frame(store: FolderStore, tmp_path: Path) -> None:
    """A poster is one JPEG per clip."""
    record = commit(store, tmp_path, "fox")
    path = one(export(store, [record], tmp_path / "to", ExportOptions(kind="poster")))
    assert path.suffix == ".jpg"
    assert path.read_bytes().startswith(b"\xff\xd8\xff")


@pytest.mark.parametrize("kind", ["copy", "png", "prores422"])
def test_export_twice_gives_the_same_bytes(store: FolderStore, tmp_path: Path, kind: str) -> None:
    """Exports hold nothing that differs between two runs."""
    record = commit(store, tmp_path, "fox")
    first, second = (one(export(store, [record], tmp_path / name, ExportOptions(kind=kind))) for name in ("a", "b"))
    pairs = (
        zip(sorted(first.rglob("*")), sorted(second.rglob("*")), strict=True) if first.is_dir() else [(first, second)]
    )
    assert all(one.read_bytes() == other.read_bytes() for one, other in pairs)


def test_colliding_names_are_refused_before_anything_is_written(store: FolderStore, tmp_path: Path) -> None:
    """Two clips under one name, also if only the case differs, stop the export with both their ids."""
    records = [commit(store, tmp_path, "fox", shot="A"), commit(store, tmp_path, "owl", shot="a")]
    with pytest.raises(UsageError, match=r"several clips one name; add .*\n.*fox, owl"):
        export(store, records, tmp_path / "to", ExportOptions(template="{shot}"))
    assert not (tmp_path / "to").exists()


def test_existing_files_are_never_replaced(store: FolderStore, tmp_path: Path) -> None:
    """What stands in the folder stops the export, or is left alone and skipped on demand."""
    records = [commit(store, tmp_path, "fox"), commit(store, tmp_path, "owl")]
    list(export(store, records[:1], tmp_path / "to", ExportOptions()))
    (tmp_path / "to" / "fox.mp4").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"has fox\.mp4 already; choose another folder or --skip-existing"):
        export(store, records, tmp_path / "to", ExportOptions())
    results = export(store, records, tmp_path / "to", ExportOptions(skip_existing=True))
    assert [result.clip_id for result in results] == ["owl"]
    assert (tmp_path / "to" / "fox.mp4").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{scene}", "has no field 'scene'; it has .*shot"),
        ("{prompt.__class__}", "has no field"),
        ("{prompt[0]}", "has no field"),
        ("{prompt!r}", "has no field"),
        ("{}", "has no field"),
        ("{seed", "does not fit clip fox"),
        ("{shot:05d}", "does not fit clip fox"),
        ("../{clip_id}", "which is no file name"),
        ("/tmp/{clip_id}", "which is no file name"),
        ("{dots}", "which is no file name"),
        ("{empty}", "which is no file name"),
        ("a//{clip_id}", "which is no file name"),
        ("{prompt}" * 60, f"a name above {MAX_NAME_BYTES} bytes"),
    ],
)
def test_bad_templates_are_refused(store: FolderStore, tmp_path: Path, template: str, message: str) -> None:
    """A template that names what is not there, or leads out of the folder, is refused with the clip's id."""
    record = commit(store, tmp_path, "fox", shot="A", dots="..", empty="")
    with pytest.raises(UsageError, match=message):
        export(store, [record], tmp_path / "to", ExportOptions(template=template))


def test_damaged_and_missing_files_are_not_exported(store: FolderStore, tmp_path: Path) -> None:
    """A file that is not the one its record names stops the export and leaves nothing under the clip's name."""
    record = commit(store, tmp_path, "fox")
    path = store.path(record.file.key)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckFailed, match="is not the file that was committed; run batch-gen verify"):
        list(export(store, [record], tmp_path / "to", ExportOptions()))
    path.unlink()
    with pytest.raises(CheckFailed, match="is missing, though its record stands"):
        list(export(store, [record], tmp_path / "to", ExportOptions()))
    assert not (tmp_path / "to").exists()


def test_failed_transcode_leaves_nothing(store: FolderStore, tmp_path: Path) -> None:
    """A sequence that cannot be finished leaves neither a folder nor an unfinished one."""
    record = commit(store, tmp_path, "fox")
    longer = record.model_copy(update={"request": {**record.request, "num_frames": 14}})
    with pytest.raises(Exception, match="only 13 of 14 frames decode"):
        list(export(store, [longer], tmp_path / "to", ExportOptions(kind="png")))
    assert list((tmp_path / "to").iterdir()) == []


def test_full_disk_is_its_own_error(tmp_path: Path) -> None:
    """No room for an export is DiskFull with the folder's name; any other trouble with files stays what it is."""
    with (
        pytest.raises(DiskFull, match=f"no space left in {tmp_path} .* while exporting fox"),
        disk_errors(tmp_path, "fox"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), disk_errors(tmp_path, "fox"):
        raise PermissionError


@given(st.text())
def test_any_value_makes_a_safe_part_of_a_name(value: str) -> None:
    """Whatever a column holds, its part of a name has no separator, no control character and few bytes."""
    cleaned = clean_value(value)
    assert not set(cleaned) & set('/\\:*?"<>|\0\n\r\t')
    assert len(cleaned.encode()) <= 120
    assert cleaned == cleaned.strip()


def test_spec_of_a_record_is_exact(store: FolderStore, tmp_path: Path) -> None:
    """The rate in a record is read back as the fraction it was."""
    assert spec_of(commit(store, tmp_path, "fox")).fps == Fraction(30000, 1001)

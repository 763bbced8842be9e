import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from batch_gen.encode import CODECS, EncodeSettings, VideoSpec
from batch_gen.errors import DiskFull, EnvironmentFault
from batch_gen.scratch import check_room, clean_dead, file_bound_bytes, needed_bytes, open_scratch
from tests.clips import write_clip

OWNER = """
import sys
from pathlib import Path
from batch_gen.scratch import open_scratch
with open_scratch(Path(sys.argv[1])) as folder:
    (folder / "half.mp4.part").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def start_owner(base: Path) -> tuple[subprocess.Popen, Path]:
    """Another process with a scratch folder below `base`."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, base], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return owner, Path(owner.stdout.readline().decode().strip())


def test_folder_is_ours_and_goes_at_the_end(tmp_path: Path) -> None:
    """Two workers get two folders, and each is removed with its content when its worker ends."""
    with open_scratch(tmp_path) as first, open_scratch(tmp_path) as second:
        assert first != second
        (first / "clip.mp4.part").write_bytes(b"x")
    assert not first.exists()
    assert not second.exists()


def test_leftovers_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    """After SIGKILL of a worker the next one removes its folder."""
    owner, folder = start_owner(tmp_path)
    owner.kill()
    owner.communicate()
    assert (folder / "half.mp4.part").exists()
    with open_scratch(tmp_path):
        assert not folder.exists()


def test_folder_of_a_living_worker_stays(tmp_path: Path) -> None:
    """A worker that starts beside another one leaves that one's folder alone."""
    owner, folder = start_owner(tmp_path)
    with open_scratch(tmp_path):
        assert (folder / "half.mp4.part").exists()
    owner.communicate(b"")
    assert not folder.exists()


def test_foreign_things_are_never_removed(tmp_path: Path) -> None:
    """A folder without our lock, a file and a link are not touched, whatever their names."""
    (tmp_path / "batch-gen-notes").mkdir()
    (tmp_path / "batch-gen-file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner.lock").touch()
    (tmp_path / "batch-gen-link").symlink_to(tmp_path / "elsewhere")
    assert clean_dead(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_missing_base_is_made(tmp_path: Path) -> None:
    """A scratch folder that does not exist yet is created."""
    with open_scratch(tmp_path / "a" / "b") as folder:
        assert folder.is_dir()


def test_unusable_base_is_an_environment_fault(tmp_path: Path) -> None:
    """A scratch folder that is a file is exit 2, with the flag that changes it."""
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="choose another with --scratch"), open_scratch(tmp_path / "file"):
        pass


def test_too_little_room_is_told_before_the_start(tmp_path: Path) -> None:
    """A run that may need more than is free does not start, and leaves no folder; what never fits is exit 2."""
    disk = shutil.disk_usage(tmp_path)
    with pytest.raises(DiskFull, match=r"MiB free and the run may need"):
        check_room(tmp_path, (disk.free + disk.total) // 2)
    with pytest.raises(EnvironmentFault, match=r"disk of .* MiB and the run may need 1,048,576,000,000 MiB") as never:
        check_room(tmp_path, 10**6 * 2**40)
    assert never.value.exit_code == 2
    with pytest.raises(EnvironmentFault), open_scratch(tmp_path, num_bytes=10**6 * 2**40):
        pass
    assert list(tmp_path.glob("batch-gen-*/")) == []


@pytest.mark.parametrize("codec", CODECS)
def test_estimate_is_above_what_noise_takes(tmp_path: Path, codec: str) -> None:
    """Even pure noise, the worst content there is, makes a smaller file than estimated."""
    spec = VideoSpec(256, 256, Fraction(16), 9)
    settings = EncodeSettings(codec=codec)
    noise = np.random.default_rng(0).integers(0, 256, (9, 256, 256, 3), dtype=np.uint8)
    made = write_clip(tmp_path / f"clip{settings.suffix}", noise, spec, settings)
    assert made.bytes <= file_bound_bytes(spec, settings)
    assert needed_bytes(spec, settings, 3) > 3 * made.bytes

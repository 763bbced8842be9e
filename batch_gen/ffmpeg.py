"""The one place that starts ffmpeg: found once, its stderr always drained, its death and a full disk told apart.

Every child sits at the end of a pipe of ours. When this process is killed, even by SIGKILL, the kernel closes the pipe
and the child ends by itself: an encoder reads end of file, a decoder cannot write any more. Its own session keeps
Ctrl-C and a group-wide SIGTERM away from it, so that a drain can finish the clip, and lets it stand back behind the
engines.
"""

import contextlib
import errno
import fcntl
import functools
import os
import select
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from batch_gen.errors import BatchGenError, ClipFailed, DiskFull, EnvironmentFault

STALL_S = 300.0
"""A pipe that moves no byte for so long belongs to a child that hangs."""
STDERR_TAIL_BYTES = 64 * 1024
PIPE_BYTES = 1024 * 1024
NICE = 10
"""How far ffmpeg stands back."""
LOW_DISK_BYTES = 1024 * 1024
EXACT = "bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"
"""swscale's flags for correct rounding and full chroma in between; its default is fast and off by some."""
TO_RGB = f"scale=flags={EXACT},format=rgb24"
"""Filter: any input, by its own tags, to 8-bit RGB."""
TO_BT709 = (
    f"scale=out_range=tv:out_color_matrix=bt709:flags={EXACT},format={{pix_fmt}},"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
"""Filter: any input, by its own tags, to limited-range BT.709 in `pix_fmt`, tagged as such."""
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", None)


@functools.cache
def executable() -> str:
    """Path of the ffmpeg that imageio-ffmpeg brings.

    Raises EnvironmentFault where there is none.
    """
    import imageio_ffmpeg

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        message = f"no ffmpeg: {error}; install the package imageio-ffmpeg or set IMAGEIO_FFMPEG_EXE"
        raise EnvironmentFault(message) from error


@functools.cache
def version() -> str:
    """First line of `ffmpeg -version`, for records and `doctor`."""
    shown = subprocess.run([executable(), "-version"], capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()[0]


class Child:
    """One ffmpeg process that either reads from us (`feed`) or writes to us (`stdout`), never both."""

    def __init__(
        self, args: Sequence[str], *, reads: bool = False, writes: bool = False, stall_s: float = STALL_S
    ) -> None:
        """Start ffmpeg with `args`; `reads` gives it a pipe as stdin, `writes` one as stdout."""
        self.stall_s = stall_s
        self._process = subprocess.Popen(
            [executable(), "-hide_banner", "-nostdin", "-v", "error", "-xerror", *args],
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=subprocess.PIPE if writes else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        give_way(self._process.pid)
        self._stderr = bytearray()
        self._drain = threading.Thread(target=self._drain_stderr, name="ffmpeg-stderr", daemon=True)
        self._drain.start()
        self._poll = select.poll()
        for pipe, event in ((self._process.stdin, select.POLLOUT), (self._process.stdout, select.POLLIN)):
            self._prepare(pipe, event)

    def _prepare(self, pipe: IO[bytes] | None, event: int) -> None:
        if pipe is None:
            return
        os.set_blocking(pipe.fileno(), False)
        if _F_SETPIPE_SZ is not None:  # a frame is a megabyte, the default pipe 64 KiB
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, PIPE_BYTES)
        self._poll.register(pipe.fileno(), event)

    def _drain_stderr(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        while block := pipe.read(4096):
            self._stderr += block
            del self._stderr[:-STDERR_TAIL_BYTES]

    @property
    def pid(self) -> int:
        """Process id, for tests and logs."""
        return self._process.pid

    @property
    def stderr(self) -> str:
        """The last 64 KiB that the process said; complete after `wait` or `kill`."""
        return self._stderr.decode("utf-8", "replace").strip()

    def _await_pipe(self) -> None:
        if not self._poll.poll(self.stall_s * 1000):
            raise TimeoutError(f"ffmpeg moved no data for {self.stall_s:g} s")

    def feed(self, data: memoryview) -> None:
        """Write all of `data` (bytes, C order) to stdin, waiting for room.

        Raises BrokenPipeError after the process died and TimeoutError when it hangs.
        """
        assert self._process.stdin is not None
        file = self._process.stdin.fileno()
        while data:
            self._await_pipe()
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(file, data) :]

    def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` from stdout; a smaller number of bytes than asked for means the stream ended."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        filled = 0
        while filled < len(buffer):
            self._await_pipe()
            try:
                count = os.readv(file, [buffer[filled:]])
            except BlockingIOError:
                continue
            if count == 0:
                break
            filled += count
        return filled

    def read_all(self) -> bytes:
        """Everything up to the end of stdout; for small outputs."""
        blocks = []
        while True:
            block = bytearray(PIPE_BYTES)
            count = self.read_into(memoryview(block))
            blocks.append(bytes(block[:count]))
            if count < len(block):
                return b"".join(blocks)

    def wait(self) -> int:
        """Close stdin, wait for the end, reap, and return the exit status.

        Raises TimeoutError (the process is killed) when it takes longer than twice the stall limit.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            status = self._process.wait(2 * self.stall_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"ffmpeg did not end within {2 * self.stall_s:g} s") from None
        self._close()
        return status

    def kill(self) -> None:
        """End the process at once and reap it; harmless when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._drain.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def give_way(pid: int) -> None:
    """Let a process of its own session run behind the engines, which lose two cores' time for each that is taken.

    Linux shares cores between sessions before it looks at nice values, so the session's weight is lowered as well,
    where the kernel lets us; elsewhere, and where it does not, nothing is lost but time.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(NICE), "ascii")


def feed_all(child: Child, arrays: Iterable[npt.NDArray[Any]], doing: str, folder: Path) -> None:
    """Feed arrays to a child that writes into `folder`, and wait for its end.

    Raises ClipFailed("encode") when it fails or hangs, DiskFull when it had no room.
    """
    try:
        for array in arrays:
            child.feed(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        status = child.wait()
    except (BrokenPipeError, TimeoutError):
        status = None
    finally:
        child.kill()
    if status != 0:
        raise failure("encode", doing, child, folder)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, or of its nearest parent that exists."""
    return shutil.disk_usage(_existing(folder)).free


def total_bytes(folder: Path) -> int:
    """Bytes of the disk of `folder`, or of its nearest parent that exists, used ones too."""
    return shutil.disk_usage(_existing(folder)).total


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def disk_full(folder: Path, doing: str) -> DiskFull:
    """The error for a disk without room."""
    advice = "free some or choose another scratch folder"
    return DiskFull(f"no space left in {folder} ({free_bytes(folder):,} bytes free) while {doing}; {advice}")


def means_disk_full(error: OSError) -> bool:
    """Whether an OSError says that the disk or the quota is used up."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def failure(kind: str, doing: str, child: Child, folder: Path) -> BatchGenError:
    """The error for an ffmpeg that ended badly: DiskFull if `folder` has no room, else ClipFailed(kind)."""
    said = child.stderr
    if any(os.strerror(code) in said for code in (errno.ENOSPC, errno.EDQUOT)) or free_bytes(folder) < LOW_DISK_BYTES:
        return disk_full(folder, doing)
    last_lines = "\n".join(said.splitlines()[-8:]) or "it said nothing"
    return ClipFailed(kind, f"ffmpeg failed while {doing}: {last_lines}")

"""The supervisor's side of an engine: start the rank processes, speak with rank 0, notice death and silence.

Ranks are started here and nowhere else, one process per core, with their environment set before exec. They live in
their own session (a terminal's Ctrl-C never reaches them), end when the supervisor ends, and write their stderr to
files of their own, so that one voice speaks on the terminal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen import wire
from batch_gen.engine import ALL_STEPS, DenoiseOptions, Done, Event, Events, Slab, Step, Tap
from batch_gen.environment import child_environment, rank_environment
from batch_gen.errors import KINDS, BatchGenError, ClipFailed, EngineLost, RetryClass
from batch_gen.patience import Patience
from batch_gen.request import RenderRequest

_POLL_S = 0.25
_LOG_BYTES = 1 << 16
DEFAULT_STALL_S = 600.0
COMPILE_S = 3600.0
_DUMP_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start: plain data, given to every rank as one JSON argument.

    Args:
        kind: `fake` or `pipeline`.
        options: for `fake` the fields of FakeOptions, for `pipeline` those of ranks.PipelineSpec.
        num_ranks: processes of this replica.
        threads: CPU threads of one rank.
        cores: device cores of the ranks, by rank; empty on CPU.
        cpus: host cores that the ranks may use; empty for all.
        folder: scratch folder of this rank group (logs, rendezvous, last words).
        stall_s: seconds of silence that mean a hang, whatever was seen so far.
        min_stall_s: no less is a hang, however quick the stage was so far; see `Patience` for what is in between.
        load_s: seconds that loading may take.
        first_s: seconds that an answer may take where graphs may have to be compiled first; 0 where none are.
        cache: folder of compiled graphs, shared by all ranks of this machine; empty leaves it to the compiler.
        gpus: what each rank is told to see of the machine's CUDA devices, by rank; empty for no restriction.
        environment: variables set before exec.
    """

    kind: str
    options: dict[str, Any]
    folder: str
    num_ranks: int = 1
    threads: int = 1
    cores: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    stall_s: float = DEFAULT_STALL_S
    load_s: float = 3600.0
    first_s: float = 0.0
    min_stall_s: float = 60.0
    cache: str = ""
    gpus: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


class RemoteEngine:
    """An `Engine` in 1..n processes of its own.

    Args:
        spec: what to start.
        on_wait: called now and then while the ranks load, which `spec.load_s` bounds.
        on_compile: called now and then while a call may wait for a compiler, which `spec.first_s` bounds.
        compiled: see `Patience`.

    Raises:
        EngineLost: from any call, when a rank died (`engine_died`), is silent (`hang`) or reported a device error.
        ClipFailed: from any call, when this clip failed and the ranks go on.
    """

    def __init__(
        self,
        spec: EngineSpec,
        on_wait: Callable[[], None] = lambda: None,
        on_compile: Callable[[], None] = lambda: None,
        compiled: set[Hashable] | None = None,
    ) -> None:
        self.spec = spec
        self._on_wait, self._on_compile = on_wait, on_compile
        self._stage = "start"
        self._closed = False
        self._busy = False
        known = set() if compiled is None else compiled
        self._patience = Patience(spec.stall_s, spec.min_stall_s, spec.first_s, known)
        self._texts: set[bytes] = set()
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob("*"):
            stale.unlink()
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_POLL_S)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._start_all(theirs)
        self._description = self._await_ready()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._ranks]

    def text(self, requests: Sequence[RenderRequest]) -> Events:
        """See `Engine.text`."""
        body = {"requests": [request.to_json() for request in requests]}
        texts = {_digest(text) for request in requests for text in (request.prompt, request.negative_prompt)}
        self._finish_last_call()
        self._patience.begin("text", works=not texts <= self._texts)  # the ranks keep what they encoded
        self._texts |= texts
        yield from self._call("text", body)

    def denoise(self, request: RenderRequest, text: str, options: DenoiseOptions = ALL_STEPS) -> Events:
        """See `Engine.denoise`."""
        start = options.start
        body: dict[str, Any] = {
            "request": request.to_json(),
            "text": text,
            "stop": options.stop,
            "taps": list(options.taps),
        }
        body["start"] = start[0] if start else None
        body["together"] = [other.to_json() for other in options.together]
        arrays: list[npt.NDArray[Any]] = [start[1], *options.images] if start else list(options.images)
        is_whole = start is None and (options.stop is None or options.stop >= request.steps)
        self._finish_last_call()
        self._patience.begin(("denoise", _graphs_of(request), len(options.together)), is_whole=is_whole)
        yield from self._call("denoise", body, arrays)

    def decode(self, request: RenderRequest, latents: npt.NDArray[np.float32]) -> Events:
        """See `Engine.decode`."""
        self._finish_last_call()
        self._patience.begin(("decode", request.bucket))
        yield from self._call("decode", {"request": request.to_json()}, [latents])

    def render(self, request: RenderRequest) -> Iterator[Event]:
        """See `Engine.render`."""
        from batch_gen.engine import render

        return render(self, request)

    def describe(self) -> dict[str, Any]:
        """See `Engine.describe`."""
        return self._description

    def close(self) -> None:
        """Ask the ranks to end, then end them; returns within a few seconds."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(wire.WireClosed, OSError):
            wire.send(self._connection, {"type": "close"})
        deadline = time.monotonic() + 5.0
        for process in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        self._connection.close()

    def kill(self) -> None:
        """End the ranks at once."""
        self._closed = True
        self._kill()
        self._connection.close()

    def _start_all(self, theirs: socket.socket) -> None:
        """Start every rank; when one cannot be started, those before it end."""
        with theirs:
            try:
                for rank in range(self.spec.num_ranks):
                    self._ranks.append(self._start(rank, theirs))
            except BaseException:
                self.kill()
                raise

    def _start(self, rank: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno() if rank == 0 else -1
        arguments = json.dumps({**asdict(self.spec), "rank": rank, "fd": fd, "parent": os.getpid()})
        with (self._folder / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "batch_gen.ranks", arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(rank),
                pass_fds=(fd,) if rank == 0 else (),
                start_new_session=True,
            )

    def _environment(self, rank: int) -> dict[str, str]:
        spec = self.spec
        wanted = rank_environment(rank, spec.num_ranks, spec.threads, spec.gpus[rank] if spec.gpus else None)
        return child_environment(**{**wanted, **spec.environment})

    def _await_ready(self) -> dict[str, Any]:
        try:
            header, _ = self._receive(self.spec.load_s)
        except BaseException:
            self.kill()
            raise
        if header["type"] == "error":
            self.kill()
            raise self._error(header)
        assert header["type"] == "ready"
        description: dict[str, Any] = header["description"]
        return description

    def _finish_last_call(self) -> None:
        """The caller may have given the last call up half way; the ranks did not."""
        while self._busy:
            self._answer(learns=False)  # nobody was here to hear when the answers came

    def _call(self, stage: str, body: dict[str, Any], arrays: Sequence[npt.NDArray[Any]] = ()) -> Events:
        """Run a stage that `self._patience` was told of."""
        self._stage = stage
        try:
            self._connection.settimeout(self.spec.stall_s)  # large arrays wait for a rank that reads slowly
            wire.send(self._connection, {"type": stage, **body}, arrays)
        except OSError as error:
            is_full = isinstance(error.__cause__, TimeoutError)
            raise (self._hang(self.spec.stall_s) if is_full else self._lost()) from error
        self._busy = True
        while self._busy:
            header, received = self._answer()
            event = _event(header, received)
            if event is None:
                raise self._error(header)
            yield event

    def _answer(self, *, learns: bool = True) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
        """The next message of the call in progress; notes when it is the last one."""
        header, arrays = self._receive(self._patience.seconds)
        self._busy = header["type"] not in {"done", "error"}
        if learns:
            self._patience.heard(works=header["type"] in {"step", "slab"})
        if learns and header["type"] == "done":
            self._patience.ended()
        return header, arrays

    def _receive(self, patience_s: float) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
        deadline = time.monotonic() + patience_s
        while True:
            self._look_for_deaths()
            try:
                if _readable(self._connection, _POLL_S):
                    self._connection.settimeout(max(self.spec.stall_s, 1.0))
                    return wire.receive(self._connection)
            except TimeoutError as error:
                raise self._hang(patience_s) from error
            except (OSError, ValueError) as error:  # closed by the ranks, or here by `kill` from another thread
                raise self._lost() from error
            if time.monotonic() > deadline:
                raise self._hang(patience_s)
            self._still_waiting()

    def _still_waiting(self) -> None:
        """Silence that is known to be long is no sign of a fault: whoever waits for this engine hears of it."""
        if self._stage == "start":
            self._on_wait()
        elif self._busy and self._patience.may_compile and self._ranks[0].poll() is None:
            self._on_compile()

    def _look_for_deaths(self) -> None:
        for process in self._ranks[1:]:
            if process.poll() is not None:
                raise self._lost()
        # Rank 0's last message may still be in the socket: its death is seen when the socket closes.

    def _hang(self, patience_s: float) -> EngineLost:
        """The group is silent: its ranks say where they stand, then they are ended."""
        for process in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)  # see `ranks.main`
        time.sleep(_DUMP_S)
        stands = [f"; rank {rank}: {tail}" for rank in range(len(self._ranks)) if (tail := self._stand(rank))]
        self.kill()
        said = f"no sign of life from the ranks for {patience_s:.0f} s in stage {self._stage!r}"
        return EngineLost("hang", said + "".join(stands), self._log(0))

    def _stand(self, rank: int) -> str:
        """Where a rank's main thread stands, from the dump that it was asked for; empty when it gave none."""
        text = (self._folder / f"rank-{rank}.log").read_text("utf-8", "replace")
        _, found, stack = text.rpartition("Current thread")
        return " < ".join(line.strip() for line in stack.splitlines()[1:4]) if found else ""

    def _lost(self) -> EngineLost:
        """The cause of a death: the first rank that left last words, else the first that ended."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and all(process.poll() is None for process in self._ranks):
            time.sleep(0.02)
        codes = [process.poll() for process in self._ranks]
        words = [(rank, _last_words(self._folder, rank)) for rank in range(len(self._ranks))]
        self.kill()
        for rank, (kind, message) in [(rank, said) for rank, said in words if said is not None]:
            text = f"rank {rank} of {len(codes)} failed in stage {self._stage!r}: {message}"
            return EngineLost(kind, text, self._log(rank))
        dead = next((rank for rank, code in enumerate(codes) if code is not None), 0)
        log = self._log(dead)
        tail = " | ".join([line for line in log.splitlines() if line.strip()][-3:])[-4000:]
        text = f"rank {dead} of {len(codes)} {_how(codes[dead])} in stage {self._stage!r}{': ' + tail if tail else ''}"
        return EngineLost("engine_died", text, log)

    def _log(self, rank: int) -> str:
        """The end of a rank's log; empty when there is none."""
        path = self._folder / f"rank-{rank}.log"
        return path.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace") if path.is_file() else ""

    def _error(self, header: dict[str, Any]) -> BatchGenError:
        kind, message = header["kind"], header["message"]
        retry = KINDS[kind].retry
        if retry in (RetryClass.DEVICE, RetryClass.HOST) or (header.get("ended") and retry is RetryClass.CLIP):
            self.kill()
            return EngineLost(kind, message, self._log(0))
        if retry in (RetryClass.CLIP, RetryClass.INPUT, RetryClass.TRANSIENT):
            return ClipFailed(kind, message)
        return BatchGenError(message, kind=kind)

    def _kill(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)


def _graphs_of(request: RenderRequest) -> Hashable:
    """What decides which graphs a clip's steps use: by the schedule each expert, by guidance the number of texts."""
    guided = request.guidance_high > 1, request.guidance_low > 1
    return request.bucket, request.steps, request.flow_shift, guided


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _event(header: dict[str, Any], arrays: list[npt.NDArray[Any]]) -> Event | None:
    kind = header["type"]
    if kind == "step":
        return Step(header["index"], header["total"], header["stage"])
    if kind == "tap":
        return Tap(header["name"], arrays[0])
    if kind == "slab":
        return Slab(arrays[0])
    if kind == "done":
        value = arrays[0] if arrays else header["value"]
        return Done(tuple(value) if isinstance(value, list) else value, header["info"])
    return None


def _readable(connection: socket.socket, timeout_s: float) -> bool:
    import select

    ready, _, _ = select.select([connection], [], [], timeout_s)
    return bool(ready)


def _last_words(folder: Path, rank: int) -> tuple[str, str] | None:
    try:
        said = json.loads((folder / f"rank-{rank}.last.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    kind = said["kind"] if said["kind"] in KINDS else "engine_died"
    return kind, said["message"]


def _how(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"

"""The supervisor's side of an engine: start the rank processes, speak with rank 0, notice death and silence.

Ranks are started here and nowhere else, one process per core, with their environment set before exec. They live in
their own session (a terminal's Ctrl-C never reaches them), end when the supervisor ends, and write their stderr to
files of their own, so that one voice speaks on the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batch_gen import wire
from batch_gen.engine import ALL_STEPS, DenoiseOptions, Done, Event, Events, Slab, Step, Tap
from batch_gen.environment import child_environment
from batch_gen.errors import KINDS, BatchGenError, ClipFailed, EngineLost, RetryClass
from batch_gen.request import RenderRequest

_POLL_S = 0.25
_LAST_WORDS_BYTES = 4000
_LOG_BYTES = 1 << 16
DEFAULT_STALL_S = 600.0
COMPILE_S = 3600.0
STALL_FACTOR = 20.0
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
        min_stall_s: no less is a hang, however quick the stage was so far; in between, `STALL_FACTOR` times its longest
            silence is one.
        load_s: seconds that loading may take.
        first_s: seconds that the first answer of a stage to a bucket may take, for its graphs are compiled then.
        cache: folder of compiled graphs, shared by all ranks of this machine; empty leaves it to the compiler.
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
    environment: dict[str, str] = field(default_factory=dict)


class RemoteEngine:
    """An `Engine` in 1..n processes of its own.

    Args:
        spec: what to start.
        on_wait: called now and then while the ranks load, which `spec.load_s` bounds.

    Raises:
        EngineLost: from any call, when a rank died (`engine_died`), is silent (`hang`) or reported a device error.
        ClipFailed: from any call, when this clip failed and the ranks go on.
    """

    def __init__(self, spec: EngineSpec, on_wait: Callable[[], None] = lambda: None) -> None:
        self.spec = spec
        self._on_wait = on_wait
        self._stage = "start"
        self._closed = False
        self._busy = False
        self.graph_counts: dict[str, int] = {}
        self._silences: dict[tuple[str, str], float] = {}
        self._folder = Path(spec.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob("*"):
            stale.unlink()
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_POLL_S)
        with theirs:
            self._ranks = [self._start(rank, theirs) for rank in range(spec.num_ranks)]
        self._description = self._await_ready()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._ranks]

    def text(self, requests: Sequence[RenderRequest]) -> Events:
        """See `Engine.text`."""
        body = {"requests": [request.to_json() for request in requests]}
        yield from self._call(("text", ""), body)

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
        yield from self._call(("denoise", str(request.bucket)), body, arrays)

    def decode(self, request: RenderRequest, latents: npt.NDArray[np.float32]) -> Events:
        """See `Engine.decode`."""
        yield from self._call(("decode", str(request.bucket)), {"request": request.to_json()}, [latents])

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

    def _start(self, rank: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno() if rank == 0 else -1
        arguments = json.dumps({**asdict(self.spec), "rank": rank, "fd": fd, "parent": os.getpid()})
        with (self._folder / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "batch_gen.ranks", arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.spec, rank),
                pass_fds=(fd,) if rank == 0 else (),
                start_new_session=True,
            )

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

    def _call(self, graph: tuple[str, str], body: dict[str, Any], arrays: Sequence[npt.NDArray[Any]] = ()) -> Events:
        """Run a stage on a bucket; `graph` names both."""
        while self._busy:  # the caller gave the last call up half way; the ranks did not
            self._answer(self.spec.stall_s)
        self._stage = graph[0]
        try:
            self._connection.settimeout(self.spec.stall_s)  # large arrays wait for a rank that reads slowly
            wire.send(self._connection, {"type": graph[0], **body}, arrays)
        except OSError as error:
            is_full = isinstance(error.__cause__, TimeoutError)
            raise (self._hang(self.spec.stall_s) if is_full else self._lost()) from error
        self._busy = True
        silences: list[float] = []
        while self._busy:
            asked_at = time.monotonic()
            header, received = self._answer(self._patience_s(graph, first=not silences))
            silences.append(time.monotonic() - asked_at)
            event = _event(header, received)
            if event is None:
                raise self._error(header)
            if isinstance(event, Done):
                self.graph_counts = event.info.pop("graphs", self.graph_counts)
                compiled = graph in self._silences or not self.spec.first_s
                self._silences[graph] = max(self._silences.get(graph, 0.0), *silences[0 if compiled else 1 :], 0.0)
            yield event

    def _patience_s(self, graph: tuple[str, str], *, first: bool) -> float:
        """How long the next answer of a stage may take, by what it took before."""
        spec = self.spec
        if graph not in self._silences:
            return max(spec.stall_s, spec.first_s) if first else spec.stall_s
        return min(spec.stall_s, max(spec.min_stall_s, STALL_FACTOR * self._silences[graph]))

    def _answer(self, patience_s: float) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
        """The next message of the call in progress; notes when it is the last one."""
        header, arrays = self._receive(patience_s)
        self._busy = header["type"] not in {"done", "error"}
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
            if self._stage == "start":
                self._on_wait()

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
        how = _how(codes[dead])
        tail = _tail(self._folder / f"rank-{dead}.log")
        return EngineLost(
            "engine_died",
            f"rank {dead} of {len(codes)} {how} in stage {self._stage!r}{': ' + tail if tail else ''}",
            self._log(dead),
        )

    def _log(self, rank: int) -> str:
        """The end of a rank's log; empty when there is none."""
        try:
            data = (self._folder / f"rank-{rank}.log").read_bytes()
        except OSError:
            return ""
        return data[-_LOG_BYTES:].decode("utf-8", "replace")

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


def _environment(spec: EngineSpec, rank: int) -> dict[str, str]:
    threads = str(spec.threads)
    wanted = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    wanted |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.num_ranks)}
    # Spinning threads starve encoders and other replicas on shared cores; measured 15x slower beside a busy process.
    wanted |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # The ranks of a replica share a machine: their connections are no business of its network.
        "GLOO_SOCKET_IFNAME": next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"),
    }
    return child_environment(**wanted, **spec.environment)


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


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()[-_LAST_WORDS_BYTES:]
    except OSError:
        return ""
    lines = [line for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])

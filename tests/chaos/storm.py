"""A run by several supervisors as processes, with kills and pauses at random moments, and what must be true after it.

The workers are real `batch-gen run --model fake:...` commands. Killed ones, and those that ask for it (exit 75), are
started again, as a scheduler would. What the engines did is read from their trace, not from the product's own books.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from batch_gen.encode import frames_hash
from batch_gen.engine import frames_of
from batch_gen.fake_engine import FakeEngine
from batch_gen.ledger import UNFINISHED_PER_REPLICA
from batch_gen.records import Record
from batch_gen.request import RenderRequest
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.tables import write_manifest

ROOT = Path(__file__).resolve().parents[2]
START_AGAIN = {75, -signal.SIGKILL}
IN_FLIGHT = UNFINISHED_PER_REPLICA + 1
"""Clips of one replica that may be begun and not committed: two being written, one in the engine."""


@dataclass(frozen=True)
class Weather:
    """One storm.

    Attributes:
        kills, pauses: How many of each, half of them on supervisors and half on engines.
        ttl_s: Of the leases; a pause takes 1.3 to 3 times as long.
        step_s: Seconds of one of the two steps of a clip.
    """

    seed: int = 0
    clips: int = 40
    workers: int = 3
    kills: int = 4
    pauses: int = 4
    ttl_s: float = 4.0
    step_s: float = 0.05
    patience_s: float = 300.0


@dataclass(frozen=True, order=True)
class Blow:
    """One kill or pause; it falls when so many renders have ended."""

    after: int
    kind: str
    target: str


@dataclass
class Outcome:
    """What a storm left behind, in figures."""

    weather: Weather
    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    committed: int = 0
    quarantined: int = 0
    renders_begun: int = 0
    double_renders: int = 0
    late_writers: int = 0
    nondeterministic: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def bound(self) -> int:
        """Double renders that the kills and pauses may cost."""
        return sum(self.blows.values()) * IN_FLIGHT

    @property
    def ok(self) -> bool:
        """Whether everything is as promised."""
        return not self.faults


def make_manifest(path: Path, num_clips: int) -> Path:
    """Clips as small as they can be: 5 frames of 32x32, 2 steps."""
    same = {"num_frames": 5, "width": 32, "height": 32, "steps": 2}
    rows = [{"row_id": f"clip-{n:04d}", "prompt": f"a red circle {n}", "seed": n, **same} for n in range(num_clips)]
    write_manifest(path, rows, {})
    return path


class Storm:
    """Workers, blows and their clock.

    Args:
        weather: What to do.
        out, endpoint: The output root, and its server when it is on S3.
        folder: For the manifest, logs and the engines' trace.
        flags: More flags for every worker.
    """

    def __init__(
        self, weather: Weather, out: str, folder: Path, endpoint: str | None = None, flags: Sequence[str] = ()
    ) -> None:
        self.weather, self.out, self.folder, self.endpoint = weather, out, folder, endpoint
        self.outcome = Outcome(weather)
        self._random = random.Random(weather.seed)
        self._blows = self._forecast()
        self._trace = folder / "trace"
        self._trace.touch()
        options = folder / "engine.json"
        options.write_text(json.dumps({"step_s": weather.step_s, "trace": str(self._trace)}))
        manifest = make_manifest(folder / "m.parquet", weather.clips)
        self._command = [sys.executable, "-m", "batch_gen", "run", str(manifest), "--out", out, "--quiet", "--json"]
        self._command += ["--model", f"fake:{options}", "--lease-ttl", str(weather.ttl_s), "--drain-budget", "5"]
        self._command += ["--stall-timeout", str(2.5 * weather.ttl_s), "--scratch", str(folder / "scratch"), *flags]
        self._command += [] if endpoint is None else ["--s3-endpoint", endpoint]
        self._workers: list[subprocess.Popen[bytes]] = []
        self._resume_at: dict[psutil.Process, float] = {}
        self._ended = 0
        self._offset = 0

    def run(self) -> Outcome:
        """Let it blow until every worker has ended well."""
        began = time.monotonic()
        self._workers = [self._start(index) for index in range(self.weather.workers)]
        try:
            while self._tick():
                if time.monotonic() - began > self.weather.patience_s:
                    self.outcome.faults.append("the run never ends")
                    break
                time.sleep(0.05)  # how closely the storm watches
        finally:
            self._stop()
        self.outcome.seconds = time.monotonic() - began
        if self._blows:
            self.outcome.faults.append(f"{len(self._blows)} blows found nobody")
        return self.outcome

    def _forecast(self) -> list[Blow]:
        """Kills and pauses at random moments of the run, the last one before its end, soonest last."""
        kinds = ["kill"] * self.weather.kills + ["pause"] * self.weather.pauses
        targets = ["supervisor", "engine"] * len(kinds)
        last = int(0.85 * self.weather.clips)
        moments = (self._random.randint(1, last) for _ in kinds)
        return sorted((Blow(*blow) for blow in zip(moments, kinds, targets)), reverse=True)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        self.outcome.starts += 1
        with (self.folder / f"worker-{index}.log").open("ab") as log:
            return subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)

    def _tick(self) -> bool:
        """Wake whose time has come, start the dead again, perhaps let a blow fall; False when all have ended well."""
        now = time.monotonic()
        for process in [process for process, at in self._resume_at.items() if at <= now]:
            self._wake(process)
        for index, worker in enumerate(self._workers):
            code = worker.poll()
            if code in START_AGAIN:
                self._workers[index] = self._start(index)
            elif code not in {None, 0}:
                self.outcome.faults.append(f"worker {index} ended with {code}: {self._last_words(index)}")
                return False
        self._read_trace()
        if self._blows and self._blows[-1].after <= self._ended and self._strike(self._blows[-1]):
            self._blows.pop()
        return any(worker.poll() is None for worker in self._workers)

    def _strike(self, blow: Blow) -> bool:
        """Hit somebody; False when there is nobody to hit now."""
        victims = [psutil.Process(worker.pid) for worker in self._workers if worker.poll() is None]
        if blow.target == "engine":
            victims = [rank for victim in victims for rank in ranks_of(victim)]
        victims = [victim for victim in victims if victim not in self._resume_at]
        if not victims:
            return False
        victim = self._random.choice(victims)
        try:
            victim.send_signal(signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)
        except psutil.NoSuchProcess:
            return False
        if blow.kind == "pause":
            self._resume_at[victim] = time.monotonic() + self.weather.ttl_s * self._random.uniform(1.3, 3.0)
        self.outcome.blows[f"{blow.kind} {blow.target}"] += 1
        return True

    def _wake(self, process: psutil.Process) -> None:
        self._resume_at.pop(process)
        try:
            process.send_signal(signal.SIGCONT)  # psutil makes sure that it is still the same process
        except psutil.NoSuchProcess:
            return

    def _read_trace(self) -> None:
        with self._trace.open("rb") as trace:
            trace.seek(self._offset)
            fresh = trace.read()
        self._offset += len(fresh)
        self._ended += fresh.count(b"decoded ")

    def _last_words(self, index: int) -> str:
        return (self.folder / f"worker-{index}.log").read_text("utf-8", "replace")[-3000:]

    def _stop(self) -> None:
        for process in list(self._resume_at):
            self._wake(process)
        for worker in self._workers:
            worker.kill()
            worker.wait()


def ranks_of(supervisor: psutil.Process) -> list[psutil.Process]:
    """The rank processes of a supervisor."""
    try:
        return [child for child in supervisor.children() if "batch_gen.ranks" in child.cmdline()]
    except psutil.Error:
        return []


def judge(storm: Storm, endpoint: str | None = None) -> Outcome:
    """Hold what the storm left against what is promised: `verify --deep`, the trace, the done log, the frames."""
    outcome, weather = storm.outcome, storm.weather
    if outcome.faults:
        return outcome
    verified = _product("verify", storm.out, "--deep", "--json", endpoint=endpoint)
    status = _product("status", storm.out, "--json", endpoint=endpoint)
    outcome.committed, outcome.quarantined = verified["num_committed"], verified["num_quarantined"]
    trace = Counter(tuple(line.split()) for line in (storm.folder / "trace").read_text().splitlines())
    clips = {clip_id for _, clip_id in trace}
    outcome.renders_begun = sum(trace["denoise", clip_id] for clip_id in clips)
    outcome.double_renders = sum(max(0, trace["decoded", clip_id] - 1) for clip_id in clips)
    outcome.nondeterministic = int(status["waste"].get("nondeterministic_duplicate", 0))
    outcome.late_writers = int(status["waste"].get("duplicate", 0))
    store = open_store(storm.out, StoreOptions(endpoint_url=endpoint))
    keys = Counter(Path(entry.key).stem for entry in store.list("clips/"))
    checks = {
        f"verify: {verified['problems'][:5]}": verified["ok"],
        f"committed {outcome.committed} of {weather.clips}": outcome.committed == weather.clips,
        f"quarantined: {status['quarantined']}": outcome.quarantined == 0,
        "a file or record too many or too few": set(keys.values()) == {2} and len(keys) == weather.clips,
        "the run does not call itself finished": status["finished"],
        f"double renders: {outcome.double_renders} > {outcome.bound}": outcome.double_renders <= outcome.bound,
        f"nondeterministic duplicates: {outcome.nondeterministic}": outcome.nondeterministic == 0,
        "frames are not the engine's": frames_are_right(store),
    }
    outcome.faults += [fault for fault, holds in checks.items() if not holds]
    return outcome


def frames_are_right(store) -> bool:
    """Whether each record's frames hash is that of the request, rendered here."""
    engine = FakeEngine()
    for entry in store.list("clips/"):
        if entry.key.endswith(".json"):
            record = Record.model_validate_json(store.get(entry.key).body)
            frames = frames_of(engine.render(RenderRequest.from_json(record.request)))
            if frames_hash(frames) != record.frames_hash:
                return False
    return True


def _product(*arguments: str, endpoint: str | None) -> dict:
    """A command's JSON; its exit code is told by what it prints."""
    command = [sys.executable, "-m", "batch_gen", *arguments]
    command += [] if endpoint is None else ["--s3-endpoint", endpoint]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)

"""Eight real processes that serve as the ranks of one mesh after another, over gloo.

Starting a process and importing torch costs seconds; joining a process group costs tenths of one. A function of
`tests.parallel.cases` runs on every rank of a mesh; a rank that fails closes its connections, so its peers fail too
instead of waiting.
"""

import datetime as dt
import multiprocessing
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from models.parallel.layout import Degrees, Layout, make_layout

NUM_RANKS = 8
CASE_LIMIT_S = 240.0


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a case: a value, or an error with its traceback."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""


class RankPool:
    """`run(function, degrees, *arguments)`: the results of `function(mesh, *arguments)`, by rank."""

    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.cases", "tests.parallel.clips"])
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0
        self._ranks = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function, mesh: Degrees | Layout, *arguments) -> list:
        """Results by rank; the first error of a rank is raised here, with that rank's traceback as a note."""
        outcomes = self.outcomes(function, mesh, *arguments)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
        for rank, outcome in failed:
            outcome.error.add_note(f"rank {rank} of {mesh}:\n{outcome.trace}")
        if failed:
            # Peers of a failed rank report a lost connection; the cause is the error that is none.
            causes = [outcome.error for _, outcome in failed if "onnection" not in str(outcome.error)]
            raise (causes or [failed[0][1].error])[0]
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, mesh: Degrees | Layout, *arguments) -> list[Outcome]:
        """What each rank made of it, errors included."""
        layout = make_layout("arithmetic", mesh) if isinstance(mesh, Degrees) else mesh
        self._cases += 1
        store = str(Path(self._folder.name) / f"store-{self._cases}")
        members = self._ranks[: layout.degrees.size]
        for _, connection in members:
            connection.send((function, layout, store, arguments))
        waiting = {connection for _, connection in members}
        while waiting:
            ready = wait(waiting, CASE_LIMIT_S)
            if not ready:
                raise TimeoutError(f"{len(waiting)} of {len(members)} ranks did not answer in {CASE_LIMIT_S} s")
            waiting -= set(ready)
        return [connection.recv() for _, connection in members]

    def close(self) -> None:
        """End the ranks."""
        for process, connection in self._ranks:
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(connection, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, store, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = Outcome(value=_run(function, layout, rank, store, arguments))
        except Exception as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        connection.send(outcome)


def _run(function, layout: Layout, rank: int, store: str, arguments: tuple) -> object:
    import torch.distributed as dist

    from models.parallel.collectives import barrier
    from models.parallel.mesh import build_mesh, close_mesh

    size = layout.degrees.size
    try:
        if size > 1:
            limit = dt.timedelta(seconds=120)
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit
            )
        mesh = build_mesh(layout)
        value = function(mesh, *arguments)
        barrier(mesh)
    finally:
        close_mesh()
    return value

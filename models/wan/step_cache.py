"""Step caching: while the first block changes little from step to step, the other blocks' residual is taken over.

Off unless asked for: it changes the clip. Each text (branch) of each expert decides for itself; what is remembered
lives as long as one clip. With ranks, the sums behind a decision go over the ranks of a branch and the decision is the
MAX over them, so that all take the same way. Source: first-block caching as in ParaAttention and cache-dit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.errors import ModelError
from models.parallel.collectives import all_reduce
from models.parallel.mesh import Axis
from models.wan.graphs import ExpertGraphs
from models.wan.model import Rope, Stream, TextKeys


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """threshold: relative L1 change of the first block's residual below which a step is skipped.

    warm_up: steps of each expert that are computed in any case. max_run: skips in a row at most.
    """

    threshold: float
    warm_up: int = 4
    max_run: int = 3


@dataclass(slots=True)
class Branch:
    """What is remembered of one text on one expert, in the layout of the tokens held here, [B, N, W]."""

    first: Tensor | None = None  # the first block's residual when the others were last computed
    rest: Tensor | None = None  # the residual of the others then
    num_computed: int = 0
    num_skipped: int = 0
    run: int = 0


@dataclass(slots=True)
class StepCache:
    """The caches of one clip. axis: the ranks that share a branch."""

    settings: CacheSettings
    axis: Axis
    branches: dict[tuple[str, int], Branch] = field(default_factory=dict)

    def velocity(
        self, key: tuple[str, int], model: ExpertGraphs, inputs: tuple[Tensor, Tensor, list[TextKeys], Rope]
    ) -> Tensor:
        """As `model.steady(*inputs)`, of a branch (expert, text slot)."""
        latents, timestep, text, rope = inputs
        branch = self.branches.setdefault(key, Branch())
        frame, stream = model.begin(latents, timestep, rope)
        start = stream.total()
        probed = model.through(frame, Stream(start), text, slice(0, 1)).total()
        first = probed - start
        if self._may_skip(branch, first):
            assert branch.rest is not None
            branch.num_skipped += 1
            branch.run += 1
            return model.end(frame, Stream(probed + branch.rest))
        last = model.through(frame, Stream(probed), text, slice(1, None)).total()
        branch.first, branch.rest = first, last - probed
        branch.num_computed += 1
        branch.run = 0
        return model.end(frame, Stream(last))

    def counts(self) -> dict[str, int]:
        """Skipped steps by branch, such as `high.0`."""
        return {f"{stage}.{slot}": branch.num_skipped for (stage, slot), branch in self.branches.items()}

    def _may_skip(self, branch: Branch, first: Tensor) -> bool:
        if branch.first is None or branch.num_computed < self.settings.warm_up or branch.run >= self.settings.max_run:
            return False  # the same on every rank: counts only
        change = torch.stack([(first - branch.first).abs().float().sum(), branch.first.abs().float().sum()])
        moved, before = all_reduce(change, self.axis)
        ratio = all_reduce((moved / before).view(1), self.axis, "max")
        return bool(ratio.item() < self.settings.threshold)


def check_cache(settings: CacheSettings | None, num_layers: int, where: str) -> None:
    """Raise ModelError("unsupported") where a cache would do nothing or harm."""
    if settings is None:
        return
    if num_layers < 2:
        raise ModelError("unsupported", f"{where}: step caching needs two blocks or more, the model has {num_layers}")
    if not settings.threshold > 0 or settings.warm_up < 1 or settings.max_run < 1:
        raise ModelError("unsupported", f"step cache {settings}: threshold above 0, warm-up and run 1 or more")


def check_steps(settings: CacheSettings | None, steps: int) -> None:
    """Raise ModelError("input") for a clip so short that no step could be skipped."""
    if settings is not None and steps <= settings.warm_up:
        raise ModelError("input", f"steps {steps}: step caching computes the first {settings.warm_up} in any case")

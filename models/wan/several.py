"""Several clips of one shape in one evaluation of an expert; each clip keeps its own texts, keys and solver."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.wan.experts import Experts
from models.wan.graphs import Guidance
from models.wan.model import Rope
from models.wan.solver import Solver
from models.wan.text import TextHandle


@dataclass(frozen=True, slots=True)
class Member:
    """One of the clips: its prompt and negative prompt, and its solver."""

    texts: list[TextHandle]
    solver: Solver


@dataclass(frozen=True, slots=True)
class Group:
    """What the clips share. batched: both texts of a clip run as one batch, as they do when it is alone."""

    experts: Experts
    guidance: Guidance
    rope: Rope
    batched: bool

    @torch.inference_mode()
    def step(
        self, members: Sequence[Member], latents: Sequence[Tensor], index: int, stage: str, factor: float | None
    ) -> list[Tensor]:
        """Each clip's latents [1, C, T, h, w] float32 after step `index`; factor: the guidance, None for none."""
        timestep = members[0].solver.timesteps[index]
        time = torch.tensor([timestep], dtype=torch.float32, device=latents[0].device)
        inputs = (torch.cat(list(latents)), time, self.rope)
        texts = [member.texts[: 1 if factor is None else 2] for member in members]
        batches = [texts] if self.batched else [[[text] for text in branch] for branch in zip(*texts, strict=True)]
        parts = [self.experts.velocity_of_clips(stage, slot, batch, inputs) for slot, batch in enumerate(batches)]
        velocities = parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).flatten(0, 1)
        stepped = []
        for member, before, branches in zip(members, latents, velocities.chunk(len(members)), strict=True):
            velocity = branches
            if factor is not None:
                positive, negative = branches.chunk(2)
                velocity = self.guidance.guide(positive, negative, factor)
            stepped.append(member.solver.step(index, velocity, before))
        return stepped

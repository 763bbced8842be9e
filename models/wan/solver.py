"""The ODE solvers, built from diffusers: UniPC (the checkpoints' own) and Euler.

Timesteps and sigmas stay on the host. The flow shift is always explicit: it decides how many steps each expert does.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from models.errors import ModelError
from models.wan.spec import NUM_TRAIN_TIMESTEPS

SOLVERS = ("unipc", "euler")


class Solver:
    """The schedule of one clip and the state of its solver."""

    def __init__(self, scheduler: Any, steps: int, start: int = 0) -> None:
        """A fresh solver at step `start`.

        A solver that starts in the middle has no history: UniPC's first step from there is of order 1 and uncorrected.
        """
        self._scheduler = scheduler
        scheduler.set_timesteps(steps)
        scheduler.set_begin_index(start)
        self.timesteps: list[float] = scheduler.timesteps.tolist()

    def step(self, index: int, velocity: Tensor, latents: Tensor) -> Tensor:
        """Latents after step `index`: velocity and latents [B, C, T, h, w] float32 -> the same shape, float32."""
        timestep = self._scheduler.timesteps[index]
        stepped: Tensor = self._scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return stepped


def num_train_timesteps(config: Mapping[str, Any]) -> int:
    """Training timesteps of a scheduler_config.json."""
    return int(config.get("num_train_timesteps", NUM_TRAIN_TIMESTEPS))


def make_solver(config: Mapping[str, Any], name: str, flow_shift: float, steps: int, start: int = 0) -> Solver:
    """A solver for one clip from the checkpoint's scheduler_config.json; raises ModelError("unsupported")."""
    if name == "unipc":
        scheduler = UniPCMultistepScheduler(**_unipc_settings(config, flow_shift))
    elif name == "euler":
        train = num_train_timesteps(config)
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=train, shift=flow_shift)
    else:
        raise ModelError("unsupported", f"solver {name!r} is unknown; choose one of {', '.join(SOLVERS)}")
    return Solver(scheduler, steps, start)


def _unipc_settings(config: Mapping[str, Any], flow_shift: float) -> dict[str, Any]:
    """The checkpoint's own settings where it names them; flow matching in any case."""
    known = inspect.signature(UniPCMultistepScheduler.__init__).parameters
    settings = {key: value for key, value in config.items() if key in known and not key.startswith("_")}
    if settings.get("use_dynamic_shifting"):
        raise ModelError("unsupported", "scheduler: use_dynamic_shifting contradicts an explicit flow shift")
    return settings | {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": flow_shift}


def initial_noise(seed: int, shape: tuple[int, int, int, int]) -> Tensor:
    """[1, C, T, h, w] float32 from one CPU generator: what diffusers' `WanPipeline` draws for this seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape), generator=generator, dtype=torch.float32)
